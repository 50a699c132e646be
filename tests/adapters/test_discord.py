"""The Discord adapter against the fake REST API and Gateway: who is meant, threads, slash commands, buttons, and replies that arrive once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from hermes_trio import Turn
from hermes_trio.adapters.discord.adapter import DiscordAdapter, DiscordSettings, discord_platform
from hermes_trio.adapters.discord.gateway import EVENT_ATTEMPTS, Dispatch, GatewaySession
from hermes_trio.adapters.wire.backoff import Backoff
from hermes_trio.base.settings import SettingsError
from hermes_trio.messaging.contract import Adapter, Incoming, Outgoing, PlatformError, PlatformErrorKind, Received
from hermes_trio.messaging.menu import MENU
from hermes_trio.messaging.platforms import Platform
from hermes_trio.store.errors import StoreUnavailable
from hermes_trio.testing.contracts import RecordingHub
from hermes_trio.testing.gateway import eventually
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


@pytest.mark.one_node
@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"allow_all": True}, ["[discord]", "token is missing", "DISCORD_BOT_TOKEN", "developer portal"]),
        ({"token": "t", "reply_to": "yes"}, ["reply_to is 'yes'", "'message', 'none'"]),
        ({"token": "t", "guild": "1"}, ["guild is not a setting", "did you mean guild_id?"]),
    ],
)
def test_a_mistake_in_the_table_names_the_key_and_what_is_accepted(table: dict[str, Any], words: list[str]) -> None:
    """The error says what to change."""
    with pytest.raises(SettingsError) as raised:
        discord_platform(table, {})
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.one_node
def test_the_environment_is_enough() -> None:
    """A token in the environment makes an adapter; without one there is none."""
    made = discord_platform({}, {"DISCORD_BOT_TOKEN": "from-env", "DISCORD_ALLOWED_USERS": "7"})
    assert made is not None
    assert (adapter_of(made).settings.token, made.settings.allowed_users) == ("from-env", ["7"])
    assert discord_platform({}, {}) is None


@pytest.mark.one_node
def test_every_table_on_the_page_is_accepted() -> None:
    """The example in the documentation makes an adapter."""
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


@pytest.mark.one_node
async def test_when_both_attempts_fail_the_doubt_of_the_first_stays(fake: FakeDiscord) -> None:
    """A refusal of the second attempt does not make the first one certain."""
    fake.fail("create_message", Drop(before=False))
    fake.fail("create_message", RateLimited(30))
    adapter, place = adapter_of(member(fake)), fake.say("hello")["channel_id"]
    async with adapter.open():
        result = await adapter.send(Outgoing(chat_id=place, text="hi"))
    assert (result.success, result.ambiguous, result.error_kind) == (False, True, PlatformErrorKind.RATE_LIMITED)
    assert result.retry_after == 30


@pytest.mark.one_node
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


class Failing(RecordingHub):
    """A hub that fails for some texts, so many times, in a way that is not retried on the spot, as soon as `ready` is set."""

    def __init__(self, **times: int) -> None:
        super().__init__()
        self.times = times
        self.ready = trio.Event()

    async def receive(self, adapter: Adapter, incoming: Incoming) -> Received:
        if self.times.get(incoming.plain_text, 0) > 0:
            await self.ready.wait()
            self.times[incoming.plain_text] -= 1
            self.attempts.append(incoming)
            raise RuntimeError("cannot be handled")
        return await super().receive(adapter, incoming)

    def texts(self) -> list[str]:
        return [one.plain_text for one in self.attempts]


@asynccontextmanager
async def restarting(fake: FakeDiscord, hub: Failing) -> AsyncIterator[list[Exception]]:
    """An adapter that is started again after each failure, without a delay, for the body of the `async with`. Yields the failures."""
    adapter = DiscordAdapter(
        DiscordSettings(token=fake.token, base_url=fake.base_url),
        backoff=Backoff(first=0.001, cap=0.001, attempts=3),
        identify_interval=0,
    )
    adapter.gateway = hub
    failures: list[Exception] = []
    connected = trio.Event()

    async def run() -> None:
        while True:
            try:
                await adapter.run(connected.set)
            except Exception as error:
                failures.append(error)

    async with adapter.open(), trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await connected.wait()
        yield failures
        nursery.cancel_scope.cancel()


@pytest.mark.one_node
async def test_a_message_that_could_not_be_handled_is_replayed_when_the_adapter_starts_again(fake: FakeDiscord) -> None:
    """The session is resumed behind the last event before it; messages of other chats that were handled do not come again."""
    hub = Failing(one=1)
    async with restarting(fake, hub) as failures:
        fake.say("one", user_id="1")
        fake.say("behind it", user_id="1")
        fake.say("two", user_id="2")
        await eventually(lambda: "two" in hub.texts())
        hub.ready.set()
        await eventually(lambda: "behind it" in hub.texts())
        fake.say("three", user_id="2")
        await eventually(lambda: "three" in hub.texts())
    assert hub.texts() == ["two", "one", "one", "behind it", "three"]
    kinds = [entry.kind for entry in fake.gateway.log]
    assert (len(failures), kinds.count("identify"), kinds.count("resume")) == (1, 1, 1)


@pytest.mark.one_node
async def test_a_message_that_can_never_be_handled_is_skipped(
    fake: FakeDiscord, caplog: pytest.LogCaptureFixture
) -> None:
    """After a few attempts it does not keep the others of its chat from being handled."""
    hub = Failing(poison=100)
    hub.ready.set()
    async with restarting(fake, hub) as failures:
        fake.say("poison")
        fake.say("behind it")
        await eventually(lambda: hub.received)
    assert hub.texts() == ["poison"] * EVENT_ATTEMPTS + ["behind it"]
    assert len(failures) == EVENT_ATTEMPTS
    assert f"failed {EVENT_ATTEMPTS} times; it is skipped" in caplog.text


@pytest.mark.one_node
async def test_a_session_that_cannot_be_connected_is_not_tried_for_ever(fake: FakeDiscord) -> None:
    """Its address may be gone: after an outage it is tried by the next start, and if that fails, a new session begins."""
    hub = Failing()
    async with restarting(fake, hub) as failures:
        fake.gateway.refuse_connections = True
        await fake.gateway.drop_connections()
        await eventually(lambda: len(failures) >= 3)
        fake.gateway.refuse_connections = False
        await fake.gateway.wait_for("identify", count=2, timeout=30)
        fake.say("hello")
        await eventually(lambda: hub.received)
    assert "resume" not in [entry.kind for entry in fake.gateway.log]


@pytest.mark.one_node
async def test_messages_that_discord_does_not_replay_are_reported(
    fake: FakeDiscord, caplog: pytest.LogCaptureFixture
) -> None:
    """Three messages could not be handled, and Discord refuses to resume their session: the log says how many are lost, and later ones are handled."""
    hub = Failing(one=1)
    async with restarting(fake, hub) as failures:
        for text in ("one", "two", "three"):
            fake.say(text, user_id="1")
        fake.say("elsewhere", user_id="2")
        await eventually(lambda: "elsewhere" in hub.texts())
        fake.gateway.forget_sessions()
        hub.ready.set()
        await fake.gateway.wait_for("identify", count=2, timeout=30)
        fake.say("four", user_id="1")
        await eventually(lambda: "four" in hub.texts())
    assert hub.texts() == ["elsewhere", "one", "four"]
    assert len(failures) == 1
    assert caplog.text.count("did not replay 3 events") == 1


@pytest.mark.one_node
async def test_messages_of_an_ended_session_that_fail_are_reported(
    fake: FakeDiscord, caplog: pytest.LogCaptureFixture
) -> None:
    """Discord ends a session while its messages are being handled, and that fails: no replay brings them back, so the log says how many are lost."""
    hub = Failing(one=1)
    async with restarting(fake, hub):
        fake.say("one")
        fake.say("two")
        fake.say("elsewhere", user_id="2")
        await eventually(lambda: "elsewhere" in hub.texts())
        await fake.gateway.invalidate_sessions(resumable=False)
        await fake.gateway.wait_for("identify", count=2, timeout=30)
        hub.ready.set()
        await eventually(lambda: "lost" in caplog.text)
    assert "2 events of a Discord session that has ended were not handled" in caplog.text
    assert hub.texts() == ["elsewhere", "one"]


@pytest.mark.one_node
async def test_a_stop_reports_the_messages_that_are_not_handled(
    fake: FakeDiscord, caplog: pytest.LogCaptureFixture
) -> None:
    """The next process begins a session of its own, and Discord replays nothing to it."""
    hub = Failing(one=1)
    async with restarting(fake, hub):
        fake.say("one")
        fake.say("elsewhere", user_id="2")
        await eventually(lambda: "elsewhere" in hub.texts())
    assert "1 events of a Discord session that has ended were not handled" in caplog.text


@pytest.mark.one_node
async def test_what_discord_replays_too_often_is_handled_once(fake: FakeDiscord) -> None:
    """A resumed connection gets events again that were handled before."""
    fake.gateway.replayed = 100
    hub = Failing(two=1)
    hub.ready.set()
    async with restarting(fake, hub):
        for text in ("one", "two", "three"):
            fake.say(text)
        await eventually(lambda: "three" in hub.texts())
        await fake.gateway.drop_connections()
        await fake.gateway.wait_for("resume", count=2)
        fake.say("four")
        await eventually(lambda: "four" in hub.texts())
    assert hub.texts() == ["one", "two", "two", "three", "four"]


@pytest.mark.one_node
def test_a_store_that_cannot_be_reached_skips_no_message() -> None:
    """However often the store fails, the message is asked for again; other failures count."""
    session = GatewaySession("s", "")
    event = Dispatch("MESSAGE_CREATE", {}, 1, session)
    for error, left in ((StoreUnavailable("no route"), 1), (RuntimeError("poison"), 0)):
        session.begin(1)
        for _ in range(EVENT_ATTEMPTS):
            with pytest.raises(type(error)), event.handling():
                raise error
        assert session.unhandled == left
