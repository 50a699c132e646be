"""How long a connection may keep the server waiting, without a timer for each.

Every connection carries the moment at which its current wait is over (`due`); moving it is one assignment. One task,
`Connections.run`, checks all of them a few times within the shortest timeout and ends those that are late. While there
is no connection it sleeps without a deadline. It must outlive the connections, since it is also what ends a stalled
write that may not be cancelled.
"""

from __future__ import annotations

from typing import Protocol, final

import trio

# Ticks per shortest timeout: a wait ends at most a quarter of itself late.
_TICKS = 4
_SHORTEST_TICK, _LONGEST_TICK = 0.01, 1.0
# A loop that was blocked for this many ticks has itself to blame; clients get one more tick.
_BLOCKED_TICKS = 3


class Waiting(Protocol):
    """A connection, as far as its time limit is concerned."""

    due: float

    def expire(self) -> None:
        """End the wait that is over. Must not block and must not remove the connection at once."""
        ...

    def dismiss(self) -> None:
        """Close now if nothing is under way: the server stops."""
        ...

    def sever(self) -> None:
        """Break off what is under way, shielded or not: the time limit is over."""
        ...


@final
class Connections:
    """All open connections, and the task that ends those whose wait is over."""

    def __init__(self, *timeouts: float) -> None:
        self._tick = min(_LONGEST_TICK, max(_SHORTEST_TICK, min(timeouts) / _TICKS))
        self._members: set[Waiting] = set()
        self._arrival = trio.Event()
        self._empty = trio.Event()
        self.room = trio.Event()
        """Set when a connection closes; a task that waits for room puts a new event here first."""
        self.now = 0.0
        """The trio clock, as of the last tick: precise enough for timeouts, and free to read."""

    def __len__(self) -> int:
        return len(self._members)

    def add(self, member: Waiting) -> None:
        """Add an open connection; it stays until `remove`."""
        if not self._members:
            self.now = trio.current_time()
            self._arrival.set()
        self._members.add(member)

    def remove(self, member: Waiting) -> None:
        """Remove a closed connection."""
        self._members.discard(member)
        self.room.set()
        if not self._members:
            self._empty.set()

    def dismiss(self) -> None:
        """Ask every connection to end when it can."""
        for member in self._members:
            member.dismiss()

    def sever(self) -> None:
        """Break off every connection."""
        for member in self._members:
            member.sever()

    async def wait_empty(self) -> None:
        """Return when no connection is open. Cancellation has no effect on the connections."""
        while self._members:
            self._empty = trio.Event()
            await self._empty.wait()

    async def run(self) -> None:
        """End late connections until cancelled."""
        excused = False
        while True:
            if not self._members:
                self._arrival = trio.Event()
                await self._arrival.wait()
            await trio.sleep(self._tick)
            now = trio.current_time()
            blocked = now - self.now > _BLOCKED_TICKS * self._tick
            self.now = now
            excused = blocked and not excused
            if excused:
                continue
            for member in self._members:
                if member.due < now:
                    member.expire()
