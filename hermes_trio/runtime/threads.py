"""The one place that runs synchronous code: with the caller's context, a limiter, and a visible node.

Cancelling the caller gives the thread a grace to end. One that stays deaf moves to the tree's `abandoned` node, keeps its limiter token until it
really ends, and makes the receipt of the stop say so. While a call is in flight a virtual clock stands still.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Literal, Protocol, TypeVar, TypeVarTuple, runtime_checkable

import trio

from .context import current_binding
from .tree import Node, Tree

__all__ = ["HoldableClock", "Threads"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

DEFAULT_GRACE: Final = 5.0
"""Seconds that a cancelled call may take to end before it counts as abandoned."""

_UNLIMITED: Final = trio.CapacityLimiter(math.inf)
"""Our own limiters hold the token until the thread has ended; Trio's must not be waited for on top."""


@runtime_checkable
class HoldableClock(Protocol):
    """A virtual clock that can be told to stand still while real work is going on."""

    def hold(self) -> None: ...

    def release(self) -> None: ...


class Threads:
    """Worker threads of one runtime. Agents and leaf calls have separate limiters, so that an agent never waits for its own leaf call."""

    def __init__(self, tree: Tree, *, agents: int = 64, leaves: int = 64, grace: float = DEFAULT_GRACE) -> None:
        self._tree = tree
        self._limiters = {"agent": trio.CapacityLimiter(agents), "leaf": trio.CapacityLimiter(leaves)}
        self._grace = grace
        self._count = 0
        self.in_flight: int = 0

    async def run_sync(
        self,
        function: Callable[[*Ts], T],
        *args: *Ts,
        name: str = "",
        pool: Literal["agent", "leaf"] = "leaf",
        grace: float | None = None,
    ) -> T:
        """Run `function(*args)` in a worker thread and return its result.

        On cancellation the call is given `grace` seconds to end; its result is dropped either way, and `Cancelled` is raised.
        """
        self._count += 1
        words = name or getattr(function, "__qualname__", type(function).__name__)
        outer = current_binding()
        grace = self._grace if grace is None else grace
        if outer is None or outer.node is None:
            return await self._run(function, args, pool, grace, None)
        node = outer.node.open("thread", f"thread_{self._count}", name=words)
        ended = "failed"
        try:
            result = await self._run(function, args, pool, grace, node)
            ended = "finished"
            return result
        except trio.Cancelled:
            ended = "cancelled"
            raise
        finally:
            if node.parent is not self._tree.abandoned:
                node.close(ended)

    async def _run(
        self, function: Callable[[*Ts], T], args: tuple[*Ts], pool: str, grace: float, node: Node | None
    ) -> T:
        limiter = self._limiters[pool]
        holder = object()
        if node is not None:
            node.waits = ["a free thread"]
        await limiter.acquire_on_behalf_of(holder)
        if node is not None:
            node.waits = [f"thread {node.name}"]
        try:
            # From here to the start of the thread nothing else can run: a started thread always calls `ended`.
            await trio.lowlevel.checkpoint_if_cancelled()
        except trio.Cancelled:
            limiter.release_on_behalf_of(holder)
            raise
        token = trio.lowlevel.current_trio_token()
        clock = trio.lowlevel.current_clock()
        over = trio.Event()
        abandoned = False

        def ended() -> None:
            self.in_flight -= 1
            limiter.release_on_behalf_of(holder)
            if isinstance(clock, HoldableClock):
                clock.release()
            over.set()
            if abandoned and node is not None:
                node.close("ended late")

        def call() -> T:
            try:
                return function(*args)
            finally:
                try:
                    token.run_sync_soon(ended)
                except trio.RunFinishedError:
                    pass

        self.in_flight += 1
        if isinstance(clock, HoldableClock):
            clock.hold()
        try:
            return await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=_UNLIMITED)
        except trio.Cancelled:
            if isinstance(clock, HoldableClock) and not over.is_set():
                # The grace is real time: a clock that stands still would make it last for ever.
                clock.release()
                with trio.CancelScope(shield=True, deadline=trio.current_time() + grace):
                    await over.wait()
                clock.hold()
            else:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + grace):
                    await over.wait()
            if not over.is_set() and node is not None:
                abandoned = True
                node.note = "abandoned"
                node.move(self._tree.abandoned)
            raise
