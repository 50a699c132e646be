"""Worlds with several nodes: what they promise together, and that the invariants find what is broken between them."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from hermes_trio.runtime.event_writer import EventWriter
from hermes_trio.runtime.outcome import Outcome
from hermes_trio.runtime.ports import EventRow
from hermes_trio.runtime.turn import Turn
from hermes_trio.store.sqlite import resumptions
from hermes_trio.testing.simulation import Program, Step, WorldSettings, make_program, run_program, run_seed, run_seeds
from hermes_trio.testing.simulation.accounts import SPARE
from hermes_trio.testing.simulation.script import marks

from .mutants import patched, seeds_until_found
from .node_mutants import NODE_MUTANTS


def test_a_sample_of_worlds_with_several_nodes_keeps_every_promise() -> None:
    """With pauses, partitions and lost signals among the faults."""
    broken = {seed: found for seed in range(1, 4) if (found := run_seed(seed, nodes=1 + seed % 3).violations)}
    assert broken == {}


def test_a_seed_chooses_how_many_nodes_there_are() -> None:
    """One to three, the same for the same seed; a number that is given decides."""
    assert {make_program(seed).nodes for seed in range(60)} == {1, 2, 3}
    assert make_program(7) == make_program(7)
    assert make_program(7, nodes=3).nodes == 3
    assert not any(step.kind in ("pause", "partition") for step in make_program(1, nodes=1).steps)


PAUSED = Program(
    seed=3,
    seconds=120,
    nodes=2,
    steps=(
        Step(5.0, "run", who=0, number=1, words="think 40"),
        Step(6.0, "pause", who=0, words="seconds=60"),
        Step(6.0, "pause", who=1, words="seconds=5"),
        Step(20.0, "write", who=0, number=2, words="say"),
    ),
)


def test_a_node_that_was_paused_past_its_lease_ends_when_it_wakes() -> None:
    """Another node has taken over by then; the paused node writes and begins nothing more."""
    result = run_program(PAUSED)
    assert not result.violations, result.story()
    names = [
        one.kind
        for one in result.trace
        if "node0.1" in one.text and one.kind in ("pause", "gone", "resume", "lease lost")
    ]
    assert names == ["pause", "gone", "resume", "lease lost"]


CUT_OFF = Program(
    seed=1,
    seconds=120,
    nodes=2,
    steps=(
        *(Step(25.0, "run", who=0, number=number, words="run 30") for number in range(1, 4)),
        Step(26.0, "partition", who=0, words="away seconds=60"),
    ),
)


def test_a_node_that_goes_on_without_its_lease_is_convicted() -> None:
    """One of the defects between nodes; `make test-slow` puts in all of them. Without it the same program breaks no promise."""
    invariant, _, _, patches = NODE_MUTANTS["a node that goes on without its lease"]
    assert run_program(CUT_OFF).violations == ()
    with patched(*patches):
        assert invariant in run_program(CUT_OFF).invariants


CUT_OFF_AT_THE_END = Program(
    seed=1,
    seconds=60,
    nodes=2,
    steps=(
        Step(5.0, "run", who=0, number=1, words="ponder 1"),
        Step(5.02, "partition", who=0, words="away seconds=2.5"),
    ),
)


def _ends_without_what_is_on_its_way(real: Any) -> Any:
    """The end of a run commits with the events that wait, but not with those that the store has been asked to append."""

    def terminal(self: EventWriter, turn: Turn, outcome: Outcome) -> tuple[EventRow, ...]:
        self._writing = {}
        return real(self, turn, outcome)

    return terminal


def test_a_run_whose_end_is_stored_before_its_first_events_is_convicted() -> None:
    """A reader on another node would get the last events only. Without the defect every reader gets all of them."""
    assert run_program(CUT_OFF_AT_THE_END).violations == ()
    with patched((EventWriter, "terminal", _ends_without_what_is_on_its_way)):
        assert "5 events" in run_program(CUT_OFF_AT_THE_END).invariants


@pytest.mark.slow
def test_two_hundred_worlds_with_three_nodes_keep_every_promise() -> None:
    """With faults of every family."""
    assert run_seeds(range(40_000, 40_200), nodes=3).failures == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", NODE_MUTANTS)
def test_every_defect_between_nodes_is_convicted_within_five_hundred_seeds(name: str) -> None:
    """By the invariant that it breaks. `pytest -s` prints the table."""
    invariant, faults, nodes, patches = NODE_MUTANTS[name]
    seeds = seeds_until_found(patches, invariant, 500, faults, nodes)
    sys.stdout.write(f"\n| {name} | {', '.join(faults) or 'none'} | {nodes} | {invariant} | {seeds} |\n")
    assert seeds is not None


ONE_SESSION = Program(
    seed=1,
    seconds=90,
    nodes=2,
    steps=(
        Step(5.0, "run", who=0, number=1, words="think 40 session=1"),
        *(Step(6.0 + number, "run", who=0, number=number, words="say stop=5 session=1") for number in (2, 3, 4, 5)),
    ),
)


def test_a_turn_that_is_stopped_while_another_node_has_its_session_adds_nothing_to_it() -> None:
    """As on one node: the transcript is that of the turn that has the session."""
    result = run_program(ONE_SESSION)
    assert not result.violations, result.story()
    assert len({one.text.split()[0] for one in result.trace.of("model") if "m9" not in one.text}) == 1


LOST_AGAIN_AND_AGAIN = Program(
    seed=1,
    seconds=120,
    nodes=2,
    steps=(
        Step(5.0, "run", who=0, number=1, words="think 40 resume=1"),
        Step(5.0, "run", who=1, number=2, words="think 40"),
        *(Step(8.0 + 20 * count, "crash", who=who, words="now down=1") for count in range(5) for who in range(2)),
    ),
)


def test_a_run_that_is_begun_again_without_end_is_convicted() -> None:
    """The same program with the bound of attempts keeps all promises: the run fails after its third attempt, and one that did not ask after its first."""
    result = run_program(LOST_AGAIN_AND_AGAIN)
    assert result.violations == ()
    calls = [next(iter(marks(one.text))) for one in result.trace.of("model") if marks(one.text) & {"m1", "m2"}]
    assert (calls.count("m1"), calls.count("m2")) == (3, 1)
    with patched((resumptions, "ATTEMPTS", lambda real: 2 * real)):
        assert "5 events" in run_program(LOST_AGAIN_AND_AGAIN).invariants


def test_a_resumed_run_has_its_time_again() -> None:
    """Each attempt is a turn of its own, with the time limit of the first."""
    seed = next(number for number, spare in SPARE.items() if spare == "seconds")
    steps = (
        Step(5.0, "run", who=0, number=1, words="run 30 resume=1"),
        Step(8.0, "crash", 0, 2, "before accept_message down=60"),
        Step(9.0, "embedding", 0, 3, "say"),
    )
    result = run_program(Program(seed, 100, steps), WorldSettings(cron="", calm_seconds=100))
    assert result.violations == (), result.story()
    ends = [one for one in result.trace.of("process ends") if "m1 " in one.text]
    assert [one.text.split()[-1] for one in ends] == ["15"]
