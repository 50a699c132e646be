"""`Idempotency-Key` on answers that are given once: the first request works, the others get its answer, byte for byte.

A key belongs to a tenant, a route and a session; used again with another body it is a conflict. The answer commits with its turn, so a crash cannot
separate the two. Requests that come while the first one works wait for it; if it fails or its client leaves, the next one takes over.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Protocol

import msgspec
import trio

from hermes_trio.runtime.membership import Membership
from hermes_trio.store import IdempotencyConflict, IdempotentReply

from .requests import Response

__all__ = ["IdempotentReplies", "IdempotentUse", "ReplyStore", "fingerprint_of"]


class ReplyStore(Protocol):
    """What the replies need from the store."""

    async def get_reply(self, tenant: str, route: str, key: str, fingerprint: str) -> IdempotentReply | None: ...


def fingerprint_of(body: bytes) -> str:
    """What tells two bodies apart."""
    return sha256(body).hexdigest()


class IdempotentUse(msgspec.Struct, frozen=True):
    """One use of a key. `replayed` is the earlier answer, if there is one."""

    tenant: str
    route: str
    key: str
    fingerprint: str
    replayed: Response | None = None

    def record(self, response: Response) -> list[object]:
        """What must commit with the turn, so that this answer can be repeated. Failures are not kept."""
        if not self.key or response.status >= 400:
            return []
        headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in response.headers)
        return [
            IdempotentReply(
                tenant=self.tenant,
                route=self.route,
                key=self.key,
                fingerprint=self.fingerprint,
                status=response.status,
                headers=headers,
                body=response.body,
            )
        ]


class IdempotentReplies:
    """Who is working on which key now."""

    def __init__(self, store: ReplyStore, membership: Membership) -> None:
        self._store = store
        self._membership = membership
        self._working: dict[tuple[str, str, str], tuple[str, trio.Event]] = {}

    @asynccontextmanager
    async def once(self, tenant: str, route: str, key: str, body: bytes) -> AsyncIterator[IdempotentUse]:
        """Be the one who works on this key for the body of the `async with`, or get the answer of the one who was.

        Cancelling it gives the key to the next in line.
        """
        fingerprint = fingerprint_of(body) if key else ""
        mine = IdempotentUse(tenant, route, key, fingerprint)
        if not key:
            yield mine
            return
        name = (tenant, route, key)
        while True:
            other = self._working.get(name)
            if other is not None:
                if other[0] != fingerprint:
                    raise IdempotencyConflict(key)
                await other[1].wait()
                continue
            event = trio.Event()
            self._working[name] = (fingerprint, event)
            try:
                # Another node may be working on the same key: its reply is written before it lets go.
                async with self._membership.holding(f"idempotency {fingerprint_of(repr(name).encode())}"):
                    found = await self._store.get_reply(tenant, route, key, fingerprint)
                    if found is not None:
                        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in found.headers]
                        headers.append((b"idempotent-replayed", b"true"))
                        yield msgspec.structs.replace(mine, replayed=Response(found.body, found.status, headers))
                    else:
                        yield mine
            finally:
                del self._working[name]
                event.set()
            return
