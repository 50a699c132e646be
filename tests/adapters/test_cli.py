"""The terminal as a platform: how text is cut into blocks, what is shown once and what is shown again, and how a run ends."""

from __future__ import annotations

import io
from collections import deque
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from hermes_trio import Runtime, Turn
from hermes_trio.adapters.cli.chat import CLI, ChatAdapter, ResumeError, begin_session, end_session
from hermes_trio.adapters.cli.once import ExitCode, run_once
from hermes_trio.adapters.cli.screen import BlockStream, Screen
from hermes_trio.messaging.contract import Outgoing
from hermes_trio.runtime.outcome import CancelCause, Cause
from hermes_trio.runtime.ports import Reply
from tests.messaging.harness import memory_store, open_world, scripted, starts_job, works


class Typed:
    """Lines of a user; they end only when it is closed."""

    def __init__(self, *lines: str) -> None:
        self._lines = deque(lines)

    async def next(self) -> str | None:
        """The next line."""
        await trio.lowlevel.checkpoint()
        return self._lines.popleft() if self._lines else None


def plain_screen() -> tuple[Screen, io.StringIO]:
    """A screen without formatting, and what was written to it."""
    file = io.StringIO()
    return Screen(formatted=False, file=file), file


# The screen


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("one\ntwo\n\nthree", ["one\ntwo", "three"]),
        ("```py\na\n\nb\n```\nafter", ["```py\na\n\nb\n```", "after"]),
        ("~~~\n```\n\n~~~\n", ["~~~\n```\n\n~~~"]),
        ("```\nnever closed\n\nstill", ["```\nnever closed\n\nstill"]),
        ("\n\n\n", []),
    ],
)
def test_text_is_cut_where_a_block_is_complete(text: str, blocks: list[str]) -> None:
    """At a blank line outside a fence, and at the end of a fence."""
    stream = BlockStream()
    assert [*stream.feed(text), *stream.flush()] == blocks


@given(st.text(alphabet="ab \n`", max_size=60), st.lists(st.integers(1, 5), max_size=30))
def test_it_does_not_matter_in_which_pieces_the_text_comes(text: str, sizes: list[int]) -> None:
    """The blocks are the same."""
    whole = BlockStream()
    expected = [*whole.feed(text), *whole.flush()]
    pieces, rest = BlockStream(), text
    found: list[str] = []
    for size in sizes:
        found += pieces.feed(rest[:size])
        rest = rest[size:]
    assert [*found, *pieces.feed(rest), *pieces.flush()] == expected


def test_formatted_text_is_written_in_whole_lines_only() -> None:
    """So that a line that is being typed is not broken."""
    file = io.StringIO()
    screen = Screen(formatted=True, file=file)
    screen.stream("**half a ")
    assert file.getvalue() == ""
    screen.stream("sentence**\n\nand")
    assert file.getvalue().endswith("\n")
    assert "half a sentence" in file.getvalue()
    screen.end_stream()
    assert "and" in file.getvalue()


def test_no_answer_or_command_controls_the_terminal() -> None:
    """Text of a model, of a tool and of a remark: escape sequences are not passed on. A program that reads an answer from a pipe gets it as it is."""
    hostile = "a\x1b]0;title\x07\x1b[2Jb\u202ec"
    file = io.StringIO()
    live: list[str] = []
    screen = Screen(formatted=True, file=file, live=live.append)
    screen.stream(hostile)
    screen.end_stream()
    screen.say(hostile)
    screen.tool(hostile)
    screen.note(hostile)
    shown = file.getvalue() + "".join(live)
    assert shown.count("[2Jb c") == 5
    assert not {"\x1b", "\x07", "\u202e"} & set(shown)
    piped = io.StringIO()
    Screen(formatted=False, file=piped).say(hostile)
    assert piped.getvalue() == f"{hostile}\n"


def test_a_line_stays_a_line() -> None:
    """A list of commands, a poem and an address are not joined into one paragraph; long lines are wrapped all the same."""
    file = io.StringIO()
    screen = Screen(formatted=True, file=file)
    screen.say("Roses are *red*,\nviolets are blue.\n\n12 Some Street\nSome Town")
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert lines[:5] == ["Roses are red,", "violets are blue.", "", "12 Some Street", "Some Town"]


def test_what_is_being_written_is_shown_while_it_is_being_written() -> None:
    """Each piece of an unfinished block is handed on as it comes, and taken away when the block is written."""
    seen: list[str] = []
    screen = Screen(formatted=True, file=io.StringIO(), live=seen.append)
    for piece in ("one ", "two", "\n\nthree"):
        screen.stream(piece)
    screen.end_stream()
    assert seen == ["one ", "one two", "three", ""]


# The conversation


async def test_an_answer_that_was_streamed_is_not_shown_again(virtual_clock: object) -> None:
    """What is added at the end (a stop, a cut) is."""

    async def writes(turn: Turn) -> str:
        for word in ("hello ", "there"):
            turn.emit("message.delta", delta=word)
            await trio.sleep(1)
        return "hello there"

    screen, file = plain_screen()
    chat = ChatAdapter(screen, Typed("hi"), interactive=False)
    async with open_world(scripted(writes), chat) as world:
        chat.inbox = lambda: world.hub.messaging.inboxes[CLI]
        await chat.left.wait()
        await world.idle()
    assert file.getvalue() == "hello there\n"


async def test_an_answer_that_was_committed_and_not_shown_is_shown_the_next_time(
    virtual_clock: object, tmp_path: Path
) -> None:
    """With a word, because whether it was seen is not known."""
    screen, file = plain_screen()
    chat = ChatAdapter(screen, Typed(), interactive=False)
    await chat.send(Outgoing(chat_id="local", text="from the last life", payload={"turn": "turn_gone"}))
    assert file.getvalue() == "(from before; you may have seen it)\nfrom the last life\n"
    await chat.send(Outgoing(chat_id="local", text="a command's answer"))
    assert file.getvalue().endswith("\na command's answer\n")


async def test_stopping_by_key_shows_the_receipt(virtual_clock: object) -> None:
    """And says so when there is nothing to stop."""
    screen, file = plain_screen()
    lines = Typed("work")
    chat = ChatAdapter(screen, lines, interactive=False)
    async with open_world(scripted(works(1000)), chat) as world:
        chat.inbox = lambda: world.hub.messaging.inboxes[CLI]
        await trio.sleep(1)
        await chat.interrupt()
        assert "nothing of it runs any more" in file.getvalue()
        await world.idle()
        await chat.interrupt()
        assert "Nothing is running" in file.getvalue()


async def test_what_was_cut_off_is_marked_before_the_receipt(virtual_clock: object) -> None:
    """The text, "(stopped)", and then what the stop found: in the order in which it happened, and each once."""

    async def writes(turn: Turn) -> str:
        turn.emit("message.delta", delta="half an")
        turn.progress = Reply(text="half an", partial=True)
        await trio.sleep(1000)
        return "never"

    screen, file = plain_screen()
    chat = ChatAdapter(screen, Typed("work"), interactive=False)
    async with open_world(scripted(writes), chat) as world:
        chat.inbox = lambda: world.hub.messaging.inboxes[CLI]
        await trio.sleep(1)
        assert chat.status().startswith("… working for 1 s")
        await chat.interrupt()
        await world.idle()
        assert chat.status() == ""
    shown = file.getvalue()
    assert shown.startswith("half an\n(stopped)\nStopped in")
    assert shown.count("(stopped)") == shown.count("half an") == 1


async def test_models_are_chosen_by_name(virtual_clock: object) -> None:
    """`/model` says which one answers, `/model NAME` changes it for the turns that follow, an unknown name is an error; `/quit` leaves."""

    async def names(turn: Turn) -> str:
        return f"by {turn.input.model or 'the default'}"

    screen, file = plain_screen()
    lines = Typed("hi", "/model", "/model none", "/model big", "hi", "/help", "/quit", "never read")
    chat = ChatAdapter(screen, lines, interactive=False)
    chat.models = ("small", "big")
    async with open_world(scripted(names, names), chat) as world:
        chat.inbox = lambda: world.hub.messaging.inboxes[CLI]
        await chat.left.wait()
        await world.idle()
    shown = file.getvalue()
    assert "small answers. There are also: big." in shown
    assert "there is no model 'none'; there are: small, big" in shown
    assert "big answers. There are also: small." in shown
    assert "by big" in shown
    assert "/quit: leave" in shown
    assert lines._lines == deque(["never read"])


async def test_leaving_warns_once_while_something_runs(virtual_clock: object) -> None:
    """The second time it is meant."""
    screen, file = plain_screen()
    chat = ChatAdapter(screen, Typed(), interactive=True)
    chat.running = lambda: 2
    async with open_world(scripted(), chat):
        await chat.left.wait()
    assert file.getvalue() == "2 running in the background would be stopped. Ctrl-D or /quit again leaves.\n"


async def test_sessions_begin_resume_and_end(virtual_clock: object) -> None:
    """A new one each time, the last one or any by its id; one in which nothing was said is forgotten."""
    screen, _ = plain_screen()
    async with open_world(scripted(), ChatAdapter(screen, Typed(), interactive=False)) as world:
        store, inbox = world.store, world.hub.messaging.inboxes[CLI]

        async def leave() -> str:
            return await end_session(world.runtime, inbox)

        with pytest.raises(ResumeError, match="no conversation to resume"):
            await begin_session(store, "")
        empty = await begin_session(store, None)
        assert await leave() == ""
        assert await store.get_session(empty.id) is None
        first = await begin_session(store, None)
        await store.append_messages(first.id, [_message("hello")])
        assert await leave() == first.id
        second = await begin_session(store, None)
        assert second.id != first.id
        assert await leave() == ""
        assert (await begin_session(store, "")).id == first.id
        await leave()
        again = await begin_session(store, first.id)
        found = await store.get_session(first.id)
        assert found is not None
        assert (again.id, found.ended_at) == (first.id, None)
        with pytest.raises(ResumeError, match="there is no session 'nope'"):
            await begin_session(store, "nope")


def _message(text: str):
    from hermes_trio import Message

    return Message(role="user", content=text)


# One shot


async def test_a_run_waits_until_everything_has_settled(virtual_clock: object) -> None:
    """The report of background work is answered, and the session has ended."""
    screen, _ = plain_screen()
    async with Runtime(agent=scripted(starts_job(600), "all done"), store=memory_store()) as runtime:
        result = await run_once(runtime, "go", screen=screen)
        assert (result.exit_code, [one.text for one in result.outcomes]) == (
            ExitCode.COMPLETED,
            ["started", "all done"],
        )
        store = runtime.store
        session = await store.get_session(result.session_id)  # type: ignore[attr-defined]
        assert session.end_reason == "run_complete"
        assert runtime.lanes == 0
        assert result.as_dict()["text"] == "all done"


@pytest.mark.parametrize(
    ("step", "code"),
    [("fine", ExitCode.COMPLETED), (ValueError("x"), ExitCode.FAILED), (works(100), ExitCode.DEADLINE)],
)
async def test_the_exit_code_says_how_it_ended(virtual_clock: object, step: object, code: ExitCode) -> None:
    """Completed, failed, or over time."""
    async with Runtime(agent=scripted(step), store=memory_store()) as runtime:
        assert (await run_once(runtime, "go", screen=None, deadline=10)).exit_code is code


async def test_a_stopped_run_gives_the_receipt(virtual_clock: object) -> None:
    """Turn and background work are gone."""
    stop = trio.Event()
    async with Runtime(agent=scripted(works(1000)), store=memory_store()) as runtime:
        async with trio.open_nursery() as nursery:

            async def press() -> None:
                await trio.sleep(1)
                stop.set()

            nursery.start_soon(press)
            result = await run_once(runtime, "go", screen=None, stop=stop)
        assert result.exit_code is ExitCode.STOPPED
        assert result.receipt is not None
        assert result.receipt.ok
        assert result.receipt.cause == Cause(CancelCause.STOP, "Ctrl-C")
        assert result.as_dict()["status"] == "stopped"
