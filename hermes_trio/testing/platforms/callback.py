"""Calls the product's own HTTP endpoint (webhooks, events), as a platform does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final
from urllib.parse import urlsplit

import attrs
import h11
import trio

READ_SIZE = 65536


@final
@attrs.frozen
class Callback:
    """One delivery attempt and its answer. `status` is 0 if no complete answer arrived."""

    url: str
    headers: Mapping[str, str]
    body: bytes
    status: int
    answer: bytes


async def post(url: str, headers: Mapping[str, str], body: bytes, *, timeout: float) -> Callback:
    """POST once to a plain-HTTP address. Never raises for an error of the other side.

    Cancelling it closes the connection.
    """
    status, answer = 0, b""
    try:
        with trio.move_on_after(timeout):
            status, answer = await _exchange(url, headers, body)
    except (OSError, trio.BrokenResourceError, h11.RemoteProtocolError):
        pass
    return Callback(url, headers, body, status, answer)


async def _exchange(url: str, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
    parts = urlsplit(url)
    assert parts.scheme == "http", f"a fake delivers to plain-HTTP loopback addresses only, not to {url!r}"
    assert parts.hostname is not None
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    sent = [("Host", parts.netloc), ("Connection", "close"), ("Content-Length", str(len(body))), *headers.items()]
    protocol = h11.Connection(h11.CLIENT)
    async with await trio.open_tcp_stream(parts.hostname, parts.port or 80) as stream:
        data = protocol.send(h11.Request(method="POST", target=target, headers=sent)) or b""
        data += protocol.send(h11.Data(data=body)) or b""
        data += protocol.send(h11.EndOfMessage()) or b""
        await stream.send_all(data)
        status, answer = 0, bytearray()
        while True:
            event = protocol.next_event()
            if event is h11.NEED_DATA:
                protocol.receive_data(bytes(await stream.receive_some(READ_SIZE)))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                answer += event.data
            elif isinstance(event, h11.EndOfMessage):
                return status, bytes(answer)
            elif not isinstance(event, h11.InformationalResponse):
                return 0, b""
