"""Running worlds: one seed, one result."""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import attrs

from .judge import INVARIANTS, Invariant, judge
from .program import FAULT_KINDS, Program, make_program
from .trace import Trace
from .world import World, WorldSettings

__all__ = ["SeedResult", "run_program", "run_seed"]


class _Heap:
    settled = False


_heap = _Heap()


@attrs.frozen
class SeedResult:
    """What became of one program. `violations` are the promises that were broken, in words; empty is good."""

    program: Program
    violations: tuple[str, ...]
    trace: Trace
    seconds: float
    """Simulated ones."""

    def story(self, last: int = 40) -> str:
        """The program, the last moments, and what was wrong: for people."""
        lines = [f"seed {self.program.seed}, {len(self.program.steps)} steps:", *map(str, self.program.steps), ""]
        lines += [*self.trace.story(last), "", *self.violations]
        return "\n".join(lines)


async def _note(violations: list[str], found: list[str]) -> None:
    violations += found


def run_program(
    program: Program, settings: WorldSettings | None = None, invariants: Mapping[str, Invariant] = INVARIANTS
) -> SeedResult:
    """Play a program in a world of its own, and judge it. What the world itself raises is a violation, too."""
    if not _heap.settled:
        # What is loaded by now stays: each collection after a world looks at what the world left alone.
        gc.collect()
        gc.freeze()
        _heap.settled = True
    world = World(program, settings)
    violations: list[str] = []
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # what a gateway logs is not what it promises, and costs as much as what it does
    try:
        world.run(after=lambda world: _note(violations, judge(world, invariants)))
    except Exception as error:
        violations.append(f"the world broke: {describe(error)}")
    finally:
        logging.disable(before)
    violations += [f"left the simulation: {text}" for text in world.boundary.breaches]
    violations += [
        f"{node.name} ended with {describe(node.failure)}" for node in world.nodes if node.failure is not None
    ]
    moments = list(world.trace)
    gc.collect()
    return SeedResult(program, tuple(violations), world.trace, moments[-1].at if moments else 0.0)


def run_seed(
    seed: int,
    *,
    minutes: float = 3.0,
    faults: Sequence[str] = FAULT_KINDS,
    settings: WorldSettings | None = None,
) -> SeedResult:
    """Make the program of a seed and play it."""
    return run_program(make_program(seed, minutes=minutes, faults=faults), settings)


def describe(error: BaseException) -> str:
    """An exception in one line; of a group, its first leaf."""
    leaf: Any = error
    while isinstance(leaf, BaseExceptionGroup):
        leaf = cast("Any", leaf).exceptions[0]
    frames = traceback.extract_tb(leaf.__traceback__)
    where = f" ({frames[-1].name} in {Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(leaf).__name__}: {leaf}{where}"
