"""The hot routes: exact matches answered by plain ASGI callables in front of the framework.

A request that matches goes straight to its callable; everything else, WebSocket and lifespan included, goes to the
fallback application. There are no patterns here: what needs one is not hot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import final

from hermes_trio.http.server.asgi import ASGIApp, Receive, Scope, Send
from hermes_trio.http.server.responses import HeaderBlock

JSON_HEADERS = HeaderBlock([(b"content-type", b"application/json")])


@final
class HotRoutes:
    """An ASGI application: `(method, path)` hits go to their own callable, the rest to `fallback`."""

    __slots__ = ("_fallback", "_routes")

    def __init__(self, fallback: ASGIApp, routes: Mapping[tuple[str, str], ASGIApp]) -> None:
        self._fallback = fallback
        self._routes = dict(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or run the fallback; cancellation is that of whichever ran."""
        if scope["type"] == "http":
            hot = self._routes.get((scope["method"], scope["path"]))
            if hot is not None:
                return await hot(scope, receive, send)
        return await self._fallback(scope, receive, send)


async def send_json(
    send: Send, status: int, body: bytes, headers: HeaderBlock | Iterable[tuple[bytes, bytes]] = JSON_HEADERS
) -> None:
    """Answer with an encoded JSON body. `headers` replace the default content type; make them a `HeaderBlock`
    where speed counts.
    """
    if type(headers) is not HeaderBlock:
        headers = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
