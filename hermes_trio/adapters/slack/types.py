"""The Slack objects that the product reads, with Slack's own field names. Other fields are ignored.

The same payloads arrive over Socket Mode and over HTTP, so they are read here and not in either transport.
"""

from __future__ import annotations

import msgspec


class Identity(msgspec.Struct, frozen=True):
    """Whose token it is (auth.test)."""

    user_id: str
    team_id: str = ""
    bot_id: str | None = None
    user: str = ""
    team: str = ""
    url: str = ""


class File(msgspec.Struct, frozen=True):
    """A shared file. An app without access to it gets neither its name nor its title."""

    name: str | None = None
    title: str | None = None


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """`type` is message, app_mention, …; `channel_type` is im for direct messages. `thread_ts` names the thread's root."""

    type: str
    subtype: str | None = None
    channel: str | None = None
    channel_type: str | None = None
    user: str | None = None
    bot_id: str | None = None
    text: str = ""
    ts: str | None = None
    thread_ts: str | None = None
    files: tuple[File, ...] | None = None


class EventCallback(msgspec.Struct, frozen=True, kw_only=True):
    """An Events API request. `event_id` is the same in every repetition. `challenge` is set in url_verification."""

    type: str
    event_id: str = ""
    team_id: str = ""
    api_app_id: str = ""
    event: Event | None = None
    challenge: str | None = None


class Named(msgspec.Struct, frozen=True):
    id: str
    name: str | None = None
    username: str | None = None


class Action(msgspec.Struct, frozen=True):
    action_id: str = ""
    block_id: str = ""
    type: str = ""
    value: str | None = None


class Container(msgspec.Struct, frozen=True):
    message_ts: str | None = None
    channel_id: str | None = None
    thread_ts: str | None = None
    is_ephemeral: bool = False


class BlockActions(msgspec.Struct, frozen=True, kw_only=True):
    """A pressed Block Kit element. `response_url` answers in the bot's name, so it is not shown."""

    type: str
    user: Named
    channel: Named | None = None
    container: Container = Container()
    message: Event | None = None
    actions: tuple[Action, ...] = ()
    response_url: str = ""
    trigger_id: str = ""

    def __repr__(self) -> str:
        return f"BlockActions(user={self.user.id!r}, actions={self.actions!r})"


class SlashCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A used slash command. `response_url` answers in the bot's name, so it is not shown."""

    command: str
    text: str = ""
    user_id: str = ""
    user_name: str = ""
    channel_id: str = ""
    channel_name: str = ""
    team_id: str = ""
    response_url: str = ""
    trigger_id: str = ""

    def __repr__(self) -> str:
        return f"SlashCommand({self.command!r}, user_id={self.user_id!r}, channel_id={self.channel_id!r})"
