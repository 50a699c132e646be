"""How much still waits: the figures of a drain report and of a health check."""

from __future__ import annotations

from typing import Final

from .rows import Database, one
from .verbs import Verbs

__all__ = ["BacklogVerbs"]

_COUNTS: Final = """
SELECT (SELECT count(*) FROM inbox WHERE state = 'pending'),
       (SELECT count(*) FROM outbox WHERE settled_at IS NULL),
       (SELECT count(*) FROM approvals WHERE state = 'pending'),
       (SELECT count(*) FROM runs WHERE status NOT IN ('completed', 'failed', 'cancelled')),
       (SELECT count(*) FROM jobs WHERE ended_at IS NULL)
"""


def count_backlog(db: Database) -> dict[str, int]:
    """The rows that wait, by what they wait for."""
    row = one(db, _COUNTS, ())
    assert row is not None
    return dict(zip(("inbox", "outbox", "approvals", "runs", "jobs"), (int(count) for count in row), strict=True))


class BacklogVerbs(Verbs):
    """Counting what is not settled yet."""

    async def backlog(self) -> dict[str, int]:
        """How many rows wait, by what they wait for: `inbox`, `outbox`, `approvals`, `runs`, `jobs`."""
        return await self._read(count_backlog)
