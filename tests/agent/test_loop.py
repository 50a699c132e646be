"""The model-tool loop: parallel tools, their failures, budgets, steering, events, and what is kept when a turn is cut off."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from hermes_trio import Budget, CancelCause, Outcome, Runtime, SessionContext, Turn, TurnInput, TurnState
from hermes_trio.agent.loop import RESULT_LIMIT, AgentSettings, ModelAgent
from hermes_trio.agent.model import Finished, ModelError, ModelErrorKind, ReasoningDelta
from hermes_trio.agent.tool import add_usage, keep_partial_result
from hermes_trio.runtime.outcome import Cause, Usage
from hermes_trio.runtime.ports import Message
from hermes_trio.runtime.stop_receipt import ReceiptLine, stop_work
from hermes_trio.store.ports import Store
from hermes_trio.tools.registry import Tools, tool

from .scripted import USAGE, Routes, ScriptedModel, tool_call

CONTEXT = SessionContext(session_id="s1", session_key="s1")


@tool()
async def add(turn: Turn, a: int, b: int) -> dict[str, int]:
    """Add two numbers."""
    await trio.lowlevel.checkpoint()
    return {"sum": a + b}


@tool()
async def nap(turn: Turn, seconds: float) -> str:
    """Take time."""
    try:
        await trio.sleep(seconds)
    except BaseException:
        keep_partial_result(turn, '{"slept": "a while"}')
        raise
    return '{"slept": "all of it"}'


@tool()
async def explode(turn: Turn) -> str:
    """Fail in the tool itself."""
    raise RuntimeError("the fuse was wet")


@tool()
def blocking(turn: Turn, text: str) -> str:
    """A synchronous tool."""
    return msgspec.json.encode({"said": text}).decode()


@tool()
async def costly(turn: Turn) -> str:
    """Uses a model of its own."""
    add_usage(turn, Usage(input_tokens=100, output_tokens=50, api_calls=3))
    return "{}"


def agent(model: ScriptedModel, runtime: Runtime | None = None, **settings: Any) -> ModelAgent:
    """An agent with the sample tools."""
    history = None if runtime is None else cast("Store", runtime.store)
    return ModelAgent(
        Routes(model),
        Tools([add, nap, explode, blocking, costly]),
        settings=AgentSettings(**settings),
        history=history,
    )


async def run(runtime: Runtime, model: ScriptedModel, text: str = "hello", **more: Any) -> Outcome:
    settings = more.pop("settings", {})
    return await runtime.run_turn(text, CONTEXT, agent=agent(model, runtime, **settings), **more)


async def transcript(runtime: Runtime) -> list[Message]:
    return await runtime.store.load_history("s1")


async def test_a_plain_answer(runtime: Runtime) -> None:
    """An answer without tools is the reply; prompt and answer are the transcript; tokens are counted."""
    model = ScriptedModel(["Hel", "lo", Finished(usage=USAGE)])
    outcome = await run(runtime, model)
    assert (outcome.text, outcome.state, outcome.usage, outcome.model) == (
        "Hello",
        TurnState.COMPLETED,
        USAGE,
        "scripted",
    )
    assert [(message.role, message.text) for message in await transcript(runtime)] == [
        ("user", "hello"),
        ("assistant", "Hello"),
    ]


async def test_history_and_instructions_reach_the_model(runtime: Runtime) -> None:
    """The next turn brings the history of the store; what the caller brings replaces it; instructions join the system prompt."""
    model = ScriptedModel(["one"], ["two"], ["three"])
    await run(runtime, model, "first")
    await run(runtime, model, "second")
    assert [message.text for message in model.requests[1].messages][1:] == ["first", "one", "second"]
    own = TurnInput(text="third", history=(Message(role="user", content="mine"),), instructions="Be brief.")
    await runtime.run_turn(own, CONTEXT, agent=agent(model))
    system, *rest = model.requests[2].messages
    assert system.text.endswith("\n\nBe brief.")
    assert [message.text for message in rest] == ["mine", "third"]


async def test_tools_of_one_answer_run_at_the_same_time(runtime: Runtime) -> None:
    """Parallel calls take as long as the longest; results come back in the order of the calls, each to its own call."""
    model = ScriptedModel(
        [tool_call("nap", "c1", seconds=3), tool_call("add", "c2", a=1, b=2), tool_call("nap", "c3", seconds=2)],
        ["done"],
    )
    began = trio.current_time()
    outcome = await run(runtime, model)
    assert trio.current_time() - began == pytest.approx(3)
    assert outcome.text == "done"
    results = model.requests[1].messages[-3:]
    assert [message.tool_call_id for message in results] == ["c1", "c2", "c3"]
    assert results[1].text == '{"sum":3}'
    assert outcome.usage.tool_calls == 3
    assert outcome.usage.api_calls == 2


async def test_calls_with_the_same_id_keep_their_places(runtime: Runtime) -> None:
    """A model that repeats call ids gets each result in its place."""
    model = ScriptedModel([tool_call("add", "same", a=1, b=1), tool_call("add", "same", a=2, b=2)], ["ok"])
    await run(runtime, model)
    assert [message.text for message in model.requests[1].messages[-2:]] == ['{"sum":2}', '{"sum":4}']


async def test_every_call_is_a_node_of_the_turn(runtime: Runtime) -> None:
    """While a tool runs it shows below its turn."""
    model = ScriptedModel([tool_call("nap", "c1", seconds=5)], ["ok"])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, runtime, model)
        await wait_all_tasks_blocked()
        node = runtime.tree.find("c1")
        assert node is not None
        assert (node.kind, node.name) == ("tool", "nap")
        assert node.parent is not None
        assert node.parent.kind == "turn"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (tool_call("explode"), "the tool failed: RuntimeError: the fuse was wet"),
        (
            tool_call("nothing_like_it"),
            "there is no tool 'nothing_like_it'; the tools are: add, blocking, costly, explode, nap",
        ),
        (tool_call("add", a="x", b=2), "wrong arguments for add: Expected `int`, got `str` - at `$.a`"),
        (tool_call("add", a=1), "missing required field `b`"),
        (tool_call("add", a=1, b=2, c=3), "unknown field `c`. It takes: a (required), b (required)"),
    ],
)
async def test_what_goes_wrong_in_a_tool_is_told_to_the_model(runtime: Runtime, call: Any, words: str) -> None:
    """Wrong arguments, unknown tools and failing tools are results that the model can act on, never a crash of the turn."""
    model = ScriptedModel([call], ["I see"])
    outcome = await run(runtime, model)
    assert outcome.state is TurnState.COMPLETED
    result = msgspec.json.decode(model.requests[1].messages[-1].text)
    assert words in result["error"]


@pytest.mark.parametrize("arguments", ["", "null", "[1]", "{", '{"a": ' + "[" * 5000, "\udcff"])
async def test_hostile_arguments_do_not_fail_the_turn(runtime: Runtime, arguments: str) -> None:
    """Whatever a model writes as arguments, the turn goes on."""
    model = ScriptedModel([msgspec.structs.replace(tool_call("add"), arguments=arguments)], ["I see"])
    outcome = await runtime.run_turn("x", CONTEXT, agent=agent(model))
    assert "error" in msgspec.json.decode(model.requests[1].messages[-1].text)
    assert outcome.text == "I see"


async def test_one_failing_tool_does_not_disturb_the_others(runtime: Runtime) -> None:
    """A failure next to a slow tool leaves the slow one alone."""
    model = ScriptedModel([tool_call("explode", "c1"), tool_call("nap", "c2", seconds=1)], ["ok"])
    await run(runtime, model)
    assert model.requests[1].messages[-1].text == '{"slept": "all of it"}'


async def test_a_synchronous_tool_runs_in_a_thread(runtime: Runtime) -> None:
    """A plain function is a tool, too."""
    model = ScriptedModel([tool_call("blocking", text="hi")], ["ok"])
    await run(runtime, model)
    assert model.requests[1].messages[-1].text == '{"said":"hi"}'


async def test_the_budget_of_iterations(runtime: Runtime) -> None:
    """When the steps are used up the model is asked once more, without tools, and its answer is the reply."""
    model = ScriptedModel([tool_call("add", a=1, b=1)], [tool_call("add", a=2, b=2)], ["all I have"])
    outcome = await run(runtime, model, settings={"max_iterations": 2})
    assert (outcome.text, outcome.finish_reason) == ("all I have", "max_iterations")
    assert model.requests[2].tools == ()
    assert len(model.requests) == 3


async def test_steering_is_taken_up_between_two_steps(runtime: Runtime) -> None:
    """A text that comes in while tools run is given to the model with their results, and is part of the transcript."""
    model = ScriptedModel([tool_call("nap", seconds=5)], ["turned"])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, runtime, model)
        await wait_all_tasks_blocked()
        (turn,) = runtime.core.live_turns.values()
        turn.steering.append("go left instead")
    assert model.requests[1].messages[-1].text == "go left instead"
    assert [message.role for message in await transcript(runtime)] == ["user", "assistant", "tool", "user", "assistant"]
    assert turn.steering == []


async def test_events(runtime: Runtime) -> None:
    """Whoever follows the turn sees text as it comes, tools as they start and end, and what the model said beside its calls."""
    events: list[Any] = []
    model = ScriptedModel(["I add.", tool_call("add", "c1", a=1, b=1), tool_call("explode", "c2")], ["ok"])
    await run(runtime, model, sink=events.append)
    names = [event["event"] for event in events]
    assert names[:2] == ["model.started", "message.delta"]
    assert names.count("model.started") == names.count("model.completed") == 2
    assert names.count("tool.started") == names.count("tool.completed") == 2
    assert {event["tool_call_id"]: event["error"] for event in events if event["event"] == "tool.completed"} == {
        "c1": False,
        "c2": True,
    }
    assert {"event": "reasoning.available", "text": "I add."} in events


async def test_a_stop_keeps_what_was_finished(runtime: Runtime) -> None:
    """A turn stopped during its tools keeps finished results, what a tool left, and a word for a call that had nothing."""
    model = ScriptedModel([tool_call("add", "c1", a=1, b=1), tool_call("nap", "c2", seconds=60)], ["never"])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, runtime, model)
        await wait_all_tasks_blocked()
        (turn,) = runtime.core.live_turns.values()
        receipt = await turn.stop()
    assert receipt.ok
    assert {line.node: line.how for line in receipt.lines}["c2"] == "cancelled"
    messages = await transcript(runtime)
    assert [(message.role, message.tool_call_id) for message in messages] == [
        ("user", ""),
        ("assistant", ""),
        ("tool", "c1"),
        ("tool", "c2"),
    ]
    assert messages[2].text == '{"sum":2}'
    assert messages[3].text == '{"slept": "a while"}'
    assert model.open == 0


async def test_one_call_of_a_tool_can_be_stopped_and_the_turn_goes_on(runtime: Runtime) -> None:
    """The model is told what the call had so far, and answers; the calls beside it are not touched."""
    model = ScriptedModel([tool_call("add", "c1", a=1, b=1), tool_call("nap", "c2", seconds=1e6)], ["then without it"])
    lines: list[ReceiptLine] = []
    async with trio.open_nursery() as nursery:
        outcomes: list[Outcome] = []

        async def go() -> None:
            outcomes.append(await run(runtime, model))

        nursery.start_soon(go)
        await wait_all_tasks_blocked()
        node = runtime.tree.find("c2")
        assert node is not None
        receipt = await stop_work(node, Cause(CancelCause.STOP, "by Ada"), 5, lines.append)
    assert receipt.ok
    assert [(line.node, line.how) for line in lines] == [("c2", "cancelled")]
    assert outcomes[0].text == "then without it"
    told = model.requests[1].messages[-1]
    assert told.tool_call_id == "c2"
    assert told.text == '{"slept": "a while"}'


async def test_a_call_of_a_model_is_a_node(runtime: Runtime) -> None:
    """While the model is asked, its node is in the turn; it leaves with the call."""
    model = ScriptedModel(["half of ", 60.0, "the answer"])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, runtime, model)
        await wait_all_tasks_blocked()
        (turn,) = runtime.core.live_turns.values()
        (node,) = turn.node.children or ()
        assert (node.kind, node.name) == ("model", model.name)
        await turn.stop()
    assert node.how == "cancelled"


async def test_a_stop_in_the_middle_of_an_answer_keeps_its_text(runtime: Runtime) -> None:
    """What the model had said so far is kept, and the call to the model is closed."""
    model = ScriptedModel(["half of ", "the", 60.0, " answer"])
    outcomes: list[Outcome] = []

    async def ask() -> None:
        outcomes.append(await run(runtime, model))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        (turn,) = runtime.core.live_turns.values()
        await turn.stop()
    assert (outcomes[0].text, outcomes[0].partial) == ("half of the", True)
    assert (await transcript(runtime))[-1].text == "half of the"
    assert model.open == 0


async def test_a_failing_model_fails_the_turn(runtime: Runtime) -> None:
    """Only the model's own failure fails the turn: with its kind, its text, and what had been said."""
    model = ScriptedModel(["so far", ModelError(ModelErrorKind.OVERLOADED, "too busy, sorry")])
    outcome = await run(runtime, model)
    assert (outcome.state, outcome.error_code, outcome.error) == (
        TurnState.FAILED,
        "model_overloaded",
        "too busy, sorry",
    )
    assert (await transcript(runtime))[-1].text == "so far"


async def test_an_answer_that_was_cut_off_says_so(runtime: Runtime) -> None:
    """An answer that hit the model's own limit is partial."""
    outcome = await run(runtime, ScriptedModel(["a lot of", Finished(finish_reason="length")]))
    assert (outcome.text, outcome.partial, outcome.error_code) == ("a lot of", True, "output_truncated")


async def test_reasoning_is_kept_beside_the_answer(runtime: Runtime) -> None:
    """What a model shows of its thinking is stored with its message and is not part of the text."""
    model = ScriptedModel([ReasoningDelta("hmm"), tool_call("add", a=1, b=1)], ["ok"])
    outcome = await run(runtime, model)
    assert outcome.text == "ok"
    assert model.requests[1].messages[-2].reasoning == "hmm"


async def test_tokens_are_taken_off_the_budget(runtime: Runtime) -> None:
    """A turn whose tokens are used up is ended, and says why."""
    model = ScriptedModel([tool_call("add", a=1, b=1)], ["never said"], ["nor this"])
    outcome = await run(runtime, model, budget=Budget(tokens=20))
    assert outcome.state is TurnState.CANCELLED
    assert outcome.cause is not None
    assert outcome.cause.kind is CancelCause.BUDGET


async def test_what_tools_use_is_on_the_turn_s_account(runtime: Runtime) -> None:
    """The usage of a turn includes that of its synchronous children."""
    outcome = await run(runtime, ScriptedModel([tool_call("costly")], ["ok"]))
    assert outcome.usage == Usage(input_tokens=120, output_tokens=60, api_calls=5, tool_calls=1)


async def test_a_huge_result_is_shortened(runtime: Runtime) -> None:
    """TOOL-24: a result above the ceiling keeps its two ends."""

    @tool()
    async def flood(turn: Turn) -> str:
        """Say much."""
        return "a" * RESULT_LIMIT + "b" * RESULT_LIMIT

    model = ScriptedModel([tool_call("flood")], ["ok"])
    await runtime.run_turn("x", CONTEXT, agent=ModelAgent(Routes(model), Tools([flood])))
    shown = model.requests[1].messages[-1].text
    assert len(shown) < RESULT_LIMIT + 200
    assert f"{RESULT_LIMIT} characters of {2 * RESULT_LIMIT} left out" in shown


async def test_turns_share_nothing(runtime: Runtime) -> None:
    """H13: one agent object serves many turns at once, each with its own tools and state."""

    @tool()
    async def who(turn: Turn) -> dict[str, str]:
        """Say whose turn it is."""
        await trio.sleep(1)
        return {"session": turn.context.session_id}

    async def answer(request: Any) -> Any:
        last = request.messages[-1]
        return [tool_call("who")] if last.role == "user" else [last.text]

    model = ScriptedModel(*[answer] * 40)
    shared = ModelAgent(Routes(model), Tools([who]))
    texts: dict[str, str] = {}

    async def one(session: str) -> None:
        context = SessionContext(session_id=session, session_key=session)
        texts[session] = (await runtime.run_turn("who", context, agent=shared)).text

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(one, f"s{number}")
    assert texts == {session: f'{{"session":"{session}"}}' for session in texts}
    assert len(texts) == 20
