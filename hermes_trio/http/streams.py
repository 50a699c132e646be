"""Event streams: the writer that opens an answer late, and the bell between a turn and the task that writes its events.

The head of a stream goes out with its first bytes, so a turn that is refused is still an ordinary error. A turn never waits for its reader: text that has
not been written yet is joined, which bounds it by the length of the answer; the connection bounds how long a reader may stall.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, final

import trio

from hermes_trio.http.server import EventStreamWriter, Send
from hermes_trio.runtime.outcome import Outcome

from .requests import HeaderPairs, encode_json

__all__ = ["HEARTBEAT_SECONDS", "STREAM_TYPE", "Bell", "StreamWriter", "TurnEvents", "data_event", "named_event"]

HEARTBEAT_SECONDS: Final = 15.0
"""A silent stream is kept open by a comment, and a client that vanished without a word is noticed by it."""

STREAM_TYPE: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


def data_event(value: Any) -> bytes:
    """An unnamed event. JSON has no line breaks outside of strings, and none unescaped inside."""
    return b"data: %b\n\n" % encode_json(value)


def named_event(name: str, value: Any) -> bytes:
    """A named event; the name is one of ours."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode_json(value))


@final
class StreamWriter:
    """Writes one stream. Used by one task; `open` is called once, by whoever has the first bytes."""

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
        """Keep encoded events for the next flush."""
        self._writer.put(encoded)

    async def flush(self) -> None:
        """Send what was put, in one piece."""
        await self._writer.flush()

    @property
    def is_full(self) -> bool:
        """Whether enough waits that it should be flushed."""
        return self._writer.is_full

    async def comment(self, text: str) -> None:
        """Send a comment, which clients ignore."""
        await self._writer.comment(text)

    async def close(self) -> None:
        """Send the rest and end the answer."""
        await self._writer.close()


@final
class Bell:
    """Tells a writing task that there is something to write, or that nothing more will come. Ringing never waits.

    `beat` is a task beside the writing one: it wakes it when the bell was silent for long. A timeout for each wait would cost more than the event.
    """

    __slots__ = ("_event", "_last", "_rung", "closed")

    def __init__(self) -> None:
        self._rung: bool = False
        self._last: float = trio.current_time()
        self._event: trio.Event | None = None
        self.closed: bool = False

    def ring(self) -> None:
        """There is something to write."""
        self._rung = True
        if self._event is not None:
            self._event.set()
            self._event = None

    def close(self) -> None:
        """Nothing more will come."""
        self.closed = True
        self.ring()

    async def wait(self) -> bool:
        """Wait for a ring since the last one; False if there was none for as long as a stream may be silent. Cancelling loses nothing."""
        if not self._rung:
            self._event = trio.Event()
            await self._event.wait()
        rung, self._rung = self._rung, False
        self._last = trio.current_time()
        return rung

    async def beat(self) -> None:
        """Wake the writing task whenever it has had nothing to write for as long as a stream may be silent, until cancelled."""
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
    """What becomes of the events of a turn on one stream. `take` is called by the turn and never waits; the rest by the writing task."""

    def take(self, event: Mapping[str, Any]) -> None:
        """An event of the turn."""
        ...

    async def open(self) -> None:
        """The turn was admitted: begin the answer."""
        ...

    async def write(self) -> None:
        """Write what was taken since the last time."""
        ...

    async def keep_alive(self) -> None:
        """Nothing was taken for a while."""
        ...

    async def end(self, outcome: Outcome) -> None:
        """The turn has ended: write the rest and say how."""
        ...
