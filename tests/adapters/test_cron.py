"""The scheduler: one row a slot, at most one run a slot, and every session ended, whatever happens to the server and to the clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
import trio

from hermes_trio import Agent, Budget, Turn, get_session_env
from hermes_trio.adapters.cron import jobs as cron_jobs
from hermes_trio.adapters.cron.jobs import ScheduledJob
from hermes_trio.adapters.cron.schedule import slots
from hermes_trio.adapters.cron.scheduler import CRON_COMPLETE, CronScheduler
from hermes_trio.http.api import jobs as http_jobs
from hermes_trio.messaging.addresses import Address
from hermes_trio.messaging.platforms import Platform
from hermes_trio.messaging.senders import target_of
from hermes_trio.messaging.settings import CronSettings, HomeChannel, PlatformSettings
from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.ports import InboxRow, NewMessage
from hermes_trio.store import (
    CommitUncertain,
    CronExecution,
    CronJob,
    CronState,
    InboxState,
    OutboxState,
    Page,
    SessionFilter,
    StoreError,
)
from hermes_trio.testing.faults import StoreFaults
from hermes_trio.testing.memory_platform import MemoryPlatform
from tests.messaging.harness import World, asks, open_world, scripted, starts_job, works

pytestmark = pytest.mark.usefixtures("virtual_clock")

START = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
HOME = PlatformSettings(allow_all=True, home=HomeChannel(chat_id="home"))


class WallClock:
    """The clock on the wall: it follows the loop's time, and can be moved."""

    def __init__(self, offset: float = 0.0) -> None:
        self.offset = START + offset

    def __call__(self) -> float:
        return self.offset + trio.current_time()


@attrs.frozen
class Scheduled:
    """A gateway with a scheduler."""

    world: World
    schedulers: Sequence[CronScheduler]
    chat: MemoryPlatform
    _next: Iterator[int] = attrs.field(factory=count)

    @property
    def cron(self) -> CronScheduler:
        """The scheduler of the node whose turn it is."""
        return self.schedulers[next(self._next) % len(self.schedulers)]

    async def add(self, schedule: str, **fields: Any) -> str:
        """Make a job and return its id."""
        given = {"name": "report", "prompt": "what happened?", "deliver": "memory", **fields, "schedule": schedule}
        return (await self.cron.create_job("", given))["id"]

    async def rows(self, job_id: str | None = None) -> list[CronExecution]:
        """All execution rows, oldest first."""
        return (await self.world.store.list_cron_executions(job_id, page=Page(100_000)))[::-1]

    async def states(self, job_id: str | None = None) -> list[str]:
        """The states of the rows, oldest first."""
        return [row.state.value for row in await self.rows(job_id)]

    async def reasons(self) -> set[str | None]:
        """How the sessions have ended."""
        return {
            session.end_reason
            for session in await self.world.store.list_sessions(SessionFilter(source="cron"), Page(10_000))
        }


@asynccontextmanager
async def open_cron(
    agent: Agent,
    *,
    path: Path | None = None,
    clock: Callable[[], float] | None = None,
    check_seconds: float = 3600,
    faults: StoreFaults | None = None,
    **settings: Any,
) -> AsyncIterator[Scheduled]:
    """A scheduler with one platform in memory."""
    chat = MemoryPlatform()
    wall = WallClock() if clock is None else clock
    async with (
        open_world(agent, Platform(chat, HOME), path=path, clock=wall, faults=faults) as world,
        AsyncExitStack() as stack,
    ):
        schedulers: list[CronScheduler] = []
        for one in world.nodes:
            scheduler = CronScheduler(one.hub.messaging, CronSettings(**settings), check_seconds=check_seconds)
            await stack.enter_async_context(scheduler.open())
            schedulers.append(scheduler)
        yield Scheduled(world, schedulers, chat)


async def test_a_slot_runs_once_and_its_answer_goes_to_the_home_channel() -> None:
    """The row says that it ran, with the output; the session has ended as cron_complete."""
    async with open_cron(scripted("all quiet")) as cron:
        job = await cron.add("30m")
        (sent,) = await cron.chat.wait_sent(1)
        await cron.world.idle()
        assert (sent.chat, sent.text) == ("home", "**report**\n\nall quiet")
        (row,) = await cron.rows(job)
        assert (row.state, row.output, row.slot) == (CronState.COMPLETED, "all quiet", START + 1800)
        assert row.session_id == f"cron_{job}_20260101_003000"
        assert await cron.reasons() == {CRON_COMPLETE}
        view = await cron.cron.get_job(None, job)
        assert view is not None
        assert (view["state"], view["last_status"], view["next_run_at"]) == ("completed", "ok", None)
        assert await cron.world.store.prune_sessions(-1, source="cron") == 1


@pytest.mark.parametrize("verb", ["claim_cron_slot", "accept_message"])
async def test_a_slot_whose_claim_is_uncertain_runs_once(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verb raised after its commit: the scheduler reads again, and the slot is neither skipped nor recorded as failed."""
    async with open_cron(scripted("all quiet")) as cron:
        real, failures = getattr(cron.world.store, verb), ["once"]

        async def uncertain(*args: Any, **named: Any) -> Any:
            value = await real(*args, **named)
            if failures:
                raise CommitUncertain(failures.pop())
            return value

        monkeypatch.setattr(cron.world.store, verb, uncertain)
        job = await cron.add("30m")
        await cron.chat.wait_sent(1)
        await cron.world.idle()
        assert (await cron.states(job), failures) == (["completed"], [])
        assert len(cron.chat.sent) == 1


@pytest.mark.parametrize("how", ["failure", "deadline", "silence", "nothing"])
async def test_the_session_ends_as_cron_complete_on_every_path(how: str) -> None:
    """A failure is told, silence is not; a job that overruns is stopped by its deadline (SC-22)."""
    step: Any = {
        "failure": RuntimeError("boom"),
        "deadline": works(10_000),
        "silence": "checked the disks\n[SILENT]",
        "nothing": "",
    }[how]
    async with open_cron(scripted(step)) as cron:
        job = await cron.add("1m", deadline=60)
        await trio.sleep(200)
        await cron.world.idle()
        (row,) = await cron.rows(job)
        assert await cron.reasons() == {CRON_COMPLETE}
        match how:
            case "silence":
                assert (row.state, cron.chat.texts()) == (CronState.COMPLETED, [])
            case "nothing":
                assert (row.state, row.error) == (CronState.FAILED, "the agent ended its turn without an answer")
            case "failure":
                assert row.state is CronState.FAILED
                assert "boom" not in cron.chat.texts()[0]
                assert cron.chat.texts()[0].startswith("[report: failed.")
            case _:
                assert row.state is CronState.FAILED
                assert "deadline" in row.error
                assert "deadline" in cron.chat.texts()[0]


async def test_a_slot_that_finds_the_last_run_still_going_is_skipped() -> None:
    """It has its row all the same, and the next one runs (SC-3, SC-22)."""
    async with open_cron(scripted(works(150)), deadline=1000) as cron:
        job = await cron.add("every 1m")
        await trio.sleep(60 * 5 + 1)
        await cron.world.idle()
        assert await cron.states(job) == ["completed", "skipped", "skipped", "completed", "completed"]


async def test_slots_that_passed_while_nobody_was_there_collapse_into_one_run(tmp_path: Path) -> None:
    """Each of them has a row that says what stands for it."""
    path = tmp_path / "state.db"
    async with open_cron(scripted(), path=path) as cron:
        job = await cron.add("every 1h")
        await trio.sleep(3600 * 2 + 1)
        await cron.world.idle()
    async with open_cron(scripted(), path=path, clock=WallClock(3600 * 5)) as cron:
        await trio.sleep(1)
        await cron.world.idle()
        assert await cron.states(job) == ["completed", "completed", *["missed"] * 4, "completed"]
        rows = await cron.rows(job)
        assert "stands for it" in rows[2].error


async def test_a_long_absence_has_a_bounded_number_of_rows_that_says_how_many_there_were(tmp_path: Path) -> None:
    """A year of minutes does not become half a million rows."""
    path = tmp_path / "state.db"
    async with open_cron(scripted(), path=path) as cron:
        job = await cron.add("every 1m")
    async with open_cron(scripted(), path=path, clock=WallClock(365 * 86400)) as cron:
        await trio.sleep(1)
        await cron.world.idle()
        rows = await cron.rows(job)
        assert len(rows) == 101
        assert rows[-1].state is CronState.COMPLETED
        assert "and for 525499 earlier slots" in rows[0].error


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    "verb", ["claim_cron_slot", "accept_message", "start_cron_slot", "finish_cron_slot", "set_meta"]
)
async def test_a_slot_runs_once_though_a_write_about_it_fails(verb: str, after: bool) -> None:
    """A write fails twice, before or after its commit: the slot is run once, its row has its end, and the next slot is run as well."""
    agent = scripted()
    faults = StoreFaults()
    async with open_cron(agent, faults=faults) as cron:
        job = await cron.add("every 10m")
        faults.fail(verb, times=2, after_commit=after)
        await trio.sleep(1250)
        await cron.world.idle()
        assert faults.injected
        assert len(agent.turns) == 2
        assert await cron.states(job) == ["completed"] * 2
        view = await cron.cron.get_job(None, job)
        assert view is not None
        assert view["state"] == "scheduled"
        assert await cron.reasons() == {CRON_COMPLETE}


@pytest.mark.parametrize("after", [False, True])
async def test_a_job_that_runs_so_many_times_does_though_its_claim_fails(after: bool) -> None:
    """A run whose writes are repeated counts once."""
    agent = scripted()
    faults = StoreFaults()
    async with open_cron(agent, faults=faults) as cron:
        await cron.add("every 10m", repeat=2)
        faults.fail("claim_cron_slot", times=2, after_commit=after)
        await trio.sleep(3600)
        await cron.world.idle()
        assert len(agent.turns) == 2


async def test_a_job_whose_slots_the_store_refuses_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots of other jobs run in time, and the job itself runs when the store accepts its claim."""
    agent = scripted()
    async with open_cron(agent) as cron:
        bad, good = await cron.add("every 10m", name="a"), await cron.add("every 10m", name="b")
        healed = trio.Event()
        for node in cron.world.nodes:
            store = node.hub.messaging.store

            async def picky(job_id: str, *args: Any, claim: Any = store.claim_cron_slot, **named: Any) -> bool:
                if job_id == bad and not healed.is_set():
                    raise StoreError("no")
                return await claim(job_id, *args, **named)

            monkeypatch.setattr(store, "claim_cron_slot", picky)
        await trio.sleep(1300)
        assert await cron.states(good) == ["completed"] * 2
        assert await cron.states(bad) == []
        healed.set()
        await trio.sleep(60)
        await cron.world.idle()
        assert (await cron.states(bad))[-1] == "completed"


async def test_a_job_that_is_changed_while_it_is_counted_keeps_the_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process changes the job between the scheduler's reading and its claim: the prompt is the new one, and the run is counted."""
    agent = scripted()
    async with open_cron(agent) as cron:
        job = await cron.add("every 10m", repeat=3)
        for node in cron.world.nodes:
            store = node.hub.messaging.store

            async def changes(job_id: str, *, store: Any = store, get: Any = store.get_cron_job) -> CronJob | None:
                row = await get(job_id)
                if row is not None and row.spec["prompt"] != "new":
                    await store.put_cron_job(msgspec.structs.replace(row, spec={**row.spec, "prompt": "new"}))
                return row

            monkeypatch.setattr(store, "get_cron_job", changes)
        await trio.sleep(650)
        await cron.world.idle()
        row = await cron.world.store.get_cron_job(job)
        assert row is not None
        assert (row.spec["prompt"], row.spec["completed"]) == ("new", 1)


@pytest.mark.parametrize("after", [False, True])
async def test_what_a_slot_owes_is_marked_though_its_start_is_not_written(after: bool) -> None:
    """If the server died now, the next start would tell the addresses of the job: the mark does not depend on another write."""
    marks: list[object] = []
    faults = StoreFaults()

    async def agent(turn: Turn) -> str:
        session = turn.context.session_id
        marks.append(await turn.core.store.get_meta(f"one_shot:{session}"))  # pyright: ignore[reportAttributeAccessIssue]
        return "done"

    async with open_cron(agent, faults=faults) as cron:
        await cron.add("every 10m")
        faults.fail("start_cron_slot", after_commit=after)
        await trio.sleep(700)
        await cron.world.idle()
        assert len(marks) == 1
        assert marks[0]


async def test_a_clock_that_goes_back_runs_nothing_twice() -> None:
    """The slots of the repeated time have their rows already."""
    clock = WallClock()
    agent = scripted()
    async with open_cron(agent, clock=clock, check_seconds=10) as cron:
        job = await cron.add("every 10m")
        await trio.sleep(3600 + 1)
        clock.offset -= 1800
        await trio.sleep(1800 - 2)
        assert len(agent.turns) == 6
        await trio.sleep(605)
        await cron.world.idle()
        assert len(agent.turns) == 7
        assert await cron.states(job) == ["completed"] * 7


async def test_a_clock_that_jumps_ahead_is_noticed_at_once() -> None:
    """The missed slots are recorded, and one run stands for them."""
    clock = WallClock()
    async with open_cron(scripted(), clock=clock, check_seconds=10) as cron:
        job = await cron.add("every 10m")
        await trio.sleep(5)
        clock.offset += 3600
        await trio.sleep(15)
        await cron.world.idle()
        assert await cron.states(job) == [*["missed"] * 5, "completed"]


async def test_concurrent_jobs_never_see_each_others_target() -> None:
    """Twenty jobs in the same second, each with its own places, by value (SC-24, SC-25)."""

    async def agent(turn: Turn) -> str:
        before = get_session_env("HERMES_CRON_AUTO_DELIVER_CHAT_ID")
        await trio.sleep(1)
        assert before == get_session_env("HERMES_CRON_AUTO_DELIVER_CHAT_ID")
        return f"{turn.input.text} for {before}"

    async with open_cron(agent, wrap_response=False) as cron:
        for number in range(20):
            await cron.add("1m", name=f"job {number}", prompt=f"p{number}", deliver=f"memory:chat{number}")
        await cron.chat.wait_sent(20)
    assert {(one.chat, one.text) for one in cron.chat.sent} == {(f"chat{n}", f"p{n} for chat{n}") for n in range(20)}


async def test_an_answer_goes_to_several_places_and_a_wrong_one_is_told() -> None:
    """Duplicates collapse, a failure at one place does not stop the others (GW-154, GW-165)."""
    async with open_cron(scripted("x"), wrap_response=False) as cron:
        job = await cron.add("1m", deliver="memory:a,memory:b,memory:a,local")
        await cron.chat.wait_sent(2)
        await cron.world.idle()
        assert sorted(one.chat for one in cron.chat.sent) == ["a", "b"]
        assert (await cron.rows(job))[0].output == "x"
        with pytest.raises(ValueError, match="unknown platform 'fax'"):
            await cron.add("1m", deliver="fax:1")


async def test_the_origin_of_a_job_that_no_chat_made_is_the_home_channel() -> None:
    """On the command line and over HTTP there is no chat: the job has no origin, and the word means the first home."""
    async with open_cron(scripted("x"), wrap_response=False) as cron:
        job = await cron.cron.get_job(None, await cron.add("1m", deliver="origin"))
        assert job is not None
        assert (job["deliver"], job["origin"]) == ("origin", None)
        (sent,) = await cron.chat.wait_sent(1)
        assert HOME.home is not None
        assert sent.chat == HOME.home.chat_id


async def test_origin_is_where_the_job_came_from() -> None:
    """Chat and thread, for a program that makes jobs for its chats."""
    async with open_cron(scripted("x"), wrap_response=False) as cron:
        origin = {"platform": "memory", "chat_id": "7", "thread_id": "9"}
        await cron.add("1m", deliver="origin", origin=origin)
        (sent,) = await cron.chat.wait_sent(1)
        assert (sent.chat, sent.thread) == ("7", "9")


async def test_a_stored_job_with_a_field_that_is_no_more_still_runs() -> None:
    """A job that was stored with skills is read, shown without them, changed and run; a new one cannot have them."""
    async with open_cron(scripted("x"), wrap_response=False) as cron:
        job = await cron.add("every 1h")
        row = await cron.world.store.get_cron_job(job)
        assert row is not None
        await cron.world.store.put_cron_job(msgspec.structs.replace(row, spec={**row.spec, "skills": ["news"]}))
        shown = await cron.cron.update_job(None, job, {"name": "renamed"})
        assert shown is not None
        assert (shown["name"], "skills" in shown) == ("renamed", False)
        await cron.chat.wait_sent(1)
        with pytest.raises(ValueError, match="a job has no field 'skills'"):
            await cron.add("1m", skills=["news"])


async def test_background_work_of_a_job_reports_to_the_jobs_places() -> None:
    """The session stays open for it, and ends afterwards."""
    async with open_cron(scripted(starts_job(600), "built"), wrap_response=False) as cron:
        await cron.add("1m", deliver="memory:a,memory:b")
        await cron.chat.wait_sent(4)
        await cron.world.idle()
        assert cron.chat.texts("a") == cron.chat.texts("b") == ["started", "built"]
        assert await cron.reasons() == {CRON_COMPLETE}


async def test_a_job_cannot_ask_anybody() -> None:
    """An approval is refused with the reason, at once."""
    worlds: list[World] = []
    async with open_cron(scripted(asks(lambda: worlds[0])), wrap_response=False) as cron:
        worlds.append(cron.world)
        await cron.add("1m")
        (sent,) = await cron.chat.wait_sent(1)
        assert "no user to ask" in sent.text


async def test_pause_resume_run_and_remove() -> None:
    """What passes while a job is paused is not made up for; a manual run has a slot of its own."""
    async with open_cron(scripted()) as cron:
        job = await cron.add("every 1h")
        paused = await cron.cron.pause_job(None, job)
        assert paused is not None
        assert (paused["state"], paused["next_run_at"]) == ("paused", None)
        await trio.sleep(3600 * 5)
        assert await cron.rows(job) == []
        await cron.cron.run_job(None, job)
        await cron.chat.wait_sent(1)
        await cron.world.idle()
        resumed = await cron.cron.resume_job(None, job)
        assert resumed is not None
        assert resumed["next_run_at"] == "2026-01-01T06:00:00+00:00"
        await trio.sleep(3601)
        await cron.world.idle()
        assert await cron.states(job) == ["completed", "completed"]
        assert await cron.cron.delete_job(None, job)
        assert await cron.cron.get_job(None, job) is None
        assert not await cron.cron.delete_job(None, job)


async def test_a_job_with_a_number_of_repeats_ends_after_them() -> None:
    """It stays in the list as completed."""
    async with open_cron(scripted()) as cron:
        job = await cron.add("every 1m", repeat=3)
        await trio.sleep(600)
        await cron.world.idle()
        assert await cron.states(job) == ["completed"] * 3
        view = await cron.cron.get_job(None, job)
        assert view is not None
        assert (view["state"], view["repeat"]) == ("completed", {"times": 3, "completed": 3})


async def test_jobs_belong_to_their_tenant() -> None:
    """An administrator sees all of them."""
    async with open_cron(scripted()) as cron:
        made = await cron.cron.create_job("t1", {"name": "n", "prompt": "p", "schedule": "every 1h"})
        assert await cron.cron.get_job("t2", made["id"]) is None
        assert await cron.cron.update_job("t2", made["id"], {"name": "x"}) is None
        assert await cron.cron.list_jobs("t2", include_disabled=True) == []
        assert len(await cron.cron.list_jobs(None, include_disabled=True)) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": "sometimes"}, "not understood"),
        ({"schedule": "* * * * * * *"}, "5 fields"),
        ({"schedule": "1h", "deadline": -1}, "deadline"),
        ({"schedule": "1h", "repeat": 0}, "repeat"),
        ({"schedule": "1h", "prompt": " "}, "prompt"),
        ({"schedule": "1h", "colour": "red"}, "no field 'colour'"),
        ({"schedule": "0 9 * * *", "timezone": "Europe/Atlantis"}, "unknown time zone"),
    ],
)
async def test_a_mistake_names_the_field(fields: dict[str, Any], message: str) -> None:
    """And nothing is stored."""
    async with open_cron(scripted()) as cron:
        with pytest.raises(ValueError, match=message):
            await cron.add(**fields)
        assert await cron.cron.list_jobs(None, include_disabled=True) == []


async def test_no_more_jobs_run_at_once_than_allowed() -> None:
    """The others wait for a place, and run."""
    running = Counter[str]()
    most: list[int] = []

    async def agent(turn: Turn) -> str:
        running["now"] += 1
        most.append(running["now"])
        await trio.sleep(10)
        running["now"] -= 1
        return "done"

    async with open_cron(agent, max_parallel_jobs=2) as cron:
        for number in range(6):
            await cron.add("1m", name=f"job {number}")
        await cron.chat.wait_sent(6)
    assert max(most) == 2


@pytest.mark.parametrize("how", ["slow", "refused"])
async def test_a_slot_whose_turn_is_written_late_has_the_end_of_its_turn(how: str) -> None:
    """The store takes longer than the end of a turn waits: the answer is delivered, and the row of the slot says so, too."""
    faults = StoreFaults()
    async with open_cron(scripted("all quiet"), faults=faults) as cron:
        job = await cron.add("30m")
        if how == "slow":
            faults.slow("finish_turn", seconds=15)
        else:
            faults.fail("finish_turn", times=None, seconds=1860, error=lambda verb: CommitUncertain(verb))
        await cron.chat.wait_sent(1)
        await trio.sleep(300)
        await cron.world.idle()
        assert [(row.state, row.output) for row in await cron.rows(job)] == [(CronState.COMPLETED, "all quiet")]
        assert cron.chat.texts() == ["**report**\n\nall quiet"]


async def test_while_draining_nothing_is_dispatched() -> None:
    """The slot is run after the next start, as a late one (GW-177)."""
    async with open_cron(scripted()) as cron:
        job = await cron.add("every 1m")
        await cron.world.runtime.drain(0)
        await trio.sleep(300)
        assert await cron.rows(job) == []


async def test_a_graceful_stop_tells_the_owner_and_ends_the_row(tmp_path: Path) -> None:
    """The run is failed, not lost; the next slot runs after the restart."""
    path = tmp_path / "state.db"
    async with open_cron(scripted(works(1000)), path=path) as cron:
        job = await cron.add("every 1h", deliver="memory:a")
        await trio.sleep(3601)
    assert "interrupted" in cron.chat.texts("a")[0]
    async with open_cron(scripted(), path=path, clock=WallClock(100)) as again:
        await trio.sleep(3601)
        await again.world.idle()
        assert await again.states(job) == ["failed", "completed"]
        assert await again.reasons() == {CRON_COMPLETE}


@pytest.mark.one_node  # nodes that are stopped in order hand their slots over
async def test_a_slot_that_was_claimed_and_not_begun_when_the_server_died_is_told_and_not_run(tmp_path: Path) -> None:
    """At most once: the row says that it was interrupted, and its owner hears so exactly once."""
    path = tmp_path / "state.db"
    agent = scripted()
    async with open_cron(agent, path=path) as cron:
        job = await cron.add("1m", deliver="memory:a")
        # The process dies after the commit: nobody is woken.
        cron.world.runtime._lanes.wake = lambda inbox, key: None  # type: ignore[method-assign]
        await trio.sleep(61)
        assert agent.turns == []
    for _ in range(2):
        async with open_cron(agent, path=path, clock=WallClock(100)) as again:
            await trio.sleep(10)
            await again.world.idle()
            assert agent.turns == []
            assert await again.states(job) == ["failed"]
            said = again.chat.texts("a")
        if _ == 0:
            assert len(said) == 1
            assert "interrupted" in said[0]
        else:
            assert said == []


YEAR = {
    "berlin night": "CRON_TZ=Europe/Berlin 30 2 * * *",
    "new york night": "CRON_TZ=America/New_York 30 1 * * *",
    "lord howe": "CRON_TZ=Australia/Lord_Howe 45 1 * * *",
    "quarters": "0 */6 * * *",
    "berlin workdays": "CRON_TZ=Europe/Berlin 0 9,17 * * MON-FRI",
    "interval": "every 7h",
    "monthly": "0 0 L * *",
}


@pytest.mark.slow
@pytest.mark.one_node
async def test_a_year_of_cron(tmp_path: Path) -> None:
    """Across time changes, restarts, a long absence and a clock that is moved both ways: each slot has exactly one row, and ran at most once."""
    path = tmp_path / "state.db"
    day = 86_400.0
    ran: Counter[tuple[str, str]] = Counter()
    jobs: dict[str, str] = {}

    async def agent(turn: Turn) -> str:
        ran[turn.context.chat_id, turn.context.message_id] += 1
        if len(ran) % 97 == 0:
            raise RuntimeError("now and then something fails")
        await trio.sleep(30)
        return "[SILENT]"

    clock = WallClock()
    end = START
    while end < START + 366 * day:
        async with open_cron(agent, path=path, clock=clock) as cron:
            if not jobs:
                for name, schedule in YEAR.items():
                    jobs[name] = await cron.add(schedule, name=name)
            month = len(jobs) and int((clock() - START) // (30 * day))
            await trio.sleep(13 * day)
            if month % 4 == 1:
                clock.offset += 2 * day
            elif month % 4 == 3:
                clock.offset -= 3 * 3600
            await trio.sleep(15 * day + 17)
            end = max(end, clock())
        # Nobody is there for an hour and a bit, and once for ten days.
        clock.offset += 4000 if month != 6 else 10 * day
    async with open_cron(agent, path=path, clock=clock) as cron:
        await trio.sleep(100)
        await cron.world.idle()
        end = clock()
        counts: Counter[str] = Counter()
        for name, job_id in jobs.items():
            row = await cron.world.store.get_cron_job(job_id)
            assert row is not None
            expected: list[float] = []
            for slot in slots(ScheduledJob.read(row).schedule, datetime.fromtimestamp(START, UTC)):
                if slot > datetime.fromtimestamp(end, UTC):
                    break
                expected.append(slot.timestamp())
            rows = await cron.rows(job_id)
            assert [one.slot for one in rows] == expected, name
            assert all(one.state.terminal for one in rows)
            counts.update(one.state.value for one in rows)
            began = sum(one.state in (CronState.COMPLETED, CronState.FAILED) for one in rows)
            assert began == sum(1 for (job, _) in ran if job == job_id)
        assert max(ran.values()) == 1
        assert await cron.reasons() == {CRON_COMPLETE}
        assert timedelta(seconds=end - START) > timedelta(days=366)
        assert counts["missed"] > 20
        assert counts["failed"] > 10
        assert counts["completed"] > 2500


@pytest.mark.one_node
async def test_what_the_api_changes_is_what_jobs_have() -> None:
    """The front end may not know the scheduler, so each has its list of fields; the one is a part of the other."""
    assert set(http_jobs._CHANGEABLE) == set(cron_jobs._FIELDS) - {"timezone", "origin"}


async def test_a_jobs_session_belongs_to_the_jobs_owner() -> None:
    """The session, the turn and what they may do are filed under the tenant of the job, not under the operator's."""
    tenants: list[str] = []

    async def agent(turn: Turn) -> str:
        tenants.append(turn.spec.tenant)
        return "done"

    async with open_cron(agent) as cron:
        fields = {"name": "report", "prompt": "x", "deliver": "memory", "schedule": "30m"}
        await cron.cron.create_job("acme", fields)
        await cron.chat.wait_sent(1)
        await cron.world.idle()
        sessions = await cron.world.store.list_sessions(SessionFilter(source="cron"), Page(10))
        assert [session.tenant for session in sessions] == ["acme"]
        assert tenants == ["acme"]


async def test_a_slot_whose_turn_could_not_begin_ends_with_the_turn_that_did() -> None:
    """The store refused the beginning for a while, and the slot ran later: its row says how that went, and its answer is told once."""
    faults = StoreFaults()
    async with open_cron(scripted("all quiet"), faults=faults) as cron:
        faults.fail("begin_turn", times=6)
        job = await cron.add("30m")
        await cron.chat.wait_sent(1)
        await cron.world.idle()
        (row,) = await cron.rows(job)
        assert (row.state, row.output, row.error) == (CronState.COMPLETED, "all quiet", "")
        assert len(cron.chat.sent) == 1


async def test_a_slot_that_becomes_a_dead_letter_has_failed_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What cannot be handed to an agent does not count as running for ever."""
    async with open_cron(scripted()) as cron:
        budget = cron.schedulers[0].interface.budget
        calls: list[float] = []

        def poisoned(rows: Sequence[InboxRow]) -> Budget | None:
            calls.append(rows[0].payload["slot"])
            if calls[0] == calls[-1]:
                raise ValueError("cannot read this")
            return budget(rows)

        for one in cron.schedulers:
            monkeypatch.setattr(one.interface, "budget", poisoned)
        job = await cron.add("every 10m")
        await trio.sleep(1250)
        await cron.world.idle()
        assert await cron.states(job) == ["failed", "completed"]
        assert "cannot read this" in (await cron.rows(job))[0].error


@pytest.mark.one_node  # the first node of several starts although the store fails
@pytest.mark.parametrize("after", [False, True])
async def test_the_owner_of_a_slot_that_was_not_begun_is_told_though_the_store_fails(
    tmp_path: Path, after: bool
) -> None:
    """The first start after the server died fails on its way: the owner is told by one of them, and only by one."""
    path = tmp_path / "state.db"
    async with open_cron(scripted(), path=path) as cron:
        await cron.world.runtime.drain(0)
        routing = SessionContext(platform="cron", chat_id="j", chat_name="report", session_key="k", session_id="c")
        payload = {"slot": START, "places": [["memory", "home", None]]}
        await cron.world.store.accept_message(
            NewMessage(inbox="cron", session_key="k", routing=routing, text="x", payload=payload)
        )
    faults = StoreFaults()
    faults.fail("inbox_dead", after_commit=after)
    with pytest.raises(StoreError):
        async with open_cron(scripted(), path=path, faults=faults):
            pass
    async with open_cron(scripted(), path=path) as cron:
        await cron.world.idle()
        sent = await cron.world.store.replies_to("memory", target_of(Address("memory", "home", None)))
        assert [row.state for row in sent] == [OutboxState.SENT]
        assert await cron.world.store.list_inbox(InboxState.PENDING) == []
