"""What a turn and a run leave on the disk of PostgreSQL, and what live turns weigh: `python -m bench.disk [--quick]` or `make bench-disk`.

The product serves each kind of request from 32 clients. Before and after it, the size of the database (`pg_database_size`) and the position in the WAL
(`pg_wal_lsn_diff`) are read, after a checkpoint and after the indexer has had its time. The texts are a prompt and an answer of the size of `TEXT`. Then
turns are held, and the resident memory of the node is divided among them; at last the connections of the node are counted.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import psycopg
import trio

from bench.pinned_server import REFERENCE_KEY, ROOT, rss_bytes
from bench.report import Report, arguments_for
from bench.scale import new_database
from tests.e2e.server_process import server_process
from tests.postgres_server import postgres_server

TEXT = "a few words of a conversation, as people and models write them. " * 16
ADMIN = {"Authorization": f"Bearer {REFERENCE_KEY}"}
CLIENTS = 32
DELTAS = 20
SETTLE_SECONDS = 5.0

Request = Callable[[int], tuple[str, dict[str, Any], dict[str, str]]]


def chat(number: int) -> tuple[str, dict[str, Any], dict[str, str]]:
    """A chat completion in a session of its own."""
    body = {"messages": [{"role": "user", "content": f"{number} {TEXT}"}]}
    return "/v1/chat/completions", body, {"X-Hermes-Session-Id": f"own-{number}"}


def talk(number: int) -> tuple[str, dict[str, Any], dict[str, str]]:
    """A turn that continues one of a few sessions."""
    path, body, _ = chat(number)
    return path, body, {"X-Hermes-Session-Id": f"shared-{number % CLIENTS}"}


def run(number: int) -> tuple[str, dict[str, Any], dict[str, str]]:
    """A run with an event log, in a session of its own."""
    return "/v1/runs", {"input": f"#d{DELTAS} {number} {TEXT}", "session_id": f"run-{number}"}, {}


KINDS: dict[str, Request] = {
    "a chat completion, a new session each": chat,
    "a chat completion that continues a session": talk,
    f"a run with {DELTAS} deltas": run,
}


async def drive(url: str, count: int, request: Request) -> None:
    """Make so many requests, and wait until all turns have ended."""
    numbers = iter(range(count))
    async with httpx2.AsyncClient(base_url=url, headers=ADMIN, trust_env=False, timeout=60) as http:

        async def client() -> None:
            for number in numbers:
                path, body, headers = request(number)
                answer = await http.post(path, json=body, headers=headers)
                answer.raise_for_status()
                if path == "/v1/runs":
                    run_id = answer.json()["run_id"]
                    await http.get(f"/v1/runs/{run_id}", params={"wait": "settled", "timeout": "30"})

        async with trio.open_nursery() as nursery:
            for _ in range(CLIENTS):
                nursery.start_soon(client)
    await trio.sleep(SETTLE_SECONDS)


def sizes(database: str) -> tuple[int, int]:
    """The bytes of the database, and of all WAL so far."""
    with psycopg.connect(database) as link:
        row = link.execute(
            "SELECT pg_database_size(current_database()), pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint"
        ).fetchone()
    assert row is not None
    return row


async def hold(url: str, count: int) -> None:
    """Start turns that wait."""
    async with httpx2.AsyncClient(base_url=url, headers=ADMIN, trust_env=False, timeout=60) as http:
        for number in range(count):
            answer = await http.post("/v1/runs", json={"input": "#h", "session_id": f"held-{number}"})
            answer.raise_for_status()
    await trio.sleep(SETTLE_SECONDS)


def bind(url: str, count: int) -> float:
    """Return the bytes of memory that a session weighs after its first command, which binds it to its node."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {"HERMES_STORE_URL": url, "PYTHONPATH": str(ROOT)}
        with (
            server_process(Path(folder), environment=environment, key=REFERENCE_KEY) as node,
            httpx2.Client(base_url=node.url, headers=ADMIN, trust_env=False, timeout=60) as http,
        ):

            def run_commands(first: int, end: int) -> int:
                for number in range(first, end):
                    body = {"input": "!run true", "session_id": f"bound-{number}"}
                    run_id = http.post("/v1/runs", json=body).raise_for_status().json()["run_id"]
                    http.get(f"/v1/runs/{run_id}", params={"wait": "settled", "timeout": "30"}).raise_for_status()
                return rss_bytes(node.pid)

            before = run_commands(0, 10)
            return (run_commands(10, 10 + count) - before) / count


def main() -> int:
    """Measure and print."""
    args = arguments_for(__doc__).parse_args()
    count = 500 if args.quick else 5_000
    held = 200 if args.quick else 900
    report = Report("disk", args.results, args.plot)
    rows: list[list[str]] = []
    from bench.scale import _end, _product, _start  # the processes of that benchmark

    with postgres_server() as server:
        url = new_database(server)
        process, port = _start([*_product("--url", url, "--node", "one")], ROOT)
        try:
            address = f"http://127.0.0.1:{port}"
            trio.run(drive, address, CLIENTS, chat)
            before = rss_bytes(process.pid)
            trio.run(hold, address, held)
            weight = (rss_bytes(process.pid) - before) / held
        finally:
            _end([process])
        process, port = _start([*_product("--url", url, "--node", "two")], ROOT)
        try:
            address = f"http://127.0.0.1:{port}"
            trio.run(drive, address, CLIENTS, chat)
            for name, request in KINDS.items():
                server.execute("CHECKPOINT")
                size, log = sizes(url)
                trio.run(drive, address, count, request)
                grown, logged = (after - before for after, before in zip(sizes(url), (size, log), strict=True))
                report.figures[name] = {"disk": grown / count, "wal": logged / count}
                rows.append([name, f"{grown / count / 1024:.1f}", f"{logged / count / 1024:.1f}"])
            with psycopg.connect(url) as link:
                (connections,) = link.execute(
                    "SELECT count(*) - 1 FROM pg_stat_activity WHERE datname = current_database()"
                ).fetchone() or (0,)
            bound = bind(url, 60)
            report.figures |= {
                "bound session": bound,
                "live run": weight,
                "connections": connections,
                "turns": count,
                "text": len(TEXT),
            }
        finally:
            _end([process])
    report.table(f"{count:,} of each, prompts of {len(TEXT):,} bytes", ["", "KiB of disk", "KiB of WAL"], rows)
    words = ", ".join(f"{name}: {disk} KiB of disk and {wal} of WAL" for name, disk, wal in rows)
    return report.finish(
        f"{words}; a live run {weight / 1024:.1f} KiB of memory, a bound session {bound / 1024:.0f}; {connections} connections of a node",
        strict=args.strict,
    )


if __name__ == "__main__":
    sys.exit(main())
