"""Version 6: the nodes that share a store, their leases, and their requests to each other; whether a user has seen a question."""

from __future__ import annotations

from typing import Final

from hermes_trio.store.sqlite.rows import Database

_NODES: Final = """
CREATE TABLE nodes (
    incarnation TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    started_at REAL NOT NULL,
    expires_at REAL NOT NULL,
    info TEXT NOT NULL DEFAULT '{}'
) WITHOUT ROWID;
CREATE TABLE leases (
    name TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    claimed_at REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE node_requests (
    n INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    node TEXT NOT NULL,
    kind TEXT NOT NULL,
    target TEXT NOT NULL DEFAULT '',
    payload TEXT NOT NULL DEFAULT '{}',
    state TEXT NOT NULL DEFAULT 'open',
    answer TEXT NOT NULL DEFAULT '{}',
    created_at REAL NOT NULL
);
CREATE INDEX node_requests_open ON node_requests (node, n) WHERE state IN ('open', 'taken');
CREATE INDEX node_requests_age ON node_requests (created_at);
"""

_APPROVALS: Final = "ALTER TABLE approvals ADD COLUMN asked INTEGER NOT NULL DEFAULT 1"


def to_version_6(db: Database) -> None:
    """Make the tables of the nodes, and the column of approvals that says whether a user has seen the question."""
    db.execute(_NODES)
    db.execute(_APPROVALS)
