"""What a turn and a tree cost, against bare Trio: `python -m bench.runtime [--quick]`.

Time. CPU time of the loop's thread; in each round one after the other and in the same process, so that a noisy machine disturbs all of them alike:

- bare: one nursery with one task that returns at once. This is what the others are divided by;
- turn scope: a turn is made (plan, id, node in the tree, cancel scope), its nursery opens with the context bound, and everything is closed again;
- turn: the whole life of an empty turn (session lock, scope, an agent that answers at once, outcome, the records of its commit under the shield,
  settlement), on a store that writes nothing down;
- embedded turn: the same through `Runtime.run_turn`, with admission;
- child turn: the same through `Turn.run_child`, inside a turn;
- lane turn: a message is accepted, its lane made, the turn run, and the lane gone again;
- job: a job is started with its handshake, does nothing, ends and is waited for.

Memory. Ten thousand idle turns, each in a task of its own, and ten thousand bare tasks with a nursery each, in fresh processes: what the resident set
grows by, and what tracemalloc counts.

Snapshot. The tree of ten thousand live turns as data, while nothing else can run: elapsed time, and the time of the loop's own thread, which other
processes on the machine do not add to.
"""

from __future__ import annotations

import gc
import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import attrs
import trio
import trio.testing
from rich.progress import Progress

from bench.report import Report, arguments_for, progress, spread
from hermes_trio import (
    InboxRow,
    Interface,
    Job,
    JobSpec,
    NewMessage,
    Outcome,
    Runtime,
    RuntimeSettings,
    RuntimeStore,
    SessionContext,
    Turn,
    TurnInput,
)
from hermes_trio.runtime.context import Binding, _binding
from hermes_trio.runtime.ports import InboxKind, JobFinish, JobStart, Recovery, TurnFinish, TurnStart, inbox_topic
from hermes_trio.runtime.turn import TurnSpec
from hermes_trio.runtime.turn_lifecycle import run_turn
from hermes_trio.store.signals import Signals

BOUND = 3.0
GOAL = 2.0
IDLE = 10_000
IDLE_BOUND = 12 * 1024
SNAPSHOT_BOUND = 50.0
"""Milliseconds."""

Work = Callable[[int], Awaitable[None]]
"""Does something so many times."""


class NothingWritten:
    """The verbs of a store that a turn, a lane and a job call, without a store: messages wait in a list."""

    lease_seconds = 0.0

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._waiting: dict[str, list[InboxRow]] = {}
        self._signals = Signals()
        self.subscribe = self._signals.subscribe

    async def recover(self, epoch: str) -> Recovery:
        return Recovery(epoch=epoch)

    async def waiting_sessions(self, inbox: str) -> list[str]:
        return []

    async def backlog(self) -> dict[str, int]:
        return {}

    async def resolve_session(self, context: SessionContext, *, source: str, fresh: bool = False) -> str:
        return context.session_key

    async def accept_message(self, message: NewMessage, *, limit: int | None = None) -> int:
        row = InboxRow(
            id=next(self._ids),
            kind=InboxKind.MESSAGE,
            inbox=message.inbox,
            session_key=message.session_key,
            routing=message.routing,
            text=message.text,
        )
        self._waiting.setdefault(message.session_key, []).append(row)
        self._signals.announce([(inbox_topic(message.inbox), message.session_key)])
        return row.id

    async def take_inbox(self, inbox: str, session_key: str, limit: int = 32) -> Sequence[InboxRow]:
        return self._waiting.get(session_key, [])

    async def begin_turn(self, start: TurnStart) -> None:
        del self._waiting[start.context.session_key]

    async def finish_turn(self, finish: TurnFinish) -> None:
        pass

    async def start_job(self, job: JobStart) -> None:
        pass

    async def finish_job(self, job: JobFinish) -> bool:
        return False


@asynccontextmanager
async def nothing_written() -> AsyncIterator[RuntimeStore]:
    """Opens that store."""
    yield cast(RuntimeStore, NothingWritten())


async def answer(turn: Turn) -> str:
    """An agent that answers at once."""
    return "ok"


async def idle(turn: Turn) -> str:
    """An agent that waits."""
    await trio.sleep_forever()
    raise AssertionError


def open_runtime(agent: Callable[[Turn], Awaitable[str]] = answer) -> Runtime:
    """A runtime without a watchdog, so that nothing but the work is measured."""
    return Runtime(
        agent=agent, store=nothing_written(), settings=RuntimeSettings(watchdog_seconds=0, max_turns=2 * IDLE)
    )


def session(number: int) -> SessionContext:
    """The context of a session."""
    key = f"agent:main:bench:dm:{number}"
    return SessionContext(platform="bench", chat_id=str(number), session_key=key, session_id=key)


# -- time -------------------------------------------------------------------------------------------------------------------------


class Answers(Interface):
    """A delivering front that says when a turn of it has ended."""

    platform = "bench"

    def __init__(self) -> None:
        self.ended = trio.Event()

    async def on_turn_end(self, outcome: Outcome) -> None:
        self.ended.set()


async def no_task() -> None:
    """What the bare nursery runs."""


@asynccontextmanager
async def works() -> AsyncIterator[dict[str, Work]]:
    """Everything that is timed."""
    interface, where, said = Answers(), session(0), TurnInput(text="hello")
    message = NewMessage(inbox="bench", session_key=where.session_key, routing=where, text="hello")
    async with open_runtime() as runtime, runtime.delivering(interface) as inbox:
        core, channel, owner = runtime.core, inbox.channel, runtime.owner(where)

        async def bare(times: int) -> None:
            for _ in range(times):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(no_task)

        async def turn_scope(times: int) -> None:
            for _ in range(times):
                plan = TurnSpec(input=said, context=where, agent=answer, source="bench")
                turn = core.make_turn(plan, channel)
                core.live_turns[turn.id] = turn
                token = _binding.set(Binding(turn.context, turn, turn.node))
                async with trio.open_nursery() as nursery:
                    turn.enter(nursery)
                _binding.reset(token)
                del core.live_turns[turn.id]
                turn.node.close()

        async def turn(times: int) -> None:
            for _ in range(times):
                plan = TurnSpec(input=said, context=where, agent=answer, source="bench")
                await run_turn(core, core.make_turn(plan, channel))

        async def embedded(times: int) -> None:
            for _ in range(times):
                await runtime.run_turn(said, where)

        async def child(times: int) -> None:
            async def parent(turn: Turn) -> str:
                for _ in range(times):
                    await turn.run_child(said, agent=answer)
                return "ok"

            await runtime.run_turn(said, where, agent=parent)

        async def lane(times: int) -> None:
            for _ in range(times):
                interface.ended = trio.Event()
                await inbox.accept(message)
                await interface.ended.wait()

        async def job(times: int) -> None:
            async def run(job: Job) -> None:
                job.started()

            spec = JobSpec(kind="bench", title="nothing", run=run)
            for _ in range(times):
                await (await core.supervisor.start(spec, owner)).wait()

        yield {
            "bare nursery, one task": bare,
            "turn scope": turn_scope,
            "turn": turn,
            "embedded turn": embedded,
            "child turn": child,
            "lane turn": lane,
            "job": job,
        }


async def time_all(rounds: int, times: int, bar: Progress) -> dict[str, list[float]]:
    """CPU microseconds of each, a sample a round. The first round warms up and does not count."""
    row = bar.add_task("time", total=rounds)
    samples: dict[str, list[float]] = {}
    async with works() as timed:
        for number in range(-1, rounds):
            for name, work in timed.items():
                gc.collect()
                began = time.thread_time()
                await work(times)
                if number >= 0:
                    samples.setdefault(name, []).append((time.thread_time() - began) / times * 1e6)
            bar.update(row, completed=number + 1)
    return samples


# -- memory -----------------------------------------------------------------------------------------------------------------------


def resident() -> int:
    """Bytes of memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def bare_idle() -> None:
    """What an idle turn is in bare Trio: a nursery, and a wait."""
    async with trio.open_nursery():
        await trio.sleep_forever()


async def weigh(what: str, measure: Callable[[], int]) -> float:
    """Bytes that one of so many idle tasks or turns takes."""
    async with open_runtime(idle) as runtime, trio.open_nursery() as nursery:
        contexts = [session(number) for number in range(IDLE)]
        gc.collect()
        before = measure()
        for context in contexts:
            if what == "turn":
                nursery.start_soon(runtime.run_turn, "hello", context)
            else:
                nursery.start_soon(bare_idle)
        await trio.testing.wait_all_tasks_blocked()
        gc.collect()
        grown = measure() - before
        nursery.cancel_scope.cancel()
    return grown / IDLE


def weigh_here(what: str) -> None:
    """The part that runs in a fresh process: print both figures."""
    by_resident = trio.run(weigh, what, resident)
    tracemalloc.start()
    by_tracemalloc = trio.run(weigh, what, lambda: tracemalloc.get_traced_memory()[0])
    print(json.dumps({"resident": by_resident, "tracemalloc": by_tracemalloc}))


def weigh_all(bar: Progress) -> dict[str, dict[str, float]]:
    """Bytes of an idle turn and of an idle task, each measured in a process of its own."""
    row = bar.add_task("memory", total=2)
    weights: dict[str, dict[str, float]] = {}
    for what in ("bare", "turn"):
        command = [sys.executable, "-m", "bench.runtime", "--weigh", what]
        told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
        weights[what] = json.loads(told.stdout)
        bar.advance(row)
    return weights


# -- the snapshot -----------------------------------------------------------------------------------------------------------------


@attrs.define
class Snapshots:
    """Milliseconds of each snapshot."""

    nodes: int = 0
    elapsed: list[float] = attrs.Factory(list[float])
    thread: list[float] = attrs.Factory(list[float])


async def take_snapshots(count: int, bar: Progress) -> Snapshots:
    """Snapshots of a tree of ten thousand turns and a few nodes around them."""
    row = bar.add_task("snapshot", total=count)
    taken = Snapshots()
    async with open_runtime(idle) as runtime, trio.open_nursery() as nursery:
        for number in range(IDLE):
            nursery.start_soon(runtime.run_turn, "hello", session(number))
        await trio.testing.wait_all_tasks_blocked()
        taken.nodes = runtime.tree.size
        for _ in range(count):
            began, busy = time.perf_counter(), time.thread_time()
            runtime.tree.snapshot()
            taken.elapsed.append((time.perf_counter() - began) * 1e3)
            taken.thread.append((time.thread_time() - busy) * 1e3)
            await trio.sleep(0.01)
            bar.advance(row)
        nursery.cancel_scope.cancel()
    return taken


# -- all of it --------------------------------------------------------------------------------------------------------------------


def draw(times: dict[str, list[float]], weights: dict[str, dict[str, float]], snapshots: Snapshots, axes: Any) -> None:
    """Ratios, bytes, milliseconds."""
    left, middle, right = axes
    base = times["bare nursery, one task"]
    ratios = {name: [a / b for a, b in zip(taken, base, strict=True)] for name, taken in times.items()}
    left.boxplot(list(ratios.values()), orientation="horizontal", tick_labels=list(ratios), showfliers=False)
    left.axvline(BOUND, color="tab:red", linestyle="--", label=f"bound of a turn: {BOUND:g}")
    left.axvline(GOAL, color="tab:green", linestyle=":", label=f"goal: {GOAL:g}")
    left.set_xlim(left=0)
    left.set_xlabel("times one bare nursery with one task")
    left.invert_yaxis()
    left.legend(fontsize=7)
    left.set_title("Time")
    names = [f"{what}, {how}" for what, by in weights.items() for how in by]
    kilobytes = [size / 1024 for by in weights.values() for size in by.values()]
    middle.bar_label(middle.bar(names, kilobytes), fmt="%.1f")
    middle.axhline(IDLE_BOUND / 1024, color="tab:red", linestyle="--")
    middle.tick_params("x", rotation=20)
    middle.set_ylabel("KiB")
    middle.set_title(f"Memory of one of {IDLE:,} idle turns")
    right.plot(snapshots.elapsed, label="elapsed")
    right.plot(snapshots.thread, label="the loop's thread")
    right.axhline(SNAPSHOT_BOUND, color="tab:red", linestyle="--")
    right.set_ylim(bottom=0)
    right.set_ylabel("ms")
    right.set_title(f"Snapshot of {snapshots.nodes:,} nodes")
    right.legend(fontsize=7)


def publish(
    report: Report, times: dict[str, list[float]], weights: dict[str, dict[str, float]], snapshots: Snapshots
) -> None:
    """The tables, the figures, the plot and the bounds."""
    base = times["bare nursery, one task"]
    ratios = {name: statistics.median(a / b for a, b in zip(taken, base, strict=True)) for name, taken in times.items()}
    report.table(
        "CPU time, medians of all rounds (smallest to largest)",
        ["what", "µs", "times bare"],
        [[name, spread(taken), f"{ratios[name]:.2f}"] for name, taken in times.items()],
    )
    report.table(
        f"Memory of one of {IDLE:,} that wait, KiB",
        ["what", "resident set", "tracemalloc"],
        [
            [words, f"{weights[what]['resident'] / 1024:.1f}", f"{weights[what]['tracemalloc'] / 1024:.1f}"]
            for what, words in (("bare", "a bare task with a nursery"), ("turn", "a turn, its task included"))
        ],
    )
    report.table(
        f"Snapshot of {snapshots.nodes:,} nodes, ms",
        ["how long", "median (smallest to largest)"],
        [["elapsed", spread(snapshots.elapsed)], ["the loop's own thread", spread(snapshots.thread)]],
    )
    report.figures = {
        "ratios": ratios,
        "microseconds": {name: statistics.median(taken) for name, taken in times.items()},
        "bytes_of_an_idle_turn": weights,
        "snapshot_milliseconds": {
            "nodes": snapshots.nodes,
            "elapsed_median": statistics.median(snapshots.elapsed),
            "thread_median": statistics.median(snapshots.thread),
            "thread_largest": max(snapshots.thread),
        },
        "samples": {"microseconds": times, **attrs.asdict(snapshots)},
    }
    report.plot(partial(draw, times, weights, snapshots), panels=3)
    for name in ("turn scope", "turn"):
        report.bound(
            f"{name} {ratios[name]:.2f}x <= {BOUND:g}x (goal {GOAL:g}x{', met' if ratios[name] <= GOAL else ''})",
            ratios[name] <= BOUND,
        )
    heaviest = max(weights["turn"].values())
    report.bound(f"idle turn {heaviest / 1024:.1f} KiB <= {IDLE_BOUND // 1024} KiB", heaviest <= IDLE_BOUND)
    typical, longest = statistics.median(snapshots.elapsed), max(snapshots.thread)
    report.bound(
        f"snapshot {typical:.0f} ms (largest of the loop's thread {longest:.0f} ms) <= {SNAPSHOT_BOUND:.0f} ms",
        max(typical, longest) <= SNAPSHOT_BOUND,
    )


def main() -> int:
    """Measure and report."""
    parser = arguments_for(__doc__)
    parser.add_argument("--weigh", choices=("bare", "turn"), help="print the memory of one kind, and nothing else")
    options = parser.parse_args()
    if options.weigh:
        weigh_here(options.weigh)
        return 0
    rounds, times, count = (5, 300, 10) if options.quick else (25, 1000, 40)
    with progress() as bar:
        weights = weigh_all(bar)
        snapshots = trio.run(take_snapshots, count, bar)
        timed = trio.run(time_all, rounds, times, bar)
    report = Report("runtime", options.results, options.plot)
    publish(report, timed, weights, snapshots)
    return report.finish(strict=options.strict)


if __name__ == "__main__":
    sys.exit(main())
