"""The Bot API objects that the product reads, with the Bot API's own field names.

Fields that are not listed are ignored when decoding, as the Bot API adds new ones without notice.
"""

from __future__ import annotations

from typing import Any

import msgspec


class User(msgspec.Struct, frozen=True):
    id: int
    is_bot: bool = False
    first_name: str = ""
    last_name: str | None = None
    username: str | None = None


class Chat(msgspec.Struct, frozen=True):
    """`type` is private, group, supergroup or channel."""

    id: int
    type: str
    title: str | None = None
    username: str | None = None
    first_name: str | None = None
    is_forum: bool = False


class Entity(msgspec.Struct, frozen=True):
    """`offset` and `length` count UTF-16 units."""

    type: str
    offset: int
    length: int
    url: str | None = None
    user: User | None = None


class File(msgspec.Struct, frozen=True):
    file_id: str
    file_unique_id: str = ""
    file_name: str | None = None
    mime_type: str | None = None
    file_size: int | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    message_id: int
    date: int = 0
    chat: Chat
    sender: User | None = msgspec.field(default=None, name="from")
    message_thread_id: int | None = None
    is_topic_message: bool = False
    reply_to_message: Message | None = None
    text: str | None = None
    entities: tuple[Entity, ...] = ()
    caption: str | None = None
    caption_entities: tuple[Entity, ...] = ()
    photo: tuple[File, ...] = ()
    document: File | None = None
    audio: File | None = None
    voice: File | None = None
    video: File | None = None
    sticker: File | None = None
    migrate_to_chat_id: int | None = None


class CallbackQuery(msgspec.Struct, frozen=True, kw_only=True):
    """`message` lacks its content (and has date 0) when it is too old for the bot to see."""

    id: str
    sender: User = msgspec.field(name="from")
    message: Message | None = None
    data: str | None = None


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """One incoming update. At most one of the optional fields is set; an update of another kind has none."""

    update_id: int
    message: Message | None = None
    edited_message: Message | None = None
    channel_post: Message | None = None
    callback_query: CallbackQuery | None = None


class WebhookInfo(msgspec.Struct, frozen=True):
    url: str = ""
    pending_update_count: int = 0
    last_error_date: int | None = None
    last_error_message: str | None = None


class Parameters(msgspec.Struct, frozen=True):
    retry_after: float | None = None
    migrate_to_chat_id: int | None = None


class Response(msgspec.Struct, frozen=True):
    """The envelope of every answer."""

    ok: bool
    result: Any = None
    error_code: int = 0
    description: str = ""
    parameters: Parameters = Parameters()
