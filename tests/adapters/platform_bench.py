"""One chat adapter in a gateway, and a place for the requests that its platform makes to it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import attrs
import trio

from hermes_trio import Agent
from hermes_trio.messaging.callbacks import CallbackEndpoint
from hermes_trio.messaging.contract import Adapter, Disposition, Incoming, Received
from hermes_trio.messaging.platforms import Platform
from hermes_trio.messaging.settings import OutboxSettings
from hermes_trio.store import Runner, open_store
from hermes_trio.testing.gateway import GatewayOptions, open_test_gateway
from hermes_trio.testing.platforms.server import FakeReply, FakeRequest, LoopbackServer, open_loopback_server
from tests import node_mode
from tests.messaging.harness import RotatingHub, World, scripted

QUICK = OutboxSettings(first_delay=0.02, longest_delay=0.1, flush_seconds=1.0)


@asynccontextmanager
async def open_bench(platform: Platform, agent: Agent | None = None) -> AsyncIterator[World]:
    """A gateway that is connected to one platform, in real time, for the body of the `async with`.

    While `node_mode.NODES` is more than one it is so many gateways on one store, each with an adapter of its own, of which the first is connected; what it
    brings goes to one gateway after the other.
    """
    platforms = [platform, *(deepcopy(platform) for _ in range(node_mode.NODES - 1))]
    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(node_mode.open_stores(open_store(None, runner=Runner.INLINE)))
        worlds: list[World] = []
        for own, store in zip(platforms, opened, strict=True):
            options = GatewayOptions(outbox=QUICK)
            world = await stack.enter_async_context(
                open_test_gateway(agent or scripted(), own, store=store, options=options)
            )
            if own is platform:
                await world.connected(platform.name)
            worlds.append(attrs.evolve(world, nodes=worlds))
        if len(worlds) > 1:
            platform.adapter.gateway = RotatingHub([world.hub for world in worlds], [one.adapter for one in platforms])
        yield worlds[0]


@asynccontextmanager
async def open_mount(endpoint: CallbackEndpoint) -> AsyncIterator[LoopbackServer]:
    """A server that brings requests to an adapter, as the product's own server does."""

    async def answer(request: FakeRequest) -> FakeReply:
        if request.path != endpoint.endpoint:
            return FakeReply(404)
        status, headers, body = await endpoint.handle(
            request.method, request.path, request.headers.items(), request.body
        )
        return FakeReply(status, body, dict(headers))

    async with open_loopback_server(answer) as server:
        yield server


class Gate:
    """A `GatewayPort` that keeps what comes in, and returns only when the test says so."""

    def __init__(self) -> None:
        self.received: list[Incoming] = []
        self.opened = trio.Event()
        self.arrived = trio.Event()

    async def receive(self, adapter: Adapter, incoming: Incoming) -> Received:
        self.received.append(incoming)
        self.arrived.set()
        await self.opened.wait()
        return Received(disposition=Disposition.ACCEPTED)

    async def approval_clicked(self, adapter: Adapter, source: Any, approval_id: str, choice: Any) -> str:
        return ""

    async def get_cursor(self, adapter: Adapter) -> str | None:
        return None

    async def set_cursor(self, adapter: Adapter, value: str) -> None:
        return None


def tables_of(page: str) -> list[dict[str, Any]]:
    """The configuration files that a page of the documentation shows, as tables."""
    text = (Path(__file__).parents[2] / "docs" / "adapters" / page).read_text(encoding="utf-8")
    return [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL)]
