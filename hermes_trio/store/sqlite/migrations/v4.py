"""Version 4: a request for approval says whose turn waits for it."""

from __future__ import annotations

from hermes_trio.store.sqlite.rows import Database


def to_version_4(db: Database) -> None:
    """Add the asker. Requests of older versions have none; what was pending is reaped at the start."""
    db.execute("ALTER TABLE approvals ADD COLUMN asker TEXT NOT NULL DEFAULT ''")
