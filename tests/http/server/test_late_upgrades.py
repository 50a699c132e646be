"""Connections that turn out to be Hypercorn's, when the server already stops."""

from __future__ import annotations

import trio
import trio.testing
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, CloseConnection, Request

from .loopback import RawClient, RunningServer, running
from .sample_app import SampleApp

LONG = 3600.0


async def stop_in_the_middle(server: RunningServer, client: RawClient, head: bytes) -> None:
    """The shutdown comes between the two halves of a head."""
    await client.send(head[:20])
    await trio.testing.wait_all_tasks_blocked(0.01)
    server.shutdown.set()
    await trio.testing.wait_all_tasks_blocked(0.01)
    await client.send(head[20:])


async def test_websocket_during_the_drain() -> None:
    """A WebSocket that opens now is served within the grace and can be closed; the server ends with it."""
    async with running(SampleApp(), graceful_timeout=LONG) as server:
        client = await server.connect()
        ws = WSConnection(ConnectionType.CLIENT)
        await stop_in_the_middle(server, client, ws.send(Request(host="test", target="/ws")))
        events: list[object] = []
        while not events:
            ws.receive_data(await client.stream.receive_some(65536))
            events.extend(ws.events())
        assert isinstance(events[0], AcceptConnection)
        await client.send(ws.send(CloseConnection(code=1000)))
        await client.rest()
        await server.ended.wait()


async def test_a_websocket_does_not_outlast_the_grace() -> None:
    """One that stays open is cut off when the grace is over."""
    async with running(SampleApp(), graceful_timeout=0.05) as server:
        client = await server.connect()
        ws = WSConnection(ConnectionType.CLIENT)
        await stop_in_the_middle(server, client, ws.send(Request(host="test", target="/ws")))
        await server.ended.wait()
