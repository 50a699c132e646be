"""The trace: the events of a world, in order. The invariants and `story` read it, and two runs of one seed are compared by it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Moment(NamedTuple):
    """One entry of a trace: seconds since the start of the world, a kind, and a text."""

    at: float
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.at:10.3f} s  {self.kind:<16} {self.text}"


class Trace:
    """The entries of one world, in order. Iterating over it yields them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._moments: list[Moment] = []

    def note(self, kind: str, text: str = "") -> None:
        """Append an entry with the present time."""
        self._moments.append(Moment(round(self._clock(), 6), kind, text))

    def __iter__(self) -> Iterator[Moment]:
        return iter(self._moments)

    def __len__(self) -> int:
        return len(self._moments)

    @property
    def last(self) -> Moment:
        """Return the newest entry."""
        return self._moments[-1]

    def of(self, kind: str) -> list[Moment]:
        """Return the entries of one kind."""
        return [one for one in self._moments if one.kind == kind]

    def text(self) -> str:
        """Return all entries, one a line."""
        return "\n".join(map(str, self._moments))

    def digest(self) -> str:
        """Return a digest of the text: equal traces have equal digests."""
        return hashlib.sha256(self.text().encode()).hexdigest()[:16]

    def story(self, last: int = 40) -> list[str]:
        """Return the last entries for a person to read, without reads of the store."""
        return [str(one) for one in self._moments if one.kind != "verb"][-last:]
