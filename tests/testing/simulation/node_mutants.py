"""Deliberate defects between nodes: each must violate an invariant of several nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from hermes_trio.runtime.membership import Membership
from hermes_trio.runtime.shares import SharedSpending
from hermes_trio.store.sqlite import inbox, turns
from hermes_trio.store.sqlite.store import SqliteStore
from hermes_trio.store.sqlite.verbs import Verbs

from .mutants import NONE, Patch

__all__ = ["NODE_MUTANTS"]


def _lets_everything_through(real: Any) -> Any:
    def fenced(self: Verbs, verb: Callable[..., Any]) -> Callable[..., Any]:
        return verb

    return fenced


def _looks_at_no_owner(real: str) -> str:
    """A turn begins even if another node has the session."""
    changed = real.replace("(?14 = 0 OR", "(?14 = ?14 OR")
    assert changed != real
    return changed


def _finds_nobody_elsewhere(real: str) -> str:
    """A lane is claimed even if another node runs it."""
    return f"SELECT * FROM ({real}) WHERE false"


def _goes_on(real: Any) -> Any:
    def lose(self: Membership, reason: str) -> None:
        """Nothing ends."""

    return lose


def _holds_what_others_hold(real: Any) -> Any:
    @asynccontextmanager
    async def hold(self: Membership, name: str, *, retry: bool) -> AsyncIterator[None]:
        yield

    return hold


def _counts_for_each_node(real: Any) -> Any:
    """Only the node that has run a job counts the run."""

    async def get_cron_job(self: SqliteStore, job_id: str) -> Any:
        row = await real(self, job_id)
        runs = self.__dict__.setdefault("runs_here", {})
        if row is None or not row.spec.get("times"):
            return row
        runs[job_id] = runs.get(job_id, -1) + 1
        return msgspec.structs.replace(row, spec={**row.spec, "completed": runs[job_id]})

    return get_cron_job


def _hears_nothing(real: Any) -> Any:
    def hear(self: SharedSpending, said: Any) -> None:
        """Every node counts only its own spending."""

    return hear


PARTITION = ("partition",)
LATE_NODES = ("pause", "partition")

NODE_MUTANTS: dict[str, tuple[str, Sequence[str], int, tuple[Patch, ...]]] = {
    "a fence that lets everything through": ("6 nodes", LATE_NODES, 2, ((Verbs, "_fenced", _lets_everything_through),)),
    "a session that is used whoever has it": ("6 nodes", NONE, 2, ((turns, "_BEGIN", _looks_at_no_owner),)),
    "a lane that is claimed whoever works in it": (
        "6 nodes",
        NONE,
        3,
        ((turns, "_BEGIN", _looks_at_no_owner), (inbox, "ELSEWHERE", _finds_nobody_elsewhere)),
    ),
    "a node that goes on without its lease": ("6 nodes", PARTITION, 2, ((Membership, "_lose", _goes_on),)),
    "a singleton on every node": ("9 limits", NONE, 2, ((Membership, "_hold", _holds_what_others_hold),)),
    "a limit of runs that each node counts for itself": (
        "9 limits",
        NONE,
        2,
        ((SqliteStore, "get_cron_job", _counts_for_each_node),),
    ),
    "a limit of requests that each node counts for itself": (
        "9 limits",
        NONE,
        2,
        ((SharedSpending, "hear", _hears_nothing),),
    ),
}
"""By the defect: the invariant that it must violate, the faults, the nodes of the worlds, and the patches."""
