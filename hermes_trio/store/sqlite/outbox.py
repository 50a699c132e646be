"""The outbox: replies that wait for a platform. In order for each chat, sent at least once, never silently dropped.

`pending` → `attempting` → `sent`, or back to `pending` with a later time, or `dead` after too many attempts. A row that was being attempted
when the server died is sent again, marked as a possible duplicate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from hermes_trio.runtime.errors import Fenced
from hermes_trio.runtime.ports import OUTBOX_TOPIC, NewReply
from hermes_trio.store.records import FIRST_PAGE, OutboxRow, OutboxState, Page

from .encoding import clean, dump, load_mapping
from .rows import Database, Row, changed, equalities, many, one, single
from .verbs import Verbs

_COLUMNS: Final = (
    "id, platform, target, text, payload, session_id, turn_id, state, attempts, next_at, error, maybe_duplicate,"
    " created_at, settled_at"
)


def _row(row: Row) -> OutboxRow:
    target, text, payload = load_mapping(row[2]), row[3], load_mapping(row[4])
    values: list[Any] = [*row[:2], target, text, payload, *row[5:7], OutboxState(row[7]), *row[8:]]
    return OutboxRow(*values)


def _target(target: Mapping[str, object]) -> str:
    """Return a target as text: equal targets give equal texts."""
    return dump(dict(sorted(target.items())))


def add_replies(
    db: Database, now: float, session_id: str, turn_id: str, entries: Sequence[NewReply], node: str = ""
) -> list[int]:
    """Queue replies, in order; return their ids. With `node`, that node sends them while it is alive: it knows which messages they replace."""
    ids: list[int] = []
    for entry in entries:
        made = one(
            db,
            "INSERT INTO outbox (platform, target, text, payload, session_id, turn_id, next_at, created_at, owner)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING id",
            (
                entry.platform,
                _target(entry.target),
                clean(entry.text),
                dump(entry.payload) if entry.payload else "{}",
                session_id,
                turn_id,
                now,
                now,
                node,
            ),
        )
        assert made is not None
        ids.append(made[0])
        db.signals.append((OUTBOX_TOPIC, entry.platform))
    return ids


_HEADS: Final = (
    "SELECT id, state, next_at, owner, created_at, attempts FROM outbox WHERE id IN"
    " (SELECT min(id) FROM outbox WHERE platform = ? AND settled_at IS NULL GROUP BY target)"
)
"""The oldest unsettled reply of each chat: only it may be sent, so that later ones do not overtake it."""


def _claimable(
    db: Database, now: float, owner: str, platform: str, holding: Sequence[int], waited: Sequence[tuple[int, int]]
) -> list[tuple[float, int]]:
    """Return when each head can be claimed: waiting ones when they are due, and at once those of this owner whose claim's answer was lost.

    What the caller holds is never claimed, even if it waits: its attempt has ended in the store, and the caller does not know that yet.
    A reply with a creation time after now is due at once, because the clock was set back. Its claim sets that time to now, so that its next attempt waits.
    So is one that has `waited`: its delay has passed, and its time was computed by a clock that was ahead.
    """
    ripe = frozenset(waited)
    return [
        (next_at if state == "pending" and created_at <= now and (number, attempts) not in ripe else 0.0, number)
        for number, state, next_at, held, created_at, attempts in many(db, _HEADS, (platform,))
        if number not in holding and (held == owner or (state == "pending" and not held))
    ]


def claim(
    db: Database,
    now: float,
    owner: str,
    platform: str,
    limit: int,
    holding: Sequence[int],
    waited: Sequence[tuple[int, int]] = (),
) -> list[OutboxRow]:
    """Claim for this owner and return the oldest unsent reply of each chat, where it is due."""
    ids = sorted(number for due, number in _claimable(db, now, owner, platform, holding, waited) if due <= now)[:limit]
    claimed: list[OutboxRow] = []
    for number in ids:
        found = one(
            db,
            "UPDATE outbox SET state = 'attempting', attempts = attempts + 1, owner = ?1,"
            " created_at = CASE WHEN created_at > ?2 THEN ?2 ELSE created_at END WHERE id = ?3"
            f" RETURNING {_COLUMNS}",
            (owner, now, number),
        )
        assert found is not None
        claimed.append(_row(found))
    return claimed


def next_due(
    db: Database, now: float, owner: str, platform: str, holding: Sequence[int], waited: Sequence[tuple[int, int]] = ()
) -> float | None:
    """Return when the next reply of a platform can be claimed. Only the oldest unsent reply of each chat counts."""
    return min((due for due, _ in _claimable(db, now, owner, platform, holding, waited)), default=None)


def end_attempt(db: Database, owner: str, row: OutboxRow, change: str, bindings: Sequence[object]) -> bool:
    """Write the end of one attempt, once: `change` is the SQL that updates the row."""
    mine = "id = ? AND settled_at IS NULL AND state = 'attempting' AND owner = ? AND attempts = ?"
    if changed(db, f"UPDATE outbox SET {change} WHERE {mine}", (*bindings, row.id, owner, row.attempts)):
        db.signals.append((OUTBOX_TOPIC, row.platform))
        return True
    found = one(db, "SELECT owner FROM outbox WHERE id = ? AND state = 'attempting'", (row.id,))
    if found is not None and found[0] != owner:
        raise Fenced(f"reply {row.id} is being sent by another owner")
    return False


def revive(db: Database, now: float, number: int) -> bool:
    """Queue a dead reply again."""
    found = one(
        db,
        "UPDATE outbox SET state = 'pending', owner = '', settled_at = NULL, attempts = 0, next_at = ?1, created_at = ?1,"
        " maybe_duplicate = CASE WHEN maybe_duplicate > 1 THEN 1 ELSE maybe_duplicate END"
        " WHERE id = ?2 AND state = 'dead' RETURNING platform",
        (now, number),
    )
    if found is not None:
        db.signals.append((OUTBOX_TOPIC, found[0]))
    return found is not None


def listed(db: Database, state: str, platform: str | None, page: Page) -> list[OutboxRow]:
    """Return the replies in a state, oldest first."""
    where, bindings = equalities({"state": state, "platform": platform})
    sql = f"SELECT {_COLUMNS} FROM outbox WHERE {' AND '.join(where)} ORDER BY id LIMIT ? OFFSET ?"
    return [_row(row) for row in many(db, sql, (*bindings, page.limit, page.offset))]


def to_chat(db: Database, platform: str, target: str, limit: int) -> list[OutboxRow]:
    """Return the newest replies to one chat, newest first. Each half of the query has an index of its own."""
    found: list[Row] = []
    for state in ("settled_at IS NULL", "settled_at IS NOT NULL"):
        sql = f"SELECT {_COLUMNS} FROM outbox WHERE platform = ? AND target = ? AND {state} ORDER BY id DESC LIMIT ?"
        found += many(db, sql, (platform, target, limit))
    return sorted((_row(row) for row in found), key=lambda row: -row.id)[:limit]


def unsent(db: Database) -> int:
    """Return how many replies are neither sent nor dead."""
    return single(db, "SELECT count(*) FROM outbox WHERE settled_at IS NULL")


class SqliteOutbox(Verbs):
    """The outbox's part of the store."""

    async def add_outbox(self, entries: Sequence[NewReply], *, session_id: str = "") -> list[int]:
        node = self.owner if self.lease_seconds else ""
        return await self._write(add_replies, self._clock(), session_id, "", tuple(entries), node)

    async def claim_outbox(
        self, platform: str, *, limit: int = 16, holding: Sequence[int] = (), waited: Sequence[tuple[int, int]] = ()
    ) -> list[OutboxRow]:
        return await self._write(claim, self._clock(), self.owner, platform, limit, tuple(holding), tuple(waited))

    async def next_outbox_due(
        self, platform: str, *, holding: Sequence[int] = (), waited: Sequence[tuple[int, int]] = ()
    ) -> float | None:
        return await self._read(next_due, self._clock(), self.owner, platform, tuple(holding), tuple(waited))

    async def outbox_sent(self, row: OutboxRow) -> bool:
        change = "state = 'sent', settled_at = ?, error = ''"
        return await self._write(end_attempt, self.owner, row, change, (self._clock(),))

    async def outbox_retry(self, row: OutboxRow, *, at: float, error: str) -> bool:
        change = "state = 'pending', owner = '', next_at = ?, error = ?, maybe_duplicate = ?"
        return await self._write(end_attempt, self.owner, row, change, (at, clean(error), row.maybe_duplicate))

    async def outbox_dead(self, row: OutboxRow, *, error: str) -> bool:
        change = "state = 'dead', settled_at = ?, error = ?, maybe_duplicate = ?"
        bindings = (self._clock(), clean(error), row.maybe_duplicate)
        return await self._write(end_attempt, self.owner, row, change, bindings)

    async def revive_outbox(self, number: int) -> bool:
        return await self._write(revive, self._clock(), number)

    async def list_outbox(
        self, state: OutboxState, page: Page = FIRST_PAGE, *, platform: str | None = None
    ) -> list[OutboxRow]:
        return await self._scan(listed, state.value, platform, page)

    async def replies_to(self, platform: str, target: Mapping[str, object], *, limit: int = 50) -> list[OutboxRow]:
        return await self._read(to_chat, platform, _target(target), limit)

    async def outbox_unsent(self) -> int:
        return await self._read(unsent)
