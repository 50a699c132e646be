"""The messages of a session: append, read, archive. A message is never changed, only archived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hermes_trio.runtime.ports import Message

from .encoding import MESSAGE_COLUMNS, message_from_row, message_to_row
from .rows import Database, many, single, write, write_many

PREVIEW_LENGTH: Final = 120

_INSERT: Final = f"INSERT INTO messages (session, {MESSAGE_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_HISTORY: Final = f"SELECT {MESSAGE_COLUMNS} FROM messages WHERE session = ? AND active = 1 ORDER BY id"
_PAGE: Final = f"{_HISTORY} LIMIT ?"


def add_messages(db: Database, now: float, session: int, messages: Sequence[Message]) -> None:
    """Append to a transcript."""
    if len(messages) == 1:
        write(db, _INSERT, (session, *message_to_row(messages[0], now)))
    else:
        write_many(db, _INSERT, [(session, *message_to_row(message, now)) for message in messages])


def first_words(messages: Sequence[Message]) -> str:
    """Return the start of the first message of a user, on one line, for lists of sessions."""
    for message in messages:
        if message.role == "user":
            return " ".join(message.text[: PREVIEW_LENGTH * 2].split())[:PREVIEW_LENGTH]
    return ""


def _number(db: Database, session_id: str) -> int | None:
    return single(db, "SELECT n FROM sessions WHERE id = ?", (session_id,))


def history(db: Database, session_id: str) -> list[Message]:
    """Return all live messages, oldest first; empty for an unknown session."""
    session = _number(db, session_id)
    return [] if session is None else [message_from_row(row) for row in many(db, _HISTORY, (session,))]


def history_page(db: Database, session_id: str, limit: int) -> list[Message] | None:
    """Return the same, or None if there are more than `limit`: too many for a point read."""
    session = _number(db, session_id)
    if session is None:
        return []
    found = many(db, _PAGE, (session, limit + 1))
    return None if len(found) > limit else [message_from_row(row) for row in found]


def archive_messages(db: Database, session: int) -> None:
    """Archive the live messages of a session: search still finds them, and the history no longer has them."""
    write(db, "UPDATE messages SET active = 0, compacted = 1 WHERE session = ? AND active = 1", (session,))
