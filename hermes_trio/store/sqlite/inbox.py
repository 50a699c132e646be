"""The inbox: rows that wait for a session. A row is pending until it reaches exactly one of these states.

| state | meaning |
| --- | --- |
| `taken` | claimed by its `owner`; once `turn_id` is set, the turn that handles it has begun |
| `delivered` | delivered in a turn that was committed |
| `superseded` | the agent had already seen it |
| `abandoned` | there is no session left to deliver to; `reason` says why |
| `interrupted` | a message whose turn died with the server |
| `dead` | failed in every attempt; `reason` says why, and it can be queued again |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.errors import Fenced, MailboxFull
from hermes_trio.runtime.ports import InboxKind, InboxRow, NewMessage, NewNotice, NewReply, NoticeKind, inbox_topic
from hermes_trio.store.records import FIRST_PAGE, InboxState, Page

from .encoding import clean, dump, load_mapping, load_routing, routing_text
from .outbox import add_replies
from .roots import close_root
from .rows import Database, Row, changed, exists, many, one, single, write
from .verbs import Verbs

SESSION_ENDED: Final = "session_ended"

COLUMNS: Final = (
    "id, kind, inbox, session_key, session_id, routing, text, notice, job_id, root_id, payload, created_at, attempts"
)

_CLAIMABLE: Final = (
    "settled_at IS NULL AND session_key = ? AND inbox = ?"
    " AND (state = 'pending' OR (state = 'taken' AND owner = ? AND turn_id = ''))"
)

_OF_ROOT: Final = " AND kind = 'notice' AND root_id = ?"

ELSEWHERE: Final = (
    "SELECT 1 FROM inbox WHERE settled_at IS NULL AND session_key = ?1 AND inbox = ?2 AND state = 'taken' AND owner <> ?3"
    " UNION ALL SELECT 1 FROM jobs WHERE ended_at IS NULL AND session_key = ?1 AND owner <> ?3"
    " UNION ALL SELECT 1 FROM routes r JOIN leases l ON l.name = 'host ' || r.session_id JOIN nodes n ON n.incarnation = l.owner"
    " WHERE r.session_key = ?1 AND l.owner <> ?3 LIMIT 1"
)
"""Another node has the lane of a session key: it is working on a row of it, or background work, the shell or the files of the session are there."""


def row_of(row: Row) -> InboxRow:
    """Return a row as its record."""
    number, kind, inbox, key, session_id, routing, text, notice, job_id, root_id, payload, created, attempts = row
    return InboxRow(
        id=number,
        kind=InboxKind(kind),
        inbox=inbox,
        session_key=key,
        session_id=session_id,
        routing=load_routing(routing),
        text=text,
        notice=NoticeKind(notice) if notice else None,
        job_id=job_id,
        root_id=root_id,
        payload=load_mapping(payload),
        created_at=created,
        attempts=attempts,
    )


def session_has_ended(db: Database, session_id: str) -> bool:
    """Return whether a session is known and has ended."""
    return bool(session_id) and exists(
        db, "SELECT 1 FROM sessions WHERE id = ? AND ended_at IS NOT NULL", (session_id,)
    )


def insert_notice(db: Database, now: float, notice: NewNotice, state: str = "pending", reason: str = "") -> int | None:
    """Write a notice in the state given. A notice for an ended session is written as abandoned; it does not reopen the session.

    Returns its id if it now waits.
    """
    if state == "pending" and session_has_ended(db, notice.routing.session_id):
        state, reason = "abandoned", SESSION_ENDED
    made = one(
        db,
        "INSERT INTO inbox (kind, inbox, session_key, session_id, routing, text, notice, job_id, root_id, payload,"
        " state, reason, created_at, settled_at) VALUES ('notice', ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING id",
        (
            notice.inbox,
            notice.routing.session_key,
            notice.routing.session_id,
            routing_text(notice.routing),
            clean(notice.text),
            notice.kind.value,
            notice.job_id,
            notice.root_id,
            dump(notice.payload),
            state,
            reason,
            now,
            None if state == "pending" else now,
        ),
    )
    if state != "pending" or made is None:
        return None
    db.signals.append((inbox_topic(notice.inbox), notice.routing.session_key))
    return made[0]


def accept_message(db: Database, now: float, message: NewMessage, limit: int | None = None) -> int | None:
    """Write a message, unless its dedupe key is known to this inbox. Raises `MailboxFull` if `limit` messages wait for its session already."""
    sql = "SELECT count(*) FROM inbox WHERE settled_at IS NULL AND session_key = ? AND inbox = ? AND kind = 'message' AND state = 'pending'"
    if limit is not None and (found := one(db, sql, (message.session_key, message.inbox))) and found[0] >= limit:
        raise MailboxFull(
            f"{found[0]} messages already wait in this conversation; wait for an answer, or stop the current turn"
        )
    inserted = one(
        db,
        "INSERT INTO inbox (kind, inbox, session_key, session_id, routing, text, payload, dedupe_key, created_at)"
        " VALUES ('message', ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING RETURNING id",
        (
            message.inbox,
            message.session_key,
            message.routing.session_id,
            routing_text(message.routing),
            clean(message.text),
            dump(message.payload),
            message.dedupe_key,
            now,
        ),
    )
    if inserted is None:
        return None
    db.signals.append((inbox_topic(message.inbox), message.session_key))
    return inserted[0]


def take_rows(db: Database, owner: str, turn_id: str, session_id: str, ids: Sequence[int]) -> None:
    """Assign exactly these rows to a turn that begins. Raises `Fenced` if one of them is neither waiting nor claimed by this owner."""
    taken = 0
    for number in ids:
        taken += changed(
            db,
            "UPDATE inbox SET state = 'taken', turn_id = ?1, owner = ?2,"
            " session_id = CASE kind WHEN 'message' THEN ?3 ELSE session_id END"
            " WHERE id = ?4 AND (state = 'pending' OR (state = 'taken' AND owner = ?2 AND turn_id IN ('', ?1)))",
            (turn_id, owner, session_id, number),
        )
    if taken != len(ids):
        raise Fenced(
            f"{len(ids) - taken} of {len(ids)} inbox rows of turn {turn_id} are not held by this owner any more"
        )


def settle_rows(db: Database, now: float, owner: str, turn_id: str, taken: Sequence[int], told: Sequence[int]) -> None:
    """Settle the rows of a turn that ends: acknowledged notices and all messages that it took become delivered; its other notices wait again.

    A notice that was superseded or abandoned while the turn delivered it becomes delivered, too. Raises `Fenced` if another owner
    holds a row that the turn took.
    """
    for number in taken:
        if exists(db, "SELECT 1 FROM inbox WHERE id = ? AND owner NOT IN ('', ?)", (number, owner)):
            raise Fenced(f"inbox row {number} of turn {turn_id} now belongs to another owner")
    for number in told:
        found = one(
            db,
            "UPDATE inbox SET state = 'delivered', reason = '', turn_id = ?, settled_at = ?"
            " WHERE id = ? AND state IN ('pending', 'taken', 'superseded', 'abandoned') AND owner IN ('', ?)"
            " RETURNING root_id",
            (turn_id, now, number, owner),
        )
        if found is not None:
            close_root(db, found[0])
    rest = [number for number in taken if number not in told] if told else taken
    for number in rest:
        write(
            db,
            "UPDATE inbox SET state = 'delivered', turn_id = ?, settled_at = ?"
            " WHERE id = ? AND kind = 'message' AND state IN ('pending', 'taken')",
            (turn_id, now, number),
        )
    if rest:
        _wait_again(db, owner, rest)


def release_rows(db: Database, owner: str, rows: Sequence[InboxRow]) -> None:
    """Release a claim: the rows wait for the next claim. A begin of these rows whose outcome was unknown is undone."""
    ids = _unbegin(db, owner, rows)
    _wait_again(db, owner, ids)


def _wait_again(db: Database, owner: str, ids: Sequence[int]) -> None:
    sql = (
        "UPDATE inbox SET state = 'pending', owner = '', turn_id = '' WHERE id = ? AND state = 'taken' AND owner = ?"
        " RETURNING inbox, session_key"
    )
    for number in ids:
        for inbox, key in many(db, sql, (number, owner)):
            db.signals.append((inbox_topic(inbox), key))


def _unbegin(db: Database, owner: str, rows: Sequence[InboxRow]) -> list[int]:
    """Close the turn that took these rows, since no agent has seen them. Return the rows that are still held by the claim that returned them.

    Each claim counts as one more attempt: a row that was claimed again belongs to that claim, and to the turn that began with it.
    """
    held = "SELECT 1 FROM inbox WHERE id = ? AND owner = ? AND state = 'taken' AND attempts = ?"
    ids = [row.id for row in rows if exists(db, held, (row.id, owner, row.attempts))]
    sql = (
        "UPDATE sessions SET open_turn = NULL WHERE (id, open_turn, owner) IN"
        " (SELECT session_id, turn_id, owner FROM inbox WHERE id = ? AND owner = ? AND state = 'taken' AND turn_id <> '')"
    )
    for number in ids:
        write(db, sql, (number, owner))
    return ids


def make_dead_letters(
    db: Database, now: float, owner: str, claimed: Sequence[InboxRow], reason: str, told: Sequence[NewReply]
) -> None:
    """Make dead letters of claimed rows and queue the replies to their senders. Rows that are not held any more are not changed."""
    ids = _unbegin(db, owner, claimed)
    sql = "UPDATE inbox SET state = 'dead', reason = ?, settled_at = ? WHERE id = ? AND state = 'taken' AND owner = ?"
    sql += " RETURNING root_id, inbox, session_key"
    rows = [row for number in ids for row in many(db, sql, (clean(reason), now, number, owner))]
    if _close(db, rows):
        add_replies(db, now, "", "", told)


def expire_waiting(db: Database, reason: str, now: float, before: float, limit: int) -> int:
    """Make dead letters of rows that have waited since `before`, `limit` at most; return how many there were."""
    sql = (
        "UPDATE inbox SET state = 'dead', reason = ?, settled_at = ? WHERE id IN"
        " (SELECT id FROM inbox WHERE settled_at IS NULL AND state = 'pending' AND created_at < ? LIMIT ?)"
        " RETURNING root_id, inbox, session_key"
    )
    return _close(db, many(db, sql, (reason, now, before, limit)))


def revive_row(db: Database, now: float, number: int) -> bool:
    """Queue a dead letter again, from now on."""
    found = one(
        db,
        "UPDATE inbox SET state = 'pending', reason = '', owner = '', turn_id = '', attempts = 0, settled_at = NULL,"
        " created_at = ? WHERE id = ? AND state = 'dead' RETURNING inbox, session_key",
        (now, number),
    )
    if found is not None:
        db.signals.append((inbox_topic(found[0]), found[1]))
    return found is not None


def acknowledge(db: Database, now: float, owner: str, ids: Sequence[int]) -> None:
    """Mark rows as delivered outside any turn."""
    settle_rows(db, now, owner, "", (), ids)


def supersede(db: Database, now: float, job_id: str) -> int:
    """Mark the pending notices of a job as superseded; return their number."""
    sql = (
        "UPDATE inbox SET state = 'superseded', settled_at = ? WHERE job_id = ? AND job_id <> '' AND state = 'pending'"
        " RETURNING root_id, inbox, session_key"
    )
    return _close(db, many(db, sql, (now, job_id)))


def abandon_waiting(db: Database, now: float, session_id: str, reason: str, root_id: str | None = None) -> int:
    """Mark the pending rows of a session as abandoned, or only the notices of one root; return their number.

    Claimed rows are in a turn and are not changed.
    """
    sql = (
        "UPDATE inbox SET state = 'abandoned', reason = ?, settled_at = ? WHERE session_id = ? AND session_id <> '' AND settled_at IS NULL"
        f" AND state = 'pending'{'' if root_id is None else _OF_ROOT} RETURNING root_id, inbox, session_key"
    )
    given = (reason, now, session_id)
    return _close(db, many(db, sql, given if root_id is None else (*given, root_id)))


def _close(db: Database, rows: Sequence[Row]) -> int:
    """Signal the roots and sessions of rows that no longer wait; return the number of rows."""
    for root_id, inbox, key in rows:
        db.signals.append((inbox_topic(inbox), key))
        close_root(db, root_id)
    return len(rows)


def claim_lane(db: Database, owner: str, inbox: str, session_key: str, limit: int) -> list[InboxRow]:
    """Claim as `claim_rows` does, unless another node has the lane of the session: the end of its work is signalled."""
    if exists(db, ELSEWHERE, (session_key, inbox, owner)):
        return []
    return claim_rows(db, owner, inbox, session_key, limit)


def claim_rows(db: Database, owner: str, inbox: str, session_key: str, limit: int) -> list[InboxRow]:
    """Claim the rows of the next turn of a session: its oldest message, or all notices before that message that have one destination.

    Rows that this owner has claimed and not begun are claimed again, so that a claim whose answer was lost is repeated.
    """
    sql = f"SELECT {COLUMNS} FROM inbox WHERE {_CLAIMABLE} ORDER BY id LIMIT ?"
    found = [row_of(row) for row in many(db, sql, (session_key, inbox, owner, limit))]
    rows = first_of(found)
    claimed = [
        changed(
            db,
            "UPDATE inbox SET state = 'taken', owner = ?1, attempts = attempts + 1"
            " WHERE id = ?2 AND (state = 'pending' OR (state = 'taken' AND owner = ?1 AND turn_id = ''))",
            (owner, row.id),
        )
        for row in rows
    ]
    if sum(claimed) != len(rows):
        raise Fenced(f"{len(rows) - sum(claimed)} inbox rows of {session_key} were claimed by another owner")
    return claimed_again(rows)


def first_of(found: Sequence[InboxRow]) -> list[InboxRow]:
    """Return the rows of one turn among those that wait: the oldest message, or all notices before that message that have one destination."""
    rows = list(found[:1])
    if rows and rows[0].kind is InboxKind.NOTICE:
        for row in found[1:]:
            if row.kind is InboxKind.MESSAGE or _destination(row) != _destination(rows[0]):
                break
            rows.append(row)
    return rows


def claimed_again(rows: Sequence[InboxRow]) -> list[InboxRow]:
    """Return these rows with one more attempt."""
    return [msgspec.structs.replace(row, attempts=row.attempts + 1) for row in rows]


def _destination(row: InboxRow) -> tuple[str, SessionContext]:
    return (row.session_id, msgspec.structs.replace(row.routing, message_id=""))


def listed(db: Database, state: str, page: Page) -> list[tuple[InboxRow, str]]:
    """Return rows in a state with their reasons, oldest first."""
    sql = f"SELECT {COLUMNS}, reason FROM inbox WHERE state = ? ORDER BY id LIMIT ? OFFSET ?"
    return [(row_of(row[:-1]), row[-1]) for row in many(db, sql, (state, page.limit, page.offset))]


def waits(db: Database, inbox: str, session_key: str, owner: str) -> bool:
    """Return whether there is a row to claim, without a transaction."""
    return exists(db, f"SELECT 1 FROM inbox WHERE {_CLAIMABLE} LIMIT 1", (session_key, inbox, owner))


def waiting_keys(db: Database, inbox: str, owner: str) -> list[str]:
    """Return the session keys with rows that wait, or that this owner claimed and did not begin, the longest waiting first."""
    sql = (
        "SELECT session_key FROM (SELECT session_key, id FROM inbox WHERE settled_at IS NULL AND state = 'pending' AND inbox = ?1 UNION ALL"
        " SELECT session_key, id FROM inbox WHERE settled_at IS NULL AND state = 'taken' AND turn_id = '' AND inbox = ?1 AND owner = ?2) AS waiting"
        " GROUP BY session_key ORDER BY min(id)"
    )
    return [key for (key,) in many(db, sql, (inbox, owner))]


def waiting_count(
    db: Database,
    inbox: str | None = None,
    session_key: str | None = None,
    taken: bool = False,
    kind: InboxKind | None = None,
) -> int:
    """See `RuntimeStore.inbox_waiting`."""
    only = {"inbox = ?": inbox, "session_key = ?": session_key, "kind = ?": kind and kind.value}
    given = {part: value for part, value in only.items() if value is not None}
    states = "('pending', 'taken')" if taken else "('pending')"
    sql = " AND ".join((f"SELECT count(*) FROM inbox WHERE settled_at IS NULL AND state IN {states}", *given))
    return single(db, sql, tuple(given.values()))


class SqliteInbox(Verbs):
    """The inbox's part of the store."""

    async def add_notice(self, notice: NewNotice) -> int | None:
        return await self._write(insert_notice, self._clock(), notice)

    async def accept_message(self, message: NewMessage, *, limit: int | None = None) -> int | None:
        return await self._write(accept_message, self._clock(), message, limit)

    async def supersede(self, job_id: str) -> int:
        return await self._write(supersede, self._clock(), job_id)

    async def abandon(self, *, session_id: str, reason: str, root_id: str | None = None) -> int:
        return await self._write(abandon_waiting, self._clock(), session_id, reason, root_id)

    async def take_inbox(self, inbox: str, session_key: str, limit: int = 32) -> list[InboxRow]:
        if not await self._read(waits, inbox, session_key, self.owner):
            return []
        claim = claim_lane if self.lease_seconds else claim_rows
        return await self._write(claim, self.owner, inbox, session_key, limit)

    async def release_inbox(self, rows: Sequence[InboxRow]) -> None:
        await self._write(release_rows, self.owner, tuple(rows))

    async def inbox_dead(self, rows: Sequence[InboxRow], *, reason: str, replies: Sequence[NewReply] = ()) -> None:
        await self._write(make_dead_letters, self._clock(), self.owner, tuple(rows), reason, tuple(replies))

    async def revive_inbox(self, number: int) -> bool:
        return await self._write(revive_row, self._clock(), number)

    async def list_inbox(self, state: InboxState, page: Page = FIRST_PAGE) -> list[tuple[InboxRow, str]]:
        return await self._scan(listed, state.value, page)

    async def acknowledge(self, ids: Sequence[int]) -> None:
        await self._write(acknowledge, self._clock(), self.owner, tuple(ids))

    async def waiting_sessions(self, inbox: str) -> list[str]:
        return await self._read(waiting_keys, inbox, self.owner)

    async def inbox_waiting(
        self,
        *,
        inbox: str | None = None,
        session_key: str | None = None,
        taken: bool = False,
        kind: InboxKind | None = None,
    ) -> int:
        return await self._read(waiting_count, inbox, session_key, taken, kind)
