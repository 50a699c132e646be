"""A client that disconnects: its request is cancelled, the cause is readable, and no other request is affected."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from hermes_trio.http.server import Ending

from .loopback import RawClient, request, running, until
from .sample_app import SampleApp


@pytest.mark.parametrize(
    "way", [RawClient.close, RawClient.half_close, RawClient.reset], ids=["close", "half-close", "reset"]
)
async def test_disconnect_cancels_the_handler(fast: bool, way: Callable[[RawClient], Awaitable[None]]) -> None:
    """Closing, half-closing or resetting the connection cancels the request under way."""
    app = SampleApp()
    async with running(app, fast=fast) as server:
        client = await server.connect()
        await client.send(request("/wait"))
        await app.waiting.wait()
        await way(client)
        await app.cancelled.wait()
        assert app.endings == [Ending.CLIENT_LEFT]
        assert (await (await server.connect()).get("/echo")).status == 200


async def test_disconnect_is_seen_behind_pipelined_bytes() -> None:
    """Unread requests in the kernel's buffer do not hide that the client has gone."""
    app = SampleApp()
    async with running(app) as server:
        client = await server.connect()
        await client.send(request("/wait"))
        await app.waiting.wait()
        await client.send(request("/echo") * 10)
        await client.close()
        await app.cancelled.wait()
        assert app.endings == [Ending.CLIENT_LEFT]


async def test_disconnect_with_an_unfinished_body_cancels_its_reader(fast: bool) -> None:
    """A client that leaves in the middle of its body ends the request; the server goes on."""
    app = SampleApp()
    async with running(app, fast=fast) as server:
        client = await server.connect()
        await client.send(request("/echo", "POST", Content_Length="100") + b"half")
        await until(lambda: app.started == 1)
        await client.close()
        assert (await (await server.connect()).get("/echo")).status == 200


async def test_disconnect_cancels_a_stream(fast: bool) -> None:
    """An event stream whose reader has gone is cancelled even while it has nothing to send."""
    app = SampleApp()
    async with running(app, fast=fast) as server:
        client = await server.connect()
        await client.send(request("/stream"))
        await app.waiting.wait()
        await client.close()
        await app.cancelled.wait()
        assert app.endings == [Ending.CLIENT_LEFT]


async def test_disconnect_ends_a_stream_that_never_pauses() -> None:
    """A handler that only sends, without a checkpoint of its own, does not freeze the server and is cancelled."""
    app = SampleApp()
    async with running(app) as server:
        client = await server.connect()
        await client.send(request("/flood"))
        await app.waiting.wait()
        assert (await (await server.connect()).get("/echo")).status == 200
        await client.close()
        await app.cancelled.wait()


async def test_disconnect_is_delivered_by_receive(fast: bool) -> None:
    """An application that waits for the disconnect message gets it, under a shield too."""
    app = SampleApp()
    async with running(app, fast=fast) as server:
        client = await server.connect()
        await client.send(request("/listen"))
        await app.waiting.wait()
        await client.close()
        await app.cancelled.wait()
        assert app.disconnects == 1


async def test_request_and_half_close_in_one_packet_gets_an_instant_answer() -> None:
    """Half-closing counts as leaving, but an answer that needs no waiting still reaches who asked."""
    app = SampleApp()
    async with running(app) as server:
        client = await server.connect()
        await client.send(request("/echo"))
        await client.half_close()
        assert (await client.rest()).startswith(b"HTTP/1.1 200")
        client = await server.connect()
        await client.send(request("/wait"))
        await client.half_close()
        await app.cancelled.wait()


async def test_leaving_between_requests_cancels_nothing(fast: bool) -> None:
    """A client that has its answer may go; the request that it belonged to was not cancelled."""
    app = SampleApp()
    async with running(app, fast=fast) as server:
        for _ in range(20):
            client = await server.connect()
            assert (await client.get("/echo")).status == 200
            await client.close()
        assert app.endings == []
        assert app.started == 20


async def test_many_departures_at_once() -> None:
    """Every one of many abandoned requests is cancelled."""
    app = SampleApp()
    async with running(app) as server:
        clients = [await server.connect() for _ in range(100)]
        for client in clients:
            await client.send(request("/wait"))
        await until(lambda: app.started == 100)
        for client in clients:
            await client.close()
        await until(lambda: len(app.endings) == 100)
        assert set(app.endings) == {Ending.CLIENT_LEFT}


async def test_connection_of_a_disconnected_client_ends_at_once(fast: bool) -> None:
    """A client that has gone costs neither a task nor a descriptor, however long idle connections may live."""
    async with running(SampleApp(), fast=fast, keep_alive_timeout=3600) as server:
        before = trio.lowlevel.current_statistics().tasks_living
        client = await server.connect()
        assert (await client.get("/echo")).status == 200
        await client.close()
        await until(lambda: trio.lowlevel.current_statistics().tasks_living == before)
