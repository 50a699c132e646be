"""What only some people and worlds do: interruptions, steering, `/stop all`, files, jobs near a change of the clock, and retention beside live work."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import attrs
import msgspec
import pytest
import trio

from hermes_trio.messaging.senders import Senders
from hermes_trio.store.sqlite import maintenance
from hermes_trio.testing.simulation import (
    PLATFORMS,
    Program,
    Step,
    WorldSettings,
    make_program,
    run_program,
    run_seed,
    world,
)
from hermes_trio.testing.simulation.habits import CHANGES, EPOCH

from .habit_mutants import HABIT_MUTANTS, INTERRUPTED, STEERED
from .mutants import patched, seeds_until_found

SETTINGS = WorldSettings(cron="", calm_seconds=100)
NIGHT = WorldSettings(calm_seconds=300)


@pytest.mark.parametrize("name", HABIT_MUTANTS)
def test_a_deliberate_defect_is_convicted(name: str) -> None:
    """By the invariant that it breaks; without it the same world is innocent."""
    invariant, program, patches = HABIT_MUTANTS[name]
    settings = NIGHT if program.start != EPOCH else SETTINGS
    # With several nodes, the seed decides which node has the connection of the bot, and which one the conversation.
    for seed in range(1, 7 if program.nodes > 1 else 2):
        program = attrs.evolve(program, seed=seed)
        result = run_program(program, settings)
        assert result.violations == (), result.story()
        with patched(*patches):
            if invariant in run_program(program, settings).invariants:
                return
    pytest.fail(f"nothing violates {invariant}")


@pytest.mark.slow
@pytest.mark.parametrize("name", HABIT_MUTANTS)
def test_a_deliberate_defect_is_convicted_within_five_hundred_seeds(name: str) -> None:
    """In worlds that seeds make. `pytest -s` prints the table."""
    invariant, program, patches = HABIT_MUTANTS[name]
    nodes = 3 if program.nodes > 1 else None
    seeds = seeds_until_found(patches, invariant, 500, nodes=nodes, platform=None)
    sys.stdout.write(f"\n| {name} | {invariant} | {seeds} |\n")
    assert seeds is not None


def _removes_all_ended_sessions(real: Any) -> Any:
    return lambda prune: ("ended_at IS NOT NULL AND ended_at < ?", [prune.before])


def _claims_late(real: Any) -> Any:
    async def claim(self: Senders, sender: Any, waited: Any) -> Any:
        if self._runtime.core.draining:
            await trio.sleep(12)
        return await real(self, sender, waited)

    return claim


def _flushes_without_a_bound(real: Any) -> Any:
    def stage(self: Senders, runtime: Any) -> Any:
        self.settings = msgspec.structs.replace(self.settings, flush_seconds=1_000.0)
        return real(self, runtime)

    return stage


def _short_for_sessions(real: Any) -> Any:
    return msgspec.structs.replace(real, sessions=real.jobs)


def test_retention_keeps_the_session_of_a_child_whose_process_was_lost_with_its_host() -> None:
    """The session has ended; its job is live until another node takes over. The seed decides which node has the conversation."""
    steps = (Step(12.0, "write", 0, 1, "dels 5 kept=1"), Step(12.01, "crash", 0, 1, "now down=0.5"))
    with patched((world, "SHORT_RETENTION", _short_for_sessions)):
        for seed in range(1, 9):
            program = Program(seed, 90, steps, 2, upkeep=True)
            result = run_program(program, SETTINGS)
            assert result.violations == (), result.story()
            with patched((maintenance.Prune, "where", _removes_all_ended_sessions)):
                if "2 acknowledged" in run_program(program, SETTINGS).invariants:
                    return
    pytest.fail("no node with the conversation has crashed")


DRAINED = (Step(5.0, "write", 0, 1, "run 10"), Step(8.0, "restart", 0, 1))


def test_a_slow_store_delays_the_last_replies_of_a_drained_node_within_the_bounds_of_its_close() -> None:
    """The last attempts of the close wait for the store before the time for the flush begins."""
    slow = "claim_outbox slow seconds={} times=1"
    result = run_program(Program(1, 90, (*DRAINED, Step(9.0, "store", words=slow.format(12)))), SETTINGS)
    assert result.violations == (), result.story()
    with patched((Senders, "stage", _flushes_without_a_bound)):
        result = run_program(Program(1, 90, (*DRAINED, Step(9.0, "store", words=slow.format(25)))), SETTINGS)
    assert "7 stops" in result.invariants


def test_a_drained_node_that_sends_its_last_replies_late_is_convicted() -> None:
    """Without a fault of the store it has only the grace of its server and the time for the flush."""
    program = Program(1, 90, DRAINED)
    result = run_program(program, SETTINGS)
    assert result.violations == (), result.story()
    with patched((Senders, "stage", _flushes_without_a_bound), (Senders, "_claim", _claims_late)):
        assert "7 stops" in run_program(program, SETTINGS).invariants


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_newer_message_interrupts_and_is_answered(nodes: int) -> None:
    """The first one gets no reply."""
    result = run_program(Program(1, 90, INTERRUPTED, nodes, busy="interrupt"), SETTINGS)
    assert result.violations == (), result.story()
    (answer,) = result.trace.of("chat")
    assert answer.text == "500: 'done m2'"
    assert answer.at < 20


def test_a_newer_message_interrupts_although_it_became_a_dead_letter() -> None:
    """Queueing it again makes it no younger: the first message needs no reply."""
    steps = (
        Step(5.0, "store", 0, 1, "begin_turn before seconds=110"),
        Step(37.0, "write", 0, 2, "bg 10"),
        Step(40.0, "write", 0, 3, "run 5"),
        Step(120.0, "chore", 0, 4, "letters"),
    )
    result = run_program(Program(1, 130, steps, busy="interrupt"), SETTINGS)
    assert result.violations == (), result.story()
    assert "500: 'done m3'" in [one.text for one in result.trace.of("chat")]


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_newer_message_steers(nodes: int) -> None:
    """It is in the first turn, which answers it."""
    result = run_program(Program(1, 90, STEERED, nodes, busy="steer"), SETTINGS)
    assert result.violations == (), result.story()
    assert [one.text for one in result.trace.of("chat")] == ["500: 'done m2'"]


@pytest.mark.parametrize("change", CHANGES)
def test_a_nightly_job_runs_once_in_the_night_of_a_change(change: str) -> None:
    """At the change if its time is left out, the first time if it is there twice."""
    result = run_program(Program(1, 30, (), start=CHANGES[change]), NIGHT)
    assert result.violations == (), result.story()
    asked = [one for one in result.trace.of("model") if "m9003" in one.text]
    assert len(asked) == (change != "second of two")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_document_is_a_message_of_its_own_session(platform: str) -> None:
    """The gateway tells the agent its name, and answers in the chat that it came from."""
    result = run_program(Program(1, 60, (Step(5.0, "write", 1, 4, "file=1"),), platform=platform), SETTINGS)
    assert result.violations == (), result.story()
    assert [one.text for one in result.trace.of("chat")] == ["501: 'told m4'"]


@pytest.mark.parametrize("after", range(5))
@pytest.mark.parametrize("asks", ["run 5", "bg 5", "say", "bgs 5"])
def test_an_event_that_a_model_sends_twice_is_no_second_call(after: int, asks: str) -> None:
    """Whichever event it is."""
    steps = (Step(4.0, "model", words=f"repeat after={after}"), Step(5.0, "write", 0, 1, asks))
    result = run_program(Program(1, 60, steps), SETTINGS)
    assert result.violations == (), result.story()


def test_retention_removes_runs_beside_live_work() -> None:
    """Those that have ended; the job of another one lives on, and is told."""
    steps = (Step(5.0, "run", 0, 1, "say"), Step(5.0, "run", 1, 2, "bg 60"), Step(6.0, "write", 0, 3, "bg 60"))
    result = run_program(Program(1, 90, steps, upkeep=True), SETTINGS)
    assert result.violations == (), result.story()
    assert "500: 'told m3'" in [one.text for one in result.trace.of("chat")]


def test_a_longer_program_has_as_many_actions_in_each_three_minutes() -> None:
    """And each has a number of its own."""
    short, long = make_program(6, nodes=3), make_program(6, nodes=3, minutes=30)
    assert len(long.steps) > 5 * len(short.steps)
    assert max(step.at for step in long.steps) > 1500
    numbers = Counter(step.number for step in long.steps if step.kind in ("write", "run", "web", "chat", "webhook"))
    assert max(numbers.values()) == 1


def test_seeds_choose_what_people_do() -> None:
    """Each habit is that of some seeds."""
    programs = [make_program(seed) for seed in range(160)]
    assert {program.busy for program in programs} == {"queue", "interrupt", "steer"}
    assert {program.start for program in programs} == {EPOCH, *CHANGES.values()}
    assert {program.upkeep for program in programs} == {True, False}
    words = [step.words for program in programs for step in program.steps]
    assert any(one.startswith("/stop all") for one in words)
    assert any(one.startswith("repeat after=") for one in words)
    assert any("file=1" in one for one in words)


@pytest.mark.slow
def test_long_worlds_of_several_nodes_keep_every_promise() -> None:
    """Thirty minutes with people and faults."""
    broken = {seed: found for seed in range(1, 7) if (found := run_seed(seed, nodes=3, minutes=30).violations)}
    assert broken == {}


def test_a_program_of_three_minutes_is_the_first_part_of_a_longer_one() -> None:
    """So that a seed means the same people."""
    short, long = make_program(8), make_program(8, minutes=6)
    first = [attrs.evolve(step) for step in short.steps if step.kind == "run"]
    assert all(step in long.steps for step in first)
