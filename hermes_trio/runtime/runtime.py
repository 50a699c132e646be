"""`Runtime`: one process, one tree. `Runtime._live` opens the scopes of the tree, outermost first.

They close in the reverse order: intake stops first, each scope closes only when the one inside it is empty,
and the store closes last. Cancelling the task that opened the runtime does not cut that order short; `abort` does.
"""

from __future__ import annotations

import contextvars
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from importlib import import_module
from typing import Any, Final, Self, cast

import msgspec
import trio

from .agents import AnyAgent, as_agent
from .budget import Budget
from .channel import CompletionChannel
from .context import Binding, SessionContext, _binding, check_id
from .core import RuntimeCore, RuntimeSettings
from .errors import AlreadyOpen, Fenced, NoRuntime, RuntimeClosed
from .event_writer import EventWriter
from .ids import Ids
from .interface import Completions, Inbox, Interface
from .lane import Lanes
from .membership import Membership
from .outcome import CancelCause, Cause, Outcome
from .peers import Peers
from .ports import Agent, Recovery, RuntimeStore, TurnInput, inbox_topic
from .run import Runs
from .settlement import Settlement
from .stateless import StatelessEntry
from .stop_receipt import StopReceipt, stop_each
from .supervisor import Supervisor
from .threads import Threads, virtual_clock_of
from .tree import EMPTY_CONTEXT, Tree, waiting
from .turn import NO_HOOKS, EventSink, Owner, Turn, TurnHooks, TurnSpec
from .turn_lifecycle import run_turn
from .watchdog import Watchdog

logger: Final = logging.getLogger("hermes_trio.runtime")

Stage = Callable[["Runtime"], AbstractAsyncContextManager[object]]
"""A scope that must outlive every job: opened between the store and the supervisor (the warden, the senders)."""


class DrainReport(msgspec.Struct, frozen=True, kw_only=True):
    """The work that was left when a drain ended: all zero, or the exact list of what remains."""

    turns: int
    jobs: int
    threads: int
    cancelled: int
    stopped_jobs: int = 0
    seconds: float
    backlog: dict[str, int]
    """The rows that wait in the store, by kind; empty if the store could not be read."""
    remaining: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Return whether no turn, job or thread runs any more."""
        return not (self.turns or self.jobs or self.threads or self.remaining)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data that can be written as JSON."""
        return {"ok": self.ok, **msgspec.structs.asdict(self)}


class Runtime:
    """Hosts agents: `async with Runtime(agent=f) as rt: outcome = await rt.run_turn("hello")`.

    `store` is an async context manager that opens the store; without one it is a database in memory. `stages` are opened around the supervisor, in order.
    Leaving the `async with` stops intake, lets turns end for `settings.drain_seconds`, cancels the rest, stops the jobs, and closes the store.
    """

    def __init__(
        self,
        *,
        agent: AnyAgent,
        store: AbstractAsyncContextManager[RuntimeStore] | None = None,
        settings: RuntimeSettings | None = None,
        stages: Sequence[Stage] = (),
        seed: int | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.agent: Agent = as_agent(agent)
        self.settings: RuntimeSettings = RuntimeSettings() if settings is None else settings
        self.recovery: Recovery | None = None
        self._store = store
        self._stages = tuple(stages)
        self._ids = Ids(seed)
        self._clock = clock
        self._manager: AbstractAsyncContextManager[Runtime] | None = None
        self._binding_token: Any = None
        self._closing = trio.Event()
        self._cut_off: set[str] = set()
        self._turns: trio.Nursery | None = None
        self._receivers: trio.Nursery | None = None
        self._core: RuntimeCore | None = None
        self._lanes: Lanes
        self._completions: Completions
        self._watchdog: Watchdog | None = None
        self.stateless: StatelessEntry

    # -- the life of a runtime ---------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._manager is not None:
            raise AlreadyOpen("this Runtime has been opened before; make a new one")
        self._manager = self._open()
        await self._manager.__aenter__()
        # Inside a Runtime and outside any turn the session variables are bound to empty values: a server that was started from a tool's shell does not
        # inherit that shell's identity.
        self._binding_token = _binding.set(Binding(EMPTY_CONTEXT, None, self.tree.root))
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        assert self._manager is not None
        _binding.reset(self._binding_token)
        return await self._manager.__aexit__(*error)  # noqa: ASYNC102 - waits for the tree, which ends in its own order

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Runtime]:
        try:
            async with trio.open_nursery() as nursery:
                opened = trio.Event()
                nursery.start_soon(self._live, opened)
                try:
                    # Not `nursery.start`: a task that is cancelled while it opens a runtime would wait for ever, because `_live` is shielded.
                    await opened.wait()
                    yield self
                finally:
                    self._closing.set()
        except BaseExceptionGroup as group:
            # The task that opened the runtime expects the exceptions of its own body as they were raised.
            alone = group.exceptions
            if len(alone) == 1:
                raise alone[0] from alone[0].__cause__  # noqa: ASYNC123 - it is the caller's own exception
            raise

    async def _live(self, opened: trio.Event) -> None:
        """Open the scopes of the tree, outermost first, and close them in reverse. Shielded: cancelling the opener does not change that order."""
        with trio.CancelScope(shield=True):
            token = _binding.set(Binding(EMPTY_CONTEXT, None, None))
            try:
                async with self._open_store() as store, AsyncExitStack() as stages:
                    core = self._make_core(store)
                    _binding.set(Binding(EMPTY_CONTEXT, None, core.tree.root))
                    core.base_context = contextvars.copy_context()
                    core.membership.joining()
                    self.recovery = await store.recover(core.epoch)
                    with self._watch():
                        stages.enter_context(core.peers.answering())
                        await stages.enter_async_context(core.membership.open())
                        await stages.enter_async_context(core.ends.open())
                        for stage in self._stages:
                            await stages.enter_async_context(stage(self))
                        async with (
                            core.asyncio_loop.open(),
                            core.supervisor.open(),
                            self._open_journal(),
                            trio.open_nursery() as turns,
                        ):
                            self._turns = turns
                            if self.settings.resume_runs:
                                await turns.start(self.stateless.resume_runs)
                            await self._run_receivers(opened)
                            await self._wind_down(self.settings.drain_seconds)
                            self._turns = None
                            # All turns have ended; what is left here only waits (a lane that lingers, a run that has not settled).
                            turns.cancel_scope.cancel()
                        await stages.aclose()
                    core.membership.check()
            finally:
                _binding.reset(token)
                self._closing.set()

    async def _run_receivers(self, opened: trio.Event) -> None:
        """Run the receivers until the runtime closes, or raise what one of them raised. In both cases new work is refused from then on."""
        try:
            async with trio.open_nursery() as receivers:
                self._receivers = receivers
                opened.set()
                try:
                    await self._closing.wait()
                finally:
                    self._receivers = None
                self.core.waits.limit()
                receivers.cancel_scope.cancel()
        finally:
            # Before the scope of the turns closes: nothing may be started in it afterwards.
            self.core.draining = True
            self.core.waits.limit()

    @asynccontextmanager
    async def _open_store(self) -> AsyncIterator[RuntimeStore]:
        opened = self._store
        if opened is None:
            # The package names the default store: this layer must not import `hermes_trio.store`.
            opened = cast("AbstractAsyncContextManager[RuntimeStore]", import_module("hermes_trio").default_store())
        async with opened as store:
            yield store

    def _make_core(self, store: RuntimeStore) -> RuntimeCore:
        clock = self._clock or _wall_clock(store)
        core = RuntimeCore(agent=self.agent, store=store, settings=self.settings, ids=self._ids, clock=clock)
        core.tree.runtime = self
        core.supervisor = Supervisor(core)
        core.journal = EventWriter(core)
        core.membership = Membership(core, self._lose)
        self._core = core
        self._lanes = Lanes(core, lambda: self._turns)
        self._completions = Completions(core)
        runs = Runs(core)
        core.peers = Peers(core, runs, self._lanes)
        self.stateless = StatelessEntry(core, runs, lambda: self._turns)
        return core

    @asynccontextmanager
    async def _open_journal(self) -> AsyncIterator[None]:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.core.journal.run)
                yield
                nursery.cancel_scope.cancel()
        finally:
            # Also if a receiver has failed: readers have these events already. From here on each write is tried for the last time, with a bound for all.
            self.core.waits.renew()
            with self.core.waits.bound():
                await self.core.journal.flush()  # noqa: ASYNC102 - `bound` shields, with a deadline

    def _watch(self) -> Watchdog | nullcontext[None]:
        if self.settings.watchdog_seconds <= 0 or virtual_clock_of(trio.lowlevel.current_clock()) is not None:
            return nullcontext()
        self._watchdog = Watchdog(self.tree, self.settings.watchdog_seconds)
        return self._watchdog

    # -- what can be seen --------------------------------------------------------------------------------------------------------

    @property
    def core(self) -> RuntimeCore:
        """Return the parts that the runtime's modules share. Raises `RuntimeClosed` before the runtime has been opened."""
        if self._core is None:
            raise RuntimeClosed("the runtime is not open; use `async with Runtime(...) as rt:`")
        return self._core

    @property
    def tree(self) -> Tree:
        """Return the live task tree."""
        return self.core.tree

    @property
    def store(self) -> RuntimeStore:
        """Return the store that this runtime writes to."""
        return self.core.store

    @property
    def supervisor(self) -> Supervisor:
        """Return the owner of all jobs."""
        return self.core.supervisor

    @property
    def membership(self) -> Membership:
        """Return the lease of this node, its singletons and its requests to other nodes."""
        return self.core.membership

    @property
    def peers(self) -> Peers:
        """Return the work that runs on other nodes that share the store."""
        return self.core.peers

    @property
    def threads(self) -> Threads:
        """Return the one place that runs synchronous code."""
        return self.core.threads

    @property
    def draining(self) -> bool:
        """Return whether new work is refused."""
        return self.core.draining

    @property
    def unwritten(self) -> list[str]:
        """Return the ends that the store has refused so far, each with the reason: they are retried until they are written."""
        return self.core.ends.describe()

    @property
    def lanes(self) -> int:
        """Return the number of live lanes."""
        return len(self._lanes)

    @property
    def watchdog(self) -> Watchdog | None:
        """Return the watchdog of the loop; None if it is switched off or the clock is virtual."""
        return self._watchdog

    # -- work --------------------------------------------------------------------------------------------------------------------

    async def run_turn(
        self,
        input: TurnInput | str,
        context: SessionContext | None = None,
        *,
        agent: AnyAgent | None = None,
        budget: Budget | None = None,
        one_shot: str = "",
        sink: EventSink | None = None,
        hooks: TurnHooks = NO_HOOKS,
    ) -> Outcome:
        """Run a turn in this task, for a program that embeds the runtime. Its channel is the runtime's own: see `completions`.

        Waits while too many turns run; raises `Draining` or `RuntimeClosed`. Cancelling the task cancels the turn, whose end is still written.
        """
        self.stateless.check()
        core = self.core
        where = SessionContext() if context is None else context
        if not where.session_id:
            where = msgspec.structs.replace(where, session_id=where.session_key or core.ids.make("s_", 16))
        if not where.session_key:
            where = where.with_own_key()
        at_once = core.admission.try_admit()
        if not at_once:
            await core.admission.admit()
        try:
            if not at_once:
                self.stateless.check()
            spec = TurnSpec(
                input=TurnInput(text=input) if isinstance(input, str) else input,
                context=where,
                agent=None if agent is None else core.adapt(agent),
                source=where.platform or "embedded",
                budget=budget,
                one_shot=one_shot,
                hooks=hooks if sink is None else msgspec.structs.replace(hooks, sink=sink),
            )
            if core.shared:
                spec = await core.hosts.place(spec, anywhere=True)
            return await run_turn(core, core.make_turn(spec, self._completions.channel))
        finally:
            core.admission.release()

    def completions(self) -> Completions:
        """Return the notices of in-process work as an async iterator: `async for notice in rt.completions(): …`."""
        return self._completions

    @property
    def channel(self) -> CompletionChannel:
        """Return the in-process channel, for watched jobs that are started outside any turn."""
        return self._completions.channel

    def owner(self, context: SessionContext | None = None) -> Owner:
        """Return an owner for jobs that are started outside any turn."""
        where = SessionContext(session_id="(program)", session_key="(program)") if context is None else context
        return Owner(context=where, turn_id="", root=Settlement(self.core.ids.make("root_", 16)), channel=self.channel)

    @asynccontextmanager
    async def delivering(self, interface: Interface) -> AsyncIterator[Inbox]:
        """Register a delivering interface for the body of the `async with`. Entering wakes a lane for each key that waits in its inbox."""
        check_id(interface.platform, "Interface.platform", 64)
        self.stateless.check()
        inbox = Inbox(self.core, self._lanes, interface)
        self._lanes.register(inbox)
        wakes = self.core.store.subscribe(
            inbox_topic(interface.platform), lambda key: self._lanes.wake(interface.platform, key)
        )
        try:
            with wakes:
                await inbox.sweep()
                yield inbox
        finally:
            self._lanes.unregister(inbox)

    def start_receiver(self, name: str, function: Callable[[], Awaitable[object]]) -> None:
        """Run a task that brings work in (an adapter, the HTTP server) in the innermost scope, which a shutdown cancels first."""
        if self._receivers is None:
            raise RuntimeClosed("the runtime is closed; receivers are started inside `async with Runtime(...)`")
        self.core.base_context.copy().run(self._receivers.start_soon, self._receive, name, function)

    async def _receive(self, name: str, function: Callable[[], Awaitable[object]]) -> None:
        node = self.tree.root.open("receiver", name)
        token = _binding.set(Binding(EMPTY_CONTEXT, None, node))
        try:
            await function()
        except* Fenced:
            # A node that was taken over ends by its membership, also if a receiver notices it before the next heartbeat.
            if not await self.core.membership.is_fenced():  # noqa: ASYNC120 - if cancelled here, the runtime is closing
                raise
        finally:
            _binding.reset(token)
            node.close()

    # -- the end -----------------------------------------------------------------------------------------------------------------

    async def stop_session(self, session_id: str, cause: Cause | None = None) -> list[StopReceipt]:
        """Stop the turns and the jobs of one session, on all nodes; return one receipt each."""
        why = Cause(CancelCause.STOP) if cause is None else cause
        turns = [turn for turn in self.core.live_turns.values() if turn.context.session_id == session_id]
        try:
            if self.core.shared or any(turn.origin.run is not None and turn.origin.run.resumable for turn in turns):
                await self.core.store.stop_resuming(self.core.epoch, session_id=session_id)
        finally:
            receipts = await stop_each(turns, why)  # noqa: ASYNC102 - also if the store fails; a cancellation ends it
        receipts.extend(await self.supervisor.stop_here(session_id, why))
        if self.core.shared:
            receipts.extend(await self.core.peers.stop_session(session_id, why))
        return receipts

    async def drain(self, seconds: float, *, asking: Turn | None = None) -> DrainReport:
        """Refuse new work, wait at most `seconds` for the turns, cancel the rest, stop the jobs, and report what is left.

        The turn `asking` is neither waited for nor cancelled. Afterwards the runtime stays open for reads and refuses new work.
        """
        return await self._wind_down(seconds, asking)

    async def _wind_down(self, seconds: float, asking: Turn | None = None) -> DrainReport:
        core = self.core
        began = trio.current_time()
        core.draining = True
        cut_before = len(self._cut_off)
        # A store that does not answer does not delay a drain: a run whose row is still being written is reported as a turn that may begin.
        if seconds > 0 and not core.drained:
            core.waits.lift()
        with trio.move_on_at(began + max(seconds, core.settings.finish_seconds)):
            for starting in list(core.starting):
                await starting.wait()
        spared = _family(core, asking)

        def others() -> list[Turn]:
            return [turn for turn in core.live_turns.values() if turn.id not in spared]

        with trio.move_on_at(began + seconds):
            while turns := others():
                with waiting(f"{len(turns)} turns to end"):
                    for turn in turns:
                        await turn.node.wait_closed()
        core.drained = True
        core.waits.limit()
        why = Cause(CancelCause.DRAIN, "the runtime is draining")
        while turns := others():
            for turn in turns:
                self._cut(turn, why)
            for turn in turns:
                await turn.node.wait_closed()
        with core.waits.bound(shield=False):
            await self._lanes.release_claims()
        stopped = len(await core.supervisor.stop_all(why))
        report = DrainReport(
            turns=len(others()) + len(core.starting),
            stopped_jobs=stopped,
            jobs=len(core.supervisor),
            threads=sum(node.kind == "thread" for node in core.tree.abandoned.children or ()),
            cancelled=len(self._cut_off) - cut_before,
            seconds=round(trio.current_time() - began, 3),
            backlog=await self._backlog(),
            remaining=tuple(node.id for node in core.tree.abandoned.children or ()),
        )
        logger.debug("drained: %s", report.as_dict())
        return report

    async def _backlog(self) -> dict[str, int]:
        """Return the number of waiting rows by kind; empty if the store fails or is slow, because a shutdown must not depend on it."""
        with self.core.waits.bound(shield=False):
            try:
                return await self.core.store.backlog()
            except Exception as error:
                logger.error(
                    "could not count the waiting rows of the store; the report of the drain has none: %s", error
                )
        return {}

    def _cut(self, turn: Turn, why: Cause) -> None:
        """Cancel a turn that would have continued, and count it."""
        if turn.cause is None:
            self._cut_off.add(turn.id)
        turn.cancel(why)

    def _lose(self, reason: str) -> None:
        """Shut the runtime down because the lease of this node is lost. The scopes close in their usual order."""
        self.abort(f"this node ends: {reason}")

    def abort(self, reason: str = "the runtime was told to end at once") -> None:
        """Cancel everything at once, for an operator's second signal. Ends that are being written are bounded by their shields."""
        self._closing.set()
        if self._core is not None:
            self._core.draining = True
            self._core.waits.limit()
            why = Cause(CancelCause.DRAIN, reason)
            for turn in list(self._core.live_turns.values()):
                self._cut(turn, why)
        for nursery in (self._receivers, self._turns):
            if nursery is not None:
                nursery.cancel_scope.cancel()


def _family(core: RuntimeCore, asking: Turn | None) -> frozenset[str]:
    """Return the ids of the asking turn and of the turns that enclose it."""
    if asking is None:
        return frozenset()
    ids = {asking.id}
    node = asking.node.parent
    while node is not None:
        if node.kind == "turn":
            ids.add(node.id)
        node = node.parent
    return frozenset(ids & core.live_turns.keys())


def current_runtime() -> Runtime:
    """Return the Runtime that this code runs in. Raises `NoRuntime` outside of one."""
    binding = _binding.get()
    runtime = None if binding is None or binding.node is None else binding.node.tree.runtime
    if not isinstance(runtime, Runtime):
        raise NoRuntime(
            "no Runtime is open here: background work needs an owner; open one with `async with Runtime(...)`"
        )
    return runtime


def _wall_clock(store: RuntimeStore) -> Callable[[], float]:
    """Return the clock for stored times: the host's, the store's where nodes share it, or Trio's if that is virtual, to agree with deadlines."""
    if virtual_clock_of(trio.lowlevel.current_clock()) is not None:
        return trio.current_time
    return store.now if store.lease_seconds > 0 else time.time
