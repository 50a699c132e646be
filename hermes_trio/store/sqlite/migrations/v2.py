"""Version 2: what hermes-trio 0.2 adds."""

from __future__ import annotations

from hermes_trio.store.sqlite.rows import Database

__all__ = ["to_version_2"]


def to_version_2(db: Database) -> None:
    """Bring a file of version 1 to version 2."""
    db.execute("CREATE INDEX jobs_root ON jobs (root_id) WHERE ended_at IS NULL")
