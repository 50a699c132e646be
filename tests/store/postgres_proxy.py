"""A TCP proxy before a database that loses answers: the server has committed, and the client is never told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

COMMITTED = b"COMMIT\x00"
"""The tag with which the server says that a transaction is durable."""


class LosingProxy:
    """Forwards everything, until it is told to lose an answer: then the connection that brings the next commit's answer is cut before it arrives."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.port = 0
        self.lose = 0
        """How many of the next answers to commits are lost."""
        self.lost = 0

    async def handle(self, client: trio.SocketStream) -> None:
        """One connection."""
        server = await trio.open_tcp_stream("127.0.0.1", self._target)
        async with client, server, trio.open_nursery() as nursery:
            nursery.start_soon(self._pump, client, server, False, nursery.cancel_scope)
            nursery.start_soon(self._pump, server, client, True, nursery.cancel_scope)

    async def _pump(
        self, source: trio.SocketStream, target: trio.SocketStream, answers: bool, scope: trio.CancelScope
    ) -> None:
        try:
            while data := await source.receive_some(65_536):
                if answers and self.lose and COMMITTED in data:
                    self.lose -= 1
                    self.lost += 1
                    break
                await target.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        scope.cancel()


@asynccontextmanager
async def losing_proxy(port: int) -> AsyncIterator[LosingProxy]:
    """A proxy before `port` of 127.0.0.1, for the body of the `async with`."""
    proxy = LosingProxy(port)
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        proxy.port = listeners[0].socket.getsockname()[1]
        nursery.start_soon(trio.serve_listeners, proxy.handle, listeners)
        try:
            yield proxy
        finally:
            nursery.cancel_scope.cancel()
