"""The writer: one task that runs all writes, with group commit.

Callers enqueue a verb (a plain function of the connection) and park. The writer runs everything that is queued in one transaction, commits once, and
only then wakes the callers. A failing verb fails the attempt: its transaction is rolled back, and all verbs of it run again, each in a savepoint of its own.
So do those of the next batch. Without a savepoint SQLite copies no page before a change of it, which is a twentieth of a turn.
A verb that is in the queue always runs: cancelling its caller abandons the wait, never the write. A caller that is alone need not queue: it
does what the writer would do, in its own task.

Verbs run on the loop (they access memory: SQLite's page cache), in slices so that a long batch does not block the loop; what waits for the
disk, the commit, runs in the store's own thread, one hop per batch. A verb in a thread would have to reacquire the interpreter's lock from a
busy loop after each statement, which makes thread-per-call drivers slow under load. Verbs that scan or delete many rows are marked
`heavy` and run entirely in the thread.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from enum import Enum
from itertools import chain
from time import perf_counter
from typing import Any, Final, Protocol, TypeVar, cast

import apsw
import msgspec
import outcome
import trio

from hermes_trio.store.errors import StoreClosed, StoreError, translate
from hermes_trio.store.signals import Signals

from .files import BUSY_MILLISECONDS, DatabaseFile
from .rows import Database, roll_back

T = TypeVar("T")

QUEUE_LIMIT: Final = 4096
"""The most verbs in the queue; further callers wait before they enqueue."""

BATCH_LIMIT: Final = 512
"""The most verbs in one transaction. A higher limit gains nothing: the commit's cost per verb is small long before."""

SLICE_SECONDS: Final = 0.001
"""How long a batch runs on the loop before it yields to the other tasks, if they need less than that themselves."""

LONGEST_SLICE: Final = 0.05
"""A batch may run for as long as the other tasks have just taken, up to this: a loop full of requests must not starve the writes that end them."""

LONE_VERBS: Final = 16
"""One of this many lone writes still goes through the queue: other tasks run, and concurrent writers are noticed."""


class Weight(Enum):
    """How a verb is run."""

    LIGHT = "light"
    """A few indexed rows: on the loop, in the batch's transaction."""
    HEAVY = "heavy"
    """Scans or deletes much: in the worker thread, in a transaction of its own."""
    BARE = "bare"
    """Cannot run inside a transaction (checkpoint, vacuum): in the worker thread."""


class Worker(Protocol):
    """Where blocking work runs, one piece at a time: `start` it, wait until it is `over`, `take` its value or its error."""

    def start(self, work: Callable[[], Any], /) -> None:
        """Begin `work`. It runs to its end even if its caller is cancelled."""
        ...

    async def over(self) -> None:
        """Wait until the work has ended. If the caller is cancelled here, another task may wait in its place."""
        ...

    def take(self) -> Any:
        """Return the result of the work or raise its error; afterwards the next work can start."""
        ...

    async def __aenter__(self) -> Worker: ...

    async def __aexit__(self, *failure: object) -> None: ...


class _Call(msgspec.Struct, eq=False):
    verb: Callable[..., object]
    args: tuple[object, ...]
    weight: Weight
    task: trio.lowlevel.Task | None = None
    value: object = None
    error: Exception | None = None


class WriterStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The counters of a writer since it was opened."""

    verbs: int
    commits: int
    waiting: int
    largest_batch: int


class ThreadWorker:
    """A thread of the store for the body of the `async with`; leaving waits for its end.

    Both sides wait for a byte on a pair of sockets: a hop costs a fifth of what it costs through a queue and `run_sync_soon`, because neither side has
    to acquire a lock from the other. The thread is daemonic, so that a program that crashes does not wait for it.
    """

    def __init__(self, name: str) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._work: Callable[[], Any] | None = None
        self._result: outcome.Value[Any] | outcome.Error | None = None
        self._thread: threading.Thread = threading.Thread(target=self._run, name=name, daemon=True)

    async def __aenter__(self) -> ThreadWorker:
        self._thread.start()
        return self

    async def __aexit__(self, *failure: object) -> None:
        self._ours.close()
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self._thread.join)

    def _run(self) -> None:
        with self._theirs as bell, suppress(OSError):  # the socket was closed: no task waits any more
            while bell.recv(1):
                assert self._work is not None
                self._result = outcome.capture(self._work)
                bell.send(b"\0")

    def start(self, work: Callable[[], Any], /) -> None:
        """Begin `work` in the thread and yield the interpreter's lock to it: otherwise it would start only when the loop is idle."""
        self._work = work
        self._ours.send(b"\0")
        os.sched_yield()

    async def over(self) -> None:
        """Wait for the thread's byte."""
        await trio.lowlevel.wait_readable(self._ours)

    def take(self) -> Any:
        """Return the result. Reads the byte that announced it only now, so that until then another task can take over the wait."""
        self._ours.recv(1)
        result, self._result, self._work = self._result, None, None
        assert result is not None
        return result.unwrap()


class InlineWorker:
    """Runs everything on the loop, without a thread. For virtual time, property tests and databases in memory."""

    _result: outcome.Value[Any] | outcome.Error

    async def __aenter__(self) -> InlineWorker:
        return self

    async def __aexit__(self, *failure: object) -> None:
        return None

    def start(self, work: Callable[[], Any], /) -> None:
        """Run `work` at once, in this call."""
        self._result = outcome.capture(work)

    async def over(self) -> None:
        """Return at once: inline work has already finished."""

    def take(self) -> Any:
        """Return the result."""
        return self._result.unwrap()


class Writer:
    """Owns the writing connection. `run` is its task; it ends when `close` was called and the queue is empty.

    `slices` says whether other tasks may run in the middle of a batch; they may not where reads use the same connection. While no other caller
    waits, a verb runs in its caller's task, which saves two steps of the scheduler; with `at_once`, for a database in memory, its commit too.
    """

    def __init__(
        self,
        db: Database,
        worker: Worker,
        path: str,
        *,
        slices: bool,
        at_once: bool = False,
        signals: Signals | None = None,
        file: DatabaseFile | None = None,
    ) -> None:
        self.around: Callable[[str], AbstractContextManager[object]] | None = None
        """Entered, with the verb's name, around every write that a caller waits for."""
        self._db: Database = db
        self._file: DatabaseFile | None = file
        self._signals: Signals = Signals() if signals is None else signals
        self._worker: Worker = worker
        self._path: str = path
        self._slices: bool = slices
        self._at_once: bool = at_once
        self._was_lone: bool = False
        """Whether the last batch had one verb, so that a caller need not wait for others to share a transaction with."""
        self._wary: bool = False
        """Whether a verb of the last batch failed: then the next one opens savepoints at once. Verbs that always fail must not double the work of all."""
        self._queue: deque[_Call] = deque()
        self._room: trio.lowlevel.ParkingLot = trio.lowlevel.ParkingLot()
        self._sleeper: trio.lowlevel.Task | None = None
        """The writer's task while it is idle, else None."""
        self._orphaned: bool = False
        """Whether the worker runs work whose caller was cancelled: the writer waits for its end."""
        self._closing: bool = False
        self._ended: bool = False
        self._verbs: int = 0
        self._commits: int = 0
        self._largest: int = 0

    def statistics(self) -> WriterStatistics:
        """Return a snapshot of the counters."""
        return WriterStatistics(
            verbs=self._verbs, commits=self._commits, waiting=len(self._queue), largest_batch=self._largest
        )

    def submit(self, verb: Callable[..., T], *args: object, weight: Weight = Weight.LIGHT) -> Coroutine[Any, Any, T]:
        """Run `verb(connection, *args)` in the next batch; return when it is durable, or raise its error.

        If cancelled before the verb is in the queue, the verb never runs. If cancelled later, it runs without a waiting caller.
        """
        if self.around is not None:
            return self._submit_inside(self.around(getattr(verb, "__name__", "write")), verb, args, weight)
        return self._submit(verb, args, weight)

    async def _submit_inside(
        self, manager: AbstractContextManager[object], verb: Callable[..., T], args: tuple[object, ...], weight: Weight
    ) -> T:
        with manager:
            return await self._submit(verb, args, weight)

    async def _submit(self, verb: Callable[..., T], args: tuple[object, ...], weight: Weight) -> T:
        await trio.lowlevel.checkpoint_if_cancelled()
        lone = self._was_lone and (self._verbs + 1) % LONE_VERBS and not self._queue and self._sleeper is not None
        if lone and weight is Weight.LIGHT:
            if not self._at_once:
                return await self._write_alone(verb, args)
            self._verbs += 1
            self._commits += 1
            value = run_now(self._db, self._path, verb, *args)
            self._announce()
            return value
        while len(self._queue) >= QUEUE_LIMIT and not self._ended:
            await self._room.park()
        call = self._enqueue(verb, args, weight)
        call.task = trio.lowlevel.current_task()

        def abandon(_: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
            call.task = None
            return trio.lowlevel.Abort.SUCCEEDED

        return cast(T, await trio.lowlevel.wait_task_rescheduled(abandon))

    @trio.lowlevel.enable_ki_protection
    async def _write_alone(self, verb: Callable[..., T], args: tuple[object, ...]) -> T:
        """Run and commit a verb that has no others to share a transaction with, in the task of its caller; the writer's own task sleeps meanwhile.

        If the caller is cancelled, the writer waits for the end of the commit.
        """
        db = self._db
        sleeper, self._sleeper = self._sleeper, None
        try:
            await self._begin()
            value = verb(db, *args)
            if not db.in_transaction:
                raise StoreError(f"{self._path}: the transaction was rolled back; nothing was written")
            await self._do(self._commit)
            self._announce()
        except apsw.Error as error:
            self._undo()
            raise translate(error, self._path) from error
        except BaseException:
            self._undo()
            raise
        finally:
            self._verbs += 1
            self._commits += 1
            self._was_lone = not self._queue
            self._sleeper = sleeper
            if self._queue or self._closing or self._orphaned:
                self._wake()
        return value

    def _undo(self) -> None:
        if not self._orphaned and self._db.in_transaction:
            self._roll_back()

    def _announce(self) -> None:
        """Announce the signals of a commit to their subscribers."""
        if self._db.signals:
            signals = self._db.signals.copy()
            self._db.signals.clear()
            self._signals.announce(signals)

    def post(self, verb: Callable[..., object], *args: object) -> None:
        """Enqueue a verb without waiting for it (bookkeeping). It is dropped if the queue is full or the writer has ended."""
        if len(self._queue) < QUEUE_LIMIT and not self._ended:
            self._enqueue(verb, args, Weight.LIGHT)

    def _enqueue(self, verb: Callable[..., object], args: tuple[object, ...], weight: Weight) -> _Call:
        if self._ended:
            raise StoreClosed(f"{self._path} is closed; nothing was written")
        call = _Call(verb, args, weight)
        self._queue.append(call)
        self._wake()
        return call

    def _wake(self) -> None:
        if self._sleeper is not None:
            sleeper, self._sleeper = self._sleeper, None
            trio.lowlevel.reschedule(sleeper)

    def close(self) -> None:
        """Let `run` end once the queue is empty."""
        self._closing = True
        self._wake()

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Write until closed. Shielded, also against Ctrl-C: the queued verbs of a cancelled runtime are still written."""
        try:
            with trio.CancelScope(shield=True):
                while True:
                    if self._orphaned:
                        await self._end_orphan()
                    elif self._queue:
                        await self._one_batch()
                    elif self._closing:
                        return
                    else:
                        self._sleeper = trio.lowlevel.current_task()
                        await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
        finally:
            self._ended = True
            left, self._queue = self._queue, deque()
            for call in left:
                call.error = StoreClosed(f"{self._path} was closed before this write; nothing was written")
                self._settle(call)
            self._room.unpark_all()

    async def _do(self, work: Callable[[], Any]) -> Any:
        self._worker.start(work)
        try:
            await self._worker.over()
        except BaseException:  # cancelled, or Ctrl-C, which the main task gets wherever it waits
            self._orphaned = True
            raise
        return self._worker.take()

    async def _one_batch(self) -> None:
        if self._queue[0].weight is Weight.LIGHT:
            calls = await self._light_batch()
        else:
            call = self._queue.popleft()
            calls = [call]
            await self._do(lambda: self._alone(call))
        self._verbs += len(calls)
        self._commits += 1
        self._largest = max(self._largest, len(calls))
        self._was_lone = len(calls) == 1
        for call in calls:
            self._settle(call)
        self._announce()
        if len(self._queue) < QUEUE_LIMIT:
            self._room.unpark_all()

    async def _end_orphan(self) -> None:
        """Wait for the work of a cancelled caller, ignore its error, and roll back a transaction that it left open."""
        with suppress(Exception):
            await self._worker.over()
            self._worker.take()
        if self._db.in_transaction:
            await self._do(self._roll_back)
        self._orphaned = False
        self._announce()

    def _settle(self, call: _Call) -> None:
        task = call.task
        if task is None:
            return
        if call.error is not None:
            trio.lowlevel.reschedule(task, outcome.Error(call.error))
        else:
            trio.lowlevel.reschedule(task, outcome.Value(call.value))

    async def _light_batch(self) -> list[_Call]:
        """Run the next verbs in one transaction. If one of them fails, run them again and the rest, with a savepoint around each."""
        calls: list[_Call] = []
        again = False
        try:
            try:
                await self._run_each(self._take(calls), self._attempt if self._wary else self._run)
            except Exception:
                if not calls or self._wary:
                    raise
                self._wary = again = True
            if again:
                await self._do(self._roll_back)
                await self._run_each(chain(calls.copy(), self._take(calls)), self._attempt)
            if self._wary:
                self._wary = any(call.error is not None for call in calls)
            if not self._db.in_transaction:
                raise StoreError(f"{self._path}: the transaction was rolled back; nothing was written")
            await self._do(self._commit)
        except Exception as error:
            if not calls:
                calls.append(self._queue.popleft())
            await self._do(self._roll_back)
            self._fail_all(calls, error)
        return calls

    def _take(self, calls: list[_Call]) -> Iterator[_Call]:
        """Move the next calls of a batch from the queue to `calls`, one by one."""
        queue = self._queue
        while queue and queue[0].weight is Weight.LIGHT and len(calls) < BATCH_LIMIT:
            call = queue.popleft()
            calls.append(call)
            yield call

    async def _run_each(self, calls: Iterable[_Call], run: Callable[[_Call], None]) -> None:
        """Begin a transaction and run calls in it, in slices."""
        await self._begin()
        limit = perf_counter() + SLICE_SECONDS
        for call in calls:
            run(call)
            if self._slices and (left := perf_counter()) > limit:
                await trio.lowlevel.cancel_shielded_checkpoint()
                back = perf_counter()
                limit = back + max(SLICE_SECONDS, min(back - left, LONGEST_SLICE))

    async def _begin(self) -> None:
        db = self._db
        if self._file is not None:
            self._file.check()
        if db.in_transaction:  # a rollback failed before
            await self._do(self._roll_back)
        db.signals.clear()
        db.set_busy_timeout(0)
        try:
            db.execute("BEGIN IMMEDIATE")
            return
        except apsw.BusyError:
            pass
        finally:
            db.set_busy_timeout(BUSY_MILLISECONDS)
        # Another process writes. Shielded: the task that began a transaction must end it.
        with trio.CancelScope(shield=True):
            await self._do(self._begin_waiting)

    def check_file(self) -> None:
        """Raise `StoreReplaced` if the file that is open is no longer the one that has its name. Does nothing for a database in memory."""
        if self._file is not None:
            self._file.check()

    def _begin_waiting(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def _commit(self) -> None:
        self._db.execute("COMMIT")

    def _roll_back(self) -> None:
        """Roll back the open transaction, if any. If that fails, it is rolled back before the next one begins, or before the next read of this connection."""
        self._db.signals.clear()
        if self._db.in_transaction:
            with suppress(apsw.Error):
                roll_back(self._db)

    def _run(self, call: _Call) -> None:
        call.value = call.verb(self._db, *call.args)

    def _attempt(self, call: _Call) -> None:
        db = self._db
        if not db.in_transaction:
            call.error = StoreError(f"{self._path}: the transaction was rolled back; nothing was written")
            return
        db.execute("SAVEPOINT verb")
        try:
            call.value = call.verb(db, *call.args)
        except Exception as error:
            call.error = self._owned(error)
            if db.in_transaction:
                db.execute("ROLLBACK TO verb; RELEASE verb")
        else:
            db.execute("RELEASE verb")

    def _alone(self, call: _Call) -> None:
        db = self._db
        try:
            if db.in_transaction:  # a rollback failed before
                roll_back(db)
            if call.weight is Weight.BARE:
                call.value = call.verb(db, *call.args)
                return
            self.check_file()
            db.execute("BEGIN IMMEDIATE")
            try:
                call.value = call.verb(db, *call.args)
                db.execute("COMMIT")
            finally:
                if db.in_transaction:
                    self._roll_back()
        except Exception as error:
            call.error = self._owned(error)

    def _fail_all(self, calls: list[_Call], error: Exception) -> None:
        for call in calls:
            if call.error is None:
                mine = translate(error, self._path)
                call.error = type(mine)(*mine.args) if mine is error and len(calls) > 1 else mine

    def _owned(self, error: Exception) -> Exception:
        """Return the error for the caller: an error of the driver is translated to the store's, any other is returned unchanged."""
        return translate(error, self._path) if isinstance(error, apsw.Error) else error


def run_now(db: Database, path: str, verb: Callable[..., T], *args: Any) -> T:
    """Run a verb in a transaction of its own, in this call. If its rollback fails, it is rolled back before the next transaction or read."""
    try:
        if db.in_transaction:  # a rollback failed before
            roll_back(db)
        db.execute("BEGIN IMMEDIATE")
        try:
            value = verb(db, *args)
            db.execute("COMMIT")
        except BaseException:
            db.signals.clear()
            if db.in_transaction:
                with suppress(apsw.Error):
                    roll_back(db)
            raise
    except apsw.Error as error:
        raise translate(error, path) from error
    return value
