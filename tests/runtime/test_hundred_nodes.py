"""A hundred nodes on one store, on virtual time: the arithmetic of docs/scale.md, and one takeover among so many."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import trio

from hermes_trio import SessionContext, Turn
from hermes_trio.runtime.membership import BEATS
from hermes_trio.runtime.ports import NewRun, TurnStart
from hermes_trio.store import SqliteStore
from hermes_trio.testing.nodes import open_nodes

pytestmark = pytest.mark.slow

NODES = 100
LEASE = 15.0


async def idle(turn: Turn) -> str:
    """Does nothing."""
    return ""


def count_calls(monkeypatch: pytest.MonkeyPatch, *verbs: str) -> Counter[str]:
    """Count the calls of verbs of the store, on all nodes."""
    calls: Counter[str] = Counter()
    for verb in verbs:
        original: Any = getattr(SqliteStore, verb)

        def counted(self: SqliteStore, *args: Any, verb: str = verb, original: Any = original, **named: Any) -> Any:
            calls[verb] += 1
            return original(self, *args, **named)

        monkeypatch.setattr(SqliteStore, verb, counted)
    return calls


async def test_a_hundred_nodes_cost_what_the_page_says_and_take_over_in_time(
    virtual_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 renewals and 20 reads of all nodes a second; a node that dies is reaped within a second of its lease, and a singleton runs on one node."""
    async with open_nodes(lease_seconds=LEASE) as nodes, nodes.open(idle, NODES) as runtimes:
        ran: list[str] = []

        async def alone(name: str) -> None:
            ran.append(name)
            await trio.sleep_forever()

        async with trio.open_nursery() as nursery:
            for runtime in runtimes[1:]:
                nursery.start_soon(runtime.membership.run_alone, "clock", lambda name=runtime: alone(name.store.owner))
            await trio.sleep(LEASE)
            assert len(ran) == 1
            calls = count_calls(monkeypatch, "renew_node", "list_nodes", "reap")
            await trio.sleep(60)
            a_second, one_more = BEATS * NODES / LEASE, NODES / 60  # a beat may fall on each end of the minute
            assert calls["renew_node"] / 60 == pytest.approx(a_second, abs=one_more)
            assert calls["list_nodes"] / 60 == pytest.approx(a_second, abs=one_more)
            assert calls["reap"] == 0
            async with nodes.store.shared("dies", lease_seconds=LEASE) as dies:
                await dies.recover("e")
                new = NewRun(run_id="lost", session_id="s")
                start = TurnStart(turn_id="", context=SessionContext(session_id="s"), source="x", run=new)
                await dies.begin_turn(start)
            await trio.sleep(LEASE + 1)
            row = await nodes.store.get_run("lost")
            assert row is not None
            assert (row.status.value, row.error_code) == ("failed", "interrupted")
            assert len(await runtimes[0].store.list_nodes()) == NODES
            assert calls["reap"] >= 1
            assert len(ran) == 1
            nursery.cancel_scope.cancel()
