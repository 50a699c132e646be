"""A seed gives the same trace alone, after others, and in any order."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hermes_trio.testing.simulation import make_program, run_seed

DIGESTS = """
import sys
from hermes_trio.testing.simulation import run_seed
for seed in map(int, sys.argv[1:]):
    before = len(sys.modules)
    print(seed, run_seed(seed).trace.digest(), len(sys.modules) - before, flush=True)
"""

WITH_MCP = 2
WITH_LATE_IMPORTS = 73
"""The first seed that continues a conversation of the terminal, which imports its adapter."""


def replay(*seeds: int) -> dict[int, tuple[str, int]]:
    """Run seeds in this order in a new process: the digest of each, and how many modules it imported."""
    command = [sys.executable, "-c", DIGESTS, *map(str, seeds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [line.split() for line in done.stdout.splitlines()]
    return {int(seed): (digest, int(modules)) for seed, digest, modules in found}


def test_a_seed_alone_is_the_seed_after_others() -> None:
    """Here others have run before, in this process; there it is the first."""
    assert make_program(WITH_MCP).mcp
    run_seed(1)
    assert run_seed(WITH_MCP).trace.digest() == replay(WITH_MCP)[WITH_MCP][0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [17, 18, WITH_MCP, WITH_LATE_IMPORTS])
def test_a_seed_alone_is_the_seed_after_twenty_others(seed: int) -> None:
    """Also one with an MCP server, and one that imports modules that no earlier one has imported."""
    alone, later = replay(seed), replay(*range(100, 120), seed)
    assert alone[seed][0] == later[seed][0]
    if seed == WITH_LATE_IMPORTS:
        assert later[seed][1] > 0
