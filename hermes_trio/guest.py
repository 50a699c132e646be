"""A `Runtime` for asyncio programs.

`AsyncioRuntime` runs Trio in a thread of its own and runs asyncio agents on the program's loop, beside its clients and pools. A thread is used
instead of Trio's guest mode: a program that blocks its loop would stall every turn and process of the runtime, and one that stops its loop early
would leave Trio unfinished; the difference in cost is below a tenth of a millisecond a turn (`make bench-embed` prints both).

Cancellation works in both directions: cancelling the program's task stops its turn and waits until it has ended; when the runtime ends, calls that
the program still waits for raise.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Final, Self, TypeVar, TypeVarTuple

import trio

from hermes_trio.runtime.agents import AnyAgent, as_agent, asyncio_agent, runs_on_trio
from hermes_trio.runtime.budget import Budget
from hermes_trio.runtime.context import Binding, SessionContext, _binding
from hermes_trio.runtime.core import RuntimeSettings
from hermes_trio.runtime.errors import AlreadyOpen, RuntimeClosed
from hermes_trio.runtime.outcome import CancelCause, Cause, Outcome
from hermes_trio.runtime.ports import Agent, InboxRow, RuntimeStore, TurnInput
from hermes_trio.runtime.runtime import DrainReport, Runtime, Stage
from hermes_trio.runtime.stop_receipt import StopReceipt
from hermes_trio.runtime.tree import EMPTY_CONTEXT
from hermes_trio.runtime.turn import EventSink, Turn, TurnHooks

logger: Final = logging.getLogger("hermes_trio.guest")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

LOOP_CHECK_SECONDS: Final = 0.5
"""How often the runtime checks whether the program has closed its loop."""


class AsyncioRuntime:
    """Hosts agents inside a running asyncio loop: `async with AsyncioRuntime(agent=f) as rt: outcome = await rt.run_turn("hello")`.

    The arguments are those of `Runtime`. An async function given as `agent` runs as an asyncio task on this loop; wrap a Trio function with
    `trio_agent`. Leaving the `async with` ends the runtime and joins its thread; cancellation does not interrupt that.
    """

    def __init__(
        self,
        *,
        agent: AnyAgent,
        store: AbstractAsyncContextManager[RuntimeStore] | None = None,
        settings: RuntimeSettings | None = None,
        stages: Sequence[Stage] = (),
    ) -> None:
        self._runtime = Runtime(agent=_host_agent(agent), store=store, settings=settings, stages=stages)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ended: asyncio.Future[None]
        self._token: trio.lowlevel.TrioToken
        self._calls: trio.Nursery
        self._closing: trio.Event
        self._opening = trio.CancelScope()
        self._given_up = False
        self._open = False
        self._kept: deque[InboxRow] = deque()
        """Notices whose reader was cancelled when they arrived. The next reader gets them."""

    @property
    def runtime(self) -> Runtime:
        """Return the runtime. Its methods must be called in the Trio thread, through `run`."""
        return self._runtime

    async def __aenter__(self) -> Self:
        if self._thread is not None:
            raise AlreadyOpen("this AsyncioRuntime has been opened before; make a new one")
        loop = self._loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        ready: asyncio.Future[None] = loop.create_future()
        self._thread = threading.Thread(target=self._main, args=(ready,), name="hermes-trio runtime", daemon=True)
        self._thread.start()
        try:
            await asyncio.wait([ready, self._ended], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._give_up()
            await self._wait_for_the_end()  # noqa: ASYNC102 - as in __aexit__
            raise
        if not ready.done():
            self._thread.join()
            self._ended.result()  # raises what kept the runtime from opening
            raise RuntimeClosed("the runtime ended while it was being opened")
        self._open = True
        return self

    async def __aexit__(self, *error: object) -> None:
        self._open = False
        self._call_trio(lambda: self._closing.set())
        interrupted = await self._wait_for_the_end()  # noqa: ASYNC102 - the runtime bounds its own end
        self._ended.result()
        if interrupted is not None:
            raise interrupted

    async def _wait_for_the_end(self) -> asyncio.CancelledError | None:
        """Wait until the runtime has ended, join its thread, and return a cancellation that arrived meanwhile."""
        interrupted: asyncio.CancelledError | None = None
        while not self._ended.done():
            try:
                await asyncio.wait([self._ended])  # noqa: ASYNC102 - the runtime ends in its own order, and bounds it
            except asyncio.CancelledError as cancelled:  # noqa: ASYNC103 - raised by the caller, after the runtime has ended
                interrupted = cancelled
        assert self._thread is not None
        self._thread.join()
        return interrupted

    def _give_up(self) -> None:
        """Cancel the opening of the runtime. If the thread has not reached `_live` yet, it finds the flag there."""
        self._given_up = True
        if hasattr(self, "_token"):
            self._call_trio(lambda: self._opening.cancel())

    # -- work --------------------------------------------------------------------------------------------------------------------

    async def run_turn(
        self,
        input: TurnInput | str,
        context: SessionContext | None = None,
        *,
        agent: AnyAgent | None = None,
        budget: Budget | None = None,
        sink: EventSink | None = None,
        on_receipt: Callable[[StopReceipt], None] | None = None,
    ) -> Outcome:
        """Run a turn and return its outcome, as `Runtime.run_turn` does.

        Cancelling this call stops the turn, waits until its scope is empty, hands the receipt to `on_receipt` and then raises `CancelledError`. `sink` and
        `on_receipt` are called on this loop.
        """
        loop = self._running()
        turns: list[Turn] = []

        async def stop() -> None:
            for turn in turns:
                receipt = await turn.stop(Cause(CancelCause.CLIENT_GONE, "the host's task was cancelled"))
                if on_receipt is not None:
                    _call_host(loop, on_receipt, receipt)

        async def turn() -> Outcome:
            return await self._runtime.run_turn(
                input,
                context,
                agent=agent,
                budget=budget,
                sink=None if sink is None else partial(_call_host, loop, sink),
                hooks=TurnHooks(on_start=turns.append),
            )

        return await self._run(turn, stop)

    async def run(self, function: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        """Run an async function that is written for Trio in the runtime's thread, and return its result or raise its exception.

        Cancelling this call cancels the function and waits until it has ended.
        """

        async def call() -> T:
            return await function(*args)

        return await self._run(call, None)

    async def stop_session(self, session_id: str) -> list[StopReceipt]:
        """Stop the turns and the jobs of one session; one receipt each."""
        return await self.run(self._runtime.stop_session, session_id)

    async def drain(self, seconds: float) -> DrainReport:
        """Refuse new work, wait at most `seconds` for the turns, cancel the rest, stop the jobs, and report what remained."""
        return await self.run(self._runtime.drain, seconds)

    async def render_tree(self) -> str:
        """Return the live task tree as text."""

        async def render() -> str:
            return self._runtime.tree.render()

        return await self.run(render)

    async def completions(self) -> AsyncGenerator[InboxRow, None]:
        """Yield the notices of work in this process as they arrive. A yielded notice is acknowledged; cancelling the wait loses none."""

        async def take() -> InboxRow:
            return await anext(aiter(self._runtime.completions()))

        while True:
            yield self._kept.popleft() if self._kept else await self._run(take, None, late=self._kept.append)

    # -- the bridge --------------------------------------------------------------------------------------------------------------

    async def _run(
        self,
        function: Callable[[], Awaitable[T]],
        stop: Callable[[], Awaitable[None]] | None,
        *,
        late: Callable[[T], None] | None = None,
    ) -> T:
        """Run `function` in the Trio thread. `late` receives a result that arrived after the caller was cancelled."""
        loop = self._running()
        future: asyncio.Future[T] = loop.create_future()
        stopped: asyncio.Future[None] = loop.create_future()
        scopes: list[trio.CancelScope] = []
        context = contextvars.copy_context()

        def settle(result: T | None, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)  # pyright: ignore[reportArgumentType]
            else:
                future.set_exception(error)

        async def call() -> None:
            _binding.set(Binding(EMPTY_CONTEXT, None, self._runtime.tree.root))
            result: T | None = None
            error: BaseException | None = RuntimeClosed("the runtime was closed while this call was under way")
            try:
                with trio.CancelScope() as scope:
                    scopes.append(scope)
                    result = await function()
                    error = None
            except Exception as raised:
                error = raised
            finally:
                _call_host(loop, settle, result, error)

        def start() -> None:
            try:
                context.run(self._calls.start_soon, call)
            except RuntimeError:
                _call_host(loop, settle, None, RuntimeClosed("the runtime is closing; it takes no new work"))

        async def cancel() -> None:
            try:
                if stop is not None:
                    with trio.CancelScope(shield=True):
                        await stop()
            finally:
                for scope in scopes:
                    scope.cancel()
                _call_host(loop, stopped.set_result, None)

        def start_cancel() -> None:
            try:
                self._calls.start_soon(cancel)
            except RuntimeError:
                _call_host(loop, stopped.set_result, None)  # the runtime is ending, and everything in it

        if not self._call_trio(start):
            raise RuntimeClosed("the runtime has ended")
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self._call_trio(start_cancel)
            while not ((future.done() and stopped.done()) or self._ended.done()):
                try:
                    pending = [each for each in (future, stopped) if not each.done()]
                    await asyncio.wait([*pending, self._ended], return_when=asyncio.FIRST_COMPLETED)  # noqa: ASYNC102
                except asyncio.CancelledError:  # noqa: ASYNC103 - the turn's end is waited for, however often the host asks
                    continue  # noqa: ASYNC104
            if future.done() and not future.cancelled() and future.exception() is None and late is not None:
                late(future.result())
            raise

    def _running(self) -> asyncio.AbstractEventLoop:
        if not self._open or self._loop is None or self._ended.done():
            raise RuntimeClosed("the runtime is not open; use `async with AsyncioRuntime(...) as rt:`")
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeClosed("this AsyncioRuntime was opened in another event loop; open one in each loop")
        return self._loop

    def _call_trio(self, function: Callable[[], object]) -> bool:
        try:
            self._token.run_sync_soon(function)
        except trio.RunFinishedError:
            return False
        return True

    def _main(self, ready: asyncio.Future[None]) -> None:
        """Run the thread: one `trio.run`. Reports its end to the program's loop, whatever it is."""
        assert self._loop is not None
        error: BaseException | None = None
        try:
            trio.run(self._live, ready)
        except BaseException as raised:  # noqa: ASYNC103 - told to the host, which raises it
            error = raised

        def tell() -> None:
            if self._ended.done():
                return
            if error is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(error)

        _call_host(self._loop, tell)

    async def _live(self, ready: asyncio.Future[None]) -> None:
        assert self._loop is not None
        self._token = trio.lowlevel.current_trio_token()
        self._closing = trio.Event()
        with self._opening:
            if self._given_up:
                self._opening.cancel()
            async with self._runtime as runtime, trio.open_nursery() as calls:
                runtime.core.asyncio_loop.use_host_loop(self._loop)
                runtime.core.adapt = _host_agent
                self._calls = calls
                _call_host(self._loop, lambda: ready.done() or ready.set_result(None))
                calls.start_soon(self._watch_loop, self._loop)
                await self._closing.wait()
                calls.cancel_scope.cancel()

    async def _watch_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the runtime if the program has closed its loop without leaving the `async with`."""
        while not loop.is_closed():  # noqa: ASYNC110 - a loop has no signal for its close
            await trio.sleep(LOOP_CHECK_SECONDS)
        logger.warning(
            "the asyncio loop of an AsyncioRuntime was closed while the runtime was open; the runtime ends now."
            " Leave its `async with` before the loop is closed"
        )
        self._closing.set()


def _host_agent(agent: AnyAgent) -> Agent:
    made = as_agent(agent)
    return made if runs_on_trio(made) else asyncio_agent(made)


def _call_host(loop: asyncio.AbstractEventLoop, function: Callable[[*Ts], object], *args: *Ts) -> None:
    """Call `function(*args)` on the program's loop. Does nothing if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        pass
