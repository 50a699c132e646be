"""Every verb of the store fails in some world, before its commit and after it."""

from __future__ import annotations

import pytest

from hermes_trio.testing.faults import READ_VERBS, STORE_VERBS
from hermes_trio.testing.simulation import Program, Step, WorldSettings, make_program, run_program, run_seed
from hermes_trio.testing.simulation.coverage import Coverage
from hermes_trio.testing.simulation.targets import (
    COMMAND_VERBS,
    NODE_VERBS,
    STEPS,
    TARGETS,
    UNCALLED,
    target_of,
)

CYCLE = 2 * len(TARGETS)
"""The number of seeds after which the targets repeat."""


def test_the_targets_are_all_pairs_of_a_verb_and_a_fault() -> None:
    """Each verb fails before its commit, and after it if it writes; the tables name existing verbs only."""
    assert set(STEPS) | NODE_VERBS | COMMAND_VERBS | set(UNCALLED) <= STORE_VERBS
    wanted = {(verb, "before") for verb in STORE_VERBS} | {(verb, "after") for verb in STORE_VERBS - READ_VERBS}
    assert {pair for pair in wanted if pair[0] not in UNCALLED} <= set(TARGETS)
    assert {target_of(seed) for seed in range(1, CYCLE, 2)} == set(TARGETS)
    assert target_of(2) is None


def test_a_program_with_some_faults_has_no_target() -> None:
    """`--faults` names all faults that a world has, and `--nodes 1` has none of several nodes."""
    assert all(step.number != 90 for step in make_program(1, faults=("store",)).steps)
    for index, (verb, _) in enumerate(TARGETS):
        if verb in NODE_VERBS:
            assert make_program(2 * index + 1).nodes > 1
            assert all(step.number != 90 for step in make_program(2 * index + 1, nodes=1).steps)


CHORES = (
    "sessions",
    "responses",
    "lists",
    "page",
    "keys",
    "letters",
    "schedule",
    "direct",
    "pairing",
    "upkeep",
    "terminal",
)


def test_what_chores_are_told_is_so() -> None:
    """Without faults every chore is done, and a promise that is not kept is a violation."""
    steps = tuple(Step(5.0 + number, "chore", number % 2, 31 + number, chore) for number, chore in enumerate(CHORES))
    result = run_program(Program(1, 120, steps), WorldSettings(cron="", calm_seconds=300))
    assert result.violations == ()
    answers = [one.text.rpartition(" ")[2] for one in result.trace.of("chore")]
    assert len(answers) > 30
    assert {answer[0] for answer in answers} <= {"2", "4"}
    called = [verb for verb in COMMAND_VERBS if not result.coverage.calls[verb]]
    assert called == []


def test_coverage_tells_what_contradicts_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair that is listed as unreachable, and was reached, is reported."""
    coverage = Coverage()
    monkeypatch.setattr("hermes_trio.testing.simulation.coverage.UNCALLED", {"replies_to": "nobody asks"})
    assert coverage.contradictions() == []
    coverage.calls["replies_to"] += 1
    coverage.states["crash", "job starting"] += 1
    assert len(coverage.contradictions()) == 2


@pytest.mark.slow
def test_every_verb_fails_before_and_after_its_commit() -> None:
    """In a few cycles of the targets. Only those that have not failed yet are tried again."""
    coverage = Coverage()
    for cycle in range(5):
        left = set(coverage.unfailed())
        for index, (verb, how) in enumerate(TARGETS):
            if f"{verb} {how}" in left:
                result = run_seed(cycle * CYCLE + 2 * index + 1)
                assert result.violations == (), (result.program.seed, result.violations)
                coverage.add(result.coverage)
    assert coverage.unfailed() == []
    assert coverage.contradictions() == []
