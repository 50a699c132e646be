"""`hermes-trio tree`, `hermes-trio top` and `hermes-trio console`: the live tree of the server that runs in the home directory.

All three find the server's address beside its lock file and call its HTTP API with the admin key.
"""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Final, cast

import httpx2
import msgspec
from cyclopts import Parameter

from hermes_trio.base.terminal import clean
from hermes_trio.commands.options import CommandFailed, ConfigOption, HomeOption, server_client
from hermes_trio.commands.output import say, say_json
from hermes_trio.config import load_config

STUCK_SECONDS: Final = 60.0
"""The age after which an inbox row counts as stuck."""


@asynccontextmanager
async def open_server_client(home: Path | None, config: Path | None) -> AsyncIterator[httpx2.AsyncClient]:
    """Connect to the server of a home directory for the body of the `async with`. Raises `CommandFailed` if none answers."""
    settings = load_config(os.environ, home=home, path=config)
    async with server_client(settings) as client:
        try:
            answer = await client.get("/health")
        except httpx2.HTTPError as error:
            raise CommandFailed(
                f"no server answers at {client.base_url} ({type(error).__name__}); start one with `hermes-trio serve`"
            ) from None
        if answer.status_code != 200:
            raise CommandFailed(f"{client.base_url} answered {answer.status_code}; is another program served there?")
        yield client


async def ask(client: httpx2.AsyncClient, method: str, path: str) -> dict[str, Any]:
    """Return a JSON answer of the server. Raises `CommandFailed` with the server's message for an error."""
    try:
        answer = await client.request(method, path)
    except httpx2.HTTPError as error:
        raise CommandFailed(f"{client.base_url} does not answer: {type(error).__name__}") from None
    decoded = cast("dict[str, Any]", msgspec.json.decode(answer.content))
    if answer.status_code >= 400:
        raise CommandFailed(str(decoded.get("error", {}).get("message", decoded)))
    return decoded


def warning_of(node: dict[str, Any]) -> str:
    """Return what is wrong with a node, in words; empty if nothing is."""
    if node["kind"] == "runtime" and "blocked" in node["note"]:
        return "loop was blocked"
    if node["note"] == "abandoned":
        return "deaf thread"
    if node["deadline"] is not None and node["deadline"] < 0:
        return "past its deadline"
    if str(node["waits_on"]).startswith("approval "):
        return "waits for a person"
    if node["kind"] == "lane" and node["note"] and node["since"] > STUCK_SECONDS:
        return "inbox does not move"
    return ""


def duration(seconds: float) -> str:
    """Format a duration in at most six characters."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} m {seconds % 60:02.0f}"
    if seconds < 86_400:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f}"
    return f"{seconds // 86_400:.0f} d {seconds % 86_400 // 3600:02.0f}"


def plain_lines(tree: dict[str, Any]) -> list[str]:
    """Return the tree as indented text."""
    lines: list[str] = []
    pending = [(tree, 0)]
    while pending:
        node, depth = pending.pop()
        name = clean(node["name"])
        parts = [f"{node['kind']} {clean(node['id'])}" if node["id"] != node["kind"] else node["kind"]]
        parts += [name] if name else []
        parts.append(f"age {duration(node['age'])}")
        if node["deadline"] is not None:
            left = node["deadline"]
            parts.append(f"deadline in {duration(left)}" if left >= 0 else f"{duration(-left)} over its deadline")
        parts += [f"waits on {clean(node['waits_on'])}"] if node["waits_on"] else []
        parts += [clean(node["note"])] if node["note"] else []
        warning = warning_of(node)
        parts += [f"! {warning}"] if warning else []
        lines.append("  " * depth + " · ".join(parts))
        pending.extend((child, depth + 1) for child in reversed(node["children"]))
    return lines


def other_lines(other: dict[str, Any]) -> list[str]:
    """Return the tree of another node as indented text below its name, or that it does not answer."""
    title = f"node {clean(other['node'])} {other['incarnation'][:8]}"
    if other["tree"] is None:
        return ["", f"{title} · ! does not answer"]
    lines = plain_lines(other["tree"])
    left = other["size"] - len(lines)
    return ["", title, *lines, *([f"… and {left} more"] if left else [])]


async def tree(
    *,
    json: Annotated[bool, Parameter(help="Print the tree as JSON.", negative="")] = False,
    session: Annotated[str | None, Parameter(help="Only nodes of this session, by its key or id.")] = None,
    node: Annotated[str | None, Parameter(help="Only this node of the store, by its name or incarnation.")] = None,
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """Print the live tree of the running server once, and those of the other nodes that share its store."""
    from urllib.parse import urlencode

    wanted = urlencode({name: value for name, value in (("session", session), ("node", node)) if value})
    async with open_server_client(home, config) as client:
        found = await ask(client, "GET", "/v1/tree" + (f"?{wanted}" if wanted else ""))
    if json:
        say_json(found)
    else:
        others = [line for other in found.get("others", ()) for line in other_lines(other)]
        say("\n".join([*plain_lines(found["tree"]), *others]))


async def top(
    *,
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """Watch the live tree in the terminal: sort, filter, and stop tasks. Press `q` to quit."""
    from hermes_trio.commands.top import run_top

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise CommandFailed("`hermes-trio top` needs a terminal; `hermes-trio tree` prints the tree once")
    async with open_server_client(home, config) as client:
        await run_top(client)


async def console(
    *,
    browser: Annotated[bool, Parameter(help="Open the browser. --no-browser prints the link only.")] = True,
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """Open the console in the browser, signed in by a link that works once, within ten minutes."""
    async with open_server_client(home, config) as client:
        made = await ask(client, "POST", "/v1/console/code")
        link = f"{str(client.base_url).rstrip('/')}{made['path']}"
    say(link)
    if browser and sys.stdout.isatty() and not webbrowser.open(link):
        say("No browser could be opened here: open the link yourself.")
