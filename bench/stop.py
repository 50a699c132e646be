"""The time of a stop until every task and process has ended: `python -m bench.stop [--quick]`.

A turn of the real agent (demo model, all tools, a store in a file) delegates to three synchronous children, each with a command in the foreground, and runs two
commands of its own beside them: four turns, five process groups. When all five commands run, the turn is stopped. Measured is the time from the stop to its
receipt, which comes when the last process is gone and every node has left the tree; the benchmark checks with its own eyes that the processes are gone.

The same with commands that ignore SIGTERM shows what the grace costs. It has no bound: it is the grace, and a little.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import attrs
import msgspec
import trio
from rich.progress import Progress

from bench.report import Report, arguments_for, progress, spread
from hermes_trio import Runtime, SessionContext, StopReceipt, Turn, TurnHooks
from hermes_trio.agent.loop import ModelAgent
from hermes_trio.providers.demo import DemoModel
from hermes_trio.store import open_store
from hermes_trio.store.ports import Store
from hermes_trio.tools.toolbox import Toolbox, open_toolbox

CHILDREN = 3
PROCESSES = 5
BOUND = 500.0

OBEDIENT = "sleep 3600; true"
STUBBORN = "trap '' TERM; sleep 3600; true"


@attrs.frozen
class Sample:
    """One stop."""

    milliseconds: float
    nodes: int
    hows: tuple[str, ...]


class OneModel:
    """Routes with the demo model alone."""

    def __init__(self) -> None:
        self._model = DemoModel()

    def get(self, name: str = "") -> DemoModel:
        return self._model

    def __contains__(self, name: object) -> bool:
        return False


@asynccontextmanager
async def gateway(folder: str) -> AsyncIterator[tuple[Runtime, Toolbox]]:
    """A runtime with all tools and the real agent."""
    opened: list[Toolbox] = []

    @asynccontextmanager
    async def stage(runtime: Runtime) -> AsyncIterator[None]:
        async with open_toolbox(runtime) as box:
            runtime.core.agent = ModelAgent(
                OneModel(), box, history=cast("Store", runtime.store), directives=lambda turn: True
            )
            opened.append(box)
            yield

    async def unassembled(turn: Turn) -> str:
        raise AssertionError("the agent is put in place before any turn can start")

    async with Runtime(agent=unassembled, store=open_store(Path(folder) / "state.db"), stages=[stage]) as runtime:
        yield runtime, opened[0]


def message(command: str) -> str:
    """The directives for the demo model."""
    tasks = [{"goal": f"!run {command}"} for _ in range(CHILDREN)]
    own = [f"!run {command}" for _ in range(PROCESSES - CHILDREN)]
    return "\n".join([f"!tool delegate_task {msgspec.json.encode({'tasks': tasks}).decode()}", *own])


async def stop_once(runtime: Runtime, box: Toolbox, command: str, number: int) -> Sample:
    """Start everything, wait until all commands run, stop, and check that they have ended."""
    context = SessionContext(session_id=f"s{number}", session_key=f"s{number}")
    turns: list[Turn] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(runtime.run_turn, message(command), context, hooks=TurnHooks(on_start=turns.append)))
        pids = await running(box)
        receipt: StopReceipt = await turns[0].stop()
    alive = [pid for pid in pids if os.path.exists(f"/proc/{pid}")]  # noqa: ASYNC240
    if not receipt.ok or alive:
        raise RuntimeError(f"the stop left something: {receipt}, alive {alive}")
    hows = tuple(line.how for line in receipt.lines if line.kind == "process")
    return Sample(receipt.milliseconds, len(receipt.lines), hows)


async def running(box: Toolbox) -> list[int]:
    """Wait until every shell has started its command; return the process ids of all."""
    with trio.fail_after(60):
        while True:
            shells = [process.pid for process in box.warden.processes if process.pid]
            commands = [pid for shell in shells for pid in children(shell) if name(pid) == "sleep"]
            if len(shells) == len(commands) == PROCESSES:
                return [*shells, *commands]
            await trio.sleep(0.005)


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


async def measure(kinds: dict[str, tuple[str, int]], bar: Progress) -> dict[str, list[Sample]]:
    """All samples, by kind of command. The first of each warms up and is thrown away."""
    samples: dict[str, list[Sample]] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with gateway(folder) as (runtime, box):
            for kind, (command, count) in kinds.items():
                task = bar.add_task(kind, total=count)
                taken: list[Sample] = []
                for number in range(count + 1):
                    taken.append(await stop_once(runtime, box, command, len(samples) * 10_000 + number))
                    bar.advance(task)
                samples[kind] = taken[1:]
    return samples


def percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def publish(report: Report, samples: dict[str, list[Sample]], seconds: float) -> None:
    """Tables, figures, plot and bounds."""
    rows: list[list[str]] = []
    figures: dict[str, Any] = {"children": CHILDREN, "processes": PROCESSES, "seconds": round(seconds, 1)}
    for kind, taken in samples.items():
        ordered = sorted(sample.milliseconds for sample in taken)
        killed = sum(how == "SIGKILL" for sample in taken for how in sample.hows)
        p50, p99 = percentile(ordered, 0.5), percentile(ordered, 0.99)
        rows.append([kind, str(len(taken)), f"{p50:.1f}", f"{p99:.1f}", spread(ordered), str(killed)])
        figures[kind] = {
            "stops": len(taken),
            "p50_milliseconds": round(p50, 3),
            "p99_milliseconds": round(p99, 3),
            "nodes": statistics.median(sample.nodes for sample in taken),
            "killed_with_sigkill": killed,
            "samples": [round(value, 3) for value in ordered],
        }
    report.table(
        f"A turn with {CHILDREN} synchronous children and {PROCESSES} processes: ms from the stop to its receipt",
        ["commands", "stops", "p50", "p99", "median (smallest to largest)", "SIGKILLs"],
        rows,
    )
    report.figures = figures
    report.plot(partial(draw, samples))
    p99 = figures["obey SIGTERM"]["p99_milliseconds"]
    report.bound(f"p99 {p99:.0f} ms <= {BOUND:.0f} ms for commands that obey SIGTERM", p99 <= BOUND)


def draw(samples: dict[str, list[Sample]], axes: Any) -> None:
    """Plot the distribution of the times of the stops."""
    for kind, taken in samples.items():
        ordered = sorted(sample.milliseconds for sample in taken)
        axes.step(ordered, [(index + 1) / len(ordered) for index in range(len(ordered))], where="post", label=kind)
    axes.axvline(BOUND, color="grey", linestyle=":", label=f"bound {BOUND:.0f} ms")
    axes.set(
        xlabel="ms from the stop to its receipt", ylabel="share of stops", xscale="log", title="Stop with a receipt"
    )
    axes.legend()


def main() -> int:
    """Measure and report."""
    options = arguments_for(__doc__).parse_args()
    kinds = {
        "obey SIGTERM": (OBEDIENT, 30 if options.quick else 300),
        "ignore SIGTERM": (STUBBORN, 3 if options.quick else 20),
    }
    began = time.monotonic()
    with progress() as bar:
        samples = trio.run(measure, kinds, bar)
    report = Report("stop", options.results, options.plot)
    publish(report, samples, time.monotonic() - began)
    p50 = report.figures["obey SIGTERM"]["p50_milliseconds"]
    return report.finish(f"p50 {p50:.0f} ms", strict=options.strict)


if __name__ == "__main__":
    sys.exit(main())
