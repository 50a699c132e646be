"""The asyncio loop of a runtime, for agents and tools that are written for asyncio.

One loop in one thread, started by the first use and ended with the runtime, inside the supervisor: no turn or job can outlive it. A program that runs
asyncio itself lends its own loop (`AsyncioRuntime`) and closes it; then there is no thread.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Protocol, TypeVar, TypeVarTuple, cast

import trio

from .context import current_binding
from .errors import AgentFailed, RuntimeClosed, RuntimeProblem
from .threads import abandon_call, exits_only_the_call, hold_clock, release_clock, wait_out
from .tree import Node, Tree

if TYPE_CHECKING:
    import asyncio

logger: Final = logging.getLogger("hermes_trio.runtime.asyncio_loop")

T = TypeVar("T")
P = ParamSpec("P")
Ts = TypeVarTuple("Ts")

CLOSE_SECONDS: Final = 5.0
"""The time for the thread of the loop to end before it is shown as abandoned."""


class OnTrio(Protocol):
    """A turn or a job, whose methods belong to Trio."""

    @property
    def bridge(self) -> AsyncioLoop:
        """Return the asyncio loop of its runtime."""
        ...

    def start_on_trio(self, function: Callable[[], Awaitable[None]], name: str) -> None:
        """Start a task on Trio that ends with the turn or job. Raises `RuntimeError` if that has ended."""
        ...


AnyOnTrio = TypeVar("AnyOnTrio", bound=OnTrio)


def awaitable_from_asyncio(
    method: Callable[Concatenate[AnyOnTrio, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[AnyOnTrio, P], Coroutine[Any, Any, T]]:
    """Let asyncio code await a method of a turn or a job: called from asyncio, it runs on Trio as a task of its owner."""

    @functools.wraps(method)
    async def call(owner: AnyOnTrio, /, *args: P.args, **named: P.kwargs) -> T:
        if owner.bridge.on_trio():
            return await method(owner, *args, **named)
        bound = functools.partial(method, owner, *args, **named)
        return await owner.bridge.call_back(owner, bound, method.__name__)

    return call


class AsyncioLoop:
    """Runs coroutine functions of asyncio for tasks of Trio, and calls of other threads in the thread of Trio. Made in the runtime's Trio."""

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
        self._away: dict[Node, tuple[int, bool]] = {}
        """How many calls on Trio each asyncio task of a node waits for, and whether a virtual clock was released for them."""
        self._token: trio.lowlevel.TrioToken = trio.lowlevel.current_trio_token()
        self.node: Node | None = None

    @property
    def descriptors(self) -> frozenset[int]:
        """Return the descriptors that belong to the thread's loop: its selector and its wake-up sockets."""
        if self._thread is None or self._loop is None or self._loop.is_closed():
            return frozenset()
        parts = (getattr(self._loop, name, None) for name in ("_selector", "_ssock", "_csock"))
        return frozenset(part.fileno() for part in parts if part is not None)

    @property
    def thread(self) -> threading.Thread | None:
        """Return the thread of the loop, if it was started."""
        return self._thread

    def use_host_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Use `loop`, which the embedding program runs and closes, instead of a loop in a thread. Call it before the first use."""
        assert self._loop is None
        self._loop = loop

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Accept work for the body of the `async with`; leaving it ends the loop's thread, if it was started.

        A thread that does not end within its time limit moves to the tree's `abandoned` node.
        """
        try:
            yield
        finally:
            self._closed = True
            if self._thread is not None:
                with trio.CancelScope(shield=True):
                    await self._close()

    async def run(self, function: Callable[[*Ts], Awaitable[T]], *args: *Ts, name: str = "") -> T:
        """Run `function(*args)` as a task on the loop, with the caller's context, and return its result or raise its exception.

        On cancellation the task is cancelled and given the thread grace to end; if it does not end, it moves to the tree's `abandoned` node.
        """
        loop = await self._started()
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
            if self._thread is None:
                return await function(*args)  # the loop is the host's: SystemExit means the host
            with exits_only_the_call():
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
                abandon_call(node, over)
            raise
        task = tasks[0]
        if task.cancelled():
            # Not by the turn, which is cancelled in Trio: the agent awaited something that was cancelled, or the program cancels every task of its loop.
            words = "the agent" if node is None else f"the agent {node.name}"
            raise AgentFailed(f"{words} was cancelled in asyncio, and not by its turn", "agent_cancelled_itself")
        return task.result()

    def on_trio(self) -> bool:
        """Return whether this code runs in the Trio of the runtime."""
        try:
            return trio.lowlevel.current_trio_token() is self._token
        except RuntimeError:
            return False

    def call_soon(self, function: Callable[[*Ts], object], *args: *Ts) -> None:
        """Call `function(*args)` in the thread of Trio: now, if this is it. From elsewhere the calls keep their order, and what they raise is logged."""
        if self.on_trio():
            function(*args)
            return

        caller = contextvars.copy_context()

        def call() -> None:
            try:
                function(*args)
            except Exception:
                # In the caller's context, so that the entry has its session and turn.
                name = getattr(function, "__qualname__", function)
                caller.run(logger.exception, "a call from another thread failed and is not repeated: %s", name)

        try:
            self._token.run_sync_soon(call)
        except trio.RunFinishedError:
            pass  # the runtime has ended, and the receiver of this call with it

    async def call_back(self, owner: OnTrio, function: Callable[[], Awaitable[T]], name: str) -> T:
        """Run `function` on Trio, as a task of `owner`, for a task of asyncio that waits for it. Cancelling the wait cancels it, and waits for its end."""
        import asyncio

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeProblem(
                f"{name} is awaited in the Trio of its runtime or in asyncio; this is another Trio or no event loop at all"
            ) from None
        future: asyncio.Future[T] = loop.create_future()
        scope = trio.CancelScope()
        binding = current_binding()
        caller = None if binding is None else binding.node

        def settle(result: T | None, error: BaseException | None) -> None:
            if not future.done():
                if error is None:
                    future.set_result(cast("T", result))
                else:
                    future.set_exception(error)

        async def work() -> None:
            result: T | None = None
            error: BaseException | None = RuntimeClosed(f"{name} was cancelled: its owner ended")
            try:
                with scope:
                    result = await function()
                    error = None
            except Exception as raised:
                error = raised  # the agent may handle it; it does not fail the turn
            finally:
                self._take_clock(caller)
                _tell_loop(loop, settle, result, error)

        def start() -> None:
            try:
                owner.start_on_trio(work, name)
                self._leave_clock(caller)
            except (RuntimeError, AttributeError, RuntimeClosed):
                _tell_loop(loop, settle, None, RuntimeClosed(f"{name} was refused: its owner has ended"))

        try:
            self._token.run_sync_soon(start)
        except trio.RunFinishedError:
            raise RuntimeClosed(f"{name} was refused: the runtime has ended") from None
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self.call_soon(scope.cancel)
            while not future.done():
                try:
                    await asyncio.wait([future])  # noqa: ASYNC102 - bounded by the turn, whose task it is
                except asyncio.CancelledError:  # noqa: ASYNC103 - raised below
                    continue  # noqa: ASYNC104
            if not future.cancelled():
                future.exception()
            raise

    def _leave_clock(self, caller: Node | None) -> None:
        """Release the virtual clock while the asyncio task of `caller` waits for Trio."""
        if caller is not None:
            count, left = self._away.get(caller, (0, False))
            self._away[caller] = (count + 1, left or release_clock(trio.lowlevel.current_clock()))

    def _take_clock(self, caller: Node | None) -> None:
        """Count one call of `caller` as ended; after the last one, hold the virtual clock for it again."""
        if caller is not None:
            count, left = self._away.pop(caller)
            if count > 1:
                self._away[caller] = (count - 1, left)
            elif left:
                hold_clock(trio.lowlevel.current_clock())

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
                    await ready.wait()  # short: the thread only imports asyncio first
        return cast("asyncio.AbstractEventLoop", self._loop)

    def _serve(self, token: trio.lowlevel.TrioToken, ready: trio.Event, over: trio.Event) -> None:
        """Run the loop in its thread until `_close`, then cancel every task that is left on it."""
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
            # Real time on a virtual clock, too: this waits for a thread.
            await trio.to_thread.run_sync(self._thread.join, CLOSE_SECONDS, limiter=trio.CapacityLimiter(1))
        finally:
            release_clock(clock)
        assert self.node is not None
        if self._thread.is_alive():
            self.node.note = "abandoned"
            self.node.move(self._tree.abandoned)
        else:
            self.node.close("finished")


def _tell_loop(loop: asyncio.AbstractEventLoop, function: Callable[[*Ts], object], *args: *Ts) -> None:
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        pass  # the loop is closed: no task waits there
