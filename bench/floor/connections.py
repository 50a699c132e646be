"""Many open connections: what each costs in memory, and what they do to the latency of one more client.

Usage: python -m bench.floor.connections [--open 10000] [--active 200] [--server ours] [--seconds 4]
Opens the connections in batches, makes one request on each, then lets `--active` of them ask again and again (a request
sleeps 0.2 s) while one more client probes. Prints memory per connection, refusals, and the probe's p50 and p99 before and during.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from pathlib import Path

import trio

from bench.floor.compare import BODY, server

REQUEST = (
    f"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n{BODY}"
).encode()
PROBE = b"GET /none HTTP/1.1\r\nHost: bench\r\nContent-Length: 2\r\n\r\n{}"


def resident_kb(process: int) -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    raise SystemExit("no VmRSS")


def server_process(port: int) -> int:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(port).encode() in words and b"taskset" not in words[0]:
                return int(folder.name)
    raise SystemExit("the server's process was not found")


async def ask(stream: trio.SocketStream, request: bytes) -> None:
    await stream.send_all(request)
    if not await stream.receive_some(65536):
        raise SystemExit("the server closed a connection")


async def probe(port: int, seconds: float) -> tuple[float, float]:
    times: list[float] = []
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            began = time.perf_counter()
            await ask(stream, PROBE)
            times.append((time.perf_counter() - began) * 1000)
            await trio.sleep(0.005)
    return statistics.median(times), statistics.quantiles(times, n=100)[98]


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--open", type=int, default=10_000)
    parser.add_argument("--active", type=int, default=200)
    parser.add_argument("--server", default="ours")
    parser.add_argument("--seconds", type=float, default=4)
    args = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if args.open > hard - 200:
        raise SystemExit(f"--open {args.open} needs more descriptors than the hard limit of {hard}")
    with server(args.server, 0.2) as port:
        process = server_process(port)
        quiet = await probe(port, args.seconds)
        before = resident_kb(process)
        streams: list[trio.SocketStream] = []
        refused = 0

        async def open_one() -> None:
            nonlocal refused
            try:
                stream = await trio.open_tcp_stream("127.0.0.1", port)
                streams.append(stream)
                await ask(stream, PROBE)
            except OSError:
                refused += 1

        for start in range(0, args.open, 500):
            async with trio.open_nursery() as nursery:
                for _ in range(min(500, args.open - start)):
                    nursery.start_soon(open_one)
        opened = resident_kb(process)
        async with trio.open_nursery() as nursery:

            async def keep_asking(stream: trio.SocketStream) -> None:
                while True:
                    await ask(stream, REQUEST)

            for stream in streams[: args.active]:
                nursery.start_soon(keep_asking, stream)
            await trio.sleep(0.5)
            busy = await probe(port, args.seconds)
            active = resident_kb(process)
            nursery.cancel_scope.cancel()
        for stream in streams:
            await stream.aclose()
    print(f"{len(streams)} connections open, {refused} refused", file=sys.stdout)
    print(
        f"memory: {(opened - before) / max(1, len(streams)):.1f} kB per open connection, {(active - opened) / args.active:.1f} kB more per active"
    )
    print(
        f"probe ms: p50 {quiet[0]:.2f} p99 {quiet[1]:.2f} alone, p50 {busy[0]:.2f} p99 {busy[1]:.2f} beside them, p99 x{busy[1] / quiet[1]:.1f}"
    )


if __name__ == "__main__":
    trio.run(main)
