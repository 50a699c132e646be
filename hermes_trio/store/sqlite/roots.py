"""Open work: of one input, by the root id of its jobs and notices; of a session; and in total."""

from __future__ import annotations

from typing import Final

from hermes_trio.runtime.ports import ROOT_TOPIC

from .rows import Database, exists, one, single
from .verbs import Verbs

_COUNTS: Final = """
SELECT (SELECT count(*) FROM inbox WHERE settled_at IS NULL AND state = 'pending'),
       (SELECT count(*) FROM outbox WHERE settled_at IS NULL),
       (SELECT count(*) FROM approvals WHERE state = 'pending'),
       (SELECT count(*) FROM runs WHERE ended_at IS NULL),
       (SELECT count(*) FROM jobs WHERE ended_at IS NULL)
"""


def count_backlog(db: Database) -> dict[str, int]:
    """Return how many rows wait, by kind."""
    row = one(db, _COUNTS, ())
    assert row is not None
    return dict(zip(("inbox", "outbox", "approvals", "runs", "jobs"), (int(count) for count in row), strict=True))


def root_open(db: Database, root_id: str) -> bool:
    """Return whether a job of this root is live, or a notice of it waits or is in a turn."""
    return exists(db, "SELECT 1 FROM jobs WHERE root_id = ? AND ended_at IS NULL LIMIT 1", (root_id,)) or exists(
        db, "SELECT 1 FROM inbox WHERE root_id = ? AND root_id <> '' AND settled_at IS NULL LIMIT 1", (root_id,)
    )


def close_root(db: Database, root_id: str) -> None:
    """Signal a root of which a job or notice has ended, if nothing of it is open any more."""
    if root_id and not root_open(db, root_id):
        db.signals.append((ROOT_TOPIC, root_id))


def root_wakes(db: Database, root_id: str) -> int:
    """Return how many turns have begun with notices of this root."""
    sql = "SELECT count(DISTINCT turn_id) FROM inbox WHERE root_id = ? AND root_id <> '' AND kind = 'notice' AND turn_id <> ''"
    return single(db, sql, (root_id,))


def session_promised(db: Database, session_id: str) -> int:
    """Return the number of running watched jobs of a session and of its rows that wait or are in a turn."""
    sql = (
        "SELECT (SELECT count(*) FROM jobs WHERE session_id = ?1 AND ended_at IS NULL AND inbox <> '')"
        " + (SELECT count(*) FROM inbox WHERE session_id = ?1 AND session_id <> '' AND settled_at IS NULL)"
    )
    return single(db, sql, (session_id,))


class SqliteRoots(Verbs):
    """The roots' part of the store."""

    async def root_open(self, root_id: str) -> bool:
        return await self._read(root_open, root_id)

    async def backlog(self) -> dict[str, int]:
        self._writer.check_file()
        return await self._read(count_backlog)

    async def root_wakes(self, root_id: str) -> int:
        return await self._read(root_wakes, root_id)

    async def session_promised(self, session_id: str) -> int:
        return await self._read(session_promised, session_id)
