"""Version 2: who holds what is under way, which turn a session has written last, and how often a row of an inbox was tried."""

from __future__ import annotations

from hermes_trio.store.sqlite.rows import Database


def to_version_2(db: Database) -> None:
    """Bring a file of version 1 to version 2. Open work in it belongs to an owner that has ended (the empty one), and is reaped at the start."""
    for table in ("sessions", "runs", "jobs", "inbox", "outbox", "approvals", "cron_executions"):
        db.execute(f"ALTER TABLE {table} ADD COLUMN owner TEXT NOT NULL DEFAULT ''")
    db.execute("ALTER TABLE sessions ADD COLUMN last_turn TEXT NOT NULL DEFAULT ''")
    db.execute("ALTER TABLE inbox ADD COLUMN attempts INTEGER NOT NULL DEFAULT 0")
    db.execute("CREATE INDEX jobs_root ON jobs (root_id) WHERE ended_at IS NULL")
    db.execute("DROP INDEX inbox_pending")
    db.execute("DROP INDEX inbox_session")
    db.execute("CREATE INDEX inbox_waiting ON inbox (session_key, inbox, id) WHERE settled_at IS NULL")
    db.execute("CREATE INDEX inbox_root ON inbox (root_id) WHERE root_id <> ''")
    db.execute("CREATE INDEX inbox_open ON inbox (session_id) WHERE settled_at IS NULL AND session_id <> ''")
    db.execute("CREATE INDEX inbox_dead ON inbox (id) WHERE state = 'dead'")
