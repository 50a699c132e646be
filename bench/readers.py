"""Readers that stall: what 200 of them cost a server, and what the others notice.

A server in a process of its own has one run of 50 MB. Each reader asks for its events and then reads nothing. Printed are the growth of the server's
resident memory and the time that `/health` takes beside them. `live` readers are there before the run tells anything; the others come when it has ended.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import trio

from hermes_trio.http.app import make_app
from hermes_trio.http.core import ApiCore, ApiSettings
from hermes_trio.http.server import ServerConfig, hypercorn_config, serve
from hermes_trio.runtime.core import RuntimeSettings
from hermes_trio.runtime.runtime import Runtime
from hermes_trio.runtime.turn import Turn
from hermes_trio.store import open_store

KEY = "bench-admin-key-0123456789"
PIECE = 1_000_000
SETTLE_SECONDS = 60.0


class ReadersResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured. Memory is in MB, times are in milliseconds."""

    readers: int
    megabytes: int
    live: bool
    before: float
    after: float
    health_p50: float
    health_p99: float
    health_calls: int

    @property
    def growth(self) -> float:
        """How much the server grew."""
        return self.after - self.before


async def _produce(turn: Turn) -> str:
    """Tells as much text as it is asked for, and answers with a word: what remains is the readers' cost."""
    megabytes, pause = turn.input.text.split()
    await trio.sleep(float(pause))
    for _ in range(int(megabytes)):
        turn.emit("message.delta", delta="x" * PIECE)
        await trio.sleep(0.02)
    return "done"


async def _serve(path: str) -> None:
    runtime = Runtime(agent=_produce, store=open_store(path), settings=RuntimeSettings(watchdog_seconds=0))
    async with runtime, trio.open_nursery() as nursery:
        app = make_app(ApiCore(runtime, runtime.store, ApiSettings(admin_key=KEY)))  # pyright: ignore[reportArgumentType]
        config = hypercorn_config("127.0.0.1:0")
        config.errorlog = None
        config.graceful_timeout = 1.0
        [url] = await nursery.start(
            partial(serve, app, ServerConfig(hypercorn=config, write_timeout=600.0), shutdown=trio.Event())
        )
        print(url, flush=True)
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        nursery.cancel_scope.cancel()


def _resident(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024 / 1e6
    raise AssertionError("the kernel says nothing of the memory of the server")


def _ask(address: tuple[str, int], method: str, path: str, body: object = None) -> tuple[int, bytes]:
    connection = HTTPConnection(*address, timeout=60)
    try:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _stall(stack: ExitStack, address: tuple[str, int], run_id: str) -> None:
    """Ask for the events of a run, and read nothing."""
    sock = stack.enter_context(socket.socket())
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(address)
    sock.sendall(f"GET /v1/runs/{run_id}/events HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode())


def _health(address: tuple[str, int], seconds: float) -> list[float]:
    """Milliseconds of each of many calls, in order of size."""
    times: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        assert _ask(address, "GET", "/health")[0] == 200
        times.append((time.perf_counter() - began) * 1000)
        time.sleep(0.005)
    return sorted(times)


def measure(readers: int = 200, megabytes: int = 50, *, live: bool = False, seconds: float = 5.0) -> ReadersResult:
    """Start a server, let so many readers stall, and measure for so many seconds."""
    with ExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory())
        server = subprocess.Popen(
            [sys.executable, "-m", "bench.readers", "--serve", os.path.join(home, "state.db")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert server.stdout is not None
        stack.callback(server.wait)
        stack.callback(server.kill)
        url = urlsplit(server.stdout.readline().strip())
        address = (url.hostname or "", url.port or 0)
        for _ in range(20):
            _ask(address, "GET", "/health")
        pause = 3.0 if live else 0.0
        before = _resident(server.pid)
        run_id: str = json.loads(_ask(address, "POST", "/v1/runs", {"input": f"{megabytes} {pause}"})[1])["run_id"]
        if live:
            for _ in range(readers):
                _stall(stack, address, run_id)
        _ask(address, "GET", f"/v1/runs/{run_id}?wait=ended&timeout={SETTLE_SECONDS:g}")
        if not live:
            for _ in range(readers):
                _stall(stack, address, run_id)
        times = _health(address, seconds)
        after = _resident(server.pid)
        status = json.loads(_ask(address, "GET", f"/v1/runs/{run_id}")[1])["status"]
        assert status == "completed", status
        return ReadersResult(
            readers=readers,
            megabytes=megabytes,
            live=live,
            before=before,
            after=after,
            health_p50=times[len(times) // 2],
            health_p99=times[int(len(times) * 0.99)],
            health_calls=len(times),
        )


def main() -> None:
    """Print the figures, or be the server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", metavar="DATABASE")
    parser.add_argument("--quick", action="store_true", help="fewer readers, a shorter run")
    arguments = parser.parse_args()
    if arguments.serve:
        trio.run(_serve, arguments.serve)
        return
    readers, megabytes = (40, 10) if arguments.quick else (200, 50)
    for live in (False, True):
        found = measure(readers, megabytes, live=live)
        print(
            f"{found.readers} stalled readers of a {'live' if live else 'stored'} run of {found.megabytes} MB:"
            f" RSS {found.before:.0f} -> {found.after:.0f} MB (+{found.growth:.0f});"
            f" /health p50 {found.health_p50:.1f} ms, p99 {found.health_p99:.1f} ms ({found.health_calls} calls)"
        )


if __name__ == "__main__":
    main()
