"""Work on other nodes that share the store: found by its rows, followed by signals, shown and stopped by a request to its node.

The node that runs the work answers with the receipt of its own stop. If the node has ended, the reaper has ended its work, and the receipt says
that the stop was not observed. Where a store has one owner, nothing here is called.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from .outcome import CancelCause, Cause
from .ports import NODE_TOPIC, ROOT_TOPIC, RUN_TOPIC, NodeAnswer, NodeRequest, NodeRow, SignalStore
from .stop_receipt import StopReceipt
from .tree import NodeView, cut_view, part_of

if TYPE_CHECKING:
    from .core import RuntimeCore
    from .lane import Lanes
    from .run import Runs

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

MOST_NODES: Final = 20_000
"""The number of tree nodes that all other nodes together send, in equal shares."""

LEAST_NODES: Final = 200
"""The share of each node where there are very many."""


class PeerTree(msgspec.Struct, frozen=True):
    """The tree of another node, cut to the nodes nearest to its root if it is large; `size` is the number before that."""

    tree: NodeView
    size: int


@contextmanager
def watch_run(store: SignalStore, run_id: str, wake: Callable[[], None], *, settled: bool = True) -> Generator[None]:
    """Call `wake` when the row or the log of a run, or (with `settled`) what it started, may have changed, or when a node has ended."""
    with (
        store.subscribe(RUN_TOPIC, lambda _: wake(), run_id),
        store.subscribe(ROOT_TOPIC, lambda _: wake(), run_id) if settled else nullcontext(),
        store.subscribe(NODE_TOPIC, lambda _: wake()),
    ):
        yield


async def all_of(calls: Iterable[Callable[[], Awaitable[object]]]) -> None:
    """Make all calls concurrently. If one fails, the others are cancelled, and its exception is raised as it is, not in a group."""
    failures: list[Exception] = []

    async def make(call: Callable[[], Awaitable[object]]) -> None:
        try:
            await call()
        except Exception as error:
            failures.append(error)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for call in calls:
            nursery.start_soon(make, call)
    if failures:
        raise failures[0]


class Peers:
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
        """Stop the jobs of a session, and with `turns` its turns, on every other node that has any; return one receipt each.

        A turn that waits for the session has no row yet, so with `turns` all nodes are asked; those without rows of the session have `LOOK_SECONDS` to answer.
        """
        receipts: list[StopReceipt] = []
        kind = STOP_SESSION if turns else STOP_JOBS
        store = self._core.store

        async def ask(node: str) -> None:
            receipts.extend(await self._ask(node, kind, session_id, cause, STOP_SECONDS))

        async def ask_briefly(node: str) -> None:
            answer = await self._core.membership.ask(
                node, kind, session_id, _payload(cause, STOP_SECONDS), seconds=LOOK_SECONDS
            )
            if answer is not None and "receipts" in answer.value:
                receipts.extend(msgspec.convert(list(answer.value["receipts"]), list[StopReceipt]))

        owners = set(await store.session_owners(session_id))
        others = {row.incarnation for row in await store.list_nodes()} - owners if turns else set[str]()
        await all_of(
            [partial(ask, node) for node in owners if node != store.owner]
            + [partial(ask_briefly, node) for node in others if node != store.owner]
        )
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

    async def trees(self, tenant: str | None, session: str = "") -> list[tuple[NodeRow, PeerTree | None]]:
        """Return the other nodes and the part of their trees that `tenant` may see (None: all); the tree is None if a node does not answer in time.

        With `session`, only the part of that session (by key or id).
        """
        found: dict[str, PeerTree | None] = {}
        others = [row for row in await self._core.store.list_nodes() if row.incarnation != self._core.store.owner]
        payload: dict[str, Any] = {"most": max(LEAST_NODES, MOST_NODES // max(1, len(others))), "session": session}
        if tenant is not None:
            payload["tenant"] = tenant

        async def ask(node: str) -> None:
            answer = await self._core.membership.ask(node, TREE, "", payload, seconds=LOOK_SECONDS)
            found[node] = None
            if answer is not None and "tree" in answer.value:
                found[node] = msgspec.convert(answer.value, PeerTree)

        await all_of([partial(ask, row.incarnation) for row in others])
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
        payload = {**_payload(cause, seconds), **(more or {})}
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
            async with self._runs.claiming:
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
        payload = request.payload
        tree, size = self._core.tree.view(tenant=payload.get("tenant"))
        if payload.get("session"):
            tree, size = part_of(tree, payload["session"])
        cut_view(tree, int(payload.get("most", LEAST_NODES)))
        return msgspec.to_builtins(PeerTree(tree, size))


def _payload(cause: Cause, seconds: float) -> dict[str, Any]:
    return {"cause": cause.kind.value, "detail": cause.detail, "seconds": seconds}


def _asked(request: NodeRequest) -> tuple[Cause, float]:
    payload = request.payload
    cause = Cause(CancelCause(payload.get("cause", CancelCause.STOP.value)), str(payload.get("detail", "")))
    return cause, float(payload.get("seconds", STOP_SECONDS))


def _told(receipts: list[StopReceipt]) -> Mapping[str, Any]:
    return {"receipts": msgspec.to_builtins(receipts)}


def _unseen(target: str, node: str, cause: Cause, answer: NodeAnswer | None, milliseconds: float) -> StopReceipt:
    """Return the receipt of a stop that was not observed: the node has ended, or has not answered (yet)."""
    if answer is None:
        why = f"node {node[:8]} has not answered yet; the request to stop stays in the store"
    elif answer.gone:
        why = f"node {node[:8]} has ended; its work was ended in the store, and the stop was not observed"
    else:
        why = f"node {node[:8]}: {answer.value.get('error', 'no receipt')}"
    return StopReceipt(target=target, cause=cause, ok=False, milliseconds=milliseconds, remaining=(why,))
