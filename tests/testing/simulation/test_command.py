"""`hermes-trio simulate`: what it prints of a world that breaks a promise, what it refuses, and agents and invariants of a user."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hermes_trio.commands.options import CommandFailed
from hermes_trio.commands.simulate import simulate
from hermes_trio.testing.simulation import (
    INVARIANTS,
    Program,
    Step,
    World,
    WorldSettings,
    run_seed,
    run_seeds,
    shrink,
    versions,
)
from hermes_trio.testing.simulation.shrinker import kind_of

from .mutants import MUTANTS, patched

HERE = __name__


async def polite(turn: Any) -> str:
    """An agent."""
    return f"you said: {turn.input.text}"


def nobody_is_thanked(world: World) -> Iterator[str]:
    """An invariant that does not hold."""
    for message in world.chat.messages():
        if "you said" in message.text:
            yield f"{message.text!r} at {world.trace.last.at}"
            return


def run_line(line: str) -> None:
    """Run a command line that the command has printed."""
    program, command, *words = shlex.split(line)
    assert (program, command) == ("hermes-trio", "simulate")
    given: dict[str, Any] = {
        name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)
    }
    kinds: dict[str, Any] = {"seed": int, "nodes": int, "minutes": float}
    for name in kinds.keys() & given.keys():
        given[name] = kinds[name](given[name])
    simulate(**given)


def test_a_failure_is_told_shortened_and_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints the invariant, a story, a shorter program with the same violation and a command; the command gives the same violation again."""
    invariant, patches = MUTANTS["a transcript without the results of tools"]
    picture, report = tmp_path / "coverage.svg", tmp_path / "report.txt"
    with patched(*patches):
        with pytest.raises(CommandFailed, match=invariant) as failed:
            simulate(first=16, seeds=1, nodes=2, faults="store", minutes=1.0, picture=picture, report=report)
        out, progress = capsys.readouterr()
        again = next(line.partition(": ")[2] for line in out.splitlines() if line.startswith("again: "))
        assert "--seed 16 --minutes 1 --faults store --nodes 2" in again
        with pytest.raises(CommandFailed) as repeated:
            run_line(again)
        told = capsys.readouterr().out
    assert str(failed.value) == f"1 of 1 seeds: {repeated.value}"
    assert progress.count(f"{repeated.value}\n") == 1
    for text in (out, told):
        assert versions() in text
        (numbers,) = re.findall(r"^shortened from (\d+) steps to (\d+)$", text, re.MULTILINE)
        before, after = map(int, numbers)
        assert after < before
        assert f", {after} steps:" in text
        violations = [line for line in text.splitlines() if line.startswith(invariant)]
        # Of the same invariant: this world has violations of several kinds.
        assert violations
    assert " s  chat" in out
    written = report.read_text()
    assert "finish_turn" in written
    assert "again" not in written
    named = {text.text for text in ElementTree.parse(picture).iter() if text.tag.endswith("text")}
    assert {"store verb x fault", "state x fault", "finish_turn", "turn open", "before", "store before"} <= named


def test_a_program_is_made_smaller_in_every_way() -> None:
    """Fewer nodes, no MCP server, the two steps that matter without options that do not, and no more time than they need."""
    steps = [Step(float(at), "write", 0, at, "say") for at in range(1, 20)]
    steps[7] = Step(8.0, "store", 1, 8, "finish_turn before times=1")
    steps[12] = Step(13.0, "run", 0, 13, "say session=1 reconnect=1")
    tried = 0

    def fails(program: Program) -> bool:
        nonlocal tried
        tried += 1
        kinds = {step.kind: step.words for step in program.steps}
        return "store" in kinds and "session=1" in kinds.get("run", "") and program.nodes > 1

    found = shrink(Program(1, 180, tuple(steps), 3, "telegram", True), fails)
    assert found == Program(
        1,
        14.0,
        (Step(8.0, "store", 1, 8, "finish_turn before times=1"), Step(13.0, "run", 0, 13, "say session=1")),
        nodes=2,
    )
    assert tried < 60


def test_violations_are_the_same_in_spite_of_numbers_and_names() -> None:
    """The same sentence about other rows is the same violation; another sentence of the same invariant is not."""
    first, other = "8 calm: the job j17 is 'running' after 600 s", "8 calm: the job ab4 is 'starting' after 12.5 s"
    assert kind_of(first) == kind_of(other) == "8 calm: the job # is # after # s"
    assert kind_of("8 calm: a lane is held") != kind_of("8 calm: a process runs")


@pytest.mark.parametrize("name", ["seeds", "first", "workers", "picture", "report"])
def test_options_of_many_worlds_are_refused_with_one(name: str) -> None:
    """Instead of ignored."""
    given: dict[str, Any] = {"seed": 3, name: Path("x") if name in ("picture", "report") else 2}
    with pytest.raises(CommandFailed, match=f"--seed runs one world: --{name} cannot"):
        simulate(**given)


@pytest.mark.parametrize(
    ("option", "name", "told"),
    [
        ("agent", "no_colon", "must be MODULE:NAME"),
        ("agent", "no_such_module:agent", "No module named"),
        ("invariant", f"{HERE}:missing", "has no attribute"),
        ("invariant", f"{HERE}:HERE", "must be callable"),
    ],
)
def test_an_agent_or_invariant_that_cannot_be_imported_is_named(option: str, name: str, told: str) -> None:
    """With what is wrong."""
    given: dict[str, Any] = {option: [name] if option == "invariant" else name}
    with pytest.raises(CommandFailed, match=told):
        simulate(seeds=1, **given)


def test_an_agent_and_an_invariant_of_a_user(capsys: pytest.CaptureFixture[str]) -> None:
    """The command runs seeds with them, and the command that it prints names them."""
    with pytest.raises(CommandFailed, match="nobody_is_thanked"):
        simulate(seeds=1, agent=f"{HERE}:polite", invariant=[f"{HERE}:nobody_is_thanked"], faults="none", nodes=1)
    out = capsys.readouterr().out
    assert f"--agent {HERE}:polite --invariant {HERE}:nobody_is_thanked" in out


def test_seeds_with_settings_and_invariants() -> None:
    """`run_seed` and `run_seeds` take them; several workers import them by name, and say so if they cannot."""
    settings = WorldSettings(agent=polite, calm_seconds=120)
    mine = {**INVARIANTS, "thanks": nobody_is_thanked}
    assert run_seed(1, settings=settings).violations == ()
    assert run_seed(1, settings=settings, invariants=mine).invariants == {"thanks"}
    with pytest.raises(ValueError, match="functions of a module"):
        run_seeds([1, 2], workers=2, invariants={"mine": lambda world: ()})


@pytest.mark.slow
def test_workers_run_seeds_with_settings_and_invariants() -> None:
    """Other processes get the same agent and the same invariants."""
    settings = WorldSettings(agent=polite)
    mine = {"thanks": nobody_is_thanked}
    here = run_seeds(range(1, 13), settings=settings, invariants=mine)
    there = run_seeds(range(1, 13), workers=2, settings=settings, invariants=mine)
    assert here.failures == there.failures != {}
