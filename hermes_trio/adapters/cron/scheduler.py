"""The scheduler: every slot of every job gets exactly one execution row, and at most one run.

A slot is claimed by its row, in the transaction that advances the job, so that neither a restart nor a clock that jumps can run it twice. Slots that
passed while the server was off are recorded as missed and collapse into one run; a slot whose previous run has not ended is skipped. Each run is a
session of its own that ends as `cron_complete` on every path. The addresses of an answer are part of its session, by value.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final

import msgspec
import trio

from hermes_trio.messaging.adapter_runner import receiving
from hermes_trio.messaging.addresses import Address, Resolution, TargetError, resolve_targets
from hermes_trio.messaging.command_text import is_silent_job_reply
from hermes_trio.messaging.core import MessagingCore
from hermes_trio.messaging.one_shot import OneShotInterface, delivery_fields
from hermes_trio.messaging.settings import CronSettings
from hermes_trio.runtime.budget import Budget
from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.ends import End
from hermes_trio.runtime.errors import OutcomeUnknown, RuntimeProblem
from hermes_trio.runtime.outcome import Outcome, TurnState
from hermes_trio.runtime.ports import CRON_TOPIC, InboxKind, InboxRow, NewMessage, RuntimeStore, TurnInput
from hermes_trio.runtime.retrying import retried
from hermes_trio.runtime.tree import waiting
from hermes_trio.runtime.turn import Turn
from hermes_trio.store import Page
from hermes_trio.store.errors import StoreError
from hermes_trio.store.records import CronExecution, CronJob, CronState

from .jobs import ScheduledJob, changed_job, execution_view, job_view, new_job
from .schedule import Once, ScheduleError, due, next_after, slots

logger: Final = logging.getLogger("hermes_trio.adapters.cron.scheduler")

CRON: Final = "cron"
CRON_COMPLETE: Final = "cron_complete"
CHECK_SECONDS: Final = 60.0
"""How often the scheduler checks whether the clock was changed."""

JUMP_SECONDS: Final = 2.0
STORE_SECONDS: Final = 5.0
FIRST_SECONDS: Final = 0.2
"""The first pause before a write about a slot is tried again. The slots of other jobs wait meanwhile."""

MOST_RUNNING: Final = 1000
"""The maximum of executions that are read to find those that run on other nodes."""

MISSED_ROWS: Final = 1000
"""The maximum of missed slots with a row of their own after one absence; of more only the newest get one, and one of them has the count."""

INSTRUCTIONS: Final = (
    "You are running as the scheduled job {name!r}. No user can answer questions. Answer with what should be delivered;"
    " if there is nothing to tell, answer with [SILENT] and nothing else."
)

UNBEGUN: Final = "The server was stopped before this run had begun"


class CronInterface(OneShotInterface):
    """The interface of cron slots."""

    def __init__(self, messaging: MessagingCore, settings: CronSettings, ended: Callable[[str], None]) -> None:
        super().__init__(messaging, CRON, CRON_COMPLETE)
        self._settings = settings
        self._ended = ended
        self._places: dict[str, tuple[Address, ...]] = {}

    def prepare(self, rows: Sequence[InboxRow]) -> TurnInput:
        given = super().prepare(rows)
        name = rows[0].routing.chat_name
        model = str(given.payload.get("model", ""))
        return msgspec.structs.replace(given, model=model, instructions=INSTRUCTIONS.format(name=name))

    def budget(self, rows: Sequence[InboxRow]) -> Budget | None:
        return Budget(seconds=float(rows[0].payload.get("deadline") or self._settings.deadline))

    async def session_for(self, store: RuntimeStore, context: SessionContext) -> str:
        return context.session_id or await super().session_for(store, context)

    def linger_of(self, context: SessionContext) -> float:
        return self._settings.linger

    def places(self, turn: Turn) -> Sequence[Address]:
        return self._places.get(turn.id, super().places(turn))

    def told(self, turn: Turn, outcome: Outcome, place: Address) -> str:
        """Return the text to deliver. A marker of silence counts anywhere that it counts for a job; a failure is always delivered (GW-153)."""
        if outcome.state is TurnState.COMPLETED:
            if is_silent_job_reply(outcome.text) or not outcome.text.strip():
                return ""
            text = super().told(turn, outcome, place)
            return f"**{turn.context.chat_name}**\n\n{text}" if text and self._settings.wrap_response else text
        return super().told(turn, outcome, place)

    async def on_turn_start(self, turn: Turn) -> None:
        self._turns[turn.id] = turn
        core, store, job_id = self._messaging.runtime.core, self._messaging.store, turn.context.chat_id
        given = turn.input.payload.get("places")
        if given is None:
            find = partial(store.get_cron_job, job_id)
            over = lambda: core.draining  # noqa: E731 - one condition
            try:
                row = await retried(find, f"read cron job {job_id}", first=0.2, works=core.ends.works, over=over)
                if row is not None:
                    self._places[turn.id] = resolve(self._messaging, ScheduledJob.read(row)).addresses
            except Exception:
                logger.exception("could not read cron job %s; its background work reports to the first address", job_id)
        else:
            self._places[turn.id] = tuple(Address(*place) for place in given)
        await super().on_turn_start(turn)
        if given is not None:
            slot = float(turn.input.payload["slot"])
            start = partial(store.start_cron_slot, job_id, slot, session_id=turn.context.session_id)
            await core.ends.put(End(f"the start of slot {slot} of cron job {job_id}", start))

    async def ended(self, turn: Turn, outcome: Outcome) -> None:
        """Store the end of the slot with the end of its own turn; background work may still report later."""
        self._places.pop(turn.id, None)
        if "slot" not in turn.input.payload or not outcome.begun:
            return
        problems = "; ".join(turn.input.payload.get("problems", ()))
        completed = outcome.state is TurnState.COMPLETED and bool(outcome.text.strip())
        state = CronState.COMPLETED if completed else CronState.FAILED
        error = problems if completed else outcome.error or "the agent ended its turn without an answer"
        await self.end_slot(turn.context.chat_id, float(turn.input.payload["slot"]), state, outcome.text, error)

    async def on_refused(self, rows: Sequence[InboxRow], reason: str) -> None:
        """Record a slot that could not be passed to an agent as failed."""
        for row in rows:
            if "slot" in row.payload:
                await self.end_slot(row.routing.chat_id, float(row.payload["slot"]), CronState.FAILED, "", reason)

    async def end_slot(self, job_id: str, slot: float, state: CronState, output: str, error: str) -> None:
        """Store the end of a slot, after which the next slot of the job can run."""
        store = self._messaging.store
        end = End(
            f"slot {slot} of cron job {job_id}",
            lambda: store.finish_cron_slot(job_id, slot, state, output=output, error=error),
            lambda _: store.finish_cron_slot(job_id, slot, state, error=error),
        )
        await self._messaging.runtime.core.ends.put(end)
        self._ended(job_id)


def resolve(messaging: MessagingCore, job: ScheduledJob) -> Resolution:
    """Return the present addresses of a job's answers; a target that cannot be resolved is reported as a problem."""
    try:
        targets = job.targets(messaging.platforms.names)
    except TargetError as error:
        return Resolution((), True, (str(error),))
    return resolve_targets(targets, origin=job.origin, homes=messaging.platforms.homes)


class CronScheduler:
    """See the module. It is the `CronPort` of the HTTP API."""

    def __init__(
        self,
        messaging: MessagingCore,
        settings: CronSettings | None = None,
        *,
        clock: Callable[[], float] | None = None,
        check_seconds: float = CHECK_SECONDS,
    ) -> None:
        self.settings: CronSettings = CronSettings() if settings is None else settings
        self._messaging = messaging
        self._clock: Callable[[], float] = messaging.runtime.core.clock if clock is None else clock
        self._check_seconds = check_seconds
        self._changed = trio.Event()
        self._lock = trio.Lock()
        self._live: set[str] = set()
        """Jobs whose slot has been started and whose turn has not ended."""
        self.interface = CronInterface(messaging, self.settings, self._over)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[CronScheduler]:
        """Run slots for the body of the `async with`. Leaving it stops the scheduler; runs end in the runtime's order."""
        runtime = self._messaging.runtime
        async with self.interface.settling():
            if not runtime.core.shared:
                # Where nodes share the store, what was handed over and not begun is begun by another one.
                await self._tell_unbegun()
            async with (
                runtime.delivering(self.interface) as self.interface.inbox,
                receiving(runtime, CRON, lambda: runtime.core.membership.run_alone(CRON, self._run)),
            ):
                yield self

    # -- time ------------------------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        with self._messaging.store.subscribe(CRON_TOPIC, lambda _: self._changed.set()):
            while True:
                self._changed = trio.Event()
                try:
                    soonest = await self._tick()
                except StoreError as error:
                    logger.error("could not read the cron jobs; retrying: %s", error)
                    soonest = self._clock() + STORE_SECONDS
                await self._sleep_until(soonest)

    async def _sleep_until(self, when: float | None) -> None:
        """Sleep until the wall clock reaches `when`, a job was changed, or the wall clock was changed."""
        began, wall_began = trio.current_time(), self._clock()
        with waiting("the next slot" if when is not None else "a job"):
            while not self._changed.is_set():
                wall = self._clock()
                moved = (wall - wall_began) - (trio.current_time() - began)
                left = self._check_seconds if when is None else when - wall
                if left <= 0 or abs(moved) > JUMP_SECONDS:
                    return
                with trio.move_on_after(min(left, self._check_seconds)):
                    await self._changed.wait()

    async def _tick(self) -> float | None:
        """Run what is due; return the next due time."""
        soonest: float | None = None
        for row in await self._messaging.store.list_cron_jobs():
            if not row.enabled or row.next_at is None:
                continue
            next_at: float | None = row.next_at
            if next_at <= self._clock():
                if self._messaging.runtime.draining or await self._is_full():
                    continue
                try:
                    async with self._lock:
                        next_at = await self._fire(row.id)
                except StoreError as error:
                    logger.error("could not run cron job %s (%s); retrying: %s", row.name, row.id, error)
                    next_at = self._clock() + STORE_SECONDS
            if next_at is not None:
                soonest = next_at if soonest is None else min(soonest, next_at)
        return soonest

    async def _is_full(self) -> bool:
        most = self.settings.max_parallel_jobs
        return most is not None and len(await self._running()) >= most

    async def _running(self) -> set[str]:
        """Return the jobs whose slot has been started and whose turn has not ended, on any node."""
        if not self._messaging.runtime.core.shared:
            return self._live
        found = await self._messaging.store.list_cron_executions(page=Page(MOST_RUNNING))
        return {one.job_id for one in found if one.state in (CronState.CLAIMED, CronState.RUNNING)}

    def _over(self, job_id: str) -> None:
        self._live.discard(job_id)
        self._changed.set()

    # -- one job -----------------------------------------------------------------------------------------------------------------------

    async def _fire(self, job_id: str) -> float | None:
        """Account for all due slots of one job, and start at most one run. Return its next due time."""
        store = self._messaging.store
        row = await store.get_cron_job(job_id)
        now = self._clock()
        if row is None or not row.enabled or row.next_at is None or row.next_at > now:
            return None if row is None or not row.enabled else row.next_at
        try:
            job = ScheduledJob.read(row)
        except (ScheduleError, KeyError, TypeError, ValueError) as error:
            logger.error("could not read cron job %s (%s); it is disabled: %s", row.name, row.id, error)
            await store.put_cron_job(msgspec.structs.replace(row, enabled=False))
            return None
        present = datetime.fromtimestamp(now, UTC)
        first = datetime.fromtimestamp(row.next_at, UTC)
        if isinstance(job.schedule, Once):
            slot, missed, more = first, (), 0
        else:
            decision = due(job.schedule, first - timedelta(microseconds=1), present)
            if decision.run is None:
                await store.set_cron_next(row.id, _stamp(next_after(job.schedule, present)))
                return row.next_at
            slot = decision.run
            missed = tuple(_between(job, first, slot)) if decision.missed_count <= MISSED_ROWS else decision.missed
            more = decision.missed_count - len(missed)
        for index, one in enumerate(missed):
            why = f"the server was not running; the run of {slot.isoformat()} stands for it"
            if more and index == 0:
                why += f", and for {more} earlier slots"
            await store.claim_cron_slot(row.id, one.timestamp(), state=CronState.MISSED, error=why)
        following = _stamp(next_after(job.schedule, max(slot, present)))
        if row.id in await self._running():
            await self._account(row, slot, CronState.SKIPPED, "the last run was still going on", following)
            return following
        if job.times is not None and job.completed + 1 >= job.times:
            following = None
        if await self._account(row, slot, CronState.CLAIMED, "", following):
            await self._start(job, slot.timestamp())
        return following

    async def _written(self, write: Callable[[], Awaitable[object]]) -> bool:
        """Write, and retry while the store fails. A write whose answer was lost counts as made.

        Raises the error of a write that the store refuses while it accepts others: nothing of it is written. One that may be written is retried until
        the store has answered, so that no claim is lost.
        """
        unknown = False

        async def attempt() -> bool:
            nonlocal unknown
            try:
                return bool(await write()) or unknown
            except OutcomeUnknown:
                unknown = True
                raise

        async def works() -> bool:
            return not unknown and await self._messaging.runtime.core.ends.works()

        return await retried(attempt, "store a cron slot", first=FIRST_SECONDS, longest=STORE_SECONDS, works=works)

    async def _account(
        self, row: CronJob, slot: datetime, state: CronState, error: str, following: float | None
    ) -> bool:
        """Write the row of a slot, and advance the job. Return False if another scheduler has written it."""
        store, at = self._messaging.store, slot.timestamp()
        claimed = await self._written(
            lambda: store.claim_cron_slot(
                row.id, at, state=state, error=error, next_at=following, count=state is CronState.CLAIMED
            )
        )
        if following is None:
            end = End(f"the schedule of cron job {row.id}", lambda: store.set_cron_next(row.id, None))
            await self._messaging.runtime.core.ends.put(end)
        return claimed

    async def _start(self, job: ScheduledJob, slot: float, *, manual: bool = False) -> None:
        """Pass a claimed slot to its lane; the message's dedupe key makes that repeatable. If it is refused, the slot has failed with the reason."""
        row = job.row
        resolution = resolve(self._messaging, job)
        key = f"agent:main:cron:cron:{row.id}:{slot:.3f}"
        when = datetime.fromtimestamp(slot, UTC)
        session_id = f"cron_{row.id}_{when:%Y%m%d_%H%M%S}" + (f"_{round(slot * 1000) % 1000:03}" if manual else "")
        routing = SessionContext(
            platform=CRON,
            source=CRON,
            chat_id=row.id,
            chat_name=" ".join(row.name.split())[:200],
            session_key=key,
            session_id=session_id,
            message_id=f"{slot:.3f}",
            tenant=row.tenant,
            **delivery_fields(resolution.addresses[0] if resolution.addresses else None),
        )
        message = NewMessage(
            inbox=CRON,
            session_key=key,
            routing=routing,
            text=job.prompt,
            payload={
                "slot": slot,
                "model": job.model,
                "deadline": job.deadline or self.settings.deadline,
                "places": [[place.platform, place.chat_id, place.thread_id] for place in resolution.addresses],
                "problems": list(resolution.problems),
            },
            dedupe_key=f"{row.id}:{slot:.3f}",
        )
        self._live.add(row.id)
        try:
            await self._written(lambda: self.interface.inbox.accept(message))
        except RuntimeProblem as error:
            await self.interface.end_slot(row.id, slot, CronState.FAILED, "", str(error))
        except BaseException:
            self._live.discard(row.id)
            raise

    async def _tell_unbegun(self) -> None:
        """Record a slot that was passed on and not begun when the server died as failed, and report that. It is not begun now."""
        store = self._messaging.store
        for key in await store.waiting_sessions(CRON):
            for row in await store.take_inbox(CRON, key):
                if row.kind is not InboxKind.MESSAGE:
                    continue
                text = f"[{row.routing.chat_name}: interrupted. {UNBEGUN}; it is not made up for.]"
                places = [Address(*place) for place in row.payload.get("places", ())]
                told = [reply for place in places for reply in self._messaging.platforms.compose(place, text)]
                await store.inbox_dead([row], reason=UNBEGUN, replies=told)

    # -- the port of the HTTP front end and the command line ---------------------------------------------------------------------------

    async def list_jobs(self, tenant: str | None, *, include_disabled: bool) -> list[dict[str, Any]]:
        """Return the jobs of a tenant, or of all."""
        rows = await self._messaging.store.list_cron_jobs(tenant=tenant)
        return [await self._view(row) for row in rows if row.enabled or include_disabled]

    async def create_job(self, tenant: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Create a job. Raises `ValueError` for a wrong field."""
        row = new_job(
            fields,
            id=self._messaging.runtime.core.ids.hex(12),
            tenant=tenant,
            now=self._clock(),
            timezone=self.settings.timezone,
            platforms=self._messaging.platforms.names,
        )
        return await self._put(row)

    async def get_job(self, tenant: str | None, job_id: str) -> dict[str, Any] | None:
        """Return one job, or None."""
        row = await self._find(tenant, job_id)
        return None if row is None else await self._view(row)

    async def update_job(self, tenant: str | None, job_id: str, fields: Mapping[str, Any]) -> dict[str, Any] | None:
        """Change a job; return None if there is none. Raises `ValueError` for a wrong field."""
        async with self._lock:
            row = await self._find(tenant, job_id)
            if row is None:
                return None
            changed = changed_job(
                row,
                fields,
                now=self._clock(),
                timezone=self.settings.timezone,
                platforms=self._messaging.platforms.names,
            )
            return await self._put(changed)

    async def delete_job(self, tenant: str | None, job_id: str) -> bool:
        """Delete a job. Its run in progress continues."""
        async with self._lock:
            row = await self._find(tenant, job_id)
            return row is not None and await self._messaging.store.delete_cron_job(row.id)

    async def pause_job(self, tenant: str | None, job_id: str) -> dict[str, Any] | None:
        """Pause a job: its slots are skipped until it is resumed."""
        return await self.update_job(tenant, job_id, {"enabled": False})

    async def resume_job(self, tenant: str | None, job_id: str) -> dict[str, Any] | None:
        """Resume a job with its next slot. Missed slots are not caught up."""
        return await self.update_job(tenant, job_id, {"enabled": True})

    async def run_job(self, tenant: str | None, job_id: str) -> dict[str, Any] | None:
        """Run a job now, in a slot of its own, unless it is running."""
        async with self._lock:
            row = await self._find(tenant, job_id)
            if row is None:
                return None
            if row.id not in await self._running():
                slot = round(self._clock(), 3)
                if await self._written(lambda: self._messaging.store.claim_cron_slot(row.id, slot)):
                    await self._start(ScheduledJob.read(row), slot, manual=True)
            return await self._view(row)

    async def executions(self, tenant: str | None, job_id: str, limit: int = 20) -> list[dict[str, Any]] | None:
        """Return the newest slots of a job; None if there is no such job."""
        row = await self._find(tenant, job_id)
        if row is None:
            return None
        return [execution_view(one) for one in await self._messaging.store.list_cron_executions(row.id, Page(limit))]

    async def _find(self, tenant: str | None, job_id: str) -> CronJob | None:
        row = await self._messaging.store.get_cron_job(job_id)
        return row if row is not None and tenant in (None, row.tenant) else None

    async def _put(self, row: CronJob) -> dict[str, Any]:
        stored = await self._messaging.store.put_cron_job(row)
        return await self._view(stored)

    async def _view(self, row: CronJob) -> dict[str, Any]:
        found: list[CronExecution] = await self._messaging.store.list_cron_executions(row.id, Page(1))
        return job_view(row, found[0] if found else None, running=row.id in await self._running())


def _between(job: ScheduledJob, first: datetime, last: datetime) -> list[datetime]:
    """Return the slots from `first` on that come before `last`."""
    found: list[datetime] = []
    for slot in slots(job.schedule, first - timedelta(microseconds=1)):
        if slot >= last:
            break
        found.append(slot)
    return found


def _stamp(slot: datetime | None) -> float | None:
    return None if slot is None else slot.timestamp()
