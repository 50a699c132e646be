"""The answers and faults that a simulated provider is scripted to give, and its record of calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any

import attrs
import trio

from hermes_trio.runtime.outcome import Usage
from hermes_trio.runtime.ports import ToolCall


class Fault(Enum):
    """How an answer fails after `fault_after` of its events."""

    HANG_UP = auto()
    """The connection is closed in the middle of the response."""
    RESET = auto()
    """The connection is reset in the middle of the response."""
    END_EARLY = auto()
    """The response ends properly, but the answer is incomplete."""
    STALL = auto()
    """Nothing more is sent, and the connection stays open."""
    SILENT = auto()
    """The request is read, and no headers are sent."""
    GARBAGE = auto()
    """An event holds something that is not JSON."""
    NOT_HTTP = auto()
    """The response is not HTTP."""
    LONG_LINE = auto()
    """An event has a line of ten megabytes."""
    ENDLESS_LINE = auto()
    """An event has a line that never ends."""
    ENDLESS_HEADERS = auto()
    """The response's headers never end."""
    ENDLESS_TOOL_CALL = auto()
    """The arguments of a tool call never end."""
    ENDLESS_TEXT = auto()
    """The text never ends."""
    INVALID_UTF8 = auto()
    """A piece of text holds bytes that are not UTF-8."""
    REPEAT = auto()
    """An event is sent twice, and the answer goes on."""
    ERROR_EVENT = auto()
    """The provider reports an overload in the middle of the answer."""


@attrs.frozen(kw_only=True)
class ScriptedAnswer:
    """A scripted answer. The server waits `pause` seconds before every event, and for `gate` before the first one.

    With `whole` it sends the answer in one piece although the request asks for a stream.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    usage: Usage = attrs.field(factory=lambda: Usage(input_tokens=11, output_tokens=7, cache_read_tokens=3))
    finish_reason: str = ""
    piece: int = 8
    pause: float = 0.0
    gate: trio.Event | None = None
    whole: bool = False
    fault: Fault | None = None
    fault_after: int = 0

    @property
    def reason(self) -> str:
        """Return the finish reason of the OpenAI API."""
        return self.finish_reason or ("tool_calls" if self.tool_calls else "stop")


@attrs.frozen(kw_only=True)
class ScriptedRefusal:
    """A scripted error response."""

    status: int
    message: str = "scripted refusal"
    type: str = ""
    code: str | None = None
    headers: Mapping[str, str] = attrs.Factory(dict[str, str])


@attrs.define(eq=False)
class ScriptedCall:
    """The record of one call.

    `ended` is set when the call has ended; `gone_at` is the time at which its client disconnected early.
    """

    number: int
    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    started_at: float
    events_sent: int = 0
    gone_at: float | None = None
    ended: trio.Event = attrs.Factory(trio.Event)

    @property
    def client_gone(self) -> bool:
        """Return whether the client disconnected before the answer was complete."""
        return self.gone_at is not None


Reply = ScriptedAnswer | ScriptedRefusal | Callable[[ScriptedCall], ScriptedAnswer | ScriptedRefusal]
