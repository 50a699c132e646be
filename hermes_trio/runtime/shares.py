"""Limits that all nodes of a store share: each publishes its spending with its heartbeat, and adds the spending of the others.

Spending does not read the store. A node therefore knows what the others spent up to two heartbeats ago, and that is the bound: until then
each of them may spend as if it were alone. Over longer times they spend together what one node may spend alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, cast, final

TOLD_KEYS: Final = 200
"""Keys in one heartbeat: the busiest ones."""

WINDOWS: Final = 3
"""Heartbeats that include a key after it was spent from: one of them may be lost."""

KEPT_KEYS: Final = 10_000


@final
class SharedSpending:
    """The spending from one limit, by key. `heard(key, amount)` is called with the spending of other nodes."""

    def __init__(self, heard: Callable[[str, int], None]) -> None:
        self._heard = heard
        self._spent: Counter[str] = Counter()
        self._windows: list[Counter[str]] = [Counter()]
        self._known: dict[str, dict[str, int]] | None = None

    def spend(self, key: str) -> None:
        """Count one unit that was spent on this node."""
        if key not in self._spent and len(self._spent) >= KEPT_KEYS:
            # All counts restart together: a node that has seen a larger number treats a smaller one as a restart.
            self._spent.clear()
        self._spent[key] += 1
        self._windows[-1][key] += 1

    def say(self) -> dict[str, int]:
        """Return what this node has spent since it started, for the keys that were spent from recently."""
        busy = sum(self._windows, Counter[str]())
        self._windows = [*self._windows[1 - WINDOWS :], Counter[str]()]
        return {key: self._spent[key] for key, _ in busy.most_common(TOLD_KEYS)}

    def hear(self, said: Mapping[str, Any]) -> None:
        """Add the published spending of the other nodes, by incarnation. Spending from before this node started is not counted."""
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
