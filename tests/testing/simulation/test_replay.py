"""A seed gives the same trace alone, after others, and in any order."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import count, islice

import pytest

from hermes_trio.testing.simulation import Program, make_program, run_seed

DIGESTS = """
import sys
from hermes_trio.testing.simulation import run_seed
for seed in map(int, sys.argv[1:]):
    before = len(sys.modules)
    print(seed, run_seed(seed).trace.digest(), len(sys.modules) - before, flush=True)
"""


def first_seed(wanted: Callable[[Program], bool]) -> int:
    """Return the first seed with such a program."""
    return next(seed for seed in count(1) if wanted(make_program(seed)))


def is_plain(program: Program) -> bool:
    """Return whether a program has Telegram and no MCP server."""
    return program.platform == "telegram" and not program.mcp


WITH_MCP = first_seed(lambda program: program.mcp)
WITH_LATE_IMPORTS = first_seed(lambda program: program.mcp and program.platform == "slack")
"""It imports modules that no plain program does."""


def replay(*seeds: int) -> dict[int, tuple[str, int]]:
    """Run seeds in this order in a new process: the digest of each, and how many modules it imported."""
    command = [sys.executable, "-c", DIGESTS, *map(str, seeds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [line.split() for line in done.stdout.splitlines()]
    return {int(seed): (digest, int(modules)) for seed, digest, modules in found}


def test_a_seed_alone_is_the_seed_after_others() -> None:
    """Here others have run before, in this process; there it is the first."""
    run_seed(1)
    assert run_seed(WITH_MCP).trace.digest() == replay(WITH_MCP)[WITH_MCP][0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [17, 18, WITH_MCP, WITH_LATE_IMPORTS])
def test_a_seed_alone_is_the_seed_after_twenty_others(seed: int) -> None:
    """Also one with an MCP server, and one that imports modules that no earlier one has imported."""
    others = islice((other for other in count(100) if is_plain(make_program(other))), 20)
    alone, later = replay(seed), replay(*others, seed)
    assert alone[seed][0] == later[seed][0]
    if seed == WITH_LATE_IMPORTS:
        assert later[seed][1] > 0
