"""Stop with a receipt: one line a node, and a scope that is empty."""

import threading

import pytest
import trio

from hermes_trio import (
    CancelCause,
    Cause,
    Reply,
    Runtime,
    RuntimeSettings,
    SessionContext,
    Turn,
    TurnHooks,
    TurnInput,
    TurnSpec,
    TurnState,
)
from hermes_trio.testing.fakes import FakeAdapter, ScriptedAgent, fake_job


async def test_a_stop_empties_the_scope_and_says_what_became_of_each_node(runtime: Runtime):
    """A nested child turn, three tasks, a worker thread and a tool that starts a job: one line each."""
    stopping = threading.Event()
    turns: list[Turn] = []
    jobs = []

    async def child(turn: Turn) -> str:
        await trio.sleep_forever()
        return ""

    async def start_job(turn: Turn) -> None:
        jobs.append(await turn.core.supervisor.start_watched(fake_job(3600), turn.owner, turn.channel))
        await trio.sleep_forever()

    async def agent(turn: Turn) -> str:
        for number in range(3):
            turn.start_soon(trio.sleep_forever, name=f"sleeper {number}")
        turn.start_soon(start_job, turn, name="a tool that starts a job")

        async def in_thread() -> None:
            await turn.run_sync(stopping.wait, 10, name="blocking call")

        turn.start_soon(in_thread)
        await turn.run_child("sub", agent=child)
        return "unreachable"

    async with trio.open_nursery() as nursery:
        outcomes = []

        async def run() -> None:
            outcomes.append(
                await runtime.run_turn(
                    "x", SessionContext(session_id="s"), agent=agent, hooks=TurnHooks(on_start=turns.append)
                )
            )

        nursery.start_soon(run)
        await trio.testing.wait_all_tasks_blocked()
        threading.Timer(0.05, stopping.set).start()
        receipt = await turns[0].stop(Cause(CancelCause.STOP, "by the test"))
    assert receipt.ok
    kinds = sorted(line.kind for line in receipt.lines)
    assert kinds == ["task", "task", "task", "task", "task", "thread", "turn", "turn"]
    assert all(line.how == "cancelled" for line in receipt.lines), receipt.lines
    assert next(line for line in receipt.lines if line.kind == "thread").waited_on == "thread blocking call"
    assert not turns[0].node.children
    assert outcomes[0].state is TurnState.CANCELLED
    assert str(outcomes[0].cause) == "stop: by the test"
    # The job belongs to the supervisor, not to the turn: stopping the turn does not touch it, stopping the session does.
    assert [job.id for job in runtime.supervisor.jobs("s")] == [jobs[0].id]
    (stopped,) = await runtime.stop_session("s")
    assert stopped.ok
    assert len(runtime.supervisor) == 0
    await _drop_notices(runtime)


async def _drop_notices(runtime: Runtime) -> None:
    async for _ in runtime.completions():
        break


async def test_a_stop_before_the_work_starts_is_not_lost(runtime: Runtime):
    """A turn that waits for its session's lock is stopped there, and never runs."""
    gate = trio.Event()
    ran: list[str] = []
    waiting: list[Turn] = []

    async def hold(turn: Turn) -> str:
        await gate.wait()
        return "first"

    async def never(turn: Turn) -> str:
        ran.append("it ran")
        return "second"

    context = SessionContext(session_id="same")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: runtime.run_turn("1", context, agent=hold))
        await trio.testing.wait_all_tasks_blocked()

        async def second() -> None:
            outcome = await runtime.run_turn("2", context, agent=never, hooks=TurnHooks(on_start=waiting.append))
            assert outcome.state is TurnState.CANCELLED

        nursery.start_soon(second)
        await trio.testing.wait_all_tasks_blocked()
        assert waiting[0].node.waits_on.startswith("lock session same held by turn_") or waiting[0].node.parent
        receipt = await waiting[0].stop()
        assert receipt.ok
        gate.set()
    assert ran == []
    assert len(runtime.core.locks) == 0


async def test_a_run_that_is_stopped_at_once_never_runs(runtime: Runtime):
    """The stop can arrive before the run's task has had its first step."""
    ran: list[str] = []

    async def agent(turn: Turn) -> str:
        ran.append("it ran")
        await trio.lowlevel.checkpoint()
        ran.append("past a checkpoint")
        return ""

    run = await runtime.stateless.start_run(
        TurnSpec(input=TurnInput(text="x"), context=SessionContext(session_id="s"), agent=agent)
    )
    run.request_stop()
    await run.settled.wait()
    assert "past a checkpoint" not in ran
    assert run.status.value == "cancelled"
    assert [event.data["event"] for event in run.log.since(0, 9)] == ["run.cancelled", "run.settled"]


async def test_a_second_stop_is_harmless(runtime: Runtime):
    """It says that there is nothing left to stop."""
    turns: list[Turn] = []
    async with trio.open_nursery() as nursery:

        async def forever(turn: Turn) -> str:
            await trio.sleep_forever()
            return ""

        nursery.start_soon(lambda: runtime.run_turn("x", agent=forever, hooks=TurnHooks(on_start=turns.append)))
        await trio.testing.wait_all_tasks_blocked()
        first = await turns[0].stop()
    second = await turns[0].stop()
    assert (first.ok, first.already_ended) == (True, False)
    assert (second.ok, second.already_ended, second.lines) == (True, True, ())


async def test_what_was_finished_is_kept(runtime: Runtime):
    """The agent's progress at the time of the stop is the transcript."""
    from hermes_trio import Message

    turns: list[Turn] = []

    async def agent(turn: Turn) -> str:
        turn.progress = Reply(text="one of two", messages=(Message(role="assistant", content="one of two"),))
        await trio.sleep_forever()
        return ""

    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            lambda: runtime.run_turn(
                "x", SessionContext(session_id="s"), agent=agent, hooks=TurnHooks(on_start=turns.append)
            )
        )
        await trio.testing.wait_all_tasks_blocked()
        await turns[0].stop()
    assert [message.text for message in await runtime.store.load_history("s")] == ["one of two"]


async def test_an_agent_that_raises_while_being_stopped_counts_as_stopped(runtime: Runtime):
    """A cancel always cancels; the exception is kept for the log."""
    turns: list[Turn] = []
    outcomes = []

    async def agent(turn: Turn) -> str:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("in the clean-up")

    async with trio.open_nursery() as nursery:

        async def run() -> None:
            outcomes.append(await runtime.run_turn("x", agent=agent, hooks=TurnHooks(on_start=turns.append)))

        nursery.start_soon(run)
        await trio.testing.wait_all_tasks_blocked()
        receipt = await turns[0].stop()
    assert receipt.ok
    assert outcomes[0].state is TurnState.CANCELLED
    assert isinstance(outcomes[0].exception, ValueError)


@pytest.mark.allow_leaks
async def test_a_thread_that_stays_deaf_is_shown_as_abandoned(virtual_clock):
    """The receipt says so, the node moves below `abandoned`, and the token is held until the thread ends."""
    release = threading.Event()
    turns: list[Turn] = []

    async def agent(turn: Turn) -> str:
        await turn.run_sync(release.wait, name="deaf")
        return ""

    async with Runtime(agent=agent, settings=RuntimeSettings(thread_grace=0.05)) as runtime:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: runtime.run_turn("x", hooks=TurnHooks(on_start=turns.append)))
            await trio.testing.wait_all_tasks_blocked()
            receipt = await turns[0].stop()
        assert not receipt.ok
        assert [line.how for line in receipt.lines if line.kind == "thread"] == ["abandoned"]
        (abandoned,) = runtime.tree.abandoned.children or ()
        assert abandoned.name == "deaf"
        assert runtime.threads.in_flight == 1
        release.set()
        await abandoned.wait_closed()
        assert runtime.threads.in_flight == 0
        assert not runtime.tree.abandoned.children


async def test_cancelling_the_caller_ends_the_turn_and_writes_it_down(runtime: Runtime):
    """A client that leaves: the turn is cancelled as `client_gone`, stored, and the cancellation goes on."""
    outcomes = []

    async def on_end(outcome) -> None:
        outcomes.append(outcome)

    async def forever(turn: Turn) -> str:
        await trio.sleep_forever()
        return ""

    with trio.move_on_after(1) as scope:
        await runtime.stateless.run_turn(
            TurnSpec(
                input=TurnInput(text="hi"),
                context=SessionContext(session_id="s"),
                agent=forever,
                hooks=TurnHooks(on_end=on_end),
            )
        )
    assert scope.cancelled_caught
    assert outcomes[0].cause.kind is CancelCause.CLIENT_GONE
    assert [message.text for message in await runtime.store.load_history("s")] == ["hi"]
    assert runtime.stateless.active == 0


async def test_stopping_the_session_of_one_chat_leaves_the_others_alone(
    runtime: Runtime, fake_adapter: FakeAdapter, scripted_agent: ScriptedAgent
):
    """An innocent neighbour lives on."""

    async def start(turn: Turn) -> str:
        await turn.core.supervisor.start_watched(fake_job(10, "finished"), turn.owner, turn.channel)
        return turn.context.session_id

    scripted_agent.then(start, start)
    await fake_adapter.say("a", chat="1")
    await fake_adapter.wait_for(1)
    await fake_adapter.say("b", chat="2")
    first, _ = await fake_adapter.wait_for(2)
    await runtime.stop_session(first.text)
    sent = await fake_adapter.wait_for(4)
    told = {entry.context.chat_id: entry.notices[0].text for entry in sent[2:]}
    assert "stopped" in told["1"]
    assert "finished" in told["2"]
