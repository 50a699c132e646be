"""Nodes: several owners of one store, each fenced when it is gone, and what only one of them may have at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from hermes_trio.runtime.errors import Fenced, SessionHeld
from hermes_trio.runtime.outcome import RunStatus
from hermes_trio.runtime.ports import (
    ANSWER_TOPIC,
    APPROVAL_TOPIC,
    KEY_TOPIC,
    LEASE_TOPIC,
    NODE_TOPIC,
    REQUEST_TOPIC,
    RUN_TOPIC,
    SESSION_TOPIC,
    EventRow,
    NodeRequest,
)
from hermes_trio.store import SqliteStore, open_store
from hermes_trio.store.records import ApprovalChoice, NewApproval
from hermes_trio.store.sqlite.nodes import ANSWER_SECONDS
from hermes_trio.store.sqlite.rows import many

from .conftest import Clock, PostgresBackend
from .turns import KEY, finish, job, message, run, start


@asynccontextmanager
async def _two_in_memory(clock: Clock) -> AsyncIterator[tuple[SqliteStore, SqliteStore]]:
    async with (
        open_store(None, clock=clock) as base,
        base.shared("a", lease_seconds=15) as one,
        base.shared("b", lease_seconds=15) as two,
    ):
        yield one, two


@asynccontextmanager
async def _two_on_postgres(backend: PostgresBackend) -> AsyncIterator[tuple[Any, Any]]:
    async with (
        backend.open(node_name="a", lease_seconds=15) as one,
        backend.open(node_name="b", lease_seconds=15) as two,
    ):
        yield one, two


@pytest.fixture(params=["memory", pytest.param("postgres", marks=pytest.mark.slow)])
def shared_database(request: pytest.FixtureRequest, clock: Clock) -> PostgresBackend | None:
    """A PostgreSQL database, or None for one in memory."""
    return PostgresBackend(request.getfixturevalue("postgres_url"), clock) if request.param == "postgres" else None


@pytest.fixture
async def nodes(shared_database: PostgresBackend | None, clock: Clock) -> AsyncIterator[tuple[Any, Any]]:
    """Two nodes on one store."""
    opened = _two_in_memory(clock) if shared_database is None else _two_on_postgres(shared_database)
    async with opened as (one, two):
        await one.recover("e1")
        await two.recover("e2")
        await trio.testing.wait_all_tasks_blocked(0.05)
        yield one, two


async def until(told: list[Any], count: int) -> None:
    """Wait until so many signals came: from another host they come a moment after the commit."""
    with trio.move_on_after(10):
        while len(told) < count:  # noqa: ASYNC110
            await trio.sleep(0.005)


Nodes = tuple[SqliteStore, SqliteStore]


async def test_the_one_owner_of_a_store_has_no_lease(clock: Clock) -> None:
    """A store that one owner opens at a time pays nothing: it has no nodes, and nothing expires."""
    async with open_store(None, clock=clock) as store:
        await store.recover("e1")
        clock.advance(1_000_000)
        assert (store.lease_seconds, await store.list_nodes()) == (0.0, [])
        assert await store.accept_message(message("one")) is not None


async def test_a_lease_is_renewed_until_it_has_expired(nodes: Nodes, clock: Clock) -> None:
    """A heartbeat within the lease renews it and says when the first neighbour expires; an expired lease is never renewed."""
    one, two = nodes
    clock.advance(10)
    assert await one.renew_node({"turns": 3}) == 5.0
    clock.advance(10)
    assert await one.renew_node({"turns": 3}) == -5.0
    with pytest.raises(Fenced):
        await two.renew_node({})
    assert [(node.name, node.info) for node in await one.list_nodes()] == [("a", {"turns": 3}), ("b", {})]


async def test_what_is_expired_but_not_taken_over_may_still_write(nodes: Nodes, clock: Clock) -> None:
    """The fence is the row, not the clock: until another node has reaped it, the node keeps what it holds."""
    _, two = nodes
    clock.advance(20)
    assert await two.accept_message(message("late")) is not None


async def test_a_node_that_was_taken_over_can_write_nothing(nodes: Nodes, clock: Clock) -> None:
    """Whatever it tries, `Fenced` comes back and the store is as it was."""
    one, two = nodes
    await one.begin_turn(start("t1", run=run()))
    clock.advance(10)
    await two.renew_node({})
    clock.advance(10)
    assert (await two.reap("e2")).runs_interrupted == 1
    for attempt in (
        one.accept_message(message("zombie")),
        one.finish_turn(finish(start("t1", run=run()), "a", "b")),
        one.renew_node({}),
        one.claim_lease("cron"),
        one.reap("e1"),
    ):
        with pytest.raises(Fenced):
            await attempt
    found = await two.get_run("run_1")
    assert found is not None
    assert (found.status, found.owner) == (RunStatus.FAILED, two.owner)
    assert await two.inbox_waiting() == 0


async def test_names_may_repeat_and_a_restart_is_a_new_node(nodes: Nodes, clock: Clock) -> None:
    """Two nodes with one name are two nodes; a new incarnation does not inherit the leases of the last one."""
    one, _ = nodes
    before = one.owner
    assert await one.claim_lease("cron")
    await one.begin_turn(start("t1", run=run()))
    clock.advance(1)
    recovery = await one.recover("e3")
    assert (recovery.runs_interrupted, one.owner != before) == (1, True)
    assert [node.name for node in await one.list_nodes()] == ["b", "a"]
    assert await one.claim_lease("cron")


async def test_a_singleton_is_held_by_one_node(nodes: Nodes, clock: Clock) -> None:
    """It moves when it is released, when its node leaves, and when its node is reaped; each time it is signalled."""
    one, two = nodes
    free: list[str] = []
    with two.subscribe(LEASE_TOPIC, free.append):
        assert await one.claim_lease("cron")
        assert await one.claim_lease("cron")
        assert not await two.claim_lease("cron")
        await two.release_lease("cron")
        assert (await two.list_nodes())[0].leases == ("cron",)
        await one.release_lease("cron")
        assert await two.claim_lease("cron")
        assert await one.claim_lease("index")
        clock.advance(10)
        await two.renew_node({})
        clock.advance(10)
        await two.reap("e2")
        assert await two.claim_lease("index")
        await two.leave_node("e2")
        await until(free, 4)
    assert free == ["cron", "index", "cron", "index"]


async def test_a_node_that_leaves_leaves_nothing_open(nodes: Nodes) -> None:
    """A planned stop gives everything an end at once: no lease has to run out."""
    one, two = nodes
    gone: list[str] = []
    with two.subscribe(NODE_TOPIC, gone.append):
        await one.begin_turn(start("t1", hold=True))
        await one.start_job(job())
        await one.leave_node("e1")
        await until(gone, 1)
    assert gone == [one.owner]
    assert [node.incarnation for node in await two.list_nodes()] == [two.owner]
    assert (await two.list_jobs())[0].state.value == "lost"
    await two.begin_turn(start("t2", hold=True))


async def test_a_request_leaves_no_text_behind(nodes: Nodes, clock: Clock) -> None:
    """What a request contains is gone when its node has taken it or has ended, and its answer some minutes later, also if no node asks again."""
    one, two = nodes

    async def kept(columns: str) -> list[Any]:
        return await two._read(lambda db: many(db, f"SELECT {columns} FROM node_requests ORDER BY n"))

    async def pass_time(seconds: float) -> None:
        while seconds > 0:
            clock.advance(min(seconds, 10))
            seconds -= 10
            await one.renew_node({})
            await two.renew_node({})

    for name in ("r1", "r2"):
        assert await two.ask_node(NodeRequest(id=name, node=one.owner, kind="http", payload={"body": "secret"}))
    for _ in range(2):
        assert [request.payload["body"] for request in await one.take_requests()] == ["secret", "secret"]
    assert await one.take_requests(["r1", "r2"]) == []
    assert await kept("payload") == [("{}",), ("{}",)]
    await pass_time(10)
    await one.answer_request("r1", {"data": "secret"})
    await pass_time(ANSWER_SECONDS)
    await two.maintain()
    found = await two.get_answer("r1")
    assert found is not None
    assert found.value["data"] == "secret"
    await pass_time(1)
    await two.maintain()
    assert await kept("id, state, answer") == [("r2", "taken", "{}")]
    assert await two.ask_node(NodeRequest(id="r3", node=one.owner, kind="http", payload={"body": "secret"}))
    await one.leave_node("e1")
    assert await kept("state, payload") == [("gone", "{}"), ("gone", "{}")]


async def test_a_request_is_answered_once_by_its_node_or_by_the_reaper(nodes: Nodes, clock: Clock) -> None:
    """It waits for the node, is handed out until the node says that it has it, and has one answer; of a node that is gone the answer is that it is gone."""
    one, two = nodes
    asked: list[str] = []
    answered: list[str] = []
    with one.subscribe(REQUEST_TOPIC, asked.append, one.owner), two.subscribe(ANSWER_TOPIC, answered.append):
        stop = NodeRequest(id="r1", node=one.owner, kind="stop", target="run_1", payload={"detail": "x"})
        assert await two.ask_node(stop)
        assert await two.ask_node(stop)
        assert await two.get_answer("r1") is None
        assert await one.take_requests() == [stop]
        assert await one.take_requests() == [stop]
        assert await one.take_requests(["r1"]) == []
        assert await one.take_requests() == []
        await one.answer_request("r1", {"ok": True})
        await one.answer_request("r1", {"ok": False})
        found = await two.get_answer("r1")
        assert found is not None
        assert (dict(found.value), found.gone) == ({"ok": True}, False)
        assert await two.ask_node(NodeRequest(id="r2", node=one.owner, kind="stop"))
        clock.advance(10)
        await two.renew_node({})
        clock.advance(10)
        await two.reap("e2")
        found = await two.get_answer("r2")
        assert found is not None
        assert found.gone
        assert not await two.ask_node(NodeRequest(id="r3", node=one.owner, kind="stop"))
        await until(answered, 2)
    assert (set(asked), answered) == ({one.owner}, ["r1", "r2"])


async def test_the_lock_of_a_session_is_a_row(nodes: Nodes, clock: Clock) -> None:
    """A turn of another node waits for the end of the one that has the session, which is signalled; a promise waits for nothing."""
    one, two = nodes
    free: list[str] = []
    with two.subscribe(SESSION_TOPIC, free.append, "s1"):
        first, second = start("t1", hold=True), start("t2", hold=True)
        await one.begin_turn(first)
        with pytest.raises(SessionHeld):
            await two.begin_turn(second)
        await two.begin_turn(msgspec.structs.replace(start(run=run()), turn_id=""))
        with pytest.raises(SessionHeld):
            await two.begin_turn(second)
        # A turn that was cancelled while it waited ends without the lock, and gives none back.
        await two.finish_turn(finish(second, "never mind"))
        with pytest.raises(SessionHeld):
            await two.begin_turn(start("t3", hold=True))
        await one.finish_turn(finish(first, "a", "b"))
        await two.begin_turn(start("t4", hold=True, run=run()))
        found = await one.get_run("run_1")
        assert found is not None
        assert found.status is RunStatus.RUNNING
        with pytest.raises(SessionHeld):
            await one.begin_turn(start("t5", hold=True))
        clock.advance(10)
        await one.renew_node({})
        clock.advance(10)
        await one.reap("e1")
        await one.begin_turn(start("t6", hold=True))
        await until(free, 2)
    # The third is the release by the reaper: a store may leave it out, because this node does not wait for the session then.
    assert free in (["s1", "s1"], ["s1", "s1", "s1"])


async def test_the_lane_of_a_key_lives_on_one_node(nodes: Nodes) -> None:
    """While one node works on a row of a key, or background work of it runs there, no other node takes the next row."""
    one, two = nodes
    await one.accept_message(message("one"))
    await two.accept_message(message("two"))
    (first,) = await one.take_inbox("telegram", KEY)
    assert await two.take_inbox("telegram", KEY) == []
    begun = start("t1", inbox_ids=(first.id,))
    await one.begin_turn(begun)
    await one.start_job(job(inbox=""))
    await one.finish_turn(finish(begun, "one", "done"))
    assert await two.take_inbox("telegram", KEY) == []
    assert [row.text for row in await one.take_inbox("telegram", KEY)] == ["two"]


async def test_a_run_an_approval_and_a_key_signal_on_every_node(nodes: Nodes) -> None:
    """A commit wakes tasks that wait on other nodes than the one that wrote."""
    one, two = nodes
    seen: list[tuple[str, str]] = []
    with (
        two.subscribe(RUN_TOPIC, lambda key: seen.append(("run", key))),
        two.subscribe(APPROVAL_TOPIC, lambda key: seen.append(("approval", key))),
        two.subscribe(KEY_TOPIC, lambda key: seen.append(("key", key))),
    ):
        begun = start("t1", run=run())
        await one.begin_turn(begun)
        await one.append_events([EventRow(run_id="run_1", epoch="e1", number=1, event={"event": "tool.started"})])
        await one.finish_turn(finish(begun, "a", "b"))
        await until(seen, 3)
        assert seen == [("run", "run_1")] * 3
        seen.clear()
        for number in range(4):
            await one.create_approval(
                NewApproval(id=f"a{number}", scope="c", command="rm", expires_at=9e9, asker="ann")
            )
        answered = await two.answer_approval("a0", ApprovalChoice.ONCE)
        assert answered is not None
        assert (answered.asker, answered.asked) == ("ann", True)
        await two.expire_approval("a1", reason="nobody saw it", asked=False)
        found = await one.get_approval("a1")
        assert found is not None
        assert (found.reason, found.asked) == ("nobody saw it", False)
        await one.end_approval_scope("c", reason="over")
        await until(seen, 4)
        assert sorted(seen) == [("approval", f"a{number}") for number in range(4)]
        seen.clear()
        key, _ = await one.create_api_key("k")
        await one.revoke_api_key(key.id)
        await one.revoke_api_key(key.id)
        await until(seen, 1)
        assert seen == [("key", key.id)]
