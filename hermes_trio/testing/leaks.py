"""Finds what a test on Trio leaves behind: compares tasks, trees of open runtimes, threads, child processes and descriptors with before.

The check runs after the test's body has returned and before anything is cancelled, so that the teardown cannot hide a leak.
"""

from __future__ import annotations

from typing import Final

import attrs
import trio
import trio.testing

from hermes_trio.runtime.runtime import Runtime
from hermes_trio.runtime.tree import Node

from .process_leaks import ProcessWatch, blame

IDLE_KINDS: Final = frozenset({"runtime", "abandoned", "turns", "supervisor", "asyncio"})
"""The nodes of an idle runtime's tree."""


@attrs.frozen
class LeakWatch:
    """The state before the body of the test."""

    tasks: frozenset[trio.lowlevel.Task]
    process: ProcessWatch
    nodes: frozenset[Node]
    runtimes: tuple[Runtime, ...]

    @classmethod
    def take(cls, runtimes: tuple[Runtime, ...]) -> LeakWatch:
        """Return the present state."""
        return cls(
            frozenset(_system_tasks()),
            ProcessWatch.take(),
            frozenset(node for runtime in runtimes for node in runtime.tree.root.walk()),
            runtimes,
        )

    async def check(self) -> None:
        """Raise `LeakError` with one line for each leak, and the trees."""
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
        loops = [runtime.core.asyncio_loop for runtime in self.runtimes]
        found += self.process.found(
            threads={loop.thread.ident for loop in loops if loop.thread is not None},
            descriptors=frozenset[int]().union(*(loop.descriptors for loop in loops)),
        )
        blame(found, "\n\n".join(runtime.tree.render() for runtime in self.runtimes))


def _system_tasks() -> set[trio.lowlevel.Task]:
    root = trio.lowlevel.current_root_task()
    if root is None:
        return set()
    return {task for nursery in root.child_nurseries for task in nursery.child_tasks if task.name not in _TRIO_TASKS}


_TRIO_TASKS: Final = frozenset({"<init>", "trio._core._entry_queue.EntryQueue.task"})
