"""HTTP/1.1 over Trio for streaming calls, at a cost that does not depend on how many are under way.

`ConnectionPool` owns the idle connections; a `ClientConnection` that is in use belongs to the call that took it, which gives
it back or aborts it. There is no background task, no lock and no scan: taking and giving back are one list
operation. `make bench-model` compares it with a shared HTTP client. Closing the pool closes the idle
connections at once, and those in use when they are given back.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Protocol, final

import httptools
import trio

from .dial import ConnectFailed, Dialer, Origin, Proxy

HEAD_LIMIT: Final = 64 * 1024
"""The maximum size of a response's status line and headers, in bytes."""

CHUNK: Final = 64 * 1024
"""Bytes read from a socket at a time."""

IDLE_LIMIT: Final = 256
"""The maximum number of idle connections to one origin."""

IDLE_SECONDS: Final = 30.0
"""Seconds for which an idle connection may be reused; most servers close theirs after 5 to 75 seconds."""


class ResponseBroken(Exception):
    """Raised when the peer closes the connection or sends invalid HTTP. `untouched` is true if no byte of a response had arrived."""

    def __init__(self, message: str, *, untouched: bool = False) -> None:
        super().__init__(message)
        self.untouched: bool = untouched


class _Parser(Protocol):
    def feed_data(self, data: bytes | bytearray) -> None: ...
    def get_status_code(self) -> int: ...
    def should_keep_alive(self) -> bool: ...


@final
class ClientConnection:
    """One HTTP/1.1 connection, used for one exchange at a time: `send`, then `read` until it returns nothing."""

    __slots__ = (
        "_body",
        "_complete",
        "_head_bytes",
        "_head_done",
        "_keep_alive",
        "_parser",
        "_socket",
        "_stream",
        "_until_close",
        "aborted",
        "headers",
        "idle_since",
        "origin",
        "proxy",
        "reused",
        "status",
    )

    def __init__(
        self, origin: Origin, stream: trio.abc.Stream, sock: trio.socket.SocketType, proxy: Proxy | None = None
    ) -> None:
        self.origin = origin
        self.proxy = proxy
        self.reused = False
        self.aborted = False
        self.idle_since = 0.0
        self.status = 0
        self.headers: dict[str, str] = {}
        self._stream = stream
        self._socket = sock
        self._parser: _Parser | None = None
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.headers = {}
        self._body: list[bytes] = []
        self._head_bytes = 0
        self._head_done = False
        self._complete = False
        self._keep_alive = False
        self._until_close = False

    async def send(self, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes) -> None:
        """Send a request and wait for the head of its response, which is then in `status` and `headers`.

        If the peer closes the connection before it has read the whole request, a response that it has sent is still
        read. Raises `ResponseBroken` if there is none. Cancelling leaves the connection unusable: abort it.
        """
        self._reset()
        protocol: Any = self
        self._parser = httptools.HttpResponseParser(protocol)
        plain_proxy = self.proxy if not self.origin.secure else None
        if plain_proxy:
            target = f"{self.origin}{target}"
        lines = [f"{method} {target} HTTP/1.1", f"Host: {self.origin.authority}"]
        if plain_proxy and plain_proxy.authorization:
            lines.append(f"Proxy-Authorization: {plain_proxy.authorization}")
        lines += [f"{name}: {value}" for name, value in headers]
        lines += [f"Content-Length: {len(body)}", "", ""]
        try:
            await self._stream.send_all("\r\n".join(lines).encode("latin-1") + body)
        except trio.BrokenResourceError:
            pass
        while not self._head_done:
            await self._receive()

    async def read(self) -> bytes:
        """Return the next piece of the body, or no bytes when the response is complete.

        Raises `ResponseBroken` if the response is cut off.
        """
        while not self._body and not self._complete:
            await self._receive()
        if len(self._body) == 1:
            return self._body.pop()
        data = b"".join(self._body)
        self._body.clear()
        return data

    @property
    def complete(self) -> bool:
        """Return whether the whole response has arrived and been read."""
        return self._complete and not self._body

    @property
    def reusable(self) -> bool:
        """Return whether another request may be sent on this connection."""
        return self.complete and self._keep_alive and not self.aborted

    def abort(self) -> None:
        """Close the socket at once, without a checkpoint. The peer sees a disconnect."""
        if not self.aborted:
            self.aborted = True
            self._parser = None
            self._body.clear()
            self._socket.close()

    def stale(self) -> bool:
        """Return whether an idle connection has been closed by its peer, or has unexpected bytes."""
        try:
            self._raw_peek()
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def _raw_peek(self) -> bytes:
        duplicate = socket.socket(fileno=self._socket.fileno())
        try:
            return duplicate.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        finally:
            duplicate.detach()

    async def _receive(self) -> None:
        try:
            data = await self._stream.receive_some(CHUNK)
        except trio.BrokenResourceError as error:
            raise self._broken(_cause(error)) from None
        if not data:
            if self._head_done and self._until_close:
                self._complete = True
                return
            raise self._broken("the connection was closed before the response was complete")
        parser = self._parser
        assert parser is not None
        if not self._head_done:
            self._head_bytes += len(data)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise ResponseBroken("the server switched to another protocol") from None
        except httptools.HttpParserError as error:
            raise ResponseBroken(f"the response is not valid HTTP: {error}") from None
        if not self._head_done and self._head_bytes > HEAD_LIMIT:
            raise ResponseBroken(f"the response's headers are longer than {HEAD_LIMIT} bytes")

    def _broken(self, why: str) -> ResponseBroken:
        return ResponseBroken(why, untouched=not self._head_bytes)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Handle a header (a callback of the parser)."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        """Handle the end of the head (a callback of the parser)."""
        parser = self._parser
        assert parser is not None
        self.status = parser.get_status_code()
        if 100 <= self.status < 200:
            self.headers = {}
            return
        self._head_done = True
        headers = self.headers
        self._until_close = (
            "content-length" not in headers and "chunked" not in headers.get("transfer-encoding", "").lower()
        )

    def on_body(self, body: bytes) -> None:
        """Handle a part of the body (a callback of the parser)."""
        self._body.append(body)

    def on_message_begin(self) -> None:
        """Handle bytes after the end of the response, which make the connection unusable (a callback of the parser)."""
        if self._complete:
            self._keep_alive = False

    def on_message_complete(self) -> None:
        """Handle the end of the response (a callback of the parser)."""
        if self._head_done:
            parser = self._parser
            assert parser is not None
            self._complete = True
            self._keep_alive = parser.should_keep_alive()


def _cause(error: BaseException) -> str:
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno == errno.ECONNRESET:
        return "the connection was reset by the server"
    return str(cause or error) or "the connection was lost"


@final
class ConnectionPool:
    """Keeps idle connections for reuse, by origin.

    It is an async context manager, and any number of models and tasks may share it.
    """

    def __init__(self, dialer: Dialer | None = None) -> None:
        self._dialer = dialer if dialer is not None else Dialer()
        self._idle: dict[Origin, list[ClientConnection]] = {}
        self._closed = False

    async def __aenter__(self) -> ConnectionPool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the idle connections. A connection that is given back later is closed, too."""
        self._closed = True
        for connections in self._idle.values():
            for connection in connections:
                connection.abort()
        self._idle.clear()

    async def take(self, origin: Origin, *, fresh: bool = False) -> ClientConnection:
        """Return a connection to the origin: an idle one, or a new one. Cancelling leaves nothing open.

        `fresh` is for a call whose idle connection turned out to be closed: the other idle connections to this origin
        are dropped, because the peer has probably closed them too, and a new one is opened. Raises `ConnectFailed`.
        """
        if self._closed:
            raise ConnectFailed("the connection pool has been closed")
        idle = self._idle.get(origin)
        oldest = trio.current_time() - IDLE_SECONDS
        while idle:
            connection = idle.pop()
            if not fresh and connection.idle_since >= oldest and not connection.stale():
                connection.reused = True
                return connection
            connection.abort()
        stream, sock = await self._dialer.connect(origin)
        return ClientConnection(origin, stream, sock, self._dialer.proxy_for(origin))

    def give_back(self, connection: ClientConnection) -> None:
        """End a call's use of a connection: keep it if another call can use it, close it if not."""
        idle = self._idle.setdefault(connection.origin, [])
        if not connection.reusable or self._closed or len(idle) >= IDLE_LIMIT:
            connection.abort()
            return
        connection.idle_since = trio.current_time()
        idle.append(connection)

    def statistics(self) -> Mapping[str, int]:
        """Return how many idle connections there are, by origin."""
        return {str(origin): len(connections) for origin, connections in self._idle.items() if connections}
