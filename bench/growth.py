"""Does a turn cost more as the work grows? `python -m bench.growth [--quick]` or `make bench-growth`.

CPU time of a turn (runtime and durable store; all threads count), on random stored sessions, 32 at a time:

- with a thousand and with a million stored sessions of two messages each (quick: a hundred thousand);
- with ten and with ten thousand live jobs, each a session of its own in the tree;
- with ten and with ten thousand more nodes in the tree;
- with a history of 0 to 1,000 messages, which the agent reads: how much a message adds, and how straight the line is.

Each pair is measured in turns, so that a noisy machine disturbs both alike. The databases are filled by SQL in the store's own schema.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import apsw
import trio
from rich.progress import Progress

from bench.report import Report, arguments_for, progress, spread
from hermes_trio import (
    Job,
    JobSpec,
    JobState,
    Reply,
    Runtime,
    RuntimeSettings,
    SessionContext,
    Turn,
    TurnInput,
    TurnSpec,
)
from hermes_trio.gateway.serving import settle_heap
from hermes_trio.store import open_store

AT_ONCE = 32
BOUND = 1.5
JOBS_OF_A_SESSION = 10

_SESSIONS = """
WITH RECURSIVE counter (k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM counter WHERE k < ?1)
INSERT INTO sessions (n, id, source, session_key, model, preview, routing, started_at, last_active, message_count)
SELECT k, 'stored-' || k, 'api_server', 'stored-' || k, 'demo', 'hello', '{}', ?2 - k, ?2 - k, 2 FROM counter
"""
_MESSAGES = """
INSERT INTO messages (session, role, content, timestamp)
SELECT n, ?1, ?2, started_at FROM sessions ORDER BY n
"""
TEXT = "The second stage failed because the cache key had changed and the fallback image was no longer there."


async def answer(turn: Turn) -> Reply:
    """Read the conversation, and answer."""
    await turn.history()
    return Reply(text="Hello! It is sunny in Paris today.")


@asynccontextmanager
async def filled(path: Path, sessions: int, **settings: Any) -> AsyncIterator[Runtime]:
    """Open a runtime on a durable store with this many sessions. They are not indexed for search, which would be measured, too."""
    async with open_store(path, maintenance=False):
        pass
    db = apsw.Connection(str(path))
    db.pragma("synchronous", "off")
    db.execute("BEGIN IMMEDIATE")
    db.execute(_SESSIONS, (sessions, time.time()))
    db.execute(_MESSAGES, ("user", "hello, " + TEXT))
    db.execute(_MESSAGES, ("assistant", TEXT))
    db.execute("COMMIT")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    db.close()
    async with Runtime(
        agent=answer,
        store=open_store(path, maintenance=False),
        settings=RuntimeSettings(watchdog_seconds=0, **settings),
    ) as runtime:
        yield runtime


def of_session(name: str) -> SessionContext:
    """Return a context as `http/turns.py` makes it."""
    return SessionContext(platform="api_server", source="api_server", session_id=name, session_key=name, chat_id=name)


async def cpu_per_turn(runtime: Runtime, turns: int, choose: Callable[[], str]) -> float:
    """CPU microseconds a turn, of all threads, 32 turns at a time."""
    left = turns

    async def client() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            outcome = await runtime.stateless.run_turn(
                TurnSpec(input=TurnInput(text="hello"), context=of_session(choose()))
            )
            assert outcome.ok, outcome.error

    began = time.process_time()
    async with trio.open_nursery() as nursery:
        for _ in range(AT_ONCE):
            nursery.start_soon(client)
    return 1e6 * (time.process_time() - began) / turns


def anyone(sessions: int) -> Callable[[], str]:
    """Chooses stored sessions at random, the same in every run."""
    choice = random.Random(7)
    return lambda: f"stored-{choice.randint(1, sessions)}"


Pair = tuple[list[float], list[float]]


async def in_turns(one: Callable[[], Awaitable[float]], other: Callable[[], Awaitable[float]], rounds: int) -> Pair:
    """Measure two things alternately. The first round warms both up and does not count."""
    await one()
    await other()
    found: Pair = ([], [])
    for _ in range(rounds):
        found[0].append(await one())
        found[1].append(await other())
    return found


async def by_sessions(folder: Path, few: int, many: int, turns: int, rounds: int) -> Pair:
    """A small and a large database."""
    async with AsyncExitStack() as stack:
        small = await stack.enter_async_context(filled(folder / "few.db", few))
        large = await stack.enter_async_context(filled(folder / "many.db", many))
        settle_heap()
        some, any_of_many = anyone(few), anyone(many)
        return await in_turns(
            lambda: cpu_per_turn(small, turns, some), lambda: cpu_per_turn(large, turns, any_of_many), rounds
        )


async def _lives_on(job: Job) -> JobState:
    job.started(job.id)
    await trio.sleep_forever()
    raise AssertionError("a job that sleeps for ever has woken up")


async def add_jobs(runtime: Runtime, count: int, first: int = 0) -> None:
    """Start jobs that run until the runtime ends, several for each session."""
    spec = JobSpec(kind="process", title="lives on", run=_lives_on)
    for number in range(first, first + count):
        owner = runtime.owner(of_session(f"with-jobs-{number // JOBS_OF_A_SESSION}"))
        await runtime.supervisor.start(spec, owner)


async def by_jobs(folder: Path, few: int, many: int, turns: int, rounds: int) -> Pair:
    """A few and many live jobs, in two runtimes."""
    async with AsyncExitStack() as stack:
        calm = await stack.enter_async_context(filled(folder / "calm.db", 1000))
        busy = await stack.enter_async_context(filled(folder / "busy.db", 1000, max_jobs=2 * many))
        await add_jobs(calm, few)
        async with trio.open_nursery() as nursery:
            for part in range(0, many, many // 50):
                nursery.start_soon(add_jobs, busy, many // 50, part)
        settle_heap()
        return await in_turns(
            lambda: cpu_per_turn(calm, turns, anyone(1000)), lambda: cpu_per_turn(busy, turns, anyone(1000)), rounds
        )


async def by_nodes(folder: Path, few: int, many: int, turns: int, rounds: int) -> Pair:
    """A small and a large tree."""
    async with AsyncExitStack() as stack:
        bare = await stack.enter_async_context(filled(folder / "bare.db", 1000))
        leafy = await stack.enter_async_context(filled(folder / "leafy.db", 1000))
        for runtime, count in ((bare, few), (leafy, many)):
            for number in range(count):
                runtime.tree.root.open("task", f"leaf-{number}")
        settle_heap()
        return await in_turns(
            lambda: cpu_per_turn(bare, turns, anyone(1000)), lambda: cpu_per_turn(leafy, turns, anyone(1000)), rounds
        )


async def by_history(folder: Path, lengths: list[int], turns: int, rounds: int) -> dict[int, list[float]]:
    """Conversations of several lengths, measured in turns."""
    found: dict[int, list[float]] = {length: [] for length in lengths}
    async with filled(folder / "history.db", 10) as runtime:
        settle_heap()
        for number in range(rounds + 1):
            for length in lengths:
                # Fresh conversations for each round, so that the turns themselves hardly lengthen them.
                names = [f"long-{number}-{length}-{copy}" for copy in range(AT_ONCE)]
                await _converse(folder / "history.db", names, length)
                cpu = await cpu_per_turn(runtime, turns, lambda names=names: random.choice(names))
                if number:
                    found[length].append(cpu)
    return found


async def _converse(path: Path, names: list[str], length: int) -> None:
    def fill() -> None:
        db = apsw.Connection(str(path))
        db.set_busy_timeout(5000)
        db.execute("BEGIN IMMEDIATE")
        for name in names:
            db.execute(
                "INSERT INTO sessions (id, source, session_key, routing, preview, model, started_at, last_active)"
                " VALUES (?, 'api_server', ?, '{}', 'hello', 'demo', 0, 0)",
                (name, name),
            )
            number = db.last_insert_rowid()
            rows = [(number, "assistant" if k % 2 else "user", TEXT) for k in range(length)]
            db.executemany("INSERT INTO messages (session, role, content, timestamp) VALUES (?, ?, ?, 0)", rows)
        db.execute("COMMIT")
        db.close()

    await trio.to_thread.run_sync(fill)


def line(points: dict[int, float]) -> tuple[float, float, float]:
    """Intercept, slope and the share of the variance that a straight line explains."""
    lengths, costs = list(points), list(points.values())
    slope, intercept = statistics.linear_regression(lengths, costs)
    return intercept, slope, statistics.correlation(lengths, costs) ** 2


async def _measure(folder: Path, quick: bool, bar: Progress) -> dict[str, Any]:
    turns, rounds = (300, 3) if quick else (2000, 7)
    many_sessions = 100_000 if quick else 1_000_000
    task = bar.add_task("stored sessions", total=4)
    figures: dict[str, Any] = {"sessions": {"few": 1000, "many": many_sessions}}
    figures["sessions"]["cpu_us"] = await by_sessions(folder, 1000, many_sessions, turns, rounds)
    bar.update(task, advance=1, description="live jobs")
    figures["jobs"] = dict[str, Any](few=10, many=10_000)
    figures["jobs"]["cpu_us"] = await by_jobs(folder, 10, 10_000, turns, rounds)
    bar.update(task, advance=1, description="tree nodes")
    figures["nodes"] = dict[str, Any](few=10, many=10_000)
    figures["nodes"]["cpu_us"] = await by_nodes(folder, 10, 10_000, turns, rounds)
    bar.update(task, advance=1, description="length of the history")
    lengths = [0, 50, 100, 200] if quick else [0, 50, 100, 200, 500, 1000]
    figures["history"] = await by_history(folder, lengths, turns // 4, max(2, rounds // 2))
    bar.advance(task)
    return figures


def main() -> int:
    """Run the benchmark."""
    args = arguments_for(__doc__).parse_args()
    report = Report("growth", args.results, args.plot)
    with progress() as bar, tempfile.TemporaryDirectory(prefix="hermes-trio-bench-") as folder:
        figures = trio.run(_measure, Path(folder), args.quick, bar)
    report.figures |= figures
    rows: list[list[str]] = []
    for what, words in (("sessions", "stored sessions"), ("jobs", "live jobs"), ("nodes", "tree nodes")):
        few, many = figures[what]["cpu_us"]
        ratio = statistics.median([more / less for less, more in zip(few, many, strict=True)])
        small, large = figures[what]["few"], figures[what]["many"]
        rows.append([f"{small:,} → {large:,} {words}", spread(few, 0), spread(many, 0), f"{ratio:.2f}"])
        report.bound(f"{ratio:.2f} x from {small:,} to {large:,} {words} (at most {BOUND})", ratio <= BOUND)
    report.table("CPU microseconds a turn", ["", "few", "many", "ratio"], rows)
    points = {length: statistics.median(found) for length, found in figures["history"].items()}
    intercept, slope, straight = line(points)
    report.table(
        "CPU microseconds a turn, by messages in its history",
        ["messages", "us"],
        [[f"{length:,}", spread(found, 0)] for length, found in figures["history"].items()],
    )
    report.bound(f"history linear, {slope:.2f} us a message (R2 {straight:.3f}, at least 0.9)", straight >= 0.9)

    def draw(axes: Any) -> None:
        left, right = axes
        names = ["sessions", "jobs", "nodes"]
        for place, (offset, which) in enumerate(((-0.2, "few"), (0.2, "many"))):
            heights = [statistics.median(figures[name]["cpu_us"][place]) for name in names]
            left.bar([k + offset for k in range(len(names))], heights, width=0.4, label=which)
        left.set_xticks(
            range(len(names)), [f"{figures[name]['few']:,} → {figures[name]['many']:,}\n{name}" for name in names]
        )
        left.set_title("CPU us a turn")
        left.legend()
        right.plot(list(points), list(points.values()), "o")
        right.plot(list(points), [intercept + slope * length for length in points])
        right.set_title("CPU us a turn, by messages in its history")

    report.plot(draw, panels=2)
    return report.finish(strict=args.strict)


if __name__ == "__main__":
    sys.exit(main())
