"""The store on SQLite: opened once per process and file, closed last.

`open_store` is the only way to get one. It owns the connections, the writer task, the maintenance task and the lock against a second
server, and ends all of them in this order: maintenance stops, the writer empties its queue, the connections close, the lock is released.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from enum import Enum
from pathlib import Path
from time import perf_counter
from typing import Final, Literal, Protocol

import apsw
import msgspec
import trio

from hermes_trio.base.retention import Retention
from hermes_trio.runtime.errors import Fenced
from hermes_trio.runtime.ports import Wake
from hermes_trio.store.errors import StoreError, translate
from hermes_trio.store.ownership import owned
from hermes_trio.store.records import MaintenanceReport
from hermes_trio.store.signals import Signals

from .access import SqliteAccess
from .approvals import SqliteApprovals
from .cron import SqliteCron
from .cursors import SqliteCursors
from .deliveries import SqliteDeliveries
from .files import MEMORY, DatabaseFile, connect, connect_reader, enter_wal
from .inbox import SqliteInbox
from .jobs import SqliteJobs
from .keys import SqliteKeys
from .maintenance import SqliteMaintenance
from .nodes import SqliteNodes, insert_node
from .outbox import SqliteOutbox
from .recovery import SqliteRecovery
from .responses import SqliteResponses
from .resumptions import SqliteResumptions
from .roots import SqliteRoots
from .rows import Database, single, write
from .runs import SqliteRuns
from .schema import check_ours, migrate, version_of
from .sessions import SqliteSessions
from .turns import SqliteTurns
from .verbs import OwnReads, Reads, SharedReads, Writes
from .writer import InlineWorker, ThreadWorker, Worker, Writer, WriterStatistics

READER_THREADS: Final = 4

INDEX_SECONDS: Final = 15.0
"""The interval between indexing rounds; a search indexes missing messages first."""

INDEX_PAUSE_FACTOR: Final = 4.0
"""The pause after indexing, as a multiple of the time that it took."""

UPKEEP_LEASE: Final = "upkeep"
"""The singleton that indexes messages and applies retention."""

LEASE_SECONDS: Final = 15.0
"""The default duration of a node's lease."""

SECRET_NAME: Final = "server_secret"

log: Final = logging.getLogger(__name__)

DEFAULT_RETENTION: Final = Retention()


class Runner(Enum):
    """Where the store's blocking work runs. The verbs and the SQL are the same."""

    THREADED = "threaded"
    """In the store's own thread, and scans in a few more. For production."""
    INLINE = "inline"
    """On the loop. For virtual time and property tests. A database in memory is always inline: it does not wait for a disk."""


class OpenDatabase(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """An open database: its writer, its readers, and what its stores share."""

    path: str
    writer: Writes
    reads: Reads
    signals: Signals
    retention: Retention
    clock: Callable[[], float]
    token: Callable[[int], str]


class SqliteStore(
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
    """All verbs, on one SQLite database."""

    def __init__(self, database: OpenDatabase, *, node_name: str = "", lease_seconds: float = 0.0) -> None:
        self.database = database
        self.path: str = database.path
        self.retention: Retention = database.retention
        self._writer = database.writer
        self._reads = database.reads
        self._signals = database.signals
        self.owner = secrets.token_hex(16)
        self.node_name = node_name
        self.lease_seconds = lease_seconds
        self._clock = self._lease_clock = database.clock
        self._token = database.token
        self._response_limit = self.retention.response_count
        self.secret = b""
        """See `SessionStore.secret`; set by `open_store`."""

    @asynccontextmanager
    async def shared(self, name: str = "", *, lease_seconds: float = LEASE_SECONDS) -> AsyncIterator[SqliteStore]:
        """Open this store once more, as a node: for several runtimes in one process. All of its users must be nodes.

        A handle that is closed without `leave_node` counts as a dead node: its lease expires, and other nodes reap its work.
        """
        name = name or f"node-{self._token(4)}"
        handle = SqliteStore(self.database, node_name=name, lease_seconds=lease_seconds)
        handle.secret = self.secret
        await self._writer.submit(insert_node, self._clock(), handle.owner, handle.node_name, lease_seconds)
        yield handle

    def subscribe(self, topic: str, wake: Wake, key: str | None = None) -> AbstractContextManager[None]:
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


class MaintainedStore(Protocol):
    """A store with a maintenance task of its own."""

    path: str

    retention: Retention

    lease_seconds: float

    async def claim_lease(self, name: str) -> bool: ...

    async def index_some(self) -> int: ...

    async def maintain(self) -> MaintenanceReport: ...


async def _index_gently(store: MaintainedStore, sleep: Callable[[float], Awaitable[None]]) -> None:
    """Index waiting messages in small batches, with pauses that are longer than the work, so that commits are not delayed."""
    while True:
        began = perf_counter()
        if not await store.index_some():
            return
        await sleep(INDEX_PAUSE_FACTOR * (perf_counter() - began))


async def _does_maintenance(store: MaintainedStore) -> bool:
    """Return whether this node does the maintenance, where several share the store: the first that claims the lease, until it leaves or dies."""
    if not store.lease_seconds:
        return True
    try:
        return await store.claim_lease(UPKEEP_LEASE)
    except Fenced:
        return False


async def run_maintenance(store: MaintainedStore, sleep: Callable[[float], Awaitable[None]]) -> None:
    """Index new messages often, and run maintenance periodically. A store error such as a full disk does not end the task."""
    rounds = max(1, round(store.retention.interval / INDEX_SECONDS))
    pause = store.retention.interval / rounds
    while True:
        for _ in range(rounds):
            await sleep(pause)
            try:
                if await _does_maintenance(store):
                    await _index_gently(store, sleep)
            except StoreError as error:
                log.warning("could not update the search index of %s; the next round retries: %s", store.path, error)
        try:
            if not await _does_maintenance(store):
                continue
            report = await store.maintain()
        except StoreError as error:
            log.warning("maintenance of %s failed; the next round retries: %s", store.path, error)
        else:
            log.debug(
                "store maintained",
                extra={"removed": dict(report.removed), "sessions_ended": report.sessions_ended},
            )


def secret_of(db: Database) -> bytes:
    """Return the secret of this database; make it on the first call. Every process that opens the database reads the same."""
    write(
        db,
        "INSERT INTO state_meta (key, value) VALUES (?, ?) ON CONFLICT DO NOTHING",
        (SECRET_NAME, secrets.token_hex(32)),
    )
    return bytes.fromhex(single(db, "SELECT value FROM state_meta WHERE key = ?", (SECRET_NAME,)))


@asynccontextmanager
async def open_store(
    path: str | Path | None,
    *,
    runner: Runner | Literal["threaded", "inline"] = Runner.THREADED,
    retention: Retention = DEFAULT_RETENTION,
    clock: Callable[[], float] = time.time,
    token: Callable[[int], str] = secrets.token_hex,
    sleep: Callable[[float], Awaitable[None]] = trio.sleep,
    maintenance: bool | None = None,
) -> AsyncIterator[SqliteStore]:
    """Open the store at `path`, or one in memory for None or `:memory:`, for the body of the `async with`.

    Raises `StoreInUse` if another server has it open, `NewerSchema` if a newer program wrote it, `StoreReadOnly` if it cannot be
    written. On the way out everything that was enqueued is written, also when the body was cancelled. `token(n)` makes the random
    part of session ids, n bytes in hex. `maintenance` says whether the store runs maintenance every `retention.interval` seconds of
    `sleep`; a database in memory does so only if it is set.
    """
    name = MEMORY if path is None else str(path)
    in_memory = name == MEMORY
    with ExitStack() as stack:
        if not in_memory:
            stack.enter_context(owned(Path(name)))
        db = connect(name)
        stack.callback(db.close)
        try:
            check_ours(db, name)
            if version_of(db) == 0:
                enter_wal(db, name)
                migrate(db, name)
            else:
                migrate(db, name)
                enter_wal(db, name)
            secret = secret_of(db)
        except apsw.Error as error:
            raise translate(error, name) from error
        shared = in_memory or Runner(runner) is Runner.INLINE
        reads: Reads = SharedReads(db, name) if shared else OwnReads(lambda: connect_reader(name), name, READER_THREADS)
        stack.callback(reads.close)
        threaded = not shared
        worker: Worker = ThreadWorker("hermes-trio store") if threaded else InlineWorker()
        signals = Signals()
        file = None if in_memory else DatabaseFile(name)
        if file is not None:
            stack.callback(file.close)
        writer = Writer(
            db,
            worker,
            name,
            slices=threaded,
            at_once=in_memory,
            signals=signals,
            file=file,
        )
        store = SqliteStore(
            OpenDatabase(
                path=name, writer=writer, reads=reads, signals=signals, retention=retention, clock=clock, token=token
            )
        )
        store.secret = secret
        maintained = not in_memory if maintenance is None else maintenance
        failure: Exception | None = None
        async with worker, trio.open_nursery() as nursery:
            nursery.start_soon(writer.run, name="store writer")
            try:
                async with trio.open_nursery() as keepers:
                    if maintained:
                        keepers.start_soon(run_maintenance, store, sleep, name="store maintenance")
                    try:
                        yield store
                    except Exception as error:
                        failure = error
                    keepers.cancel_scope.cancel()
            finally:
                writer.close()
        if failure is not None:
            raise failure
