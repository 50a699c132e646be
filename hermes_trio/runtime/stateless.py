"""The stateless entry: runs turns for clients that are gone when the turn ends.

No method here has a parameter through which a channel could be passed, and the turns that it makes have none. This is all that the HTTP front end gets
to see of the runtime.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar, Literal

import trio

from .budget import Budget
from .context import SessionContext, check_id
from .core import RuntimeCore
from .errors import Draining, RuntimeClosed
from .outcome import CancelCause, Cause, Outcome
from .ports import Agent, NewRun, TurnInput, TurnStart
from .run import Run, Runs
from .turn import EventSink, Turn, TurnSpec
from .turn_lifecycle import run_turn

__all__ = ["StatelessEntry"]


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
                on_start(turn)
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

        The run belongs to the runtime. If this call is cancelled while the row is being written, the run is not started, and the next boot ends its row.
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
            with trio.CancelScope(shield=True, deadline=trio.current_time() + core.settings.finish_seconds) as bound:
                await core.store.begin_turn(
                    TurnStart(
                        turn_id="",
                        context=context,
                        source=plan.source,
                        tenant=tenant,
                        model=input.model,
                        run=run_record,
                    )
                )
            if bound.cancelled_caught:
                raise TimeoutError(f"the run could not be written down within {core.settings.finish_seconds:g} s")
            nursery = self._nursery()
            if nursery is None:
                raise RuntimeClosed("the runtime closed while the run was being written down; the next start ends it")
        except BaseException:
            core.admission.release()
            raise
        run = self.runs.make(plan)
        core.base_context.copy().run(nursery.start_soon, self.runs.live, run)
        return run
