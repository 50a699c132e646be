"""Deliberate defects between nodes: each must be convicted by what several nodes promise together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from hermes_trio.runtime.membership import Membership
from hermes_trio.runtime.shares import SharedSpending
from hermes_trio.store.sqlite import inbox, turns
from hermes_trio.store.sqlite.store import SqliteStore
from hermes_trio.store.sqlite.verbs import Verbs
from hermes_trio.testing.simulation import run_seed

from .mutants import Patch, patched

__all__ = ["NODE_MUTANTS", "node_seeds_until_found"]


def node_seeds_until_found(patches: tuple[Patch, ...], invariant: str, most: int, nodes: int) -> int | None:
    """How many seeds with so many nodes, from 1 on, it takes until that invariant is broken; None if it is not within `most`."""
    with patched(*patches):
        for count in range(1, most + 1):
            if any(text.startswith(invariant) for text in run_seed(count, nodes=nodes).violations):
                return count
    return None


def _lets_everything_through(real: Any) -> Any:
    def fenced(self: Verbs, verb: Callable[..., Any]) -> Callable[..., Any]:
        return verb

    return fenced


def _looks_at_no_owner(real: str) -> str:
    """A turn begins whoever has the session."""
    changed = real.replace("(?14 = 0 OR", "(?14 = ?14 OR")
    assert changed != real
    return changed


def _finds_nobody_elsewhere(real: str) -> str:
    """A lane is claimed whoever works in it."""
    return f"SELECT * FROM ({real}) WHERE false"


def _goes_on(real: Any) -> Any:
    def lose(self: Membership, reason: str) -> None:
        """Nothing ends."""

    return lose


def _holds_what_others_hold(real: Any) -> Any:
    @asynccontextmanager
    async def holding(self: Membership, name: str) -> AsyncIterator[None]:
        yield

    return holding


def _counts_for_each_node(real: Any) -> Any:
    """How often a job has run is known to the node that has run it, and to no other."""

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
        """Every node counts alone."""

    return hear


NODE_MUTANTS: dict[str, tuple[str, int, tuple[Patch, ...]]] = {
    "a fence that lets everything through": ("6 nodes", 2, ((Verbs, "_fenced", _lets_everything_through),)),
    "a session that is used whoever has it": ("6 nodes", 2, ((turns, "_BEGIN", _looks_at_no_owner),)),
    "a lane that is claimed whoever works in it": (
        "6 nodes",
        3,
        ((turns, "_BEGIN", _looks_at_no_owner), (inbox, "_ELSEWHERE", _finds_nobody_elsewhere)),
    ),
    "a node that goes on without its lease": ("6 nodes", 2, ((Membership, "_lose", _goes_on),)),
    "a singleton on every node": ("9 limits", 2, ((Membership, "holding", _holds_what_others_hold),)),
    "a limit of runs that each node counts for itself": (
        "9 limits",
        2,
        ((SqliteStore, "get_cron_job", _counts_for_each_node),),
    ),
    "a limit of requests that each node counts for itself": (
        "9 limits",
        2,
        ((SharedSpending, "hear", _hears_nothing),),
    ),
}
"""By what is wrong: the invariant that must convict it, the nodes of the worlds, and the patches."""
