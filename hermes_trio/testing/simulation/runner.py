"""Runs worlds: one seed, or many seeds in several processes."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast

import attrs

from .coverage import Coverage
from .invariants import INVARIANTS, Invariant, check_invariants
from .program import FAULT_KINDS, Program, make_program
from .shrinker import kind_of, shrink
from .trace import Trace
from .world import World, WorldSettings

SHRINK_ATTEMPTS = 200
SETTLING_WORLDS = 3
"""The number of worlds of a process after which few objects that stay are made, except those of modules that are loaded later."""
CHUNK = 10
"""The number of seeds that a worker process gets at a time."""


class _Heap:
    worlds = 0
    modules = 0


_heap = _Heap()


class SeedOptions(TypedDict, total=False):
    """The options of `run_seed` and `run_seeds`."""

    minutes: float
    """Simulated minutes in which people act and faults occur; 3 if not given."""
    faults: Sequence[str]
    """The families of faults; all if not given."""
    nodes: int | None
    """The number of nodes; the seed decides it if not given."""
    platform: str | None
    """The chat platform; the seed decides it if not given."""
    settings: WorldSettings | None
    """The settings of each world, such as its agent."""
    invariants: Mapping[str, Invariant]
    """The invariants by name; `INVARIANTS` if not given."""


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


def run_seed(seed: int, **options: Unpack[SeedOptions]) -> SeedResult:
    """Make the program of a seed and execute it. The seed decides the number of nodes and the platform, unless they are given."""
    program = make_program(
        seed,
        minutes=options.get("minutes", 3.0),
        faults=options.get("faults", FAULT_KINDS),
        nodes=options.get("nodes"),
        platform=options.get("platform"),
    )
    return run_program(program, options.get("settings"), options.get("invariants", INVARIANTS))


def shrink_failure(
    result: SeedResult,
    settings: WorldSettings | None = None,
    invariants: Mapping[str, Invariant] = INVARIANTS,
    *,
    attempts: int = SHRINK_ATTEMPTS,
) -> SeedResult:
    """Return the result of a shorter program with the first violation of `result`; `result` itself if none was found.

    A violation is the same if its invariant and its words are, whatever numbers and names it mentions. Runs at most `attempts` worlds.
    """
    wanted = kind_of(result.violations[0])
    best = result

    def fails(program: Program) -> bool:
        nonlocal best
        tried = run_program(program, settings, invariants)
        same = [text for text in tried.violations if kind_of(text) == wanted]
        if same:
            best = tried
        return bool(same)

    shrink(result.program, fails, attempts=attempts)
    return best


def _run_some(seeds: Sequence[int], options: SeedOptions) -> SimulationReport:
    began = time.process_time()
    report = SimulationReport(seeds=len(seeds))
    was_enabled = gc.isenabled()
    # Otherwise the end of each world would begin a collection of everything that is still referenced.
    gc.disable()
    try:
        for seed in seeds:
            result = run_seed(seed, **options)
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
    workers: int = 1,
    progress: Callable[[SimulationReport], None] | None = None,
    **options: Unpack[SeedOptions],
) -> SimulationReport:
    """Run many seeds in `workers` processes, and return the sums. `progress` is called after each part with the sums so far.

    Other processes import the agent of the settings and the invariants by their names. Raises `ValueError` if they cannot.
    """
    wanted = list(seeds)
    parts = [wanted[at : at + CHUNK] for at in range(0, len(wanted), CHUNK)]
    if workers > 1:
        _check_importable(options)
    total = SimulationReport()
    for part in _results(partial(_run_some, options=options), parts, workers):
        total.add(part)
        if progress is not None:
            progress(total)
    return total


def _check_importable(options: SeedOptions) -> None:
    try:
        pickle.dumps(options)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            "with several workers, the agent and the invariants must be functions of a module, or objects that can be"
            f" pickled: {error}"
        ) from error


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
