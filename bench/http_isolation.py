"""Does any HTTP session see another's identity? 2,000 sessions at once, several turns each, every turn looked at from inside and from outside.

Usage: python -m bench.http_isolation [--quick] [--sessions 2000] [--turns 3]

Each client names its session and says in every request who it is; the agent answers with what the turn, a task of it and (one turn in ten) a worker
thread of it see. A crossing is any answer with another's name in it, in the text or in the headers. Prints `crossings: 0`, or how many there were.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import attrs
import trio

from bench.load import raise_descriptor_limit, request_bytes
from bench.pinned_server import LOAD_CORE, PinnedServer, pinned, product
from bench.report import Report, arguments_for, progress

__all__ = ["Crossings", "look_for_crossings"]

TIMEOUT = 120.0


@attrs.define
class Crossings:
    """What was found."""

    answers: int = 0
    crossings: int = 0
    failures: int = 0
    most_at_once: int = 0


async def _answer(stream: trio.SocketStream) -> tuple[bytes, bytes]:
    """The head and the body of the next answer."""
    data = b""
    while (end := data.find(b"\r\n\r\n")) < 0:
        data += await _some(stream)
    head, body = data[:end].lower(), data[end + 4 :]
    length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
    while len(body) < length:
        body += await _some(stream)
    return data[:end], body


async def _some(stream: trio.SocketStream) -> bytes:
    data = await stream.receive_some()
    if not data:
        raise ConnectionError("the server closed the connection")
    return bytes(data)


def _crossed(name: str, head: bytes, body: bytes) -> bool:
    if f"x-hermes-session-id: {name}\r\n" not in head.decode().lower() + "\r\n":
        return True
    text: str = json.loads(body)["choices"][0]["message"]["content"]
    return any(word != f"{name}/api::{name}" for word in text.split())


async def look_for_crossings(port: int, sessions: int, turns: int, found: Crossings) -> None:
    """Run this many concurrent clients, each with its own session, all started together."""
    start = trio.Event()
    ready = 0
    at_once = 0

    async def client(number: int) -> None:
        nonlocal ready, at_once
        name = f"isolated-{number}"
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            ready += 1
            if ready == sessions:
                start.set()
            await start.wait()
            for turn in range(turns):
                order = "#it" if (number + turn) % 10 == 0 else "#i"
                body = json.dumps({"messages": [{"role": "user", "content": f"{order} {name}"}]})
                headers = f"X-Hermes-Session-Id: {name}\r\nX-Hermes-Session-Key: {name}\r\n"
                at_once += 1
                found.most_at_once = max(found.most_at_once, at_once)
                await stream.send_all(request_bytes(body, more=headers))
                head, answer = await _answer(stream)
                at_once -= 1
                found.answers += 1
                if not head.startswith(b"HTTP/1.1 200"):
                    found.failures += 1
                elif _crossed(name, head, answer):
                    found.crossings += 1

    with trio.fail_after(TIMEOUT):
        async with trio.open_nursery() as nursery:
            for number in range(sessions):
                nursery.start_soon(client, number)


def measure(sessions: int, turns: int) -> Crossings:
    """Start the product, run the clients, and end it."""
    raise_descriptor_limit()
    found = Crossings()
    with pinned("hermes-trio", product(store="durable", more=["--turns", str(2 * sessions)])) as server:
        os.sched_setaffinity(0, {LOAD_CORE})
        trio.run(_look, server, sessions, turns, found)
    return found


async def _look(server: PinnedServer, sessions: int, turns: int, found: Crossings) -> None:
    await look_for_crossings(server.port, sessions, turns, found)


def main() -> int:
    """Run the benchmark."""
    parser = arguments_for(__doc__)
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=0)
    args = parser.parse_args()
    report = Report("http_isolation", Path(args.results), args.plot)
    turns = args.turns or (2 if args.quick else 5)
    with progress() as bar:
        task = bar.add_task(f"{args.sessions} sessions at once", total=1)
        found = measure(args.sessions, turns)
        bar.advance(task)
    report.figures["isolation"] = attrs.asdict(found)
    rows = [
        ["sessions at once", f"{found.most_at_once:,}"],
        ["answers", f"{found.answers:,}"],
        ["refused or failed", f"{found.failures:,}"],
        ["crossings", f"{found.crossings:,}"],
    ]
    report.table("Identity over HTTP", ["", ""], rows)
    report.bound(f"crossings: {found.crossings} at {found.most_at_once} concurrent HTTP sessions", not found.crossings)
    report.bound(f"{found.answers - found.failures} of {args.sessions * turns} answered", not found.failures)
    return report.finish(strict=args.strict)


if __name__ == "__main__":
    sys.exit(main())
