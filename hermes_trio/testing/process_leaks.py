"""Finds threads, child processes and descriptors that a test leaves behind. Uses no event loop, so it works for every kind of test."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Set
from typing import Final

import attrs

OS_GRACE: Final = 1.0
"""Real seconds that an ending thread, process or descriptor may take to disappear."""

POOLS: Final = ("Trio thread", "trio.", "MainThread", "execnet", "asyncio_", "AnyIO worker", "ThreadPoolExecutor-")
"""Threads that event loops and executors keep for the next call. They own them, not the test."""


class LeakError(AssertionError):
    """Raised if a test has leaked a task, thread, process or descriptor."""


@attrs.frozen
class ProcessWatch:
    """The threads, child processes and descriptors before the body of the test."""

    threads: frozenset[threading.Thread]
    """The thread objects, because idents are reused."""
    children: frozenset[int]
    descriptors: frozenset[tuple[int, str]]

    @classmethod
    def take(cls) -> ProcessWatch:
        """Return the present state."""
        gc.collect()
        return cls(frozenset(_threads()), frozenset(_children()), frozenset(_descriptors()))

    def found(self, *, threads: Set[int | None] = frozenset(), descriptors: Set[int] = frozenset()) -> list[str]:
        """Return one line for each leak that remains after its grace. `threads` and `descriptors` have an owner that outlives the test."""
        deadline = time.monotonic() + OS_GRACE
        while True:
            gc.collect()
            found = [f"thread {new.name}" for new in _threads() - self.threads if new.ident not in threads]
            found += [f"child process {pid} ({_command(pid)})" for pid in _children() if pid not in self.children]
            found += [
                f"descriptor {fd} -> {target}"
                for fd, target in _descriptors() - self.descriptors
                if fd not in descriptors
            ]
            if not found or time.monotonic() > deadline:
                return found
            # A thread of a pool or an ending process needs real time; the loop has nothing else to do now.
            time.sleep(0.01)

    def check(self) -> None:
        """Raise `LeakError` with one line for each leak."""
        blame(self.found())


def blame(found: list[str], trees: str = "") -> None:
    """Raise `LeakError` if a leak was found."""
    if found:
        lines = "\n".join(f"  - {line}" for line in found)
        raise LeakError(f"the test left something behind:\n{lines}" + (f"\n\nthe tree:\n{trees}" if trees else ""))


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.name.startswith(POOLS)}


def _children() -> set[int]:
    found: set[int] = set()
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:
        return found
    for thread in threads:
        try:
            with open(f"/proc/self/task/{thread}/children") as file:
                found.update(int(pid) for pid in file.read().split())
        except OSError:
            continue
    return found


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    except OSError:
        return "gone"


def _descriptors() -> set[tuple[int, str]]:
    found: set[tuple[int, str]] = set()
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return found
    for name in names:
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if not target.startswith("/proc/"):
            found.add((int(name), target))
    return found
