"""Converts Discord's messages and interactions: who speaks where, whether the agent is addressed, and the text.

A direct message is a direct conversation. In a server's channel the agent is addressed by a mention or by a reply to one of its messages; in a thread
in which it takes part, by every message. A thread is a channel of its own on Discord, and the thread of its parent here.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Final, Literal

import msgspec

from hermes_trio.base.structs import RedactedStruct
from hermes_trio.messaging.contract import Incoming
from hermes_trio.messaging.menu import MENU
from hermes_trio.messaging.session_keys import Source

from .client import API_URL, Channel, Interaction, Message, User

PLATFORM: Final = "discord"

PLAIN_MESSAGE, REPLY = 0, 19
TEXT_OPTION: Final = 3


class DiscordSettings(RedactedStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of `[discord]` besides the shared settings.

    Channels outside `allowed_channels` (if it is not empty) are ignored, with their threads; in `free_channels` every message addresses the agent.
    With `guild_id` the slash commands are registered in that server only, where they appear at once.
    """

    hidden: ClassVar[tuple[str, ...]] = ("token", "proxy")
    token: str = ""
    base_url: str = API_URL
    proxy: str | None = None
    require_mention: bool = True
    allowed_channels: list[str] = msgspec.field(default_factory=list[str])
    free_channels: list[str] = msgspec.field(default_factory=list[str])
    reply_to: Literal["message", "none"] = "message"
    register_commands: bool = True
    guild_id: str = ""

    def concerns(self, source: Source) -> bool:
        """Return whether the agent works in this channel."""
        return source.is_direct or not self.allowed_channels or source.chat_id in self.allowed_channels


def source_of(
    channel_id: str,
    channel: Channel | None,
    user: User,
    *,
    guild_id: str | None,
    name: str | None = None,
    message_id: str | None = None,
    is_bot: bool = False,
) -> Source:
    """Return the source of an event. `channel` is what is known about the channel, or None."""
    is_thread = channel is not None and channel.is_thread and channel.parent_id is not None
    parent = channel.parent_id if channel is not None and is_thread else channel_id
    return Source(
        platform=PLATFORM,
        chat_type="dm" if guild_id is None else "group",
        chat_id=parent,
        chat_name=None if channel is None else channel.name,
        user_id=user.id,
        user_name=name or user.global_name or user.username or user.id,
        thread_id=channel_id if is_thread else None,
        scope_id=guild_id,
        message_id=message_id,
        is_bot=user.bot or is_bot,
    )


def incoming_of(
    message: Message, channel: Channel | None, bot: User, settings: DiscordSettings, *, takes_part: bool
) -> Incoming | None:
    """Convert a message; return None if it is not something that a person said. `takes_part`: the agent takes part in this thread."""
    if message.author.id == bot.id or message.type not in (PLAIN_MESSAGE, REPLY):
        return None
    mention = re.compile(rf"<@!?{re.escape(bot.id)}>[,:]?\s*")
    text = mention.sub("", message.content).strip()
    if not text and message.attachments:
        text = f"[attached: {', '.join(one.filename for one in message.attachments)}]"
    if not text:
        return None
    nick = None if message.member is None else message.member.nick
    source = source_of(
        message.channel_id,
        channel,
        message.author,
        guild_id=message.guild_id,
        name=nick,
        message_id=message.id,
        is_bot=message.webhook_id is not None,
    )
    if not settings.concerns(source):
        return None
    answered = message.referenced_message
    meant = (
        source.is_direct
        or not settings.require_mention
        or source.chat_id in settings.free_channels
        or takes_part
        or any(one.id == bot.id for one in message.mentions)
        or (answered is not None and answered.author.id == bot.id)
    )
    return Incoming(
        source=source,
        text=text,
        event_id=message.id,
        anchor=None if settings.reply_to == "message" else "",
        addressed=meant,
    )


def slash_commands() -> list[dict[str, Any]]:
    """Return the menu as Discord's application commands."""
    listed: list[dict[str, Any]] = []
    for entry in MENU:
        command: dict[str, Any] = {"name": entry.name, "description": entry.description, "type": 1}
        if entry.argument:
            option = {"name": "argument", "description": entry.argument, "type": TEXT_OPTION, "required": False}
            command["options"] = [option]
        listed.append(command)
    return listed


def command_text(interaction: Interaction) -> str | None:
    """Return a slash command as a person would type it; None if it is not one of ours."""
    entry = next((one for one in MENU if one.name == interaction.data.get("name")), None)
    if entry is None:
        return None
    options: list[dict[str, Any]] = interaction.data.get("options") or []
    argument = str(options[0].get("value", "")) if options else ""
    return entry.typed("/", argument.strip())
