"""The store on SQLite: opened once per process and file, closed last.

`open_store` is the only way to get one. It owns the connections, the writer task, the maintenance task and the lock against a second
server, and ends all of them, in this order: maintenance stops, the writer empties its queue, the connections close, the lock goes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from enum import Enum
from pathlib import Path
from typing import Final

import apsw
import trio

from .backlog import BacklogVerbs
from .errors import translate
from .files import MEMORY, connect, connect_reader, enter_wal, owned
from .inbox import InboxVerbs
from .jobs import JobVerbs
from .outbox import OutboxVerbs
from .records import Retention
from .recovery import RecoveryVerbs
from .responses import ResponseVerbs
from .runs import RunVerbs
from .schema import migrate, version_of
from .sessions import SessionVerbs
from .turns import TurnVerbs
from .verbs import OwnReads, Reads, SharedReads
from .writer import InlineWorker, ThreadWorker, Worker, Writer, WriterStatistics

__all__ = ["Runner", "SqliteStore", "open_store"]

READER_THREADS: Final = 4

DEFAULT_RETENTION: Final = Retention()


class Runner(Enum):
    """Where the store's blocking work runs. The verbs and the SQL are the same."""

    THREADED = "threaded"
    """In the store's own thread, and scans in a few more. For production."""
    INLINE = "inline"
    """On the loop. For virtual time and property tests. A database in memory is always inline: it waits for no disk."""


class SqliteStore(BacklogVerbs, SessionVerbs, TurnVerbs, RunVerbs, JobVerbs, InboxVerbs, OutboxVerbs, ResponseVerbs, RecoveryVerbs):
    """All verbs, on one SQLite database."""

    def __init__(
        self,
        *,
        path: str,
        writer: Writer,
        reads: Reads,
        retention: Retention,
        clock: Callable[[], float],
        token: Callable[[int], str],
    ) -> None:
        self.path: str = path
        self.retention: Retention = retention
        self._writer = writer
        self._reads = reads
        self._clock = clock
        self._token = token
        self._response_limit = retention.response_count

    def statistics(self) -> WriterStatistics:
        """What the writer has done since the store was opened."""
        return self._writer.statistics()


@asynccontextmanager
async def open_store(
    path: str | Path | None,
    *,
    runner: Runner = Runner.THREADED,
    retention: Retention = DEFAULT_RETENTION,
    clock: Callable[[], float] = time.time,
    token: Callable[[int], str] = secrets.token_hex,
) -> AsyncIterator[SqliteStore]:
    """Open the store at `path`, or one in memory for None or `:memory:`, for the body of the `async with`.

    Raises `StoreInUse` if another server has it open, `NewerSchema` if a newer program wrote it, `StoreReadOnly` if it cannot be
    written. On the way out everything that was enqueued is written, also when the body was cancelled. `token(n)` makes the random
    part of session ids, n bytes in hex.
    """
    name = MEMORY if path is None else str(path)
    in_memory = name == MEMORY
    with ExitStack() as stack:
        if not in_memory:
            stack.enter_context(owned(Path(name)))
        db = connect(name)
        stack.callback(db.close)
        try:
            if version_of(db) == 0:
                enter_wal(db, name)
                migrate(db, name)
            else:
                migrate(db, name)
                enter_wal(db, name)
        except apsw.Error as error:
            raise translate(error, name) from error
        shared = in_memory
        reads: Reads = SharedReads(db, name) if shared else OwnReads(lambda: connect_reader(name), name, READER_THREADS)
        stack.callback(reads.close)
        threaded = runner is Runner.THREADED and not in_memory
        worker: Worker = ThreadWorker("hermes-trio store") if threaded else InlineWorker()
        writer = Writer(db, worker, name, slices=threaded)
        store = SqliteStore(path=name, writer=writer, reads=reads, retention=retention, clock=clock, token=token)
        failure: Exception | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(writer.run, name="store writer")
                try:
                    yield store
                except Exception as error:
                    failure = error
                finally:
                    writer.close()
        finally:
            await worker.close()
        if failure is not None:
            raise failure
