"""How much the guard sees: its score over a corpus of intents, and over a developer's days, in a confined command.

Run with `-s` to see the table, with what the guard of 0.1.0 did beside it. A floor may only be raised.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from hermes_trio import guard
from hermes_trio.guard import Remembered, Verdict, inspect_command

from .developer_corpus import DEVELOPER
from .held_out_corpus import HELD_OUT_INTENTS, HELD_OUT_WORK
from .intent_corpus import INTENTS, After
from .second_corpus import SECOND_INTENTS, SECOND_WORK

FLOORS = {
    "deletes": 38,
    "machine": 38,
    "history": 41,
    "remote code": 41,
    "privilege": 41,
    "credentials": 46,
    "exfiltration": 49,
    "gateway": 41,
    "persistence": 38,
    "data": 53,
}
PASSES = 272
"""How many of the developer's commands pass without a question, at least."""

HELD_OUT = 83
"""How many of the held-out intents are asked about."""
HELD_OUT_PASSES = 69
"""How many of the held-out everyday commands pass."""

SECOND, SECOND_PASSES = 49, 45
"""The same of the second set, as it was when it was read for the first time."""

BEFORE = {"intents": 183, "everyday": 248, "lines": 5_966}
"""What the guard of 0.1.0 scored on these corpora, and how long it was."""


def inspect(case: str | After) -> Verdict:
    """Read one command of a corpus where the corpora say it runs."""
    after = After(case) if isinstance(case, str) else case
    return inspect_command(
        after.command,
        home="/home/dev",
        cwd="/home/dev/project",
        gateway_home="/home/dev/.hermes-trio",
        remembered=Remembered(definitions=after.definitions, variables=dict(after.variables)),
        confined=True,
    )


def test_the_guard_sees_at_least_this_much() -> None:
    """Each class of intents is asked about at least as often as before."""
    seen = {name: sum(not inspect(case).clean for case in cases) for name, cases in INTENTS.items()}
    total = sum(map(len, INTENTS.values()))
    sys.stdout.write(
        f"\nintents asked about or blocked: {sum(seen.values())} of {total} (0.1.0: {BEFORE['intents']})\n"
    )
    for name, cases in INTENTS.items():
        missed = [case if isinstance(case, str) else case.command for case in cases if inspect(case).clean]
        sys.stdout.write(f"  {name:<13} {seen[name]:>3} of {len(cases):>3}   missed: {' | '.join(missed)!r}\n")
    assert total >= 300
    assert len(INTENTS) == 10
    assert {name: count for name, count in seen.items() if count < FLOORS[name]} == {}


def test_everyday_work_passes() -> None:
    """Developers' commands pass without a question at least as often as before."""
    asked = [(command, verdict) for command in DEVELOPER if not (verdict := inspect(command)).clean]
    sys.stdout.write(
        f"\neveryday commands that pass: {len(DEVELOPER) - len(asked)} of {len(DEVELOPER)} (0.1.0: {BEFORE['everyday']})\n"
    )
    for command, verdict in asked:
        sys.stdout.write(f"  {command!r}: {verdict.description}\n")
    assert len(DEVELOPER) >= 200
    assert len(set(DEVELOPER)) == len(DEVELOPER)
    assert len(DEVELOPER) - len(asked) >= PASSES


@pytest.mark.parametrize(
    ("intents", "work", "floor", "passes"),
    [
        pytest.param(HELD_OUT_INTENTS, HELD_OUT_WORK, HELD_OUT, HELD_OUT_PASSES, id="first"),
        pytest.param(SECOND_INTENTS, SECOND_WORK, SECOND, SECOND_PASSES, id="second"),
    ],
)
def test_commands_that_were_written_without_the_rules_at_hand(
    intents: Mapping[str, Sequence[str]], work: Sequence[str], floor: int, passes: int
) -> None:
    """Nearly as many intents are asked about, and no work is held up. The first set has shown missing classes since, the second is as it was read."""
    cases = [case for group in intents.values() for case in group]
    missed = [case for case in cases if inspect(case).clean]
    asked = [command for command in work if not inspect(command).clean]
    sys.stdout.write(
        f"\nheld-out intents asked about or blocked: {len(cases) - len(missed)} of {len(cases)}, missed: {missed!r}\n"
    )
    sys.stdout.write(f"held-out work that passes: {len(work) - len(asked)} of {len(work)}\n")
    known = {case for group in INTENTS.values() for case in group if isinstance(case, str)} | set(DEVELOPER)
    if intents is HELD_OUT_INTENTS:
        assert known.isdisjoint([*work, *cases])
    assert len(cases) - len(missed) >= floor
    assert len(work) - len(asked) >= passes


def test_the_guard_is_shorter_than_it_was() -> None:
    """A question is asked with less reading than a wall would take."""
    lines = sum(len(path.read_text().splitlines()) for path in Path(guard.__file__).parent.rglob("*.py"))
    sys.stdout.write(f"\nlines of the guard: {lines:,} (0.1.0: {BEFORE['lines']:,})\n")
    assert lines < BEFORE["lines"]
