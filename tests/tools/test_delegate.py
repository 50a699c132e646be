"""Delegation: synchronous, in the background, on a stateless turn, with a full pool, at its limits, and cut off (TOOL-103 to TOOL-134)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from hermes_trio import (
    CancelCause,
    Cause,
    InboxRow,
    NoticeKind,
    Outcome,
    Runtime,
    SessionContext,
    Turn,
    TurnInput,
    TurnSpec,
)
from hermes_trio.agent.loop import ModelAgent
from hermes_trio.agent.model import ModelError, ModelErrorKind, ModelRequest
from hermes_trio.runtime.outcome import JobState
from hermes_trio.runtime.ports import ToolCall
from hermes_trio.testing.fakes import FakeAdapter
from hermes_trio.tools.delegate import Delegation
from hermes_trio.tools.registry import Tools, tool
from hermes_trio.tools.settings import DelegationSettings
from tests.agent.scripted import Routes, ScriptedModel, Step, tool_call

CONTEXT = SessionContext(session_id="s1", session_key="s1", platform="test")


@tool()
async def nap(turn: Turn, seconds: float) -> str:
    """Take time."""
    await trio.sleep(seconds)
    return '{"slept": true}'


class Family:
    """A parent and its children on one agent: the parent calls `delegate_task`, children do what their goal says.

    Goals: `say TEXT`, `nap SECONDS` (in a tool), `think SECONDS` (in the model), `fail`, `silent`, `more GOAL` (delegate further), `loop` (never ends).
    """

    def __init__(self, runtime: Runtime, **settings: Any) -> None:
        self.runtime = runtime
        self.delegation = Delegation(DelegationSettings(**settings), inherit=self._inherit, forget=self._forget)
        self.model = ScriptedModel(*[self._answer] * 1000)
        self.agent = ModelAgent(Routes(self.model), Tools([self.delegation, nap]))
        self.inherited: list[tuple[str, str]] = []
        self.forgotten: list[str] = []
        self.tools_of_children: list[set[str]] = []

    def _inherit(self, parent: SessionContext, child: SessionContext) -> None:
        self.inherited.append((parent.session_id, child.session_id))

    def _forget(self, session_id: str) -> None:
        self.forgotten.append(session_id)

    async def _answer(self, request: ModelRequest) -> Sequence[Step]:
        await trio.lowlevel.checkpoint()
        last = request.messages[-1]
        if last.role == "tool":
            return [f"result: {last.text}"]
        if "delegated goal" in request.messages[0].text:
            self.tools_of_children.append({spec.name for spec in request.tools})
        verb, _, rest = last.text.partition("\n")[0].partition(" ")
        match verb:
            case "say":
                return [rest]
            case "nap":
                return ["I will nap.", tool_call("nap", seconds=float(rest))]
            case "think":
                return ["thinking ", float(rest), "done"]
            case "fail":
                return [ModelError(ModelErrorKind.OVERLOADED, "too busy")]
            case "silent":
                return [""]
            case "more":
                return [tool_call("delegate_task", goal=rest)]
            case "background":
                return [tool_call("delegate_task", goal=rest, background=True)]
            case "call":
                return [ToolCall(id="call_1", name="delegate_task", arguments=rest)]
            case _:
                return [f"noted {last.text}"]

    async def ask(self, text: str, *, stateless: bool = False, session: str = "s1", **more: Any) -> Outcome:
        """A turn of the parent."""
        context = SessionContext(session_id=session, session_key=session, platform="test")
        if stateless:
            return await self.runtime.stateless.run_turn(
                TurnSpec(input=TurnInput(text=text), context=context, agent=self.agent, **more)
            )
        return await self.runtime.run_turn(text, context, agent=self.agent, **more)

    async def delegate(self, *, stateless: bool = False, **arguments: Any) -> dict[str, Any]:
        """The result of `delegate_task` as the parent's model got it."""
        outcome = await self.ask(f"call {msgspec.json.encode(arguments).decode()}", stateless=stateless)
        assert outcome.text.startswith("result: "), outcome
        return msgspec.json.decode(outcome.text.removeprefix("result: "))

    async def notice(self) -> InboxRow:
        """The next notice."""
        with trio.fail_after(1000):
            return await self.runtime.completions().__anext__()


@pytest.fixture
async def family(runtime: Runtime) -> Family:
    """A family with the usual limits, on virtual time: children are agents of the same kind as their parent."""
    made = Family(runtime)
    runtime.core.agent = made.agent
    return made


def with_limits(family: Family, **settings: Any) -> Family:
    made = Family(family.runtime, **settings)
    family.runtime.core.agent = made.agent
    return made


async def test_one_child(family: Family) -> None:
    """TOOL-115, TOOL-116: the result of one child, with everything that is known of it."""
    result = await family.delegate(goal="say hello", context="to the world")
    (entry,) = result["results"]
    assert (entry["task_index"], entry["status"], entry["exit_reason"]) == (0, "completed", "completed")
    assert entry["summary"] == "hello"
    assert (entry["api_calls"], entry["model"]) == (1, "scripted")
    assert entry["tokens"] == {"input": 10, "output": 5}
    assert entry["tool_trace"] == []
    assert "note" not in result
    child = family.model.requests[1]
    assert child.messages[-1].text == "say hello\n\nContext:\nto the world"


async def test_children_run_at_the_same_time_and_come_back_in_order(family: Family) -> None:
    """A batch takes as long as its longest child, and its results are ordered by task."""
    began = trio.current_time()
    result = await family.delegate(tasks=[{"goal": "think 5"}, {"goal": "say quick"}, {"goal": "nap 3"}])
    assert trio.current_time() - began == pytest.approx(5)
    assert [entry["summary"] for entry in result["results"]] == ["thinking done", "quick", 'result: {"slept": true}']
    (trace,) = result["results"][2]["tool_trace"]
    assert (trace["tool"], trace["status"], trace["args_bytes"]) == ("nap", "ok", len('{"seconds":3.0}'))


async def test_a_child_has_a_conversation_of_its_own(family: Family) -> None:
    """TOOL-111: a child sees its goal only, its session is below its parent's, ended when it is done, and inherits the directory."""
    await family.ask("say something before")
    result = await family.delegate(goal="say hello")
    child_request = family.model.requests[2]
    assert [message.role for message in child_request.messages] == ["system", "user"]
    session_id = result["results"][0]["session_id"]
    record = await family.runtime.store.get_session(session_id)  # type: ignore[attr-defined]
    assert (record.parent_session_id, record.source, record.end_reason) == ("s1", "subagent", "subagent_complete")
    assert family.inherited == [("s1", session_id)]
    assert family.forgotten == [session_id]


async def test_failures_are_results(family: Family) -> None:
    """TOOL-116, TOOL-117: a child that fails or says nothing is told as such, next to one that succeeds."""
    result = await family.delegate(tasks=[{"goal": "fail"}, {"goal": "silent"}, {"goal": "say ok"}])
    assert [entry["status"] for entry in result["results"]] == ["error", "failed", "completed"]
    assert result["results"][0]["error"] == "too busy"
    assert result["results"][1]["error"]
    assert result["results"][0]["summary"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "give a goal"),
        ({"goal": "  "}, "give a goal"),
        ({"tasks": [{"goal": "x"}, {"goal": ""}]}, "tasks[1].goal is empty"),
        ({"tasks": [{"context": "x"}]}, "missing required field `goal` - at `$.tasks[0]`"),
        ({"tasks": "nonsense"}, "tasks is not a JSON array"),
        ({"tasks": ["x"]}, "Expected `object`, got `str` - at `$.tasks[0]`"),
        ({"tasks": [{"goal": "x"}] * 4}, "4 tasks are more than max_concurrent_children (3)"),
    ],
)
async def test_wrong_tasks_are_refused(family: Family, arguments: dict[str, Any], words: str) -> None:
    """TOOL-106: what cannot be delegated is an error that says what would be right, and no child is started."""
    result = await family.delegate(**arguments)
    assert words in result["error"]
    assert family.inherited == []


async def test_tasks_as_text_and_over_goal(family: Family) -> None:
    """TOOL-103, TOOL-106: tasks may be JSON text, and win over goal."""
    result = await family.delegate(goal="say no", tasks='[{"goal": "say yes"}]')
    assert [entry["summary"] for entry in result["results"]] == ["yes"]


async def test_a_pause_refuses_new_children(family: Family) -> None:
    """TOOL-106: the operator can pause delegation."""
    assert "paused" in (await with_limits(family, paused=True).delegate(goal="say x"))["error"]


async def test_depth_and_roles(family: Family) -> None:
    """TOOL-108 to TOOL-110: leaves cannot delegate; an orchestrator can, as deep as allowed; unknown roles are leaves."""
    await family.delegate(goal="say x", role="orchestrator")
    assert family.tools_of_children == [{"nap"}]
    deep = with_limits(family, max_spawn_depth=2)
    result = await deep.delegate(
        tasks=[{"goal": "more say inner", "role": "orchestrator"}, {"goal": "say leaf", "role": "boss"}]
    )
    inner = msgspec.json.decode(result["results"][0]["summary"].removeprefix("result: "))
    assert inner["results"][0]["summary"] == "inner"
    assert {"nap", "delegate_task"} in deep.tools_of_children
    assert deep.tools_of_children.count({"nap"}) == 2
    off = with_limits(family, max_spawn_depth=2, orchestrators=False)
    await off.delegate(goal="say x", role="orchestrator")
    assert off.tools_of_children == [{"nap"}]


async def test_a_child_s_children_are_never_in_the_background(family: Family) -> None:
    """TOOL-105: what a child delegates runs inside the child, whatever it asked for."""
    deep = with_limits(family, max_spawn_depth=2)
    result = await deep.delegate(goal="background say inner", role="orchestrator")
    inner = msgspec.json.decode(result["results"][0]["summary"].removeprefix("result: "))
    assert "synchronously" in inner["note"]
    assert inner["results"][0]["summary"] == "inner"


async def test_a_child_s_time(family: Family) -> None:
    """TOOL-112, H12: a child's time limit is at least 30 s; when it is over everything of the child is over, before the result is told."""
    short = with_limits(family, child_seconds=1)
    began = trio.current_time()
    result = await short.delegate(tasks=[{"goal": "nap 100"}, {"goal": "say ok"}])
    assert trio.current_time() - began == pytest.approx(30)
    late, fine = result["results"]
    assert (late["status"], late["exit_reason"]) == ("timeout", "timeout")
    assert late["error"]
    assert fine["status"] == "completed"
    assert short.model.open == 0
    assert DelegationSettings(child_seconds=0).child_budget is None
    assert DelegationSettings(child_seconds=-1).child_budget is None


async def test_long_summaries_are_shortened(family: Family) -> None:
    """TOOL-118: a summary above its share keeps three quarters of its beginning and one of its end."""
    result = await family.delegate(goal="say " + "a" * 30_000 + "END")
    (entry,) = result["results"]
    assert entry["summary_truncated"] is True
    assert entry["summary"].endswith("END")
    assert len(entry["summary"]) < 24_200


async def test_the_usage_of_children_is_their_parent_s(family: Family) -> None:
    """TOOL-121: what synchronous children use is on the parent's account."""
    outcome = await family.ask('call {"tasks": [{"goal": "say a"}, {"goal": "say b"}]}')
    assert outcome.usage.api_calls == 4
    assert outcome.usage.input_tokens == 40


# -- background ------------------------------------------------------------------------------------------------------------------


async def test_background_returns_at_once_and_reports_once(family: Family) -> None:
    """TOOL-122, TOOL-123, TOOL-132: a batch is one unit: dispatched at once, and one message when the last child has ended."""
    began = trio.current_time()
    sent = await family.delegate(tasks=[{"goal": "think 10"}, {"goal": "fail"}], background=True)
    assert trio.current_time() == began
    assert (sent["status"], sent["mode"], sent["count"]) == ("dispatched", "background", 2)
    assert sent["goals"] == ["think 10", "fail"]
    assert sent["delegation_id"].startswith("deleg_")
    notice = await family.notice()
    assert trio.current_time() - began == pytest.approx(10)
    assert notice.notice is NoticeKind.DELEGATION
    assert notice.text.startswith(f"[ASYNC DELEGATION BATCH COMPLETE - {sent['delegation_id']}]")
    assert "✓ 1/2 think 10" in notice.text
    assert "thinking done" in notice.text
    assert "✗ 2/2 fail" in notice.text
    assert "too busy" in notice.text
    assert "Status: completed" in notice.text
    assert notice.payload["status"] == "completed"
    assert (await family.runtime.store.backlog())["inbox"] == 0


async def test_a_batch_that_failed_altogether(family: Family) -> None:
    """TOOL-131: the status is error only if every child failed."""
    sent = await family.delegate(goal="fail", background=True)
    notice = await family.notice()
    assert notice.text.startswith(f"[ASYNC DELEGATION COMPLETE - {sent['delegation_id']}]")
    assert "Status: error" in notice.text
    job = await family.runtime.store.get_job(sent["delegation_id"])  # type: ignore[attr-defined]
    assert job.state is JobState.FAILED


async def test_a_later_stop_of_the_parent_does_not_touch_a_background_batch(family: Family) -> None:
    """H1, TOOL-126: a background batch listens only to its own scope; the parent's next turn is stopped, the results are real."""
    await family.delegate(goal="think 10", background=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(family.ask, "think 1000")
        await wait_all_tasks_blocked()
        (turn,) = (turn for turn in family.runtime.core.live_turns.values() if turn.context.session_id == "s1")
        assert (await turn.stop()).ok
    notice = await family.notice()
    assert "✓ 1/1 think 10" in notice.text


async def test_a_batch_that_is_stopped_tells_what_it_had(family: Family) -> None:
    """TOOL-127, TOOL-128: stopping the session stops its batches and theirs only; the message says what was finished."""
    sent = await family.delegate(tasks=[{"goal": "say early"}, {"goal": "nap 1000"}], background=True)
    await wait_all_tasks_blocked()
    receipts = await family.runtime.supervisor.stop_session("s1", Cause(CancelCause.STOP))
    assert all(receipt.ok for receipt in receipts)
    notice = await family.notice()
    assert "✓ 1/2 say early" in notice.text
    assert "✗ 2/2 nap 1000" in notice.text
    assert "interrupted" in notice.text
    job = await family.runtime.store.get_job(sent["delegation_id"])  # type: ignore[attr-defined]
    assert job.state is JobState.KILLED
    assert family.model.open == 0


async def test_without_a_channel_the_children_run_synchronously(family: Family) -> None:
    """TOOL-124: on a stateless turn background work is done within the turn, and a note says so."""
    result = await family.delegate(goal="think 5", background=True, stateless=True)
    assert result["results"][0]["summary"] == "thinking done"
    assert "cannot deliver" in result["note"]
    assert not family.runtime.supervisor.jobs()


async def test_a_full_pool_runs_inline_and_can_be_stopped(family: Family) -> None:
    """H9, TOOL-124: when the pool is full the batch runs inside the turn, where stop reaches it; work is never refused."""
    for _ in range(3):
        assert (await family.delegate(goal="think 1000", background=True))["status"] == "dispatched"
    outcomes: list[Outcome] = []

    async def ask() -> None:
        outcomes.append(await family.ask('call {"goal": "nap 1000", "background": true}'))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        turns = list(family.runtime.core.live_turns.values())
        (parent,) = (turn for turn in turns if turn.context.session_id == "s1")
        began = trio.current_time()
        receipt = await parent.stop()
        assert trio.current_time() == began
        assert receipt.ok
        assert sum(line.kind == "turn" for line in receipt.lines) == 2
    assert outcomes[0].cause is not None
    assert len(family.runtime.supervisor.jobs()) == 3
    await family.runtime.stop_session("s1")


async def test_parallel_dispatches_share_the_pool(family: Family) -> None:
    """H10: slots are taken before anything else happens, so parallel calls of one answer cannot take more than there are."""
    small = with_limits(family, max_concurrent_children=1)
    call_ = '{"goal": "think 5", "background": true}'

    async def both(request: ModelRequest) -> Sequence[Step]:
        await trio.lowlevel.checkpoint()
        return [ToolCall(id=f"c{n}", name="delegate_task", arguments=call_) for n in range(2)]

    small.model.answers.insert(0, both)
    await small.ask("go")
    results = [
        msgspec.json.decode(message.text)
        for message in await family.runtime.store.load_history("s1")
        if message.role == "tool"
    ]
    assert sorted("status" in result for result in results) == [False, True]
    assert "is the limit" in next(result["note"] for result in results if "results" in result)


async def test_a_slot_is_free_after_every_end(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """H10: a dispatch that cannot be written down, a batch that fails, and one that is stopped all give their slot back."""
    small = with_limits(family, max_concurrent_children=1)

    async def locked(*_: object) -> None:
        raise OSError("database is locked")

    with monkeypatch.context() as patch:
        patch.setattr(family.runtime.store, "start_job", locked)
        assert "locked" in (await small.delegate(goal="say x", background=True))["error"]
    assert small.delegation._background == 0
    assert (await small.delegate(goal="fail", background=True))["status"] == "dispatched"
    await small.notice()
    await wait_all_tasks_blocked()
    assert (await small.delegate(goal="nap 1000", background=True))["status"] == "dispatched"
    await family.runtime.stop_session("s1")
    assert small.delegation._background == 0
    assert not family.runtime.supervisor.jobs()


# -- cancellation ----------------------------------------------------------------------------------------------------------------


async def test_stopping_a_parent_stops_its_children_at_once_and_keeps_what_they_had(family: Family) -> None:
    """H2, TOOL-125: a stop reaches synchronous children recursively and at once; finished and partial results are in the transcript."""
    deep = with_limits(family, max_spawn_depth=2)
    tasks = [{"goal": "say finished"}, {"goal": "think 1000"}, {"goal": "more nap 1000", "role": "orchestrator"}]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(deep.ask, f"call {msgspec.json.encode({'tasks': tasks}).decode()}")
        await wait_all_tasks_blocked()
        (parent,) = (turn for turn in family.runtime.core.live_turns.values() if turn.context.session_id == "s1")
        began = trio.current_time()
        receipt = await parent.stop()
    assert receipt.ok
    assert trio.current_time() == began
    assert sum(line.kind == "turn" for line in receipt.lines) == 4
    history = await family.runtime.store.load_history("s1")
    kept = msgspec.json.decode(next(message.text for message in history if message.role == "tool"))
    first, second, third = kept["results"]
    assert (first["status"], first["summary"]) == ("completed", "finished")
    assert (second["status"], second["summary"]) == ("interrupted", "thinking ")
    assert third["status"] == "interrupted"
    assert "stopped" in kept["note"]
    assert deep.model.open == 0


async def test_children_carry_their_own_identity(family: Family) -> None:
    """H11: a child has its conversation's key and routing, and a session of its own."""
    seen: list[SessionContext] = []

    async def child(turn: Turn) -> str:
        seen.append(turn.context)
        return "seen"

    family.runtime.core.agent = child
    await family.runtime.run_turn(
        TurnInput(text='call {"goal": "look"}'),
        SessionContext(
            session_id="s1", session_key="agent:main:telegram:dm:7", platform="telegram", chat_id="7", thread_id="3"
        ),
        agent=family.agent,
    )
    (context,) = seen
    assert (context.platform, context.chat_id, context.thread_id) == ("telegram", "7", "3")
    assert context.session_key == "agent:main:telegram:dm:7"
    assert context.session_id.startswith("s1.")


async def test_a_batch_reports_to_the_conversation_that_started_it(family: Family, fake_adapter: FakeAdapter) -> None:
    """TOOL-133, TOOL-134: the report becomes a turn of the originating chat, with its thread and anchor."""
    await fake_adapter.say("background think 5", chat="7", thread_id="t1", message_id="m1")
    first, second = await fake_adapter.wait_for(2)
    assert "dispatched" in first.text
    assert second.text.startswith("noted [ASYNC DELEGATION COMPLETE")
    assert second.context == first.context
    assert (second.context.chat_id, second.context.thread_id, second.context.message_id) == ("7", "t1", "m1")


async def test_a_report_does_not_revive_an_ended_session(family: Family) -> None:
    """TOOL-134: the end of the session stops its batches, and nothing is told to it any more."""
    await family.delegate(goal="nap 1000", background=True)
    await family.runtime.supervisor.stop_session("s1", Cause(CancelCause.SESSION_ENDED))
    assert (await family.runtime.store.backlog())["inbox"] == 0


async def test_previews_and_schema(family: Family) -> None:
    """TOOL-103, TOOL-104: the model may say goal, context, tasks, role and background, and people see the goal."""
    assert set(family.delegation.spec.parameters["properties"]) == {"goal", "context", "tasks", "role", "background"}
    assert family.delegation.preview('{"goal": "tidy up"}') == "tidy up"
