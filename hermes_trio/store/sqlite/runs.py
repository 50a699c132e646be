"""Runs: a status row and a numbered event log each. A run ends once; its idempotency key leads back to it for as long as its row is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from hermes_trio.runtime.errors import Fenced
from hermes_trio.runtime.outcome import RunStatus, Usage
from hermes_trio.runtime.ports import RUN_TOPIC, EventRow, NewRun, TurnFinish, TurnStart
from hermes_trio.store.errors import AlreadyStarted, IdempotencyConflict
from hermes_trio.store.records import ALL_RUNS, EVENT_PAGE_BYTES, FIRST_PAGE, LISTED_OUTPUT, Page, RunFilter, RunRow

from .encoding import clean, dump, load_mapping
from .resumptions import forget_resumption, keep_resumption
from .rows import Database, Row, changed, equalities, exists, many, one, single, write, write_many
from .verbs import Verbs

COLUMNS: Final = (
    "run_id, session_id, turn_id, model, tenant, input_preview, idempotency_key, fingerprint, status, last_event,"
    " created_at, updated_at, ended_at, output, usage, error, error_code, owner, attempt"
)

_QUIET_EVENTS: Final = frozenset({"message.delta"})
"""Events that do not change `last_event`."""

_FINISH: Final = f"""
INSERT INTO runs ({COLUMNS})
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?11, ?11, ?12, ?13, ?14, ?15, ?16, 0)
ON CONFLICT (run_id) DO UPDATE SET
    session_id = excluded.session_id, model = coalesce(nullif(excluded.model, ''), runs.model), status = excluded.status,
    last_event = excluded.last_event, updated_at = excluded.updated_at, ended_at = excluded.ended_at,
    output = excluded.output, usage = excluded.usage, error = excluded.error, error_code = excluded.error_code
WHERE runs.ended_at IS NULL AND runs.tenant = excluded.tenant AND runs.owner = ?16
"""


def run_from_row(row: Row) -> RunRow:
    """Return a row as a run's record."""
    usage = load_mapping(row[14]) if row[14] else None
    values: list[Any] = [*row[:8], RunStatus(row[8]), *row[9:14], usage, *row[15:]]
    return RunRow(*values)


def usage_report(usage: Usage) -> dict[str, int]:
    """Return usage in the form that runs report."""
    return {
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }


def begin_run(db: Database, now: float, owner: str, run: NewRun, start: TurnStart) -> None:
    """Make a run's row. Idempotent. Raises `AlreadyStarted` or `IdempotencyConflict` if its idempotency key belongs to another run or body."""
    if run.idempotency_key:
        sql = "SELECT run_id, fingerprint FROM runs WHERE tenant = ? AND idempotency_key = ?"
        found = one(db, sql, (run.tenant, run.idempotency_key))
        if found is not None:
            if found[1] != run.fingerprint:
                raise IdempotencyConflict(run.idempotency_key)
            if found[0] != run.run_id:
                raise AlreadyStarted(found[0])
    write(
        db,
        "INSERT INTO runs (run_id, session_id, turn_id, model, tenant, input_preview, idempotency_key, fingerprint,"
        " status, created_at, updated_at, owner, attempt) VALUES (?, ?, ?, ?, ?, ?, ?, ?, 'queued', ?, ?, ?, ?)"
        " ON CONFLICT (run_id) DO NOTHING",
        (
            run.run_id,
            run.session_id,
            start.turn_id,
            clean(run.model),
            run.tenant,
            clean(run.input_preview),
            run.idempotency_key,
            run.fingerprint,
            now,
            now,
            owner,
            int(run.resumable),
        ),
    )
    if start.resumption is not None:
        keep_resumption(db, run.run_id, start.resumption)
    db.signals.append((RUN_TOPIC, run.run_id))


def finish_run(db: Database, now: float, owner: str, run: NewRun, finish: TurnFinish) -> None:
    """Write a run's end. Raises `Fenced` if another owner has the run, or has ended it."""
    status = finish.state.value
    written = changed(
        db,
        _FINISH,
        (
            run.run_id,
            finish.start.context.session_id or run.session_id,
            finish.start.turn_id,
            clean(finish.model or run.model),
            run.tenant,
            clean(run.input_preview),
            run.idempotency_key,
            run.fingerprint,
            status,
            f"run.{status}",
            now,
            clean(finish.text),
            dump(usage_report(finish.usage)),
            clean(finish.error),
            finish.error_code,
            owner,
        ),
    )
    if not written and exists(db, "SELECT 1 FROM runs WHERE run_id = ? AND owner <> ?", (run.run_id, owner)):
        raise Fenced(f"run {run.run_id} now belongs to another owner")
    if run.resumable:
        forget_resumption(db, run.run_id)
    db.signals.append((RUN_TOPIC, run.run_id))


def insert_events(db: Database, now: float, events: Sequence[EventRow]) -> None:
    """Append to run logs. Idempotent: an event that exists is not changed. Events of a removed run are ignored."""
    write_many(
        db,
        "INSERT INTO events (run_id, number, epoch, event) SELECT ?1, ?2, ?3, ?4"
        " WHERE EXISTS (SELECT 1 FROM runs WHERE run_id = ?1) ON CONFLICT DO NOTHING",
        [(event.run_id, event.number, event.epoch, dump(event.event)) for event in events],
    )
    db.signals.extend([(RUN_TOPIC, run_id) for run_id in {event.run_id for event in events}])


def last_events(events: Sequence[EventRow]) -> dict[str, str]:
    """Return the new `last_event` of each run in these events."""
    named = ((event.run_id, event.event.get("event")) for event in events)
    return {run_id: name for run_id, name in named if isinstance(name, str) and name not in _QUIET_EVENTS}


def append_events(db: Database, now: float, events: Sequence[EventRow]) -> None:
    """Append to the logs of live runs, and update their `last_event`."""
    insert_events(db, now, events)
    write_many(
        db,
        "UPDATE runs SET last_event = ?, updated_at = ? WHERE run_id = ? AND ended_at IS NULL",
        [(name, now, run_id) for run_id, name in last_events(events).items()],
    )


def update_status(db: Database, now: float, run_id: str, status: str) -> None:
    """Move a live run to another live status."""
    sql = "UPDATE runs SET status = ?, updated_at = ? WHERE run_id = ? AND ended_at IS NULL"
    write(db, sql, (status, now, run_id))
    db.signals.append((RUN_TOPIC, run_id))


def get_run(db: Database, run_id: str) -> RunRow | None:
    """Return a run by its id, or None."""
    found = one(db, f"SELECT {COLUMNS} FROM runs WHERE run_id = ?", (run_id,))
    return run_from_row(found) if found else None


def list_runs(db: Database, which: RunFilter, page: Page) -> list[RunRow]:
    """Return runs, the newest first, each with the beginning of its output."""
    status = None if which.status is None else which.status.value
    where, bindings = equalities({"status": status, "session_id": which.session_id, "tenant": which.tenant})
    columns = COLUMNS.replace(" output,", f" substr(output, 1, {LISTED_OUTPUT + 1}),")
    sql = f"SELECT {columns} FROM runs WHERE {' AND '.join(where)} ORDER BY rowid DESC LIMIT ? OFFSET ?"
    return [run_from_row(row) for row in many(db, sql, (*bindings, page.limit, page.offset))]


def events_after(db: Database, run_id: str, number: int, limit: int, most_bytes: int) -> list[EventRow]:
    """Return the events of a run with larger numbers, in order: at least one, and no more than fit into `most_bytes`."""
    # The sizes are in the rows' headers: events that are not returned are not read.
    sql = "SELECT number, octet_length(event) FROM events WHERE run_id = ? AND number > ? ORDER BY number LIMIT ?"
    last, size = 0, 0
    for count, length in many(db, sql, (run_id, number, limit)):
        size += length
        if last and size > most_bytes:
            break
        last = count
    sql = "SELECT run_id, epoch, number, event FROM events WHERE run_id = ? AND number > ? AND number <= ? ORDER BY number"
    return [
        EventRow(run_id=run, epoch=epoch, number=count, event=load_mapping(event))
        for run, epoch, count, event in many(db, sql, (run_id, number, last))
    ]


def epoch_of(db: Database, run_id: str, number: int) -> str | None:
    """Return the epoch of an event, or None."""
    return single(db, "SELECT epoch FROM events WHERE run_id = ? AND number = ?", (run_id, number))


class SqliteRuns(Verbs):
    """The runs' part of the store."""

    async def append_events(self, events: Sequence[EventRow]) -> None:
        """Append to run logs, as one batch. Appending an event twice keeps the first."""
        await self._write(append_events, self._clock(), tuple(events))

    async def set_run_status(self, run_id: str, status: RunStatus) -> None:
        await self._write(update_status, self._clock(), run_id, status.value)

    async def get_run(self, run_id: str) -> RunRow | None:
        return await self._read(get_run, run_id)

    async def list_runs(self, which: RunFilter = ALL_RUNS, page: Page = FIRST_PAGE) -> list[RunRow]:
        return await self._scan(list_runs, which, page)

    async def events_after(
        self, run_id: str, number: int = 0, *, limit: int = 500, most_bytes: int = EVENT_PAGE_BYTES
    ) -> list[EventRow]:
        return await self._read(events_after, run_id, number, limit, most_bytes)

    async def event_epoch(self, run_id: str, number: int) -> str | None:
        return await self._read(epoch_of, run_id, number)
