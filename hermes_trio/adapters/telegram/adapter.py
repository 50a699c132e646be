"""The Telegram adapter: receives by long polling or webhook, sends from the outbox, with buttons for approvals.

An update is confirmed after the hub has stored it: what a crash leaves unconfirmed is redelivered, and recognised if it had been stored. Markup that
Telegram refuses is replaced by plain text. The adapter's runner ends `run`, the senders end `open`.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import trio

from hermes_trio.adapters.wire.backoff import Backoff, Reconnection
from hermes_trio.base.settings import SettingsError
from hermes_trio.messaging.callbacks import CallbackResponse, headers_of
from hermes_trio.messaging.chunking import TELEGRAM
from hermes_trio.messaging.contract import Adapter, Button, Outgoing, SendResult
from hermes_trio.messaging.errors import Missing, PlatformError, PlatformErrorKind, single_failure
from hermes_trio.messaging.intake import STORE_DELAYS, Intake, hand_over
from hermes_trio.messaging.markup import to_markdown_v2, to_plain
from hermes_trio.messaging.menu import MENU
from hermes_trio.messaging.platform_settings import (
    check_addresses,
    complete_table,
    is_configured,
    read_platform,
    required_token,
)
from hermes_trio.messaging.platforms import Platform
from hermes_trio.store.errors import StoreError

from .client import TelegramClient, TelegramPoller, Update, User, parse_update
from .events import PLATFORM, TelegramSettings, incoming_of, source_of
from .types import CallbackQuery

logger: Final = logging.getLogger("hermes_trio.adapters.telegram.adapter")

TOKEN_VARIABLE: Final = "TELEGRAM_BOT_TOKEN"
SECRET_HEADER: Final = "x-telegram-bot-api-secret-token"
MAX_UPDATE_BYTES: Final = 1_048_576
TYPING_SECONDS: Final = 4.0
"""Telegram shows the typing sign for five seconds."""

COMMAND_SECONDS: Final = 1.0
"""A command that takes longer is confirmed while it is executed: Telegram delivers nothing new before that."""

FLUSH_SECONDS: Final = 2.0
TOAST_LENGTH: Final = 200
BUTTONS_A_ROW: Final = 2


def telegram_platform(table: Mapping[str, Any], environment: Mapping[str, str]) -> Platform | None:
    """Build the adapter of `[telegram]` and the environment, or return None if it is not configured. Raises `SettingsError`."""
    if not is_configured(table, environment, TOKEN_VARIABLE):
        return None
    completed = complete_table(table, PLATFORM, environment, {"token": TOKEN_VARIABLE})
    shared, own = read_platform(completed, PLATFORM, TelegramSettings)
    return Platform(TelegramAdapter(own), shared)


class TelegramAdapter(Adapter):
    """See the module. In webhook mode the server must pass requests for `endpoint` to `handle`."""

    platform = PLATFORM
    limit = TELEGRAM
    typing_seconds = TYPING_SECONDS
    supports_edit = True
    max_body_bytes: int = MAX_UPDATE_BYTES

    def __init__(self, settings: TelegramSettings, *, backoff: Backoff | None = None) -> None:
        required_token(settings.token, PLATFORM, "token", TOKEN_VARIABLE, "from @BotFather")
        check_addresses(PLATFORM, base_url=settings.base_url, proxy=settings.proxy)
        path = urlsplit(settings.webhook_url).path
        if settings.mode == "webhook" and (not urlsplit(settings.webhook_url).hostname or path in ("", "/")):
            raise SettingsError(
                f'[{PLATFORM}]: webhook_url is {settings.webhook_url!r}; with mode = "webhook" it must be the public https'
                " address of this server, with a path: https://bot.example.org/telegram"
            )
        self.settings = settings
        self.endpoint: str = path if settings.mode == "webhook" else ""
        self._backoff = backoff or Backoff()
        # New at each start; registered with Telegram together with the address.
        self._secret = secrets.token_urlsafe(32)
        self._open_client: TelegramClient | None = None
        self._bot: User | None = None
        self._receiving = False
        self._moved: dict[str, str] = {}

    @property
    def _client(self) -> TelegramClient:
        if self._open_client is None:
            raise PlatformError(PlatformErrorKind.TRANSIENT, "the Telegram adapter is not open")
        return self._open_client

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Enable sending for the body of the `async with`; leaving it closes every connection."""
        async with TelegramClient(
            self.settings.base_url, self.settings.token, proxy=self.settings.proxy
        ) as self._open_client:
            try:
                yield
            finally:
                self._open_client = None

    # -- receiving -------------------------------------------------------------------------------------------------------------------

    async def run(self, connected: Callable[[], None]) -> None:
        """See `Adapter.run`. When cancelled, it confirms stored updates with Telegram, in a bounded time."""
        client = self._client
        self._bot = await client.get_me()
        self.bot_name = self._bot.username or ""
        if self.settings.register_commands:
            await self._register(client)
        if self.settings.mode == "webhook":
            await client.set_webhook(self.settings.webhook_url, secret_token=self._secret)
        else:
            await client.delete_webhook()
        self._receiving = True
        try:
            connected()
            if self.settings.mode == "webhook":
                await trio.sleep_forever()
            await self._poll(client)
        finally:
            self._receiving = False

    async def _register(self, client: TelegramClient) -> None:
        try:
            await client.set_my_commands({entry.name: entry.description for entry in MENU})
        except PlatformError as error:
            if error.kind is PlatformErrorKind.UNAUTHORIZED:
                raise
            logger.warning("could not set the command menu; the old one stays: %s", error)

    async def _poll(self, client: TelegramClient) -> None:
        poller = client.poll(timeout=self.settings.poll_seconds)
        reconnection = Reconnection(self._backoff)
        try:
            with single_failure():
                async with trio.open_nursery() as nursery:
                    intake = Intake(nursery)
                    while True:
                        try:
                            update = await anext(poller)
                        except PlatformError as error:
                            delay = reconnection.failed(error)
                            logger.warning("could not poll Telegram; next attempt in %.0f s: %s", delay, error)
                            await trio.sleep(delay)
                            continue
                        reconnection.ready()
                        await intake.put(_chat(update), lambda update=update: self._take(update, poller))
        finally:
            with trio.move_on_after(FLUSH_SECONDS, shield=True):
                try:
                    await poller.flush()
                except PlatformError as error:
                    logger.info("could not confirm updates with Telegram; they will be redelivered: %s", error)

    async def _take(self, update: Update, poller: TelegramPoller) -> None:
        """Handle one update and confirm it."""
        is_command = update.message is not None and (update.message.text or "").startswith("/")
        async with trio.open_nursery() as nursery:

            async def confirm_in_time() -> None:
                await trio.sleep(COMMAND_SECONDS)
                poller.confirm(update.update_id)

            if is_command:
                nursery.start_soon(confirm_in_time)
            while True:
                try:
                    said = await self._accept(update)
                    break
                except StoreError as error:
                    if not poller.is_confirmed(update.update_id):
                        raise
                    logger.warning("could not handle the command of update %d; retrying: %s", update.update_id, error)
                    await trio.sleep(STORE_DELAYS[-1])
            poller.confirm(update.update_id)
            nursery.cancel_scope.cancel()
        await self._answer(update.callback_query, said)

    async def _accept(self, update: Update) -> str:
        """Pass one update to the hub; return the text for a person who pressed a button. Edited messages are ignored."""
        if update.callback_query is not None:
            return await self._clicked(update.callback_query)
        assert self._bot is not None
        incoming = None if update.message is None else incoming_of(update.message, self._bot, self.settings)
        if incoming is not None:
            await hand_over(self, incoming)
        return ""

    async def _clicked(self, query: CallbackQuery) -> str:
        parsed = Button.parse(query.data or "")
        if parsed is None or query.message is None:
            return "This button is too old."
        return await self.gateway.approval_clicked(self, source_of(query.message, query.sender), *parsed)

    async def _answer(self, query: CallbackQuery | None, said: str) -> None:
        """End the progress sign on a button."""
        if query is None:
            return
        try:
            await self._client.answer_callback_query(query.id, said[:TOAST_LENGTH])
        except PlatformError as error:
            logger.info("could not send the result of a pressed button; the press has been handled: %s", error)

    # -- the webhook -----------------------------------------------------------------------------------------------------------------

    async def handle(self, method: str, path: str, headers: Iterable[tuple[str, str]], body: bytes) -> CallbackResponse:
        """Answer Telegram's request. Telegram repeats it until it gets 200, which is sent when the update is stored.

        Cancelling it does not undo what was accepted; the repetition is recognised.
        """
        if method != "POST":
            return CallbackResponse.refusal(405, "an update is a POST request", ("Allow", "POST"))
        given = headers_of(headers).get(SECRET_HEADER, "")
        if not hmac.compare_digest(given.encode(), self._secret.encode()):
            return CallbackResponse.refusal(401, "the secret token is missing or wrong")
        if len(body) > MAX_UPDATE_BYTES:
            return CallbackResponse.refusal(413, f"the body has more than {MAX_UPDATE_BYTES} bytes")
        if not self._receiving:
            return CallbackResponse.refusal(503, "the adapter is not connected; send it again", ("Retry-After", "5"))
        try:
            update = parse_update(body)
        except msgspec.ValidationError as error:
            # Refusing it would block every later update.
            logger.warning("skipped an update of an unknown form: %s", error)
            return CallbackResponse.of(200, {"ok": True})
        except (msgspec.DecodeError, UnicodeDecodeError):
            return CallbackResponse.refusal(400, "the body is not JSON")
        try:
            said = await self._accept(update)
        except StoreError as error:
            logger.error("could not store an update; Telegram will repeat it: %s", error)
            return CallbackResponse.refusal(503, "the update could not be stored; send it again", ("Retry-After", "5"))
        await self._answer(update.callback_query, said)
        return CallbackResponse.of(200, {"ok": True})

    # -- sending ---------------------------------------------------------------------------------------------------------------------

    async def send(self, message: Outgoing) -> SendResult:
        """See `Adapter.send`. Tries plainer forms, a group's new id, and the group itself if its topic was deleted."""
        client = self._client
        chats = [self._moved.get(message.chat_id, message.chat_id)]
        thread = _number(message.thread_id)
        forms = list(_forms(message.text, plain=message.plain))
        keyboard = _keyboard(message.buttons)
        while True:
            (text, mode), chat = forms[0], chats[-1]
            try:
                if message.edits:
                    edited = _number(message.edits) or 0
                    await client.edit_message_text(chat, edited, text, parse_mode=mode, inline_keyboard=keyboard)
                    return SendResult.sent(message.edits)
                sent = await client.send_message(
                    chat,
                    text,
                    parse_mode=mode,
                    message_thread_id=None if thread == 1 else thread,
                    reply_to=_number(message.reply_to),
                    inline_keyboard=keyboard,
                    silent=not message.notify,
                )
                return SendResult.sent(sent.message_id)
            except PlatformError as error:
                if error.kind in (PlatformErrorKind.BAD_FORMAT, PlatformErrorKind.TOO_LONG) and len(forms) > 1:
                    logger.info("Telegram refused a formatted text; sending it as plain text: %s", error)
                    forms.pop(0)
                elif error.moved_to is not None and error.moved_to not in chats:
                    self._moved[message.chat_id] = error.moved_to
                    chats.append(error.moved_to)
                elif error.missing is Missing.THREAD and thread is not None:
                    thread = None
                else:
                    raise

    async def edit(self, chat_id: str, thread_id: str, message_id: str, text: str) -> SendResult:
        """See `Adapter.edit`; the message loses its buttons."""
        return await self.send(Outgoing(chat_id=chat_id, thread_id=thread_id, text=text, edits=message_id))

    async def typing(self, chat_id: str, thread_id: str) -> None:
        await self._client.send_chat_action(
            self._moved.get(chat_id, chat_id), message_thread_id=None if thread_id == "1" else _number(thread_id)
        )


def _chat(update: Update) -> str:
    if update.message is not None:
        return str(update.message.chat.id)
    if update.callback_query is not None and update.callback_query.message is not None:
        return str(update.callback_query.message.chat.id)
    return ""


def _number(text: str) -> int | None:
    """Return an id of Telegram, or None for anything else (an anchor from another platform)."""
    return int(text) if text.isascii() and text.isdigit() else None


def _forms(text: str, *, plain: bool) -> Iterator[tuple[str, str | None]]:
    """Return the text with markup, without markup, and unchanged: Telegram accepts one of them."""
    if not plain:
        yield to_markdown_v2(text), "MarkdownV2"
    yield to_plain(text), None
    yield text, None


def _keyboard(buttons: Sequence[Button]) -> list[list[dict[str, str]]] | None:
    if not buttons:
        return None
    listed = [{"text": button.label, "callback_data": button.value} for button in buttons]
    return [listed[start : start + BUTTONS_A_ROW] for start in range(0, len(listed), BUTTONS_A_ROW)]
