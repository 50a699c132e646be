"""Server-sent events: one encoder, and one writer that puts everything at hand into one send.

The writer never waits for more to come; what has been put since the last flush leaves together. `pump` reads a
channel to its end and sends a comment whenever nothing else went out for a while, so that proxies keep the stream and
a vanished client is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar, final

import trio

from hermes_trio.http.server.asgi import Send
from hermes_trio.http.server.responses import HeaderBlock

HEARTBEAT = 15.0
# What one send carries at most before it is flushed; a reader that falls behind must not grow the buffer.
_FLUSH_BYTES = 65536

STREAM_HEADERS = HeaderBlock(
    [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ]
)

T = TypeVar("T")


def encode_event(data: bytes, *, event: str | None = None, id: str | None = None) -> bytes:
    """Return one event as it goes over the wire. Line breaks in `data` become several data lines, which a client joins again.

    :raises ValueError: if `event` or `id` contains a line break or NUL, which would end its line or be ignored by
        clients.
    """
    lines: list[bytes] = []
    for name, value in (("id", id), ("event", event)):
        if value is not None:
            if "\n" in value or "\r" in value or "\0" in value:
                raise ValueError(f"the {name} of an event cannot contain CR, LF or NUL: {value!r}")
            lines.append(f"{name}: {value}\n".encode())
    if b"\n" in data or b"\r" in data:
        normal = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines += (b"data: %b\n" % line for line in normal.split(b"\n"))
    else:
        lines.append(b"data: %b\n" % data)
    lines.append(b"\n")
    return b"".join(lines)


@final
class EventStreamWriter:
    """The answer to one request as an event stream: `open`, any number of `put` and `flush`, `close`.

    Not closing it tells the client that the stream was cut off. Used by one task.
    """

    __slots__ = ("_buffer", "_headers", "_send", "_size", "_status")

    def __init__(
        self, send: Send, *, status: int = 200, headers: HeaderBlock | Iterable[tuple[bytes, bytes]] = STREAM_HEADERS
    ) -> None:
        self._send = send
        self._status = status
        self._headers = headers
        self._buffer: list[bytes] = []
        self._size = 0

    async def open(self) -> None:
        """Send the head at once, so that the client knows that the stream exists before its first event."""
        headers = self._headers if type(self._headers) is HeaderBlock else list(self._headers)
        await self._send({"type": "http.response.start", "status": self._status, "headers": headers})
        await self._send({"type": "http.response.body", "body": b"", "more_body": True})

    def put(self, encoded: bytes) -> None:
        """Keep an encoded event for the next flush."""
        self._buffer.append(encoded)
        self._size += len(encoded)

    @property
    def is_full(self) -> bool:
        """Return whether enough is waiting that it should be flushed before more is put."""
        return self._size >= _FLUSH_BYTES

    async def flush(self) -> None:
        """Send everything that was put, in one message. Cancelled while the reader stalls, the stream is cut off."""
        if not self._buffer:
            await trio.lowlevel.checkpoint()
            return
        body = self._buffer[0] if len(self._buffer) == 1 else b"".join(self._buffer)
        self._buffer.clear()
        self._size = 0
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def event(self, data: bytes, *, event: str | None = None, id: str | None = None) -> None:
        """Send one event now, after whatever was put before it."""
        self.put(encode_event(data, event=event, id=id))
        await self.flush()

    async def comment(self, text: str = "") -> None:
        """Send a comment line, which clients ignore."""
        self.put(f": {' '.join(text.split())}\n\n".encode())
        await self.flush()

    async def pump(
        self, source: trio.MemoryReceiveChannel[T], encode: Callable[[T], bytes], *, heartbeat: float = HEARTBEAT
    ) -> None:
        """Send everything that comes out of `source` until it ends, as few sends as its pace allows.

        Cancellation can lose the items that were taken and not yet sent; the stream is cut off then.
        """
        while True:
            try:
                with trio.fail_after(heartbeat):
                    item = await source.receive()
            except trio.TooSlowError:
                await self.comment("keep-alive")
                continue
            except trio.EndOfChannel:
                return
            self.put(encode(item))
            while not self.is_full:
                try:
                    self.put(encode(source.receive_nowait()))
                except (trio.WouldBlock, trio.EndOfChannel):
                    break
            await self.flush()

    async def close(self) -> None:
        """Send what is left and end the answer."""
        body = b"".join(self._buffer)
        self._buffer.clear()
        self._size = 0
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
