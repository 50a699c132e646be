"""What happened in a world, in order: what the judge reads, what a story is told from, and what two runs of one seed are compared by."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import attrs

__all__ = ["Moment", "Trace"]


@attrs.frozen
class Moment:
    """One entry: the time since the world began, what kind of thing happened, and what it was."""

    at: float
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.at:10.3f} s  {self.kind:<16} {self.text}"


class Trace:
    """See the module."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._moments: list[Moment] = []

    def note(self, kind: str, text: str = "") -> None:
        """Something happens now."""
        self._moments.append(Moment(round(self._clock(), 6), kind, text))

    def __iter__(self) -> Iterator[Moment]:
        return iter(self._moments)

    def __len__(self) -> int:
        return len(self._moments)

    @property
    def last(self) -> Moment:
        """The newest moment."""
        return self._moments[-1]

    def of(self, kind: str) -> list[Moment]:
        """The moments of one kind."""
        return [one for one in self._moments if one.kind == kind]

    def text(self) -> str:
        """All of it, a line each."""
        return "\n".join(map(str, self._moments))

    def digest(self) -> str:
        """A number of the whole: equal traces have equal ones."""
        return hashlib.sha256(self.text().encode()).hexdigest()[:16]

    def story(self, last: int = 40) -> list[str]:
        """The last moments that a person would want to read: reads of the store are left out."""
        return [str(one) for one in self._moments if one.kind != "verb"][-last:]
