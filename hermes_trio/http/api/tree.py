"""The task tree as an API: what runs, who owns it, how old it is, until when it may run, and what it waits on.

The whole tree is for admins, because it shows everybody's work; a run's part of it is for whoever owns the run.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import trio

from hermes_trio.http.auth import RequiredScope
from hermes_trio.http.requests import EventStream, HandlerResult, Request, Response, encode_json
from hermes_trio.http.routing import Route
from hermes_trio.http.streams import HEARTBEAT_SECONDS, StreamWriter
from hermes_trio.runtime.run import Run

from .runs import find_run

__all__ = ["tree_routes"]

BATCH_SECONDS: Final = 0.05
"""Differences are collected for so long before they are sent: a busy tree changes thousands of times a second."""


class TreeBody(msgspec.Struct):
    """The tree, as it was in one moment."""

    size: int
    tree: dict[str, Any]
    object: str = "hermes.tree"


class RunTree(msgspec.Struct):
    """What is alive of one run: its turn, and the jobs that it started."""

    run_id: str
    live: bool
    nodes: list[dict[str, Any]]
    object: str = "hermes.run.tree"


async def get_tree(request: Request) -> HandlerResult:
    """The whole tree."""
    tree = request.front.host.tree
    return Response.of(TreeBody(tree.size, tree.snapshot()))


async def get_run_tree(request: Request) -> HandlerResult:
    """The part of the tree that belongs to a run; empty when it has settled."""
    run = await find_run(request)
    host = request.front.host
    nodes: list[dict[str, Any]] = []
    if isinstance(run, Run):
        mine = [run.turn.node, *(job.node for job in host.supervisor.jobs() if job.owner.root.id == run.id)]
        nodes = [host.tree.snapshot(node) for node in mine if node.closed_at is None]
    return Response.of(RunTree(request.params["run_id"], isinstance(run, Run) and not run.settled.is_set(), nodes))


async def tree_events(request: Request) -> HandlerResult:
    """A snapshot, then the differences, as a stream."""
    return EventStream(lambda writer: _follow(request, writer))


async def _follow(request: Request, writer: StreamWriter) -> None:
    tree = request.front.host.tree
    with tree.watch() as watcher:
        await writer.open(_encode({"event": "snapshot", "size": tree.size, "tree": tree.snapshot()}))
        while True:
            event: dict[str, Any] | None = None
            with trio.move_on_after(HEARTBEAT_SECONDS):
                event = await watcher.__anext__()
            if event is None:
                await writer.comment("keepalive")
                continue
            await trio.sleep(BATCH_SECONDS)
            while event is not None:
                if event["event"] == "resync":
                    event = {**event, "size": tree.size, "tree": tree.snapshot()}
                writer.put(_encode(event))
                event = None
                with trio.move_on_after(0):
                    event = await watcher.__anext__()
            await writer.flush()


def _encode(event: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % encode_json(event)


def tree_routes() -> list[Route]:
    """The routes of this module."""
    return [
        Route(
            name="tree",
            method="GET",
            path="/v1/tree",
            handler=get_tree,
            access=RequiredScope.ADMIN,
            summary="The live task tree",
            answer=TreeBody,
            tag="tree",
        ),
        Route(
            name="tree_events",
            method="GET",
            path="/v1/tree/events",
            handler=tree_events,
            access=RequiredScope.ADMIN,
            streams=True,
            summary="The tree's differences, as a stream",
            media="text/event-stream",
            tag="tree",
        ),
        Route(
            name="run_tree",
            method="GET",
            path="/v1/runs/{run_id}/tree",
            handler=get_run_tree,
            access=RequiredScope.RUNS,
            summary="What is alive of a run",
            answer=RunTree,
            errors=(404,),
            tag="runs",
        ),
    ]
