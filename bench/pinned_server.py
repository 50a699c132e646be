"""A server process on a core of its own, as a benchmark sees it: started, measured from outside, ended.

The machine is shared, so wall-clock figures are compared only within one round, and beside them stands the CPU time that the server used for a
request, which others' load changes little. Everything here is read from /proc: nothing is added to the server that is measured.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

__all__ = ["LOAD_CORE", "REFERENCE_KEY", "SERVER_CORE", "PinnedServer", "baseline", "pinned", "product", "reference"]

ROOT = Path(__file__).parent.parent
REFERENCE_PYTHON = ROOT / ".bench-venv" / "bin" / "python"
REFERENCE_KEY = "bench-key-0123456789abcdef0123456789abcdef"
"""The one key of every server that is measured."""

_CORES = sorted(os.sched_getaffinity(0))
SERVER_CORE, LOAD_CORE = _CORES[0], _CORES[-1]
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
READY_SECONDS = 60.0
END_SECONDS = 20.0


@attrs.define
class PinnedServer:
    """A running server. `facts` is what it printed about itself."""

    name: str
    process: subprocess.Popen[str]
    port: int
    facts: dict[str, Any]

    @property
    def url(self) -> str:
        """Return its address."""
        return f"http://127.0.0.1:{self.port}"

    def cpu_seconds(self) -> float:
        """User and system time of all of its threads so far. Its resolution is a clock tick."""
        return cpu_seconds(self.process.pid)

    def rss_bytes(self) -> int:
        """Resident memory."""
        return rss_bytes(self.process.pid)

    def descriptors(self) -> int:
        """Open descriptors."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def threads(self) -> int:
        """Threads."""
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def children(self) -> list[int]:
        """Processes whose parent it is."""
        path = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        return [int(word) for word in Path(path).read_text().split()]


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    # schedstat counts in nanoseconds, but a thread that has ended takes its count with it; stat keeps it.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE


@contextmanager
def pinned(name: str, command: Sequence[str], *, core: int = SERVER_CORE, port: int = 0) -> Iterator[PinnedServer]:
    """Start a server on one core; it must print a line `READY`, with facts in JSON if it has any. It is ended at the end of the block."""
    process = subprocess.Popen(
        ["taskset", "-c", str(core), *command], stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    )
    assert process.stdout is not None
    try:
        facts: dict[str, Any] = {}
        deadline = time.monotonic() + READY_SECONDS
        while True:
            line = process.stdout.readline()
            if line.startswith("READY"):
                facts = json.loads(line[5:].strip() or "{}")
                break
            if not line or time.monotonic() > deadline:
                raise RuntimeError(f"{name} did not start; run it by hand: {' '.join(command)}")
        yield PinnedServer(name, process, facts.get("port", port), facts)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdout.close()


def product(
    *, store: str = "durable", sleep: float = 0.0, home: Path | None = None, more: Sequence[str] = ()
) -> list[str]:
    """The command that serves the product."""
    command = [sys.executable, "-m", "bench.product_server", "--store", store, "--sleep", str(sleep), *more]
    return command if home is None else [*command, "--home", str(home)]


def reference(port: int, *, sleep: float = 0.0, cap: str = "0") -> list[str] | None:
    """The command that serves the reference, or None if it is not installed. `cap` is its limit of turns at once; `default` is its own."""
    if not REFERENCE_PYTHON.exists():
        return None
    script = str(ROOT / "bench" / "serve_reference.py")
    return [str(REFERENCE_PYTHON), script, str(port), "--sleep", str(sleep), "--cap", cap]


def baseline(name: str, port: int, *, sleep: float = 0.0) -> list[str]:
    """The command that serves a bare server: `uvicorn` (with Starlette) or `quart` (stock Quart-Trio on stock Hypercorn)."""
    return [sys.executable, "-m", "bench.baseline_server", name, str(port), "--sleep", str(sleep)]
