"""Shortens a failing program: fewer nodes, no MCP server, fewer steps, simpler steps and less time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

import attrs

from .habits import EPOCH
from .program import Program

_PARTICULAR: Final = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\S*\d\S*")
"""What differs between two occurrences of one defect: quoted text, and words with digits such as numbers, times, ids and marks."""

_RESERVE: Final = 1.0
"""Seconds that a shortened program lasts after its last step."""


def kind_of(violation: str) -> str:
    """Return a violation without its particulars: the invariant and the sentence, with `#` for numbers, ids and quoted text."""
    name, _, text = violation.partition(":")
    return f"{name}:{_PARTICULAR.sub('#', text)}"


def shrink(program: Program, fails: Callable[[Program], bool], *, attempts: int = 200) -> Program:
    """Return a shorter program for which `fails` is still true. `fails` is called at most `attempts` times.

    First makes the world smaller, because every later attempt costs less in a smaller world, then leaves out steps, in halves, in smaller parts and one by
    one, then options of steps, and at last the time after the last step.
    """
    left = attempts

    def shorten(candidates: Callable[[Program], Iterator[Program]]) -> bool:
        """Replace the program by a candidate that fails, and go on with its candidates. Return whether there was one."""
        nonlocal program, left
        before, tried = program, candidates(program)
        while left > 0 and (shorter := next(tried, None)) is not None:
            left -= 1
            if fails(shorter):
                program, tried = shorter, candidates(shorter)
        return program is not before

    def leave_out() -> bool:
        """Leave out steps that are not needed. Return whether there were any."""
        nonlocal program, left
        before = len(program.steps)
        size = max(1, before // 2)
        while left > 0:
            found, start = False, 0
            while start < len(program.steps) and left > 0:
                left -= 1
                shorter = program.without(range(start, start + size))
                if fails(shorter):
                    program, found = shorter, True
                else:
                    start += size
            if size == 1 and not found:
                break
            size = max(1, size // 2)
        return len(program.steps) < before

    shorten(_smaller_worlds)
    leave_out()
    shorten(_smaller_worlds)
    if shorten(_simpler_steps):
        leave_out()
    shorten(_earlier_ends)
    return program


def _smaller_worlds(program: Program) -> Iterator[Program]:
    """Yield the program with one node, with one node less, without an MCP server, and with the usual start, retention and handling of messages."""
    for nodes in sorted({1, program.nodes - 1}):
        if 1 <= nodes < program.nodes:
            yield attrs.evolve(program, nodes=nodes)
    if program.mcp:
        yield attrs.evolve(program, mcp=False)
    for simpler in ({"busy": "queue"}, {"start": EPOCH}, {"upkeep": False}):
        if (usual := attrs.evolve(program, **simpler)) != program:
            yield usual


def _simpler_steps(program: Program) -> Iterator[Program]:
    """Yield the program without one option of one action, such as the reconnect of a client. A fault keeps its options."""
    for index, step in enumerate(program.steps):
        words = step.words.split()
        for at, word in enumerate(words):
            if at and "=" in word and not step.is_fault:
                simpler = attrs.evolve(step, words=" ".join(words[:at] + words[at + 1 :]))
                yield attrs.evolve(program, steps=(*program.steps[:index], simpler, *program.steps[index + 1 :]))


def _earlier_ends(program: Program) -> Iterator[Program]:
    """Yield the program with an end just after its last step, or halfway to it."""
    last = max((step.at for step in program.steps), default=0.0) + _RESERVE
    if program.seconds - last > 2 * _RESERVE:
        yield attrs.evolve(program, seconds=last)
        yield attrs.evolve(program, seconds=round((last + program.seconds) / 2, 2))
