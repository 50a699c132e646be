"""Count the instructions of one turn in two checkouts: `make bench-instructions BEFORE=path`, with the store in memory, in a file, and behind the server.

Times on a shared machine differ by a third from minute to minute; the number of instructions differs by less: by a twentieth in memory, and more with
a store in a file, where it depends on how many turns share a commit. Compare on an idle machine only. They are counted by valgrind, which runs a
program some fifty times slower. Each process runs twice, with fewer and with more turns: the difference is what the turns cost, without the start of
the process. A cache that works better or a disk that waits is not seen: `make bench-compare` measures time.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from bench.compare import CLIENTS
from bench.load import CHAT_BODY, free_port, generate, request_bytes

TURNS = {"memory": (100, 500), "file": (100, 300)}
"""The turns of the two runs of a process."""
SERVED_SECONDS = (1.0, 7.0)
"""How long the server is under load in its two runs."""

_COLLECTED = re.compile(r"Collected : (\d+)")


def _valgrind(checkout: Path, *words: str) -> subprocess.Popen[str]:
    """Start a Python program of a checkout whose instructions are counted."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONHASHSEED": "0"}
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", sys.executable, *words]
    return subprocess.Popen(
        command, cwd=checkout, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _counted(process: subprocess.Popen[str]) -> int:
    """Wait for the end of the process; return the number of its instructions."""
    said = process.communicate()[1]
    found = _COLLECTED.search(said)
    if process.returncode != 0 or found is None:
        raise SystemExit(f"valgrind ended with {process.returncode} and without a count; it said:\n{said[-2000:]}")
    return int(found[1])


def of_a_turn(checkout: Path, kind: str) -> float:
    """Return the instructions of one turn of an embedded runtime."""
    few, many = TURNS[kind]
    program = str(Path(__file__).with_name("compare.py"))
    less, more = (_counted(_valgrind(checkout, program, "--measure", kind, str(turns))) for turns in (few, many))
    return (more - less) / (many - few)


def of_a_request(checkout: Path) -> float:
    """Return the instructions of one durable request behind the server."""
    runs: list[tuple[int, int]] = []
    for seconds in SERVED_SECONDS:
        port = free_port()
        words = ["-m", "bench.product_server", "--store", "durable", "--drain", "1", "--port", str(port)]
        with _valgrind(checkout, *words) as server:
            assert server.stdout is not None
            while not server.stdout.readline().startswith("READY"):
                pass
            url, request = f"http://127.0.0.1:{port}", request_bytes(CHAT_BODY)
            answered = generate(url, CLIENTS, seconds, request).answered
            server.terminate()
            runs.append((_counted(server), answered))
    (less, few), (more, many) = runs
    return (more - less) / max(1, many - few)


def count(checkout: Path, kind: str) -> float:
    """Return the instructions of one turn of this kind."""
    return of_a_request(checkout) if kind == "serve" else of_a_turn(checkout, kind)


def main() -> int:
    """Count in this checkout, and in the other one that is named."""
    if shutil.which("valgrind") is None:
        print("valgrind, which counts the instructions, is not installed (Debian, Ubuntu: apt install valgrind)")
        return 1
    here = Path(__file__).absolute().parent.parent
    before = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else None
    for kind in (*TURNS, "serve"):
        mine = count(here, kind)
        line = f"{kind}: {mine:,.0f} instructions"
        if before is not None:
            theirs = count(before, kind)
            line += f", {theirs:,.0f} before, ratio {mine / theirs:.3f}"
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
