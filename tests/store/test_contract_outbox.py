"""The contract of the outbox."""

from __future__ import annotations

import msgspec

from hermes_trio.runtime.ports import NewReply
from hermes_trio.store import OutboxState, Store

from .conftest import Clock


def entry(text: str, chat: str = "1", platform: str = "telegram") -> NewReply:
    """A reply to a chat."""
    return NewReply(platform=platform, target={"chat_id": chat, "thread": None}, text=text, payload={"k": 1})


async def test_a_chat_gets_its_replies_in_order(store: Store) -> None:
    """Only the oldest unsent reply of each chat is handed out; the next one when that is settled."""
    await store.add_outbox([entry("a1"), entry("b1", "2"), entry("a2"), entry("other", platform="slack")])

    first = await store.claim_outbox("telegram")
    assert [(row.text, row.attempts, row.target["chat_id"]) for row in first] == [("a1", 1, "1"), ("b1", 1, "2")]
    held = [row.id for row in first]
    assert await store.claim_outbox("telegram", holding=held) == []
    assert await store.outbox_sent(first[0]) is True
    assert [row.text for row in await store.claim_outbox("telegram", holding=held)] == ["a2"]
    assert await store.outbox_unsent() == 3


async def test_a_failed_attempt_waits_for_its_time(store: Store, clock: Clock) -> None:
    """A retry is handed out when it is due, with its attempts and the last error; later replies do not overtake it."""
    await store.add_outbox([entry("a1"), entry("a2")])
    (row,) = await store.claim_outbox("telegram")
    await store.outbox_retry(row, at=clock.now + 30, error="429")

    assert await store.claim_outbox("telegram") == []
    assert await store.next_outbox_due("telegram") == clock.now + 30
    clock.advance(30)
    (again,) = await store.claim_outbox("telegram")
    assert (again.id, again.attempts, again.error) == (row.id, 2, "429")


async def test_a_clock_that_is_set_back_holds_up_no_reply(store: Store, clock: Clock) -> None:
    """A reply that seems to come from the future is due at once: it does not wait for the clock to catch up."""
    await store.add_outbox([entry("a1")])
    clock.advance(-3600)
    assert await store.next_outbox_due("telegram") == 0
    (row,) = await store.claim_outbox("telegram")
    assert row.text == "a1"
    await store.outbox_retry(row, at=clock.now + 60, error="busy")
    assert await store.claim_outbox("telegram") == [], "its next attempt waits like any other"
    assert await store.next_outbox_due("telegram") == clock.now + 60


async def test_a_reply_that_has_waited_is_due_whatever_its_time_is(store: Store, clock: Clock) -> None:
    """Its time may have been computed by a clock that was ahead. Only the attempt that is named counts."""
    await store.add_outbox([entry("a1")])
    (row,) = await store.claim_outbox("telegram")
    await store.outbox_retry(row, at=clock.now + 3600, error="busy")
    earlier, waited = [(row.id, row.attempts - 1)], [(row.id, row.attempts)]
    assert await store.next_outbox_due("telegram", waited=earlier) == clock.now + 3600
    assert await store.claim_outbox("telegram", waited=earlier) == []
    assert await store.next_outbox_due("telegram", waited=waited) == 0
    (again,) = await store.claim_outbox("telegram", waited=waited)
    assert (again.id, again.attempts) == (row.id, 2)


async def test_an_uncertain_attempt_is_remembered_in_the_row(store: Store, clock: Clock) -> None:
    """The next attempt knows how often the platform may have got the reply, because the row has the number; a dead letter that is tried again counts as one."""
    await store.add_outbox([entry("a1")])
    (row,) = await store.claim_outbox("telegram")
    await store.outbox_retry(msgspec.structs.replace(row, maybe_duplicate=2), at=clock.now, error="no answer")
    (again,) = await store.claim_outbox("telegram")
    assert again.maybe_duplicate == 2
    await store.outbox_dead(again, error="gone")
    await store.revive_outbox(again.id)
    assert (await store.claim_outbox("telegram"))[0].maybe_duplicate == 1
    await store.recover("e2")
    assert [row.maybe_duplicate for row in await store.claim_outbox("telegram")] == [2]


async def test_dead_letters_are_kept_and_can_be_revived(store: Store) -> None:
    """A reply that was given up no longer blocks its chat; it can be listed and tried again."""
    await store.add_outbox([entry("a1"), entry("a2")])
    (row,) = await store.claim_outbox("telegram")
    assert await store.outbox_dead(row, error="chat not found") is True
    (following,) = await store.claim_outbox("telegram")
    await store.outbox_sent(following)

    dead = await store.list_outbox(OutboxState.DEAD, platform="telegram")
    assert [(letter.text, letter.error) for letter in dead] == [("a1", "chat not found")]
    assert await store.revive_outbox(row.id) is True
    assert await store.revive_outbox(row.id) is False
    assert [letter.text for letter in await store.claim_outbox("telegram")] == ["a1"]
    assert [letter.text for letter in await store.list_outbox(OutboxState.SENT)] == ["a2"]


async def test_a_settled_reply_stays_settled(store: Store, clock: Clock) -> None:
    """Sent is sent: a late failure report changes nothing."""
    await store.add_outbox([entry("a")], session_id="s1")
    (number,) = await store.claim_outbox("telegram")
    await store.outbox_sent(number)

    assert await store.outbox_retry(number, at=clock.now, error="late") is False
    assert await store.outbox_dead(number, error="late") is False
    assert await store.outbox_unsent() == 0
    assert await store.next_outbox_due("telegram") is None


async def test_what_was_said_in_one_chat_is_found_whatever_became_of_it(store: Store) -> None:
    """Newest first, sent or not, of this chat of this platform alone, at most so many."""
    await store.add_outbox([entry("a1"), entry("a2"), entry("b1", chat="b")])
    (first, _) = await store.claim_outbox("telegram")
    await store.outbox_sent(first)
    await store.add_outbox([entry("a3")])
    target = entry("x").target
    assert [row.text for row in await store.replies_to("telegram", target)] == ["a3", "a2", "a1"]
    assert [row.text for row in await store.replies_to("telegram", target, limit=2)] == ["a3", "a2"]
    assert await store.replies_to("slack", target) == []
