"""How much still waits, and what became of what was promised: the figures of a drain report, a health check and an audit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .rows import Database, one
from .verbs import Verbs

__all__ = ["SqliteBacklog"]

_COUNTS: Final = """
SELECT (SELECT count(*) FROM inbox WHERE settled_at IS NULL AND state = 'pending'),
       (SELECT count(*) FROM outbox WHERE settled_at IS NULL),
       (SELECT count(*) FROM approvals WHERE state = 'pending'),
       (SELECT count(*) FROM runs WHERE ended_at IS NULL),
       (SELECT count(*) FROM jobs WHERE ended_at IS NULL)
"""


def count_backlog(db: Database) -> dict[str, int]:
    """The rows that wait, by what they wait for."""
    row = one(db, _COUNTS, ())
    assert row is not None
    return dict(zip(("inbox", "outbox", "approvals", "runs", "jobs"), (int(count) for count in row), strict=True))


def completions(db: Database, job_ids: Sequence[str]) -> dict[str, tuple[str, str]]:
    """What became of the completion notice of each job: state and reason."""
    found: dict[str, tuple[str, str]] = {}
    for job_id in job_ids:
        row = one(
            db,
            "SELECT state, reason FROM inbox WHERE job_id = ? AND notice IN ('completion', 'async_delegation', 'lost')",
            (job_id,),
        )
        if row is not None:
            found[job_id] = (str(row[0]), str(row[1]))
    return found


class SqliteBacklog(Verbs):
    """Counting what is not settled yet."""

    async def backlog(self) -> dict[str, int]:
        """How many rows wait, by what they wait for: `inbox`, `outbox`, `approvals`, `runs`, `jobs`. Raises `StoreReplaced`."""
        self._writer.check_file()
        return await self._read(count_backlog)

    async def completion_states(self, job_ids: Sequence[str]) -> dict[str, tuple[str, str]]:
        """For watched jobs that have ended: whether each was delivered, superseded or abandoned, and why."""
        return await self._read(completions, tuple(job_ids))
