"""Values that keep some of their fields to themselves, however they are shown."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import pytest

from hermes_trio.adapters.discord.events import DiscordSettings
from hermes_trio.adapters.slack.events import SlackSettings
from hermes_trio.adapters.telegram.events import TelegramSettings
from hermes_trio.base.structs import RedactedStruct
from hermes_trio.config import Config
from hermes_trio.http.auth import AdminKey
from hermes_trio.http.settings import ServerSettings
from hermes_trio.messaging.settings import RouteSettings, WebhookSettings
from hermes_trio.net.dial import Proxy
from hermes_trio.runtime.outcome import Outcome, TurnState
from hermes_trio.tools.mcp import McpServer
from hermes_trio.tools.warden import ProcessSpec

SECRET = "a-secret-of-the-owner"


class Sealed(RedactedStruct, frozen=True):
    """A letter: who it is for may be read."""

    hidden: ClassVar[tuple[str, ...]] = ("text",)
    to: str
    text: str


class Parcel(msgspec.Struct, frozen=True):
    """A value of the ordinary kind with a discreet one inside."""

    letter: Sealed


def test_what_is_shown() -> None:
    """The fields that are not hidden, in their order, as in any other value."""
    letter = Sealed("you", SECRET)
    assert repr(letter) == str(letter) == "Sealed(to='you')"
    assert dict(letter.__rich_repr__()) == {"to": "you"}
    assert repr(Parcel(letter)) == "Parcel(letter=Sealed(to='you'))"
    assert msgspec.structs.replace(letter, to="me") == Sealed("me", SECRET)
    assert hash(letter) == hash(Sealed("you", SECRET))


@pytest.mark.parametrize(
    "value",
    [
        ProcessSpec(command="true", cwd="/", env={"KEY": SECRET}),
        AdminKey(SECRET),
        Proxy(host="proxy", port=1, authorization=SECRET),
        Outcome(turn_id="t", session_id="s", state=TurnState.COMPLETED, exception=ValueError(SECRET)),
        ServerSettings(key=SECRET),
        WebhookSettings(secret=SECRET, routes={"r": RouteSettings(prompt="p", secret=[SECRET])}),
        TelegramSettings(token=SECRET, proxy=f"http://u:{SECRET}@proxy"),
        DiscordSettings(token=SECRET),
        SlackSettings(token=SECRET, app_token=SECRET, signing_secret=SECRET),
        McpServer(command="true", env={"KEY": SECRET}, headers={"authorization": SECRET}),
        Config(server=ServerSettings(key=SECRET), environment={"KEY": SECRET}, telegram={"token": SECRET}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_secrets_stay_inside(value: msgspec.Struct) -> None:
    """Neither the plain nor the coloured form of a value shows what it hides."""
    from rich.pretty import pretty_repr

    assert SECRET not in repr(value)
    assert SECRET not in pretty_repr(value)
