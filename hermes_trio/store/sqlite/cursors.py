"""Small durable values: the read position of an adapter (a cursor), and single values by name."""

from __future__ import annotations

from .rows import Database, single, write
from .verbs import Verbs


def get_cursor(db: Database, adapter: str) -> str | None:
    """Return the read position of an adapter, or None."""
    return single(db, "SELECT value FROM cursors WHERE adapter = ?", (adapter,))


def set_cursor(db: Database, now: float, adapter: str, value: str) -> None:
    """Store the read position of an adapter."""
    write(
        db,
        "INSERT INTO cursors (adapter, value, updated_at) VALUES (?, ?, ?) ON CONFLICT (adapter)"
        " DO UPDATE SET value = excluded.value, updated_at = excluded.updated_at",
        (adapter, value, now),
    )


def get_meta(db: Database, key: str) -> str | None:
    """Return a value by its name, or None."""
    return single(db, "SELECT value FROM state_meta WHERE key = ?", (key,))


def set_meta(db: Database, key: str, value: str | None) -> None:
    """Store a value, or delete it if it is None."""
    if value is None:
        write(db, "DELETE FROM state_meta WHERE key = ?", (key,))
    else:
        write(
            db,
            "INSERT INTO state_meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            (key, value),
        )


class SqliteCursors(Verbs):
    """Cursors and single values."""

    async def get_cursor(self, adapter: str) -> str | None:
        return await self._read(get_cursor, adapter)

    async def set_cursor(self, adapter: str, value: str) -> None:
        await self._write(set_cursor, self._clock(), adapter, value)

    async def get_meta(self, key: str) -> str | None:
        return await self._read(get_meta, key)

    async def set_meta(self, key: str, value: str | None) -> None:
        await self._write(set_meta, key, value)
