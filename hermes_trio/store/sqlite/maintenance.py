"""Maintenance: end idle sessions, remove ended rows after their retention, and free the space.

Only ended rows are removed. Each step is one small transaction in the writer's queue, so a turn's commit waits for one step at most.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Concatenate, Final, ParamSpec

import msgspec

from hermes_trio.base.retention import DAY, Retention, age_limit
from hermes_trio.store.records import OWED, MaintenanceReport

from .approvals import forget_grants
from .files import BUSY_MILLISECONDS
from .inbox import expire_waiting
from .nodes import forget_requests, host_lease
from .rows import Database, changed, equalities, many, single, write
from .search import SqliteSearch
from .sessions import IDLE, INTERRUPTED
from .verbs import Verbs
from .writer import Weight

P = ParamSpec("P")

ROWS_A_STEP: Final = 2_000
"""How many rows one transaction removes at most: a turn's commit waits for one of them."""
PAGES_A_STEP: Final = 256
MERGE_PAGES: Final = 64
MERGE_STEPS: Final = 10_000
"""A bound for a loop that ends by itself; an index of that many steps would be far larger than a disk."""


class Prune(msgspec.Struct, frozen=True, kw_only=True):
    """Which ended sessions to remove: those that ended before a time, have no live job, and match all the filters that are given.

    A background process outlives the end of its sub-agent's session, and needs the session's folder and its binding to a host.
    """

    before: float
    source: str | None = None
    end_reason: str | None = None
    tenant: str | None = None

    def where(self) -> tuple[str, list[object]]:
        """Return the condition and its bindings."""
        parts, bindings = equalities({"source": self.source, "end_reason": self.end_reason, "tenant": self.tenant})
        ended = (
            "ended_at IS NOT NULL AND ended_at < ?"
            " AND NOT EXISTS (SELECT 1 FROM jobs j WHERE j.session_id = sessions.id AND j.ended_at IS NULL)"
        )
        return " AND ".join((ended, *parts)), [self.before, *bindings]


def count_prunable(db: Database, prune: Prune) -> int:
    """Count the sessions that `prune_some` would remove in all."""
    where, bindings = prune.where()
    return single(db, f"SELECT count(*) FROM sessions WHERE {where}", bindings)


def prune_some(db: Database, prune: Prune, batch: int) -> tuple[int, bool]:
    """Remove a few ended sessions; return how many, and whether there may be more.

    A long transcript is removed in parts, its session last, so that an interruption leaves an ended session, never a message without one.
    """
    where, bindings = prune.where()
    sql = f"SELECT n, id FROM sessions WHERE {where} ORDER BY ended_at LIMIT ?"
    room = ROWS_A_STEP
    removed = 0
    found = many(db, sql, (*bindings, batch))
    for number, session_id in found:
        room -= changed(
            db,
            "DELETE FROM messages WHERE id IN (SELECT id FROM messages WHERE session = ? LIMIT ?)",
            (number, room),
        )
        if room <= 0:
            return removed, True
        write(db, "UPDATE sessions SET parent_session_id = NULL WHERE parent_session_id = ?", (session_id,))
        write(db, "DELETE FROM leases WHERE name = ?", (host_lease(session_id),))
        write(db, "DELETE FROM sessions WHERE n = ?", (number,))
        removed += 1
    return removed, len(found) == batch


def end_idle(db: Database, now: float, retention: Retention, batch: int) -> tuple[int, bool]:
    """End a few idle sessions: without a turn, a live job or a waiting row. Returns what `prune_some` does."""
    derived = "(source = 'api_server' AND substr(id, 1, 4) IN ('api-', 'run_'))"
    cutoffs = (
        (f"one_shot = 0 AND NOT {derived}", retention.session_idle, IDLE),
        (f"one_shot = 0 AND {derived}", retention.derived_idle, IDLE),
        ("one_shot = 1", retention.one_shot_idle, "linger_expired"),
    )
    ended = 0
    for kind, days, reason in cutoffs:
        if (age := age_limit(days)) is not None:
            ended += changed(
                db,
                "UPDATE sessions SET ended_at = ?, end_reason = ? WHERE n IN (SELECT n FROM sessions s"
                f" WHERE ended_at IS NULL AND last_active < ? AND {kind} AND open_turn IS NULL"
                " AND NOT EXISTS (SELECT 1 FROM jobs j WHERE j.session_id = s.id AND j.ended_at IS NULL)"
                " AND NOT EXISTS (SELECT 1 FROM inbox i WHERE i.session_id = s.id AND i.session_id <> ''"
                " AND i.settled_at IS NULL)"
                " AND NOT EXISTS (SELECT 1 FROM inbox i WHERE i.session_key = s.session_key AND i.session_key <> ''"
                " AND i.settled_at IS NULL)"
                " ORDER BY last_active LIMIT ?)",
                (now, reason, now - age, batch),
            )
    return ended, bool(ended)


class _Rule(msgspec.Struct, frozen=True):
    """What retention removes from a table: rows whose `ended` column is older than an age, and the oldest beyond a count."""

    table: str
    ended: str
    days: Callable[[Retention], float] | None
    """How long rows are kept; None for rows whose `ended` column is the time of their removal."""
    count: Callable[[Retention], int] | None = None
    condition: str = "true"
    key: str = "rowid"
    parts: str = ""
    """A table with rows that belong to one of these and go first, `ROWS_A_STEP` at a time. Both tables have the column `key`."""


_RUN_SETTLED: Final = "NOT EXISTS (SELECT 1 FROM jobs j WHERE j.root_id = runs.run_id AND j.ended_at IS NULL)"
"""The run has no live job: one with live jobs may get further events."""

_RULES: Final = (
    _Rule("runs", "ended_at", lambda r: r.runs, lambda r: r.run_count, _RUN_SETTLED, "run_id", "events"),
    _Rule("jobs", "ended_at", lambda r: r.jobs, lambda r: r.job_count),
    _Rule("inbox", "settled_at", lambda r: r.inbox, lambda r: r.inbox_count, key="id"),
    _Rule("outbox", "settled_at", lambda r: r.outbox, lambda r: r.outbox_count, "state = 'sent'", "id"),
    _Rule("outbox", "settled_at", lambda r: r.dead_letters, None, "state = 'dead'", "id"),
    _Rule("approvals", "answered_at", lambda r: r.approvals, lambda r: r.approval_count),
    _Rule("responses", "used_at", lambda r: r.responses),
    _Rule("idempotency", "expires_at", None),
    _Rule("webhook_deliveries", "accepted_at", lambda r: r.deliveries, lambda r: r.delivery_count),
    _Rule("cron_executions", "ended_at", lambda r: r.cron_executions),
    _Rule("api_keys", "revoked_at", lambda r: r.revoked_keys),
)


def _expired(rule: _Rule, now: float, retention: Retention) -> list[tuple[str, tuple[object, ...]]]:
    """Selections of row ids that a rule removes, without a limit."""
    selections: list[tuple[str, tuple[object, ...]]] = []
    age = 0.0 if rule.days is None else age_limit(rule.days(retention))
    base = f"SELECT {rule.key} FROM {rule.table} WHERE {rule.ended} IS NOT NULL AND {rule.condition}"
    if age is not None:
        selections.append((f"{base} AND {rule.ended} < ? ORDER BY {rule.ended}", (now - age,)))
    if rule.count is not None:
        selections.append((f"{base} ORDER BY {rule.ended} DESC LIMIT -1 OFFSET ?", (rule.count(retention),)))
    return selections


def remove_expired(db: Database, rule: _Rule, now: float, retention: Retention) -> tuple[int, bool]:
    """Remove a few rows that a rule no longer keeps; return how many, and whether there may be more."""
    removed = 0
    more = False
    room = ROWS_A_STEP
    for selection, bindings in _expired(rule, now, retention):
        found = many(
            db, f"SELECT {rule.key} FROM ({selection}) AS expired LIMIT ?", (*bindings, min(retention.batch, room))
        )
        more = more or bool(found)
        for (key,) in found:
            if rule.parts:
                room -= changed(
                    db,
                    f"DELETE FROM {rule.parts} WHERE ({rule.key}, number) IN"
                    f" (SELECT {rule.key}, number FROM {rule.parts} WHERE {rule.key} = ? LIMIT ?)",
                    (key, room),
                )
            if room <= 0:
                return removed, True
            room -= changed(db, f"DELETE FROM {rule.table} WHERE {rule.key} = ?", (key,))
            removed += 1
    return removed, more


def remove_rest(db: Database, now: float, retention: Retention) -> int:
    """Remove what no rule of age covers: expired pairing codes, grants of conversations that no longer exist, slots beyond a job's count, old requests
    of nodes to each other.

    Also what is owed for a one-shot session, if it has ended and its end is settled: its process died before it could remove the row.
    """
    removed = changed(db, "DELETE FROM pairing_codes WHERE expires_at < ?", (now,))
    removed += changed(
        db,
        "DELETE FROM cron_executions WHERE rowid IN (SELECT rowid FROM (SELECT rowid, ended_at, row_number() OVER"
        " (PARTITION BY job_id ORDER BY slot DESC) AS place FROM cron_executions) AS placed WHERE place > ?"
        " AND ended_at IS NOT NULL LIMIT ?)",
        (retention.cron_execution_count, retention.batch),
    )
    removed += changed(
        db,
        "DELETE FROM state_meta WHERE substr(key, 1, ?) = ? AND NOT EXISTS (SELECT 1 FROM sessions"
        " WHERE id = substr(key, ?) AND (ended_at IS NULL OR end_reason = ?))",
        (len(OWED), OWED, len(OWED) + 1, INTERRUPTED),
    )
    return removed + forget_grants(db, now - DAY) + forget_requests(db, now)


def give_up_waiting(db: Database, now: float, retention: Retention) -> tuple[int, bool]:
    """Make dead letters of a few rows that have waited too long for an interface or a platform. Returns what `prune_some` does."""
    age = age_limit(retention.waiting)
    if age is None:
        return 0, False
    reason = f"no lane has taken it for {retention.waiting:g} days"
    sent = (
        "UPDATE outbox SET state = 'dead', error = ?, settled_at = ? WHERE id IN"
        " (SELECT id FROM outbox WHERE settled_at IS NULL AND state = 'pending' AND created_at < ? LIMIT ?)"
    )
    given = (reason, now, now - age, retention.batch)
    count = expire_waiting(db, *given) + changed(db, sent, given)
    return count, bool(count)


def expired_counts(db: Database, now: float, retention: Retention) -> dict[str, int]:
    """Return how many rows the next round of maintenance would remove, by table."""
    counts: dict[str, int] = {}
    age = age_limit(retention.sessions)
    if age is not None:
        counts["sessions"] = count_prunable(db, Prune(before=now - age))
    for rule in _RULES:
        ids: set[int | str] = set()
        for selection, bindings in _expired(rule, now, retention):
            ids.update(number for (number,) in many(db, selection, bindings))
        counts[rule.table] = counts.get(rule.table, 0) + len(ids)
    return counts


def merge_index(db: Database, table: str, pages: int) -> bool:
    """Merge a part of a search index; a negative number starts merging everything. Returns whether there was something to do."""
    before = single(db, "SELECT total_changes()")
    write(db, f"INSERT INTO {table} ({table}, rank) VALUES ('merge', ?)", (pages,))
    return single(db, "SELECT total_changes()") - before >= 2


def give_back(db: Database, pages: int) -> int:
    """Remove unused pages from the end of the file; return how many."""
    before = int(db.pragma("freelist_count"))
    many(db, f"PRAGMA incremental_vacuum({pages})")
    return before - int(db.pragma("freelist_count"))


def checkpoint(db: Database) -> None:
    """Checkpoint the log into the file and truncate it. While a reader (a backup, `doctor`) uses the log, the next round does it."""
    db.set_busy_timeout(0)
    try:
        many(db, "PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        db.set_busy_timeout(BUSY_MILLISECONDS)


class SqliteMaintenance(SqliteSearch, Verbs):
    """Maintenance's part of the store."""

    retention: Retention

    async def prune_sessions(
        self,
        older_than_days: float = 90,
        source: str | None = None,
        *,
        end_reason: str | None = None,
        tenant: str | None = None,
        dry_run: bool = False,
    ) -> int:
        before = self._clock() - older_than_days * DAY
        prune = Prune(before=before, source=source, end_reason=end_reason, tenant=tenant)
        if dry_run:
            return await self._scan(count_prunable, prune)
        return await self._repeat(prune_some, prune, self.retention.batch)

    async def _repeat(
        self, step: Callable[Concatenate[Database, P], tuple[int, bool]], *args: P.args, **named: P.kwargs
    ) -> int:
        """Run small steps until nothing is left to do; return the total."""
        done, more = 0, True
        while more:
            count, more = await self._write_heavily(step, *args, **named)
            done += count
        return done

    async def maintain(self, now: float | None = None) -> MaintenanceReport:
        """Run one round: end idle sessions, remove expired rows, index, and free space.

        When cancelled, it stops between two steps; the next round continues.
        """
        began = perf_counter()
        when = self._clock() if now is None else now
        retention = self.retention
        ended = await self._repeat(end_idle, when, retention, retention.batch)
        removed: dict[str, int] = {}
        age = age_limit(retention.sessions)
        if age is not None:
            removed["sessions"] = await self._repeat(prune_some, Prune(before=when - age), retention.batch)
        for rule in _RULES:
            removed[rule.table] = removed.get(rule.table, 0) + await self._repeat(remove_expired, rule, when, retention)
        removed["other"] = await self._write_heavily(remove_rest, when, retention)
        await self._repeat(give_up_waiting, when, retention)
        indexed = await self.index_messages()
        if removed.get("sessions"):
            await self.optimize_search()
        freed = await self.give_space_back()
        return MaintenanceReport(
            sessions_ended=ended,
            removed={table: count for table, count in removed.items() if count},
            messages_indexed=indexed,
            pages_freed=freed,
            seconds=perf_counter() - began,
        )

    async def optimize_search(self) -> None:
        """Merge the search indexes in small steps, which drops what belonged to removed messages."""
        for table in ("message_words", "message_grams"):
            more = await self._write_heavily(merge_index, table, -MERGE_PAGES)
            for _ in range(MERGE_STEPS):
                if not more:
                    break
                more = await self._write_heavily(merge_index, table, MERGE_PAGES)

    async def give_space_back(self) -> int:
        """Remove unused pages from the file and truncate its log; return how many pages."""
        total = 0
        while freed := await self._writer.submit(give_back, PAGES_A_STEP, weight=Weight.BARE):
            total += freed
        await self._writer.submit(checkpoint, weight=Weight.BARE)
        return total
