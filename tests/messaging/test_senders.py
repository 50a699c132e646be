"""The senders: order, retries, dead letters, labels after a crash, and what happens on the way out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from hermes_trio.messaging.addresses import Address
from hermes_trio.messaging.contract import Outgoing, PlatformError, PlatformErrorKind, SendResult
from hermes_trio.messaging.senders import DUPLICATE_LABEL, target_of
from hermes_trio.messaging.settings import OutboxSettings
from hermes_trio.runtime.ports import NewReply
from hermes_trio.store import OutboxRow, OutboxState
from hermes_trio.testing.faults import StoreFaults
from hermes_trio.testing.memory_platform import MemoryPlatform

from .harness import open_world, scripted

pytestmark = pytest.mark.usefixtures("virtual_clock")


def fault(kind: PlatformErrorKind, **details: object) -> PlatformError:
    """A platform's refusal."""
    return PlatformError(kind, kind.value, **details)  # type: ignore[arg-type]


@pytest.mark.one_node
async def test_a_failure_that_passes_is_tried_again_with_growing_pauses() -> None:
    """Nothing is lost and nothing is doubled."""
    chat = MemoryPlatform()
    chat.send_faults.extend(fault(PlatformErrorKind.TRANSIENT) for _ in range(4))
    async with open_world(scripted(), chat) as world:
        await chat.say("hi")
        await chat.wait_sent(1)
        assert 2 + 4 + 8 + 16 <= trio.current_time() <= 2 + 4 + 8 + 16 + 4
        await world.idle()
        await trio.testing.wait_all_tasks_blocked()
        assert world.senders.statistics()["memory"] == {"sent": 1, "failed": 4, "dead": 0, "in_flight": 0}
    assert chat.texts() == ["echo: hi"]


async def test_the_platforms_own_pause_is_kept() -> None:
    """`Retry-After` decides, not our own idea of it."""
    chat = MemoryPlatform()
    chat.send_faults.append(fault(PlatformErrorKind.RATE_LIMITED, retry_after=77.0))
    async with open_world(scripted(), chat):
        await chat.say("hi")
        await chat.wait_sent(1)
        assert trio.current_time() == pytest.approx(77, abs=0.1)


@pytest.mark.one_node
async def test_a_retry_whose_time_was_computed_by_a_clock_that_was_ahead_comes_after_its_delay() -> None:
    """The clock is set forward after the reply was queued, and back while it waits for its third attempt."""
    ahead = 0.0
    chat = MemoryPlatform()
    chat.send_faults.extend(fault(PlatformErrorKind.TRANSIENT) for _ in range(2))
    async with open_world(scripted(), chat, clock=lambda: trio.current_time() + ahead) as world:
        await chat.say("hi")
        await trio.sleep(1)
        ahead = 3600.0
        await trio.sleep(4)
        assert world.senders.statistics()["memory"]["failed"] == 2
        ahead = 0.0
        await chat.wait_sent(1)
        assert 2 + 4 <= trio.current_time() <= 2 + 4 + 2
    assert chat.texts() == ["echo: hi"]


async def test_the_order_of_a_chat_is_kept_and_chats_do_not_wait_for_each_other() -> None:
    """What waits behind a reply that is tried again comes after it; other chats go on."""
    chat = MemoryPlatform()
    chat.refuses = lambda message: (
        fault(PlatformErrorKind.TRANSIENT) if message.chat_id == "slow" and trio.current_time() < 100 else None
    )
    async with open_world(scripted(), chat):
        for number in range(3):
            await chat.say(f"s{number}", chat="slow")
            await chat.say(f"f{number}", chat="fast")
        await chat.until(lambda: len(chat.texts("fast")) == 3)
        assert trio.current_time() < 1
        assert chat.texts("slow") == []
        await chat.until(lambda: len(chat.texts("slow")) == 3)
    assert chat.texts("slow") == ["echo: s0", "echo: s1", "echo: s2"]


@pytest.mark.parametrize("kind", [PlatformErrorKind.FORBIDDEN, PlatformErrorKind.NOT_FOUND])
async def test_a_failure_for_good_is_a_dead_letter_that_can_be_queued_again(kind: PlatformErrorKind) -> None:
    """It does not hold up the next reply of the chat."""
    chat = MemoryPlatform()
    chat.send_faults.append(fault(kind))
    async with open_world(scripted(), chat) as world:
        await chat.say("one")
        await chat.say("two")
        await chat.wait_sent(1)
        (dead,) = await world.store.list_outbox(OutboxState.DEAD)
        assert (dead.text, dead.error) == ("echo: one", f"{kind.value}: {kind.value}")
        assert await world.store.revive_outbox(dead.id)
        await chat.wait_sent(2)
    assert chat.texts() == ["echo: two", "echo: one"]


async def test_after_a_day_of_failures_a_reply_is_given_up() -> None:
    """The dead letter says what the last failure was."""
    chat = MemoryPlatform()
    chat.refuses = lambda message: fault(PlatformErrorKind.TRANSIENT)
    async with open_world(scripted(), chat) as world:
        await chat.say("one")
        await trio.sleep(25 * 3600)
        (dead,) = await world.store.list_outbox(OutboxState.DEAD)
        assert dead.attempts > 200


async def test_an_error_that_nobody_can_explain_is_not_tried_for_ever() -> None:
    """Five times, then it is a dead letter."""
    chat = MemoryPlatform()
    chat.send_faults.extend(RuntimeError("what?") for _ in range(5))
    async with open_world(scripted(), chat) as world:
        await chat.say("one")
        await trio.sleep(3600)
        assert len(await world.store.list_outbox(OutboxState.DEAD)) == 1


async def test_markup_that_the_platform_refuses_is_sent_plain() -> None:
    """In the same attempt; the answer arrives."""
    chat = MemoryPlatform()
    chat.refuses = lambda message: None if message.plain else fault(PlatformErrorKind.BAD_FORMAT)
    async with open_world(scripted("**bold**"), chat):
        await chat.say("hi")
        (sent,) = await chat.wait_sent(1)
    assert sent.message.plain
    assert sent.text == "**bold**"


async def test_a_long_answer_is_split_and_a_retry_repeats_no_part_that_has_arrived() -> None:
    """Each part is a row of its own, in order."""
    chat = MemoryPlatform(limit=100)
    text = " ".join(f"word{number}" for number in range(60))
    seen: list[Outgoing] = []

    def second_fails_once(message: Outgoing) -> PlatformError | None:
        seen.append(message)
        return fault(PlatformErrorKind.TRANSIENT) if len(seen) == 2 else None

    chat.refuses = second_fails_once
    async with open_world(scripted(text), chat) as world:
        await chat.say("hi")
        await chat.wait_sent(5)
        await world.idle()
    assert all(len(part) <= 100 for part in chat.texts())
    numbers = [part.rpartition(" (")[2] for part in chat.texts()]
    assert numbers == [f"{index}/{len(numbers)})" for index in range(1, len(numbers) + 1)]
    assert [one.reply_to for one in chat.sent] == ["in-1", *[""] * (len(numbers) - 1)]


@pytest.mark.one_node  # another node sends it again at once, labelled, to the same platform
async def test_a_crash_between_the_send_and_its_note_sends_it_again_labelled(tmp_path: Path) -> None:
    """The platform had taken it: the second one says that it may be a duplicate."""
    path = tmp_path / "state.db"
    chat = MemoryPlatform()
    chat.gate = trio.Event()
    async with open_world(scripted(), chat, path=path, outbox=OutboxSettings(flush_seconds=0)):
        await chat.say("hi")
        await chat.wait_sent(1)
    again = MemoryPlatform()
    async with open_world(scripted(), again, path=path) as world:
        await again.wait_sent(1)
        await world.idle()
    assert chat.texts() == ["echo: hi"]
    assert again.texts() == [f"{DUPLICATE_LABEL}\n\necho: hi"]


async def test_a_crash_between_commit_and_send_sends_it_once_without_a_label(tmp_path: Path) -> None:
    """Nobody had seen it."""
    path = tmp_path / "state.db"
    chat = MemoryPlatform()
    async with open_world(scripted(), chat, path=path) as world:
        for node in world.nodes:
            node.senders._claim = _nothing  # type: ignore[method-assign]
        await chat.say("hi")
        await trio.sleep(1)
    again = MemoryPlatform()
    async with open_world(scripted(), again, path=path) as world:
        await again.wait_sent(1)
        await world.idle()
    assert again.texts() == ["echo: hi"]


async def _nothing(sender: object) -> list[object]:
    return []


async def test_a_send_without_an_answer_is_repeated_with_the_label() -> None:
    """Whether it arrived is not known, and that is what the second one says (SC-23)."""
    chat = MemoryPlatform()
    chat.gate = trio.Event()
    async with open_world(scripted(), chat, outbox=OutboxSettings(send_seconds=10, look_seconds=86_400)) as world:
        await chat.say("hi")
        await chat.wait_sent(1)
        await trio.sleep(11)
        chat.gate = None
        await chat.wait_sent(2)
        await world.idle()
    assert chat.texts() == ["echo: hi", f"{DUPLICATE_LABEL}\n\necho: hi"]


async def test_a_send_without_an_answer_is_repeated_with_the_label_by_the_next_server_too(tmp_path: Path) -> None:
    """That the platform may have it is in the row: a restart between two attempts loses neither the reply nor the label."""
    chat = MemoryPlatform()
    chat.send_faults.append(fault(PlatformErrorKind.TRANSIENT, ambiguous=True))
    async with open_world(scripted(), chat, path=tmp_path / "db", outbox=OutboxSettings(first_delay=600)) as world:
        await chat.say("hi")
        await trio.sleep(10)
        assert [row.maybe_duplicate for row in await world.store.list_outbox(OutboxState.PENDING)] == [1]
    assert chat.texts() == []
    async with open_world(scripted(), chat, path=tmp_path / "db"):
        await chat.wait_sent(1)
    assert chat.texts() == [f"{DUPLICATE_LABEL}\n\necho: hi"]


async def test_a_platform_that_takes_everything_and_never_answers_gets_three_copies() -> None:
    """Then the reply is given up with the reason, the next one of the chat goes out, and it can be sent again by hand."""
    chat = MemoryPlatform()
    chat.gate = trio.Event()
    async with open_world(scripted(), chat, outbox=OutboxSettings(send_seconds=10, look_seconds=86_400)) as world:
        await chat.say("hi")
        await trio.sleep(12 * 3600)
        assert chat.texts() == ["echo: hi", *[f"{DUPLICATE_LABEL}\n\necho: hi"] * 2]
        (given_up,) = await world.store.list_outbox(OutboxState.DEAD)
        assert given_up.error.startswith(
            "outcome unknown: memory left 3 attempts unanswered; it probably has the reply"
        )
        chat.gate = None
        await chat.say("again")
        await chat.wait_sent(4)
        assert await world.store.revive_outbox(given_up.id)
        await chat.wait_sent(5)
        await world.idle()
        assert await world.store.list_outbox(OutboxState.DEAD) == []
    assert chat.texts()[3:] == ["echo: again", f"{DUPLICATE_LABEL}\n\necho: hi"]


async def test_a_platform_that_answers_with_an_error_of_its_own_is_tried_until_it_works() -> None:
    """It says that it failed: what it may have done is labelled, and an outage of hours loses nothing."""
    chat = MemoryPlatform()
    chat.send_faults += [fault(PlatformErrorKind.TRANSIENT, ambiguous=True, code=502) for _ in range(30)]
    async with open_world(scripted(), chat) as world:
        await chat.say("hi")
        await chat.wait_sent(1)
        await world.idle()
    assert chat.texts() == [f"{DUPLICATE_LABEL}\n\necho: hi"]


async def test_a_reply_whose_server_is_killed_in_each_attempt_is_given_up(tmp_path: Path) -> None:
    """Each of them may have arrived."""
    path = tmp_path / "state.db"
    texts: list[str] = []
    dead: list[OutboxRow] = []
    for number in range(5):
        chat = MemoryPlatform()
        chat.gate = trio.Event()
        async with open_world(scripted(), chat, path=path, outbox=OutboxSettings(flush_seconds=0)) as world:
            if number == 0:
                await chat.say("hi")
            await trio.sleep(5)
            dead = await world.store.list_outbox(OutboxState.DEAD)
        texts += chat.texts()
    assert texts == ["echo: hi", *[f"{DUPLICATE_LABEL}\n\necho: hi"] * 2]
    assert [row.error.partition(";")[0] for row in dead] == ["outcome unknown: memory left 3 attempts unanswered"]


async def test_on_the_way_out_what_the_last_turns_left_is_sent() -> None:
    """Within a bounded time; one platform that hangs does not hold up another (SC-20)."""
    hangs, works_well = MemoryPlatform("hangs"), MemoryPlatform("well")
    hangs.gate = trio.Event()
    async with open_world(scripted(), hangs, works_well) as world:
        await world.hub.messaging.post(Address("hangs", "1"), "bye")
        await world.hub.messaging.post(Address("well", "1"), "bye")
        began = trio.current_time()
    assert trio.current_time() - began <= 6
    assert works_well.texts() == ["bye"]


async def test_replies_of_a_platform_that_is_gone_wait_for_it(tmp_path: Path) -> None:
    """They are neither lost nor sent elsewhere."""
    path = tmp_path / "state.db"
    chat = MemoryPlatform("old")
    chat.refuses = lambda message: fault(PlatformErrorKind.TRANSIENT)
    async with open_world(scripted(), chat, path=path):
        await chat.say("hi")
        await trio.sleep(1)
    async with open_world(scripted(), MemoryPlatform("new"), path=path) as world:
        await trio.sleep(100)
        assert len(await world.store.list_outbox(OutboxState.PENDING, platform="old")) == 1


@pytest.mark.one_node
async def test_a_platform_whose_client_cannot_be_opened_takes_nothing_else_with_it() -> None:
    """It is tried again, and what waits is sent then."""

    class Shut(MemoryPlatform):
        """Its client fails twice."""

        opened = 0

        @asynccontextmanager
        async def open(self) -> AsyncIterator[None]:
            self.opened += 1
            if self.opened < 3:
                raise OSError("no certificates")
            yield

    shut, chat = Shut("shut"), MemoryPlatform()
    async with open_world(scripted(), shut, chat) as world:
        await world.hub.messaging.post(Address("shut", "1"), "hello")
        await chat.say("hi")
        await chat.wait_sent(1)
        assert trio.current_time() < 1
        await shut.wait_sent(1)
        assert trio.current_time() >= 60


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("verb", ["outbox_sent", "outbox_retry", "outbox_dead", "claim_outbox", "next_outbox_due"])
async def test_a_write_about_a_reply_that_fails_blocks_no_chat(verb: str, after: bool) -> None:
    """The store fails three times, before or after its commit: each reply of the chat is sent once, in order, without a label and without a restart."""
    chat = MemoryPlatform()
    faults = StoreFaults()
    chat.send_faults.append(fault(PlatformErrorKind.TRANSIENT))
    if verb == "outbox_dead":
        chat.send_faults.append(fault(PlatformErrorKind.FORBIDDEN))
    async with open_world(scripted(), chat, faults=faults) as world:
        faults.fail(verb, times=3, after_commit=after)
        for number in range(3):
            await chat.say(f"{number}")
        await trio.sleep(300)
        await world.idle()
        sent = [f"echo: {number}" for number in range(3)]
        assert chat.texts() == (sent[1:] if verb == "outbox_dead" else sent)
        assert faults.injected
        assert await world.store.list_outbox(OutboxState.ATTEMPTING) == []
        assert world.senders.statistics()["memory"]["in_flight"] == 0
        assert len(world.runtime.core.ends) == 0


async def test_a_store_that_answers_late_makes_no_reply_come_again_and_again() -> None:
    """The end of an attempt is written late, and repeated: until the sender knows the result, the reply is not claimed again, and then it is sent once."""

    class Distant(MemoryPlatform):
        """A message takes a moment."""

        async def send(self, message: Outgoing) -> SendResult:
            await trio.sleep(0.5)
            return await super().send(message)

    chat = Distant()
    faults = StoreFaults()
    chat.send_faults.append(fault(PlatformErrorKind.RATE_LIMITED, retry_after=20.0))
    chat.send_faults.append(fault(PlatformErrorKind.TRANSIENT, ambiguous=True))
    async with open_world(scripted(), chat, faults=faults) as world:
        await chat.say("later", chat="b")
        await trio.sleep(1)
        faults.slow("outbox_retry", seconds=45)
        await chat.say("hi", chat="a")
        # At 20 s the reply to b is claimed, behind the slow write; the sender still holds the reply to a then.
        await trio.sleep(300)
        await world.idle()
        assert faults.injected
        assert await world.store.outbox_unsent() == 0
        assert world.senders.statistics()["memory"]["in_flight"] == 0
    assert chat.texts("b") == ["echo: later"]
    assert chat.texts("a") == [f"{DUPLICATE_LABEL}\n\necho: hi"]


@pytest.mark.one_node
@pytest.mark.parametrize("where", ["payload", "hook"])
async def test_a_reply_that_cannot_be_composed_costs_itself_alone(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake in one reply neither interrupts what is being sent to other chats nor comes back for ever: it becomes a dead letter."""
    chat = MemoryPlatform()
    chat.gate = trio.Event()

    def reply(to: str, text: str, payload: Mapping[str, Any]) -> NewReply:
        return NewReply(platform="memory", target=target_of(Address("memory", to, None)), text=text, payload=payload)

    async def before_send(row: OutboxRow) -> str:
        if row.text == "poison":
            raise KeyError("no such preview")
        return ""

    async with open_world(scripted(), chat) as world:
        if where == "hook":
            monkeypatch.setattr(world.senders.hooks, "before_send", before_send)
        await world.store.add_outbox([reply("other", "fine", {})])
        await chat.wait_sent(1)
        choices = {"approval_id": "a", "choices": ["bogus"]} if where == "payload" else {}
        await world.store.add_outbox([reply("bad", "poison", choices), reply("bad", "next", {})])
        await trio.sleep(10)
        chat.gate.set()
        await trio.sleep(3600)
        assert (chat.texts("other"), chat.texts("bad")) == (["fine"], ["next"])
        assert [row.text for row in await world.store.list_outbox(OutboxState.DEAD)] == ["poison"]
