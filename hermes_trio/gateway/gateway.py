"""The gateway without a server: a runtime with the configured models, tools and adapters. `serve`, `chat` and `run` are built on it.

Stages are entered in the order of the tree: models and tools first, the senders inside them; the adapters are opened when the runtime runs.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import msgspec

from hermes_trio.adapters.assembly import AdapterAssembly, OpenAdapters
from hermes_trio.adapters.web.adapter import WebAdapter
from hermes_trio.agent.approvals import Approvals
from hermes_trio.agent.command_policy import ApprovalSettings, ModelReviewer
from hermes_trio.agent.loop import AgentSettings, ModelAgent
from hermes_trio.agent.tool import Tool, ToolSource
from hermes_trio.base.settings import read_settings
from hermes_trio.config import Config
from hermes_trio.http.auth import is_loopback
from hermes_trio.http.turns import PLATFORM
from hermes_trio.plugins import load_tools
from hermes_trio.providers.routes import ModelRoutes, build_routes
from hermes_trio.runtime.core import RuntimeSettings
from hermes_trio.runtime.ports import Agent
from hermes_trio.runtime.runtime import Runtime
from hermes_trio.runtime.turn import Turn
from hermes_trio.store.backend import address_login_files, open_backend
from hermes_trio.store.ports import Store
from hermes_trio.tools.confinement import open_confinement
from hermes_trio.tools.mcp import McpSettings
from hermes_trio.tools.settings import ToolSettings
from hermes_trio.tools.toolbox import NAMES, CommandReview, Toolbox, open_toolbox
from hermes_trio.tracing.stage import configured_tracing

from .fingerprint import configuration_fingerprint


class Gateway(msgspec.Struct, frozen=True, kw_only=True):
    """The open gateway: the runtime and its parts."""

    config: Config
    runtime: Runtime
    store: Store
    approvals: Approvals
    toolbox: Toolbox
    adapters: OpenAdapters
    routes: ModelRoutes


def build_agent(config: Config, routes: ModelRoutes, store: Store, toolbox: ToolSource) -> Agent:
    """Return the agent that answers every turn."""
    local = is_loopback(config.server.host)
    settings = agent_settings(config)
    allowed = frozenset(settings.demo_directives)

    def directives(turn: Turn) -> bool:
        # The demo model runs commands of every sender, so only where each sender is the owner of this machine.
        platform = turn.context.platform
        return platform in allowed or (local and platform in (PLATFORM, WebAdapter.platform))

    return ModelAgent(routes, toolbox, settings=settings, history=store, directives=directives)


def agent_settings(config: Config) -> AgentSettings:
    """Read `[agent]` of the configuration. Raises `SettingsError` for a wrong key."""
    return read_settings(config.agent, AgentSettings, "agent")


@asynccontextmanager
async def open_gateway(
    config: Config,
    assembly: AdapterAssembly,
    *,
    agent: Agent | None = None,
    database: Path | None = None,
    in_memory: bool = False,
    store: AbstractAsyncContextManager[Store] | None = None,
    directives: tuple[str, ...] = (),
    resume_runs: bool = False,
) -> AsyncIterator[Gateway]:
    """Open the gateway for the body of the `async with`. Leaving it stops everything in order.

    `agent` replaces the configured agent, `database` the configured place, `store` opens another store; with `in_memory` nothing is stored on disk.
    The demo model also obeys its directives on the platforms in `directives`. A gateway that serves the API begins interrupted runs again (`resume_runs`); one
    for a conversation in the terminal leaves them to it.
    """
    config.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directives:
        allowed = [*agent_settings(config).demo_directives, *directives]
        table: Mapping[str, Any] = {**config.agent, "demo_directives": allowed}
        config = msgspec.structs.replace(config, agent=dict(table))
    routes = build_routes(config.models, config.environment)
    tools = ToolSettings.read(config.tools)
    approval_settings = read_settings(config.approvals, ApprovalSettings, "approvals")
    mcp = McpSettings.read(config.mcp, config.environment)
    environment = config.environment or os.environ
    secrets, sockets = address_login_files(config.store.url, environment) if config.store.url else ([], [])
    confinement = open_confinement(
        tools, environment, home=config.home, config=config.path, secrets=secrets, sockets=sockets
    )
    tracing = [configured_tracing(config.tracing)] if config.tracing.enabled else []
    extensions: list[Tool] = load_tools(config.plugins.tools, Tool, taken=set(NAMES) - set(tools.disabled))
    brokers: list[Approvals] = []
    boxes: list[Toolbox] = []

    @asynccontextmanager
    async def assemble(runtime: Runtime) -> AsyncIterator[None]:
        store = cast("Store", runtime.store)
        runtime.membership.configuration = configuration_fingerprint(config, store.secret)
        broker = Approvals(store, seconds=approval_settings.timeout)
        brokers.append(broker)
        async with (
            confinement.folders.swept(sha256(store.secret).hexdigest()[:32], store.get_session),
            routes,
            open_toolbox(
                runtime,
                tools,
                review=CommandReview(
                    approvals=broker,
                    settings=approval_settings,
                    reviewer=ModelReviewer(routes.get),
                    gateway_home=str(config.home),
                ),
                mcp=mcp,
                environment=config.environment or None,
                confinement=confinement,
                more=extensions,
            ) as toolbox,
        ):
            boxes.append(toolbox)
            if agent is None:
                runtime.core.agent = build_agent(config, routes, store, toolbox)
            yield

    opened = store
    if opened is None:
        opened = open_backend(
            None if in_memory else database or config.place,
            retention=config.retention,
            node_name=config.store.node_name,
            lease_seconds=config.store.lease_seconds,
        )
    runtime = Runtime(
        agent=agent or _unassembled,
        store=opened,
        settings=RuntimeSettings(max_turns=config.limits.concurrent_turns, resume_runs=resume_runs),
        stages=[*tracing, assemble, assembly.stage],
    )
    async with runtime, assembly.open(runtime, brokers[0], ends=boxes[0].end_conversation) as adapters:
        yield Gateway(
            config=config,
            runtime=runtime,
            store=cast("Store", runtime.store),
            approvals=brokers[0],
            toolbox=boxes[0],
            adapters=adapters,
            routes=routes,
        )


async def _unassembled(turn: Turn) -> str:
    raise AssertionError("the agent is put in place before any turn can start")
