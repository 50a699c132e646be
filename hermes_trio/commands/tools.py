"""`hermes-trio tools`: lists the agent's tools and their origin. Also the state of the MCP servers, for `doctor`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from cyclopts import Parameter

from hermes_trio.commands.options import CommandFailed, ConfigOption, HomeOption, server_client
from hermes_trio.commands.output import say
from hermes_trio.config import Config, load_config

ASKING_SECONDS: Final = 5.0
DESCRIPTION: Final = 90


async def tools(
    *,
    as_json: Annotated[bool, Parameter(name="--json", help="Print JSON.", negative="")] = False,
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """List all tools with their origin. Connects to the MCP servers; one that cannot be reached is listed with the reason."""
    from hermes_trio.adapters.assembly import AdapterAssembly
    from hermes_trio.gateway.gateway import open_gateway

    settings = load_config(os.environ, home=home, path=config)
    assembly = AdapterAssembly([], environment=settings.environment, home=settings.home)
    found: list[dict[str, str]] = []
    problems: dict[str, str] = {}
    async with open_gateway(settings, assembly, in_memory=True) as gateway:
        box = gateway.toolbox
        found += [
            {"name": one.spec.name, "origin": "built in", "description": one.spec.description}
            for one in box.tools.own()
        ]
        for name, link in box.links.links.items():
            found += [
                {"name": one.spec.name, "origin": f"mcp {name}", "description": one.spec.description}
                for one in link.tools
            ]
            if link.problem:
                problems[name] = link.problem
    if as_json:
        sys.stdout.write(msgspec.json.encode({"tools": found, "problems": problems}).decode() + "\n")
        return
    width = max((len(one["name"]) for one in found), default=0)
    origins = max((len(one["origin"]) for one in found), default=0)
    for one in found:
        first = (one["description"].strip().splitlines() or [""])[0][:DESCRIPTION]
        say(f"{one['name']:{width}}  {one['origin']:{origins}}  {first}")
    for name, problem in problems.items():
        say(f"MCP server {name} cannot be reached: {problem}")


async def mcp_health(config: Config) -> Mapping[str, Mapping[str, Any]]:
    """Return the state of the MCP servers: from the running server of the home directory, else as configured."""
    import httpx2

    from hermes_trio.store.ownership import owner_pid
    from hermes_trio.tools.mcp import McpSettings

    if owner_pid(config.database) is not None:
        try:
            async with server_client(config) as client:
                answer = await client.get("/health/detailed", timeout=ASKING_SECONDS)
            return answer.json()["mcp"]
        except (httpx2.HTTPError, CommandFailed, KeyError, ValueError):
            pass
    servers = McpSettings.read(config.mcp, config.environment).servers
    return {
        name: {"state": "configured" if one.enabled else "disabled", "error": None} for name, one in servers.items()
    }
