"""Work on other nodes that share the store: found by its rows, followed by signals, shown and stopped by a request to its node.

The node that runs the work answers with the receipt of its own stop. If the node is gone, the reaper has ended its work, and the receipt says
that the stop was not observed. Where a store has one owner, nothing here is called.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from .outcome import CancelCause, Cause, StopReceipt
from .ports import NODE_TOPIC, ROOT_TOPIC, RUN_TOPIC, NodeAnswer, NodeRequest, NodeRow, SignalStore

if TYPE_CHECKING:
    from .core import RuntimeCore
    from .lane import Lanes
    from .run import Runs

__all__ = ["Neighbours", "watch_run"]

STOP_SECONDS: Final = 30.0
"""The default time-out of a stop on another node."""

ANSWER_SECONDS: Final = 5.0
"""The additional time for the receipt of a stop to arrive."""

STOP_RUN: Final = "stop_run"
STOP_SESSION: Final = "stop_session"
STOP_JOBS: Final = "stop_jobs"
STOP_TURN: Final = "stop_turn"
RUN_TREE: Final = "run_tree"
TREE: Final = "tree"

LOOK_SECONDS: Final = 2.0
"""The time-out for another node to send its tree."""


@contextmanager
def watch_run(store: SignalStore, run_id: str, wake: Callable[[], None], *, settled: bool = True) -> Generator[None]:
    """Call `wake` when the row or the log of a run, or (with `settled`) what it started, may have changed, or when a node has gone."""
    with (
        store.subscribe(RUN_TOPIC, lambda _: wake(), run_id),
        store.subscribe(ROOT_TOPIC, lambda _: wake(), run_id) if settled else nullcontext(),
        store.subscribe(NODE_TOPIC, lambda _: wake()),
    ):
        yield


class Neighbours:
    """Shows and stops work on other nodes, and answers their requests about the work here."""

    def __init__(self, core: RuntimeCore, runs: Runs, lanes: Lanes) -> None:
        self._core = core
        self._runs = runs
        self._lanes = lanes

    @contextmanager
    def answering(self) -> Generator[None]:
        """Answer requests of other nodes for the body of the `with`."""
        with ExitStack() as stack:
            for kind, handler in (
                (STOP_RUN, self._run_here),
                (STOP_SESSION, self._session_here),
                (STOP_JOBS, self._jobs_here),
                (STOP_TURN, self._turn_here),
                (RUN_TREE, self._run_tree_here),
                (TREE, self._tree_here),
            ):
                stack.enter_context(self._core.membership.answering(kind, handler))
            yield

    # -- asking ------------------------------------------------------------------------------------------------------------------

    async def stop_run(self, run_id: str, node: str, cause: Cause, seconds: float = STOP_SECONDS) -> StopReceipt:
        """Stop a run on the node that runs it, with everything that it started. With `seconds` 0, request the stop without waiting for it."""
        return (await self._ask(node, STOP_RUN, run_id, cause, seconds))[0]

    async def stop_session(self, session_id: str, cause: Cause, *, turns: bool = True) -> list[StopReceipt]:
        """Stop the jobs of a session, and with `turns` its turns, on every other node that has any; return one receipt each."""
        receipts: list[StopReceipt] = []
        kind = STOP_SESSION if turns else STOP_JOBS

        async def ask(node: str) -> None:
            receipts.extend(await self._ask(node, kind, session_id, cause, STOP_SECONDS))

        owners = await self._core.store.session_owners(session_id)
        async with trio.open_nursery() as nursery:
            for node in owners:
                if node != self._core.store.owner:
                    nursery.start_soon(ask, node)
        return receipts

    async def stop_turn(
        self, inbox: str, session_key: str, cause: Cause, *, session_id: str = ""
    ) -> StopReceipt | None:
        """Stop the turn that the lane of a key runs on another node; return None if there is none. With `session_id`, only a turn of that session."""
        node = await self._core.store.lane_owner(inbox, session_key)
        if not node or node == self._core.store.owner:
            return None
        only = {"inbox": inbox, "session_id": session_id}
        found = await self._ask(node, STOP_TURN, session_key, cause, STOP_SECONDS, only)
        return found[0] if found else None

    async def run_tree(self, run_id: str, node: str) -> list[dict[str, Any]] | None:
        """Return the nodes of a run in the tree of the node that runs it; None if that node does not answer."""
        answer = await self._core.membership.ask(node, RUN_TREE, run_id, seconds=LOOK_SECONDS)
        return None if answer is None or answer.gone else answer.value.get("nodes")

    async def trees(self, tenant: str | None) -> list[tuple[NodeRow, dict[str, Any] | None]]:
        """Return the other nodes and the part of their trees that `tenant` may see (None: all); the tree is None if a node does not answer in time."""
        found: dict[str, dict[str, Any] | None] = {}

        async def ask(node: str) -> None:
            payload = {} if tenant is None else {"tenant": tenant}
            answer = await self._core.membership.ask(node, TREE, "", payload, seconds=LOOK_SECONDS)
            found[node] = None if answer is None else answer.value.get("tree")

        others = [row for row in await self._core.store.list_nodes() if row.incarnation != self._core.store.owner]
        async with trio.open_nursery() as nursery:
            for row in others:
                nursery.start_soon(ask, row.incarnation)
        return [(row, found[row.incarnation]) for row in others]

    async def _ask(
        self,
        node: str,
        kind: str,
        target: str,
        cause: Cause,
        seconds: float,
        more: Mapping[str, Any] | None = None,
    ) -> list[StopReceipt]:
        payload = {"cause": cause.kind.value, "detail": cause.detail, "seconds": seconds, **(more or {})}
        began = trio.current_time()
        wait = seconds + ANSWER_SECONDS if seconds else 0.0
        answer = await self._core.membership.ask(node, kind, target, payload, seconds=wait)
        if answer is not None and not answer.gone and "receipts" in answer.value:
            return msgspec.convert(list(answer.value["receipts"]), list[StopReceipt])
        return [_unseen(target, node, cause, answer, 1000 * (trio.current_time() - began))]

    # -- answering ---------------------------------------------------------------------------------------------------------------

    async def _run_here(self, request: NodeRequest) -> Mapping[str, Any]:
        cause, seconds = _asked(request)
        run = self._runs.find(request.target)
        if run is None:
            return _told(
                [StopReceipt(target=request.target, cause=cause, ok=True, milliseconds=0.0, already_ended=True)]
            )
        return _told([await run.stop_all(cause, seconds or STOP_SECONDS)])

    async def _session_here(self, request: NodeRequest) -> Mapping[str, Any]:
        cause, _ = _asked(request)
        receipts: list[StopReceipt] = []

        async def stop(turn: Any) -> None:
            receipts.append(await turn.stop(cause))

        async with trio.open_nursery() as nursery:
            for turn in list(self._core.live_turns.values()):
                if turn.context.session_id == request.target:
                    nursery.start_soon(stop, turn)
        receipts += await self._core.supervisor.stop_here(request.target, cause)
        return _told(receipts)

    async def _jobs_here(self, request: NodeRequest) -> Mapping[str, Any]:
        return _told(await self._core.supervisor.stop_here(request.target, _asked(request)[0]))

    async def _turn_here(self, request: NodeRequest) -> Mapping[str, Any]:
        turn = self._lanes.current(str(request.payload.get("inbox", "")), request.target)
        if turn is None or request.payload.get("session_id") not in ("", turn.context.session_id):
            return _told([])
        return _told([await turn.stop(_asked(request)[0])])

    async def _run_tree_here(self, request: NodeRequest) -> Mapping[str, Any]:
        run = self._runs.find(request.target)
        return {"nodes": [] if run is None else run.snapshot()}

    async def _tree_here(self, request: NodeRequest) -> Mapping[str, Any]:
        return {"tree": self._core.tree.snapshot(tenant=request.payload.get("tenant"))}


def _asked(request: NodeRequest) -> tuple[Cause, float]:
    payload = request.payload
    cause = Cause(CancelCause(payload.get("cause", CancelCause.STOP.value)), str(payload.get("detail", "")))
    return cause, float(payload.get("seconds", STOP_SECONDS))


def _told(receipts: list[StopReceipt]) -> Mapping[str, Any]:
    return {"receipts": msgspec.to_builtins(receipts)}


def _unseen(target: str, node: str, cause: Cause, answer: NodeAnswer | None, milliseconds: float) -> StopReceipt:
    """Return the receipt of a stop that was not observed: the node is gone, or has not answered (yet)."""
    if answer is None:
        why = f"node {node[:8]} has not answered yet; the stop stays asked for"
    elif answer.gone:
        why = f"node {node[:8]} is gone; what it ran was given its end, and nobody has seen it stop"
    else:
        why = f"node {node[:8]}: {answer.value.get('error', 'no receipt')}"
    return StopReceipt(target=target, cause=cause, ok=False, milliseconds=milliseconds, remaining=(why,))
