"""When is everything that one input started over? A `Settlement` counts it: turns, jobs, and notices that nobody has been told yet.

A run has two ends: its turn has ended, and it has *settled* (no descendant is alive and nothing of it is undelivered).
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from .budget import UNLIMITED, Allowance

__all__ = ["Settlement", "Settlements"]


class Settlement:
    """The count of what is alive below one input. Changed only by the scopes that open and close those things."""

    __slots__ = ("_early", "_event", "_on_settled", "allowance", "id", "jobs", "notices", "turns", "watched")

    def __init__(
        self, id: str, on_settled: Callable[[Settlement], None] | None = None, allowance: Allowance = UNLIMITED
    ) -> None:
        self.id = id
        self.turns = 0
        self.jobs = 0
        self.watched = 0
        self.notices: set[int] = set()
        self._early: set[int] = set()
        self.allowance = allowance
        self._on_settled = on_settled
        self._event: trio.Event | None = None

    @property
    def settled(self) -> bool:
        """Whether nothing is alive and nothing is undelivered."""
        return not (self.turns or self.jobs or self.notices)

    @property
    def promised(self) -> int:
        """How many completions somebody still has to be told: watched jobs that run, and notices that wait."""
        return self.watched + len(self.notices)

    def expect(self, notice: int) -> None:
        """A notice waits; it counts until it has been told, seen or given up (which may have happened already)."""
        if notice in self._early:
            self._early.discard(notice)
        else:
            self.notices.add(notice)

    def told(self, notice: int) -> None:
        """A notice does not wait any more. Saying so twice is harmless."""
        if notice in self.notices:
            self.notices.discard(notice)
            self.changed()
        else:
            self._early.add(notice)

    def changed(self) -> None:
        """To be called after lowering a count: tells whoever waits, once nothing is left."""
        if self.settled:
            if self._event is not None:
                self._event.set()
            if self._on_settled is not None:
                tell, self._on_settled = self._on_settled, None
                tell(self)

    async def wait(self) -> None:
        """Wait until settled. Cancelling abandons the wait."""
        while not self.settled:
            if self._event is None or self._event.is_set():
                self._event = trio.Event()
            await self._event.wait()


class Settlements:
    """Finds the `Settlement` of a notice again by its id, while one is open."""

    def __init__(self) -> None:
        self._open: dict[str, Settlement] = {}

    def __len__(self) -> int:
        return len(self._open)

    def keep(self, root: Settlement) -> None:
        """Remember a root that has a job; forgotten when it has settled (see `forget`)."""
        self._open[root.id] = root

    def find(self, id: str) -> Settlement | None:
        """The open root of this id."""
        return self._open.get(id)

    def forget_settled(self, root: Settlement) -> None:
        """Drop a root that has settled."""
        if root.settled:
            self._open.pop(root.id, None)
