"""Event streams: the writer, which sends the head with the first bytes, and the wakeup between a turn and the task that writes its events.

A turn that is refused is still an ordinary error, because the head is sent late. A turn never waits for its reader: unwritten text is joined, which
bounds it by the length of the answer; the connection limits how long a reader may stall.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, final

import trio

from hermes_trio.http.server import EventStreamWriter, Send
from hermes_trio.runtime.outcome import Outcome

from .requests import HeaderPairs, encode_json

HEARTBEAT_SECONDS: Final = 15.0
"""How long a stream may be silent before a comment is sent, which keeps it open and detects a vanished client."""

STREAM_TYPE: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


def data_event(value: Any) -> bytes:
    """Return an unnamed event. JSON has no line breaks outside of strings, and none unescaped inside."""
    return b"data: %b\n\n" % encode_json(value)


def named_event(name: str, value: Any) -> bytes:
    """Return a named event; the name is one of ours."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode_json(value))


@final
class StreamWriter:
    """Writes one stream. Used by one task; `open` is called once, with the first bytes."""

    __slots__ = ("_headers", "_send", "_writer", "opened")

    def __init__(self, send: Send, headers: Callable[[HeaderPairs], HeaderPairs]) -> None:
        self._send = send
        self._headers = headers
        self._writer: EventStreamWriter = EventStreamWriter(send)
        self.opened: bool = False

    async def open(self, first: bytes = b"", headers: HeaderPairs = ()) -> None:
        """Send the head and the first bytes, together."""
        self.opened = True
        pairs = self._headers([*STREAM_TYPE, *headers])
        await self._send({"type": "http.response.start", "status": 200, "headers": pairs})
        await self._send({"type": "http.response.body", "body": first, "more_body": True})

    def put(self, encoded: bytes) -> None:
        """Buffer encoded events for the next flush."""
        self._writer.put(encoded)

    async def flush(self) -> None:
        """Send the buffer, in one piece."""
        await self._writer.flush()

    @property
    def is_full(self) -> bool:
        """Return whether the buffer should be flushed."""
        return self._writer.is_full

    async def comment(self, text: str) -> None:
        """Send a comment, which clients ignore."""
        await self._writer.comment(text)

    async def close(self) -> None:
        """Send the rest and end the response."""
        await self._writer.close()


@final
class StreamWakeup:
    """Signals a writing task that there is something to write, or that nothing more will come. Ringing never waits.

    `beat` runs beside the writing task and wakes it after a long silence. A timeout for each wait would cost more than the event.
    """

    __slots__ = ("_event", "_last", "_set", "closed")

    def __init__(self) -> None:
        self._set: bool = False
        self._last: float = trio.current_time()
        self._event: trio.Event | None = None
        self.closed: bool = False

    def set(self) -> None:
        """Signal that there is something to write."""
        self._set = True
        if self._event is not None:
            self._event.set()
            self._event = None

    def close(self) -> None:
        """Signal that nothing more will come."""
        self.closed = True
        self.set()

    async def wait(self) -> bool:
        """Wait for a ring since the last one; return False after a long silence. Cancelling loses nothing."""
        if not self._set:
            self._event = trio.Event()
            await self._event.wait()
        was_set, self._set = self._set, False
        self._last = trio.current_time()
        return was_set

    async def beat(self) -> None:
        """Wake the writing task after each long silence, until cancelled."""
        while True:
            due = self._last + HEARTBEAT_SECONDS
            if trio.current_time() < due:
                await trio.sleep_until(due)
                continue
            self._last = trio.current_time()
            if self._event is not None:
                self._event.set()
                self._event = None
            await trio.lowlevel.checkpoint()


class TurnEvents(Protocol):
    """Writes the events of a turn to one stream. The turn calls `take`, which never waits; the writing task calls the rest."""

    def take(self, event: Mapping[str, Any]) -> None:
        """Take an event of the turn."""
        ...

    async def open(self) -> None:
        """Begin the response, after the turn was admitted."""
        ...

    async def write(self) -> None:
        """Write what was taken since the last call."""
        ...

    async def keep_alive(self) -> None:
        """Keep the stream open after a silence."""
        ...

    async def end(self, outcome: Outcome) -> None:
        """Write the rest and the outcome, after the turn has ended."""
        ...
