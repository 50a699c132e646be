"""API keys. A key is random, is shown once, and is stored as a hash: a reader of the database cannot use it.

The keys carry 256 bits of randomness, so a plain SHA-256 is enough; a slow hash only protects secrets that can be guessed.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any, Final, cast

from hermes_trio.runtime.ports import KEY_TOPIC
from hermes_trio.store.records import ApiKey

from .encoding import clean, dump, load
from .rows import Database, Row, changed, many, one, write
from .verbs import Verbs

PREFIX: Final = "htk_"
USE_RESOLUTION: Final = 60.0
"""The resolution of a key's last use, in seconds; it avoids a write per request."""

_COLUMNS: Final = "id, name, tenant, scopes, created_at, last_used_at, expires_at, revoked_at"


def hash_key(secret: str) -> str:
    """Return the hash of a key, which is stored."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _key(row: Row) -> ApiKey:
    values: list[Any] = [*row[:3], tuple(cast("list[str]", load(row[3]))), *row[4:]]
    return ApiKey(*values)


def insert(db: Database, now: float, key: ApiKey, hashed: str) -> None:
    """Write the row of a key."""
    write(
        db,
        f"INSERT INTO api_keys (hash, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, NULL, ?, NULL)",
        (hashed, key.id, clean(key.name), key.tenant, dump(key.scopes), now, key.expires_at),
    )


def find(db: Database, now: float, hashed: str) -> ApiKey | None:
    """Return the valid key with this hash, or None."""
    sql = (
        f"SELECT {_COLUMNS} FROM api_keys WHERE hash = ? AND revoked_at IS NULL"
        " AND (expires_at IS NULL OR expires_at > ?)"
    )
    found = one(db, sql, (hashed, now))
    return _key(found) if found else None


def used(db: Database, now: float, key_id: str) -> None:
    """Record a use of a key."""
    write(db, "UPDATE api_keys SET last_used_at = ? WHERE id = ?", (now, key_id))


def revoke(db: Database, now: float, key_id: str) -> bool:
    """Revoke a key; return whether it was valid."""
    revoked = changed(db, "UPDATE api_keys SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL", (now, key_id))
    if revoked:
        db.signals.append((KEY_TOPIC, key_id))
    return bool(revoked)


def list_all(db: Database, include_revoked: bool) -> list[ApiKey]:
    """Return all keys, oldest first."""
    where = "" if include_revoked else "WHERE revoked_at IS NULL"
    return [_key(row) for row in many(db, f"SELECT {_COLUMNS} FROM api_keys {where} ORDER BY created_at, id")]


class SqliteKeys(Verbs):
    """The API keys' part of the store."""

    async def create_api_key(
        self, name: str, *, scopes: tuple[str, ...] = (), tenant: str = "", expires_at: float | None = None
    ) -> tuple[ApiKey, str]:
        secret = PREFIX + secrets.token_urlsafe(32)
        key_id = f"key_{secrets.token_hex(8)}"
        now = self._clock()
        key = ApiKey(key_id, name, tenant or key_id, scopes, now, None, expires_at, None)
        await self._write(insert, now, key, hash_key(secret))
        return key, secret

    async def find_api_key(self, secret: str) -> ApiKey | None:
        now = self._clock()
        found = await self._read(find, now, hash_key(secret))
        if found is not None and (found.last_used_at is None or now - found.last_used_at > USE_RESOLUTION):
            self._post(used, now, found.id)
        return found

    async def revoke_api_key(self, key_id: str) -> bool:
        return await self._write(revoke, self._clock(), key_id)

    async def list_api_keys(self, *, include_revoked: bool = False) -> list[ApiKey]:
        return await self._read(list_all, include_revoked)
