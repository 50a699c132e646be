"""Ends that are written late, or whose answer is lost: they end what they were made for, and nothing that came after it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from hermes_trio import Runtime, SessionContext, Turn, TurnInput, TurnSpec
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


@pytest.mark.parametrize(("verb", "refuses"), [("release_inbox", 1), ("bury_inbox", 3)])
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
    """The store fails while a completion is acknowledged: whoever reads completions gets it, and gets it once."""
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


async def test_a_job_whose_row_is_not_written_holds_up_no_drain() -> None:
    """The store does not answer to the start of a job: whoever started it can be stopped, and the runtime drains and closes within bounds."""
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
    """Cancelling whoever writes events loses none of them, also if the store has not heard of them yet."""

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
    """Whoever keeps something for a session is told of its end, also if that could not be written at once."""
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
