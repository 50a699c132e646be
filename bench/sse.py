"""Event streams: `python -m bench.sse [--quick]` or `make bench-sse`.

1. Events a second and core: a streamed chat completion of many deltas, from eight clients. Counted are the events that reach the clients, per CPU second
   of the server: ours (durable), the reference, bare uvicorn + Starlette, and stock Quart-Trio on stock Hypercorn, in turns.
2. From the 202 of `POST /v1/runs` to the first event of the run, against the time of an instant chat completion, in turns on one connection each.
3. What an idle event stream costs: thousands of readers of runs that say nothing.
"""

from __future__ import annotations

import json
import os
import select
import socket
import statistics
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from typing import Any

from bench.load import CHAT_BODY, free_port, raise_descriptor_limit, request_bytes
from bench.pinned_server import LOAD_CORE, PinnedServer, baseline, pinned, product, reference
from bench.report import Report, arguments_for, progress, spread

OURS, REFERENCE, UVICORN, QUART = "ours, durable", "reference", "uvicorn", "stock Quart-Trio"
READERS = 8
IDLE_BOUND = 20_000
RATE_BOUND = 3.0


def _ask(prompt: str, *, stream: bool) -> str:
    return json.dumps({"model": "m", "stream": stream, "messages": [{"role": "user", "content": prompt}]})


def stream_events(server: PinnedServer, deltas: int, rounds: int) -> tuple[int, float, float]:
    """Read so many rounds of streams with eight clients; returns events, seconds and CPU seconds of the server."""
    request = request_bytes(_ask(f"#d{deltas}", stream=True))
    epoll = select.epoll()
    clients: dict[int, tuple[socket.socket, list[int]]] = {}
    events = 0
    cpu, began = server.cpu_seconds(), time.perf_counter()
    for _ in range(READERS):
        sock = socket.create_connection(("127.0.0.1", server.port), 30)
        sock.sendall(request)
        clients[sock.fileno()] = (sock, [rounds])
        epoll.register(sock, select.EPOLLIN)
    tails: dict[int, bytes] = defaultdict(bytes)
    while clients:
        for descriptor, _ in epoll.poll(30):
            sock, left = clients[descriptor]
            data = sock.recv(262144)
            seen = tails[descriptor] + data
            events += seen.count(b"data: {")
            done = seen.count(b"data: [DONE]\n\n")
            # What may be the beginning of a mark that the next bytes complete; too short to hold a whole one.
            tails[descriptor] = b"" if done else data[-6:] if len(data) >= 6 else seen[-6:]
            if not data or done:
                left[0] -= 1
                if not left[0] or not data:
                    epoll.unregister(descriptor)
                    sock.close()
                    del clients[descriptor]
                else:
                    sock.sendall(request)
    epoll.close()
    return events, time.perf_counter() - began, server.cpu_seconds() - cpu


def _read_answer(sock: socket.socket) -> bytes:
    data = b""
    while (end := data.find(b"\r\n\r\n")) < 0:
        data += sock.recv(65536)
    length = int(data[:end].lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
    while len(data) < end + 4 + length:
        data += sock.recv(65536)
    return data[end + 4 :]


def first_events(server: PinnedServer, count: int) -> tuple[list[float], list[float]]:
    """Milliseconds from the 202 to the first event of a run, and of an instant chat completion, in turns."""
    runs: list[float] = []
    chats: list[float] = []
    chat, start = request_bytes(CHAT_BODY), request_bytes(json.dumps({"input": "hello"}), path="/v1/runs")
    with (
        socket.create_connection(("127.0.0.1", server.port), 30) as one,
        socket.create_connection(("127.0.0.1", server.port), 30) as other,
    ):
        for _ in range(count):
            began = time.perf_counter()
            one.sendall(chat)
            _read_answer(one)
            chats.append(1000 * (time.perf_counter() - began))
            one.sendall(start)
            run = json.loads(_read_answer(one))["run_id"]
            events = request_bytes("", path=f"/v1/runs/{run}/events", method="GET")
            began = time.perf_counter()
            other.sendall(events)
            data = b""
            while b"data: " not in data:
                data += other.recv(65536)
            runs.append(1000 * (time.perf_counter() - began))
            while not data.endswith(b"0\r\n\r\n"):
                data += other.recv(65536)
    return runs, chats


def idle_streams(server: PinnedServer, count: int, runs: int = 20) -> tuple[int, float]:
    """Open so many streams on runs that are held; returns how many are open, and the bytes that each costs the server."""
    raise_descriptor_limit()
    held: list[str] = []
    with socket.create_connection(("127.0.0.1", server.port), 30) as sock:
        for _ in range(runs):
            sock.sendall(request_bytes(json.dumps({"input": "#h"}), path="/v1/runs"))
            held.append(json.loads(_read_answer(sock))["run_id"])
    time.sleep(0.5)
    before = server.rss_bytes()
    streams: list[socket.socket] = []
    try:
        for number in range(count):
            sock = socket.create_connection(("127.0.0.1", server.port), 30)
            sock.sendall(request_bytes("", path=f"/v1/runs/{held[number % runs]}/events", method="GET"))
            streams.append(sock)
        good = sum(sock.recv(65536).startswith(b"HTTP/1.1 200") for sock in streams)
        time.sleep(1)
        return good, (server.rss_bytes() - before) / count
    finally:
        for sock in streams:
            sock.close()


def main() -> int:
    """Run the benchmark."""
    parser = arguments_for(__doc__)
    parser.add_argument("--idle", type=int, default=0)
    args = parser.parse_args()
    quick: bool = args.quick
    rounds, deltas, repeats = (1, 1000, 2) if quick else (5, 1000, 5)
    idle: int = args.idle or (1000 if quick else 5000)
    report = Report("sse", args.results, args.plot)
    rates: dict[str, list[float]] = defaultdict(list)
    if reference(0) is None:
        print("The reference is not installed, so nothing is compared with it; run: make bench-reference", flush=True)
    affinity = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {LOAD_CORE})
    try:
        with ExitStack() as stack, progress() as bar:
            ports = {name: free_port() for name in (REFERENCE, UVICORN, QUART)}
            commands = {
                OURS: product(store="durable"),
                REFERENCE: reference(ports[REFERENCE]),
                UVICORN: baseline("uvicorn", ports[UVICORN]),
                QUART: baseline("quart", ports[QUART]),
            }
            servers = {
                name: stack.enter_context(pinned(name, command, port=ports.get(name, 0)))
                for name, command in commands.items()
                if command is not None
            }
            task = bar.add_task("streaming", total=rounds * len(servers) + 2)
            for _ in range(rounds):
                for name, server in servers.items():
                    events, _, cpu = stream_events(server, deltas, repeats)
                    rates[name].append(events / max(cpu, 0.01))
                    bar.advance(task)
            bar.update(task, description="first events")
            runs, chats = first_events(servers[OURS], 50 if quick else 300)
            bar.advance(task)
            bar.update(task, description=f"{idle} idle streams")
            opened, cost = idle_streams(servers[OURS], idle)
            bar.advance(task)
    finally:
        os.sched_setaffinity(0, affinity)
    ratios = {
        name: [one / stock for one, stock in zip(found, rates[QUART], strict=True)] for name, found in rates.items()
    }
    rows = [[name, spread(found, 0), spread(ratios[name], 2)] for name, found in rates.items()]
    report.table(f"Streamed events, {READERS} clients", ["", "events a CPU second", "x stock Quart-Trio"], rows)
    first, chat = statistics.median(runs), statistics.median(chats)
    report.table(
        "Waiting for a run",
        ["", "ms"],
        [["202 to the first event", spread(runs, 2)], ["an instant chat completion", spread(chats, 2)]],
    )
    report.table("Idle streams", ["", ""], [["open", f"{opened:,}"], ["kB each", f"{cost / 1000:.1f}"]])
    report.figures |= {
        "events_per_cpu_second": {name: [round(rate) for rate in found] for name, found in rates.items()},
        "first_event_ms": runs,
        "chat_ms": chats,
        "idle_streams": opened,
        "idle_stream_bytes": cost,
    }
    ratio = statistics.median(ratios[OURS])
    report.bound(
        f"{ratio:.1f} x stock Quart-Trio in events a CPU second (at least {RATE_BOUND:g})", ratio >= RATE_BOUND
    )
    report.bound(f"first event {first:.2f} ms after the 202 (a chat completion takes {chat:.2f})", first <= chat)
    report.bound(
        f"{opened} idle streams at {cost / 1000:.1f} kB (at most {IDLE_BOUND / 1000:g})",
        cost <= IDLE_BOUND and opened == idle,
    )

    def draw(axes: Any) -> None:
        axes.barh(list(rates), [statistics.median(found) for found in rates.values()])
        axes.set_title("streamed events a CPU second")

    report.plot(draw, height=3)
    return report.finish(strict=args.strict)


if __name__ == "__main__":
    sys.exit(main())
