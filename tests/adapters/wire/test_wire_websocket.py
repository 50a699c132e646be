"""The WebSocket itself, against the fakes' server, httpx2's client, and in-memory streams."""

from __future__ import annotations

from contextlib import asynccontextmanager

import httpx2
import pytest
import trio
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, Request, TextMessage

from hermes_trio.adapters.wire.sockets import open_platform_socket
from hermes_trio.messaging.errors import PlatformError, PlatformErrorKind
from hermes_trio.net.websocket import MAX_MESSAGE_BYTES, SocketClosed, WebSocket
from hermes_trio.testing.platforms.server import FakeReply, open_loopback_server
from hermes_trio.testing.platforms.server import FakeRequest as HttpRequest


async def not_a_socket(request: HttpRequest) -> FakeReply:
    return FakeReply(403 if request.path == "/forbidden" else 404)


async def echo(request: HttpRequest, socket: WebSocket) -> None:
    """Repeat every message; `close` ends with 4321, `drop` without a word."""
    try:
        while True:
            message = await socket.receive()
            if message == "close":
                await socket.close(4321, "as you wish")
            elif message == "drop":
                await socket.abort()
            else:
                await socket.send(message)
    except SocketClosed:
        pass


@asynccontextmanager
async def echo_server():
    async with open_loopback_server(not_a_socket, echo) as server:
        yield server


async def test_messages_go_and_come_back() -> None:
    """Text and bytes, small and larger than one read, come back whole and in order."""
    async with echo_server() as server, open_platform_socket(f"{server.socket_url}/x?y=1") as socket:
        for message in ("hello", b"bytes", "é" * 200_000, ""):
            await socket.send(message)
            assert await socket.receive() == message


async def test_another_client_agrees() -> None:
    """httpx2's own WebSocket client understands the fakes' server."""
    async with (
        echo_server() as server,
        httpx2.AsyncClient() as client,
        client.websocket(f"{server.socket_url}/") as socket,
    ):
        await socket.send_text("hello")
        assert await socket.receive_text() == "hello"
        await socket.ping()


async def test_close_code_and_lost_connection_are_told_apart() -> None:
    """The peer's close code and reason are kept; a lost connection is 1006."""
    async with echo_server() as server:
        async with open_platform_socket(server.socket_url) as socket:
            await socket.send("close")
            with pytest.raises(SocketClosed) as closed:
                await socket.receive()
            assert (closed.value.code, closed.value.reason) == (4321, "as you wish")
            with pytest.raises(SocketClosed):
                await socket.send("late")
        async with open_platform_socket(server.socket_url) as socket:
            await socket.send("drop")
            with pytest.raises(SocketClosed) as closed:
                await socket.receive()
            assert closed.value.code == 1006


async def test_refused_upgrade_and_unreachable_host() -> None:
    """A host that does not upgrade and one that is not there are errors without the address's secrets."""
    async with open_loopback_server(not_a_socket) as server:
        for path, kind in (("/forbidden", PlatformErrorKind.UNAUTHORIZED), ("/missing", PlatformErrorKind.TRANSIENT)):
            with pytest.raises(PlatformError) as caught:
                async with open_platform_socket(f"{server.socket_url}{path}?ticket=s3cret"):
                    pass
            assert caught.value.kind is kind
            assert "s3cret" not in str(caught.value)
    with pytest.raises(PlatformError) as caught:
        async with open_platform_socket("ws://127.0.0.1:1/?ticket=s3cret"):
            pass
    assert (caught.value.kind, caught.value.permanent) == (PlatformErrorKind.TRANSIENT, False)
    assert "s3cret" not in str(caught.value)


async def test_silent_host_is_given_up() -> None:
    """A host that accepts and never answers the upgrade is given up after the timeout."""

    async def say_nothing(stream: trio.SocketStream) -> None:
        await trio.sleep_forever()

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, say_nothing, listeners)
        with pytest.raises(PlatformError, match="no upgrade"):
            async with open_platform_socket(f"ws://127.0.0.1:{port}", connect_timeout=0.05):
                pass
        nursery.cancel_scope.cancel()


async def test_cancellation_closes_the_connection() -> None:
    """Cancelling the block ends the connection on the other side too."""
    begun, ended = trio.Event(), trio.Event()

    async def watch(request: HttpRequest, socket: WebSocket) -> None:
        begun.set()
        with pytest.raises(SocketClosed):
            await socket.receive()
        ended.set()

    async def stay(url: str) -> None:
        async with open_platform_socket(url):
            await trio.sleep_forever()

    async with open_loopback_server(not_a_socket, watch) as server:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stay, server.socket_url)
            with trio.fail_after(5):
                await begun.wait()
            nursery.cancel_scope.cancel()
        with trio.fail_after(5):
            await ended.wait()


@asynccontextmanager
async def pair():
    """A client and a server WebSocket over memory, for what real sockets cannot show."""
    left, right = memory_stream_pair()
    client, server = WSConnection(ConnectionType.CLIENT), WSConnection(ConnectionType.SERVER)
    server.receive_data(client.send(Request(host="x", target="/")))
    list(server.events())
    client.receive_data(server.send(AcceptConnection()))
    list(client.events())
    yield WebSocket(left, client), WebSocket(right, server), right


async def test_cancelled_receive_loses_nothing(autojump_clock: MockClock) -> None:
    """A message of which only a part had arrived is completed by the next receive."""
    async with pair() as (client, server, raw):
        frame = server._protocol.send(TextMessage("hello"))
        await raw.send_all(frame[:4])
        with trio.move_on_after(1):
            await client.receive()
        await raw.send_all(frame[4:])
        assert await client.receive() == "hello"


async def test_only_one_task_receives() -> None:
    """A second receiver is a mistake that is named at once."""
    async with pair() as (client, _, _), trio.open_nursery() as nursery:
        nursery.start_soon(client.receive)
        await wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await client.receive()
        nursery.cancel_scope.cancel()


async def test_pings_are_answered_and_heard(autojump_clock: MockClock) -> None:
    """A ping is answered by the receiving task, and the answer counts as a sign of life."""
    async with pair() as (client, server, _), trio.open_nursery() as nursery:
        nursery.start_soon(client.receive)
        nursery.start_soon(server.receive)
        before = server.received_at
        await trio.sleep(1)
        await server.ping()
        await wait_all_tasks_blocked()
        assert server.received_at > before
        nursery.cancel_scope.cancel()


async def test_oversized_message_is_refused() -> None:
    """A message above the limit ends the connection with 1009 instead of filling the memory."""
    async with pair() as (client, server, _), trio.open_nursery() as nursery:
        nursery.start_soon(server.send, b"x" * (MAX_MESSAGE_BYTES + 1))
        with pytest.raises(SocketClosed) as closed:
            await client.receive()
        assert closed.value.code == 1009
        nursery.cancel_scope.cancel()


async def test_garbage_is_a_protocol_error() -> None:
    """Bytes that are no WebSocket frame end the connection with 1002."""
    async with pair() as (client, _, raw):
        await raw.send_all(b"\xff\xff\xff\xff\xff")
        with pytest.raises(SocketClosed) as closed:
            await client.receive()
        assert closed.value.code == 1002


async def test_a_frame_in_one_segment_with_the_upgrade_is_received() -> None:
    """Servers greet at once: the greeting often arrives together with the answer to the upgrade."""

    async def greet(stream: trio.SocketStream) -> None:
        protocol = WSConnection(ConnectionType.SERVER)
        protocol.receive_data(bytes(await stream.receive_some()))
        list(protocol.events())
        await stream.send_all(protocol.send(AcceptConnection()) + protocol.send(TextMessage("hello")))
        await stream.receive_some()
        await stream.aclose()

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, greet, listeners)
        async with open_platform_socket(f"ws://127.0.0.1:{port}/") as socket:
            with trio.fail_after(5):
                assert await socket.receive() == "hello"
        nursery.cancel_scope.cancel()
