"""`Idempotency-Key` on requests: the first request works, later ones get its response, byte for byte.

A key belongs to a tenant, a route and a session; with another body it is a conflict. The response is committed with its turn, so that a crash cannot
separate the two. Requests that arrive while the first one works wait for it; if it fails or its client disconnects, the next one takes over.
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


class ReplyStore(Protocol):
    """The verbs of the store that this needs."""

    async def get_reply(self, tenant: str, route: str, key: str, fingerprint: str) -> IdempotentReply | None: ...


def fingerprint_of(body: bytes) -> str:
    """Return a digest of a body."""
    return sha256(body).hexdigest()


class IdempotentUse(msgspec.Struct, frozen=True):
    """One use of a key. `replayed` is the earlier response, or None."""

    tenant: str
    route: str
    key: str
    fingerprint: str
    replayed: Response | None = None

    def record(self, response: Response) -> list[object]:
        """Return what must be committed with the turn, so that this response can be replayed. Failures are not stored."""
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
    """The keys that requests work on now."""

    def __init__(self, store: ReplyStore, membership: Membership) -> None:
        self._store = store
        self._membership = membership
        self._working: dict[tuple[str, str, str], tuple[str, trio.Event]] = {}

    @asynccontextmanager
    async def once(self, tenant: str, route: str, key: str, body: bytes) -> AsyncIterator[IdempotentUse]:
        """Hold this key for the body of the `async with`, or get the response of its earlier holder.

        Cancelling it passes the key to the next request in line.
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
                # Another node may be working on the same key: its reply is written before it releases the key.
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
