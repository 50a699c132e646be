"""Runs worlds: one seed, or many seeds in several processes."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import attrs

from .coverage import Coverage
from .invariants import INVARIANTS, Invariant, check_invariants
from .program import FAULT_KINDS, Program, make_program, shrink
from .trace import Trace
from .world import World, WorldSettings

__all__ = ["SeedResult", "SimulationReport", "run_program", "run_seed", "run_seeds", "shrink_failure"]

SHRINK_ATTEMPTS = 60
SETTLING_WORLDS = 3
"""The number of worlds of a process after which few objects that stay are made, except those of modules that are loaded later."""
CHUNK = 10
"""The number of seeds that a worker process gets at a time."""


class _Heap:
    worlds = 0
    modules = 0


_heap = _Heap()


@attrs.frozen
class SeedResult:
    """The result of one program. `violations` has a sentence for each violated invariant; it is empty if all hold."""

    program: Program
    violations: tuple[str, ...]
    trace: Trace
    seconds: float
    """The simulated duration."""
    coverage: Coverage

    @property
    def invariants(self) -> set[str]:
        """Return the names of the violated invariants."""
        return {text.partition(":")[0] for text in self.violations}

    def story(self, last: int = 40) -> str:
        """Return the program, the last entries of the trace and the violations, as text for a person."""
        lines = [
            f"seed {self.program.seed}, {self.program.nodes} nodes, {self.program.platform}, {len(self.program.steps)} steps:",
            *map(str, self.program.steps),
            "",
        ]
        lines += [*self.trace.story(last), "", *self.violations]
        return "\n".join(lines)


@attrs.define
class SimulationReport:
    """The sums over many seeds."""

    seeds: int = 0
    simulated: float = 0.0
    cpu: float = 0.0
    coverage: Coverage = attrs.Factory(Coverage)
    failures: dict[int, tuple[str, ...]] = attrs.Factory(dict[int, "tuple[str, ...]"])

    def add(self, other: SimulationReport) -> None:
        """Add the sums of another part."""
        self.seeds += other.seeds
        self.simulated += other.simulated
        self.cpu += other.cpu
        self.coverage.add(other.coverage)
        self.failures |= other.failures


async def _note(violations: list[str], found: list[str]) -> None:
    violations += found


def run_program(
    program: Program, settings: WorldSettings | None = None, invariants: Mapping[str, Invariant] = INVARIANTS
) -> SeedResult:
    """Execute a program in a new world and check the invariants. An exception of the world itself is reported as a violation."""
    if _heap.worlds < SETTLING_WORLDS or _heap.modules != len(sys.modules):
        # Modules stay loaded, and some worlds load more, as the first one with an MCP server does: with them frozen, a collection after a world only
        # traverses the objects of that world.
        gc.collect()
        gc.freeze()
    _heap.worlds += 1
    _heap.modules = len(sys.modules)
    world = World(program, settings)
    violations: list[str] = []
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # no invariant reads the log, and formatting it would double the cost
    try:
        world.run(after=lambda world: _note(violations, check_invariants(world, invariants)))
    except Exception as error:
        violations.append(f"the world broke: {describe(error)}")
    finally:
        logging.disable(before)
    violations += [f"left the simulation: {text}" for text in world.boundary.breaches]
    violations += [
        f"the server ended: {node.name} with {describe(node.failure)}"
        for node in world.nodes
        if node.failure is not None
    ]
    moments = list(world.trace)
    seconds = moments[-1].at if moments else 0.0
    return SeedResult(program, tuple(violations), world.trace, seconds, world.coverage)


def run_seed(
    seed: int,
    *,
    minutes: float = 3.0,
    faults: Sequence[str] = FAULT_KINDS,
    nodes: int | None = None,
    platform: str | None = None,
    settings: WorldSettings | None = None,
) -> SeedResult:
    """Make the program of a seed and execute it. The seed decides the number of nodes and the platform, unless they are given."""
    return run_program(make_program(seed, minutes=minutes, faults=faults, nodes=nodes, platform=platform), settings)


def shrink_failure(result: SeedResult) -> SeedResult:
    """Return the result of a shorter program that violates one of the same invariants; `result` itself if none was found."""
    wanted = result.invariants

    def fails(program: Program) -> bool:
        return bool(run_program(program).invariants & wanted)

    shorter = shrink(result.program, fails, attempts=SHRINK_ATTEMPTS)
    again = run_program(shorter)
    return again if again.violations else result


def _run_some(
    seeds: Sequence[int], minutes: float, faults: Sequence[str], nodes: int | None, platform: str | None
) -> SimulationReport:
    began = time.process_time()
    report = SimulationReport(seeds=len(seeds))
    was_enabled = gc.isenabled()
    # Otherwise the end of each world would begin a collection of everything that is still referenced.
    gc.disable()
    try:
        for seed in seeds:
            result = run_seed(seed, minutes=minutes, faults=faults, nodes=nodes, platform=platform)
            report.simulated += result.seconds
            report.coverage.add(result.coverage)
            if result.violations:
                report.failures[seed] = result.violations
            del result
            gc.collect()
    finally:
        if was_enabled:
            gc.enable()
    report.cpu = time.process_time() - began
    return report


def run_seeds(
    seeds: Iterable[int],
    *,
    minutes: float = 3.0,
    faults: Sequence[str] = FAULT_KINDS,
    nodes: int | None = None,
    platform: str | None = None,
    workers: int = 1,
    progress: Callable[[SimulationReport], None] | None = None,
) -> SimulationReport:
    """Run many seeds in `workers` processes, and return the sums. `progress` is called after each part with the sums so far."""
    wanted = list(seeds)
    parts = [wanted[at : at + CHUNK] for at in range(0, len(wanted), CHUNK)]
    work = partial(_run_some, minutes=minutes, faults=tuple(faults), nodes=nodes, platform=platform)
    total = SimulationReport()
    for part in _results(work, parts, workers):
        total.add(part)
        if progress is not None:
            progress(total)
    return total


def _results(
    work: Callable[[Sequence[int]], SimulationReport], parts: Sequence[Sequence[int]], workers: int
) -> Iterator[SimulationReport]:
    if workers <= 1:
        yield from map(work, parts)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap_unordered(work, parts)


def describe(error: BaseException) -> str:
    """Return an exception in one line; for a group, its first leaf."""
    leaf: Any = error
    while isinstance(leaf, BaseExceptionGroup):
        leaf = cast("Any", leaf).exceptions[0]
    frames = traceback.extract_tb(leaf.__traceback__)
    where = f" ({frames[-1].name} in {Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(leaf).__name__}: {leaf}{where}"
