"""The Discord adapter: receives from the Gateway, sends from the outbox, with slash commands and buttons.

Events are passed to the hub in order within a channel. Discord sends an event once: after a lost connection, or if handling an event has failed, the
session is resumed and the missed events are replayed, but messages that are written while the server is down are lost. The adapter's runner owns
`run`, the senders own `open`.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
import trio

from hermes_trio.adapters.wire.backoff import Backoff
from hermes_trio.messaging.chunking import DISCORD
from hermes_trio.messaging.contract import Adapter, Button, Disposition, Incoming, Outgoing, SendResult
from hermes_trio.messaging.errors import PlatformError, PlatformErrorKind, single_failure
from hermes_trio.messaging.intake import FOR_THE_AGENT, Intake, hand_over
from hermes_trio.messaging.joined_threads import JoinedThreads
from hermes_trio.messaging.lru import LruMap
from hermes_trio.messaging.markup import to_discord, to_plain
from hermes_trio.messaging.platform_settings import (
    check_addresses,
    complete_table,
    is_configured,
    read_platform,
    required_token,
)
from hermes_trio.messaging.platforms import Platform
from hermes_trio.messaging.session_keys import Source
from hermes_trio.store.records import ApprovalChoice

from .client import Channel, DiscordClient, Interaction, InteractionResponse, Message, User
from .events import PLATFORM, DiscordSettings, command_text, incoming_of, slash_commands, source_of
from .gateway import DiscordGateway, Dispatch, GatewaySession, open_discord_gateway

logger: Final = logging.getLogger("hermes_trio.adapters.discord.adapter")

TOKEN_VARIABLE: Final = "DISCORD_BOT_TOKEN"
TYPING_SECONDS: Final = 8.0
"""Seconds between two typing requests; Discord shows the indicator for ten seconds."""

COMMAND, COMPONENT = 2, 3
CHANNEL_EVENTS: Final = ("CHANNEL_CREATE", "CHANNEL_UPDATE", "THREAD_CREATE", "THREAD_UPDATE")
STYLES: Final[Mapping[ApprovalChoice, int]] = {
    ApprovalChoice.ONCE: 3,
    ApprovalChoice.SESSION: 1,
    ApprovalChoice.ALWAYS: 1,
    ApprovalChoice.DENY: 4,
}

ACKNOWLEDGED: Final[Mapping[Disposition, str]] = {
    Disposition.UNAUTHORISED: "You are not allowed to use this agent.",
    Disposition.PAIRING: "You are not paired with this agent yet; the message here says how to get access.",
    Disposition.IGNORED: "This was not addressed to this agent.",
}


def discord_platform(table: Mapping[str, Any], environment: Mapping[str, str]) -> Platform | None:
    """Build the adapter from `[discord]` and the environment, or return None if it is not configured. Raises `SettingsError`."""
    if not is_configured(table, environment, TOKEN_VARIABLE):
        return None
    completed = complete_table(table, PLATFORM, environment, {"token": TOKEN_VARIABLE})
    shared, own = read_platform(completed, PLATFORM, DiscordSettings)
    return Platform(DiscordAdapter(own), shared)


class DiscordAdapter(Adapter):
    """See the module. `identify_interval` is the number of seconds that Discord requires between two new sessions."""

    platform = PLATFORM
    limit = DISCORD
    typing_seconds = TYPING_SECONDS
    supports_edit = True

    def __init__(
        self, settings: DiscordSettings, *, backoff: Backoff | None = None, identify_interval: float = 5.0
    ) -> None:
        required_token(
            settings.token, PLATFORM, "token", TOKEN_VARIABLE, "from the developer portal, Bot → Reset Token"
        )
        check_addresses(PLATFORM, base_url=settings.base_url, proxy=settings.proxy)
        self.settings = settings
        self._backoff = backoff
        self._identify_interval = identify_interval
        self._open_client: DiscordClient | None = None
        self._bot: User | None = None
        self._session: GatewaySession | None = None
        self._unregistered = ""
        self._channels: LruMap[str, Channel] = LruMap()
        self._threads = JoinedThreads(self)

    @property
    def _client(self) -> DiscordClient:
        if self._open_client is None:
            raise PlatformError(PlatformErrorKind.TRANSIENT, "the Discord adapter is not open")
        return self._open_client

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Enable sending for the body of the `async with`; leaving it closes every connection."""
        settings = self.settings
        async with DiscordClient(settings.base_url, settings.token, proxy=settings.proxy) as self._open_client:
            try:
                yield
            finally:
                self._open_client = None

    # -- receiving -------------------------------------------------------------------------------------------------------------------

    async def run(self, connected: Callable[[], None]) -> None:
        """See `Adapter.run`. Cancelling it ends the session; events that were passed to the hub stay there.

        After a failure the next call resumes the session, and Discord replays the events that were not handled.
        """
        await self._threads.load()
        session, self._session = self._session, None
        gateway = open_discord_gateway(
            self._client, session, backoff=self._backoff, identify_interval=self._identify_interval
        )
        connection: DiscordGateway | None = None
        try:
            with single_failure():
                async with gateway as connection, trio.open_nursery() as nursery:
                    await self._receive(connection, nursery, connected)
        except Exception:
            # Not when cancelled: another node may receive from now on. A session that has not been connected is not tried a second time.
            if connection is not None and connection.session is not None and connection.session.answered and self._bot:
                self._session = connection.session
            raise
        finally:
            if connection is not None and connection.session is not None and self._session is None:
                connection.session.give_up()

    async def _receive(self, connection: DiscordGateway, nursery: trio.Nursery, connected: Callable[[], None]) -> None:
        intake = Intake(nursery)
        if self._unregistered:
            nursery.start_soon(self._register, self._unregistered)
        async for event in connection.events:
            match event.name:
                case "READY":
                    self._bot = msgspec.convert(event.data["user"], User)
                    self.bot_name = self._bot.username
                    connected()
                    self._unregistered = str(event.data["application"]["id"])
                    nursery.start_soon(self._register, self._unregistered)
                case "RESUMED":
                    connected()
                case "MESSAGE_CREATE" | "INTERACTION_CREATE":
                    await self._dispatch(intake, event)
                case _:
                    with event.handling():
                        self._note_channels(event)

    async def _dispatch(self, intake: Intake, event: Dispatch) -> None:
        """Queue a message or an interaction behind those of its channel."""
        message, interaction = event.message(), event.interaction()
        if message is not None:
            channel = message.channel_id
        elif interaction is not None:
            channel = interaction.channel_id or ""
        else:
            # Something that cannot be read: replaying it would not help.
            event.session.settle(event.sequence)
            return

        async def handle() -> None:
            with event.handling():
                if message is not None:
                    await self._message(message)
                elif interaction is not None:
                    await self._interaction(interaction)

        await intake.put(channel, handle)

    def _note_channels(self, event: Dispatch) -> None:
        if event.name == "GUILD_CREATE":
            for one in [*event.data.get("channels", ()), *event.data.get("threads", ())]:
                self._note(one)
        elif event.name in CHANNEL_EVENTS:
            self._note(event.data)

    def _note(self, raw: Any) -> None:
        try:
            channel = msgspec.convert(raw, Channel)
        except msgspec.ValidationError:
            return
        self._channels.note(channel.id, channel)

    async def _channel(self, channel_id: str, guild_id: str | None) -> Channel | None:
        """Return the channel, which says whether it is a thread, from the cache or from Discord; None for a direct message or if the lookup fails."""
        if guild_id is None:
            return None
        known = self._channels.get(channel_id)
        if known is None:
            try:
                known = await self._client.get_channel(channel_id)
            except PlatformError as error:
                logger.warning(
                    "could not look up channel %s; it is treated as a channel, not a thread: %s", channel_id, error
                )
                return None
            self._channels.note(channel_id, known)
        return known

    async def _register(self, application_id: str) -> None:
        if not self.settings.register_commands:
            return
        try:
            await self._client.overwrite_commands(
                application_id, slash_commands(), guild_id=self.settings.guild_id or None
            )
        except PlatformError as error:
            logger.warning("could not register the slash commands; the old ones stay: %s", error)
        self._unregistered = ""

    async def _message(self, message: Message) -> None:
        assert self._bot is not None
        if message.author.id == self._bot.id:
            return
        channel = await self._channel(message.channel_id, message.guild_id)
        takes_part = message.channel_id in self._threads
        incoming = incoming_of(message, channel, self._bot, self.settings, takes_part=takes_part)
        if incoming is None:
            return
        received = await hand_over(self, incoming)
        if incoming.source.thread_id and received.disposition in FOR_THE_AGENT:
            await self._threads.enter(incoming.source.thread_id)

    # -- commands and buttons ----------------------------------------------------------------------------------------------------------

    async def _interaction(self, interaction: Interaction) -> None:
        person = interaction.person
        if person is None or interaction.channel_id is None:
            return
        channel = interaction.channel or await self._channel(interaction.channel_id, interaction.guild_id)
        source = source_of(interaction.channel_id, channel, person, guild_id=interaction.guild_id)
        if interaction.type == COMMAND:
            await self._command(interaction, source)
        elif interaction.type == COMPONENT:
            await self._clicked(interaction, source)

    async def _command(self, interaction: Interaction, source: Source) -> None:
        """Handle a slash command like a typed one; its reply is in the channel, and the person gets an acknowledgement."""
        text = command_text(interaction)
        if text is None or not self.settings.concerns(source):
            await self._respond(interaction, InteractionResponse.REPLY, "There is no such command here.")
            return
        await self._respond(interaction, InteractionResponse.REPLY_LATER)
        incoming = Incoming(source=source, text=text, event_id=interaction.id, anchor="")
        received = await hand_over(self, incoming)
        try:
            await self._client.edit_response(
                interaction, ACKNOWLEDGED.get(received.disposition, f"`{text[:100]}` is answered here.")
            )
        except PlatformError as error:
            logger.info("could not acknowledge a slash command; it has been handled: %s", error)

    async def _clicked(self, interaction: Interaction, source: Source) -> None:
        parsed = Button.parse(str(interaction.data.get("custom_id", "")))
        if parsed is None:
            return
        await self._respond(interaction, InteractionResponse.UPDATE_LATER)
        said = await self.gateway.approval_clicked(self, source, *parsed)
        try:
            await self._client.follow_up(interaction, said, ephemeral=True)
        except PlatformError as error:
            logger.info("could not send the result of a pressed button; the press has been handled: %s", error)

    async def _respond(
        self, interaction: Interaction, response: InteractionResponse, content: str | None = None
    ) -> None:
        """Send the first response, which Discord requires within three seconds. A failure is logged, and the interaction is handled anyway."""
        try:
            await self._client.respond(interaction, response, content, ephemeral=True)
        except PlatformError as error:
            logger.info("could not send the first response to an interaction; it is handled anyway: %s", error)

    # -- sending ---------------------------------------------------------------------------------------------------------------------

    async def send(self, message: Outgoing) -> SendResult:
        """See `Adapter.send`. If the connection breaks before a response, retry once with the same nonce, so that Discord posts the message once."""
        client, channel = self._client, message.thread_id or message.chat_id
        text = to_discord(message.text)
        if message.plain:
            text = to_plain(message.text)
            text = text if 0 < len(text) <= self.limit.size else message.text
        components = _components(message.buttons)
        if message.edits:
            await client.edit_message(channel, message.edits, text, components=components)
            return SendResult.sent(message.edits)
        nonce = secrets.token_hex(12)
        first: PlatformError | None = None
        while True:
            try:
                sent = await client.create_message(
                    channel,
                    text,
                    reply_to=message.reply_to if message.reply_to.isdigit() else None,
                    components=components or None,
                    nonce=nonce,
                )
                return SendResult.sent(sent.id)
            except PlatformError as error:
                if first is not None:
                    # The first attempt may have arrived, whatever the second one raised.
                    return msgspec.structs.replace(SendResult.failed(error), ambiguous=True)
                if not error.ambiguous:
                    raise
                first = error

    async def edit(self, chat_id: str, thread_id: str, message_id: str, text: str) -> SendResult:
        """See `Adapter.edit`; the message loses its buttons."""
        return await self.send(Outgoing(chat_id=chat_id, thread_id=thread_id, text=text, edits=message_id))

    async def typing(self, chat_id: str, thread_id: str) -> None:
        await self._client.trigger_typing(thread_id or chat_id)


def _components(buttons: Sequence[Button]) -> list[dict[str, Any]]:
    """Return one row of buttons; an empty list removes the buttons of an edited message."""
    if not buttons:
        return []
    row = [
        {"type": 2, "style": STYLES[button.choice], "label": button.label, "custom_id": button.value}
        for button in buttons
    ]
    return [{"type": 1, "components": row}]
