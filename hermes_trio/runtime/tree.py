"""The live task tree: what runs, its owner, its age, its deadline, and what it waits on.

A `Node` is opened and closed by the scope that does the work, so the tree always matches the running tasks. Every change of a node goes
through the node, which counts it and marks it for the watchers. Readers take a snapshot, or follow the differences: a watcher collects which nodes changed and
describes each once when it is read, however often it changed. Without watchers a change costs two assignments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import inf
from types import TracebackType
from typing import Any, Final, Protocol, cast

import msgspec
import trio

from .context import Binding, SessionContext, _binding
from .outcome import Cause

EMPTY_CONTEXT: Final = SessionContext()

WATCHER_BUFFER: Final = 20_000
"""Nodes that may change for one watcher between two reads; beyond that the watcher must take a snapshot."""

_NO_HEADERS: Final[Mapping[str, str]] = {}

REMEMBERED_ENDS: Final = 4096
"""Ended nodes that the tree remembers, so that a reader that reconnects learns how they ended."""

PLACES: Final = frozenset({"runtime", "turns", "supervisor", "abandoned"})
"""Kinds of the nodes that hold the work of all tenants. Every reader sees that they exist; only an admin sees their details."""


class Stoppable(Protocol):
    """Work that can be stopped by its node."""

    def cancel(self, cause: Cause) -> None:
        """Cancel the work. The first cause stays."""
        ...

    def stopped_node(self) -> Node | None:
        """Return the node that leaves the tree when the work has ended; None if there is nothing to stop."""
        ...

    def title(self) -> str:
        """Return a one-line description of the work; empty where the node's name, id or owner suffices."""
        return ""


class NodeView(msgspec.Struct, gc=False):
    """A node as data for a reader. Times are in seconds: `age`, the age of its note and waits (`since`), and the rest until its `deadline`.

    A snapshot nests `children`; a difference names the `parent` by its key.
    """

    key: int
    id: str
    kind: str
    name: str
    owner: str
    tenant: str
    age: float
    deadline: float | None
    waits_on: str
    note: str
    since: float
    stops: bool
    children: Sequence[NodeView] | msgspec.UnsetType = msgspec.UNSET
    parent: int | msgspec.UnsetType | None = msgspec.UNSET


class Node:
    """One piece of work. `key` is unique in its tree; `how` says how it ended, once it has.

    `note`, `waits` and `deadline` are set by assignment, and every assignment marks the node as changed.
    `scope` is the cancel scope that has the deadline. `tenant` owns the work; children inherit it.
    """

    __slots__ = (
        "_closed",
        "_note",
        "_waits",
        "children",
        "closed_at",
        "how",
        "id",
        "key",
        "kind",
        "left",
        "name",
        "opened_at",
        "owner",
        "parent",
        "said_at",
        "scope",
        "tenant",
        "tree",
        "version",
        "work",
    )

    def __init__(
        self,
        tree: Tree,
        parent: Node | None,
        kind: str,
        id: str,
        name: str = "",
        owner: str = "",
        tenant: str = "",
        work: Stoppable | None = None,
    ) -> None:
        self.tree = tree
        self.parent = parent
        self.kind = kind
        self.id = id
        self.name = name
        self.owner = owner
        self.tenant = tenant
        self.work = work
        self.opened_at: float = tree.now()
        self.said_at: float = self.opened_at
        self.closed_at: float | None = None
        self.how = ""
        self.children: dict[Node, None] | None = None
        # The version of the change that made the node: unique, and a reader has seen a node if its key is not above the reader's version.
        key = tree.version = tree.version + 1
        self.key: int = key
        self.version: int = key
        self.scope: trio.CancelScope | None = None
        self._note = ""
        self._waits: list[str] | None = None
        self.left: list[Node] | None = None
        self._closed: trio.Event | None = None

    def __repr__(self) -> str:
        return f"<{self.kind} {self.id}{' ' + self.how if self.how else ''}>"

    @property
    def waits_on(self) -> str:
        """Return what this node waits on, as described by the waiting code; empty while it computes."""
        return "; ".join(self._waits) if self._waits else ""

    @property
    def waits(self) -> Sequence[str]:
        """Return what this node waits on, one entry for each wait."""
        return () if self._waits is None else tuple(self._waits)

    @waits.setter
    def waits(self, words: Sequence[str]) -> None:
        self._waits = list(words)
        self.tree._said(self)

    @property
    def note(self) -> str:
        """Further text about the node."""
        return self._note

    @note.setter
    def note(self, words: str) -> None:
        if words != self._note:
            self._note = words
            self.tree._said(self)

    @property
    def deadline(self) -> float | None:
        """Return the Trio time at which this node will be cancelled, or None."""
        if self.scope is None:
            return None
        deadline = self.scope.deadline
        return None if deadline == inf else deadline

    @deadline.setter
    def deadline(self, at: float | None) -> None:
        if self.scope is None:
            raise ValueError(f"{self!r} has no scope, so it can have no deadline")
        self.scope.deadline = inf if at is None else at
        self.tree._changed(self)

    def walk(self) -> Iterator[Node]:
        """Iterate over this node and everything below it, parents first."""
        pending: list[Node] = [self]
        while pending:
            node = pending.pop()
            yield node
            if node.children:
                pending.extend(reversed(node.children))

    def open(
        self,
        kind: str,
        id: str,
        *,
        name: str = "",
        owner: str | None = None,
        scope: trio.CancelScope | None = None,
        tenant: str | None = None,
        work: Stoppable | None = None,
    ) -> Node:
        """Open a node below this one; the scope that opens it must close it. `tenant` is the parent's unless given; `work` makes it stoppable."""
        tree = self.tree
        node = Node(
            tree,
            self,
            kind,
            id,
            name,
            self.owner if owner is None else owner,
            self.tenant if tenant is None else tenant,
            work,
        )
        if scope is not None:
            node.scope = scope
        if self.children is None:
            self.children = {}
        self.children[node] = None
        tree.size += 1
        if tree._told:
            tree._tell(node)
        return node

    def close(self, how: str = "finished") -> None:
        """Remove the node from the tree. The first `how` stays; closing twice changes nothing."""
        if self.closed_at is not None:
            return
        tree = self.tree
        self.closed_at = tree.now()
        if not self.how:
            self.how = how
        if self.parent is not None and self.parent.children is not None:
            self.parent.children.pop(self, None)
        # The work may refer to the node: without this reference there is no cycle, and both are freed at once.
        self.work = self.scope = None
        if self._closed is not None:
            self._closed.set()
        tree._did_close(self)

    def move(self, parent: Node) -> None:
        """Move the node below another parent: the only way in which work changes its owner."""
        if self.parent is not None and self.parent.children is not None:
            self.parent.children.pop(self, None)
        self.parent = parent
        if parent.children is None:
            parent.children = {}
        parent.children[self] = None
        self.tree._changed(self)

    def leave_behind(self, kind: str, id: str, how: str) -> Node:
        """Open a node below `abandoned` for a thread or process of this node that did not end. The caller closes it when that has ended.

        Receipts of this node, and of those above it, count it as remaining until then.
        """
        self.how = how
        node = self.tree.abandoned.open(kind, id, name=self.name, owner=self.owner, tenant=self.tenant)
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

    def describe(self, now: float) -> NodeView:
        """Return the node itself as data, without its children."""
        scope, waits, work = self.scope, self._waits, self.work
        # Arguments by position, and milliseconds truncated instead of rounded: together this halves the time of a large snapshot.
        return NodeView(
            self.key,
            self.id,
            self.kind,
            self.name if work is None else work.title() or self.name,
            self.owner,
            self.tenant,
            int((now - self.opened_at) * 1000) / 1000,
            None if scope is None or (at := scope.deadline) == inf else int((at - now) * 1000) / 1000,
            "; ".join(waits) if waits else "",
            self._note,
            int((now - self.said_at) * 1000) / 1000,
            work is not None,
        )

    def describe_bare(self, now: float) -> NodeView:
        """Return a shared place as data without its details, for a reader that may only know that it exists."""
        view = self.describe(now)
        view.waits_on = view.note = ""
        view.since = 0.0
        return view

    def shown_to(self, tenant: str | None) -> bool:
        """Return whether a reader of this tenant sees the node; None is a reader that sees everything."""
        return tenant is None or self.tenant == tenant

    def parent_for(self, tenant: str | None) -> Node | None:
        """Return the nearest node above this one that the reader sees."""
        above = self.parent
        if tenant is not None:
            while above is not None and above.tenant != tenant and above.kind not in PLACES:
                above = above.parent
        return above


class TreeDifference(msgspec.Struct, frozen=True):
    """The changes between two reads: new and changed nodes as they are now, each with its parent's key, and the ended ones with how they ended."""

    version: int
    size: int
    nodes: tuple[NodeView, ...]
    closed: tuple[tuple[int, str], ...]


class TreeWatcher:
    """Collects the changes since the last read, for one reader of one tenant (None: of all). Marking a change never waits.

    `version` is the state that the reader has; nodes that were opened and closed between two reads are not reported.
    """

    def __init__(self, tree: Tree, tenant: str | None, version: int) -> None:
        self._tree = tree
        self._tenant = tenant
        self._dirty: dict[Node, None] = {}
        self._wake: trio.Event | None = None
        self.version = version
        self.behind: bool = False
        """Whether the reader must take a snapshot, because more nodes changed than are kept for it."""

    def mark(self, node: Node) -> None:
        """Note that a node was opened, changed or closed."""
        if self._tenant is not None and node.tenant != self._tenant:
            return
        if node.closed_at is not None and node.key > self.version:
            self._dirty.pop(node, None)
            return
        self._dirty[node] = None
        if len(self._dirty) > WATCHER_BUFFER:
            self._dirty.clear()
            self.behind = True
        if self._wake is not None:
            self._wake.set()
            self._wake = None

    async def wait(self) -> None:
        """Wait until there is something to read. Cancelling loses nothing."""
        if self._dirty or self.behind:
            await trio.lowlevel.checkpoint()
            return
        self._wake = trio.Event()
        await self._wake.wait()

    def view(self) -> tuple[NodeView, int]:
        """Return the whole tree as the reader sees it, and its number of nodes; later differences continue from here."""
        self._dirty.clear()
        self.behind = False
        self.version = self._tree.version
        return self._tree.view(tenant=self._tenant)

    def take(self) -> TreeDifference:
        """Return the changes since the last read, in one step without a checkpoint."""
        now = trio.current_time()
        dirty, self._dirty = self._dirty, {}
        known, self.version = self.version, self._tree.version
        return self._tree._difference(dirty, known, now, self._tenant)


class TreeTracer(Protocol):
    """Makes spans of the nodes of a tree, for as long as it is in `Tree.tracer`. Its methods never wait and never raise."""

    def mark(self, node: Node) -> None:
        """Note that a node was opened, changed or closed."""
        ...

    def note(self, node: Node, **facts: object) -> None:
        """Add what the tree does not know to the span of a node, before the node closes."""
        ...

    def headers(self, node: Node) -> Mapping[str, str]:
        """Return the trace headers for a request that this node makes."""
        ...

    def attached(self, node: Node) -> AbstractContextManager[None]:
        """Make the span of `node` the current one of this task for the body of the `with`, for libraries that send it along by themselves."""
        ...

    def received(self, headers: Iterable[tuple[bytes, bytes]]) -> AbstractContextManager[None]:
        """Make the trace context of a request the current one of this task for the body of the `with`."""
        ...

    def carried(self) -> AbstractContextManager[None]:
        """Capture the current trace context; the returned manager makes it the current one of any task for the body of the `with`."""
        ...


class Tree:
    """All nodes of one runtime, below `root`. `abandoned` holds threads and processes that did not end when they were stopped.

    `version` counts every change. `epoch` names this tree: keys and versions mean nothing in another.
    """

    def __init__(self, epoch: str = "") -> None:
        # The clock of this run, without a lookup in Trio's globals: a turn reads it a dozen times.
        self.now: Callable[[], float] = trio.lowlevel.current_clock().current_time
        self.size: int = 0
        self.epoch = epoch
        self.version: int = 0
        self.runtime: object = None
        self.tracer: TreeTracer | None = None
        """The tracer that makes spans of the nodes; see `trace`."""
        self._watchers: list[TreeWatcher] = []
        self._told: tuple[TreeWatcher | TreeTracer, ...] = ()
        """The watchers and the tracer: the receivers of every change."""
        self._ended: deque[tuple[int, int, str, str]] = deque(maxlen=REMEMBERED_ENDS)
        """Version, key, how it ended, and tenant of the nodes that ended last."""
        self.root: Node = Node(self, None, "runtime", "runtime")
        self.abandoned: Node = self.root.open("abandoned", "abandoned")

    def view(self, node: Node | None = None, *, tenant: str | None = None) -> tuple[NodeView, int]:
        """Return the tree (or the part below `node`) and its number of nodes, taken in one step without a checkpoint.

        With a tenant, only that tenant's nodes and the shared places that hold them.
        """
        top = self.root if node is None else node
        return _describe(top, self.now()) if tenant is None else _describe_for(top, self.now(), tenant)

    def snapshot(self, node: Node | None = None, *, tenant: str | None = None) -> dict[str, Any]:
        """Return the same as plain dictionaries and lists."""
        return msgspec.to_builtins(self.view(node, tenant=tenant)[0])

    def since(self, version: int, tenant: str | None = None) -> TreeDifference | None:
        """Return the changes after `version`; None if the tree does not remember that far."""
        ended = self._ended
        if not 0 < version <= self.version or (len(ended) == REMEMBERED_ENDS and ended[0][0] > version):
            return None
        changed = {node: None for node in self.root.walk() if node.version > version and node.shown_to(tenant)}
        alive = self._difference(changed, version, trio.current_time(), tenant)
        closed = tuple(
            (key, how)
            for when, key, how, whose in ended
            if when > version >= key and (tenant is None or whose == tenant)
        )
        return msgspec.structs.replace(alive, closed=closed)

    def _difference(self, changed: dict[Node, None], known: int, now: float, tenant: str | None) -> TreeDifference:
        nodes: list[NodeView] = []
        closed: list[tuple[int, str]] = []
        for node in changed:
            if node.closed_at is None:
                above = node.parent_for(tenant)
                described = node.describe(now)
                described.parent = None if above is None else above.key
                nodes.append(described)
            elif node.key <= known:
                closed.append((node.key, node.how))
        return TreeDifference(self.version, self.size if tenant is None else -1, tuple(nodes), tuple(closed))

    def find_key(self, key: int) -> Node | None:
        """Return the live node with this key, or None."""
        return next((node for node in self.root.walk() if node.key == key), None)

    def find(self, id: str) -> Node | None:
        """Return the first node with this id, or None."""
        return next((node for node in self.root.walk() if node.id == id), None)

    def render(self, node: Node | None = None) -> str:
        """Return the tree as indented text, for people and for failing tests."""
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
    def watch(self, tenant: str | None = None, *, version: int | None = None) -> Iterator[TreeWatcher]:
        """Follow the changes for the body of the `with`: from `version` on, or from now."""
        watcher = TreeWatcher(self, tenant, self.version if version is None else version)
        self._watchers.append(watcher)
        self._collect_told()
        try:
            yield watcher
        finally:
            self._watchers.remove(watcher)
            self._collect_told()

    @contextmanager
    def trace(self, tracer: TreeTracer) -> Iterator[None]:
        """Make spans of the nodes for the body of the `with`. Raises `ValueError` if the tree has a tracer already."""
        if self.tracer is not None:
            raise ValueError("this tree is traced already; give the runtime one Tracing only")
        self.tracer = tracer
        self._collect_told()
        try:
            yield
        finally:
            self.tracer = None
            self._collect_told()

    def _collect_told(self) -> None:
        self._told = (*self._watchers, *(() if self.tracer is None else (self.tracer,)))

    @property
    def watchers(self) -> int:
        """Return the number of readers that follow the tree now."""
        return len(self._watchers)

    def _did_close(self, node: Node) -> None:
        self.size -= 1
        self.version = node.version = self.version + 1
        if self._told:
            self._tell(node)
        self._ended.append((node.version, node.key, node.how, node.tenant))

    def _changed(self, node: Node) -> None:
        """Count a change of a node and mark it for the watchers and the tracer. Every change goes through here."""
        self.version = node.version = self.version + 1
        if self._told:
            self._tell(node)

    def _said(self, node: Node) -> None:
        """Do the same for a change of a node's note or waits, and record its time."""
        node.said_at = self.now()
        self.version = node.version = self.version + 1
        if self._told:
            self._tell(node)

    def _tell(self, node: Node) -> None:
        for told in self._told:
            told.mark(node)


def part_of(tree: NodeView, session: str) -> tuple[NodeView, int]:
    """Return the part of a view that belongs to a session (by key or id), with the nodes above it, and the number of nodes."""

    def keep(node: NodeView) -> tuple[NodeView, int] | None:
        if session in (node.owner, node.id):
            return node, _count(node)
        below = [kept for child in node.children or () if (kept := keep(child)) is not None]
        if not below:
            return None
        shown = msgspec.structs.replace(node, children=[child for child, _ in below])
        return shown, 1 + sum(count for _, count in below)

    return keep(tree) or (msgspec.structs.replace(tree, children=()), 1)


def _count(node: NodeView) -> int:
    return 1 + sum(_count(child) for child in node.children or ())


def cut_view(tree: NodeView, most: int) -> None:
    """Reduce a view to at most `most` nodes in place: the ones nearest to the root stay, and of siblings the oldest."""
    left = most - 1
    level = [tree]
    while level:
        below: list[NodeView] = []
        for node in level:
            node.children = list(node.children or ())[:left]
            left -= len(node.children)
            below += node.children
        level = below


def _describe_for(node: Node, now: float, tenant: str) -> tuple[NodeView, int]:
    """Return the part of a tree that a tenant sees: the shared places, and its own nodes, each below the nearest node that it sees."""
    top = node.describe(now) if node.tenant == tenant else node.describe_bare(now)
    children: list[NodeView] = []
    top.children = children
    count = 1
    pending: list[tuple[Node, list[NodeView]]] = [(node, children)]
    while pending:
        this, siblings = pending.pop()
        for child in this.children or ():
            if child.tenant == tenant:
                below = child.describe(now)
            elif child.kind in PLACES:
                below = child.describe_bare(now)
            else:
                if child.children:
                    pending.append((child, siblings))
                continue
            count += 1
            siblings.append(below)
            if child.children:
                own: list[NodeView] = []
                below.children = own
                pending.append((child, own))
            else:
                below.children = ()
    return top, count


def _describe(node: Node, now: float) -> tuple[NodeView, int]:
    top = node.describe(now)
    top.children = ()
    count = 1
    pending: list[tuple[Node, NodeView]] = [(node, top)] if node.children else []
    while pending:
        this, described = pending.pop()
        children: list[NodeView] = []
        described.children = children
        for child in this.children or ():
            below = child.describe(now)
            children.append(below)
            if child.children:
                pending.append((child, below))
            else:
                below.children = ()
        count += len(children)
    return top, count


def current_node() -> Node | None:
    """Return the node that this task works for, or None outside any."""
    binding = _binding.get()
    return None if binding is None else binding.node


def trace_headers() -> Mapping[str, str]:
    """Return the trace headers for a request of this task; empty where nothing is traced."""
    node = current_node()
    if node is None or node.tree.tracer is None:
        return _NO_HEADERS
    return node.tree.tracer.headers(node)


class waiting:  # noqa: N801 - reads as a word: `with waiting("approval 7")`
    """Show what the current node (or `node`) waits on, for the body of the `with`. Does nothing outside any node."""

    __slots__ = ("_node", "_words")

    def __init__(self, words: str, node: Node | None = None) -> None:
        self._words = words
        self._node = node

    def __enter__(self) -> None:
        node = self._node = self._node or current_node()
        if node is not None:
            if node._waits is None:
                node._waits = []
            node._waits.append(self._words)
            node.tree._said(node)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        node = self._node
        if node is not None and node._waits is not None:
            node._waits.remove(self._words)
            node.tree._said(node)


class working:  # noqa: N801 - reads as a word: `with working("tool", "call_1")`
    """Open a node below the current one and bind it for the body of the `with`. Yields the node, or None outside any tree."""

    __slots__ = ("_id", "_kind", "_name", "_node", "_scope", "_token", "_work")

    def __init__(
        self,
        kind: str,
        id: str,
        name: str = "",
        scope: trio.CancelScope | None = None,
        work: Stoppable | None = None,
    ) -> None:
        self._kind = kind
        self._id = id
        self._name = name
        self._scope = scope
        self._work = work
        self._node: Node | None = None
        self._token: Any = None

    def __enter__(self) -> Node | None:
        outer = _binding.get()
        if outer is None or outer.node is None:
            return None
        self._node = outer.node.open(self._kind, self._id, name=self._name, scope=self._scope, work=self._work)
        self._token = _binding.set(Binding(outer.context, outer.turn, self._node))
        return self._node

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._node is None:
            return
        _binding.reset(self._token)
        self._node.close(ended_as(error))


def ended_as(error: BaseException | None) -> str:
    """Return the word for how a scope ended, from the exception that left it."""
    if error is None:
        return "finished"
    _, rest = split_cancelled(error)
    return "cancelled" if rest is None else "failed"


class printable:  # noqa: N801 - used as a function
    """Converts an exception of foreign code whose `__repr__` or `__str__` fails into a `RuntimeError`, for the body of the `with`.

    A nursery formats the exceptions that leave it, and would fail while it closes.
    """

    __slots__ = ()

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, tb: object) -> None:
        if error is not None:
            check_printable(error)


def check_printable(error: BaseException) -> None:
    """Raise a `RuntimeError` in place of an exception that cannot be formatted."""
    if isinstance(error, trio.Cancelled):
        return
    try:
        f"{error!r} {error}"
    except Exception:
        raise RuntimeError(f"{type(error).__qualname__} was raised, which cannot be printed") from error


def split_cancelled(error: BaseException) -> tuple[BaseException | None, BaseException | None]:
    """Split an exception into its cancellations and the rest; each is None if empty."""
    if isinstance(error, BaseExceptionGroup):
        return cast("BaseExceptionGroup[BaseException]", error).split(trio.Cancelled)
    return (error, None) if isinstance(error, trio.Cancelled) else (None, error)
