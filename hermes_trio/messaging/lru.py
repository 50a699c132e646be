"""What an adapter remembers between two events, and may forget: names, channels, the threads that the agent takes part in.

Bounded, in memory, oldest first out. Nothing that must not be lost belongs here.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Generic, TypeVar

__all__ = ["LruMap"]

REMEMBERED: Final = 10_000

K = TypeVar("K")
V = TypeVar("V")


class LruMap(Generic[K, V]):
    """A map with a bound."""

    def __init__(self, size: int = REMEMBERED) -> None:
        self._size = size
        self._known: OrderedDict[K, V] = OrderedDict()

    def __contains__(self, key: K) -> bool:
        return key in self._known

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: K) -> V | None:
        """What is remembered, which keeps it longer."""
        if key not in self._known:
            return None
        self._known.move_to_end(key)
        return self._known[key]

    def note(self, key: K, value: V) -> None:
        """Remember this, and forget the oldest if there is too much."""
        self._known[key] = value
        self._known.move_to_end(key)
        while len(self._known) > self._size:
            self._known.popitem(last=False)
