"""The network between a node and its database: a TCP proxy that loses answers to commits, holds one direction back, or cuts a message in the middle."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

COMMITTED = b"COMMIT\x00"
"""The tag with which the server says that a transaction is durable."""

BEGINS_UNIT = b"SELECT begin_unit("
"""The statement that begins each unit. A node sends its text once on each connection that has units, and has nothing else there."""


class _Connection:
    """One connection: how many times the proxy was frozen before it was made, by which bytes its transaction was chosen to lose its answer, and whether it is
    one on which a node sends units.
    """

    def __init__(self, made: int) -> None:
        self.made = made
        self.chosen: bytes | None = None
        self.writes = False


class DatabaseProxy:
    """Forwards between a node and its database. What is held back arrives later, as packets do that are sent again when a partition ends."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.port = 0
        self.lose = 0
        """How many of the next answers to commits are lost, each with its connection."""
        self.lose_with = b""
        """Only answers to commits of transactions in which the node sent these bytes are lost."""
        self.away = 0.0
        """For so many seconds after an answer was lost no new connection gets through."""
        self.lost = 0
        self._back_at = -math.inf
        self._open = {"up": trio.Event(), "down": trio.Event()}
        for gate in self._open.values():
            gate.set()
        self._cut: trio.Event | None = None
        self._frozen = 0

    def freeze(self) -> None:
        """Forward nothing any more on the connections that are open, and keep them open. New ones work."""
        self._frozen += 1

    def hold(self, *directions: str) -> None:
        """Hold back what goes `up` (from the node to the database), `down`, or both."""
        for direction in directions:
            self._open[direction] = trio.Event()

    def heal(self) -> None:
        """Forward everything again, what was held back first."""
        for gate in self._open.values():
            gate.set()

    def cut(self) -> trio.Event:
        """Forward half of what the node sends next on a connection for units, and hold the rest back until `heal`; the event is set when that has happened."""
        self._cut = trio.Event()
        return self._cut

    async def handle(self, node: trio.SocketStream) -> None:
        """One connection."""
        try:
            await self._open["up"].wait()
            await trio.sleep_until(self._back_at)
            server = await trio.open_tcp_stream("127.0.0.1", self._target)
        except OSError:
            await node.aclose()
            return
        connection = _Connection(self._frozen)
        async with node, server, trio.open_nursery() as nursery:
            nursery.start_soon(self._pump, node, server, connection, "up", nursery.cancel_scope)
            nursery.start_soon(self._pump, server, node, connection, "down", nursery.cancel_scope)

    def _loses(self, connection: _Connection) -> bool:
        """Whether the answer to this commit is lost."""
        if not self.lose or connection.chosen != self.lose_with:
            return False
        self.lose -= 1
        self.lost += 1
        self._back_at = trio.current_time() + self.away
        return True

    async def _pump(
        self,
        source: trio.SocketStream,
        target: trio.SocketStream,
        connection: _Connection,
        direction: str,
        scope: trio.CancelScope,
    ) -> None:
        try:
            while data := await source.receive_some(65_536):
                if connection.made < self._frozen:
                    continue
                await self._open[direction].wait()
                if direction == "up" and self.lose_with in data:
                    connection.chosen = self.lose_with
                if direction == "down" and COMMITTED in data:
                    if self._loses(connection):
                        break
                    connection.chosen = None
                if direction == "up" and BEGINS_UNIT in data:
                    connection.writes = True
                if direction == "up" and self._cut is not None and connection.writes and len(data) > 200:
                    done, self._cut = self._cut, None
                    await target.send_all(data[: len(data) // 2])
                    self.hold("up")
                    done.set()
                    await self._open["up"].wait()
                    data = data[len(data) // 2 :]
                await target.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        scope.cancel()


@asynccontextmanager
async def database_proxy(port: int) -> AsyncIterator[DatabaseProxy]:
    """A proxy before `port` of 127.0.0.1, for the body of the `async with`."""
    proxy = DatabaseProxy(port)
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        proxy.port = listeners[0].socket.getsockname()[1]
        nursery.start_soon(trio.serve_listeners, proxy.handle, listeners)
        try:
            yield proxy
        finally:
            nursery.cancel_scope.cancel()
