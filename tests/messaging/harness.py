"""A gateway on a store in memory, with platforms in memory, for tests: the real way in and out, on virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import attrs
import trio

from hermes_trio import Agent, RuntimeSettings, Turn
from hermes_trio.agent.approvals import Approvals, Question
from hermes_trio.messaging.contract import Adapter, Incoming, Received
from hermes_trio.messaging.core import ConversationEnd
from hermes_trio.messaging.hub import MessageHub
from hermes_trio.messaging.platforms import Platform
from hermes_trio.messaging.session_keys import Source
from hermes_trio.messaging.settings import OutboxSettings, PlatformSettings
from hermes_trio.runtime.turn import DeliveringTurn
from hermes_trio.store.records import ApprovalChoice
from hermes_trio.testing.fakes import ScriptedAgent, fake_job
from hermes_trio.testing.faults import StoreFaults
from hermes_trio.testing.gateway import GatewayOptions, OpenTestGateway, memory_store, open_test_gateway
from hermes_trio.testing.memory_platform import MemoryPlatform
from tests import node_mode

OPEN = PlatformSettings(allow_all=True)

World = OpenTestGateway


@asynccontextmanager
async def open_world(
    agent: Agent,
    *platforms: Adapter | Platform,
    settings: PlatformSettings = OPEN,
    path: Path | None = None,
    runtime_settings: RuntimeSettings | None = None,
    outbox: OutboxSettings | None = None,
    approval_seconds: float = 60,
    seed: int = 1,
    clock: Callable[[], float] | None = None,
    ends: Callable[[Approvals], ConversationEnd] | None = None,
    faults: StoreFaults | None = None,
) -> AsyncIterator[World]:
    """A running gateway for the body of the `async with`. `ends` makes what is called when a conversation starts anew.

    While `node_mode.NODES` is more than one it is so many runtimes on one store, and what the platforms bring goes to one after the other. The world shows
    the first of them.
    """
    configured = [one if isinstance(one, Platform) else Platform(one, settings) for one in platforms]
    async with AsyncExitStack() as stack:
        stores = node_mode.open_stores(memory_store(path, clock), lease_seconds=node_mode.LEASE)
        opened = await stack.enter_async_context(stores)
        worlds: list[World] = []
        for number, one in enumerate(opened):
            options = GatewayOptions(
                runtime=runtime_settings or RuntimeSettings(watchdog_seconds=0),
                outbox=outbox or OutboxSettings(look_seconds=86_400),
                approval_seconds=approval_seconds,
                seed=seed + number,
                clock=clock,
                ends=ends,
            )
            store = one if faults is None else faults.around(one)
            world = await stack.enter_async_context(open_test_gateway(agent, *configured, store=store, options=options))
            worlds.append(attrs.evolve(world, nodes=worlds))
        if len(worlds) > 1:
            for platform in configured:
                platform.adapter.gateway = RotatingHub([world.hub for world in worlds])
        yield worlds[0]


class RotatingHub:
    """Takes in what a platform brings, on one node after the other, as if the adapter of that node had brought it (with `adapters`, one for each)."""

    def __init__(self, hubs: Sequence[MessageHub], adapters: Sequence[Adapter] = ()) -> None:
        self.turns = cycle(zip(hubs, adapters or [None] * len(hubs), strict=True))
        self.get_cursor = hubs[0].get_cursor
        self.set_cursor = hubs[0].set_cursor

    async def receive(self, adapter: Adapter, incoming: Incoming) -> Received:
        """See `HubPort`."""
        hub, own = next(self.turns)
        return await hub.receive(own or adapter, incoming)

    async def approval_clicked(self, adapter: Adapter, source: Source, approval_id: str, choice: ApprovalChoice) -> str:
        """See `HubPort`."""
        hub, own = next(self.turns)
        return await hub.approval_clicked(own or adapter, source, approval_id, choice)


def starts_job(seconds: float = 10, text: str = "done", answer: str = "started") -> Callable[[Turn], Awaitable[str]]:
    """An agent step that starts a watched job and answers."""

    async def step(turn: Turn) -> str:
        assert isinstance(turn, DeliveringTurn)
        await turn.core.supervisor.start_watched(fake_job(seconds, text), turn.owner, turn.channel)
        return answer

    return step


def works(seconds: float, answer: str = "worked") -> Callable[[Turn], Awaitable[str]]:
    """An agent step that takes some time."""

    async def step(turn: Turn) -> str:
        await trio.sleep(seconds)
        return answer

    return step


def asks(world: Callable[[], World], command: str = "rm -rf x") -> Callable[[Turn], Awaitable[str]]:
    """An agent step that asks for an approval and answers with what came of it."""

    async def step(turn: Turn) -> str:
        answer = await world().approvals.ask(turn, Question(shown=command, description="deletes files"))
        return f"{'allowed' if answer.allowed else 'refused'}: {answer.reason}".rstrip(": ")

    return step


def scripted(*steps: Any) -> ScriptedAgent:
    """An agent that plays steps, then echoes."""
    return ScriptedAgent(*steps)


def platforms(*names: str) -> Sequence[MemoryPlatform]:
    """Several platforms."""
    return [MemoryPlatform(name) for name in names]
