"""The one way in: who may, what is a command, what answers an approval, and what a message does while a turn runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from hermes_trio import RuntimeSettings, Turn
from hermes_trio.messaging.command_text import LiteralText
from hermes_trio.messaging.contract import Button, Disposition, Incoming, Received
from hermes_trio.messaging.platforms import Platform
from hermes_trio.messaging.session_keys import Source
from hermes_trio.messaging.settings import PlatformSettings
from hermes_trio.store import NewApproval, SessionFilter
from hermes_trio.store.errors import StoreError
from hermes_trio.store.records import ApprovalChoice
from hermes_trio.testing.faults import StoreFaults
from hermes_trio.testing.memory_platform import MemoryPlatform

from .harness import World, asks, open_world, scripted, starts_job, works

pytestmark = pytest.mark.usefixtures("virtual_clock")


def member(chat: MemoryPlatform, **settings: object) -> Platform:
    """A platform with some settings; by default every user is allowed."""
    return Platform(chat, PlatformSettings(**{"allow_all": True, **settings}))  # type: ignore[arg-type]


# Who may


async def test_a_stranger_in_a_direct_chat_is_offered_a_code_once_and_let_in_by_it() -> None:
    """Before that nothing of what they write reaches the agent."""
    chat, agent = MemoryPlatform(), scripted()
    async with open_world(agent, member(chat, allow_all=False)) as world:
        assert (await chat.say("let me in")).disposition is Disposition.PAIRING
        assert (await chat.say("hello?")).disposition is Disposition.UNAUTHORISED
        (offer,) = await chat.wait_sent(1)
        code = offer.text.split("`")[1]
        assert await world.store.redeem_pairing("memory", code) is not None
        assert (await chat.say("thanks")).disposition is Disposition.ACCEPTED
        await chat.wait_sent(2)
    assert [turn.input.text for turn in agent.turns] == ["thanks"]


async def test_strangers_in_groups_get_no_answer_and_their_commands_do_nothing() -> None:
    """Silence, also for /stop and for answers to an approval."""
    chat, agent = MemoryPlatform(), scripted(works(100))
    async with open_world(agent, member(chat, allow_all=False, allowed_users=["friend"])):
        await chat.say("work", kind="group", user="friend")
        await trio.sleep(1)
        for text in ("hello", "/stop", "yes"):
            assert (await chat.say(text, kind="group", user="stranger")).disposition is Disposition.UNAUTHORISED
        await chat.wait_sent(1)
    assert chat.texts("1") == ["worked"]


async def test_an_ignored_stranger_gets_no_code() -> None:
    """`unknown_dm = "ignore"` is silence."""
    chat = MemoryPlatform()
    async with open_world(scripted(), member(chat, allow_all=False, unknown_dm="ignore")):
        assert (await chat.say("hello")).disposition is Disposition.UNAUTHORISED
    assert chat.sent == []


async def test_bots_and_talk_among_others_are_ignored() -> None:
    """Neither becomes a turn."""
    chat, agent = MemoryPlatform(), scripted()
    async with open_world(agent, member(chat)):
        source = Source(platform="memory", chat_type="dm", chat_id="1", user_id="b", is_bot=True)
        assert (
            await chat.gateway.receive(chat, Incoming(source=source, text="beep"))
        ).disposition is Disposition.IGNORED
        assert (await chat.say("lunch?", kind="group", addressed=False)).disposition is Disposition.IGNORED
        assert (await chat.say("   ")).disposition is Disposition.IGNORED
    assert agent.turns == []


# Twice


async def test_an_event_that_is_delivered_twice_is_done_once(tmp_path: Path) -> None:
    """In one life of the server, for messages and for commands, and for messages across a restart."""
    path, agent = tmp_path / "state.db", scripted()
    chat = MemoryPlatform()
    async with open_world(agent, chat, path=path) as world:
        assert (await chat.say("a", event_id="1")).disposition is Disposition.ACCEPTED
        assert (await chat.say("a", event_id="1")).disposition is Disposition.DUPLICATE
        assert (await chat.say("/status", event_id="2")).disposition is Disposition.COMMAND
        assert (await chat.say("/status", event_id="2")).disposition is Disposition.DUPLICATE
        await world.idle()
    again = MemoryPlatform()
    async with open_world(agent, again, path=path) as world:
        assert (await again.say("a", event_id="1")).disposition is Disposition.DUPLICATE
        await world.idle()
    assert len(agent.turns) == 1


async def test_an_answer_that_is_delivered_twice_is_not_a_message() -> None:
    """The word answered the question; its second delivery says nothing to the agent, on whichever node it arrives."""
    chat, worlds = MemoryPlatform(), list[World]()
    agent = scripted(asks(lambda: worlds[0]))
    async with open_world(agent, chat) as world:
        worlds.append(world)
        await chat.say("clean up", event_id="1")
        await chat.wait_sent(1)
        assert (await chat.say("no", event_id="2")).disposition is Disposition.ANSWERED
        assert (await chat.say("no", event_id="2")).disposition is Disposition.DUPLICATE
        await world.idle()
    assert len(agent.turns) == 1


async def test_two_redeliveries_at_the_same_moment_are_one_message() -> None:
    """The claim is made before the first await."""
    chat, agent = MemoryPlatform(), scripted()
    receipts: list[Disposition] = []

    async def deliver() -> None:
        receipts.append((await chat.say("a", event_id="1")).disposition)

    async with open_world(agent, chat) as world:
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(deliver)
        await world.idle()
    assert sorted(receipt.value for receipt in receipts) == ["accepted", *["duplicate"] * 4]


@pytest.mark.one_node
async def test_a_redelivery_is_a_duplicate_only_when_the_first_attempt_is_stored() -> None:
    """A platform that gets this receipt does not deliver the event again, and a crash before the commit would lose it."""
    faults = StoreFaults()
    chat, agent = MemoryPlatform(), scripted(works(60))
    receipts: list[tuple[Disposition, int]] = []
    async with open_world(agent, chat, faults=faults) as world:

        async def deliver() -> None:
            disposition = (await chat.say("a", event_id="1")).disposition
            receipts.append((disposition, await world.store.inbox_waiting(taken=True)))

        faults.slow("accept_message", seconds=20)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(deliver)
            await trio.sleep(5)
            nursery.start_soon(deliver)
            await trio.sleep(5)
            assert receipts == []
        await world.idle()
    assert sorted((receipt.value, rows) for receipt, rows in receipts) == [("accepted", 1), ("duplicate", 1)]
    assert len(agent.turns) == 1


async def test_a_redelivery_is_accepted_if_the_first_attempt_fails_meanwhile() -> None:
    """It waits for the end of that attempt; of several, one is accepted."""
    faults = StoreFaults()
    chat, agent = MemoryPlatform(), scripted()
    ends: list[str] = []

    async def deliver() -> None:
        try:
            ends.append((await chat.say("a", event_id="1")).disposition.value)
        except StoreError:
            ends.append("failed")

    async with open_world(agent, chat, faults=faults) as world:
        faults.fail("accept_message")
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(deliver)
        await world.idle()
    assert sorted(ends) == ["accepted", "duplicate", "failed"]
    assert len(agent.turns) == 1


async def test_a_message_that_was_refused_is_no_duplicate_when_it_is_sent_again() -> None:
    """It has no row: as soon as there is room it is accepted."""
    chat, agent = MemoryPlatform(), scripted(works(10))
    settings = RuntimeSettings(watchdog_seconds=0, mailbox=1)
    async with open_world(agent, chat, runtime_settings=settings) as world:
        await chat.say("a", event_id="1")
        await trio.sleep(1)
        await chat.say("b", event_id="2")
        assert (await chat.say("c", event_id="3")).disposition is Disposition.REFUSED
        await world.idle()
        assert (await chat.say("c", event_id="3")).disposition is Disposition.ACCEPTED
        await world.idle()
        assert (await chat.say("c", event_id="3")).disposition is Disposition.DUPLICATE
    assert [turn.input.text for turn in agent.turns] == ["a", "b", "c"]


# Conversations


async def test_people_in_a_group_have_their_own_conversations_and_share_a_thread() -> None:
    """Keys are computed once and carry the whole place (SC-18); in a shared one each text says who wrote it."""
    chat, agent = MemoryPlatform(), scripted()
    async with open_world(agent, chat):
        await chat.say("a", kind="group", chat="g", user="1", name="Ann")
        await chat.say("b", kind="group", chat="g", user="2", name="Bob")
        await chat.say("c", kind="group", chat="g", user="1", name="Ann", thread="t")
        await chat.say("d", kind="group", chat="g", user="2", name="Bob", thread="t")
        await chat.wait_sent(4)
    keys = {turn.input.text: turn.context.session_key for turn in agent.turns}
    assert keys["a"] != keys["b"]
    assert keys["[Ann] c"] == keys["[Bob] d"]


async def test_messages_of_one_conversation_are_answered_one_by_one_in_order() -> None:
    """One mailbox, one task: a third message never runs beside the second (SC-2, SC-16, SC-17)."""
    running = 0

    async def agent(turn: Turn) -> str:
        nonlocal running
        running += 1
        assert running == 1
        await trio.sleep(5)
        running -= 1
        return turn.input.text

    chat = MemoryPlatform()
    async with open_world(agent, chat):
        for number in range(10):
            await chat.say(str(number))
        await chat.wait_sent(10)
    assert chat.texts() == [str(number) for number in range(10)]


async def test_a_full_mailbox_is_said_and_nothing_is_lost_silently() -> None:
    """The message that does not fit is refused with a word (GW-53, SC-17)."""
    chat, agent = MemoryPlatform(), scripted(works(100))
    async with open_world(agent, chat, runtime_settings=RuntimeSettings(mailbox=2, watchdog_seconds=0)):
        receipts: list[Disposition] = []
        for number in range(5):
            receipts.append((await chat.say(str(number))).disposition)
            await trio.sleep(0.1)
        assert receipts.count(Disposition.REFUSED) == 2
        await chat.wait_sent(5)
    assert sum("too much at once" in text for text in chat.texts()) == 2


# Busy


async def test_interrupt_stops_the_turn_and_its_half_answer_is_not_sent() -> None:
    """The newer message is answered next (GW-57, SC-13)."""
    chat = MemoryPlatform()
    async with open_world(scripted(works(1000), "second"), member(chat, busy="interrupt")):
        await chat.say("first")
        await trio.sleep(1)
        await chat.say("no, rather this")
        await chat.wait_sent(1)
        assert trio.current_time() < 10
    assert chat.texts() == ["second"]


async def test_interrupt_waits_while_a_child_works_inside_the_turn() -> None:
    """Its work would be thrown away (GW-51)."""

    async def delegates(turn: Turn) -> str:
        return (await turn.run_child("a part of it", agent=scripted(works(50, "part")))).text

    chat = MemoryPlatform()
    async with open_world(scripted(delegates), member(chat, busy="interrupt")):
        await chat.say("first")
        await trio.sleep(1)
        await chat.say("second")
        await chat.wait_sent(2)
    assert chat.texts() == ["part", "echo: second"]


async def test_steer_hands_the_text_to_the_running_turn_and_does_not_repeat_it() -> None:
    """What the turn took up is not a turn of its own (GW-52)."""

    async def listens(turn: Turn) -> str:
        await trio.sleep(10)
        heard = [turn.steering.pop(0) for _ in range(len(turn.steering))]
        return f"heard {heard}"

    chat, agent = MemoryPlatform(), scripted(listens)
    async with open_world(agent, member(chat, busy="steer")) as world:
        await chat.say("go")
        await trio.sleep(1)
        assert (await chat.say("and faster")).disposition is Disposition.STEERED
        await chat.wait_sent(1)
        await world.idle()
    assert chat.texts() == ["heard ['and faster']"]
    assert len(agent.turns) == 1


async def test_a_steered_message_that_the_store_refuses_is_named_to_its_person() -> None:
    """With the turn's own: the transcript contains neither."""

    async def listens(turn: Turn) -> str:
        await trio.sleep(10)
        return f"heard {[turn.steering.pop(0) for _ in range(len(turn.steering))]}"

    chat, faults = MemoryPlatform(), StoreFaults()
    async with open_world(scripted(listens), member(chat, busy="steer"), faults=faults):
        await chat.say("book a table")
        await trio.sleep(1)
        assert (await chat.say("for two")).disposition is Disposition.STEERED
        faults.full("finish_turn", times=5)
        await chat.wait_sent(1)
    assert chat.texts()[0].endswith("This conversation does not contain the message: book a table; for two)")


async def test_a_message_does_not_steer_past_an_older_one_that_waits() -> None:
    """Generated text is not passed to a turn; what is typed after it comes after it."""

    async def listens(turn: Turn) -> str:
        await trio.sleep(10)
        return f"heard {[turn.steering.pop(0) for _ in range(len(turn.steering))]}"

    chat, agent = MemoryPlatform(), scripted(listens, listens)
    async with open_world(agent, member(chat, busy="steer")) as world:
        await chat.say("go")
        await trio.sleep(1)
        assert (await chat.say("and faster")).disposition is Disposition.STEERED
        assert (await chat.say(LiteralText("generated"))).disposition is Disposition.ACCEPTED
        assert (await chat.say("stop that")).disposition is Disposition.ACCEPTED
        await chat.wait_sent(3)
        await world.idle()
    assert chat.texts() == ["heard ['and faster']", "heard []", "echo: stop that"]


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("verb", ["acknowledge", "finish_turn"])
async def test_a_steered_message_is_handled_once_although_the_store_refuses_for_a_minute(verb: str, anew: bool) -> None:
    """The turn used it, and the store does not take that down for longer than the end of a turn waits: no second turn begins with it."""

    async def listens(turn: Turn) -> str:
        await trio.sleep(10)
        heard = [turn.steering.pop(0) for _ in range(len(turn.steering))]
        return f"heard {heard}"

    faults = StoreFaults()
    chat, agent = MemoryPlatform(), scripted(listens)
    async with open_world(agent, member(chat, busy="steer"), faults=faults) as world:
        await chat.say("go")
        await trio.sleep(1)
        assert (await chat.say("and faster")).disposition is Disposition.STEERED
        faults.fail(verb, times=None, seconds=60)
        if anew:
            await trio.sleep(30)
            await chat.say("/new")
        await chat.wait_sent(1 + anew)
        await world.idle()
    assert "heard ['and faster']" in chat.texts()
    assert len(agent.turns) == 1


@pytest.mark.one_node
async def test_a_person_is_told_which_message_the_conversation_does_not_contain() -> None:
    """If the store refuses the record of a turn, the message is in no transcript: its failure names it, so that it can be sent again."""
    faults = StoreFaults()
    chat, agent = MemoryPlatform(), scripted("an answer")
    async with open_world(agent, chat, faults=faults) as world:
        faults.fail("finish_turn", times=5)
        await chat.say("book a table\nfor two")
        await chat.wait_sent(1)
        await world.idle()
    (told,) = chat.texts()
    assert told.startswith("(This failed: the turn's end could not be stored")
    assert told.endswith("This conversation does not contain the message: book a table)")


async def test_what_a_turn_did_not_take_up_becomes_the_next_turn() -> None:
    """Steering loses nothing, whatever the agent does with it."""
    chat, agent = MemoryPlatform(), scripted(works(10))
    async with open_world(agent, member(chat, busy="steer")) as world:
        await chat.say("go")
        await trio.sleep(1)
        assert (await chat.say("and this")).disposition is Disposition.STEERED
        await chat.wait_sent(2)
        await world.idle()
    assert chat.texts() == ["worked", "echo: and this"]


@pytest.mark.one_node
async def test_an_acknowledgement_comes_at_most_once_in_a_while() -> None:
    """When it is asked for (GW-55)."""
    chat = MemoryPlatform()
    async with open_world(scripted(works(50)), member(chat, busy_ack=True)):
        await chat.say("go")
        await trio.sleep(1)
        for _ in range(3):
            await chat.say("more")
        await chat.wait_sent(5)
    assert sum("still working" in text for text in chat.texts()) == 1


# Commands


async def test_stop_answers_with_the_receipt_and_leaves_what_is_queued() -> None:
    """Everything in the scope has ended when the answer is given (SC-11, SC-14)."""
    chat = MemoryPlatform()
    async with open_world(scripted(works(1000)), chat) as world:
        await chat.say("work")
        await chat.say("then this")
        await trio.sleep(1)
        reception = await chat.say("/stop")
        assert "nothing of it runs any more" in reception.text
        assert "1 message waiting" in reception.text
        await world.idle()
        assert "Nothing was running." in (await chat.say("/stop")).text
    assert "echo: then this" in chat.texts()


def _hard_to_stop(seconds: float) -> Any:
    """An agent step whose end takes some time."""

    async def step(turn: Turn) -> str:
        try:
            await trio.sleep(1000)
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(seconds)
        return ""

    return step


async def _say_and_cancel(chat: MemoryPlatform, text: str, after: float) -> list[Received]:
    """Send a command whose receiver is cancelled while it is executed; return what the receiver got."""
    got: list[Received] = []

    async def receive() -> None:
        got.append(await chat.say(text))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await trio.sleep(after)
        nursery.cancel_scope.cancel()
    return got


@pytest.mark.parametrize(
    ("command", "expected"), [("/stop", "nothing of it runs any more"), ("/new", "A new conversation begins.")]
)
async def test_a_command_is_answered_although_its_receiver_is_cancelled(command: str, expected: str) -> None:
    """As a drain does it, between the effect and the reply. The receiver gets the result, so that it can confirm the event."""
    chat = MemoryPlatform()
    async with open_world(scripted(_hard_to_stop(3)), chat):
        await chat.say("work")
        await trio.sleep(1)
        (received,) = await _say_and_cancel(chat, command, 1)
        assert received.disposition is Disposition.COMMAND
        await chat.wait_sent(1)
    assert expected in chat.texts()[0]


async def test_a_command_that_takes_too_long_when_its_receiver_is_cancelled_says_so() -> None:
    """The wait is bounded, because a drain waits for it."""
    chat = MemoryPlatform()
    async with open_world(scripted(_hard_to_stop(25)), chat):
        await chat.say("work")
        await trio.sleep(1)
        began = trio.current_time()
        (received,) = await _say_and_cancel(chat, "/stop", 1)
        assert trio.current_time() - began == pytest.approx(6)
        await chat.wait_sent(1)
    assert received.text == chat.texts()[0]
    assert "do not know how /stop has ended" in received.text


@pytest.mark.one_node
async def test_a_command_whose_reply_could_not_be_stored_is_not_executed_again() -> None:
    """The repetition of its event gets the receipt of the first execution."""
    chat, faults = MemoryPlatform(), StoreFaults()
    async with open_world(scripted(works(1000)), chat, faults=faults):
        await chat.say("work")
        await trio.sleep(1)
        faults.fail("add_outbox", times=1)
        with pytest.raises(StoreError):
            await chat.say("/stop", event_id="e1")
        assert "nothing of it runs any more" in (await chat.say("/stop", event_id="e1")).text
        assert (await chat.say("/stop", event_id="e1")).disposition is Disposition.DUPLICATE
        await chat.wait_sent(1)
    assert "nothing of it runs any more" in chat.texts()[0]


@pytest.mark.one_node
async def test_the_reply_to_a_command_is_stored_once_by_a_store_that_is_slow() -> None:
    """The platform delivers the command again meanwhile; that waits for the first attempt, however long the store takes."""
    chat, faults = MemoryPlatform(), StoreFaults()
    async with open_world(scripted(works(1000)), chat, faults=faults):
        faults.slow("add_outbox", seconds=45, times=1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(chat.say, "/new", event_id="e1"))
            await trio.sleep(12)
            nursery.start_soon(partial(chat.say, "/new", event_id="e1"))
        await trio.sleep(100)
    assert chat.texts() == ["A new conversation begins."]


async def test_stop_all_stops_background_work_too() -> None:
    """With a receipt for each; a plain stop says that it is still there."""
    chat = MemoryPlatform()
    async with open_world(scripted(starts_job(1000)), chat) as world:
        await chat.say("work")
        await chat.wait_sent(1)
        assert "1 background job still running" in (await chat.say("/stop")).text
        assert "Background" in (await chat.say("/stop all")).text
        assert len(world.runtime.supervisor) == 0


async def test_new_ends_the_session_with_everything_that_belonged_to_it() -> None:
    """Turn and jobs are stopped, the next message begins in another session, and no late notice comes (SC-1)."""
    chat, agent = MemoryPlatform(), scripted(starts_job(1000), works(1000))
    async with open_world(agent, chat) as world:
        await chat.say("one")
        await chat.wait_sent(1)
        await chat.say("two")
        await trio.sleep(1)
        assert "A new conversation begins." in (await chat.say("/new")).text
        await chat.say("three")
        await world.idle()
        assert len(world.runtime.supervisor) == 0
        sessions = await world.store.list_sessions(SessionFilter(source="memory"))
    assert agent.turns[0].context.session_id == agent.turns[1].context.session_id != agent.turns[2].context.session_id
    assert [one.end_reason for one in sessions] == [None, "session_reset"]
    assert chat.texts()[-1] == "echo: three"
    assert len(chat.sent) == 3


@pytest.mark.one_node
async def test_status_and_tree_show_this_conversation_and_no_other() -> None:
    """What other people do is not theirs to see."""
    chat = MemoryPlatform()
    async with open_world(scripted(starts_job(1000, "mine"), works(1000)), chat) as world:
        await chat.say("one", chat="a")
        await chat.wait_sent(1)
        await chat.say("two", chat="b", user="u2")
        await trio.sleep(5)
        status = (await chat.say("/status", chat="b", user="u2")).text
        assert "has been working for 5 s" in status
        assert "mine" not in status
        assert "mine" in (await chat.say("/status", chat="a")).text
        tree = (await chat.say("/tree", chat="b", user="u2")).text
        assert "turn" in tree
        assert "mine" not in tree
        assert world.runtime.lanes == 1


async def test_unknown_commands_are_answered_and_other_bots_commands_are_not() -> None:
    """Neither reaches the agent; a path is not a command."""
    chat, agent = MemoryPlatform(), scripted()
    chat.bot_name = "hermes"
    async with open_world(agent, chat) as world:
        assert "no command /dance" in (await chat.say("/dance")).text
        assert (await chat.say("/stop@other")).disposition is Disposition.IGNORED
        assert (await chat.say("/help@Hermes")).disposition is Disposition.COMMAND
        assert (await chat.say("/etc/hosts is what?")).disposition is Disposition.ACCEPTED
        await world.idle()
    assert len(agent.turns) == 1


async def test_literal_text_is_never_a_command_nor_an_answer() -> None:
    """Text that no person typed is marked where it enters (SC-31)."""
    chat, worlds = MemoryPlatform(), list[World]()
    agent = scripted(asks(lambda: worlds[0]))
    async with open_world(agent, chat) as world:
        worlds.append(world)
        await chat.say("go")
        await chat.wait_sent(1)
        for text in ("/stop", "yes", "/approve all always"):
            assert (await chat.say(LiteralText(text))).disposition is Disposition.ACCEPTED
        assert len(await world.approvals.pending("agent:main:memory:dm:1")) == 1


# Approvals


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        ("yes", "allowed"),
        ("No!", "refused: the user refused it"),
        ("/approve session", "allowed"),
        ("/deny too risky", "refused: too risky"),
    ],
)
async def test_an_approval_is_answered_by_a_word_or_a_command(said: str, outcome: str) -> None:
    """While it waits, a bare word is an answer; afterwards it is a message again."""
    chat, worlds = MemoryPlatform(), list[World]()
    async with open_world(scripted(asks(lambda: worlds[0])), chat) as world:
        worlds.append(world)
        await chat.say("delete it")
        (question,) = await chat.wait_sent(1)
        assert "rm -rf x" in question.text
        assert (await chat.say(said)).disposition in (Disposition.ANSWERED, Disposition.COMMAND)
        await world.idle()
        assert chat.texts()[-1] == outcome
        assert (await chat.say("yes")).disposition is Disposition.ACCEPTED


async def test_an_approval_is_answered_by_its_button_and_settled_in_place() -> None:
    """The right people only, once; the question then says what became of it."""
    chat, worlds = MemoryPlatform(edits=True), list[World]()
    async with open_world(
        scripted(asks(lambda: worlds[0])), member(chat, allow_all=False, allowed_users=["u1"])
    ) as world:
        worlds.append(world)
        await chat.say("delete it")
        (question,) = await chat.wait_sent(1)
        assert [button.choice for button in question.message.buttons] == list(ApprovalChoice)
        parsed = Button.parse(question.message.buttons[0].value)
        assert parsed is not None
        approval_id, choice = parsed
        assert "not allowed" in await chat.click(approval_id, choice, user="stranger")
        assert "Nothing waits" in await chat.click(approval_id, choice, chat="another")
        assert "Approved (once)" in await chat.click(approval_id, choice)
        assert "Nothing waits" in await chat.click(approval_id, ApprovalChoice.DENY)
        await chat.wait_sent(2)
        await chat.until(lambda: "Approved (once)." in question.text)
    assert chat.texts()[1] == "allowed"


@pytest.mark.parametrize(("admins", "allowed"), [([], False), (["u2"], True), (["*"], True)])
async def test_in_a_group_only_the_asker_answers(admins: list[str], allowed: bool) -> None:
    """Another member of the group is told that it is not theirs, unless the platform names them an admin of approvals; the asker may."""
    chat, worlds = MemoryPlatform(edits=True), list[World]()
    async with open_world(scripted(asks(lambda: worlds[0])), member(chat, approval_admins=admins)) as world:
        worlds.append(world)
        await chat.say("delete it", kind="group", user="u1")
        (question,) = await chat.wait_sent(1)
        parsed = Button.parse(question.message.buttons[0].value)
        assert parsed is not None
        said = await chat.click(*parsed, kind="group", user="u2")
        assert ("Approved" in said) is allowed
        assert ("Only the person who asked" in said) is not allowed
        if not allowed:
            assert "Approved (once)" in await chat.click(*parsed, kind="group", user="u1")
        await chat.wait_sent(2)
    assert chat.texts()[1] == "allowed"


@pytest.mark.parametrize("words", ["/approve", "/approve all", "/deny no", "/deny all", "yes", "no"])
@pytest.mark.parametrize(("admins", "allowed"), [([], False), (["u2"], True), (["*"], True)])
async def test_words_of_another_member_of_a_group_answer_nothing(words: str, admins: list[str], allowed: bool) -> None:
    """In a conversation that a group shares, a command or a bare word of another member leaves the question waiting; an admin's answers it."""
    chat, worlds = MemoryPlatform(), list[World]()
    shared = member(chat, approval_admins=admins, group_sessions_per_user=False)
    async with open_world(scripted(asks(lambda: worlds[0])), shared) as world:
        worlds.append(world)
        await chat.say("delete it", kind="group", user="u1")
        await chat.wait_sent(1)
        (waiting,) = await world.store.list_approvals()
        assert waiting.asker == "u1"
        said = await chat.say(words, kind="group", user="u2")
        assert ("Only the person who asked" in said.text) is not allowed
        assert len(await world.store.list_approvals()) == (0 if allowed else 1)
        if not allowed:
            await chat.say("yes", kind="group", user="u1")
        await world.idle()
    refused = allowed and ("deny" in words or words == "no")
    assert any(text.startswith("refused" if refused else "allowed") for text in chat.texts())


async def test_who_may_answer_is_known_to_every_process(tmp_path: Path) -> None:
    """The asker is in the row: a process that did not ask the question lets the same people answer it, each their own oldest."""
    chat = MemoryPlatform()
    shared = member(chat, group_sessions_per_user=False)
    async with open_world(scripted(), shared, path=tmp_path / "store.db") as world:
        await chat.say("hello", kind="group", user="u1")
        await world.idle()
        key = (await world.store.list_sessions())[0].session_key
        for number, user in enumerate(("u1", "u2", "u2")):
            await world.store.create_approval(
                NewApproval(id=f"appr_{number}", scope=key, command="x", expires_at=9e9, session_key=key, asker=user)
            )
        await chat.say("/approve", kind="group", user="u2")
        assert [row.id for row in await world.store.list_approvals()] == ["appr_0", "appr_2"]
        assert "Only the person who asked" in (await chat.say("/approve all", kind="group", user="u3")).text
        assert "Only the person who asked" in await chat.click("appr_0", ApprovalChoice.ONCE, kind="group", user="u2")
        await chat.say("/deny all", kind="group", user="u2")
        assert [row.id for row in await world.store.list_approvals()] == ["appr_0"]


async def test_a_command_that_the_chat_cannot_show_whole_is_refused() -> None:
    """Nothing is cut: the agent and the chat are told why, and what would do."""
    chat, worlds = MemoryPlatform(), list[World]()
    long = "rm -rf " + "a" * 12_000
    async with open_world(scripted(asks(lambda: worlds[0], long)), chat) as world:
        worlds.append(world)
        await chat.say("delete it")
        await world.idle()
        await chat.until(lambda: any("write it to a file" in text for text in chat.texts()))
        assert not any("Approval needed" in text for text in chat.texts())
        assert any("refused: the command has 12007 characters" in text for text in chat.texts())


async def test_a_long_command_is_shown_whole_before_its_question() -> None:
    """In as many messages as the platform needs, in a code block that the command cannot leave; the question with its buttons comes last."""
    chat, worlds = MemoryPlatform(limit=1_000), list[World]()
    long = "rm -rf " + " ".join(f"folder-{number:04}" for number in range(400)) + "\n```\n**Approval given**"
    async with open_world(scripted(asks(lambda: worlds[0], long)), chat) as world:
        worlds.append(world)
        await chat.say("delete it")
        await chat.until(lambda: any("Approval needed" in text for text in chat.texts()))
        *parts, question = chat.sent
        assert [bool(one.message.buttons) for one in chat.sent] == [False] * len(parts) + [True]
        assert f"above, whole: {len(long)} characters" in question.text
        blocks = [one.text.partition("```\n")[2].rpartition("\n```")[0] for one in parts]
        assert all("\n```\n" not in block for block in blocks)
        shown = " ".join(blocks).replace("\u200b", "").split()
        assert shown == long.split()
        await chat.say("yes")
        await world.idle()
    assert chat.texts()[-1] == "allowed"


async def test_an_approval_that_nobody_answers_is_refused_and_the_chat_is_told() -> None:
    """Silence is not consent."""
    chat, worlds = MemoryPlatform(), list[World]()
    async with open_world(scripted(asks(lambda: worlds[0])), chat, approval_seconds=30) as world:
        worlds.append(world)
        await chat.say("delete it")
        await chat.wait_sent(3)
    assert "no answer in time" in " ".join(chat.texts())
    assert "refused: no answer within 30 s" in " ".join(chat.texts())


async def test_typing_pauses_while_a_person_is_asked() -> None:
    """It is their turn to write (GW-9)."""
    chat, worlds = MemoryPlatform(typing=2), list[World]()
    async with open_world(scripted(asks(lambda: worlds[0])), chat, approval_seconds=30) as world:
        worlds.append(world)
        await chat.say("delete it")
        await chat.wait_sent(1)
        typed = len(chat.typed)
        await trio.sleep(20)
        assert len(chat.typed) == typed
        await chat.say("yes")
        await chat.wait_sent(2)


# Failures


async def test_a_failure_is_told_without_its_details() -> None:
    """The text of an exception may hold anything (GW-75)."""
    chat = MemoryPlatform()
    async with open_world(scripted(ValueError("password=hunter2"), "[SILENT]", ""), chat) as world:
        await chat.say("one")
        await chat.wait_sent(1)
        await chat.say("two")
        await chat.say("three")
        await world.idle()
    assert "hunter2" not in chat.texts()[0]
    assert "failed" in chat.texts()[0]
    assert chat.texts()[1:] == ["(The agent ended its turn without an answer.)"]
