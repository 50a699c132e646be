"""The gateway as a whole: message in, turn, reply out, background work that reports back, failing adapters, restart."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import trio

from hermes_trio import RuntimeSettings, Turn
from hermes_trio.messaging.contract import AdapterState, Disposition, PlatformError, PlatformErrorKind
from hermes_trio.messaging.platforms import Platform, Platforms
from hermes_trio.store.errors import StoreUnavailable
from hermes_trio.testing.memory_platform import MemoryPlatform

from .harness import OPEN, memory_store, open_world, scripted, starts_job, works

pytestmark = pytest.mark.usefixtures("virtual_clock")


async def test_a_message_becomes_a_turn_and_its_reply_goes_to_the_chat_and_thread() -> None:
    """The reply is anchored to the message that it answers."""
    chat = MemoryPlatform()
    async with open_world(scripted(), chat):
        reception = await chat.say("hello", chat="42", thread="7")
        (reply,) = await chat.wait_sent(1)
    assert reception.disposition is Disposition.ACCEPTED
    assert (reply.text, reply.chat, reply.thread, reply.reply_to) == ("echo: hello", "42", "7", "in-1")


async def test_background_work_reports_back_to_its_own_chat_and_thread_hours_later() -> None:
    """Chat, thread and reply anchor are those of the message that started the work."""
    chat = MemoryPlatform()
    async with open_world(scripted(starts_job(7200, "built")), chat):
        await chat.say("build", chat="42", thread="7")
        _, notice = await chat.wait_sent(2)
        assert trio.current_time() >= 7200
    assert "built" in notice.text
    assert (notice.chat, notice.thread, notice.reply_to) == ("42", "7", "in-1")


async def test_an_adapter_that_cannot_connect_backs_off_alone_and_is_visible() -> None:
    """30, 60, 120, 240, then 300 seconds; the other adapter and its conversations never notice (GW-16, SC-32)."""
    broken, healthy = MemoryPlatform("broken"), MemoryPlatform("healthy")
    broken.connect_faults.extend(PlatformError(PlatformErrorKind.TRANSIENT, "no route") for _ in range(7))
    async with open_world(scripted(), broken, healthy) as world:
        await broken.until(lambda: broken.connects == 7)
        await trio.sleep(1)
        line = world.hub.health()["platforms"]["broken"]
        assert (line["state"], line["error_code"]) == ("retrying", "transient")
        assert world.hub.health()["status"] == "degraded"
        node = next(node for node in world.runtime.tree.root.walk() if (node.kind, node.id) == ("adapter", "broken"))
        assert "no route" in node.waits_on
        await healthy.say("hi")
        assert (await healthy.wait_sent(1))[0].text == "echo: hi"
        await broken.until(lambda: world.hub.runners["broken"].state is AdapterState.CONNECTED)
        assert world.hub.health()["status"] == "ok"
    waits = [later - earlier for earlier, later in itertools.pairwise(broken.connect_times)]
    assert waits == [30, 60, 120, 240, 300, 300, 300]


async def test_an_adapter_continues_soon_after_the_store_is_back() -> None:
    """A store that cannot be reached is tried every five seconds, and does not lengthen the pauses after failures of the platform."""
    chat = MemoryPlatform()
    chat.connect_faults.extend(StoreUnavailable("no route") for _ in range(7))
    chat.connect_faults.append(PlatformError(PlatformErrorKind.TRANSIENT, "no route"))
    async with open_world(scripted(), chat) as world:
        await trio.sleep(1)
        line = world.hub.health()["platforms"]["memory"]
        assert (line["state"], line["error_code"]) == ("retrying", "store")
        await chat.until(lambda: world.hub.runners["memory"].state is AdapterState.CONNECTED)
    waits = [later - earlier for earlier, later in itertools.pairwise(chat.connect_times)]
    assert waits == [5] * 7 + [30]


async def test_a_permanent_error_is_said_and_not_tried_again() -> None:
    """A bad token stays off for a week, visibly, while the other adapter works (issue of one bad token)."""
    broken, healthy = MemoryPlatform("broken"), MemoryPlatform("healthy")
    broken.connect_faults.append(PlatformError(PlatformErrorKind.UNAUTHORIZED, "the token is not valid"))
    async with open_world(scripted(), broken, healthy) as world:
        await trio.sleep(7 * 86400)
        assert broken.connects == 1
        line = world.hub.health()["platforms"]["broken"]
        assert (line["state"], line["error_code"]) == ("fatal", "unauthorized")
        assert "the token is not valid" in line["error"]
        node = next(node for node in world.runtime.tree.root.walk() if (node.kind, node.id) == ("adapter", "broken"))
        assert "fatal" in node.note
        await healthy.say("hi")
        await healthy.wait_sent(1)


async def test_a_crash_of_an_adapter_shows_its_kind_and_not_its_text() -> None:
    """What an unknown exception says may hold a secret, so only its type is reported."""
    chat = MemoryPlatform()
    chat.connect_faults.append(RuntimeError("secret-token-123"))
    async with open_world(scripted(), chat) as world:
        await trio.sleep(1)
        line = world.hub.health()["platforms"]["memory"]
        assert line["state"] == "retrying"
        assert "RuntimeError" in line["error"]
        assert "secret" not in line["error"]
        await chat.until(lambda: chat.connects == 2)


async def test_a_reply_that_was_computed_during_a_reconnect_goes_out_through_the_next_connection() -> None:
    """Turns do not belong to the connection: it may break and come back while they run (GW-27, SC-14)."""
    chat = MemoryPlatform()
    async with open_world(scripted(works(100)), chat):
        await chat.say("long work")
        await trio.sleep(1)
        chat.disconnect(PlatformError(PlatformErrorKind.TRANSIENT, "reset"))
        (reply,) = await chat.wait_sent(1)
        assert chat.connects == 2
    assert reply.text == "worked"


async def test_the_typing_sign_lasts_as_long_as_the_turn() -> None:
    """It is repeated while the turn runs and stops with it: no task is left (SC-15)."""
    chat = MemoryPlatform(typing=4)
    async with open_world(scripted(works(10)), chat) as world:
        await chat.say("work", chat="9")
        await chat.wait_sent(1)
        await world.idle()
        typed = len(chat.typed)
        await trio.sleep(60)
        assert len(chat.typed) == typed == 3
        assert not [node for node in world.runtime.tree.root.walk() if node.kind == "typing"]
    assert set(chat.typed) == {("9", "")}


async def test_an_answer_is_shown_while_it_is_written_and_ends_as_one_message() -> None:
    """The preview is edited into the last word: one message, no duplicate (SC-12)."""

    async def writes(turn: Turn) -> str:
        for word in ("Once upon a time there was ", "a task tree that ", "was never left alone."):
            turn.emit("message.delta", delta=word)
            await trio.sleep(2)
        return "Once upon a time there was a task tree that was never left alone."

    chat = MemoryPlatform(edits=True)
    member = Platform(chat, type(OPEN)(allow_all=True, stream=True))
    async with open_world(scripted(writes), member) as world:
        await chat.say("tell me")
        await chat.until(lambda: bool(chat.sent) and chat.sent[0].text.endswith("alone."))
        await world.idle()
    (shown,) = chat.sent
    assert shown.edits[0] == "Once upon a time there was …"
    assert len(shown.edits) >= 3


async def test_what_was_queued_is_kept_across_a_restart_and_what_ran_is_told(tmp_path: Path) -> None:
    """A graceful restart interrupts the running turn with a word and begins the queued message afterwards (SC-7, SC-9)."""
    path = tmp_path / "state.db"
    chat = MemoryPlatform()
    async with open_world(scripted(works(1000)), chat, path=path):
        await chat.say("first")
        await chat.say("second")
        await trio.sleep(1)
    (told,) = chat.sent
    assert "Interrupted" in told.text
    again = MemoryPlatform()
    async with open_world(scripted(), again, path=path) as world:
        await again.wait_sent(1)
        await world.idle()
    assert again.texts() == ["echo: second"]


async def test_a_message_that_comes_while_draining_is_kept_for_the_next_start(tmp_path: Path) -> None:
    """ "Kept" is said only after it is written down, and it is answered once (SC-9)."""
    path = tmp_path / "state.db"
    chat = MemoryPlatform()
    async with open_world(scripted(), chat, path=path) as world:
        for node in world.nodes:
            await node.runtime.drain(0)
        reception = await chat.say("are you there?")
        assert reception.disposition is Disposition.ACCEPTED
        await chat.wait_sent(1)
        assert "kept" in chat.sent[0].text
    again = MemoryPlatform()
    async with open_world(scripted(), again, path=path) as world:
        await again.wait_sent(1)
        await world.idle()
    assert again.texts() == ["echo: are you there?"]


async def test_the_gateway_ends_without_leaving_a_task_behind() -> None:
    """Leaving the scope ends adapters, lanes and senders, in that order (SC-4, SC-21)."""
    chat = MemoryPlatform()
    async with open_world(scripted(works(1000)), chat, runtime_settings=RuntimeSettings(watchdog_seconds=0)) as world:
        await chat.say("work")
        await trio.sleep(1)
        tree = world.runtime.tree
    assert [
        node.kind for node in tree.root.walk() if node.kind in ("adapter", "receiver", "sender", "turn", "lane")
    ] == []


@pytest.mark.one_node
async def test_two_adapters_cannot_have_one_name() -> None:
    """The name is what keys, rows and targets mean."""
    with pytest.raises(ValueError, match="two adapters are called 'memory'"):
        Platforms([Platform(MemoryPlatform()), Platform(MemoryPlatform())])


async def test_one_slow_conversation_does_not_hold_up_others_at_start(tmp_path: Path) -> None:
    """After a restart each key goes on by itself: a long turn does not delay the messages of other keys (SC-30)."""
    path = tmp_path / "state.db"
    async with memory_store(path):
        pass
    first = MemoryPlatform()
    async with open_world(scripted(works(1000)), first, path=path):
        await first.say("a", chat="slow")
        await first.say("b", chat="slow")
        await trio.sleep(1)
    again = MemoryPlatform()

    async def slow_or_not(turn: Turn) -> str:
        if turn.context.chat_id == "slow":
            await trio.sleep(5000)
        return f"answer to {turn.input.text}"

    async with open_world(slow_or_not, again, path=path):
        await again.say("quick", chat="other")
        await again.wait_sent(1)
        assert again.texts() == ["answer to quick"]
        assert trio.current_time() < 4000


async def test_a_failed_typing_sign_costs_nothing_and_its_log_entry_names_the_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A small task of the gateway fails alone: the reply arrives."""

    class Broken(MemoryPlatform):
        async def typing(self, chat_id: str, thread_id: str) -> None:
            raise RuntimeError("no typing today")

    chat = Broken(typing=4.0)
    turns: list[str] = []

    async def agent(turn: Turn) -> str:
        turns.append(turn.id)
        await trio.sleep(1)
        return "done"

    async with open_world(agent, chat):
        await chat.say("hello")
        await chat.wait_sent(1)
    assert f"the typing sign of turn {turns[0]} failed" in caplog.text
