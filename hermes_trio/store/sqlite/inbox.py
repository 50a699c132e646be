"""The inbox: what waits for a session. A row is pending until exactly one of these happens to it.

| state | meaning |
| --- | --- |
| `taken` | a message whose turn has begun and not finished; only a message, and only while that turn lives |
| `delivered` | told, in a turn that was committed |
| `superseded` | the agent had already seen it by itself |
| `abandoned` | nobody is left to tell; `reason` says why |
| `interrupted` | a message whose turn died with the server |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hermes_trio.runtime.errors import MailboxFull
from hermes_trio.runtime.ports import InboxKind, InboxRow, NewMessage, NewNotice, NoticeKind, inbox_topic

from .encoding import clean, dump, load_mapping, load_routing, routing_text
from .rows import Database, Row, changed, exists, many, marks, one, write, write_many
from .verbs import Verbs

__all__ = ["SqliteInbox", "abandon_waiting", "insert_notice", "session_has_ended", "settle_rows", "take_rows"]

SESSION_ENDED: Final = "session_ended"

_COLUMNS: Final = (
    "id, kind, inbox, session_key, session_id, routing, text, notice, job_id, root_id, payload, created_at"
)


def _row(row: Row) -> InboxRow:
    number, kind, inbox, key, session_id, routing, text, notice, job_id, root_id, payload, created = row
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
    )


def session_has_ended(db: Database, session_id: str) -> bool:
    """Whether a session is known and has ended."""
    return bool(session_id) and exists(
        db, "SELECT 1 FROM sessions WHERE id = ? AND ended_at IS NOT NULL", (session_id,)
    )


def insert_notice(db: Database, now: float, notice: NewNotice, state: str = "pending", reason: str = "") -> int | None:
    """Write a notice in the state given; one for a session that has ended is abandoned, it never revives the session.

    Returns its id if it now waits.
    """
    if state == "pending" and session_has_ended(db, notice.session_id):
        state, reason = "abandoned", SESSION_ENDED
    write(
        db,
        "INSERT INTO inbox (kind, inbox, session_key, session_id, routing, text, notice, job_id, root_id, payload,"
        " state, reason, created_at, settled_at) VALUES ('notice', ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            notice.inbox,
            notice.session_key,
            notice.session_id,
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
    if state != "pending":
        return None
    db.signals.append((inbox_topic(notice.inbox), notice.session_key))
    return db.last_insert_rowid()


def accept_message(db: Database, now: float, message: NewMessage, limit: int | None = None) -> int | None:
    """Write a message, unless its dedupe key is known to this inbox; raise `MailboxFull` if so many wait for its session already."""
    sql = "SELECT count(*) FROM inbox WHERE session_key = ? AND inbox = ? AND kind = 'message' AND state = 'pending'"
    if limit is not None and (found := one(db, sql, (message.session_key, message.inbox))) and found[0] >= limit:
        raise MailboxFull(
            f"{found[0]} messages already wait in this conversation; wait for an answer, or stop the current turn"
        )
    inserted = changed(
        db,
        "INSERT INTO inbox (kind, inbox, session_key, session_id, routing, text, payload, dedupe_key, created_at)"
        " VALUES ('message', ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
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
    if not inserted:
        return None
    db.signals.append((inbox_topic(message.inbox), message.session_key))
    return db.last_insert_rowid()


def take_rows(db: Database, turn_id: str, session_id: str, ids: Sequence[int]) -> None:
    """A turn begins with these rows: its messages are never begun again. Notices keep waiting for the commit that tells them."""
    write_many(
        db,
        "UPDATE inbox SET state = 'taken', turn_id = ?, session_id = ?"
        " WHERE id = ? AND kind = 'message' AND state = 'pending'",
        [(turn_id, session_id, number) for number in ids],
    )


def settle_rows(db: Database, now: float, turn_id: str, taken: Sequence[int], told: Sequence[int]) -> None:
    """A turn ends: what it told is delivered, and so are the messages that it took, however it ended.

    A notice that was superseded or abandoned while the turn was telling it has been told: that is what its row says.
    """
    if told:
        write_many(
            db,
            "UPDATE inbox SET state = 'delivered', reason = '', turn_id = ?, settled_at = ?"
            " WHERE id = ? AND state IN ('pending', 'taken', 'superseded', 'abandoned')",
            [(turn_id, now, number) for number in told],
        )
    rest = [number for number in taken if number not in told] if told else taken
    if rest:
        write_many(
            db,
            "UPDATE inbox SET state = 'delivered', turn_id = ?, settled_at = ?"
            " WHERE id = ? AND kind = 'message' AND state IN ('pending', 'taken')",
            [(turn_id, now, number) for number in rest],
        )


def acknowledge(db: Database, now: float, ids: Sequence[int]) -> None:
    """Mark rows as delivered outside any turn."""
    settle_rows(db, now, "", (), ids)


def supersede(db: Database, now: float, job_id: str) -> list[tuple[str, int]]:
    """The pending notices of a job have been seen."""
    sql = (
        "UPDATE inbox SET state = 'superseded', settled_at = ? WHERE job_id = ? AND job_id <> '' AND state = 'pending'"
        " RETURNING root_id, id"
    )
    return [(str(root_id), int(number)) for root_id, number in many(db, sql, (now, job_id))]


def abandon_waiting(db: Database, now: float, session_id: str, reason: str) -> list[tuple[str, int]]:
    """Nobody is left to tell what waits for a session."""
    sql = (
        "UPDATE inbox SET state = 'abandoned', reason = ?, settled_at = ?"
        " WHERE session_id = ? AND session_id <> '' AND state = 'pending' RETURNING root_id, id"
    )
    return [(str(root_id), int(number)) for root_id, number in many(db, sql, (reason, now, session_id))]


def waiting_rows(db: Database, inbox: str, session_key: str, limit: int) -> list[InboxRow]:
    """What waits for a session key in an inbox, oldest first."""
    sql = f"SELECT {_COLUMNS} FROM inbox WHERE session_key = ? AND inbox = ? AND state = 'pending' ORDER BY id LIMIT ?"
    return [_row(row) for row in many(db, sql, (session_key, inbox, limit))]


def waiting_keys(db: Database, inbox: str) -> list[str]:
    """The session keys for which something waits, the longest waiting first."""
    sql = "SELECT session_key FROM inbox WHERE state = 'pending' AND inbox = ? GROUP BY session_key ORDER BY min(id)"
    return [key for (key,) in many(db, sql, (inbox,))]


def row_states(db: Database, ids: Sequence[int]) -> dict[int, tuple[str, str]]:
    """State and reason of rows, by id."""
    found: dict[int, tuple[str, str]] = {}
    for start in range(0, len(ids), 100):
        part = ids[start : start + 100]
        sql = f"SELECT id, state, reason FROM inbox WHERE id IN ({marks(len(part))})"
        found.update({number: (state, reason) for number, state, reason in many(db, sql, part)})
    return found


def waiting_count(db: Database, inbox: str | None = None, session_key: str | None = None) -> int:
    """How many rows wait, in all inboxes or for one session."""
    only = {"inbox = ?": inbox, "session_key = ?": session_key}
    given = {part: value for part, value in only.items() if value is not None}
    sql = " AND ".join(("SELECT count(*) FROM inbox WHERE state = 'pending'", *given))
    found = one(db, sql, tuple(given.values()))
    return found[0] if found else 0


class SqliteInbox(Verbs):
    """The inbox's part of the store."""

    async def add_notice(self, notice: NewNotice) -> int | None:
        """Write a notice; return its id."""
        return await self._write(insert_notice, self._clock(), notice)

    async def accept_message(self, message: NewMessage, *, limit: int | None = None) -> int | None:
        """Write a message and return its id, or None if its dedupe key was accepted before."""
        return await self._write(accept_message, self._clock(), message, limit)

    async def supersede(self, job_id: str) -> list[tuple[str, int]]:
        """Mark the pending notices of a job as seen; return how many there were."""
        return await self._write(supersede, self._clock(), job_id)

    async def abandon(self, *, session_id: str, reason: str) -> list[tuple[str, int]]:
        """Mark what waits for a session as abandoned; return how many rows there were."""
        return await self._write(abandon_waiting, self._clock(), session_id, reason)

    async def take_inbox(self, inbox: str, session_key: str, limit: int = 32) -> list[InboxRow]:
        """What waits for a session in an inbox, oldest first. It keeps waiting until a turn begins or acknowledges it."""
        return await self._read(waiting_rows, inbox, session_key, limit)

    async def acknowledge(self, ids: Sequence[int]) -> None:
        """Mark rows as delivered outside any turn."""
        await self._write(acknowledge, self._clock(), tuple(ids))

    async def waiting_sessions(self, inbox: str) -> list[str]:
        """The session keys for which something waits in this inbox, the longest waiting first."""
        return await self._read(waiting_keys, inbox)

    async def inbox_states(self, ids: Sequence[int]) -> dict[int, tuple[str, str]]:
        """State and reason of rows, by id; a row that retention removed is missing."""
        return await self._read(row_states, tuple(ids))

    async def inbox_waiting(self, *, inbox: str | None = None, session_key: str | None = None) -> int:
        """How many rows wait, in all inboxes, in one, or for one session."""
        return await self._read(waiting_count, inbox, session_key)
