"""A bounded LRU map in memory, for what an adapter may forget: names, channels, threads."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Generic, TypeVar

REMEMBERED: Final = 10_000

K = TypeVar("K")
V = TypeVar("V")


class LruMap(Generic[K, V]):
    """A map with a maximum size."""

    def __init__(self, size: int = REMEMBERED) -> None:
        self._size = size
        self._known: OrderedDict[K, V] = OrderedDict()

    def __contains__(self, key: K) -> bool:
        return key in self._known

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: K) -> V | None:
        """Return the value and mark it as used."""
        if key not in self._known:
            return None
        self._known.move_to_end(key)
        return self._known[key]

    def note(self, key: K, value: V) -> None:
        """Set a value, and drop the least recently used one beyond the limit."""
        self._known[key] = value
        self._known.move_to_end(key)
        while len(self._known) > self._size:
            self._known.popitem(last=False)
