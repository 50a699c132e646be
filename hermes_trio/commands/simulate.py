"""`hermes-trio simulate`: run simulated worlds by their seeds, count what they covered, and print the story of the first one that broke a promise."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

from hermes_trio.commands.options import CommandFailed

if TYPE_CHECKING:
    from hermes_trio.testing.simulation import SimulationReport

__all__ = ["simulate"]

BAR: Final = 30
SHOWN_FAILURES: Final = 5
MOST_NODES: Final = 9


def simulate(
    *,
    seeds: Annotated[int, Parameter(help="The number of worlds.")] = 100,
    first: Annotated[int, Parameter(help="The seed of the first world.")] = 1,
    seed: Annotated[int | None, Parameter(help="Run only the world of this seed, and print its whole story.")] = None,
    minutes: Annotated[float, Parameter(help="Simulated minutes in which people act and faults occur.")] = 3.0,
    nodes: Annotated[
        int | None, Parameter(help="The number of nodes in each world; default: 1 to 3, by the seed.")
    ] = None,
    platform: Annotated[
        str | None, Parameter(help="The chat platform of each world; default: one of them, by the seed.")
    ] = None,
    faults: Annotated[str, Parameter(help="Kinds of faults, separated by commas; 'none' for none.")] = "all",
    workers: Annotated[int, Parameter(help="The number of worker processes.")] = 1,
    picture: Annotated[Path | None, Parameter(help="Write the coverage as an SVG file.")] = None,
) -> None:
    """Simulate whole gateways. A seed always gives the same world, byte for byte. Exits with 1 if a promise was broken."""
    from hermes_trio.testing.simulation import FAULT_KINDS, PLATFORMS, run_seed, run_seeds, shrink_failure

    kinds = FAULT_KINDS if faults == "all" else () if faults == "none" else tuple(faults.split(","))
    unknown = [kind for kind in kinds if kind not in FAULT_KINDS]
    if unknown:
        raise CommandFailed(f"--faults has {unknown[0]!r}; accepted are {', '.join(FAULT_KINDS)}, all and none")
    for name, given in (("--seeds", seeds), ("--workers", workers), ("--minutes", minutes)):
        if not given > 0:
            raise CommandFailed(f"{name} is {given}; it must be more than 0")
    if nodes is not None and not 1 <= nodes <= MOST_NODES:
        raise CommandFailed(f"--nodes is {nodes}; it must be 1 to {MOST_NODES}")
    if platform is not None and platform not in PLATFORMS:
        raise CommandFailed(f"--platform is {platform!r}; accepted are {', '.join(PLATFORMS)}")
    if seed is not None:
        result = run_seed(seed, minutes=minutes, faults=kinds, nodes=nodes, platform=platform)
        if result.violations:
            result = shrink_failure(result)
        sys.stdout.write(
            f"{result.story(400)}\ntrace {result.trace.digest()}, {result.seconds:.0f} simulated seconds\n"
        )
        if result.violations:
            raise CommandFailed(f"seed {seed}: {result.violations[0]}")
        return
    began = time.monotonic()

    def progress(report: SimulationReport) -> None:
        _show(report, seeds, time.monotonic() - began)

    wanted = range(first, first + seeds)
    report = run_seeds(
        wanted, minutes=minutes, faults=kinds, nodes=nodes, platform=platform, workers=workers, progress=progress
    )
    sys.stderr.write("\n")
    elapsed = time.monotonic() - began
    sys.stdout.write(f"{report.coverage.table()}\n\n")
    for line in report.coverage.missing():
        sys.stdout.write(f"{line}\n")
    sys.stdout.write(
        f"\n{report.seeds} seeds, {len(report.failures)} with a broken promise; {report.simulated / 3600:.0f} simulated hours in"
        f" {elapsed:.0f} s: {report.seeds / max(elapsed, 0.001):.1f} seeds a second, {report.cpu / max(report.seeds, 1):.2f} CPU"
        " seconds a seed\n"
    )
    if picture is not None:
        picture.write_text(report.coverage.picture(), encoding="utf-8")
    if report.failures:
        for number in sorted(report.failures)[:SHOWN_FAILURES]:
            sys.stdout.write(f"seed {number}: {report.failures[number][0]}\n")
        if more := sorted(report.failures)[SHOWN_FAILURES:]:
            sys.stdout.write(f"and the seeds {', '.join(map(str, more))}\n")
        worst = min(report.failures)
        shrunk = shrink_failure(run_seed(worst, minutes=minutes, faults=kinds, nodes=nodes, platform=platform))
        again = f"hermes-trio simulate --seed {worst} --minutes {minutes:g} --faults {faults}"
        again += "" if nodes is None else f" --nodes {nodes}"
        again += "" if platform is None else f" --platform {platform}"
        sys.stdout.write(f"\n{shrunk.story()}\n\nagain: {again}\n")
        raise CommandFailed(f"{len(report.failures)} of {report.seeds} seeds broke a promise")


def _show(report: SimulationReport, seeds: int, elapsed: float) -> None:
    done = report.seeds * BAR // max(seeds, 1)
    rate = report.seeds / max(elapsed, 0.001)
    sys.stderr.write(
        f"\r[{'#' * done}{'.' * (BAR - done)}] {report.seeds} of {seeds}, {rate:.1f} a second, {len(report.failures)} broken "
    )
    sys.stderr.flush()
