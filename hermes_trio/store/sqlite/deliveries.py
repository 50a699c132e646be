"""Webhook deliveries: each id is accepted once per route, and only together with its message (SC-5).

A delivery that was refused, or that failed before it was accepted, leaves no row: the sender may deliver it again.
"""

from __future__ import annotations

from hermes_trio.runtime.ports import NewMessage

from .inbox import accept_message
from .rows import Database, changed, exists, write
from .verbs import Verbs


def accept(db: Database, now: float, route: str, delivery_id: str, message: NewMessage) -> int | None:
    """Write the delivery's id and its message, unless the id is known to this route."""
    if not record(db, now, route, delivery_id):
        return None
    number = accept_message(db, now, message)
    sql = "UPDATE webhook_deliveries SET inbox_id = ? WHERE route = ? AND delivery_id = ?"
    write(db, sql, (number, route, delivery_id))
    return number


def record(db: Database, now: float, route: str, delivery_id: str) -> bool:
    """Write a delivery's id."""
    sql = "INSERT INTO webhook_deliveries (route, delivery_id, accepted_at) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
    return bool(changed(db, sql, (route, delivery_id, now)))


def known(db: Database, route: str, delivery_id: str) -> bool:
    """Return whether a route has accepted an id."""
    sql = "SELECT 1 FROM webhook_deliveries WHERE route = ? AND delivery_id = ?"
    return exists(db, sql, (route, delivery_id))


class SqliteDeliveries(Verbs):
    """The webhook deliveries' part of the store."""

    async def accept_delivery(self, route: str, delivery_id: str, message: NewMessage) -> int | None:
        return await self._write(accept, self._clock(), route, delivery_id, message)

    async def record_delivery(self, route: str, delivery_id: str) -> bool:
        return await self._write(record, self._clock(), route, delivery_id)

    async def delivery_known(self, route: str, delivery_id: str) -> bool:
        return await self._read(known, route, delivery_id)
