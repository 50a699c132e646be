"""Fakes and clients for the wire tests. Every test is bounded: nothing here may hang."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from hermes_trio.adapters.discord.client import DiscordClient
from hermes_trio.adapters.slack.client import SlackClient
from hermes_trio.adapters.telegram.client import TelegramClient
from hermes_trio.testing.platforms import (
    FakeDiscord,
    FakeSlack,
    FakeTelegram,
    open_fake_discord,
    open_fake_slack,
    open_fake_telegram,
)


@pytest.fixture
async def telegram() -> AsyncIterator[FakeTelegram]:
    async with open_fake_telegram() as fake:
        yield fake


@pytest.fixture
async def telegram_client(telegram: FakeTelegram) -> AsyncIterator[TelegramClient]:
    async with TelegramClient(telegram.base_url, telegram.token, timeout=2) as client:
        yield client


@pytest.fixture
async def discord() -> AsyncIterator[FakeDiscord]:
    async with open_fake_discord() as fake:
        yield fake


@pytest.fixture
async def discord_client(discord: FakeDiscord) -> AsyncIterator[DiscordClient]:
    async with DiscordClient(discord.base_url, discord.token, timeout=2) as client:
        yield client


@pytest.fixture
async def slack() -> AsyncIterator[FakeSlack]:
    async with open_fake_slack() as fake:
        yield fake


@pytest.fixture
async def slack_client(slack: FakeSlack) -> AsyncIterator[SlackClient]:
    async with SlackClient(slack.base_url, slack.token, app_token=slack.app_token, timeout=2) as client:
        yield client
