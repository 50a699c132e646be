"""The contract of jobs, and of the inbox that they report to."""

from __future__ import annotations

import pytest

from hermes_trio.runtime.errors import Fenced
from hermes_trio.runtime.outcome import JobState
from hermes_trio.runtime.ports import InboxKind, JobFinish, NoticeKind
from hermes_trio.store import NewSession, Store
from hermes_trio.testing.rows import inbox_states

from .conftest import Clock
from .turns import KEY, finish, job, message, notice, start


async def test_a_message_waits_with_all_that_it_brought(store: Store, clock: Clock) -> None:
    """What was accepted comes back whole, oldest first."""
    first = await store.accept_message(message("one"))
    second = await store.accept_message(message("two"))

    rows = await store.take_inbox("telegram", KEY)
    assert [(row.id, row.text, row.kind, row.attempts) for row in rows] == [(first, "one", InboxKind.MESSAGE, 1)]
    assert rows[0].routing.platform == "telegram"
    assert rows[0].created_at == clock.now
    await store.begin_turn(start(inbox_ids=(rows[0].id,)))
    assert [row.id for row in await store.take_inbox("telegram", KEY)] == [second]
    assert await store.inbox_waiting() == 0


async def test_a_dedupe_key_is_accepted_once_per_inbox(store: Store) -> None:
    """The same key again is no second message; in another inbox it is another message; no key is never a duplicate."""
    first = await store.accept_message(message(dedupe="7"))
    again = await store.accept_message(message(dedupe="7"))
    elsewhere = await store.accept_message(message(dedupe="7", inbox="slack"))
    unkeyed = [await store.accept_message(message()) for _ in range(2)]

    assert first is not None
    assert again is None
    assert elsewhere is not None
    assert None not in unkeyed


async def test_a_dedupe_key_holds_after_delivery(store: Store) -> None:
    """A message that was handled is not accepted again."""
    first = await store.accept_message(message(dedupe="7"))
    assert first is not None
    await store.acknowledge([first])

    assert await store.accept_message(message(dedupe="7")) is None


async def test_waiting_sessions_are_named_longest_waiting_first(store: Store) -> None:
    """An inbox lists the session keys with waiting rows."""
    await store.accept_message(message(key="b"))
    await store.accept_message(message(key="a"))
    await store.accept_message(message(key="c", inbox="slack"))
    done = await store.accept_message(message(key="d"))
    assert done is not None
    await store.acknowledge([done])

    assert await store.waiting_sessions("telegram") == ["b", "a"]
    assert await store.waiting_sessions("discord") == []


async def test_a_jobs_end_and_its_notice_are_one(store: Store, clock: Clock) -> None:
    """The end of a watched job leaves exactly one notice; ending it again changes nothing."""
    await store.create_session(NewSession(id="s1", source="telegram", session_key=KEY))
    await store.start_job(job())
    clock.advance(5)
    first = await store.finish_job(
        JobFinish(job_id="proc_1", state=JobState.EXITED, summary="exit 0", details={"code": 0}, notice=notice("bye"))
    )
    again = await store.finish_job(JobFinish(job_id="proc_1", state=JobState.KILLED, notice=notice("again")))

    ended = await store.get_job("proc_1")
    assert again is None
    assert ended is not None
    assert (ended.state, ended.summary, ended.details) == (JobState.EXITED, "exit 0", {"code": 0})
    assert ended.ended_at == clock.now
    rows = await store.take_inbox("telegram", KEY)
    assert [(row.id, row.text, row.notice, row.job_id) for row in rows] == [
        (first, "bye", NoticeKind.COMPLETION, "proc_1")
    ]


async def test_a_seen_end_is_told_to_nobody(store: Store) -> None:
    """Superseded and abandoned ends are recorded as such, and are not delivered."""
    for name, fields in (("p1", {"superseded": True}), ("p2", {"abandoned": "session_ended"})):
        await store.start_job(job(name))
        told = await store.finish_job(
            JobFinish(job_id=name, state=JobState.EXITED, notice=notice(job_id=name), **fields)  # type: ignore[arg-type]
        )
        assert told is None

    assert await store.inbox_waiting() == 0


async def test_a_late_notice_never_revives_a_session(store: Store) -> None:
    """The end of a job of an ended session is written down, and abandoned."""
    await store.create_session(NewSession(id="s1", source="telegram", session_key=KEY))
    await store.start_job(job())
    await store.end_session("s1", "session_reset")

    assert await store.finish_job(JobFinish(job_id="proc_1", state=JobState.EXITED, notice=notice())) is None
    assert await store.take_inbox("telegram", KEY) == []


async def test_superseding_marks_pending_notices_of_the_job_only(store: Store) -> None:
    """What the agent has seen by itself is not told again."""
    mine = await store.add_notice(notice(job_id="p1"))
    other = await store.add_notice(notice(job_id="p2"))

    assert await store.supersede("p1") == 1
    assert await store.supersede("p1") == 0
    assert await inbox_states(store, [mine, other]) == {mine: ("superseded", ""), other: ("pending", "")}


async def test_abandoning_says_why(store: Store) -> None:
    """What waits for a session is abandoned with a reason, once."""
    number = await store.add_notice(notice())

    assert await store.abandon(session_id="s1", reason="linger") == 1
    assert await store.abandon(session_id="s1", reason="again") == 0
    assert await inbox_states(store, [number]) == {number: ("abandoned", "linger")}


async def test_jobs_are_listed_by_session_and_life(store: Store, clock: Clock) -> None:
    """Newest first; live ones alone on request; the last output is kept while the job lives."""
    for number in range(3):
        clock.advance(1)
        await store.start_job(job(f"p{number}", session_id=f"s{number % 2}"))
    await store.note_job_output("p0", "x" * 10_000 + "tail")
    await store.finish_job(JobFinish(job_id="p2", state=JobState.FAILED))
    await store.note_job_output("p2", "too late")

    assert [row.job_id for row in await store.list_jobs()] == ["p2", "p1", "p0"]
    assert [row.job_id for row in await store.list_jobs(live_only=True)] == ["p1", "p0"]
    assert [row.job_id for row in await store.list_jobs(session_id="s0")] == ["p2", "p0"]
    noted = await store.get_job("p0")
    late = await store.get_job("p2")
    assert noted is not None
    assert noted.output_tail.endswith("tail")
    assert len(noted.output_tail) == 4_000
    assert late is not None
    assert late.output_tail == ""


async def test_what_a_turn_has_told_is_delivered(store: Store) -> None:
    """A notice that was abandoned or superseded while a turn was telling it counts as told when that turn commits."""
    abandoned = await store.add_notice(notice(job_id="p1"))
    superseded = await store.add_notice(notice(session_id="s2", job_id="p2"))
    await store.abandon(session_id="s1", reason="session_ended")
    await store.supersede("p2")
    await store.finish_turn(finish(start(), "q", "a", acknowledged=(abandoned, superseded)))

    states = await inbox_states(store, [abandoned, superseded])
    assert states == {abandoned: ("delivered", ""), superseded: ("delivered", "")}


async def test_a_turn_that_ends_acknowledges_a_message_that_it_got_while_it_ran(store: Store) -> None:
    """Also if the message was claimed for a turn after it; an end that is written twice changes nothing."""
    first = await store.accept_message(message("first"))
    used = await store.accept_message(message("used"))
    left = await store.accept_message(message("left"))
    assert first is not None
    assert used is not None
    assert left is not None
    (row,) = await store.take_inbox("telegram", KEY)
    begun = start(inbox_ids=(row.id,))
    await store.begin_turn(begun)
    assert [row.id for row in await store.take_inbox("telegram", KEY)] == [used]
    for _ in range(2):
        await store.finish_turn(finish(begun, "q", "a", acknowledged=(used,)))
    states = await inbox_states(store, (first, used, left))
    assert states == {first: ("delivered", ""), used: ("delivered", ""), left: ("pending", "")}
    assert len(await store.load_history("s1")) == 2
    with pytest.raises(Fenced):
        await store.begin_turn(start(inbox_ids=(used,)))
