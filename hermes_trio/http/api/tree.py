"""The task tree as an API: what runs, its owner, its age, its deadline, and what it waits for.

An admin sees the whole tree; every other key sees the nodes of its tenant. `GET /v1/tree/events` sends a snapshot and then the changes, at most ten
times a second, and resumes after `Last-Event-ID`. Where several nodes share the store, a `nodes` event reports all of them after each
heartbeat. `POST /v1/tree/{key}/stop` stops the work of one node.

Each node of the store has its own tree. A request with the parameter `node` is relayed to that node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import msgspec
import trio

from hermes_trio.http.auth import RequiredScope
from hermes_trio.http.core import ApiCore
from hermes_trio.http.errors import ApiError, not_found, retry_after
from hermes_trio.http.nodes import node_bodies, still_answers
from hermes_trio.http.requests import EventStream, HandlerResult, Request, Response, encode_json
from hermes_trio.http.routing import Route, RouteParameter
from hermes_trio.http.streams import HEARTBEAT_SECONDS, StreamWriter, named_event
from hermes_trio.runtime.errors import HandledElsewhere
from hermes_trio.runtime.outcome import CancelCause, Cause
from hermes_trio.runtime.ports import NodeRow
from hermes_trio.runtime.run import Run
from hermes_trio.runtime.stop_receipt import ReceiptLine, StopReceipt, stop_work
from hermes_trio.runtime.tree import Node, NodeView, Tree, TreeDifference, TreeWatcher, part_of
from hermes_trio.runtime.turn import Turn

from .runs import find_run

BATCH_SECONDS: Final = 0.1
"""Seconds for which changes are collected before they are sent: a busy tree changes thousands of times a second, and a page redraws ten times."""

STOP_SECONDS: Final = 30.0
"""Seconds that a stop waits for the node to leave the tree before its receipt lists what remains."""

LONGEST_STOP: Final = 600.0

LOOK_SECONDS: Final = 1.0
"""Seconds between two checks of a stream for a new list of nodes."""

NODE: Final = RouteParameter(
    "node",
    "The name or the incarnation of the node whose tree is requested; by default, the node that receives the request.",
)


class TreeElsewhere(msgspec.Struct):
    """The tree of another node of the store. `tree` is null if that node did not answer in time.

    `size` counts all nodes of the tree; of a large one, `tree` has only those nearest to the root.
    """

    node: str
    incarnation: str
    expires_at: float
    answers: bool
    size: int
    tree: NodeView | None


class TreeBody(msgspec.Struct):
    """The tree of one node of the store at one moment. `others` has the trees of the other nodes, unless the request names a node."""

    size: int
    tree: NodeView
    epoch: str = ""
    version: int = 0
    node: str = ""
    object: str = "hermes.tree"
    others: list[TreeElsewhere] | msgspec.UnsetType = msgspec.UNSET


class RunTree(msgspec.Struct):
    """The live nodes of one run: its turn, and the jobs that it started."""

    run_id: str
    live: bool
    nodes: list[dict[str, Any]]
    object: str = "hermes.run.tree"


class ReceiptBody(msgspec.Struct):
    """The receipt of a stop: one line for each node that was live, and the nodes that still run."""

    target: str
    cause: str
    detail: str
    ok: bool
    milliseconds: float
    already_ended: bool
    lines: list[dict[str, Any]]
    remaining: list[str]
    object: str = "hermes.receipt"


async def get_tree(request: Request) -> HandlerResult:
    """Return the trees as this key sees them; with `session`, only the nodes of this session and those above them; with `node`, one tree."""
    await _check_node(request)
    core = request.core
    tree = core.runtime.tree
    found, size = tree.view(tenant=request.caller.sees)
    session = request.query("session")
    if session:
        found, size = part_of(found, session)
    body = TreeBody(size, found, tree.epoch, tree.version, core.store.owner)
    if core.shared and not request.query("node"):
        body.others = []
        for row, told in await core.runtime.peers.trees(request.caller.sees, session):
            other = TreeElsewhere(row.name, row.incarnation, row.expires_at, told is not None, 0, None)
            if told is not None:
                other.size, other.tree = told.size, told.tree
            body.others.append(other)
    return Response.of(body)


async def _check_node(request: Request) -> None:
    """Raise `HandledElsewhere` if the parameter `node` (a name, or an incarnation or its beginning) means another node of the store.

    Raises 404 if it means none, 409 if it means several, and 503 if the node has missed heartbeats.
    """
    wanted, core = request.query("node"), request.core
    if not wanted or wanted == core.store.owner:
        return
    rows = await core.store.list_nodes() if core.shared else []
    found = [row for row in rows if wanted == row.name or (len(wanted) >= 8 and row.incarnation.startswith(wanted))]
    if not found:
        raise ApiError(404, f"No node {wanted!r} shares this node's store.", code="unknown_node", param="node")
    if len(found) > 1:
        names = ", ".join(row.incarnation for row in found)
        raise ApiError(409, f"Several nodes are called {wanted!r}: {names}.", code="ambiguous_node", param="node")
    [row] = found
    if row.incarnation == core.store.owner:
        return
    if not still_answers(core, row):
        raise ApiError(
            503,
            f"Node {row.name} ({row.incarnation[:8]}) has missed its heartbeats; retry later.",
            code="node_unreachable",
            headers=retry_after(1),
        )
    raise HandledElsewhere(f"only node {row.incarnation[:8]} has its tree", row.incarnation)


async def get_run_tree(request: Request) -> HandlerResult:
    """Return the part of the tree that belongs to a run; empty when it has settled."""
    run = await find_run(request)
    core = request.core
    if isinstance(run, Run):
        return Response.of(RunTree(run.id, not run.settled.is_set(), run.snapshot()))
    nodes: list[dict[str, Any]] | None = None
    if core.shared and (not run.status.terminal or await core.store.root_open(run.run_id)):
        nodes = await core.runtime.peers.run_tree(run.run_id, run.owner)
        if nodes is None and (found := await core.store.get_run(run.run_id)) is not None and not found.status.terminal:
            raise ApiError(
                503,
                "The node of this run does not answer; retry later.",
                code="node_unreachable",
                headers=retry_after(1),
            )
        return Response.of(RunTree(run.run_id, True, nodes or []))
    return Response.of(RunTree(run.run_id, False, []))


async def tree_events(request: Request) -> HandlerResult:
    """Stream a snapshot, then the changes. With `Last-Event-ID`, send the changes since that event instead of the snapshot, if the tree still has them."""
    await _check_node(request)
    return EventStream(partial(_follow, request))


async def _follow(request: Request, writer: StreamWriter) -> None:
    tree = request.core.runtime.tree
    seen = request.caller.sees
    missed = _missed(tree, request.header(b"last-event-id") or request.query("last_event_id"), seen)
    core = request.core
    told: Sequence[NodeRow] = ()
    with tree.watch(seen) as watcher:
        await writer.open(_snapshot(core, watcher) if missed is None else _difference(tree, missed))
        said = trio.current_time()
        while True:
            if core.shared and core.runtime.membership.nodes is not told:
                told = core.runtime.membership.nodes
                writer.put(named_event("nodes", {"nodes": node_bodies(core, told, request.caller)}))
                await writer.flush()
                said = trio.current_time()
            with trio.move_on_after(LOOK_SECONDS if core.shared else HEARTBEAT_SECONDS) as quiet:
                await watcher.wait()
            if quiet.cancelled_caught:
                if trio.current_time() >= said + HEARTBEAT_SECONDS:
                    said = trio.current_time()
                    await writer.comment("keepalive")
                continue
            await trio.sleep(BATCH_SECONDS)
            if watcher.behind:
                writer.put(_snapshot(core, watcher))
            else:
                difference = watcher.take()
                if difference.nodes or difference.closed:
                    writer.put(_difference(tree, difference))
            await writer.flush()
            said = trio.current_time()


def _missed(tree: Tree, last: str, tenant: str | None) -> TreeDifference | None:
    epoch, _, version = last.partition("-")
    if not last or epoch != tree.epoch or not version.isdecimal() or len(version) > 18:
        return None
    return tree.since(int(version), tenant)


def _snapshot(core: ApiCore, watcher: TreeWatcher) -> bytes:
    tree = core.runtime.tree
    found, size = watcher.view()
    body = {
        "epoch": tree.epoch,
        "version": watcher.version,
        "size": size,
        "tree": found,
        "node": core.store.owner,
    }
    return _event(tree, watcher.version, "snapshot", body)


def _difference(tree: Tree, difference: TreeDifference) -> bytes:
    return _event(tree, difference.version, "difference", difference)


def _event(tree: Tree, version: int, name: str, body: object) -> bytes:
    return b"id: %b-%d\nevent: %b\ndata: %b\n\n" % (tree.epoch.encode(), version, name.encode(), encode_json(body))


async def stop_by_key(request: Request) -> HandlerResult:
    """Stop the work of one node and everything below it; the receipt says how each ended.

    A client that accepts an event stream gets each line of the receipt as it becomes known.
    """
    await _check_node(request)
    node = _find(request)
    seconds = _seconds(request)
    cause = Cause(CancelCause.STOP, f"by {request.caller.name}")
    if isinstance(node.work, Turn) and (run := node.work.origin.run) is not None and run.resumable:
        await request.core.runtime.stateless.stop_resuming(run.run_id)
    if "text/event-stream" in (request.header(b"accept") or ""):
        return EventStream(partial(_stream_stop, node, cause, seconds))
    return Response.of(_receipt(await stop_work(node, cause, seconds)))


def _find(request: Request) -> Node:
    text = request.params["key"]
    tree = request.core.runtime.tree
    node = tree.find_key(int(text)) if text.isdecimal() and len(text) <= 18 else None
    if node is None or not request.caller.owns(node.tenant):
        raise not_found("live node", text, "node_not_found")
    if node.work is None:
        raise ApiError(
            409,
            f"A node of kind {node.kind!r} cannot be stopped on its own: stop the turn, job, tool call or session above it.",
            code="node_not_stoppable",
        )
    return node


def _seconds(request: Request) -> float:
    text = request.query("timeout")
    if not text:
        return STOP_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= LONGEST_STOP:
        raise ApiError(400, f"timeout must be a number of seconds from 0 to {LONGEST_STOP:g}.", param="timeout")
    return seconds


def _receipt(receipt: StopReceipt) -> ReceiptBody:
    return msgspec.convert(receipt.as_dict(), ReceiptBody)


async def _stream_stop(node: Node, cause: Cause, seconds: float, writer: StreamWriter) -> None:
    lines: deque[ReceiptLine] = deque()
    told = trio.Event()
    done: list[StopReceipt] = []

    def tell(line: ReceiptLine) -> None:
        lines.append(line)
        told.set()

    async def stop() -> None:
        done.append(await stop_work(node, cause, seconds, tell))
        told.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stop)
        await writer.open(named_event("stopping", {"target": node.id, "key": node.key, "kind": node.kind}))
        while lines or not done:
            await told.wait()
            told = trio.Event()
            while lines:
                line = lines.popleft()
                shown = {**msgspec.structs.asdict(line), "milliseconds": round(line.milliseconds, 3)}
                writer.put(named_event("line", shown))
            await writer.flush()
    writer.put(named_event("receipt", _receipt(done[0])))
    await writer.flush()


def tree_routes() -> list[Route]:
    """Return the routes of this module."""
    return [
        Route(
            name="tree",
            method="GET",
            path="/v1/tree",
            handler=get_tree,
            access=RequiredScope.RUNS,
            summary="Get the live task trees of all nodes, as this key sees them",
            answer=TreeBody,
            errors=(404, 409, 503),
            parameters=(
                RouteParameter(
                    "session", "The key or the id of a session; only its nodes and those above them are returned."
                ),
                NODE,
            ),
            tag="tree",
        ),
        Route(
            name="tree_events",
            method="GET",
            path="/v1/tree/events",
            handler=tree_events,
            access=RequiredScope.RUNS,
            streams=True,
            summary="Stream a snapshot of the tree, then its changes",
            media="text/event-stream",
            parameters=(
                RouteParameter("last_event_id", "Resume after the event with this id."),
                RouteParameter("Last-Event-ID", "The same, as the header that browsers send.", where="header"),
                NODE,
            ),
            errors=(404, 409, 503),
            tag="tree",
        ),
        Route(
            name="tree_stop",
            method="POST",
            path="/v1/tree/{key}/stop",
            handler=stop_by_key,
            access=RequiredScope.RUNS,
            streams=True,
            summary="Stop the work of a node and return the receipt",
            answer=ReceiptBody,
            errors=(400, 404, 409, 503),
            parameters=(
                RouteParameter("timeout", "Seconds to wait until the node has left the tree.", {"type": "number"}),
                NODE,
            ),
            tag="tree",
        ),
        Route(
            name="run_tree",
            method="GET",
            path="/v1/runs/{run_id}/tree",
            handler=get_run_tree,
            access=RequiredScope.RUNS,
            summary="Get the live tree of a run",
            answer=RunTree,
            errors=(404, 503),
            tag="runs",
        ),
    ]
