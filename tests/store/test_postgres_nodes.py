"""Several nodes on one PostgreSQL: nothing is handed out twice, no answer that is lost loses or doubles a write, no node writes after it was taken over.

Each promise has its counter-test: with the part of the database that keeps it taken out, the same load must break it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import product
from subprocess import PIPE
from typing import Any

import msgspec
import pytest
import trio

pytest.importorskip("psycopg", reason="the extra `postgres` is not installed")

from hermes_trio.runtime.errors import Fenced, SessionHeld
from hermes_trio.runtime.outcome import JobState
from hermes_trio.runtime.ports import JobFinish, Message, NewReply, NodeRequest, Recovery
from hermes_trio.store import AlreadyStarted, ApprovalChoice, NewApproval, NewSession, Page
from hermes_trio.store.errors import ForeignSession, StoreUnavailable
from hermes_trio.store.postgres import batches
from hermes_trio.store.postgres.errors import LinkBroken
from hermes_trio.store.postgres.link import open_link
from hermes_trio.store.postgres.locks import NODES as LOCK
from hermes_trio.store.postgres.locks import lock_number
from hermes_trio.store.postgres.reconnecting_link import ReconnectingLink
from hermes_trio.store.postgres.store import PostgresStore, open_postgres
from hermes_trio.store.records import CronState, InboxState, OutboxState
from tests.database_proxy import database_proxy
from tests.postgres_server import PostgresServer

from .paused_node import LEASE
from .turns import context, finish, job, message, notice, run, start

pytestmark = pytest.mark.slow

NODES = 4

WITHOUT_MARKER = """
CREATE OR REPLACE FUNCTION hermes_trio.begin_unit(node text, place text, counted bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM hermes_trio.nodes WHERE incarnation = node FOR KEY SHARE;
END $$
"""

WITHOUT_FENCE = """
CREATE OR REPLACE FUNCTION hermes_trio.begin_unit(node text, place text, counted bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN END $$
"""


@asynccontextmanager
async def some_nodes(url: str, count: int = NODES, **settings: Any) -> AsyncIterator[list[PostgresStore]]:
    """Several nodes on one database."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(open_postgres(url, node_name=f"n{number}", maintenance=False, **settings))
            for number in range(count)
        ]


async def at_once(nodes: list[PostgresStore], work: Callable[[PostgresStore], Awaitable[Any]]) -> list[Any]:
    """What each node answers to the same question, asked at the same time."""
    answers: list[Any] = [None] * len(nodes)

    async def ask(place: int, node: PostgresStore) -> None:
        try:
            answers[place] = await work(node)
        except Exception as error:
            answers[place] = error

    async with trio.open_nursery() as nursery:
        for place, node in enumerate(nodes):
            nursery.start_soon(ask, place, node)
    return answers


def deadlocks(server: PostgresServer, url: str) -> int:
    """How many deadlocks the server has counted in this database."""
    name = url.rpartition("/")[2]
    return int(
        server.execute(
            f"SELECT pg_stat_force_next_flush(); SELECT deadlocks FROM pg_stat_database WHERE datname = '{name}'"
        )
    )


async def test_messages_are_claimed_once(postgres: PostgresServer, postgres_url: str) -> None:
    """Four nodes work on the same forty lanes: each message has one turn, on one node, in the order of its lane."""
    begun: list[tuple[str, str]] = []
    async with some_nodes(postgres_url) as nodes:
        keys = [f"lane:{number}" for number in range(40)]
        for number in range(10):
            for key in keys:
                await nodes[number % NODES].accept_message(message(f"{number}", key=key))

        async def work(node: PostgresStore) -> None:
            while waiting := await node.waiting_sessions("telegram"):
                for key in waiting:
                    for row in await node.take_inbox("telegram", key):
                        opened = start(session_id=f"s {key}", key=key, inbox_ids=(row.id,), hold=True)
                        await node.begin_turn(opened)
                        begun.append((key, row.text))
                        await node.finish_turn(finish(opened, row.text, "done"))

        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(work, node)
        assert Counter(begun) == Counter({(key, f"{number}"): 1 for key in keys for number in range(10)})
        for key in keys:
            assert [text for lane, text in begun if lane == key] == [f"{number}" for number in range(10)]
        assert len(await nodes[0].list_inbox(InboxState.DELIVERED, Page(1_000))) == 400
        assert sum(node.units.deadlocks for node in nodes) == 0
    assert deadlocks(postgres, postgres_url) == 0


async def test_replies_are_claimed_once_and_in_order(postgres: PostgresServer, postgres_url: str) -> None:
    """Four nodes send for the same platform: each reply is handed out once, and a chat's replies one after the other."""
    sent: list[tuple[int, str]] = []
    async with some_nodes(postgres_url) as nodes:
        for number in range(8):
            await nodes[number % NODES].add_outbox(
                [NewReply(platform="telegram", target={"chat": chat}, text=f"{number}") for chat in range(30)]
            )

        async def work(node: PostgresStore) -> None:
            while await node.outbox_unsent():
                for row in await node.claim_outbox("telegram", limit=8):
                    sent.append((int(row.target["chat"]), row.text))
                    await trio.lowlevel.checkpoint()
                    await node.outbox_sent(row)

        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(work, node)
        assert Counter(sent) == Counter({(chat, f"{number}"): 1 for chat in range(30) for number in range(8)})
        for chat in range(30):
            assert [text for one, text in sent if one == chat] == [f"{number}" for number in range(8)]
        assert len(await nodes[0].list_outbox(OutboxState.SENT, Page(1_000))) == 240
    assert deadlocks(postgres, postgres_url) == 0


async def test_what_is_due_is_due_on_nodes_whose_clocks_differ(
    postgres: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts whose clocks are ten minutes off, one fast and one slow, agree with a third on what is due, what has expired and how old it is."""
    real = time.time
    async with AsyncExitStack() as stack:
        nodes: list[PostgresStore] = []
        for number, shift in enumerate((0.0, 600.0, -600.0)):
            monkeypatch.setattr(time, "time", lambda shift=shift: real() + shift)
            opened = open_postgres(postgres_url, node_name=f"n{number}", maintenance=False, clock=time.time)
            nodes.append(await stack.enter_async_context(opened))
        for writer in nodes:
            assert abs(writer.now() - real()) < 60
            for reader in nodes:
                platform = f"{writer.node_name} {reader.node_name}"
                for chat in ("now", "later"):
                    await writer.add_outbox([NewReply(platform=platform, target={"chat": chat}, text=chat)])
                for row in await writer.claim_outbox(platform, limit=8):
                    due = writer.now() + (-2.0 if row.text == "now" else 120.0)
                    await writer.outbox_retry(row, at=due, error="again")
                assert [row.text for row in await reader.claim_outbox(platform, limit=8)] == ["now"]
                soon, later = f"soon {platform}", f"later {platform}"
                _, valid = await writer.create_api_key(soon, expires_at=writer.now() + 120)
                _, expired = await writer.create_api_key(later, expires_at=writer.now() - 120)
                assert await reader.find_api_key(valid) is not None
                assert await reader.find_api_key(expired) is None
            assert await writer.renew_node({}) is not None
            assert all(60 > node.expires_at - writer.now() > -60 for node in await writer.list_nodes())


@asynccontextmanager
async def stopped_in_transaction(url: str, node: PostgresStore, statement: str, *given: str) -> AsyncIterator[None]:
    """A session of a node whose lease has expired, stopped in the middle of a transaction, for the body of the `async with`."""
    async with open_link(url, "stopped") as link:
        for sql in ("SET search_path TO hermes_trio", "BEGIN"):
            await link.run(sql)
        await link.run(statement, [text.encode() for text in given])
        yield


async def test_a_node_joins_beside_one_that_was_stopped_in_the_middle_of_a_unit(
    postgres: PostgresServer, postgres_url: str
) -> None:
    """A node that joins, reaps or leaves first ends the database sessions of expired nodes, and waits for none of their time-outs."""
    database = postgres_url.rpartition("/")[2]
    stopped_in = (
        "begin_unit($1, $2, 1000000)",
        f"begin_unit($1, $2, 1000000), pg_advisory_xact_lock({lock_number(LOCK)})",
    )
    for act, unit in product(("recover", "reap", "leave"), stopped_in):
        async with some_nodes(postgres_url, 2) as (one, two):
            await one.recover("one")
            await two.recover("two")
            async with stopped_in_transaction(postgres_url, one, f"SELECT {unit}", one.owner, "units"):
                postgres.execute(
                    f"UPDATE hermes_trio.nodes SET expires_at = 0 WHERE incarnation = '{one.owner}'", database
                )
                with trio.fail_after(7):  # less than the time for which a lock is waited for
                    await {"recover": two.recover, "reap": two.reap, "leave": two.leave_node}[act]("two")
                    if act != "leave":
                        assert [node.name for node in await two.list_nodes()] == [two.node_name]


async def test_the_session_that_renews_a_lease_can_be_told_by_its_node(
    postgres: PostgresServer, postgres_url: str
) -> None:
    """A node that is stopped in the middle of a heartbeat holds a lock on its own row: the node that takes over must end that session, too."""
    async with some_nodes(postgres_url, 1) as (node,):
        await node.recover("epoch")
        names = f"SELECT count(*) FROM pg_stat_activity WHERE application_name = 'hermes-trio {node.owner}'"
        assert postgres.execute(names) == "1"
        await node.renew_node({})
        await node.probe()
        assert postgres.execute(names) == "2"


async def test_a_heartbeat_that_is_cancelled_holds_nothing_afterwards(postgres_url: str) -> None:
    """A node that drains while a heartbeat is under way leaves at once: the transaction of the heartbeat ends with its caller."""
    async with some_nodes(postgres_url, 1) as (node,):
        await node.recover("epoch")
        async with stopped_in_transaction(
            postgres_url, node, "SELECT 1 FROM nodes WHERE incarnation = $1 FOR UPDATE", node.owner
        ):
            with trio.move_on_after(0.2) as bound:
                await node.renew_node({})
            assert bound.cancelled_caught
        with trio.fail_after(5):
            await node.leave_node("epoch")
            await node.recover("again")
            await node.renew_node({})


async def test_every_other_claim_has_one_winner(postgres: PostgresServer, postgres_url: str) -> None:
    """Slots, singletons, approvals, deliveries, idempotency keys, pairing codes, requests, sessions: four ask at once, one gets it."""
    async with some_nodes(postgres_url) as nodes:
        for number in range(25):
            await _claim_everything(nodes, f"{number}")
    assert deadlocks(postgres, postgres_url) == 0


async def _claim_everything(nodes: list[PostgresStore], name: str) -> None:
    first = nodes[0]
    assert (await at_once(nodes, lambda node: node.claim_cron_slot("job", float(name)))).count(True) == 1
    assert (await at_once(nodes, lambda node: node.claim_lease(name))).count(True) == 1
    await first.create_approval(NewApproval(id=name, scope=name, command="rm", expires_at=9e9))
    answers = await at_once(nodes, lambda node: node.answer_approval(name, ApprovalChoice.ONCE))
    assert sum(answer is not None for answer in answers) == 1
    taken = await at_once(nodes, lambda node: node.accept_delivery("hook", name, message(key=f"hook {name}")))
    assert sum(answer is not None for answer in taken) == 1
    runs = await at_once(
        nodes,
        lambda node: node.begin_turn(
            start(
                session_id=f"r {name} {node.node_name}",
                run=run(f"run {name} {node.node_name}", idempotency_key=name),
            )
        ),
    )
    assert [type(found) for found in runs if found is not None] == [AlreadyStarted] * 3
    await first.offer_pairing("telegram", name, user_id=name)
    users = await at_once(nodes, lambda node: node.redeem_pairing("telegram", name))
    assert sum(user is not None for user in users) == 1
    sessions = await at_once(nodes, lambda node: node.resolve_session(context("", f"key {name}"), source="telegram"))
    assert len(set(sessions)) == 1, sessions
    held = await at_once(nodes, lambda node: node.begin_turn(start(session_id=f"held {name}", hold=True)))
    assert [type(found) for found in held if found is not None] == [SessionHeld] * 3
    made = await at_once(nodes, lambda node: node.create_session(NewSession(id=f"made {name}", source="api")))
    assert sum(not isinstance(found, Exception) for found in made) == 1
    await nodes[1].ask_node(NodeRequest(id=f"request {name}", node=first.owner, kind="stop"))
    requests = await at_once([first] * NODES, lambda node: node.take_requests([f"request {name}"]))
    assert sum(len(found) for found in requests) == 0


async def test_every_verb_that_changes_a_row_once_has_one_winner(postgres: PostgresServer, postgres_url: str) -> None:
    """Hosts, sessions of tenants, deliveries, messages, slots, the ends of jobs and approvals, dead letters: four ask at once, one changes the row."""
    async with some_nodes(postgres_url) as nodes:
        for number in range(25):
            await _change_everything_once(nodes, f"{number}")
    assert deadlocks(postgres, postgres_url) == 0


async def _change_everything_once(nodes: list[PostgresStore], name: str) -> None:
    first = nodes[0]
    await first.create_session(NewSession(id=f"hosted {name}", source="api"))
    assert (await at_once(nodes, lambda node: node.claim_host(f"hosted {name}"))).count(True) == 1

    def claim(node: PostgresStore) -> Awaitable[Any]:
        tenant = "red" if nodes.index(node) % 2 else "blue"
        return node.claim_session(NewSession(id=f"claimed {name}", source="api", tenant=tenant))

    claimed = await at_once(nodes, claim)
    tenants = [found.tenant for found in claimed if not isinstance(found, ForeignSession)]
    assert tenants in (["red"] * 2, ["blue"] * 2), claimed

    def deliver(node: PostgresStore) -> Awaitable[Any]:
        if nodes.index(node) % 2:
            return node.record_delivery("hook", f"handled {name}")
        return node.accept_delivery("hook", f"handled {name}", message(key=f"handled {name}"))

    assert sum(bool(found) for found in await at_once(nodes, deliver)) == 1
    accepted = await at_once(nodes, lambda node: node.accept_message(message(key=f"m {name}", dedupe=f"d {name}")))
    assert sum(found is not None for found in accepted) == 1

    # A slot is begun by the node that has its message; a node that begins it after another one takes it over.
    slot = float(name)
    assert await first.claim_cron_slot("once", slot)
    begun = await at_once(nodes, lambda node: node.start_cron_slot("once", slot, session_id=f"s {node.node_name}"))
    assert True in begun
    (execution,) = [found for found in await first.list_cron_executions("once") if found.slot == slot]
    assert begun[[f"s {node.node_name}" for node in nodes].index(execution.session_id)] is True
    ended = await at_once(nodes, lambda node: node.finish_cron_slot("once", slot, CronState.COMPLETED))
    assert ended.count(True) == 1
    assert {type(found) for found in ended if found is not True} <= {Fenced, bool}

    await first.start_job(job(f"job {name}", f"jobs {name}", key=f"jobs {name}"))
    told = notice(session_id=f"jobs {name}", key=f"jobs {name}", job_id=f"job {name}")
    end = JobFinish(job_id=f"job {name}", state=JobState.EXITED, notice=told)
    ends = await at_once([first, *nodes], lambda node: node.finish_job(end))
    assert sum(isinstance(found, int) for found in ends) == 1
    assert [type(found) for found in ends[2:]] == [Fenced] * 3

    await first.create_approval(NewApproval(id=f"late {name}", scope=f"late {name}", command="rm", expires_at=9e9))

    def decide(node: PostgresStore) -> Awaitable[Any]:
        if nodes.index(node) % 2:
            return node.expire_approval(f"late {name}")
        return node.answer_approval(f"late {name}", ApprovalChoice.ONCE)

    assert sum(bool(found) for found in await at_once(nodes, decide)) == 1

    number = await first.accept_message(message(key=f"dead {name}"))
    assert number is not None
    await first.inbox_dead(await first.take_inbox("telegram", f"dead {name}"), reason="it failed")
    assert (await at_once(nodes, lambda node: node.revive_inbox(number))).count(True) == 1
    await first.add_outbox([NewReply(platform=f"dead {name}", target={"chat": 1}, text="x")])
    (row,) = await first.claim_outbox(f"dead {name}")
    assert await first.outbox_dead(row, error="it failed")
    assert (await at_once(nodes, lambda node: node.revive_outbox(row.id))).count(True) == 1


async def test_a_session_that_is_released_while_a_turn_is_refused_is_nobody_elses(
    postgres: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder may be reaped between the statement that finds the session held and the one that looks for its holder: the turn tries again."""
    async with some_nodes(postgres_url, 2) as (one, two):
        await one.begin_turn(start(session_id="s", hold=True))
        await two.create_session(NewSession(id="foreign", source="api", tenant="another"))
        many = batches.many

        def look(db: Any, sql: str, *given: Any) -> Any:
            if sql == batches._HOLDERS:
                release = "UPDATE hermes_trio.sessions SET open_turn = NULL WHERE id = 's'"
                postgres.execute(release, postgres_url.rpartition("/")[2])
            return many(db, sql, *given)

        with monkeypatch.context() as patched:
            patched.setattr(batches, "many", look)
            with pytest.raises(SessionHeld):
                await two.begin_turn(start(session_id="s", hold=True))
            with pytest.raises(ForeignSession):
                await two.begin_turn(start(session_id="foreign", hold=True))
        await two.begin_turn(start(session_id="s", hold=True))


@pytest.mark.parametrize("how", ["reap", "recover"])
async def test_a_dead_node_is_reaped_once(postgres: PostgresServer, postgres_url: str, how: str) -> None:
    """Four nodes find it at once: its run, its job, its approval, its replies and its messages are ended or released once, and one notice is written."""
    database = postgres_url.rpartition("/")[2]
    async with some_nodes(postgres_url) as nodes:
        for turn in range(8):
            async with some_nodes(postgres_url, 1) as (victim,):
                await victim.recover("victim")
                key = f"key {turn}"
                await victim.accept_message(message("first", key=key))
                (row,) = await victim.take_inbox("telegram", key)
                opened = start(session_id=f"s {turn}", key=key, inbox_ids=(row.id,), hold=True)
                await victim.begin_turn(opened)
                begun = start(session_id=f"r {turn}", run=run(f"run {turn}", f"r {turn}"))
                await victim.begin_turn(begun)
                await victim.start_job(job(f"job {turn}", f"s {turn}", key=key))
                await victim.create_approval(
                    NewApproval(id=f"a {turn}", scope=f"a {turn}", command="rm", expires_at=9e9)
                )
                await victim.add_outbox([NewReply(platform="telegram", target={"chat": turn}, text="x")])
                assert len(await victim.claim_outbox("telegram")) == 1
                postgres.execute(
                    f"UPDATE hermes_trio.nodes SET expires_at = 0 WHERE incarnation = '{victim.owner}'", database
                )
                found = await at_once(nodes, lambda node: getattr(node, how)(f"epoch {node.node_name}"))
                sums = Counter[str]()
                for one in found:
                    assert isinstance(one, Recovery), one
                    sums.update(
                        {name: value for name, value in msgspec.structs.asdict(one).items() if type(value) is int}
                    )
                assert (sums["runs_interrupted"], sums["jobs_lost"], sums["approvals_expired"]) == (1, 1, 1), sums
                assert sums["outbox_requeued"] == 1, sums
                assert (
                    postgres.execute(
                        "SELECT count(*) FROM hermes_trio.inbox WHERE kind = 'notice' AND job_id <> ''", database
                    )
                    == f"{turn + 1}"
                )
                with pytest.raises(Fenced):
                    await victim.finish_turn(finish(begun, "a", "b"))
            (reply,) = await nodes[0].claim_outbox("telegram")
            assert await nodes[0].outbox_sent(reply)
    assert deadlocks(postgres, postgres_url) == 0


async def _write_under_losses(server: PostgresServer, url: str, losses: int) -> tuple[int, int, int]:
    """Write numbered messages through a proxy that loses answers; return how many were lost, were doubled, and how often an answer was lost."""
    async with database_proxy(server.port) as proxy:
        through = url.replace(f":{server.port}/", f":{proxy.port}/")
        done: list[str] = []
        async with open_postgres(through, maintenance=False) as store:
            for worker in range(8):
                await store.create_session(NewSession(id=f"s{worker}", source="api"))

            async def write(worker: int) -> None:
                number = 0
                while proxy.lost < losses:
                    number += 1
                    text = f"{worker}-{number}"
                    await store.append_messages(f"s{worker}", [Message(role="user", content=text)])
                    done.append(text)
                    if worker == 0 and not proxy.lose and number % 3 == 0:
                        proxy.lose = 1

            async with trio.open_nursery() as nursery:
                for worker in range(8):
                    nursery.start_soon(write, worker)
            proxy.lose = 0
            found = Counter[str]()
            for worker in range(8):
                found.update(entry.text for entry in await store.load_history(f"s{worker}"))
        lost = sum(found[text] == 0 for text in done)
        doubled = sum(count - 1 for count in found.values() if count > 1)
        return lost, doubled, proxy.lost


async def test_a_lost_answer_neither_loses_nor_doubles_a_write(postgres: PostgresServer, postgres_url: str) -> None:
    """Fifty commits whose answer never arrives: each is sent again or found to be there, and every acknowledged message is there once."""
    assert await _write_under_losses(postgres, postgres_url, 50) == (0, 0, 50)


async def test_a_lost_answer_keeps_no_node_from_joining(postgres: PostgresServer, postgres_url: str) -> None:
    """The transactions that make a node's row, begin its incarnation and renew its lease are run again when their answer is lost: one node is there."""
    async with database_proxy(postgres.port) as proxy:
        through = postgres_url.replace(f":{postgres.port}/", f":{proxy.port}/")
        proxy.lose = 1
        async with open_postgres(through, maintenance=False) as store:
            assert proxy.lost == 1
            proxy.lose = 1
            await store.recover("epoch")
            assert proxy.lost == 2
            proxy.lose = 1
            assert await store.renew_node({}) is None
            assert proxy.lost == 3
            assert [node.incarnation for node in await store.list_nodes()] == [store.owner]


async def test_connections_whose_other_side_is_gone_cost_no_lease(postgres: PostgresServer, postgres_url: str) -> None:
    """A proxy keeps connections open and forwards nothing: a heartbeat finds out, and what waited for an answer goes on, on new connections."""
    async with database_proxy(postgres.port) as proxy:
        through = postgres_url.replace(f":{postgres.port}/", f":{proxy.port}/")
        async with open_postgres(through, maintenance=False, lease_seconds=3.0) as store:
            await store.recover("epoch")
            proxy.freeze()
            with trio.fail_after(10):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(store.set_meta, "key", "value")
                    nursery.start_soon(store.list_nodes)
                    with pytest.raises(StoreUnavailable):
                        await store.renew_node({})
                    assert await store.renew_node({}) is None
            assert await store.get_meta("key") == "value"


async def test_an_answer_that_is_overdue_ends_its_connection(postgres: PostgresServer, postgres_url: str) -> None:
    """Also without a heartbeat, and only if the server owes one."""
    async with database_proxy(postgres.port) as proxy, trio.open_nursery() as nursery:
        through = postgres_url.replace(f":{postgres.port}/", f":{proxy.port}/")
        line = ReconnectingLink("reads", through, "the test's", {}, answer_seconds=0.1)
        await nursery.start(line.keep)
        with trio.fail_after(10):
            first = await line.link(1)
            await trio.sleep(0.3)
            assert await first.run("SELECT 1") == [(1,)]
            proxy.freeze()
            with pytest.raises(LinkBroken, match="has not answered"):
                await first.run("SELECT 1")
            assert await (await line.link(5)).run("SELECT 1") == [(1,)]
        line.close()


async def test_without_the_marker_lost_answers_double_writes(postgres: PostgresServer, postgres_url: str) -> None:
    """The test above sees what the marker prevents."""
    postgres.execute(WITHOUT_MARKER, postgres_url.rpartition("/")[2])
    lost, doubled, _ = await _write_under_losses(postgres, postgres_url, 8)
    assert lost == 0
    assert doubled > 0


async def _pause(server: PostgresServer, url: str, moment: float) -> int:
    """Stop a node past its lease, take it over, let it go on; return how many rows it wrote after it was taken over."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    async with open_postgres(url, node_name="reaper", maintenance=False) as store, trio.open_nursery() as nursery:
        await store.recover("reaper")
        words = [sys.executable, "-m", "tests.store.paused_node", url]
        process = await nursery.start(
            partial(trio.run_process, words, env=environment, stdout=PIPE, stderr=None, check=False)
        )
        try:
            line = (await process.stdout.receive_some()).decode()
            owner = line.split()[1]
            await trio.sleep(moment)
            process.send_signal(signal.SIGSTOP)
            await trio.sleep(LEASE + 0.3)
            await store.reap("reaper")
            assert owner not in [node.incarnation for node in await store.list_nodes()]
            sql = f"SELECT count(*) FROM hermes_trio.outbox WHERE text = '{owner}'"
            name = url.rpartition("/")[2]
            before = int(server.execute(sql, name))
            assert before > 0
            process.send_signal(signal.SIGCONT)
            with trio.move_on_after(1.5):
                await process.wait()
            return int(server.execute(sql, name)) - before
        finally:
            process.kill()
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("moment", [0.3, 0.41, 0.52, 0.67])
async def test_a_paused_node_writes_nothing_after_it_was_taken_over(
    postgres: PostgresServer, postgres_url: str, moment: float
) -> None:
    """Stopped past its lease, at whatever point of its units, and let go on: not one row of it is committed any more."""
    assert await _pause(postgres, postgres_url, moment) == 0


async def test_without_the_fence_a_paused_node_goes_on_writing(postgres: PostgresServer, postgres_url: str) -> None:
    """The test above sees what the fence prevents."""
    postgres.execute(WITHOUT_FENCE, postgres_url.rpartition("/")[2])
    assert await _pause(postgres, postgres_url, 0.3) > 0


async def test_a_node_that_was_taken_over_is_told(postgres_url: str) -> None:
    """Every write raises `Fenced`, and the writers go on answering."""
    async with some_nodes(postgres_url, 2, lease_seconds=0.5) as (one, two):
        await trio.sleep(0.7)
        await two.recover("e2")
        for _ in range(3):
            with pytest.raises(Fenced):
                await one.accept_message(message())
        assert await two.accept_message(message()) is not None
