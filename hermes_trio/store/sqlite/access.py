"""The users who may talk to the agent on a platform: allow-lists, and the pairing codes by which users get on them."""

from __future__ import annotations

import hashlib
from typing import Any, Final

from hermes_trio.store.records import AllowedUser, PairingRequest

from .encoding import clean
from .rows import Database, changed, exists, many, one, single, write
from .verbs import Verbs

PENDING_LIMIT: Final = 50
"""Open pairing codes a platform may have, so that strangers cannot fill the table."""


def _hash(platform: str, code: str) -> str:
    normal = code.strip().upper()
    return hashlib.sha256(f"{platform}\0{normal}".encode("utf-8", "surrogatepass")).hexdigest()


def offer(
    db: Database, now: float, platform: str, hashed: str, user_id: str, user_name: str, expires_at: float
) -> bool:
    """Store a code for a user who has none; return whether it was stored."""
    write(db, "DELETE FROM pairing_codes WHERE platform = ? AND expires_at <= ?", (platform, now))
    if exists(db, "SELECT 1 FROM pairing_codes WHERE platform = ? AND user_id = ?", (platform, user_id)):
        return False
    if single(db, "SELECT count(*) FROM pairing_codes WHERE platform = ?", (platform,)) >= PENDING_LIMIT:
        return False
    sql = (
        "INSERT INTO pairing_codes (platform, code_hash, user_id, user_name, created_at, expires_at)"
        " VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
    )
    return bool(changed(db, sql, (platform, hashed, user_id, clean(user_name), now, expires_at)))


def redeem(db: Database, now: float, platform: str, hashed: str) -> AllowedUser | None:
    """Approve a code: delete it and put its user on the allow-list. Returns None if there is no such valid code."""
    found = one(
        db,
        "DELETE FROM pairing_codes WHERE platform = ? AND code_hash = ? AND expires_at > ? RETURNING user_id, user_name",
        (platform, hashed, now),
    )
    return None if found is None else allow(db, now, platform, found[0], found[1])


def allow(db: Database, now: float, platform: str, user_id: str, user_name: str) -> AllowedUser:
    """Put a user on a platform's allow-list."""
    found = one(
        db,
        "INSERT INTO allowed_users (platform, user_id, user_name, added_at) VALUES (?, ?, ?, ?)"
        " ON CONFLICT (platform, user_id) DO UPDATE SET user_name = excluded.user_name"
        " RETURNING platform, user_id, user_name, added_at",
        (platform, user_id, clean(user_name), now),
    )
    assert found is not None
    values: list[Any] = list(found)
    return AllowedUser(*values)


def disallow(db: Database, platform: str, user_id: str) -> bool:
    """Remove a user from a platform's allow-list."""
    sql = "DELETE FROM allowed_users WHERE platform = ? AND user_id = ?"
    return bool(changed(db, sql, (platform, user_id)))


def is_allowed(db: Database, platform: str, user_id: str) -> bool:
    """Return whether a user is on a platform's allow-list."""
    return exists(db, "SELECT 1 FROM allowed_users WHERE platform = ? AND user_id = ?", (platform, user_id))


def allowed(db: Database, platform: str | None) -> list[AllowedUser]:
    """Return the users on the allow-lists."""
    where = "" if platform is None else "WHERE platform = ?"
    sql = f"SELECT platform, user_id, user_name, added_at FROM allowed_users {where} ORDER BY platform, user_id"
    return [AllowedUser(*row) for row in many(db, sql, () if platform is None else (platform,))]


def waiting(db: Database, now: float, platform: str | None) -> list[PairingRequest]:
    """Return the users who have an open code."""
    where = "" if platform is None else "AND platform = ?"
    sql = (
        "SELECT platform, user_id, user_name, created_at, expires_at FROM pairing_codes"
        f" WHERE expires_at > ? {where} ORDER BY created_at, user_id"
    )
    return [PairingRequest(*row) for row in many(db, sql, (now,) if platform is None else (now, platform))]


class SqliteAccess(Verbs):
    """The platforms' allow-lists in the store."""

    async def offer_pairing(
        self, platform: str, code: str, *, user_id: str, user_name: str = "", ttl: float = 3_600.0
    ) -> bool:
        now = self._clock()
        return await self._write(offer, now, platform, _hash(platform, code), user_id, user_name, now + ttl)

    async def redeem_pairing(self, platform: str, code: str) -> AllowedUser | None:
        return await self._write(redeem, self._clock(), platform, _hash(platform, code))

    async def list_pairings(self, platform: str | None = None) -> list[PairingRequest]:
        return await self._read(waiting, self._clock(), platform)

    async def allow_user(self, platform: str, user_id: str, *, user_name: str = "") -> AllowedUser:
        return await self._write(allow, self._clock(), platform, user_id, user_name)

    async def disallow_user(self, platform: str, user_id: str) -> bool:
        return await self._write(disallow, platform, user_id)

    async def user_allowed(self, platform: str, user_id: str) -> bool:
        return await self._read(is_allowed, platform, user_id)

    async def list_allowed(self, platform: str | None = None) -> list[AllowedUser]:
        return await self._read(allowed, platform)
