"""What retention removes in a world with `upkeep`: kept for the invariants, which read it together with the rows that are there.

Triggers of the world's connection copy each row that is deleted, and note what must not be removed. They are temporary, so that the schema stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from hermes_trio.base.retention import DAY, Retention

_SHORT: Final = 15 / DAY
_LONGER: Final = 4 / 24
"""For what recognises repetitions: platforms and clients of a world send them within minutes, the clock is set by an hour, and an
end is repeated until the store has written it."""

SHORT_RETENTION: Final = Retention(
    runs=_SHORT,
    jobs=_SHORT,
    outbox=_SHORT,
    approvals=_SHORT,
    cron_executions=_SHORT,
    sessions=_LONGER,
    inbox=_LONGER,
    deliveries=_LONGER,
    interval=30.0,
)
"""The retention of a world with `upkeep`."""

_TABLES: Final = (
    "runs",
    "events",
    "jobs",
    "inbox",
    "outbox",
    "approvals",
    "cron_executions",
    "webhook_deliveries",
    "sessions",
    "messages",
)

_LIVE: Final[Mapping[str, tuple[str, str]]] = {
    "runs": (
        "OLD.run_id",
        "OLD.ended_at IS NULL OR EXISTS (SELECT 1 FROM main.jobs j WHERE j.root_id = OLD.run_id AND j.ended_at IS NULL)",
    ),
    "jobs": ("OLD.job_id", "OLD.ended_at IS NULL"),
    "inbox": ("OLD.text", "OLD.settled_at IS NULL"),
    "outbox": ("OLD.text", "OLD.settled_at IS NULL"),
    "approvals": ("OLD.command", "OLD.state = 'pending'"),
    "cron_executions": ("OLD.job_id", "OLD.ended_at IS NULL"),
    "sessions": (
        "OLD.id",
        "OLD.ended_at IS NULL OR EXISTS (SELECT 1 FROM main.jobs j WHERE j.session_id = OLD.id AND j.ended_at IS NULL)",
    ),
}
"""By table: what names a row, and when it must not be removed."""


class Archive:
    """See the module."""

    def __init__(self, db: Any) -> None:
        self._db = db
        db.execute("CREATE TEMP TABLE removed_live (text)")
        for table in _TABLES:
            columns = [str(row[1]) for row in db.execute(f"PRAGMA main.table_info({table})")]
            db.execute(f"CREATE TEMP TABLE removed_{table} AS SELECT * FROM main.{table} WHERE 0")
            kept = f"INSERT INTO removed_{table} VALUES ({', '.join(f'OLD.{name}' for name in columns)});"
            noted = ""
            if table in _LIVE:
                name, live = _LIVE[table]
                noted = f"INSERT INTO removed_live SELECT '{table}: ' || {name} WHERE {live};"
            if table == "sessions":
                # A later session may have the same number.
                number = "-1 - (SELECT count(*) FROM removed_sessions)"
                kept = f"UPDATE removed_messages SET session = {number} WHERE session = OLD.n; {kept}".replace(
                    "(OLD.n,", f"({number},"
                )
            db.execute(f"CREATE TEMP TRIGGER note_{table} BEFORE DELETE ON main.{table} BEGIN {noted} {kept} END")

    @property
    def live(self) -> list[str]:
        """Return the rows that were removed although their work had not ended."""
        return [text for (text,) in self._db.execute("SELECT text FROM removed_live")]

    def has_run(self, run_id: str) -> bool:
        """Return whether a run was removed."""
        return bool(list(self._db.execute("SELECT 1 FROM removed_runs WHERE run_id = ?", (run_id,))))

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Let queries read what was removed, too, for the body of the `with`. Nothing may write then."""
        for table in _TABLES:
            self._db.execute(
                f"CREATE TEMP VIEW {table} AS SELECT * FROM main.{table} UNION ALL SELECT * FROM removed_{table}"
            )
        try:
            yield
        finally:
            for table in _TABLES:
                self._db.execute(f"DROP VIEW temp.{table}")
