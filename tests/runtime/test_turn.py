"""A turn: its nursery, its context, its two kinds, and the one way in which it ends."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from hermes_trio import (
    AgentFailed,
    Budget,
    CancelCause,
    DeliveringTurn,
    Message,
    Reply,
    Runtime,
    RuntimeClosed,
    RuntimeSettings,
    SessionContext,
    StatelessTurn,
    TooBusy,
    Turn,
    TurnHooks,
    TurnInput,
    TurnSpec,
    TurnState,
    Usage,
    async_delivery_supported,
    asyncio_agent,
    current_context,
    current_turn,
    get_session_env,
    sync_agent,
)
from hermes_trio.testing.fakes import FakeAdapter, ScriptedAgent


async def test_the_context_is_bound_in_the_turn_and_nowhere_else(runtime: Runtime, scripted_agent: ScriptedAgent):
    """The agent, its tasks and its threads see the session; the caller does not."""
    seen: list[str] = []

    async def step(turn: Turn) -> str:
        async def task() -> None:
            seen.append(get_session_env("HERMES_SESSION_ID"))

        turn.start_soon(task)
        seen.append(await turn.run_sync(get_session_env, "HERMES_SESSION_ID"))
        assert current_turn() is turn
        return get_session_env("HERMES_SESSION_ID")

    outcome = await runtime.run_turn("x", SessionContext(session_id="s1"), agent=step)
    assert (outcome.text, seen) == ("s1", ["s1", "s1"])
    assert get_session_env("HERMES_SESSION_ID", "unbound?") == ""
    assert current_turn() is None


async def test_inside_a_runtime_the_shell_that_started_it_is_not_inherited(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
):
    """A server that a tool's shell started does not take that shell's identity."""
    monkeypatch.setenv("HERMES_SESSION_KEY", "of somebody else")
    assert get_session_env("HERMES_SESSION_KEY", "default") == ""


async def test_the_two_kinds(runtime: Runtime, scripted_agent: ScriptedAgent, fake_adapter: FakeAdapter):
    """The stateless entry makes stateless turns without a channel, an adapter and the program itself delivering ones."""
    supported: list[bool] = []

    async def look(turn: Turn) -> str:
        supported.append(async_delivery_supported())
        return type(turn).__name__

    scripted_agent.then(look, look, look)
    first = await runtime.stateless.run_turn(
        TurnSpec(input=TurnInput(text="x"), context=SessionContext(session_id="a"))
    )
    second = await runtime.run_turn("x", SessionContext(session_id="b"))
    await fake_adapter.say("x")
    (third,) = await fake_adapter.wait_for(1)
    assert [first.text, second.text, third.text] == ["StatelessTurn", "DeliveringTurn", "DeliveringTurn"]
    assert supported == [False, True, True]
    assert not hasattr(StatelessTurn, "channel")
    assert hasattr(DeliveringTurn, "channel")


async def test_a_child_is_of_its_parents_kind(runtime: Runtime, scripted_agent: ScriptedAgent):
    """Delegating does not change whether something can be told later, and the child has a session of its own."""
    children: list[Turn] = []

    async def child(turn: Turn) -> str:
        children.append(turn)
        return "child"

    async def parent(turn: Turn) -> str:
        outcome = await turn.run_child("do it", agent=child)
        return f"{outcome.text} {outcome.session_id}"

    stateless = await runtime.stateless.run_turn(
        TurnSpec(input=TurnInput(text="x"), context=SessionContext(session_id="a"), agent=parent)
    )
    delivering = await runtime.run_turn("x", SessionContext(session_id="b"), agent=parent)
    assert [type(turn) for turn in children] == [StatelessTurn, DeliveringTurn]
    assert stateless.text.startswith("child a.")
    assert delivering.text.startswith("child b.")


async def test_a_failing_agent_is_an_outcome_and_not_a_crash(runtime: Runtime, scripted_agent: ScriptedAgent):
    """What the user sees is generic; what the log has is the exception."""
    scripted_agent.then(ZeroDivisionError("secret detail"), AgentFailed("no such city", code="lookup"))
    first = await runtime.run_turn("x")
    second = await runtime.run_turn("x")
    assert (first.state, first.error_code) == (TurnState.FAILED, "agent_error")
    assert "secret detail" not in first.error
    assert isinstance(first.exception, ZeroDivisionError)
    assert (second.error, second.error_code) == ("no such city", "lookup")


async def test_a_group_of_failures_has_one_first_cause(runtime: Runtime):
    """Exception groups end at the turn: one cause, the others as notes."""

    async def boom(what: str) -> None:
        raise KeyError(what)

    async def agent(turn: Turn) -> str:
        turn.start_soon(boom, "one")
        turn.start_soon(boom, "two")
        await trio.sleep_forever()
        return ""

    outcome = await runtime.run_turn("x", agent=agent)
    assert isinstance(outcome.exception, KeyError)
    assert any("also raised: KeyError" in note for note in outcome.exception.__notes__)


async def test_a_task_that_failed_before_the_agent_returned(runtime: Runtime):
    """A turn is not complete because its agent got away without noticing that a task of the turn had failed."""

    async def agent(turn: Turn) -> str:
        done = trio.Event()

        async def failing() -> None:
            done.set()
            raise ValueError("no")

        turn.nursery.start_soon(failing)
        await done.wait()
        assert not turn.nursery.child_tasks
        return "all is well"

    outcome = await runtime.run_turn("go", agent=agent)
    assert (outcome.state, outcome.error_code) == (TurnState.FAILED, "agent_error")
    assert isinstance(outcome.exception, ValueError)


async def test_a_deadline_cancels_with_a_cause(runtime: Runtime):
    """The time of a turn is part of its budget, and what it had so far is kept."""

    async def slow(turn: Turn) -> str:
        turn.progress = Reply(text="half an ans", messages=(Message(role="assistant", content="half an ans"),))
        await trio.sleep(60)
        return "whole"

    outcome = await runtime.run_turn("x", SessionContext(session_id="s"), agent=slow, budget=Budget(seconds=5))
    assert outcome.state is TurnState.CANCELLED
    assert outcome.cause is not None
    assert outcome.cause.kind is CancelCause.DEADLINE
    assert (outcome.text, outcome.partial, outcome.seconds) == ("half an ans", True, 5.0)
    assert [message.text for message in await runtime.store.load_history("s")] == ["half an ans"]


async def test_a_finished_reply_is_never_discarded_by_a_cancel(runtime: Runtime):
    """A stop that comes when the answer is there does not undo the answer."""
    turns: list[Turn] = []

    async def agent(turn: Turn) -> str:
        turn.cancel(_stop())
        return "finished"

    outcome = await runtime.run_turn("x", agent=agent, hooks=TurnHooks(on_start=turns.append))
    assert (outcome.state, outcome.text) == (TurnState.COMPLETED, "finished")


def _stop():
    from hermes_trio import Cause

    return Cause(CancelCause.STOP)


async def test_the_turn_is_written_down_in_one_piece(runtime: Runtime, scripted_agent: ScriptedAgent):
    """Prompt and answer are the history of the next turn."""
    scripted_agent.then(Reply(text="four", usage=Usage(input_tokens=3, output_tokens=1)))
    await runtime.run_turn("2+2?", SessionContext(session_id="sums"))
    history = await runtime.store.load_history("sums")
    assert [(message.role, message.text) for message in history] == [("user", "2+2?"), ("assistant", "four")]

    async def recall(turn: Turn) -> str:
        return " / ".join(message.text for message in await turn.history())

    outcome = await runtime.run_turn("and before?", SessionContext(session_id="sums"), agent=recall)
    assert outcome.text == "2+2? / four"


async def test_a_client_that_brings_its_history_gets_that_one(runtime: Runtime):
    """The store is not consulted when the input has a history."""

    async def recall(turn: Turn) -> str:
        return " / ".join(message.text for message in await turn.history())

    given = TurnInput(text="x", history=(Message(role="user", content="mine"),))
    outcome = await runtime.stateless.run_turn(
        TurnSpec(input=given, context=SessionContext(session_id="sums"), agent=recall)
    )
    assert outcome.text == "mine"


async def test_two_turns_never_share_a_transcript(runtime: Runtime):
    """The same session, from two entries: one after the other, in order."""
    running = 0
    most = 0
    order: list[str] = []

    async def agent(turn: Turn) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await trio.sleep(1)
        running -= 1
        order.append(turn.input.text)
        return "ok"

    async with trio.open_nursery() as nursery:
        for number in range(5):

            async def one(number=number) -> None:
                same = SessionContext(session_id="same")
                if number % 2:
                    await runtime.run_turn(str(number), same, agent=agent)
                else:
                    spec = TurnSpec(input=TurnInput(text=str(number)), context=same, agent=agent)
                    await runtime.stateless.run_turn(spec)

            nursery.start_soon(one)
            await trio.testing.wait_all_tasks_blocked()
    assert (most, order) == (1, ["0", "1", "2", "3", "4"])
    assert trio.current_time() == 5.0


async def test_the_limit_of_turns_refuses_stateless_clients_and_makes_the_others_wait():
    """HTTP answers 429; the program's own turn waits for a token, which is freed when the work has really ended."""
    async with Runtime(agent=ScriptedAgent(), settings=RuntimeSettings(max_turns=1)) as runtime:
        gate = trio.Event()

        async def hold(turn: Turn) -> str:
            await gate.wait()
            return "held"

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: runtime.run_turn("x", agent=hold))
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(TooBusy, match="1 turns are running, which is the limit"):
                await runtime.stateless.run_turn(
                    TurnSpec(input=TurnInput(text="y"), context=SessionContext(session_id="other"))
                )
            nursery.start_soon(lambda: runtime.run_turn("z"))
            await trio.testing.wait_all_tasks_blocked()
            assert runtime.core.admission.active == 1
            gate.set()
        assert runtime.core.admission.active == 0


async def test_a_closed_runtime_says_so(scripted_agent: ScriptedAgent):
    """Work for a runtime that is not open is a clear error."""
    runtime = Runtime(agent=scripted_agent)
    with pytest.raises(RuntimeClosed, match="not open; use `async with Runtime"):
        _ = runtime.tree
    async with runtime:
        pass
    with pytest.raises(RuntimeClosed, match="closed"):
        await runtime.run_turn("x")
    with pytest.raises(Exception, match="opened before; make a new one"):
        async with runtime:
            pass


async def test_whoever_is_cancelled_while_a_runtime_opens_gets_away(
    virtual_clock: object, scripted_agent: ScriptedAgent
):
    """The runtime opens and ends in its own order, and the cancelled caller does not wait for ever."""
    ended: list[str] = []

    @asynccontextmanager
    async def slow(runtime: Runtime) -> AsyncIterator[None]:
        await trio.sleep(10)
        try:
            yield
        finally:
            ended.append("stage")

    with trio.fail_after(60):
        with trio.move_on_after(1) as scope:
            async with Runtime(agent=scripted_agent, stages=[slow]):
                raise AssertionError("it was opened for a caller that was cancelled")
    assert scope.cancelled_caught
    assert ended == ["stage"]


async def test_a_sync_function_can_be_an_agent(runtime: Runtime):
    """It runs in a worker thread, with the context of the turn."""

    def agent(turn: Turn) -> str:
        return f"{get_session_env('HERMES_SESSION_ID')}: {turn.input.text}"

    outcome = await runtime.run_turn("hello", SessionContext(session_id="s"), agent=sync_agent(agent))
    assert outcome.text == "s: hello"


async def test_an_asyncio_function_can_be_an_agent(runtime: Runtime):
    """It runs in an event loop of its own, with the context of the turn, and can be stopped."""
    import asyncio

    async def agent(turn: Turn) -> str:
        await asyncio.sleep(0)
        return get_session_env("HERMES_SESSION_ID")

    outcome = await runtime.run_turn("x", SessionContext(session_id="s"), agent=asyncio_agent(agent))
    assert (outcome.state, outcome.text) == (TurnState.COMPLETED, "s")


async def test_an_asyncio_agent_is_cancelled_as_asyncio_does_it(runtime: Runtime):
    """Stopping the turn raises `CancelledError` in the coroutine, which can clean up."""
    import asyncio
    import threading

    began = threading.Event()
    cleaned: list[str] = []

    async def agent(turn: Turn) -> str:
        began.set()
        try:
            await asyncio.sleep(3600)
        finally:
            cleaned.append("up")
        return "late"

    turns: list[Turn] = []
    async with trio.open_nursery() as nursery:

        async def run() -> None:
            outcome = await runtime.run_turn("x", agent=asyncio_agent(agent), hooks=TurnHooks(on_start=turns.append))
            assert outcome.state is TurnState.CANCELLED

        nursery.start_soon(run)
        await trio.to_thread.run_sync(began.wait)
        receipt = await turns[0].stop()
    assert receipt.ok
    assert cleaned == ["up"]


async def test_a_child_process_gets_the_session_and_the_directory_by_value(runtime: Runtime, tmp_path):
    """`SessionContext.environ` carries the identity; nothing is taken from the server's environment."""
    import sys

    async def agent(turn: Turn) -> str:
        context = current_context()
        assert context is not None
        done = await trio.run_process(
            [sys.executable, "-S", "-c", "import os; print(os.environ['HERMES_SESSION_ID'], os.getcwd())"],
            env={**os.environ, **context.environ()},
            cwd=context.cwd,
            capture_stdout=True,
        )
        return done.stdout.decode().strip()

    outcome = await runtime.run_turn("x", SessionContext(session_id="s9", cwd=str(tmp_path)), agent=agent)
    assert outcome.text == f"s9 {tmp_path}"
