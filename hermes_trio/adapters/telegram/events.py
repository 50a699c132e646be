"""Converts Telegram's messages: who speaks where, whether the agent is addressed, and the text.

A private chat is a direct conversation. In a group the agent is addressed by a mention, by a reply to one of its messages, or by one of its commands.
A forum's topic is a thread; its General topic is the group itself, as in the Bot API.
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Final, Literal

import msgspec
from msgspec import Meta

from hermes_trio.base.structs import RedactedStruct
from hermes_trio.messaging.command_text import parse_command
from hermes_trio.messaging.contract import Incoming
from hermes_trio.messaging.menu import KNOWN_COMMANDS
from hermes_trio.messaging.session_keys import Source

from .client import API_URL, Message, User

PLATFORM: Final = "telegram"
GENERAL_TOPIC: Final = 1


class TelegramSettings(RedactedStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of `[telegram]` besides the shared settings.

    `webhook_url` is the public https address that Telegram posts to in webhook mode; the server answers at its path. Groups outside `allowed_chats`
    (if it is not empty) are ignored; in `free_chats` every message addresses the agent.
    """

    hidden: ClassVar[tuple[str, ...]] = (
        "token",
        "proxy",
    )
    token: str = ""
    base_url: str = API_URL
    proxy: str | None = None
    mode: Literal["polling", "webhook"] = "polling"
    webhook_url: str = ""
    poll_seconds: Annotated[int, Meta(ge=0, le=50)] = 50
    require_mention: bool = True
    allowed_chats: list[str] = msgspec.field(default_factory=list[str])
    free_chats: list[str] = msgspec.field(default_factory=list[str])
    reply_to: Literal["message", "none"] = "message"
    register_commands: bool = True


def source_of(message: Message, user: User | None = None) -> Source:
    """Return the source of a message by its author (or by `user`, who pressed a button below it)."""
    chat, person = message.chat, user or message.sender
    thread = message.message_thread_id if message.is_topic_message else None
    return Source(
        platform=PLATFORM,
        chat_type="dm" if chat.type == "private" else "group",
        chat_id=str(chat.id),
        chat_name=chat.title or chat.first_name or chat.username,
        user_id=None if person is None else str(person.id),
        user_name=None if person is None else _name(person),
        thread_id=None if thread in (None, GENERAL_TOPIC) else str(thread),
        message_id=str(message.message_id),
        is_bot=person is not None and person.is_bot,
    )


def _name(user: User) -> str:
    return " ".join(part for part in (user.first_name, user.last_name) if part) or user.username or str(user.id)


def incoming_of(message: Message, bot: User, settings: TelegramSettings) -> Incoming | None:
    """Convert a message; return None if it is not something that a person said to this bot (a pinned message, a channel's post)."""
    text = _text(message)
    if not text or message.sender is None or message.sender.id == bot.id or message.chat.type == "channel":
        return None
    source = source_of(message)
    chat = source.chat_id or ""
    if not source.is_direct and settings.allowed_chats and chat not in settings.allowed_chats:
        return None
    mention = _mention(bot)
    meant = (
        source.is_direct
        or not settings.require_mention
        or chat in settings.free_chats
        or _commands(text, bot)
        or _names(message, bot, mention, text)
        or _answers(message, bot)
    )
    return Incoming(
        source=source,
        text=mention.sub("", text).strip() or text,
        # A message keeps its id, whichever update brings it.
        event_id=f"{chat}/{message.message_id}",
        anchor=None if settings.reply_to == "message" else "",
        addressed=meant,
    )


def _mention(bot: User) -> re.Pattern[str]:
    # The name that follows a command ("/stop@name") belongs to the command.
    return re.compile(rf"(?<!\w)@{re.escape(bot.username or str(bot.id))}\b[,:]?", re.IGNORECASE)


def _names(message: Message, bot: User, mention: re.Pattern[str], text: str) -> bool:
    entities = message.entities or message.caption_entities
    return mention.search(text) is not None or any(one.user is not None and one.user.id == bot.id for one in entities)


def _commands(text: str, bot: User) -> bool:
    """Return whether it is a command for this bot: addressed to it, or a known one that names no other bot."""
    command = parse_command(text)
    if command is None:
        return False
    if command.addressee is None:
        return command.name in KNOWN_COMMANDS
    return command.addressee.lower() == (bot.username or "").lower()


def _answers(message: Message, bot: User) -> bool:
    answered = message.reply_to_message
    if answered is None or answered.sender is None or answered.sender.id != bot.id:
        return False
    # Every message of a topic names the one that opened it, which is no reply.
    return answered.message_id != message.message_thread_id


def _text(message: Message) -> str:
    written = message.text or message.caption
    if written:
        return written
    files = {"document": message.document, "audio": message.audio, "voice message": message.voice}
    files |= {"video": message.video, "sticker": message.sticker, "photo": next(iter(message.photo), None)}
    for kind, file in files.items():
        if file is not None:
            return f"[attached: {kind}{f' {file.file_name}' if file.file_name else ''}]"
    return ""
