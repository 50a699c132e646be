"""The Slack adapter: receives by Socket Mode or the Events API, sends from the outbox, with Block Kit buttons for approvals.

A delivery is acknowledged when the hub has stored it; one that Slack repeats meanwhile is recognised by its channel and time stamp. Slack has no
typing sign for bots. The adapter's runner ends `run`, the senders end `open`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
import trio

from hermes_trio.adapters.wire.backoff import Backoff
from hermes_trio.base.settings import SettingsError
from hermes_trio.messaging.callbacks import CallbackResponse, form_of, headers_of
from hermes_trio.messaging.contract import Adapter, Button, Disposition, Incoming, Outgoing, SendResult
from hermes_trio.messaging.errors import Missing, PlatformError, PlatformErrorKind, single_failure
from hermes_trio.messaging.intake import FOR_THE_AGENT, Intake, hand_over
from hermes_trio.messaging.joined_threads import JoinedThreads
from hermes_trio.messaging.lru import LruMap
from hermes_trio.messaging.platform_settings import (
    check_addresses,
    complete_table,
    is_configured,
    read_platform,
    required_token,
)
from hermes_trio.messaging.platforms import Platform
from hermes_trio.store.errors import StoreError

from .client import Identity, SlackClient
from .events import PLATFORM, PREFIX, SlackSettings, click_source, command_incoming, incoming_of
from .signing import is_signed_by_slack
from .socket import Envelope, SlackSocket, SocketStatus, open_slack_socket
from .text import SLACK_LIMIT, UPDATE_CHARACTERS, button_blocks, escape, posted, shortened
from .types import BlockActions, EventCallback, SlashCommand

logger: Final = logging.getLogger("hermes_trio.adapters.slack.adapter")

TOKEN_VARIABLE: Final = "SLACK_BOT_TOKEN"
APP_TOKEN_VARIABLE: Final = "SLACK_APP_TOKEN"
SECRET_VARIABLE: Final = "SLACK_SIGNING_SECRET"
MAX_BODY_BYTES: Final = 1_048_576
READY_SECONDS: Final = 0.05
ACKNOWLEDGE_SECONDS: Final = 1.0
TELL_SECONDS: Final = 1.5
"""The time limit for messages beside a response: a request must be answered within three seconds."""

ACKNOWLEDGED: Final[Mapping[Disposition, str]] = {
    Disposition.UNAUTHORISED: "You are not allowed to use this agent.",
    Disposition.PAIRING: "You are not paired with this agent yet; the message here says how to get access.",
}


def slack_platform(table: Mapping[str, Any], environment: Mapping[str, str]) -> Platform | None:
    """Build the adapter of `[slack]` and the environment, or return None if it is not configured. Raises `SettingsError`."""
    if not is_configured(table, environment, TOKEN_VARIABLE):
        return None
    variables = {"token": TOKEN_VARIABLE, "app_token": APP_TOKEN_VARIABLE, "signing_secret": SECRET_VARIABLE}
    completed = complete_table(table, PLATFORM, environment, variables)
    shared, own = read_platform(completed, PLATFORM, SlackSettings)
    return Platform(SlackAdapter(own), shared)


def _check(settings: SlackSettings) -> None:
    required_token(
        settings.token, PLATFORM, "token", TOKEN_VARIABLE, "OAuth & Permissions, Bot User OAuth Token, xoxb-…"
    )
    check_addresses(PLATFORM, base_url=settings.base_url, proxy=settings.proxy)
    if settings.mode == "socket":
        advice = "Basic Information, App-Level Tokens, xapp-…"
        required_token(settings.app_token, PLATFORM, "app_token", APP_TOKEN_VARIABLE, advice)
        return
    advice = "Basic Information, Signing Secret"
    required_token(settings.signing_secret, PLATFORM, "signing_secret", SECRET_VARIABLE, advice)
    if not settings.endpoint.startswith("/") or settings.endpoint == "/":
        raise SettingsError(f"[{PLATFORM}]: endpoint is {settings.endpoint!r}; it must be a path such as /slack/events")


class SlackAdapter(Adapter):
    """See the module. With `mode = "events"` the server must pass requests for `endpoint` to `handle`."""

    platform = PLATFORM
    limit = SLACK_LIMIT
    command_prefix = PREFIX
    supports_edit = True
    max_body_bytes: int = MAX_BODY_BYTES

    def __init__(
        self, settings: SlackSettings, *, backoff: Backoff | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        _check(settings)
        self.settings = settings
        self.endpoint: str = settings.endpoint if settings.mode == "events" else ""
        self._backoff = backoff
        self._clock = clock
        self._open_client: SlackClient | None = None
        self._identity: Identity | None = None
        self._receiving = False
        self._threads = JoinedThreads(self)
        self._names: LruMap[str, str] = LruMap()

    @property
    def _client(self) -> SlackClient:
        if self._open_client is None:
            raise PlatformError(PlatformErrorKind.TRANSIENT, "the Slack adapter is not open")
        return self._open_client

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Enable sending for the body of the `async with`; leaving it closes every connection."""
        settings = self.settings
        async with SlackClient(
            settings.base_url, settings.token, app_token=settings.app_token, proxy=settings.proxy
        ) as self._open_client:
            try:
                yield
            finally:
                self._open_client = None

    # -- receiving -------------------------------------------------------------------------------------------------------------------

    async def run(self, connected: Callable[[], None]) -> None:
        """See `Adapter.run`. Cancelling it ends the connection; unacknowledged deliveries are repeated on the next one."""
        self._identity = await self._client.auth_test()
        await self._threads.load()
        self._receiving = True
        try:
            if self.settings.mode == "events":
                connected()
                await trio.sleep_forever()
            with single_failure():
                async with (
                    open_slack_socket(self._client, backoff=self._backoff) as socket,
                    trio.open_nursery() as nursery,
                ):
                    nursery.start_soon(_tell_when_ready, socket, connected)
                    intake = Intake(nursery)
                    async for envelope in socket.envelopes:
                        await intake.put(_chat(envelope.payload), lambda envelope=envelope: self._take(envelope))
        finally:
            self._receiving = False

    async def _take(self, envelope: Envelope) -> None:
        """Handle one delivery, acknowledge it, and respond to the person."""
        callback, pressed, command = envelope.event(), envelope.block_actions(), envelope.command()
        if callback is not None:
            await self._event(callback)
            # It is stored, or executed: also if this task is cancelled, Slack need not deliver it again.
            with trio.move_on_after(ACKNOWLEDGE_SECONDS, shield=True):
                await envelope.acknowledge()
        elif pressed is not None:
            said = await self._clicked(pressed)
            await envelope.acknowledge()
            await self._tell(pressed, said)
        elif command is not None:
            await envelope.acknowledge(_private(await self._command(command)))
        else:
            # Something that this app did not ask for, or cannot read: repeating it would not help.
            await envelope.acknowledge()

    async def _event(self, callback: EventCallback) -> None:
        event, identity = callback.event, self._identity
        if event is None or identity is None:
            return
        takes_part = f"{event.channel}/{event.thread_ts}" in self._threads
        incoming = incoming_of(event, identity, self.settings, takes_part=takes_part)
        if incoming is None:
            return
        received = await hand_over(self, await self._named(incoming))
        source = incoming.source
        if source.thread_id and not source.is_direct and received.disposition in FOR_THE_AGENT:
            await self._threads.enter(f"{source.chat_id}/{source.thread_id}")

    async def _named(self, incoming: Incoming) -> Incoming:
        """Add the person's name, as far as Slack reveals it."""
        user = incoming.source.user_id
        if not incoming.addressed or not user or incoming.source.is_bot:
            return incoming
        name = self._names.get(user)
        if name is None:
            try:
                name = await self._client.user_name(user)
            except PlatformError as error:
                logger.info("could not look up the name of %s: %s", user, error)
                name = user
            self._names.note(user, name)
        return msgspec.structs.replace(incoming, source=msgspec.structs.replace(incoming.source, user_name=name))

    async def _clicked(self, pressed: BlockActions) -> str:
        parsed = next((found for one in pressed.actions if (found := Button.parse(one.value or ""))), None)
        return "" if parsed is None else await self.gateway.approval_clicked(self, click_source(pressed), *parsed)

    async def _command(self, command: SlashCommand) -> str:
        incoming = command_incoming(command)
        if not self.settings.concerns(incoming.source):
            return "This agent does not work in this channel."
        received = await hand_over(self, incoming)
        return ACKNOWLEDGED.get(received.disposition, f"`{incoming.plain_text[:100]}` is answered here.")

    async def _tell(self, pressed: BlockActions, said: str) -> None:
        """Show a text to the person who pressed a button, in the thread of its message."""
        if not pressed.response_url or not said:
            return
        with trio.move_on_after(TELL_SECONDS):
            try:
                thread = click_source(pressed).thread_id
                await self._client.respond(pressed.response_url, escape(said), thread_ts=thread)
            except PlatformError as error:
                logger.info("could not send the result of a pressed button; the press has been handled: %s", error)

    # -- the Events API --------------------------------------------------------------------------------------------------------------

    async def handle(self, method: str, path: str, headers: Iterable[tuple[str, str]], body: bytes) -> CallbackResponse:
        """Answer Slack's request: an event, a click or a command. Slack repeats an event until it gets 200.

        Cancelling it does not undo what was accepted; the repetition is recognised.
        """
        names = headers_of(headers)
        if method != "POST":
            return CallbackResponse.refusal(405, "Slack sends POST requests", ("Allow", "POST"))
        if len(body) > MAX_BODY_BYTES:
            return CallbackResponse.refusal(413, f"the body has more than {MAX_BODY_BYTES} bytes")
        if not is_signed_by_slack(
            self.settings.signing_secret,
            timestamp=names.get("x-slack-request-timestamp", ""),
            signature=names.get("x-slack-signature", ""),
            body=body,
            now=self._clock(),
        ):
            return CallbackResponse.refusal(401, "the signature is missing, wrong or too old")
        try:
            return await self._answer(names.get("content-type", ""), body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return CallbackResponse.refusal(400, f"the body cannot be read: {error}")
        except StoreError as error:
            logger.error("could not store a delivery; Slack will repeat it: %s", error)
            return CallbackResponse.refusal(503, "it could not be stored; send it again", ("Retry-After", "5"))

    async def _answer(self, content_type: str, body: bytes) -> CallbackResponse:
        if content_type.startswith("application/json"):
            callback = msgspec.json.decode(body, type=EventCallback)
            if callback.type == "url_verification":
                return CallbackResponse.of(200, {"challenge": callback.challenge or ""})
            if not self._receiving:
                return _unavailable()
            await self._event(callback)
            return CallbackResponse(200)
        if not self._receiving:
            return _unavailable()
        form = form_of(body)
        if "payload" in form:
            pressed = msgspec.json.decode(form["payload"], type=BlockActions)
            if pressed.type == "block_actions":
                await self._tell(pressed, await self._clicked(pressed))
            return CallbackResponse(200)
        return CallbackResponse.of(200, _private(await self._command(msgspec.convert(form, SlashCommand))))

    # -- sending ---------------------------------------------------------------------------------------------------------------------

    async def send(self, message: Outgoing) -> SendResult:
        """See `Adapter.send`. The anchor of a reply is its thread; if that was deleted, the reply is sent to the channel."""
        client, channel = self._client, message.chat_id
        text = posted(message.text, plain=message.plain)
        blocks = button_blocks(message.text, message.buttons) if message.buttons and not message.plain else None
        if message.edits and len(text) <= UPDATE_CHARACTERS:
            await client.update(channel, message.edits, text, blocks=blocks)
            return SendResult.sent(message.edits)
        thread = message.thread_id or None
        try:
            sent = await client.post_message(channel, text, thread_ts=thread, blocks=blocks)
        except PlatformError as error:
            if error.missing is not Missing.THREAD:
                raise
            sent = await client.post_message(channel, text, blocks=blocks)
        if message.edits:
            await self._remove(channel, message.edits)
        return SendResult.sent(sent)

    async def _remove(self, channel: str, ts: str) -> None:
        """Delete a message that grew too long to be edited, and was sent anew."""
        try:
            await self._client.delete(channel, ts)
        except PlatformError as error:
            logger.info("could not delete an outdated message: %s", error)

    async def edit(self, chat_id: str, thread_id: str, message_id: str, text: str) -> SendResult:
        """See `Adapter.edit`; the message loses its buttons, and shows what fits."""
        await self._client.update(chat_id, message_id, shortened(text))
        return SendResult.sent(message_id)


async def _tell_when_ready(socket: SlackSocket, connected: Callable[[], None]) -> None:
    while socket.status is not SocketStatus.READY:  # noqa: ASYNC110 - the socket's status is all that it says
        await trio.sleep(READY_SECONDS)
    connected()


def _chat(payload: Mapping[str, Any]) -> str:
    """Return the channel of a delivery, whatever its kind."""
    event, channel = payload.get("event"), payload.get("channel")
    for found in (event, channel):
        if isinstance(found, dict):
            fields = msgspec.convert(found, dict[str, Any])
            return str(fields.get("channel") or fields.get("id") or "")
    return str(payload.get("channel_id") or "")


def _private(text: str) -> dict[str, Any]:
    return {"response_type": "ephemeral", "text": text}


def _unavailable() -> CallbackResponse:
    return CallbackResponse.refusal(503, "the adapter is not connected; send it again", ("Retry-After", "5"))
