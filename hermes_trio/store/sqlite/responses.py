"""Stored responses, the conversations that point to them, and the replies that idempotency keys repeat.

A tenant's responses are bounded: the least recently used go first, and with a response go the names that point to it.
"""

from __future__ import annotations

from typing import cast

from hermes_trio.store.errors import ConversationMoved, IdempotencyConflict, UnknownRecord
from hermes_trio.store.records import IdempotentReply, StoredResponse

from .encoding import dump, load
from .rows import Database, Row, changed, one, single, write
from .verbs import Verbs


def put_response(db: Database, now: float, response: StoredResponse, limit: int) -> None:
    """Store a response (the final one replaces a snapshot) and point its conversation to it."""
    kept = changed(
        db,
        "INSERT INTO responses (id, tenant, session_id, body, transcript, created_at, used_at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET session_id = excluded.session_id,"
        " body = excluded.body, transcript = excluded.transcript, used_at = excluded.used_at"
        " WHERE responses.tenant = excluded.tenant",
        (
            response.id,
            response.tenant,
            response.session_id,
            response.body,
            response.transcript,
            response.created_at or now,
            now,
        ),
    )
    if not kept:
        raise UnknownRecord(f"there is no response {response.id!r}")
    if response.conversation:
        _advance(db, now, response)
    write(
        db,
        "DELETE FROM responses WHERE tenant = ?1 AND rowid IN"
        " (SELECT rowid FROM responses WHERE tenant = ?1 ORDER BY used_at DESC, rowid DESC LIMIT -1 OFFSET ?2)",
        (response.tenant, limit),
    )


def _advance(db: Database, now: float, response: StoredResponse) -> None:
    latest = latest_of(db, response.tenant, response.conversation) or ""
    expected = response.expected_previous
    if expected is not None and latest not in (expected, response.id):
        raise ConversationMoved(response.conversation, latest)
    write(
        db,
        "INSERT INTO conversations (tenant, name, response_id, updated_at) VALUES (?, ?, ?, ?)"
        " ON CONFLICT (tenant, name) DO UPDATE SET response_id = excluded.response_id, updated_at = excluded.updated_at",
        (response.tenant, response.conversation, response.id, now),
    )


def latest_of(db: Database, tenant: str, name: str) -> str | None:
    """Return the id of the response that a conversation's name points to, or None."""
    return single(db, "SELECT response_id FROM conversations WHERE tenant = ? AND name = ?", (tenant, name))


def get_response(db: Database, tenant: str | None, response_id: str) -> StoredResponse | None:
    """Return a tenant's response, or any tenant's if `tenant` is None."""
    sql = "SELECT id, tenant, session_id, body, transcript, created_at FROM responses WHERE id = ?1 AND tenant = coalesce(?2, tenant)"
    found: Row | None = one(db, sql, (response_id, tenant))
    if found is None:
        return None
    return StoredResponse(
        id=found[0], tenant=found[1], session_id=found[2], body=found[3], transcript=found[4], created_at=found[5]
    )


def touch_response(db: Database, now: float, response_id: str) -> None:
    """Record that a response was read."""
    write(db, "UPDATE responses SET used_at = ? WHERE id = ?", (now, response_id))


def delete_response(db: Database, tenant: str | None, response_id: str) -> bool:
    """Delete a tenant's response, or any tenant's if `tenant` is None."""
    return bool(
        changed(db, "DELETE FROM responses WHERE id = ?1 AND tenant = coalesce(?2, tenant)", (response_id, tenant))
    )


def put_reply(db: Database, now: float, reply: IdempotentReply, limit: int) -> None:
    """Store the reply to a key. Raises `IdempotencyConflict` for a valid key with another body."""
    get_reply(db, now, reply.tenant, reply.route, reply.key, reply.fingerprint)
    write(
        db,
        "INSERT INTO idempotency (tenant, route, key, fingerprint, status, headers, body, created_at, expires_at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (tenant, route, key) DO UPDATE SET"
        " fingerprint = excluded.fingerprint, status = excluded.status, headers = excluded.headers,"
        " body = excluded.body, created_at = excluded.created_at, expires_at = excluded.expires_at",
        (
            reply.tenant,
            reply.route,
            reply.key,
            reply.fingerprint,
            reply.status,
            dump(reply.headers),
            reply.body,
            now,
            now + reply.ttl,
        ),
    )


def get_reply(db: Database, now: float, tenant: str, route: str, key: str, fingerprint: str) -> IdempotentReply | None:
    """Return the stored reply to a key, or None."""
    found = one(
        db,
        "SELECT fingerprint, status, headers, body, expires_at - created_at FROM idempotency"
        " WHERE tenant = ? AND route = ? AND key = ? AND expires_at > ?",
        (tenant, route, key, now),
    )
    if found is None:
        return None
    if found[0] != fingerprint:
        raise IdempotencyConflict(key)
    headers = cast("list[list[str]]", load(found[2]))
    return IdempotentReply(
        tenant=tenant,
        route=route,
        key=key,
        fingerprint=fingerprint,
        status=found[1],
        headers=tuple((name, value) for name, value in headers),
        body=found[3],
        ttl=found[4],
    )


class SqliteResponses(Verbs):
    """The responses' part of the store."""

    _response_limit: int

    async def put_response(self, response: StoredResponse) -> None:
        await self._write(put_response, self._clock(), response, self._response_limit)

    async def get_response(self, tenant: str | None, response_id: str) -> StoredResponse | None:
        found = await self._read(get_response, tenant, response_id)
        if found is not None:
            self._post(touch_response, self._clock(), response_id)
        return found

    async def delete_response(self, tenant: str | None, response_id: str) -> bool:
        return await self._write(delete_response, tenant, response_id)

    async def latest_response(self, tenant: str, conversation: str) -> str | None:
        return await self._read(latest_of, tenant, conversation)

    async def get_reply(self, tenant: str, route: str, key: str, fingerprint: str) -> IdempotentReply | None:
        return await self._read(get_reply, self._clock(), tenant, route, key, fingerprint)
