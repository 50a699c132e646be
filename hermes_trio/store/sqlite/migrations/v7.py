"""Version 7: runs that are begun again after an interruption: which attempt, and what begins it."""

from __future__ import annotations

from typing import Final

from hermes_trio.store.sqlite.rows import Database

_ATTEMPT: Final = "ALTER TABLE runs ADD COLUMN attempt INTEGER NOT NULL DEFAULT 0"

_RESUMPTIONS: Final = """
CREATE TABLE resumptions (
    run_id TEXT PRIMARY KEY REFERENCES runs (run_id) ON DELETE CASCADE,
    spec TEXT NOT NULL,
    key_id TEXT NOT NULL DEFAULT '',
    stopped INTEGER NOT NULL DEFAULT 0
)
"""


def to_version_7(db: Database) -> None:
    """Make the column and the table. Runs of older versions are not begun again."""
    db.execute(_ATTEMPT)
    db.execute(_RESUMPTIONS)
