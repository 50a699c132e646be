"""Fixes for what stock Hypercorn 0.18, Quart 0.22 and Quart-Trio 0.12 do wrong under Trio, each with its cause.

`with_fixes(app)` wraps any ASGI application; `FixedQuartTrio`, in `quart_fixes`, has the same fixes built in, for `hypercorn
--worker-class trio`. Both leave requests of the fast path alone: there the causes do not exist.

**Last send.** Hypercorn emits `http.disconnect` from inside the application's own last `send()`. Quart-Trio cancels
the request when it reads that, so the send is cut off before Hypercorn has made the connection ready for its next
request: the keep-alive timer never starts and the idle client holds up the shutdown. Fix: the last body send is
shielded, for a bounded time.

**Early answer.** An answer before the request body has arrived (401, 404, 413, 429) leaves Hypercorn's h11 state
machine between two requests, and its reader blocked on an application queue that has no reader: the next request is
never answered. Fix: before the last send, the rest of the body is waited for, bounded in time, so that a client that
is still uploading reads the answer; a body known to be long is answered with `connection: close`.

**Stalled reader.** `TCPServer.protocol_send` shields every write without a limit, so one client that stops reading
blocks the shutdown for ever. Fix: `bounded_send`; `bound_stock_sends()` puts it into Hypercorn's class for servers
that we do not start ourselves.

**No window.** `StreamBuffer.pop` lets the sender of an HTTP/2 stream go on after every small piece, also after an empty one, so that the buffer of a
reader that gives no window grows without a limit. Fix: `bound_stream_buffers()`; the sender waits until the buffer has room, and a wait that
lasts too long ends the request, as does a body that comes too slowly.

**Frames for nothing.** h2 answers and Hypercorn handles as many PING, SETTINGS, WINDOW_UPDATE, PRIORITY, RST_STREAM and empty DATA frames as a client
sends, each of which costs it nothing. Fix: `http2_frames.bound_frames()`; a connection has an allowance, which grows with time and with what it is sent.

**Late body.** DATA on an HTTP/2 stream that was answered early (401, 413, 429) raises `KeyError` in `H2Protocol._handle_events`, which ends the connection
and every other request on it. Fix: `http2_frames.drop_late_bodies()`.

**Disconnect.** Hypercorn tells an application that its client has disconnected only if it asks; one that is busy with
something else continues without a client. Fix: the request is cancelled, with the cause on record, as on the fast path.

**WebSocket send loop.** Sending to a peer that has disconnected returns without a checkpoint; a loop around it freezes the
process. Fix: every `websocket.send` ends with one.

**Response timeout.** Quart cuts a response off after `RESPONSE_TIMEOUT` (60 s), silently, streams too. Fix: a
response without a Content-Length has no timeout; `unbounded()` says so explicitly for any other.

**Body limit.** Quart's `MAX_CONTENT_LENGTH` bounds the bytes that wait to be read, not their sum, so `async for` over
a chunked body is unbounded. Fix: `BoundedBody` counts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, final

import msgspec
import trio
from hypercorn.events import Closed, Event, RawData

from hermes_trio.http.server.asgi import ASGIApp, Message, Receive, Scope, Send
from hermes_trio.http.server.endings import (
    EXCHANGE_EXTENSION,
    FAULT_OF_ENDING,
    Ending,
    ProtocolFault,
    RequestEnd,
)

if TYPE_CHECKING:
    from hypercorn.trio.tcp_server import TCPServer

DRAIN_BYTES = 1024 * 1024
DRAIN_TIMEOUT = 5.0
LAST_SEND_TIMEOUT = 30.0
PIECE_BYTES = 64 * 1024
LAST_SEND_GRACE = 0.5
WRITE_TIMEOUT = 30.0


@final
class SendBound:
    """How long one connection's sends are shielded, and the way to end the shield early."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._scope: trio.CancelScope | None = None
        self._is_cut = False

    def shield(self) -> trio.CancelScope:
        """Return a fresh bounded shield for the one send under way."""
        self._scope = trio.CancelScope(shield=True, deadline=trio.current_time() + self._timeout)
        if self._is_cut:
            self._scope.cancel()
        return self._scope

    def cut(self) -> None:
        """Give up the send under way and all later ones."""
        self._is_cut = True
        if self._scope is not None:
            self._scope.cancel()


async def bounded_send(server: TCPServer, data: bytes, bound: SendBound) -> None:
    """Hypercorn's raw send with a bounded shield: a reader that takes nothing for too long loses its connection.

    Cancellation does not interrupt the send before its bound, because half a frame would corrupt the connection.
    """
    broken = False
    async with server.send_lock:
        shield = bound.shield()
        try:
            with shield:
                await server.stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            broken = True
    if shield.cancelled_caught:
        await trio.aclose_forcefully(server.stream)
        broken = True
    if broken:
        await server.protocol.handle(Closed())


def bound_stock_sends(timeout: float = WRITE_TIMEOUT) -> Callable[[], None]:
    """Bound the sends of every Hypercorn connection in this process; call the result to undo it.

    For `hypercorn --worker-class trio`, which makes its connections itself.
    """
    from hypercorn.trio.tcp_server import TCPServer

    from hermes_trio.http.server.http2_frames import bound_frames, drop_late_bodies

    bound_stream_buffers()
    bound_frames()
    drop_late_bodies()
    stock = TCPServer.protocol_send

    async def protocol_send(self: TCPServer, event: Event) -> None:
        if isinstance(event, RawData):
            await bounded_send(self, event.data, SendBound(timeout))
        else:
            await stock(self, event)

    def undo() -> None:
        TCPServer.protocol_send = stock

    TCPServer.protocol_send = protocol_send
    return undo


class SlowClient(msgspec.Struct, frozen=True):
    """How long a client may keep a request waiting: see `ServerConfig`."""

    body_timeout: float = 30.0
    body_rate: float = 1024.0
    write_timeout: float = WRITE_TIMEOUT


DEFAULT_SLOW_CLIENT = SlowClient()


def bound_stream_buffers() -> None:
    """Let the senders of every HTTP/2 stream in this process wait while its reader gives no window. Calling it again changes nothing."""
    from hypercorn.protocol.h2 import BUFFER_LOW_WATER, StreamBuffer

    async def pop(self: StreamBuffer, max_length: int) -> bytes:
        data = bytes(self.buffer[:max_length])
        del self.buffer[: len(data)]
        if len(self.buffer) < BUFFER_LOW_WATER:
            await self._paused.set()  # pyright: ignore[reportPrivateUsage]
        if not self.buffer:
            await self._is_empty.set()  # pyright: ignore[reportPrivateUsage]
        return data

    StreamBuffer.pop = pop


@final
class GuardedExchange:
    """One request on a stock connection, with the fixes for the last send, for early answers and for disconnects.

    `run` owns one task beside the application: it reads on, so that the client's disconnect is seen while the
    application does something else, and so that the rest of an unwanted body is dropped while the answer ends.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        drain_bytes: int = DRAIN_BYTES,
        drain_timeout: float = DRAIN_TIMEOUT,
        slow: SlowClient = DEFAULT_SLOW_CLIENT,
    ) -> None:
        self._receive = receive
        self._send = send
        self._slow = slow
        self._body_since: float | None = None
        self._body_read = False
        self._drain_bytes = drain_bytes
        self._drain_timeout = drain_timeout
        self._method: str = scope["method"]
        self._http1 = str(scope["http_version"]).startswith("1")
        self._length = next((int(value) for name, value in scope["headers"] if name == b"content-length"), None)
        self._received = 0
        self._start: Message | None = None
        self._answering = False
        self._begun = False
        self._disconnected = False
        self._settled = trio.Event()
        self._waiting: list[Message] = []
        self._changed = trio.Event()
        self._scope = trio.CancelScope()
        self._last_send: trio.CancelScope | None = None
        self._last_send_timeout = LAST_SEND_TIMEOUT
        self.request_end = RequestEnd()
        scope.setdefault("extensions", {})[EXCHANGE_EXTENSION] = self.request_end

    async def run(self, app: Callable[[Receive, Send], Awaitable[None]]) -> None:
        """Run the application's side of the request; it is cancelled when the client disconnects before the last send."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            with self._scope:
                await app(self.receive, self.send)
            if self.request_end.ending is Ending.SLOW_BODY and not self._begun:
                await self._refuse(FAULT_OF_ENDING[Ending.SLOW_BODY])
            nursery.cancel_scope.cancel()

    async def _refuse(self, fault: ProtocolFault) -> None:
        """Say why the request ends, in place of an answer that has not begun."""
        body = fault.body()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        with trio.move_on_after(self._slow.write_timeout):
            await self._send({"type": "http.response.start", "status": fault.status, "headers": headers})
            await self._send({"type": "http.response.body", "body": body})

    def _end(self, ending: Ending) -> None:
        """Cancel the application's side, for this reason."""
        if self.request_end.ending is None:
            self.request_end.ending = ending
        self._scope.cancel(reason=ending.value)

    async def receive(self) -> Message:
        """Return the next message, or `http.disconnect` once there can be no other. Cancellation loses no message."""
        while not self._waiting:
            if self._disconnected:
                return {"type": "http.disconnect"}
            if self._body_read:
                await self._changed.wait()
                continue
            if self._body_since is None:
                self._body_since = trio.current_time()
            slow = self._slow
            with trio.CancelScope(
                deadline=self._body_since + slow.body_timeout + self._received / slow.body_rate
            ) as bound:
                await self._changed.wait()
            if bound.cancelled_caught:
                self._end(Ending.SLOW_BODY)
                await trio.lowlevel.checkpoint()
        message = self._waiting.pop(0)
        if not message.get("more_body", False):
            self._body_read = True
        self._notify()
        return message

    async def send(self, message: Message) -> None:
        """Pass the message on; the last one is shielded, and waits for the rest of the request first.

        The head waits for the first part of the body, as ASGI allows. Cancellation does not interrupt the last send.
        """
        if message["type"] == "http.response.start":
            self._start = message
            return
        more = bool(message.get("more_body", False))
        if self._start is not None:
            start, self._start = self._start, None
            self._begun = True
            await self._send(self._complete_head(start, None if more else len(message.get("body", b""))))
        body: bytes = message.get("body", b"") if message["type"] == "http.response.body" else b""
        if len(body) > PIECE_BYTES and not self._http1:
            # The bound is for each piece: a reader that keeps taking a little gets everything.
            last = (len(body) - 1) // PIECE_BYTES * PIECE_BYTES
            for start in range(0, last, PIECE_BYTES):
                if self.request_end.ending is not None:
                    break
                await self._bounded({**message, "body": body[start : start + PIECE_BYTES], "more_body": True})
            message = {**message, "body": body[last:]}
        if self.request_end.ending is Ending.SLOW_READER:
            # An application that may not be cancelled continues without its client.
            await trio.lowlevel.checkpoint()
            return
        if message["type"] != "http.response.body" or more:
            await self._bounded(message)
            return
        with trio.move_on_after(self._last_send_timeout, shield=True) as self._last_send:
            self._answering = True
            self._notify()
            if self._http1 and not self._settled.is_set():
                if message.get("body", b""):
                    await self._send({**message, "more_body": True})
                    message = {**message, "body": b""}
                with trio.move_on_after(self._drain_timeout):
                    await self._settled.wait()
            await self._send(message)

    async def _bounded(self, message: Message) -> None:
        """Pass a message on that is not the last one. A reader that does not take it in time ends the request."""
        with trio.move_on_after(self._slow.write_timeout) as bound:
            await self._send(message)
        if bound.cancelled_caught:
            # Over HTTP/2 a reader that gives no window stalls the stream, and the connection's own bound does not see it.
            self._end(Ending.SLOW_READER)
            await trio.lowlevel.checkpoint()

    def _complete_head(self, start: Message, length: int | None) -> Message:
        """Return the opening message with the length of a one-part answer, and with the close that a long unread
        body forces.
        """
        headers = list(start.get("headers", ()))
        countable = start["status"] not in {204, 304} and (length or self._method != "HEAD")
        if length is not None and countable and all(name.lower() != b"content-length" for name, _ in headers):
            headers.append((b"content-length", b"%d" % length))
        if self._http1 and self._length is not None and self._length - self._received > self._drain_bytes:
            headers.append((b"connection", b"close"))
        return {**start, "headers": headers}

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _read_on(self) -> None:
        """Take messages one ahead of the application, and past the end of the body; once the answer ends, drop them."""
        while (message := await self._receive())["type"] != "http.disconnect":
            size = len(message.get("body", b""))
            more = message.get("more_body", False)
            self._received += size
            if not more:
                self._settled.set()
            self._waiting.append(message)
            self._notify()
            while more and self._waiting and not self._answering:
                await self._changed.wait()
            if self._answering:
                self._waiting.clear()

    async def _watch(self) -> None:
        """Read until the client disconnects, then end the request; if cancelled, the last send too has little time left."""
        try:
            await self._read_on()
        finally:
            # Over HTTP/2 a send to a closed connection, or one that waits for the reader's window, never returns.
            self._last_send_timeout = LAST_SEND_GRACE
            if self._last_send is not None:
                self._last_send.deadline = min(self._last_send.deadline, trio.current_time() + LAST_SEND_GRACE)
        self._disconnected = True
        self._settled.set()
        if not self._answering:
            self.request_end.ending = Ending.CLIENT_LEFT
            self._scope.cancel(reason=Ending.CLIENT_LEFT.value)
        self._notify()


def checkpointed_send(send: Send) -> Send:
    """Send on a WebSocket, and always let other tasks run and see a cancellation."""

    async def checkpointed(message: Message) -> None:
        await send(message)
        await trio.lowlevel.checkpoint()

    return checkpointed


def is_guarded(scope: Scope) -> bool:
    return EXCHANGE_EXTENSION in scope.get("extensions", {})


def with_fixes(
    app: ASGIApp,
    *,
    drain_bytes: int = DRAIN_BYTES,
    drain_timeout: float = DRAIN_TIMEOUT,
    slow: SlowClient = DEFAULT_SLOW_CLIENT,
) -> ASGIApp:
    """Return the application with the fixes that act between server and application."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_guarded(scope):
            exchange = GuardedExchange(
                scope, receive, send, drain_bytes=drain_bytes, drain_timeout=drain_timeout, slow=slow
            )
            await exchange.run(partial(app, scope))
        elif scope["type"] == "websocket":
            await app(scope, receive, checkpointed_send(send))
        else:
            await app(scope, receive, send)

    return guarded
