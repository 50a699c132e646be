"""Hazards of delivery and of stopping that lie between the tools, the loop and the runtime: each by the way in which work used to be lost."""

from __future__ import annotations

import random

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from hermes_trio import CancelCause, Cause, DeliveringTurn, Runtime, SessionContext, Turn, TurnState
from hermes_trio.agent.approvals import ApprovalResult, Approvals, Question
from hermes_trio.runtime.turn import StatelessTurn, TurnHooks, TurnInput, TurnSpec
from hermes_trio.store.records import ApprovalChoice
from hermes_trio.testing.fakes import FakeAdapter, ScriptedAgent, fake_job

from .bench_of_tools import call, open_bench, open_demo, until


async def test_a_turn_that_fails_after_starting_a_process_loses_nothing() -> None:
    """H17: the promise is the job's own from the moment it starts: the turn may fail at the next line, and the end is told all the same."""
    async with open_bench() as bench:

        async def body(turn: Turn) -> None:
            arguments = {"command": "sleep 0.3; echo survived", "background": True, "notify_on_complete": True}
            await call(bench.box, turn, "terminal", arguments)
            (job,) = bench.runtime.supervisor.jobs("s1")
            assert bench.runtime.tree.find(job.id) is job.node
            raise RuntimeError("the turn breaks here")

        with pytest.raises(RuntimeError, match="breaks here"):
            await bench.in_turn(body)
        with trio.fail_after(10):
            notice = await bench.runtime.completions().__anext__()
        assert "survived" in notice.text


async def test_a_stop_does_not_throw_away_what_waits() -> None:
    """H19: a notice that waits behind a busy turn is told after that turn is stopped, in a turn of its own, not mixed into a user's message."""
    async with open_demo() as bench, FakeAdapter().connect(bench.runtime) as adapter:
        await adapter.say("!bg sleep 1; echo waited for")
        await adapter.wait_for(1)
        (job,) = bench.runtime.supervisor.jobs()
        await adapter.say("!sleep 60")
        key = adapter.key("1")
        await until(lambda: (turn := adapter.inbox.current_turn(key)) and "!sleep" in turn.input.text)
        with trio.fail_after(10):
            await job.wait()
        await adapter.say("a plain message")
        receipt = await adapter.inbox.stop_turn(key, Cause(CancelCause.STOP))
        assert receipt is not None
        assert receipt.ok
        replies = await adapter.wait_for(4)
        told = [reply for reply in replies if "waited for" in reply.text and "completed normally" in reply.text]
        assert len(told) == 1
        assert "plain message" not in told[0].text
        assert any(reply.text == "You said: a plain message" for reply in replies)
        assert (await bench.runtime.store.backlog())["inbox"] == 0


async def test_a_notice_is_no_answer_to_a_question(
    runtime: Runtime, scripted_agent: ScriptedAgent, fake_adapter: FakeAdapter
) -> None:
    """H19: while a turn waits for an approval a notice waits, too: it is neither the answer nor lost."""
    approvals = Approvals(runtime.store, seconds=100)  # type: ignore[arg-type]
    answers: list[ApprovalResult] = []

    async def ask(turn: Turn) -> str:
        assert isinstance(turn, DeliveringTurn)
        hooks = msgspec.structs.replace(turn.spec.hooks, asks=lambda event: None)
        turn.spec = msgspec.structs.replace(turn.spec, hooks=hooks)
        await turn.core.supervisor.start_watched(fake_job(5), turn.owner, turn.channel)
        answers.append(await approvals.ask(turn, Question(shown="x", description="y")))
        return "asked"

    scripted_agent.then(ask)
    await fake_adapter.say("go")
    first, second = await fake_adapter.wait_for(2)
    assert (answers[0].allowed, answers[0].timed_out) == (False, True)
    assert (first.text, first.notices) == ("asked", ())
    assert len(second.notices) == 1


async def test_a_notice_whose_turn_fails_does_not_wedge_the_conversation(
    runtime: Runtime, scripted_agent: ScriptedAgent, fake_adapter: FakeAdapter
) -> None:
    """H20: a turn that fails while it tells a notice leaves nothing claimed or running: the next message is answered."""

    async def start(turn: Turn) -> str:
        assert isinstance(turn, DeliveringTurn)
        await turn.core.supervisor.start_watched(fake_job(1), turn.owner, turn.channel)
        return "started"

    scripted_agent.then(start, RuntimeError("while telling"), "fine again")
    await fake_adapter.say("go")
    await fake_adapter.wait_for(2)
    await fake_adapter.say("still there?")
    replies = await fake_adapter.wait_for(3)
    assert replies[1].outcome.state is TurnState.FAILED
    assert replies[2].text == "fine again"
    assert (await runtime.store.backlog())["inbox"] == 0


async def test_every_conversation_gets_its_own_notices_in_order(
    runtime: Runtime, scripted_agent: ScriptedAgent, fake_adapter: FakeAdapter
) -> None:
    """H23: one inbox a session: whatever the order in which jobs of many conversations end, each is told of its own, once, in order."""
    seconds = random.Random(7)
    wanted: dict[str, list[tuple[float, str]]] = {}

    async def start(turn: Turn) -> str:
        assert isinstance(turn, DeliveringTurn)
        for number in range(5):
            after = seconds.uniform(1, 100)
            text = f"{turn.context.chat_id}-{number}"
            wanted.setdefault(turn.context.chat_id, []).append((after, text))
            await turn.core.supervisor.start_watched(fake_job(after, text), turn.owner, turn.channel)
        return "started"

    scripted_agent.then(*[start] * 20)
    for chat in range(20):
        await fake_adapter.say("go", chat=str(chat))
    with trio.fail_after(10_000):
        while sum(len(sent.notices) for sent in fake_adapter.sent) < 100:
            await fake_adapter.wait_for(len(fake_adapter.sent) + 1)
    for chat, jobs in wanted.items():
        told = [row.text for sent in fake_adapter.sent if sent.context.chat_id == chat for row in sent.notices]
        assert [text.split()[-1].rstrip("]") for text in told] == [text for _, text in sorted(jobs)]


async def test_a_stop_hits_its_own_turn_and_no_later_one(runtime: Runtime, scripted_agent: ScriptedAgent) -> None:
    """H25: a stop that comes too late says so and leaves no mark that could end the next turn."""
    context = SessionContext(session_id="s", session_key="s")
    await runtime.run_turn("first", context)
    receipt = await scripted_agent.turns[0].stop()
    assert receipt.already_ended
    scripted_agent.turns[0].cancel(Cause(CancelCause.STOP))
    assert (await runtime.run_turn("second", context)).text == "echo: second"


async def test_a_stop_during_an_approval_is_not_forgotten(runtime: Runtime, scripted_agent: ScriptedAgent) -> None:
    """H25: a stop that arrives while the turn waits for an answer ends the turn, even if the answer comes in the same moment."""
    approvals = Approvals(runtime.store, seconds=100)  # type: ignore[arg-type]

    async def ask(turn: Turn) -> str:
        await approvals.ask(turn, Question(shown="x", description="y"))
        await trio.sleep(1000)
        return "never"

    scripted_agent.then(ask)
    states: list[TurnState] = []

    async def run() -> None:
        context = SessionContext(session_id="s", session_key="s")
        states.append((await runtime.run_turn("go", context, hooks=TurnHooks(asks=lambda event: None))).state)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await wait_all_tasks_blocked()
        (row,) = await approvals.pending("s")
        began = trio.current_time()
        scripted_agent.turns[0].cancel(Cause(CancelCause.STOP))
        await approvals.answer("s", ApprovalChoice.ONCE, approval_id=row.id)
    assert states == [TurnState.CANCELLED]
    assert trio.current_time() == began


async def test_a_stateless_turn_has_nothing_to_promise_with(runtime: Runtime, scripted_agent: ScriptedAgent) -> None:
    """A turn without a channel has no attribute to hold one: that is why no promise can be made in it."""
    await runtime.stateless.run_turn(TurnSpec(input=TurnInput(text="x"), context=SessionContext(session_id="s")))
    (turn,) = scripted_agent.turns
    assert isinstance(turn, StatelessTurn)
    assert not hasattr(turn, "channel")
