"""What a test may ask of every fake platform, in the same words: calls, faults, messages, and who is connected."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import attrs
import httpx2
import pytest
import trio

from hermes_trio.adapters.wire.sockets import open_platform_socket
from hermes_trio.net.websocket import SocketClosed
from hermes_trio.testing.platforms import (
    ANY,
    Delay,
    Drop,
    FakeDiscord,
    FakeSlack,
    FakeTelegram,
    NothingArrived,
    RateLimited,
    ServerError,
    open_fake_discord,
    open_fake_slack,
    open_fake_telegram,
)
from hermes_trio.testing.platforms.fake import FakePlatform
from hermes_trio.testing.platforms.sockets import FakeSockets

Fake = FakeTelegram | FakeDiscord | FakeSlack


@attrs.frozen
class Way:
    """How a bot asks a platform who it is, and how it says something."""

    opened: Callable[[], AbstractAsyncContextManager[Any]]
    me: str
    post: str


WAYS = [
    pytest.param(Way(open_fake_telegram, "getMe", "sendMessage"), id="telegram"),
    pytest.param(Way(open_fake_discord, "get_current_user", "create_message"), id="discord"),
    pytest.param(Way(open_fake_slack, "auth.test", "chat.postMessage"), id="slack"),
]


class Bot:
    """A client that knows nothing of the product."""

    def __init__(self, fake: Fake, http: httpx2.AsyncClient) -> None:
        self._fake = fake
        self._http = http

    async def ask(self) -> int:
        """Who am I? Returns the HTTP status."""
        match self._fake:
            case FakeTelegram() as fake:
                answer = await self._http.get(f"{fake.base_url}/bot{fake.token}/getMe")
            case FakeDiscord() as fake:
                answer = await self._http.get(f"{fake.base_url}/users/@me", headers=self._headers("Bot"))
            case FakeSlack() as fake:
                answer = await self._http.post(f"{fake.base_url}/auth.test", headers=self._headers("Bearer"))
        return answer.status_code

    async def say(self, text: str) -> None:
        """Say something in the one place that there is."""
        match self._fake:
            case FakeTelegram() as fake:
                fake.add_private_chat(1)
                address = f"{fake.base_url}/bot{fake.token}/sendMessage"
                answer = await self._http.post(address, json={"chat_id": 1, "text": text})
            case FakeDiscord() as fake:
                fake.add_channel("1")
                address, headers = f"{fake.base_url}/channels/1/messages", self._headers("Bot")
                answer = await self._http.post(address, json={"content": text}, headers=headers)
            case FakeSlack() as fake:
                fake.add_channel("C1")
                address, headers = f"{fake.base_url}/chat.postMessage", self._headers("Bearer")
                answer = await self._http.post(address, json={"channel": "C1", "text": text}, headers=headers)
        assert answer.status_code == 200

    def _headers(self, scheme: str) -> dict[str, str]:
        return {"authorization": f"{scheme} {self._fake.token}"}


@pytest.fixture
async def http() -> AsyncIterator[httpx2.AsyncClient]:
    """A client without a proxy."""
    async with httpx2.AsyncClient(trust_env=False) as client:
        yield client


@pytest.mark.parametrize("way", WAYS)
async def test_every_fault_hits_its_call_and_is_written_down(way: Way, http: httpx2.AsyncClient) -> None:
    """In their order, each once or as often as it was said; then the platform is well again."""
    async with way.opened() as fake:
        bot = Bot(fake, http)
        fake.fail(way.me, RateLimited(1))
        fake.fail(way.me, ServerError(503), times=2)
        fake.fail(way.me, Delay(0.01))
        assert [await bot.ask() for _ in range(5)] == [429, 503, 503, 200, 200]
        fake.fail(ANY, Drop())
        with pytest.raises(httpx2.TransportError):
            await bot.ask()
        assert [call.status for call in fake.calls] == [429, 503, 503, 200, 200, 0]
        assert {call.method for call in fake.calls} == {way.me}
        third = await fake.wait_for_call(way.me, count=3)
        assert (third.number, third.status) == (2, 503)
        well = await fake.wait_for_call(way.me, lambda call: call.status == 200, count=2)
        assert well.number == 4
        with pytest.raises(NothingArrived, match=f"no call of {way.post}"):
            await fake.wait_for_call(way.post, timeout=0.01)


@pytest.mark.parametrize("way", WAYS)
async def test_each_message_is_returned_by_one_wait(way: Way, http: httpx2.AsyncClient) -> None:
    """The oldest that fits and that nobody has had; one that was deleted is not there any more."""
    async with way.opened() as fake:
        bot = Bot(fake, http)
        for text in ("one", "two", "another two", "three"):
            await bot.say(text)
        two = await fake.wait_for_message(containing="two")
        assert two is fake.messages[1]
        assert two.versions == ["two"]
        assert await fake.wait_for_message(containing="two") is fake.messages[2]
        fake.messages[0].deleted = True
        assert await fake.wait_for_message() is fake.messages[3]
        with pytest.raises(NothingArrived, match="the last of 4 were"):
            await fake.wait_for_message(timeout=0.01)


def test_a_fake_without_a_server_says_how_one_is_made() -> None:
    """It has no address before it is opened."""
    fake = FakePlatform[Any]("token", rate_limited=lambda fault: None, error_of=lambda reply: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(AssertionError, match="open_fake_"):
        _ = fake.base_url


def sockets_of(fake: FakeDiscord | FakeSlack) -> tuple[FakeSockets[Any], str]:
    """The connections of a fake, and an address at which the next one is made."""
    if isinstance(fake, FakeDiscord):
        return fake.gateway, f"{fake.server.socket_url}/gateway?v=10&encoding=json"
    return fake.socket, f"{fake.server.socket_url}/link/?ticket={fake.socket.ticket()}"


@pytest.mark.parametrize("opened", [open_fake_discord, open_fake_slack], ids=["discord", "slack"])
async def test_connections_are_counted_lost_and_refused(
    opened: Callable[[], AbstractAsyncContextManager[FakeDiscord | FakeSlack]],
) -> None:
    """A test can wait for who is connected, and lose them all without a word."""
    async with opened() as fake:
        sockets, address = sockets_of(fake)
        async with open_platform_socket(address) as one, open_platform_socket(sockets_of(fake)[1]) as other:
            await sockets.wait_for_connections(2)
            for socket in (one, other):
                assert await socket.receive(), "the platform says hello first"
            await sockets.drop_connections()
            for socket in (one, other):
                with pytest.raises(SocketClosed) as lost:
                    await socket.receive()
                assert lost.value.code == 1006
        await sockets.wait_for_connections(0)
        sockets.refuse_connections = True
        async with open_platform_socket(sockets_of(fake)[1]) as refused:
            with pytest.raises(SocketClosed):
                await refused.receive()
        with pytest.raises(trio.TooSlowError):
            await sockets.wait_for_connections(1, timeout=0.01)
