"""The contract of a turn's two transactions."""

from __future__ import annotations

import msgspec
import pytest

from hermes_trio.runtime.errors import SessionEnded
from hermes_trio.runtime.outcome import RunStatus, TurnState, Usage
from hermes_trio.runtime.ports import EventRow, Message, NewReply, ToolCall
from hermes_trio.store import (
    AlreadyStarted,
    IdempotencyConflict,
    IdempotentReply,
    SessionFilter,
    Store,
    StoredResponse,
)
from hermes_trio.testing.rows import inbox_states

from .conftest import Clock
from .turns import KEY, context, finish, message, notice, run, start


async def test_finish_alone_makes_the_session(store: Store) -> None:
    """A turn that was not acknowledged before is written in one commit, session included."""
    await store.finish_turn(finish(start(), "what is up?", "not much"))

    session = await store.get_session("s1")
    assert session is not None
    assert (session.source, session.session_key, session.preview) == ("telegram", KEY, "what is up?")
    assert (session.message_count, session.ended_at) == (2, None)
    assert [entry.text for entry in await store.load_history("s1")] == ["what is up?", "not much"]


async def test_counters_add_up_over_turns(store: Store) -> None:
    """Each turn adds its messages, tokens and calls to the session."""
    usage = Usage(input_tokens=10, output_tokens=3, cache_read_tokens=2, api_calls=1, tool_calls=4)
    for number in range(3):
        await store.finish_turn(finish(start(f"turn_{number}"), "q", "a", usage=usage))

    session = await store.get_session("s1")
    assert session is not None
    assert (session.message_count, session.tool_call_count, session.api_call_count) == (6, 12, 3)
    assert (session.input_tokens, session.output_tokens, session.cache_read_tokens) == (30, 9, 6)


async def test_messages_come_back_as_they_were(store: Store) -> None:
    """Structured content, tool calls, reasoning and platform ids survive; lone surrogates are replaced, not fatal, and so is NUL if need be."""
    messages = (
        Message(
            role="user", content=[{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "x"}}]
        ),
        Message(
            role="assistant",
            content="",
            tool_calls=(ToolCall(id="c1", name="terminal", arguments='{"command": "ls"}'),),
            reasoning="think",
            finish_reason="tool_calls",
            token_count=7,
        ),
        Message(role="tool", content="a\x00b", tool_call_id="c1", tool_name="terminal"),
        Message(role="assistant", content="żółć \ud800 漢字", platform_message_id="99", timestamp=5.0),
    )
    await store.finish_turn(finish(start(), messages=messages))

    loaded = await store.load_history("s1")
    plain = [msgspec.structs.replace(entry, timestamp=0.0) for entry in loaded[:3]]
    assert plain[:2] == list(messages[:2])
    assert msgspec.structs.replace(plain[2], content="a\x00b") == messages[2]
    assert plain[2].content in ("a\x00b", "a\ufffdb")
    assert (loaded[3].content, loaded[3].timestamp, loaded[3].platform_message_id) == ("żółć ? 漢字", 5.0, "99")


async def test_everything_of_a_turn_commits_together(store: Store) -> None:
    """Messages, reply, acknowledgements, run, events, stored response and session end are one transaction."""
    await store.resolve_session(context(""), source="telegram")
    taken = await store.accept_message(message("do it"))
    told = await store.add_notice(notice(session_id="s1"))
    assert taken is not None
    begun = start(run=run(tenant="t"), inbox_ids=(taken, told), one_shot=True)
    await store.begin_turn(begun)
    await store.finish_turn(
        finish(
            begun,
            "do it",
            "done",
            outbox=(NewReply(platform="telegram", target={"chat_id": "42"}, text="done"),),
            acknowledged=(told,),
            events=(EventRow(run_id="run_1", epoch="e", number=1, event={"event": "run.completed"}),),
            end_session="webhook_complete",
            also=(
                StoredResponse(id="resp_1", tenant="t", session_id="s1", body=b"{}", conversation="c"),
                IdempotentReply(
                    tenant="t", route="/v1", key="k", fingerprint="f", status=200, headers=(("a", "b"),), body=b"x"
                ),
            ),
        )
    )

    session = await store.get_session("s1")
    assert session is not None
    assert (session.end_reason, session.one_shot) == ("webhook_complete", True)
    assert await inbox_states(store, [taken, told]) == {taken: ("delivered", ""), told: ("delivered", "")}
    claimed = await store.claim_outbox("telegram")
    assert [row.text for row in claimed] == ["done"]
    ended = await store.get_run("run_1")
    assert ended is not None
    assert (ended.status, ended.output, ended.last_event) == (RunStatus.COMPLETED, "done", "run.completed")
    assert [event.number for event in await store.events_after("run_1")] == [1]
    assert await store.latest_response("t", "c") == "resp_1"
    assert await store.get_reply("t", "/v1", "k", "f") is not None


async def test_a_failing_part_takes_the_whole_turn_with_it(store: Store) -> None:
    """When one record of a turn cannot be written, nothing of the turn is there."""
    with pytest.raises(TypeError, match="does not know how to write a dict"):
        await store.finish_turn(
            finish(start(), "q", "a", outbox=(NewReply(platform="p", target={}, text="a"),), also=({},))
        )

    assert await store.get_session("s1") is None
    assert await store.claim_outbox("p") == []


async def test_a_failed_turn_keeps_its_notices_waiting(store: Store) -> None:
    """A turn that acknowledges nothing leaves its notices pending; its message is not begun again."""
    taken = await store.accept_message(message())
    told = await store.add_notice(notice())
    assert taken is not None
    begun = start(inbox_ids=(taken, told))
    await store.begin_turn(begun)
    await store.finish_turn(finish(begun, state=TurnState.FAILED, error="boom", messages=()))

    assert await inbox_states(store, [taken, told]) == {taken: ("delivered", ""), told: ("pending", "")}
    assert [row.id for row in await store.take_inbox("telegram", KEY)] == [told]


async def test_begun_messages_are_not_handed_out_again(store: Store) -> None:
    """What a turn has begun with is not claimed again, by the same owner either, until the turn has ended."""
    taken = await store.accept_message(message())
    told = await store.add_notice(notice())
    assert taken is not None
    assert [row.id for row in await store.take_inbox("telegram", KEY)] == [taken]

    await store.begin_turn(start(inbox_ids=(taken, told)))

    assert await store.take_inbox("telegram", KEY) == []


async def test_begin_reopens_and_finish_does_not(store: Store) -> None:
    """A new message reopens an ended session; a session that ended while its last turn ran stays ended."""
    await store.finish_turn(finish(start(), "q", "a"))
    await store.end_session("s1", "api")
    await store.begin_turn(start("turn_2"))
    reopened = await store.get_session("s1")
    await store.end_session("s1", "session_reset")
    await store.finish_turn(finish(start("turn_2"), "q2", "a2"))
    ended = await store.get_session("s1")

    assert reopened is not None
    assert reopened.ended_at is None
    assert ended is not None
    assert (ended.end_reason, ended.message_count) == ("session_reset", 4)


async def test_a_turn_that_began_after_the_end_reopens_the_session(store: Store, clock: Clock) -> None:
    """A message to a session that had been ended by hand opens it again; one that ends under its turn stays ended."""
    await store.finish_turn(finish(start()))
    await store.end_session("s1", "by hand")
    clock.advance(5)
    await store.finish_turn(finish(msgspec.structs.replace(start(), began_at=clock.now)))
    again = await store.get_session("s1")

    began = clock.now
    clock.advance(5)
    await store.end_session("s1", "under the turn")
    await store.finish_turn(finish(msgspec.structs.replace(start(), began_at=began)))
    ended = await store.get_session("s1")

    assert again is not None
    assert (again.ended_at, again.end_reason) == (None, None)
    assert ended is not None
    assert ended.end_reason == "under the turn"


@pytest.mark.parametrize("hold", [False, True])
async def test_a_turn_of_waiting_rows_does_not_reopen_a_session(store: Store, clock: Clock, hold: bool) -> None:
    """What waited for a conversation that has ended meanwhile does not go on in it: neither its beginning nor its end reopens the session."""
    await store.finish_turn(finish(start(), "q", "a"))
    number = await store.accept_message(message("older"))
    told = await store.add_notice(notice())
    assert number is not None
    assert told is not None
    late = start("turn_2", inbox_ids=(number,), hold=hold, began_at=clock.now + 5)
    await store.end_session("s1", "session_reset")
    clock.advance(5)
    for ids in ((number,), (told,)):
        with pytest.raises(SessionEnded):
            await store.begin_turn(msgspec.structs.replace(late, inbox_ids=ids))
    ended = await store.get_session("s1")
    (row,) = await store.take_inbox("telegram", KEY)
    await store.begin_turn(start("turn_3", "s2", inbox_ids=(row.id,), hold=hold))
    moved = await store.get_session("s2")
    other = await store.accept_message(message("stopped before it began"))
    assert other is not None
    await store.finish_turn(finish(msgspec.structs.replace(late, inbox_ids=(other,)), state=TurnState.CANCELLED))
    stopped = await store.get_session("s1")

    assert ended is not None
    assert (ended.end_reason, row.text) == ("session_reset", "older")
    assert moved is not None
    assert moved.ended_at is None
    assert stopped is not None
    assert stopped.end_reason == "session_reset"


async def test_a_turn_on_an_idle_session_reopens_it(store: Store) -> None:
    """A message is the opposite of idleness, also where only the end of its turn is written."""
    await store.finish_turn(finish(start(), "q", "a"))
    await store.end_session("s1", "idle")
    await store.finish_turn(finish(start("turn_2"), "q2", "a2"))

    session = await store.get_session("s1")
    assert session is not None
    assert (session.ended_at, session.end_reason) == (None, None)


async def test_an_ended_one_shot_session_is_not_revived(store: Store) -> None:
    """A late turn of a one-shot session does not take its end back."""
    await store.finish_turn(finish(start(one_shot=True), "q", "a", end_session="cron_complete"))
    await store.begin_turn(start("turn_2", one_shot=True))
    late = await store.get_session("s1")
    await store.begin_turn(start("turn_3"))
    resumed = await store.get_session("s1")

    assert late is not None
    assert late.end_reason == "cron_complete"
    assert resumed is not None
    assert resumed.ended_at is None


async def test_the_first_end_reason_wins_over_the_turns(store: Store) -> None:
    """A one-shot session that was ended early keeps that reason when its turn ends it too."""
    begun = start(one_shot=True)
    await store.begin_turn(begun)
    await store.end_session("s1", "drain")
    await store.finish_turn(finish(begun, "q", "a", end_session="cron_complete"))

    session = await store.get_session("s1")
    assert session is not None
    assert session.end_reason == "drain"


async def test_a_child_turn_makes_a_subagent_session(store: Store) -> None:
    """A session with a parent is that parent's sub-agent, and is listed only when asked for."""
    await store.finish_turn(finish(start(), "q", "a"))
    await store.finish_turn(finish(start("turn_2", "child", "", parent_session_id="s1"), "q", "a"))

    assert [entry.id for entry in await store.list_sessions()] == ["s1"]
    assert {entry.id for entry in await store.list_sessions(SessionFilter(include_children=True))} == {"s1", "child"}


async def test_an_idempotency_key_starts_one_run(store: Store) -> None:
    """The same key with the same body leads to the first run; with another body it is a conflict; nothing is written."""
    first = run(tenant="t", idempotency_key="k", fingerprint="f")
    await store.begin_turn(start(run=first))

    with pytest.raises(AlreadyStarted) as started:
        await store.begin_turn(start("turn_2", "s2", run=msgspec.structs.replace(first, run_id="run_2")))
    with pytest.raises(IdempotencyConflict):
        await store.begin_turn(
            start("turn_3", "s3", run=msgspec.structs.replace(first, run_id="run_3", fingerprint="g"))
        )
    await store.begin_turn(start("turn_4", "s4", run=msgspec.structs.replace(first, run_id="run_4", tenant="u")))

    assert started.value.run_id == "run_1"
    assert await store.get_session("s2") is None
    assert [found.run_id for found in await store.list_runs()] == ["run_4", "run_1"]


async def test_a_reply_key_with_another_body_fails_the_commit(store: Store) -> None:
    """An idempotent reply that conflicts takes its turn with it: the client is told, nothing is half done."""
    reply = IdempotentReply(tenant="t", route="r", key="k", fingerprint="f", status=200, headers=(), body=b"1")
    await store.finish_turn(finish(start(), "q", "a", also=(reply,)))

    with pytest.raises(IdempotencyConflict):
        await store.finish_turn(
            finish(start("turn_2", "s2"), "q", "a", also=(msgspec.structs.replace(reply, fingerprint="g"),))
        )

    assert await store.get_session("s2") is None


async def test_a_notice_reopens_a_session_that_ended_otherwise(store: Store, clock: Clock) -> None:
    """A new chat in a terminal ends the last one of a process that was killed; what was lost in that one is still told."""
    await store.finish_turn(finish(start(), "q", "a"))
    told = await store.add_notice(notice())
    assert told is not None
    await store.new_session(KEY, source="cli", reason="new_session")
    clock.advance(5)
    await store.begin_turn(start("turn_2", inbox_ids=(told,)))
    opened = await store.get_session("s1")
    assert opened is not None
    assert opened.ended_at is None
