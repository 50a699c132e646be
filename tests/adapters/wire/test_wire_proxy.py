"""A platform's `proxy` carries everything: its HTTP calls and its WebSocket. A real proxy listens on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import attrs
import pytest
import trio

from hermes_trio.adapters.discord.client import DiscordClient
from hermes_trio.adapters.discord.gateway import open_discord_gateway
from hermes_trio.adapters.slack.client import SlackClient
from hermes_trio.adapters.slack.socket import open_slack_socket
from hermes_trio.adapters.wire.backoff import Backoff
from hermes_trio.adapters.wire.sockets import open_platform_socket
from hermes_trio.messaging.errors import PlatformError, PlatformErrorKind
from hermes_trio.testing.platforms import FakeDiscord, FakeSlack

QUICK = Backoff(first=0.01, cap=0.02, attempts=4)
CREDENTIALS = "Basic dXNlcjpwYXNz"


@attrs.define
class LocalProxy:
    """An HTTP proxy: tunnels with CONNECT, passes plain requests on, and notes the first line of each connection."""

    url: str
    refuses: bool = False
    lines: list[str] = attrs.field(factory=list)

    async def serve(self, stream: trio.SocketStream) -> None:
        """One connection, to its end."""
        head = b""
        while b"\r\n\r\n" not in head:
            piece = await stream.receive_some(4096)
            if not piece:
                return
            head += piece
        first, _, rest = head.partition(b"\r\n")
        self.lines.append(first.decode())
        if self.refuses or f"proxy-authorization: {CREDENTIALS}".lower() not in head.decode().lower():
            await stream.send_all(b"HTTP/1.1 407 Proxy Authentication Required\r\ncontent-length: 0\r\n\r\n")
            return
        method, target, version = first.decode().split(" ")
        parts = urlsplit(target if "://" in target else f"//{target}")
        async with (
            stream,
            await trio.open_tcp_stream(parts.hostname or "", parts.port or 80) as upstream,
            trio.open_nursery() as nursery,
        ):
            if method == "CONNECT":
                await stream.send_all(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                path = target.split("/", 3)[3] if target.count("/") > 2 else ""
                await upstream.send_all(f"{method} /{path} {version}\r\n".encode() + rest)

            async def copy(source: trio.SocketStream, target: trio.SocketStream) -> None:
                try:
                    async for piece in source:
                        await target.send_all(piece)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    pass
                nursery.cancel_scope.cancel()

            nursery.start_soon(copy, stream, upstream)
            nursery.start_soon(copy, upstream, stream)


@asynccontextmanager
async def open_local_proxy() -> AsyncIterator[LocalProxy]:
    """A proxy for the body of the `async with`."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    proxy = LocalProxy(f"http://user:pass@127.0.0.1:{listeners[0].socket.getsockname()[1]}")
    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, proxy.serve, listeners)
        yield proxy
        nursery.cancel_scope.cancel()


async def test_discord_goes_through_its_proxy(discord: FakeDiscord) -> None:
    """The Gateway's WebSocket is a tunnel of the proxy, as the calls are the proxy's; events arrive through it."""
    async with open_local_proxy() as proxy:
        async with (
            DiscordClient(discord.base_url, discord.token, proxy=proxy.url) as client,
            open_discord_gateway(client, backoff=QUICK, identify_interval=0) as gateway,
        ):
            with trio.fail_after(5):
                ready = await gateway.events.receive()
        assert ready.name == "READY"
        assert any(line.startswith("CONNECT 127.0.0.1:") for line in proxy.lines)
        assert any(line.startswith("GET http://127.0.0.1:") for line in proxy.lines)


async def test_slack_goes_through_its_proxy(slack: FakeSlack) -> None:
    """Socket Mode is a tunnel of the proxy; an envelope arrives through it, and its acknowledgement goes back."""
    async with open_local_proxy() as proxy:
        async with (
            SlackClient(slack.base_url, slack.token, app_token=slack.app_token, proxy=proxy.url) as client,
            open_slack_socket(client, backoff=QUICK) as socket,
        ):
            slack.say("in private")
            with trio.fail_after(5):
                envelope = await socket.envelopes.receive()
            assert await envelope.acknowledge()
        assert any(line.startswith("CONNECT 127.0.0.1:") for line in proxy.lines)


async def test_a_proxy_that_refuses_is_named_without_its_credentials() -> None:
    """The failure says which proxy and what it answered, can be tried again, and tells no password."""
    async with open_local_proxy() as proxy:
        proxy.refuses = True
        with pytest.raises(PlatformError, match="did not connect") as caught:
            async with open_platform_socket("ws://127.0.0.1:9/?ticket=s3cret", proxy=proxy.url):
                pass
    assert caught.value.kind is PlatformErrorKind.TRANSIENT
    assert "407" in str(caught.value)
    assert "pass" not in str(caught.value)
    assert "s3cret" not in str(caught.value)
