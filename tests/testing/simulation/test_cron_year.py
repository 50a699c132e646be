"""A year of scheduled jobs, with daylight-saving changes and a loss of power a week: every slot is accounted for."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from itertools import takewhile
from typing import Any

import pytest
import trio

from hermes_trio import Runtime, RuntimeSettings, Turn
from hermes_trio.adapters.cron.jobs import ScheduledJob, new_job
from hermes_trio.adapters.cron.schedule import slots
from hermes_trio.adapters.cron.scheduler import CronScheduler
from hermes_trio.agent.approvals import Approvals
from hermes_trio.messaging.hub import MessageHub
from hermes_trio.messaging.platforms import Platforms
from hermes_trio.messaging.senders import Senders
from hermes_trio.messaging.settings import CronSettings, OutboxSettings
from hermes_trio.store import Runner, SqliteStore, open_store
from hermes_trio.testing.clock import virtual_clock
from hermes_trio.testing.simulation.node import FencedStore

START = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
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


async def a_year(days: int, seed: int) -> Counter[str]:
    """Let jobs run for so many days with a crash a week; return how their slots ended."""
    dice = random.Random(seed)
    found: Counter[str] = Counter()
    async with (
        open_store(None, runner=Runner.INLINE, clock=trio.current_time, maintenance=False) as store,
        trio.open_nursery() as nursery,
    ):
        jobs = []
        for number, schedule in enumerate(SCHEDULES):
            fields = {"name": f"job {number}", "schedule": schedule, "prompt": "go", "deliver": "local"}
            job = new_job(fields, id=f"{number:012x}", tenant="", now=START, timezone=ZONE, platforms=())
            await store.put_cron_job(job)
            jobs.append(ScheduledJob.read(job))
        end = START + days * DAY
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
        first, until = datetime.fromtimestamp(START, UTC), datetime.fromtimestamp(end, UTC)
        for job in jobs:
            for slot in takewhile(lambda one: one <= until, slots(job.schedule, first)):
                state = states.pop((job.row.id, slot.timestamp()), "no row")
                found[state] += 1
        late = [slot for _, slot in states if slot <= end]
        assert late == [], "no slot that the schedule does not have"
        nursery.cancel_scope.cancel()
    return found


def check(days: int, seed: int) -> Counter[str]:
    """Every slot has one row with an end."""
    found = trio.run(a_year, days, seed, clock=virtual_clock(START))
    assert set(found) <= {"completed", "failed", "missed", "skipped"}, found
    assert found["completed"] > found["failed"] + found["missed"]
    return found


def test_a_week_of_jobs_with_crashes_are_accounted_for() -> None:
    """A sample of the year."""
    assert sum(check(8, 3).values()) > 120


@pytest.mark.slow
def test_a_year_of_jobs_with_crashes_is_accounted_for() -> None:
    """Fifty jobs, both changes of the clock, a crash a week."""
    assert sum(check(365, 4).values()) > 8_000
