"""The whole gateway with the chat platforms in front of it, for tests: real store, real tools, the demo model, real sockets to the fakes.

`open_gateway_with` puts it together in this process; `open_server_with` starts the real server, which can be killed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import attrs
import trio

from hermes_trio import Runtime, RuntimeSettings
from hermes_trio.adapters.assembly import build_chat_platform
from hermes_trio.adapters.discord.adapter import DiscordAdapter
from hermes_trio.agent.approvals import Approvals
from hermes_trio.agent.command_policy import ApprovalSettings
from hermes_trio.agent.loop import ModelAgent
from hermes_trio.messaging.contract import AdapterState
from hermes_trio.messaging.hub import MessageHub
from hermes_trio.messaging.platforms import Platform
from hermes_trio.messaging.settings import OutboxSettings
from hermes_trio.providers.routes import build_routes
from hermes_trio.runtime.turn import Turn
from hermes_trio.store import open_store
from hermes_trio.store.ports import Store
from hermes_trio.testing.gateway import GatewayOptions, OpenTestGateway, eventually, open_test_gateway
from hermes_trio.testing.platforms import FakeDiscord, FakeSlack, FakeTelegram
from hermes_trio.tools.settings import TerminalSettings, ToolSettings
from hermes_trio.tools.toolbox import CommandReview, open_toolbox
from tests import node_mode
from tests.messaging.harness import RotatingHub

from .server_process import KEY, clean_environment

SHARED: Mapping[str, Any] = {"allow_all": True, "thread_sessions_per_user": True}
"""Conversations of their own in threads: in shared ones each text begins with a name, and the demo model would not see its directives."""

Tables = Mapping[str, Mapping[str, Any]]

TIMEOUT = 20.0
"""Seconds for something to arrive on a busy machine."""


class ChatWorld:
    """What a test looks at: the first node, and of what runs the nodes together."""

    def __init__(self, opened: OpenTestGateway) -> None:
        self._opened = opened
        self.nodes = opened.nodes
        self.store = opened.store
        self.hub = opened.hub

    async def connected(self, *platforms: str) -> None:
        """Wait until each of these platforms, or of all, is connected on some node."""
        for name in platforms or tuple(self.hub.runners):
            await eventually(lambda name=name: AdapterState.CONNECTED in self._states(name))

    async def idle(self) -> None:
        """Wait until nothing runs and nothing waits to be sent."""
        await self._opened.idle(jobs=True, seconds=60)

    async def fatal(self, platform: str) -> MessageHub:
        """Wait until a platform has been given up, and return the hub that has done it: the other nodes stand by."""
        await eventually(lambda: AdapterState.FATAL in self._states(platform), seconds=TIMEOUT)
        return next(one.hub for one in self.nodes if one.hub.runners[platform].state is AdapterState.FATAL)

    def _states(self, platform: str) -> set[AdapterState]:
        return {node.hub.runners[platform].state for node in self.nodes}

    async def running(self, kind: str) -> None:
        """Wait until something of this kind is in a tree."""
        await eventually(lambda: self.holds(kind), seconds=TIMEOUT)

    def holds(self, kind: str) -> bool:
        """Whether something of this kind is in a tree."""
        return any(one.kind == kind for node in self.nodes for one in node.runtime.tree.root.walk())

    @property
    def jobs(self) -> int:
        """Background jobs that run."""
        return sum(node.jobs for node in self.nodes)


def platforms_of(tables: Tables) -> list[Platform]:
    """The adapters of these tables, by the same functions that the product uses."""
    found = [build_chat_platform(name, table, {}) for name, table in tables.items()]
    for platform in found:
        if platform is not None and isinstance(platform.adapter, DiscordAdapter):
            # The fake does not insist on five seconds between two sessions.
            platform.adapter._identify_interval = 0.0
    return [platform for platform in found if platform is not None]


@asynccontextmanager
async def open_gateway_with(
    tables: Tables,
    database: Path | None = None,
    *,
    approval_seconds: float = 60.0,
    settings: RuntimeSettings | None = None,
    directory: Path | None = None,
    processes: int = 256,
) -> AsyncIterator[ChatWorld]:
    """The gateway for the body of the `async with`.

    While `node_mode.NODES` is more than one it is so many gateways on one store, one of which is connected to each platform; what that brings goes to one
    gateway after the other.
    """
    tools = ToolSettings(terminal=TerminalSettings(cwd=str(directory or ""), kill_grace=0.3, max_processes=processes))
    async with AsyncExitStack() as stack:
        made: list[list[Platform]] = []
        opened: list[OpenTestGateway] = []
        for store in await stack.enter_async_context(node_mode.open_stores(open_store(database))):
            made.append(platforms_of(tables))
            node = _open_node(made[-1], store, tools, approval_seconds, settings)
            opened.append(attrs.evolve(await stack.enter_async_context(node), nodes=opened))
        if len(opened) > 1:
            for same in zip(*made, strict=True):
                adapters = [platform.adapter for platform in same]
                for adapter in adapters:
                    adapter.gateway = RotatingHub([node.hub for node in opened], adapters)
        yield ChatWorld(opened[0])


@asynccontextmanager
async def _open_node(
    platforms: Sequence[Platform],
    store: Any,
    tools: ToolSettings,
    approval_seconds: float,
    settings: RuntimeSettings | None,
) -> AsyncIterator[OpenTestGateway]:
    routes = build_routes()
    brokers: list[Approvals] = []

    @asynccontextmanager
    async def assemble(runtime: Runtime) -> AsyncIterator[None]:
        store = cast("Store", runtime.store)
        brokers.append(Approvals(store, seconds=approval_seconds))
        async with (
            routes,
            open_toolbox(
                runtime,
                tools,
                review=CommandReview(approvals=brokers[0], settings=ApprovalSettings(timeout=approval_seconds)),
            ) as box,
        ):
            runtime.core.agent = ModelAgent(routes, box, history=store, directives=lambda turn: True)
            yield

    options = GatewayOptions(
        outbox=OutboxSettings(first_delay=0.05, longest_delay=0.5, flush_seconds=2.0),
        runtime=settings or RuntimeSettings(watchdog_seconds=0),
        approvals=lambda: brokers[0],
    )
    async with open_test_gateway(_nobody, *platforms, store=store, stages=[assemble], options=options) as opened:
        yield opened


async def _nobody(turn: Turn) -> str:
    raise AssertionError("the agent is put in place before any turn")


def telegram_table(fake: FakeTelegram, **more: Any) -> dict[str, Any]:
    """`[telegram]` for a fake."""
    return {"token": fake.token, "base_url": fake.base_url, "poll_seconds": 10, **SHARED, **more}


def discord_table(fake: FakeDiscord, **more: Any) -> dict[str, Any]:
    """`[discord]` for a fake."""
    return {"token": fake.token, "base_url": fake.base_url, **SHARED, **more}


def slack_table(fake: FakeSlack, **more: Any) -> dict[str, Any]:
    """`[slack]` for a fake."""
    return {
        "token": fake.token,
        "app_token": fake.app_token,
        "base_url": fake.base_url,
        **SHARED,
        **more,
    }


# -- as a process ----------------------------------------------------------------------------------------------------------------


@attrs.define
class ServerWithChats:
    """`hermes-trio serve` in a process of its own."""

    process: trio.Process

    async def kill(self) -> None:
        """What a crash or the kernel would do."""
        self.process.kill()
        await self.process.wait()

    async def stop(self) -> int:
        """Ask it to end, and wait for it."""
        self.process.terminate()
        with trio.fail_after(TIMEOUT):
            return await self.process.wait()


@asynccontextmanager
async def open_server_with(tables: Tables, home: Path, *, port: int = 0) -> AsyncIterator[ServerWithChats]:
    """The real server with these platforms, listening; it has ended after the body."""
    lines = [f"[agent]\ndemo_directives = {json.dumps(list(tables))}\n"]
    for name, table in tables.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    (home / "config.toml").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "hermes_trio", "serve", "--port", str(port)]
    environment = clean_environment(home, API_SERVER_KEY=KEY)
    process = await trio.lowlevel.open_process(command, stdout=-1, stderr=-2, env=environment)
    try:
        async with trio.open_nursery() as nursery:
            listening = trio.Event()
            said: list[bytes] = []

            async def read() -> None:
                assert process.stdout is not None
                while data := await process.stdout.receive_some():
                    said.append(bytes(data))
                    if b"listens on" in b"".join(said):
                        listening.set()
                listening.set()

            nursery.start_soon(read)
            with trio.fail_after(2 * TIMEOUT):
                await listening.wait()
            assert process.poll() is None, b"".join(said).decode()
            yield ServerWithChats(process)
            nursery.cancel_scope.cancel()
    finally:
        if process.poll() is None:
            process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            assert process.stdout is not None
            await process.stdout.aclose()
