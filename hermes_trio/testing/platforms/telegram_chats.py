"""What Telegram keeps: chats with their topics and messages, and the bot's messages as people see them."""

from __future__ import annotations

from typing import Any, final

import attrs

from .fake import SentMessage


@final
@attrs.define
class BotMessage(SentMessage):
    """A message that the bot sent, as people see it now."""

    chat_id: int
    message_id: int
    text: str
    thread_id: int | None = None
    reply_to: int | None = None
    parse_mode: str | None = None
    entities: list[dict[str, Any]] = attrs.field(factory=list[dict[str, Any]])
    buttons: list[list[dict[str, Any]]] = attrs.field(factory=list[list[dict[str, Any]]])
    silent: bool = False


@final
@attrs.define
class FakeChat:
    id: int
    type: str
    title: str
    forum: bool = False
    topics: set[int] = attrs.field(factory=set[int])
    forbidden: str | None = None
    moved_to: int | None = None
    messages: dict[int, dict[str, Any]] = attrs.field(factory=dict[int, "dict[str, Any]"])

    def json(self) -> dict[str, Any]:
        if self.type == "private":
            return {"id": self.id, "type": self.type, "first_name": self.title}
        return {"id": self.id, "type": self.type, "title": self.title} | ({"is_forum": True} if self.forum else {})
