"""The one place that runs synchronous code: with the caller's context, a limiter, and a visible node.

Cancelling the caller gives the thread a grace period to end. If it does not, it moves to the tree's `abandoned` node, keeps its limiter token until it
ends, and is listed in the receipt of the stop. While a call is in flight a virtual clock does not advance.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Literal, TypeVar, TypeVarTuple, cast
from weakref import WeakKeyDictionary

import trio

from .context import current_binding
from .tree import Node, Tree

if TYPE_CHECKING:
    from trio.testing import MockClock

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

DEFAULT_GRACE: Final = 5.0
"""Seconds that a cancelled call may take to end before it counts as abandoned."""

_UNLIMITED: Final = trio.CapacityLimiter(math.inf)
"""The limiters of `Threads` hold a token until the thread has ended; Trio's limiter must not block in addition."""


def virtual_clock_of(clock: object) -> MockClock | None:
    """Return the clock if it is a virtual one. Does not import `trio.testing`, which loads a test runner: a program with a virtual clock has."""
    module = sys.modules.get("trio.testing")
    return cast("MockClock", clock) if module is not None and isinstance(clock, module.MockClock) else None


class _Held:
    """Virtual clocks that are held, each with the number of calls that hold it."""

    def __init__(self) -> None:
        self._held: WeakKeyDictionary[MockClock, list[float]] = WeakKeyDictionary()

    def hold(self, clock: object) -> None:
        """Keep a virtual clock from advancing until `release` has been called as often. Does nothing for a real one."""
        virtual = virtual_clock_of(clock)
        if virtual is not None:
            self._held.setdefault(virtual, []).append(virtual.autojump_threshold)
            virtual.autojump_threshold = math.inf

    def release(self, clock: object) -> bool:
        """Undo one `hold`; return whether there was one."""
        virtual = virtual_clock_of(clock)
        if virtual is None or not self._held.get(virtual):
            return False
        before = self._held[virtual].pop(0)
        if not self._held[virtual]:
            virtual.autojump_threshold = before
        else:
            self._held[virtual][0] = before
        return True


_clocks: Final = _Held()
hold_clock: Final = _clocks.hold
release_clock: Final = _clocks.release


@contextmanager
def exits_only_the_call() -> Generator[None]:
    """Make `SystemExit` in a thread that is not the program's main one a `RuntimeError`: it ends that call, as `sys.exit` does in any thread."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"sys.exit({error.code!r}) was called in a worker thread; it ends that call only") from error


async def wait_out(over: trio.Event, returned: threading.Event, grace: float, clock: object) -> None:
    """Wait for the end of the call, at most for the grace period, which is real time on a virtual clock too."""
    if virtual_clock_of(clock) is None:
        with trio.move_on_after(grace):
            await over.wait()
        return
    hold_clock(clock)
    try:
        if await trio.to_thread.run_sync(returned.wait, grace, limiter=_UNLIMITED):
            await over.wait()
    finally:
        release_clock(clock)


def abandon_call(node: Node, over: trio.Event) -> None:
    """Move the node of a call that outlives its cancelled caller to `abandoned`, and make a job of the call.

    The receipts of its turn or job count it, and what its input started has not settled, until `over` is set.
    """
    from .supervisor import Job  # which is awaited from asyncio, and so needs this module
    from .turn import Turn

    outer = node.parent
    node.note = "abandoned"
    node.move(node.tree.abandoned)
    while outer is not None and not isinstance(outer.work, Turn | Job):
        outer = outer.parent
    if outer is not None and isinstance(outer.work, Turn | Job):
        outer.left = [*(outer.left or ()), node]
        outer.work.core.supervisor.adopt_thread(node.name, outer.work.owner, over)


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
        returned = threading.Event()
        abandoned = False

        def ended() -> None:
            self.in_flight -= 1
            limiter.release_on_behalf_of(holder)
            release_clock(clock)
            over.set()
            if abandoned and node is not None:
                node.close("ended late")

        def call() -> T:
            try:
                with exits_only_the_call():
                    return function(*args)
            finally:
                returned.set()
                try:
                    token.run_sync_soon(ended)
                except trio.RunFinishedError:
                    pass

        self.in_flight += 1
        hold_clock(clock)
        try:
            return await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=_UNLIMITED)
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                await wait_out(over, returned, grace, clock)
            if not over.is_set() and node is not None:
                abandoned = True
                abandon_call(node, over)
            raise
