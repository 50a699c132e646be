"""The contract of a gateway's store beyond that of a runtime, as tests: a class for each slice of the port, and `GatewayStoreContract` for all.

A store that has one slice only runs the class of that slice; its tests prepare what they need with the verbs of `RuntimeStore` and `SessionStore`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec
import pytest
import trio

from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.errors import BudgetExhausted, Fenced
from hermes_trio.runtime.outcome import JobState, RunStatus, TurnState
from hermes_trio.runtime.ports import (
    EventRow,
    JobFinish,
    JobStart,
    Message,
    NewMessage,
    NewNotice,
    NewReply,
    NewRun,
    NodeRequest,
    NoticeKind,
    ResumedRun,
    Resumption,
    SessionHost,
    TurnFinish,
    TurnInput,
    TurnStart,
)
from hermes_trio.store.errors import (
    ForeignSession,
    IdempotencyConflict,
    InvalidTitle,
    SessionExists,
    TitleTaken,
    UnknownSession,
)
from hermes_trio.store.ports import Store
from hermes_trio.store.records import (
    ApprovalChoice,
    ApprovalState,
    CronJob,
    CronState,
    IdempotentReply,
    InboxState,
    NewApproval,
    NewSession,
    OutboxState,
    Page,
    RunFilter,
    SearchQuery,
    SessionFilter,
    StoredResponse,
)
from hermes_trio.testing.rows import completion_states, grant_category, inbox_states

from .store import StoreContract

INBOX = "contract"
KEY = "agent:main:contract:dm:1"


def _context(session_id: str = "s1", key: str = KEY) -> SessionContext:
    return SessionContext(platform=INBOX, session_id=session_id, session_key=key)


def _session(name: str = "s1", *, key: str = "", tenant: str = "", title: str | None = None) -> NewSession:
    return NewSession(id=name, source=INBOX, session_key=key, tenant=tenant, title=title)


def _message(text: str = "hello", key: str = KEY) -> NewMessage:
    return NewMessage(inbox=INBOX, session_key=key, routing=_context("", key), text=text)


def _start(turn_id: str = "turn_1", session_id: str = "s1", run: NewRun | None = None) -> TurnStart:
    return TurnStart(turn_id=turn_id, context=_context(session_id), source=INBOX, run=run)


def _resumable(run_id: str = "run_1", session_id: str = "s1", key_id: str = "") -> TurnStart:
    """Return the acceptance of a run that is begun again when it is interrupted."""
    run = NewRun(run_id=run_id, session_id=session_id, idempotency_key=f"k {run_id}", resumable=True)
    context = msgspec.structs.replace(_context(session_id), key_id=key_id)
    history = (Message(role="user", content=[{"type": "text", "text": "before"}]),)
    kept = Resumption(context=context, source=INBOX, input=TurnInput(text="\x00 it", history=history), seconds=3.0)
    return TurnStart(turn_id="", context=context, source=INBOX, run=run, resumption=kept)


def _finish(start: TurnStart, *texts: str) -> TurnFinish:
    roles = ("user", "assistant")
    messages = tuple(Message(role=roles[place % 2], content=text) for place, text in enumerate(texts))
    return TurnFinish(start=start, state=TurnState.COMPLETED, messages=messages, text=texts[-1])


def _job(job_id: str = "job_1", session_id: str = "s1") -> JobStart:
    return JobStart(
        job_id=job_id,
        kind="process",
        title="make test",
        root_id="root_1",
        turn_id="turn_1",
        routing=_context(session_id),
        inbox=INBOX,
    )


def _notice(job_id: str = "job_1") -> NewNotice:
    return NewNotice(
        inbox=INBOX,
        routing=_context(),
        kind=NoticeKind.COMPLETION,
        text="done",
        job_id=job_id,
        root_id="root_1",
    )


def _event(number: int, name: str = "tool.started") -> EventRow:
    return EventRow(run_id="run_1", epoch="epoch-1", number=number, event={"event": name})


def _approval(name: str, scope: str = "run_1", tenant: str = "", grantee: str = "") -> NewApproval:
    return NewApproval(
        id=name,
        scope=scope,
        command="rm -r build",
        categories=("recursive delete",),
        expires_at=time.time() + 600,
        tenant=tenant,
        grantee=grantee,
    )


def _files_with(folder: Path, text: bytes) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file() and text in path.read_bytes()]


class _StoreSlice(ABC):
    """How the store under test is opened."""

    durable: bool = True
    """Whether a store that is opened again at the same path has what was written before."""

    @abstractmethod
    def open_store(self, path: Path) -> AbstractAsyncContextManager[Store]:
        """Open the store that is kept in the folder `path`, for the body of the `async with`."""


class SessionStoreContract(_StoreSlice):
    """The promises of `SessionStore`."""

    @pytest.mark.trio
    async def test_a_session_is_made_once_and_found(self, tmp_path: Path) -> None:
        """A second one of that id is refused; one without an id is given one; an unknown one is None."""
        async with self.open_store(tmp_path) as store:
            made = await store.create_session(
                NewSession(id="s1", source=INBOX, system_prompt="be kind", model_config={"a": 1})
            )
            assert await store.get_session("s1") == made
            with pytest.raises(SessionExists):
                await store.create_session(_session())
            assert (await store.create_session(_session(""))).id
            assert await store.get_session("nobody") is None
            assert await store.session_prompt("s1") == ("be kind", '{"a":1}')

    @pytest.mark.trio
    async def test_a_session_belongs_to_its_tenant(self, tmp_path: Path) -> None:
        """Claiming makes it or finds it; whatever another tenant asks of it is refused, and nothing is changed."""
        async with self.open_store(tmp_path) as store:
            first = await store.claim_session(_session(tenant="red"))
            assert (await store.claim_session(_session(tenant="red"))).id == first.id
            with pytest.raises(ForeignSession):
                await store.claim_session(_session(tenant="blue"))
            with pytest.raises(ForeignSession):
                await store.delete_session("s1", tenant="blue")
            with pytest.raises(ForeignSession):
                await store.patch_session("s1", end_reason="mine", tenant="blue")
            with pytest.raises(ForeignSession):
                await store.fork_session("s1", tenant="blue")
            found = await store.get_session("s1")
            assert found is not None
            assert found.ended_at is None
            assert [one.id for one in await store.list_sessions(SessionFilter(tenant="blue"))] == []

    @pytest.mark.trio
    async def test_title_and_end_are_changed_both_or_neither(self, tmp_path: Path) -> None:
        """A title is one tenant's once; a bad one leaves the session open; an unknown session is named."""
        async with self.open_store(tmp_path) as store:
            await store.create_session(_session("a", tenant="red", title="plan"))
            await store.create_session(_session("b", tenant="red"))
            await store.create_session(_session("c", tenant="blue", title="plan"))
            with pytest.raises(TitleTaken):
                await store.patch_session("b", title="plan", set_title=True, end_reason="done")
            with pytest.raises(InvalidTitle):
                await store.patch_session("b", title="a\x07b", set_title=True, end_reason="done")
            found = await store.get_session("b")
            assert found is not None
            assert (found.title, found.ended_at) == (None, None)
            ended = await store.patch_session("b", title="other", set_title=True, end_reason="done")
            assert (ended.title, ended.end_reason) == ("other", "done")
            with pytest.raises(UnknownSession):
                await store.patch_session("nobody", end_reason="done")

    @pytest.mark.trio
    async def test_an_interruption_is_concluded_once(self, tmp_path: Path) -> None:
        """With its replies, if there is a mark; no other end is changed."""
        told = [NewReply(platform=INBOX, target={"chat_id": "a"}, text="interrupted")]
        async with self.open_store(tmp_path) as store:
            await store.recover("epoch-1")
            for name in ("marked", "unmarked"):
                context = _context(name, key=name)
                await store.begin_turn(TurnStart(turn_id=name, context=context, source=INBOX, one_shot=True))
            await store.set_meta("marked", "1")
            await store.create_session(_session("ended"))
            await store.end_session("ended", "done")
            await store.recover("epoch-2")
            for name, there in {"marked": True, "unmarked": True, "ended": False, "unknown": False}.items():
                for first in (there, False):
                    assert await store.conclude_interrupted(name, reason="over", mark=name, replies=told) is first
            reasons = {session.id: session.end_reason for session in await store.list_sessions()}
            assert reasons == {"marked": "over", "unmarked": "over", "ended": "done"}
            assert [row.text for row in await store.claim_outbox(INBOX)] == ["interrupted"]
            assert await store.get_meta("marked") is None

    @pytest.mark.trio
    async def test_an_end_can_be_taken_back(self, tmp_path: Path) -> None:
        """Once; then there is none to take back."""
        async with self.open_store(tmp_path) as store:
            await store.create_session(_session())
            await store.end_session("s1", "done")
            assert await store.reopen_session("s1") is True
            assert await store.reopen_session("s1") is False

    @pytest.mark.trio
    async def test_the_latest_activity_is_listed_first(self, tmp_path: Path) -> None:
        """Pages do not overlap; ended sessions can be left out."""
        async with self.open_store(tmp_path) as store:
            for name in ("a", "b", "c"):
                await store.create_session(_session(name))
            await store.append_messages("a", [Message(role="user", content="hello")])
            await store.end_session("b", "done")
            assert (await store.list_sessions())[0].id == "a"
            pages = [one.id for offset in range(3) for one in await store.list_sessions(page=Page(1, offset))]
            assert sorted(pages) == ["a", "b", "c"]
            assert {one.id for one in await store.list_sessions(SessionFilter(open_only=True))} == {"a", "c"}

    @pytest.mark.trio
    async def test_a_fork_has_the_messages_and_ends_its_source(self, tmp_path: Path) -> None:
        """Deleting the source leaves the branch; deleting it again deletes nothing."""
        async with self.open_store(tmp_path) as store:
            await store.finish_turn(_finish(_start(), "one", "two"))
            branch = await store.fork_session("s1", new_id="branch")
            source = await store.get_session("s1")
            assert source is not None
            assert (source.end_reason, branch.parent_session_id) == ("branched", "s1")
            assert [one.text for one in await store.load_history("branch")] == ["one", "two"]
            with pytest.raises(SessionExists):
                await store.fork_session("branch", new_id="s1")
            assert await store.delete_session("s1") == 1
            assert await store.delete_session("s1") == 0
            assert await store.load_history("s1") == []
            assert await store.get_session("branch") is not None

    @pytest.mark.trio
    async def test_a_key_moves_to_a_new_and_to_an_earlier_session(self, tmp_path: Path) -> None:
        """The session that was behind the key ends; the one that the key is pointed to is open."""
        async with self.open_store(tmp_path) as store:
            first = await store.resolve_session(_context(""), source=INBOX)
            second = await store.new_session(KEY, source=INBOX)
            behind = await store.session_of(KEY)
            assert behind is not None
            assert behind.id == second
            ended = await store.get_session(first)
            assert ended is not None
            assert ended.end_reason == "session_reset"
            switched = await store.switch_session(KEY, first)
            assert (switched.id, switched.ended_at) == (first, None)
            left = await store.get_session(second)
            assert left is not None
            assert left.end_reason == "session_switch"
            with pytest.raises(UnknownSession):
                await store.switch_session(KEY, "nobody")

    @pytest.mark.trio
    async def test_a_transcript_is_added_to_and_compacted(self, tmp_path: Path) -> None:
        """Compaction sets the messages aside: the history is what took their place, the list can still show them."""
        async with self.open_store(tmp_path) as store:
            await store.create_session(_session())
            await store.append_messages("s1", [Message(role="user", content=f"{number}") for number in range(5)])
            page = await store.list_messages("s1", Page(2, 2))
            assert [one.message.text for one in page] == ["2", "3"]
            await store.replace_history("s1", [Message(role="user", content="summary")])
            assert [one.text for one in await store.load_history("s1")] == ["summary"]
            everything = await store.list_messages("s1", include_archived=True)
            assert [one.active for one in everything] == [False] * 5 + [True]
            with pytest.raises(UnknownSession):
                await store.append_messages("nobody", [Message(role="user", content="x")])
            with pytest.raises(UnknownSession):
                await store.replace_history("nobody", [])

    @pytest.mark.trio
    async def test_the_secret_is_made_once(self, tmp_path: Path) -> None:
        """At least 16 bytes, and the same after closing and opening."""
        async with self.open_store(tmp_path) as store:
            secret = store.secret
            assert len(secret) >= 16
        if self.durable:
            async with self.open_store(tmp_path) as store:
                assert store.secret == secret


class SearchStoreContract(_StoreSlice):
    """The promises of `SearchStore`."""

    @pytest.mark.trio
    async def test_all_terms_must_be_there(self, tmp_path: Path) -> None:
        """Phrases, beginnings and OR work; tenants, sources, sessions and roles select; what was just committed is found."""
        async with self.open_store(tmp_path) as store:
            for name, tenant, text in (("a", "red", "the zebra sleeps"), ("b", "blue", "a zebra eats grass")):
                await store.create_session(_session(name, tenant=tenant))
                await store.append_messages(name, [Message(role="user", content=text)])

            async def found(text: str) -> set[str]:
                return {hit.session_id for hit in await store.search_messages(SearchQuery(text=text))}

            assert await found("zebra") == {"a", "b"}
            assert await found("zebra grass") == {"b"}
            assert await found('"zebra sleeps"') == {"a"}
            assert await found("gras*") == {"b"}
            assert await found("sleeps OR grass") == {"a", "b"}
            assert await found("giraffe") == set()
            assert [hit.session_id for hit in await store.search_messages(SearchQuery(text="zebra", tenant="red"))] == [
                "a"
            ]
            assert [
                hit.session_id for hit in await store.search_messages(SearchQuery(text="zebra", session_id="b"))
            ] == ["b"]
            assert await store.search_messages(SearchQuery(text="zebra", roles=("assistant",))) == []
            assert await store.search_messages(SearchQuery(text="zebra", source="elsewhere")) == []
            (hit,) = await store.search_messages(SearchQuery(text="zebra"), Page(1, 1))
            assert "zebra" in hit.snippet

    @pytest.mark.parametrize("text", ["", '"', "a AND", "(((", "*", "NEAR/", "\x00", "OR OR"])
    @pytest.mark.trio
    async def test_no_query_is_an_error(self, tmp_path: Path, text: str) -> None:
        """Any string is a valid query."""
        async with self.open_store(tmp_path) as store:
            assert isinstance(await store.search_messages(SearchQuery(text=text)), list)

    @pytest.mark.trio
    async def test_what_is_committed_is_found(self, tmp_path: Path) -> None:
        """A search sees everything that was committed before it."""
        async with self.open_store(tmp_path) as store:
            await store.create_session(_session())
            await store.append_messages("s1", [Message(role="user", content=f"word{number}") for number in range(30)])
            assert len(await store.search_messages(SearchQuery(text="word7"))) == 1


class RunStoreContract(_StoreSlice):
    """The promises of `RunStore`."""

    @pytest.mark.trio
    async def test_a_run_lives_until_its_turn_ends(self, tmp_path: Path) -> None:
        """It is there before it is promised; after its end no event moves it."""
        async with self.open_store(tmp_path) as store:
            start = _start(run=NewRun(run_id="run_1", session_id="s1", tenant="red", idempotency_key="k"))
            await store.begin_turn(start)
            found = await store.get_run("run_1")
            assert found is not None
            assert found.status is RunStatus.QUEUED
            await store.append_events([_event(1)])
            await store.finish_turn(_finish(start, "one", "two"))
            await store.append_events([_event(2)])
            ended = await store.get_run("run_1")
            assert ended is not None
            assert (ended.status, ended.output) == (RunStatus.COMPLETED, "two")
            assert await store.get_run("nobody") is None

    @pytest.mark.trio
    async def test_runs_are_listed_by_what_is_asked(self, tmp_path: Path) -> None:
        """By status, session and tenant, the newest first. An idempotency key is its tenant's alone."""
        async with self.open_store(tmp_path) as store:
            for number, tenant in enumerate(("red", "blue")):
                run = NewRun(run_id=f"run_{number}", session_id=f"s{number}", tenant=tenant, idempotency_key="k")
                await store.begin_turn(_start(f"turn_{number}", f"s{number}", run))
            assert [row.run_id for row in await store.list_runs()] == ["run_1", "run_0"]
            assert [row.run_id for row in await store.list_runs(RunFilter(tenant="red"))] == ["run_0"]
            assert [row.run_id for row in await store.list_runs(RunFilter(session_id="s1"), Page(1))] == ["run_1"]
            assert await store.list_runs(RunFilter(status=RunStatus.COMPLETED)) == []

    @pytest.mark.trio
    async def test_events_are_read_after_a_number(self, tmp_path: Path) -> None:
        """Reading destroys nothing; an event that is written again changes nothing; a page has one event at least."""
        async with self.open_store(tmp_path) as store:
            await store.begin_turn(_start(run=NewRun(run_id="run_1", session_id="s1")))
            await store.append_events([_event(1), _event(2)])
            await store.append_events([_event(2, "other"), _event(3)])
            for _ in range(2):
                assert [row.number for row in await store.events_after("run_1")] == [1, 2, 3]
            (second,) = await store.events_after("run_1", 1, limit=1)
            assert (second.number, second.event["event"]) == (2, "tool.started")
            assert len(await store.events_after("run_1", most_bytes=1)) == 1
            assert await store.events_after("run_1", 3) == []
            assert await store.event_epoch("run_1", 2) == "epoch-1"
            assert await store.event_epoch("run_1", 9) is None

    @pytest.mark.trio
    async def test_an_interrupted_run_is_claimed_for_its_next_attempt(self, tmp_path: Path) -> None:
        """Once for each interruption, with what began it and one event in its log, until an end is written; after its last attempt it has failed."""
        async with self.open_store(tmp_path) as store:
            await store.recover("epoch-1")
            start = _resumable()
            await store.begin_turn(start)
            await store.begin_turn(_resumable("run_2", "s2"))
            await store.append_events([_event(1)])
            assert await store.claim_interrupted("epoch-1") == []
            others: list[ResumedRun] = []
            for attempt in (2, 3):
                found = await store.recover(f"epoch-{attempt}")
                assert (found.runs_interrupted, found.runs_released) == (0, 2 if attempt == 2 else 1)
                row = await store.get_run("run_1")
                assert row is not None
                assert (row.owner, row.attempt, row.ended_at) == ("", attempt - 1, None)
                for _ in range(2):  # the second time as if the first answer was lost
                    one, *others = await store.claim_interrupted(f"epoch-{attempt}")
                    assert (one.run, one.attempt, one.last, one.stopped) == (start.run, attempt, attempt, False)
                    assert one.resumption == start.resumption
                    # Where nodes share the store its row follows a run; it waited for its session.
                    status = RunStatus.QUEUED if store.lease_seconds else RunStatus.RUNNING
                    assert (one.status, one.created_at) == (status, row.created_at)
                if attempt == 2:
                    assert [other.run.run_id for other in others] == ["run_2"]
                    ended = _resumable("run_2", "s2")
                    await store.finish_turn(
                        _finish(msgspec.structs.replace(ended, turn_id="t", resumption=None), "q", "a")
                    )
            assert (await store.recover("epoch-4")).runs_interrupted == 1
            assert await store.claim_interrupted("epoch-4") == []
            row = await store.get_run("run_1")
            assert row is not None
            assert (row.status, row.error_code, row.attempt) == (RunStatus.FAILED, "interrupted", 3)
            assert "in attempt 3 of 3" in row.error
            assert [
                (event.number, event.epoch, event.event["event"]) for event in await store.events_after("run_1")
            ] == [
                (1, "epoch-1", "tool.started"),
                (2, "epoch-2", "run.resumed"),
                (3, "epoch-3", "run.resumed"),
                (4, "epoch-4", "run.failed"),
            ]
            other = await store.get_run("run_2")
            assert other is not None
            assert (other.status, other.output, other.attempt) == (RunStatus.COMPLETED, "a", 2)

    @pytest.mark.trio
    async def test_an_interrupted_run_that_may_not_go_on_is_ended(self, tmp_path: Path) -> None:
        """A stop that was requested, an ended or deleted session and a revoked or expired key end it, each with its reason, before its release or after it."""
        async with self.open_store(tmp_path) as store:
            await store.recover("epoch-1")
            key, _ = await store.create_api_key("laptop")
            late, _ = await store.create_api_key("late", expires_at=time.time() - 1)
            for released in (False, True):
                names = [
                    f"{what} {released}"
                    for what in ("stopped", "stopped by session", "ended", "deleted", "revoked", "expired")
                ]
                keys = {names[4]: key.id, names[5]: late.id}
                for name in names:
                    await store.begin_turn(_resumable(name, f"s {name}", keys.get(name, "")))
                if released:
                    await store.recover("epoch-2")
                await store.stop_resuming("epoch-2", run_id=names[0])
                await store.stop_resuming("epoch-2", session_id=f"s {names[1]}")
                await store.end_session(f"s {names[2]}", "user_exit")
                await store.delete_session(f"s {names[3]}")
                await store.revoke_api_key(key.id)
                key, _ = await store.create_api_key("another")
                if not released:
                    assert (await store.recover("epoch-2")).runs_released == 0
                assert await store.claim_interrupted("epoch-2") == []
                ends: list[tuple[str, str]] = []
                for name in names:
                    row = await store.get_run(name)
                    assert row is not None
                    (last,) = await store.events_after(name)
                    assert (last.number, last.event["event"]) == (1, f"run.{row.status.value}")
                    ends.append((row.status.value, row.error.rpartition(" because ")[2]))
                stopped = (
                    "cancelled",
                    "cancelled (stop: the server stopped before the run had ended; it was not begun again)",
                )
                assert ends == [
                    stopped,
                    stopped,
                    ("failed", "its session has ended."),
                    ("failed", "its session has ended."),
                    ("failed", "its API key was revoked or has expired."),
                    ("failed", "its API key was revoked or has expired."),
                ]

    @pytest.mark.trio
    async def test_a_run_that_does_not_ask_for_it_is_not_begun_again(self, tmp_path: Path) -> None:
        """It has failed, as its status and its log say."""
        async with self.open_store(tmp_path) as store:
            await store.recover("epoch-1")
            await store.begin_turn(_start(run=NewRun(run_id="run_1", session_id="s1")))
            await store.stop_resuming("epoch-1", run_id="run_1")
            found = await store.recover("epoch-2")
            assert (found.runs_interrupted, found.runs_released) == (1, 0)
            assert await store.claim_interrupted("epoch-2") == []
            row = await store.get_run("run_1")
            assert row is not None
            assert (row.status, row.attempt) == (RunStatus.FAILED, 0)


class JobStoreContract(_StoreSlice):
    """The promises of `JobStore`."""

    @pytest.mark.trio
    async def test_jobs_are_listed_with_their_last_output(self, tmp_path: Path) -> None:
        """The newest first; output that comes after the end is not kept."""
        async with self.open_store(tmp_path) as store:
            for number in range(3):
                await store.start_job(_job(f"job_{number}", f"s{number % 2}"))
            await store.note_job_output("job_0", "half done")
            await store.finish_job(JobFinish(job_id="job_2", state=JobState.FAILED))
            await store.note_job_output("job_2", "too late")
            assert [row.job_id for row in await store.list_jobs()] == ["job_2", "job_1", "job_0"]
            assert [row.job_id for row in await store.list_jobs(live_only=True)] == ["job_1", "job_0"]
            assert [row.job_id for row in await store.list_jobs(session_id="s0", page=Page(1, 1))] == ["job_0"]
            noted, late = await store.get_job("job_0"), await store.get_job("job_2")
            assert noted is not None
            assert noted.output_tail == "half done"
            assert late is not None
            assert (late.state, late.output_tail) == (JobState.FAILED, "")
            assert await store.get_job("nobody") is None


class InboxStoreContract(_StoreSlice):
    """The promises of `InboxStore`."""

    @pytest.mark.trio
    async def test_a_dead_letter_can_wait_again(self, tmp_path: Path) -> None:
        """It is listed with its reason, and revived once."""
        async with self.open_store(tmp_path) as store:
            number = await store.accept_message(_message("poison"))
            assert number is not None
            await store.inbox_dead(await store.take_inbox(INBOX, KEY), reason="it failed too often")
            ((row, reason),) = await store.list_inbox(InboxState.DEAD)
            assert (row.id, row.text, reason) == (number, "poison", "it failed too often")
            assert await inbox_states(store, [number, -1]) == {number: ("dead", "it failed too often")}
            assert await store.revive_inbox(number) is True
            assert await store.revive_inbox(number) is False
            assert [row.id for row in await store.take_inbox(INBOX, KEY)] == [number]

    @pytest.mark.trio
    async def test_the_way_of_a_completion_is_known(self, tmp_path: Path) -> None:
        """For each watched job that has ended: whether it was delivered, superseded or abandoned."""
        async with self.open_store(tmp_path) as store:
            await store.finish_turn(_finish(_start(), "hi", "there"))
            for name in ("job_1", "job_2"):
                await store.start_job(_job(name))
                await store.finish_job(JobFinish(job_id=name, state=JobState.EXITED, notice=_notice(name)))
            await store.supersede("job_1")
            await store.abandon(session_id="s1", reason="linger")
            assert await completion_states(store, ["job_1", "job_2"]) == {
                "job_1": ("superseded", ""),
                "job_2": ("abandoned", "linger"),
            }


class OutboxStoreContract(_StoreSlice):
    """The promises of `OutboxStore`."""

    def _replies(self, *texts: str) -> list[NewReply]:
        """Return a reply for each text; the first letter names the chat."""
        return [NewReply(platform=INBOX, target={"chat_id": text[0]}, text=text) for text in texts]

    @pytest.mark.trio
    async def test_a_chat_gets_its_replies_in_order(self, tmp_path: Path) -> None:
        """The oldest of each chat is handed out, once, and the next when it is settled."""
        async with self.open_store(tmp_path) as store:
            await store.recover("epoch-1")
            await store.add_outbox(self._replies("a1", "b1", "a2"), session_id="s1")
            rows = await store.claim_outbox(INBOX)
            assert [row.text for row in rows] == ["a1", "b1"]
            held = [row.id for row in rows]
            assert await store.claim_outbox(INBOX, holding=held) == []
            assert await store.outbox_sent(rows[0]) is True
            assert [row.text for row in await store.claim_outbox(INBOX, holding=held)] == ["a2"]
            assert await store.outbox_unsent() == 2
            assert await store.claim_outbox("elsewhere") == []

    @pytest.mark.trio
    async def test_a_failed_attempt_waits_for_its_time(self, tmp_path: Path) -> None:
        """What comes later does not overtake it."""
        async with self.open_store(tmp_path) as store:
            await store.recover("epoch-1")
            await store.add_outbox(self._replies("a1", "a2"))
            (row,) = await store.claim_outbox(INBOX)
            due = float(int(time.time()) + 600)
            assert await store.outbox_retry(row, at=due, error="busy") is True
            assert await store.claim_outbox(INBOX) == []
            assert await store.next_outbox_due(INBOX) == due
            (waiting,) = [one for one in await store.list_outbox(OutboxState.PENDING) if one.id == row.id]
            assert (waiting.attempts, waiting.error) == (1, "busy")

    @pytest.mark.trio
    async def test_what_its_sender_holds_is_not_claimed(self, tmp_path: Path) -> None:
        """A failed attempt is due again, and its sender does not know yet that its end was written: it does not get the reply a second time."""
        async with self.open_store(tmp_path) as store:
            await store.recover("epoch-1")
            await store.add_outbox(self._replies("a1", "a2"))
            (row,) = await store.claim_outbox(INBOX)
            assert await store.outbox_retry(row, at=0.0, error="busy") is True
            assert await store.claim_outbox(INBOX, holding=[row.id]) == []
            assert await store.next_outbox_due(INBOX, holding=[row.id]) is None
            assert [(one.text, one.attempts) for one in await store.claim_outbox(INBOX)] == [("a1", 2)]

    @pytest.mark.trio
    async def test_the_end_of_an_attempt_stands(self, tmp_path: Path) -> None:
        """A late failure does not change what was sent; a dead letter blocks no other reply and can be sent again."""
        async with self.open_store(tmp_path) as store:
            await store.recover("epoch-1")
            await store.add_outbox(self._replies("a1", "a2"))
            (first,) = await store.claim_outbox(INBOX)
            assert await store.outbox_dead(first, error="no such chat") is True
            (second,) = await store.claim_outbox(INBOX)
            assert await store.outbox_sent(second) is True
            assert await store.outbox_retry(second, at=time.time(), error="late") is False
            assert await store.outbox_dead(second, error="late") is False
            assert [row.error for row in await store.list_outbox(OutboxState.DEAD, platform=INBOX)] == ["no such chat"]
            assert await store.revive_outbox(first.id) is True
            assert await store.revive_outbox(first.id) is False
            assert [row.text for row in await store.claim_outbox(INBOX)] == ["a1"]

    @pytest.mark.trio
    async def test_a_dead_letter_of_a_former_owner_is_sent_again(self, tmp_path: Path) -> None:
        """A reply that one server gave up, and that is queued again after a restart, is claimed by the new one."""
        if not self.durable:
            pytest.skip("this store is not durable")
        async with self.open_store(tmp_path) as store:
            await store.recover("epoch-1")
            await store.add_outbox(self._replies("a1"))
            (first,) = await store.claim_outbox(INBOX)
            await store.outbox_dead(first, error="no such chat")
        async with self.open_store(tmp_path) as store:
            await store.recover("epoch-2")
            assert await store.revive_outbox(first.id) is True
            assert [row.text for row in await store.claim_outbox(INBOX)] == ["a1"]

    @pytest.mark.trio
    async def test_the_replies_to_a_chat_are_found(self, tmp_path: Path) -> None:
        """The newest first, sent or not, and those of that chat alone."""
        async with self.open_store(tmp_path) as store:
            await store.recover("epoch-1")
            await store.add_outbox(self._replies("a1", "b1", "a2"))
            (first, _) = await store.claim_outbox(INBOX)
            await store.outbox_sent(first)
            assert [row.text for row in await store.replies_to(INBOX, {"chat_id": "a"})] == ["a2", "a1"]
            assert [row.text for row in await store.replies_to(INBOX, {"chat_id": "a"}, limit=1)] == ["a2"]
            assert await store.replies_to("elsewhere", {"chat_id": "a"}) == []

    @pytest.mark.trio
    async def test_a_reply_that_was_under_way_is_sent_again_with_a_label(self, tmp_path: Path) -> None:
        """After the owner has ended, the reply can be claimed again, marked as one that the platform may have."""
        if not self.durable:
            pytest.skip("this store is not durable")
        async with self.open_store(tmp_path) as store:
            await store.recover("epoch-1")
            await store.add_outbox(self._replies("a1"))
            await store.claim_outbox(INBOX)
        async with self.open_store(tmp_path) as store:
            assert (await store.recover("epoch-2")).outbox_requeued == 1
            assert [(row.text, row.maybe_duplicate) for row in await store.claim_outbox(INBOX)] == [("a1", 1)]


class ApprovalStoreContract(_StoreSlice):
    """The promises of `ApprovalStore`."""

    @pytest.mark.trio
    async def test_a_request_is_answered_once(self, tmp_path: Path) -> None:
        """The first answer stands; those that wait in a scope are listed oldest first."""
        async with self.open_store(tmp_path) as store:
            for name in ("a1", "a2", "a3"):
                await store.create_approval(_approval(name))
            await store.create_approval(_approval("b1", "run_2", tenant="red"))
            answered = await store.answer_approval("a1", ApprovalChoice.DENY, reason="no")
            assert answered is not None
            assert (answered.state, answered.reason) == (ApprovalState.DENIED, "no")
            assert await store.answer_approval("a1", ApprovalChoice.ONCE) is None
            assert await store.get_approval("a1") == answered
            assert [one.id for one in await store.list_approvals(scope="run_1")] == ["a2", "a3"]
            assert await store.answer_approval("a2", ApprovalChoice.ONCE) is not None
            assert await store.answer_approval("a3", ApprovalChoice.DENY) is not None
            assert [one.id for one in await store.list_approvals(tenant="red")] == ["b1"]
            assert await store.expire_approval("b1") is True
            assert await store.expire_approval("b1") is False
            assert await store.list_approvals() == []
            assert len(await store.list_approvals(state=None, newest=True, page=Page(3, 1))) == 3

    @pytest.mark.trio
    async def test_grants_reach_as_far_as_the_answer(self, tmp_path: Path) -> None:
        """`once` grants nothing, `session` the scope, `always` the grantee; the end of the scope takes its own grants."""
        async with self.open_store(tmp_path) as store:
            await store.create_approval(_approval("a1"))
            await store.answer_approval("a1", ApprovalChoice.ONCE)
            assert await store.granted("run_1") == frozenset()
            await store.create_approval(_approval("a2"))
            await store.answer_approval("a2", ApprovalChoice.SESSION)
            assert await store.granted("run_1") == {"recursive delete"}
            assert await store.granted("run_2") == frozenset()
            await store.create_approval(_approval("a3", grantee="tenant red"))
            await store.answer_approval("a3", ApprovalChoice.ALWAYS)
            assert await store.granted("run_2", grantee="tenant red") == {"recursive delete"}
            assert await store.granted("run_2", grantee="tenant blue") == frozenset()
            await store.create_approval(_approval("a4"))
            assert await store.end_approval_scope("run_1", reason="run_ended") == 1
            assert [(one.scope, one.category) for one in await store.list_grants()] == [
                ("tenant red", "recursive delete")
            ]

    @pytest.mark.trio
    async def test_a_grant_is_given_and_taken_back(self, tmp_path: Path) -> None:
        """In its own scope only, and taken back once."""
        async with self.open_store(tmp_path) as store:
            await grant_category(store, "disk", scope="run_1")
            assert await store.granted("run_1") == {"disk"}
            assert await store.granted("run_2") == frozenset()
            assert await store.revoke_grant("disk", scope="run_1") is True
            assert await store.revoke_grant("disk", scope="run_1") is False


class ResponseStoreContract(_StoreSlice):
    """The promises of `ResponseStore`."""

    @pytest.mark.trio
    async def test_a_response_is_its_tenants(self, tmp_path: Path) -> None:
        """Kept byte for byte; another tenant neither reads nor deletes it; the name of a conversation leads to it."""
        response = StoredResponse(id="r1", tenant="red", session_id="s1", body=b"\x00{}", conversation="c")
        async with self.open_store(tmp_path) as store:
            await store.put_response(response)
            found = await store.get_response("red", "r1")
            assert found is not None
            assert found.body == b"\x00{}"
            assert await store.get_response("blue", "r1") is None
            assert await store.delete_response("blue", "r1") is False
            assert await store.latest_response("red", "c") == "r1"
            assert await store.delete_response("red", "r1") is True
            assert await store.latest_response("red", "c") is None

    @pytest.mark.trio
    async def test_a_reply_is_repeated_exactly(self, tmp_path: Path) -> None:
        """For its tenant, route and body; another body under the same key is a conflict."""
        reply = IdempotentReply(
            tenant="red", route="/x", key="k", fingerprint="f", status=201, headers=(("a", "1"),), body=b"\xff"
        )
        async with self.open_store(tmp_path) as store:
            finish = msgspec.structs.replace(_finish(_start(), "one", "two"), also=(reply,))
            await store.finish_turn(finish)
            assert await store.get_reply("red", "/x", "k", "f") == reply
            assert await store.get_reply("blue", "/x", "k", "f") is None
            assert await store.get_reply("red", "/y", "k", "f") is None
            with pytest.raises(IdempotencyConflict):
                await store.get_reply("red", "/x", "k", "other")


class DeliveryStoreContract(_StoreSlice):
    """The promises of `DeliveryStore`."""

    @pytest.mark.trio
    async def test_a_delivery_is_accepted_with_its_message_once(self, tmp_path: Path) -> None:
        """Another route may use the same id."""
        async with self.open_store(tmp_path) as store:
            assert await store.delivery_known("github", "d1") is False
            assert await store.accept_delivery("github", "d1", _message("push")) is not None
            assert await store.accept_delivery("github", "d1", _message("push")) is None
            assert await store.delivery_known("github", "d1") is True
            assert await store.accept_delivery("gitlab", "d1", _message("push")) is not None
            assert await store.inbox_waiting(inbox=INBOX) == 2
            assert await store.record_delivery("github", "d2") is True
            assert await store.record_delivery("github", "d2") is False


class CronStoreContract(_StoreSlice):
    """The promises of `CronStore`."""

    @pytest.mark.trio
    async def test_a_slot_is_claimed_once(self, tmp_path: Path) -> None:
        """One claimant runs it, and the job advances to its next slot with the claim; the first end stands."""
        async with self.open_store(tmp_path) as store:
            await store.put_cron_job(CronJob(id="j", name="nightly", schedule="0 3 * * *", next_at=10.0))
            assert await store.claim_cron_slot("j", 10.0, next_at=20.0) is True
            assert await store.claim_cron_slot("j", 10.0, next_at=20.0) is False
            assert await store.start_cron_slot("j", 10.0, session_id="s1") is True
            assert await store.finish_cron_slot("j", 10.0, CronState.COMPLETED, output="ok") is True
            assert await store.finish_cron_slot("j", 10.0, CronState.FAILED, error="late") is False
            found = await store.get_cron_job("j")
            assert found is not None
            assert found.next_at == 20.0
            (execution,) = await store.list_cron_executions("j")
            assert (execution.state, execution.output) == (CronState.COMPLETED, "ok")

    @pytest.mark.trio
    async def test_jobs_are_changed_and_forgotten(self, tmp_path: Path) -> None:
        """Putting one again changes it; lists go by name and tenant."""
        async with self.open_store(tmp_path) as store:
            made = await store.put_cron_job(CronJob(id="j", name="b", schedule="x", tenant="red"))
            changed = await store.put_cron_job(CronJob(id="j", name="a", schedule="y", tenant="red", enabled=False))
            await store.put_cron_job(CronJob(id="k", name="c", schedule="x", tenant="blue", next_at=5.0))
            await store.set_cron_next("k", None)
            assert (changed.created_at, changed.enabled) == (made.created_at, False)
            assert [(job.id, job.next_at) for job in await store.list_cron_jobs()] == [("j", None), ("k", None)]
            assert [job.id for job in await store.list_cron_jobs(tenant="blue")] == ["k"]
            assert await store.delete_cron_job("j") is True
            assert await store.delete_cron_job("j") is False
            assert await store.get_cron_job("j") is None


class KeyStoreContract(_StoreSlice):
    """The promises of `KeyStore`."""

    @pytest.mark.trio
    async def test_a_key_works_until_it_is_revoked_or_expires(self, tmp_path: Path) -> None:
        """It is a tenant of its own unless it is given one; its text is in no file of the store."""
        async with self.open_store(tmp_path) as store:
            key, secret = await store.create_api_key("laptop", scopes=("runs",))
            found = await store.find_api_key(secret)
            assert found is not None
            assert (found.id, found.scopes, found.tenant) == (key.id, ("runs",), key.id)
            assert await store.find_api_key(secret + "x") is None
            _, late = await store.create_api_key("late", tenant="red", expires_at=time.time() - 1)
            assert await store.find_api_key(late) is None
            assert await store.revoke_api_key(key.id) is True
            assert await store.revoke_api_key(key.id) is False
            assert await store.find_api_key(secret) is None
            assert key.id not in [one.id for one in await store.list_api_keys()]
            assert key.id in [one.id for one in await store.list_api_keys(include_revoked=True)]
        assert _files_with(tmp_path, secret.encode()) == []


class AccessStoreContract(_StoreSlice):
    """The promises of `AccessStore`."""

    @pytest.mark.trio
    async def test_a_code_lets_one_person_in_once(self, tmp_path: Path) -> None:
        """On its own platform, while it is in force."""
        async with self.open_store(tmp_path) as store:
            assert await store.offer_pairing(INBOX, "ABCD-1234", user_id="7", user_name="Ann") is True
            assert await store.offer_pairing(INBOX, "WXYZ-1234", user_id="7") is False
            assert [one.user_name for one in await store.list_pairings(INBOX)] == ["Ann"]
            assert await store.redeem_pairing("elsewhere", "ABCD-1234") is None
            allowed = await store.redeem_pairing(INBOX, "ABCD-1234")
            assert allowed is not None
            assert allowed.user_id == "7"
            assert await store.redeem_pairing(INBOX, "ABCD-1234") is None
            await store.offer_pairing(INBOX, "LATE-1234", user_id="8", ttl=-1.0)
            assert await store.redeem_pairing(INBOX, "LATE-1234") is None

    @pytest.mark.trio
    async def test_allow_lists_are_per_platform(self, tmp_path: Path) -> None:
        """A user who is allowed on one platform is not allowed on another."""
        async with self.open_store(tmp_path) as store:
            await store.allow_user(INBOX, "1", user_name="Ann")
            assert await store.user_allowed(INBOX, "1") is True
            assert await store.user_allowed("elsewhere", "1") is False
            assert [one.user_id for one in await store.list_allowed(INBOX)] == ["1"]
            assert await store.disallow_user(INBOX, "1") is True
            assert await store.disallow_user(INBOX, "1") is False
            assert await store.list_allowed() == []


class CursorStoreContract(_StoreSlice):
    """The promises of `CursorStore`."""

    @pytest.mark.trio
    async def test_the_last_value_counts(self, tmp_path: Path) -> None:
        """Also after closing and opening; None forgets."""
        async with self.open_store(tmp_path) as store:
            assert await store.get_cursor(INBOX) is None
            for value in ("1", "2"):
                await store.set_cursor(INBOX, value)
                await store.set_meta("a", value)
            assert (await store.get_cursor(INBOX), await store.get_meta("a")) == ("2", "2")
        if self.durable:
            async with self.open_store(tmp_path) as store:
                assert (await store.get_cursor(INBOX), await store.get_meta("a")) == ("2", "2")
                await store.set_meta("a", None)
                assert await store.get_meta("a") is None


class MaintenanceStoreContract(_StoreSlice):
    """The promises of `MaintenanceStore`."""

    @pytest.mark.trio
    async def test_only_ended_sessions_are_removed(self, tmp_path: Path) -> None:
        """An open session stays, however old; source, reason and tenant select. A dry run only counts."""
        async with self.open_store(tmp_path) as store:
            for name in ("open", "ended", "other"):
                await store.create_session(_session(name, tenant="red"))
            await store.end_session("ended", "done")
            await store.end_session("other", "kept")
            assert await store.prune_sessions(-1, INBOX, end_reason="done", tenant="blue") == 0
            assert await store.prune_sessions(-1, INBOX, end_reason="done", tenant="red", dry_run=True) == 1
            assert await store.prune_sessions(-1, INBOX, end_reason="done", tenant="red") == 1
            assert {one.id for one in await store.list_sessions()} == {"open", "other"}


class GatewayStoreContract(
    SessionStoreContract,
    SearchStoreContract,
    RunStoreContract,
    JobStoreContract,
    InboxStoreContract,
    OutboxStoreContract,
    ApprovalStoreContract,
    ResponseStoreContract,
    DeliveryStoreContract,
    CronStoreContract,
    KeyStoreContract,
    AccessStoreContract,
    CursorStoreContract,
    MaintenanceStoreContract,
    StoreContract,
):
    """Everything that a gateway needs of its store: each slice of `Store`, that of the runtime included."""

    @abstractmethod
    def open_store(self, path: Path) -> AbstractAsyncContextManager[Store]:
        """Open the store that is kept in the folder `path`, for the body of the `async with`."""


class NodeStoreContract(ABC):
    """The promises of `NodeStore`, for a store that several processes share. A store with one owner (`lease_seconds` 0) needs none of them."""

    @abstractmethod
    def open_nodes(self, path: Path) -> AbstractAsyncContextManager[tuple[Store, Store]]:
        """Open the store in the folder `path` for two nodes, whose leases last for a minute or more, for the body of the `async with`."""

    @pytest.mark.trio
    async def test_a_singleton_is_held_by_one_node(self, tmp_path: Path) -> None:
        """Claiming it again is no news; it is free when it is released, and when its node leaves."""
        async with self.open_nodes(tmp_path) as (one, two):
            await one.recover("epoch-1")
            await two.recover("epoch-2")
            assert one.owner != two.owner
            assert await one.claim_lease("cron")
            assert await one.claim_lease("cron")
            assert not await two.claim_lease("cron")
            await two.release_lease("cron")
            assert not await two.claim_lease("cron")
            await one.release_lease("cron")
            assert await two.claim_lease("cron")
            await two.leave_node("epoch-2")
            assert await one.claim_lease("cron")

    @pytest.mark.trio
    async def test_a_node_that_has_left_can_write_nothing(self, tmp_path: Path) -> None:
        """What it owned has its end, and whatever it tries raises `Fenced`."""
        async with self.open_nodes(tmp_path) as (one, two):
            await one.recover("epoch-1")
            await two.recover("epoch-2")
            left = await two.renew_node({"turns": 3})
            assert left is not None
            assert left > 0
            assert {node.incarnation for node in await one.list_nodes()} == {one.owner, two.owner}
            await two.start_job(_job())
            await two.leave_node("epoch-2")
            assert [node.incarnation for node in await one.list_nodes()] == [one.owner]
            assert (await one.backlog())["jobs"] == 0
            with pytest.raises(Fenced):
                await two.accept_message(_message(key="another"))
            with pytest.raises(Fenced):
                await two.renew_node({})
            assert await one.inbox_waiting(inbox=INBOX, session_key="another") == 0

    @pytest.mark.trio
    async def test_an_interrupted_run_is_claimed_by_one_node(self, tmp_path: Path) -> None:
        """Of two nodes that claim at once one gets each run; what the lost node writes of it is refused; a stop reaches the one that has it."""
        async with self.open_nodes(tmp_path) as (one, two):
            await one.recover("epoch-1")
            await two.recover("epoch-2")
            starts = [_resumable(f"run_{number}", f"s{number}") for number in range(8)]
            for start in starts:
                await two.begin_turn(start)
            lost = two.owner
            await two.leave_node("epoch-2")
            with pytest.raises(Fenced):
                await two.append_events([_event(1)])
            with pytest.raises(Fenced):
                await two.finish_turn(_finish(msgspec.structs.replace(starts[1], turn_id="t", hold=True), "q", "a"))
            await two.recover("epoch-3")
            claimed: list[tuple[str, ResumedRun]] = []

            async def claim(store: Store) -> None:
                claimed.extend([(store.owner, found) for found in await store.claim_interrupted("epoch-3")])

            async with trio.open_nursery() as nursery:
                for store in (one, two):
                    nursery.start_soon(claim, store)
            assert sorted(found.run.run_id for _, found in claimed) == [f"run_{number}" for number in range(8)]
            assert {found.status for _, found in claimed} == {RunStatus.QUEUED}
            for owner, found in claimed:
                row = await one.get_run(found.run.run_id)
                assert row is not None
                assert (row.owner, row.attempt, owner != lost) == (owner, 2, True)
                assert [event.number for event in await one.events_after(found.run.run_id)] == [1]
            await one.stop_resuming("epoch-1", session_id="s3")
            again = [found for store in (one, two) for found in await store.claim_interrupted("epoch-3")]
            assert [found.run.run_id for found in again if found.stopped] == ["run_3"]

    @pytest.mark.trio
    async def test_nodes_share_the_wakes_of_a_root(self, tmp_path: Path) -> None:
        """Of turns that begin at once in different sessions, on one node or two, one begins if the notices of their root may start one more turn."""
        async with self.open_nodes(tmp_path) as (one, two):
            await one.recover("epoch-1")
            await two.recover("epoch-2")
            roots = [f"root_{number}" for number in range(12)]
            starts: list[tuple[Store, TurnStart]] = []
            refused: list[str] = []
            for root_id in roots:
                for store, name in ((one, "a"), (one, "b"), (two, "c")):
                    where = _context(f"{root_id}-{name}", f"{root_id}-{name}")
                    number = await store.add_notice(msgspec.structs.replace(_notice(), routing=where, root_id=root_id))
                    assert number is not None
                    assert await store.take_inbox(INBOX, where.session_key)
                    start = TurnStart(turn_id=f"turn_{name}", context=where, source=INBOX, inbox_ids=(number,))
                    starts.append((store, msgspec.structs.replace(start, roots=(root_id,), wakes=1)))

            async def begin(store: Store, start: TurnStart) -> None:
                try:
                    await store.begin_turn(start)
                except BudgetExhausted:
                    refused.extend(start.roots)

            async with trio.open_nursery() as nursery:
                for store, start in starts:
                    nursery.start_soon(begin, store, start)
            assert sorted(refused) == sorted(2 * roots)
            assert [await two.root_wakes(root_id) for root_id in roots] == [1] * len(roots)

    @pytest.mark.trio
    async def test_a_request_is_answered_once(self, tmp_path: Path) -> None:
        """By the node that it was sent to, which gets it until it says that it has it; if that node has ended, the answer says so."""
        async with self.open_nodes(tmp_path) as (one, two):
            await one.recover("epoch-1")
            await two.recover("epoch-2")
            request = NodeRequest(id="r1", node=two.owner, kind="stop", target="run_1")
            assert await one.ask_node(request)
            assert await one.get_answer("r1") is None
            assert await two.take_requests() == [request]
            assert await two.take_requests() == [request]
            assert await two.take_requests(["r1"]) == []
            assert await two.take_requests() == []
            await two.answer_request("r1", {"ok": True})
            await two.answer_request("r1", {"ok": False})
            answer = await one.get_answer("r1")
            assert answer is not None
            assert (dict(answer.value), answer.gone) == ({"ok": True}, False)
            late = NodeRequest(id="r2", node=two.owner, kind="stop")
            assert await one.ask_node(late)
            await two.leave_node("epoch-2")
            answer = await one.get_answer("r2")
            assert answer is not None
            assert answer.gone
            assert not await one.ask_node(NodeRequest(id="r3", node=late.node, kind="stop"))

    @pytest.mark.trio
    async def test_every_node_knows_who_works_on_what(self, tmp_path: Path) -> None:
        """While a turn is under way its node has the session and the lane; when it has ended, no node has, and its run does not change any more."""
        async with self.open_nodes(tmp_path) as (one, two):
            await one.recover("epoch-1")
            await two.recover("epoch-2")
            number = await one.accept_message(_message())
            assert number is not None
            await one.take_inbox(INBOX, KEY)
            assert await two.lane_owner(INBOX, KEY) == one.owner
            assert (await two.inbox_waiting(inbox=INBOX), await two.inbox_waiting(inbox=INBOX, taken=True)) == (0, 1)
            run = NewRun(run_id="run_1", session_id="s1")
            start = TurnStart(turn_id="turn_1", context=_context(), source=INBOX, run=run, inbox_ids=(number,))
            await one.begin_turn(start)
            assert await two.session_owners("s1") == [one.owner]
            for status in (RunStatus.WAITING_FOR_APPROVAL, RunStatus.RUNNING):
                await one.set_run_status("run_1", status)
                found = await two.get_run("run_1")
                assert found is not None
                assert found.status is status
            await one.finish_turn(_finish(start, "one", "two"))
            await one.set_run_status("run_1", RunStatus.RUNNING)
            found = await two.get_run("run_1")
            assert found is not None
            assert found.status is RunStatus.COMPLETED
            assert await two.session_owners("s1") == []
            assert await two.lane_owner(INBOX, KEY) == ""

    @pytest.mark.trio
    async def test_a_session_is_bound_to_one_node(self, tmp_path: Path) -> None:
        """By a claim, which outlives its node until it is released or claimed anew, else by its live jobs; other nodes leave the lane of the session alone."""
        async with self.open_nodes(tmp_path) as (one, two):
            await one.recover("epoch-1")
            await two.recover("epoch-2")
            number = await one.accept_message(_message())
            assert number is not None
            session_id = await one.resolve_session(_message().routing, source=INBOX)
            assert await two.session_host(session_id) is None
            assert await one.claim_host(session_id)
            assert await one.claim_host(session_id)
            assert not await two.claim_host(session_id)
            assert await two.session_host(session_id) == SessionHost(node=one.owner)
            assert {node.incarnation: node.hosted for node in await two.list_nodes()} == {one.owner: 1, two.owner: 0}
            assert await two.take_inbox(INBOX, KEY) == []
            await two.start_job(_job())
            assert await one.session_host("s1") == SessionHost(node=two.owner)
            gone = one.owner
            await one.leave_node("epoch-1")
            assert await two.session_host(session_id) == SessionHost(node=gone, gone=True)
            assert [row.id for row in await two.take_inbox(INBOX, KEY)] == [number]
            await two.release_host(session_id, "another")
            assert await two.claim_host(session_id)
            await two.release_host(session_id, gone)
            assert await two.session_host(session_id) == SessionHost(node=two.owner)
            await two.end_session(session_id, "over")
            assert await two.session_host(session_id) is None

    @pytest.mark.trio
    async def test_a_cron_slot_is_ended_by_the_node_that_has_run_it(self, tmp_path: Path) -> None:
        """Whichever node runs the clock and has claimed it, or has tried to begin it; it is ended once, and not by another node afterwards."""
        async with self.open_nodes(tmp_path) as (one, two):
            await one.recover("epoch-1")
            await two.recover("epoch-2")
            assert await one.claim_cron_slot("j", 1.0)
            assert await two.finish_cron_slot("j", 1.0, CronState.COMPLETED, output="done")
            with pytest.raises(Fenced):
                await one.finish_cron_slot("j", 1.0, CronState.FAILED)
            assert await one.claim_cron_slot("j", 2.0)
            assert await one.start_cron_slot("j", 2.0, session_id="s")
            assert await two.start_cron_slot("j", 2.0, session_id="s")
            assert not await two.start_cron_slot("j", 2.0, session_id="s"), "the slot was begun twice by one node"
            await one.leave_node("epoch-1")
            assert await two.finish_cron_slot("j", 2.0, CronState.COMPLETED)
            states = [row.state for row in await two.list_cron_executions("j")]
            assert states == [CronState.COMPLETED, CronState.COMPLETED]
