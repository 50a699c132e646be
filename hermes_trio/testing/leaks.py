"""What did a test leave behind? Compares tasks, threads, child processes, descriptors and the trees of open runtimes with how they were before.

Judged when the test's body has returned and before anything is cancelled, so that tearing down cannot hide a leak.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import attrs
import trio
import trio.testing

from hermes_trio.runtime.runtime import Runtime
from hermes_trio.runtime.tree import Node

__all__ = ["LeakError", "LeakWatch", "watching"]

OS_GRACE: Final = 1.0
"""Real seconds that a thread, process or descriptor which is just ending may take to disappear."""

IDLE_KINDS: Final = frozenset({"runtime", "abandoned", "turns", "supervisor", "asyncio"})
"""Nodes that an idle runtime consists of."""


class LeakError(AssertionError):
    """A test left something behind."""


@attrs.frozen
class LeakWatch:
    """How things were before the body of the test."""

    tasks: frozenset[trio.lowlevel.Task]
    threads: frozenset[int]
    children: frozenset[int]
    descriptors: frozenset[tuple[int, str]]
    nodes: frozenset[Node]
    runtimes: tuple[Runtime, ...]

    @classmethod
    def take(cls, runtimes: tuple[Runtime, ...]) -> LeakWatch:
        """Look at everything."""
        gc.collect()
        return cls(
            frozenset(_system_tasks()),
            frozenset(_threads()),
            frozenset(_children()),
            frozenset(_descriptors()),
            frozenset(node for runtime in runtimes for node in runtime.tree.root.walk()),
            runtimes,
        )

    async def check(self) -> None:
        """Raise `LeakError` with one line for each thing that is still there, and the trees."""
        await trio.testing.wait_all_tasks_blocked()
        found = [f"task {task.name}" for task in _system_tasks() if task not in self.tasks]
        for runtime in self.runtimes:
            found += [
                f"{node.kind} {node.id}" + (f" waits on {node.waits_on}" if node.waits_on else "")
                for node in runtime.tree.root.walk()
                if node not in self.nodes and node.kind not in IDLE_KINDS
            ]
            if runtime.threads.in_flight:
                found.append(f"{runtime.threads.in_flight} calls in flight in worker threads")
        found += self._of_the_process()
        if found:
            trees = "\n\n".join(runtime.tree.render() for runtime in self.runtimes)
            lines = "\n".join(f"  - {line}" for line in found)
            raise LeakError(f"the test left something behind:\n{lines}" + (f"\n\nthe tree:\n{trees}" if trees else ""))

    def _of_the_process(self) -> list[str]:
        deadline = time.monotonic() + OS_GRACE
        while True:
            gc.collect()
            loops = [runtime.core.asyncio_loop for runtime in self.runtimes]
            owned = {loop.thread.ident for loop in loops if loop.thread is not None}
            used = frozenset[int]().union(*(loop.descriptors for loop in loops))
            found = [f"thread {name}" for ident, name in _threads().items() if ident not in self.threads | owned]
            found += [f"child process {pid} ({_command(pid)})" for pid in _children() if pid not in self.children]
            found += [
                f"descriptor {fd} -> {target}" for fd, target in _descriptors() - self.descriptors if fd not in used
            ]
            if not found or time.monotonic() > deadline:
                return found
            # A thread of Trio's cache or a dying process needs real time; the loop has nothing else to do now.
            time.sleep(0.01)


@contextmanager
def watching(runtimes: tuple[Runtime, ...]) -> Iterator[LeakWatch]:
    """The state before, for a later `check`."""
    yield LeakWatch.take(runtimes)


def _system_tasks() -> set[trio.lowlevel.Task]:
    root = trio.lowlevel.current_root_task()
    if root is None:
        return set()
    return {task for nursery in root.child_nurseries for task in nursery.child_tasks if task.name not in _TRIO_TASKS}


_TRIO_TASKS: Final = frozenset({"<init>", "trio._core._entry_queue.EntryQueue.task"})


def _threads() -> dict[int, str]:
    return {
        thread.ident: thread.name
        for thread in threading.enumerate()
        if thread.ident is not None and not thread.name.startswith(("Trio thread", "trio.", "MainThread", "execnet"))
    }


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
