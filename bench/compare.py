"""Compare the CPU of one turn in two checkouts: `make bench-compare BEFORE=path`, with the store in memory, in a file, and behind the server.

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

ROUNDS = int(os.environ.get("ROUNDS", "20"))
TURNS = {"memory": 1500, "file": 400}
CLIENTS, SECONDS = 32, 2.0
"""The load on the server, whose store is durable."""


async def measure(kind: str, turns: int) -> None:
    """Print the microseconds of CPU that a turn takes, on average of so many, with the store in memory or in a file."""
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
            for number in range(turns):
                await runtime.run_turn("x", sessions[number % 50])
            print((time.process_time() - began) / turns * 1e6)


def one_round(checkout: Path, kind: str) -> float:
    """One process of a checkout."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, __file__, "--measure", kind, str(TURNS[kind])]
    ended = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=True)
    return float(ended.stdout)


def served_round(checkout: Path, kind: str) -> float:
    """One server of a checkout: the microseconds of CPU that it takes for a request."""
    from bench.load import CHAT_BODY, free_port, generate, request_bytes
    from bench.pinned_server import cpu_seconds

    port = free_port()
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-m", "bench.product_server", "--store", "durable", "--port", str(port)]
    with subprocess.Popen(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            while not server.stdout.readline().startswith("READY"):
                pass
            url, request = f"http://127.0.0.1:{port}", request_bytes(CHAT_BODY)
            generate(url, CLIENTS, SECONDS / 4, request)
            began = cpu_seconds(server.pid)
            answered = generate(url, CLIENTS, SECONDS, request).answered
            return (cpu_seconds(server.pid) - began) / max(1, answered) * 1e6
        finally:
            server.terminate()
            server.communicate()


def main() -> None:
    """Compare the checkout that is named with this one."""
    before, after = Path(sys.argv[1]).absolute(), Path(__file__).absolute().parent.parent
    sys.path.insert(0, str(after))
    for kind in (*TURNS, "serve"):
        measured = served_round if kind == "serve" else one_round
        first, mine, second = [], [], []
        for _ in range(ROUNDS):
            first.append(measured(before, kind))
            mine.append(measured(after, kind))
            second.append(measured(before, kind))
        ratio, same = min(mine) / min(first), min(second) / min(first)
        print(
            f"{kind}: {min(first):.1f} µs before, {min(mine):.1f} µs after, ratio {ratio:.3f}, A/A {same:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        import trio

        trio.run(measure, sys.argv[2], int(sys.argv[3]))
    else:
        main()
