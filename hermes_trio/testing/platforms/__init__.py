"""Fakes of Telegram, Discord and Slack that use real HTTP and WebSocket on loopback.

Each `open_fake_…` is an async context manager: leaving it ends the fake with all its connections. A
client needs only the fake's base URL and token. Names of methods in `calls` and in `fail(…)` are the documented ones.
"""

from .discord import DiscordMessage, FakeDiscord, open_fake_discord
from .faults import ANY, Delay, Drop, Fault, RateLimited, ServerError
from .ledger import NothingArrived, RecordedCall
from .slack import FakeSlack, SlackMessage, open_fake_slack
from .telegram import BotMessage, FakeTelegram, open_fake_telegram

__all__ = [
    "ANY",
    "BotMessage",
    "Delay",
    "DiscordMessage",
    "Drop",
    "FakeDiscord",
    "FakeSlack",
    "FakeTelegram",
    "Fault",
    "NothingArrived",
    "RateLimited",
    "RecordedCall",
    "ServerError",
    "SlackMessage",
    "open_fake_discord",
    "open_fake_slack",
    "open_fake_telegram",
]
