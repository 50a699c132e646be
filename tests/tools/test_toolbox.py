"""All tools together, through the real agent loop with the demo model: the three gates of delivery, children and their processes, settings."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import trio

from hermes_trio import SessionContext, Turn, TurnInput, TurnSpec
from hermes_trio.base.settings import SettingsError
from hermes_trio.runtime.outcome import JobState
from hermes_trio.testing.fakes import FakeAdapter
from hermes_trio.tools.registry import tool
from hermes_trio.tools.settings import ToolSettings
from hermes_trio.tools.toolbox import NAMES

from .bench_of_tools import Bench, call, gone, open_bench, open_demo, tool_results, until


async def say(bench: Bench, text: str, *, session: str = "s1", stateless: bool = False) -> list[dict[str, Any]]:
    """A turn of the real agent; the results of its tools."""
    context = SessionContext(session_id=session, session_key=session, platform="test")
    before = len(await bench.runtime.store.load_history(session))
    if stateless:
        outcome = await bench.runtime.stateless.run_turn(TurnSpec(input=TurnInput(text=text), context=context))
    else:
        outcome = await bench.runtime.run_turn(text, context)
    assert outcome.ok, outcome
    return tool_results((await bench.runtime.store.load_history(session))[before:])


# -- the three gates of delivery -------------------------------------------------------------------------------------------------


async def test_gate_one_a_stateless_turn() -> None:
    """Stateless: the process runs, nothing is watched, a note says so, and poll works in a later turn."""
    async with open_demo() as bench:
        (started,) = await say(bench, "!bg echo hello; sleep 30", stateless=True)
        assert started["notify_on_complete"] is False
        assert "process(action='poll')" in started["notify_unsupported"]
        record = bench.box.processes.find(started["session_id"], "s1")
        assert record is not None
        assert not record.job.watched
        await until(lambda: record.output.total)
        poll = msgspec.json.encode({"action": "poll", "session_id": started["session_id"]}).decode()
        (polled,) = await say(bench, f"!tool process {poll}", stateless=True)
        assert (polled["status"], polled["output_preview"]) == ("running", "hello\n")
        kill = msgspec.json.encode({"action": "kill", "session_id": started["session_id"]}).decode()
        (killed,) = await say(bench, f"!tool process {kill}", stateless=True)
        assert killed["status"] == "killed"
        assert (await bench.runtime.store.backlog())["inbox"] == 0


async def test_gate_two_a_delivering_turn() -> None:
    """Delivering: the notice becomes a turn of the same conversation, with its platform, chat, thread and anchor."""
    async with open_demo() as bench, FakeAdapter().connect(bench.runtime) as adapter:
        await adapter.say("!bg echo finished", chat="42", thread_id="t1", user_id="u", message_id="m5")
        first, second = await adapter.wait_for(2)
        (started,) = tool_results(await bench.runtime.store.load_history(first.context.session_id))
        assert started["notify_on_complete"] is True
        assert f"Background process {started['session_id']} completed normally (exit code 0)" in second.text
        assert "finished" in second.text
        assert second.context == first.context
        assert (second.context.platform, second.context.chat_id, second.context.thread_id) == (
            adapter.platform,
            "42",
            "t1",
        )
        assert second.context.message_id == "m5"
        history = await bench.runtime.store.load_history(second.context.session_id)
        assert [message.role for message in history] == ["user", "assistant", "tool", "assistant", "user", "assistant"]
        assert (await bench.runtime.store.backlog())["inbox"] == 0


async def test_gate_three_bare_use() -> None:
    """Outside any turn delivery is supported, and the in-process channel carries it."""
    async with open_demo() as bench:
        started = await bench.box.terminal("echo bare", background=True, notify_on_complete=True)
        assert started["notify_on_complete"] is True
        with trio.fail_after(10):
            notice = await bench.runtime.completions().__anext__()
        assert notice.job_id == started["session_id"]


async def test_the_interface_of_the_turn_decides_and_not_the_session() -> None:
    """A session first used statelessly and then through an adapter delivers there."""
    async with open_demo() as bench, FakeAdapter().connect(bench.runtime) as adapter:
        await adapter.say("hello", chat="1")
        (reply,) = await adapter.wait_for(1)
        session = reply.context.session_id
        (silent,) = await say(bench, "!bg true", session=session, stateless=True)
        assert "notify_unsupported" in silent
        await adapter.say("!bg true", chat="1")
        replies = await adapter.wait_for(3)
        assert "completed normally" in replies[2].text


async def test_a_busy_conversation_is_not_interrupted() -> None:
    """TOOL-89, TOOL-95, H19: a notice that comes while a turn runs waits for its end and becomes a turn of its own."""
    async with open_demo() as bench, FakeAdapter().connect(bench.runtime) as adapter:
        await adapter.say("!bg true")
        await adapter.wait_for(1)
        await adapter.say("!sleep 1")
        replies = await adapter.wait_for(3)
        texts = [reply.text for reply in replies[1:]]
        assert sorted("Sleeping" in text for text in texts) == [False, True]
        assert sum("completed normally" in text for text in texts) == 1


async def test_several_tools_at_once() -> None:
    """Parallel tool calls of one message, through the loop: foreground, background and the list."""
    async with open_demo() as bench:
        one, two, three = await say(bench, "!run echo one\n!bg sleep 30\n!tool nothing {}")
        assert one["output"] == "one"
        assert two["session_id"]
        assert "there is no tool 'nothing'" in three["error"]


# -- children --------------------------------------------------------------------------------------------------------------------


async def test_a_child_s_processes_end_with_the_child() -> None:
    """H14: what a subagent started in the background is owned by it: gone when it has ended, and it is told so beforehand."""
    async with open_bench() as bench:
        started: list[dict[str, Any]] = []

        async def child(turn: Turn) -> str:
            arguments = {"command": "sleep 60", "background": True, "notify_on_complete": True}
            started.append(await call(bench.box, turn, "terminal", arguments))
            return "left it running"

        async def body(turn: Turn) -> None:
            outcome = await turn.run_child("start something", agent=child)
            assert outcome.ok

        await bench.in_turn(body)
        assert started[0]["notify_on_complete"] is False
        assert "end with the child" in started[0]["notify_unsupported"]
        assert gone(started[0]["pid"])
        assert not bench.runtime.supervisor.jobs()
        job = await bench.runtime.store.get_job(started[0]["session_id"])  # type: ignore[attr-defined]
        assert job.state is JobState.KILLED


async def test_a_child_starts_in_its_parent_s_directory_and_goes_its_own_way() -> None:
    """TOOL-18: a subagent begins where its parent is; its own `cd` and exports stay its own."""
    async with open_demo() as bench:
        await say(bench, "!run cd /usr; export A=parent")
        goal = "!run pwd; echo [$A]; cd /; export A=child"
        (delegated,) = await say(bench, f"!tool delegate_task {msgspec.json.encode({'goal': goal}).decode()}")
        assert "/usr\n[]" in delegated["results"][0]["summary"]
        (after,) = await say(bench, "!run pwd; echo [$A]")
        assert after["output"] == "/usr\n[parent]"
        assert len(bench.box.shells) == 1


async def test_stopping_a_turn_with_children_ends_their_processes() -> None:
    """A stop of the parent's turn ends the foreground processes of its children, and the receipt names each of them."""
    async with open_demo() as bench:
        tasks = [{"goal": f"!run sleep 6{number}"} for number in range(3)]
        text = f"!tool delegate_task {msgspec.json.encode({'tasks': tasks}).decode()}"
        async with trio.open_nursery() as nursery:
            context = SessionContext(session_id="s1", session_key="s1")
            nursery.start_soon(bench.runtime.run_turn, text, context)
            await until(lambda: sum(process.pid > 0 for process in bench.box.warden.processes) == 3)
            pids = [process.pid for process in bench.box.warden.processes]
            (parent,) = (turn for turn in bench.runtime.core.live_turns.values() if turn.context.session_id == "s1")
            receipt = await parent.stop()
        assert receipt.ok
        hows = [line.how for line in receipt.lines if line.kind == "process"]
        assert len(hows) == 3
        assert set(hows) <= {"SIGTERM", "SIGKILL"}
        assert all(gone(pid) for pid in pids)
        history = await bench.runtime.store.load_history("s1")
        (kept,) = tool_results(history)
        assert [entry["status"] for entry in kept["results"]] == ["interrupted"] * 3


async def test_a_background_child_can_use_the_terminal_after_the_turn() -> None:
    """A background delegation works on when its turn is over, and reports with what its tools found."""
    async with open_demo() as bench, FakeAdapter().connect(bench.runtime) as adapter:
        await adapter.say("!delegate !run sleep 0.3; echo from the child")
        first, second = await adapter.wait_for(2)
        (dispatched,) = tool_results(await bench.runtime.store.load_history(first.context.session_id))
        assert dispatched["status"] == "dispatched"
        assert "ASYNC DELEGATION COMPLETE" in second.text
        assert "from the child" in second.text


# -- closing ---------------------------------------------------------------------------------------------------------------------


async def test_closing_ends_everything_together() -> None:
    """H28: many stubborn processes end in one grace, not one after the other, and the loop stays free."""
    async with open_bench(table={"terminal": {"kill_grace": 0.5, "max_processes_per_session": 64}}) as bench:
        pids: list[int] = []
        for _ in range(12):
            started = await bench.run("trap '' TERM; echo up; while :; do sleep 1; done", background=True)
            record = bench.box.processes.find(started["session_id"], "s1")
            assert record is not None
            await until(lambda record=record: record.output.total)
            pids.append(started["pid"])
        began = trio.current_time()
        report = await bench.runtime.drain(0)
        assert report.ok
        assert trio.current_time() - began < 5
    assert all(gone(pid) for pid in pids)


async def test_a_drain_refuses_new_processes_with_a_reason() -> None:
    """A turn that is still running while the runtime drains cannot start background work, and is told why."""
    async with open_bench() as bench:
        found: list[dict[str, Any]] = []

        async def body(turn: Turn) -> None:
            await bench.runtime.drain(0, asking=turn)
            found.append(await call(bench.box, turn, "terminal", {"command": "sleep 1", "background": True}))

        await bench.in_turn(body)
        assert (found[0]["exit_code"], "draining" in found[0]["error"]) == (-1, True)


# -- settings --------------------------------------------------------------------------------------------------------------------


async def test_tools_can_be_switched_off_and_added() -> None:
    """`disabled` takes tools away from every turn; a program's own tools are there beside the others."""

    @tool()
    async def greet(turn: Turn, name: str) -> dict[str, str]:
        """Greet somebody."""
        return {"greeting": f"hello {name}"}

    async with open_demo(table={"disabled": [name for name in NAMES if name != "process"]}, more=(greet,)) as bench:
        missing, present = await say(bench, '!run ls\n!tool greet {"name": "you"}')
        assert "there is no tool 'terminal'; the tools are: greet, process" in missing["error"]
        assert present == {"greeting": "hello you"}


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"terminal": {"timeout": 0}}, "tools.terminal.timeout is 0: expected `int` >= 1"),
        ({"terminal": {"timeuot": 5}}, "tools.terminal.timeuot is not a setting (did you mean timeout?)"),
        ({"terminal": {"kill_grace": "soon"}}, "tools.terminal.kill_grace is 'soon': expected `float`, got `str`"),
        ({"terminals": {}}, "tools.terminals is not a setting (did you mean terminal?)"),
        ({"delegation": {"max_spawn_depth": 0}}, "tools.delegation.max_spawn_depth is 0"),
        ({"disabled": ["everything"]}, "tools.disabled"),
        ({"terminal": 5}, "tools.terminal is 5: expected `object`"),
    ],
)
def test_mistakes_in_the_settings_are_named(table: dict[str, Any], words: str) -> None:
    """A mistake in `[tools]` says which key it is about, what stands there and what would be right."""
    with pytest.raises(SettingsError) as caught:
        ToolSettings.read(table)
    assert words in str(caught.value)


async def test_the_names_of_all_own_tools_are_reserved() -> None:
    """`NAMES` has every tool of the toolbox, so that no plugin can take the name of one."""
    found: set[str] = set()

    async def body(turn: Turn) -> None:
        found.update(bench.box.for_turn(turn))

    async with open_bench() as bench:
        await bench.in_turn(body)
    assert found == set(NAMES)
