"""The store on PostgreSQL: opened once per process, closed last.

`open_postgres` is the only way to get one. It owns six connections (units, upkeep, reads, scans, leases, signals), the tasks that keep them open, and the
row of this node, and ends all of them in this order: upkeep stops, the writers empty their queues, the node's row is removed, the
connections close.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import trio

from hermes_trio.base.retention import Retention
from hermes_trio.runtime.ports import SESSION_TOPIC, EventRow, Message, Recovery, TurnStart, Wake
from hermes_trio.store.errors import StoreError, StoreUnavailable
from hermes_trio.store.records import EVENT_PAGE_BYTES
from hermes_trio.store.signals import Signal, Signals
from hermes_trio.store.sqlite import inbox, jobs, nodes, outbox, recovery, runs, turns
from hermes_trio.store.sqlite.access import SqliteAccess
from hermes_trio.store.sqlite.approvals import SqliteApprovals
from hermes_trio.store.sqlite.cron import SqliteCron
from hermes_trio.store.sqlite.cursors import SqliteCursors
from hermes_trio.store.sqlite.deliveries import SqliteDeliveries
from hermes_trio.store.sqlite.inbox import SqliteInbox
from hermes_trio.store.sqlite.jobs import SqliteJobs
from hermes_trio.store.sqlite.keys import SqliteKeys
from hermes_trio.store.sqlite.maintenance import SqliteMaintenance
from hermes_trio.store.sqlite.nodes import SqliteNodes, insert_node
from hermes_trio.store.sqlite.outbox import SqliteOutbox
from hermes_trio.store.sqlite.recovery import SqliteRecovery
from hermes_trio.store.sqlite.responses import SqliteResponses
from hermes_trio.store.sqlite.resumptions import SqliteResumptions
from hermes_trio.store.sqlite.roots import SqliteRoots
from hermes_trio.store.sqlite.rows import Database, one, write
from hermes_trio.store.sqlite.runs import SqliteRuns
from hermes_trio.store.sqlite.sessions import SqliteSessions
from hermes_trio.store.sqlite.store import run_maintenance, secret_of
from hermes_trio.store.sqlite.turns import SqliteTurns
from hermes_trio.store.sqlite.writer import WriterStatistics

from .address import parse_address
from .bridge import run_waiting
from .database import PostgresDatabase
from .errors import REPEATABLE, LinkBroken, SqlError, translate_sql
from .link import PostgresLink, open_link
from .locks import NODES, lock_number
from .reads import READ_BATCHES, GatheredReads, PostgresReads
from .reconnecting_link import ReconnectingLink
from .schema import SCHEMA, check_rights, check_schema, check_server
from .search import PostgresSearch
from .signal_listener import POLL_SECONDS, SignalListener
from .writer import ATTEMPTS, LONG_WAIT_SECONDS, WAIT_SECONDS, UnitWriter

P = ParamSpec("P")
T = TypeVar("T")

LEASE_SECONDS: Final = 15.0
"""The default duration of a node's lease."""

_SESSION: Final = {
    "search_path": SCHEMA,
    "jit": "off",
    "default_transaction_isolation": "read committed",
    "statement_timeout": "60s",
    "lock_timeout": "8s",
    "idle_in_transaction_session_timeout": "20s",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "3",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "15000",
}
_BY_KEY: Final = {"enable_seqscan": "off", "enable_mergejoin": "off"}
"""For the connections whose statements find their rows by keys. The planner keeps the plan of a prepared statement, and would plan for tables as small
as they are at first, or read a small table whole, with all the dead versions of its rows, for each unit."""

_WRITING: Final = {**_SESSION, "synchronous_commit": "on", "transaction_timeout": "60s"}
_HEAVY: Final = {**_SESSION, "synchronous_commit": "on", "statement_timeout": "10min", "transaction_timeout": "15min"}
_SCANNING: Final = {**_SESSION, "statement_timeout": "5min"}
_SIGNALLING: Final = {**_SESSION, "synchronous_commit": "off"}

OVERDUE_SECONDS: Final = 15.0
"""How much later than its own time-out of a statement a server may answer before its connection counts as broken."""

_ANSWERS: Final = {"upkeep": 900.0, "scans": 300.0}
"""The time-outs of statements, in seconds, where it is not a minute."""

HEARTBEAT_SHARE: Final = 1 / 3
"""The part of a lease for which a heartbeat waits for its answer, before it is sent again on another connection."""

_LONG_WAITING: Final[frozenset[Callable[..., object]]] = frozenset(
    {turns.finish_turn, jobs.finish_job, runs.append_events, outbox.end_attempt, inbox.release_rows, inbox.acknowledge}
)
"""Verbs that write an end, which would be lost: they wait longer for the database."""

AGAIN_SECONDS: Final = 0.1
"""The pause before a read that waits for the database is tried again."""

CLOCK_SLACK: Final = 0.25
"""The difference between the clocks of a host and the database, in seconds, that is not corrected."""

DEFAULT_RETENTION: Final = Retention()

log: Final = logging.getLogger(__name__)


def join(db: Database, store_now: Callable[[Database], float], owner: str, name: str, lease: float) -> bytes:
    """Make the row of a node; return the secret of the database."""
    insert_node(db, _lock_nodes(db, store_now), owner, name, lease)
    return secret_of(db)


def begin(
    db: Database, store_now: Callable[[Database], float], last: str, owner: str, member: tuple[str, float], epoch: str
) -> Recovery:
    """Begin a new incarnation of a node, in one transaction. No other node joins or is reaped meanwhile."""
    now = _lock_nodes(db, store_now)
    _name_session(db, owner)
    return recovery.recover(db, now, last, owner, member, epoch)


def renew(
    db: Database, store_now: Callable[[Database], float], owner: str, lease: float, info: Mapping[str, Any]
) -> Any:
    """Renew a lease by the database's clock."""
    _name_session(db, owner)
    return nodes.renew(db, store_now(db), owner, lease, info)


def reap(db: Database, store_now: Callable[[Database], float], owner: str, epoch: str) -> Recovery:
    """End the database sessions of the nodes whose lease is over, then reap them."""
    return recovery.reap(db, _lock_nodes(db, store_now), owner, (), epoch)


def leave(db: Database, store_now: Callable[[Database], float], owner: str, epoch: str) -> None:
    """End a node in order."""
    recovery.leave(db, _lock_nodes(db, store_now), owner, epoch)


def _lock_nodes(db: Database, store_now: Callable[[Database], float]) -> float:
    """End the database sessions of expired nodes, one of which may hold the lock, then take the lock; return the time."""
    _end_sessions(db, store_now(db))
    write(db, "SELECT pg_advisory_xact_lock(?)", (lock_number(NODES),))
    now = store_now(db)
    _end_sessions(db, now)
    return now


def _name_session(db: Database, owner: str) -> None:
    """Name this database session after its node, as units do: the reaper ends it by that name."""
    name = f"hermes-trio {owner}"
    write(
        db,
        "SELECT set_config('application_name', ?1, false) WHERE current_setting('application_name') <> ?1",
        (name,),
    )


def _end_sessions(db: Database, now: float) -> None:
    """End the database sessions of the nodes whose lease is over: one that was suspended in a transaction holds its row lock."""
    write(
        db,
        "SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity a JOIN nodes n ON a.application_name = 'hermes-trio ' || n.incarnation"
        " WHERE n.expires_at <= ? AND a.usename = current_user AND a.pid <> pg_backend_pid()",
        (now,),
    )


def remove(db: Database, owner: str) -> None:
    """Remove the row of a node that is closed: the next reaper need not wait for its lease."""
    write(db, "SELECT pg_advisory_xact_lock(?)", (lock_number(NODES),))
    nodes.remove_node(db, owner)


def database_now(db: Database) -> float:
    """Return the time of the database's clock."""
    found = one(db, "SELECT extract(epoch FROM clock_timestamp())::double precision")
    assert found is not None
    return float(found[0])


class CorrectedClock:
    """The time of the database's clock, continued by the host between two answers, so that due times mean the same on all nodes.

    The host counts with its monotonic clock: a step of its clock changes nothing. Small differences are not corrected, so that the clock does not jump
    with the latency of an answer.
    """

    def __init__(self, clock: Callable[[], float], steady: Callable[[], float] = time.monotonic) -> None:
        self._steady: Callable[[], float] = steady
        self.offset: float = clock() - steady()
        """What is added to the monotonic clock, in seconds: from the host's clock until the database has answered once."""

    def __call__(self) -> float:
        return self._steady() + self.offset

    def ask(self, db: Database) -> float:
        """Return the time of the database's clock; correct the host's if the difference is larger than the slack."""
        sent = self._steady()
        now = database_now(db)
        received = self._steady()
        offset, doubt = now - (sent + received) / 2, (received - sent) / 2
        if abs(offset - self.offset) > CLOCK_SLACK + doubt:
            log.warning(
                "the clock of this host differs from the database's by %.1f s; stored times follow the database's",
                self.offset - offset,
            )
            self.offset = offset
        return now


class PostgresStore(
    PostgresSearch,
    SqliteSessions,
    SqliteTurns,
    SqliteRuns,
    SqliteResumptions,
    SqliteJobs,
    SqliteRoots,
    SqliteInbox,
    SqliteOutbox,
    SqliteApprovals,
    SqliteResponses,
    SqliteDeliveries,
    SqliteCron,
    SqliteKeys,
    SqliteAccess,
    SqliteCursors,
    SqliteNodes,
    SqliteRecovery,
    SqliteMaintenance,
):
    """All verbs, on one PostgreSQL database that other nodes use at the same time."""

    def __init__(
        self,
        *,
        url: str,
        where: str,
        lines: dict[str, ReconnectingLink],
        retention: Retention,
        clock: Callable[[], float],
        token: Callable[[int], str],
        node_name: str,
        lease_seconds: float,
    ) -> None:
        self.path: str = where
        """The name of the database for errors and logs, without its password."""
        self.node_name = node_name
        self.lease_seconds = lease_seconds
        self._leasing: trio.Lock = trio.Lock()
        self.retention = retention
        self._url: str = url
        self._lines: dict[str, ReconnectingLink] = lines
        self._corrected: CorrectedClock | None = CorrectedClock(clock) if clock is time.time else None
        self._clock: Callable[[], float] = self._corrected or clock
        self._token = token
        self._signals: Signals = Signals()
        self.owner = secrets.token_hex(16)
        self.listener: SignalListener = SignalListener(
            lines["signals"], self._signals, node=lambda: self.owner, clock=self._clock
        )
        self.units: UnitWriter = UnitWriter(
            lines["units"],
            "units",
            where,
            node=lambda: self.owner,
            announce=self.listener.publish,
            long_waiting=_LONG_WAITING,
        )
        self.upkeep: UnitWriter = UnitWriter(
            lines["upkeep"], "upkeep", where, node=lambda: self.owner, announce=self.listener.publish, limit=1
        )
        self.units.heavy = self.upkeep
        self._writer = self.units
        self._reads = PostgresReads(lines["reads"], lines["scans"], where)
        self.gathered: GatheredReads = GatheredReads(lines["reads"], where)
        self._response_limit = retention.response_count
        self.secret = b""
        """See `SessionStore.secret`; set by `open_postgres`."""

    @asynccontextmanager
    async def shared(self, name: str = "", *, lease_seconds: float = LEASE_SECONDS) -> AsyncIterator[PostgresStore]:
        """Open this database once more, as another node: for several runtimes in one process."""
        async with open_postgres(
            self._url,
            retention=self.retention,
            clock=self._clock if self._corrected is None else time.time,
            token=self._token,
            maintenance=False,
            node_name=name or f"node-{self._token(4)}",
            lease_seconds=lease_seconds,
        ) as store:
            yield store

    def subscribe(self, topic: str, wake: Wake, key: str | None = None) -> AbstractContextManager[None]:
        """Call `wake(key)` after each commit of any node that concerns `topic` and `key` (any key for None), for the body of the `with`."""
        if topic == SESSION_TOPIC and key is not None:
            self.listener.want([key])
        return self._signals.subscribe(topic, wake, key)

    @contextmanager
    def observe_writes(self, around: Callable[[str], AbstractContextManager[object]]) -> Iterator[None]:
        """Enter `around(name of the verb)` around every write that a caller waits for, for the body of the `with`."""
        before, self._writer.around = self._writer.around, around
        try:
            yield
        finally:
            self._writer.around = before

    def statistics(self) -> WriterStatistics:
        """Return the counters of the writer since the store was opened."""
        return self._writer.statistics()

    async def _write(self, verb: Callable[Concatenate[Database, P], T], *args: P.args, **named: P.kwargs) -> T:
        assert not named, "verbs take positional arguments"
        return await self.units.submit(verb, *args)

    def _post(self, verb: Callable[Concatenate[Database, P], object], *args: P.args, **named: P.kwargs) -> None:
        assert not named, "verbs take positional arguments"
        self._writer.post(verb, *args)  # its unit checks the node's row

    async def _read(self, read: Callable[Concatenate[Database, P], T], *args: P.args, **named: P.kwargs) -> T:
        if read in READ_BATCHES:
            assert not named, "reads that are gathered take positional arguments"
            return await self.gathered.read(read, args)
        return await super()._read(read, *args, **named)

    async def _write_heavily(self, verb: Callable[Concatenate[Database, P], T], *args: P.args, **named: P.kwargs) -> T:
        assert not named, "verbs take positional arguments"
        return await self.upkeep.submit(verb, *args)

    def _now(self, db: Database) -> float:
        """Return the time for leases: the database's, unless the store was given another clock. Corrects the host's clock by it."""
        return self._corrected.ask(db) if self._corrected is not None else self._clock()

    async def load_history(self, session_id: str) -> list[Message]:
        """See `SqliteSessions.load_history`. Only turns that have begun read it, so it waits for the database for as long as their ends do."""
        until = time.perf_counter() + LONG_WAIT_SECONDS
        while True:
            try:
                return await super().load_history(session_id)
            except StoreUnavailable:
                if time.perf_counter() >= until:
                    raise
                await trio.sleep(AGAIN_SECONDS)

    async def begin_turn(self, start: TurnStart) -> None:
        """Commit the beginning of a turn; see `RuntimeStore`."""
        await super().begin_turn(start)
        if start.hold:
            self.listener.note_held(start.context.session_id)

    async def events_after(
        self, run_id: str, number: int = 0, *, limit: int = 500, most_bytes: int = EVENT_PAGE_BYTES
    ) -> list[EventRow]:
        """Return a page of the events of a run; see `RunStore`."""
        rows = await self.gathered.read(runs.events_after, (run_id, number, limit, most_bytes))
        if rows:
            self.listener.note_read(run_id, rows[-1].number)
        return rows

    async def recover(self, epoch: str) -> Recovery:
        """Begin a new incarnation of this node, and reap the work of owners that have ended, its own last incarnation included."""
        last, owner = self.owner, secrets.token_hex(16)
        found = await self._transact(begin, self._now, last, owner, (self.node_name, self.lease_seconds), epoch)
        self.owner = owner
        return found

    async def reap(self, epoch: str) -> Recovery:
        """End or requeue everything that belongs to owners that have ended. A node whose lease has expired counts as ended."""
        return await self._write_heavily(reap, self._now, self.owner, epoch)

    async def leave_node(self, epoch: str) -> None:
        """End this node at once: its remaining work is ended, its singletons are released, and its later writes raise `Fenced`."""
        await self._write_heavily(leave, self._now, self.owner, epoch)

    async def renew_node(self, info: Mapping[str, Any]) -> Any:
        """Renew the lease of this node; see `NodeStore`. Uses a connection of its own, so that waiting units do not delay it.

        If no answer comes, all connections on which nothing came meanwhile are opened again: those of a proxy may outlive the server behind it.
        """
        seconds, sent = self.lease_seconds * HEARTBEAT_SHARE, trio.current_time()
        with trio.move_on_after(seconds):
            return await self._transact(renew, self._now, self.owner, self.lease_seconds, info)
        for line in self._lines.values():
            line.replace(sent)
        raise StoreUnavailable(f"the database {self.path} did not answer a heartbeat within {seconds:g} s")

    async def join(self) -> None:
        """Make the row of this node, and read the secret of the database. Called before any other verb."""
        self.secret = await self._transact(join, self._now, self.owner, self.node_name, self.lease_seconds)

    async def close(self) -> None:
        """Remove the row of this node, if the database can be reached."""
        try:
            await self._transact(remove, self.owner)
        except StoreError as error:
            log.warning("could not remove the row of node %s; its lease expires: %s", self.owner[:8], error)

    async def _transact(self, work: Callable[..., T], *args: object) -> T:
        """Run `work(database, *args)` in a transaction without the fence, to make or remove the row of this node. `work` may run twice.

        Cancelling it closes the connection, so that the transaction holds no locks; it may have been committed.
        """
        line = self._lines["leases"]
        attempts = 0
        while True:
            link = await line.link(WAIT_SECONDS)
            async with self._leasing:
                try:
                    value, signals = await run_waiting(lambda link=link: _transaction(link, work, args))
                except LinkBroken:
                    continue
                except SqlError as error:
                    attempts += 1
                    if error.state not in REPEATABLE or attempts == ATTEMPTS:
                        raise translate_sql(error, self.path) from None
                    continue
            self.listener.publish(signals)
            return value

    async def optimize_search(self) -> None:
        """Do nothing: PostgreSQL maintains its indexes itself."""

    async def give_space_back(self) -> int:
        """Do nothing: PostgreSQL reuses the space of removed rows (autovacuum)."""
        return 0


def _transaction(link: PostgresLink, work: Callable[..., T], args: tuple[object, ...]) -> tuple[T, list[Signal]]:
    db = PostgresDatabase(link)
    db.execute("BEGIN")
    try:
        value = work(db, *args)
        db.execute("COMMIT")
        db.settle()
    except LinkBroken:
        raise
    except Exception:
        db.settle_always()
        db.execute("ROLLBACK")
        db.settle()
        raise
    except (
        BaseException
    ) as error:  # cancelled: no wait is possible here, and the server rolls back when the connection is closed
        link.fail(error)
        raise
    return value, db.signals


@asynccontextmanager
async def open_postgres(
    url: str,
    *,
    retention: Retention = DEFAULT_RETENTION,
    clock: Callable[[], float] = time.time,
    token: Callable[[int], str] = secrets.token_hex,
    maintenance: bool = True,
    node_name: str = "",
    lease_seconds: float = LEASE_SECONDS,
    poll_seconds: float = POLL_SECONDS,
) -> AsyncIterator[PostgresStore]:
    """Open the store in the PostgreSQL database at `url`, for the body of the `async with`.

    Raises `StoreUnavailable` if it cannot be reached, and `StoreError` or `NewerSchema` with what to do for a server, a schema or rights that do not fit. On
    the way out everything that was enqueued is written, also when the body was cancelled, as long as the database can be reached. A caller that keeps the store
    open for longer than `lease_seconds` must renew the lease (`renew_node`), as a runtime does.
    """
    _, where = parse_address(url)
    async with open_link(url, where) as link:
        with telling(where):
            await check_server(link, url, where)
            await check_schema(link, where)
            await check_rights(link, where)
    kinds = {
        "units": {**_WRITING, **_BY_KEY},
        "upkeep": _HEAVY,
        "reads": {**_SESSION, **_BY_KEY},
        "scans": _SCANNING,
        # A node that is suspended while it joins has no name by which others could end its database session, and holds the lock for joining.
        "leases": {**_WRITING, "idle_in_transaction_session_timeout": f"{max(1, int(lease_seconds * 1000))}ms"},
        "signals": _SIGNALLING,
    }
    lines = {
        kind: ReconnectingLink(kind, url, where, settings, _ANSWERS.get(kind, 60.0) + OVERDUE_SECONDS)
        for kind, settings in kinds.items()
    }
    store = PostgresStore(
        url=url,
        where=where,
        lines=lines,
        retention=retention,
        clock=clock,
        token=token,
        node_name=node_name or socket.gethostname(),
        lease_seconds=lease_seconds,
    )
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        try:
            for line in lines.values():
                await nursery.start(line.keep)
            await store.join()
            async with trio.open_nursery() as writers:
                writers.start_soon(store.units.run, name="store units")
                writers.start_soon(store.upkeep.run, name="store upkeep")
                writers.start_soon(store.gathered.run, name="store reads")
                try:
                    async with trio.open_nursery() as keepers:
                        await keepers.start(store.listener.run, poll_seconds, name="store signals")
                        if maintenance:
                            keepers.start_soon(run_maintenance, store, trio.sleep, name="store maintenance")
                        try:
                            yield store
                        except Exception as error:
                            failure = error
                        keepers.cancel_scope.cancel()
                finally:
                    for line in lines.values():
                        line.answer_seconds = LONG_WAIT_SECONDS
                    store.units.close()
                    store.upkeep.close()
                    store.gathered.close()
        except Exception as error:
            failure = error
        finally:
            with trio.move_on_after(WAIT_SECONDS, shield=True):
                await store.close()
            for line in lines.values():
                line.close()
    if failure is not None:
        raise failure


@contextmanager
def telling(where: str) -> Iterator[None]:
    """Raise the store's errors in place of PostgreSQL's."""
    try:
        yield
    except (SqlError, LinkBroken) as error:
        raise translate_sql(error, where) from None
