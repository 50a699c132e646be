"""The Telegram client against the fake Bot API, over real sockets."""

from __future__ import annotations

import logging

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from hermes_trio.adapters.telegram.client import TelegramClient, parse_update
from hermes_trio.messaging.errors import Missing, PlatformError, PlatformErrorKind
from hermes_trio.testing.platforms import ANY, Delay, Drop, FakeTelegram, RateLimited, ServerError
from hermes_trio.testing.platforms.server import FakeReply, FakeRequest, open_loopback_server

GROUP = -1001234567890


async def refused(awaitable) -> PlatformError:
    with pytest.raises(PlatformError) as caught, trio.fail_after(5):
        await awaitable
    return caught.value


async def test_get_me_names_the_bot(telegram: FakeTelegram, telegram_client: TelegramClient) -> None:
    """getMe gives the bot's own user."""
    me = await telegram_client.get_me()
    assert (me.id, me.is_bot, me.username) == (123456, True, "hermes_bot")


@pytest.mark.parametrize("token", ["999999:wrong", "nonsense"])
async def test_wrong_token_is_permanent_and_never_shown(telegram: FakeTelegram, token: str) -> None:
    """A wrong or malformed token is UNAUTHORIZED for good, and appears in no text."""
    async with TelegramClient(telegram.base_url, token) as client:
        error = await refused(client.get_me())
    assert (error.kind, error.permanent) == (PlatformErrorKind.UNAUTHORIZED, True)
    assert token not in f"{error} {error!r} {client!r}"


async def test_token_is_in_no_log_and_no_traceback(
    telegram: FakeTelegram, telegram_client: TelegramClient, caplog: pytest.LogCaptureFixture
) -> None:
    """At the most talkative log level no record names the token, also when calls fail."""
    with caplog.at_level(logging.DEBUG):
        await telegram_client.get_me()
        telegram.fail("getMe", Drop())
        error = await refused(telegram_client.get_me())
    assert telegram.token not in caplog.text
    assert telegram.token not in f"{error} {error.__cause__}"
    async with TelegramClient("http://127.0.0.1:1", telegram.token) as nowhere:
        error = await refused(nowhere.get_me())
    assert telegram.token not in str(error)
    assert (error.kind, error.ambiguous) == (PlatformErrorKind.TRANSIENT, False)


async def test_updates_are_polled_and_confirmed(telegram: FakeTelegram, telegram_client: TelegramClient) -> None:
    """An update stays with the platform until the consumer has confirmed it."""
    poller = telegram_client.poll(timeout=5)
    first_id = telegram.say("one")
    telegram.say("/status now", user_id=7)
    first = await anext(poller)
    second = await anext(poller)
    assert first.message is not None
    assert second.message is not None
    assert (first.message.message_id, first.message.text, first.message.chat.type) == (first_id, "one", "private")
    assert second.message.entities[0].type == "bot_command"
    assert telegram.pending_update_ids == [first.update_id, second.update_id]

    poller.confirm(second.update_id)
    poller.confirm(first.update_id)
    telegram.say("three")
    third = await anext(poller)
    assert telegram.pending_update_ids == [third.update_id]


async def test_unconfirmed_update_is_given_to_the_next_poller(
    telegram: FakeTelegram, telegram_client: TelegramClient
) -> None:
    """What was not confirmed before a restart comes again; what was confirmed and flushed does not."""
    telegram.say("handled")
    telegram.say("lost in the crash")
    poller = telegram_client.poll(timeout=5)
    handled = await anext(poller)
    lost = await anext(poller)
    poller.confirm(handled.update_id)
    assert poller.unconfirmed == {lost.update_id}
    await poller.flush()

    again = await anext(telegram_client.poll(timeout=5))
    assert again.update_id == lost.update_id


async def test_next_poll_waits_for_confirmation(telegram: FakeTelegram, telegram_client: TelegramClient) -> None:
    """A consumer that confirms late is not given the same update twice, and the poll does not spin."""
    telegram.say("one")
    poller = telegram_client.poll(timeout=5)
    one = await anext(poller)
    async with trio.open_nursery() as nursery:
        got: list[str | None] = []

        async def consume() -> None:
            update = await anext(poller)
            assert update.message is not None
            got.append(update.message.text)

        nursery.start_soon(consume)
        await wait_all_tasks_blocked()
        telegram.say("two")
        await wait_all_tasks_blocked()
        assert got == []
        poller.confirm(one.update_id)
    assert got == ["two"]
    assert [call.method for call in telegram.calls] == ["getUpdates", "getUpdates"]


async def test_poller_goes_on_after_an_error(telegram: FakeTelegram, telegram_client: TelegramClient) -> None:
    """A failed poll raises, and iterating again continues where it was."""
    poller = telegram_client.poll(timeout=5)
    telegram.fail("getUpdates", ServerError())
    telegram.say("hello")
    error = await refused(anext(poller))
    assert (error.kind, error.code) == (PlatformErrorKind.TRANSIENT, 502)
    update = await anext(poller)
    assert update.message is not None


async def test_second_poller_ends_the_first(telegram: FakeTelegram, telegram_client: TelegramClient) -> None:
    """Two pollers of one token: the older gets 409 Conflict, which is not permanent."""
    errors: list[PlatformError] = []
    async with trio.open_nursery() as nursery:

        async def older() -> None:
            errors.append(await refused(telegram_client.get_updates(timeout=5)))

        nursery.start_soon(older)
        await telegram.wait_for_poller()
        await telegram_client.get_updates(timeout=0)
    assert (errors[0].code, errors[0].permanent) == (409, False)
    assert "terminated by other getUpdates request" in errors[0].message


async def test_update_of_unforeseen_form_does_not_stop_the_others(
    telegram: FakeTelegram, telegram_client: TelegramClient
) -> None:
    """An update that cannot be read is given as one without content, and the next one follows."""
    telegram._add_update("message", {"message_id": "not a number"})
    telegram.say("fine")
    poller = telegram_client.poll(timeout=5)
    odd = await anext(poller)
    fine = await anext(poller)
    assert odd.message is None
    assert fine.message is not None


async def test_cancelled_poll_closes_its_connection(telegram: FakeTelegram, telegram_client: TelegramClient) -> None:
    """Cancelling a long poll ends it on the platform's side too, so that the next one meets no conflict."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(telegram_client.get_updates, None)
        await telegram.wait_for_poller()
        nursery.cancel_scope.cancel()
    await telegram.wait_for_poller(present=False)
    assert await telegram_client.get_updates(timeout=0) == []


async def test_message_with_topic_reply_and_buttons(telegram: FakeTelegram, telegram_client: TelegramClient) -> None:
    """sendMessage carries topic, reply anchor, buttons and markup, and returns the message."""
    asked = telegram.say("question", chat_id=GROUP, thread_id=9)
    keyboard = [[{"text": "Yes", "callback_data": "approve:1"}]]
    sent = await telegram_client.send_message(
        GROUP,
        "*bold* answer\\.",
        parse_mode="MarkdownV2",
        message_thread_id=9,
        reply_to=asked,
        inline_keyboard=keyboard,
        silent=True,
    )
    seen = await telegram.wait_for_message(chat_id=GROUP, containing="answer", thread_id=9)
    assert (sent.message_id, sent.text) == (seen.message_id, "bold answer.")
    assert (seen.reply_to, seen.buttons, seen.silent) == (asked, keyboard, True)
    assert seen.entities == [{"type": "bold", "offset": 0, "length": 4}]


async def test_reply_to_a_deleted_message_is_sent_anyway(
    telegram: FakeTelegram, telegram_client: TelegramClient
) -> None:
    """A reply anchor that is gone costs the anchor, not the message."""
    telegram.say("hello")
    await telegram_client.send_message(42, "answer", reply_to=999)
    assert (await telegram.wait_for_message(chat_id=42)).reply_to is None


async def test_button_click_arrives_and_is_answered_once(
    telegram: FakeTelegram, telegram_client: TelegramClient
) -> None:
    """A pressed button is an update with its data; answering it twice is refused."""
    telegram.say("hello")
    await telegram_client.send_message(42, "ok?", inline_keyboard=[[{"text": "Yes", "callback_data": "y"}]])
    query_id = telegram.click(await telegram.wait_for_message(containing="ok?"), "Yes", user_id=42)
    updates = await telegram_client.get_updates(timeout=5)
    query = updates[-1].callback_query
    assert query is not None
    assert query.message is not None
    assert (query.id, query.data, query.sender.id, query.message.text) == (query_id, "y", 42, "ok?")
    await telegram_client.answer_callback_query(query.id, "done")
    error = await refused(telegram_client.answer_callback_query(query.id))
    assert (error.kind, error.missing) == (PlatformErrorKind.NOT_FOUND, Missing.OTHER)
    assert telegram.answered_callbacks[query_id]["text"] == "done"


async def test_caption_and_edited_message_arrive(telegram: FakeTelegram, telegram_client: TelegramClient) -> None:
    """A photo's caption and a person's edit reach the client typed."""
    telegram.caption("look", kind="document")
    telegram.edit(42, telegram.say("tpyo"), "typo")
    captioned, _, edited = await telegram_client.get_updates(timeout=5)
    assert captioned.message is not None
    assert captioned.message.document is not None
    assert (captioned.message.caption, captioned.message.document.file_name) == ("look", "notes.txt")
    assert edited.edited_message is not None
    assert edited.edited_message.text == "typo"


async def test_edit_delete_and_chat_action(telegram: FakeTelegram, telegram_client: TelegramClient) -> None:
    """Edits say whether they changed anything; deletion and typing reach the chat."""
    telegram.say("hello")
    keyboard = [[{"text": "a", "callback_data": "a"}]]
    message = await telegram_client.send_message(42, "thinking", inline_keyboard=keyboard)
    await telegram_client.send_chat_action(42)
    assert await telegram_client.edit_message_text(42, message.message_id, "done")
    assert not await telegram_client.edit_message_text(42, message.message_id, "done")
    assert not await telegram_client.edit_message_buttons(42, message.message_id)
    assert (await telegram.wait_for_message(chat_id=42, containing="done")).versions == ["thinking", "done"]
    await telegram_client.delete_message(42, message.message_id)
    assert telegram.messages[0].deleted
    assert list(telegram.chat_actions) == [(42, "typing", None)]
    error = await refused(telegram_client.edit_message_text(42, message.message_id, "late"))
    assert (error.kind, error.missing) == (PlatformErrorKind.NOT_FOUND, Missing.MESSAGE)


async def test_length_is_counted_in_utf16_units(telegram: FakeTelegram, telegram_client: TelegramClient) -> None:
    """4096 units pass and one more does not, an emoji counting twice."""
    telegram.say("hello")
    await telegram_client.send_message(42, "😀" * 2048)
    error = await refused(telegram_client.send_message(42, "😀" * 2048 + "a"))
    assert (error.kind, error.permanent) == (PlatformErrorKind.TOO_LONG, True)


@pytest.mark.parametrize(
    ("text", "options", "kind"),
    [
        ("1. first", {"parse_mode": "MarkdownV2"}, PlatformErrorKind.BAD_FORMAT),
        ("*open", {"parse_mode": "MarkdownV2"}, PlatformErrorKind.BAD_FORMAT),
        ("text", {"parse_mode": "nonsense"}, PlatformErrorKind.BAD_FORMAT),
        ("  \n", {}, PlatformErrorKind.BAD_FORMAT),
        ("text", {"inline_keyboard": [[{"text": "x", "callback_data": "d" * 65}]]}, PlatformErrorKind.BAD_FORMAT),
        ("text", {"message_thread_id": 77}, PlatformErrorKind.NOT_FOUND),
        ("text", {"message_thread_id": 1}, PlatformErrorKind.NOT_FOUND),
    ],
)
async def test_refused_messages(
    telegram: FakeTelegram, telegram_client: TelegramClient, text: str, options: dict, kind: PlatformErrorKind
) -> None:
    """What the Bot API refuses is refused here, with a kind that a sender can act on, and nothing is sent."""
    telegram.say("hello", chat_id=GROUP)
    error = await refused(telegram_client.send_message(GROUP, text, **options))
    assert (error.kind, error.permanent, error.code) == (kind, True, 400)
    assert len(telegram.messages) == 0


async def test_missing_chat_and_missing_thread_differ(telegram: FakeTelegram, telegram_client: TelegramClient) -> None:
    """A chat that is unknown and a topic that is unknown are told apart (GW-5)."""
    telegram.say("hello", chat_id=GROUP)
    chat = await refused(telegram_client.send_message(4711, "hello"))
    thread = await refused(telegram_client.send_message(GROUP, "hello", message_thread_id=5))
    assert (chat.missing, thread.missing) == (Missing.CHAT, Missing.THREAD)


async def test_blocked_and_migrated_chats(telegram: FakeTelegram, telegram_client: TelegramClient) -> None:
    """A block is FORBIDDEN; a group that became a supergroup says where it went."""
    telegram.say("hello")
    telegram.forbid(42)
    assert (await refused(telegram_client.send_message(42, "hello"))).kind is PlatformErrorKind.FORBIDDEN
    telegram.say("hello", chat_id=-55)
    telegram.migrate(-55, GROUP)
    error = await refused(telegram_client.send_message(-55, "hello"))
    assert (error.kind, error.moved_to) == (PlatformErrorKind.NOT_FOUND, str(GROUP))


async def test_rate_limit_says_how_long(telegram: FakeTelegram, telegram_client: TelegramClient) -> None:
    """429 carries the platform's own delay, and only the scripted calls are hit."""
    telegram.say("hello")
    telegram.fail("sendMessage", RateLimited(7))
    error = await refused(telegram_client.send_message(42, "hello"))
    assert (error.kind, error.retry_after, error.permanent) == (PlatformErrorKind.RATE_LIMITED, 7, False)
    await telegram_client.send_message(42, "hello")


async def test_lost_answer_is_ambiguous(telegram: FakeTelegram, telegram_client: TelegramClient) -> None:
    """When the connection drops after the work was done, the error says that it may have been done."""
    telegram.say("hello")
    telegram.fail("sendMessage", Drop(before=False))
    error = await refused(telegram_client.send_message(42, "hello"))
    assert (error.kind, error.ambiguous) == (PlatformErrorKind.TRANSIENT, True)
    assert (await telegram.wait_for_message(chat_id=42)).text == "hello"


async def test_slow_answer_times_out(telegram: FakeTelegram) -> None:
    """A call that takes too long is given up with an ambiguous transient error."""
    telegram.fail(ANY, Delay(5))
    async with TelegramClient(telegram.base_url, telegram.token, timeout=0.05) as client:
        error = await refused(client.get_me())
    assert (error.kind, error.ambiguous) == (PlatformErrorKind.TRANSIENT, True)


async def test_webhook_is_delivered_with_its_secret_until_accepted(
    telegram: FakeTelegram, telegram_client: TelegramClient
) -> None:
    """Webhook mode: updates are posted with the secret, again after a 5xx, and polling is refused meanwhile."""
    received: list[tuple[str | None, int]] = []

    async def endpoint(request: FakeRequest) -> FakeReply:
        update = parse_update(request.body)
        received.append((request.headers.get("x-telegram-bot-api-secret-token"), update.update_id))
        return FakeReply(500 if len(received) == 1 else 200)

    async with open_loopback_server(endpoint) as server:
        await telegram_client.set_webhook(f"{server.url}/telegram", secret_token="s3cret")
        telegram.say("over the webhook")
        await telegram.webhook_deliveries.first(lambda delivery: delivery.status == 200, wanted="that was accepted")
        assert received == [("s3cret", 100_000_001)] * 2
        assert (await refused(telegram_client.get_updates(timeout=0))).code == 409
        info = await telegram_client.get_webhook_info()
        assert (info.pending_update_count, info.last_error_message is None) == (0, False)
        await telegram_client.delete_webhook()
        assert await telegram_client.get_updates(timeout=0) == []


async def test_commands_are_set_and_validated(telegram: FakeTelegram, telegram_client: TelegramClient) -> None:
    """setMyCommands takes lower-case names and refuses others."""
    await telegram_client.set_my_commands({"status": "What is running"})
    assert telegram.commands == [{"command": "status", "description": "What is running"}]
    assert (await refused(telegram_client.set_my_commands({"Bad-Name": "x"}))).kind is PlatformErrorKind.BAD_FORMAT
