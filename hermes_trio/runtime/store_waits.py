"""The bound of all waits for the store while a runtime drains or closes.

A wait for a commit is bounded by `finish_seconds`. Waits follow each other: the end of a turn is written after the ends of its children, then the jobs are
stopped, then the runtime closes. While a limit is set, the waits for a store that does not answer therefore share one `finish_seconds`, however
many they are; time in which nothing waits for the store does not count, and each written end renews it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio


class StoreWaits:
    """The waits of one runtime for its store: their number, and what is left for them while a limit is set."""

    def __init__(self, seconds: float, now: Callable[[], float]) -> None:
        self._seconds = seconds
        self._now = now
        self._waiting = 0
        self._since = 0.0
        """When the first of the waits in progress began, or what is left was last renewed."""
        self._left: float | None = None
        """What was left for waits at `_since`; None without a limit."""

    def limit(self) -> None:
        """Let all waits share one bound from now on. Does nothing if they share one already."""
        if self._left is None:
            self.renew()

    def renew(self) -> None:
        """Let all waits share one whole bound from now on, whatever earlier ones have used."""
        self._left, self._since = self._seconds, self._now()

    def lift(self) -> None:
        """Bound each wait by itself again."""
        self._left = None

    def answered(self) -> None:
        """Record that the store has written an end: under a limit, what is left is renewed."""
        if self._left is not None:
            self.renew()

    def until(self, seconds: float) -> float:
        """Return the time at which a wait that begins now ends: after `seconds`, or earlier if less is left."""
        now = self._now()
        if self._left is None:
            return now + seconds
        return min(now + seconds, (self._since if self._waiting else now) + self._left)

    def begin(self) -> float:
        """Begin a wait; return the time at which it has to end. The caller calls `end` then."""
        now = self._now()
        if not self._waiting:
            self._since = now
        self._waiting += 1
        return now + self._seconds if self._left is None else min(now + self._seconds, self._since + self._left)

    def end(self) -> None:
        """End a wait that `begin` began."""
        self._waiting -= 1
        if self._left is not None and not self._waiting:
            self._left = max(0.0, self._left - (self._now() - self._since))

    @contextmanager
    def bound(self, seconds: float | None = None, *, shield: bool = True) -> Iterator[trio.CancelScope]:
        """Bound the body of the `with`, which waits for the store, by `seconds` (`finish_seconds`) and by what is left."""
        until = self.begin()
        if seconds is not None:
            until = min(until, self._now() + seconds)
        try:
            with trio.CancelScope(shield=shield, deadline=until) as scope:
                yield scope
        finally:
            self.end()
