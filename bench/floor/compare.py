"""Compare the floor servers: interleaved rounds, each server alone on one core, wrk on another.

Usage: python -m bench.floor.compare [--rounds 5] [--seconds 2] [--clients 1,32,256] [--servers ours,stock,uvicorn] [--sleep-clients 1000]
Prints requests per second and p99 as medians with their spread, and the ratio to uvicorn + Starlette of the same round.
"""

from __future__ import annotations

import argparse
import re
import socket
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BODY = '{"model":"demo","messages":[{"role":"system","content":"be brief"},{"role":"user","content":"hello, how are you today?"}]}'
LUA = f"""
wrk.method = "POST"
wrk.body = '{BODY}'
wrk.headers["Content-Type"] = "application/json"
wrk.headers["Authorization"] = "Bearer bench-key-0123456789abcdef"
done = function(summary, latency, requests)
  io.write(string.format("RESULT %d %d %d %d\\n", summary.requests, summary.duration, latency:percentile(99),
    summary.errors.connect + summary.errors.read + summary.errors.write + summary.errors.status + summary.errors.timeout))
end
"""
UNITS = 1e6


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def server(name: str, sleep: float) -> Iterator[int]:
    port = free_port()
    command = [
        "taskset",
        "-c",
        "0",
        sys.executable,
        str(Path(__file__).with_name("servers.py")),
        name,
        str(port),
        str(sleep),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=None)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if "READY" not in line:
            raise SystemExit(f"{name} did not start")
        yield port
    finally:
        process.kill()
        process.wait()


def load(port: int, clients: int, seconds: float, script: str) -> tuple[float, float, int]:
    command = [
        "taskset",
        "-c",
        "1",
        "wrk",
        "-t1",
        f"-c{clients}",
        f"-d{max(1, round(seconds))}s",
        "--timeout",
        "20s",
        "-s",
        script,
    ]
    output = subprocess.run(
        [*command, f"http://127.0.0.1:{port}/v1/chat/completions"], capture_output=True, text=True, check=True
    )
    found = re.search(r"RESULT (\d+) (\d+) (\d+) (\d+)", output.stdout)
    if found is None:
        raise SystemExit(output.stdout + output.stderr)
    requests, micros, p99, errors = map(int, found.groups())
    return requests / (micros / UNITS), p99 / 1000, errors


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--clients", default="1,32,256")
    parser.add_argument("--servers", default="ours,stock,uvicorn")
    parser.add_argument("--sleep-clients", type=int, default=1000)
    args = parser.parse_args()
    names = args.servers.split(",")
    cases = [(int(count), 0.0) for count in args.clients.split(",") if count]
    if args.sleep_clients:
        cases.append((args.sleep_clients, 0.2))
    rates: dict[tuple[int, float, str], list[float]] = defaultdict(list)
    tails: dict[tuple[int, float, str], list[float]] = defaultdict(list)
    failures: dict[tuple[int, float, str], int] = defaultdict(int)
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(LUA)
        script.flush()
        for round_number in range(args.rounds):
            for clients, sleep in cases:
                for name in names:
                    key = clients, sleep, name
                    with server(name, sleep) as port:
                        load(port, min(clients, 8), 1, script.name) if not sleep else None
                        rate, tail, errors = load(port, clients, args.seconds + (2 if sleep else 0), script.name)
                    rates[key].append(rate)
                    tails[key].append(tail)
                    failures[key] += errors
            print(f"round {round_number + 1} of {args.rounds} done", file=sys.stderr, flush=True)
    print(
        f"{'clients':>8} {'sleep':>5} {'server':>12} {'req/s':>8} {'spread':>13} {'p99 ms':>8} {'x uvicorn':>9} errors"
    )
    for clients, sleep in cases:
        base = rates[clients, sleep, "uvicorn"]
        for name in names:
            rate = rates[clients, sleep, name]
            ratio = statistics.median(a / b for a, b in zip(rate, base, strict=True)) if base else float("nan")
            spread = f"{min(rate):.0f}-{max(rate):.0f}"
            tail = statistics.median(tails[clients, sleep, name])
            print(
                f"{clients:>8} {sleep:>5} {name:>12} {statistics.median(rate):>8.0f} {spread:>13} {tail:>8.1f} {ratio:>9.2f} "
                f"{failures[clients, sleep, name]}"
            )


if __name__ == "__main__":
    main()
