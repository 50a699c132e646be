"""Quart-Trio with the fixes that `hypercorn_fixes` explains. A module of its own, so that a server that does not need Quart does not load it."""

from __future__ import annotations

from typing import Any, TypeVar, cast, final

import trio
from quart.wrappers import Response
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection, TrioASGIWebsocketConnection
from quart_trio.wrappers import TrioRequest
from quart_trio.wrappers.request import TrioBody
from werkzeug.exceptions import RequestEntityTooLarge

from hermes_trio.http.server.asgi import Scope
from hermes_trio.http.server.hypercorn_fixes import GuardedExchange, checkpointed_send, is_guarded

ResponseT = TypeVar("ResponseT", bound=Response)


def unbounded(response: ResponseT) -> ResponseT:
    """Return the same response without Quart's response timeout."""
    response.timeout = None
    return response


@final
class BoundedBody(TrioBody):
    """A request body whose limit holds for the sum of its parts."""

    _total = 0

    def append(self, data: bytes) -> None:
        """Take a part; past the limit the body is complete and reading it raises `RequestEntityTooLarge`."""
        self._total += len(data)
        limit = self._max_content_length
        if limit is not None and self._total > limit:
            self._must_raise = RequestEntityTooLarge()
            self.set_complete()
            return
        super().append(data)

    async def __anext__(self) -> bytes:
        """Return the next part; a limit that was passed while it was waited for is an error, not the end."""
        try:
            return await super().__anext__()
        except StopAsyncIteration:
            if self._must_raise is not None:
                raise self._must_raise from None
            raise


class FixedRequest(TrioRequest):
    """A Quart request with a body that is really bounded."""

    body_class = BoundedBody


class FixedHTTPConnection(TrioASGIHTTPConnection):
    """Quart-Trio's HTTP connection with the last send shielded and early answers settled."""

    async def __call__(self, receive: Any, send: Any) -> None:
        """Run one request; cancelled when its client disconnects."""
        scope = cast("Scope", self.scope)
        if is_guarded(scope):
            await super().__call__(receive, send)
        else:
            await GuardedExchange(scope, receive, send).run(cast("Any", super().__call__))

    async def handle_request(self, nursery: trio.Nursery, request: Any, send: Any) -> None:
        """Answer one request; a stream has no response timeout."""
        response = await self.app.handle_request(request)
        timeout = self._timeout_of(response)
        if timeout is None:
            await self._send_response(send, response)
        else:
            with trio.move_on_after(timeout):
                await self._send_response(send, response)
        nursery.cancel_scope.cancel()

    def _timeout_of(self, response: Any) -> float | None:
        if isinstance(response, Response) and response.timeout is not Ellipsis:
            return cast("float | None", response.timeout)
        if "content-length" not in response.headers:
            return None
        return cast("float | None", self.app.config["RESPONSE_TIMEOUT"])


class FixedWebsocketConnection(TrioASGIWebsocketConnection):
    """Quart-Trio's WebSocket connection whose sends are checkpoints."""

    async def __call__(self, receive: Any, send: Any) -> None:
        """Run one WebSocket; cancelled when its peer disconnects."""
        await super().__call__(receive, cast("Any", checkpointed_send(send)))


class FixedQuartTrio(QuartTrio):
    """QuartTrio with every fix of this module."""

    asgi_http_class = FixedHTTPConnection
    asgi_websocket_class = FixedWebsocketConnection
    request_class = FixedRequest
