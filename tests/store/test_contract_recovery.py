"""The contract of boot: no row says `running` without a live task, and each owner is notified once."""

from __future__ import annotations

from hermes_trio.runtime.outcome import JobState, RunStatus
from hermes_trio.runtime.ports import EventRow, NewReply, NoticeKind, Recovery
from hermes_trio.store import ApprovalState, CronState, NewApproval, NewSession, OutboxState, Store
from hermes_trio.testing.rows import inbox_states

from .turns import KEY, context, finish, job, message, notice, run, start


async def test_an_orderly_store_has_nothing_to_recover(store: Store) -> None:
    """Boot leaves finished work alone."""
    begun = start(run=run())
    await store.begin_turn(begun)
    await store.finish_turn(finish(begun, "q", "a"))
    waiting = await store.accept_message(message("later"))

    assert await store.recover("e2") == Recovery(epoch="e2", messages_waiting=1)
    assert [row.id for row in await store.take_inbox("telegram", KEY)] == [waiting]


async def test_a_live_run_fails_as_interrupted_with_a_last_event(store: Store) -> None:
    """Status, error code and the event log agree; the event gets the next number, in the new epoch."""
    await store.begin_turn(start(run=run()))
    await store.append_events([EventRow(run_id="run_1", epoch="e1", number=1, event={"event": "tool.started"})])
    recovery = await store.recover("e2")

    found = await store.get_run("run_1")
    assert recovery.runs_interrupted == 1
    assert found is not None
    assert (found.status, found.error_code, found.last_event) == (RunStatus.FAILED, "interrupted", "run.failed")
    assert "server stopped" in found.error
    last = (await store.events_after("run_1"))[-1]
    assert (last.number, last.epoch) == (2, "e2")
    assert (last.event["event"], last.event["error_code"]) == ("run.failed", "interrupted")


async def test_a_run_without_events_gets_its_first_one(store: Store) -> None:
    """The terminal event is there however early the server died."""
    await store.begin_turn(start(run=run()))
    await store.recover("e2")

    assert [row.number for row in await store.events_after("run_1")] == [1]


async def test_a_watched_job_is_lost_with_one_truthful_notice(store: Store) -> None:
    """The notice says what is known, with the last output; an unwatched job is lost without one."""
    await store.create_session(NewSession(id="s1", source="telegram", session_key=KEY))
    await store.start_job(job("watched"))
    await store.note_job_output("watched", "75 % done")
    await store.start_job(job("unwatched", inbox=""))
    recovery = await store.recover("e2")

    assert recovery.jobs_lost == 2
    for name in ("watched", "unwatched"):
        lost = await store.get_job(name)
        assert lost is not None
        assert lost.state is JobState.LOST
        assert lost.ended_at is not None
    (row,) = await store.take_inbox("telegram", KEY)
    assert (row.notice, row.job_id) == (NoticeKind.LOST, "watched")
    assert "75 % done" in row.text
    assert row.payload["state"] == "lost"


async def test_a_begun_message_is_interrupted_and_told_once(store: Store) -> None:
    """It is not begun again; its conversation is told; notices and unbegun messages keep waiting."""
    session = await store.resolve_session(context(""), source="telegram")
    begun = await store.accept_message(message("long work"))
    later = await store.accept_message(message("and then this"))
    told = await store.add_notice(notice(session_id=session))
    assert begun is not None
    assert later is not None
    await store.begin_turn(start(session_id=session, inbox_ids=(begun, told)))
    recovery = await store.recover("e2")

    states = await inbox_states(store, [begun, later, told])
    assert states == {begun: ("interrupted", ""), later: ("pending", ""), told: ("pending", "")}
    (first,) = await store.take_inbox("telegram", KEY)
    assert first.id == later
    await store.begin_turn(start(session_id=session, inbox_ids=(later,)))
    rows = await store.take_inbox("telegram", KEY)
    assert rows[0].id == told
    await store.acknowledge([told])
    (row,) = await store.take_inbox("telegram", KEY)
    assert (row.notice, row.payload) == (NoticeKind.INFORMATION, {"interrupted_message": begun})
    assert "long work" in row.text
    assert recovery.messages_waiting == 3


async def test_an_interrupted_one_shot_session_ends_with_its_notices(store: Store) -> None:
    """No ghost: the session has an end and a reason, and what would wait for it is abandoned."""
    begun = await store.accept_message(message("deliver", key="hook:1"))
    assert begun is not None
    await store.begin_turn(start(session_id="hook", key="hook:1", one_shot=True, inbox_ids=(begun,)))
    await store.start_job(job("p1", session_id="hook", key="hook:1"))
    recovery = await store.recover("e2")

    session = await store.get_session("hook")
    assert recovery.sessions_ended == 1
    assert session is not None
    assert (session.end_reason, session.ended_at is not None) == ("interrupted", True)
    assert [row.session_id for row in await store.take_inbox("telegram", "hook:1")] == []


async def test_a_one_shot_session_that_waited_for_its_job_hears_of_it(store: Store) -> None:
    """Its turn was over, so it stays open for the notice; without one it has settled, and ends."""
    await store.finish_turn(finish(start("t1", "waits", "hook:1", one_shot=True), "q", "a"))
    await store.start_job(job("p1", session_id="waits", key="hook:1"))
    await store.finish_turn(finish(start("t2", "settled", "hook:2", one_shot=True), "q", "a"))
    recovery = await store.recover("e2")

    assert recovery.sessions_ended == 1
    waits = await store.get_session("waits")
    settled = await store.get_session("settled")
    assert waits is not None
    assert waits.ended_at is None
    assert settled is not None
    assert settled.end_reason == "interrupted"
    assert [row.notice for row in await store.take_inbox("telegram", "hook:1")] == [NoticeKind.LOST]


async def test_an_ordinary_session_stays_open(store: Store) -> None:
    """The conversation goes on; only its interrupted turn is over."""
    await store.begin_turn(start())
    await store.recover("e2")

    session = await store.get_session("s1")
    assert session is not None
    assert session.ended_at is None


async def test_pending_approvals_expire(store: Store) -> None:
    """No task waits for the answer any more."""
    await store.create_approval(NewApproval(id="a", scope="run_1", command="rm", expires_at=1.0))
    recovery = await store.recover("e2")

    found = await store.get_approval("a")
    assert recovery.approvals_expired == 1
    assert found is not None
    assert (found.state, found.reason) == (ApprovalState.EXPIRED, "interrupted")


async def test_attempted_replies_are_sent_again_and_labelled(store: Store) -> None:
    """A reply that was under way may have arrived; one that was not is sent plainly."""
    await store.add_outbox(
        [
            NewReply(platform="telegram", target={"chat": 1}, text="under way"),
            NewReply(platform="telegram", target={"chat": 1}, text="behind it"),
        ]
    )
    await store.claim_outbox("telegram")
    recovery = await store.recover("e2")

    assert recovery.outbox_requeued == 1
    pending = await store.list_outbox(OutboxState.PENDING)
    assert [(row.text, row.maybe_duplicate) for row in pending] == [("under way", 1), ("behind it", 0)]


async def test_an_interrupted_cron_slot_has_failed(store: Store) -> None:
    """A slot is never run twice: one that was under way is failed, not retried."""
    await store.claim_cron_slot("j", 10.0)
    await store.recover("e2")

    (execution,) = await store.list_cron_executions("j")
    assert (execution.state, execution.error) == (CronState.FAILED, "interrupted")
    assert await store.claim_cron_slot("j", 10.0) is False


async def test_recovering_twice_tells_nothing_twice(store: Store) -> None:
    """A crash in the middle of a boot, or a second boot, finds everything in order."""
    begun = await store.accept_message(message())
    assert begun is not None
    await store.begin_turn(start(run=run(), inbox_ids=(begun,)))
    await store.start_job(job())
    first = await store.recover("e2")
    second = await store.recover("e3")

    assert (first.runs_interrupted, first.jobs_lost) == (1, 1)
    assert second == Recovery(epoch="e3", messages_waiting=first.messages_waiting)
    assert len(await store.events_after("run_1")) == 1
