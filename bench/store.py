"""What durability costs: `python -m bench.store [--quick]`.

Three questions, asked in turns within one run so that a noisy machine disturbs all of them alike:

1. Durable commits per second (synchronous=FULL) from 256 concurrent tasks: the store's group commit, against one transaction per thread hop on
   the standard library's driver.
2. CPU per chat turn: the session's row, a question, an answer and the reply in the outbox, in one commit, 256 turns at a time. All threads count.
   The share of the search index, which is written later and in batches, is shown beside it.
3. A point read: p50 on an idle store, p99 while 256 writers saturate it. On a machine that others use too, the kernel takes the CPU away from
   a few reads; their share is shown, and the p99 of the others, which says what the store does.

The table goes to standard output, the figures to `bench/results/store.json`, and the last line says which bounds hold.
"""

from __future__ import annotations

import argparse
import json
import resource
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import attrs
import trio
from rich.console import Console
from rich.table import Table

from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.outcome import TurnState, Usage
from hermes_trio.runtime.ports import Message, NewReply, TurnFinish, TurnStart
from hermes_trio.store import SqliteStore, open_store

WRITERS = 256
SPEEDUP_BOUND = 8.0
CPU_BOUND = 100.0
CPU_GOAL = 80.0
READ_BOUND = 10.0
RESULTS = Path(__file__).parent / "results" / "store.json"

QUESTION = "Could you look at the build log of the gateway and tell me why the second stage failed last night? " * 2
ANSWER = "The second stage failed because the cache key had changed and the fallback image was no longer there. " * 4

UPSERT = (
    "INSERT INTO cursors (adapter, value, updated_at) VALUES (?, ?, ?) ON CONFLICT (adapter)"
    " DO UPDATE SET value = excluded.value, updated_at = excluded.updated_at"
)


@attrs.define
class Figures:
    """All samples of a run."""

    grouped: list[float] = attrs.Factory(list)
    hopped: list[float] = attrs.Factory(list)
    turn_cpu: list[float] = attrs.Factory(list)
    turn_rate: list[float] = attrs.Factory(list)
    index_cpu: list[float] = attrs.Factory(list)
    idle_p50: list[float] = attrs.Factory(list)
    busy_p99: list[float] = attrs.Factory(list)
    undisturbed_p99: list[float] = attrs.Factory(list)
    disturbed: list[float] = attrs.Factory(list)
    batch: float = 0.0


async def for_a_while(seconds: float, work: Callable[[int], Awaitable[object]], tasks: int = WRITERS) -> int:
    """Let `tasks` tasks repeat `work(task number)` for `seconds`; return how often it was done."""
    done = 0
    end = time.perf_counter() + seconds

    async def loop(number: int) -> None:
        nonlocal done
        while time.perf_counter() < end:
            await work(number)
            done += 1

    async with trio.open_nursery() as nursery:
        for number in range(tasks):
            nursery.start_soon(loop, number)
    return done


async def grouped_commits(store: SqliteStore, seconds: float) -> float:
    """Commits per second through the store."""
    began = time.perf_counter()
    done = await for_a_while(seconds, lambda number: store.set_cursor(f"adapter-{number}", "x" * 32))
    return done / (time.perf_counter() - began)


async def hopped_commits(path: Path, seconds: float) -> float:
    """Commits per second with one transaction per thread hop on the standard library's driver, the same row and settings."""
    db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, cached_statements=256)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute(
        "CREATE TABLE IF NOT EXISTS cursors (adapter TEXT PRIMARY KEY, value TEXT, updated_at REAL) WITHOUT ROWID"
    )
    one_at_a_time = trio.CapacityLimiter(1)

    def write(number: int) -> None:
        db.execute("BEGIN IMMEDIATE")
        db.execute(UPSERT, (f"adapter-{number}", "x" * 32, time.time()))
        db.execute("COMMIT")

    began = time.perf_counter()
    done = await for_a_while(seconds, lambda number: trio.to_thread.run_sync(write, number, limiter=one_at_a_time))
    rate = done / (time.perf_counter() - began)
    db.close()
    return rate


def chat_turn(number: int, count: int) -> TurnFinish:
    """Return the end of a chat turn, as it is stored."""
    key = f"agent:main:telegram:dm:{number}"
    return TurnFinish(
        start=TurnStart(
            turn_id=f"turn_{number}_{count}",
            context=SessionContext(
                platform="telegram", chat_id=str(number), session_key=key, session_id=f"bench_{number}"
            ),
            source="telegram",
        ),
        state=TurnState.COMPLETED,
        messages=(
            Message(role="user", content=QUESTION, platform_message_id=str(count)),
            Message(role="assistant", content=ANSWER, finish_reason="stop", token_count=90),
        ),
        usage=Usage(input_tokens=700, output_tokens=90, api_calls=1),
        text=ANSWER,
        outbox=(NewReply(platform="telegram", target={"chat_id": str(number)}, text=ANSWER),),
    )


async def turns(store: SqliteStore, seconds: float) -> tuple[float, float, float]:
    """CPU microseconds per turn, turns per second, and CPU microseconds per turn for the search index afterwards."""
    written = [chat_turn(number, 0) for number in range(WRITERS)]

    async def turn(number: int) -> None:
        await store.finish_turn(written[number])

    cpu = time.process_time()
    began = time.perf_counter()
    done = await for_a_while(seconds, turn)
    cost = (time.process_time() - cpu) / done
    rate = done / (time.perf_counter() - began)
    cpu = time.process_time()
    await store.index_messages()
    return cost * 1e6, rate, (time.process_time() - cpu) / done * 1e6


def taken_off() -> int:
    """Return the number of involuntary context switches of this thread."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


async def reads(store: SqliteStore, count: int) -> tuple[list[float], list[float]]:
    """Seconds of single point reads, one every few milliseconds: all of them, and those that kept the CPU."""
    samples: list[float] = []
    undisturbed: list[float] = []
    for number in range(count):
        await trio.sleep(0.002)
        taken = taken_off()
        began = time.perf_counter()
        found = await store.get_session(f"bench_{number % WRITERS}")
        seconds = time.perf_counter() - began
        samples.append(seconds)
        if taken_off() == taken:
            undisturbed.append(seconds)
        assert found is not None
    return samples, undisturbed


async def reads_under_load(store: SqliteStore, count: int) -> tuple[list[float], list[float]]:
    """The same while 256 tasks write turns without a pause."""
    async with trio.open_nursery() as nursery:

        async def writer(number: int) -> None:
            turn = chat_turn(number, 1)
            while True:
                await store.finish_turn(turn)

        for number in range(WRITERS):
            nursery.start_soon(writer, number)
        samples = await reads(store, count)
        nursery.cancel_scope.cancel()
    return samples


def p99(samples: list[float]) -> float:
    """The 99th percentile."""
    return sorted(samples)[min(len(samples) - 1, int(len(samples) * 0.99))]


async def measure(directory: Path, rounds: int, seconds: float, reads_a_round: int) -> Figures:
    """All rounds, interleaved."""
    figures = Figures()
    async with open_store(directory / "store.db", maintenance=False) as store:
        await turns(store, 0.2)
        for _ in range(rounds):
            figures.grouped.append(await grouped_commits(store, seconds))
            figures.hopped.append(await hopped_commits(directory / "hopped.db", seconds))
            cost, rate, index = await turns(store, seconds)
            figures.turn_cpu.append(cost)
            figures.turn_rate.append(rate)
            figures.index_cpu.append(index)
            idle, _ = await reads(store, reads_a_round)
            figures.idle_p50.append(statistics.median(idle))
            busy, undisturbed = await reads_under_load(store, reads_a_round)
            figures.busy_p99.append(p99(busy))
            figures.undisturbed_p99.append(p99(undisturbed))
            figures.disturbed.append(1 - len(undisturbed) / len(busy))
        counters = store.statistics()
        figures.batch = counters.verbs / counters.commits
    return figures


def _said_of_reads(ratio: float, calm: float, disturbed: float) -> str:
    """The bound on reads, judged by all of them; what they are without those that the kernel interrupted explains a machine that others use."""
    aside = f" ({calm:.1f}x without the {disturbed:.1%} that the kernel interrupted)" if ratio > READ_BOUND else ""
    return f"read p99/p50 {ratio:.1f}x <= {READ_BOUND:.0f}x{aside}"


def report(figures: Figures) -> int:
    """Print the table and the line of bounds, keep the figures; return how many bounds are broken."""
    grouped, hopped = statistics.median(figures.grouped), statistics.median(figures.hopped)
    speedup = statistics.median(a / b for a, b in zip(figures.grouped, figures.hopped, strict=True))
    cpu = statistics.median(figures.turn_cpu)
    idle, busy = statistics.median(figures.idle_p50) * 1e6, statistics.median(figures.busy_p99) * 1e6
    ratio = statistics.median(b / a for a, b in zip(figures.idle_p50, figures.busy_p99, strict=True))
    calm = statistics.median(b / a for a, b in zip(figures.idle_p50, figures.undisturbed_p99, strict=True))
    disturbed = statistics.median(figures.disturbed)
    table = Table(title="The store, medians of all rounds")
    table.add_column("what")
    table.add_column("figure", justify="right")
    table.add_row("durable commits/s, 256 tasks, group commit", f"{grouped:,.0f}")
    table.add_row("durable commits/s, 256 tasks, a thread hop each (stdlib)", f"{hopped:,.0f}")
    table.add_row("ratio", f"{speedup:.1f} x")
    table.add_row("CPU per chat turn, 256 at a time", f"{cpu:.0f} µs")
    table.add_row("  … and later for the search index", f"{statistics.median(figures.index_cpu):.0f} µs")
    table.add_row("chat turns/s", f"{statistics.median(figures.turn_rate):,.0f}")
    table.add_row("verbs per commit", f"{figures.batch:.0f}")
    table.add_row("point read, idle, p50", f"{idle:.1f} µs")
    table.add_row("point read, writers saturate, p99", f"{busy:.1f} µs")
    table.add_row("ratio", f"{ratio:.1f} x")
    table.add_row("ratio, without reads that the kernel interrupted", f"{calm:.1f} x")
    table.add_row("  … which were", f"{disturbed:.1%}")
    Console(width=100).print(table)
    bounds = {
        f"speedup {speedup:.1f}x >= {SPEEDUP_BOUND:.0f}x": speedup >= SPEEDUP_BOUND,
        f"turn CPU {cpu:.0f}us <= {CPU_BOUND:.0f}us": cpu <= CPU_BOUND,
        _said_of_reads(ratio, calm, disturbed): ratio <= READ_BOUND,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(
        json.dumps(
            {
                "python": sys.version.split()[0],
                "commits_per_second": grouped,
                "commits_per_second_thread_hop": hopped,
                "speedup": speedup,
                "turn_cpu_microseconds": cpu,
                "turn_cpu_goal_microseconds": CPU_GOAL,
                "index_cpu_microseconds": statistics.median(figures.index_cpu),
                "turns_per_second": statistics.median(figures.turn_rate),
                "read_idle_p50_microseconds": idle,
                "read_busy_p99_microseconds": busy,
                "read_ratio": ratio,
                "read_ratio_undisturbed": calm,
                "reads_disturbed": disturbed,
                "bounds": bounds,
                "samples": attrs.asdict(figures),
            },
            indent=2,
        )
        + "\n"
    )
    print("store: " + "; ".join(f"{text} {'ok' if held else 'MISSED'}" for text, held in bounds.items()))
    return sum(not held for held in bounds.values())


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two short rounds")
    parser.add_argument(
        "--directory", type=Path, default=None, help="where the databases go (default: a temporary one)"
    )
    arguments = parser.parse_args()
    rounds, seconds, reads_a_round = (2, 0.5, 200) if arguments.quick else (5, 2.0, 600)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        return report(trio.run(measure, Path(directory), rounds, seconds, reads_a_round))


if __name__ == "__main__":
    sys.exit(main())
