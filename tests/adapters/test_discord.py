"""The Discord adapter against the fake REST API and Gateway: who is meant, threads, slash commands, buttons, and replies that arrive once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from hermes_trio import Turn
from hermes_trio.adapters.discord.adapter import DiscordAdapter, discord_platform
from hermes_trio.base.settings import SettingsError
from hermes_trio.messaging.contract import Outgoing, PlatformError, PlatformErrorKind
from hermes_trio.messaging.menu import MENU
from hermes_trio.messaging.platforms import Platform
from hermes_trio.testing.platforms import Drop, FakeDiscord, RateLimited, open_fake_discord
from tests.messaging.harness import World, asks, scripted, works

from .platform_bench import open_bench, tables_of

CHANNEL = "700"


@pytest.fixture
async def fake() -> AsyncIterator[FakeDiscord]:
    """A Discord of its own."""
    async with open_fake_discord() as opened:
        yield opened


def member(fake: FakeDiscord, **more: Any) -> Platform:
    """The adapter for it."""
    made = discord_platform({"token": fake.token, "base_url": fake.base_url, "allow_all": True, **more}, {})
    assert made is not None
    return made


def adapter_of(made: Platform) -> DiscordAdapter:
    assert isinstance(made.adapter, DiscordAdapter)
    return made.adapter


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"allow_all": True}, ["[discord]", "token is missing", "DISCORD_BOT_TOKEN", "developer portal"]),
        ({"token": "t", "reply_to": "yes"}, ["reply_to is 'yes'", "'message', 'none'"]),
        ({"token": "t", "guild": "1"}, ["guild is not a setting", "did you mean guild_id?"]),
    ],
)
def test_a_mistake_in_the_table_names_the_key_and_what_is_accepted(table: dict[str, Any], words: list[str]) -> None:
    """Whoever reads the error knows what to change."""
    with pytest.raises(SettingsError) as raised:
        discord_platform(table, {})
    assert all(word in str(raised.value) for word in words), raised.value


def test_the_environment_is_enough() -> None:
    """A token in the environment makes an adapter; without one there is none."""
    made = discord_platform({}, {"DISCORD_BOT_TOKEN": "from-env", "DISCORD_ALLOWED_USERS": "7"})
    assert made is not None
    assert (adapter_of(made).settings.token, made.settings.allowed_users) == ("from-env", ["7"])
    assert discord_platform({}, {}) is None


def test_every_table_on_the_page_is_accepted() -> None:
    """Whoever copies from the documentation gets an adapter."""
    tables = tables_of("discord.md")
    assert len(tables) >= 3
    for table in tables:
        assert discord_platform(table["discord"], {}) is not None


async def test_in_a_channel_only_what_is_meant_for_the_agent_is_answered(fake: FakeDiscord) -> None:
    """A mention and an answer to the bot are for it; talk, its own messages and other bots are not."""
    async with open_bench(member(fake)) as world:
        fake.say("just talking", channel_id=CHANNEL)
        asked = fake.say("what is up?", channel_id=CHANNEL, mention=True)
        first = await fake.wait_for_message(channel_id=CHANNEL)
        fake.say("and now?", channel_id=CHANNEL, reply_to=first.id)
        second = await fake.wait_for_message(channel_id=CHANNEL)
        await world.idle()
    assert (first.content, first.reply_to) == ("echo: what is up?", asked["id"])
    assert second.content == "echo: and now?"
    assert len(fake.messages) == 2


async def test_nobody_is_pinged_by_what_a_model_writes(fake: FakeDiscord) -> None:
    """Mentions in an answer are switched off where it is sent."""
    async with open_bench(member(fake), scripted("@everyone <@42> look")):
        fake.say("go")
        await fake.wait_for_message()
    sent = next(call for call in fake.calls if call.method == "create_message")
    assert sent.params["allowed_mentions"] == {"parse": [], "replied_user": True}


async def test_a_thread_is_a_conversation_of_its_own(fake: FakeDiscord) -> None:
    """In a thread in which the agent takes part nobody needs to mention it; the channel and other threads are not part of that."""
    async with open_bench(member(fake)) as world:
        thread = fake.start_thread(CHANNEL, "plans")
        other = fake.start_thread(CHANNEL, "other")
        fake.say("before", channel_id=thread)
        fake.say("hello", channel_id=thread, mention=True)
        first = await fake.wait_for_message(channel_id=thread)
        fake.say("go on", channel_id=thread)
        second = await fake.wait_for_message(channel_id=thread)
        fake.say("unrelated", channel_id=other)
        fake.say("unrelated", channel_id=CHANNEL)
        await world.idle()
        sessions = {one.session_key for one in await world.store.list_sessions()}
    assert (first.content, second.content) == ("echo: [Ada] hello", "echo: [Ada] go on")
    assert sessions == {f"agent:main:discord:group:{CHANNEL}:{thread}"}
    assert len(fake.messages) == 2


async def test_a_thread_that_was_there_before_is_looked_up(fake: FakeDiscord) -> None:
    """Its first message is enough to know that it is a thread, and of which channel."""
    thread = fake.start_thread(CHANNEL, "old")
    async with open_bench(member(fake)) as world:
        fake.say("hello", channel_id=thread, mention=True)
        await fake.wait_for_message(channel_id=thread)
        sessions = [one.session_key for one in await world.store.list_sessions()]
    assert sessions == [f"agent:main:discord:group:{CHANNEL}:{thread}"]


async def test_slash_commands_are_registered_and_carried_out(fake: FakeDiscord) -> None:
    """They are the gateway's commands; using one is acknowledged in time, and answered in the channel."""
    async with open_bench(member(fake)) as world:
        await fake.wait_for_call("overwrite_commands")
        assert [one["name"] for one in fake.commands] == [entry.name for entry in MENU]
        fake.use_command("status", channel_id=CHANNEL)
        answer = await fake.wait_for_message(channel_id=CHANNEL, containing="idle")
        fake.use_command("stop", options={"argument": "everything"}, channel_id=CHANNEL)
        await fake.wait_for_message(channel_id=CHANNEL, containing="knows no 'everything'")
        await world.idle()
    assert not answer.ephemeral
    acknowledged = [one for one in fake.messages if one.interaction_id is not None]
    assert [one.content for one in acknowledged] == [
        "`/status` is answered here.",
        "`/stop everything` is answered here.",
    ]


async def test_a_slash_command_of_a_stranger_is_refused_to_their_face(fake: FakeDiscord) -> None:
    """They see that they are not allowed, and nobody else sees anything."""
    async with open_bench(member(fake, allow_all=False, allowed_users=["1"])) as world:
        fake.use_command("status", channel_id=CHANNEL, user_id="42")
        shown = await fake.wait_for_message(channel_id=CHANNEL)
        await world.idle()
    assert (shown.content, shown.interaction_id is not None) == ("You are not allowed to use this agent.", True)
    assert len(fake.messages) == 1


async def test_a_button_is_answered_in_time_and_goes_away(fake: FakeDiscord) -> None:
    """Pressing one resolves the approval, tells the person, and leaves the question without buttons."""
    worlds: list[World] = []
    async with open_bench(member(fake), scripted(asks(lambda: worlds[0]))) as world:
        worlds.append(world)
        fake.say("delete it", channel_id=CHANNEL, mention=True)
        question = await fake.wait_for_message(channel_id=CHANNEL, containing="Approval needed")
        interaction = fake.click(question, "Deny")
        await fake.wait_for_message(channel_id=CHANNEL, containing="refused")
        told = await fake.wait_for_message(channel_id=CHANNEL, containing="Refused:")
        await world.idle()
    assert (interaction, 6) in list(fake.responses)
    assert told.interaction_id == interaction
    assert question.buttons == []
    assert question.content.endswith("Refused.")


async def test_a_reply_whose_answer_is_lost_is_asked_for_under_its_nonce(fake: FakeDiscord) -> None:
    """The second attempt finds the first one's message: there is one, and no label."""
    fake.fail("create_message", Drop(before=False))
    async with open_bench(member(fake)) as world:
        fake.say("hello")
        await fake.wait_for_message(containing="hello")
        await world.idle()
    assert [one.content for one in fake.messages] == ["echo: hello"]
    assert len([call for call in fake.calls if call.method == "create_message"]) == 2


async def test_when_both_attempts_fail_the_doubt_of_the_first_stays(fake: FakeDiscord) -> None:
    """A refusal of the second attempt does not make the first one certain."""
    fake.fail("create_message", Drop(before=False))
    fake.fail("create_message", RateLimited(30))
    adapter, place = adapter_of(member(fake)), fake.say("hello")["channel_id"]
    async with adapter.open():
        result = await adapter.send(Outgoing(chat_id=place, text="hi"))
    assert (result.success, result.ambiguous, result.error_kind) == (False, True, PlatformErrorKind.RATE_LIMITED)
    assert result.retry_after == 30


async def test_what_cannot_be_sent_says_why(fake: FakeDiscord) -> None:
    """A channel that the bot may not write in is forbidden; one that is gone is not found."""
    fake.add_channel(CHANNEL)
    fake.forbid(CHANNEL)
    adapter = adapter_of(member(fake))
    async with adapter.open():
        with pytest.raises(PlatformError) as forbidden:
            await adapter.send(Outgoing(chat_id=CHANNEL, text="hi"))
        with pytest.raises(PlatformError) as missing:
            await adapter.send(Outgoing(chat_id="1", text="hi"))
    assert (forbidden.value.kind, missing.value.kind) == (PlatformErrorKind.FORBIDDEN, PlatformErrorKind.NOT_FOUND)


async def test_a_long_answer_is_cut_at_two_thousand_characters(fake: FakeDiscord) -> None:
    """Every part is taken, in order."""
    text = "\n".join(f"line {n}" for n in range(500))
    async with open_bench(member(fake), scripted(text)) as world:
        fake.say("go")
        await fake.wait_for_message(containing="line 499")
        await world.idle()
    assert all(len(one.content) <= 2000 for one in fake.messages)
    assert [one.content.rpartition("(")[2] for one in fake.messages] == ["1/3)", "2/3)", "3/3)"]


async def test_typing_is_shown_in_the_thread_while_a_turn_runs(fake: FakeDiscord) -> None:
    """It is shown where the person waits."""
    async with open_bench(member(fake), scripted(works(0.1))):
        thread = fake.start_thread(CHANNEL, "plans")
        fake.say("work", channel_id=thread, mention=True)
        await fake.wait_for_message()
    assert set(fake.typing) == {thread}


async def test_an_answer_is_shown_while_it_is_written(fake: FakeDiscord) -> None:
    """With `stream`, one message grows into the answer."""

    async def writes(turn: Turn) -> str:
        for word in ("The first part of a long answer, ", "then the second part."):
            turn.emit("message.delta", delta=word)
            await trio.sleep(1.0)
        return "The first part of a long answer, then the second part."

    async with open_bench(member(fake, stream=True), scripted(writes)) as world:
        fake.say("tell me")
        await fake.wait_for_message(containing="The first part")
        await world.idle()
    (shown,) = fake.messages
    assert shown.versions[0] == "The first part of a long answer, …"
    assert shown.content == "The first part of a long answer, then the second part."


async def test_a_lost_connection_is_resumed_and_nothing_is_lost(fake: FakeDiscord) -> None:
    """What was said while the connection was away is replayed, and answered once."""
    async with open_bench(member(fake)) as world:
        fake.say("one")
        await fake.wait_for_message(containing="one")
        await fake.gateway.drop_connections()
        fake.say("two")
        await fake.wait_for_message(containing="two")
        await fake.gateway.wait_for("resume")
        await world.idle()
    assert [one.content for one in fake.messages] == ["echo: one", "echo: two"]
