"""The runtime's promises while the store stutters, while work is poisonous, and while the runtime drains."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import msgspec
import pytest
import trio
import trio.testing

from hermes_trio import DeliveringTurn, Runtime, SessionContext
from hermes_trio.runtime.errors import Draining, JobRefused, OutcomeUnknown, RuntimeClosed
from hermes_trio.runtime.outcome import JobState, RunStatus, TurnState
from hermes_trio.runtime.ports import EventRow, TurnInput
from hermes_trio.runtime.run import Run
from hermes_trio.runtime.supervisor import Job, JobSpec
from hermes_trio.runtime.turn import Turn, TurnSpec
from hermes_trio.store import AlreadyStarted, Store, StoreError, open_store
from hermes_trio.testing.fakes import FakeAdapter, ScriptedAgent, fake_job
from hermes_trio.testing.faults import StoreFaults

WHERE = SessionContext(session_id="s", session_key="s")


@pytest.fixture(autouse=True)
def on_virtual_time(virtual_clock: trio.testing.MockClock) -> None:
    """Every test here runs on virtual time."""


class World:
    """A runtime on a store that fails when told to."""

    def __init__(self, agent: ScriptedAgent | None = None) -> None:
        self.faults = StoreFaults()
        self.agent = ScriptedAgent() if agent is None else agent
        self.runtime = Runtime(agent=self.agent, store=self.faults.around(open_store(None)), seed=1)

    @property
    def store(self) -> Store:
        """All of the store."""
        return self.runtime.store  # type: ignore[return-value]


async def test_a_bad_event_costs_itself_alone(caplog: pytest.LogCaptureFixture):
    """A value that is no JSON in an event is replaced by a note; the run's other events, its end and other runs' events are kept."""

    async def emits(turn: Turn) -> str:
        turn.emit("tool.started", tool="good")
        turn.emit("tool.started", tool=object())
        turn.emit("tool.completed", tool="good")
        await trio.sleep(10)
        return "done"

    world = World(ScriptedAgent(emits, emits))
    async with world.runtime as runtime:
        places = [SessionContext(session_id=name, session_key=name) for name in "ab"]
        runs = [
            await runtime.stateless.start_run(TurnSpec(input=TurnInput(text="hi"), context=place)) for place in places
        ]
        await trio.sleep(5)
        for run in runs:
            kept = [row.event for row in await world.store.events_after(run.id)]
            assert [event["event"] for event in kept] == ["tool.started", "tool.started", "tool.completed"]
            assert "not JSON" in kept[1]["problem"]
        for run in runs:
            await run.ended.wait()
            assert run.status is RunStatus.COMPLETED
    assert "not JSON" in caplog.text


async def test_events_of_a_run_that_was_removed_do_not_stop_the_events_of_others():
    """Retention may remove a run's row under its last events; the events of every other run are still written down."""
    hold = trio.Event()

    async def emits(turn: Turn) -> str:
        turn.emit("tool.started", tool=turn.input.text)
        await hold.wait()
        turn.emit("tool.completed", tool=turn.input.text)
        await trio.sleep(10)
        return "done"

    world = World(ScriptedAgent(emits, emits))
    async with world.runtime as runtime:
        gone = await runtime.stateless.start_run(
            TurnSpec(input=TurnInput(text="one"), context=WHERE), run_id="run_gone"
        )
        other = await runtime.stateless.start_run(
            TurnSpec(input=TurnInput(text="two"), context=SessionContext(session_id="t", session_key="t")),
            run_id="run_other",
        )
        await trio.sleep(1)
        await runtime.store._writer.submit(lambda db: db.execute("DELETE FROM runs WHERE run_id = 'run_gone'"))  # type: ignore[attr-defined]
        hold.set()
        await trio.sleep(5)
        kept = [row.event["event"] for row in await world.store.events_after(other.id)]
        assert kept == ["tool.started", "tool.completed"]
        await gone.ended.wait()
        await other.ended.wait()


async def test_the_log_of_a_run_whose_end_is_reduced_has_no_gap():
    """The end was to bring the last events along; refused with them, it is written alone, and they are written by themselves."""

    async def emits(turn: Turn) -> str:
        turn.emit("tool.started", tool="good")
        turn.emit("tool.completed", tool="good")
        return "done"

    world = World(ScriptedAgent(emits))
    async with world.runtime as runtime:
        world.faults.fail("finish_turn", times=5)
        run = await runtime.stateless.start_run(TurnSpec(input=TurnInput(text="hi"), context=WHERE))
        await run.settled.wait()
        await trio.sleep(5)
        kept = [(row.number, row.event["event"]) for row in await world.store.events_after(run.id)]
        assert kept == list(enumerate(["tool.started", "tool.completed", "run.failed", "run.settled"], 1))


async def test_the_last_event_of_a_run_whose_end_is_reduced_is_not_stored_before_earlier_ones():
    """A reader on another node reads rows: it would take a last event without its predecessors for a gap."""

    async def emits(turn: Turn) -> str:
        turn.emit("tool.started", tool="good")
        turn.emit("tool.completed", tool="good")
        return "done"

    world = World(ScriptedAgent(emits))
    async with world.runtime as runtime:
        world.faults.fail("finish_turn", times=5)
        run = await runtime.stateless.start_run(TurnSpec(input=TurnInput(text="hi"), context=WHERE))
        await run.ended.wait()
        kept = [(row.number, row.event["event"]) for row in await world.store.events_after(run.id)]
        assert kept[:3] == list(enumerate(["tool.started", "tool.completed", "run.failed"], 1))


async def test_an_end_that_may_be_written_is_told_as_it_is_stored():
    """The end was committed although the verb raised, then refused for a while: the run's reader and its row agree on how it ended."""
    world = World(ScriptedAgent("done"))
    async with world.runtime as runtime:
        world.faults.fail("finish_turn", after_commit=True)
        world.faults.fail("finish_turn", times=5)
        run = await runtime.stateless.start_run(TurnSpec(input=TurnInput(text="hi"), context=WHERE))
        await run.settled.wait()
        await trio.sleep(5)
        kept = [row.event["event"] for row in await world.store.events_after(run.id)]
        assert kept == [event.data["event"] for event in run.log.since(0, 10)] == ["run.completed", "run.settled"]


@pytest.mark.parametrize(("unknown", "end"), [(False, "run.completed"), (True, "run.failed")])
async def test_an_end_whose_reduction_fails_too_is_told_as_it_is_stored(unknown: bool, end: str):
    """The reduced end is refused, or its answer is lost: the reader gets the terminal event of the end that the store has."""
    world = World(ScriptedAgent("done"))
    async with world.runtime as runtime:
        world.faults.fail("finish_turn", times=5)
        world.faults.fail("finish_turn", after_commit=unknown)
        run = await runtime.stateless.start_run(TurnSpec(input=TurnInput(text="hi"), context=WHERE))
        await run.settled.wait()
        await trio.sleep(5)
        kept = [row.event["event"] for row in await world.store.events_after(run.id)]
        assert kept == [event.data["event"] for event in run.log.since(0, 10)] == [end, "run.settled"]
        row = await world.store.get_run(run.id)
        assert row is not None
        assert row.status is run.status


async def test_events_that_were_read_are_written_when_a_receiver_crashes():
    """A receiver's failure ends the runtime: the events that readers have got by then are in the store."""
    runs: list[Run] = []

    async def program(store: Store) -> None:
        async with Runtime(agent=ScriptedAgent("done"), store=nullcontext(store), seed=1) as runtime:

            async def crash() -> None:
                runs.append(await runtime.stateless.start_run(TurnSpec(input=TurnInput(text="hi"), context=WHERE)))
                await runs[0].settled.wait()
                raise RuntimeError("the receiver broke")

            runtime.start_receiver("crashing", crash)
            await trio.sleep(10)

    async with open_store(None) as store:
        with pytest.raises((RuntimeError, ExceptionGroup)):
            await program(store)
        kept = [row.event["event"] for row in await store.events_after(runs[0].id)]
        assert kept == [event.data["event"] for event in runs[0].log.since(0, 10)] == ["run.completed", "run.settled"]


async def test_a_refusal_that_passes_costs_no_events_while_others_are_taken():
    """The store refuses the events of one run once and takes those of another: the first are written a moment later."""
    hold = trio.Event()

    async def emits(turn: Turn) -> str:
        turn.emit("tool.started", tool=turn.input.text)
        await hold.wait()
        return "done"

    world = World(ScriptedAgent(emits, emits))
    async with world.runtime as runtime:
        # The batch of both, and then one of the two that are tried apart.
        world.faults.fail("append_events", times=2)
        places = [SessionContext(session_id=name, session_key=name) for name in "ab"]
        runs = [
            await runtime.stateless.start_run(TurnSpec(input=TurnInput(text="hi"), context=place)) for place in places
        ]
        await trio.sleep(30)
        for run in runs:
            assert [row.event["event"] for row in await world.store.events_after(run.id)] == ["tool.started"]
        hold.set()


@pytest.mark.parametrize("written", [False, True])
async def test_no_reader_of_the_rows_meets_the_end_of_a_run_before_what_came_first(
    written: bool, monkeypatch: pytest.MonkeyPatch
):
    """The run ends while its events are on their way to a store that refuses them: its end commits with all of them, and each is kept once."""
    arrived, refused = trio.Event(), trio.Event()

    async def emits(turn: Turn) -> str:
        turn.emit("tool.started", tool="x")
        await arrived.wait()
        turn.emit("tool.completed", tool="x")
        return "done"

    world = World(ScriptedAgent(emits))
    async with world.runtime as runtime:
        append = world.store.append_events

        async def far_away(rows: Sequence[EventRow]) -> None:
            if not arrived.is_set():
                arrived.set()
                await refused.wait()
                if not written:
                    raise StoreError("the store is away; nothing was written")
            await append(rows)

        monkeypatch.setattr(world.store, "append_events", far_away)
        run = await runtime.stateless.start_run(TurnSpec(input=TurnInput(text="hi"), context=WHERE))
        await run.ended.wait()
        names = ["tool.started", "tool.completed", "run.completed"]
        assert [row.event["event"] for row in await world.store.events_after(run.id)] == names
        refused.set()
        await trio.sleep(5)
        kept = [(row.number, row.event["event"]) for row in await world.store.events_after(run.id)]
        assert kept == list(enumerate([*names, "run.settled"], 1))


async def test_an_event_that_comes_while_the_end_is_written_has_a_number_of_its_own():
    """The terminal event's number is taken before it is committed; what a background approval says meanwhile comes after it, in the log and in the store."""
    world = World()
    async with world.runtime as runtime:
        world.faults.slow("finish_turn", seconds=5)
        run = await runtime.stateless.start_run(TurnSpec(input=TurnInput(text="hi"), context=WHERE))
        await trio.sleep(1)
        run.emit({"event": "approval.request", "approval_id": "a"})
        run.emit({"event": "approval.responded", "approval_id": "a"})
        await run.ended.wait()
        await trio.sleep(1)
        names = ["run.completed", "approval.request", "approval.responded", "run.settled"]
        assert [event.data["event"] for event in run.log.since(0, 10)] == names
        kept = await world.store.events_after(run.id)
        assert [(row.number, row.event["event"]) for row in kept] == list(enumerate(names, 1))


@pytest.mark.parametrize("after_commit", [False, True])
async def test_a_job_that_is_cancelled_with_a_group_has_an_end(after_commit: bool):
    """Trio delivers a cancellation through a nursery as an exception group: the job's end is written down all the same."""
    world = World()
    started = trio.Event()

    async def run(job: Job) -> JobState:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            job.started()
            started.set()
            await trio.sleep_forever()
        return JobState.EXITED

    with trio.CancelScope() as program:
        async with world.runtime as runtime:
            job = await runtime.supervisor.start_watched(
                JobSpec(kind="process", title="p", run=run), runtime.owner(), runtime.channel
            )
            await started.wait()
            assert runtime.supervisor._nursery is not None
            runtime.supervisor._nursery.cancel_scope.cancel()  # as a sibling's crash does
            with trio.CancelScope(shield=True):
                await job.wait()
                row = await world.store.get_job(job.id)
            assert row is not None
            assert row.state is JobState.KILLED
            program.cancel()


async def test_a_receiver_that_crashes_does_not_leave_jobs_without_an_end():
    """The exception is raised where the runtime was opened, after every job has been stopped and its end written down."""
    states: dict[str, str] = {}
    faults = StoreFaults()

    class Watching:
        """The wrapped store, whose rows are read just before it closes."""

        def __init__(self) -> None:
            self.opening = faults.around(open_store(None))

        async def __aenter__(self) -> Store:
            self.store = await self.opening.__aenter__()
            return self.store

        async def __aexit__(self, *error: object) -> bool | None:
            with trio.CancelScope(shield=True):
                states.update({job.job_id: job.state.value for job in await self.store.list_jobs()})
            return await self.opening.__aexit__(*error)  # type: ignore[arg-type]

    async def crash() -> None:
        await trio.sleep(1)
        raise RuntimeError("the receiver broke")

    async def program() -> None:
        async with Runtime(agent=ScriptedAgent(), store=Watching(), seed=1) as runtime:
            await runtime.supervisor.start_watched(fake_job(3600), runtime.owner(), runtime.channel)
            runtime.start_receiver("crashing", crash)
            await trio.sleep(10)

    with pytest.raises((RuntimeError, ExceptionGroup)):
        await program()
    assert list(states.values()) == ["killed"]


async def test_a_runtime_that_a_receiver_ends_refuses_new_work(caplog: pytest.LogCaptureFixture):
    """While it stops its jobs, a new run, job or receiver is refused by the error for it, and the notices of the jobs wake no lane: they wait."""

    async def crash() -> None:
        raise ValueError("the receiver broke")

    async def start(turn: Turn) -> str:
        assert isinstance(turn, DeliveringTurn)
        await turn.core.supervisor.start_watched(fake_job(3600), turn.owner, turn.channel)
        return "started"

    world, adapter, lanes = World(ScriptedAgent(start)), FakeAdapter(), list[str]()

    async def program() -> None:
        async with world.runtime as runtime, adapter.connect(runtime):
            await adapter.say("go")
            await adapter.wait_for(1)
            world.faults.slow("finish_job", seconds=5)
            runtime.start_receiver("crashing", crash)
            await trio.sleep(1)
            with pytest.raises(Draining):
                await runtime.stateless.start_run(TurnSpec(input=TurnInput(text="more"), context=WHERE))
            with pytest.raises((Draining, RuntimeClosed)):
                await runtime.supervisor.start_watched(fake_job(1), runtime.owner(), runtime.channel)
            with pytest.raises(RuntimeClosed):
                runtime.start_receiver("late", crash)
            try:
                await trio.sleep_forever()
            finally:
                lanes.extend(node.id for node in runtime.tree.root.walk() if node.kind == "lane")

    with pytest.RaisesGroup(ValueError, flatten_subgroups=True, allow_unwrapped=True):
        await program()
    assert len(world.faults.injected) == 1
    assert lanes == []
    assert "a subscriber of" not in caplog.text


async def test_a_job_whose_start_is_uncertain_has_an_end():
    """`start_job` was committed and raised, and so did its repetition: nothing runs, and no row says that something does."""
    world = World()
    async with world.runtime as runtime:
        world.faults.fail("start_job", after_commit=True, times=2)
        with pytest.raises(StoreError):
            await runtime.supervisor.start_watched(fake_job(1), runtime.owner(), runtime.channel)
        assert await world.store.list_jobs(live_only=True) == []
        assert len(await world.store.list_jobs()) == 1


async def test_a_job_whose_start_was_written_but_not_answered_starts():
    """A lost answer costs nothing: the row is written again, which changes nothing, and the job runs under the id that it was given."""
    world = World()
    async with world.runtime as runtime:
        world.faults.fail("start_job", after_commit=True)
        spec = msgspec.structs.replace(fake_job(1), id="job_mine")
        job = await runtime.supervisor.start_watched(spec, runtime.owner(), runtime.channel)
        with pytest.raises(JobRefused, match="job_mine"):
            await runtime.supervisor.start_watched(spec, runtime.owner(), runtime.channel)
        assert await job.wait() is JobState.EXITED
        assert [row.job_id for row in await world.store.list_jobs()] == ["job_mine"]
        assert (await anext(runtime.completions())).job_id == "job_mine"


async def test_a_run_whose_row_is_written_late_is_found_by_its_idempotency_key():
    """The caller is told that the outcome is not known; the run starts when its row is written, and the same key leads to that live run."""
    world = World()
    async with world.runtime as runtime:
        world.faults.slow("begin_turn", seconds=60)
        entry = runtime.stateless
        began = trio.current_time()
        with pytest.raises(OutcomeUnknown, match="same idempotency key"):
            await entry.start_run(
                TurnSpec(input=TurnInput(text="hi"), context=WHERE), idempotency_key="k", fingerprint="f"
            )
        assert trio.current_time() - began == 10
        with pytest.raises((OutcomeUnknown, AlreadyStarted)):
            await entry.start_run(
                TurnSpec(input=TurnInput(text="hi"), context=WHERE), idempotency_key="k", fingerprint="f"
            )
        await trio.sleep(100)
        with pytest.raises(AlreadyStarted) as again:
            await entry.start_run(
                TurnSpec(input=TurnInput(text="hi"), context=WHERE), idempotency_key="k", fingerprint="f"
            )
        row = await world.store.get_run(again.value.run_id)
        assert row is not None
        assert row.status is RunStatus.COMPLETED
        assert len(await world.store.list_runs()) == 1
        assert len(world.agent.turns) == 1
        assert runtime.core.admission.active == 0


async def test_a_run_whose_caller_was_cancelled_runs():
    """Cancelling the request abandons the wait, never the write: there is no row without a task."""
    world = World()
    async with world.runtime as runtime:
        world.faults.slow("begin_turn", seconds=5)
        with trio.move_on_after(1):
            await runtime.stateless.start_run(TurnSpec(input=TurnInput(text="hi"), context=WHERE), run_id="run_1")
        await trio.sleep(10)
        row = await world.store.get_run("run_1")
        assert row is not None
        assert row.status is RunStatus.COMPLETED


async def test_a_run_whose_commit_is_uncertain_is_asked_for_and_starts():
    """A begin that was committed and raised is written again, which changes nothing, and the run that the caller gets is the real one."""
    world = World()
    async with world.runtime as runtime:
        world.faults.fail("begin_turn", after_commit=True, times=2)
        run = await runtime.stateless.start_run(
            TurnSpec(input=TurnInput(text="hi"), context=WHERE), idempotency_key="k", fingerprint="f"
        )
        await run.ended.wait()
        assert run.status is RunStatus.COMPLETED
        assert len(await world.store.list_runs()) == 1


async def test_a_run_that_certainly_was_not_written_is_refused():
    """A failure before the commit is an error of the request, at once, and leaves nothing."""
    world = World()
    async with world.runtime as runtime:
        world.faults.fail("begin_turn")
        with pytest.raises(StoreError):
            await runtime.stateless.start_run(TurnSpec(input=TurnInput(text="hi"), context=WHERE))
        assert await world.store.list_runs() == []
        assert runtime.core.admission.active == 0
        assert runtime.core.live_turns == {}


async def test_a_drain_waits_for_the_run_that_is_being_written_down():
    """`ok` is said when nothing runs and nothing will: a run that was accepted before the drain is ended by it, not begun after it."""

    async def slow(turn: Turn) -> str:
        await trio.sleep(100)
        return "late"

    world = World(ScriptedAgent(slow))
    async with world.runtime as runtime:
        world.faults.slow("begin_turn", seconds=5)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(runtime.stateless.start_run, TurnSpec(input=TurnInput(text="hi"), context=WHERE))
            await trio.sleep(1)
            report = await runtime.drain(0)
            assert report.ok
            assert [row.status for row in await world.store.list_runs()] == [RunStatus.CANCELLED]
        await trio.sleep(200)
        assert [turn.cause is not None for turn in world.agent.turns] in ([], [True])


async def test_an_embedded_turn_that_waits_for_its_place_is_refused_by_a_drain():
    """A turn that got its place after the drain had begun does not run."""

    async def slow(turn: Turn) -> str:
        await trio.sleep(10)
        return "late"

    from hermes_trio import RuntimeSettings

    agent = ScriptedAgent(slow, slow)
    refused: list[bool] = []
    async with Runtime(agent=agent, settings=RuntimeSettings(max_turns=1), seed=1) as runtime:

        async def second() -> None:
            try:
                await runtime.run_turn("two", SessionContext(session_id="b"))
            except Draining:
                refused.append(True)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(runtime.run_turn, "one", SessionContext(session_id="a"))
            await trio.sleep(1)
            nursery.start_soon(second)
            await trio.sleep(1)
            assert (await runtime.drain(100)).ok
    assert refused == [True]
    assert len(agent.turns) == 1


async def test_a_drain_sees_a_turn_whose_hook_before_it_still_runs():
    """`on_turn_start` may wait: a drain that comes meanwhile ends that turn instead of reporting that there is none."""

    class Slow(FakeAdapter):
        async def on_turn_start(self, turn: Turn) -> None:
            await super().on_turn_start(turn)
            await trio.sleep(5)

    world = World()
    async with world.runtime as runtime, Slow().connect(runtime) as adapter:
        await adapter.say("hi")
        await trio.sleep(1)
        report = await runtime.drain(0)
        assert report.ok
        assert report.cancelled == 1
        assert world.agent.turns == []
        assert [sent.outcome.state for sent in adapter.sent] == [TurnState.CANCELLED]


async def test_a_drain_ends_a_lane_that_lingers_and_keeps_the_notice():
    """A one-shot session that waits for a watched job for an hour does not keep the runtime open: its job is stopped and counted, and its notice waits."""
    started: list[Job] = []

    async def starts(turn: Turn) -> str:
        started.append(await turn.core.supervisor.start_watched(fake_job(3600), turn.owner, turn.channel))  # type: ignore[attr-defined]
        return "started"

    world = World(ScriptedAgent(starts))
    async with world.runtime as runtime, FakeAdapter("hook", one_shot="webhook").connect(runtime) as adapter:
        await adapter.say("go")
        await adapter.wait_for(1)
        await trio.sleep(1)
        (lane,) = [node for node in runtime.tree.root.walk() if node.kind == "lane"]
        assert list(lane.waits or ()) == ["1 watched jobs of a one-shot session"]
        began = trio.current_time()
        report = await runtime.drain(30)
        assert report.ok
        assert report.stopped_jobs == 1
        assert trio.current_time() - began < 1
        assert runtime.lanes == 0
        assert (await world.store.backlog())["inbox"] == 1
    assert trio.current_time() - began < 1


async def test_a_log_entry_of_a_job_names_it(caplog: pytest.LogCaptureFixture):
    """Whatever logs in the name of a job, or of something inside it, can be found by the job's id."""
    from hermes_trio.logs import add_identity

    entry: dict[str, object] = {}

    async def run(job: Job) -> JobState:
        job.started()
        add_identity(entry)
        return JobState.EXITED

    async with World().runtime as runtime:
        job = await runtime.supervisor.start(JobSpec(kind="process", title="p", run=run), runtime.owner())
        await job.wait()
    assert entry["job"] == job.id
