"""What people of some seeds do beside the actions that `program.py` draws: interrupt, stop everything, send files. Also when some worlds begin.

Each function draws from a generator of its own, so that the rest of a program stays as it is.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from .program import Step

EPOCH: Final = 1_790_000_000.0
"""The start of most worlds, in seconds since 1970: a Monday in September 2026."""

ZONE: Final = "Europe/Berlin"
"""The time zone of the scheduled jobs."""

NIGHTLY: Final = "30 2 * * *"
NIGHTLY_JOB: Final = "c30c30c30c30"

BUSY: Final = ("queue", "interrupt", "steer")
"""What a message does while a turn of its conversation runs."""

INTERRUPTING: Final = 200
"""Added to the number of a step for a further message of the same person while the first one is worked on."""

_BEFORE: Final = 90.0

CHANGES: Final[Mapping[str, float]] = {
    # The clock of Europe/Berlin is put from 2:00 to 3:00.
    "left out": datetime(2027, 3, 28, 1, 0, tzinfo=UTC).timestamp() - _BEFORE,
    # The first half past two of this night, and the second one.
    "first of two": datetime(2026, 10, 25, 0, 30, tzinfo=UTC).timestamp() - _BEFORE,
    "second of two": datetime(2026, 10, 25, 1, 30, tzinfo=UTC).timestamp() - _BEFORE,
}
"""The starts of worlds near a change of the clock in Europe/Berlin, shortly before a daily job of 2:30 is due, or would be."""

_INTERRUPTIBLE: Final = ("think", "run", "bg", "ponder", "del", "ask", "rm")
_FURTHER: Final = ("say", "say", "think 2", "run 5", "bg 10")


def busy_of(seed: int) -> str:
    """Return what a message does while a turn runs: mostly it waits."""
    return random.Random(f"{seed} busy").choices(BUSY, (60, 20, 20))[0]


def start_of(seed: int) -> float:
    """Return when the world of a seed begins: one of sixteen shortly before a change of the clock."""
    starts = tuple(CHANGES.values())
    return starts[seed // 16 % len(starts)] if seed % 16 == 7 else EPOCH


def has_upkeep(seed: int) -> bool:
    """Return whether the store of this world removes ended rows after seconds. Such a world has no chores, which remove rows, too."""
    return seed % 16 == 8


def with_habits(seed: int, steps: Sequence[Step], busy: str, *, models: bool) -> list[Step]:
    """Return the steps with those that only some people do. `models` says whether the models of this world fail."""
    found = _stopping_everything(random.Random(f"{seed} all"), steps)
    found = _with_files(random.Random(f"{seed} files"), found)
    if models:
        found = _repeating(random.Random(f"{seed} repeat"), found)
    return found if busy == "queue" else _interrupting(random.Random(f"{seed} interrupt"), found)


def _stopping_everything(rng: random.Random, steps: Sequence[Step]) -> list[Step]:
    found: list[Step] = []
    for step in steps:
        if step.kind == "command" and step.words.startswith("/stop") and rng.random() < 0.4:
            step = attrs.evolve(step, words=step.words.replace("/stop", "/stop all", 1))
            if step.words == "/stop all" and step.at > 8 and rng.random() < 0.5:
                # There is something in the background that it stops.
                found.append(attrs.evolve(step, at=round(step.at - 7, 2), kind="write", words="bg 60"))
        found.append(step)
    return found


def _with_files(rng: random.Random, steps: Sequence[Step]) -> list[Step]:
    """Let some messages be a file, or have one."""
    found: list[Step] = []
    for step in steps:
        if (step.kind == "write" and "=" not in step.words and rng.random() < 0.05) or (
            step.kind == "web" and not step.words.startswith("/") and rng.random() < 0.25
        ):
            words = "file=1" if step.kind == "write" else f"{step.words} file=1"
            step = attrs.evolve(step, words=words)
        found.append(step)
    return found


def _repeating(rng: random.Random, steps: Sequence[Step]) -> list[Step]:
    """Let some faults of models be an event that is sent twice."""
    found: list[Step] = []
    for step in steps:
        if step.kind == "model" and step.number % 400 < 30 and rng.random() < 0.15:
            step = attrs.evolve(step, words=f"repeat after={rng.choice((0, 1, 2, 3))}")
        found.append(step)
    return found


def _interrupting(rng: random.Random, steps: Sequence[Step]) -> list[Step]:
    """Let people write again while their message is worked on."""
    found: list[Step] = []
    for step in steps:
        found.append(step)
        if (
            step.kind == "write"
            and step.number % 400 < INTERRUPTING
            and "group=" not in step.words
            and step.words.startswith(_INTERRUPTIBLE)
            and rng.random() < 0.6
        ):
            at = round(step.at + rng.choice((0.0, 0.5, 3.0, 8.0)), 2)
            found.append(attrs.evolve(step, at=at, number=step.number + INTERRUPTING, words=rng.choice(_FURTHER)))
    return found
