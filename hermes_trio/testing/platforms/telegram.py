"""A Telegram Bot API server on loopback: the documented methods, their limits, and their error texts.

It stands for a Bot API server run with `--local` (so webhooks may be plain HTTP). Tests speak for the people
(`say`, `caption`, `click`) and read what the bot did (`messages`, `calls`); `open_fake_telegram` ends it.

Of the parse modes it knows MarkdownV2; others are refused, never accepted unread.
"""

from __future__ import annotations

import math
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, final

import attrs
import msgspec
import trio

from .callback import Callback, post
from .changes import Changes
from .fake import FakePlatform
from .faults import RateLimited
from .ledger import WAIT_SECONDS, CallLedger
from .server import FakeReply, FakeRequest, open_loopback_server
from .telegram_arguments import (
    TelegramRefusal,
    arguments_of,
    bad_request,
    boolean,
    command_entities,
    formatted_text,
    inline_keyboard,
    integer,
    string,
    structure,
    without_reply,
)
from .telegram_chats import BotMessage, FakeChat

CHAT_ACTIONS = frozenset(
    {
        "typing",
        "upload_photo",
        "record_video",
        "upload_video",
        "record_voice",
        "upload_voice",
        "upload_document",
        "choose_sticker",
        "find_location",
        "record_video_note",
        "upload_video_note",
    }
)
SECRET_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,256}")
COMMAND = re.compile(r"[a-z0-9_]{1,32}")
# The General topic of a forum: messages are in it when they name no topic, and naming it is an error.
GENERAL_TOPIC = 1


@attrs.define
class _Webhook:
    url: str = ""
    secret: str | None = None
    last_error: str | None = None


class _Poller:
    def __init__(self) -> None:
        self.terminated = False


@final
class FakeTelegram(FakePlatform[BotMessage]):
    """The control surface of a running fake. Made by `open_fake_telegram`."""

    def __init__(self, token: str, username: str, webhook_retry_delay: float) -> None:
        super().__init__(token, rate_limited=_rate_limited, error_of=_error_of)
        self.bot = {"id": int(token.partition(":")[0]), "is_bot": True, "first_name": "Bot", "username": username}
        self.webhook_deliveries: CallLedger[Callback] = CallLedger("webhook delivery")
        self.commands: list[dict[str, str]] = []
        self.chat_actions: CallLedger[tuple[int, str, int | None]] = CallLedger("chat action")
        self.answered_callbacks: dict[str, dict[str, Any]] = {}
        self._chats: dict[int, FakeChat] = {}
        self._updates: list[dict[str, Any]] = []
        self._next_update = 100_000_001
        self._next_message = 1
        self._next_callback = 1
        self._callbacks: set[str] = set()
        self._allowed: list[str] = []
        self._poller: _Poller | None = None
        self._changes = Changes()
        self._webhook = _Webhook()
        self._webhook_retry_delay = webhook_retry_delay

    # What tests look at.

    @property
    def pending_update_ids(self) -> list[int]:
        """Return the ids of updates that the bot has not confirmed yet."""
        return [update["update_id"] for update in self._updates]

    @property
    def webhook_url(self) -> str:
        return self._webhook.url

    async def wait_for_message(
        self,
        *,
        chat_id: int | None = None,
        containing: str = "",
        thread_id: int | None = None,
        timeout: float = WAIT_SECONDS,
    ) -> BotMessage:
        """Wait for the oldest fitting message that no earlier wait has returned. Compares the current text, with edits."""

        def fits(message: BotMessage) -> bool:
            return (
                (chat_id is None or message.chat_id == chat_id)
                and (thread_id is None or message.thread_id == thread_id)
                and containing in message.text
            )

        wanted = f"in chat {chat_id} (topic {thread_id}) containing {containing!r}"
        return await self._claim(fits, wanted=wanted, timeout=timeout)

    async def wait_for_poller(self, *, present: bool = True, timeout: float = WAIT_SECONDS) -> None:
        """Wait until a getUpdates call is held open, or until none is."""
        with trio.fail_after(timeout):
            await self._changes.until(lambda: (self._poller is not None) is present)

    # What people and the platform do.

    def add_private_chat(self, user_id: int, first_name: str = "Ada") -> None:
        """Add a user who has started the bot. The bot cannot write to other users."""
        self._chats.setdefault(user_id, FakeChat(user_id, "private", first_name))

    def add_group(self, chat_id: int, title: str = "Group", *, forum: bool = False) -> None:
        """Add a group or supergroup with the bot as a member. Its id is negative."""
        assert chat_id < 0, "Telegram's group ids are negative"
        kind = "supergroup" if forum or chat_id <= -1_000_000_000_000 else "group"
        self._chats.setdefault(chat_id, FakeChat(chat_id, kind, title, forum))

    def add_topic(self, chat_id: int, thread_id: int) -> None:
        self._chats[chat_id].topics.add(thread_id)

    def forbid(self, chat_id: int, reason: str = "bot was blocked by the user") -> None:
        """Block the bot as a user, or remove it from a group: sending answers 403."""
        self._chats[chat_id].forbidden = reason

    def migrate(self, chat_id: int, new_chat_id: int) -> None:
        """Turn a group into a supergroup with another id."""
        self.add_group(new_chat_id, self._chats[chat_id].title)
        self._chats[chat_id].moved_to = new_chat_id

    def say(
        self,
        text: str,
        *,
        user_id: int = 42,
        chat_id: int | None = None,
        thread_id: int | None = None,
        reply_to: int | None = None,
        first_name: str = "Ada",
    ) -> int:
        """Write as a user; without `chat_id` in the private chat. Returns the message id."""
        return self._inject(
            {"text": text, **command_entities(text, "entities")}, user_id, chat_id, thread_id, reply_to, first_name
        )

    def caption(
        self,
        text: str,
        *,
        kind: str = "photo",
        user_id: int = 42,
        chat_id: int | None = None,
        thread_id: int | None = None,
    ) -> int:
        """Send a `photo` or a `document` with a caption, as a user."""
        file = {"file_id": "file-1", "file_unique_id": "unique-1", "file_size": 1000}
        media: Any = [{**file, "width": 90, "height": 90}] if kind == "photo" else {**file, "file_name": "notes.txt"}
        content = {kind: media, "caption": text, **command_entities(text, "caption_entities")}
        return self._inject(content, user_id, chat_id, thread_id, None, "Ada")

    def click(self, message: BotMessage, button: str, *, user_id: int = 42) -> str:
        """Press the button whose label or callback data is `button`, as a user. Returns the callback query's id."""
        pressed = [b for row in message.buttons for b in row if button in (b["text"], b.get("callback_data"))]
        assert pressed, f"message {message.message_id} has no button {button!r}: {message.buttons}"
        query_id = str(self._next_callback)
        self._next_callback += 1
        self._callbacks.add(query_id)
        query = {
            "id": query_id,
            "from": {"id": user_id, "is_bot": False, "first_name": "Ada"},
            "message": self._chats[message.chat_id].messages[message.message_id],
            "chat_instance": str(message.chat_id),
            "data": pressed[0]["callback_data"],
        }
        self._add_update("callback_query", query)
        return query_id

    def edit(self, chat_id: int, message_id: int, text: str) -> None:
        """Edit a message as its user."""
        message = self._chats[chat_id].messages[message_id] | {"text": text, "edit_date": 1_700_000_001}
        self._chats[chat_id].messages[message_id] = message
        self._add_update("edited_message", message)

    # The API.

    async def handle(self, request: FakeRequest) -> FakeReply:
        """Answer `/bot<token>/<method>`."""
        match = re.fullmatch(r"/bot([^/]+)/([A-Za-z]+)", request.path)
        if match is None:
            return TelegramRefusal(404, "Not Found").reply()
        token, name = match.groups()
        params = arguments_of(request)
        # Method names are not case-sensitive.
        method = next((m for m in ("getUpdates", *_METHODS) if m.lower() == name.lower()), None)

        async def act() -> FakeReply:
            try:
                if not re.fullmatch(r"\d+:[\w-]+", token):
                    raise TelegramRefusal(404, "Not Found")
                if token != self.token:
                    raise TelegramRefusal(401, "Unauthorized")
                if method is None:
                    raise TelegramRefusal(404, "Not Found")
                if method == "getUpdates":
                    return FakeReply.of({"ok": True, "result": await self._get_updates(params)})
                return FakeReply.of({"ok": True, "result": _METHODS[method](self, params)})
            except TelegramRefusal as refusal:
                return refusal.reply()

        return await self.handler.handle(method or name, params, act)

    async def _get_updates(self, params: Mapping[str, Any]) -> list[dict[str, Any]]:
        if self._webhook.url:
            hint = "use deleteWebhook to delete the webhook first"
            raise TelegramRefusal(409, f"Conflict: can't use getUpdates method while webhook is active; {hint}")
        if self._poller is not None:
            self._poller.terminated = True
        mine = self._poller = _Poller()
        self._changes.tell()
        try:
            self._allow(params)
            offset = integer(params, "offset") or 0
            limit = min(max(integer(params, "limit") or 100, 1), 100)
            if offset > 0:
                self._updates = [update for update in self._updates if update["update_id"] >= offset]
            elif offset < 0:
                self._updates = self._updates[offset:]
            with trio.move_on_after(integer(params, "timeout") or 0):
                await self._changes.until(lambda: bool(self._updates) or mine.terminated)
            if mine.terminated:
                hint = "make sure that only one bot instance is running"
                raise TelegramRefusal(409, f"Conflict: terminated by other getUpdates request; {hint}")
            return self._updates[:limit]
        finally:
            if self._poller is mine:
                self._poller = None
                self._changes.tell()

    def _get_me(self, params: Mapping[str, Any]) -> Any:
        return {**self.bot, "can_join_groups": True, "can_read_all_group_messages": False}

    def _set_webhook(self, params: Mapping[str, Any]) -> bool:
        url = str(params.get("url", ""))
        if url and not re.match(r"https?://[^/]+", url):
            raise bad_request("bad webhook: Failed to resolve host")
        secret = params.get("secret_token")
        if secret is not None and not SECRET_TOKEN.fullmatch(str(secret)):
            raise bad_request("secret token contains unallowed characters")
        self._allow(params)
        if boolean(params, "drop_pending_updates"):
            self._updates.clear()
        self._webhook = _Webhook(url, None if secret is None else str(secret))
        if self._poller is not None:
            self._poller.terminated = True
        self._changes.tell()
        return True

    def _delete_webhook(self, params: Mapping[str, Any]) -> bool:
        if boolean(params, "drop_pending_updates"):
            self._updates.clear()
        self._webhook = _Webhook()
        self._changes.tell()
        return True

    def _get_webhook_info(self, params: Mapping[str, Any]) -> dict[str, Any]:
        info: dict[str, Any] = {
            "url": self._webhook.url,
            "has_custom_certificate": False,
            "pending_update_count": len(self._updates),
        }
        if self._webhook.last_error is not None:
            info |= {"last_error_date": 1_700_000_000, "last_error_message": self._webhook.last_error}
        return info

    def _send_message(self, params: Mapping[str, Any]) -> dict[str, Any]:
        text, entities = formatted_text(params)
        chat = self._writable_chat(params)
        thread_id = integer(params, "message_thread_id")
        if thread_id is not None and (thread_id == GENERAL_TOPIC or thread_id not in chat.topics):
            raise bad_request("message thread not found")
        reply_to = self._reply_target(chat, params)
        buttons = inline_keyboard(params)
        message: dict[str, Any] = {
            "message_id": self._take_message_id(),
            "from": self.bot,
            "chat": chat.json(),
            "date": 1_700_000_000,
            "text": text,
        }
        if thread_id is not None:
            message |= {"message_thread_id": thread_id, "is_topic_message": True}
        if entities:
            message["entities"] = entities
        if reply_to is not None:
            message["reply_to_message"] = without_reply(chat.messages[reply_to])
        if buttons:
            message["reply_markup"] = {"inline_keyboard": buttons}
        chat.messages[message["message_id"]] = message
        self.messages.append(
            BotMessage(
                chat_id=chat.id,
                message_id=message["message_id"],
                text=text,
                thread_id=thread_id,
                reply_to=reply_to,
                parse_mode=string(params, "parse_mode"),
                entities=entities,
                buttons=buttons,
                silent=boolean(params, "disable_notification"),
                versions=[text],
            )
        )
        return message

    def _edit_message_text(self, params: Mapping[str, Any]) -> dict[str, Any]:
        text, entities = formatted_text(params)
        return self._edit(params, text, entities)

    def _edit_message_reply_markup(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return self._edit(params, None, [])

    def _edit(self, params: Mapping[str, Any], text: str | None, entities: list[dict[str, Any]]) -> dict[str, Any]:
        chat = self._writable_chat(params)
        message_id = integer(params, "message_id")
        message = chat.messages.get(message_id or 0)
        if message is None:
            raise bad_request("message to edit not found")
        shown = next((m for m in self.messages if m.chat_id == chat.id and m.message_id == message_id), None)
        if shown is None:
            raise bad_request("message can't be edited")
        if text is None:
            text, entities = shown.text, shown.entities
        buttons = inline_keyboard(params)
        if (text, entities, buttons) == (shown.text, shown.entities, shown.buttons):
            same = "specified new message content and reply markup are exactly the same as a current content"
            raise bad_request(f"message is not modified: {same} and reply markup of the message")
        if text != shown.text:
            shown.versions.append(text)
        shown.text, shown.entities, shown.buttons = text, entities, buttons
        shown.parse_mode = string(params, "parse_mode")
        message |= {"text": text, "edit_date": 1_700_000_001}
        for key, value in (("entities", entities), ("reply_markup", {"inline_keyboard": buttons} if buttons else None)):
            message.pop(key, None)
            if value:
                message[key] = value
        self.messages.touch()
        return message

    def _delete_message(self, params: Mapping[str, Any]) -> bool:
        chat = self._chat(params)
        message_id = integer(params, "message_id")
        if message_id is None or message_id not in chat.messages:
            raise bad_request("message to delete not found")
        del chat.messages[message_id]
        for message in self.messages:
            if message.chat_id == chat.id and message.message_id == message_id:
                message.deleted = True
        self.messages.touch()
        return True

    def _send_chat_action(self, params: Mapping[str, Any]) -> bool:
        action = str(params.get("action", ""))
        if action not in CHAT_ACTIONS:
            raise bad_request("wrong parameter action in request")
        chat = self._writable_chat(params)
        self.chat_actions.append((chat.id, action, integer(params, "message_thread_id")))
        return True

    def _answer_callback_query(self, params: Mapping[str, Any]) -> bool:
        query_id = str(params.get("callback_query_id", ""))
        if query_id not in self._callbacks:
            raise bad_request("query is too old and response timeout expired or query ID is invalid")
        if len(str(params.get("text", ""))) > 200:
            raise bad_request("MESSAGE_TOO_LONG")
        self._callbacks.discard(query_id)
        self.answered_callbacks[query_id] = dict(params)
        return True

    def _set_my_commands(self, params: Mapping[str, Any]) -> bool:
        commands = structure(params, "commands")
        if not isinstance(commands, list):
            raise bad_request("can't parse bot commands: expected an Array of BotCommand")
        listed: list[dict[str, str]] = []
        for entry in msgspec.convert(commands, list[dict[str, str]]):
            if not COMMAND.fullmatch(entry.get("command", "").removeprefix("/")):
                raise bad_request("BOT_COMMAND_INVALID")
            if not 1 <= len(entry.get("description", "")) <= 256:
                raise bad_request("BOT_COMMAND_DESCRIPTION_INVALID")
            listed.append(entry)
        if len(listed) > 100:
            raise bad_request("BOT_COMMANDS_TOO_MUCH")
        self.commands = listed
        return True

    # The inside.

    def _inject(
        self,
        content: dict[str, Any],
        user_id: int,
        chat_id: int | None,
        thread_id: int | None,
        reply_to: int | None,
        first_name: str,
    ) -> int:
        if chat_id is None or chat_id > 0:
            self.add_private_chat(user_id, first_name)
        else:
            self.add_group(chat_id)
        chat = self._chats[user_id if chat_id is None else chat_id]
        message: dict[str, Any] = {
            "message_id": self._take_message_id(),
            "from": {"id": user_id, "is_bot": False, "first_name": first_name},
            "chat": chat.json(),
            "date": 1_700_000_000,
            **content,
        }
        if thread_id is not None:
            chat.topics.add(thread_id)
            message |= {"message_thread_id": thread_id, "is_topic_message": True}
        if reply_to is not None:
            message["reply_to_message"] = without_reply(chat.messages[reply_to])
        chat.messages[message["message_id"]] = message
        self._add_update("message", message)
        return int(message["message_id"])

    def _add_update(self, kind: str, value: dict[str, Any]) -> None:
        if self._allowed and kind not in self._allowed:
            return
        self._updates.append({"update_id": self._next_update, kind: value})
        self._next_update += 1
        self._changes.tell()

    def _allow(self, params: Mapping[str, Any]) -> None:
        if "allowed_updates" in params:
            self._allowed = msgspec.convert(structure(params, "allowed_updates"), list[str])

    def _take_message_id(self) -> int:
        self._next_message += 1
        return self._next_message - 1

    def _chat(self, params: Mapping[str, Any]) -> FakeChat:
        if params.get("chat_id") in (None, ""):
            raise bad_request("chat_id is empty")
        chat = self._chats.get(integer(params, "chat_id") or 0)
        if chat is None:
            raise bad_request("chat not found")
        return chat

    def _writable_chat(self, params: Mapping[str, Any]) -> FakeChat:
        chat = self._chat(params)
        if chat.forbidden is not None:
            raise TelegramRefusal(403, f"Forbidden: {chat.forbidden}")
        if chat.moved_to is not None:
            text = "Bad Request: group chat was upgraded to a supergroup chat"
            raise TelegramRefusal(400, text, migrate_to_chat_id=chat.moved_to)
        return chat

    def _reply_target(self, chat: FakeChat, params: Mapping[str, Any]) -> int | None:
        reply: Any = structure(params, "reply_parameters")
        if reply is None:
            return None
        if not isinstance(reply, dict) or "message_id" not in reply:
            raise bad_request("can't parse reply parameters: Can't find field \"message_id\"")
        parameters = msgspec.convert(reply, dict[str, Any])
        target = int(parameters["message_id"])
        if target in chat.messages:
            return target
        if parameters.get("allow_sending_without_reply"):
            return None
        raise bad_request("message to be replied not found")

    async def deliver_webhooks(self) -> None:
        """Post pending updates to the webhook, in order, and retry each until it is accepted with a 2xx."""
        while True:
            if not self._webhook.url or not self._updates:
                await self._changes.wait()
                continue
            webhook, update = self._webhook, self._updates[0]
            headers = {"Content-Type": "application/json"}
            if webhook.secret is not None:
                headers["X-Telegram-Bot-Api-Secret-Token"] = webhook.secret
            delivery = await post(webhook.url, headers, msgspec.json.encode(update), timeout=10)
            self.webhook_deliveries.append(delivery)
            if 200 <= delivery.status < 300:
                self._updates = [other for other in self._updates if other is not update]
            else:
                webhook.last_error = f"Wrong response from the webhook: {delivery.status}"
                await trio.sleep(self._webhook_retry_delay)


# All but getUpdates, which alone may wait.
_METHODS: dict[str, Callable[[FakeTelegram, Mapping[str, Any]], Any]] = {
    "getMe": FakeTelegram._get_me,
    "setWebhook": FakeTelegram._set_webhook,
    "deleteWebhook": FakeTelegram._delete_webhook,
    "getWebhookInfo": FakeTelegram._get_webhook_info,
    "sendMessage": FakeTelegram._send_message,
    "editMessageText": FakeTelegram._edit_message_text,
    "editMessageReplyMarkup": FakeTelegram._edit_message_reply_markup,
    "deleteMessage": FakeTelegram._delete_message,
    "sendChatAction": FakeTelegram._send_chat_action,
    "answerCallbackQuery": FakeTelegram._answer_callback_query,
    "setMyCommands": FakeTelegram._set_my_commands,
}


def _rate_limited(fault: RateLimited) -> FakeReply:
    seconds = math.ceil(fault.retry_after)
    return TelegramRefusal(429, f"Too Many Requests: retry after {seconds}", retry_after=seconds).reply()


def _error_of(reply: FakeReply) -> str | None:
    return None if reply.status == 200 else msgspec.json.decode(reply.body)["description"]


@asynccontextmanager
async def open_fake_telegram(
    *,
    token: str = "123456:fake-telegram-token",
    username: str = "hermes_bot",
    webhook_retry_delay: float = 0.05,
) -> AsyncGenerator[FakeTelegram, None]:
    """Run a fake until the block ends; then its server and connections are closed and its deliveries have ended."""
    fake = FakeTelegram(token, username, webhook_retry_delay)
    async with open_loopback_server(fake.handle) as server, trio.open_nursery() as nursery:
        fake.attach(server)
        nursery.start_soon(fake.deliver_webhooks)
        yield fake
        nursery.cancel_scope.cancel()
