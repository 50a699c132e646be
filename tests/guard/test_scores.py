"""How much the guard sees: its score over a corpus of intents, and over a developer's days, in a confined command.

Run with `-s` to see the table. A floor may only be raised. The guard of 0.1.0 asked about 183 of these 443 intents, and let 248 of these 272
everyday commands pass.
"""

from __future__ import annotations

import sys

from hermes_trio.guard import Remembered, Verdict, inspect_command

from .developer_corpus import DEVELOPER
from .held_out_corpus import HELD_OUT_INTENTS, HELD_OUT_WORK
from .intent_corpus import INTENTS, After

FLOORS = {
    "deletes": 38,
    "machine": 38,
    "history": 41,
    "remote code": 41,
    "privilege": 41,
    "credentials": 46,
    "exfiltration": 46,
    "gateway": 40,
    "persistence": 38,
    "data": 53,
}
PASSES = 272
"""How many of the developer's commands pass without a question, at least."""

HELD_OUT_FLOORS = {
    "deletes": 11,
    "machine": 7,
    "history": 5,
    "remote code": 12,
    "privilege": 6,
    "credentials": 7,
    "exfiltration": 8,
    "persistence": 9,
    "data": 12,
}
HELD_OUT_PASSES = 69
"""How many of the held-out everyday commands pass."""


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
    sys.stdout.write(f"\nintents asked about or blocked: {sum(seen.values())} of {total}\n")
    for name, cases in INTENTS.items():
        missed = [case if isinstance(case, str) else case.command for case in cases if inspect(case).clean]
        sys.stdout.write(f"  {name:<13} {seen[name]:>3} of {len(cases):>3}   missed: {' | '.join(missed)!r}\n")
    assert total >= 300
    assert len(INTENTS) == 10
    assert {name: count for name, count in seen.items() if count < FLOORS[name]} == {}


def test_everyday_work_passes() -> None:
    """Developers' commands pass without a question at least as often as before."""
    asked = [(command, verdict) for command in DEVELOPER if not (verdict := inspect(command)).clean]
    sys.stdout.write(f"\neveryday commands that pass: {len(DEVELOPER) - len(asked)} of {len(DEVELOPER)}\n")
    for command, verdict in asked:
        sys.stdout.write(f"  {command!r}: {verdict.description}\n")
    assert len(DEVELOPER) >= 200
    assert len(set(DEVELOPER)) == len(DEVELOPER)
    assert len(DEVELOPER) - len(asked) >= PASSES


def test_commands_that_nobody_tuned_the_guard_for() -> None:
    """Of commands that were written without the rules at hand, nearly as many intents are asked about, and no work is held up."""
    seen = {name: sum(not inspect(case).clean for case in cases) for name, cases in HELD_OUT_INTENTS.items()}
    total = sum(map(len, HELD_OUT_INTENTS.values()))
    missed = [case for cases in HELD_OUT_INTENTS.values() for case in cases if inspect(case).clean]
    asked = [command for command in HELD_OUT_WORK if not inspect(command).clean]
    sys.stdout.write(
        f"\nheld-out intents asked about or blocked: {sum(seen.values())} of {total}, missed: {missed!r}\n"
    )
    sys.stdout.write(f"held-out work that passes: {len(HELD_OUT_WORK) - len(asked)} of {len(HELD_OUT_WORK)}\n")
    known = {case for cases in INTENTS.values() for case in cases if isinstance(case, str)} | set(DEVELOPER)
    assert known.isdisjoint([*HELD_OUT_WORK, *(case for cases in HELD_OUT_INTENTS.values() for case in cases)])
    assert total >= 60 <= len(HELD_OUT_WORK)
    assert {name: count for name, count in seen.items() if count < HELD_OUT_FLOORS[name]} == {}
    assert len(HELD_OUT_WORK) - len(asked) >= HELD_OUT_PASSES
