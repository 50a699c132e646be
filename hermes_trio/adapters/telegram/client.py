"""The Telegram Bot API: one method for each API method, and a poller that confirms only accepted updates.

The bot token is part of every URL, so no error and no log line quotes a URL. `TelegramClient` is an async context manager; leaving it closes its
connections.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar, final

import msgspec
import trio

from hermes_trio.adapters.wire.http import CALL_TIMEOUT, HttpLink, PlatformClient, PlatformResponse
from hermes_trio.messaging.errors import Missing, PlatformError, PlatformErrorKind, Redaction, require_token

from .types import Message, Parameters, Response, Update, User, WebhookInfo

API_URL = "https://api.telegram.org"
# Seconds for which the Bot API keeps a getUpdates call open while there is no update.
LONG_POLL_SECONDS = 50
# The kinds of update that the product acts on.
UPDATE_KINDS = ("message", "edited_message", "callback_query")

T = TypeVar("T")


def parse_update(body: bytes) -> Update:
    """Parse an update from the body of a webhook delivery. Raises `msgspec.DecodeError`."""
    return msgspec.json.decode(body, type=Update)


@final
class TelegramClient(PlatformClient):
    """Calls the Bot API for one bot. Every method raises `PlatformError`; cancelling a call closes its connection."""

    def __init__(self, base_url: str, token: str, *, timeout: float = CALL_TIMEOUT, proxy: str | None = None) -> None:
        redaction = Redaction((require_token("Telegram bot token", token),))
        self._prefix = f"/bot{token}/"
        super().__init__(HttpLink(base_url, redaction=redaction, timeout=timeout, proxy=proxy))

    async def get_me(self) -> User:
        """Return the bot's own user. Raises `PlatformError` of kind UNAUTHORIZED if the token is wrong."""
        return await self._call("getMe", {}, User)

    async def get_updates(
        self,
        offset: int | None = None,
        *,
        timeout: int = LONG_POLL_SECONDS,
        limit: int = 100,
        allowed_updates: Sequence[str] = UPDATE_KINDS,
    ) -> list[Update]:
        """Return updates from `offset` on. Requesting an offset confirms everything below it.

        Waits up to `timeout` seconds for the first one.
        """
        params: dict[str, Any] = {"timeout": timeout, "limit": limit, "allowed_updates": list(allowed_updates)}
        if offset is not None:
            params["offset"] = offset
        listed = await self._call("getUpdates", params, list[dict[str, Any]], timeout=timeout + self._link.timeout)
        return [_update(raw) for raw in listed]

    def poll(
        self, *, timeout: int = LONG_POLL_SECONDS, allowed_updates: Sequence[str] = UPDATE_KINDS
    ) -> TelegramPoller:
        """Return an iterator of updates that are confirmed one by one."""
        return TelegramPoller(self, timeout, tuple(allowed_updates))

    async def set_webhook(
        self,
        url: str,
        *,
        secret_token: str,
        allowed_updates: Sequence[str] = UPDATE_KINDS,
        drop_pending_updates: bool = False,
    ) -> None:
        """Make Telegram post updates to `url`, each with the secret in `X-Telegram-Bot-Api-Secret-Token`."""
        params = {
            "url": url,
            "secret_token": secret_token,
            "allowed_updates": list(allowed_updates),
            "drop_pending_updates": drop_pending_updates,
        }
        await self._call("setWebhook", params, bool)

    async def delete_webhook(self, *, drop_pending_updates: bool = False) -> None:
        """Delete the webhook, so that updates are received by polling again."""
        await self._call("deleteWebhook", {"drop_pending_updates": drop_pending_updates}, bool)

    async def get_webhook_info(self) -> WebhookInfo:
        return await self._call("getWebhookInfo", {}, WebhookInfo)

    async def send_message(
        self,
        chat_id: int | str,
        text: str,
        *,
        parse_mode: str | None = None,
        message_thread_id: int | None = None,
        reply_to: int | None = None,
        inline_keyboard: Sequence[Sequence[Mapping[str, str]]] | None = None,
        silent: bool = False,
    ) -> Message:
        """Send text of at most 4096 UTF-16 units. If the message in `reply_to` was deleted, the text is sent without the reference."""
        params: dict[str, Any] = {"chat_id": chat_id, "text": text}
        if parse_mode is not None:
            params["parse_mode"] = parse_mode
        if message_thread_id is not None:
            params["message_thread_id"] = message_thread_id
        if reply_to is not None:
            params["reply_parameters"] = {"message_id": reply_to, "allow_sending_without_reply": True}
        if inline_keyboard is not None:
            params["reply_markup"] = {"inline_keyboard": inline_keyboard}
        if silent:
            params["disable_notification"] = True
        return await self._call("sendMessage", params, Message)

    async def edit_message_text(
        self,
        chat_id: int | str,
        message_id: int,
        text: str,
        *,
        parse_mode: str | None = None,
        inline_keyboard: Sequence[Sequence[Mapping[str, str]]] | None = None,
    ) -> bool:
        """Replace a message's text and buttons. Return whether that changed anything."""
        params: dict[str, Any] = {"chat_id": chat_id, "message_id": message_id, "text": text}
        if parse_mode is not None:
            params["parse_mode"] = parse_mode
        if inline_keyboard is not None:
            params["reply_markup"] = {"inline_keyboard": inline_keyboard}
        return await self._edit("editMessageText", params)

    async def edit_message_buttons(
        self, chat_id: int | str, message_id: int, inline_keyboard: Sequence[Sequence[Mapping[str, str]]] = ()
    ) -> bool:
        """Replace, or by default remove, a message's buttons. Return whether that changed anything."""
        markup = {"inline_keyboard": inline_keyboard}
        params = {"chat_id": chat_id, "message_id": message_id, "reply_markup": markup}
        return await self._edit("editMessageReplyMarkup", params)

    async def delete_message(self, chat_id: int | str, message_id: int) -> None:
        await self._call("deleteMessage", {"chat_id": chat_id, "message_id": message_id}, bool)

    async def send_chat_action(
        self, chat_id: int | str, action: str = "typing", *, message_thread_id: int | None = None
    ) -> None:
        """Show for five seconds, or until the next message, that the bot is busy."""
        params: dict[str, Any] = {"chat_id": chat_id, "action": action}
        if message_thread_id is not None:
            params["message_thread_id"] = message_thread_id
        await self._call("sendChatAction", params, bool)

    async def answer_callback_query(
        self, callback_query_id: str, text: str | None = None, *, show_alert: bool = False
    ) -> None:
        """Answer a pressed button, which removes its progress indicator; `text` is shown to the person."""
        params: dict[str, Any] = {"callback_query_id": callback_query_id, "show_alert": show_alert}
        if text is not None:
            params["text"] = text
        await self._call("answerCallbackQuery", params, bool)

    async def set_my_commands(self, commands: Mapping[str, str]) -> None:
        """Offer commands (name to description) in the chat's menu."""
        listed = [{"command": name, "description": description} for name, description in commands.items()]
        await self._call("setMyCommands", {"commands": listed}, bool)

    async def _edit(self, method: str, params: Mapping[str, Any]) -> bool:
        try:
            await self._call(method, params, Message)
        except PlatformError as error:
            if "message is not modified" in error.message:
                return False
            raise
        return True

    async def _call(
        self, method: str, params: Mapping[str, Any], result: type[T], *, timeout: float | None = None
    ) -> T:
        answer = await self._link.call("POST", self._prefix + method, json=params, timeout=timeout)
        try:
            response = msgspec.json.decode(answer.body, type=Response)
            if response.ok:
                return msgspec.convert(response.result, result)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _unreadable(method, answer, error) from None
        raise _refused(method, response)


def _update(raw: dict[str, Any]) -> Update:
    try:
        return msgspec.convert(raw, Update)
    except msgspec.ValidationError:
        # An update of an unexpected form must not block the ones after it: treat it as an update of an unknown kind.
        return Update(update_id=int(raw["update_id"]))


def _unreadable(method: str, answer: PlatformResponse, error: Exception) -> PlatformError:
    # The body is a proxy's error page or another response that is not the Bot API's: the call may have taken effect.
    transient = answer.status >= 500 or answer.status == 200
    kind = PlatformErrorKind.TRANSIENT if transient else PlatformErrorKind.UNKNOWN
    message = f"{method}: HTTP {answer.status} with a body that is not a Bot API response: {error}"
    return PlatformError(kind, message, permanent=not transient, ambiguous=transient, code=answer.status)


def _refused(method: str, response: Response) -> PlatformError:
    code, text, parameters = response.error_code, response.description, response.parameters
    message = f"{method}: {text} ({code})"
    match code:
        case 401:
            return PlatformError(PlatformErrorKind.UNAUTHORIZED, message, code=code)
        case 404:
            # Every method that is called exists, so 404 means that the bot was not found: the token is malformed.
            return PlatformError(PlatformErrorKind.UNAUTHORIZED, f"{message}: is the token complete?", code=code)
        case 403:
            return PlatformError(PlatformErrorKind.FORBIDDEN, message, code=code)
        case 409:
            return PlatformError(PlatformErrorKind.UNKNOWN, message, permanent=False, code=code)
        case 429:
            return PlatformError(PlatformErrorKind.RATE_LIMITED, message, retry_after=parameters.retry_after, code=code)
        case _ if code >= 500:
            return PlatformError(PlatformErrorKind.TRANSIENT, message, ambiguous=True, code=code)
        case _:
            return _bad_request(message, text.lower(), parameters, code)


def _bad_request(message: str, text: str, parameters: Parameters, code: int) -> PlatformError:
    if parameters.migrate_to_chat_id is not None:
        moved_to = str(parameters.migrate_to_chat_id)
        return PlatformError(PlatformErrorKind.NOT_FOUND, message, missing=Missing.CHAT, moved_to=moved_to, code=code)
    if "too long" in text or "too_long" in text:
        return PlatformError(PlatformErrorKind.TOO_LONG, message, code=code)
    if "not found" in text or "query is too old" in text:
        # If the description names the chat and also a thread or message, the thread or message is missing (GW-5).
        if "thread" in text or "topic" in text:
            missing = Missing.THREAD
        elif "message" in text:
            missing = Missing.MESSAGE
        else:
            missing = Missing.CHAT if "chat" in text else Missing.OTHER
        return PlatformError(PlatformErrorKind.NOT_FOUND, message, missing=missing, code=code)
    if any(words in text for words in ("parse", "text is empty", "_invalid", "entit")):
        return PlatformError(PlatformErrorKind.BAD_FORMAT, message, code=code)
    if any(words in text for words in ("not enough rights", "have no rights", "can't be edited", "can't be deleted")):
        return PlatformError(PlatformErrorKind.FORBIDDEN, message, code=code)
    return PlatformError(PlatformErrorKind.UNKNOWN, message, permanent=True, code=code)


@final
class TelegramPoller:
    """Receives updates by long polling; the Bot API keeps each until the consumer confirms it.

    `async for` yields each update once. `confirm` says that the consumer has stored the update; the offset advances only over confirmed updates, so
    that unconfirmed ones are yielded again after a crash. After the last update of a response, the next poll waits until all of them have been
    confirmed.

    A failed poll raises `PlatformError`; iterating again continues at the same offset. Cancelling an iteration loses no update.
    """

    def __init__(self, client: TelegramClient, timeout: int, allowed_updates: tuple[str, ...]) -> None:
        self._client = client
        self._timeout = timeout
        self._allowed = allowed_updates
        self._offset: int | None = None
        self._waiting: deque[Update] = deque()
        self._given: set[int] = set()
        self._newest = 0
        self._all_confirmed = trio.Event()
        self._all_confirmed.set()

    @property
    def unconfirmed(self) -> frozenset[int]:
        """Return the ids of the updates that were yielded and not confirmed."""
        return frozenset(self._given)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Update:
        while not self._waiting:
            await self._all_confirmed.wait()
            updates = await self._client.get_updates(self._offset, timeout=self._timeout, allowed_updates=self._allowed)
            self._waiting.extend(updates)
        update = self._waiting.popleft()
        self._given.add(update.update_id)
        self._newest = max(self._newest, update.update_id)
        self._all_confirmed = trio.Event()
        return update

    def confirm(self, update_id: int) -> None:
        """Confirm the update with this id. Idempotent."""
        self._given.discard(update_id)
        if not self._given and self._newest:
            self._offset = self._newest + 1
            self._all_confirmed.set()

    def is_confirmed(self, update_id: int) -> bool:
        """Return whether the update was confirmed, so that Telegram will not deliver it again."""
        return update_id not in self._given

    async def flush(self) -> None:
        """Send the confirmations to the Bot API, without waiting for new updates. Call it before closing the client.

        Otherwise the next poll would send them, and after a restart the updates would be received again.
        """
        offset = min(self._given) if self._given else self._offset
        if offset is not None:
            await self._client.get_updates(offset, timeout=0, limit=1, allowed_updates=self._allowed)
