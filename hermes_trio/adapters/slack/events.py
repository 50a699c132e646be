"""Converts Slack's events, commands and clicks: who speaks where, whether the agent is addressed, and the text.

A direct message is a direct conversation. In a channel the agent is addressed by a mention, and answers in the thread of that message; in a thread in
which it takes part, by every message. A mention arrives as two events about one message, which therefore have one identity.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final, Literal

import msgspec

from hermes_trio.base.structs import RedactedStruct
from hermes_trio.messaging.command_text import LiteralText, parse_command
from hermes_trio.messaging.contract import Incoming
from hermes_trio.messaging.menu import KNOWN_COMMANDS
from hermes_trio.messaging.session_keys import Source

from .client import API_URL, Identity
from .types import BlockActions, Event, SlashCommand

PLATFORM: Final = "slack"
PREFIX: Final = "!"
"""Slack reserves texts that begin with a slash."""

FILE_SHARE: Final = "file_share"
UNNAMED_FILE: Final = "a file"

SAID: Final = (None, FILE_SHARE, "thread_broadcast", "bot_message")
"""The kinds of message events that are something said; the others are edits, deletions and joins."""


class SlackSettings(RedactedStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of `[slack]` besides the shared settings.

    Socket Mode needs `app_token`, the Events API `signing_secret`, and `endpoint` as the path of its request URLs. Channels outside
    `allowed_channels` (if it is not empty) are ignored; in `free_channels` every message addresses the agent.
    """

    hidden: ClassVar[tuple[str, ...]] = ("token", "app_token", "signing_secret", "proxy")
    token: str = ""
    app_token: str = ""
    signing_secret: str = ""
    base_url: str = API_URL
    proxy: str | None = None
    mode: Literal["socket", "events"] = "socket"
    endpoint: str = "/slack/events"
    require_mention: bool = True
    reply_in_thread: bool = True
    allowed_channels: list[str] = msgspec.field(default_factory=list[str])
    free_channels: list[str] = msgspec.field(default_factory=list[str])

    def concerns(self, source: Source) -> bool:
        """Return whether the agent works in this channel."""
        return source.is_direct or not self.allowed_channels or source.chat_id in self.allowed_channels


def incoming_of(
    event: Event, identity: Identity, settings: SlackSettings, *, takes_part: bool, user_name: str | None = None
) -> Incoming | None:
    """Convert an event; return None if it is not something that a person said. `takes_part`: the agent takes part in this thread."""
    if event.type not in ("message", "app_mention") or event.subtype not in SAID or not event.channel or not event.ts:
        return None
    if event.user == identity.user_id or (event.bot_id is not None and event.bot_id == identity.bot_id):
        return None
    mention = f"<@{identity.user_id}>"
    text = plain_text(re.sub(rf"<@{re.escape(identity.user_id)}(\|[^>]*)?>[,:]?\s*", "", event.text))
    text = text or _attached(event)
    if not text:
        return None
    direct = event.channel_type == "im" or (event.channel_type is None and event.channel.startswith("D"))
    thread = event.thread_ts if event.thread_ts != event.ts else None
    if thread is None and not direct and settings.reply_in_thread:
        thread = event.ts
    source = Source(
        platform=PLATFORM,
        chat_type="dm" if direct else "group",
        chat_id=event.channel,
        user_id=event.user or event.bot_id,
        user_name=user_name,
        thread_id=thread,
        message_id=event.ts,
        is_bot=event.bot_id is not None,
    )
    if not settings.concerns(source):
        return None
    meant = (
        direct
        or not settings.require_mention
        or event.channel in settings.free_channels
        or event.type == "app_mention"
        or mention in event.text
        or takes_part
    )
    return Incoming(source=source, text=_command_or_text(text), event_id=f"{event.channel}/{event.ts}", addressed=meant)


def _attached(event: Event) -> str:
    """Return the text for a message that has only files: their names, as far as Slack reveals them."""
    names = [one.name or one.title or UNNAMED_FILE for one in event.files or ()]
    if not names and event.subtype == FILE_SHARE:
        names = [UNNAMED_FILE]
    return f"[attached: {', '.join(names)}]" if names else ""


def _command_or_text(text: str) -> str | LiteralText:
    """Return a command only for the known ones: people begin ordinary sentences with this prefix."""
    command = parse_command(text, prefix=PREFIX)
    return text if command is None or command.name in KNOWN_COMMANDS else LiteralText(text)


def command_incoming(command: SlashCommand) -> Incoming:
    """Convert a slash command: one of ours by its own name or by its first word (`/hermes stop`), else text for the agent.

    Slack has no slash commands in threads, so it belongs to the channel.
    """
    own = command.command.lstrip("/").rpartition("-")[2]
    first = command.text.split(maxsplit=1)[0].lower() if command.text.strip() else ""
    if own in KNOWN_COMMANDS:
        text = f"{PREFIX}{own} {command.text}".strip()
    elif not first:
        text = f"{PREFIX}help"
    else:
        text = f"{PREFIX}{command.text.strip()}" if first in KNOWN_COMMANDS else plain_text(command.text)
    direct = command.channel_id.startswith("D") or command.channel_name == "directmessage"
    source = Source(
        platform=PLATFORM,
        chat_type="dm" if direct else "group",
        chat_id=command.channel_id,
        chat_name=None if direct else command.channel_name,
        user_id=command.user_id,
        user_name=command.user_name or None,
    )
    return Incoming(source=source, text=text, anchor="")


def click_source(pressed: BlockActions) -> Source:
    """Return the source of a pressed button."""
    channel = pressed.container.channel_id or (pressed.channel.id if pressed.channel is not None else "")
    shown = pressed.message
    thread = pressed.container.thread_ts or (shown.thread_ts if shown is not None else None)
    # A message that others have answered names itself as its thread.
    if thread == (pressed.container.message_ts or (shown.ts if shown is not None else None)):
        thread = None
    return Source(
        platform=PLATFORM,
        chat_type="dm" if channel.startswith("D") else "group",
        chat_id=channel,
        user_id=pressed.user.id,
        user_name=pressed.user.name or pressed.user.username,
        thread_id=thread,
    )


_MARK: Final = re.compile(r"<([@#!]?)([^<>|]+)(?:\|([^<>]*))?>")
_ENTITIES: Final = (("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&"))


def plain_text(text: str) -> str:
    """Convert a person's text from Slack's form: links, mentions and the three escaped characters."""

    def shown(match: re.Match[str]) -> str:
        kind, target, label = match.groups()
        if kind == "@":
            return f"@{label or target}"
        if kind == "#":
            return f"#{label or target}"
        if kind == "!":
            return label or f"@{target.partition('^')[0]}"
        return target if not label or label in target else f"{label} ({target})"

    read = _MARK.sub(shown, text)
    for entity, character in _ENTITIES:
        read = read.replace(entity, character)
    return read.strip()
