"""The soak with several nodes on one PostgreSQL: `make soak ARGS="--nodes 3"`. A node is killed every 20 s under load, and started again.

Afterwards: nothing acknowledged is lost or doubled, every run has one end, nothing was delivered twice, no row is open or without an owner; then SIGTERM: each
node drains and exits with 0, and no process that a node has started and no node's row is left.
"""

from __future__ import annotations

import random
import signal
import tempfile
from pathlib import Path
from typing import Any

import attrs
import trio
from rich.progress import Progress

from bench.report import Report, progress
from hermes_trio.store.postgres.link import open_link
from hermes_trio.store.postgres.schema import migrate_schema
from tests.chaos.cluster import Cluster
from tests.chaos.scenario import Scenario, chaos
from tests.postgres_server import PostgresServer, postgres_server

KILL_SECONDS = 20.0
JOBS_OF = 7
"""The user whose jobs are long."""
CLIENTS = {"chats": 6, "runs": 6, "people": 3, "approvals": 1, "hooks": 1, "jobs": 2, "talks": 2, "pages": 1}
LONG_JOB = "!bg sleep 45"
"""A background process for each kill, which outlives it if it runs on another node."""


@attrs.define
class Outcome:
    """What was seen."""

    scenario: Scenario | None = None
    line: str = ""
    kills: int = 0
    exits: list[int] = attrs.field(factory=list[int])
    rows_left: list[dict[str, Any]] = attrs.field(factory=list[dict[str, Any]])


async def soak_nodes(server: PostgresServer, folder: Path, count: int, seconds: float, bar: Progress) -> Outcome:
    """Load the nodes, with a kill every 20 s; then wait until they are idle, and end them."""
    async with open_link(server.url("prepared"), "prepared") as link:
        await migrate_schema(link, "prepared")
    found = Outcome()
    names = tuple(f"node-{number}" for number in range(count))
    task = bar.add_task(f"{count} nodes under load", total=int(seconds))
    choice = random.Random(1)
    async with chaos(server, folder, f"soak with {count} nodes", names=names, clients=CLIENTS) as scenario:
        found.scenario = scenario
        cluster = scenario.cluster
        cluster.telegram.add_private_chat(JOBS_OF)
        until = trio.current_time() + seconds
        while (now := trio.current_time()) < until:
            await trio.sleep(min(KILL_SECONDS, until - now))
            bar.update(task, completed=int(seconds - max(0.0, until - trio.current_time())))
            if trio.current_time() < until:
                cluster.telegram.say(LONG_JOB, user_id=JOBS_OF)
                await trio.sleep(1)
                await _kill_one(scenario, choice)
                found.kills += 1
        scenario.at_calm = lambda: _end(cluster, found)
    found.line = scenario.report()
    return found


async def _kill_one(scenario: Scenario, choice: random.Random) -> None:
    cluster = scenario.cluster
    victim = choice.choice(cluster.nodes)
    before = (await cluster.incarnations()).get(victim.name, [])
    starts = victim.output.count("listens on")
    await victim.kill()
    for incarnation in before:
        scenario.takeovers.append(await cluster.until_gone(incarnation, victim))
    victim.start()
    await victim.wait_ready(starts + 1)


async def _end(cluster: Cluster, found: Outcome) -> None:
    """Send SIGTERM to all idle nodes."""
    for node in cluster.nodes:
        node.signal(signal.SIGTERM)
    found.exits = [await node.wait_ended() for node in cluster.nodes]
    # The binding of a session to a node outlives the node, so that the model can be told what was lost.
    found.rows_left = await cluster.rows(
        "SELECT name FROM hermes_trio.nodes UNION ALL SELECT name FROM hermes_trio.leases WHERE name NOT LIKE 'host %'"
    )


def main(count: int, seconds: float, report: Report) -> int:
    """Run it; 1 if something is left or was lost."""
    with (
        progress() as bar,
        tempfile.TemporaryDirectory(prefix="hermes-trio-soak-") as folder,
        postgres_server() as server,
    ):
        server.execute("CREATE DATABASE prepared OWNER keeper")
        found = trio.run(soak_nodes, server, Path(folder), count, seconds, bar)
    scenario = found.scenario
    assert scenario is not None
    ledger = scenario.load.ledger
    print(found.line)
    for violation in scenario.violations[:20]:
        print(f"violation: {violation}")
    report.figures |= {
        "seconds": seconds,
        "kills": found.kills,
        "takeovers": [round(one.seconds, 2) for one in scenario.takeovers],
        "answered": len(ledger.answered),
        "runs": len(ledger.runs),
        "written_to_the_bot": len(ledger.written),
        "violations": len(scenario.violations),
        "exits": found.exits,
        "processes": len(scenario.processes),
    }
    promised = len(ledger.answered) + len(ledger.runs) + len(ledger.written)
    report.bound(f"{found.kills} nodes killed, {len(scenario.takeovers)} taken over", bool(found.kills))
    report.bound(
        f"{promised:,} promises, {len(scenario.violations)} not kept", promised > 0 and not scenario.violations
    )
    report.bound(f"SIGTERM: exits {found.exits}", found.exits == [0] * count)
    left = scenario.processes.left()
    report.bound(
        f"{len(left)} of {len(scenario.processes)} processes left", len(scenario.processes) > count and not left
    )
    report.bound(f"{len(found.rows_left)} rows of nodes and leases left", not found.rows_left)
    return report.finish(strict=True)
