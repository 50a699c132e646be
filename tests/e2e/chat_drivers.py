"""The fake platforms behind one interface, so that one test runs on each of them. `DRIVERS` lists them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import attrs

from hermes_trio.testing.platforms import (
    BotMessage,
    DiscordMessage,
    FakeDiscord,
    FakeSlack,
    FakeTelegram,
    SlackMessage,
    open_fake_discord,
    open_fake_slack,
    open_fake_telegram,
)
from hermes_trio.testing.platforms.fake import FakePlatform

from .chat_world import TIMEOUT, discord_table, slack_table, telegram_table


@attrs.frozen
class Place:
    """A chat, or a thread in it, and the person who speaks there."""

    chat: str
    user: str
    thread: str = ""


@attrs.frozen
class Shown:
    """A message of the agent, as it is seen now. `reply_to` is what it hangs on: a message, or on Slack its thread."""

    text: str
    chat: str
    thread: str
    reply_to: str
    buttons: tuple[str, ...]
    raw: Any


class Driver(ABC):
    """People on one platform."""

    name: str
    prefix = "/"
    send_method: str
    """The API method that sends a message, by the name that the fake records."""
    fake: FakePlatform[Any]

    @abstractmethod
    def table(self, **more: Any) -> dict[str, Any]:
        """The adapter's table in the configuration."""

    @abstractmethod
    def direct(self, number: int) -> Place:
        """A direct chat of a person of its own."""

    @abstractmethod
    def threaded(self, number: int) -> Place:
        """A thread of its own in a group."""

    @abstractmethod
    def say(self, place: Place, text: str) -> str:
        """The person writes, so that the agent is meant; returns what an answer must hang on."""

    @abstractmethod
    def click(self, shown: Shown, label: str, place: Place) -> None:
        """The person presses a button."""

    @abstractmethod
    def seen(self) -> list[Shown]:
        """Everything that the agent has said, in order, without what was deleted or shown to one person only."""

    @abstractmethod
    async def next(self, place: Place, containing: str = "", timeout: float = TIMEOUT) -> Shown:
        """The next message in a place that contains this."""

    @abstractmethod
    async def ready(self) -> None:
        """Wait until a gateway that has been started since the last time is connected."""

    def seen_in(self, place: Place) -> list[Shown]:
        """What the agent has said in one place."""
        return [one for one in self.seen() if (one.chat, one.thread) == (place.chat, place.thread)]


class TelegramDriver(Driver):
    name = "telegram"
    send_method = "sendMessage"

    fake: FakeTelegram

    def __init__(self, fake: FakeTelegram) -> None:
        self.fake = fake

    def table(self, **more: Any) -> dict[str, Any]:
        return telegram_table(self.fake, **more)

    def direct(self, number: int) -> Place:
        return Place(str(5000 + number), str(5000 + number))

    def threaded(self, number: int) -> Place:
        chat = -1_001_000_000_000
        self.fake.add_group(chat, "Forum", forum=True)
        self.fake.add_topic(chat, 70 + number)
        return Place(str(chat), str(5000 + number), str(70 + number))

    def say(self, place: Place, text: str) -> str:
        if not place.thread:
            return str(self.fake.say(text, user_id=int(place.user)))
        return str(
            self.fake.say(
                text if text.startswith("/") else f"@hermes_bot {text}",
                user_id=int(place.user),
                chat_id=int(place.chat),
                thread_id=int(place.thread),
            )
        )

    def click(self, shown: Shown, label: str, place: Place) -> None:
        self.fake.click(shown.raw, label, user_id=int(place.user))

    def seen(self) -> list[Shown]:
        return [_of_telegram(one) for one in self.fake.messages if not one.deleted]

    async def next(self, place: Place, containing: str = "", timeout: float = TIMEOUT) -> Shown:
        return _of_telegram(
            await self.fake.wait_for_message(
                chat_id=int(place.chat),
                thread_id=int(place.thread) if place.thread else None,
                containing=containing,
                timeout=timeout,
            )
        )

    async def ready(self) -> None:
        await self.fake.wait_for_poller(timeout=TIMEOUT)


def _of_telegram(one: BotMessage) -> Shown:
    labels = tuple(str(button["text"]) for row in one.buttons for button in row)
    thread = "" if one.thread_id is None else str(one.thread_id)
    return Shown(one.text, str(one.chat_id), thread, str(one.reply_to or ""), labels, one)


class DiscordDriver(Driver):
    name = "discord"
    send_method = "create_message"

    fake: FakeDiscord

    def __init__(self, fake: FakeDiscord) -> None:
        self.fake = fake
        self._threads: dict[int, str] = {}
        self._starts = 0

    def table(self, **more: Any) -> dict[str, Any]:
        return discord_table(self.fake, **more)

    def direct(self, number: int) -> Place:
        user = str(5000 + number)
        return Place(self.fake._dm(user).id, user)

    def threaded(self, number: int) -> Place:
        if number not in self._threads:
            self._threads[number] = self.fake.start_thread("7000", f"thread {number}")
        return Place("7000", str(5000 + number), self._threads[number])

    def say(self, place: Place, text: str) -> str:
        if not place.thread:
            return str(self.fake.say(text, user_id=place.user)["id"])
        said = self.fake.say(text, user_id=place.user, channel_id=place.thread, mention=True)
        return str(said["id"])

    def click(self, shown: Shown, label: str, place: Place) -> None:
        self.fake.click(shown.raw, label, user_id=place.user)

    def seen(self) -> list[Shown]:
        return [self._shown(one) for one in self.fake.messages if not one.deleted and not one.ephemeral]

    def _shown(self, one: DiscordMessage) -> Shown:
        thread = one.channel_id if one.channel_id in self._threads.values() else ""
        labels = tuple(str(button["label"]) for button in one.buttons)
        chat = "7000" if thread else one.channel_id
        return Shown(one.content, chat, thread, one.reply_to or "", labels, one)

    async def next(self, place: Place, containing: str = "", timeout: float = TIMEOUT) -> Shown:
        found = await self.fake.wait_for_message(
            channel_id=place.thread or place.chat, containing=containing, timeout=timeout
        )
        return self._shown(found)

    async def ready(self) -> None:
        self._starts += 1
        await self.fake.gateway.wait_for("identify", count=self._starts, timeout=TIMEOUT)


class SlackDriver(Driver):
    name = "slack"
    send_method = "chat.postMessage"
    prefix = "!"

    fake: FakeSlack

    def __init__(self, fake: FakeSlack) -> None:
        self.fake = fake
        self._roots: dict[int, str] = {}

    def table(self, **more: Any) -> dict[str, Any]:
        return slack_table(self.fake, **more)

    def direct(self, number: int) -> Place:
        return Place(f"D{5000 + number}", f"U{5000 + number}")

    def threaded(self, number: int) -> Place:
        if number not in self._roots:
            self._roots[number] = self.fake.say(f"topic {number}", user="U1", channel="C7000")
        return Place("C7000", f"U{5000 + number}", self._roots[number])

    def say(self, place: Place, text: str) -> str:
        if not place.thread:
            self.fake.say(text, user=place.user)
            return ""
        self.fake.say(text, user=place.user, channel=place.chat, thread_ts=place.thread, mention=True)
        return place.thread

    def click(self, shown: Shown, label: str, place: Place) -> None:
        self.fake.click(shown.raw, label, user=place.user)

    def seen(self) -> list[Shown]:
        return [_of_slack(one) for one in self.fake.messages if not one.deleted and one.ephemeral_for is None]

    async def next(self, place: Place, containing: str = "", timeout: float = TIMEOUT) -> Shown:
        found = await self.fake.wait_for_message(
            channel=place.chat, thread_ts=place.thread or None, containing=containing, timeout=timeout
        )
        return _of_slack(found)

    async def ready(self) -> None:
        await self.fake.socket.wait_for_connections(timeout=TIMEOUT)


def _of_slack(one: SlackMessage) -> Shown:
    labels = tuple(str(button["text"]["text"]) for button in one.buttons)
    return Shown(one.text, one.channel, one.thread_ts or "", one.thread_ts or "", labels, one)


@asynccontextmanager
async def _open_telegram() -> AsyncIterator[Driver]:
    async with open_fake_telegram() as fake:
        yield TelegramDriver(fake)


@asynccontextmanager
async def _open_discord() -> AsyncIterator[Driver]:
    async with open_fake_discord() as fake:
        yield DiscordDriver(fake)


@asynccontextmanager
async def _open_slack() -> AsyncIterator[Driver]:
    async with open_fake_slack(ack_timeout=10.0) as fake:
        yield SlackDriver(fake)


DRIVERS: Mapping[str, Callable[[], AbstractAsyncContextManager[Driver]]] = {
    "telegram": _open_telegram,
    "discord": _open_discord,
    "slack": _open_slack,
}
"""Every chat platform, as `CHAT_PLATFORMS` of the product names it."""

PLATFORMS = tuple(DRIVERS)


def open_driver(name: str) -> AbstractAsyncContextManager[Driver]:
    """A platform by its name, for the body of the `async with`."""
    return DRIVERS[name]()


@asynccontextmanager
async def open_drivers() -> AsyncIterator[dict[str, Driver]]:
    """All platforms."""
    async with AsyncExitStack() as stack:
        yield {name: await stack.enter_async_context(open_driver(name)) for name in PLATFORMS}
