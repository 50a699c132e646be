"""One scenario: a cluster under load, a fault, recovery, and the check of the guarantees."""

from __future__ import annotations

import itertools
import os
import signal
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio

from tests.postgres_server import PostgresServer

from .cluster import BESIDE_OTHERS, LEASE, ChaosNode, Cluster, Takeover, open_cluster
from .judge import judge, open_rows
from .load import Load
from .processes import Descendants

WARM_SECONDS = 1.5
CALM_SECONDS = 90.0
STALL_SECONDS = 0.5
"""A live node may be taken over only if the disk, the network of the test or the node was late by this much, or the node
waited for a processor twice as long."""
LEFT_SECONDS = 10.0
"""Seconds after the end of the nodes within which everything that they started must have ended."""

REPORTS: list[str] = []
"""A line of figures for each scenario, printed at the end."""


@attrs.define
class Scenario:
    """The cluster of a test, its load, and its measurements."""

    cluster: Cluster
    load: Load
    name: str
    takeovers: list[Takeover] = attrs.field(factory=list[Takeover])
    """The seconds from a node's last sign of life to the removal of its row."""
    expected_losses: int = 0
    """How many leases the faults of the test must cost."""
    losses: list[tuple[float, ChaosNode]] = attrs.field(factory=list[tuple[float, ChaosNode]])
    """When a node was found to have lost its lease, by the monotonic clock."""
    waits: list[tuple[float, ChaosNode, float]] = attrs.field(factory=list[tuple[float, ChaosNode, float]])
    """For how many seconds in all a process of a node had waited for a processor at a time of the monotonic clock."""
    processes: Descendants = attrs.field(factory=Descendants)
    """Everything that the nodes have started."""
    notes: dict[str, Any] = attrs.field(factory=dict[str, Any])
    at_calm: Callable[[], Awaitable[None]] | None = None
    """Called after the check, while the nodes still run."""
    disk: list[tuple[float, float]] = attrs.field(factory=list[tuple[float, float]])
    """When writes to the disk ended, by the monotonic clock, and how long they took, in seconds: a node whose database waits for them can lose its lease."""
    late: list[tuple[float, float]] = attrs.field(factory=list[tuple[float, float]])
    """When, and by how much, the loop of this process was late, in seconds: the nodes reach their database through it."""
    violations: list[str] = attrs.field(factory=list[str])
    """The broken guarantees; known after the body of the scenario."""

    async def watch(self, path: Path) -> None:
        """Write to the disk five times a second, and note how long that takes, how late this loop is, lost leases, and once a second all processes."""

        def write() -> None:
            with path.open("wb") as file:
                file.write(b"x")
                file.flush()
                os.fsync(file.fileno())

        for turn in itertools.count():
            began = trio.current_time()
            await trio.to_thread.run_sync(write)
            self.disk.append((time.monotonic(), trio.current_time() - began))
            if turn % 5 == 0:
                await self.note_processes()
            self.note_losses()
            due = trio.current_time() + 0.2
            await trio.sleep_until(due)
            self.late.append((time.monotonic(), trio.current_time() - due))

    async def note_processes(self) -> None:
        """Remember the processes of all nodes, and how long the nodes waited for a processor."""
        alive = [node for node in self.cluster.nodes if node.alive]
        self.waits += [(time.monotonic(), node, node.waited()) for node in alive]
        await trio.to_thread.run_sync(self.processes.note, [node.pid for node in alive])

    def note_losses(self) -> None:
        """Note which nodes have lost a lease since the last time."""
        for node in self.cluster.nodes:
            known = sum(one is node for _, one in self.losses)
            self.losses += [(time.monotonic(), node)] * (node.losses() - known)

    def unexplained_losses(self) -> list[str]:
        """Return the leases that were lost beyond the expected ones although the disk, the network and the node itself were in time.

        A node that a test stops or cuts off is late by that.
        """
        self.note_losses()
        if len(self.losses) <= self.expected_losses:
            return []
        found: list[str] = []
        for at, node in self.losses:
            since = at - 2 * LEASE - 1
            ours = [seconds for when, seconds in (*self.disk, *self.late) if since <= when <= at + seconds]
            stall = max((*ours, *node.stalls(since, at)), default=0.0)
            waits = [seconds for when, one, seconds in self.waits if one is node and since - 1 <= when <= at + 1]
            waited = max(0.0, waits[-1] - waits[0]) if waits else 0.0
            if stall < STALL_SECONDS and waited < 2 * STALL_SECONDS:
                found.append(
                    f"{node.name} lost its lease; nothing was later than {stall:.2f} s, and it waited for a processor for {waited:.2f} s"
                )
        return found

    def report(self) -> str:
        """Return the figures in one line."""
        ledger = self.load.ledger
        taken = ", ".join(f"{one.seconds:.2f}" for one in self.takeovers)
        late = [one for one in self.takeovers if one.late]
        causes = "".join(f"; its reaper was starved for {one.starved:.2f} s" for one in late if not one.unexplained)
        starved = max(0, self.cluster.losses() - self.expected_losses)
        parts = [
            f"{self.name}: {len(ledger.answered)} chats answered, {len(ledger.runs)} runs promised, {len(ledger.ends)} ends told,"
            f" {len(ledger.written)} messages of the bot, {ledger.approved} approvals answered",
            f"{ledger.statuses[503]} refused with 503, {ledger.broken} connections broken",
            *([f"taken over after {taken} s ({len(late)} later than {LEASE + 1:g} s{causes})"] if taken else []),
            f"{starved} starved nodes taken over",
            f"{longest(self.disk):.2f} s at most for a write to the disk, {longest(self.late):.2f} s for the network",
            *(f"{value} {name}" for name, value in self.notes.items()),
            f"{len(self.violations)} violations",
        ]
        return "; ".join(parts)


def longest(noted: list[tuple[float, float]]) -> float:
    """Return the longest of some durations."""
    return max((seconds for _, seconds in noted), default=0.0)


@asynccontextmanager
async def chaos(
    server: PostgresServer, folder: Path, name: str, *, clients: dict[str, int] | None = None, **cluster_options: Any
) -> AsyncIterator[Scenario]:
    """Run a cluster under load for the body of the `async with`; then heal all faults, wait for the load to end, and set `violations`."""
    async with open_cluster(server, folder, **cluster_options) as cluster, trio.open_nursery() as nursery:
        load = Load(cluster, zlib.crc32(name.encode()))
        load.start(nursery, clients or {})
        scenario = Scenario(cluster, load, name)
        nursery.start_soon(scenario.watch, folder / "disk")
        await trio.sleep(WARM_SECONDS)
        yield scenario
        await trio.sleep(WARM_SECONDS)
        await restore(cluster)
        await load.stop()

        async def calm() -> bool:
            return not await open_rows(cluster)

        try:
            await cluster.until("nothing is open", calm, CALM_SECONDS)
        except AssertionError as error:
            scenario.violations.append(str(error).partition("\n")[0])
        scenario.violations += await judge(cluster, load.ledger)
        if not BESIDE_OTHERS:
            scenario.violations += [
                f"taken over after {one.seconds:.2f} s, with a reaper that was late by {one.starved:.2f} s"
                for one in scenario.takeovers
                if one.unexplained
            ]
            scenario.violations += scenario.unexplained_losses()
        await scenario.note_processes()
        if scenario.at_calm is not None:
            await scenario.at_calm()
        nursery.cancel_scope.cancel()
    with trio.move_on_after(LEFT_SECONDS):
        while scenario.processes.left():  # noqa: ASYNC110
            await trio.sleep(0.1)
    scenario.violations += [f"left behind: {words}" for words in scenario.processes.left()]
    REPORTS.append(scenario.report())
    REPORTS.extend(f"    {violation[:2000]}" for violation in scenario.violations[:10])


async def restore(cluster: Cluster) -> None:
    """Heal all faults: partitions, paused nodes, killed nodes."""
    for node in cluster.nodes:
        node.proxy.lose = 0
        node.proxy.heal()
        if not node.alive:
            starts = node.output.count("listens on")
            node.start()
            await node.wait_ready(starts + 1)
        elif node.paused:
            node.signal(signal.SIGCONT)


async def must_hold(scenario: Scenario) -> None:
    """Fail with the broken guarantees and the last log lines of the nodes."""
    assert not scenario.violations, "\n".join([*scenario.violations[:20], scenario.cluster.tails()])
