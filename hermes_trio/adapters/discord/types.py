"""The Discord objects that the product reads, with Discord's own field names. Other fields are ignored."""

from __future__ import annotations

from typing import Any

import msgspec


class User(msgspec.Struct, frozen=True):
    id: str
    username: str = ""
    global_name: str | None = None
    bot: bool = False


class Member(msgspec.Struct, frozen=True):
    user: User | None = None
    nick: str | None = None
    roles: tuple[str, ...] = ()


class Channel(msgspec.Struct, frozen=True):
    """`type` 0 is a guild's text channel, 1 a direct message, 10 to 12 threads (whose parent is `parent_id`)."""

    id: str
    type: int
    guild_id: str | None = None
    name: str | None = None
    parent_id: str | None = None
    topic: str | None = None

    @property
    def is_thread(self) -> bool:
        return self.type in (10, 11, 12)


class Attachment(msgspec.Struct, frozen=True):
    id: str
    filename: str = ""
    content_type: str | None = None
    size: int = 0
    url: str = ""


class Reference(msgspec.Struct, frozen=True):
    message_id: str | None = None
    channel_id: str | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    channel_id: str
    guild_id: str | None = None
    author: User
    member: Member | None = None
    content: str = ""
    type: int = 0
    mentions: tuple[User, ...] = ()
    attachments: tuple[Attachment, ...] = ()
    message_reference: Reference | None = None
    referenced_message: Message | None = None
    webhook_id: str | None = None
    nonce: str | int | None = None


class Interaction(msgspec.Struct, frozen=True, kw_only=True):
    """`type` 2 is a slash command (`data` has name and options), 3 a pressed component (`data` has custom_id)."""

    id: str
    application_id: str
    type: int
    token: str
    data: dict[str, Any] = {}
    channel_id: str | None = None
    channel: Channel | None = None
    guild_id: str | None = None
    member: Member | None = None
    user: User | None = None
    message: Message | None = None

    @property
    def person(self) -> User | None:
        """Return who used it, in a guild or in a direct message."""
        return self.member.user if self.member is not None else self.user

    def __repr__(self) -> str:
        # Any holder of the token can answer in the bot's name.
        return f"Interaction(id={self.id!r}, type={self.type}, channel_id={self.channel_id!r})"


class SessionStartLimit(msgspec.Struct, frozen=True):
    """`reset_after` is in milliseconds."""

    remaining: int = 1
    reset_after: int = 0
    total: int = 1000
    max_concurrency: int = 1


class GatewayBot(msgspec.Struct, frozen=True):
    url: str
    shards: int = 1
    session_start_limit: SessionStartLimit = SessionStartLimit()
