"""Simulates whole gateways: one event loop, virtual time, a seeded scheduler, injected faults, and replay by seed.

    from hermes_trio.testing.simulation import run_seed
    result = run_seed(17)
    assert not result.violations, result.story()

Importing this package imports the gateway; importing `hermes_trio.testing` does not.
"""

from __future__ import annotations

from .boundary import SimulationBreach
from .coverage import Coverage
from .invariants import INVARIANTS, Invariant, check_invariants
from .program import FAULT_KINDS, PLATFORMS, Program, Step, make_program
from .runner import SeedOptions, SeedResult, SimulationReport, run_program, run_seed, run_seeds, shrink_failure
from .shrinker import shrink
from .trace import Moment, Trace
from .versions import versions
from .world import World, WorldSettings

__all__ = [
    "FAULT_KINDS",
    "INVARIANTS",
    "PLATFORMS",
    "Coverage",
    "Invariant",
    "Moment",
    "Program",
    "SeedOptions",
    "SeedResult",
    "SimulationBreach",
    "SimulationReport",
    "Step",
    "Trace",
    "World",
    "WorldSettings",
    "check_invariants",
    "make_program",
    "run_program",
    "run_seed",
    "run_seeds",
    "shrink",
    "shrink_failure",
    "versions",
]
