"""Event streams: the writer that opens an answer late, and the feed between a turn and the one who writes its events.

The head of a stream goes out with its first bytes, so a turn that is refused is still an ordinary error. A feed never makes the turn wait: text that
has not been written yet is joined, which bounds it by the length of the answer; the connection bounds how long a reader may stall.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, final

import trio

from hermes_trio.http.server import EventStreamWriter, Send

from .message import HeaderPairs, encode_json

__all__ = ["HEARTBEAT_SECONDS", "Feed", "StreamWriter", "data_event", "named_event"]

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
class Feed:
    """The events of one turn on their way to one writer. `put` is the turn's sink; `take` waits for what came since the last one."""

    __slots__ = ("_closed", "_events", "_wake")

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._closed: bool = False
        self._wake: trio.Event | None = None

    def put(self, event: Mapping[str, Any]) -> None:
        """Add an event; text is joined with text that still waits."""
        events = self._events
        if event["event"] == "message.delta" and events and events[-1]["event"] == "message.delta":
            events[-1]["parts"].append(event["delta"])
        elif event["event"] == "message.delta":
            events.append({"event": "message.delta", "parts": [event["delta"]]})
        else:
            events.append(dict(event))
        self._ring()

    def close(self) -> None:
        """Nothing more will come."""
        self._closed = True
        self._ring()

    def _ring(self) -> None:
        if self._wake is not None:
            self._wake.set()
            self._wake = None

    async def take(self) -> list[dict[str, Any]] | None:
        """What has come, in order (text as `delta`); an empty list when nothing came for a while; None at the end.

        Cancelling it loses nothing.
        """
        if not self._events and not self._closed:
            self._wake = trio.Event()
            with trio.move_on_after(HEARTBEAT_SECONDS):
                await self._wake.wait()
        if not self._events and self._closed:
            return None
        events, self._events = self._events, []
        for event in events:
            if "parts" in event:
                event["delta"] = "".join(event.pop("parts"))
        return events
