"""The contract of retention: every session ends, only ended rows go, and the space comes back."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from hermes_trio.runtime.outcome import JobState
from hermes_trio.runtime.ports import EventRow, JobFinish, NewReply
from hermes_trio.store import (
    ApprovalChoice,
    CronState,
    IdempotentReply,
    InboxState,
    NewApproval,
    NewSession,
    OutboxState,
    Page,
    Retention,
    Runner,
    SearchQuery,
    SessionFilter,
    Store,
    StoredResponse,
    open_store,
)
from hermes_trio.store.records import OWED
from hermes_trio.testing.rows import inbox_states

from .conftest import Backend, Clock
from .turns import KEY, finish, job, message, notice, run, start

DAY = 86_400.0


async def ids(store: Store) -> set[str]:
    """The ids of all sessions."""
    return {session.id for session in await store.list_sessions(SessionFilter(include_children=True), Page(1_000))}


async def test_pruning_touches_only_ended_sessions(store: Store, clock: Clock) -> None:
    """Open sessions stay however old they are; the age counts from the end."""
    for name in ("open", "old", "recent", "other"):
        await store.create_session(NewSession(id=name, source="webhook" if name == "other" else "cli"))
    await store.end_session("old", "cli_close")
    await store.end_session("other", "webhook_complete")
    clock.advance(10 * DAY)
    await store.end_session("recent", "cli_close")
    clock.advance(1)

    assert await store.prune_sessions(5, "cli") == 1
    assert await ids(store) == {"open", "recent", "other"}
    assert await store.prune_sessions(5, end_reason="webhook_complete") == 1
    assert await store.prune_sessions(0) == 1
    assert await ids(store) == {"open"}


async def test_an_ended_session_with_a_live_job_is_not_removed(store: Store, clock: Clock) -> None:
    """A background process outlives the session of its sub-agent, which goes with the next round after the end of the job."""
    await store.create_session(NewSession(id="child", source="subagent"))
    await store.start_job(job("p1", "child"))
    await store.end_session("child", "subagent_complete")
    clock.advance(100 * DAY)

    assert await store.prune_sessions(1, dry_run=True) == 0
    assert await store.prune_sessions(1) == 0
    assert "sessions" not in (await store.maintain()).removed
    assert await ids(store) == {"child"}

    await store.finish_job(JobFinish(job_id="p1", state=JobState.EXITED))
    assert (await store.maintain()).removed["sessions"] == 1


async def test_pruning_a_parent_leaves_its_children(store: Store, clock: Clock) -> None:
    """Surviving children lose the link, nothing else; messages go with their session."""
    await store.finish_turn(finish(start("t1", "parent"), "q", "a", end_session="done"))
    await store.finish_turn(finish(start("t2", "child", "", parent_session_id="parent"), "q", "a"))
    clock.advance(100 * DAY)
    await store.prune_sessions(90)

    child = await store.get_session("child")
    assert child is not None
    assert child.parent_session_id is None
    assert await store.load_history("parent") == []
    assert len(await store.load_history("child")) == 2


async def test_a_long_transcript_is_pruned_in_parts(store: Store, clock: Clock) -> None:
    """A session with more messages than one step removes goes completely."""
    for number in range(30):
        await store.finish_turn(finish(start(f"t{number}"), *(["text"] * 100)))
    await store.end_session("s1", "done")
    clock.advance(1)

    assert await store.prune_sessions(0) == 1
    assert await store.search_messages(SearchQuery(text="text")) == []
    assert await store.load_history("s1") == []


@pytest.mark.parametrize(
    ("session", "source", "days", "ended"),
    [
        ("chat", "telegram", 29, False),
        ("chat", "telegram", 31, True),
        ("api-123", "api_server", 2, True),
        ("api_named", "api_server", 2, False),
        ("api-123", "telegram", 2, False),
    ],
)
async def test_idle_sessions_end(
    store: Store, clock: Clock, session: str, source: str, days: float, ended: bool
) -> None:
    """30 days without activity end a session, one day if the HTTP front end derived it; the reason is `idle`."""
    await store.create_session(NewSession(id=session, source=source))
    clock.advance(days * DAY)
    report = await store.maintain()

    found = await store.get_session(session)
    assert found is not None
    assert (found.end_reason, report.sessions_ended) == (("idle", 1) if ended else (None, 0))


async def test_a_forgotten_one_shot_session_ends(store: Store, clock: Clock) -> None:
    """The last line of defence against ghosts: a one-shot session does not outlive its linger by more than a day."""
    await store.finish_turn(finish(start(one_shot=True), "q", "a"))
    clock.advance(2 * DAY)
    await store.maintain()

    found = await store.get_session("s1")
    assert found is not None
    assert found.end_reason == "linger_expired"


async def test_a_session_with_work_or_mail_is_not_idle(store: Store, clock: Clock) -> None:
    """A running turn, a live job and a waiting message each keep a session open."""
    await store.begin_turn(start("t1", "turn", "k1"))
    await store.create_session(NewSession(id="job", source="x", session_key="k2"))
    await store.start_job(job("p1", "job", key="k2"))
    await store.create_session(NewSession(id="mail", source="x", session_key=KEY))
    await store.accept_message(message())
    clock.advance(40 * DAY)
    report = await store.maintain()

    assert report.sessions_ended == 0


async def test_everything_that_has_ended_goes_in_time(store: Store, clock: Clock) -> None:
    """After all ages have passed, only what is open or in force is left; rows that were never taken are dead letters."""
    begun = start(run=run())
    await store.begin_turn(begun)
    await store.append_events([EventRow(run_id="run_1", epoch="e", number=1, event={})])
    await store.finish_turn(
        finish(
            begun,
            "q",
            "a",
            outbox=(NewReply(platform="p", target={}, text="a"),),
            end_session="done",
            also=(
                StoredResponse(id="r", tenant="t", session_id="s1", body=b"", conversation="c"),
                IdempotentReply(tenant="t", route="r", key="k", fingerprint="f", status=200, headers=(), body=b""),
            ),
        )
    )
    await store.begin_turn(start("t2", "s2", "k2", run=run("run_2", "s2")))
    for name in ("p1", "p2"):
        await store.start_job(job(name, "s2", key="k2"))
    await store.finish_job(JobFinish(job_id="p1", state=JobState.EXITED))
    accepted = await store.accept_delivery("route", "d1", message("old"))
    assert accepted is not None
    await store.acknowledge([accepted])
    await store.accept_message(message("waiting"))
    (sent,) = await store.claim_outbox("p")
    await store.outbox_sent(sent)
    await store.create_approval(NewApproval(id="a1", scope="x", command="c", expires_at=1.0))
    await store.answer_approval("a1", ApprovalChoice.ONCE)
    await store.claim_cron_slot("j", 1.0, state=CronState.MISSED)
    key, _ = await store.create_api_key("old")
    await store.revoke_api_key(key.id)
    await store.offer_pairing("telegram", "code", user_id="1")
    clock.advance(120 * DAY)
    report = await store.maintain()

    assert report.removed["sessions"] == 1
    assert await store.get_run("run_1") is None
    assert await store.events_after("run_1") == []
    assert [found.run_id for found in await store.list_runs()] == ["run_2"]
    assert [found.job_id for found in await store.list_jobs()] == ["p2"]
    assert await inbox_states(store, [accepted]) == {}
    assert [row.text for row, _ in await store.list_inbox(InboxState.DEAD)] == ["waiting"]
    assert await store.list_outbox(OutboxState.SENT) == []
    assert await store.list_approvals(state=None) == []
    assert await store.get_response("t", "r") is None
    assert await store.latest_response("t", "c") is None
    assert await store.delivery_known("route", "d1") is False
    assert await store.list_cron_executions() == []
    assert await store.list_api_keys(include_revoked=True) == []
    assert (await store.maintain()).removed == {}


async def test_counts_bound_what_ages_do_not(backend: Backend, clock: Clock) -> None:
    """Of many young rows the newest are kept."""
    retention = Retention(inbox_count=3, run_count=2, cron_execution_count=2, batch=4)
    async with backend.open(retention=retention) as store:
        numbers: list[int] = []
        for number in range(12):
            clock.advance(1)
            accepted = await store.accept_message(message(str(number)))
            assert accepted is not None
            await store.acknowledge([accepted])
            numbers.append(accepted)
            begun = start(f"t{number}", run=run(f"run_{number}"))
            await store.begin_turn(begun)
            await store.finish_turn(finish(begun, "q", "a"))
            await store.claim_cron_slot("j", float(number), state=CronState.SKIPPED)
        for _ in range(3):
            await store.maintain()

        assert sorted(await inbox_states(store, numbers)) == numbers[-3:]
        assert [found.run_id for found in await store.list_runs()] == ["run_11", "run_10"]
        assert [found.slot for found in await store.list_cron_executions("j")] == [11.0, 10.0]


async def test_retention_can_be_switched_off(backend: Backend, clock: Clock) -> None:
    """None keeps for ever."""
    async with backend.open(retention=Retention(sessions=0, session_idle=0)) as store:
        await store.create_session(NewSession(id="open", source="x"))
        await store.create_session(NewSession(id="ended", source="x"))
        await store.end_session("ended", "done")
        clock.advance(10_000 * DAY)
        await store.maintain()

        assert await ids(store) == {"open", "ended"}


async def test_the_store_looks_after_itself(autojump_clock: trio.testing.MockClock) -> None:
    """Without a call of `maintain`, an idle session ends and an ended one is removed, in virtual time."""
    retention = Retention(session_idle=2, sessions=5, interval=3_600.0)
    async with open_store(
        None, runner=Runner.INLINE, clock=trio.current_time, retention=retention, maintenance=True
    ) as store:
        await store.create_session(NewSession(id="s", source="x"))
        await trio.sleep(2 * DAY + 3_601)
        ended = await store.get_session("s")
        await trio.sleep(5 * DAY + 3_601)

        assert ended is not None
        assert ended.end_reason == "idle"
        assert await store.get_session("s") is None


async def test_what_waits_for_somebody_who_does_not_come_back_is_a_dead_letter(store: Store, clock: Clock) -> None:
    """A message, a notice and a reply of an interface that was removed do not wait for ever: they can be listed, with the reason, and queued again."""
    number = await store.accept_message(message("hello", inbox="gone"))
    told = await store.add_notice(notice("done"))
    await store.add_outbox([NewReply(platform="gone", target={"chat_id": "1"}, text="reply")])
    clock.advance(29 * DAY)
    await store.maintain()
    assert await store.list_inbox(InboxState.DEAD) == []
    clock.advance(2 * DAY)
    await store.maintain()
    dead = await store.list_inbox(InboxState.DEAD)
    assert {row.id for row, _ in dead} == {number, told}
    assert {reason for _, reason in dead} == {"no lane has taken it for 30 days"}
    (reply,) = await store.list_outbox(OutboxState.DEAD)
    assert await store.revive_inbox(number or 0)
    assert await store.revive_outbox(reply.id)
    await store.maintain()
    assert len(await store.list_inbox(InboxState.DEAD)) == 1, "what is queued again waits anew"
    assert await store.list_outbox(OutboxState.DEAD) == []


async def test_what_is_owed_for_a_session_goes_when_its_end_is_settled(store: Store) -> None:
    """A process that dies after the end of a turn leaves the row. Those of open and of interrupted sessions are needed; other rows stay."""
    for name, reason in {"open": "", "interrupted": "interrupted", "ended": "webhook_complete"}.items():
        await store.create_session(NewSession(id=name, source="webhook"))
        if reason:
            await store.end_session(name, reason)
    names = ("open", "interrupted", "ended", "pruned")
    for name in names:
        await store.set_meta(OWED + name, "{}")
    await store.set_meta("ended", "{}")
    await store.maintain()
    assert [name for name in names if await store.get_meta(OWED + name)] == ["open", "interrupted"]
    assert await store.get_meta("ended") == "{}"
