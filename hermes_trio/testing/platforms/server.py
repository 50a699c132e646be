"""A small HTTP/1.1 and WebSocket server on a random loopback port, for the platform fakes.

`open_loopback_server` owns the listener and every connection; leaving it ends them all at once. A handler answers one
request at a time on each connection. It may hold a request as long as it likes (long polling): a client that
disconnects cancels its handler. An exception of a handler fails the test that opened the server.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, final
from urllib.parse import parse_qsl, unquote, urlsplit

import attrs
import h11
import msgspec
import trio
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection
from wsproto.events import Request as UpgradeRequest

from hermes_trio.messaging.errors import single_failure
from hermes_trio.net.websocket import WebSocket

READ_SIZE = 65536
MAX_BODY_BYTES = 16 * 1024 * 1024


@final
class ConnectionDropped(Exception):
    """Raised by a handler to end the connection without an answer."""


@final
@attrs.frozen
class FakeRequest:
    """One complete request. Header names are lower-case; `path` is decoded and has no query."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the body as JSON, or None if it is not JSON."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    def form(self) -> dict[str, str]:
        """Return the body as a URL-encoded form."""
        return dict(parse_qsl(self.body.decode("utf-8", "replace"), keep_blank_values=True))


@final
@attrs.frozen
class FakeReply:
    """One complete answer."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = attrs.field(factory=dict[str, str])

    @classmethod
    def of(cls, value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> FakeReply:
        """Return an answer with a JSON body."""
        return cls(status, msgspec.json.encode(value), {"content-type": "application/json", **(headers or {})})


Handler = Callable[[FakeRequest], Awaitable[FakeReply]]
SocketHandler = Callable[[FakeRequest, WebSocket], Awaitable[None]]


@final
@attrs.define
class LoopbackServer:
    """A running server. Made by `open_loopback_server`."""

    port: int
    handle: Handler
    handle_socket: SocketHandler | None
    connections: set[trio.SocketStream] = attrs.field(factory=set[trio.SocketStream])
    host: str = "127.0.0.1"

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def socket_url(self) -> str:
        return f"ws://{self.host}:{self.port}"

    async def serve(self, stream: trio.SocketStream) -> None:
        """Answer requests on one connection until it ends."""
        self.connections.add(stream)
        try:
            async with stream:
                await self._serve(stream)
        except (trio.BrokenResourceError, h11.RemoteProtocolError, ConnectionDropped):
            pass
        finally:
            self.connections.discard(stream)

    async def _serve(self, stream: trio.SocketStream) -> None:
        protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=READ_SIZE)
        while True:
            received = await _read_request(stream, protocol)
            if received is None:
                return
            request, raw_headers, target = received
            if request.headers.get("upgrade", "").lower() == "websocket" and self.handle_socket is not None:
                await self._upgrade(stream, request, raw_headers, target)
                return
            reply = await self._answer(stream, protocol, request)
            if reply is None:
                return
            await _write_reply(stream, protocol, reply, head_only=request.method == "HEAD")
            if protocol.our_state is not h11.DONE or protocol.their_state is not h11.DONE:
                return
            protocol.start_next_cycle()

    async def _answer(
        self, stream: trio.SocketStream, protocol: h11.Connection, request: FakeRequest
    ) -> FakeReply | None:
        reply: FakeReply | None = None
        dropped = False
        async with trio.open_nursery() as nursery:

            async def watch_for_disconnect() -> None:
                while True:
                    try:
                        data = await stream.receive_some(READ_SIZE)
                    except trio.BrokenResourceError:
                        data = b""
                    if not data:
                        nursery.cancel_scope.cancel()
                        return
                    protocol.receive_data(bytes(data))

            nursery.start_soon(watch_for_disconnect)
            try:
                reply = await self.handle(request)
            except ConnectionDropped:
                dropped = True
            nursery.cancel_scope.cancel()
        if dropped:
            await trio.aclose_forcefully(stream)
        return reply

    async def _upgrade(
        self, stream: trio.SocketStream, request: FakeRequest, headers: list[tuple[bytes, bytes]], target: bytes
    ) -> None:
        assert self.handle_socket is not None
        protocol = WSConnection(ConnectionType.SERVER)
        protocol.initiate_upgrade_connection(headers, target)
        for event in protocol.events():
            assert isinstance(event, UpgradeRequest)
        await stream.send_all(protocol.send(AcceptConnection()))
        await self.handle_socket(request, WebSocket(stream, protocol))


async def _read_request(
    stream: trio.SocketStream, protocol: h11.Connection
) -> tuple[FakeRequest, list[tuple[bytes, bytes]], bytes] | None:
    head: h11.Request | None = None
    body = bytearray()
    while True:
        event = protocol.next_event()
        if event is h11.NEED_DATA:
            if protocol.they_are_waiting_for_100_continue:
                go_ahead = protocol.send(h11.InformationalResponse(status_code=100, headers=[]))
                await stream.send_all(go_ahead or b"")
            protocol.receive_data(bytes(await stream.receive_some(READ_SIZE)))
        elif isinstance(event, h11.Request):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > MAX_BODY_BYTES:
                raise ConnectionDropped
        elif isinstance(event, h11.EndOfMessage) and head is not None:
            break
        else:
            return None
    parts = urlsplit(head.target.decode("ascii"))
    headers = {name.decode("ascii").lower(): value.decode("latin-1") for name, value in head.headers}
    request = FakeRequest(
        method=head.method.decode("ascii"),
        path=unquote(parts.path),
        query=dict(parse_qsl(parts.query, keep_blank_values=True)),
        headers=headers,
        body=bytes(body),
    )
    return request, list(head.headers), head.target


async def _write_reply(
    stream: trio.SocketStream, protocol: h11.Connection, reply: FakeReply, *, head_only: bool
) -> None:
    headers = [(name.encode("ascii"), value.encode("latin-1")) for name, value in reply.headers.items()]
    if reply.status != 204:
        headers.append((b"content-length", str(len(reply.body)).encode("ascii")))
    data = protocol.send(h11.Response(status_code=reply.status, headers=headers)) or b""
    if reply.body and not head_only:
        data += protocol.send(h11.Data(data=reply.body)) or b""
    data += protocol.send(h11.EndOfMessage()) or b""
    await stream.send_all(data)


@asynccontextmanager
async def open_loopback_server(
    handle: Handler, handle_socket: SocketHandler | None = None
) -> AsyncGenerator[LoopbackServer, None]:
    """Serve on 127.0.0.1 until the block ends, then end every connection and close the listener.

    An exception of the body is raised without a group, so that a failed assertion is reported as one.
    """
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = int(listeners[0].socket.getsockname()[1])
    server = LoopbackServer(port, handle, handle_socket)
    with single_failure():
        async with trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, server.serve, listeners)
            yield server
            nursery.cancel_scope.cancel()
