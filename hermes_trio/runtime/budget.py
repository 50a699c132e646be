"""Budgets that nest like deadlines: a child gets the smaller of its own and the rest of its parent's.

Spending is counted at every level up to the top. The level that is exhausted is cancelled, with a cause that names the resource.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

import msgspec

from .errors import BudgetExhausted
from .outcome import CancelCause, Cause

Resource = Literal["jobs", "wakes", "tokens", "turns"]


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a scope; None sets no limit (the parent's still applies).

    `seconds` is wall time, `jobs` background jobs started, `wakes` turns started by notices, `tokens` model tokens, `turns` child turns.
    """

    seconds: float | None = None
    jobs: int | None = None
    wakes: int | None = None
    tokens: int | None = None
    turns: int | None = None

    def __post_init__(self) -> None:
        for name in ("seconds", "jobs", "wakes", "tokens", "turns"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"Budget.{name} is {value}; it must be zero or more, or None for no limit")


class Allowance:
    """The state of a budget while its scope runs: what is left, here and in every scope around it."""

    __slots__ = ("_exhausted", "_given", "_left", "_parent")

    def __init__(
        self, budget: Budget | None, parent: Allowance | None, exhausted: Callable[[Cause], None] | None
    ) -> None:
        self._parent = parent
        self._exhausted = exhausted
        self._given: dict[Resource, int] = {}
        if budget is not None:
            limits: dict[Resource, int | None] = {
                "jobs": budget.jobs,
                "wakes": budget.wakes,
                "tokens": budget.tokens,
                "turns": budget.turns,
            }
            self._given = {name: limit for name, limit in limits.items() if limit is not None}
        self._left: dict[Resource, int] = dict(self._given)

    def rest(self, resource: Resource) -> int | None:
        """Return what may still be spent here: the smallest rest of all levels, or None if no level has a limit."""
        smallest: int | None = None
        level: Allowance | None = self
        while level is not None:
            left = level._left.get(resource)
            if left is not None and (smallest is None or left < smallest):
                smallest = left
            level = level._parent
        return smallest

    def spend(self, resource: Resource, amount: int = 1) -> None:
        """Spend `amount` at every level. If a level has too little left, cancel that level and raise `BudgetExhausted`; nothing is spent then."""
        level: Allowance | None = self
        while level is not None:
            left = level._left.get(resource)
            if left is not None and left < amount:
                detail = f"{resource}: {level._given[resource] - left} of {level._given[resource]} used, {amount} more requested"
                if level._exhausted is not None:
                    level._exhausted(Cause(CancelCause.BUDGET, detail))
                raise BudgetExhausted(f"the budget is used up ({detail}); raise the budget, or end the work")
            level = level._parent
        level = self
        while level is not None:
            if resource in level._left:
                level._left[resource] -= amount
            level = level._parent

    def child(self, budget: Budget | None, exhausted: Callable[[Cause], None]) -> Allowance:
        """Return the allowance of a scope inside this one: a new one, or this one if `budget` is None."""
        return self if budget is None else Allowance(budget, self, exhausted)


UNLIMITED: Final = Allowance(None, None, None)
