"""Shows which parts of the program use the CPU time of a turn: `python -m bench.profile_turn [--store memory] [--clients 32]`.

The product answers instant chat completions twice: as it is, for the CPU time of a turn, and under cProfile, for the shares of it. A profiler makes small
Python functions look more expensive than they are, so the shares are for finding things, and the CPU time for believing them. The table adds up the
time that is spent in each part's own code; system calls and SQLite show up as built-in functions and are listed by themselves.
"""

from __future__ import annotations

import pstats
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, cast

from bench.load import drive
from bench.pinned_server import PinnedServer, pinned, product
from bench.report import Report, arguments_for

PARTS = {
    "hermes_trio/http/server/": "server: connection, framing, answer",
    "hermes_trio/http/": "front end: key, body, session, rendering",
    "hermes_trio/runtime/": "runtime: turn, tree, outcome",
    "hermes_trio/store/": "store: the turn's rows",
    "bench/": "the agent",
    "trio/": "Trio: scheduler, scopes, nursery, epoll",
    "outcome/": "Trio: scheduler, scopes, nursery, epoll",
    "trio._core": "Trio: scheduler, scopes, nursery, epoll",
    "outcome._impl": "Trio: scheduler, scopes, nursery, epoll",
    "contextlib.py": "Trio: scheduler, scopes, nursery, epoll",
    "hermes_trio.": "making attrs objects",
    "hermes_trio/": "wiring",
}
BUILT_IN = {
    "'send' of '_socket": "system calls: send, recv, epoll",
    "'recv_into' of '_socket": "system calls: send, recv, epoll",
    "of 'select.epoll'": "system calls: send, recv, epoll",
    "of 'apsw.": "SQLite",
    "msgspec": "JSON",
    "openssl_sha256": "hashes",
}


def part_of(file: str, name: str) -> str:
    """Return the part that a function belongs to."""
    if file == "~":
        return next((part for mark, part in BUILT_IN.items() if mark in name), "other built-in functions")
    return next((part for mark, part in PARTS.items() if mark in file), "the rest")


def profile(store: str, clients: int, seconds: int, path: Path) -> tuple[float, int]:
    """CPU microseconds of a turn without the profiler; writes a profile, and returns its number of turns too."""
    with pinned("as it is", product(store=store)) as server:
        drive(server.url, clients, 1)
        cpu = server.cpu_seconds()
        load = drive(server.url, clients, seconds)
        cost = 1e6 * (server.cpu_seconds() - cpu) / load.answered
    with pinned("under the profiler", product(store=store, more=["--profile", str(path)])) as server:
        turns = drive(server.url, clients, seconds).answered
        _write_profile(server)
    return cost, turns


def _write_profile(server: PinnedServer) -> None:
    server.process.send_signal(signal.SIGUSR1)
    assert server.process.stdout is not None
    while "PROFILED" not in (line := server.process.stdout.readline()):
        if not line:
            raise RuntimeError("the server ended before it had written its profile")


def main() -> int:
    """Profile a turn and print where its time goes."""
    parser = arguments_for(__doc__)
    parser.add_argument("--store", choices=["memory", "durable"], default="memory")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--functions", type=int, default=20, help="how many functions to list")
    args = parser.parse_args()
    report = Report(f"profile-{args.store}", args.results, args.plot)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "turn.prof"
        cost, turns = profile(args.store, args.clients, 2 if args.quick else 5, path)
        stats = cast(
            "dict[tuple[str, int, str], tuple[int, int, float, float, Any]]", cast("Any", pstats.Stats(str(path))).stats
        )
    total = sum(times[2] for times in stats.values())
    parts: Counter[str] = Counter()
    for (file, _, name), times in stats.items():
        parts[part_of(file, name)] += cast("Any", times[2])  # a Counter adds fractions as well
    rows = [[part, f"{100 * own / total:.0f} %", f"{cost * own / total:.0f}"] for part, own in parts.most_common()]
    report.table(f"A turn of {cost:.0f} us", ["", "share", "us"], rows)
    functions = sorted(stats.items(), key=lambda item: -item[1][2])[: args.functions]
    report.table(
        "Functions, by their own time",
        ["", "calls a turn", "share"],
        [
            [f"{Path(file).name}:{line} {name}"[:70], f"{times[1] / turns:.1f}", f"{100 * times[2] / total:.1f} %"]
            for (file, line, name), times in functions
        ],
    )
    report.figures |= {"cpu_us": cost, "shares": {part: own / total for part, own in parts.most_common()}}
    return report.finish(f"{cost:.0f} us of CPU a turn, {args.store} store, {args.clients} clients")


if __name__ == "__main__":
    sys.exit(main())
