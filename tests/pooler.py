"""A pooler of database connections, as small as it can be: it answers the start of each connection itself, and gives it a connection to the server for each
transaction, as PgBouncer does in transaction mode, or for as long as it is open, as in session mode.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio

__all__ = ["pooler"]

ENCRYPTION = (80877103, 80877104)
"""Requests for TLS and GSSAPI, which are refused with one byte."""

PROTOCOL = 196608


class _Backend:
    """A connection to the server that is logged in, with what the server said at its start."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.greeting = b""
        self.owed = 0
        """How many of the ends of segments that were sent to it have not been answered."""


async def _exactly(stream: trio.SocketStream, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = await stream.receive_some(count - len(data))
        if not more:
            raise trio.BrokenResourceError("it was closed")
        data += more
    return data


async def _message(stream: trio.SocketStream) -> bytes:
    """Read one message: its type, its length and its body."""
    head = await _exactly(stream, 5)
    return head + await _exactly(stream, struct.unpack("!xi", head)[0] - 4)


class _Pooler:
    def __init__(self, socket: str, user: str, database: str, *, session: bool) -> None:
        self._socket = socket
        self._words = b"user\0%b\0database\0%b\0\0" % (user.encode(), database.encode())
        self._session = session
        self._idle: list[_Backend] = []
        self._numbers = itertools.count(1)

    async def _backend(self) -> _Backend:
        """Return the connection that became idle last, or a new one."""
        if self._idle:
            return self._idle.pop()
        backend = _Backend(await trio.open_unix_socket(self._socket))
        await backend.stream.send_all(struct.pack("!ii", 8 + len(self._words), PROTOCOL) + self._words)
        while (message := await _message(backend.stream))[:1] != b"Z":
            assert message[:1] in b"RSKN", message
            if message[:1] in b"RS":
                backend.greeting += message
        return backend

    async def handle(self, client: trio.SocketStream) -> None:
        """Serve one connection of a client."""
        async with client:
            try:
                while struct.unpack("!ii", start := await _exactly(client, 8))[1] in ENCRYPTION:
                    await client.send_all(b"N")
                await _exactly(client, struct.unpack("!ii", start)[0] - 8)
                backend = await self._backend()
                key = struct.pack("!ciii", b"K", 12, next(self._numbers), 0)
                await client.send_all(backend.greeting + key + b"Z\0\0\0\x05I")
                held: list[_Backend] = [backend]
                if not self._session:
                    self._idle.append(held.pop())
                try:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._serve, client, held, nursery)
                finally:
                    for backend in held:
                        await trio.aclose_forcefully(backend.stream)
            except* (trio.BrokenResourceError, trio.ClosedResourceError):
                pass

    async def close(self) -> None:
        """Close the connections that no client has."""
        for backend in self._idle:
            await trio.aclose_forcefully(backend.stream)

    async def _serve(self, client: trio.SocketStream, held: list[_Backend], nursery: trio.Nursery) -> None:
        while (message := await _message(client))[:1] != b"X":
            if not held:
                held.append(await self._backend())
            backend = held[0]
            backend.owed += message[:1] in b"QS"
            await backend.stream.send_all(message)
            if backend.owed == 1 and message[:1] in b"QS":
                nursery.start_soon(self._answer, client, held)
        nursery.cancel_scope.cancel()

    async def _answer(self, client: trio.SocketStream, held: list[_Backend]) -> None:
        """Forward the answers to the open segments; then give the connection back, unless a transaction is open."""
        backend = held[0]
        while backend.owed:
            message = await _message(backend.stream)
            if message[:1] == b"Z":
                backend.owed -= 1
                if message[5:] == b"I" and not backend.owed and not self._session:
                    self._idle.append(held.pop())
                    await client.send_all(message)
                    return
            await client.send_all(message)


@asynccontextmanager
async def pooler(socket: str, user: str, database: str, *, session: bool = False) -> AsyncIterator[int]:
    """Pool connections to a server that trusts its Unix socket, for the body of the `async with`; the value is the port on 127.0.0.1."""
    pool = _Pooler(socket, user, database, session=session)
    async with trio.open_nursery() as nursery:
        listeners: Any = await nursery.start(partial(trio.serve_tcp, pool.handle, 0, host="127.0.0.1"))
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()
    with trio.CancelScope(shield=True):
        await pool.close()
