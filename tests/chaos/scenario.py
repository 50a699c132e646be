"""One scenario: a cluster under load, something that goes wrong, calm, and the judgement."""

from __future__ import annotations

import signal
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio

from tests.postgres_server import PostgresServer

from .cluster import LEASE, Cluster, open_cluster
from .judge import judge, open_rows
from .load import Load

WARM_SECONDS = 1.5
CALM_SECONDS = 90.0

REPORTS: list[str] = []
"""A line of figures for each scenario, printed at the end."""


@attrs.define
class Scenario:
    """What a test does things to, and what it measures."""

    cluster: Cluster
    load: Load
    name: str
    takeovers: list[float] = attrs.field(factory=list[float])
    """Seconds from the moment at which a node went silent to the removal of its row."""
    expected_losses: int = 0
    """How often a node had to give its lease up by what the test did."""
    notes: dict[str, Any] = attrs.field(factory=dict[str, Any])
    at_calm: Callable[[], Awaitable[None]] | None = None
    """Called when all is calm and judged, while the nodes still run."""
    violations: list[str] = attrs.field(factory=list[str])
    """What the judge found; known after the body of the scenario."""

    def report(self) -> str:
        """The figures in one line."""
        ledger = self.load.ledger
        taken = ", ".join(f"{seconds:.2f}" for seconds in self.takeovers)
        late = sum(seconds > LEASE + 1 for seconds in self.takeovers)
        starved = max(0, self.cluster.losses() - self.expected_losses)
        parts = [
            f"{self.name}: {len(ledger.answered)} chats answered, {len(ledger.runs)} runs promised, {len(ledger.ends)} ends told,"
            f" {len(ledger.written)} messages to the bot",
            f"{ledger.statuses[503]} refused with 503, {ledger.broken} connections broken",
            *([f"taken over after {taken} s ({late} later than {LEASE + 1:g} s)"] if taken else []),
            f"{starved} starved nodes taken over",
            *(f"{value} {name}" for name, value in self.notes.items()),
            f"{len(self.violations)} violations",
        ]
        return "; ".join(parts)


@asynccontextmanager
async def chaos(
    server: PostgresServer, folder: Path, name: str, *, clients: dict[str, int] | None = None, **cluster_options: Any
) -> AsyncIterator[Scenario]:
    """A cluster under load for the body of the `async with`. Leaving it restores everything, waits for calm, and judges; the caller looks at `violations`."""
    async with open_cluster(server, folder, **cluster_options) as cluster, trio.open_nursery() as nursery:
        load = Load(cluster, zlib.crc32(name.encode()))
        load.start(nursery, **(clients or {}))
        scenario = Scenario(cluster, load, name)
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
        if scenario.at_calm is not None:
            await scenario.at_calm()
        REPORTS.append(scenario.report())
        if scenario.violations:
            REPORTS.extend(f"    {violation[:300]}" for violation in scenario.violations[:10])
        nursery.cancel_scope.cancel()


async def restore(cluster: Cluster) -> None:
    """Let everything work again: networks, paused nodes, dead nodes."""
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
    """Fail with what the judge found, and what the nodes said last."""
    assert not scenario.violations, "\n".join([*scenario.violations[:20], scenario.cluster.tails()])
