"""The processes that nodes start: noted while they run, so that one that outlives its node is found although nothing leads to it any more."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

__all__ = ["Descendants"]


def _status(pid: int) -> tuple[str, int, str] | None:
    """Return the state, the parent and the time of the start of a process; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1]), fields[19]


class Descendants:
    """All processes that were seen below some others."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, str]] = set()

    def __len__(self) -> int:
        return len(self._seen)

    def note(self, roots: Iterable[int]) -> None:
        """Remember these processes and everything below them."""
        children: dict[int, list[int]] = defaultdict(list)
        starts: dict[int, str] = {}
        for name in os.listdir("/proc"):
            if name.isdecimal() and (found := _status(int(name))) is not None:
                children[found[1]].append(int(name))
                starts[int(name)] = found[2]
        waiting = [root for root in roots if root in starts]
        while waiting:
            pid = waiting.pop()
            self._seen.add((pid, starts[pid]))
            waiting += children[pid]

    def left(self) -> list[str]:
        """Return the command lines of those that still run."""
        found: list[str] = []
        for pid, start in self._seen:
            now = _status(pid)
            if now is not None and now[2] == start and now[0] not in "ZX":
                with suppress(OSError):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found.append(f"{pid} {words.strip()[:200]}")
        return found
