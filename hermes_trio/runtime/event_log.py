"""A run's event log: append-only, numbered, bounded. Every reader has its own cursor; reading destroys nothing.

The writer never waits. A reader that fell behind the oldest event in memory gets a `Gap` and continues from the oldest event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
import trio

DEFAULT_EVENTS: Final = 10_000
"""Events kept in memory per log; older ones are read from the store."""

DEFAULT_BYTES: Final = 8_388_608
"""The approximate length of text that a log keeps in memory; older events are read from the store."""

BATCH_BYTES: Final = 131_072
"""The length of text in one batch for a reader, which bounds the memory that a stalled reader holds."""


class LogEvent(msgspec.Struct, frozen=True):
    """An event and its number, from 1 on."""

    number: int
    data: Mapping[str, Any]
    size: int = 0
    """The length of its texts."""


class Gap(msgspec.Struct, frozen=True):
    """Events after `after` and before `oldest` are not in memory any more."""

    after: int
    oldest: int


class EventLog:
    """Events in order, at most `limit` of them and about `DEFAULT_BYTES`. Closed by the scope that owns the run; closing wakes every reader."""

    def __init__(self, limit: int = DEFAULT_EVENTS, *, on_append: Callable[[LogEvent], None] | None = None) -> None:
        self._events: deque[LogEvent] = deque()
        self._limit = limit
        self._bytes = 0
        self._on_append = on_append
        self._wake: trio.Event | None = None
        self.last: int = 0
        self.closed: bool = False

    @property
    def oldest(self) -> int:
        """Return the number of the oldest event still held; `last + 1` when there is none."""
        return self._events[0].number if self._events else self.last + 1

    def append(self, data: Mapping[str, Any]) -> LogEvent:
        """Add an event and wake the readers. Raises `ValueError` if the log is closed."""
        if self.closed:
            raise ValueError("the event log is closed; its terminal event has been written")
        self.last += 1
        size = sum([len(value) for value in data.values() if type(value) is str])
        event = LogEvent(self.last, data, size)
        self._events.append(event)
        self._bytes += size
        while len(self._events) > self._limit or (self._bytes > DEFAULT_BYTES and len(self._events) > 1):
            self._bytes -= self._events.popleft().size
        if self._on_append is not None:
            self._on_append(event)
        if self._wake is not None:
            self._wake.set()
            self._wake = None
        return event

    def close(self) -> None:
        """Close the log. Readers read the remaining events and then end."""
        self.closed = True
        if self._wake is not None:
            self._wake.set()
            self._wake = None

    def cursor(self, after: int = 0) -> EventCursor:
        """Return a reader that starts after event `after` (0: from the beginning)."""
        return EventCursor(self, after)

    def since(self, after: int, limit: int) -> list[LogEvent]:
        """Return up to `limit` events after `after`, without waiting."""
        if after >= self.last:
            return []
        skip = max(0, after - self.oldest + 1)
        if skip > len(self._events) // 2:
            # Near the end, walking back from the right is cheaper than skipping from the left.
            tail: list[LogEvent] = []
            for event in reversed(self._events):
                if event.number <= after:
                    break
                tail.append(event)
            tail.reverse()
            return tail[:limit]
        found: list[LogEvent] = []
        for event in self._events:
            if event.number > after:
                found.append(event)
                if len(found) >= limit:
                    break
        return found

    async def changed(self) -> None:
        """Wait for an append or for the close. Cancelling is harmless."""
        if self.closed:
            return
        if self._wake is None:
            self._wake = trio.Event()
        await self._wake.wait()


class EventCursor:
    """One reader's position in a log. `read` returns batches; an empty batch means that the log is closed and read to its end."""

    def __init__(self, log: EventLog, after: int) -> None:
        self._log = log
        self.after = after

    async def read(self, limit: int = 256) -> list[LogEvent | Gap]:
        """Wait for events and return them. A `Gap` comes first if events were dropped before they were read."""
        while True:
            oldest = self._log.oldest
            found: list[LogEvent | Gap] = []
            if self.after + 1 < oldest and self.after < self._log.last:
                found.append(Gap(self.after, oldest))
                self.after = oldest - 1
            events = _bounded(self._log.since(self.after, limit))
            if events:
                self.after = events[-1].number
                found.extend(events)
            if found or self._log.closed:
                return found
            await self._log.changed()


def _bounded(events: list[LogEvent]) -> list[LogEvent]:
    """Return the first events up to the size of one batch, and at least one."""
    size = 0
    for place, event in enumerate(events):
        size += event.size
        if size > BATCH_BYTES and place:
            return events[:place]
    return events
