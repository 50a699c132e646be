"""hermes-trio: a self-hosted gateway for LLM agents, built on Trio.

Everything that an embedding program needs is imported from here; `__all__` is the public interface. Names are imported when they are first used:
importing the package imports neither Trio nor a server, so that the pytest plugin does not slow other test suites down.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from .base.lazy import lazy_attributes

if TYPE_CHECKING:
    from .agent.loop import AgentSettings, ModelAgent
    from .agent.model import (
        Finished,
        Model,
        ModelError,
        ModelErrorKind,
        ModelRequest,
        ModelStream,
        TextDelta,
        ToolCallReady,
        ToolSpec,
    )
    from .agent.tool import Tool
    from .guest import AsyncioRuntime
    from .messaging.contract import Adapter, Incoming, Outgoing, PlatformError, PlatformErrorKind, SendResult
    from .messaging.platforms import Platform
    from .messaging.session_keys import Source
    from .messaging.settings import PlatformSettings, split_settings
    from .runtime.agents import asyncio_agent, sync_agent, trio_agent
    from .runtime.budget import Budget
    from .runtime.channel import CompletionChannel
    from .runtime.context import (
        SessionContext,
        async_delivery_supported,
        bind,
        current_context,
        current_turn,
        get_session_env,
    )
    from .runtime.core import RuntimeSettings
    from .runtime.errors import (
        AgentFailed,
        BudgetExhausted,
        Draining,
        InvalidContext,
        JobRefused,
        MailboxFull,
        NoRuntime,
        RuntimeClosed,
        RuntimeProblem,
        TooBusy,
        UnknownJob,
    )
    from .runtime.interface import Inbox, Interface
    from .runtime.outcome import CancelCause, Cause, JobState, Outcome, RunStatus, TurnState, Usage
    from .runtime.ports import (
        Agent,
        InboxRow,
        Message,
        NewMessage,
        NewReply,
        NoticeKind,
        Reply,
        RuntimeStore,
        TurnInput,
    )
    from .runtime.run import Run
    from .runtime.runtime import DrainReport, Runtime, current_runtime
    from .runtime.stateless import StatelessEntry
    from .runtime.stop_receipt import StopReceipt
    from .runtime.supervisor import Job, JobSpec, Supervisor
    from .runtime.tree import Node, Tree, waiting, working
    from .runtime.turn import DeliveringTurn, Owner, StatelessTurn, Turn, TurnHooks, TurnSpec
    from .store import Store, open_store
    from .tools.registry import Tools, tool
    from .tracing.stage import Tracing

__version__ = "0.2.0"

__all__ = [
    "Adapter",
    "Agent",
    "AgentFailed",
    "AgentSettings",
    "AsyncioRuntime",
    "Budget",
    "BudgetExhausted",
    "CancelCause",
    "Cause",
    "CompletionChannel",
    "DeliveringTurn",
    "DrainReport",
    "Draining",
    "Finished",
    "Inbox",
    "InboxRow",
    "Incoming",
    "Interface",
    "InvalidContext",
    "Job",
    "JobRefused",
    "JobSpec",
    "JobState",
    "MailboxFull",
    "Message",
    "Model",
    "ModelAgent",
    "ModelError",
    "ModelErrorKind",
    "ModelRequest",
    "ModelStream",
    "NewMessage",
    "NewReply",
    "NoRuntime",
    "Node",
    "NoticeKind",
    "Outcome",
    "Outgoing",
    "Owner",
    "Platform",
    "PlatformError",
    "PlatformErrorKind",
    "PlatformSettings",
    "Reply",
    "Run",
    "RunStatus",
    "Runtime",
    "RuntimeClosed",
    "RuntimeProblem",
    "RuntimeSettings",
    "RuntimeStore",
    "SendResult",
    "SessionContext",
    "Source",
    "StatelessEntry",
    "StatelessTurn",
    "StopReceipt",
    "Store",
    "Supervisor",
    "TextDelta",
    "TooBusy",
    "Tool",
    "ToolCallReady",
    "ToolSpec",
    "Tools",
    "Tracing",
    "Tree",
    "Turn",
    "TurnHooks",
    "TurnInput",
    "TurnSpec",
    "TurnState",
    "UnknownJob",
    "Usage",
    "__version__",
    "async_delivery_supported",
    "asyncio_agent",
    "bind",
    "current_context",
    "current_runtime",
    "current_turn",
    "get_session_env",
    "open_store",
    "split_settings",
    "sync_agent",
    "tool",
    "trio_agent",
    "waiting",
    "working",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        ".agent.loop": ["AgentSettings", "ModelAgent"],
        ".agent.model": [
            "Finished",
            "Model",
            "ModelError",
            "ModelErrorKind",
            "ModelRequest",
            "ModelStream",
            "TextDelta",
            "ToolCallReady",
            "ToolSpec",
        ],
        ".agent.tool": ["Tool"],
        ".messaging.contract": ["Adapter", "Incoming", "Outgoing", "PlatformError", "PlatformErrorKind", "SendResult"],
        ".messaging.platforms": ["Platform"],
        ".messaging.session_keys": ["Source"],
        ".messaging.settings": ["PlatformSettings", "split_settings"],
        ".tools.registry": ["Tools", "tool"],
        ".guest": ["AsyncioRuntime"],
        ".runtime.agents": ["asyncio_agent", "sync_agent", "trio_agent"],
        ".runtime.budget": ["Budget"],
        ".runtime.channel": ["CompletionChannel"],
        ".runtime.context": [
            "SessionContext",
            "async_delivery_supported",
            "bind",
            "current_context",
            "current_turn",
            "get_session_env",
        ],
        ".runtime.core": ["RuntimeSettings"],
        ".runtime.errors": [
            "AgentFailed",
            "BudgetExhausted",
            "Draining",
            "InvalidContext",
            "JobRefused",
            "MailboxFull",
            "NoRuntime",
            "RuntimeClosed",
            "RuntimeProblem",
            "TooBusy",
            "UnknownJob",
        ],
        ".runtime.interface": ["Inbox", "Interface"],
        ".runtime.outcome": [
            "CancelCause",
            "Cause",
            "JobState",
            "Outcome",
            "RunStatus",
            "TurnState",
            "Usage",
        ],
        ".runtime.ports": [
            "Agent",
            "InboxRow",
            "Message",
            "NewMessage",
            "NewReply",
            "NoticeKind",
            "Reply",
            "RuntimeStore",
            "TurnInput",
        ],
        ".runtime.run": ["Run"],
        ".runtime.runtime": ["DrainReport", "Runtime", "current_runtime"],
        ".runtime.stateless": ["StatelessEntry"],
        ".runtime.stop_receipt": ["StopReceipt"],
        ".runtime.supervisor": ["Job", "JobSpec", "Supervisor"],
        ".runtime.tree": ["Node", "Tree", "waiting", "working"],
        ".runtime.turn": ["DeliveringTurn", "Owner", "StatelessTurn", "Turn", "TurnHooks", "TurnSpec"],
        ".store": ["Store", "open_store"],
        ".tracing.stage": ["Tracing"],
    },
)


def __dir__() -> list[str]:
    return list(__all__)


def default_store() -> AbstractAsyncContextManager[RuntimeStore]:
    """Open a database in memory, for a `Runtime` without a `store`. It is here because the runtime must not import the store."""
    from .store import open_store

    return open_store(None, runner="inline")
