"""Membership: the lease that says whether this process still owns its work, and the singletons that run on one of several nodes.

A store that several nodes share gives each a lease. This scope lies between the store and the stages: it renews the lease, ends the tree when the lease is
lost, reaps expired nodes, runs singletons, and answers requests of other nodes. The lease counts as lost when the store says so, and also when this
process cannot reach it: by its own monotonic clock, counted from the moment at which the last successful heartbeat was *sent*, with a margin. A store with
one owner has no lease: nothing is renewed, and every singleton runs here.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import trio

from .context import Binding, _binding
from .errors import Fenced, MembershipLost
from .ports import ANSWER_TOPIC, LEASE_TOPIC, NODE_TOPIC, REAP_TOPIC, REQUEST_TOPIC, NodeAnswer, NodeRequest, NodeRow
from .retrying import retried
from .shares import SharedSpending
from .tree import EMPTY_CONTEXT, waiting

if TYPE_CHECKING:
    from .core import RuntimeCore

logger: Final = logging.getLogger("hermes_trio.runtime.membership")

BEATS: Final = 3
"""Heartbeats in the time of a lease."""

MARGIN: Final = 0.1
"""The fraction of a lease that this node does not use: the clocks of other nodes may run faster than its own."""

RETRY_SECONDS: Final = 1.0

CLAIM_SECONDS: Final = 10.0
"""The longest pause between two attempts to claim a lease: a bot stands still for that long after the store works again."""

ASK_SECONDS: Final = 5.0
"""How long writing a request is retried."""

ASK_PAUSE: Final = 0.5

LATE_SECONDS: Final = 0.2
"""The delay between the expiry of another node's lease and its reaping: a heartbeat in flight may still arrive."""

RequestHandler = Callable[[NodeRequest], Awaitable[Mapping[str, Any]]]
"""Answers a request of another node. If it raises, the answer has the name of the exception's class."""


class Membership:
    """The membership of one runtime. `lost` is the reason why its lease was lost; empty while it is held."""

    def __init__(self, core: RuntimeCore, on_loss: Callable[[str], None]) -> None:
        self._core = core
        self._on_loss = on_loss
        self._handlers: dict[str, RequestHandler] = {}
        self._answering: set[str] = set()
        """The requests that are handled, or whose answers are not written yet: the store hands out a request until it knows that this node has it."""
        self._sent: float = trio.current_time()
        self._reaping: bool = False
        self._reaps: int = 0
        """Attempts to reap. One that failed may have been written."""
        self._settled: int = 0
        """How many of them the `after_reap` callbacks have settled."""
        self._settling: bool = False
        self._after_reap: list[Callable[[], Awaitable[object]]] = []
        self._beat = trio.Event()
        self._beaten = trio.Event()
        self._shares: dict[str, SharedSpending] = {}
        self._holders: dict[str, int] = {}
        """The tasks of this node that hold a lease, or wait for it, by its name. 0: it may not be released yet in the store."""
        self.nodes: Sequence[NodeRow] = ()
        """The nodes of the store, this one among them, as they were at the last heartbeat."""
        self.lost: str = ""
        self.configuration: str = ""
        """A fingerprint of this node's configuration: all nodes should have the same."""

    def joining(self) -> None:
        """Start the time of the lease, just before the node's row is written."""
        self._sent = trio.current_time()

    def check(self) -> None:
        """Raise `MembershipLost` if the lease was lost."""
        if self.lost:
            raise MembershipLost(self.lost)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Hold the lease for the body of the `async with`. An orderly exit ends the node at once: other nodes do not wait for its expiry."""
        if not self._core.shared:
            yield
            return
        node = self._core.tree.root.open("membership", self._core.store.owner[:8])
        token = _binding.set(Binding(EMPTY_CONTEXT, None, node))
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep, nursery, name="lease")
                nursery.start_soon(self._serve, nursery, name="requests of other nodes")
                nursery.start_soon(self._look, name="other nodes")
                try:
                    with self._core.store.subscribe(REAP_TOPIC, self._note_reap):
                        yield
                finally:
                    nursery.cancel_scope.cancel()
            await self._leave()
        finally:
            _binding.reset(token)
            node.close()

    async def _leave(self) -> None:
        if self.lost:
            return
        with self._core.waits.bound(shield=False) as bound:
            try:
                await self._core.store.leave_node(self._core.epoch)
            except Exception as error:
                logger.error("could not remove node %s from the store; its lease expires: %s", self._name, error)
        if bound.cancelled_caught:
            logger.error("could not remove node %s from the store in time; its lease expires", self._name)

    # -- the lease ---------------------------------------------------------------------------------------------------------------

    async def _keep(self, nursery: trio.Nursery) -> None:
        """Renew the lease until it is lost."""
        lease = self._core.store.lease_seconds
        pause = beat = lease / BEATS
        while True:
            with waiting(f"the next heartbeat, in {pause:.1f} s"):
                await trio.sleep(pause)
            sent = trio.current_time()
            until = self._sent + lease * (1 - MARGIN)
            others: float | None = None
            with trio.move_on_at(until) as bound:
                try:
                    others = await self._renew(beat)
                except Fenced as error:
                    self._lose(str(error))
                    return
            if bound.cancelled_caught or sent >= until:
                self._lose(f"the lease of this node was not renewed within {lease:g} s")
                return
            self._sent = sent
            pause = beat
            if others is not None:
                if others <= 0 and not self._reaping:
                    self._reaping = True
                    nursery.start_soon(self._reap, name="reaper")
                elif 0 < others < beat:
                    pause = others + LATE_SECONDS
            if self._settled < self._reaps and not self._reaping:
                nursery.start_soon(self._settle, name="settling")
            self._beat.set()
            self._beaten.set()

    async def _look(self) -> None:
        """Read the nodes of the store, and release what no task holds, after each heartbeat, and when a node has joined or left."""
        store = self._core.store
        while True:
            self._beaten = trio.Event()
            with store.subscribe(NODE_TOPIC, lambda _: self._beaten.set()):
                await self.read_nodes()
                for name in [name for name, holders in self._holders.items() if not holders]:
                    await self._release(name)
                await self._beaten.wait()

    async def read_nodes(self) -> None:
        """Read the nodes of the store, and pass their spending to the shared limits. A failure is logged."""
        try:
            self.nodes = await self._core.store.list_nodes()
        except Exception as error:
            logger.warning("node %s could not read the other nodes; the next heartbeat retries: %s", self._name, error)
            return
        own = self._core.store.owner
        others = {row.incarnation: row.info.get("spent", {}) for row in self.nodes if row.incarnation != own}
        for name, share in self._shares.items():
            share.hear({node: spent.get(name, {}) for node, spent in others.items()})

    def share(self, name: str, heard: Callable[[str, int], None]) -> SharedSpending:
        """Share the limit `name` with the other nodes, for as long as the membership lasts; `heard(key, amount)` receives their spending."""
        share = self._shares[name] = SharedSpending(heard)
        return share

    async def _renew(self, beat: float) -> float | None:
        pause, what = min(RETRY_SECONDS, beat / 5), f"renew the lease of node {self._name}"
        return await retried(lambda: self._core.store.renew_node(self.describe()), what, first=pause, longest=pause)

    def describe(self) -> dict[str, Any]:
        """Return the facts about this node that its heartbeat publishes."""
        core = self._core
        return {
            "epoch": core.epoch,
            "turns": len(core.live_turns),
            "jobs": len(core.supervisor),
            "draining": core.draining,
            "configuration": self.configuration,
            "spent": {name: said for name, share in self._shares.items() if (said := share.say())},
        }

    @property
    def _name(self) -> str:
        """Return the id of this node, as log lines show it."""
        return self._core.store.owner[:8]

    async def is_fenced(self) -> bool:
        """Return whether this node was taken over, after the store refused a write of it; then its tree is being ended. Retries until the store answers."""
        if not self._core.shared:
            return False
        lease = self._core.store.lease_seconds
        with trio.move_on_at(self._sent + lease * (1 - MARGIN)):
            try:
                await self._renew(lease / BEATS)
            except Fenced as error:
                self._lose(str(error))
            else:
                return False
        self._lose(f"the lease of this node was not renewed within {lease:g} s")
        return True

    def _lose(self, reason: str) -> None:
        if self.lost:
            return
        logger.error("node %s has lost its membership and ends: %s", self._name, reason)
        self.lost = reason
        self._on_loss(reason)

    async def _reap(self) -> None:
        """Take over the work of nodes whose lease has expired, then call the `after_reap` callbacks."""
        now = self._core.store.now()
        expired = ", ".join(row.incarnation[:8] for row in self.nodes if row.expires_at <= now) or "unknown"
        self._reaps += 1
        try:
            found = await self._core.store.reap(self._core.epoch)
            logger.warning(
                "node %s took over the work of expired nodes (%s): %d runs ended, %d to begin again, %d jobs lost, %d approvals expired,"
                " %d replies queued again",
                self._name,
                expired,
                found.runs_interrupted,
                found.runs_released,
                found.jobs_lost,
                found.approvals_expired,
                found.outbox_requeued,
            )
        except Exception as error:
            logger.error("could not reap expired nodes (%s); the next heartbeat retries: %s", expired, error)
            return
        finally:
            self._reaping = False
        await self._settle()

    def _note_reap(self, node: str) -> None:
        """Note that another node has reaped its own work when it left: the next heartbeat settles it."""
        self._reaps += 1

    async def _settle(self) -> None:
        """Call the `after_reap` callbacks until all have succeeded after the last reap. If one fails, the next heartbeat retries."""
        if self._settling:
            return
        self._settling = True
        try:
            while (reaps := self._reaps) > self._settled:
                failed = False
                for settle in list(self._after_reap):
                    try:
                        await settle()
                    except Exception:
                        failed = True
                        logger.exception("could not settle the work of expired nodes; the next heartbeat retries")
                if failed:
                    return
                self._settled = reaps
        finally:
            self._settling = False

    @contextmanager
    def after_reap(self, settle: Callable[[], Awaitable[object]]) -> Generator[None]:
        """Call `settle` after each reap by this node, and after a node has left and interrupted sessions of its own, for the body of the `with`.

        It is also called after a reap without an answer, and again after the next heartbeat if it, or another callback, raises.
        """
        self._after_reap.append(settle)
        try:
            yield
        finally:
            self._after_reap.remove(settle)

    # -- singletons --------------------------------------------------------------------------------------------------------------

    async def run_alone(self, name: str, function: Callable[[], Awaitable[object]]) -> None:
        """Run `function` on one node at a time: wait until no other node runs it, and release the lease when it returns, raises or is cancelled.

        Retries while the store fails. Cancelling the caller cancels it; losing the lease of the node ends the tree, and `function` with it.
        """
        async with self._hold(name, retry=True):
            await function()

    @asynccontextmanager
    async def holding(self, name: str) -> AsyncIterator[None]:
        """Hold the lease `name` for the body of the `async with`; wait while another node holds it. Does nothing where a store has one owner.

        Raises what the store raises if the lease cannot be claimed. It does not exclude tasks of this process from each other: claiming a lease that
        this node holds succeeds, and it is released when the last of them leaves.
        """
        async with self._hold(name, retry=False):
            yield

    @asynccontextmanager
    async def _hold(self, name: str, *, retry: bool) -> AsyncIterator[None]:
        if not self._core.shared:
            yield
            return
        self._holders[name] = self._holders.get(name, 0) + 1
        claimed = False
        try:
            await self._claim(name, retry=retry)
            claimed = True
            yield
        finally:
            self._holders[name] -= 1
            # A claim that failed or was cancelled may have been written: the next heartbeat releases it.
            if claimed and not self._holders[name]:
                with self._core.waits.bound():
                    await self._release(name)  # noqa: ASYNC102 - `bound` shields, with a deadline

    async def _release(self, name: str) -> None:
        try:
            await self._core.store.release_lease(name)
        except Exception as error:
            logger.error("could not release the lease %s; the next heartbeat retries: %s", name, error)
        else:
            if not self._holders.get(name, 1):
                del self._holders[name]

    async def _claim(self, name: str, *, retry: bool) -> None:
        store = self._core.store
        while True:
            free = trio.Event()
            with store.subscribe(LEASE_TOPIC, lambda _, free=free: free.set(), name):
                try:
                    if await retried(
                        lambda: store.claim_lease(name),
                        f"claim the lease {name}",
                        longest=CLAIM_SECONDS,
                        over=lambda: not retry,
                    ):
                        return
                except Fenced as error:
                    self._lose(str(error))  # the next heartbeat would fail the same way
                if self.lost:
                    await trio.lowlevel.checkpoint()  # cancels a task of the tree; others get the error below
                    self.check()
                with waiting(f"the node that runs {name}"):
                    await free.wait()

    # -- requests ----------------------------------------------------------------------------------------------------------------

    @contextmanager
    def answering(self, kind: str, handler: RequestHandler) -> Generator[None]:
        """Answer requests of this kind with `handler`, for the body of the `with`."""
        if kind in self._handlers:
            raise ValueError(f"requests of kind {kind!r} are answered already")
        self._handlers[kind] = handler
        try:
            yield
        finally:
            del self._handlers[kind]

    async def ask(
        self,
        node: str,
        kind: str,
        target: str,
        payload: Mapping[str, Any] | None = None,
        *,
        seconds: float = 30.0,
        shown: bool = True,
    ) -> NodeAnswer | None:
        """Send a request to a node and wait at most `seconds` for its answer; return None if none came in that time.

        Raises what the store raises if the request cannot be written within `ASK_SECONDS`. `gone` in the answer means that the node did not exist or was reaped
        before it answered. With `seconds` 0 the request stays, durably. Without `shown` the wait is not in the tree: two nodes that follow each other's trees
        would report each request as a change.
        """
        store = self._core.store
        request = NodeRequest(
            id=self._core.ids.make("req_", 16), node=node, kind=kind, target=target, payload=payload or {}
        )
        answered = trio.Event()
        until = trio.current_time() + min(seconds, ASK_SECONDS)
        # Under the same id, and until it is read: a repetition of the whole call would be another request.
        send = partial(retried, first=ASK_PAUSE, longest=ASK_PAUSE, over=lambda: trio.current_time() >= until)
        read = partial(retried, first=ASK_PAUSE, longest=ASK_PAUSE)
        with store.subscribe(ANSWER_TOPIC, lambda _: answered.set(), request.id):
            if not await send(lambda: store.ask_node(request), f"send {kind} to node {node[:8]}"):
                return NodeAnswer(gone=True)
            words = waiting(f"node {node[:8]} to answer {kind} {target}") if shown else nullcontext()
            with trio.move_on_after(seconds), words:
                while True:
                    found = await read(lambda: store.get_answer(request.id), f"read the answer of node {node[:8]}")
                    if found is not None:
                        return found
                    await answered.wait()
                    answered = trio.Event()
        return None

    async def _serve(self, nursery: trio.Nursery) -> None:
        """Answer requests of other nodes, after each signal and at each heartbeat, because a signal may be lost."""
        store = self._core.store
        got: Sequence[str] = ()
        while True:
            self._beat = trio.Event()
            with store.subscribe(REQUEST_TOPIC, lambda _: self._beat.set(), store.owner):
                try:
                    requests = await store.take_requests(got)
                except Exception as error:
                    logger.warning(
                        "node %s could not read the requests of other nodes; retrying: %s", self._name, error
                    )
                else:
                    got = [request.id for request in requests]
                    for request in requests:
                        if request.id not in self._answering:
                            self._answering.add(request.id)
                            nursery.start_soon(self._answer, request)
                    if got:
                        continue  # with their ids, so that the store drops their texts
                await self._beat.wait()

    async def _answer(self, request: NodeRequest) -> None:
        handler = self._handlers.get(request.kind)
        try:
            if handler is None:
                value: Mapping[str, Any] = {"error": f"this node answers no requests of kind {request.kind!r}"}
            else:
                value = await handler(request)
        except Exception as error:
            logger.exception(
                "request %s of another node (%s %s) failed; the answer says so",
                request.id,
                request.kind,
                request.target,
            )
            value = {"error": f"the node failed with {type(error).__name__}"}
        what = f"write the answer to request {request.id}"
        try:
            write = partial(self._core.store.answer_request, request.id, value)
            await retried(write, what, first=0.1, longest=5.0, works=self._core.ends.works)
        except Exception as error:
            logger.error("could not %s; the asking node times out: %s", what, error)
        finally:
            self._answering.discard(request.id)
