"""How long to wait before connecting again, and when to give up."""

from __future__ import annotations

import math
import random
from typing import final

import msgspec
import trio

from hermes_trio.messaging.errors import PlatformError

# A connection that lived this many first delays was a good one.
STABLE_FACTOR = 10


@final
class Backoff(msgspec.Struct, frozen=True):
    """Exponential delays with jitter, for fewer than `attempts` failures in a row.

    After that the failure is the owner's: short faults are retried here, long ones belong to a supervisor that
    backs off for minutes and can be seen doing so.
    """

    first: float = 1.0
    cap: float = 30.0
    attempts: int = 6

    def delay(self, failures: int) -> float:
        """Return the seconds to wait after this many failures in a row, at least 1."""
        full = min(self.cap, self.first * 2.0 ** (failures - 1))
        return full * (0.5 + random.random() / 2)


@final
class Reconnection:
    """Counts the failed attempts of a connection, and computes the delay before the next one."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._failures = 0
        self._short_connections = 0
        self._ready_at = -math.inf
        self.count = 0

    def ready(self) -> None:
        """Record that a connection is up."""
        self._failures = 0
        self._ready_at = trio.current_time()

    def lost(self) -> float:
        """Record that a connection has ended; return the delay before the next one: none, unless connections keep breaking."""
        self.count += 1
        if trio.current_time() - self._ready_at > STABLE_FACTOR * self._backoff.first:
            self._short_connections = 0
        self._short_connections += 1
        return 0.0 if self._short_connections == 1 else self._backoff.delay(self._short_connections - 1)

    def failed(self, error: PlatformError) -> float:
        """Record a failed attempt; return the delay before the next one. Raises the error if it is permanent or one too many."""
        self.count += 1
        self._failures += 1
        if error.permanent or self._failures >= self._backoff.attempts:
            raise error
        return max(self._backoff.delay(self._failures), error.retry_after or 0.0)
