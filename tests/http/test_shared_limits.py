"""The limit on requests a minute, shared by three nodes on one store in memory, on virtual time: the stated bound, and the long run."""

from __future__ import annotations

import trio

from hermes_trio.http.errors import ApiError
from hermes_trio.http.limits import RateLimiter
from hermes_trio.runtime.membership import BEATS
from hermes_trio.runtime.shares import TOLD_KEYS, SharedSpending
from hermes_trio.runtime.turn import Turn
from hermes_trio.testing.nodes import Nodes, open_nodes

LEASE = 15.0
RATE = 1.0
BURST = 10
BEAT = LEASE / BEATS


async def idle(turn: Turn) -> str:
    """Never called."""
    raise AssertionError


def admits(limiter: RateLimiter, key: str = "k") -> bool:
    """Whether a node takes a request now."""
    try:
        limiter.check(key)
    except ApiError:
        return False
    return True


async def hammered(nodes: Nodes, seconds: float, *, shared: bool) -> list[float]:
    """When requests were let through, if a client tries all three nodes ten times a second."""
    let: list[float] = []
    async with nodes.open(idle, 3) as runtimes:
        limiters = [RateLimiter(int(RATE * 60), BURST, one.core.membership if shared else None) for one in runtimes]
        began = trio.current_time()
        while trio.current_time() - began < seconds:
            for limiter in limiters:
                while admits(limiter):
                    let.append(trio.current_time())
            await trio.sleep(0.1)
    return let


async def test_three_nodes_let_through_what_one_may(virtual_clock: object) -> None:
    """In any window of t seconds: three bursts, t seconds' worth, and two heartbeats' worth for each other node; in the long run what one node lets through.

    Without sharing it would be three times as much.
    """
    async with open_nodes(lease_seconds=LEASE) as nodes:
        let = await hammered(nodes, 600.0, shared=True)
        alone = await hammered(nodes, 600.0, shared=False)
    for first in range(0, len(let), 7):
        for last in range(first, len(let), 11):
            window = let[last] - let[first]
            assert last - first + 1 <= 3 * BURST + RATE * window + 2 * RATE * 2 * BEAT + 3
    assert 0.9 * 600 <= len(let) <= 600 + 3 * BURST + 2 * RATE * 2 * BEAT
    assert len(alone) >= 3 * 600


async def test_a_client_of_one_node_gets_all_of_its_limit(virtual_clock: object) -> None:
    """The other nodes take nothing from it; another key is not concerned; a node that comes later takes nothing of what was spent before."""
    async with open_nodes(lease_seconds=LEASE) as nodes, nodes.open(idle, 2) as (one, two):
        first, second = (RateLimiter(60, BURST, runtime.core.membership) for runtime in (one, two))
        assert sum(admits(first) for _ in range(20)) == BURST
        await trio.sleep(60)
        assert sum(admits(first) for _ in range(20)) == BURST
        await trio.sleep(2 * BEAT + 1)
        assert admits(second, "other")
        async with nodes.make(idle, "late") as three:
            third = RateLimiter(60, BURST, three.core.membership)
            await trio.sleep(2 * BEAT + 1)
            assert sum(admits(third) for _ in range(20)) == BURST


async def test_what_is_told_is_bounded_and_survives_lost_heartbeats() -> None:
    """A node publishes its busiest keys for three heartbeats; a node that missed one gets all of it with the next, and nothing twice."""
    heard: list[tuple[str, int]] = []
    here = SharedSpending(lambda key, amount: heard.append((key, amount)))
    there = SharedSpending(lambda key, amount: None)
    here.hear({"a": {}})
    for number in range(5 * TOLD_KEYS):
        there.spend(f"k{number}")
    for _ in range(3):
        there.spend("busy")
    assert len(there.say()) == TOLD_KEYS
    there.spend("busy")
    said = there.say()
    assert said["busy"] == 4
    here.hear({"a": {"busy": 4}})
    here.hear({"a": {"busy": 4}})
    here.hear({"a": {}})
    here.hear({"a": {"busy": 6}, "b": {"busy": 2}})
    assert heard == [("busy", 4), ("busy", 2), ("busy", 2)]
    for _ in range(4):
        said = there.say()
    assert said == {}
