"""A year of scheduled jobs, with daylight-saving changes and a loss of power a week: every slot is accounted for."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
import trio

from hermes_trio import Runtime, RuntimeSettings, Turn
from hermes_trio.adapters.cron import schedule
from hermes_trio.adapters.cron.jobs import new_job
from hermes_trio.adapters.cron.scheduler import CronScheduler
from hermes_trio.agent.approvals import Approvals
from hermes_trio.messaging.hub import MessageHub
from hermes_trio.messaging.platforms import Platforms
from hermes_trio.messaging.senders import Senders
from hermes_trio.messaging.settings import CronSettings, OutboxSettings
from hermes_trio.store import Runner, SqliteStore, open_store
from hermes_trio.testing.clock import virtual_clock
from hermes_trio.testing.simulation.node import FencedStore
from hermes_trio.testing.simulation.wall_clock import times_of_day

START = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
AUTUMN = datetime(2026, 10, 24, tzinfo=UTC).timestamp()
"""The day before a change of the clock."""

DAY = 86_400.0
ZONE = "Europe/Berlin"

SCHEDULES = [
    *(
        f"{minute} 2 * * *" for minute in range(0, 60, 12)
    ),  # in the hour that is left out in March, and twice there in October
    *(f"{minute} {minute % 24} * * *" for minute in range(5)),
    *(f"{minute} 0,12 * * *" for minute in range(5)),
    *(f"{minute} {minute % 24} * * {minute % 7}" for minute in range(25)),
    *(f"{minute} 3 {minute + 1} * *" for minute in range(10)),
]
"""Fifty jobs: daily, twice a day, weekly and monthly."""


class Life:
    """One start of the scheduler, until its power fails."""

    def __init__(self, root: SqliteStore) -> None:
        self.root = root
        self.dead = False
        self.scope = trio.CancelScope()
        self.runtime: Runtime | None = None

    @asynccontextmanager
    async def open_store(self) -> Any:
        handle = SqliteStore(self.root.database)
        yield FencedStore(handle, lambda: self.dead)

    async def run(self) -> None:
        """Schedule, until the power fails."""

        async def agent(turn: Turn) -> str:
            await trio.sleep(random.random() * 20)
            return "done"

        with self.scope:
            senders = Senders([], OutboxSettings(look_seconds=30 * DAY))
            settings = RuntimeSettings(watchdog_seconds=0)
            self.runtime = Runtime(
                agent=agent, store=self.open_store(), settings=settings, stages=[senders.stage], seed=1
            )
            async with self.runtime as runtime:
                approvals = Approvals(runtime.store, seconds=60)  # type: ignore[arg-type]
                hub = MessageHub(runtime, Platforms([]), senders, approvals)
                async with hub.open():
                    cron = CronScheduler(hub.messaging, CronSettings(timezone=ZONE), check_seconds=DAY)
                    async with cron.open():
                        await trio.sleep_forever()

    def power_off(self) -> None:
        """Discard all later writes."""
        self.dead = True
        if self.runtime is not None:
            self.runtime.abort()
        self.scope.cancel()


def _matches(field: str, value: int) -> bool:
    return field == "*" or str(value) in field.split(",")


def wanted_slots(jobs: Mapping[str, str], start: float, end: float) -> Iterator[tuple[str, float]]:
    """Yield the slots that the jobs must have, by the clock on the wall: the scheduler's own arithmetic is not asked."""
    by_time: dict[tuple[int, int], list[tuple[str, list[str]]]] = defaultdict(list)
    for when, job in jobs.items():
        minutes, hours, *days = when.split()
        for hour in hours.split(","):
            by_time[int(hour), int(minutes)].append((job, days))
    first, until = datetime.fromtimestamp(start, UTC), datetime.fromtimestamp(end, UTC)
    for at, shown in times_of_day(ZONE, first, until):
        for job, (day, month, weekday) in by_time.get((shown.hour, shown.minute), ()):
            is_day = _matches(day, shown.day) and _matches(month, shown.month)
            if is_day and _matches(weekday, shown.isoweekday() % 7) and at > first:
                yield job, at.timestamp()


async def a_year(days: int, seed: int, start: float = START) -> Counter[str]:
    """Let jobs run for so many days with a crash a week; return how their slots ended."""
    dice = random.Random(seed)
    found: Counter[str] = Counter()
    async with (
        open_store(None, runner=Runner.INLINE, clock=trio.current_time, maintenance=False) as store,
        trio.open_nursery() as nursery,
    ):
        jobs: dict[str, str] = {}
        for number, when in enumerate(SCHEDULES):
            fields = {"name": f"job {number}", "schedule": when, "prompt": "go", "deliver": "local"}
            job = new_job(fields, id=f"{number:012x}", tenant="", now=start, timezone=ZONE, platforms=())
            await store.put_cron_job(job)
            jobs[when] = job.id
        end = start + days * DAY
        while (now := trio.current_time()) < end:
            life = Life(store)
            nursery.start_soon(life.run)
            await trio.sleep(min(dice.random() * 14 * DAY, end - now))
            if trio.current_time() < end:
                life.power_off()
                await trio.sleep(min(dice.random() * 2 * DAY, end - trio.current_time()))
        await trio.sleep(60)
        if life.dead:
            life = Life(store)
            nursery.start_soon(life.run)
        await trio.sleep(3600)
        rows = store._writer._db.execute("SELECT job_id, slot, state FROM cron_executions")  # type: ignore[attr-defined]
        states: dict[tuple[str, float], str] = {(job, slot): state for job, slot, state in rows}
        for job, slot in wanted_slots(jobs, start, end):
            found[states.pop((job, slot), "no row")] += 1
        late = [slot for _, slot in states if slot <= end]
        found["not of the schedule"] += len(late)
        nursery.cancel_scope.cancel()
    return found


def check(days: int, seed: int) -> Counter[str]:
    """Every slot has one row with an end."""
    found = trio.run(a_year, days, seed, clock=virtual_clock(START))
    assert found.pop("not of the schedule") == 0
    assert set(found) <= {"completed", "failed", "missed", "skipped"}, found
    assert found["completed"] > found["failed"] + found["missed"]
    return found


def test_the_slots_of_the_nights_in_which_the_clock_is_changed() -> None:
    """A time that is left out comes at the change, one that is there twice the first time."""
    jobs = {"30 2 * * *": "daily", "0 3 * * *": "later", "15 2 * * 0": "weekly"}
    spring = [("daily", 1.0), ("later", 1.0), ("weekly", 1.0)]
    autumn = [("weekly", 0.25), ("daily", 0.5), ("later", 2.0)]
    for month, day, wanted in ((3, 29, spring), (10, 25, autumn)):
        midnight = datetime(2026, month, day, tzinfo=UTC).timestamp()
        found = [(job, (at - midnight) / 3600) for job, at in wanted_slots(jobs, midnight, midnight + 12 * 3600)]
        assert sorted(found) == sorted(wanted)


def test_a_week_of_jobs_with_crashes_are_accounted_for() -> None:
    """A sample of the year."""
    assert sum(check(8, 3).values()) > 120


def test_a_wrong_fold_is_convicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots are judged by the clock on the wall, not by the scheduler."""
    monkeypatch.setattr(schedule, "_wall_to_utc", lambda wall, zone: wall.replace(tzinfo=zone, fold=1).astimezone(UTC))
    found = trio.run(a_year, 2, 3, AUTUMN, clock=virtual_clock(AUTUMN))
    assert found["no row"] >= 5


@pytest.mark.slow
def test_a_year_of_jobs_with_crashes_is_accounted_for() -> None:
    """Fifty jobs, both changes of the clock, a crash a week."""
    assert sum(check(365, 4).values()) > 8_000
