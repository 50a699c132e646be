"""What a store in PostgreSQL costs beside one in a file: `python -m bench.scale [--quick]`.

1. CPU of the client's process for each turn, 256 turns at a time, on SQLite and on PostgreSQL: a session's row, two messages, a run and three events, in
   one verb. Rounds alternate, the minima count, and a second SQLite round beside them (A/A) says how much of a difference is noise.
2. Turns a second of four processes that write to one database at once, with notifications to each other and without.

The server is started by this program and ends with it. The table goes to standard output, the figures to `bench/results/scale.json`, and the last lines
say which bounds hold.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import trio

from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.outcome import TurnState
from hermes_trio.runtime.ports import EventRow, Message, NewRun, TurnFinish, TurnStart
from hermes_trio.store import open_store
from hermes_trio.store.postgres.hearing import Hearing
from hermes_trio.store.postgres.link import open_link
from hermes_trio.store.postgres.schema import migrate_schema
from hermes_trio.store.postgres.store import open_postgres
from tests.postgres_server import PostgresServer, postgres_server

TASKS = 256
CPU_BOUND = 0.6
NOTIFY_BOUND = 0.7
WRITERS = 4
RESULTS = Path(__file__).parent / "results" / "scale.json"

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
        Hearing.tell = lambda self, signals: self._signals.announce(signals)
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


def measure(quick: bool) -> dict[str, Any]:
    """All figures of a run."""
    rounds, turns, seconds = (2, 4, 2.0) if quick else (4, 12, 5.0)
    figures: dict[str, list[float]] = {"sqlite": [], "sqlite again": [], "postgres": [], "notified": [], "silent": []}
    with postgres_server() as server, tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for name in ("sqlite", "postgres", "sqlite again"):
                path = Path(folder) / f"{name} {number}.db"
                opened = (
                    open_postgres(new_database(server), maintenance=False)
                    if name == "postgres"
                    else open_store(path, maintenance=False)
                )
                figures[name].append(trio.run(cpu_of_a_turn, opened, turns))
            for name in ("notified", "silent"):
                figures[name].append(four_writers(new_database(server), seconds, name == "notified"))
    return {
        "cpu_us": {name: min(figures[name]) for name in ("sqlite", "sqlite again", "postgres")},
        "turns_a_second": {name: max(figures[name]) for name in ("notified", "silent")},
        "samples": figures,
    }


def main() -> None:
    """Measure, print, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--writer", default="")
    parser.add_argument("--name", default="n")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--notify", action="store_true")
    given = parser.parse_args()
    if given.writer:
        print(trio.run(write_for, given.writer, given.name, given.seconds, given.notify))
        return
    found = measure(given.quick)
    cpu, rate = found["cpu_us"], found["turns_a_second"]
    ratio = cpu["postgres"] / cpu["sqlite"]
    told = rate["notified"] / rate["silent"]
    print(
        f"CPU a turn, 256 at once: SQLite {cpu['sqlite']:.0f} µs, again {cpu['sqlite again']:.0f} µs, PostgreSQL {cpu['postgres']:.0f} µs"
    )
    print(f"four writers: {rate['notified']:.0f} turns/s with notifications, {rate['silent']:.0f} without")
    print(
        f"client CPU {ratio:.2f} x SQLite's (bound {CPU_BOUND}): {'holds' if ratio <= CPU_BOUND else 'DOES NOT HOLD'}"
    )
    print(
        f"notifications {told:.2f} x without (bound {NOTIFY_BOUND}): {'holds' if told >= NOTIFY_BOUND else 'DOES NOT HOLD'}"
    )
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
