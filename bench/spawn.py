"""What the confinement of a command costs: `python -m bench.spawn [--quick]`.

A command as the terminal starts it (bash with a session's state) is started through the warden, in rounds that alternate between the profiles, and its end
is awaited. Measured are the time until it runs, the time until nothing of it is left, and the processor time of the server, the warden, its keepers and the
command. The ratios are those of the smallest values: what else the machine does only ever adds. `off` takes part twice: what the two differ by is noise.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from typing import Any

import msgspec
import trio
from rich.progress import Progress

from bench.report import Report, arguments_for, progress, spread
from hermes_trio.runtime.context import SessionContext
from hermes_trio.tools.terminal.shell_state import ShellStates, base_environment
from hermes_trio.tools.warden import ProcessSpec, Profile, Sandbox, SandboxPaths, Warden, Workspace, open_warden

BOUND = 1.2
COMMAND = "git --version; ls / | sort | head -3"
CONTENDERS = {
    "off": Profile.OFF,
    "protect": Profile.PROTECT,
    "workspace": Profile.WORKSPACE,
    "off again": Profile.OFF,
}
BLOCK = 10
"""Commands of one profile in a row: the kernel counts the processor time of others in hundredths of a second."""

TICKS = os.sysconf("SC_CLK_TCK")


async def spawn_once(
    warden: Warden, shells: ShellStates, sandbox: Sandbox, profile: Profile, folder: str
) -> tuple[float, float]:
    """Milliseconds until the command runs, and until nothing of it is left."""
    began = time.perf_counter()
    with shells.lease(SessionContext(session_id="s")) as lease:
        process = await warden.spawn(
            ProcessSpec(
                argv=lease.argv(COMMAND, keep=True),
                cwd=folder,
                env=lease.environment,
                inherited=lease.inherited,
                confinement=sandbox.plan(profile, Workspace(folder)),
            )
        )
        started = time.perf_counter()
        while await process.output.receive_some():
            pass
        await process.wait_empty()
        lease.take_back()
    ended = time.perf_counter()
    await process.aclose()
    return (started - began) * 1000, (ended - began) * 1000


class Samples(msgspec.Struct):
    """What was measured of one contender, in milliseconds."""

    starts: list[float] = []
    ends: list[float] = []
    processor: list[float] = []
    """Of each block, a command."""


def processor_time(warden: Warden) -> float:
    """Milliseconds that this process, the warden and all that it has reaped have used."""
    with open(f"/proc/{warden.warden_pid}/stat", encoding="utf-8") as file:
        fields = file.read().rpartition(")")[2].split()
    return time.process_time() * 1000 + sum(map(int, fields[11:15])) * 1000 / TICKS


async def measure(blocks: int, bar: Progress) -> dict[str, Samples]:
    """All samples, by contender. The first block of each warms up."""
    samples = {name: Samples() for name in CONTENDERS}
    task = bar.add_task("blocks", total=blocks)
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as folder:
        sandbox = Sandbox(SandboxPaths(home=home), environment=os.environ)
        await sandbox.ready()
        shells = ShellStates(base_environment(os.environ), folder, trio.current_time)
        async with open_warden() as warden:
            await spawn_once(warden, shells, sandbox, Profile.OFF, folder)
            for number in range(blocks + 1):
                for name, profile in CONTENDERS.items():
                    began = processor_time(warden)
                    taken = [await spawn_once(warden, shells, sandbox, profile, folder) for _ in range(BLOCK)]
                    # The last keeper is still to be reaped.
                    await trio.sleep(0.02)
                    if number:
                        samples[name].starts += [start for start, _ in taken]
                        samples[name].ends += [end for _, end in taken]
                        samples[name].processor.append((processor_time(warden) - began) / BLOCK)
                bar.advance(task)
    return samples


def publish(report: Report, samples: dict[str, Samples]) -> None:
    """Table, figures and bound."""
    rows: list[list[str]] = []
    figures: dict[str, Any] = {"user": "root" if os.geteuid() == 0 else "unprivileged"}
    plain = min(samples["off"].ends)
    plain_processor = statistics.median(samples["off"].processor)
    for name, taken in samples.items():
        ratio = min(taken.ends) / plain
        processor = statistics.median(taken.processor)
        rows.append(
            [
                name,
                str(len(taken.ends)),
                spread(taken.starts, 2),
                spread(taken.ends, 2),
                f"{min(taken.ends):.2f}",
                f"{ratio:.2f}",
                f"{processor:.2f}",
                f"{processor / plain_processor:.2f}",
            ]
        )
        figures[name] = {
            "smallest_start_milliseconds": round(min(taken.starts), 3),
            "smallest_milliseconds": round(min(taken.ends), 3),
            "ratio": round(ratio, 3),
            "processor_milliseconds": round(processor, 3),
            "processor_ratio": round(processor / plain_processor, 3),
        }
    report.table(
        f"A command of the terminal through the warden, as {figures['user']}: ms until it runs, ms until nothing of it is left, ms of the processor",
        ["profile", "commands", "runs: median (smallest to largest)", "is over", "smallest", "ratio", "CPU", "ratio"],
        rows,
    )
    report.figures = figures
    ratio = figures["protect"]["ratio"]
    report.bound(f"protect takes {ratio:.2f} times as long as off, bound {BOUND}", ratio <= BOUND)


def main() -> int:
    """Measure and report."""
    options = arguments_for(__doc__).parse_args()
    with progress() as bar:
        samples = trio.run(measure, 6 if options.quick else 60, bar)
    report = Report("spawn", options.results, options.plot)
    publish(report, samples)
    protect, again = report.figures["protect"], report.figures["off again"]
    return report.finish(
        f"protect {protect['ratio']:.2f} times off ({protect['processor_ratio']:.2f} times the processor time); off beside itself"
        f" {again['ratio']:.2f} ({again['processor_ratio']:.2f})",
        strict=options.strict,
    )


if __name__ == "__main__":
    sys.exit(main())
