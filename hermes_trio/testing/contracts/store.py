"""The contract of stores of a runtime (`hermes_trio.RuntimeStore`), as tests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import trio

from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.errors import BudgetExhausted, JobRefused, MailboxFull
from hermes_trio.runtime.outcome import JobState, TurnState
from hermes_trio.runtime.ports import (
    InboxKind,
    JobFinish,
    JobStart,
    Message,
    NewMessage,
    NewNotice,
    NoticeKind,
    RuntimeStore,
    TurnFinish,
    TurnStart,
    inbox_topic,
)
from hermes_trio.store.errors import CommitUncertain, StoreError
from hermes_trio.testing.faults import StoreFaults

T = TypeVar("T")

INBOX = "contract"
KEY = "agent:main:contract:dm:1"


def _context(session_id: str = "s1", key: str = KEY) -> SessionContext:
    return SessionContext(platform=INBOX, session_id=session_id, session_key=key)


def _message(text: str = "hello", key: str = KEY, dedupe: str = "") -> NewMessage:
    return NewMessage(inbox=INBOX, session_key=key, routing=_context("", key), text=text, dedupe_key=dedupe)


def _notice(text: str = "done", job_id: str = "job_1") -> NewNotice:
    return NewNotice(
        inbox=INBOX,
        routing=_context(),
        kind=NoticeKind.COMPLETION,
        text=text,
        job_id=job_id,
        root_id="root_1",
    )


def _job(job_id: str = "job_1", inbox: str = INBOX) -> JobStart:
    return JobStart(
        job_id=job_id,
        kind="process",
        title="make test",
        root_id="root_1",
        turn_id="turn_1",
        routing=_context(),
        inbox=inbox,
    )


def _start(taken: Sequence[int] = (), turn_id: str = "turn_1") -> TurnStart:
    return TurnStart(turn_id=turn_id, context=_context(), source=INBOX, inbox_ids=tuple(taken))


def _finish(start: TurnStart, *texts: str, acknowledged: Sequence[int] = ()) -> TurnFinish:
    roles = ("user", "assistant")
    messages = tuple(Message(role=roles[place % 2], content=text) for place, text in enumerate(texts))
    return TurnFinish(
        start=start, state=TurnState.COMPLETED, messages=messages, text="", acknowledged=tuple(acknowledged)
    )


async def _texts(store: RuntimeStore, session_id: str = "s1") -> list[str]:
    return [message.text for message in await store.load_history(session_id)]


async def _waiting(store: RuntimeStore) -> list[tuple[int, str]]:
    return [(row.id, row.text) for row in await store.take_inbox(INBOX, KEY)]


class StoreContract(ABC):
    """Subclass it as `class TestMine(StoreContract)` and implement `open_store`."""

    durable: bool = True
    """Whether a store that is opened again at the same path has what was written before."""

    @abstractmethod
    def open_store(self, path: Path) -> AbstractAsyncContextManager[RuntimeStore]:
        """Open the store that is kept in the folder `path`, for the body of the `async with`."""

    @pytest.mark.trio
    async def test_a_turn_is_kept_in_order(self, tmp_path: Path) -> None:
        """Messages come back oldest first; an unknown session has none."""
        async with self.open_store(tmp_path) as store:
            assert await store.load_history("nobody") == []
            await store.finish_turn(_finish(_start(), "one", "two"))
            await store.finish_turn(_finish(_start(turn_id="turn_2"), "three", "four"))
            assert await _texts(store) == ["one", "two", "three", "four"]

    @pytest.mark.trio
    async def test_what_was_written_is_there_after_a_restart(self, tmp_path: Path) -> None:
        """A finished turn and an accepted message survive closing."""
        if not self.durable:
            pytest.skip("this store is not durable")
        async with self.open_store(tmp_path) as store:
            await store.finish_turn(_finish(_start(), "one", "two"))
            kept = await store.accept_message(_message("later"))
        async with self.open_store(tmp_path) as store:
            recovery = await store.recover("epoch-2")
            assert recovery.messages_waiting == 1
            assert await _texts(store) == ["one", "two"]
            assert await _waiting(store) == [(kept, "later")]

    @pytest.mark.trio
    async def test_a_key_names_one_open_session(self, tmp_path: Path) -> None:
        """The same key leads to the same session until that ends or a fresh one is asked for; an ended one is not reused."""
        async with self.open_store(tmp_path) as store:
            first = await store.resolve_session(_context(""), source=INBOX)
            assert await store.resolve_session(_context(""), source=INBOX) == first
            assert await store.end_session(first, "session_reset") is True
            assert await store.end_session(first, "again") is False
            second = await store.resolve_session(_context(""), source=INBOX)
            assert second != first
            assert await store.resolve_session(_context(""), source=INBOX, fresh=True) not in (first, second)

    @pytest.mark.trio
    async def test_messages_wait_in_order_until_a_turn_takes_them(self, tmp_path: Path) -> None:
        """The oldest message is claimed, and claimed again until a turn begins with it; what a turn has begun with is never begun again."""
        async with self.open_store(tmp_path) as store:
            first = await store.accept_message(_message("one"))
            second = await store.accept_message(_message("two"))
            assert first is not None
            assert await _waiting(store) == await _waiting(store) == [(first, "one")]
            claimed = await store.take_inbox(INBOX, KEY, 1)
            assert [(row.kind, row.attempts) for row in claimed] == [(InboxKind.MESSAGE, 3)]
            assert await store.waiting_sessions(INBOX) == [KEY]
            await store.begin_turn(_start([first]))
            assert await _waiting(store) == [(second, "two")]

    @pytest.mark.trio
    async def test_a_message_is_accepted_once(self, tmp_path: Path) -> None:
        """Of many that come at once with one dedupe key one is accepted; messages without a key are all accepted."""
        accepted: list[int | None] = []
        async with self.open_store(tmp_path) as store:

            async def accept() -> None:
                accepted.append(await store.accept_message(_message(dedupe="7")))

            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(accept)
            assert len([id for id in accepted if id is not None]) == 1
            assert None not in [await store.accept_message(_message()) for _ in range(2)]
            assert await store.inbox_waiting(inbox=INBOX, session_key=KEY) == 3

    @pytest.mark.trio
    async def test_a_full_mailbox_takes_nothing(self, tmp_path: Path) -> None:
        """Beyond `limit` accepting raises `MailboxFull`, and nothing is written."""
        async with self.open_store(tmp_path) as store:
            await store.accept_message(_message("one"), limit=1)
            with pytest.raises(MailboxFull):
                await store.accept_message(_message("two", dedupe="2"), limit=1)
            assert [text for _, text in await _waiting(store)] == ["one"]
            # A refused message was not accepted: it may be sent again.
            assert await store.accept_message(_message("two", dedupe="2"), limit=2) is not None

    @pytest.mark.trio
    async def test_a_notice_leaves_with_the_commit_that_told_it(self, tmp_path: Path) -> None:
        """Beginning a turn with a notice takes nothing; finishing it does, together with the messages."""
        async with self.open_store(tmp_path) as store:
            await store.finish_turn(_finish(_start(), "hi", "there"))
            told = await store.add_notice(_notice("built"))
            assert told is not None
            start = _start(turn_id="turn_2")
            await store.begin_turn(start)
            assert await _waiting(store) == [(told, "built")]
            await store.finish_turn(_finish(start, "[built]", "good", acknowledged=[told]))
            assert await _waiting(store) == []
            assert (await _texts(store))[-1] == "good"

    @pytest.mark.trio
    async def test_the_end_of_a_job_and_its_notice_are_one(self, tmp_path: Path) -> None:
        """The first end counts; one that has been seen, or that comes to an ended session, is not waiting."""
        async with self.open_store(tmp_path) as store:
            await store.finish_turn(_finish(_start(), "hi", "there"))
            await store.start_job(_job())
            end = JobFinish(job_id="job_1", state=JobState.EXITED, notice=_notice("bye"))
            first = await store.finish_job(end)
            assert first is not None
            assert await store.finish_job(end) is None
            assert await _waiting(store) == [(first, "bye")]
            await store.start_job(_job("job_2"))
            seen = JobFinish(job_id="job_2", state=JobState.EXITED, notice=_notice(job_id="job_2"), superseded=True)
            assert await store.finish_job(seen) is None
            await store.start_job(_job("job_3"))
            await store.end_session("s1", "session_reset")
            late = JobFinish(job_id="job_3", state=JobState.EXITED, notice=_notice(job_id="job_3"))
            assert await store.finish_job(late) is None

    @pytest.mark.trio
    async def test_a_job_is_written_down_once(self, tmp_path: Path) -> None:
        """Its beginning can be repeated, after an answer that was lost, while it runs. An id that another job has, or had, is refused."""
        async with self.open_store(tmp_path) as store:
            await store.finish_turn(_finish(_start(), "hi", "there"))
            for _ in range(2):
                await store.start_job(_job())
            with pytest.raises(JobRefused, match="job_1"):
                await store.start_job(msgspec.structs.replace(_job(), turn_id="turn_2"))
            end = JobFinish(job_id="job_1", state=JobState.EXITED, notice=_notice("bye"))
            assert await store.finish_job(end) is not None
            with pytest.raises(JobRefused, match="job_1"):
                await store.start_job(_job())

    @pytest.mark.trio
    async def test_what_was_seen_or_given_up_waits_no_more(self, tmp_path: Path) -> None:
        """Superseding and abandoning say how many rows they took, once; a root is open until nothing of it waits."""
        async with self.open_store(tmp_path) as store:
            await store.finish_turn(_finish(_start(), "hi", "there"))
            await store.add_notice(_notice(job_id="job_1"))
            await store.add_notice(_notice(job_id="job_2"))
            assert await store.supersede("job_1") == 1
            assert await store.supersede("job_1") == 0
            assert await store.root_open("root_1")
            assert await store.abandon(session_id="s1", reason="session_ended") == 1
            assert not await store.root_open("root_1")
            assert await _waiting(store) == []

    @pytest.mark.trio
    async def test_a_commit_wakes_those_who_subscribed(self, tmp_path: Path) -> None:
        """The signal comes after the row can be read, for the topic and key that were asked for, and not after the subscription has ended."""
        woken: list[str] = []
        heard = trio.Event()

        def wake(key: str) -> None:
            woken.append(key)
            heard.set()

        async with self.open_store(tmp_path) as store:
            with store.subscribe(inbox_topic(INBOX), wake, KEY):
                await store.accept_message(_message(key="another"))
                await store.accept_message(_message())
                with trio.fail_after(5):
                    await heard.wait()
                assert set(woken) == {KEY}
                assert await _waiting(store)
            woken.clear()
            await store.accept_message(_message())
            await trio.sleep(0.01)
            assert woken == []

    @pytest.mark.trio
    async def test_boot_ends_what_has_no_task(self, tmp_path: Path) -> None:
        """A job that was running is lost, and its owner is told once; a second boot finds nothing to do."""
        async with self.open_store(tmp_path) as store:
            await store.finish_turn(_finish(_start(), "hi", "there"))
            await store.start_job(_job())
            await store.start_job(_job("job_2", inbox=""))
            assert (await store.recover("epoch-2")).jobs_lost == 2
            assert len(await _waiting(store)) == 1
            assert (await store.recover("epoch-3")).jobs_lost == 0
            assert (await store.backlog())["inbox"] == 1
            assert len(await _waiting(store)) == 1

    @pytest.mark.trio
    async def test_a_cancelled_commit_is_whole_or_not_there(self, tmp_path: Path) -> None:
        """Wherever a caller is cancelled, the messages and the acknowledgement of a turn are both there or neither is."""
        async with self.open_store(tmp_path) as store:
            await store.finish_turn(_finish(_start(), "hi", "there"))
            for number in range(6):
                told = await store.add_notice(_notice(f"notice {number}", job_id=f"job_{number}"))
                assert told is not None
                finish = _finish(
                    _start(turn_id=f"turn_{number + 2}"), "[notice]", f"told {number}", acknowledged=[told]
                )
                with trio.CancelScope() as scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(store.finish_turn, finish)
                        for _ in range(number):
                            await trio.lowlevel.checkpoint()
                        scope.cancel()
                await store.accept_message(_message(key="behind"))  # whatever was in the queue before is written by now
                kept = f"told {number}" in await _texts(store)
                assert kept == (told not in [id for id, _ in await _waiting(store)])

    @pytest.mark.trio
    async def test_a_claim_is_released_or_becomes_a_dead_letter(self, tmp_path: Path) -> None:
        """What was released is claimed again, and that claim is not ended by the one before; dead letters and acknowledged rows are not waiting."""
        async with self.open_store(tmp_path) as store:
            await store.probe()
            ids = [await store.accept_message(_message(text)) for text in ("one", "two")]
            first, second = [number for number in ids if number is not None]
            claimed = await store.take_inbox(INBOX, KEY)
            assert [row.id for row in claimed] == [first]
            await store.release_inbox(claimed)
            again = await store.take_inbox(INBOX, KEY)
            assert [row.id for row in again] == [first]
            await store.release_inbox(claimed)
            await store.inbox_dead(claimed, reason="it failed too often")
            assert await store.inbox_waiting(inbox=INBOX, session_key=KEY) == 1
            await store.inbox_dead(again, reason="it failed too often")
            assert [row.id for row in await store.take_inbox(INBOX, KEY)] == [second]
            await store.acknowledge([second])
            assert await _waiting(store) == []
            assert await store.inbox_waiting(inbox=INBOX, session_key=KEY) == 0

    @pytest.mark.trio
    async def test_what_a_session_is_promised_is_counted(self, tmp_path: Path) -> None:
        """A watched job that runs and a notice that waits count; so do the turns that the notices of a root began."""
        async with self.open_store(tmp_path) as store:
            await store.finish_turn(_finish(_start(), "hi", "there"))
            assert await store.session_promised("s1") == 0
            await store.start_job(_job())
            assert await store.session_promised("s1") == 1
            told = await store.finish_job(JobFinish(job_id="job_1", state=JobState.EXITED, notice=_notice("bye")))
            assert told is not None
            assert await store.session_promised("s1") == 1
            assert await store.root_wakes("root_1") == 0
            await store.take_inbox(INBOX, KEY)
            start = _start([told], "turn_2")
            await store.begin_turn(start)
            assert await store.root_wakes("root_1") == 1
            await store.finish_turn(_finish(start, "[bye]", "good", acknowledged=[told]))
            assert await store.session_promised("s1") == 0
            assert not await store.root_open("root_1")

    @pytest.mark.trio
    async def test_a_turn_begins_only_within_the_wakes_of_its_roots(self, tmp_path: Path) -> None:
        """The count and the claim of the rows are decided in one write: a refused turn leaves nothing, and a repeated begin is not counted twice."""
        async with self.open_store(tmp_path) as store:
            await store.finish_turn(_finish(_start(), "hi", "there"))
            for turn_id in ("turn_2", "turn_3"):
                number = await store.add_notice(_notice("match"))
                assert number is not None
                start = msgspec.structs.replace(_start([number], turn_id), roots=("root_1",), wakes=2)
                await store.take_inbox(INBOX, KEY)
                await store.begin_turn(start)
                await store.begin_turn(start)
                await store.finish_turn(_finish(start, "[match]", "good", acknowledged=[number]))
            number = await store.add_notice(_notice("match"))
            other = await store.add_notice(msgspec.structs.replace(_notice("other"), root_id="root_2"))
            assert number is not None
            assert other is not None
            rows = await store.take_inbox(INBOX, KEY)
            assert [row.id for row in rows] == [number, other]
            start = msgspec.structs.replace(_start([other, number], "turn_4"), roots=("root_2", "root_1"), wakes=2)
            with pytest.raises(BudgetExhausted, match="wakes: 2 of 2 used"):
                await store.begin_turn(start)
            assert (await store.root_wakes("root_1"), await store.root_wakes("root_2")) == (2, 0)
            await store.release_inbox(rows[:1])
            assert await store.abandon(session_id="s1", root_id="root_1", reason="used up") == 1
            await store.begin_turn(msgspec.structs.replace(start, inbox_ids=(other,), roots=("root_2",)))
            assert (await store.root_wakes("root_1"), await store.root_wakes("root_2")) == (2, 1)

    @pytest.mark.trio
    async def test_a_living_owner_keeps_what_is_its_own(self, tmp_path: Path) -> None:
        """Reaping owners that have ended ends no work of this one."""
        async with self.open_store(tmp_path) as store:
            await store.recover("epoch-1")
            await store.start_job(_job())
            assert (await store.reap("epoch-1")).jobs_lost == 0
            assert await store.root_open("root_1")

    @pytest.mark.trio
    async def test_a_write_that_failed_or_is_uncertain_may_be_made_again(self, tmp_path: Path) -> None:
        """A caller that does not know whether a write was committed repeats it: the message, the turn and the end of the job are there once."""
        faults = StoreFaults()
        verbs = ("accept_message", "begin_turn", "finish_turn", "finish_job")
        for verb in verbs:
            faults.fail(verb)
            faults.fail(verb, after_commit=True)

        async with faults.around(self.open_store(tmp_path)) as store:

            async def retry(write: Callable[[], Awaitable[T]]) -> T:
                for error in (StoreError, CommitUncertain):
                    with pytest.raises(error):
                        await write()
                return await write()

            await retry(lambda: store.accept_message(_message("one", dedupe="7")))
            ((number, text),) = await _waiting(store)
            assert text == "one"
            start = _start([number])
            await retry(lambda: store.begin_turn(start))
            await store.start_job(_job())
            finish = _finish(start, "one", "two")
            await retry(lambda: store.finish_turn(finish))
            end = JobFinish(job_id="job_1", state=JobState.EXITED, notice=_notice("bye"))
            await retry(lambda: store.finish_job(end))
            assert await _texts(store) == ["one", "two"]
            assert [text for _, text in await _waiting(store)] == ["bye"]
        assert len(faults.injected) == 2 * len(verbs)
