"""Limits that all nodes of a store share: each counts what it spends, tells the others with its heartbeat, and counts what they have spent.

Nothing is asked of the store when something is spent. A node therefore knows what the others spent up to two heartbeats ago, and that is the bound: until then
each of them may spend as if it were alone. In the long run they spend together what one node may spend alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, cast, final

__all__ = ["SharedSpending"]

TOLD_KEYS: Final = 200
"""Keys that a heartbeat tells of: the busiest ones."""

WINDOWS: Final = 3
"""Heartbeats for which a key that was spent from is told of: one of them may be lost."""

KEPT_KEYS: Final = 10_000


@final
class SharedSpending:
    """What is spent from one limit, by key. `heard(key, amount)` is called with what other nodes have spent."""

    def __init__(self, heard: Callable[[str, int], None]) -> None:
        self._heard = heard
        self._spent: Counter[str] = Counter()
        self._windows: list[Counter[str]] = [Counter()]
        self._known: dict[str, dict[str, int]] | None = None

    def spend(self, key: str) -> None:
        """One more was spent here."""
        if key not in self._spent and len(self._spent) >= KEPT_KEYS:
            # Forgotten by everybody at once: who has heard of a larger number takes the smaller one for a new beginning.
            self._spent.clear()
        self._spent[key] += 1
        self._windows[-1][key] += 1

    def say(self) -> dict[str, int]:
        """What this node has spent since it began, of the keys that were spent from lately."""
        busy = sum(self._windows, Counter[str]())
        self._windows = [*self._windows[1 - WINDOWS :], Counter[str]()]
        return {key: self._spent[key] for key, _ in busy.most_common(TOLD_KEYS)}

    def hear(self, said: Mapping[str, Any]) -> None:
        """Take what the other nodes have said, by incarnation. What they had spent before this node came is not counted."""
        first = self._known is None
        known = self._known or {}
        kept: dict[str, dict[str, int]] = {}
        for node, counts in said.items():
            before = dict(known.get(node, {}))
            if isinstance(counts, Mapping):
                for key, count in cast("Mapping[str, int]", counts).items():
                    last = before.get(key, 0)
                    more = count - last if count >= last else count
                    before[key] = count
                    if more and not first:
                        self._heard(key, more)
            kept[node] = before
        self._known = kept
