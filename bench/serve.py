"""The whole server against the reference and against what a user would pick instead: `python -m bench.serve [--quick]` or `make bench-serve`.

Ours is the full product (auth, limits, tree, SQLite) with an agent that answers at once or after 0.2 s, in two columns: the store in memory (the
reference's fake agent stores nothing either) and durable, one commit a turn. Beside it run the reference, bare uvicorn + Starlette and stock Quart-Trio on
stock Hypercorn. Every server has one core to itself, the load comes from another core (wrk, or our own generator), and all take turns within a round.

The machine is shared: read the ratios, which are taken within a round, and the CPU time that a server used for a request, which others' load changes
least. What a commit costs on this disk is measured in the same rounds, because one client with a durable store waits for nothing else. The quick run leaves
out the isolation of sessions, which `bench.http_isolation` measures too.
"""

from __future__ import annotations

import os
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import apsw
import attrs
from rich.progress import Progress

from bench.http_isolation import measure as measure_isolation
from bench.load import CHAT_BODY, Load, drive, free_port, have_wrk, raise_descriptor_limit, request_bytes
from bench.pinned_server import LOAD_CORE, PinnedServer, baseline, pinned, product, reference
from bench.report import Report, arguments_for, progress, spread
from bench.start import Start, measure_start, start_bounds

MEMORY, DURABLE, REFERENCE, UVICORN, QUART = "ours, memory", "ours, durable", "reference", "uvicorn", "stock Quart-Trio"
CLIENTS = (1, 32, 256)
WAIT = 0.2
CROWD = 1000
CONNECTIONS, ACTIVE = 10_000, 200
ISOLATED = 2000


@attrs.frozen
class Sample:
    """One server under load in one round."""

    load: Load
    cpu: float
    """CPU microseconds a request."""
    share: float
    """The share of its core that it got; other processes use the rest."""
    grown: int
    """Bytes by which its memory grew at most, from before the load."""


def _command(name: str, port: int, sleep: float) -> list[str] | None:
    if name == MEMORY:
        return product(store="memory", sleep=sleep, more=["--port", str(port)])
    if name == DURABLE:
        return product(store="durable", sleep=sleep, more=["--port", str(port)])
    if name == REFERENCE:
        return reference(port, sleep=sleep, cap="default" if sleep else "0")
    return baseline("uvicorn" if name == UVICORN else "quart", port, sleep=sleep)


def _start(stack: ExitStack, names: list[str], sleep: float) -> dict[str, PinnedServer]:
    servers: dict[str, PinnedServer] = {}
    for name in names:
        port = free_port()
        command = _command(name, port, sleep)
        if command is not None:
            servers[name] = stack.enter_context(pinned(name, command, port=port))
    return servers


def _warm_up(server: PinnedServer, count: int) -> None:
    request = request_bytes(CHAT_BODY)
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        for _ in range(count):
            sock.sendall(request)
            sock.recv(65536)


class _Peak(threading.Thread):
    """Samples the memory of a server while it is under load."""

    def __init__(self, server: PinnedServer) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.most = 0
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.05):
            self.most = max(self.most, self.server.rss_bytes())


def _sample(server: PinnedServer, clients: int, seconds: int) -> Sample:
    before, cpu, began = server.rss_bytes(), server.cpu_seconds(), time.perf_counter()
    peak = _Peak(server)
    peak.start()
    try:
        load = drive(server.url, clients, seconds)
    finally:
        peak.done.set()
        peak.join()
    used = server.cpu_seconds() - cpu
    took = time.perf_counter() - began
    return Sample(load, 1e6 * used / max(1, load.answered), used / took, peak.most - before)


def commit_seconds(folder: Path, count: int = 40) -> float:
    """The median time of a bare durable SQLite commit on this disk."""
    db = apsw.Connection(str(folder / "commit.db"))
    try:
        db.pragma("journal_mode", "wal")
        db.pragma("synchronous", "full")
        db.execute("CREATE TABLE IF NOT EXISTS rows (value)")
        times: list[float] = []
        for _ in range(count):
            began = time.perf_counter()
            db.execute("INSERT INTO rows VALUES (?)", ("x" * 300,))
            times.append(time.perf_counter() - began)
        return statistics.median(times)
    finally:
        db.close()


def _let_end(server: PinnedServer) -> None:
    """Wait until a server is idle after its clients have disconnected: the next server uses the same core."""
    for _ in range(40):
        cpu = server.cpu_seconds()
        time.sleep(0.1)
        if server.cpu_seconds() - cpu < 0.02:
            return


Samples = dict[tuple[str, int], list[Sample]]


def measure(
    names: list[str], cases: tuple[int, ...], sleep: float, rounds: int, seconds: int, bar: Progress
) -> Samples:
    """All servers at all numbers of clients, in turns."""
    samples: Samples = defaultdict(list)
    what = "turns at once" if not sleep else f"turns of {sleep:g} s"
    task = bar.add_task(what, total=rounds * len(cases) * len(names))
    with ExitStack() as stack:
        servers = _start(stack, names, sleep)
        for server in servers.values():
            _warm_up(server, 5 if sleep else 100)
        for _ in range(rounds):
            for clients in cases:
                for name, server in servers.items():
                    bar.update(task, description=f"{what}: {name}, {clients} clients")
                    samples[name, clients].append(_sample(server, clients, seconds))
                    _let_end(server)
                    bar.advance(task)
    return samples


def ratios(samples: Samples, name: str, other: str, clients: int) -> list[float]:
    """The rates of one server relative to another's, round by round."""
    pairs = zip(samples[name, clients], samples[other, clients], strict=True)
    return [mine.load.rate / max(0.001, theirs.load.rate) for mine, theirs in pairs]


def _median(values: list[float]) -> float:
    return statistics.median(values)


# -- a crowd ---------------------------------------------------------------------------------------------------------------------


@attrs.define
class Crowd:
    """10,000 connections, of which 200 are active: the number that was answered, and the latency of `/health` meanwhile."""

    opened: int = 0
    refused: int = 0
    answered: int = 0
    failed: int = 0
    idle_p99: float = 0.0
    busy_p99: float = 0.0


def _health_p99(port: int, seconds: float) -> float:
    """Return the p99 of `/health` in milliseconds, requested by one client at a low rate."""
    request = request_bytes("", path="/health", method="GET")
    times: list[float] = []
    end = time.perf_counter() + seconds
    with socket.create_connection(("127.0.0.1", port)) as sock:
        while time.perf_counter() < end:
            began = time.perf_counter()
            sock.sendall(request)
            sock.recv(65536)
            times.append(1000 * (time.perf_counter() - began))
            time.sleep(0.002)
    times.sort()
    return times[int(0.99 * len(times))]


def measure_crowd(server: PinnedServer, connections: int, seconds: float) -> Crowd:
    """Open the connections, keep 200 of them busy with turns of 0.2 s that begin at any time, and ask for the health meanwhile."""
    raise_descriptor_limit()
    os.sched_setaffinity(0, {LOAD_CORE})
    crowd = Crowd(idle_p99=_health_p99(server.port, seconds))
    idle: list[socket.socket] = []
    health = request_bytes("", path="/health", method="GET")
    try:
        for _ in range(connections - ACTIVE):
            try:
                sock = socket.create_connection(("127.0.0.1", server.port), 30)
            except OSError:
                crowd.refused += 1
                continue
            idle.append(sock)
        crowd.opened = len(idle)
        for sock in (idle[0], idle[len(idle) // 2], idle[-1]):
            sock.sendall(health)
            crowd.failed += not sock.recv(65536).startswith(b"HTTP/1.1 200")
        ask = request_bytes(CHAT_BODY)
        stop = time.perf_counter() + seconds + 1
        lock = threading.Lock()

        def active() -> None:
            with socket.create_connection(("127.0.0.1", server.port), 30) as sock:
                time.sleep(random.random() * 2 * WAIT)
                while time.perf_counter() < stop:
                    sock.sendall(ask)
                    good = sock.recv(65536).startswith(b"HTTP/1.1 200")
                    with lock:
                        crowd.answered += good
                        crowd.failed += not good
                    time.sleep(random.random() * WAIT)

        threads = [threading.Thread(target=active, daemon=True) for _ in range(ACTIVE)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        crowd.busy_p99 = _health_p99(server.port, seconds)
        for thread in threads:
            thread.join()
        crowd.opened += ACTIVE
    finally:
        for sock in idle:
            sock.close()
    return crowd


# -- what is shown ---------------------------------------------------------------------------------------------------------------


def _table(
    report: Report, title: str, samples: Samples, names: list[str], cases: tuple[int, ...], against: str
) -> None:
    columns = ["", *(f"{clients} clients" for clients in cases), "p99 ms", "CPU us/request"]
    rows: list[list[str]] = []
    for name in names:
        if not samples.get((name, cases[0])):
            continue
        row = [name]
        for clients in cases:
            found = [sample.load.rate for sample in samples[name, clients]]
            base = against if samples.get((against, clients)) else UVICORN
            row.append(f"{spread(ratios(samples, name, base, clients), 2)}\n{_median(found):,.0f}/s")
        last = samples[name, cases[-1]]
        row.append(f"{_median([sample.load.p99 for sample in last]):,.0f}")
        row.append(f"{_median([sample.cpu for sample in last]):,.0f}")
        rows.append(row)
    report.table(title, columns, rows)


def _figures(samples: Samples) -> dict[str, Any]:
    return {
        f"{name} at {clients}": {
            "rate": [round(sample.load.rate, 1) for sample in found],
            "p50_ms": [sample.load.p50 for sample in found],
            "p99_ms": [sample.load.p99 for sample in found],
            "core_share": [round(sample.share, 2) for sample in found],
            "cpu_us": [round(sample.cpu, 1) for sample in found],
            "refused": sum(sample.load.refused for sample in found),
            "errors": sum(sample.load.errors for sample in found),
        }
        for (name, clients), found in samples.items()
    }


def _instant_bounds(report: Report, samples: Samples, commit: float) -> None:
    for name, least in ((MEMORY, (1.0, 1.0, 1.0)), (DURABLE, (0.5, 0.7, 0.7))):
        for clients, bound in zip(CLIENTS, least, strict=True):
            ratio = _median(ratios(samples, name, REFERENCE, clients))
            words = f"{name}, {clients} clients {ratio:.2f} x (at least {bound})"
            if name == DURABLE and clients == 1:
                words += f" on a disk that commits in {1000 * commit:.2f} ms"
            report.bound(words, ratio >= bound)
    mine, theirs = (_median([s.load.p99 for s in samples[name, 256]]) for name in (MEMORY, REFERENCE))
    report.bound(f"p99 at 256 {mine:.0f} ms (reference {theirs:.0f})", mine <= theirs)


def _waiting_bounds(report: Report, samples: Samples) -> None:
    mine = samples[DURABLE, CROWD]
    if samples.get((REFERENCE, CROWD)):
        ratio = _median(ratios(samples, DURABLE, REFERENCE, CROWD))
        report.bound(f"0.2 s turns at {CROWD} {ratio:.0f} x the reference (at least 60)", ratio >= 60)
    ratio = _median(ratios(samples, DURABLE, UVICORN, CROWD))
    report.bound(f"{ratio:.2f} x bare uvicorn (at least 0.4)", ratio >= 0.4)
    p99 = _median([sample.load.p99 for sample in mine])
    report.bound(f"p99 {p99:.0f} ms (at most {3000 * WAIT:.0f})", p99 <= 3000 * WAIT)
    per_turn = max(sample.grown for sample in mine) / CROWD
    report.figures["bytes_per_turn"] = per_turn
    report.bound(f"{per_turn / 1000:.0f} kB a concurrent turn (at most 40)", per_turn <= 40_000)


def _draw(instant: Samples, waiting: Samples, names: list[str]) -> Any:
    def draw(axes: Any) -> None:
        left, right = axes
        for name in names:
            if instant.get((name, 1)):
                points = [_median([s.load.rate for s in instant[name, clients]]) for clients in CLIENTS]
                left.plot([str(clients) for clients in CLIENTS], points, marker="o", label=name)
        left.set_title("turns at once, requests/s on one core")
        left.set_xlabel("clients")
        left.legend(fontsize="small")
        shown = [name for name in names if waiting.get((name, CROWD))]
        right.barh(shown, [_median([s.load.rate for s in waiting[name, CROWD]]) for name in shown])
        right.set_title(f"turns of {WAIT:g} s, {CROWD} clients: turns/s (ideal {CROWD / WAIT:.0f})")

    return draw


def main() -> int:
    """Run the benchmark."""
    parser = arguments_for(__doc__)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--seconds", type=int, default=0, help="of load in each round")
    args = parser.parse_args()
    quick: bool = args.quick
    rounds, seconds = args.rounds or (1 if quick else 9), args.seconds or (1 if quick else 2)
    report = Report("serve", args.results, args.plot)
    everybody = [MEMORY, DURABLE, REFERENCE, UVICORN, QUART]
    waiting_names = [DURABLE, REFERENCE, UVICORN, QUART]
    if reference(0) is None:
        print("The reference is not installed, so nothing is compared with it; run: make bench-reference", flush=True)
    if not have_wrk():
        print("wrk is not installed; the load comes from our own generator, which is slower", flush=True)
    starts: dict[str, list[Start]] = defaultdict(list)
    with progress() as bar, tempfile.TemporaryDirectory() as folder:
        commit = commit_seconds(Path(folder))
        instant = measure(everybody, CLIENTS, 0.0, rounds, seconds, bar)
        commit = (commit + commit_seconds(Path(folder))) / 2
        waiting = measure(waiting_names, (CROWD,), WAIT, max(1, rounds // 2), max(2, seconds), bar)
        task = bar.add_task("starts", total=1)
        for _ in range(1 if quick else 3):
            for name in ("product", "reference"):
                start = measure_start(name)
                if start is not None:
                    starts[name].append(start)
        bar.update(task, description=f"{CONNECTIONS} connections")
        affinity = os.sched_getaffinity(0)
        try:
            with pinned(DURABLE, product(sleep=WAIT)) as server:
                crowd = measure_crowd(server, CONNECTIONS, 1 if quick else 5)
            bar.update(task, description=f"{ISOLATED} sessions")
            isolation = None if quick else measure_isolation(ISOLATED, 3)
        finally:
            os.sched_setaffinity(0, affinity)
    _table(report, "Turns that take no time, relative to the reference", instant, everybody, CLIENTS, REFERENCE)
    _table(report, f"Turns of {WAIT:g} s, relative to bare uvicorn", waiting, waiting_names, (CROWD,), UVICORN)
    report.figures |= {
        "instant": _figures(instant),
        "waiting": _figures(waiting),
        "commit_ms": 1000 * commit,
        "crowd": attrs.asdict(crowd),
        "isolation": None if isolation is None else attrs.asdict(isolation),
        "starts": {name: [attrs.asdict(start) for start in found] for name, found in starts.items()},
        "load_generator": "wrk" if have_wrk() else "own",
    }
    if instant.get((REFERENCE, 1)):
        _instant_bounds(report, instant, commit)
    _waiting_bounds(report, waiting)
    crowd_held = not crowd.refused and not crowd.failed and crowd.opened == CONNECTIONS
    report.bound(f"{crowd.opened} connections, {crowd.refused} refused, {crowd.failed} failed", crowd_held)
    calm = crowd.busy_p99 <= 3 * crowd.idle_p99
    report.bound(f"/health p99 {crowd.busy_p99:.1f} ms beside them, {crowd.idle_p99:.1f} alone (at most 3 x)", calm)
    start_bounds(report, cast("dict[str, list[Start]]", starts))
    if isolation is not None:
        report.bound(f"crossings: {isolation.crossings} at {isolation.most_at_once} sessions", not isolation.crossings)
    report.plot(_draw(instant, waiting, everybody), panels=2)
    share = _median([sample.share for clients in CLIENTS[1:] for sample in instant[DURABLE, clients]])
    report.figures["core_share"] = share
    return report.finish(f"under full load a server got {100 * share:.0f} % of its core", strict=args.strict)


if __name__ == "__main__":
    sys.exit(main())
