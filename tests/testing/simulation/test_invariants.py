"""The invariants hold in the gateway as it is, and detect every deliberate defect."""

from __future__ import annotations

import re
import sys

import pytest

from hermes_trio.testing.simulation import run_seed, run_seeds

from .chat_mutants import CHAT_MUTANTS
from .count_mutants import COUNT_MUTANTS
from .mutants import DEFECTS, MUTANTS, seeds_until_found

QUICK = [
    "a job's end without its notice",
    "a message acknowledged and not written",
    "a reply to somebody else",
    "a transcript without the results of tools",
    "an event that is not kept",
    "a run without its output",
    "a notice that does not say what ended",
    "an answer that its transcript does not have",
    "a turn that begins without its history",
]
"""Those that the first seed shows."""


def test_a_sample_of_worlds_keeps_every_promise() -> None:
    """With faults of every family; `make simulate` runs ten thousand of them."""
    broken = {seed: found for seed in range(1, 9) if (found := run_seed(seed).violations)}
    assert broken == {}


@pytest.mark.parametrize("name", QUICK)
def test_a_deliberate_defect_is_convicted(name: str) -> None:
    """By the invariant that it breaks."""
    invariant, patches = MUTANTS[name]
    assert seeds_until_found(patches, invariant, 3) is not None


@pytest.mark.slow
def test_a_thousand_worlds_keep_every_promise() -> None:
    """With faults of every family."""
    report = run_seeds(range(20_000, 21_000))
    sys.stdout.write(f"{report.coverage.table()}\n\n{report.coverage.summary()}\n")
    assert report.failures == {}
    assert report.coverage.contradictions() == []


BY_PROGRAM = ("a /stop in a chat that says ok and does nothing", "grants of all tenants in a list")
"""Few worlds have a single /stop beside a turn that goes on, or something that a tenant has allowed for good: `test_platforms` convicts them by programs."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MUTANTS if name not in BY_PROGRAM])
def test_every_deliberate_defect_is_convicted_within_five_hundred_seeds(name: str) -> None:
    """By the invariant that it breaks."""
    invariant, patches = MUTANTS[name]
    assert seeds_until_found(patches, invariant, 500) is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAT_MUTANTS)
def test_every_defect_of_a_platform_is_convicted_within_five_hundred_seeds(name: str) -> None:
    """By the invariant that it breaks, in worlds with that platform. `pytest -s` prints the table."""
    invariant, platform, patches = CHAT_MUTANTS[name]
    seeds = seeds_until_found(patches, invariant, 500, platform=platform)
    sys.stdout.write(f"\n| {name} | {platform} | {invariant} | {seeds} |\n")
    assert seeds is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNT_MUTANTS)
def test_every_defect_of_a_number_is_convicted_within_five_hundred_seeds(name: str) -> None:
    """By the invariant that it breaks, with faults of every family. `pytest -s` prints the table."""
    invariant, platform, nodes, patches = COUNT_MUTANTS[name]
    seeds = seeds_until_found(patches, invariant, 500, nodes=nodes, platform=platform)
    sys.stdout.write(f"\n| {name} | {platform} | {nodes} | {invariant} | {seeds} |\n")
    assert seeds is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFECTS)
def test_what_once_was_broken_would_be_found(name: str) -> None:
    """Each defect, put back as a small patch, is found within five hundred seeds. `pytest -s` prints the table."""
    invariant, faults, patches = DEFECTS[name]
    seeds = seeds_until_found(patches, invariant, 500, faults)
    sys.stdout.write(f"\n| {name} | {invariant} | {', '.join(faults) or 'none'} | {seeds} |\n")
    assert seeds is not None


def test_the_defects_cover_most_of_the_list() -> None:
    """At least ten kinds of defects are among those that are put back."""
    numbers = {int(found[0]) for name in DEFECTS if (found := re.findall(r"^\d+", name))}
    assert len(numbers) >= 10, sorted(numbers)
