"""Detects clients that disconnect: one epoll set for all connections, read by one task.

A connection whose task runs the application does not read its socket, so it cannot notice that the client disconnects. Instead
every connection's descriptor is in one epoll set that asks for nothing but hang-up (`EPOLLRDHUP`, edge-triggered):
arriving bytes do not wake it, a closed or half-closed peer does, pipelined bytes or not. A half-close counts as a
disconnect.
"""

from __future__ import annotations

import select
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol, final

import trio

_EVENTS = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR | select.EPOLLET
_BATCH = 512


class Watched(Protocol):
    """A connection whose client may disconnect."""

    def disconnected(self) -> None:
        """Record that the client has closed its side. Called from the watching task; must not block."""
        ...


@final
class DisconnectWatch:
    """The epoll set and who is in it. `DisconnectWatch.open()` closes it."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, Watched] = {}

    @classmethod
    @contextmanager
    def open(cls) -> Generator[DisconnectWatch]:
        """Open an empty watch, closed at the end of the block; connections must be forgotten by then."""
        watch = cls()
        try:
            yield watch
        finally:
            watch._epoll.close()

    def watch(self, descriptor: int, watched: Watched) -> None:
        """Call `watched.disconnected` once when the peer of this socket disconnects, possibly at once."""
        self._epoll.register(descriptor, _EVENTS)
        self._watched[descriptor] = watched

    def forget(self, descriptor: int) -> None:
        """Stop watching; must be called before the descriptor is closed.

        Closing alone does not take a descriptor out of the set while a forked child still holds a copy of it.
        """
        del self._watched[descriptor]
        self._epoll.unregister(descriptor)

    async def run(self) -> None:
        """Report disconnects until cancelled."""
        epoll = self._epoll
        while True:
            await trio.lowlevel.wait_readable(epoll.fileno())
            for descriptor, _ in epoll.poll(0, _BATCH):
                watched = self._watched.get(descriptor)
                if watched is not None:
                    watched.disconnected()
