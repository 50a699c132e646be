"""Group commit on PostgreSQL: the waiting verbs form one unit, and a unit is one transaction.

A unit begins with the fence and its marker, takes the locks of all its verbs in a fixed order, runs the verbs and commits. Verbs that lock different names
run concurrently, and many calls of a turn's verbs share a few statements (`batches`), so that a large unit costs few round trips. While one unit runs,
the next one is collected. A failing verb fails the whole attempt, and the unit is run again with a savepoint around each verb. When the connection breaks, the
unit is run again on the next one: if its commit had been sent, the marker shows whether it happened; if so, the earlier results are returned.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from time import perf_counter
from typing import Any, Final, TypeVar, cast

import msgspec
import outcome
import trio

from hermes_trio.store.errors import CommitUncertain, StoreClosed, StoreError, StoreUnavailable
from hermes_trio.store.signals import Signal
from hermes_trio.store.sqlite.writer import Weight, WriterStatistics

from .batches import BATCHES, Refusal
from .bridge import run_waiting, wait_here
from .database import PostgresDatabase, encode, run_together
from .errors import ALREADY, FENCED, REPEATABLE, LinkBroken, SqlError, translate_sql
from .link import PostgresLink
from .locks import locks_of, runs_of
from .reconnecting_link import ReconnectingLink

T = TypeVar("T")

QUEUE_LIMIT: Final = 4096
"""The most verbs in the queue; further callers wait before they enqueue."""

UNIT_LIMIT: Final = 128
"""The most verbs in one unit. A higher limit gains little and holds more locks until the commit."""

WAIT_SECONDS: Final = 2.0
"""Seconds that a verb waits for a database that cannot be reached."""

LONG_WAIT_SECONDS: Final = 60.0
"""The same for a verb that writes the end of finished work, whose result would be lost otherwise."""

ATTEMPTS: Final = 12
"""The maximum number of attempts for a unit that conflicts with other writers."""

LOOK_SECONDS: Final = 0.2

logger: Final = logging.getLogger(__name__)


class _Call(msgspec.Struct, eq=False):
    verb: Callable[..., object]
    args: tuple[object, ...]
    until: float
    locks: frozenset[int]
    runs: frozenset[str]
    task: trio.lowlevel.Task | None = None
    result: outcome.Value[Any] | outcome.Error | None = None
    settled: bool = False


class Unit:
    """The state of one unit, kept over all attempts to write it."""

    def __init__(self, calls: list[_Call], number: int) -> None:
        self.calls = calls
        self.number = number
        self.careful = False
        """Whether each verb gets a savepoint."""
        self.isolated = False
        """Whether a verb that keeps conflicting with another writer fails alone."""
        self.results: list[outcome.Value[Any] | outcome.Error] = []
        """What the verbs returned or raised in the attempt whose commit was sent last."""
        self.signals: list[Signal] = []
        self.sent = False
        """Whether a commit was sent and its result is unknown."""


class _VerbFailed(Exception):
    """Raised when a verb failed in an attempt without savepoints."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error: Exception = error


class UnitWriter:
    """Writes the queued verbs, one unit at a time. After `close`, `run` ends when every queued call has been written or has timed out."""

    def __init__(
        self,
        line: ReconnectingLink,
        slot: str,
        where: str,
        *,
        node: Callable[[], str],
        announce: Callable[[Sequence[Signal]], None],
        long_waiting: frozenset[Callable[..., object]] = frozenset(),
        limit: int = UNIT_LIMIT,
    ) -> None:
        self.around: Callable[[str], AbstractContextManager[object]] | None = None
        """Entered, with the verb's name, around every write that a caller waits for."""
        self.heavy: UnitWriter | None = None
        """The writer for verbs that scan or delete many rows."""
        self._line: ReconnectingLink = line
        self._slot: str = slot
        self._where: str = where
        self._node: Callable[[], str] = node
        self._announce: Callable[[Sequence[Signal]], None] = announce
        self._long_waiting: frozenset[Callable[..., object]] = long_waiting
        self._limit: int = limit
        self._queue: deque[_Call] = deque()
        self._wanted: trio.Event = trio.Event()
        self._room: trio.lowlevel.ParkingLot = trio.lowlevel.ParkingLot()
        self._closing: bool = False
        self._ended: bool = False
        self._numbers: int = 0
        self._verbs: int = 0
        self._units: int = 0
        self._largest: int = 0
        self.repeated: int = 0
        """The number of attempts that were repeated because of a conflict with another writer."""
        self.resent: int = 0
        """The number of times that a unit was sent again because the response to its commit was lost."""
        self.deadlocks: int = 0

    def statistics(self) -> WriterStatistics:
        """Return a snapshot of the counters."""
        return WriterStatistics(
            verbs=self._verbs, commits=self._units, waiting=len(self._queue), largest_batch=self._largest
        )

    async def submit(self, verb: Callable[..., T], *args: object, weight: Weight = Weight.LIGHT) -> T:
        """Run `verb(database, *args)` in the next unit; return when it is durable, or raise its error.

        If cancelled before the verb is in the queue, the verb never runs. If cancelled later, it runs without a waiting caller.
        """
        if weight is not Weight.LIGHT and self.heavy is not None:
            return await self.heavy.submit(verb, *args)
        if self.around is not None:
            with self.around(getattr(verb, "__name__", "write")):
                return await self._submit(verb, args)
        return await self._submit(verb, args)

    async def _submit(self, verb: Callable[..., T], args: tuple[object, ...]) -> T:
        await trio.lowlevel.checkpoint_if_cancelled()
        while len(self._queue) >= QUEUE_LIMIT and not self._ended:
            await self._room.park()
        call = self._enqueue(verb, args)
        call.task = trio.lowlevel.current_task()

        def abandon(_: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
            call.task = None
            return trio.lowlevel.Abort.SUCCEEDED

        return cast(T, await trio.lowlevel.wait_task_rescheduled(abandon))

    def post(self, verb: Callable[..., object], *args: object) -> None:
        """Enqueue a verb without waiting for it (bookkeeping). It is dropped if the queue is full or the writer has ended."""
        if len(self._queue) < QUEUE_LIMIT and not self._ended:
            self._enqueue(verb, args)

    def check_file(self) -> None:
        """Do nothing: a server has no file that could be replaced."""

    def _enqueue(self, verb: Callable[..., object], args: tuple[object, ...]) -> _Call:
        if self._ended:
            raise StoreClosed(f"the store {self._where} is closed; nothing was written")
        seconds = LONG_WAIT_SECONDS if verb in self._long_waiting else WAIT_SECONDS
        call = _Call(verb, args, perf_counter() + seconds, locks_of(verb, args), runs_of(verb, args))
        self._queue.append(call)
        self._wanted.set()
        return call

    def close(self) -> None:
        """Let `run` end once the queue is empty."""
        self._closing = True
        self._wanted.set()

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Write until closed. Shielded, also against Ctrl-C: the queued verbs of a cancelled runtime are still written."""
        try:
            with trio.CancelScope(shield=True):
                while True:
                    if not self._queue:
                        if self._closing:
                            return
                        self._wanted = trio.Event()
                        await self._wanted.wait()
                        continue
                    calls = [self._queue.popleft() for _ in range(min(self._limit, len(self._queue)))]
                    self._numbers += 1
                    unit = Unit(calls, self._numbers)
                    await self._write(unit)
                    self._verbs += len(calls)
                    self._units += 1
                    self._largest = max(self._largest, len(calls))
                    for call in calls:
                        self._settle(call)
                    if unit.signals:
                        self._announce(unit.signals)
                    if len(self._queue) < QUEUE_LIMIT:
                        self._room.unpark_all()
                    if 0 < len(self._queue) < self._limit:
                        # Let the callers that were just woken enqueue their next writes, so that these share a unit with the waiting ones.
                        for _ in range(2):
                            await trio.lowlevel.cancel_shielded_checkpoint()
        finally:
            self._ended = True
            left, self._queue = self._queue, deque()
            for call in left:
                text = f"the store {self._where} was closed before this write; nothing was written"
                call.result = outcome.Error(StoreClosed(text))
                self._settle(call)
            self._room.unpark_all()

    def _settle(self, call: _Call) -> None:
        if call.settled:
            return
        call.settled = True
        if call.task is not None:
            assert call.result is not None
            trio.lowlevel.reschedule(call.task, call.result)

    def _give_up(self, calls: Sequence[_Call], *, sent: bool = False) -> list[_Call]:
        """Fail the calls whose wait for the database has timed out; return the others."""
        now = perf_counter()
        kept: list[_Call] = []
        for call in calls:
            if call.until > now:
                kept.append(call)
                continue
            if sent:
                text = (
                    f"the connection to the database {self._where} broke during a commit and was not restored in time"
                )
                error: StoreError = CommitUncertain(f"{text}; read the row, or write it again")
            else:
                error = StoreUnavailable(f"the database {self._where} cannot be reached; nothing was written")
            call.result = outcome.Error(error)
            self._settle(call)
        return kept

    async def _await_link(self, unit: Unit) -> PostgresLink | None:
        """Return the link. While there is none, fail the calls whose wait has timed out; return None once no call of the unit is left."""
        while True:
            with suppress(StoreUnavailable):
                return await self._line.link(LOOK_SECONDS)
            if unit.sent:
                # The unit may have been written, so its calls must succeed or fail together.
                if max(call.until for call in unit.calls) <= perf_counter():
                    self._give_up(unit.calls, sent=True)
                    return None
            else:
                unit.calls = self._give_up(unit.calls)
            self._queue = deque(self._give_up(self._queue))
            if not unit.calls:
                return None

    async def _write(self, unit: Unit) -> None:
        """Write a unit, repeating the attempt after a conflict or a lost connection. Afterwards every call of it has a value or an error."""
        attempts = 0
        while (link := await self._await_link(unit)) is not None:
            try:
                await run_waiting(lambda link=link: self._attempt(link, unit))
                break
            except LinkBroken:
                if unit.sent:
                    self.resent += 1
            except _VerbFailed as failed:
                if len(unit.calls) == 1:
                    unit.results = [outcome.Error(failed.error)]
                    break
                unit.careful = True
            except SqlError as error:
                if error.state == ALREADY and unit.sent:
                    break
                attempts += 1
                self.deadlocks += error.state == "40P01"
                if error.state in REPEATABLE and attempts < ATTEMPTS:
                    self.repeated += 1
                    unit.careful = unit.careful or len(unit.calls) > 1
                    unit.isolated = attempts > ATTEMPTS // 2
                    await trio.sleep(random.uniform(0, 0.005 * attempts))
                elif unit.careful or len(unit.calls) == 1 or error.state == FENCED:
                    self._fail(unit, error)
                    return
                else:
                    unit.careful = True
        if link is None:
            return
        for call, result in zip(unit.calls, unit.results, strict=True):
            if isinstance(result, outcome.Error):
                result = outcome.Error(self._owned(cast(Exception, result.error)))
            call.result = result

    def _fail(self, unit: Unit, error: SqlError) -> None:
        unit.signals = []
        for call in unit.calls:
            call.result = outcome.Error(self._owned(error))

    def _owned(self, error: Exception) -> Exception:
        return translate_sql(error, self._where)

    def _attempt(self, link: PostgresLink, unit: Unit) -> None:
        """Run a unit once, in a greenlet. Sets `results` before the commit is sent."""
        db = PostgresDatabase(link)
        try:
            link.send("BEGIN")
            link.send("SELECT begin_unit($1, $2, $3)", [encode(self._node()), encode(self._slot), encode(unit.number)])
            if locks := sorted(frozenset[int]().union(*(call.locks for call in unit.calls))):
                link.send(
                    "SELECT pg_advisory_xact_lock(k) FROM unnest($1::bigint[]) AS k",
                    [("{" + ",".join(map(str, locks)) + "}").encode()],
                )
            if unit.sent:
                db.settle()  # raises, before any verb runs, if the earlier attempt was committed
            if unit.careful:
                results = [self._one(db, call, unit) for call in unit.calls]
            else:
                results = [result for wave in _waves(unit) for result in _together(db, wave)]
            link.send("COMMIT")
            unit.results, unit.signals, unit.sent = results, db.signals, True
            db.settle()
            unit.sent = False
        except LinkBroken:
            raise
        except BaseException:
            self._roll_back(link)
            raise

    def _one(self, db: PostgresDatabase, call: _Call, unit: Unit) -> outcome.Value[Any] | outcome.Error:
        """Run a verb in a savepoint of its own."""
        mark = len(db.signals)
        db.execute("SAVEPOINT verb")
        try:
            value = _alone(call, db)
            db.execute("RELEASE verb")
            db.settle()
        except LinkBroken:
            raise
        except Exception as error:
            if isinstance(error, SqlError) and error.state in REPEATABLE and not unit.isolated:
                raise
            del db.signals[mark:]
            db.settle_always()
            db.execute("ROLLBACK TO verb")
            db.execute("RELEASE verb")
            db.settle()
            return outcome.Error(error)
        return outcome.Value(value)

    def _roll_back(self, link: PostgresLink) -> None:
        """Roll back the transaction of a failed attempt. Statements in the open segment are skipped or rolled back with it."""
        with suppress(SqlError):
            wait_here(link.over(link.sync()))
        link.send("ROLLBACK")
        wait_here(link.over(link.sync()))


def _alone(call: _Call, db: PostgresDatabase) -> Any:
    """Run one call; raise its error."""
    batch = BATCHES.get(call.verb)
    if batch is None:
        return call.verb(db, *call.args)
    (value,) = batch(db, [call.args])
    if isinstance(value, Refusal):
        raise value.error
    return value


def _together(db: PostgresDatabase, wave: Sequence[_Call]) -> list[outcome.Value[Any] | outcome.Error]:
    """Run the calls of a wave concurrently, those of one verb in one batch where the verb has one."""
    groups: dict[object, list[int]] = {}
    for place, call in enumerate(wave):
        groups.setdefault(call.verb if call.verb in BATCHES else place, []).append(place)
    values: list[Any] = [None] * len(wave)
    works = [partial(_run, [wave[place] for place in places]) for places in groups.values()]
    for places, found in zip(groups.values(), run_together(db, works), strict=True):
        for place, value in zip(places, found, strict=True):
            values[place] = value
    return [outcome.Error(value.error) if isinstance(value, Refusal) else outcome.Value(value) for value in values]


def _run(calls: Sequence[_Call], db: PostgresDatabase) -> list[Any]:
    """Run calls of one verb and return their values. Raises `_VerbFailed` if the verb itself fails."""
    verb = calls[0].verb
    batch = BATCHES.get(verb)
    try:
        return [verb(db, *calls[0].args)] if batch is None else batch(db, [call.args for call in calls])
    except (LinkBroken, SqlError):
        raise
    except Exception as error:
        raise _VerbFailed(error) from None


def _waves(unit: Unit) -> list[list[_Call]]:
    """Split the calls of a unit, in their order, into waves in which no two calls take the same lock or write the same run."""
    waves: list[list[_Call]] = [[]]
    taken: set[int | str] = set()
    for call in unit.calls:
        if not (taken.isdisjoint(call.locks) and taken.isdisjoint(call.runs)):
            waves.append([])
            taken = set()
        waves[-1].append(call)
        taken |= call.locks
        taken |= call.runs
    return waves
