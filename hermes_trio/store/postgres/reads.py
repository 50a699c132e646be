"""Reads on links that many tasks share: each statement is a separate snapshot, and none waits for a write.

The reads that every turn and every reader of events makes are batched: while one statement runs, new reads wait for the next one, which
reads the rows of all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Final, TypeVar, cast

import msgspec
import outcome
import trio

from hermes_trio.runtime.ports import EventRow
from hermes_trio.store.errors import StoreClosed, StoreUnavailable
from hermes_trio.store.sqlite import nodes, runs
from hermes_trio.store.sqlite.encoding import load_mapping
from hermes_trio.store.sqlite.rows import many

from .batches import Batch, json_rows, records
from .bridge import run_waiting
from .database import PostgresDatabase
from .errors import LinkBroken, SqlError, translate_sql
from .reconnecting_link import ReconnectingLink

T = TypeVar("T")

WAIT_SECONDS: Final = 2.0
"""How long a read waits for a database that cannot be reached."""

GATHER_LIMIT: Final = 256
"""The most reads in one statement."""


class PostgresReads:
    """Reads one by one."""

    def __init__(self, near: ReconnectingLink, far: ReconnectingLink, where: str) -> None:
        self._near: ReconnectingLink = near
        self._far: ReconnectingLink = far
        self._where: str = where

    async def point(self, read: Callable[[Any], T], /) -> T:
        """Read a few rows."""
        return await read_rows(self._near, self._where, read)

    async def scan(self, read: Callable[[Any], T], /) -> T:
        """Read more rows, on the connection for scans."""
        return await read_rows(self._far, self._where, read)

    def close(self) -> None:
        """Do nothing: the lines belong to the store."""


async def read_rows(
    line: ReconnectingLink, where: str, read: Callable[[PostgresDatabase], T], until: float | None = None
) -> T:
    """Run `read(database)`; repeat it on the next link if one breaks, at most `until` a time. Raises the store's errors."""
    until = perf_counter() + WAIT_SECONDS if until is None else until
    while True:
        link = await line.link(max(0.0, until - perf_counter()))
        try:
            return await run_waiting(lambda link=link: read(PostgresDatabase(link)))
        except LinkBroken as error:
            if perf_counter() >= until:
                raise translate_sql(error, where) from None
        except SqlError as error:
            raise translate_sql(error, where) from None


class _Read(msgspec.Struct, eq=False):
    read: Callable[..., object]
    args: tuple[object, ...]
    until: float
    task: trio.lowlevel.Task | None = None


class GatheredReads:
    """The task that batches reads. `run` ends after `close`."""

    def __init__(self, line: ReconnectingLink, where: str) -> None:
        self._line: ReconnectingLink = line
        self._where: str = where
        self._queue: deque[_Read] = deque()
        self._wanted: trio.Event = trio.Event()
        self._closed: bool = False
        self.reads: int = 0
        """Reads that were answered."""
        self.statements: int = 0
        """Statements that answered them."""

    async def read(self, read: Callable[..., T], args: tuple[object, ...]) -> T:
        """Return the result of `read(database, *args)`, for a read of `READ_BATCHES`. Cancelling abandons the wait."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._closed:
            raise StoreClosed(f"the store {self._where} is closed")
        call = _Read(read, args, perf_counter() + WAIT_SECONDS, trio.lowlevel.current_task())
        if not self._queue:
            self._wanted.set()
        self._queue.append(call)

        def abandon(_: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
            call.task = None
            return trio.lowlevel.Abort.SUCCEEDED

        return cast(T, await trio.lowlevel.wait_task_rescheduled(abandon))

    def close(self) -> None:
        """Let `run` end; waiting callers get `StoreClosed`."""
        self._closed = True
        self._wanted.set()

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Read until closed. Shielded: a cancelled runtime can still read what its shutdown needs."""
        with trio.CancelScope(shield=True):
            while not self._closed:
                if not self._queue:
                    self._wanted = trio.Event()
                    await self._wanted.wait()
                    continue
                calls = [self._queue.popleft() for _ in range(min(GATHER_LIMIT, len(self._queue)))]
                calls = [call for call in calls if call.task is not None]
                groups: dict[Callable[..., object], list[_Read]] = {}
                for call in calls:
                    groups.setdefault(call.read, []).append(call)
                for group in groups.values():
                    await self._answer(group)
        for call in self._queue:
            self._settle(call, outcome.Error(StoreClosed(f"the store {self._where} is closed")))

    async def _answer(self, calls: Sequence[_Read]) -> None:
        """Answer calls of one kind with one read. If that fails, read for each alone, so that each gets its own error."""
        batch = READ_BATCHES[calls[0].read]
        self.statements += 1
        try:
            until = calls[0].until
            values = await read_rows(self._line, self._where, lambda db: batch(db, [one.args for one in calls]), until)
        except StoreUnavailable as error:
            for call in calls:
                self._settle(call, outcome.Error(StoreUnavailable(*error.args)))
            return
        except Exception as error:
            if len(calls) == 1:
                self._settle(calls[0], outcome.Error(error))
                return
            for call in calls:
                await self._answer([call])
            return
        self.reads += len(calls)
        for call, value in zip(calls, values, strict=True):
            self._settle(call, outcome.Value(value))

    def _settle(self, call: _Read, result: outcome.Value[Any] | outcome.Error) -> None:
        if call.task is not None:
            task, call.task = call.task, None
            trio.lowlevel.reschedule(task, result)


# -- the reads -------------------------------------------------------------------------------------------------------------------


class _After(msgspec.Struct, gc=False):
    run_id: str
    number: int
    most: int
    bytes: int


class _Named(msgspec.Struct, gc=False):
    name: str


class _Asked(msgspec.Struct, gc=False):
    name: str
    owner: str


_EVENTS: Final = f"""
SELECT g.place, e.epoch, e.number, e.event FROM {records(_After)} CROSS JOIN LATERAL (
    SELECT f.*, row_number() OVER counted AS count, sum(octet_length(f.event)) OVER counted AS size FROM (
        SELECT number, epoch, event FROM events WHERE run_id = g.run_id AND number > g.number ORDER BY number LIMIT g.most
    ) AS f WINDOW counted AS (ORDER BY f.number)
) AS e WHERE e.count = 1 OR e.size <= g.bytes ORDER BY g.place, e.number
"""
"""A page of events for each: at least one, and no more than fit. What does not fit is not read: its size stands in the header of its row."""

_RUNS: Final = f"SELECT g.place, r.* FROM {records(_Named)} CROSS JOIN LATERAL (SELECT {runs.COLUMNS} FROM runs WHERE run_id = g.name) AS r"

_HOSTS: Final = f"""
SELECT g.place, l.owner, n.incarnation, j.owner, s.held FROM {records(_Asked)}
LEFT JOIN leases l ON l.name = '{nodes.host_lease("")}' || g.name LEFT JOIN nodes n ON n.incarnation = l.owner
LEFT JOIN LATERAL (
    SELECT j.owner FROM jobs j JOIN nodes m ON m.incarnation = j.owner
    WHERE j.session_id = g.name AND j.ended_at IS NULL ORDER BY j.started_at LIMIT 1
) AS j ON true
LEFT JOIN LATERAL (
    SELECT true AS held FROM sessions s WHERE s.id = g.name AND s.open_turn <> '' AND s.owner <> g.owner OFFSET 0
) AS s ON true
WHERE l.owner IS NOT NULL OR j.owner IS NOT NULL OR s.held
"""


def events_after(db: PostgresDatabase, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return pages of events of runs; see `events_after`."""
    found: list[list[EventRow]] = [[] for _ in calls]
    asked = [_After(*args) for args in calls]
    for place, epoch, number, event in many(db, _EVENTS, (json_rows(asked),)):
        row = EventRow(run_id=asked[int(place) - 1].run_id, epoch=epoch, number=number, event=load_mapping(event))
        found[int(place) - 1].append(row)
    return found


def get_runs(db: PostgresDatabase, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return runs by their ids; see `get_run`."""
    found: list[Any] = [None] * len(calls)
    for place, *row in many(db, _RUNS, (json_rows([_Named(*args) for args in calls]),)):
        found[int(place) - 1] = runs.run_from_row(tuple(row))
    return found


def session_hosts(db: PostgresDatabase, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return the nodes to which sessions are bound; see `session_host`."""
    found: list[Any] = [None] * len(calls)
    for place, bound, alive, working, held in many(db, _HOSTS, (json_rows([_Asked(*args) for args in calls]),)):
        node = alive or working
        found[int(place) - 1] = (
            nodes.session_host(db, *calls[int(place) - 1])
            if bound and not node
            else nodes.SessionHost(node=node or "", held=bool(held))
        )
    return found


READ_BATCHES: Final[dict[Callable[..., Any], Batch]] = {
    runs.events_after: events_after,
    runs.get_run: get_runs,
    nodes.session_host: session_hosts,
}
"""The reads that are batched, each with the function that makes many at once."""
