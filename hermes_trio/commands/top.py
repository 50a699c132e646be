"""The screen of `hermes-trio top`: the live tree, with sort, filter and stop, on the terminal's alternate screen.

One task reads the server's events, one the keyboard, one draws. The terminal is restored however it ends.
"""

from __future__ import annotations

import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import httpx2
import msgspec
import trio
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hermes_trio.base.terminal import clean
from hermes_trio.net.sse import EventReader

from .tree import duration, warning_of

FRAME_SECONDS: Final = 0.25
ARMED_SECONDS: Final = 4.0
RETRY_SECONDS: Final = 1.0
MOST_LINES: Final = 8
"""Lines for the nodes that share the store."""

COLOURS: Final = {
    "turn": "bold",
    "model": "magenta",
    "tool": "cyan",
    "process": "green",
    "delegation": "bright_magenta",
    "thread": "yellow",
}
SORTS: Final = ("tree", "age", "deadline", "kind")
HELP: Final = "q leave · j k move · x x stop · s sort · / filter · w next warning"
MORE_HELP: Final = " · n next node"


class TreeCopy:
    """A copy of the tree of one node: a snapshot, then differences. `cluster` lists the nodes of the store, if there are several.

    `node` is the incarnation of the node whose tree it is; keys mean nothing on another.
    """

    def __init__(self) -> None:
        self.node = ""
        self.nodes: dict[int, dict[str, Any]] = {}
        self.cluster: list[dict[str, Any]] = []
        self.root = 0

    def apply(self, name: str, data: dict[str, Any], now: float) -> None:
        """Apply an event of `GET /v1/tree/events`."""
        if name == "snapshot":
            self.nodes.clear()
            self.node = data["node"]
            self.root = data["tree"]["key"]
            pending: list[tuple[dict[str, Any], int | None]] = [(data["tree"], None)]
            while pending:
                node, parent = pending.pop()
                pending += [(child, node["key"]) for child in reversed(node["children"])]
                self.nodes[node["key"]] = {**node, "parent": parent, "at": now}
        elif name == "difference":
            for node in data["nodes"]:
                self.nodes[node["key"]] = {**node, "at": now}
            for key, _ in data["closed"]:
                self.nodes.pop(key, None)
        elif name == "nodes":
            self.cluster = [{**node, "at": now} for node in data["nodes"]]

    def next_node(self, after: str) -> str:
        """Return the incarnation of the node behind `after` that answers, in the order of the list; the first again after the last."""
        known = [node["incarnation"] for node in self.cluster if node["answers"] or node["incarnation"] == after]
        if after not in known:
            return known[0] if known else after
        return known[(known.index(after) + 1) % len(known)]

    def rows(self, now: float, *, sort: str = "tree", words: str = "") -> list[tuple[int, dict[str, Any]]]:
        """Return the nodes to show with their depth: in the order of the tree, or sorted and flat."""
        current = {key: _at(node, now) for key, node in self.nodes.items()}
        if sort != "tree" or words:
            found = [(0, node) for node in current.values() if _matches(node, words)]
            if sort == "age":
                found.sort(key=lambda row: -row[1]["age"])
            elif sort == "deadline":
                found.sort(key=lambda row: float("inf") if row[1]["deadline"] is None else row[1]["deadline"])
            elif sort == "kind":
                found.sort(key=lambda row: (row[1]["kind"], row[1]["key"]))
            return found
        children: dict[int | None, list[dict[str, Any]]] = {}
        for node in current.values():
            children.setdefault(node["parent"], []).append(node)
        rows: list[tuple[int, dict[str, Any]]] = []
        pending = [(0, current[self.root])] if self.root in current else []
        while pending:
            depth, node = pending.pop()
            rows.append((depth, node))
            pending += [(depth + 1, child) for child in reversed(children.get(node["key"], []))]
        return rows


def _at(node: dict[str, Any], now: float) -> dict[str, Any]:
    passed = now - node["at"]
    deadline = None if node["deadline"] is None else node["deadline"] - passed
    return {**node, "age": node["age"] + passed, "since": node["since"] + passed, "deadline": deadline}


def _matches(node: dict[str, Any], words: str) -> bool:
    text = f"{node['kind']} {node['id']} {node['name']} {node['owner']} {node['waits_on']} {node['note']}"
    return words.lower() in text.lower()


class _Screen:
    """The state of the screen, and the actions of the keys."""

    def __init__(self, client: httpx2.AsyncClient, console: Console, nursery: trio.Nursery) -> None:
        self.client = client
        self.console = console
        self.nursery = nursery
        self.copy = TreeCopy()
        self.state = "connecting…"
        self.wanted = ""
        """The incarnation of the node whose tree is to be shown; empty for the one that receives the request."""
        self.following = trio.CancelScope()
        self.selected = 0
        self.sort = 0
        self.filter = ""
        self.typing = False
        self.armed: tuple[int, float] = (0, 0.0)
        self.receipt: list[str] = []
        self.changed = trio.Event()

    def where(self) -> str:
        """Return the address of the server, and the node of the store whose tree is shown, if there are several."""
        names = [node["name"] for node in self.copy.cluster if node["incarnation"] == self.copy.node]
        address = str(self.client.base_url)
        return f"{address} · node {clean(names[0])}" if names and len(self.copy.cluster) > 1 else address

    def touch(self) -> None:
        """Request a redraw."""
        self.changed.set()

    def rows(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the visible rows."""
        return self.copy.rows(trio.current_time(), sort=SORTS[self.sort], words=self.filter)

    # -- the keyboard --------------------------------------------------------------------------------------------------------

    def key(self, key: str) -> bool:
        """Act on a key. Return False to quit."""
        if self.typing:
            self._type(key)
        elif key in ("q", "\x03"):
            return False
        elif key in ("j", "\x1b[B", "k", "\x1b[A"):
            self._move(1 if key in ("j", "\x1b[B") else -1)
        elif key == "s":
            self.sort = (self.sort + 1) % len(SORTS)
        elif key == "/":
            self.typing, self.filter = True, ""
        elif key == "x":
            self._stop()
        elif key == "w":
            self._next_warning()
        elif key == "n":
            self._next_node()
        elif key == "\x1b":
            self.filter, self.receipt, self.armed = "", [], (0, 0.0)
        self.touch()
        return True

    def _type(self, key: str) -> None:
        if key in ("\r", "\n", "\x1b"):
            self.typing = False
        elif key in ("\x7f", "\b"):
            self.filter = self.filter[:-1]
        elif key.isprintable():
            self.filter += key

    def _move(self, by: int) -> None:
        keys = [node["key"] for _, node in self.rows()]
        if keys:
            at = keys.index(self.selected) if self.selected in keys else -1 if by > 0 else 0
            self.selected = keys[min(len(keys) - 1, max(0, at + by))]

    def _next_warning(self) -> None:
        keys = [node["key"] for _, node in self.rows() if warning_of(node)]
        if keys:
            later = [key for key in keys if key > self.selected]
            self.selected = (later or keys)[0]

    def _next_node(self) -> None:
        now = self.wanted or self.copy.node
        node = self.copy.next_node(now)
        if node != now:
            self.wanted, self.selected, self.armed, self.receipt = node, 0, (0, 0.0), []
            self.state = f"connecting to node {node[:8]}…"
            self.following.cancel()

    def _target(self) -> dict[str, Any] | None:
        """Return the nearest node, from the selected one upwards, that can be stopped by itself."""
        node = self.copy.nodes.get(self.selected)
        while node is not None and not node["stops"]:
            node = self.copy.nodes.get(node["parent"])
        return node

    def _stop(self) -> None:
        target = self._target()
        if target is None:
            self.receipt = ["This node ends with the server; use a drain."]
            return
        key, until = self.armed
        if key != target["key"] or trio.current_time() > until:
            self.armed = (target["key"], trio.current_time() + ARMED_SECONDS)
            self.receipt = [f"Press x again to stop {target['kind']} {target['id']} and all below it."]
            return
        self.armed = (0, 0.0)
        self.receipt = [f"Stopping {target['kind']} {target['id']}…"]
        self.nursery.start_soon(self._stop_now, target["key"], self.copy.node)

    async def _stop_now(self, key: int, node: str) -> None:
        def receive(name: str, data: dict[str, Any]) -> None:
            if name == "line":
                self.receipt.append(
                    f"{data['kind']} {clean(data['node'])} {clean(data['how'])} {data['milliseconds']:.0f} ms"
                )
            elif name == "receipt":
                left = ", ".join(clean(one) for one in data["remaining"])
                told = (
                    "It had already ended" if data["already_ended"] else f"Stopped · {len(data['lines'])} nodes · empty"
                )
                self.receipt[0] = told if data["ok"] else f"Not empty: {left} still runs"
            self.touch()

        try:
            await _events(self.client, "POST", f"/v1/tree/{key}/stop?node={node}", receive)
        except (httpx2.HTTPError, ConnectionError) as error:
            self.receipt = [f"The stop was not answered: {error or type(error).__name__}"]
            self.touch()

    # -- drawing -----------------------------------------------------------------------------------------------------------------

    def draw(self) -> RenderableType:
        """Render the whole screen."""
        rows = self.rows()
        cluster = [cluster_line(node, trio.current_time(), self.copy.node) for node in self.copy.cluster]
        if len(cluster) > MOST_LINES:
            cluster = [*cluster[: MOST_LINES - 1], Text(f"and {len(cluster) - MOST_LINES + 1} more nodes", style="dim")]
        height = max(3, self.console.size.height - 4 - len(self.receipt) - len(cluster))
        keys = [node["key"] for _, node in rows]
        at = keys.index(self.selected) if self.selected in keys else 0
        first = max(0, min(at - height // 2, len(rows) - height))
        table = Table(box=None, expand=True, pad_edge=False, header_style="dim")
        for name, options in (
            ("Node", {"ratio": 5}),
            ("Waits on", {"ratio": 4}),
            ("Owner", {"ratio": 2}),
            ("Age", {"justify": "right", "width": 8}),
            ("Deadline", {"justify": "right", "width": 9}),
        ):
            table.add_column(name, no_wrap=True, overflow="ellipsis", **options)  # pyright: ignore[reportArgumentType]
        for depth, node in rows[first : first + height]:
            table.add_row(*_cells(depth, node), style="reverse" if node["key"] == self.selected else "")
        warnings = sum(bool(warning_of(node)) for _, node in rows)
        title = f"hermes-trio top · {self.state} · {len(self.copy.nodes)} nodes · by {SORTS[self.sort]}"
        title += f" · {warnings} warnings" if warnings else ""
        title += f" · filter {self.filter}{'▏' if self.typing else ''}" if self.filter or self.typing else ""
        return Group(
            Text(title, style="bold"),
            *cluster,
            table,
            *(Text(line) for line in self.receipt),
            Text(HELP + (MORE_HELP if len(cluster) > 1 else ""), style="dim"),
        )


def cluster_line(node: dict[str, Any], now: float, shown: str) -> Text:
    """Describe a node that shares the store: its name, its state, its work. `shown` is the incarnation of the one whose tree is below."""
    passed = now - node["at"]
    left = node["lease_seconds"] - passed
    if left <= 0:
        state, style = "its lease has expired", "red"
    elif not node["answers"]:
        state, style = f"does not answer, lease {duration(left)}", "red"
    else:
        state, style = f"lease {duration(left)}", ""
    words = [
        f"{'▸ ' if node['incarnation'] == shown else ''}{clean(node['name'])}",
        f"up {duration(node['age_seconds'] + passed)}",
        state,
    ]
    words += ["draining"] if node["draining"] else []
    words += [f"{node['turns']} turns", f"{node['jobs']} jobs", f"{node['sessions']} sessions bound"]
    owned = ", ".join(clean(name) for name in node.get("runs", ()))
    return Text(" · ".join([*words, owned] if owned else words), style=style, no_wrap=True, overflow="ellipsis")


def _cells(depth: int, node: dict[str, Any]) -> list[Text]:
    warning = warning_of(node)
    name = clean(node["name"]) or clean(node["id"])
    what = Text("  " * depth) + Text(name, style=COLOURS.get(node["kind"], ""))
    if name != node["kind"]:
        what += Text(f"  {node['kind']}", style="dim")
    words = clean(node["waits_on"] or node["note"])
    said = Text(f"! {warning}: {words}" if warning else words, style="red" if warning else "")
    left = node["deadline"]
    due = "" if left is None else duration(left) if left >= 0 else f"{duration(-left)} over"
    owner = clean(node["owner"]).removeprefix("agent:main:")
    return [what, said, Text(owner, style="dim"), Text(duration(node["age"])), Text(due)]


async def _events(
    client: httpx2.AsyncClient, method: str, path: str, receive: Callable[[str, dict[str, Any]], None]
) -> None:
    """Read one event stream to its end. Raises `ConnectionError` if the server refuses it."""
    reader = EventReader()
    headers = {"Accept": "text/event-stream"}
    async with client.stream(method, path, headers=headers, timeout=None) as answer:
        if answer.status_code >= 400:
            found = msgspec.json.decode(await answer.aread())
            raise ConnectionError(found.get("error", {}).get("message", f"status {answer.status_code}"))
        async for piece in answer.aiter_bytes():
            for event in reader.feed(piece):
                receive(event.name, msgspec.json.decode(event.data))


@contextmanager
def _raw_terminal(descriptor: int) -> Iterator[None]:
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


async def run_top(client: httpx2.AsyncClient) -> None:
    """Show the tree until `q` is pressed. The terminal is restored however this ends."""
    console = Console()
    descriptor = sys.stdin.fileno()
    with _raw_terminal(descriptor), console.screen(hide_cursor=True) as screen:
        async with trio.open_nursery() as nursery:
            state = _Screen(client, console, nursery)
            nursery.start_soon(_follow, state)
            nursery.start_soon(_read_keys, state, descriptor)
            while True:
                screen.update(state.draw())
                state.changed = trio.Event()
                with trio.move_on_after(1.0):
                    await state.changed.wait()
                await trio.sleep(FRAME_SECONDS / 5)


async def _follow(state: _Screen) -> None:
    def receive(name: str, data: dict[str, Any]) -> None:
        state.state = state.where()
        state.copy.apply(name, data, trio.current_time())
        state.touch()

    while True:
        with trio.CancelScope() as state.following:
            try:
                path = f"/v1/tree/events?node={state.wanted}" if state.wanted else "/v1/tree/events"
                await _events(state.client, "GET", path, receive)
                state.state = "the server closed the connection"
            except (httpx2.HTTPError, ConnectionError) as error:
                state.state = f"disconnected ({error or type(error).__name__}), retrying"
                # A node that has ended or does not answer is replaced by the one that receives the request.
                state.wanted = ""
            state.touch()
            await trio.sleep(RETRY_SECONDS)


async def _read_keys(state: _Screen, descriptor: int) -> None:
    while True:
        await trio.lowlevel.wait_readable(descriptor)
        text = os.read(descriptor, 64).decode("utf-8", "replace")
        if not text:
            break
        keys = [text] if text.startswith("\x1b[") else list(text)
        if not all(state.key(key) for key in keys):
            break
    state.nursery.cancel_scope.cancel()
