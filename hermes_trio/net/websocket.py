"""A WebSocket over a Trio stream: receives and sends whole messages, and keeps the peer's close code.

There is no background task: the one task that receives also answers pings, and the caller of `open_websocket`
ends the connection. Leaving it normally sends a close frame and waits for the peer's, bounded in time; leaving it by
cancellation or by an error drops the connection at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import final
from urllib.parse import urlsplit, urlunsplit

import trio
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    Pong,
    RejectConnection,
    Request,
    TextMessage,
)
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from .dial import ConnectFailed, Dialer, Origin

# What RFC 6455 calls a connection that ended without a close frame.
ABNORMAL_CLOSURE = 1006
CONNECT_TIMEOUT = 15.0
CLOSE_TIMEOUT = 2.0
# Discord's largest dispatches are a few megabytes; anything above this is refused with 1009.
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
READ_SIZE = 65536


@final
class SocketClosed(Exception):
    """Raised when the connection has ended: `code` is the peer's close code, or 1006 if it sent none."""

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(f"the WebSocket was closed with code {code}" + (f" ({reason})" if reason else ""))
        self.code = code
        self.reason = reason


@final
class UpgradeRefused(Exception):
    """Raised when the peer answers with an HTTP status instead of upgrading."""

    def __init__(self, place: str, status: int) -> None:
        super().__init__(f"{place} answered {status} instead of upgrading")
        self.status = status


@final
class WebSocket:
    """One open WebSocket. One task receives; any task may send.

    Made by `open_websocket`, or by a server after its own handshake.
    """

    def __init__(self, stream: trio.abc.Stream, protocol: WSConnection) -> None:
        self._stream = stream
        self._protocol = protocol
        self._events: deque[Event] = deque()
        self._text: list[str] = []
        self._bytes: list[bytes] = []
        self._size = 0
        self._sending = trio.Lock()
        self._receiving = False
        self._half_sent = False
        self._closed: SocketClosed | None = None
        self._ended = trio.Event()
        self.received_at = trio.current_time()

    def take_early_frames(self) -> None:
        """Keep the frames that came in one segment with the answer to the upgrade: no later read will bring them."""
        self._events.extend(self._protocol.events())

    @property
    def closed(self) -> SocketClosed | None:
        """Return how the connection ended, or None while it is open."""
        return self._closed

    async def receive(self) -> str | bytes:
        """Return the next whole message. Raises `SocketClosed` when there will be none.

        Cancelling it loses nothing: a message that has arrived in part is completed by the next call.
        """
        if self._receiving:
            raise trio.BusyResourceError("another task is already receiving from this WebSocket")
        self._receiving = True
        try:
            while True:
                while self._events:
                    message = await self._take(self._events.popleft())
                    if message is not None:
                        return message
                await self._read()
        finally:
            self._receiving = False

    async def send(self, message: str | bytes) -> None:
        """Send one whole message. Raises `SocketClosed` if the connection has ended.

        Cancelling it in the middle of a frame makes the connection unusable, and it is closed.
        """
        if isinstance(message, str):
            await self._send(TextMessage(message))
        else:
            await self._send(BytesMessage(message))

    async def ping(self) -> None:
        """Send a ping, which the peer answers; `received_at` moves when anything arrives. Raises `SocketClosed` if the connection has ended."""
        await self._send(Ping(b""))

    async def close(self, code: int = 1000, reason: str = "", *, timeout: float = CLOSE_TIMEOUT) -> None:
        """Send a close frame, wait at most `timeout` for the peer's, and close the stream. Idempotent.

        Cancelling it closes the stream without waiting.
        """
        try:
            with trio.move_on_after(timeout):
                await self._send(CloseConnection(code, reason))
                while not self._receiving:
                    await self.receive()
                # Closing before the receiving task has read everything could reset the connection before the peer has read the close frame.
                await self._ended.wait()
        except SocketClosed:
            pass
        finally:
            self._mark(SocketClosed(code, reason))
            await trio.aclose_forcefully(self._stream)

    async def abort(self) -> None:
        """Drop the connection without a close frame."""
        self._mark(SocketClosed(ABNORMAL_CLOSURE))
        await trio.aclose_forcefully(self._stream)

    def _mark(self, closed: SocketClosed) -> SocketClosed:
        """Record why the connection ended; the first reason counts."""
        if self._closed is None:
            self._closed = closed
            self._ended.set()
        return self._closed

    async def _read(self) -> None:
        if self._closed is not None:
            await trio.lowlevel.checkpoint()
            raise self._closed
        try:
            data = await self._stream.receive_some(READ_SIZE)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            data = b""
        if not data:
            raise self._mark(SocketClosed(ABNORMAL_CLOSURE))
        self.received_at = trio.current_time()
        try:
            self._protocol.receive_data(bytes(data))
            self._events.extend(self._protocol.events())
        except (RemoteProtocolError, LocalProtocolError) as error:
            await self._end(CloseReason.PROTOCOL_ERROR, str(error))

    async def _take(self, event: Event) -> str | bytes | None:
        match event:
            case TextMessage():
                self._text.append(event.data)
                await self._bound(len(event.data.encode()))
                if event.message_finished:
                    message = "".join(self._text)
                    self._text, self._size = [], 0
                    return message
            case BytesMessage():
                self._bytes.append(bytes(event.data))
                await self._bound(len(event.data))
                if event.message_finished:
                    data = b"".join(self._bytes)
                    self._bytes, self._size = [], 0
                    return data
            case Ping():
                await self._send(event.response())
            case CloseConnection():
                code, reason = int(event.code), event.reason or ""
                try:
                    await self._send(event.response())
                except SocketClosed:
                    pass
                raise self._mark(SocketClosed(code, reason))
            case Pong():
                pass
            case _:
                await self._end(CloseReason.PROTOCOL_ERROR, "the peer sent an event that is not a message")
        return None

    async def _bound(self, more: int) -> None:
        self._size += more
        if self._size > MAX_MESSAGE_BYTES:
            await self._end(CloseReason.MESSAGE_TOO_BIG, f"a message has more than {MAX_MESSAGE_BYTES} bytes")

    async def _end(self, code: int, reason: str) -> None:
        try:
            await self._send(CloseConnection(code, reason[:100]))
        except SocketClosed:
            pass
        raise self._mark(SocketClosed(code, reason))

    async def _send(self, event: Event) -> None:
        async with self._sending:
            if self._closed is not None:
                raise self._closed
            if self._half_sent:
                raise SocketClosed(ABNORMAL_CLOSURE, "an earlier message was cut off in the middle")
            try:
                data = self._protocol.send(event)
            except LocalProtocolError:
                raise SocketClosed(ABNORMAL_CLOSURE, "the close handshake has begun") from None
            self._half_sent = True
            try:
                await self._stream.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                raise self._mark(SocketClosed(ABNORMAL_CLOSURE)) from None
            self._half_sent = False


@asynccontextmanager
async def open_websocket(
    url: str,
    dialer: Dialer,
    *,
    headers: Mapping[str, str] | None = None,
    connect_timeout: float = CONNECT_TIMEOUT,
) -> AsyncGenerator[WebSocket, None]:
    """Connect to a `ws://` or `wss://` address through `dialer`, and end the connection when the block ends.

    Raises `ConnectFailed` when the peer cannot be reached or does not upgrade in time, and `UpgradeRefused` when it answers with something else.
    The path and query are not quoted in errors: they may hold a ticket. Cancellation closes the connection.
    """
    parts = urlsplit(url)
    if parts.scheme not in {"ws", "wss"} or not parts.hostname:
        raise ValueError("a WebSocket address must begin with ws:// or wss://")
    secure = parts.scheme == "wss"
    origin = Origin("https" if secure else "http", parts.hostname, parts.port or (443 if secure else 80))
    place = f"{parts.scheme}://{parts.hostname}"
    path = urlunsplit(("", "", parts.path or "/", parts.query, ""))
    try:
        with trio.fail_after(connect_timeout):
            stream, _ = await dialer.connect(origin, tunnel=True)
    except trio.TooSlowError:
        raise ConnectFailed(f"{place}: no connection within {connect_timeout:g} s") from None
    try:
        try:
            with trio.fail_after(connect_timeout):
                socket = await _upgrade(stream, place, origin.authority, path, headers or {})
        except trio.TooSlowError:
            raise ConnectFailed(f"{place}: no upgrade within {connect_timeout:g} s") from None
        except (trio.BrokenResourceError, RemoteProtocolError) as error:
            raise ConnectFailed(f"{place}: the upgrade failed: {error}") from None
        yield socket
        await socket.close()
    finally:
        await trio.aclose_forcefully(stream)


async def _upgrade(
    stream: trio.abc.Stream, place: str, host: str, target: str, headers: Mapping[str, str]
) -> WebSocket:
    protocol = WSConnection(ConnectionType.CLIENT)
    extra = [(name.encode(), value.encode()) for name, value in headers.items()]
    await stream.send_all(protocol.send(Request(host=host, target=target, extra_headers=extra)))
    while True:
        data = await stream.receive_some(READ_SIZE)
        protocol.receive_data(bytes(data) or None)
        for event in protocol.events():
            if isinstance(event, AcceptConnection):
                socket = WebSocket(stream, protocol)
                socket.take_early_frames()
                return socket
            if isinstance(event, RejectConnection):
                raise UpgradeRefused(place, event.status_code)
        if not data:
            raise trio.BrokenResourceError("the peer closed the connection")
