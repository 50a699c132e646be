"""Ends that are written late, or whose answer is lost: they end what they were made for, and nothing that came after it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from hermes_trio import (
    Budget,
    CancelCause,
    Cause,
    Job,
    JobRefused,
    JobSpec,
    JobState,
    Outcome,
    Runtime,
    RuntimeSettings,
    SessionContext,
    Turn,
    TurnHooks,
    TurnInput,
    TurnSpec,
    asyncio_agent,
    current_runtime,
)
from hermes_trio.runtime.ends import End
from hermes_trio.runtime.ports import InboxRow, NewReply, RuntimeStore
from hermes_trio.store import InboxState, open_store
from hermes_trio.testing.fakes import FakeAdapter, ScriptedAgent, fake_job
from hermes_trio.testing.faults import StoreFaults


@pytest.fixture(autouse=True)
def on_virtual_time(virtual_clock: trio.testing.MockClock) -> None:
    """Every test here runs on virtual time."""


async def sleeping(turn: Turn) -> str:
    """A turn that takes an hour."""
    await trio.sleep(3600)
    return "late"


class Refusing(FakeAdapter):
    """An interface that cannot name the session of its first messages."""

    def __init__(self, refuses: int) -> None:
        super().__init__()
        self.refuses = refuses
        self.begun = trio.Event()

    async def on_turn_start(self, turn: Turn) -> None:
        await super().on_turn_start(turn)
        self.begun.set()

    async def session_for(self, store: RuntimeStore, context: SessionContext) -> str:
        if self.refuses:
            self.refuses -= 1
            raise ValueError("not now")
        return await super().session_for(store, context)

    def refusal(self, rows: Sequence[InboxRow], reason: str) -> Sequence[NewReply]:
        return [NewReply(platform="fake", target={"chat_id": "1"}, text=reason)]


@pytest.mark.parametrize(("verb", "refuses"), [("release_inbox", 1), ("inbox_dead", 3)])
async def test_a_claim_that_is_given_up_late_leaves_the_next_one_alone(verb: str, refuses: int) -> None:
    """A row's claim could not be given up in time, and the row was claimed again: it belongs to the turn that has begun with it."""
    faults = StoreFaults()
    agent = ScriptedAgent(sleeping)
    adapter = Refusing(refuses)
    async with Runtime(agent=agent, store=faults.around(open_store(None))) as runtime, adapter.connect(runtime):
        store: Any = runtime.store
        faults.fail(verb, times=None)
        await adapter.say("hello")
        await adapter.begun.wait()
        await trio.sleep(1)
        faults.heal()
        await trio.sleep(60)
        assert not runtime.unwritten
        ((row, _),) = await store.list_inbox(InboxState.TAKEN)
        assert row.text == "hello"
        await adapter.wait_for(1)
        assert await store.list_inbox(InboxState.DEAD) == []
        assert await store.claim_outbox("fake") == []
        assert len(agent.turns) == 1


@pytest.mark.parametrize("how", ["before", "after", "slow"])
async def test_a_completion_is_handed_over_once(how: str) -> None:
    """The store fails while a completion is acknowledged: the reader of completions gets it once."""
    faults = StoreFaults()
    async with Runtime(agent=ScriptedAgent(), store=faults.around(open_store(None))) as runtime:
        if how == "slow":
            faults.slow("acknowledge", seconds=60)
        else:
            faults.fail("acknowledge", after_commit=how == "after")
        for _ in range(2):
            await runtime.supervisor.start_watched(fake_job(1), runtime.owner(), runtime.channel)
        await trio.sleep(5)
        got: list[int] = []
        failures = 0
        with trio.move_on_after(600):
            while True:
                try:
                    got.append((await anext(runtime.completions())).id)
                except Exception:
                    failures += 1
        assert (len(got), len(set(got)), failures) == (2, 2, 0)


async def test_a_store_that_does_not_answer_holds_up_a_close_for_one_bound(virtual_clock: object) -> None:
    """Many ends wait for a store that does not answer: closing tries all of them within one bound, and not one after the other."""
    faults = StoreFaults()
    over: list[float] = []

    class Timed:
        def __init__(self) -> None:
            self.opening = faults.around(open_store(None))

        async def __aenter__(self) -> Any:
            return await self.opening.__aenter__()

        async def __aexit__(self, *error: Any) -> bool | None:
            over.append(trio.current_time())
            return await self.opening.__aexit__(*error)

    async with Runtime(agent=ScriptedAgent(), store=Timed()) as runtime:
        for number in range(30):
            owner = runtime.owner(SessionContext(session_id=f"s{number}", session_key=f"s{number}"))
            await runtime.supervisor.start_watched(fake_job(1), owner, runtime.channel)
        faults.slow("finish_job", seconds=86_400, times=None)
        await trio.sleep(30)
        began = trio.current_time()
    assert over[0] - began < 60


@pytest.mark.parametrize("written", [True, False])
async def test_the_hook_after_a_turn_whose_end_is_written_while_the_runtime_closes_is_called(written: bool) -> None:
    """The hook may write to the store, too. If the end is not written, the next start ends the turn, and the hook is not called."""
    faults = StoreFaults()
    ended: list[tuple[str, bool]] = []

    @asynccontextmanager
    async def stage(runtime: Runtime) -> AsyncIterator[None]:
        yield
        if written:
            faults.heal()

    async with Runtime(agent=ScriptedAgent("hello"), store=faults.around(open_store(None)), stages=[stage]) as runtime:
        store: Any = runtime.store

        async def on_end(outcome: Outcome) -> None:
            await trio.sleep(1)
            await store.set_meta("ended", outcome.turn_id)
            ended.append((outcome.text, outcome.committed))

        faults.fail("finish_turn", times=None)
        await runtime.run_turn("hi", hooks=TurnHooks(on_end=on_end))
        assert ended == []
    assert ended == ([("hello", True)] if written else [])


@pytest.mark.parametrize("how", ["after", "before", "slow"])
async def test_all_waits_of_a_drain_for_a_silent_store_share_one_bound(how: str) -> None:
    """Children in children, jobs and the close wait for the same store: the drain takes its time and one bound, the close at most another one."""
    faults = StoreFaults()
    deep = trio.Event()
    over: list[float] = []

    class Timed:
        def __init__(self) -> None:
            self.opening = faults.around(open_store(None))

        async def __aenter__(self) -> Any:
            return await self.opening.__aenter__()

        async def __aexit__(self, *error: Any) -> bool | None:
            over.append(trio.current_time())
            return await self.opening.__aexit__(*error)

    async def delegates(turn: Turn) -> str:
        turn.emit("tool.started", tool="x")
        if turn.input.text == "0":
            deep.set()
            await trio.sleep(3600)
        await turn.run_child(str(int(turn.input.text) - 1))
        return "done"

    settings = RuntimeSettings(finish_seconds=10)
    async with Runtime(agent=delegates, store=Timed(), settings=settings) as runtime:
        await runtime.supervisor.start_watched(fake_job(3600), runtime.owner(), runtime.channel)
        context = SessionContext(session_id="s", session_key="s")
        await runtime.stateless.start_run(TurnSpec(input=TurnInput(text="5"), context=context))
        await deep.wait()
        if how == "slow":
            faults.slow(seconds=3600, times=None)
        else:
            faults.fail(after_commit=how == "after", times=None)
        began = trio.current_time()
        report = await runtime.drain(1)
        took = trio.current_time() - began
        began = trio.current_time()
    assert took <= 1 + 10 + 0.5, report
    assert over[0] - began <= 10 + 0.5
    assert (report.cancelled, report.turns, report.jobs) == (6, 0, 0)


async def test_a_store_that_answers_late_in_a_drain_gets_the_ends_that_waited() -> None:
    """The store is silent for longer than the bound of a drain, and works again before the close: all ends are written, and later ones are waited for."""
    faults = StoreFaults()
    deep = trio.Event()

    async def delegates(turn: Turn) -> str:
        if turn.input.text == "0":
            deep.set()
            await trio.sleep(3600)
        await turn.run_child(str(int(turn.input.text) - 1))
        return "done"

    async with Runtime(agent=delegates, store=faults.around(open_store(None))) as runtime:
        store: Any = runtime.store
        job = await runtime.supervisor.start_watched(fake_job(3600), runtime.owner(), runtime.channel)
        context = SessionContext(session_id="s", session_key="s")
        run = await runtime.stateless.start_run(TurnSpec(input=TurnInput(text="3"), context=context))
        await deep.wait()
        faults.fail("finish_turn", "finish_job", times=None)
        await runtime.drain(1)
        assert len(runtime.unwritten) == 5
        faults.heal()
        await trio.sleep(30)
        assert not runtime.unwritten
        assert (await store.get_job(job.id)).state is JobState.KILLED
        assert (await store.get_run(run.id)).status.value == "cancelled"
        faults.slow("supersede", seconds=5)
        assert await runtime.core.ends.put(End("a late one", lambda: store.supersede(job.id)))


async def test_a_job_whose_row_is_not_written_holds_up_no_drain() -> None:
    """The store does not answer to the start of a job: the turn that started it can be stopped, and the runtime drains and closes within bounds."""
    faults = StoreFaults()
    over: list[float] = []

    @asynccontextmanager
    async def stage(runtime: Runtime) -> AsyncIterator[None]:
        yield
        over.append(trio.current_time())

    async def starts(turn: Turn) -> str:
        await turn.core.supervisor.start(fake_job(5), turn.owner)
        return "started"

    async with Runtime(agent=ScriptedAgent(starts), store=faults.around(open_store(None)), stages=[stage]) as runtime:
        async with FakeAdapter().connect(runtime) as adapter:
            faults.slow("start_job", seconds=86_400, times=None)
            await adapter.say("hi")
            await trio.sleep(1)
            began = trio.current_time()
            report = await runtime.drain(1)
            took = trio.current_time() - began
        began = trio.current_time()
    assert took < 120
    assert over[0] - began < 120
    assert report.ok, report


async def test_events_whose_writing_is_cancelled_are_written_later() -> None:
    """Cancelling the task that writes events loses none of them, also if the store has not received them yet."""

    async def emits(turn: Turn) -> str:
        turn.emit("tool.started", tool="x")
        await trio.sleep(3600)
        return "done"

    async with Runtime(agent=ScriptedAgent(emits), store=open_store(None)) as runtime:
        run = await runtime.stateless.start_run(
            TurnSpec(input=TurnInput(text="hi"), context=SessionContext(session_id="s"))
        )
        await trio.testing.wait_all_tasks_blocked()
        with trio.CancelScope() as scope:
            scope.cancel()
            await runtime.core.journal.flush()
        await trio.sleep(5)
        store: Any = runtime.store
        assert [row.event["event"] for row in await store.events_after(run.id)] == ["tool.started"]


async def test_a_session_that_ends_late_is_forgotten() -> None:
    """Callbacks of `at_session_end` are called, also if the end could not be written at once."""
    faults = StoreFaults()
    forgotten: list[str] = []
    async with Runtime(agent=ScriptedAgent(), store=faults.around(open_store(None))) as runtime:
        with runtime.core.at_session_end(forgotten.append):
            faults.full("finish_turn")
            faults.full("probe")
            where = SessionContext(session_id="once", session_key="once")
            outcome = await runtime.run_turn("hi", where, one_shot="done")
            assert not outcome.committed
            faults.heal()
            await trio.sleep(60)
            assert not runtime.unwritten
            assert forgotten == ["once"]


async def test_a_model_whose_name_cannot_be_kept_does_not_keep_the_end_of_its_turn_waiting() -> None:
    """Half of a surrogate pair is replaced wherever it is written: an end that no store could take would keep its session locked."""
    async with Runtime(agent=ScriptedAgent(), store=open_store(None)) as runtime:
        outcome = await runtime.run_turn(TurnInput(text="hi", model="m\ud800"), SessionContext(session_id="s"))
        assert outcome.committed
        spec = TurnSpec(input=TurnInput(text="hi", model="m\ud800"), context=SessionContext(session_id="r"))
        run = await runtime.stateless.start_run(spec)
        await run.ended.wait()
        assert (run.outcome is not None and run.outcome.committed, runtime.unwritten) == (True, [])


@pytest.mark.parametrize("how", ["before", "after", "slow", "for an hour"])
async def test_a_run_settles_after_its_thread_although_the_row_of_the_thread_is_refused(how: str) -> None:
    """A thread outlives its turn, and the store does not take the row of its job: the run waits for the thread, and no row is left open."""
    faults = StoreFaults()
    thread_ends = trio.Event()

    async def agent(turn: Turn) -> str:
        turn.core.supervisor.adopt_thread("deaf", turn.owner, thread_ends)
        return "done"

    if how == "slow":
        faults.slow("start_job", seconds=60)
    else:
        faults.fail("start_job", after_commit=how == "after", times=None if how == "for an hour" else 2)
    async with Runtime(agent=agent, store=faults.around(open_store(None))) as runtime:
        run = await runtime.stateless.start_run(
            TurnSpec(input=TurnInput(text="x"), context=SessionContext(session_id="s"))
        )
        await trio.sleep(300)
        assert (run.ended.is_set(), run.settled.is_set()) == (True, False)
        assert [job.spec.kind for job in runtime.supervisor.jobs("s")] == ["thread"]
        written = 0 if how == "for an hour" else 1
        assert (await runtime.store.backlog())["jobs"] == written
        thread_ends.set()
        with trio.fail_after(60):
            await run.settled.wait()
        faults.heal()
        await trio.sleep(300)
        assert (await runtime.store.backlog())["jobs"] == 0


@pytest.mark.parametrize("times", [0, 1, 2])
async def test_the_end_of_a_turn_or_a_job_is_not_written_before_the_row_of_the_thread_that_it_leaves(
    times: int,
) -> None:
    """Another node only has the rows: between the two it would take the run for settled, although the thread goes on."""
    faults = StoreFaults()
    thread_ends = [trio.Event(), trio.Event()]

    async def work(job: Job) -> None:
        job.started()
        try:
            await trio.sleep_forever()
        finally:
            faults.fail("start_job", times=times)
            job.core.supervisor.adopt_thread("deaf 2", job.owner, thread_ends[1])

    async def agent(turn: Turn) -> str:
        await turn.start_job(JobSpec(kind="process", title="leaves a thread", run=work))
        faults.fail("start_job", times=times)
        turn.core.supervisor.adopt_thread("deaf 1", turn.owner, thread_ends[0])
        return "done"

    async with Runtime(agent=agent, store=faults.around(open_store(None))) as runtime:
        run = await runtime.stateless.start_run(
            TurnSpec(input=TurnInput(text="x"), context=SessionContext(session_id="s"))
        )
        await run.ended.wait()
        assert [job.title for job in await runtime.store.list_jobs(live_only=True)] == ["deaf 1", "leaves a thread"]
        (job,) = (job for job in runtime.supervisor.jobs("s") if job.spec.kind == "process")
        thread_ends[0].set()
        await job.stop()
        assert [job.title for job in await runtime.store.list_jobs(live_only=True)] == ["deaf 2"]
        assert await runtime.store.root_open(run.id)
        thread_ends[1].set()
        await run.settled.wait()


async def test_a_run_waits_for_a_thread_that_one_of_its_jobs_leaves_behind(
    virtual_clock: trio.testing.MockClock,
) -> None:
    """A job is stopped and its thread goes on: the run of the job settles when the thread has ended."""
    gate = threading.Event()

    async def work(job: Job) -> None:
        job.started()
        await current_runtime().threads.run_sync(gate.wait)

    async def agent(turn: Turn) -> str:
        await turn.start_job(JobSpec(kind="process", title="deaf", run=work))
        return "done"

    async with Runtime(agent=agent, store=open_store(None), settings=RuntimeSettings(thread_grace=0.05)) as runtime:
        try:
            run = await runtime.stateless.start_run(
                TurnSpec(input=TurnInput(text="x"), context=SessionContext(session_id="s"))
            )
            await run.ended.wait()
            (job,) = runtime.supervisor.jobs("s")
            receipt = await job.stop()
            assert not receipt.ok
            await trio.testing.wait_all_tasks_blocked()
            assert not run.settled.is_set()
        finally:
            gate.set()
        await run.settled.wait()
        assert (await runtime.store.backlog())["jobs"] == 0


async def test_a_run_waits_for_an_asyncio_task_that_does_not_hear_its_cancellation(virtual_clock: object) -> None:
    """An asyncio agent goes on after its turn was stopped: both receipts name it, and the run settles when it has ended."""
    gate = threading.Event()

    begun = trio.Event()

    async def agent(turn: Turn) -> str:
        turn.emit("begun")
        while not gate.is_set():
            try:
                await asyncio.sleep(0.005)
            except asyncio.CancelledError:
                pass
        return "late"

    settings = RuntimeSettings(thread_grace=0.05)
    async with Runtime(agent=asyncio_agent(agent), store=open_store(None), settings=settings) as runtime:
        try:
            run = await runtime.stateless.start_run(
                TurnSpec(
                    input=TurnInput(text="x"),
                    context=SessionContext(session_id="s"),
                    hooks=TurnHooks(sink=lambda _: begun.set()),
                )
            )
            await begun.wait()
            first, again = await run.stop(), await run.stop()
            assert (first.ok, again.ok, len(again.remaining)) == (False, False, 1)
            await trio.testing.wait_all_tasks_blocked()
            assert (run.ended.is_set(), run.settled.is_set()) == (True, False)
        finally:
            gate.set()
        await run.settled.wait()
        assert (await runtime.store.backlog())["jobs"] == 0


async def test_a_job_that_is_stopped_before_it_has_started_is_refused() -> None:
    """The call that started it raises, and no notice of the job is sent."""
    faults = StoreFaults()
    async with (
        Runtime(agent=ScriptedAgent(), store=faults.around(open_store(None))) as runtime,
        trio.open_nursery() as nursery,
    ):
        store: Any = runtime.store
        owner = runtime.owner(SessionContext(session_id="s", session_key="s"))
        faults.slow("start_job", seconds=60)

        async def stop() -> None:
            await trio.sleep(1)
            await runtime.supervisor.stop_session("s", Cause(CancelCause.STOP))

        nursery.start_soon(stop)
        with pytest.raises(JobRefused, match="stopped before it had started"):
            await runtime.supervisor.start_watched(fake_job(0), owner, runtime.channel)
        await trio.sleep(300)
        assert await store.backlog() == {"inbox": 0, "outbox": 0, "approvals": 0, "runs": 0, "jobs": 0}


async def test_a_deadline_during_the_rows_of_threads_does_not_cut_the_commit(caplog: pytest.LogCaptureFixture) -> None:
    """The end waits for the row of a thread; the turn's deadline passes meanwhile. The end is written at once afterwards, and not reported as refused."""
    thread_ends = trio.Event()
    faults = StoreFaults()
    faults.slow("start_job", seconds=5)

    async def leaves_a_thread(turn: Turn) -> str:
        turn.core.supervisor.adopt_thread("deaf", turn.owner, thread_ends)
        return "done"

    async with Runtime(agent=leaves_a_thread, store=faults.around(open_store(None))) as runtime:
        outcome = await runtime.run_turn("hi", SessionContext(session_id="s"), budget=Budget(seconds=1))
        assert (outcome.text, outcome.committed) == ("done", True)
        assert trio.current_time() == pytest.approx(5)
        assert [line for line in caplog.messages if "could not write" in line] == []
        assert faults.calls["finish_turn"] == 1
        thread_ends.set()
