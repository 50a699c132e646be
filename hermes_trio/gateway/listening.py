"""The listening address of a server, and the responses on it while a node that has lost its lease joins again."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import msgspec
import trio

from hermes_trio.config import Config
from hermes_trio.http.app import unavailable_app
from hermes_trio.http.server import ServerConfig, serve

BACKLOG: Final = 1024

_DESCRIPTOR: Final = "fd://"


class AddressUnusable(OSError):
    """Raised if the address cannot be bound: taken, not an address of this host, or not permitted. Retrying without a change does not help."""


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """How a server listens: on the configured address, or, with `bind`, on an inherited socket. Commands find it if it `announces` itself.

    `others` are the sockets of other workers of the same address, by descriptor: connections that wait there are accepted here if their worker does not.
    """

    bind: str = ""
    announces: bool = True
    others: tuple[int, ...] = ()

    def once(self) -> str:
        """Return what one server binds, and closes: a duplicate of an inherited socket."""
        if not self.bind.startswith(_DESCRIPTOR):
            return self.bind
        return f"{_DESCRIPTOR}{os.dup(int(self.bind.removeprefix(_DESCRIPTOR)))}"


CONFIGURED: Final = Listening()


def address_of(config: Config) -> str:
    """Return the address to bind, in Hypercorn's syntax."""
    host = config.server.host
    return (
        f"[{host}]:{config.server.port}" if ":" in host and not host.startswith("[") else f"{host}:{config.server.port}"
    )


def bind_address(config: Config) -> socket.socket:
    """Bind the configured address. Raises `AddressUnusable`."""
    try:
        return _bound(config.server.host.strip("[]"), config.server.port)
    except OSError as error:
        raise AddressUnusable(f"{address_of(config)} cannot be used: {error.strerror or error}") from error


def bind_for_workers(config: Config, count: int) -> list[socket.socket]:
    """Bind the configured address once for each worker: the kernel spreads connections evenly over the sockets. Raises `AddressUnusable`."""
    sockets = [bind_address(config)]
    host, port = sockets[0].getsockname()[:2]
    try:
        # Only now: another server that has the address, or wants it, is still recognised.
        sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        while len(sockets) < count:
            sockets.append(_bound(host, port, shared=True))
    except OSError as error:
        for sock in sockets:
            sock.close()
        raise AddressUnusable(f"{address_of(config)} cannot be used: {error.strerror or error}") from error
    return sockets


def _bound(host: str, port: int, *, shared: bool = False) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if shared else socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


@contextmanager
def kept_open(config: Config, listening: Listening) -> Iterator[Listening]:
    """Bind an address for the body of the `with`, so that it outlives one server: for a node that may have to join again. Raises `AddressUnusable`."""
    if listening.bind or not config.store.url:
        yield listening
        return
    with bind_address(config) as sock:
        yield msgspec.structs.replace(listening, bind=f"{_DESCRIPTOR}{sock.fileno()}")


class UnavailableServer:
    """Answers every request with 503 and `Retry-After` on the address of a server that is being reopened."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._shutdown: trio.Event | None = None

    async def begin(self, config: ServerConfig) -> None:
        """Start answering. Does nothing if it already does."""
        if self._shutdown is None:
            self._shutdown = trio.Event()
            await self._nursery.start(partial(serve, unavailable_app, config, shutdown=self._shutdown))

    def end(self) -> None:
        """Stop answering: another server listens."""
        if self._shutdown is not None:
            self._shutdown.set()
            self._shutdown = None
