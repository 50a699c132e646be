"""Discord on loopback: REST API v10 and Gateway, their limits, and their error codes.

Tests speak for the people (`say`, `start_thread`, `use_command`, `click`) and read what the bot did (`messages`, `calls`); faults of the
Gateway are caused through `gateway`. `open_fake_discord` ends it.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, final

import attrs
import msgspec
import trio

from .discord_channels import DiscordMessage, FakeChannel, FakeInteraction, person
from .discord_gateway import FakeDiscordGateway, Intent
from .discord_rest import EPHEMERAL, Bucket, DiscordRefusal, check_commands, check_message, form_error, rate_limited
from .fake import FakePlatform
from .ledger import WAIT_SECONDS, CallLedger
from .server import FakeReply, FakeRequest, open_loopback_server

TEXT_CHANNEL, DM_CHANNEL, PUBLIC_THREAD = 0, 1, 11
COMMAND_INTERACTION, COMPONENT_INTERACTION = 2, 3
REPLY_NOW, REPLY_LATER, UPDATE_LATER, UPDATE_NOW = 4, 5, 6, 7
TIMESTAMP = "2025-01-01T00:00:00.000000+00:00"
UNKNOWN_CHANNEL = (404, 10003, "Unknown Channel")
UNKNOWN_MESSAGE = (404, 10008, "Unknown Message")
UNKNOWN_INTERACTION = (404, 10062, "Unknown interaction")
UNKNOWN_WEBHOOK = (404, 10015, "Unknown Webhook")


@final
class FakeDiscord(FakePlatform[DiscordMessage]):
    """The control surface of a running fake. Made by `open_fake_discord`."""

    # In the place of https://discord.com/api/v10.
    api_path = "/api/v10"
    guild_id = "9000"

    def __init__(
        self,
        *,
        token: str,
        heartbeat_interval: float,
        interaction_deadline: float,
        disallowed_intents: int,
        identify_interval: float,
    ) -> None:
        super().__init__(token, rate_limited=rate_limited, error_of=_error_of)
        self.bot: dict[str, Any] = {"id": "8000", "username": "hermes", "discriminator": "0000", "bot": True}
        self.application_id = "8000"
        self.typing: CallLedger[str] = CallLedger("typing channel")
        self.responses: CallLedger[tuple[str, int]] = CallLedger("interaction response")
        self.commands: list[dict[str, Any]] = []
        self.gateway = FakeDiscordGateway(
            token=token,
            ready=self._ready,
            send_hello=self._send_hello,
            heartbeat_interval=heartbeat_interval,
            disallowed_intents=disallowed_intents,
            identify_interval=identify_interval,
        )
        self._interaction_deadline = interaction_deadline
        self._channels: dict[str, FakeChannel] = {}
        self._interactions: dict[str, FakeInteraction] = {}
        self._buckets: dict[str, Bucket] = {}
        self._next_id = 1_100_000_000_000_000_000

    # What tests look at.

    async def wait_for_message(
        self, *, channel_id: str | None = None, containing: str = "", timeout: float = WAIT_SECONDS
    ) -> DiscordMessage:
        """Wait for the oldest fitting message that no earlier wait has returned. Compares the current text, with edits."""

        def fits(message: DiscordMessage) -> bool:
            wanted_place = channel_id is None or message.channel_id == channel_id
            return wanted_place and containing in message.content

        wanted = f"in channel {channel_id} containing {containing!r}"
        return await self._claim(fits, wanted=wanted, timeout=timeout)

    # What people and the platform do.

    def add_channel(self, channel_id: str, name: str = "general") -> None:
        """Add a text channel of the guild that the bot can see."""
        self._channels.setdefault(channel_id, FakeChannel(channel_id, TEXT_CHANNEL, self.guild_id, name))

    def forbid(self, channel_id: str) -> None:
        """Revoke the bot's permission to write in a channel."""
        self._channels[channel_id].forbidden = True

    def limit(self, method: str, *, calls: int, per: float) -> None:
        """Enforce a rate-limit bucket on an operation, for each channel, with the documented headers."""
        self._buckets[method] = Bucket(f"bucket-{method}", calls, per)

    def say(
        self,
        content: str,
        *,
        user_id: str = "42",
        channel_id: str | None = None,
        mention: bool = False,
        reply_to: str | None = None,
    ) -> dict[str, Any]:
        """Write as a user; without `channel_id` in a direct message. Returns the message object."""
        channel = self._dm(user_id) if channel_id is None else self._place(channel_id)
        message = self._message(channel, person(user_id), f"<@{self.bot['id']}> {content}" if mention else content)
        if mention:
            message["mentions"] = [self.bot]
        if reply_to is not None:
            message |= {"message_reference": {"message_id": reply_to, "channel_id": channel.id}, "type": 19}
            message["referenced_message"] = channel.messages[reply_to]
        self.gateway.dispatch_message("MESSAGE_CREATE", message, self.bot["id"])
        return message

    def start_thread(self, channel_id: str, name: str) -> str:
        """Start a thread as a user. Returns its id, which is a channel id."""
        return self._thread(self._place(channel_id), name, self._snowflake()).id

    def use_command(
        self,
        name: str,
        *,
        options: Mapping[str, str | int | bool] | None = None,
        user_id: str = "42",
        channel_id: str | None = None,
    ) -> str:
        """Use a slash command as a user. Returns the interaction's id."""
        kinds = {str: 3, int: 4, bool: 5}
        listed = [{"name": key, "type": kinds[type(value)], "value": value} for key, value in (options or {}).items()]
        data = {"id": "1", "name": name, "type": 1, "options": listed}
        channel = self._dm(user_id) if channel_id is None else self._place(channel_id)
        return self._interact(COMMAND_INTERACTION, data, user_id, channel, None)

    def click(self, message: DiscordMessage, button: str, *, user_id: str = "42") -> str:
        """Press the button whose label or custom id is `button`, as a user. Returns the interaction's id."""
        pressed = [b for b in message.buttons if button in (b.get("label"), b.get("custom_id"))]
        assert pressed, f"message {message.id} has no button {button!r}: {message.buttons}"
        data = {"custom_id": pressed[0]["custom_id"], "component_type": 2}
        return self._interact(COMPONENT_INTERACTION, data, user_id, self._channels[message.channel_id], message.id)

    # The REST API.

    async def handle(self, request: FakeRequest) -> FakeReply:
        """Answer one call below /api/v10."""
        path = request.path.removeprefix("/api/v10")
        found = [(route, re.fullmatch(route.path, path)) for route in _ROUTES if route.method == request.method]
        route, match = next(((route, match) for route, match in found if match is not None), (None, None))
        if route is None or match is None:
            return DiscordRefusal(404, 0, "404: Not Found").reply()
        places = match.groupdict()
        raw: Any = request.json() if request.body else {}
        body: dict[str, Any] = msgspec.convert(raw, dict[str, Any]) if isinstance(raw, dict) else {"_": raw}

        async def act() -> FakeReply:
            await trio.lowlevel.checkpoint()
            try:
                if not route.open_to_all and request.headers.get("authorization") != f"Bot {self.token}":
                    raise DiscordRefusal(401, 0, "401: Unauthorized")
                headers: dict[str, str] = {}
                if route.name in self._buckets:
                    headers, refusal = self._buckets[route.name].take(places.get("channel", ""))
                    if refusal is not None:
                        return refusal
                if request.body and raw is None:
                    raise DiscordRefusal(400, 50109, "The request body contains invalid JSON.")
                result = route.act(self, places, body)
            except DiscordRefusal as refusal:
                return refusal.reply()
            return FakeReply(204, headers=headers) if result is None else FakeReply.of(result, headers=headers)

        return await self.handler.handle(route.name, {**places, **body}, act)

    def _get_gateway_bot(self, places: Mapping[str, str], body: dict[str, Any]) -> dict[str, Any]:
        limit = {
            "total": 1000,
            "remaining": self.gateway.session_starts_left,
            "reset_after": 60000,
            "max_concurrency": 1,
        }
        return {"url": f"{self.server.socket_url}/gateway", "shards": 1, "session_start_limit": limit}

    def _get_current_user(self, places: Mapping[str, str], body: dict[str, Any]) -> dict[str, Any]:
        return self.bot

    def _get_channel(self, places: Mapping[str, str], body: dict[str, Any]) -> dict[str, Any]:
        return self._known(places["channel"]).json()

    def _create_dm(self, places: Mapping[str, str], body: dict[str, Any]) -> dict[str, Any]:
        if "recipient_id" not in body:
            raise form_error("recipient_id", "BASE_TYPE_REQUIRED", "This field is required")
        return self._dm(str(body["recipient_id"])).json()

    def _create_message(self, places: Mapping[str, str], body: dict[str, Any]) -> dict[str, Any]:
        check_message(body)
        channel = self._writable(places["channel"])
        nonce = None if body.get("nonce") is None else str(body["nonce"])
        if nonce is not None and len(nonce) > 25:
            raise form_error("nonce", "BASE_TYPE_MAX_LENGTH", "Must be 25 or fewer in length.")
        if nonce is not None and body.get("enforce_nonce"):
            twin = next((m for m in self.messages if m.nonce == nonce and m.channel_id == channel.id), None)
            if twin is not None:
                return channel.messages[twin.id]
        reference: dict[str, Any] = body.get("message_reference") or {}
        target = reference.get("message_id")
        if target is not None and target not in channel.messages:
            if reference.get("fail_if_not_exists", True):
                raise form_error("message_reference", "REPLIES_UNKNOWN_MESSAGE", "Unknown message")
            target = None
        return self._post(channel, body, reply_to=target, nonce=nonce)

    def _edit_message(self, places: Mapping[str, str], body: dict[str, Any]) -> dict[str, Any]:
        channel = self._writable(places["channel"])
        return self._change(channel, places["message"], body)

    def _delete_message(self, places: Mapping[str, str], body: dict[str, Any]) -> None:
        channel = self._known(places["channel"])
        if channel.messages.pop(places["message"], None) is None:
            raise DiscordRefusal(*UNKNOWN_MESSAGE)
        for message in self.messages:
            message.deleted = message.deleted or message.id == places["message"]
        self.messages.touch()

    def _trigger_typing(self, places: Mapping[str, str], body: dict[str, Any]) -> None:
        self.typing.append(self._writable(places["channel"]).id)

    def _start_thread_from_message(self, places: Mapping[str, str], body: dict[str, Any]) -> dict[str, Any]:
        channel = self._writable(places["channel"])
        if places["message"] not in channel.messages:
            raise DiscordRefusal(*UNKNOWN_MESSAGE)
        if places["message"] in self._channels:
            raise DiscordRefusal(400, 160004, "A thread has already been created for this message")
        # A thread that starts from a message has the message's id.
        return self._thread(channel, _thread_name(body), places["message"]).json()

    def _start_thread(self, places: Mapping[str, str], body: dict[str, Any]) -> dict[str, Any]:
        return self._thread(self._writable(places["channel"]), _thread_name(body), self._snowflake()).json()

    def _create_interaction_response(self, places: Mapping[str, str], body: dict[str, Any]) -> None:
        interaction = self._interactions.get(places["token"])
        now = trio.current_time()
        if interaction is None or interaction.id != places["interaction"]:
            raise DiscordRefusal(*UNKNOWN_INTERACTION)
        if interaction.response is not None:
            raise DiscordRefusal(400, 40060, "FakeInteraction has already been acknowledged.")
        if now > interaction.created + self._interaction_deadline:
            raise DiscordRefusal(*UNKNOWN_INTERACTION)
        kind, data = body.get("type"), msgspec.convert(body.get("data") or {}, dict[str, Any])
        channel = self._channels[interaction.channel_id]
        match kind:
            case 4:
                check_message(data)
                interaction.original = self._post(channel, data, interaction=interaction)["id"]
            case 5:
                pass
            case 6 | 7 if interaction.source is not None:
                interaction.original = interaction.source
                if kind == UPDATE_NOW:
                    self._change(channel, interaction.source, data)
            case _:
                raise form_error("type", "BASE_TYPE_CHOICES", 'Value of field "type" must be one of (4, 5, 6, 7).')
        interaction.response = int(kind or 0)
        self.responses.append((interaction.id, interaction.response))

    def _edit_original_response(self, places: Mapping[str, str], body: dict[str, Any]) -> dict[str, Any]:
        interaction = self._answered(places["token"])
        channel = self._channels[interaction.channel_id]
        if interaction.original is None:
            check_message(body)
            message = self._post(channel, body, interaction=interaction)
            interaction.original = message["id"]
            return message
        return self._change(channel, interaction.original, body)

    def _create_followup(self, places: Mapping[str, str], body: dict[str, Any]) -> dict[str, Any]:
        interaction = self._answered(places["token"])
        check_message(body)
        return self._post(self._channels[interaction.channel_id], body, interaction=interaction)

    def _overwrite_commands(self, places: Mapping[str, str], body: dict[str, Any]) -> list[dict[str, Any]]:
        if places["application"] != self.application_id:
            raise DiscordRefusal(403, 20012, "You are not authorized to perform this action on this application")
        commands = check_commands(body.get("_"))
        self.commands = [{"id": self._snowflake(), "application_id": self.application_id, **c} for c in commands]
        return self.commands

    # The inside.

    def _ready(self, session_id: str) -> dict[str, Any]:
        return {
            "v": 10,
            "user": self.bot,
            "guilds": [{"id": self.guild_id, "unavailable": True}],
            "session_id": session_id,
            "resume_gateway_url": f"{self.server.socket_url}/resume",
            "application": {"id": self.application_id, "flags": 0},
        }

    def _send_hello(self) -> list[tuple[str, dict[str, Any]]]:
        channels = [c.json() for c in self._channels.values() if c.type == TEXT_CHANNEL]
        return [("GUILD_CREATE", {"id": self.guild_id, "name": "Guild", "channels": channels, "threads": []})]

    def _snowflake(self) -> str:
        self._next_id += 1
        return str(self._next_id)

    def _dm(self, user_id: str) -> FakeChannel:
        for channel in self._channels.values():
            if channel.user_id == user_id:
                return channel
        channel = FakeChannel(self._snowflake(), DM_CHANNEL, user_id=user_id)
        self._channels[channel.id] = channel
        return channel

    def _place(self, channel_id: str) -> FakeChannel:
        self.add_channel(channel_id)
        return self._channels[channel_id]

    def _known(self, channel_id: str) -> FakeChannel:
        channel = self._channels.get(channel_id)
        if channel is None:
            raise DiscordRefusal(*UNKNOWN_CHANNEL)
        return channel

    def _writable(self, channel_id: str) -> FakeChannel:
        channel = self._known(channel_id)
        if channel.forbidden:
            if channel.type == DM_CHANNEL:
                raise DiscordRefusal(403, 50007, "Cannot send messages to this user")
            raise DiscordRefusal(403, 50013, "Missing Permissions")
        return channel

    def _answered(self, token: str) -> FakeInteraction:
        interaction = self._interactions.get(token)
        if interaction is None or interaction.response is None:
            raise DiscordRefusal(*UNKNOWN_WEBHOOK)
        return interaction

    def _thread(self, parent: FakeChannel, name: str, thread_id: str) -> FakeChannel:
        thread = FakeChannel(thread_id, PUBLIC_THREAD, parent.guild_id, name, parent.id)
        self._channels[thread.id] = thread
        self.gateway.dispatch("THREAD_CREATE", thread.json() | {"newly_created": True}, intent=Intent.GUILDS)
        return thread

    def _message(self, channel: FakeChannel, author: dict[str, Any], content: str) -> dict[str, Any]:
        message: dict[str, Any] = {
            "id": self._snowflake(),
            "type": 0,
            "channel_id": channel.id,
            "author": author,
            "content": content,
            "timestamp": TIMESTAMP,
            "edited_timestamp": None,
            "mentions": [],
            "attachments": [],
            "embeds": [],
            "components": [],
        }
        if channel.guild_id is not None:
            message["guild_id"] = channel.guild_id
        channel.messages[message["id"]] = message
        return message

    def _post(
        self,
        channel: FakeChannel,
        body: Mapping[str, Any],
        *,
        reply_to: str | None = None,
        nonce: str | None = None,
        interaction: FakeInteraction | None = None,
    ) -> dict[str, Any]:
        message = self._message(channel, self.bot, str(body.get("content") or ""))
        message["components"] = msgspec.convert(body.get("components") or [], list[dict[str, Any]])
        if reply_to is not None:
            message |= {"message_reference": {"message_id": reply_to, "channel_id": channel.id}, "type": 19}
        if nonce is not None:
            message["nonce"] = nonce
        self.messages.append(
            DiscordMessage(
                channel_id=channel.id,
                id=message["id"],
                content=message["content"],
                reply_to=reply_to,
                components=message["components"],
                nonce=nonce,
                ephemeral=bool(int(body.get("flags") or 0) & EPHEMERAL),
                interaction_id=interaction.id if interaction else None,
                versions=[message["content"]],
            )
        )
        self.gateway.dispatch_message("MESSAGE_CREATE", message, self.bot["id"])
        return message

    def _change(self, channel: FakeChannel, message_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
        message = channel.messages.get(message_id)
        if message is None:
            raise DiscordRefusal(*UNKNOWN_MESSAGE)
        if message["author"]["id"] != self.bot["id"]:
            raise DiscordRefusal(403, 50005, "Cannot edit a message authored by another user")
        check_message(body, partial=True)
        shown = next(m for m in self.messages if m.id == message_id)
        if "content" in body:
            shown.content = message["content"] = str(body["content"] or "")
            shown.versions.append(shown.content)
        if "components" in body:
            shown.components = message["components"] = body["components"] or []
        message["edited_timestamp"] = TIMESTAMP
        self.messages.touch()
        return message

    def _interact(
        self, kind: int, data: dict[str, Any], user_id: str, channel: FakeChannel, message_id: str | None
    ) -> str:
        interaction_id = self._snowflake()
        token = f"interaction-token-{interaction_id}"
        interaction = FakeInteraction(interaction_id, token, channel.id, trio.current_time(), message_id)
        self._interactions[token] = interaction
        event: dict[str, Any] = {
            "id": interaction_id,
            "application_id": self.application_id,
            "type": kind,
            "data": data,
            "channel_id": channel.id,
            "channel": channel.json(),
            "token": token,
            "version": 1,
        }
        if channel.guild_id is None:
            event["user"] = person(user_id)
        else:
            event |= {"guild_id": channel.guild_id, "member": {"user": person(user_id), "roles": []}}
        if message_id is not None:
            event["message"] = channel.messages[message_id]
        self.gateway.dispatch("INTERACTION_CREATE", event)
        return interaction_id


_CHANNEL, _MESSAGE = r"/channels/(?P<channel>\d+)", r"/messages/(?P<message>\d+)"
_APPLICATION = r"/applications/(?P<application>\d+)"
_HOOK = r"/webhooks/(?P<application>\d+)/(?P<token>[\w-]+)"


@final
@attrs.frozen
class _Route:
    """A documented operation: `name` is what `calls` and `fail` know it by."""

    method: str
    path: str
    name: str
    act: Callable[[FakeDiscord, Mapping[str, str], dict[str, Any]], Any]
    open_to_all: bool = False


_ROUTES = (
    _Route("GET", r"/gateway/bot", "get_gateway_bot", FakeDiscord._get_gateway_bot),
    _Route("GET", r"/users/@me", "get_current_user", FakeDiscord._get_current_user),
    _Route("POST", r"/users/@me/channels", "create_dm", FakeDiscord._create_dm),
    _Route("GET", _CHANNEL, "get_channel", FakeDiscord._get_channel),
    _Route("POST", rf"{_CHANNEL}/messages", "create_message", FakeDiscord._create_message),
    _Route("PATCH", rf"{_CHANNEL}{_MESSAGE}", "edit_message", FakeDiscord._edit_message),
    _Route("DELETE", rf"{_CHANNEL}{_MESSAGE}", "delete_message", FakeDiscord._delete_message),
    _Route("POST", rf"{_CHANNEL}/typing", "trigger_typing", FakeDiscord._trigger_typing),
    _Route(
        "POST", rf"{_CHANNEL}{_MESSAGE}/threads", "start_thread_from_message", FakeDiscord._start_thread_from_message
    ),
    _Route("POST", rf"{_CHANNEL}/threads", "start_thread", FakeDiscord._start_thread),
    _Route(
        "POST",
        r"/interactions/(?P<interaction>\d+)/(?P<token>[\w-]+)/callback",
        "create_interaction_response",
        FakeDiscord._create_interaction_response,
        open_to_all=True,
    ),
    _Route(
        "PATCH",
        rf"{_HOOK}/messages/@original",
        "edit_original_response",
        FakeDiscord._edit_original_response,
        open_to_all=True,
    ),
    _Route("POST", _HOOK, "create_followup", FakeDiscord._create_followup, open_to_all=True),
    _Route("PUT", rf"{_APPLICATION}/commands", "overwrite_commands", FakeDiscord._overwrite_commands),
    _Route("PUT", rf"{_APPLICATION}/guilds/\d+/commands", "overwrite_commands", FakeDiscord._overwrite_commands),
)


def _thread_name(body: Mapping[str, Any]) -> str:
    name = str(body.get("name") or "")
    if not 1 <= len(name) <= 100:
        raise form_error("name", "BASE_TYPE_BAD_LENGTH", "Must be between 1 and 100 in length.")
    return name


def _error_of(reply: FakeReply) -> str | None:
    return None if reply.status < 400 else str(msgspec.json.decode(reply.body)["message"])


@asynccontextmanager
async def open_fake_discord(
    *,
    token: str = "fake-discord-token",
    heartbeat_interval: float = 30.0,
    interaction_deadline: float = 3.0,
    disallowed_intents: int = 0,
    identify_interval: float = 0.0,
) -> AsyncGenerator[FakeDiscord, None]:
    """Run a fake until the block ends; then its server, connections and sessions are closed.

    `identify_interval` is how long a bot must wait between two IDENTIFYs (5 s on the real Gateway); `disallowed_intents` are
    those that the developer portal has not enabled.
    """
    fake = FakeDiscord(
        token=token,
        heartbeat_interval=heartbeat_interval,
        interaction_deadline=interaction_deadline,
        disallowed_intents=disallowed_intents,
        identify_interval=identify_interval,
    )
    async with open_loopback_server(fake.handle, fake.gateway.serve) as server:
        fake.attach(server)
        yield fake
