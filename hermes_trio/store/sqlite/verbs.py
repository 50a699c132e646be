"""How a verb reaches the database: the base of the store's verb classes.

Each concept of the store is a module with plain functions of a connection, and a class of verbs that runs them. Writes go through the
writer's queue. A point read (a few indexed rows) runs on the loop on a connection of its own and does not wait. A scan (search,
long lists, long transcripts) runs in a thread on one of a few more connections.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from functools import wraps
from time import perf_counter
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

import apsw
import trio

from hermes_trio.runtime.errors import Fenced
from hermes_trio.store.errors import translate

from .rows import Database, exists, roll_back
from .writer import Weight, WriterStatistics

P = ParamSpec("P")
T = TypeVar("T")

STREAK: Final = 64
"""Point reads that one task may make before it yields to the other tasks."""

PAUSE_SECONDS: Final = 0.001


class Writes(Protocol):
    """Where writes run."""

    around: Callable[[str], AbstractContextManager[object]] | None
    """Entered, with the verb's name, around every write that a caller waits for."""

    def submit(
        self, verb: Callable[..., T], *args: object, weight: Weight = Weight.LIGHT
    ) -> Coroutine[Any, Any, T]: ...

    def post(self, verb: Callable[..., object], *args: object) -> None: ...

    def check_file(self) -> None: ...

    def statistics(self) -> WriterStatistics: ...


class Reads(Protocol):
    """Where reads run."""

    async def point(self, read: Callable[[Database], T], /) -> T: ...

    async def scan(self, read: Callable[[Database], T], /) -> T: ...

    def close(self) -> None: ...


class SharedReads:
    """Reads on the writer's own connection, between its batches: for databases in memory and for virtual time.

    A transaction that is open at a read is one whose rollback failed. It is rolled back first, so that no read sees what was not committed.
    """

    def __init__(self, db: Database, path: str) -> None:
        self._db: Database = db
        self._path: str = path

    async def point(self, read: Callable[[Database], T], /) -> T:
        """Yield to other tasks, then read. A checkpoint."""
        await trio.lowlevel.checkpoint()
        try:
            if self._db.in_transaction:
                roll_back(self._db)
            return read(self._db)
        except apsw.Error as error:
            raise translate(error, self._path) from error

    async def scan(self, read: Callable[[Database], T], /) -> T:
        """Do the same as `point`."""
        return await self.point(read)

    def close(self) -> None:
        """Do nothing: the connection belongs to the writer."""


class OwnReads:
    """Reads on separate connections: a snapshot each, never blocked by a write.

    `point` is a cancellation point, but yields to other tasks only after many reads of one task in a row: a read that takes ten
    microseconds must not wait for a pass of a busy loop.
    """

    def __init__(self, connect: Callable[[], Database], path: str, threads: int) -> None:
        self._connect: Callable[[], Database] = connect
        self._path: str = path
        self._near: Database = connect()
        self._idle: list[Database] = []
        self._limiter: trio.CapacityLimiter = trio.CapacityLimiter(threads)
        self._reader: trio.lowlevel.Task | None = None
        self._streak: int = 0
        self._last: float = 0.0

    async def point(self, read: Callable[[Database], T], /) -> T:
        """Read a few rows on the loop. Cancelled before it starts or not at all."""
        await trio.lowlevel.checkpoint_if_cancelled()
        task = trio.lowlevel.current_task()
        if task is self._reader and perf_counter() - self._last < PAUSE_SECONDS:
            self._streak += 1
            if self._streak >= STREAK:
                self._streak = 0
                await trio.lowlevel.cancel_shielded_checkpoint()
        else:
            self._reader = task
            self._streak = 0
        try:
            return read(self._near)
        except apsw.Error as error:
            raise translate(error, self._path) from error
        finally:
            self._last = perf_counter()

    async def scan(self, read: Callable[[Database], T], /) -> T:
        """Read in a thread. When cancelled, wait for the running read, which is bounded, and then raise `Cancelled`."""
        async with self._limiter:
            db = self._idle.pop() if self._idle else self._connect()
            try:
                return await trio.to_thread.run_sync(read, db, limiter=_unlimited)
            except apsw.Error as error:
                raise translate(error, self._path) from error
            finally:
                self._idle.append(db)

    def close(self) -> None:
        """Close all connections; nothing may be reading."""
        self._near.close()
        while self._idle:
            self._idle.pop().close()


_unlimited: Final = trio.CapacityLimiter(float("inf"))


class Verbs:
    """The base of the verb classes. Made only by `open_store`."""

    _writer: Writes
    _reads: Reads
    _clock: Callable[[], float]
    _lease_clock: Callable[[], float]
    """The clock for leases: the same for all nodes, independent of the clocks of their hosts."""
    owner: str
    """The incarnation that owns what this handle begins."""
    lease_seconds: float
    """The duration of a node's lease; 0 for the only owner of a database."""

    def now(self) -> float:
        """Return the time by which due times in the store are decided."""
        return self._clock()

    def _write(
        self, verb: Callable[Concatenate[Database, P], T], *args: P.args, **named: P.kwargs
    ) -> Coroutine[Any, Any, T]:
        assert not named, "verbs take positional arguments"
        return self._writer.submit(self._fenced(verb) if self.lease_seconds else verb, *args)

    async def _write_heavily(self, verb: Callable[Concatenate[Database, P], T], *args: P.args, **named: P.kwargs) -> T:
        assert not named, "verbs take positional arguments"
        return await self._writer.submit(self._fenced(verb) if self.lease_seconds else verb, *args, weight=Weight.HEAVY)

    def _post(self, verb: Callable[Concatenate[Database, P], object], *args: P.args, **named: P.kwargs) -> None:
        """Enqueue a write without waiting for it. Its failure is not reported, nor that this node was taken over."""
        assert not named, "verbs take positional arguments"
        self._writer.post(self._fenced(verb) if self.lease_seconds else verb, *args)

    def _fenced(self, verb: Callable[Concatenate[Database, P], T]) -> Callable[Concatenate[Database, P], T]:
        """Return the verb with a check of this node's own row in the same transaction: a reaped node writes nothing any more."""
        owner = self.owner

        @wraps(verb)
        def fenced(db: Database, *args: P.args, **named: P.kwargs) -> T:
            if not exists(db, "SELECT 1 FROM nodes WHERE incarnation = ?", (owner,)):
                raise Fenced("this node was taken over and its work was reaped; nothing was written")
            return verb(db, *args, **named)

        return fenced

    async def _read(self, verb: Callable[Concatenate[Database, P], T], *args: P.args, **named: P.kwargs) -> T:
        return await self._reads.point(lambda db: verb(db, *args, **named))

    async def _scan(self, verb: Callable[Concatenate[Database, P], T], *args: P.args, **named: P.kwargs) -> T:
        return await self._reads.scan(lambda db: verb(db, *args, **named))
