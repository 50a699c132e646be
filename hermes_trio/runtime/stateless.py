"""The stateless entry: runs turns for clients that cannot be reached after the turn has ended.

No method here has a parameter for a channel, and the turns that it makes have none. This is the only part of the runtime that the HTTP front end
uses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Final, Literal

import attrs
import outcome
import trio

from .budget import Budget
from .context import check_id
from .core import RuntimeCore
from .errors import Draining, OutcomeUnknown, RuntimeClosed
from .membership import BEATS
from .outcome import CancelCause, Cause, Outcome
from .ports import REAP_TOPIC, NewRun, ResumedRun, Resumption, TurnStart
from .retrying import retried
from .run import Run, Runs
from .turn import TurnOrigin, TurnSpec
from .turn_lifecycle import run_turn

logger: Final = logging.getLogger("hermes_trio.runtime.stateless")

RETRY_SECONDS: Final = 1.0

_REQUESTED: Final = TurnOrigin(outer_cause=Cause(CancelCause.CLIENT_GONE))


def _resumption_of(spec: TurnSpec) -> Resumption:
    seconds = None if spec.budget is None else spec.budget.seconds
    return Resumption(context=spec.context, input=spec.input, source=spec.source, seconds=seconds)


def _spec_of(resumed: ResumedRun) -> TurnSpec:
    kept = resumed.resumption
    budget = None if kept.seconds is None else Budget(seconds=kept.seconds)
    return TurnSpec(
        input=kept.input, context=kept.context, source=kept.source, tenant=resumed.run.tenant, budget=budget
    )


@attrs.define(eq=False)
class _Written:
    """The result of writing a run's row, for the caller that waits for it."""

    over: trio.Event = attrs.field(factory=trio.Event)
    result: outcome.Value[Run] | outcome.Error = attrs.field(
        factory=lambda: outcome.Error(RuntimeClosed("the runtime was cancelled while the run was being stored"))
    )


class StatelessEntry:
    """Starts turns and runs without a channel. Made by the runtime. `supports_async_delivery` is fixed by the class."""

    supports_async_delivery: ClassVar[Literal[False]] = False

    def __init__(self, core: RuntimeCore, runs: Runs, nursery: Callable[[], trio.Nursery | None]) -> None:
        self._core = core
        self.ends = core.ends
        self._nursery = nursery
        self._in_line: int = 0
        """The runs that have been claimed and wait for a token."""
        self._resumed: set[str] = set()
        """The runs that this process has begun again. Each of them ends here, or is interrupted with this process."""
        self.runs = runs

    @property
    def active(self) -> int:
        """Return the number of turns that hold a token now."""
        return self._core.admission.active

    @property
    def draining(self) -> bool:
        """Return whether new work is refused."""
        return self._core.draining

    def check(self) -> None:
        """Raise the error with which a new turn would be refused (`RuntimeClosed` or `Draining`), without starting one."""
        if self._nursery() is None:
            raise RuntimeClosed("the runtime is closed; open one with `async with Runtime(...)` before starting turns")
        if self._core.draining:
            raise Draining()

    def check_room(self) -> None:
        """Raise the error with which a turn of HTTP would be refused now, `TooBusy` included, without starting one."""
        self.check()
        self._core.admission.check()

    async def run_turn(self, spec: TurnSpec) -> Outcome:
        """Run a turn in this task and return its outcome. Raises `TooBusy`, `Draining` or `HostedElsewhere` before anything is done.

        Cancelling the task means that the client has disconnected: the turn is cancelled, its partial result is stored, and `Cancelled` propagates.
        """
        self.check()
        core = self._core
        if core.shared:
            spec = await core.hosts.place(spec)
            self.check()
        core.admission.admit_nowait()
        try:
            return await run_turn(core, core.make_turn(spec, None, _REQUESTED))
        finally:
            core.admission.release()

    async def start_run(
        self,
        spec: TurnSpec,
        *,
        run_id: str = "",
        idempotency_key: str = "",
        fingerprint: str = "",
        resumable: bool = False,
    ) -> Run:
        """Start a run that survives its client. It is durable when this returns. A `resumable` one also survives its process: it is begun again, with
        the same input and without the hooks of `spec`.

        The run belongs to the runtime: if this call is cancelled while the row is being written, the run still starts. Raises `OutcomeUnknown` if
        the store takes longer than `finish_seconds`; the run then starts as soon as it is written, and the same idempotency key finds it. Raises
        `HostedElsewhere`, with nothing written, if another node has to run it.
        """
        self.check()
        core = self._core
        resumption = _resumption_of(spec) if resumable else None
        if core.shared:
            spec = await core.hosts.place(spec)
            self.check()
        core.admission.admit_nowait()
        try:
            run_record = NewRun(
                run_id=check_id(run_id, "run_id", 128) or core.ids.make("run_"),
                session_id=spec.context.session_id,
                model=spec.input.model,
                tenant=spec.tenant,
                input_preview=spec.input.text[:200],
                idempotency_key=idempotency_key,
                fingerprint=fingerprint,
                resumable=resumable,
            )
            start = TurnStart(
                turn_id="",
                context=spec.context,
                source=spec.source,
                tenant=spec.tenant,
                model=spec.input.model,
                run=run_record,
                resumption=resumption,
            )
            nursery = self._nursery()
            assert nursery is not None
            written = _Written()
            core.starting.add(written.over)
            traced = nullcontext() if core.tree.tracer is None else core.tree.tracer.carried()
            core.base_context.copy().run(nursery.start_soon, self._begin, spec, start, written, traced)
        except BaseException:
            core.admission.release()
            raise
        with trio.move_on_after(core.settings.finish_seconds):
            await written.over.wait()
            return written.result.unwrap()
        raise OutcomeUnknown(
            f"run {run_record.run_id} could not be stored within {core.settings.finish_seconds:g} s and may still start;"
            " ask for it by its id, or repeat the request with the same idempotency key"
        )

    async def _begin(
        self, spec: TurnSpec, start: TurnStart, written: _Written, traced: AbstractContextManager[None]
    ) -> None:
        """Write the row of a run, set the result for the waiting caller, and run the turn: the run's task."""
        core = self._core
        run: Run | None = None
        try:
            await self._write_down(start)
            if self._nursery() is None:
                raise RuntimeClosed("the runtime closed while the run was being stored; the next start ends it")
            with traced:
                assert start.run is not None
                run = self.runs.make(spec, start.run)
            if core.drained:
                # A drain did not wait for this slow write, and reported a turn that may begin: the run ends at once.
                run.request_stop(Cause(CancelCause.DRAIN))
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
        for _ in range(2):  # the woken caller runs first: it may stop the run before the run begins
            await trio.lowlevel.cancel_shielded_checkpoint()
        await self.runs.live(run)

    # -- interrupted runs --------------------------------------------------------------------------------------------------------

    async def stop_resuming(self, run_id: str) -> None:
        """Note in the store that a run is not begun again: a stop was requested, which holds also if this process ends now."""
        await self._core.store.stop_resuming(self._core.epoch, run_id=run_id)

    async def resume_runs(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Begin interrupted runs again: at the start, and where nodes share the store for as long as this one runs. Retries while the store fails."""
        core = self._core
        pause = core.store.lease_seconds / BEATS
        while True:
            released = trio.Event()
            with core.store.subscribe(REAP_TOPIC, lambda _, released=released: released.set()):
                failed = False
                try:
                    await self._claim_runs()
                except Exception as error:
                    failed = True
                    logger.warning("could not begin interrupted runs again; retrying: %s", error)
                task_status.started()
                task_status = trio.TASK_STATUS_IGNORED
                if not failed and not core.shared:
                    return
                with trio.move_on_after(RETRY_SECONDS if failed else pause):
                    await released.wait()

    async def _claim_runs(self) -> None:
        core = self._core
        nursery = self._nursery()
        if core.draining or nursery is None:
            return
        async with self.runs.claiming:
            # Other nodes may have room for what this one has not. One more waits in line, so that no run waits for ever where all nodes are busy.
            room = max(core.admission.limit - core.admission.active, 0) + 1 - self._in_line
            for resumed in await core.store.claim_interrupted(core.epoch, max(room, 0) if core.shared else None):
                if resumed.run.run_id in self._resumed:
                    continue
                spec = await core.hosts.place(_spec_of(resumed), anywhere=True)
                self._resumed.add(resumed.run.run_id)
                run = self.runs.make(spec, resumed.run)
                run.continue_from(resumed)
                logger.warning("run %s was interrupted; this is its attempt %d", run.id, run.attempt)
                if resumed.stopped or core.drained:
                    run.request_stop(Cause(CancelCause.STOP if resumed.stopped else CancelCause.DRAIN))
                self._in_line += 1
                core.base_context.copy().run(nursery.start_soon, self._resume, run)

    async def _resume(self, run: Run) -> None:
        admission, turn, admitted = self._core.admission, run.turn, False
        try:
            with trio.CancelScope() as turn.scope:
                if turn.cause is None:
                    await admission.admit()
                    admitted = True
            if not admitted:
                admission.exceed()  # it was stopped in line: it ends without a free token
        except BaseException:
            self.runs.drop(run)
            raise
        finally:
            turn.scope = None
            self._in_line -= 1
        await self.runs.live(run)

    async def _write_down(self, start: TurnStart) -> None:
        """Commit the beginning of a run. After an unknown outcome, retries until the store writes it, its rows refuse it, or a drain begins: a row that
        may exist has to be begun, however often the store refuses this write.
        """
        core = self._core
        unknown = False

        async def write() -> None:
            nonlocal unknown
            try:
                await core.store.begin_turn(start)
            except OutcomeUnknown:
                unknown = True
                raise

        what = f"learn whether run {start.run and start.run.run_id} was written"
        over = lambda: core.draining or not unknown  # noqa: E731 - one condition
        await retried(write, what, first=0.1, longest=5.0, over=over)
