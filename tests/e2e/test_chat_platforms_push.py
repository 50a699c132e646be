"""Platforms that push: Telegram's webhook and Slack's Events API, answered by the real server."""

from __future__ import annotations

import socket
from pathlib import Path

from hermes_trio.testing.platforms import FakeSlack, FakeTelegram

from .chat_drivers import open_driver
from .chat_world import TIMEOUT, open_server_with


def free_port() -> int:
    """A port that nobody listens on: the platforms must know it before the server starts."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


async def test_what_platforms_push_is_answered(tmp_path: Path) -> None:
    """Messages, buttons and background work take the same way as with a connection of our own."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    (tmp_path / "old").mkdir()
    async with open_driver("telegram") as telegram, open_driver("slack") as slack:
        assert isinstance(telegram.fake, FakeTelegram)
        assert isinstance(slack.fake, FakeSlack)
        slack.fake.use_request_url(f"{address}/slack/events")
        tables = {
            "telegram": telegram.table(mode="webhook", webhook_url=f"{address}/telegram"),
            "slack": slack.table(mode="events", signing_secret=slack.fake.signing_secret),
        }
        async with open_server_with(tables, tmp_path, port=port) as server:
            await slack.fake.wait_for_call("auth.test", timeout=TIMEOUT)
            await telegram.fake.wait_for_call("setWebhook", timeout=TIMEOUT)
            assert await slack.fake.verify_request_url()
            for driver in (telegram, slack):
                for place in (driver.direct(1), driver.threaded(1)):
                    anchor = driver.say(place, "!bg echo pushed")
                    await driver.next(place, "Background process started")
                    assert (await driver.next(place, "pushed")).reply_to == anchor
                    driver.say(place, f"!run rm -rf {tmp_path / 'old'}")
                    question = await driver.next(place, "Approval needed")
                    driver.click(question, "Deny", place)
                    await driver.next(place, "denied")
            assert await server.stop() == 0
    assert (tmp_path / "old").exists()
