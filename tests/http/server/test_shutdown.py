"""Shutdown: idle connections go at once, active ones get their grace, stalled ones cannot hold it up."""

from __future__ import annotations

import pytest
import trio

from hermes_trio.http.server import LifespanCrashed, Receive, Scope, Send

from .loopback import ends_with, request, running
from .sample_app import SampleApp

LONG = 3600.0


async def test_idle_connections_close_at_once(fast: bool) -> None:
    """Clients that wait between requests, or have not begun, do not use up the grace."""
    async with running(SampleApp(), fast=fast, graceful_timeout=LONG) as server:
        used, fresh = await server.connect(), await server.connect()
        assert (await used.get("/echo")).status == 200
        await trio.testing.wait_all_tasks_blocked()
        await server.stop()
        assert await used.rest() == b""
        assert await fresh.rest() == b""


async def test_active_request_finishes_within_the_grace(fast: bool) -> None:
    """A request under way is answered, and its connection closed after it."""
    app = SampleApp()
    async with running(app, fast=fast, graceful_timeout=LONG) as server:
        client = await server.connect()
        await client.send(request("/wait"))
        await app.waiting.wait()
        server.shutdown.set()
        await trio.testing.wait_all_tasks_blocked()
        app.finish.set()
        assert (await client.reply()).status == 200
        assert await client.rest() == b""
        await server.ended.wait()


async def test_active_request_is_cancelled_after_the_grace(fast: bool) -> None:
    """A request that takes longer than the grace is cancelled and the server ends."""
    app = SampleApp()
    async with running(app, fast=fast, graceful_timeout=0.05) as server:
        client = await server.connect()
        await client.send(request("/wait"))
        await app.waiting.wait()
        await server.stop()
        assert app.cancelled.is_set()
        if fast:
            reply = await client.reply()
            assert (reply.status, reply.headers["connection"]) == (503, "close")


async def test_stalled_reader_does_not_block_shutdown(fast: bool) -> None:
    """A client that stopped reading is cut off after the grace, even in the middle of a shielded send."""
    app = SampleApp()
    async with running(app, fast=fast, graceful_timeout=0.05, write_timeout=LONG) as server:
        client = await server.connect(receive_buffer=4096)
        await client.send(request("/shielded_flood"))
        await app.waiting.wait()
        await trio.testing.wait_all_tasks_blocked(0.01)
        await server.stop()
        assert app.cancelled.is_set()


async def test_stalled_sender_does_not_block_shutdown(fast: bool) -> None:
    """A client that stopped in the middle of its head or body is cut off after the grace."""
    async with running(SampleApp(), fast=fast, graceful_timeout=0.05) as server:
        head, body = await server.connect(), await server.connect()
        await head.send(b"GET / HTTP/1.1\r\nHo")
        await body.send(request("/echo", "POST", Content_Length="10") + b"half")
        await trio.testing.wait_all_tasks_blocked(0.01)
        await server.stop()


async def test_request_already_on_its_way_is_answered() -> None:
    """A request that reached the machine before the shutdown is served, with the connection closed after it."""
    app = SampleApp()
    async with running(app, graceful_timeout=LONG) as server:
        client = await server.connect()
        assert (await client.get("/echo")).status == 200
        client.stream.socket._sock.send(request("/echo"))  # type: ignore[attr-defined]
        server.shutdown.set()
        assert (await client.reply()).status == 200
        assert await client.rest() == b""
        await server.ended.wait()


async def test_listening_socket_is_closed(fast: bool) -> None:
    """After the shutdown, connections are refused."""
    async with running(SampleApp(), fast=fast) as server:
        await server.stop()
        with pytest.raises(OSError, match="refused"):
            await server.connect()


async def test_cancelling_the_server_ends_everything_at_once(fast: bool) -> None:
    """Cancelling the nursery that runs the server closes active and stalled connections without any grace."""
    app = SampleApp()
    async with running(app, fast=fast, graceful_timeout=LONG, write_timeout=LONG) as server:
        waiting, stalled = await server.connect(), await server.connect(receive_buffer=4096)
        await waiting.send(request("/wait"))
        await stalled.send(request("/shielded_flood"))
        await app.waiting.wait()
        await trio.testing.wait_all_tasks_blocked(0.01)
        server.nursery.cancel_scope.cancel()
    assert app.cancelled.is_set()


async def test_lifespan_crash_ends_the_server(fast: bool) -> None:
    """An application whose background work crashes takes the server with it instead of failing every later request."""
    crash = trio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "lifespan"
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await crash.wait()
        raise ValueError("background work failed")

    with ends_with(LifespanCrashed):
        async with running(app, fast=fast):
            crash.set()
            await trio.sleep_forever()


async def test_failed_startup_is_raised_and_opens_no_socket(fast: bool) -> None:
    """An application that cannot start is an error of `serve`, before anything listens."""
    from hypercorn.utils import LifespanFailureError

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no database"})

    with ends_with(LifespanFailureError):
        async with running(app, fast=fast):
            raise AssertionError("it started")


async def test_crash_beside_the_server_ends_it(fast: bool) -> None:
    """The server lives in its caller's nursery: a failure there closes it."""
    with ends_with(ZeroDivisionError):
        async with running(SampleApp(), fast=fast) as server:
            client = await server.connect()
            assert (await client.get("/echo")).status == 200
            raise ZeroDivisionError


async def test_application_without_lifespan_is_served(fast: bool) -> None:
    """An application that refuses the lifespan scope is served without one."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise NotImplementedError(scope["type"])
        await SampleApp().on_echo(scope, receive, send)

    async with running(app, fast=fast) as server:
        assert (await (await server.connect()).get("/")).status == 200
