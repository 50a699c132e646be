"""Load from many clients over HTTP/1.1: wrk where it is installed, else a generator of our own, both on a core of their own.

Each client keeps one connection and sends its next request as soon as the last one is answered. The generator is one process with one epoll set; it
is also a command, so that it can be pinned: python -m bench.load URL --clients N --seconds S (prints one line of JSON).
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import attrs

from bench.pinned_server import LOAD_CORE, REFERENCE_KEY

__all__ = ["CHAT_BODY", "Load", "drive", "free_port", "have_wrk", "request_bytes"]

CHAT_PATH = "/v1/chat/completions"
CHAT_BODY = (
    '{"model":"hermes-agent","messages":[{"role":"system","content":"be brief"},'
    '{"role":"user","content":"hello, what is the weather in Paris today?"}]}'
)
_LUA = """
wrk.method = "POST"
wrk.body = '%s'
wrk.headers["Content-Type"] = "application/json"
wrk.headers["Authorization"] = "Bearer %s"
done = function(summary, latency, requests)
  local e = summary.errors
  io.write(string.format("RESULT %%d %%d %%d %%d %%d %%d\\n", summary.requests, summary.duration,
    latency:percentile(50), latency:percentile(99), e.status, e.connect + e.read + e.write + e.timeout))
end
"""
_TIMEOUT = 30


@attrs.frozen
class Load:
    """The measurements of the clients. `rate` counts good answers only, in requests a second; times are in milliseconds."""

    rate: float
    answered: int
    p50: float
    p99: float
    refused: int
    errors: int


def have_wrk() -> bool:
    """Return whether wrk is installed."""
    return shutil.which("wrk") is not None


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def request_bytes(body: str, *, path: str = CHAT_PATH, method: str = "POST", more: str = "") -> bytes:
    """Return a whole request, with the key that all servers accept."""
    data = body.encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {REFERENCE_KEY}\r\n{more}"
    if data or method == "POST":
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    return head.encode() + b"\r\n" + data


def drive(url: str, clients: int, seconds: int, *, body: str = CHAT_BODY, own: bool = False) -> Load:
    """Let this many clients post `body` to the chat completions of a server for `seconds`."""
    if have_wrk() and not own:
        return _drive_wrk(url, clients, seconds, body)
    command = [sys.executable, "-m", "bench.load", url, "--clients", str(clients), "--seconds", str(seconds)]
    done = subprocess.run(
        ["taskset", "-c", str(LOAD_CORE), *command, "--body", body],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent,
    )
    return Load(**json.loads(done.stdout))


def _drive_wrk(url: str, clients: int, seconds: int, body: str) -> Load:
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(_LUA % (body.replace("'", "\\'"), REFERENCE_KEY))
        script.flush()
        command = ["taskset", "-c", str(LOAD_CORE), "wrk", "-t1", f"-c{clients}", f"-d{seconds}s"]
        command += ["--timeout", f"{_TIMEOUT}s", "-s", script.name, url + CHAT_PATH]
        output = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"RESULT (\d+) (\d+) (\d+) (\d+) (\d+) (\d+)", output.stdout)
    if found is None:
        raise RuntimeError(f"wrk said something unexpected: {output.stdout}{output.stderr}")
    requests, micros, p50, p99, refused, errors = map(int, found.groups())
    good = requests - refused
    return Load(good / (micros / 1e6), requests, p50 / 1000, p99 / 1000, refused, errors)


# -- our own generator -----------------------------------------------------------------------------------------------------------


class _Client:
    """One connection: what it has read of the answer under way, and since when it waits for it."""

    __slots__ = ("buffer", "need", "sent_at", "sock")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.buffer = b""
        self.need = 0
        self.sent_at = 0.0


def generate(url: str, clients: int, seconds: float, request: bytes) -> Load:
    """Run the clients in this process. Answers must carry a Content-Length."""
    raise_descriptor_limit()
    parts = urlsplit(url)
    address = (parts.hostname or "127.0.0.1", parts.port or 80)
    epoll = select.epoll()
    open_clients: dict[int, _Client] = {}
    errors = refused = 0
    times: list[float] = []
    for _ in range(clients):
        try:
            sock = socket.create_connection(address, _TIMEOUT)
        except OSError:
            errors += 1
            continue
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = _Client(sock)
        open_clients[sock.fileno()] = client
        epoll.register(sock, select.EPOLLIN)
    began = time.perf_counter()
    end = began + seconds
    for client in open_clients.values():
        client.sent_at = time.perf_counter()
        client.sock.send(request)
    while (now := time.perf_counter()) < end and open_clients:
        for descriptor, _ in epoll.poll(end - now):
            client = open_clients[descriptor]
            try:
                data = client.sock.recv(65536)
            except OSError:
                data = b""
            if not data:
                errors += 1
                epoll.unregister(descriptor)
                client.sock.close()
                del open_clients[descriptor]
                continue
            client.buffer += data
            status = _take_answer(client)
            if status is None:
                continue
            now = time.perf_counter()
            times.append(now - client.sent_at)
            refused += status >= 400
            client.sent_at = now
            client.sock.send(request)
    took = time.perf_counter() - began
    for client in open_clients.values():
        client.sock.close()
    epoll.close()
    times.sort()
    p50, p99 = (times[int(len(times) * part)] * 1000 if times else 0.0 for part in (0.5, 0.99))
    return Load((len(times) - refused) / took, len(times), p50, p99, refused, errors)


_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


def _take_answer(client: _Client) -> int | None:
    """The status of a complete answer in the buffer, which is then emptied; None if it is not complete."""
    if not client.need:
        head = client.buffer.find(b"\r\n\r\n")
        if head < 0:
            return None
        found = _LENGTH.search(client.buffer, 0, head + 2)
        client.need = head + 4 + (int(found[1]) if found else 0)
    if len(client.buffer) < client.need:
        return None
    status = int(client.buffer[9:12])
    client.buffer = client.buffer[client.need :]
    client.need = 0
    return status


def raise_descriptor_limit() -> None:
    """Raise the limit of descriptors of this process to the highest that the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> int:
    """Load a server and print the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--body", default=CHAT_BODY)
    args = parser.parse_args()
    load = generate(args.url, args.clients, args.seconds, request_bytes(args.body))
    print(json.dumps(attrs.asdict(load)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
