"""One scenario: a cluster under load, a fault, recovery, and the check of the guarantees."""

from __future__ import annotations

import os
import signal
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio

from tests.postgres_server import PostgresServer

from .cluster import BESIDE_OTHERS, LEASE, Cluster, Takeover, open_cluster
from .judge import judge, open_rows
from .load import Load

WARM_SECONDS = 1.5
CALM_SECONDS = 90.0

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
    notes: dict[str, Any] = attrs.field(factory=dict[str, Any])
    at_calm: Callable[[], Awaitable[None]] | None = None
    """Called after the check, while the nodes still run."""
    disk: list[float] = attrs.field(factory=list[float])
    """How long writes to the disk took, in seconds: a node whose database waits for it can lose its lease."""
    late: list[float] = attrs.field(factory=list[float])
    """By how much the loop of this process was late, in seconds: the nodes reach their database through it."""
    violations: list[str] = attrs.field(factory=list[str])
    """The broken guarantees; known after the body of the scenario."""

    async def watch(self, path: Path) -> None:
        """Write to the disk five times a second, and note how long that takes, and how late this loop is."""

        def write() -> None:
            with path.open("wb") as file:
                file.write(b"x")
                file.flush()
                os.fsync(file.fileno())

        while True:
            began = trio.current_time()
            await trio.to_thread.run_sync(write)
            due = trio.current_time() + 0.2
            self.disk.append(due - 0.2 - began)
            await trio.sleep_until(due)
            self.late.append(trio.current_time() - due)

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
            f"{max(self.disk, default=0.0):.2f} s at most for a write to the disk, {max(self.late, default=0.0):.2f} s for the network",
            *(f"{value} {name}" for name, value in self.notes.items()),
            f"{len(self.violations)} violations",
        ]
        return "; ".join(parts)


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
        if scenario.at_calm is not None:
            await scenario.at_calm()
        REPORTS.append(scenario.report())
        if scenario.violations:
            REPORTS.extend(f"    {violation[:2000]}" for violation in scenario.violations[:10])
        nursery.cancel_scope.cancel()


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
