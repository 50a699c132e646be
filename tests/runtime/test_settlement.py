"""Two ends: the turn has ended, and everything that it started has settled."""

import pytest
import trio

from hermes_trio import (
    Budget,
    DeliveringTurn,
    Runtime,
    RuntimeSettings,
    SessionContext,
    Turn,
    TurnInput,
    TurnSpec,
)
from hermes_trio.store import SessionFilter
from hermes_trio.testing.fakes import FakeAdapter, ScriptedAgent, fake_job


async def test_a_run_settles_when_its_last_job_has_ended(runtime: Runtime):
    """`run.completed` comes with the answer, `run.settled` when nothing of the run is alive."""

    async def agent(turn: Turn) -> str:
        await turn.core.supervisor.start(fake_job(30), turn.owner)
        return "answer"

    run = await runtime.stateless.start_run(
        TurnSpec(input=TurnInput(text="x"), context=SessionContext(session_id="s"), agent=agent)
    )
    await run.ended.wait()
    assert trio.current_time() == 0
    assert not run.settled.is_set()
    assert runtime.stateless.runs.find(run.id) is run
    await run.settled.wait()
    assert trio.current_time() == 30
    assert [event.data["event"] for event in run.log.since(0, 9)] == ["run.completed", "run.settled"]
    assert runtime.stateless.runs.find(run.id) is None


async def test_text_that_comes_quickly_is_joined_and_the_first_piece_is_not_held_back(runtime: Runtime):
    """Deltas within 50 ms become one event; the order with other events is kept."""

    async def agent(turn: Turn) -> str:
        for piece in "abcdef":
            turn.emit("message.delta", delta=piece)
        turn.emit("tool.started", tool="t", preview="")
        turn.emit("message.delta", delta="g")
        await trio.sleep(1)
        turn.emit("message.delta", delta="h")
        return "abcdefgh"

    run = await runtime.stateless.start_run(
        TurnSpec(input=TurnInput(text="x"), context=SessionContext(session_id="s"), agent=agent)
    )
    await run.settled.wait()
    events = [(event.data["event"], event.data.get("delta")) for event in run.log.since(0, 20)]
    assert events == [
        ("message.delta", "a"),
        ("message.delta", "bcdef"),
        ("tool.started", None),
        ("message.delta", "g"),
        ("message.delta", "h"),
        ("run.completed", None),
        ("run.settled", None),
    ]


@pytest.mark.parametrize("linger", [1000.0, 20.0])
async def test_a_one_shot_session_ends_when_it_has_settled_or_its_linger_is_over(virtual_clock, linger: float):
    """It stays open for its watched job, handles the notice, and then ends; a job that is too slow is stopped."""
    told: list[str] = []

    async def agent(turn: Turn) -> str:
        if turn.input.notices:
            told.append(turn.input.text)
            return "handled"
        assert isinstance(turn, DeliveringTurn)
        await turn.core.supervisor.start_watched(fake_job(100, "done"), turn.owner, turn.channel)
        return turn.context.session_id

    async with (
        Runtime(agent=agent) as runtime,
        FakeAdapter("hook", one_shot="webhook_complete", linger=linger).connect(runtime) as adapter,
    ):
        await adapter.say("event")
        (first,) = await adapter.wait_for(1)
        session = await runtime.store.get_session(first.text)  # pyright: ignore
        assert session.ended_at is None
        await trio.sleep(200)
        session = await runtime.store.get_session(first.text)  # pyright: ignore
        assert session.end_reason == "webhook_complete"
        assert len(told) == (1 if linger > 100 else 0)
        assert len(runtime.supervisor) == 0
        assert (await runtime.store.backlog())["inbox"] == 0
        assert runtime.lanes == 0


ENDS = ["success", "exception", "stop", "deadline", "drain"]


@pytest.mark.parametrize("end", ENDS)
async def test_a_one_shot_session_never_becomes_a_ghost(virtual_clock, end: str):
    """However its turn ends, the row has an end and a reason, and can be pruned."""
    from hermes_trio import CancelCause, Cause

    async def agent(turn: Turn) -> str:
        if end == "exception":
            raise RuntimeError("boom")
        if end != "success":
            await trio.sleep(3600)
        return "ok"

    class Adapter(FakeAdapter):
        def budget(self, rows):
            return Budget(seconds=10) if end == "deadline" else None

    from hermes_trio.store import open_store

    async with open_store(None, runner="inline", clock=lambda: 1e9 + trio.current_time()) as store:
        async with (
            Runtime(agent=agent, store=_already_open(store), settings=RuntimeSettings(drain_seconds=1)) as runtime,
            Adapter("hook", one_shot="webhook_complete").connect(runtime) as adapter,
        ):
            await adapter.say("event")
            await trio.testing.wait_all_tasks_blocked()
            if end == "stop":
                await adapter.inbox.stop_turn(adapter.key("1"), Cause(CancelCause.STOP))
            if end != "drain":
                await adapter.wait_for(1)
                await trio.testing.wait_all_tasks_blocked()
        sessions = await store.list_sessions(SessionFilter(include_children=True))
        assert [(session.source, session.end_reason) for session in sessions] == [("hook", "webhook_complete")]
        assert await store.prune_sessions(older_than_days=-1) == 1


def _already_open(store):
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def opened():
        yield store

    return opened()


async def test_settling_waits_for_notices_of_the_root(
    fake_adapter: FakeAdapter, scripted_agent: ScriptedAgent, runtime: Runtime
):
    """A root with an undelivered notice has not settled."""
    gate = trio.Event()

    async def start(turn: Turn) -> str:
        assert isinstance(turn, DeliveringTurn)
        await turn.core.supervisor.start_watched(fake_job(1), turn.owner, turn.channel)
        return "started"

    async def busy(turn: Turn) -> str:
        await gate.wait()
        return "busy"

    scripted_agent.then(start, busy)
    await fake_adapter.say("x")
    await fake_adapter.wait_for(1)
    root = scripted_agent.turns[0].root
    await fake_adapter.say("y")
    await trio.sleep(10)
    assert await runtime.store.root_open(root.id)
    gate.set()
    await root.wait(runtime.core)
    assert not await runtime.store.root_open(root.id)
