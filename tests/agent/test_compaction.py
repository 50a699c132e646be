"""When a conversation nearly fills the window: summaries, what stays, and what happens when even that fails."""

from __future__ import annotations

from typing import cast

import trio
from trio.testing import wait_all_tasks_blocked

from hermes_trio import Outcome, Runtime, SessionContext, Turn, TurnInput, TurnState
from hermes_trio.agent.compaction import SUMMARY_HEADING, estimate_tokens, split_for_compaction, trim_results
from hermes_trio.agent.loop import AgentSettings, ModelAgent
from hermes_trio.agent.model import ModelError, ModelErrorKind, ToolSpec
from hermes_trio.runtime.ports import Message, ToolCall
from hermes_trio.store.ports import Store
from hermes_trio.tools.registry import Tools, tool

from .scripted import Routes, ScriptedModel, tool_call

CONTEXT = SessionContext(session_id="s1", session_key="s1")
OVERFLOW = ModelError(ModelErrorKind.CONTEXT_OVERFLOW, "too long")


@tool()
async def read(turn: Turn, size: int) -> str:
    """Give much text."""
    await trio.lowlevel.checkpoint()
    return "x" * size


def store_of(runtime: Runtime) -> Store:
    return cast("Store", runtime.store)


async def run(runtime: Runtime, model: ScriptedModel, text: str, **settings: object) -> Outcome:
    agent = ModelAgent(
        Routes(model),
        Tools([read]),
        settings=AgentSettings(**settings),
        history=store_of(runtime),  # type: ignore[arg-type]
    )
    return await runtime.run_turn(text, CONTEXT, agent=agent)


async def fill(runtime: Runtime, turns: int, size: int = 2000) -> None:
    """A conversation of so many turns with answers of this size."""
    for number in range(turns):
        await run(runtime, ScriptedModel([f"answer {number} " + "y" * size], window=10**9), f"question {number}")


async def test_older_messages_become_a_summary(runtime: Runtime) -> None:
    """Near the limit the older part is summarised by the model, the newest messages stay, and the session keeps its id."""
    await fill(runtime, 10)
    model = ScriptedModel(["we talked about numbers"], ["go on"], window=4000)
    outcome = await run(runtime, model, "and now?")
    assert outcome.text == "go on"
    asked_for_summary, answered = model.requests
    assert asked_for_summary.metadata["purpose"] == "compaction"
    assert "question 0" in asked_for_summary.messages[-1].text
    texts = [message.text for message in answered.messages[1:]]
    assert texts[0] == f"{SUMMARY_HEADING}\nwe talked about numbers"
    assert texts[-1] == "and now?"
    assert any(text.startswith("question 9") for text in texts)
    assert estimate_tokens(answered.messages) < 4000
    history = await store_of(runtime).load_history("s1")
    assert history[0].text.startswith(SUMMARY_HEADING)
    assert history[-1].text == "go on"
    archived = await store_of(runtime).list_messages("s1", include_archived=True)
    assert any("question 0" in stored.message.text for stored in archived)


async def test_the_cost_of_a_summary_counts(runtime: Runtime) -> None:
    """The call that makes a summary is on the turn's account."""
    await fill(runtime, 10)
    outcome = await run(runtime, ScriptedModel(["sum"], ["ok"], window=4000), "now?")
    assert outcome.usage.api_calls == 2


async def test_an_overflow_that_the_model_reports_is_answered_with_a_summary(runtime: Runtime) -> None:
    """An estimate can be wrong: when the model itself says that it is too much, room is made and it is asked again."""
    await fill(runtime, 3)
    model = ScriptedModel([OVERFLOW], ["sum"], ["better"], window=3000)
    outcome = await run(runtime, model, "now?", compact_at=0.99)
    assert outcome.text == "better"
    assert model.requests[2].messages[1].text.startswith(SUMMARY_HEADING)


async def test_a_model_that_cannot_summarise(runtime: Runtime) -> None:
    """If the summary fails the oldest part is dropped, and the text says so; the turn goes on."""
    await fill(runtime, 10)
    model = ScriptedModel([ModelError(ModelErrorKind.UNAVAILABLE, "down")], ["go on"], window=4000)
    outcome = await run(runtime, model, "now?")
    assert outcome.text == "go on"
    assert "could not be summarised" in model.requests[1].messages[1].text


async def test_a_stop_during_the_summary_changes_nothing(runtime: Runtime) -> None:
    """A conversation whose compaction is cut off is as it was, plus the question."""
    await fill(runtime, 10)
    before = await store_of(runtime).load_history("s1")
    model = ScriptedModel([60.0, "sum"], window=4000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, runtime, model, "now?")
        await wait_all_tasks_blocked()
        (turn,) = runtime.core.live_turns.values()
        assert any(node.kind == "compaction" for node in turn.node.walk())
        await turn.stop()
    after = await store_of(runtime).load_history("s1")
    assert [message.text for message in after[:-1]] == [message.text for message in before]
    assert after[-1].text == "now?"


async def test_a_client_s_own_history_is_not_written_down(runtime: Runtime) -> None:
    """A history that the caller brought is shortened for this turn only."""
    own = tuple(Message(role="user" if n % 2 == 0 else "assistant", content=f"{n} " + "z" * 2000) for n in range(10))
    model = ScriptedModel(["sum"], ["ok"], window=4000)
    agent = ModelAgent(Routes(model), history=store_of(runtime))
    await runtime.run_turn(TurnInput(text="now?", history=own), CONTEXT, agent=agent)
    assert [message.text for message in await store_of(runtime).load_history("s1")] == ["now?", "ok"]


async def test_a_turn_that_is_long_in_itself(runtime: Runtime) -> None:
    """Tool results that would overflow the window are shortened for the model, the newest last; the transcript keeps them."""
    model = ScriptedModel(
        [tool_call("read", "c1", size=6000)],
        [tool_call("read", "c2", size=6000)],
        [tool_call("read", "c3", size=600)],
        ["done"],
        window=3500,
    )
    outcome = await run(runtime, model, "read all")
    assert outcome.text == "done"
    last = model.requests[-1].messages
    assert "left out to make room" in last[3].text
    assert estimate_tokens(last) < 3500
    stored = await store_of(runtime).load_history("s1")
    assert [len(message.text) for message in stored if message.role == "tool"] == [6000, 6000, 600]


async def test_an_overflow_that_nothing_helps_against_fails_the_turn(runtime: Runtime) -> None:
    """When there is nothing left to shorten the turn fails with the model's words; it does not loop."""
    model = ScriptedModel([OVERFLOW], [OVERFLOW], [OVERFLOW], [OVERFLOW])
    outcome = await run(runtime, model, "hello")
    assert (outcome.state, outcome.error_code) == (TurnState.FAILED, "model_context_overflow")
    assert len(model.requests) == 1


def test_a_kept_part_begins_with_a_question() -> None:
    """No tool result is separated from its call: what is kept begins with a user's message."""
    history: list[Message] = []
    for number in range(20):
        history += [
            Message(role="user", content=f"q{number}"),
            Message(role="assistant", tool_calls=(ToolCall(id="c", name="t", arguments="x" * 100),)),
            Message(role="tool", tool_call_id="c", content="r" * 100),
            Message(role="assistant", content="a"),
        ]
    older, newer = split_for_compaction(history, 1000)
    assert [*older, *newer] == history
    assert newer[0].role == "user"
    assert older
    assert estimate_tokens(newer) <= 300


def test_estimates_count_what_is_sent() -> None:
    """Calls, their arguments and the tools' descriptions count too."""
    assert estimate_tokens([Message(role="user", content="x" * 400)]) == 104
    called = Message(role="assistant", tool_calls=(ToolCall(id="c", name="tool", arguments="x" * 396),))
    assert estimate_tokens([called]) == 104
    assert estimate_tokens([], [ToolSpec(name="t", description="d" * 400)]) > 100


def test_short_results_are_not_trimmed() -> None:
    """Only long and older results are shortened."""
    messages = [Message(role="tool", content="short"), *[Message(role="tool", content="l" * 5000) for _ in range(3)]]
    assert [len(message.text) > 1100 for message in trim_results(messages)] == [False, False, True, True]
