"""The stateless entry: runs turns for clients that are gone when the turn ends.

No method here has a parameter through which a channel could be passed, and the turns that it makes have none. This is all that the HTTP front end gets
to see of the runtime.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Final, Literal

import attrs
import outcome
import trio

from .budget import Budget
from .context import SessionContext, check_id
from .core import RuntimeCore
from .errors import Draining, OutcomeUnknown, RuntimeClosed
from .outcome import CancelCause, Cause, Outcome
from .ports import Agent, NewRun, TurnInput, TurnStart
from .run import Run, Runs
from .turn import EventSink, Turn, TurnSpec
from .turn_lifecycle import run_turn

__all__ = ["StatelessEntry"]

logger: Final = logging.getLogger("hermes_trio.runtime.stateless")

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0
"""Between two attempts to learn whether a run was written."""


@attrs.define(eq=False)
class _Written:
    """How the writing of a run's row ended, for the caller that waits for it."""

    over: trio.Event = attrs.field(factory=trio.Event)
    result: outcome.Value[Run] | outcome.Error = attrs.field(
        factory=lambda: outcome.Error(RuntimeClosed("the runtime was cancelled while the run was being written down"))
    )


class StatelessEntry:
    """Made by the runtime. `supports_async_delivery` is a fact about the type; nobody sets it."""

    supports_async_delivery: ClassVar[Literal[False]] = False

    def __init__(self, core: RuntimeCore, runs: Runs, nursery: Callable[[], trio.Nursery | None]) -> None:
        self._core = core
        self._nursery = nursery
        self.runs = runs

    @property
    def active(self) -> int:
        """Turns that hold a token now."""
        return self._core.admission.active

    @property
    def draining(self) -> bool:
        """Whether new work is refused."""
        return self._core.draining

    def check(self) -> None:
        """Raise what a new turn would be refused with, without starting one."""
        if self._nursery() is None:
            raise RuntimeClosed("the runtime is closed; open one with `async with Runtime(...)` before starting turns")
        if self._core.draining:
            raise Draining()

    def check_room(self) -> None:
        """Raise what a turn of HTTP would be refused with now, `TooBusy` among it, without starting one."""
        self.check()
        self._core.admission.check()

    def announce(self, turn: Turn, on_start: Callable[[Turn], None]) -> None:
        """Tell whoever starts a turn about it. If that fails, the turn is not conducted."""
        try:
            on_start(turn)
        except BaseException:
            self._core.drop_turn(turn)
            raise

    async def run_turn(
        self,
        input: TurnInput | str,
        context: SessionContext,
        *,
        source: str = "",
        tenant: str = "",
        agent: Agent | None = None,
        budget: Budget | None = None,
        sink: EventSink | None = None,
        one_shot: str = "",
        also: Callable[[Turn, Outcome], Sequence[object]] | None = None,
        on_start: Callable[[Turn], None] | None = None,
        on_end: Callable[[Outcome], Awaitable[None]] | None = None,
    ) -> Outcome:
        """Run a turn in this task and return its outcome. Raises `TooBusy` or `Draining` before anything is done.

        Cancelling the task means that the client has left: the turn is cancelled, stored as far as it came, and `Cancelled` goes on.
        """
        self.check()
        core = self._core
        core.admission.admit_nowait()
        try:
            plan = TurnSpec(
                input=TurnInput(text=input) if isinstance(input, str) else input,
                context=context,
                agent=core.agent if agent is None else agent,
                source=source or context.platform,
                tenant=tenant,
                budget=budget,
                sink=sink,
                one_shot=one_shot,
                outer_cause=Cause(CancelCause.CLIENT_GONE),
                also=also,
                on_end=on_end,
            )
            turn = core.make_turn(plan, None)
            if on_start is not None:
                self.announce(turn, on_start)
            return await run_turn(core, turn)
        finally:
            core.admission.release()

    async def start_run(
        self,
        input: TurnInput,
        context: SessionContext,
        *,
        run_id: str = "",
        source: str = "",
        tenant: str = "",
        agent: Agent | None = None,
        budget: Budget | None = None,
        idempotency_key: str = "",
        fingerprint: str = "",
        also: Callable[[Turn, Outcome], Sequence[object]] | None = None,
        on_end: Callable[[Outcome], Awaitable[None]] | None = None,
        **record: Any,
    ) -> Run:
        """Start a run that survives its client. It is durable when this returns.

        The run belongs to the runtime: if this call is cancelled while the row is being written, the run starts all the same. Raises `OutcomeUnknown` if
        the store takes longer than `finish_seconds`; the run then starts as soon as it is written, and the same idempotency key leads to it.
        """
        self.check()
        core = self._core
        core.admission.admit_nowait()
        try:
            run_record = NewRun(
                run_id=check_id(run_id, "run_id", 128) or core.ids.make("run_"),
                session_id=context.session_id,
                model=input.model,
                tenant=tenant,
                input_preview=input.text[:200],
                idempotency_key=idempotency_key,
                fingerprint=fingerprint,
                **record,
            )
            plan = TurnSpec(
                input=input,
                context=context,
                agent=core.agent if agent is None else agent,
                source=source or context.platform,
                tenant=tenant,
                budget=budget,
                run=run_record,
                outer_cause=Cause(CancelCause.DRAIN),
                also=also,
                on_end=on_end,
            )
            start = TurnStart(
                turn_id="", context=context, source=plan.source, tenant=tenant, model=input.model, run=run_record
            )
            nursery = self._nursery()
            assert nursery is not None
            written = _Written()
            core.starting.add(written.over)
            traced = nullcontext() if core.tree.tracer is None else core.tree.tracer.carried()
            core.base_context.copy().run(nursery.start_soon, self._begin, plan, start, written, traced)
        except BaseException:
            core.admission.release()
            raise
        with trio.move_on_after(core.settings.finish_seconds):
            await written.over.wait()
            return written.result.unwrap()
        raise OutcomeUnknown(
            f"run {run_record.run_id} could not be written down within {core.settings.finish_seconds:g} s and may still start;"
            " ask for it by its id, or repeat the request with the same idempotency key"
        )

    async def _begin(
        self, plan: TurnSpec, start: TurnStart, written: _Written, traced: AbstractContextManager[None]
    ) -> None:
        """The task of a run: write its row down, tell the caller if it still waits, and live."""
        core = self._core
        run: Run | None = None
        try:
            await self._write_down(start)
            if self._nursery() is None:
                raise RuntimeClosed("the runtime closed while the run was being written down; the next start ends it")
            with traced:
                run = self.runs.make(plan)
            written.result = outcome.Value(run)
        except Exception as error:
            written.result = outcome.Error(error)
        finally:
            if run is None:
                core.admission.release()
            core.starting.discard(written.over)
            written.over.set()
        if run is None:
            return
        for _ in range(2):  # the caller, which has been woken, comes first: it may stop the run before the run begins
            await trio.lowlevel.cancel_shielded_checkpoint()
        await self.runs.live(run)

    async def _write_down(self, start: TurnStart) -> None:
        """Begin the turn of a run. An outcome that is not known is asked for until it is: written twice, it changes nothing."""
        unknown = False
        pause = FIRST_PAUSE
        while True:
            try:
                await self._core.store.begin_turn(start)
                return
            except Exception as error:
                unknown = unknown or isinstance(error, OutcomeUnknown)
                if not unknown or self._core.draining:
                    raise
                assert start.run is not None
                logger.warning("whether run %s was written is not known, asking again: %s", start.run.run_id, error)
            await trio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
