"""The nodes that share a store: rows with an expiry, the singletons that each runs, and their requests to each other.

A SQLite file has one owner and no rows here. In memory, `SqliteStore.shared` opens one database for several runtimes, each a node: so the behaviour
between hosts is tested in one process, on virtual time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from hermes_trio.runtime.errors import Fenced
from hermes_trio.runtime.ports import (
    ANSWER_TOPIC,
    LEASE_TOPIC,
    NODE_TOPIC,
    REQUEST_TOPIC,
    NodeAnswer,
    NodeRequest,
    NodeRow,
    SessionHost,
    inbox_topic,
)

from .encoding import dump, load_mapping
from .rows import Database, changed, exists, many, one, write, write_many
from .verbs import Verbs

KEPT_SECONDS: Final = 3600.0
"""The time for which a request without an answer is kept."""

ANSWER_SECONDS: Final = 300.0
"""The time for which an answer is kept: the node that asked reads it at once, unless the database is away."""

HOSTED: Final = "host "
"""The prefix of leases that bind a session to the node with its shell and files. They outlive their node: the next turn reports what was lost."""

NAMED_JOBS: Final = 20
"""The most lost jobs of a session that are named."""


def host_lease(session_id: str) -> str:
    """Return the name of the lease of the node that has the shell of a session."""
    return f"{HOSTED}{session_id}"


def is_member(db: Database, incarnation: str) -> bool:
    """Return whether a node has not been reaped."""
    return exists(db, "SELECT 1 FROM nodes WHERE incarnation = ?", (incarnation,))


def insert_node(db: Database, now: float, incarnation: str, name: str, seconds: float) -> None:
    """Write a node's row. Idempotent."""
    write(
        db,
        "INSERT INTO nodes (incarnation, name, started_at, expires_at) VALUES (?, ?, ?, ?)"
        " ON CONFLICT (incarnation) DO UPDATE SET expires_at = excluded.expires_at",
        (incarnation, name, now, now + seconds),
    )
    db.signals.append((NODE_TOPIC, incarnation))


def renew(db: Database, now: float, incarnation: str, seconds: float, info: Mapping[str, Any]) -> float | None:
    """Renew a lease that has not expired; return when the first of the others expires."""
    sql = "UPDATE nodes SET expires_at = ?, info = ? WHERE incarnation = ? AND expires_at > ?"
    if not changed(db, sql, (now + seconds, dump(info), incarnation, now)):
        raise Fenced("the lease of this node has expired; an expired lease is not renewed")
    found = one(db, "SELECT min(expires_at) FROM nodes WHERE incarnation <> ?", (incarnation,))
    return None if found is None or found[0] is None else found[0] - now


def remove_node(db: Database, incarnation: str) -> None:
    """Remove a node: its later writes are fenced, its singletons are released, and its open requests are answered as `gone`."""
    write(db, "DELETE FROM nodes WHERE incarnation = ?", (incarnation,))
    db.signals.append((NODE_TOPIC, incarnation))
    sql = "DELETE FROM leases WHERE owner = ? AND substr(name, 1, 5) <> ? RETURNING name"
    for (name,) in many(db, sql, (incarnation, HOSTED)):
        db.signals.append((LEASE_TOPIC, name))
    if exists(db, "SELECT 1 FROM leases WHERE owner = ? LIMIT 1", (incarnation,)):
        # Rows of sessions that were bound to this node can be claimed by any node now.
        sql = "SELECT DISTINCT inbox, session_key FROM inbox WHERE settled_at IS NULL AND state = 'pending'"
        for inbox, key in many(db, sql):
            db.signals.append((inbox_topic(inbox), key))
    sql = "UPDATE node_requests SET state = 'gone', payload = '{}' WHERE node = ? AND state IN ('open', 'taken') RETURNING id"
    for (request_id,) in many(db, sql, (incarnation,)):
        db.signals.append((ANSWER_TOPIC, request_id))


def remove_gone(db: Database, now: float) -> list[str]:
    """Remove the nodes whose lease has expired; return those that are left."""
    for (incarnation,) in many(db, "SELECT incarnation FROM nodes WHERE expires_at <= ?", (now,)):
        remove_node(db, incarnation)
    return [incarnation for (incarnation,) in many(db, "SELECT incarnation FROM nodes")]


def list_nodes(db: Database) -> list[NodeRow]:
    """Return all nodes, oldest first."""
    held: dict[str, list[str]] = {}
    for name, owner in many(
        db, "SELECT name, owner FROM leases WHERE substr(name, 1, 5) <> ? ORDER BY name", (HOSTED,)
    ):
        held.setdefault(owner, []).append(name)
    sql = "SELECT owner, count(*) FROM leases WHERE substr(name, 1, 5) = ? GROUP BY owner"
    hosted = {str(owner): int(count) for owner, count in many(db, sql, (HOSTED,))}
    sql = "SELECT incarnation, name, started_at, expires_at, info FROM nodes ORDER BY started_at, name, incarnation"
    return [
        NodeRow(
            incarnation=incarnation,
            name=name,
            started_at=started,
            expires_at=expires,
            info=load_mapping(info),
            leases=tuple(held.get(incarnation, ())),
            hosted=hosted.get(incarnation, 0),
        )
        for incarnation, name, started, expires, info in many(db, sql)
    ]


def claim_lease(db: Database, now: float, owner: str, name: str) -> bool:
    """Claim a singleton that no other node has."""
    write(
        db, "INSERT INTO leases (name, owner, claimed_at) VALUES (?, ?, ?) ON CONFLICT DO NOTHING", (name, owner, now)
    )
    return has_lease(db, owner, name)


def has_lease(db: Database, owner: str, name: str) -> bool:
    """Return whether a node has a singleton."""
    return exists(db, "SELECT 1 FROM leases WHERE name = ? AND owner = ?", (name, owner))


def release_lease(db: Database, owner: str, name: str) -> None:
    """Release a singleton."""
    if changed(db, "DELETE FROM leases WHERE name = ? AND owner = ?", (name, owner)):
        db.signals.append((LEASE_TOPIC, name))


def claim_host(db: Database, now: float, owner: str, session_id: str) -> bool:
    """Bind a session to a node; False while it is bound to another one that is alive."""
    name = host_lease(session_id)
    if claim_lease(db, now, owner, name):
        return True
    sql = "UPDATE leases SET owner = ?, claimed_at = ? WHERE name = ? AND owner NOT IN (SELECT incarnation FROM nodes)"
    return bool(changed(db, sql, (owner, now, name)))


def session_host(db: Database, session_id: str, owner: str) -> SessionHost | None:
    """Return the node with the shell and the files of a session, else the one with its jobs, or None; and whether a turn of another owner has it."""
    sql = "SELECT 1 FROM sessions WHERE id = ? AND open_turn <> '' AND owner <> ?"
    held = exists(db, sql, (session_id, owner))
    found = _bound_host(db, session_id)
    if found is None:
        return SessionHost(held=True) if held else None
    return msgspec.structs.replace(found, held=True) if held else found


def _bound_host(db: Database, session_id: str) -> SessionHost | None:
    sql = (
        "SELECT l.owner, l.claimed_at, n.incarnation FROM leases l LEFT JOIN nodes n ON n.incarnation = l.owner"
        " WHERE l.name = ?"
    )
    bound = one(db, sql, (host_lease(session_id),))
    if bound is not None and bound[2] is not None:
        return SessionHost(node=bound[0])
    sql = (
        "SELECT j.owner FROM jobs j JOIN nodes n ON n.incarnation = j.owner"
        " WHERE j.session_id = ? AND j.ended_at IS NULL ORDER BY j.started_at LIMIT 1"
    )
    working = one(db, sql, (session_id,))
    if working is not None:
        return SessionHost(node=working[0])
    if bound is None:
        return None
    sql = "SELECT title FROM jobs WHERE session_id = ? AND state = 'lost' AND ended_at >= ? ORDER BY started_at LIMIT ?"
    lost = many(db, sql, (session_id, bound[1], NAMED_JOBS))
    return SessionHost(node=bound[0], gone=True, lost_jobs=tuple(title for (title,) in lost))


def release_host(db: Database, session_id: str, owner: str) -> None:
    """Remove the binding of a session to a node."""
    release_lease(db, owner, host_lease(session_id))


def forget_requests(db: Database, now: float) -> int:
    """Remove the requests that nobody reads any more, and return how many: their answers may be the text of a conversation that was deleted."""
    sql = "DELETE FROM node_requests WHERE created_at < ? AND (state = 'answered' OR created_at < ?)"
    return changed(db, sql, (now - ANSWER_SECONDS, now - KEPT_SECONDS))


def ask(db: Database, now: float, request: NodeRequest) -> bool:
    """Write a request to a live node; return False if there is none. Idempotent."""
    forget_requests(db, now)
    if not is_member(db, request.node):
        return False
    write(
        db,
        "INSERT INTO node_requests (id, node, kind, target, payload, created_at) VALUES (?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (id) DO NOTHING",
        (request.id, request.node, request.kind, request.target, dump(request.payload), now),
    )
    db.signals.append((REQUEST_TOPIC, request.node))
    return True


def open_requests(db: Database, node: str) -> list[NodeRequest]:
    """Return the requests to a node that it does not have yet."""
    sql = "SELECT id, kind, target, payload FROM node_requests WHERE node = ? AND state = 'open' ORDER BY n"
    return [
        NodeRequest(id=id, node=node, kind=kind, target=target, payload=load_mapping(payload))
        for id, kind, target, payload in many(db, sql, (node,))
    ]


def mark_taken(db: Database, node: str, ids: Sequence[str]) -> None:
    """Record that a node has these requests. What they contain is not kept."""
    sql = "UPDATE node_requests SET state = 'taken', payload = '{}' WHERE id = ? AND node = ? AND state = 'open'"
    write_many(db, sql, [(id, node) for id in ids])


def answer(db: Database, now: float, request_id: str, value: Mapping[str, Any]) -> None:
    """Answer a request, once. The time for which the answer is kept begins now."""
    sql = (
        "UPDATE node_requests SET state = 'answered', payload = '{}', answer = ?, created_at = ?"
        " WHERE id = ? AND state IN ('open', 'taken')"
    )
    if changed(db, sql, (dump(value), now, request_id)):
        db.signals.append((ANSWER_TOPIC, request_id))


def get_answer(db: Database, request_id: str) -> NodeAnswer | None:
    """Return the answer to a request, or None while there is none."""
    found = one(db, "SELECT state, answer FROM node_requests WHERE id = ?", (request_id,))
    if found is None or found[0] in ("open", "taken"):
        return None
    return NodeAnswer(value=load_mapping(found[1]), gone=found[0] == "gone")


def session_owners(db: Database, session_id: str) -> list[str]:
    """Return the nodes that have an open turn, a live run, a live job or the shell of a session."""
    sql = (
        "SELECT owner FROM sessions WHERE id = ?1 AND open_turn <> ''"
        " UNION SELECT owner FROM runs WHERE session_id = ?1 AND ended_at IS NULL"
        " UNION SELECT owner FROM jobs WHERE session_id = ?1 AND ended_at IS NULL"
        " UNION SELECT incarnation FROM nodes WHERE incarnation = (SELECT owner FROM leases WHERE name = ?2)"
    )
    return [owner for (owner,) in many(db, sql, (session_id, host_lease(session_id))) if owner]


def lane_owner(db: Database, inbox: str, session_key: str) -> str:
    """Return the node that works on a row of a key; empty if none does."""
    sql = (
        "SELECT owner FROM inbox WHERE settled_at IS NULL AND session_key = ? AND inbox = ? AND state = 'taken' LIMIT 1"
    )
    found = one(db, sql, (session_key, inbox))
    return found[0] if found else ""


class SqliteNodes(Verbs):
    """The nodes' part of the store."""

    async def renew_node(self, info: Mapping[str, Any]) -> float | None:
        return await self._write(renew, self._lease_clock(), self.owner, self.lease_seconds, info)

    async def list_nodes(self) -> list[NodeRow]:
        return await self._read(list_nodes)

    async def claim_lease(self, name: str) -> bool:
        return await self._write(claim_lease, self._clock(), self.owner, name)

    async def release_lease(self, name: str) -> None:
        await self._write(release_lease, self.owner, name)

    async def claim_host(self, session_id: str) -> bool:
        if await self._read(has_lease, self.owner, host_lease(session_id)):
            return True
        return await self._write(claim_host, self._clock(), self.owner, session_id)

    async def release_host(self, session_id: str, node: str) -> None:
        await self._write(release_host, session_id, node)

    async def session_host(self, session_id: str) -> SessionHost | None:
        return await self._read(session_host, session_id, self.owner)

    async def ask_node(self, request: NodeRequest) -> bool:
        return await self._write(ask, self._clock(), request)

    async def take_requests(self, got: Sequence[str] = ()) -> list[NodeRequest]:
        if got:
            await self._write(mark_taken, self.owner, got)
        return await self._read(open_requests, self.owner)

    async def answer_request(self, request_id: str, value: Mapping[str, Any]) -> None:
        await self._write(answer, self._clock(), request_id, value)

    async def get_answer(self, request_id: str) -> NodeAnswer | None:
        return await self._read(get_answer, request_id)

    async def session_owners(self, session_id: str) -> list[str]:
        return await self._read(session_owners, session_id)

    async def lane_owner(self, inbox: str, session_key: str) -> str:
        return await self._read(lane_owner, inbox, session_key)
