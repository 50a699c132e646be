"""The WebSocket connections of a fake platform, and what a test may do to all of them at once."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

import msgspec
import trio

from hermes_trio.net.websocket import SocketClosed, WebSocket

from .changes import Changes
from .ledger import WAIT_SECONDS

C = TypeVar("C")


class FakeSockets(Generic[C]):
    """The connections of one fake, oldest first; `C` is what the platform knows about each. They end with their own tasks."""

    def __init__(self) -> None:
        self.refuse_connections = False
        self._connections: list[C] = []
        self._changes = Changes()

    def _socket_of(self, connection: C) -> WebSocket:
        raise NotImplementedError

    @contextmanager
    def _connected(self, connection: C) -> Generator[None]:
        """Count the connection for the body of the `with`. The platform reports its beginning, after its hello."""
        self._connections.append(connection)
        try:
            yield
        finally:
            self._connections.remove(connection)
            self._changes.tell()

    async def wait_for_connections(self, count: int = 1, *, timeout: float = WAIT_SECONDS) -> None:
        """Wait until exactly this many connections are open."""
        with trio.fail_after(timeout):
            await self._changes.until(lambda: len(self._connections) == count)

    async def send_to_all(self, message: dict[str, Any]) -> None:
        """Send a message over every connection that is open when its turn comes."""
        for connection in list(self._connections):
            with suppress(SocketClosed):
                await self._socket_of(connection).send(msgspec.json.encode(message).decode())

    async def drop_connections(self) -> None:
        """Lose every connection without a close frame."""
        for connection in list(self._connections):
            await self._socket_of(connection).abort()
