"""Diagnosis of a database: whether it is sound, the sizes of its tables, what is stuck, and what retention will remove.

Reads only, on a connection of its own, so it can run beside a server.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from hermes_trio.base.retention import DAY, Retention
from hermes_trio.store.ownership import lock_path, owner_pid

from .blocking_store import check_version
from .files import connect_reader
from .maintenance import expired_counts
from .rows import Database, many, single
from .schema import VERSION, version_of
from .search import index_backlog

TABLES: Final = (
    "sessions",
    "messages",
    "runs",
    "events",
    "jobs",
    "inbox",
    "outbox",
    "approvals",
    "responses",
    "idempotency",
    "webhook_deliveries",
    "cron_jobs",
    "cron_executions",
    "api_keys",
)

STUCK: Final[Mapping[str, str]] = {
    "runs without an end": "SELECT count(*) FROM runs WHERE ended_at IS NULL",
    "jobs without an end": "SELECT count(*) FROM jobs WHERE ended_at IS NULL",
    "turns without an end": "SELECT count(*) FROM sessions WHERE open_turn IS NOT NULL",
    "messages taken and not finished": "SELECT count(*) FROM inbox WHERE state = 'taken'",
    "replies being attempted": "SELECT count(*) FROM outbox WHERE state = 'attempting'",
    "approvals pending": "SELECT count(*) FROM approvals WHERE state = 'pending'",
    "cron slots under way": "SELECT count(*) FROM cron_executions WHERE ended_at IS NULL",
}
"""Rows that are legal while a server runs; without one, its next start ends or requeues them."""

WAITING: Final[Mapping[str, str]] = {
    "inbox rows waiting for more than a day": "SELECT count(*) FROM inbox WHERE state = 'pending' AND created_at < ?",
    "replies unsent for more than a day": "SELECT count(*) FROM outbox WHERE settled_at IS NULL AND created_at < ?",
    "dead letters": "SELECT count(*) FROM outbox WHERE state = 'dead' AND created_at < ? + 1e12",
}


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The findings about a database. Sizes are in bytes."""

    path: str
    version: int
    known_version: int
    server_pid: int | None
    integrity: tuple[str, ...]
    broken_links: int
    file_bytes: int
    log_bytes: int
    free_bytes: int
    rows: Mapping[str, int]
    table_bytes: Mapping[str, int]
    open_sessions: int
    stuck: Mapping[str, int]
    waiting: Mapping[str, int]
    expired: Mapping[str, int]
    unindexed: int

    @property
    def sound(self) -> bool:
        """Return whether the file passes SQLite's checks and is of a version that we know."""
        return self.integrity == ("ok",) and not self.broken_links and self.version <= self.known_version

    @property
    def healthy(self) -> bool:
        """Sound, and without anything that only a live server may have under way."""
        return self.sound and (self.server_pid is not None or not any(self.stuck.values()))


def _table_bytes(db: Database) -> dict[str, int]:
    """Return the bytes by table, each with its indexes; the tables of a search index count as one."""
    owner: dict[str, str] = dict(many(db, "SELECT name, tbl_name FROM sqlite_schema"))
    sizes: dict[str, int] = {}
    for row in many(db, "SELECT name, sum(pgsize) FROM dbstat GROUP BY name"):
        name: str = row[0]
        size: int = row[1]
        table = owner.get(name, name)
        for index in ("message_words", "message_grams"):
            if table.startswith(index):
                table = index
        sizes[table] = sizes.get(table, 0) + size
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def diagnose(db: Database, path: str, now: float, retention: Retention | None = None) -> Diagnosis:
    """Examine an open database."""
    log = f"{path}-wal"
    return Diagnosis(
        path=path,
        version=version_of(db),
        known_version=VERSION,
        server_pid=owner_pid(Path(path)) if os.path.exists(lock_path(Path(path))) else None,
        integrity=tuple(line for (line,) in many(db, "PRAGMA integrity_check(20)")),
        broken_links=len(many(db, "PRAGMA foreign_key_check")),
        file_bytes=os.path.getsize(path) if os.path.exists(path) else 0,
        log_bytes=os.path.getsize(log) if os.path.exists(log) else 0,
        free_bytes=int(db.pragma("freelist_count")) * int(db.pragma("page_size")),
        rows={table: single(db, f"SELECT count(*) FROM {table}") for table in TABLES},
        table_bytes=_table_bytes(db),
        open_sessions=single(db, "SELECT count(*) FROM sessions WHERE ended_at IS NULL"),
        stuck={what: single(db, sql) for what, sql in STUCK.items()},
        waiting={what: single(db, sql, (now - DAY,)) for what, sql in WAITING.items()},
        expired=expired_counts(db, now, retention or Retention()),
        unindexed=index_backlog(db),
    )


def diagnose_file(path: str, retention: Retention) -> Diagnosis:
    """Examine the database file at `path`, beside a server that may have it open. Raises `StoreError` for another schema version."""
    db = connect_reader(path)
    try:
        check_version(db, path)
        return diagnose(db, path, time.time(), retention)
    finally:
        db.close()
