"""hermes-trio: an agent gateway in which the task tree is the product.

Everything that an embedding program needs is imported from here; `__all__` is the public surface.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from .runtime.agents import asyncio_agent, sync_agent
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
from .runtime.outcome import CancelCause, Cause, JobState, Outcome, RunStatus, StopReceipt, TurnState, Usage
from .runtime.ports import Agent, InboxRow, Message, NewMessage, NewReply, NoticeKind, Reply, RuntimeStore, TurnInput
from .runtime.run import Run
from .runtime.runtime import DrainReport, Runtime, current_runtime, use_default_store
from .runtime.stateless import StatelessEntry
from .runtime.supervisor import Job, JobSpec, Supervisor
from .runtime.tree import Node, Tree, waiting, working
from .runtime.turn import DeliveringTurn, Owner, StatelessTurn, Turn

__version__ = "0.2.0"

__all__ = [
    "Agent",
    "AgentFailed",
    "Budget",
    "BudgetExhausted",
    "CancelCause",
    "Cause",
    "CompletionChannel",
    "DeliveringTurn",
    "DrainReport",
    "Draining",
    "Inbox",
    "InboxRow",
    "Interface",
    "InvalidContext",
    "Job",
    "JobRefused",
    "JobSpec",
    "JobState",
    "MailboxFull",
    "Message",
    "NewMessage",
    "NewReply",
    "NoRuntime",
    "Node",
    "NoticeKind",
    "Outcome",
    "Owner",
    "Reply",
    "Run",
    "RunStatus",
    "Runtime",
    "RuntimeClosed",
    "RuntimeProblem",
    "RuntimeSettings",
    "RuntimeStore",
    "SessionContext",
    "StatelessEntry",
    "StatelessTurn",
    "StopReceipt",
    "Supervisor",
    "TooBusy",
    "Tree",
    "Turn",
    "TurnInput",
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
    "sync_agent",
    "waiting",
    "working",
]


def _memory_store() -> AbstractAsyncContextManager[RuntimeStore]:
    from .store import open_store

    return open_store(None, runner="inline")


use_default_store(_memory_store)
