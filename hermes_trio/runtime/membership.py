"""Membership: the lease that says whether this process still owns its work, and the singletons that run on one of several nodes.

A store that several nodes share gives each a lease. This scope lies between the store and the stages: it renews the lease, ends the tree when the lease is
lost, reaps expired nodes, runs singletons, and answers requests of other nodes. The lease counts as lost when the store says so, and also when this
process cannot reach it: by its own monotonic clock, counted from the moment at which the last successful heartbeat was *sent*, with a margin. A store with
one owner has no lease: nothing is renewed, and every singleton runs here.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Final

import trio

from .context import Binding, _binding
from .errors import Fenced, MembershipLost
from .ports import ANSWER_TOPIC, LEASE_TOPIC, NODE_TOPIC, REQUEST_TOPIC, NodeAnswer, NodeRequest, NodeRow
from .shares import SharedSpending
from .tree import EMPTY_CONTEXT, waiting

if TYPE_CHECKING:
    from .core import RuntimeCore

__all__ = ["Membership", "RequestHandler"]

logger: Final = logging.getLogger("hermes_trio.runtime.membership")

BEATS: Final = 3
"""Heartbeats in the time of a lease."""

MARGIN: Final = 0.1
"""The fraction of a lease that this node does not use: the clocks of other nodes may run faster than its own."""

RETRY_SECONDS: Final = 1.0

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
        self._sent: float = trio.current_time()
        self._reaping: bool = False
        self._after_reap: list[Callable[[], Awaitable[object]]] = []
        self._beat = trio.Event()
        self._beaten = trio.Event()
        self._shares: dict[str, SharedSpending] = {}
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
        with trio.move_on_after(self._core.settings.finish_seconds) as bound:
            try:
                await self._core.store.leave_node(self._core.epoch)
            except Exception as error:
                logger.error("this node could not leave, its lease runs out by itself: %s", error)
        if bound.cancelled_caught:
            logger.error("this node could not leave in time, its lease runs out by itself")

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
            self._beat.set()
            self._beaten.set()

    async def _look(self) -> None:
        """Read the nodes of the store after each heartbeat, and when one has joined or left."""
        store = self._core.store
        while True:
            self._beaten = trio.Event()
            with store.subscribe(NODE_TOPIC, lambda _: self._beaten.set()):
                await self.read_nodes()
                await self._beaten.wait()

    async def read_nodes(self) -> None:
        """Read the nodes of the store, and pass their spending to the shared limits. A failure is logged."""
        try:
            self.nodes = await self._core.store.list_nodes()
        except Exception as error:
            logger.warning("the other nodes could not be read, the next heartbeat tries again: %s", error)
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
        while True:
            try:
                return await self._core.store.renew_node(self.describe())
            except Fenced:
                raise
            except Exception as error:
                logger.warning("the lease of this node could not be renewed, trying again: %s", error)
                await trio.sleep(min(RETRY_SECONDS, beat / 5))

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

    def _lose(self, reason: str) -> None:
        if self.lost:
            return
        logger.error("this node ends, because it may own nothing any more: %s", reason)
        self.lost = reason
        self._on_loss(reason)

    async def _reap(self) -> None:
        """Take over the work of nodes whose lease has expired, then call the `after_reap` callbacks."""
        try:
            found = await self._core.store.reap(self._core.epoch)
            logger.warning(
                "took over what a node left: %d runs ended, %d jobs lost, %d approvals expired, %d replies queued again",
                found.runs_interrupted,
                found.jobs_lost,
                found.approvals_expired,
                found.outbox_requeued,
            )
        except Exception as error:
            logger.error("a node that has expired could not be reaped, the next heartbeat tries again: %s", error)
            return
        finally:
            self._reaping = False
        for settle in list(self._after_reap):
            try:
                await settle()
            except Exception:
                logger.exception("what a node left could not be settled; the next one that is reaped tries again")

    @contextmanager
    def after_reap(self, settle: Callable[[], Awaitable[object]]) -> Generator[None]:
        """Call `settle` after each reap by this node, for the body of the `with`: for callers that wait for work of the reaped node."""
        self._after_reap.append(settle)
        try:
            yield
        finally:
            self._after_reap.remove(settle)

    # -- singletons --------------------------------------------------------------------------------------------------------------

    async def run_alone(self, name: str, function: Callable[[], Awaitable[object]]) -> None:
        """Run `function` on one node at a time: wait until no other node runs it, and release the lease when it returns, raises or is cancelled.

        Cancelling the caller cancels it; losing the lease of the node ends the tree, and `function` with it.
        """
        async with self.holding(name):
            await function()

    @asynccontextmanager
    async def holding(self, name: str) -> AsyncIterator[None]:
        """Hold the lease `name` for the body of the `async with`; wait while another node holds it. Does nothing where a store has one owner.

        It does not exclude tasks of this process from each other: claiming a lease that this node holds succeeds.
        """
        if not self._core.shared:
            yield
            return
        await self._claim(name)
        try:
            yield
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + self._core.settings.finish_seconds):
                try:
                    await self._core.store.release_lease(name)
                except Exception as error:
                    logger.error("the lease %s could not be released, it ends with this node: %s", name, error)

    async def _claim(self, name: str) -> None:
        store = self._core.store
        while True:
            free = trio.Event()
            with store.subscribe(LEASE_TOPIC, lambda _, free=free: free.set(), name):
                try:
                    if await store.claim_lease(name):
                        return
                except Fenced as error:
                    self._lose(str(error))  # the next heartbeat would fail the same way
                except Exception as error:
                    logger.error("the lease %s could not be claimed, trying again: %s", name, error)
                    await trio.sleep(RETRY_SECONDS)
                    continue
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
        self, node: str, kind: str, target: str, payload: Mapping[str, Any] | None = None, *, seconds: float = 30.0
    ) -> NodeAnswer | None:
        """Send a request to a node and wait at most `seconds` for its answer; return None if none came in that time.

        `gone` in the answer means that the node did not exist or was reaped before it answered. With `seconds` 0 the request stays, durably.
        """
        store = self._core.store
        request = NodeRequest(
            id=self._core.ids.make("req_", 16), node=node, kind=kind, target=target, payload=payload or {}
        )
        answered = trio.Event()
        with store.subscribe(ANSWER_TOPIC, lambda _: answered.set(), request.id):
            if not await store.ask_node(request):
                return NodeAnswer(gone=True)
            with trio.move_on_after(seconds), waiting(f"node {node[:8]} to answer {kind} {target}"):
                while True:
                    found = await store.get_answer(request.id)
                    if found is not None:
                        return found
                    await answered.wait()
                    answered = trio.Event()
        return None

    async def _serve(self, nursery: trio.Nursery) -> None:
        """Answer requests of other nodes, after each signal and at each heartbeat, because a signal may be lost."""
        store = self._core.store
        while True:
            self._beat = trio.Event()
            with store.subscribe(REQUEST_TOPIC, lambda _: self._beat.set(), store.owner):
                try:
                    for request in await store.take_requests():
                        nursery.start_soon(self._answer, request)
                except Exception as error:
                    logger.warning("the requests of other nodes could not be read, trying again: %s", error)
                await self._beat.wait()

    async def _answer(self, request: NodeRequest) -> None:
        handler = self._handlers.get(request.kind)
        try:
            if handler is None:
                value: Mapping[str, Any] = {"error": f"this node answers no requests of kind {request.kind!r}"}
            else:
                value = await handler(request)
        except Exception as error:
            logger.exception("the request %s %s of another node failed", request.kind, request.target)
            value = {"error": f"the node failed with {type(error).__name__}"}
        try:
            await self._core.store.answer_request(request.id, value)
        except Exception as error:
            logger.error("the answer to request %s could not be written: %s", request.id, error)
