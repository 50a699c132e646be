"""The asyncio loop of a runtime, for agents and tools that are written for asyncio.

One loop in one thread, started by the first use and ended with the runtime, inside the supervisor: no turn or job can outlive it. A program that runs
asyncio itself lends its own loop (`AsyncioRuntime`); then there is no thread, and the loop is its owner's to close.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, TypeVar, TypeVarTuple, cast

import trio

from .context import current_binding
from .errors import RuntimeClosed
from .threads import hold_clock, release_clock, wait_out
from .tree import Node, Tree

if TYPE_CHECKING:
    import asyncio

    from .turn import Turn

__all__ = ["AsyncioLoop"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

CLOSE_SECONDS: Final = 5.0
"""How long the thread of the loop may take to end before it is shown as abandoned."""


class AsyncioLoop:
    """Runs coroutine functions of asyncio for tasks of Trio."""

    def __init__(self, tree: Tree, *, grace: float) -> None:
        self._tree = tree
        self._grace = grace
        self._count = 0
        self._starting = trio.Lock()
        self._thread: threading.Thread | None = None
        self._ended: trio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: Callable[[], object] | None = None
        self._closed = False
        self._token: trio.lowlevel.TrioToken | None = None
        self.node: Node | None = None

    @property
    def descriptors(self) -> frozenset[int]:
        """The descriptors that belong to the thread's loop: its selector and its wake-up sockets."""
        if self._thread is None or self._loop is None or self._loop.is_closed():
            return frozenset()
        parts = (getattr(self._loop, name, None) for name in ("_selector", "_ssock", "_csock"))
        return frozenset(part.fileno() for part in parts if part is not None)

    @property
    def thread(self) -> threading.Thread | None:
        """The thread of the loop, if it was started."""
        return self._thread

    def lend(self, loop: asyncio.AbstractEventLoop) -> None:
        """Use `loop`, which somebody else runs and closes, instead of one in a thread of our own. Called before the first use."""
        assert self._loop is None
        self._loop = loop

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """End the loop's thread, if it was started, after the body. A thread that stays deaf moves to the tree's `abandoned` node."""
        try:
            yield
        finally:
            self._closed = True
            if self._thread is not None:
                with trio.CancelScope(shield=True):
                    await self._close()

    async def run(self, function: Callable[[*Ts], Awaitable[T]], *args: *Ts, name: str = "") -> T:
        """Run `function(*args)` as a task on the loop, with the caller's context, and return its result or raise its exception.

        On cancellation the task is cancelled and given the thread grace to end; one that stays deaf moves to the tree's `abandoned` node.
        """
        loop = await self._started()
        self._token = trio.lowlevel.current_trio_token()
        self._count += 1
        outer = current_binding()
        words = name or getattr(function, "__qualname__", type(function).__name__)
        node = None
        if outer is not None and outer.node is not None:
            node = outer.node.open("thread", f"asyncio_{self._count}", name=words)
        ended = "failed"
        try:
            result = await self._run(loop, function, args, node)
            ended = "finished"
            return result
        except trio.Cancelled:
            ended = "cancelled"
            raise
        finally:
            if node is not None and node.parent is not self._tree.abandoned:
                node.close(ended)

    async def _run(
        self,
        loop: asyncio.AbstractEventLoop,
        function: Callable[[*Ts], Awaitable[T]],
        args: tuple[*Ts],
        node: Node | None,
    ) -> T:
        token = trio.lowlevel.current_trio_token()
        clock = trio.lowlevel.current_clock()
        context = contextvars.copy_context()
        over = trio.Event()
        returned = threading.Event()
        tasks: list[asyncio.Task[T]] = []
        abandoned = False

        async def call() -> T:
            return await function(*args)

        def start() -> None:
            task = loop.create_task(call(), context=context)
            tasks.append(task)
            task.add_done_callback(finished)

        def finished(task: asyncio.Task[T]) -> None:
            returned.set()
            try:
                token.run_sync_soon(ended)
            except trio.RunFinishedError:
                pass

        def ended() -> None:
            release_clock(clock)
            over.set()
            if abandoned and node is not None:
                node.close("ended late")

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        if node is not None:
            node.waits = [f"asyncio task {node.name}"]
        hold_clock(clock)
        try:
            loop.call_soon_threadsafe(start)
        except RuntimeError as error:
            release_clock(clock)
            raise RuntimeClosed("the asyncio loop of this runtime is closed") from error
        try:
            await over.wait()
        except trio.Cancelled:
            try:
                loop.call_soon_threadsafe(cancel)
            except RuntimeError:
                over.set()
            with trio.CancelScope(shield=True):
                await wait_out(over, returned, self._grace, clock)
            if not over.is_set() and node is not None:
                abandoned = True
                node.note = "abandoned"
                node.move(self._tree.abandoned)
            raise
        task = tasks[0]
        if task.cancelled():
            raise _cancelled_itself()
        return task.result()

    async def call_back(self, turn: Turn, function: Callable[[], Awaitable[T]], name: str) -> T:
        """Run `function` on Trio, as a task of `turn`, for a task of asyncio that waits for it. Cancelling the wait cancels it, and waits for its end."""
        import asyncio

        loop = asyncio.get_running_loop()
        if self._token is None:
            raise RuntimeClosed("a turn can be used by an asyncio agent of its runtime only, while that runs")
        future: asyncio.Future[T] = loop.create_future()
        scope = trio.CancelScope()

        def settle(result: T | None, error: BaseException | None) -> None:
            if not future.done():
                if error is None:
                    future.set_result(cast("T", result))
                else:
                    future.set_exception(error)

        async def work() -> None:
            result: T | None = None
            error: BaseException | None = RuntimeClosed(f"the turn ended while {name} was under way")
            try:
                with scope:
                    result = await function()
                    error = None
            except Exception as raised:
                error = raised  # it is the agent's to handle, not the turn's to fail with
            finally:
                hold_clock(trio.lowlevel.current_clock())
                _tell_loop(loop, settle, result, error)

        def start() -> None:
            try:
                turn.start_soon(work, name=name)
                # The agent waits for Trio now, and not Trio for the agent: a virtual clock may go on.
                release_clock(trio.lowlevel.current_clock())
            except (RuntimeError, AttributeError):
                _tell_loop(loop, settle, None, RuntimeClosed(f"the turn is over; {name} came too late"))

        self._token.run_sync_soon(start)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self._token.run_sync_soon(scope.cancel)
            while not future.done():
                try:
                    await asyncio.wait([future])  # noqa: ASYNC102 - bounded by the turn, whose task it is
                except asyncio.CancelledError:  # noqa: ASYNC103 - raised below
                    continue  # noqa: ASYNC104
            if not future.cancelled():
                future.exception()
            raise

    async def _started(self) -> asyncio.AbstractEventLoop:
        if self._closed:
            raise RuntimeClosed("the runtime is closed; its asyncio loop takes no new work")
        if self._loop is not None:
            return self._loop
        async with self._starting:
            if self._loop is None:
                token = trio.lowlevel.current_trio_token()
                ready = trio.Event()
                over = self._ended = trio.Event()
                self._thread = threading.Thread(
                    target=self._serve, args=(token, ready, over), name="hermes-trio asyncio", daemon=True
                )
                self._thread.start()
                self.node = self._tree.root.open("asyncio", "asyncio", name="the loop of asyncio agents")
                with trio.CancelScope(shield=True):
                    await ready.wait()  # the thread answers at once: all it does before is to import asyncio
        return cast("asyncio.AbstractEventLoop", self._loop)

    def _serve(self, token: trio.lowlevel.TrioToken, ready: trio.Event, over: trio.Event) -> None:
        """The thread: one loop until `_close`, then everything that is left on it is cancelled."""
        import asyncio  # only here: loading it takes longer than loading Trio, and few programs need it

        async def serve() -> None:
            loop = asyncio.get_running_loop()
            stop = asyncio.Event()
            self._stop = lambda: loop.call_soon_threadsafe(stop.set)
            self._loop = loop
            token.run_sync_soon(ready.set)
            await stop.wait()

        try:
            asyncio.run(serve())
        finally:
            try:
                token.run_sync_soon(over.set)
            except trio.RunFinishedError:
                pass

    async def _close(self) -> None:
        assert self._stop is not None
        assert self._ended is not None
        assert self._thread is not None
        self._stop()
        clock = trio.lowlevel.current_clock()
        hold_clock(clock)
        try:
            # Real time on a virtual clock, too: it is a thread that is waited for.
            await trio.to_thread.run_sync(self._thread.join, CLOSE_SECONDS, limiter=trio.CapacityLimiter(1))
        finally:
            release_clock(clock)
        assert self.node is not None
        if self._thread.is_alive():
            self.node.note = "abandoned"
            self.node.move(self._tree.abandoned)
        else:
            self.node.close("finished")


def _cancelled_itself() -> BaseException:
    import asyncio

    return asyncio.CancelledError("the agent cancelled itself")


def _tell_loop(loop: asyncio.AbstractEventLoop, function: Callable[[*Ts], object], *args: *Ts) -> None:
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        pass  # the loop is closed: nobody waits there
