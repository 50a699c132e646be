"""The live task tree: what runs, who owns it, how old it is, until when it may run, and what it waits on.

A `Node` is opened by the scope that does the work and closed by the same scope, so the tree cannot drift from the truth. Readers take a
snapshot, or watch the differences. A watcher that is too slow is told to take a new snapshot; it never slows the work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from types import TracebackType
from typing import Any, Final, cast

import trio

from .context import Binding, SessionContext, _binding
from .outcome import Cause, ReceiptLine, StopReceipt

__all__ = [
    "EMPTY_CONTEXT",
    "Node",
    "Tree",
    "TreeWatcher",
    "current_node",
    "split_cancelled",
    "stop_node",
    "waiting",
    "working",
]

EMPTY_CONTEXT: Final = SessionContext()

WATCHER_BUFFER: Final = 1024
"""Differences kept for one watcher; one that falls further behind is told to resync."""


class Node:
    """One piece of work. `how` says how it ended, once it has."""

    __slots__ = (
        "_closed",
        "children",
        "closed_at",
        "how",
        "id",
        "kind",
        "left",
        "name",
        "note",
        "opened_at",
        "owner",
        "parent",
        "scope",
        "tree",
        "waits",
    )

    def __init__(
        self, tree: Tree, parent: Node | None, kind: str, id: str, name: str, owner: str, scope: trio.CancelScope | None
    ) -> None:
        self.tree = tree
        self.parent = parent
        self.kind = kind
        self.id = id
        self.name = name
        self.owner = owner
        self.scope = scope
        self.note = ""
        self.opened_at: float = trio.current_time()
        self.closed_at: float | None = None
        self.how = ""
        self.children: dict[Node, None] | None = None
        self.waits: list[str] | None = None
        self.left: list[Node] | None = None
        self._closed: trio.Event | None = None

    def __repr__(self) -> str:
        return f"<{self.kind} {self.id}{' ' + self.how if self.how else ''}>"

    @property
    def waits_on(self) -> str:
        """What this node waits on, in the words of the primitive that waits; empty while it computes."""
        return "; ".join(self.waits) if self.waits else ""

    @property
    def deadline(self) -> float | None:
        """The Trio time at which this node will be cancelled, or None."""
        if self.scope is None:
            return None
        deadline = self.scope.deadline
        return None if deadline == inf else deadline

    def walk(self) -> Iterator[Node]:
        """This node and everything below it, parents first."""
        pending: list[Node] = [self]
        while pending:
            node = pending.pop()
            yield node
            if node.children:
                pending.extend(reversed(node.children))

    def open(
        self, kind: str, id: str, *, name: str = "", owner: str | None = None, scope: trio.CancelScope | None = None
    ) -> Node:
        """Open a node below this one. Whoever opens it closes it, from the same scope."""
        node = Node(self.tree, self, kind, id, name, self.owner if owner is None else owner, scope)
        if self.children is None:
            self.children = {}
        self.children[node] = None
        self.tree._opened(node)
        return node

    def close(self, how: str = "finished") -> None:
        """Take the node out of the tree. The first `how` stays. Closing twice is harmless."""
        if self.closed_at is not None:
            return
        self.closed_at = trio.current_time()
        if not self.how:
            self.how = how
        if self.parent is not None and self.parent.children is not None:
            self.parent.children.pop(self, None)
        if self._closed is not None:
            self._closed.set()
        self.tree._did_close(self)

    def move(self, parent: Node) -> None:
        """Hand the node to another owner: the one explicit way in which work changes hands."""
        if self.parent is not None and self.parent.children is not None:
            self.parent.children.pop(self, None)
        self.parent = parent
        if parent.children is None:
            parent.children = {}
        parent.children[self] = None
        self.tree._changed(self)

    def leave_behind(self, kind: str, id: str, how: str) -> Node:
        """Open a node below `abandoned` for something of this node that could not be ended. The caller closes it when it has ended.

        Receipts of this node, and of those above it, count it as remaining until then.
        """
        self.how = how
        node = self.tree.abandoned.open(kind, id, name=self.name, owner=self.owner)
        node.note = how
        self.left = [*(self.left or ()), node]
        return node

    async def wait_closed(self) -> None:
        """Wait until the node has left the tree. Cancelling abandons the wait."""
        if self.closed_at is not None:
            await trio.lowlevel.checkpoint()
            return
        if self._closed is None:
            self._closed = trio.Event()
        await self._closed.wait()

    def describe(self, now: float) -> dict[str, Any]:
        """The node itself as JSON-ready data, without its children."""
        scope, waits = self.scope, self.waits
        return {
            "id": self.id,
            "kind": self.kind,
            "name": self.name,
            "owner": self.owner,
            "age": round(now - self.opened_at, 3),
            "deadline": None if scope is None or (deadline := scope.deadline) == inf else round(deadline - now, 3),
            "waits_on": "; ".join(waits) if waits else "",
            "note": self.note,
        }


class TreeWatcher:
    """A bounded view of the differences. `async for` yields `opened`, `closed`, `changed` and `resync` events."""

    def __init__(self) -> None:
        self._events: deque[dict[str, Any]] = deque()
        self._wake = trio.Event()

    def put(self, event: dict[str, Any]) -> None:
        """Add a difference; when the buffer is full, drop all of it and ask the reader to start over."""
        if len(self._events) >= WATCHER_BUFFER:
            self._events.clear()
            self._events.append({"event": "resync"})
        else:
            self._events.append(event)
        self._wake.set()

    def __aiter__(self) -> TreeWatcher:
        return self

    async def __anext__(self) -> dict[str, Any]:
        while not self._events:
            self._wake = trio.Event()
            await self._wake.wait()
        return self._events.popleft()


class Tree:
    """All nodes of one runtime, below `root`. `abandoned` holds threads and processes that did not end when they were told to."""

    def __init__(self) -> None:
        self.size: int = 0
        self.runtime: object = None
        self._watchers: list[TreeWatcher] = []
        self.root: Node = Node(self, None, "runtime", "runtime", "", "", None)
        self.abandoned: Node = self.root.open("abandoned", "abandoned")

    def snapshot(self, node: Node | None = None) -> dict[str, Any]:
        """The tree (or the part below `node`) as JSON-ready data, taken in one step without a checkpoint."""
        return _describe(self.root if node is None else node, trio.current_time())

    def find(self, id: str) -> Node | None:
        """The first node with this id."""
        return next((node for node in self.root.walk() if node.id == id), None)

    def render(self, node: Node | None = None) -> str:
        """The tree as indented text, for people and for failing tests."""
        now = trio.current_time()
        lines: list[str] = []
        pending = [(self.root if node is None else node, 0)]
        while pending:
            this, depth = pending.pop()
            parts = [f"{this.kind} {this.id}" if this.id != this.kind else this.kind]
            if this.name:
                parts.append(this.name)
            parts.append(f"age {now - this.opened_at:.1f}s")
            if (deadline := this.deadline) is not None:
                parts.append(f"deadline in {deadline - now:.1f}s")
            if this.waits_on:
                parts.append(f"waits on {this.waits_on}")
            if this.note:
                parts.append(this.note)
            lines.append("  " * depth + " · ".join(parts))
            pending.extend((child, depth + 1) for child in reversed(this.children or {}))
        return "\n".join(lines)

    @contextmanager
    def watch(self) -> Iterator[TreeWatcher]:
        """Differences from now on, for the body of the `with`."""
        watcher = TreeWatcher()
        self._watchers.append(watcher)
        try:
            yield watcher
        finally:
            self._watchers.remove(watcher)

    def _opened(self, node: Node) -> None:
        self.size += 1
        if self._watchers:
            self._tell("opened", node)

    def _did_close(self, node: Node) -> None:
        self.size -= 1
        if self._watchers:
            self._tell("closed", node)

    def _changed(self, node: Node) -> None:
        if self._watchers:
            self._tell("changed", node)

    def _tell(self, event: str, node: Node) -> None:
        data = {
            "event": event,
            "parent": None if node.parent is None else node.parent.id,
            "how": node.how,
            "node": node.describe(trio.current_time()),
        }
        for watcher in self._watchers:
            watcher.put(data)


def _describe(node: Node, now: float) -> dict[str, Any]:
    top = node.describe(now)
    # Leaves have an empty tuple: a dict of nothing but atoms is none of the garbage collector's business. With a list in each, a snapshot of ten
    # thousand nodes sets off a full collection every few times, and that holds the loop up for longer than the snapshot does.
    top["children"] = ()
    pending: list[tuple[Node, dict[str, Any]]] = [(node, top)] if node.children else []
    while pending:
        this, described = pending.pop()
        children: list[dict[str, Any]] = []
        described["children"] = children
        for child in this.children or ():
            below = child.describe(now)
            children.append(below)
            if child.children:
                pending.append((child, below))
            else:
                below["children"] = ()
    return top


def current_node() -> Node | None:
    """The node that this task works for, or None outside any."""
    binding = _binding.get()
    return None if binding is None else binding.node


class waiting:  # noqa: N801 - reads as a word: `with waiting("approval 7")`
    """Say what the current node (or another) waits on, for the body of the `with`. Outside any node it does nothing."""

    __slots__ = ("_node", "_words")

    def __init__(self, words: str, node: Node | None = None) -> None:
        self._words = words
        self._node = node

    def __enter__(self) -> None:
        node = self._node = self._node or current_node()
        if node is not None:
            if node.waits is None:
                node.waits = []
            node.waits.append(self._words)
            node.tree._changed(node)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        node = self._node
        if node is not None and node.waits is not None:
            node.waits.remove(self._words)
            node.tree._changed(node)


class working:  # noqa: N801 - reads as a word: `with working("tool", "call_1")`
    """Open a node below the current one and work in its name for the body of the `with`. Gives the node, or None outside any tree."""

    __slots__ = ("_id", "_kind", "_name", "_node", "_scope", "_token")

    def __init__(self, kind: str, id: str, name: str = "", scope: trio.CancelScope | None = None) -> None:
        self._kind = kind
        self._id = id
        self._name = name
        self._scope = scope
        self._node: Node | None = None
        self._token: Any = None

    def __enter__(self) -> Node | None:
        outer = _binding.get()
        if outer is None or outer.node is None:
            return None
        self._node = outer.node.open(self._kind, self._id, name=self._name, scope=self._scope)
        self._token = _binding.set(Binding(outer.context, outer.turn, self._node))
        return self._node

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._node is None:
            return
        _binding.reset(self._token)
        self._node.close(ended_as(error))


def ended_as(error: BaseException | None) -> str:
    """The word for how a scope ended, from the exception that left it."""
    if error is None:
        return "finished"
    _, rest = split_cancelled(error)
    return "cancelled" if rest is None else "failed"


def split_cancelled(error: BaseException) -> tuple[BaseException | None, BaseException | None]:
    """What of an exception is cancellation, and what is not."""
    if isinstance(error, BaseExceptionGroup):
        return cast("BaseExceptionGroup[BaseException]", error).split(trio.Cancelled)
    return (error, None) if isinstance(error, trio.Cancelled) else (None, error)


async def stop_node(node: Node, cancel: Any, cause: Cause, timeout: float) -> StopReceipt:
    """Call `cancel()`, wait until `node` has left the tree, and say what became of every node that was below it.

    `ok` only if it has left the tree within `timeout` seconds and no thread or process of it had to be abandoned. Cancelling abandons the
    wait for the receipt, never the stop.
    """
    if node.closed_at is not None:
        left = tuple(one.id for one in node.left or () if one.closed_at is None)
        return StopReceipt(
            target=node.id, cause=cause, ok=not left, milliseconds=0.0, remaining=left, already_ended=True
        )
    began = trio.current_time()
    before = [(this, this.waits_on) for this in node.walk()]
    cancel()
    with trio.move_on_after(timeout):
        await node.wait_closed()
    now = trio.current_time()
    lines = tuple(
        ReceiptLine(
            node=this.id,
            kind=this.kind,
            name=this.name,
            how=this.how if this.closed_at is not None else (this.note or "still running"),
            milliseconds=1000 * ((now if this.closed_at is None else this.closed_at) - began),
            waited_on=waited_on,
        )
        for this, waited_on in before
    )
    remaining = tuple(one.id for this, _ in before for one in (this, *(this.left or ())) if one.closed_at is None)
    return StopReceipt(
        target=node.id,
        cause=cause,
        ok=not remaining,
        milliseconds=1000 * (now - began),
        lines=lines,
        remaining=remaining,
    )
