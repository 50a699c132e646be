"""What a store in PostgreSQL costs beside one in a file, and how several processes share it: `python -m bench.scale [--quick]` or `make bench-scale`.

1. CPU of the client's process for each turn, 256 turns at a time, on SQLite and on PostgreSQL: a session's row, two messages, a run and three events, in
   one verb, with the collector's settings of a server.
2. Turns a second of four processes that write to one database at once, with notifications to each other and without.
3. The product over HTTP, 256 clients: turns that take no time and turns of 0.2 s, with 1, 2 and 4 workers on PostgreSQL, one process on SQLite, and the
   reference; two workers with 512 clients, too, which is the load of one worker for each of them: a process that has less to do gathers fewer writes and
   events. CPU is that of the gateway's processes and, beside it, of PostgreSQL's. The share of the busiest worker says how connections are spread: over a
   socket for each worker (SO_REUSEPORT), as the product has them, and over one that all inherit.
4. With `--before DIR`, the product of an older checkout on SQLite beside this one's.

Rounds alternate; ratios are of minima (CPU) and maxima (rates) over the rounds, and each has the ratio of a thing to itself beside it (A/A), which says how
much of a difference is noise. Each service has a PostgreSQL of its own: what a service does after its turns, as the index for searches, is not counted as
another's. All servers are started by this program and end with it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
import trio

from bench.load import CHAT_BODY, Load, drive, free_port
from bench.pinned_server import ROOT, cpu_seconds, reference
from bench.report import Report, arguments_for
from hermes_trio.config import load_config
from hermes_trio.gateway.listening import bind_for_workers
from hermes_trio.gateway.serving import settle_heap
from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.outcome import TurnState
from hermes_trio.runtime.ports import EventRow, Message, NewRun, TurnFinish, TurnStart
from hermes_trio.store import open_store
from hermes_trio.store.postgres.link import open_link
from hermes_trio.store.postgres.schema import migrate_schema
from hermes_trio.store.postgres.signal_listener import SignalListener
from hermes_trio.store.postgres.store import open_postgres
from tests.postgres_server import PostgresServer, postgres_server

TASKS = 256
CPU_BOUND = 0.6
NOTIFY_BOUND = 0.7
WRITERS = 4
SHARED_BOUND = 1.15
BEFORE_BOUND = 1.05
CLIENTS = 256
WAIT = 0.2
WAITING_BODY = CHAT_BODY.replace("hello, what", f"#s{WAIT} hello, what")
SQLITE, BEFORE, ONE, AGAIN, TWO, TWICE, FOUR, ONE_SOCKET, REFERENCE = (
    "SQLite",
    "SQLite, before",
    "1 worker",
    "1 worker again",
    "2 workers",
    "2 workers, 512 clients",
    "4 workers",
    "4 workers, one socket",
    "reference",
)
JUDGED = (SQLITE, BEFORE, ONE, AGAIN, TWO, TWICE)
"""The services whose CPU has a bound. A minimum over few rounds differs from itself by a quarter on a shared machine."""

QUESTION = "Could you look at the build log of the gateway and tell me why the second stage failed last night?"
ANSWER = "The second stage failed because the cache key had changed and the fallback image was no longer there. " * 4


def turn(name: str, number: int) -> TurnFinish:
    """A turn of a session, with a run and three events."""
    run_id = f"run_{name}_{number}"
    start = TurnStart(
        turn_id=f"{name}_{number}",
        context=SessionContext(platform="api_server", session_id=name, session_key=name),
        source="api_server",
        run=NewRun(run_id=run_id, session_id=name),
    )
    return TurnFinish(
        start=start,
        state=TurnState.COMPLETED,
        messages=(Message(role="user", content=QUESTION), Message(role="assistant", content=ANSWER)),
        text=ANSWER,
        events=tuple(
            EventRow(run_id=run_id, epoch="e", number=count, event={"event": "message.delta", "delta": ANSWER[:80]})
            for count in (1, 2, 3)
        ),
    )


async def write_turns(store: Any, prefix: str, turns: int) -> None:
    """Every task writes so many turns, one after the other."""

    async def one(task: int) -> None:
        for number in range(turns):
            await store.finish_turn(turn(f"{prefix}{task}", number))

    async with trio.open_nursery() as nursery:
        for task in range(TASKS):
            nursery.start_soon(one, task)


async def cpu_of_a_turn(opened: AbstractAsyncContextManager[Any], turns: int) -> float:
    """Microseconds of this process's CPU for each turn; the first round, in which everything is prepared, does not count."""
    async with opened as store:
        await store.recover("bench")
        await write_turns(store, "warm", 1)
        began = time.process_time()
        await write_turns(store, "s", turns)
        return (time.process_time() - began) / (TASKS * turns) * 1e6


async def prepare(url: str) -> None:
    """Make the tables."""
    async with open_link(url, "bench") as link:
        await migrate_schema(link, "bench")


def new_database(server: PostgresServer) -> str:
    """An empty store."""
    url = server.socket_url(server.new_database())
    trio.run(prepare, url)
    return url


async def write_for(url: str, name: str, seconds: float, notify: bool) -> int:
    """One of several writers: turns that it writes within the time."""
    if not notify:
        SignalListener.publish = lambda self, signals: self._signals.announce(signals)
    written = 0
    async with open_postgres(url, maintenance=False, node_name=name) as store:
        await store.recover(name)
        await write_turns(store, f"warm {name} ", 1)
        with trio.move_on_after(seconds):
            while True:
                async with trio.open_nursery() as nursery:
                    for task in range(TASKS // WRITERS):
                        nursery.start_soon(store.finish_turn, turn(f"{name} {task}", written + task))
                written += TASKS // WRITERS
    return written


def four_writers(url: str, seconds: float, notify: bool) -> float:
    """Turns a second of four processes at once."""
    words = [sys.executable, "-m", "bench.scale", "--writer", url, "--seconds", str(seconds)]
    words += ["--notify"] if notify else []
    running = [subprocess.Popen([*words, "--name", f"n{number}"], stdout=subprocess.PIPE) for number in range(WRITERS)]
    return sum(int(process.communicate()[0]) for process in running) / seconds


@attrs.define
class Service:
    """Processes that serve one address, and the PostgreSQL behind them, if there is one."""

    port: int
    processes: list[subprocess.Popen[str]]
    database: PostgresServer | None = None

    def client_cpu(self) -> list[float]:
        """CPU seconds of each process so far."""
        return [cpu_seconds(process.pid) for process in self.processes]

    def server_cpu(self) -> float:
        """CPU seconds of PostgreSQL so far."""
        return 0.0 if self.database is None else self.database.cpu_seconds()


@attrs.frozen
class Sample:
    """One service under load in one round; times are microseconds a turn."""

    load: Load
    client: float
    server: float
    busiest: float
    """The share of the busiest process in the CPU of all, times their number: 1 is an even spread."""


def _start(command: list[str], cwd: Path, sockets: tuple[int, ...] = ()) -> tuple[subprocess.Popen[str], int]:
    """Start a server; return when it has said that it is ready, with its port."""
    environment = {**os.environ, "PYTHONPATH": str(cwd)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=cwd, env=environment, pass_fds=sockets, start_new_session=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("READY"):
            return process, int(json.loads(line[5:])["port"])
    raise RuntimeError(f"this server did not start: {' '.join(command)}")


def _end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _product(*words: str) -> list[str]:
    return [sys.executable, "-m", "bench.product_server", "--drain", "1", *words]


@contextmanager
def alone(command: list[str], cwd: Path = ROOT) -> Iterator[Service]:
    """A server in one process."""
    process, port = _start(command, cwd)
    try:
        yield Service(port, [process])
    finally:
        _end([process])


@contextmanager
def workers(count: int, *, one_socket: bool = False) -> Iterator[Service]:
    """Several processes on one database, behind one socket each, as the product has them, or behind one socket that all inherit."""
    processes: list[subprocess.Popen[str]] = []
    with ExitStack() as stack:
        database = stack.enter_context(postgres_server())
        url = new_database(database)
        config = load_config({}, home=Path(), server={"port": 0})
        sockets = [stack.enter_context(sock) for sock in bind_for_workers(config, 1 if one_socket else count)]
        port = int(sockets[0].getsockname()[1])
        places = [sock.fileno() for sock in sockets]
        try:
            for number in range(count):
                own = places[number % len(places)]
                others = ",".join(str(place) for place in places if place != own)
                command = _product("--bind", f"fd://{own}", "--others", others, "--url", url, "--node", f"n{number}")
                processes.append(_start(command, ROOT, tuple(places))[0])
            for sock in sockets:
                sock.close()
            yield Service(port, processes, database)
        finally:
            _end(processes)


def sample(service: Service, body: str, seconds: int, clients: int = CLIENTS) -> Sample:
    """Put a service under load."""
    client, server = service.client_cpu(), service.server_cpu()
    load = drive(f"http://127.0.0.1:{service.port}", clients, seconds, body=body, own=True)
    used = [after - before for before, after in zip(client, service.client_cpu(), strict=True)]
    turns = max(1, load.answered - load.refused)
    busiest = max(used) / max(0.01, sum(used)) * len(used)
    return Sample(load, sum(used) / turns * 1e6, (service.server_cpu() - server) / turns * 1e6, busiest)


Samples = dict[str, list[Sample]]


def measure_served(rounds: int, seconds: int, before: Path | None) -> dict[str, Samples]:
    """All services under both kinds of turns, in alternating rounds; those without a bound only in the first two."""
    found: dict[str, Samples] = {"instant": defaultdict(list), "waiting": defaultdict(list)}
    bodies = {"instant": CHAT_BODY, "waiting": WAITING_BODY}
    with ExitStack() as stack:
        services: dict[tuple[str, str], Service] = {}

        def put(name: str, service: Service) -> None:
            services[name, "instant"] = services[name, "waiting"] = service

        put(SQLITE, stack.enter_context(alone(_product())))
        if before is not None:
            put(BEFORE, stack.enter_context(alone(_product(), before)))
        for name, count in ((ONE, 1), (AGAIN, 1), (TWO, 2), (FOUR, 4)):
            put(name, stack.enter_context(workers(count)))
        put(TWICE, services[TWO, "waiting"])
        put(ONE_SOCKET, stack.enter_context(workers(4, one_socket=True)))
        for kind, sleep in (("instant", 0.0), ("waiting", WAIT)):
            command = reference(free_port(), sleep=sleep, cap="default" if sleep else "0")
            if command is not None:
                services[REFERENCE, kind] = stack.enter_context(alone(command))
        for service in services.values():
            sample(service, CHAT_BODY, 1)
        for number in range(rounds):
            for (name, kind), service in services.items():
                if number < 2 or name in JUDGED:
                    clients = 2 * CLIENTS if name == TWICE else CLIENTS
                    found[kind][name].append(sample(service, bodies[kind], seconds, clients))
    return found


def measure_store(server: PostgresServer, rounds: int, turns: int, seconds: float) -> dict[str, list[float]]:
    """The store alone: CPU of a turn, and four writers."""
    figures: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for name in ("sqlite", "postgres", "sqlite again", "postgres again"):
                path = Path(folder) / f"{name} {number}.db"
                opened = (
                    open_postgres(new_database(server), maintenance=False)
                    if name.startswith("postgres")
                    else open_store(path, maintenance=False)
                )
                figures[name].append(trio.run(cpu_of_a_turn, opened, turns))
        for _ in range(max(2, rounds // 2)):
            for name in ("notified", "silent"):
                figures[name].append(four_writers(new_database(server), seconds, name == "notified"))
    return figures


def _table(report: Report, title: str, samples: Samples) -> None:
    rows = [
        [
            name,
            f"{max(one.load.rate for one in found):,.0f}",
            f"{min(one.load.p50 for one in found):,.0f}",
            f"{min(one.load.p99 for one in found):,.0f}",
            f"{min(one.client for one in found):,.0f}",
            f"{min(one.server for one in found):,.0f}" if found[0].server else "-",
            f"{sum(one.busiest for one in found) / len(found):.2f}",
            f"{sum(one.load.refused + one.load.errors for one in found)}",
        ]
        for name, found in samples.items()
    ]
    columns = ["", "turns/s", "p50 ms", "p99 ms", "client µs", "server µs", "busiest", "refused"]
    report.table(title, columns, rows)


def _least(samples: Samples, name: str) -> float:
    """The least CPU of a turn, the client's and the server's together."""
    return min(one.client + one.server for one in samples[name])


def _bounds(report: Report, store: dict[str, list[float]], served: dict[str, Samples]) -> None:
    lite, post = min(store["sqlite"]), min(store["postgres"])
    noise = f"A/A {min(store['sqlite again']) / lite:.2f} and {min(store['postgres again']) / post:.2f}"
    words = f"client CPU a turn, {TASKS} at once: {post:.0f} against {lite:.0f} µs, {post / lite:.2f} x SQLite's"
    report.bound(f"{words} (at most {CPU_BOUND}; {noise})", post / lite <= CPU_BOUND)
    told = max(store["notified"]) / max(store["silent"])
    words = f"four writers with notifications {told:.2f} x without (at least {NOTIFY_BOUND})"
    report.bound(words, told >= NOTIFY_BOUND)
    for kind, samples in served.items():
        noise = _least(samples, AGAIN) / _least(samples, ONE)
        for name, load in ((TWO, "the same load"), (TWICE, "twice the clients")):
            ratio = _least(samples, name) / _least(samples, ONE)
            words = f"{kind} turns, client and server CPU with two workers and {load} {ratio:.2f} x one"
            report.bound(f"{words} (at most {SHARED_BOUND}; A/A {noise:.2f})", ratio <= SHARED_BOUND)
        if BEFORE in samples:
            ratio = _least(samples, SQLITE) / _least(samples, BEFORE)
            words = f"{kind} turns on SQLite, CPU {ratio:.2f} x before (at most {BEFORE_BOUND})"
            report.bound(words, ratio <= BEFORE_BOUND)


def main() -> int:
    """Run the benchmark."""
    parser = arguments_for(__doc__)
    parser.add_argument(
        "--before", type=Path, help="an older checkout, whose product on SQLite is measured beside this one"
    )
    parser.add_argument("--writer", default="", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="n", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=2.0, help=argparse.SUPPRESS)
    parser.add_argument("--notify", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    settle_heap()
    if args.writer:
        print(trio.run(write_for, args.writer, args.name, args.seconds, args.notify))
        return 0
    quick: bool = args.quick
    report = Report("scale", args.results, args.plot)
    if reference(0) is None:
        print("The reference is not installed, so nothing is compared with it; run: make bench-reference", flush=True)
    if args.before is None:
        print("No older checkout is compared; name one with ARGS='--before DIR'", flush=True)
    with postgres_server() as server:
        store = measure_store(server, 2 if quick else 6, 4 if quick else 10, 2.0 if quick else 4.0)
    served = measure_served(1 if quick else 16, 1 if quick else 2, args.before)
    for kind, samples in served.items():
        title = "Turns that take no time" if kind == "instant" else f"Turns of {WAIT:g} s"
        _table(report, f"{title}, {CLIENTS} clients", samples)
    rows = [[name, f"{min(found):,.0f}", f"{max(found):,.0f}"] for name, found in store.items()]
    report.table("The store alone: µs of CPU a turn, and turns/s of four writers", ["", "least", "most"], rows)
    _bounds(report, store, served)
    report.figures |= {
        "store": dict(store),
        "served": {
            kind: {name: [attrs.asdict(one) for one in found] for name, found in samples.items()}
            for kind, samples in served.items()
        },
    }
    for bound in report.bounds:
        print(bound, flush=True)
    return report.finish(strict=args.strict)


if __name__ == "__main__":
    sys.exit(main())
