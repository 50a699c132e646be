"""Where everything is put together: configuration → models, tools and agent → runtime → front end.

`open_gateway` is the whole product for the body of an `async with`, without a server in front of it. The command line and `hermes_trio.asgi` add one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import attrs
import msgspec

from hermes_trio import __version__
from hermes_trio.agent.approvals import Approvals
from hermes_trio.agent.consent import ConsentSettings
from hermes_trio.agent.loop import ModelAgent
from hermes_trio.agent.models.routes import ModelRoutes, build_routes
from hermes_trio.agent.tool import ToolBox
from hermes_trio.config import Config
from hermes_trio.http.app import make_app
from hermes_trio.http.auth import AdminKey, is_loopback
from hermes_trio.http.context import PLATFORM
from hermes_trio.http.front import FrontEnd, ModelEntry
from hermes_trio.http.server import ASGIApp
from hermes_trio.runtime.core import Settings
from hermes_trio.runtime.ports import Agent
from hermes_trio.runtime.runtime import Runtime
from hermes_trio.runtime.turn import Turn
from hermes_trio.store import Retention, open_store
from hermes_trio.store.port import Store
from hermes_trio.tools.mcp import McpSettings
from hermes_trio.tools.settings import ToolSettings, read_table
from hermes_trio.tools.toolbox import open_toolbox

__all__ = ["Gateway", "build_agent", "open_gateway", "retention_of"]

DAY = 86_400.0


@attrs.frozen(kw_only=True)
class Gateway:
    """A running gateway: what a server needs to serve it."""

    config: Config
    runtime: Runtime
    front: FrontEnd
    app: ASGIApp


def build_agent(config: Config, routes: ModelRoutes, store: Store, toolbox: ToolBox) -> Agent:
    """The agent that answers every turn."""
    local = is_loopback(config.server.host)
    allowed = frozenset(cast("Sequence[str]", config.agent.get("demo_directives", ())))

    def directives(turn: Turn) -> bool:
        # The demo model runs commands for whoever writes to it: only where that is the owner of this machine.
        platform = turn.context.platform
        return platform in allowed or (local and platform == PLATFORM)

    return ModelAgent(routes, toolbox, history=store, directives=directives)


def retention_of(config: Config) -> Retention:
    """The store's retention, in its own units."""
    values: dict[str, float | int | None] = {}
    for name, value in msgspec.structs.asdict(config.retention).items():
        values[name] = value if name.endswith("_count") else (value * DAY or None)
    return Retention(**cast("dict[str, int]", values))


def model_entries(config: Config, routes: ModelRoutes) -> list[ModelEntry]:
    """What `/v1/models` lists: the advertised name, then every route."""
    advertised = config.server.model_name
    entries = [ModelEntry(advertised, advertised)]
    entries += [ModelEntry(name, name, advertised) for name in routes.names if name != advertised]
    return entries


@asynccontextmanager
async def open_gateway(
    config: Config, key: AdminKey, *, agent: Agent | None = None, in_memory: bool = False
) -> AsyncIterator[Gateway]:
    """Open everything for the body of the `async with`; leaving it stops everything in its order.

    `agent` replaces the configured one. With `in_memory` nothing is kept: for tests, and to measure what durability costs.
    """
    config.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    routes = build_routes(config.models, config.environment)
    tools = ToolSettings.read(config.tools)
    consent = read_table(config.approvals, ConsentSettings, "approvals")
    mcp = McpSettings.read(config.mcp, config.environment)
    approvals: list[Approvals] = []

    @asynccontextmanager
    async def assemble(runtime: Runtime) -> AsyncIterator[None]:
        """What needs the store and must outlive every job."""
        store = cast("Store", runtime.store)
        broker = Approvals(store, seconds=consent.timeout)
        approvals.append(broker)
        async with (
            routes,
            open_toolbox(
                runtime, tools, approvals=broker, consent=consent, mcp=mcp, environment=config.environment or None
            ) as toolbox,
        ):
            if agent is None:
                runtime.core.agent = build_agent(config, routes, store, toolbox)
            yield

    runtime = Runtime(
        agent=agent or _unassembled,
        store=open_store(None if in_memory else _database(config), retention=retention_of(config)),
        settings=Settings(max_turns=config.limits.concurrent_turns),
        stages=[assemble],
    )
    async with runtime:
        front = FrontEnd(
            runtime,
            cast("Store", runtime.store),
            admin_key=key.value,
            server=config.server,
            limits=config.limits,
            models=model_entries(config, routes),
            approvals=approvals[0],
            version=__version__,
            home=config.home,
        )
        yield Gateway(config=config, runtime=runtime, front=front, app=make_app(front))


def _database(config: Config) -> Path:
    return config.database


async def _unassembled(turn: Turn) -> str:
    raise AssertionError("the agent is put in place before any turn can start")
