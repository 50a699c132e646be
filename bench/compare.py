"""Compare the CPU of one turn in two checkouts: `make bench-compare BEFORE=path`.

The rounds alternate: the checkout before, this one, and the one before again; each is a process of its own. What is printed is the ratio of the
minima, and beside it the ratio of the checkout before to itself (A/A), which says how far the machine can be trusted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 20
TURNS = {"memory": 1500, "file": 400}


async def measure(kind: str) -> None:
    """Print the microseconds of CPU that a turn takes, with the store in memory or in a file."""
    from hermes_trio import Runtime, SessionContext, Turn
    from hermes_trio.store import open_store

    async def answer(turn: Turn) -> str:
        return "ok"

    with tempfile.TemporaryDirectory() as home:
        path = None if kind == "memory" else Path(home) / "state.db"
        async with Runtime(agent=answer, store=open_store(path, maintenance=False)) as runtime:
            sessions = [SessionContext(session_id=f"s{number}") for number in range(50)]
            for number in range(100):
                await runtime.run_turn("x", sessions[number % 50])
            began = time.process_time()
            for number in range(TURNS[kind]):
                await runtime.run_turn("x", sessions[number % 50])
            print((time.process_time() - began) / TURNS[kind] * 1e6)


def one_round(checkout: Path, kind: str) -> float:
    """One process of a checkout."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, __file__, "--measure", kind]
    ended = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=True)
    return float(ended.stdout)


def main() -> None:
    """Compare the checkout that is named with this one."""
    before, after = Path(sys.argv[1]).absolute(), Path(__file__).absolute().parent.parent
    for kind in TURNS:
        first, mine, second = [], [], []
        for _ in range(ROUNDS):
            first.append(one_round(before, kind))
            mine.append(one_round(after, kind))
            second.append(one_round(before, kind))
        ratio, same = min(mine) / min(first), min(second) / min(first)
        print(f"{kind}: {min(first):.1f} µs before, {min(mine):.1f} µs after, ratio {ratio:.3f}, A/A {same:.3f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        import trio

        trio.run(measure, sys.argv[2])
    else:
        main()
