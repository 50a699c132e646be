"""What Discord keeps: channels and threads with their messages, interactions, and the bot's messages as people see them."""

from __future__ import annotations

from typing import Any, final

import attrs

from .fake import SentMessage


@final
@attrs.define
class DiscordMessage(SentMessage):
    """A message that the bot sent, as people see it now. `interaction_id` is set when it answers an interaction."""

    channel_id: str
    id: str
    content: str
    reply_to: str | None = None
    components: list[dict[str, Any]] = attrs.field(factory=list[dict[str, Any]])
    nonce: str | None = None
    ephemeral: bool = False
    interaction_id: str | None = None

    @property
    def buttons(self) -> list[dict[str, Any]]:
        return [button for row in self.components for button in row.get("components", [])]


@final
@attrs.define
class FakeChannel:
    id: str
    type: int
    guild_id: str | None = None
    name: str = ""
    parent_id: str | None = None
    user_id: str | None = None
    forbidden: bool = False
    messages: dict[str, dict[str, Any]] = attrs.field(factory=dict[str, "dict[str, Any]"])

    def json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"id": self.id, "type": self.type, "name": self.name or None}
        if self.guild_id is not None:
            fields["guild_id"] = self.guild_id
        if self.parent_id is not None:
            fields["parent_id"] = self.parent_id
        if self.user_id is not None:
            fields["recipients"] = [person(self.user_id)]
        return fields


@final
@attrs.define
class FakeInteraction:
    id: str
    token: str
    channel_id: str
    created: float
    source: str | None = None
    response: int | None = None
    original: str | None = None


def person(user_id: str) -> dict[str, Any]:
    return {"id": user_id, "username": f"user{user_id}", "discriminator": "0", "global_name": "Ada", "bot": False}
