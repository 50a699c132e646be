"""The nodes that share a store, as a reader sees them: each as it described itself with its last heartbeat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from hermes_trio.runtime.ports import NodeRow

if TYPE_CHECKING:
    from .auth import Principal
    from .core import ApiCore

ANSWERS: Final = 0.5
"""The part of its lease that a node that answers has left: it renews the lease three times in that time."""


class NodeBody(msgspec.Struct):
    """A node. `lease_seconds` is what is left of its lease; `answers` is false if it has missed heartbeats.

    `sessions` are bound to it by their shells and files. `runs` names what only one node does, for an admin.
    """

    name: str
    incarnation: str
    here: bool
    age_seconds: float
    lease_seconds: float
    answers: bool
    turns: int
    jobs: int
    sessions: int
    draining: bool
    configuration: str
    runs: list[str] | msgspec.UnsetType = msgspec.UNSET


def still_answers(core: ApiCore, row: NodeRow) -> bool:
    """Return whether a node has renewed its lease in time."""
    return row.expires_at - core.store.now() > ANSWERS * core.store.lease_seconds


def node_bodies(core: ApiCore, rows: Sequence[NodeRow], caller: Principal) -> list[NodeBody]:
    """Return what this caller may see of these nodes, the oldest first."""
    store = core.store
    now = store.now()
    return [
        NodeBody(
            name=row.name,
            incarnation=row.incarnation,
            here=row.incarnation == store.owner,
            age_seconds=round(now - row.started_at, 1),
            lease_seconds=round(row.expires_at - now, 1),
            answers=still_answers(core, row),
            turns=row.info.get("turns", 0),
            jobs=row.info.get("jobs", 0),
            sessions=row.hosted,
            draining=row.info.get("draining", False),
            configuration=row.info.get("configuration", ""),
            runs=list(row.leases) if caller.admin else msgspec.UNSET,
        )
        for row in rows
    ]
