"""Sessions: the durable conversation of a key. Made, renamed, ended, reopened, branched, deleted, listed; never pruned while open.

The first reason for an end wins. An ended session is reopened explicitly: by `reopen_session`, or by `begin_turn` of a request. A session that ended as
`idle` is also reopened by `resolve_session` and `finish_turn`, because a message ends the idleness; any other end that comes while a
turn runs stays when that turn finishes.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.ports import Message, NewReply
from hermes_trio.store.errors import ForeignSession, InvalidTitle, SessionExists, TitleTaken, UnknownSession
from hermes_trio.store.records import (
    ALL_SESSIONS,
    FIRST_MESSAGES,
    FIRST_PAGE,
    Lineage,
    NewSession,
    Page,
    SessionFilter,
    SessionRow,
    StoredMessage,
)

from .encoding import MESSAGE_COLUMNS, clean, dump, message_from_row, routing_text
from .inbox import SESSION_ENDED, abandon_waiting
from .nodes import host_lease
from .outbox import add_replies
from .rows import Database, Row, changed, equalities, exists, many, one, single, write
from .transcript import add_messages, archive_messages, first_words, history, history_page
from .verbs import Verbs

TITLE_LENGTH: Final = 100
HISTORY_POINT: Final = 256
"""Transcripts of up to this many messages are read on the loop."""

IDLE: Final = "idle"

INTERRUPTED: Final = "interrupted"
"""The end reason of a one-shot session whose server stopped in its turn."""

SESSION_COLUMNS: Final = (
    "id, source, tenant, session_key, user_id, model, title, preview, parent_session_id, lineage, one_shot, started_at,"
    " last_active, ended_at, end_reason, message_count, tool_call_count, input_tokens, output_tokens, cache_read_tokens,"
    " cache_write_tokens, reasoning_tokens, api_call_count, system_prompt IS NOT NULL, model_config IS NOT NULL"
)

_INSERT: Final = (
    "INSERT INTO sessions (id, source, tenant, session_key, user_id, model, title, preview, parent_session_id, lineage,"
    " routing, started_at, last_active, system_prompt, model_config)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)


def session_from_row(row: Row) -> SessionRow:
    """Return a row as a session's record."""
    values: list[Any] = [*row[:9], Lineage(row[9]), bool(row[10]), *row[11:23], bool(row[23]), bool(row[24])]
    return SessionRow(*values)


def new_session_id(now: float, token: Callable[[int], str]) -> str:
    """Return a new id: `YYYYMMDD_HHMMSS_<8 hex>`, in UTC."""
    return f"{datetime.fromtimestamp(now, UTC):%Y%m%d_%H%M%S}_{token(4)}"


def check_title(title: str | None) -> str | None:
    """Return a title as it is stored: trimmed, None for an empty one. Raises `InvalidTitle`."""
    if title is None:
        return None
    trimmed = " ".join(clean(title).split())
    if len(trimmed) > TITLE_LENGTH:
        raise InvalidTitle(f"the title has {len(trimmed)} characters; at most {TITLE_LENGTH} are allowed")
    if any(unicodedata.category(character) == "Cc" for character in trimmed):
        raise InvalidTitle("the title contains a control character; remove it")
    return trimmed or None


def get_session(db: Database, session_id: str) -> SessionRow | None:
    """Return a session by its id, or None."""
    found = one(db, f"SELECT {SESSION_COLUMNS} FROM sessions WHERE id = ?", (session_id,))
    return session_from_row(found) if found else None


def _needed(db: Database, session_id: str, tenant: str | None = None) -> SessionRow:
    """Return a session, of that tenant if one is given. Raises `UnknownSession` or `ForeignSession`."""
    found = get_session(db, session_id)
    if found is None:
        raise UnknownSession(f"there is no session {session_id!r}")
    if tenant is not None and found.tenant != tenant:
        raise ForeignSession(f"there is no session {session_id!r}")
    return found


def list_sessions(db: Database, which: SessionFilter, page: Page) -> list[SessionRow]:
    """Return sessions, the newest activity first."""
    where, bindings = equalities({"source": which.source, "tenant": which.tenant})
    if not which.include_children:
        where.append("lineage <> 'subagent'")
    if which.open_only:
        where.append("ended_at IS NULL")
    sql = (
        f"SELECT {SESSION_COLUMNS} FROM sessions WHERE {' AND '.join(where)}"
        " ORDER BY last_active DESC, n DESC LIMIT ? OFFSET ?"
    )
    return [session_from_row(row) for row in many(db, sql, (*bindings, page.limit, page.offset))]


def _title_is_free(db: Database, tenant: str, title: str | None, session_id: str) -> None:
    if title is not None and exists(
        db, "SELECT 1 FROM sessions WHERE tenant = ? AND title = ? AND id <> ?", (tenant, title, session_id)
    ):
        raise TitleTaken(f"another session is called {title!r}; choose another title")


def create_session(db: Database, now: float, new: NewSession, lineage: Lineage = Lineage.ROOT) -> SessionRow:
    """Make a session of a given id."""
    title = check_title(new.title)
    if exists(db, "SELECT 1 FROM sessions WHERE id = ?", (new.id,)):
        # The same message for every owner: the caller must not learn which tenant has the id.
        raise SessionExists(f"the session id {new.id!r} cannot be used; choose another one, or none")
    _title_is_free(db, new.tenant, title, new.id)
    write(
        db,
        _INSERT,
        (
            new.id,
            new.source,
            new.tenant,
            new.session_key,
            new.user_id,
            new.model,
            title,
            "",
            new.parent_session_id,
            lineage.value,
            routing_text(new.routing),
            now,
            now,
            None if new.system_prompt is None else clean(new.system_prompt),
            None if new.model_config is None else dump(new.model_config),
        ),
    )
    if new.session_key:
        set_route(db, now, new.session_key, new.id)
    return _needed(db, new.id)


def claim_session(db: Database, now: float, new: NewSession) -> SessionRow:
    """Return the tenant's session of that id; make it if there is none. Raises `ForeignSession` if it belongs to another tenant."""
    write(
        db,
        "INSERT INTO sessions (id, source, tenant, session_key, routing, started_at, last_active)"
        " VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?6) ON CONFLICT (id) DO NOTHING",
        (new.id, new.source, new.tenant, new.session_key, routing_text(new.routing), now),
    )
    return _needed(db, new.id, new.tenant)


def set_route(db: Database, now: float, session_key: str, session_id: str) -> None:
    """Point a key to a session."""
    write(
        db,
        "INSERT INTO routes (session_key, session_id, updated_at) VALUES (?, ?, ?) ON CONFLICT (session_key)"
        " DO UPDATE SET session_id = excluded.session_id, updated_at = excluded.updated_at",
        (session_key, session_id, now),
    )


def routed_session(db: Database, session_key: str) -> tuple[str, float | None, str | None] | None:
    """Return the id, the end and the end reason of the session of a key, or None."""
    sql = "SELECT s.id, s.ended_at, s.end_reason FROM routes r JOIN sessions s ON s.id = r.session_id WHERE r.session_key = ?"
    found = one(db, sql, (session_key,))
    return (found[0], found[1], found[2]) if found else None


def open_session_of(db: Database, session_key: str) -> str | None:
    """Return the open session of a key, or None."""
    found = routed_session(db, session_key)
    return found[0] if found and found[1] is None else None


def resolve_session(db: Database, now: float, context: SessionContext, source: str, fresh: bool, made_id: str) -> str:
    """Return the open session of a key; reopen one that ended as idle, else make a new one."""
    key = context.session_key
    if key and not fresh:
        found = routed_session(db, key)
        if found is not None:
            session_id, ended_at, reason = found
            if ended_at is None:
                return session_id
            if reason == IDLE:
                reopen_session(db, now, session_id)
                return session_id
    create_session(
        db,
        now,
        NewSession(
            id=made_id,
            source=source,
            tenant=context.tenant,
            session_key=key,
            user_id=context.user_id,
            routing=context,
        ),
    )
    return made_id


def end_session(db: Database, now: float, session_id: str, reason: str) -> bool:
    """End a session, if it is open, and abandon its waiting rows; return whether it was open."""
    ended = changed(
        db,
        "UPDATE sessions SET ended_at = ?, end_reason = ? WHERE id = ? AND ended_at IS NULL",
        (now, reason, session_id),
    )
    if ended:
        write(db, "DELETE FROM leases WHERE name = ?", (host_lease(session_id),))
        abandon_waiting(db, now, session_id, SESSION_ENDED)
    return bool(ended)


def conclude_interrupted(
    db: Database, now: float, session_id: str, reason: str, mark: str, replies: Sequence[NewReply], node: str
) -> bool:
    """Replace the end reason of an interrupted session, and queue the replies if there is a value under `mark`, which is deleted."""
    sql = "UPDATE sessions SET end_reason = ? WHERE id = ? AND end_reason = ? AND ended_at IS NOT NULL"
    if not changed(db, sql, (reason, session_id, INTERRUPTED)):
        return False
    if changed(db, "DELETE FROM state_meta WHERE key = ?", (mark,)):
        add_replies(db, now, session_id, "", replies, node)
    return True


def reopen_session(db: Database, now: float, session_id: str) -> bool:
    """Reopen an ended session; return whether it had ended."""
    change = "ended_at = NULL, end_reason = NULL, one_shot = 0, last_active = ?"
    return bool(changed(db, f"UPDATE sessions SET {change} WHERE id = ? AND ended_at IS NOT NULL", (now, session_id)))


def start_over(db: Database, now: float, session_key: str, source: str, reason: str, made_id: str) -> str:
    """End the session of a key and make a new one for the key, with the same routing."""
    old = routed_session(db, session_key)
    routing, tenant, user = "", "", ""
    if old is not None:
        end_session(db, now, old[0], reason)
        write(db, "DELETE FROM grants WHERE scope = ?", (session_key,))
        known = one(db, "SELECT routing, tenant, user_id FROM sessions WHERE id = ?", (old[0],))
        if known is not None:
            routing, tenant, user = known
    create_session(db, now, NewSession(id=made_id, source=source, tenant=tenant, session_key=session_key, user_id=user))
    if routing:
        write(db, "UPDATE sessions SET routing = ? WHERE id = ?", (routing, made_id))
    return made_id


def switch_session(db: Database, now: float, session_key: str, session_id: str, reason: str) -> SessionRow:
    """Point a conversation's key to another session of the operator's: the old one ends, the new one is reopened."""
    _needed(db, session_id, "")
    old = routed_session(db, session_key)
    if old is not None and old[0] != session_id:
        end_session(db, now, old[0], reason)
    reopen_session(db, now, session_id)
    write(db, "UPDATE sessions SET session_key = ?, last_active = ? WHERE id = ?", (session_key, now, session_id))
    set_route(db, now, session_key, session_id)
    return _needed(db, session_id)


def set_title(db: Database, session_id: str, title: str | None) -> SessionRow:
    """Set or clear the title of a session."""
    known = _needed(db, session_id)
    checked = check_title(title)
    _title_is_free(db, known.tenant, checked, session_id)
    write(db, "UPDATE sessions SET title = ? WHERE id = ?", (checked, session_id))
    return _needed(db, session_id)


def patch_session(
    db: Database,
    now: float,
    session_id: str,
    title: str | None,
    set_it: bool,
    end_reason: str | None,
    tenant: str | None,
) -> SessionRow:
    """Change the title and end the session, in one transaction."""
    _needed(db, session_id, tenant)
    if set_it:
        set_title(db, session_id, title)
    if end_reason:
        end_session(db, now, session_id, end_reason)
    return _needed(db, session_id)


def delete_session(db: Database, now: float, session_id: str, tenant: str | None = None) -> int:
    """Delete a session with its sub-agents' sessions, to any depth, and abandon their waiting rows; its branches stay, without a parent.

    What was allowed for the rest of a conversation ends with the session that the conversation is in.
    """
    if tenant is not None:
        _needed(db, session_id, tenant)
    subtree = [session_id]
    for parent in subtree:
        sql = "SELECT id FROM sessions WHERE parent_session_id = ? AND lineage = 'subagent'"
        subtree.extend(child for (child,) in many(db, sql, (parent,)) if child not in subtree)
    removed = 0
    for removed_id in subtree:
        write(db, "UPDATE sessions SET parent_session_id = NULL WHERE parent_session_id = ?", (removed_id,))
        abandon_waiting(db, now, removed_id, "session_deleted")
        write(
            db,
            "DELETE FROM grants WHERE scope IN (SELECT session_key FROM routes WHERE session_id = ?)",
            (removed_id,),
        )
        write(db, "DELETE FROM leases WHERE name = ?", (host_lease(removed_id),))
        removed += changed(db, "DELETE FROM sessions WHERE id = ?", (removed_id,))
    return removed


def _lineage_title(db: Database, parent: SessionRow) -> str | None:
    if parent.title is None:
        return None
    base, _, number = parent.title.rpartition(" #")
    stem = base if base and number.isdigit() else parent.title
    for count in range(2, 10_000):
        suffix = f" #{count}"
        title = stem[: TITLE_LENGTH - len(suffix)] + suffix
        if not exists(db, "SELECT 1 FROM sessions WHERE tenant = ? AND title = ?", (parent.tenant, title)):
            return title
    return None


def fork_session(
    db: Database, now: float, session_id: str, new_id: str, title: str | None, tenant: str | None
) -> SessionRow:
    """Branch a session: a new one with a copy of the live messages; the old one ends as `branched`."""
    parent = _needed(db, session_id, tenant)
    create_session(
        db,
        now,
        NewSession(
            id=new_id,
            source=parent.source,
            tenant=parent.tenant,
            user_id=parent.user_id,
            model=parent.model,
            title=title if check_title(title) else _lineage_title(db, parent),
            parent_session_id=session_id,
        ),
        Lineage.BRANCH,
    )
    write(
        db,
        "UPDATE sessions SET (system_prompt, model_config, routing, preview) ="
        " (SELECT system_prompt, model_config, routing, preview FROM sessions WHERE id = ?) WHERE id = ?",
        (session_id, new_id),
    )
    copied = changed(
        db,
        f"INSERT INTO messages (session, {MESSAGE_COLUMNS}) SELECT (SELECT n FROM sessions WHERE id = ?),"
        f" {MESSAGE_COLUMNS} FROM messages WHERE session = (SELECT n FROM sessions WHERE id = ?) AND active = 1"
        " ORDER BY id",
        (new_id, session_id),
    )
    write(db, "UPDATE sessions SET message_count = ? WHERE id = ?", (copied, new_id))
    end_session(db, now, session_id, "branched")
    return _needed(db, new_id)


def _number(db: Database, session_id: str) -> int:
    """Return the number of a session, to which its messages refer."""
    found = single(db, "SELECT n FROM sessions WHERE id = ?", (session_id,))
    if found is None:
        raise UnknownSession(f"there is no session {session_id!r}")
    return found


def append_messages(db: Database, now: float, session_id: str, messages: Sequence[Message]) -> None:
    """Append messages to a transcript outside any turn (an import, a note of the system)."""
    add_messages(db, now, _number(db, session_id), messages)
    write(
        db,
        "UPDATE sessions SET message_count = message_count + ?, last_active = ?,"
        " preview = CASE preview WHEN '' THEN ? ELSE preview END WHERE id = ?",
        (len(messages), now, clean(first_words(messages)), session_id),
    )


def replace_history(db: Database, now: float, session_id: str, messages: Sequence[Message]) -> None:
    """Compact a transcript: archive the live messages and put these in their place. The session stays the same."""
    number = _number(db, session_id)
    archive_messages(db, number)
    add_messages(db, now, number, messages)
    write(db, "UPDATE sessions SET last_active = ? WHERE id = ?", (now, session_id))


def stored_messages(db: Database, session_id: str, page: Page, include_archived: bool) -> list[StoredMessage]:
    """Return the messages with their numbers, oldest first."""
    sql = (
        f"SELECT id, active, {MESSAGE_COLUMNS} FROM messages WHERE session = (SELECT n FROM sessions WHERE id = ?)"
        f"{'' if include_archived else ' AND active = 1'} ORDER BY id LIMIT ? OFFSET ?"
    )
    return [
        StoredMessage(row[0], session_id, message_from_row(row[2:]), bool(row[1]))
        for row in many(db, sql, (session_id, page.limit, page.offset))
    ]


def prompt_of(db: Database, session_id: str) -> tuple[str | None, str | None]:
    """Return the system prompt and the model configuration, as they were given."""
    found = one(db, "SELECT system_prompt, model_config FROM sessions WHERE id = ?", (session_id,))
    return (found[0], found[1]) if found else (None, None)


class SqliteSessions(Verbs):
    """The sessions' part of the store."""

    _token: Callable[[int], str]

    async def resolve_session(self, context: SessionContext, *, source: str, fresh: bool = False) -> str:
        if context.session_key and not fresh:
            known = await self._read(open_session_of, context.session_key)
            if known is not None:
                return known
        now = self._clock()
        return await self._write(resolve_session, now, context, source, fresh, new_session_id(now, self._token))

    async def load_history(self, session_id: str) -> list[Message]:
        page = await self._read(history_page, session_id, HISTORY_POINT)
        return page if page is not None else await self._scan(history, session_id)

    async def get_session(self, session_id: str) -> SessionRow | None:
        return await self._read(get_session, session_id)

    async def session_of(self, session_key: str) -> SessionRow | None:
        found = await self._read(routed_session, session_key)
        return None if found is None else await self._read(get_session, found[0])

    async def list_sessions(self, which: SessionFilter = ALL_SESSIONS, page: Page = FIRST_PAGE) -> list[SessionRow]:
        return await self._scan(list_sessions, which, page)

    async def create_session(self, new: NewSession) -> SessionRow:
        now = self._clock()
        if not new.id:
            new = _with_id(new, new_session_id(now, self._token))
        return await self._write(create_session, now, new)

    async def claim_session(self, new: NewSession) -> SessionRow:
        return await self._write(claim_session, self._clock(), new)

    async def patch_session(
        self,
        session_id: str,
        *,
        title: str | None = None,
        set_title: bool = False,
        end_reason: str | None = None,
        tenant: str | None = None,
    ) -> SessionRow:
        return await self._write(patch_session, self._clock(), session_id, title, set_title, end_reason, tenant)

    async def end_session(self, session_id: str, reason: str) -> bool:
        return await self._write(end_session, self._clock(), session_id, reason)

    async def conclude_interrupted(
        self, session_id: str, *, reason: str, mark: str, replies: Sequence[NewReply] = ()
    ) -> bool:
        node = self.owner if self.lease_seconds else ""
        return await self._write(conclude_interrupted, self._clock(), session_id, reason, mark, tuple(replies), node)

    async def reopen_session(self, session_id: str) -> bool:
        return await self._write(reopen_session, self._clock(), session_id)

    async def delete_session(self, session_id: str, *, tenant: str | None = None) -> int:
        return await self._write_heavily(delete_session, self._clock(), session_id, tenant)

    async def fork_session(
        self, session_id: str, *, new_id: str = "", title: str | None = None, tenant: str | None = None
    ) -> SessionRow:
        now = self._clock()
        return await self._write_heavily(
            fork_session, now, session_id, new_id or new_session_id(now, self._token), title, tenant
        )

    async def new_session(self, session_key: str, *, source: str, reason: str = "session_reset") -> str:
        now = self._clock()
        return await self._write(start_over, now, session_key, source, reason, new_session_id(now, self._token))

    async def switch_session(self, session_key: str, session_id: str, *, reason: str = "session_switch") -> SessionRow:
        return await self._write(switch_session, self._clock(), session_key, session_id, reason)

    async def append_messages(self, session_id: str, messages: Sequence[Message]) -> None:
        await self._write(append_messages, self._clock(), session_id, tuple(messages))

    async def replace_history(self, session_id: str, messages: Sequence[Message]) -> None:
        await self._write(replace_history, self._clock(), session_id, tuple(messages))

    async def list_messages(
        self, session_id: str, page: Page = FIRST_MESSAGES, *, include_archived: bool = False
    ) -> list[StoredMessage]:
        return await self._scan(stored_messages, session_id, page, include_archived)

    async def session_prompt(self, session_id: str) -> tuple[str | None, str | None]:
        return await self._read(prompt_of, session_id)


def _with_id(new: NewSession, made_id: str) -> NewSession:
    return msgspec.structs.replace(new, id=made_id)
