"""Accepting connections: every waiting one per wake-up, and patiently when the descriptor table is full.

Trio's own listener accepts one connection per scheduler pass, which is what the slowest client waits for when many
arrive at once. `accept_forever` empties the queue each time. With no descriptor left it waits for a connection to
close instead of spinning on a socket that stays readable.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import trio

from hermes_trio.http.server.open_connections import Connections

# Accepting is cheap but not free; after so many the connections already accepted get their turn.
_ACCEPTS_PER_TURN = 128
_FULL = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
# A connection that waits for longer in the queue of another process is taken from it.
_LEFT_SECONDS = 0.25
# Other parts of the process can free descriptors, too, without a signal to this task.
_LOOK_AGAIN = 0.5


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open descriptors to the hard one; returns the limit now in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            return soft
    return hard


def _pair(address: tuple[Any, ...]) -> tuple[str, int]:
    return str(address[0]), int(address[1])


def addresses_of(sock: socket.socket) -> tuple[tuple[str, int] | None, tuple[str, int] | None]:
    """Return the client's and the server's side of an accepted socket, as ASGI wants them; None for a Unix socket.

    :raises OSError: if the client has already disconnected.
    """
    if sock.family == socket.AF_UNIX:
        return None, None
    return _pair(sock.getpeername()), _pair(sock.getsockname())


def bind_of(listener: socket.socket) -> str:
    """Return the address of a listening socket, as it would be written in `bind`."""
    address = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{address}"
    host, port = _pair(address)
    return f"[{host}]:{port}" if listener.family == socket.AF_INET6 else f"{host}:{port}"


def accept_waiting(listener: socket.socket, accept: Callable[[socket.socket], None]) -> bool:
    """Accept connections that wait now; false when there was no descriptor for the next one."""
    for _ in range(_ACCEPTS_PER_TURN):
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno in _FULL:
                return False
            # The client gave up while it waited in the queue; the next one may be fine.
            continue
        sock.setblocking(False)
        accept(sock)
    return True


async def accept_forever(
    listener: socket.socket, accept: Callable[[socket.socket], None], connections: Connections
) -> None:
    """Accept connections until cancelled. `accept` must take the socket over without blocking; the listener stays
    open.
    """
    while True:
        await trio.lowlevel.wait_readable(listener)
        if not accept_waiting(listener, accept):
            connections.room = trio.Event()
            with trio.move_on_after(_LOOK_AGAIN):
                await connections.room.wait()


@contextmanager
def open_copies(descriptors: Sequence[int]) -> Generator[list[socket.socket]]:
    """Open copies of inherited listening sockets for the body of the `with`."""
    copies = [socket.socket(fileno=os.dup(descriptor)) for descriptor in descriptors]
    try:
        for copy in copies:
            copy.setblocking(False)
        yield copies
    finally:
        for copy in copies:
            copy.close()


async def accept_left(listeners: Sequence[socket.socket], accept: Callable[[socket.socket], None]) -> None:
    """Accept, until cancelled, the connections that other processes leave waiting in the queues of their sockets.

    The kernel chooses a socket for each connection, whether its process accepts or not: one that is being restarted, or is blocked, must not delay its
    share of the clients.
    """
    looked = select.poll()
    for listener in listeners:
        looked.register(listener, select.POLLIN)
    waited: set[int] = set()
    while True:
        await trio.sleep(_LEFT_SECONDS)
        waiting = {descriptor for descriptor, _ in looked.poll(0)}
        for listener in listeners:
            if listener.fileno() in waiting & waited:
                accept_waiting(listener, accept)
        waited = waiting
