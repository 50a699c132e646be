"""The pitfalls of stock Hypercorn, Quart and Quart-Trio, each on a real server, on both paths where both are concerned."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from typing import Any, cast

import hypercorn.trio
import pytest
import trio
from hypercorn.trio.tcp_server import TCPServer
from quart import Response, request, websocket

from hermes_trio.http.server import ASGIApp, FixedQuartTrio, LifespanCrashed, bound_stock_sends, unbounded

from .loopback import BOUND, RawClient, ends_with, quiet_config, running
from .loopback import request as raw_request
from .sample_app import SampleApp

SOON = 0.08
LONG = 3600.0


def quart_app() -> tuple[FixedQuartTrio, SampleApp]:
    """A Quart application with the routes that the pitfalls need; the second value records what happened."""
    app = FixedQuartTrio("sample")
    app.config["MAX_CONTENT_LENGTH"] = 10_000
    record = SampleApp()

    @app.post("/echo")
    async def echo() -> Response:
        return Response(await request.get_data())

    @app.get("/hello")
    async def hello() -> str:
        return "hello"

    @app.post("/refuse")
    async def refuse() -> tuple[str, int]:
        return "no", 401

    @app.post("/sum")
    async def total() -> str:
        size = 0
        async for part in request.body:
            size += len(part)
        return str(size)

    @app.get("/wait")
    async def wait() -> str:
        record.waiting.set()
        try:
            await record.finish.wait()
        except trio.Cancelled:
            record.cancelled.set()
            raise
        return "waited"

    @app.get("/stream")
    async def stream() -> Response:
        async def parts() -> AsyncGenerator[bytes]:
            yield b"first"
            await record.finish.wait()
            yield b"last"

        return Response(parts())

    @app.get("/slow_known_length")
    async def slow_known_length() -> Response:
        async def parts() -> AsyncGenerator[bytes]:
            yield b"first"
            await record.finish.wait()
            yield b"last"

        response = Response(parts(), headers={"content-length": "9"})
        return unbounded(response) if request.args else response

    @app.websocket("/flood")
    async def flood() -> None:
        record.waiting.set()
        try:
            while True:
                await websocket.send("x")
        except trio.Cancelled:
            record.cancelled.set()
            raise

    return app, record


def as_asgi(app: FixedQuartTrio) -> ASGIApp:
    return cast("ASGIApp", app)


async def test_keep_alive_timeout_fires_after_a_request(fast: bool) -> None:
    """An idle keep-alive client of a Quart application is closed, however many requests it made before."""
    app, _ = quart_app()
    async with running(as_asgi(app), fast=fast, keep_alive_timeout=SOON) as server:
        client = await server.connect()
        for _ in range(3):
            assert (await client.get("/hello")).body == b"hello"
        assert await client.rest() == b""


async def test_idle_client_does_not_hold_up_the_shutdown(fast: bool) -> None:
    """One idle keep-alive client that made a request does not make the shutdown last its whole grace."""
    app, _ = quart_app()
    async with running(as_asgi(app), fast=fast, graceful_timeout=LONG) as server:
        client = await server.connect()
        assert (await client.get("/hello")).body == b"hello"
        await trio.testing.wait_all_tasks_blocked(0.01)
        await server.stop()


@pytest.mark.parametrize("size", [10, 100_000, 900_000])
async def test_early_answer_leaves_the_connection_usable(fast: bool, size: int) -> None:
    """An answer before the body has arrived does not lose the next request on that connection."""
    app, _ = quart_app()
    for sample in (as_asgi(app), SampleApp()):
        async with running(sample, fast=fast) as server:
            client = await server.connect()
            await client.send(raw_request("/refuse", "POST", Content_Length=str(size)))
            await trio.testing.wait_all_tasks_blocked(0.01)
            await client.send(b"x" * size + raw_request("/hello"))
            assert (await client.reply()).status == 401
            assert (await client.reply()).status in {200, 404}


async def test_early_answer_in_parts_leaves_the_connection_usable(fast: bool) -> None:
    """The same when the answer came in several messages and the body in chunks."""
    async with running(SampleApp(), fast=fast) as server:
        client = await server.connect()
        await client.send(
            b"POST /refuse_in_parts HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"
        )
        assert (await client.reply()).status == 413
        await client.send(b"5\r\nworld\r\n" * 30 + b"0\r\n\r\n" + raw_request("/echo"))
        assert (await client.reply()).status == 200


async def test_early_answer_to_an_endless_body_closes(fast: bool) -> None:
    """A body longer than what is worth draining costs its connection, not the server's memory or a stuck task."""
    app, _ = quart_app()
    for sample in (as_asgi(app), SampleApp()):
        async with running(sample, fast=fast, drain_bytes=100_000, drain_timeout=SOON) as server:
            client = await server.connect()
            await client.send(raw_request("/refuse", "POST", Content_Length="1000000000000"))
            reply = await client.reply()
            assert (reply.status, reply.headers["connection"]) == (401, "close")

            async def send_for_ever(client: RawClient = client) -> None:
                while True:
                    await client.send(b"x" * 1_000_000)

            with pytest.raises(trio.BrokenResourceError):
                await send_for_ever()
            assert (await (await server.connect()).get("/hello")).status in {200, 404}


async def test_early_answer_to_a_body_that_never_comes_is_bounded(fast: bool) -> None:
    """A client that announces a body and sends nothing gets its answer at once and its connection closed soon."""
    async with running(SampleApp(), fast=fast, drain_timeout=SOON, linger_timeout=SOON) as server:
        client = await server.connect()
        await client.send(raw_request("/refuse", "POST", Content_Length="10"))
        assert (await client.reply()).status == 401
        assert await client.rest() == b""


async def test_disconnect_cancels_a_quart_handler(fast: bool) -> None:
    """A Quart request whose client leaves is cancelled."""
    app, record = quart_app()
    async with running(as_asgi(app), fast=fast) as server:
        client = await server.connect()
        await client.send(raw_request("/wait"))
        await record.waiting.wait()
        await client.close()
        await record.cancelled.wait()


async def test_websocket_send_loop_does_not_freeze_the_process(fast: bool) -> None:
    """A loop that sends to a WebSocket whose peer has gone is cancelled, and others are served meanwhile."""
    app, record = quart_app()
    async with running(as_asgi(app), fast=fast, write_timeout=SOON) as server:
        client = await server.connect()
        await client.send(WEBSOCKET_REQUEST)
        assert (await client.head()).status == 101
        await record.waiting.wait()
        await client.reset()
        await record.cancelled.wait()
        assert (await (await server.connect()).get("/hello")).status == 200


WEBSOCKET_REQUEST = raw_request(
    "/flood",
    Connection="Upgrade",
    Upgrade="websocket",
    Sec_WebSocket_Version="13",
    Sec_WebSocket_Key="dGhlIHNhbXBsZSBub25jZQ==",
)


async def test_streams_outlive_the_response_timeout(fast: bool) -> None:
    """Quart's response timeout does not cut a stream off."""
    app, record = quart_app()
    app.config["RESPONSE_TIMEOUT"] = SOON
    async with running(as_asgi(app), fast=fast, keep_alive_timeout=SOON * 2) as server:
        client = await server.connect()
        await client.send(raw_request("/stream"))
        await client.head()
        assert await client.chunk() == b"first"
        assert await (await server.connect()).rest() == b""
        record.finish.set()
        assert await client.chunk() == b"last"
        assert await client.chunk() == b""


async def test_response_timeout_holds_for_other_responses_unless_lifted(fast: bool) -> None:
    """A response of known length keeps its timeout, and `unbounded` lifts it."""
    app, record = quart_app()
    app.config["RESPONSE_TIMEOUT"] = SOON
    async with running(as_asgi(app), fast=fast) as server:
        cut, lifted = await server.connect(), await server.connect()
        await cut.send(raw_request("/slow_known_length"))
        await lifted.send(raw_request("/slow_known_length?lifted=1"))
        assert (await cut.rest()).endswith(b"first")
        record.finish.set()
        assert (await lifted.reply()).body == b"firstlast"


@pytest.mark.parametrize("path", ["/echo", "/sum"])
async def test_body_limit_holds_for_the_sum_of_chunks(fast: bool, path: str) -> None:
    """A chunked body above the limit is refused, also by a handler that reads it part by part."""
    app, _ = quart_app()
    async with running(as_asgi(app), fast=fast) as server:
        client = await server.connect()
        await client.send(raw_request(path, "POST", Transfer_Encoding="chunked"))
        for _ in range(12):
            await client.send(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
            await trio.testing.wait_all_tasks_blocked()
        await client.send(b"0\r\n\r\n")
        assert (await client.reply()).status == 413
        assert (await client.get("/hello")).status == 200


async def test_crash_in_the_application_nursery_ends_the_server(fast: bool) -> None:
    """A crash in Quart-Trio's `app.nursery` is not survived by a server that answers 500 to everything."""
    app, _ = quart_app()

    async def crash() -> None:
        raise ValueError("background")

    with ends_with(LifespanCrashed):
        async with running(as_asgi(app), fast=fast) as server:
            assert (await (await server.connect()).get("/hello")).status == 200
            app.nursery.start_soon(crash)
            await trio.sleep_forever()


async def test_stock_server_with_bounded_sends_shuts_down_past_a_stalled_reader() -> None:
    """Under plain Hypercorn the patched send lets go of a reader that stopped, so the shutdown ends."""
    undo = bound_stock_sends(SOON)
    shutdown = trio.Event()
    app = SampleApp()
    config = quiet_config(graceful_timeout=SOON).hypercorn
    try:
        with trio.fail_after(BOUND):
            async with trio.open_nursery() as nursery:
                start = partial(hypercorn.trio.serve, cast("Any", app), config, shutdown_trigger=shutdown.wait)
                (address,) = cast("list[str]", await nursery.start(start))
                stream = await trio.open_tcp_stream("127.0.0.1", int(address.rsplit(":", 1)[1]))
                async with stream:
                    await RawClient(stream).send(raw_request("/shielded_flood"))
                    await app.waiting.wait()
                    shutdown.set()
                    await app.cancelled.wait()
    finally:
        undo()
    assert TCPServer.protocol_send.__qualname__ == "TCPServer.protocol_send"


async def test_fixed_quart_works_under_plain_hypercorn() -> None:
    """The fixes are in the application class too: keep-alive and early answers work without our server."""
    app, _ = quart_app()
    shutdown = trio.Event()
    config = quiet_config(keep_alive_timeout=SOON).hypercorn
    with trio.fail_after(BOUND):
        async with trio.open_nursery() as nursery:
            start = partial(hypercorn.trio.serve, cast("Any", app), config, shutdown_trigger=shutdown.wait)
            (address,) = cast("list[str]", await nursery.start(start))
            async with await trio.open_tcp_stream("127.0.0.1", int(address.rsplit(":", 1)[1])) as stream:
                client = RawClient(stream)
                await client.send(raw_request("/refuse", "POST", Content_Length="10"))
                await trio.testing.wait_all_tasks_blocked(0.01)
                await client.send(b"x" * 10 + raw_request("/hello"))
                assert (await client.reply()).status == 401
                assert (await client.reply()).body == b"hello"
                assert await client.rest() == b""
            shutdown.set()
