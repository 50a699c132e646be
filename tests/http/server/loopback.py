"""A real server on loopback and a client that writes and reads raw bytes, for the tests of the serving layer."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import pytest
import trio

from hermes_trio.http.server import ASGIApp, ServerConfig, hypercorn_config, serve

BOUND = 30.0
"""How long one test's server may run; far more than any needs."""


@attrs.frozen
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes


@attrs.define
class RawClient:
    """One connection. Reads replies by their framing, whatever else is in the buffer."""

    stream: trio.SocketStream
    buffer: bytes = b""

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def _more(self) -> None:
        data = await self.stream.receive_some(65536)
        if not data:
            raise EOFError(self.buffer)
        self.buffer += data

    async def _until(self, mark: bytes) -> bytes:
        while mark not in self.buffer:
            await self._more()
        found, _, self.buffer = self.buffer.partition(mark)
        return found

    async def _exactly(self, size: int) -> bytes:
        while len(self.buffer) < size:
            await self._more()
        found, self.buffer = self.buffer[:size], self.buffer[size:]
        return found

    async def head(self) -> Reply:
        """The next response's head."""
        status_line, *lines = (await self._until(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        return Reply(int(status_line.split(" ")[1]), headers, b"")

    async def reply(self, *, to_head: bool = False) -> Reply:
        """The next whole response."""
        reply = await self.head()
        if to_head or reply.status in {100, 101, 204, 304}:
            return reply
        if "content-length" in reply.headers:
            body = await self._exactly(int(reply.headers["content-length"]))
        elif reply.headers.get("transfer-encoding") == "chunked":
            body = b""
            while chunk := await self.chunk():
                body += chunk
        else:
            body = await self.rest()
        return attrs.evolve(reply, body=body)

    async def chunk(self) -> bytes:
        """The next chunk of a chunked body; empty at its end."""
        size = int(await self._until(b"\r\n"), 16)
        data = await self._exactly(size + 2)
        return data[:-2]

    async def rest(self) -> bytes:
        """Everything until the server closes, a reset counting as closing."""
        try:
            while True:
                await self._more()
        except (EOFError, trio.BrokenResourceError):
            found, self.buffer = self.buffer, b""
            return found

    async def get(self, path: str, **headers: str) -> Reply:
        await self.send(request(path, **headers))
        return await self.reply()

    async def post(self, path: str, body: bytes) -> Reply:
        await self.send(request(path, "POST", body))
        return await self.reply()

    async def half_close(self) -> None:
        await self.stream.send_eof()

    async def close(self) -> None:
        await self.stream.aclose()

    async def reset(self) -> None:
        """Close without a good-bye."""
        self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await self.stream.aclose()


def request(path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> bytes:
    """The bytes of one ordinary request."""
    lines = [f"{method} {path} HTTP/1.1", "Host: test"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + (body or b"")


@attrs.define
class RunningServer:
    """A server under test; `stop` begins its shutdown and `ended` is set when `serve` has returned."""

    port: int
    address: str
    shutdown: trio.Event
    ended: trio.Event
    nursery: trio.Nursery
    clients: list[RawClient] = attrs.field(factory=list[RawClient])

    async def connect(self, *, receive_buffer: int | None = None) -> RawClient:
        sock = trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            await sock.connect(("127.0.0.1", self.port))
        except OSError:
            sock.close()
            raise
        client = RawClient(trio.SocketStream(sock))
        self.clients.append(client)
        return client

    async def stop(self) -> None:
        self.shutdown.set()
        await self.ended.wait()


def quiet_config(**settings: Any) -> ServerConfig:
    """A configuration on a free loopback port that logs nothing; Hypercorn's own settings are recognised by name."""
    hypercorn = hypercorn_config("127.0.0.1:0")
    hypercorn.errorlog = None
    ours = set(ServerConfig.__struct_fields__)
    for name in [name for name in settings if name not in ours]:
        assert hasattr(hypercorn, name), name
        setattr(hypercorn, name, settings.pop(name))
    return ServerConfig(hypercorn=hypercorn, **settings)


@asynccontextmanager
async def running(app: ASGIApp, *, fast: bool = True, **settings: Any) -> AsyncGenerator[RunningServer]:
    """Serve `app` for the block, then stop it; clients that the test left open are closed first."""
    config = quiet_config(fast_path=fast, **settings)
    shutdown, ended = trio.Event(), trio.Event()

    async def run(*, task_status: trio.TaskStatus[list[str]]) -> None:
        await serve(app, config, shutdown=shutdown, task_status=task_status)
        ended.set()

    with trio.fail_after(BOUND):
        async with trio.open_nursery() as nursery:
            addresses = await nursery.start(partial(run))
            address = addresses[0]
            server = RunningServer(
                0 if "unix:" in address else int(address.rsplit(":", 1)[1]), address, shutdown, ended, nursery
            )
            try:
                yield server
            finally:
                for client in server.clients:
                    client.stream.socket.close()
                shutdown.set()


def ends_with(kind: type[Exception]) -> pytest.RaisesGroup[Exception]:
    """The block ends with this error alone, in however many nested groups."""
    return pytest.RaisesGroup(kind, flatten_subgroups=True, allow_unwrapped=True)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that the kernel or another task brings about; bounded by the server's own bound."""
    while not condition():  # noqa: ASYNC110 - there is no event for what the kernel does
        await trio.sleep(0.001)
