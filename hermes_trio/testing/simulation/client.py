"""A client of a simulated gateway: HTTP/1.1 over a connection of the world. Each request has its own connection."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

import attrs
import h11
import msgspec
import trio


class NoAnswer(Exception):
    """Raised if no complete response came: the connection was refused or broke, or the time-out expired."""


class Connects(Protocol):
    """The server that a client connects to."""

    def connect(self) -> trio.SocketStream:
        """Open a connection. Raises `ConnectionRefusedError` if the server does not listen."""
        ...


@attrs.frozen
class Answer:
    """A complete response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """Return the decoded body, or None if it is not JSON."""
        try:
            return msgspec.json.decode(self.body)
        except msgspec.DecodeError:
            return None


@attrs.frozen
class StreamedEvent:
    """A server-sent event: its id and its decoded data."""

    id: str
    data: Any


class _Exchange:
    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.protocol = h11.Connection(h11.CLIENT)

    async def send(self, method: str, path: str, headers: Mapping[str, str], body: bytes, manner: str) -> None:
        given = [("Host", "gateway.localhost"), ("Connection", "close"), *headers.items()]
        given.append(("Content-Length", str(len(body))))
        data = self.protocol.send(h11.Request(method=method, target=path, headers=given)) or b""
        data += self.protocol.send(h11.Data(data=body)) or b""
        data += self.protocol.send(h11.EndOfMessage()) or b""
        if manner == "torn":
            await self.stream.send_all(data[: len(data) - max(1, len(body) // 2)])
            raise NoAnswer("left in the middle of the body")
        await self.stream.send_all(data)
        if manner == "half":
            await self.stream.send_eof()

    async def pull(self) -> Any:
        while (event := self.protocol.next_event()) is h11.NEED_DATA:
            self.protocol.receive_data(bytes(await self.stream.receive_some(65536)))
        return event


@asynccontextmanager
async def _exchange(
    server: Connects, method: str, path: str, headers: Mapping[str, str], body: bytes, manner: str = ""
) -> AsyncGenerator[tuple[_Exchange, int, dict[str, str]]]:
    await trio.lowlevel.checkpoint()
    try:
        stream = server.connect()
    except ConnectionRefusedError as error:
        raise NoAnswer("refused") from error
    try:
        exchange = _Exchange(stream)
        try:
            await exchange.send(method, path, headers, body, manner)
            head = await exchange.pull()
            while isinstance(head, h11.InformationalResponse):
                head = await exchange.pull()
            if not isinstance(head, h11.Response):
                raise NoAnswer("closed before the head")
            fields = {name.decode().lower(): value.decode("latin-1") for name, value in head.headers}
            yield exchange, head.status_code, fields
        except (trio.BrokenResourceError, trio.ClosedResourceError, h11.ProtocolError) as error:
            raise NoAnswer(type(error).__name__) from error
    finally:
        await trio.aclose_forcefully(stream)


async def request(
    server: Connects,
    method: str,
    path: str,
    *,
    json: Any = None,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    seconds: float = 60.0,
    manner: str = "",
) -> Answer:
    """Send a request and return the complete response. Raises `NoAnswer` if there is none within `seconds`. Cancelling it closes the connection.

    `manner` is `half` for a client that shuts down its side of the connection after the request, and `torn` for one that disconnects in the middle of the body.
    """
    fields = dict(headers or {})
    if json is not None:
        body = msgspec.json.encode(json)
        fields.setdefault("Content-Type", "application/json")
    with trio.move_on_after(seconds):
        async with _exchange(server, method, path, fields, body, manner) as (exchange, status, found):
            content = bytearray()
            while isinstance(event := await exchange.pull(), h11.Data):
                content += event.data
            if not isinstance(event, h11.EndOfMessage):
                raise NoAnswer("closed before the end")
            return Answer(status, found, bytes(content))
    raise NoAnswer(f"nothing within {seconds:g} s")


class EventSource:
    """Iterates over the events of one stream, in order. Made by `stream`."""

    def __init__(self, exchange: _Exchange) -> None:
        self._exchange = exchange
        self._text = ""
        self._ready: deque[StreamedEvent] = deque()

    def __aiter__(self) -> EventSource:
        return self

    async def __anext__(self) -> StreamedEvent:
        """Return the next event. Raises `NoAnswer` if the stream breaks off; its regular end ends the iteration."""
        while not self._ready:
            try:
                event = await self._exchange.pull()
            except (trio.BrokenResourceError, trio.ClosedResourceError, h11.ProtocolError) as error:
                raise NoAnswer(type(error).__name__) from error
            if isinstance(event, h11.EndOfMessage):
                raise StopAsyncIteration
            if not isinstance(event, h11.Data):
                raise NoAnswer("closed before the end")
            *blocks, self._text = (self._text + bytes(event.data).decode()).split("\n\n")
            self._ready.extend(found for block in blocks if (found := _event(block)) is not None)
        return self._ready.popleft()


@asynccontextmanager
async def stream(
    server: Connects, method: str, path: str, *, json: Any = None, headers: Mapping[str, str] | None = None
) -> AsyncGenerator[EventSource]:
    """Open a stream of events for the body of the `async with`; leaving it closes the connection. Raises `NoAnswer` if it is refused."""
    fields = dict(headers or {})
    body = b"" if json is None else msgspec.json.encode(json)
    if body:
        fields.setdefault("Content-Type", "application/json")
    async with _exchange(server, method, path, fields, body) as (exchange, status, _):
        if status != 200:
            raise NoAnswer(f"status {status}")
        yield EventSource(exchange)


def _event(block: str) -> StreamedEvent | None:
    id, data = "", ""
    for line in block.split("\n"):
        field, _, value = line.partition(": ")
        if field == "id":
            id = value
        elif field == "data":
            data = value
    if not data:
        return None
    return StreamedEvent(id, data if data == "[DONE]" else msgspec.json.decode(data))
