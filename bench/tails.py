"""10,000 readers on one node of runs that another node has: `python -m bench.tails [--quick]` or `make bench-tails`.

One process writes 4,000 events a second to the logs of 10,000 runs, as the event writer of a node does: every 50 ms one batch. On another node, first the
readers alone follow them (the store's side: signals, gathered reads, decoding), then the product serves them to as many SSE sockets. Every reader checks
that its events are numbered without a gap; CPU is that of the reading node's process from the moment at which all readers wait until the last of
them has everything, as a share of one core over the time of writing: what it costs to open the readers is not in it. Everything is on this
machine, and ends with the benchmark.
"""

from __future__ import annotations

import argparse
import json
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any, cast

import trio

from bench.pinned_server import REFERENCE_KEY, ROOT, cpu_seconds
from bench.report import Report, arguments_for
from bench.scale import new_database
from hermes_trio.gateway.serving import settle_heap
from hermes_trio.http.api.run_events import _Reader
from hermes_trio.http.limits import ReaderLimit
from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.ports import EventRow, NewRun, TurnStart
from hermes_trio.store.postgres.store import open_postgres
from tests.postgres_server import postgres_server

RATE = 4_000
BATCH_SECONDS = 0.05
STORE_BOUND = 0.15
SOCKET_BOUND = 0.50
TEXT = "a few words of an answer that is on its way, as they come from a model "


def run_name(number: int) -> str:
    """The id of a run."""
    return f"run_tail_{number}"


# -- the node that has the runs --------------------------------------------------------------------------------------------------


async def begin_runs(store: Any, count: int) -> None:
    """Make the runs."""

    async def one(number: int) -> None:
        name = run_name(number)
        context = SessionContext(platform="api_server", session_id=f"s{number}", session_key=f"s{number}")
        new = NewRun(run_id=name, session_id=f"s{number}")
        await store.begin_turn(TurnStart(turn_id=f"t{number}", context=context, source="api_server", run=new))

    for first in range(0, count, 500):
        async with trio.open_nursery() as nursery:
            for number in range(first, min(first + 500, count)):
                nursery.start_soon(one, number)


async def write_events(store: Any, count: int, rate: int, seconds: float, first: int) -> int:
    """Append events to the runs in turn, for so long, to each as many; return how many each has got. `first` is the number of the first one."""
    each = round(rate * seconds / count)
    written = 0
    began = trio.current_time()
    while written < each * count:
        passed = trio.current_time() - began
        due = min(each * count, int(rate * (passed + BATCH_SECONDS)))
        await store.append_events(
            [
                EventRow(
                    run_id=run_name(place % count),
                    epoch="ab",
                    number=first + place // count,
                    event={"event": "message.delta", "run_id": run_name(place % count), "delta": TEXT},
                )
                for place in range(written, due)
            ]
        )
        written = due
        await trio.sleep_until(began + passed + BATCH_SECONDS)
    return each


async def write_node(url: str, count: int, rate: int) -> None:
    """Run a node that makes the runs, and writes events for the seconds in each line of standard input."""
    async with open_postgres(url, maintenance=False, node_name="writer", lease_seconds=600) as store:
        await begin_runs(store, count)
        print("READY", flush=True)
        last = 0
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            began = trio.current_time()
            each = await write_events(store, count, rate, float(line), last + 1)
            last += each
            passed = trio.current_time() - began
            print(json.dumps({"written": each * count, "last": last, "seconds": passed}), flush=True)


# -- the node that reads them ----------------------------------------------------------------------------------------------------


class Sink:
    """Stands where a stream would write."""

    is_full = False

    def __init__(self, counts: list[int], place: int) -> None:
        self._counts, self._place = counts, place

    def put(self, encoded: bytes) -> None:
        """An event."""
        self._counts[self._place] += 1

    async def flush(self) -> None:
        """Nothing to send."""

    async def comment(self, text: str) -> None:
        """Nothing to send."""


async def tail_node(url: str, count: int) -> None:
    """Run a node with readers and without sockets. It prints their progress for each line of standard input."""
    counts = [0] * count
    async with open_postgres(url, maintenance=False, node_name="reader", lease_seconds=600) as store:
        core = cast(Any, SimpleNamespace(store=store, readers=ReaderLimit(count), shared=True))
        async with trio.open_nursery() as nursery:
            for place in range(count):
                # A reader with a form of its own raises at a gap.
                reader = _Reader(core, run_name(place), cast(Any, Sink(counts, place)), "run", lambda event: b"")
                nursery.start_soon(reader.follow_rows)
            await trio.sleep(1)
            settle_heap()
            print("READY", flush=True)
            while await trio.to_thread.run_sync(sys.stdin.readline):
                told = {"events": sum(counts), "least": min(counts), "reads": store.gathered.reads}
                print(json.dumps({**told, "statements": store.gathered.statements}), flush=True)
            nursery.cancel_scope.cancel()


# -- the clients -----------------------------------------------------------------------------------------------------------------


def read_streams(port: int, count: int) -> None:
    """Open a stream for each run, and check the numbers of its events. Prints the progress for each line of standard input."""
    _raise_limit()
    epoll = select.epoll()
    sockets: dict[int, socket.socket] = {}
    left: dict[int, bytes] = {}
    seen: dict[int, int] = {}
    gaps = 0
    for place in range(count):
        sock = socket.create_connection(("127.0.0.1", port), 60)
        head = f"GET /v1/runs/{run_name(place)}/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {REFERENCE_KEY}\r\n\r\n"
        sock.sendall(head.encode())
        sock.setblocking(False)
        sockets[sock.fileno()], left[sock.fileno()], seen[sock.fileno()] = sock, b"", 0
        epoll.register(sock, select.EPOLLIN)
    epoll.register(0, select.EPOLLIN)
    answered: set[int] = set()
    told = False
    while True:
        for descriptor, _ in epoll.poll(1):
            if descriptor == 0:
                if not sys.stdin.readline():
                    return
                print(json.dumps({"events": sum(seen.values()), "least": min(seen.values()), "gaps": gaps}), flush=True)
                continue
            data = sockets[descriptor].recv(65536)
            if not data:
                gaps += 1
                epoll.unregister(descriptor)
                continue
            answered.add(descriptor)
            *lines, left[descriptor] = (left[descriptor] + data).split(b"\n")
            for line in lines:
                if line.startswith(b"id: "):
                    number = int(line.rpartition(b"-")[2])
                    gaps += number != seen[descriptor] + 1
                    seen[descriptor] = number
                gaps += line.startswith(b"HTTP/1.1") and b" 200 " not in line
        if len(answered) == count and not told:
            told = True
            print("READY", flush=True)


def _raise_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# -- the benchmark ---------------------------------------------------------------------------------------------------------------


class Helper:
    """A process of this benchmark that answers each line with a line of JSON."""

    def __init__(self, *words: str, module: str = "bench.tails") -> None:
        self.process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        self.facts: dict[str, Any] = {}
        for line in cast(Any, self.process.stdout):
            if line.startswith("READY"):
                self.facts = json.loads(line[5:].strip() or "{}")
                return
        raise RuntimeError(f"this process did not start: {' '.join(words)}")

    def send(self, text: str = "") -> None:
        """Send a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return the answer."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, text: str = "") -> dict[str, Any]:
        """Send a line, and wait for the answer."""
        self.send(text)
        return self.answer()

    def end(self) -> None:
        """End it."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _until(readers: Helper, last: int) -> dict[str, Any]:
    """Wait, a minute at most, until every reader has the event of this number."""
    limit = time.monotonic() + 60
    while (found := readers.ask())["least"] < last and time.monotonic() < limit:
        time.sleep(0.2)
    return found


def _at_rest(node: Helper) -> None:
    """Wait, a minute at most, until a node is idle: all of its readers are open and wait."""
    limit = time.monotonic() + 60
    before = cpu_seconds(node.process.pid)
    while time.monotonic() < limit:
        time.sleep(0.5)
        now = cpu_seconds(node.process.pid)
        if now - before < 0.02:
            return
        before = now


def measure(writer: Helper, node: Helper, readers: Helper, seconds: float, last: int = 0) -> dict[str, Any]:
    """The share of a core of `node` while `writer` writes for so long, and whether `readers`, who have all events up to `last`, got everything."""
    _until(readers, last)
    _at_rest(node)
    cpu = cpu_seconds(node.process.pid)
    written = writer.ask(str(seconds))
    found = _until(readers, written["last"])
    used = cpu_seconds(node.process.pid) - cpu
    return {
        "share": used / written["seconds"],
        "rate": written["written"] / written["seconds"],
        "written": written["written"],
        "last": written["last"],
        "missing": written["last"] - found["least"],
        "gaps": found.get("gaps", 0),
        **found,
    }


def main() -> int:
    """Run the benchmark."""
    parser = arguments_for(__doc__)
    parser.add_argument("--tails", type=int, default=0)
    parser.add_argument("--rate", type=int, default=RATE)
    parser.add_argument("--write", default="", help=argparse.SUPPRESS)
    parser.add_argument("--tail", default="", help=argparse.SUPPRESS)
    parser.add_argument("--streams", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    count: int = args.tails or (1_000 if args.quick else 10_000)
    if args.write:
        settle_heap()
        trio.run(write_node, args.write, count, args.rate)
        return 0
    if args.tail:
        trio.run(tail_node, args.tail, count)
        return 0
    if args.streams:
        read_streams(args.streams, count)
        return 0
    _raise_limit()
    report = Report("tails", args.results, args.plot)
    seconds = 4.0 if args.quick else 10.0
    with postgres_server() as server:
        url = new_database(server)
        many = ("--tails", str(count), "--rate", str(args.rate))
        started: list[Helper] = []
        try:
            started.append(writer := Helper("--write", url, *many))
            started.append(tails := Helper("--tail", url, *many))
            alone = measure(writer, tails, tails, seconds)
            tails.process.kill()
            words = ("--url", url, "--node", "server", "--drain", "1", "--turns", "10")
            started.append(product := Helper(*words, module="bench.product_server"))
            started.append(streams := Helper("--streams", str(product.facts["port"]), *many))
            served = measure(writer, product, streams, seconds, alone["last"])
        finally:
            for helper in reversed(started):
                helper.end()
    rows = [
        [
            name,
            f"{found['rate']:,.0f}",
            f"{found['events']:,}",
            f"{found['missing']}",
            f"{found['gaps']}",
            f"{100 * found['share']:.0f} %",
        ]
        for name, found in (("the store's side", alone), ("with SSE sockets", served))
    ]
    report.table(
        f"{count:,} readers of runs of another node", ["", "events/s", "read", "missing", "gaps", "of a core"], rows
    )
    report.figures |= {"tails": count, "alone": alone, "served": served}
    for name, found, bound in (("the store's side", alone, STORE_BOUND), ("with sockets", served, SOCKET_BOUND)):
        words_ = f"{count:,} tails at {found['rate']:,.0f} events/s, {name}: {100 * found['share']:.0f} % of a core (at most {100 * bound:.0f} %)"
        report.bound(words_, found["share"] <= bound)
        report.bound(
            f"{found['missing']} missing, {found['gaps']} gaps (0)", not found["missing"] and not found["gaps"]
        )
    for bound in report.bounds:
        print(bound, flush=True)
    return report.finish(strict=args.strict)


if __name__ == "__main__":
    sys.exit(main())
