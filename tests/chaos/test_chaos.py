"""Three nodes of the real server under load, with everything that can go wrong between them and their database. `make test-chaos` runs all of it.

After each scenario: what was acknowledged is stored, nothing is doubled, each run has one end and the events 1..n, nobody was told twice, and no row is
owned by a node that is gone. Times of takeovers are reported, and judged by no clock: on a machine that starves its processes a node that lives may be
taken over, which is safe.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from hermes_trio.store.postgres.link import open_link
from hermes_trio.store.postgres.schema import migrate_schema
from tests.postgres_server import PostgresServer, postgres_server

from .cluster import LEASE, ChaosNode, Cluster
from .scenario import Scenario, chaos, must_hold

pytestmark = pytest.mark.chaos

SILENT = 2 * LEASE
"""How long a node is paused or cut off: well past its lease."""


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """A PostgreSQL that this test alone may kill."""

    async def prepare(url: str) -> None:
        async with open_link(url, "prepared") as link:
            await migrate_schema(link, "prepared")

    with postgres_server() as server:
        server.execute("CREATE DATABASE prepared OWNER keeper")
        trio.run(prepare, server.url("prepared"))
        yield server


async def incarnation_of(cluster: Cluster, node: ChaosNode) -> str:
    """The present incarnation of a node; one that a busy machine made lose its lease is waited for."""
    found: list[str] = []

    async def present() -> bool:
        found[:] = (await cluster.incarnations()).get(node.name, [])
        return bool(found)

    await cluster.until(f"{node.name} is there", present)
    return found[-1]


@pytest.mark.slow
async def test_nodes_are_killed_in_the_middle_of_turns(postgres: PostgresServer, tmp_path: Path) -> None:
    """kill -9 of two of three nodes, one after the other, while each runs turns and a background job of a conversation: taken over, told once."""
    async with chaos(postgres, tmp_path, "kill -9 of a node") as scenario:
        cluster = scenario.cluster
        cluster.telegram.add_private_chat(7)
        cluster.telegram.say("!bg sleep 600", user_id=7)
        await cluster.until("the job runs", lambda: jobs_of(cluster))
        [job] = await jobs_of(cluster)
        victims = sorted(cluster.nodes[1:], key=lambda node: node.name)
        owner = next(name for name, all in (await cluster.incarnations()).items() if job["owner"] in all)
        victims = [next(node for node in cluster.nodes if node.name == owner), *victims][:2]
        for victim in dict.fromkeys(victims):
            incarnation = await incarnation_of(cluster, victim)
            await victim.kill()
            scenario.takeovers.append(await cluster.until_gone(incarnation, trio.current_time()))
            victim.start()
            await victim.wait_ready(2)
        await cluster.until(
            "the loss is told", lambda: any("was lost" in message.text for message in cluster.telegram.messages)
        )
    await must_hold(scenario)
    assert sum("was lost" in message.text for message in cluster.telegram.messages if message.chat_id == 7) == 1


async def jobs_of(cluster: Cluster) -> list[dict[str, str]]:
    """The background jobs that run."""
    return await cluster.rows("SELECT job_id, owner FROM hermes_trio.jobs WHERE ended_at IS NULL")


async def outlast(scenario: Scenario, node: ChaosNode, incarnation: str) -> None:
    """Let a node that was stopped be taken over, and go on long after its lease: it joins again as a new node."""
    cluster = scenario.cluster
    scenario.takeovers.append(await cluster.until_gone(incarnation, trio.current_time()))
    await trio.sleep(LEASE)
    node.proxy.heal()
    node.signal(signal.SIGCONT)
    scenario.expected_losses += 1
    await joined_again(cluster, node, incarnation)


async def joined_again(cluster: Cluster, node: ChaosNode, incarnation: str) -> None:
    """Wait until a node is there as another one, in the same process."""

    async def anew() -> bool:
        found = (await cluster.incarnations()).get(node.name, [])
        return bool(found) and found[-1] != incarnation

    await cluster.until(f"{node.name} joins again", anew)
    assert node.alive


async def test_a_node_is_paused_while_it_is_idle(postgres: PostgresServer, tmp_path: Path) -> None:
    """SIGSTOP past the lease with nothing to do: taken over, and joined again without a restart."""
    async with chaos(postgres, tmp_path, "SIGSTOP, idle", clients={"chats": 0, "runs": 0, "people": 1}) as scenario:
        node = scenario.cluster.nodes[0]
        incarnation = await incarnation_of(scenario.cluster, node)
        node.signal(signal.SIGSTOP)
        await outlast(scenario, node, incarnation)
    await must_hold(scenario)


async def pause_in_unit(scenario: Scenario, node: ChaosNode, incarnation: str) -> None:
    """Stop a node between the beginning and the commit of a unit: behind a lock that is gone when it has stopped."""
    cluster = scenario.cluster
    mine = f"SELECT 1 FROM pg_stat_activity WHERE application_name = 'hermes-trio {incarnation}'"
    waits = f"{mine} AND wait_event_type = 'Lock'"
    locked = "BEGIN; LOCK TABLE hermes_trio.messages IN SHARE MODE; SELECT pg_sleep(0.6); COMMIT"
    for _ in range(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cluster.execute, locked)
            with trio.move_on_after(0.5):
                while not await cluster.rows(waits):  # noqa: ASYNC110
                    await trio.sleep(0.01)
            node.signal(signal.SIGSTOP)
        if await cluster.rows(f"{mine} AND state LIKE 'idle in transaction%'"):
            scenario.notes["pauses inside a unit"] = scenario.notes.get("pauses inside a unit", 0) + 1
            return
        node.signal(signal.SIGCONT)
        await trio.sleep(0.5)
    node.signal(signal.SIGSTOP)


async def test_a_node_is_paused_in_the_middle_of_a_unit(postgres: PostgresServer, tmp_path: Path) -> None:
    """SIGSTOP with a transaction open: whoever takes over ends it, and nothing of it is written afterwards."""
    async with chaos(postgres, tmp_path, "SIGSTOP, mid-unit", clients={"chats": 6, "runs": 6}) as scenario:
        for node in scenario.cluster.nodes[:2]:
            incarnation = await incarnation_of(scenario.cluster, node)
            await pause_in_unit(scenario, node, incarnation)
            await outlast(scenario, node, incarnation)
    await must_hold(scenario)


async def pause_half_sent(scenario: Scenario, node: ChaosNode) -> None:
    """Stop a node when half of what it sends has arrived."""
    cut = node.proxy.cut()
    with trio.move_on_after(30):
        await cut.wait()
        scenario.notes["units half sent"] = scenario.notes.get("units half sent", 0) + 1
    node.signal(signal.SIGSTOP)


async def test_a_node_is_paused_when_half_of_a_unit_was_sent(postgres: PostgresServer, tmp_path: Path) -> None:
    """SIGSTOP and half a message at the server: taken over, and the other half, which comes later, changes nothing."""
    async with chaos(postgres, tmp_path, "SIGSTOP, half sent", clients={"chats": 6, "runs": 6}) as scenario:
        for node in scenario.cluster.nodes[:2]:
            incarnation = await incarnation_of(scenario.cluster, node)
            await pause_half_sent(scenario, node)
            await outlast(scenario, node, incarnation)
    await must_hold(scenario)


async def test_the_database_is_killed_ten_times(own_server: PostgresServer, tmp_path: Path) -> None:
    """kill -9 of PostgreSQL, ten times within the lease: no restart of a node is needed, and nothing acknowledged is lost."""
    async with chaos(own_server, tmp_path, "kill -9 of the database, ten times") as scenario:
        for _ in range(10):
            await trio.to_thread.run_sync(own_server.stop, signal.SIGKILL)
            await trio.to_thread.run_sync(own_server.start)
            await trio.sleep(2.5)
        assert all(node.alive for node in scenario.cluster.nodes)
    await must_hold(scenario)


async def test_the_database_is_away_for_longer_than_the_lease(own_server: PostgresServer, tmp_path: Path) -> None:
    """All nodes lose their leases, answer 503 meanwhile, and serve again, as new nodes in the same processes, when it is back."""
    async with chaos(own_server, tmp_path, "the database away for three leases") as scenario:
        cluster = scenario.cluster
        await trio.to_thread.run_sync(own_server.stop, signal.SIGKILL)
        await trio.sleep(3 * LEASE)
        await cluster.until("all nodes give their leases up", lambda: cluster.losses() >= 3)
        scenario.expected_losses = cluster.losses()
        await trio.to_thread.run_sync(own_server.start)
        took = await cluster.until(
            "all serve again", lambda: all("has joined again" in node.output for node in cluster.nodes)
        )
        scenario.notes["s until all served again"] = f"{took:.1f}"
        assert all(node.alive for node in cluster.nodes)
    await must_hold(scenario)


async def test_connections_are_ended_at_random(postgres: PostgresServer, tmp_path: Path) -> None:
    """`pg_terminate_backend` of a random connection of a random node, again and again."""
    async with chaos(postgres, tmp_path, "pg_terminate_backend at random") as scenario:
        ended = 0
        while ended < 50:
            found = await scenario.cluster.execute(
                "SELECT pg_terminate_backend(pid) FROM (SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
                " AND application_name LIKE 'hermes-trio%' ORDER BY random() LIMIT 1) AS one"
            )
            ended += found == "t"
            await trio.sleep(random.uniform(0, 0.4))
        scenario.notes["connections ended"] = ended
    await must_hold(scenario)


async def lose_answers(scenario: Scenario, count: int) -> None:
    """Lose the answers to so many commits, on all nodes in turn."""
    proxies = [node.proxy for node in scenario.cluster.nodes]
    with trio.move_on_after(120):
        while sum(proxy.lost for proxy in proxies) < count:
            proxy = random.choice(proxies)
            if not proxy.lose:
                proxy.lose = 1
            await trio.sleep(0.1)
    scenario.notes["answers to commits lost"] = sum(proxy.lost for proxy in proxies)


async def test_answers_to_commits_are_lost(postgres: PostgresServer, tmp_path: Path) -> None:
    """Fifty commits whose answers never arrive: each is found to be there or is written again, once."""
    async with chaos(postgres, tmp_path, "answers to commits lost", clients={"chats": 6}) as scenario:
        await lose_answers(scenario, 50)
    await must_hold(scenario)


@pytest.mark.parametrize("directions", [("up",), ("down",), ("up", "down")], ids=["up", "down", "both"])
async def test_a_node_is_cut_off(postgres: PostgresServer, tmp_path: Path, directions: tuple[str, ...]) -> None:
    """Nothing from the node arrives, or nothing of the answers, or neither; what was held back arrives when the node has long been taken over."""
    async with chaos(postgres, tmp_path, f"partition, {' and '.join(directions)}") as scenario:
        cluster = scenario.cluster
        node = cluster.nodes[0]
        incarnation = await incarnation_of(cluster, node)
        node.proxy.hold(*directions)
        scenario.expected_losses += 1
        scenario.takeovers.append(await cluster.until_gone(incarnation, trio.current_time()))
        await trio.sleep(LEASE)
        node.proxy.heal()
        await joined_again(cluster, node, incarnation)
    await must_hold(scenario)


async def test_clocks_are_ten_minutes_off(postgres: PostgresServer, tmp_path: Path) -> None:
    """One host is ten minutes fast, one ten minutes slow: nothing is late, early or lost, and a killed node is taken over in time."""
    shifts = tuple({"CHAOS_CLOCK_SHIFT": shift} for shift in ("0", "600", "-600"))
    async with chaos(postgres, tmp_path, "clocks ten minutes off", environments=shifts) as scenario:
        cluster = scenario.cluster
        await trio.sleep(4)
        for node in cluster.nodes[1:]:
            incarnation = await incarnation_of(cluster, node)
            await node.kill()
            scenario.takeovers.append(await cluster.until_gone(incarnation, trio.current_time()))
            node.start()
            await node.wait_ready(2)
        written = await cluster.rows(
            "SELECT max(abs(created_at - extract(epoch FROM clock_timestamp()))) AS far FROM hermes_trio.runs"
        )
        scenario.notes["s at most between a run's time and the database's"] = round(written[0]["far"], 1)
        assert written[0]["far"] < 400
    await must_hold(scenario)


async def test_nodes_share_a_name(postgres: PostgresServer, tmp_path: Path) -> None:
    """Names are for people: three nodes of one name, one of them killed, work like any others."""
    async with chaos(postgres, tmp_path, "one name for all nodes", names=("same", "same", "same")) as scenario:
        cluster = scenario.cluster
        before = set((await cluster.incarnations())["same"])
        assert len(before) == 3
        since = trio.current_time()
        await cluster.nodes[0].kill()

        async def gone() -> bool:
            return not before <= set((await cluster.incarnations())["same"])

        await cluster.until("it is taken over", gone)
        scenario.takeovers.append(trio.current_time() - since)
    await must_hold(scenario)


async def test_a_node_is_started_again_within_its_lease(postgres: PostgresServer, tmp_path: Path) -> None:
    """Killed and started at once, and stopped and started at once: the new process is another node, and the old one is taken over all the same."""
    async with chaos(postgres, tmp_path, "restart within the lease") as scenario:
        cluster = scenario.cluster
        node = cluster.nodes[0]
        for starts, planned in ((2, False), (3, True)):
            incarnation = await incarnation_of(cluster, node)
            since = trio.current_time()
            if planned:
                node.signal(signal.SIGTERM)
                assert await node.wait_ended() == 0
                assert incarnation not in (await cluster.incarnations()).get(node.name, [])
                node.start()
            else:
                await node.kill()
                node.start()
                scenario.takeovers.append(await cluster.until_gone(incarnation, since))
            await node.wait_ready(starts)
    await must_hold(scenario)


async def test_all_notifications_are_lost(postgres: PostgresServer, tmp_path: Path) -> None:
    """No node ever hears another: everybody is told all the same, by the rows."""
    deaf = ({"CHAOS_LOSE_NOTIFICATIONS": "1"},) * 3
    async with chaos(postgres, tmp_path, "all notifications lost", environments=deaf) as scenario:
        await trio.sleep(8)
    await must_hold(scenario)


# -- the judge sees what it must -------------------------------------------------------------------------------------------------


async def test_without_the_fence_the_judge_finds_late_writes(postgres: PostgresServer, tmp_path: Path) -> None:
    """Without the fence a node that was paused past its lease writes after it was taken over."""
    async with chaos(postgres, tmp_path, "SABOTAGE: no fence", clients={"chats": 6, "runs": 6}) as scenario:
        # The marker of such a unit refers to the node's row, too.
        named = "PERFORM set_config('application_name', 'hermes-trio ' || node, false); RETURN"
        await scenario.cluster.sabotage("RAISE EXCEPTION 'the node % is gone', node USING ERRCODE = 'HT001'", named)
        for turn in range(8):
            node = scenario.cluster.nodes[turn % 2]
            incarnation = await incarnation_of(scenario.cluster, node)
            await pause_in_unit(scenario, node, incarnation)
            await scenario.cluster.until_gone(incarnation, trio.current_time())
            node.signal(signal.SIGCONT)
            await trio.sleep(2.0)
            if await scenario.cluster.rows("SELECT 1 FROM hermes_trio.late_writes"):
                break
    assert any("after it was taken over" in found for found in scenario.violations), scenario.report()


async def test_without_the_marker_the_judge_finds_doubled_writes(postgres: PostgresServer, tmp_path: Path) -> None:
    """Without the marker a commit whose answer was lost is written twice."""
    async with chaos(postgres, tmp_path, "SABOTAGE: no marker", clients={"chats": 6}) as scenario:
        await scenario.cluster.sabotage("WHERE u.number < excluded.number", "")
        await lose_answers(scenario, 60)
    assert any("stored 2 times" in found for found in scenario.violations), scenario.report()


async def test_without_the_poll_the_judge_finds_somebody_who_was_not_told(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    """Without the poll a lost notification leaves somebody waiting."""
    deaf = ({"CHAOS_LOSE_NOTIFICATIONS": "1", "CHAOS_NO_POLL": "1"},) * 3
    clients = {"chats": 0, "runs": 6, "people": 0}
    async with chaos(postgres, tmp_path, "SABOTAGE: no poll", environments=deaf, clients=clients) as scenario:
        await trio.sleep(2)
    assert any("s late" in found for found in scenario.violations), scenario.report()
