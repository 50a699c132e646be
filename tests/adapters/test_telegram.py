"""The Telegram adapter against the fake Bot API: settings, who is meant, what is confirmed when, and texts that always arrive."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import trio

from hermes_trio import Turn
from hermes_trio.adapters.telegram.adapter import TelegramAdapter, telegram_platform
from hermes_trio.adapters.wire.backoff import Backoff
from hermes_trio.base.settings import SettingsError
from hermes_trio.messaging.contract import Outgoing
from hermes_trio.messaging.menu import MENU
from hermes_trio.messaging.platforms import Platform
from hermes_trio.testing.platforms import FakeTelegram, RateLimited, ServerError, open_fake_telegram
from hermes_trio.testing.platforms.callback import Callback, post
from tests.messaging.harness import scripted, works

from .platform_bench import Gate, open_bench, open_mount, tables_of

GROUP = -1_001_234_567_890


@pytest.fixture
async def fake() -> AsyncIterator[FakeTelegram]:
    """A Telegram of its own."""
    async with open_fake_telegram() as opened:
        yield opened


def member(fake: FakeTelegram, **more: Any) -> Platform:
    """The adapter for it."""
    table = {"token": fake.token, "base_url": fake.base_url, "allow_all": True, "poll_seconds": 5, **more}
    made = telegram_platform(table, {})
    assert made is not None
    return made


def adapter_of(made: Platform) -> TelegramAdapter:
    assert isinstance(made.adapter, TelegramAdapter)
    return made.adapter


# -- settings ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.one_node
@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"allow_all": True}, ["[telegram]", "token is missing", "TELEGRAM_BOT_TOKEN", "@BotFather"]),
        ({"token": "1:a b"}, ["token has spaces"]),
        ({"token": "1:a", "mode": "push"}, ["mode is 'push'", "'polling', 'webhook'"]),
        ({"token": "1:a", "busy": "wait"}, ["busy is 'wait'", "'queue', 'interrupt', 'steer'"]),
        ({"token": "1:a", "alowed_users": ["1"]}, ["alowed_users", "did you mean allowed_users?"]),
        ({"token": "1:a", "base_url": "telegram.local"}, ["base_url is 'telegram.local'", "https://"]),
        ({"token": "1:a", "proxy": "proxy:3128"}, ["proxy is 'proxy:3128'", "http://"]),
        ({"token": "1:a", "mode": "webhook"}, ["webhook_url", "https://bot.example.org/telegram"]),
        ({"token": "1:a", "poll_seconds": 60}, ["poll_seconds", "<= 50"]),
    ],
)
def test_a_mistake_in_the_table_names_the_key_and_what_is_accepted(table: dict[str, Any], words: list[str]) -> None:
    """The error says what to change, and quotes no token."""
    with pytest.raises(SettingsError) as raised:
        telegram_platform(table, {})
    assert all(word in str(raised.value) for word in words), raised.value
    assert "1:a" not in str(raised.value)


@pytest.mark.one_node
def test_the_environment_completes_the_table_and_the_file_decides() -> None:
    """Token, allow-list and home may come from the environment; ids may be numbers; no table and no token is no adapter."""
    environment = {
        "TELEGRAM_BOT_TOKEN": "1:env",
        "TELEGRAM_ALLOWED_USERS": "7, 8",
        "TELEGRAM_HOME_CHANNEL": "42",
        "TELEGRAM_HOME_CHANNEL_THREAD_ID": "5",
    }
    made = telegram_platform({}, environment)
    assert made is not None
    assert adapter_of(made).settings.token == "1:env"
    assert made.settings.allowed_users == ["7", "8"]
    assert made.settings.home is not None
    assert (made.settings.home.chat_id, made.settings.home.thread_id) == ("42", "5")
    made = telegram_platform({"token": "1:file", "allowed_users": [9], "home": {"chat_id": -100}}, environment)
    assert made is not None
    assert (adapter_of(made).settings.token, made.settings.allowed_users) == ("1:file", ["9"])
    assert made.settings.home is not None
    assert made.settings.home.chat_id == "-100"
    assert telegram_platform({}, {}) is None
    assert telegram_platform({"enabled": False}, environment) is None
    assert "1:file" not in repr(adapter_of(made).settings)


@pytest.mark.one_node
def test_every_table_on_the_page_is_accepted() -> None:
    """The example in the documentation makes an adapter."""
    tables = tables_of("telegram.md")
    assert len(tables) >= 3
    for table in tables:
        assert telegram_platform(table["telegram"], {}) is not None


# -- who is meant -----------------------------------------------------------------------------------------------------------------


async def test_in_a_group_only_what_is_meant_for_the_agent_is_answered(fake: FakeTelegram) -> None:
    """A mention, an answer to the bot and a command are for it; talk, edits and another bot's commands are not."""
    async with open_bench(member(fake)) as world:
        fake.say("just talking", chat_id=GROUP)
        fake.say("/status@other_bot", chat_id=GROUP)
        fake.say("/weather", chat_id=GROUP)
        spoken = fake.say("@hermes_bot, what is up?", chat_id=GROUP)
        fake.edit(GROUP, spoken, "@hermes_bot edited")
        first = await fake.wait_for_message(chat_id=GROUP)
        fake.say("and now?", chat_id=GROUP, reply_to=first.message_id)
        second = await fake.wait_for_message(chat_id=GROUP)
        fake.say("/status", chat_id=GROUP)
        third = await fake.wait_for_message(chat_id=GROUP)
        await world.idle()
    assert (first.text, first.reply_to) == ("echo: what is up?", spoken)
    assert second.text == "echo: and now?"
    assert "idle" in third.text
    assert len(fake.messages) == 3


async def test_groups_can_be_free_or_closed(fake: FakeTelegram) -> None:
    """In a free chat every message is meant; a chat that is not on the list of allowed ones is ignored."""
    async with open_bench(member(fake, free_chats=[GROUP], allowed_chats=[GROUP])) as world:
        fake.say("@hermes_bot hello", chat_id=GROUP - 1)
        fake.say("no mention", chat_id=GROUP)
        reply = await fake.wait_for_message()
        await world.idle()
    assert (reply.chat_id, reply.text) == (GROUP, "echo: no mention")
    assert len(fake.messages) == 1


async def test_a_topic_is_a_conversation_and_the_general_topic_is_the_group(fake: FakeTelegram) -> None:
    """Replies stay in their topic; in General no topic is named, because Telegram refuses that. People who share a topic are told apart."""
    fake.add_group(GROUP, forum=True)
    async with open_bench(member(fake)):
        fake.say("@hermes_bot one", chat_id=GROUP, thread_id=9)
        fake.say("@hermes_bot two", chat_id=GROUP, thread_id=1)
        in_topic = await fake.wait_for_message(containing="one")
        in_general = await fake.wait_for_message(containing="two")
    assert (in_topic.thread_id, in_topic.text) == (9, "echo: [Ada] one")
    assert (in_general.thread_id, in_general.text) == (None, "echo: two")


async def test_a_caption_is_what_was_said_about_a_file(fake: FakeTelegram) -> None:
    """Without a caption the agent is told what was attached."""
    async with open_bench(member(fake)):
        fake.caption("look at this")
        assert (await fake.wait_for_message()).text == "echo: look at this"
        fake.caption("", kind="document")
        assert (await fake.wait_for_message()).text == "echo: [attached: document notes.txt]"


# -- confirming -------------------------------------------------------------------------------------------------------------------


@pytest.mark.one_node
async def test_an_update_is_confirmed_only_when_the_gateway_has_it(fake: FakeTelegram) -> None:
    """Cancelled before that, it is given out again; cancelled after it, Telegram is told before the adapter ends."""
    adapter, gate = adapter_of(member(fake)), Gate()
    adapter.gateway = gate
    async with adapter.open():
        for held in (True, False):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(adapter.run, lambda: None)
                if held:
                    fake.say("keep me")
                await gate.arrived.wait()
                assert len(fake.pending_update_ids) == 1
                if not held:
                    gate.opened.set()
                    await trio.testing.wait_all_tasks_blocked(0.05)
                nursery.cancel_scope.cancel()
            gate.arrived = trio.Event()
            assert len(fake.pending_update_ids) == (1 if held else 0)
    assert [one.text for one in gate.received] == ["keep me", "keep me"]
    assert len({one.event_id for one in gate.received}) == 1


@pytest.mark.one_node
async def test_a_slow_command_does_not_hold_up_other_people(fake: FakeTelegram) -> None:
    """Telegram gives nothing new out before everything is confirmed, so a command is confirmed while it is carried out."""
    adapter, gate = adapter_of(member(fake)), Gate()
    adapter.gateway = gate
    async with adapter.open(), trio.open_nursery() as nursery:
        nursery.start_soon(adapter.run, lambda: None)
        fake.say("/stop", user_id=1)
        await gate.arrived.wait()
        gate.arrived = trio.Event()
        fake.say("hello", user_id=2)
        with trio.fail_after(5):
            await gate.arrived.wait()
        assert [one.text for one in gate.received] == ["/stop", "hello"]
        nursery.cancel_scope.cancel()


async def test_polling_survives_an_outage(fake: FakeTelegram) -> None:
    """Failing polls are repeated with a back-off; nothing is lost."""
    made = member(fake)
    adapter_of(made)._backoff = Backoff(first=0.01, cap=0.02)
    fake.fail("getUpdates", ServerError(), times=3)
    async with open_bench(made):
        fake.say("still there?")
        assert (await fake.wait_for_message()).text == "echo: still there?"


# -- sending ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.one_node
async def test_markup_that_telegram_does_not_take_is_sent_plainer(fake: FakeTelegram) -> None:
    """A table that grows beyond the limit when it is laid out arrives as it was written."""
    wide = "| name | text |\n| --- | --- |\n" + "".join(f"| {n} | x |\n" for n in range(90)) + f"| {'w' * 200} | last |"
    adapter = adapter_of(member(fake))
    fake.add_private_chat(42)
    async with adapter.open():
        result = await adapter.send(Outgoing(chat_id="42", text=wide))
        assert result.success
        result = await adapter.send(Outgoing(chat_id="42", text="```\n```", plain=True))
        assert result.success
    first, second = fake.messages
    assert (first.text, first.parse_mode) == (wide, None)
    assert second.text.strip()


async def test_formatting_arrives_as_formatting(fake: FakeTelegram) -> None:
    """Bold is bold, and characters that MarkdownV2 reserves are themselves."""
    async with open_bench(member(fake), scripted("**bold** and 1.5 (or so)!")):
        fake.say("go")
        shown = await fake.wait_for_message()
    assert (shown.text, shown.parse_mode) == ("bold and 1.5 (or so)!", "MarkdownV2")
    assert shown.entities == [{"type": "bold", "offset": 0, "length": 4}]


async def test_a_long_answer_becomes_several_messages_in_order(fake: FakeTelegram) -> None:
    """Each is within 4096 UTF-16 units and says which one it is; only the first hangs on the message."""
    text = "\n".join(f"line {n} 😀" for n in range(900))
    async with open_bench(member(fake), scripted(text)) as world:
        asked = fake.say("go")
        await fake.wait_for_message(containing="(3/3)")
        await world.idle()
    assert [one.reply_to for one in fake.messages] == [asked, None, None]
    assert "line 899 😀" in fake.messages[-1].text
    assert all(call.status == 200 for call in fake.calls if call.method == "sendMessage")


async def test_a_rate_limit_is_waited_for(fake: FakeTelegram) -> None:
    """The reply is sent after the time that Telegram names, once."""
    fake.fail("sendMessage", RateLimited(1))
    async with open_bench(member(fake)) as world:
        fake.say("hello")
        await fake.wait_for_message(containing="hello")
        await world.idle()
    assert [call.status for call in fake.calls if call.method == "sendMessage"] == [429, 200]
    assert len(fake.messages) == 1


@pytest.mark.one_node
async def test_replies_follow_a_group_that_moved_and_survive_a_topic_that_is_gone(fake: FakeTelegram) -> None:
    """A group that became a supergroup has another id; a deleted topic leaves the group."""
    fake.add_group(-500)
    fake.migrate(-500, GROUP)
    adapter = adapter_of(member(fake))
    async with adapter.open():
        assert (await adapter.send(Outgoing(chat_id="-500", text="moved"))).success
        assert (await adapter.send(Outgoing(chat_id="-500", text="moved again"))).success
        assert (await adapter.send(Outgoing(chat_id=str(GROUP), thread_id="77", text="no topic"))).success
    assert [(one.chat_id, one.text) for one in fake.messages] == [
        (GROUP, "moved"),
        (GROUP, "moved again"),
        (GROUP, "no topic"),
    ]
    refused = [call for call in fake.calls if call.method == "sendMessage" and call.status == 400]
    assert len(refused) == 2


async def test_typing_is_shown_in_the_topic_while_a_turn_runs(fake: FakeTelegram) -> None:
    """It is shown where the person waits."""
    async with open_bench(member(fake), scripted(works(0.1))):
        fake.say("@hermes_bot work", chat_id=GROUP, thread_id=9)
        await fake.wait_for_message()
    assert set(fake.chat_actions) == {(GROUP, "typing", 9)}


async def test_an_answer_is_shown_while_it_is_written(fake: FakeTelegram) -> None:
    """With `stream`, one message grows into the answer; the last word is the outbox's."""

    async def writes(turn: Turn) -> str:
        for word in ("The first part of a long answer, ", "then the **second** part."):
            turn.emit("message.delta", delta=word)
            await trio.sleep(1.0)
        return "The first part of a long answer, then the **second** part."

    async with open_bench(member(fake, stream=True), scripted(writes)) as world:
        asked = fake.say("tell me")
        await fake.wait_for_message(containing="The first part")
        await world.idle()
    (shown,) = fake.messages
    assert shown.versions[0] == "The first part of a long answer, …"
    assert (shown.text, shown.reply_to) == ("The first part of a long answer, then the second part.", asked)
    assert len(shown.versions) >= 2


async def test_the_menu_is_what_the_gateway_understands(fake: FakeTelegram) -> None:
    """Every command is in Telegram's menu, and every entry of the menu is a command."""
    async with open_bench(member(fake)) as world:
        assert [name for name, _ in world.hub.commands.names] == [entry.name for entry in MENU]
        assert [one["command"] for one in fake.commands] == [entry.name for entry in MENU]


# -- the webhook ------------------------------------------------------------------------------------------------------------------


async def test_updates_arrive_by_webhook_once_and_only_with_the_secret(fake: FakeTelegram) -> None:
    """The address and a secret are registered with Telegram; a redelivery is recognised, and a request without the secret is refused."""
    made = member(fake, mode="webhook", webhook_url="http://127.0.0.1:1/placeholder")
    adapter = adapter_of(made)
    async with open_mount(adapter) as server:
        adapter.settings = msgspec.structs.replace(adapter.settings, webhook_url=f"{server.url}/telegram")
        adapter.endpoint = "/telegram"
        async with open_bench(made) as world:
            fake.say("over the web")
            assert (await fake.wait_for_message()).text == "echo: over the web"
            (delivery,) = fake.webhook_deliveries
            assert delivery.status == 200

            async def send(body: bytes, secret: str | None = None) -> Callback:
                name = "X-Telegram-Bot-Api-Secret-Token"
                given = delivery.headers[name] if secret is None else secret
                return await post(delivery.url, {name: given}, body, timeout=5)

            assert (await send(delivery.body)).status == 200
            assert (await send(delivery.body, "guessed")).status == 401
            assert (await send(b"not json")).status == 400
            assert (await send(b'{"update_id": "of an unforeseen form"}')).status == 200
            await world.idle()
        assert (await send(delivery.body)).status == 503
    assert len(fake.messages) == 1
