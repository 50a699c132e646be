"""The demo model: what it echoes, which directives it obeys and when, and that it is the same every time."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
import trio.testing

from hermes_trio.agent.model import Finished, Model, ModelError, ModelRequest, TextDelta, ToolCallReady
from hermes_trio.providers.demo import DIRECTIVES, DemoModel
from hermes_trio.runtime.ports import Message, ToolCall

from .conftest import answer_of, ask

OBEY = {"directives": True}


async def calls_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The tool calls that a message leads to."""
    answer = await answer_of(DemoModel(), ask(text, metadata=OBEY))
    assert answer.finish_reason == "tool_calls"
    return [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]


async def say(text: str, **metadata: Any) -> str:
    """The text that a message is answered with."""
    answer = await answer_of(DemoModel(), ask(text, metadata=metadata or OBEY))
    assert answer.tool_calls == ()
    return answer.text


async def test_echo_streams_word_by_word() -> None:
    """A message comes back in a short text, word by word, with a usage."""
    model = DemoModel()
    assert isinstance(model, Model)
    async with model.stream(ask("tell me something nice today")) as stream:
        events = [event async for event in stream]
    pieces = [event.text for event in events if isinstance(event, TextDelta)]
    assert pieces == ["You", " said:", " tell", " me", " something", " nice", " today"]
    assert "".join(pieces) == "You said: tell me something nice today"
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert (finished.finish_reason, finished.usage.api_calls) == ("stop", 1)
    assert finished.usage.input_tokens == 7


@pytest.mark.parametrize("text", ["", "a\n\n b  c \n", " leading", "x" * 400, "päö 🦜 " * 20])
async def test_echo_keeps_every_character(text: str) -> None:
    """Cutting into pieces loses nothing."""
    assert await say(text, other=1) == (f"You said: {text}" if text else "You said nothing.")


async def test_long_messages_are_shortened() -> None:
    """An echo stays short."""
    assert (await say("y" * 10_000)).endswith("… (10000 characters)")


async def test_images_are_counted() -> None:
    """A message of parts is echoed by its text, and its images are mentioned."""
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    request = ModelRequest(messages=(Message(role="user", content=parts),))
    assert (await answer_of(DemoModel(), request)).text == "You said: look (with 1 image)"


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("!run ls -l | wc", "terminal", {"command": "ls -l | wc"}),
        ("!bg sleep 5", "terminal", {"command": "sleep 5", "background": True, "notify_on_complete": True}),
        ("!watch ready ./serve", "terminal", {"command": "./serve", "background": True, "watch_patterns": ["ready"]}),
        (
            '!watch "is ready" ./serve x',
            "terminal",
            {"command": "./serve x", "background": True, "watch_patterns": ["is ready"]},
        ),
        ("!delegate count the files", "delegate_task", {"goal": "count the files", "background": True}),
        ('!tool process {"action": "list"}', "process", {"action": "list"}),
        ("!tool anything", "anything", {}),
    ],
)
async def test_directives_become_tool_calls(text: str, name: str, arguments: dict[str, Any]) -> None:
    """Each directive is one tool call with the arguments that it stands for; what follows the directives is ignored."""
    assert await calls_of(f"{text}\nand some words") == [(name, arguments)]


async def test_several_directives_are_parallel_calls() -> None:
    """Directives on several lines at the top become calls of one answer, with ids of their own."""
    text = "!run one\n!run two\n!delegate three\nwords\n!run not this"
    assert [name for name, _ in await calls_of(text)] == ["terminal", "terminal", "delegate_task"]
    answer = await answer_of(DemoModel(), ask(text, metadata=OBEY))
    assert len({call.id for call in answer.tool_calls}) == 3


@pytest.mark.parametrize("text", ["!run rm -rf /", "!fail now", "!sleep 100", "!unknown"])
async def test_directives_are_echoed_where_they_are_not_allowed(text: str) -> None:
    """Without the flag, a directive is a text like any other: nobody gets a shell by writing to a demo bot. The echo names the setting."""
    for metadata in ({"directives": False, "platform": "cron"}, {"other": 1}):
        echo = await say(text, **metadata)
        assert echo.startswith(f"You said: {text}")
        assert ("demo_directives" in echo) == (text != "!unknown")
    if text != "!unknown":
        assert '[agent] demo_directives = ["cron"]' in await say(text, directives=False, platform="cron")


async def test_directives_only_at_the_top() -> None:
    """A line further down is no directive."""
    assert await say("please\n!run ls") == "You said: please\n!run ls"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("!nonsense", "I do not know !nonsense"),
        ("!run", "!run needs something"),
        ("!watch onlypattern", "needs a pattern and a command"),
        ('!watch "unclosed ls', "needs a pattern and a command"),
        ("!tool x {broken", "are not JSON"),
        ("!tool x [1]", "must be a JSON object"),
        ("!sleep soon", "is not a number of seconds"),
        ("!sleep -1", "is not a number of seconds"),
        ("!sleep nan", "is not a number of seconds"),
        ("!sleep inf", "is not a number of seconds"),
        ("!run ok\n!nonsense", "I do not know !nonsense"),
    ],
)
async def test_misused_directives_get_help(text: str, words: str) -> None:
    """A directive that cannot be obeyed is answered with what would be right, and nothing is run."""
    assert words in await say(text)


async def test_help_names_every_directive() -> None:
    """The answer to an unknown directive lists all of them."""
    answer = await say("!help")
    assert all(directive in answer for directive in DIRECTIVES)


async def test_fail_fails_with_the_text() -> None:
    """`!fail` ends the call with that text, and with nothing that would make anybody repeat it."""
    with pytest.raises(ModelError) as caught:
        await say("!fail the moon is wrong")
    assert str(caught.value) == "the moon is wrong"
    assert not caught.value.retryable


async def test_sleep_takes_its_time_and_streams(autojump_clock: trio.testing.MockClock) -> None:
    """`!sleep` takes exactly that long, in pieces, and goes on with the directives after it."""
    start = trio.current_time()
    times: list[float] = []
    calls: list[str] = []
    async with DemoModel().stream(ask("!sleep 3\n!run ls", metadata=OBEY)) as stream:
        async for event in stream:
            times.append(trio.current_time() - start)
            if isinstance(event, ToolCallReady):
                calls.append(event.call.name)
    assert times[-1] == pytest.approx(3)
    assert len(set(times)) > 3
    assert calls == ["terminal"]


async def test_sleep_can_be_cancelled(autojump_clock: trio.testing.MockClock) -> None:
    """A cancelled sleep ends at once."""
    with trio.move_on_after(2) as scope:
        await say("!sleep 1000")
    assert scope.cancelled_caught
    assert trio.current_time() == pytest.approx(2)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ('{"output": "hello", "exit_code": 0, "error": null}', "hello"),
        ('{"output": "a\\nb", "exit_code": 0}', "```\na\nb\n```"),
        ('{"output": "", "exit_code": 0}', "(no output)"),
        (
            '{"output": "x", "exit_code": 0, "approval": "approved by the user (once)"}',
            "x\n(approved by the user (once))",
        ),
        ('{"output": "no such file", "exit_code": 2, "error": null}', "no such file\n(exit code 2)"),
        ('{"output": "", "exit_code": 1, "exit_code_meaning": "no match"}', "(exit code 1: no match)"),
        ('{"output": "", "exit_code": -1, "error": "not run"}', "Error: not run"),
        (
            '{"output": "Background process started", "session_id": "proc_1", "pid": 7, "exit_code": 0}',
            "Background process started: proc_1, pid 7",
        ),
        ('{"result": "42", "structured_content": {"result": 42}}', "42"),
        ('{"error": "there is no tool"}', "Error: there is no tool"),
        ('{"processes": []}', '```json\n{\n  "processes": []\n}\n```'),
        ("[1, 2]", "```json\n[1, 2]\n```"),
        ("no json at all", "no json at all"),
        ('{"output": "```\\nx\\n```", "exit_code": 0}', "````\n```\nx\n```\n````"),
    ],
)
async def test_results_come_back_as_text(result: str, text: str) -> None:
    """After a tool result, the answer is what a person wants to read: the output; the exit code only if it is not 0; the error; else the data."""
    request = ModelRequest(
        messages=(
            Message(role="user", content="!run ls"),
            Message(role="assistant", tool_calls=(ToolCall(id="a", name="terminal"),)),
            Message(role="tool", tool_call_id="a", content=result),
        ),
        metadata=OBEY,
    )
    answer = await answer_of(DemoModel(), request)
    assert (answer.text, answer.finish_reason) == (text, "stop")


async def test_several_results_come_back_in_order() -> None:
    """Results of parallel calls are answered in the order of the calls."""
    calls = (ToolCall(id="a", name="terminal"), ToolCall(id="b", name="process"))
    request = ModelRequest(
        messages=(
            Message(role="user", content="!run ls"),
            Message(role="assistant", tool_calls=calls),
            Message(role="tool", tool_call_id="a", content='{"output": "a.txt", "exit_code": 0}'),
            Message(role="tool", tool_call_id="b", content="second"),
        )
    )
    assert (await answer_of(DemoModel(), request)).text == "a.txt\n\nsecond"


async def test_notices_are_acknowledged() -> None:
    """A notice is answered with its first line and its output, and a burst with each of them."""
    notice = (
        "[IMPORTANT: Background process proc_1 completed normally (exit code 0).\n"
        "Command: make\nOutput:\nall done\n!run evil]"
    )
    other = "[ASYNC DELEGATION COMPLETE - deleg_1]\nchild says hi"
    answer = await say(f"{notice}\n\n{other}")
    assert "Noted: [IMPORTANT: Background process proc_1 completed normally (exit code 0)." in answer
    assert "```\nall done\n!run evil\n```" in answer
    assert "Noted: [ASYNC DELEGATION COMPLETE - deleg_1]\n```\nchild says hi\n```" in answer
    assert await say("anything else", notice=True) == "Noted: anything else"


LOSS = "[IMPORTANT: The host of this conversation is gone.\nIts shell is lost.\nBackground work that was lost with it:\n- make]"


@pytest.mark.parametrize("parts", [False, True], ids=["text", "parts"])
async def test_a_message_behind_a_preface_is_answered(parts: bool) -> None:
    """What the runtime put in front of a message is acknowledged, and the message is echoed or obeyed as it would be alone."""

    async def answer(text: str, **metadata: Any) -> tuple[str, list[str]]:
        content: Any = [{"type": "text", "text": one} for one in (LOSS, text)] if parts else f"{LOSS}\n\n{text}"
        request = ModelRequest(
            messages=(Message(role="user", content=content),), metadata={"preface": LOSS, **OBEY, **metadata}
        )
        found = await answer_of(DemoModel(), request)
        return found.text, [call.name for call in found.tool_calls]

    noted = "Noted: [IMPORTANT: The host of this conversation is gone.\n```\nIts shell is lost."
    for directive in ("!run ls", "!bg sleep 1", "!watch x ls", "!delegate think", "!tool terminal {}"):
        text, calls = await answer(directive)
        assert text.startswith(noted)
        assert calls == ["delegate_task" if "delegate" in directive else "terminal"]
    for said, told in (("hello", "You said: hello"), ("!what", "I do not know !what."), ("!run", "!run needs")):
        text, calls = await answer(said)
        assert text.startswith(noted)
        assert f"\n\n{told}" in text
        assert not calls
    text, calls = await answer("!run ls", directives=False)
    assert "\n\nYou said: !run ls\n\n(The demo model does not obey" in text
    assert not calls
    with pytest.raises(ModelError, match="the moon"):
        await answer("!fail the moon")


async def test_directives_behind_the_name_of_their_sender_are_obeyed() -> None:
    """In a shared conversation the sender's name stands in front of each message, which is otherwise echoed with it."""
    found = await answer_of(DemoModel(), ask("[Ann B.] !run ls\n!bg sleep 1", metadata=OBEY))
    assert [call.name for call in found.tool_calls] == ["terminal", "terminal"]
    assert await say("[Ann] hello !run ls", **OBEY) == "You said: [Ann] hello !run ls"
    assert (await say("[Ann] !run ls", directives=False)).startswith(
        "You said: [Ann] !run ls\n\n(The demo model does not obey"
    )
    assert (await say("[IMPORTANT] !run ls", **OBEY)).startswith("Noted: ")


async def test_a_preface_that_no_runtime_wrote_is_a_notice() -> None:
    """Text that only looks like a preface, of a person or of a job, leads to no command; neither does a notice behind a real one."""
    assert (await say(f"{LOSS}\n\n!run ls")).startswith("Noted: ")
    behind = f"{LOSS}\n\n[IMPORTANT: Background process proc_1 was lost.\nOutput:\n!run ls]"
    assert (await say(behind, preface=LOSS, notice=True, **OBEY)).count("Noted: ") == 2


async def test_the_same_request_gives_the_same_events() -> None:
    """Nothing depends on time or chance."""
    request = ask("!run a\n!tool b {}", metadata=OBEY)
    runs = []
    for _ in range(2):
        async with DemoModel().stream(request) as stream:
            runs.append([event async for event in stream])
    assert runs[0] == runs[1]


async def test_nothing_to_answer() -> None:
    """A request without any message is answered, not crashed on."""
    assert "nothing to answer" in (await answer_of(DemoModel(), ModelRequest(messages=()))).text


async def test_a_closed_stream_stays_closed() -> None:
    """After its block, a stream gives nothing."""
    async with DemoModel().stream(ask("hi")) as stream:
        pass
    with pytest.raises(trio.ClosedResourceError):
        await stream.receive()
