"""Outcomes: the legal end states of turns and jobs, why a scope was cancelled, and the receipt of a stop.

Cancel causes are data. The code that cancels a scope records the cause first, so the receipt, the status and the event agree.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec

from hermes_trio.base.structs import RedactedStruct

if TYPE_CHECKING:
    from .ports import Message, ToolCall

STORE_ERROR: Final = "store_error"
"""The error code of a turn whose record the store refused: its messages are in no transcript."""


class CancelCause(Enum):
    """Why a scope was cancelled."""

    STOP = "stop"
    DEADLINE = "deadline"
    BUDGET = "budget"
    DRAIN = "drain"
    CLIENT_GONE = "client_gone"
    PARENT_GONE = "parent_gone"
    SESSION_ENDED = "session_ended"


class Cause(msgspec.Struct, frozen=True):
    """A `CancelCause` with a detail from the code that cancelled."""

    kind: CancelCause
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.detail}" if self.detail else self.kind.value


class TurnState(Enum):
    """How a turn ended. A turn that still runs has no state: its node in the tree describes it."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class JobState(Enum):
    """The states of a job. Only the job's own task changes its state, and only forward."""

    STARTING = "starting"
    RUNNING = "running"
    EXITED = "exited"
    FAILED = "failed"
    KILLED = "killed"
    TIMED_OUT = "timed_out"
    LOST = "lost"

    @property
    def terminal(self) -> bool:
        """Return whether a job in this state has ended."""
        return self not in _LIVE_JOB_STATES


_LIVE_JOB_STATES: Final = frozenset({JobState.STARTING, JobState.RUNNING})


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The usage of a turn, summed over all of its model calls and its synchronous children."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0
    api_calls: int = 0
    tool_calls: int = 0

    @property
    def total_tokens(self) -> int:
        """Input and output tokens together."""
        return self.input_tokens + self.output_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{name: getattr(self, name) + getattr(other, name) for name in Usage.__struct_fields__})


class Outcome(RedactedStruct, frozen=True, kw_only=True):
    """How a turn ended, as its caller, its adapter and its row see it.

    `error` is text that may be shown to a user; `exception` is the first cause that is not a cancellation, for logs. `partial` says that
    `text` is incomplete because the turn was cut off. `committed` is false when the end could not be committed, `begun` when
    the turn was not begun at all: no agent has seen its input, which waits again. `calls` are the calls
    of its client's tools with which the turn ended, `reasoning` is the reasoning text of the model, `messages` is what the turn adds to
    a transcript, as far as it came.
    """

    hidden: ClassVar[tuple[str, ...]] = ("exception", "messages")
    turn_id: str
    session_id: str
    session_key: str = ""
    state: TurnState
    text: str = ""
    error: str = ""
    error_code: str = ""
    cause: Cause | None = None
    usage: Usage = Usage()
    partial: bool = False
    model: str = ""
    finish_reason: str = "stop"
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    messages: tuple[Message, ...] = ()
    exception: BaseException | None = None
    committed: bool = True
    begun: bool = True
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Return whether the turn ended by itself, without an error."""
        return self.state is TurnState.COMPLETED and not self.error


class RunStatus(Enum):
    """The statuses of a run, by their names on the wire."""

    QUEUED = "queued"
    RUNNING = "running"
    WAITING_FOR_APPROVAL = "waiting_for_approval"
    STOPPING = "stopping"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        """Return whether the run's turn has ended."""
        return self in TERMINAL_STATUSES


TERMINAL_STATUSES: Final = frozenset({RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.CANCELLED})
