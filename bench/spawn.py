"""What the confinement of a command costs: `python -m bench.spawn [--quick]`.

A command as the terminal starts it (bash with a session's state) is started through the warden, in rounds that alternate between the profiles, and its end
is awaited. Measured are the time until it runs and the time until nothing of it is left. The ratio is that of the smallest values: what else the machine
does only ever adds.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from typing import Any

import trio
from rich.progress import Progress

from bench.report import Report, arguments_for, progress, spread
from hermes_trio.runtime.context import SessionContext
from hermes_trio.tools.terminal.shell_state import ShellStates, base_environment
from hermes_trio.tools.warden import ProcessSpec, Profile, Sandbox, SandboxPaths, Warden, Workspace, open_warden

BOUND = 1.2
COMMAND = "git --version; ls / | sort | head -3"
PROFILES = (Profile.OFF, Profile.PROTECT, Profile.WORKSPACE)


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


async def measure(rounds: int, bar: Progress) -> dict[Profile, list[tuple[float, float]]]:
    """All samples, by profile. The first rounds warm up."""
    samples: dict[Profile, list[tuple[float, float]]] = {profile: [] for profile in PROFILES}
    task = bar.add_task("rounds", total=rounds)
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as folder:
        sandbox = Sandbox(SandboxPaths(home=home), environment=os.environ)
        await sandbox.ready()
        shells = ShellStates(base_environment(os.environ), folder, trio.current_time)
        async with open_warden() as warden:
            for number in range(rounds + 3):
                for profile in PROFILES:
                    taken = await spawn_once(warden, shells, sandbox, profile, folder)
                    if number >= 3:
                        samples[profile].append(taken)
                bar.advance(task)
    return samples


def publish(report: Report, samples: dict[Profile, list[tuple[float, float]]]) -> None:
    """Table, figures and bound."""
    rows: list[list[str]] = []
    figures: dict[str, Any] = {"user": "root" if os.geteuid() == 0 else "unprivileged"}
    plain = min(ended for _, ended in samples[Profile.OFF])
    for profile, taken in samples.items():
        starts, ends = [start for start, _ in taken], [end for _, end in taken]
        ratio = min(ends) / plain
        rows.append(
            [str(profile), str(len(taken)), spread(starts, 2), spread(ends, 2), f"{min(ends):.2f}", f"{ratio:.2f}"]
        )
        figures[str(profile)] = {
            "smallest_start_milliseconds": round(min(starts), 3),
            "smallest_milliseconds": round(min(ends), 3),
            "ratio": round(ratio, 3),
        }
    report.table(
        f"A command of the terminal through the warden, as {figures['user']}: ms until it runs, ms until nothing of it is left",
        ["profile", "commands", "runs: median (smallest to largest)", "is over", "smallest", "ratio"],
        rows,
    )
    report.figures = figures
    ratio = figures[str(Profile.PROTECT)]["ratio"]
    report.bound(f"protect takes {ratio:.2f} times as long as off, bound {BOUND}", ratio <= BOUND)


def main() -> int:
    """Measure and report."""
    options = arguments_for(__doc__).parse_args()
    with progress() as bar:
        samples = trio.run(measure, 60 if options.quick else 400, bar)
    report = Report("spawn", options.results, options.plot)
    publish(report, samples)
    return report.finish(f"protect {report.figures['protect']['ratio']:.2f} times off", strict=options.strict)


if __name__ == "__main__":
    sys.exit(main())
