"""`hermes-trio simulate`: run simulated worlds by their seeds, count what they covered, and print the story of the first one that broke a promise."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from hermes_trio.commands.options import CommandFailed

if TYPE_CHECKING:
    from hermes_trio.testing.simulation import SeedOptions, SimulationReport

BAR: Final = 30
SEEDS: Final = 100
SHOWN_FAILURES: Final = 5
MOST_NODES: Final = 9


def simulate(
    *,
    seeds: Annotated[int | None, Parameter(help=f"The number of worlds; default: {SEEDS}.")] = None,
    first: Annotated[int | None, Parameter(help="The seed of the first world; default: 1.")] = None,
    seed: Annotated[int | None, Parameter(help="Run only the world of this seed, and print its whole story.")] = None,
    minutes: Annotated[float, Parameter(help="Simulated minutes in which people act and faults occur.")] = 3.0,
    nodes: Annotated[
        int | None, Parameter(help="The number of nodes in each world; default: 1 to 3, by the seed.")
    ] = None,
    platform: Annotated[
        str | None, Parameter(help="The chat platform of each world; default: one of them, by the seed.")
    ] = None,
    faults: Annotated[str, Parameter(help="Kinds of faults, separated by commas; 'none' for none.")] = "all",
    agent: Annotated[
        str | None,
        Parameter(help="An agent of your own, as MODULE:NAME; default: the agent loop with a scripted model."),
    ] = None,
    invariant: Annotated[
        list[str] | None, Parameter(help="An invariant of your own, as MODULE:NAME. May be given several times.")
    ] = None,
    workers: Annotated[int | None, Parameter(help="The number of worker processes; default: 1.")] = None,
    picture: Annotated[Path | None, Parameter(help="Write the coverage as an SVG file.")] = None,
    report: Annotated[Path | None, Parameter(help="Write the figures and tables to a file, too.")] = None,
) -> None:
    """Simulate whole gateways. A seed always gives the same world, byte for byte. Exits with 1 if a promise was broken."""
    from hermes_trio.testing.simulation import FAULT_KINDS, PLATFORMS, run_seeds

    kinds = FAULT_KINDS if faults == "all" else () if faults == "none" else tuple(faults.split(","))
    unknown = [kind for kind in kinds if kind not in FAULT_KINDS]
    if unknown:
        raise CommandFailed(f"--faults has {unknown[0]!r}; accepted are {', '.join(FAULT_KINDS)}, all and none")
    for name, given in (("--seeds", seeds), ("--workers", workers), ("--minutes", minutes)):
        if given is not None and not given > 0:
            raise CommandFailed(f"{name} is {given}; it must be more than 0")
    if nodes is not None and not 1 <= nodes <= MOST_NODES:
        raise CommandFailed(f"--nodes is {nodes}; it must be 1 to {MOST_NODES}")
    if platform is not None and platform not in PLATFORMS:
        raise CommandFailed(f"--platform is {platform!r}; accepted are {', '.join(PLATFORMS)}")
    options = _options(agent, invariant or [])
    options.update(minutes=minutes, faults=kinds, nodes=nodes, platform=platform)
    words = ["--minutes", repr(minutes).removesuffix(".0"), "--faults", faults]
    for name, value in (("--nodes", nodes), ("--platform", platform), ("--agent", agent)):
        words += [] if value is None else [name, str(value)]
    words += [word for name in invariant or [] for word in ("--invariant", name)]
    if seed is not None:
        many = {"--seeds": seeds, "--first": first, "--workers": workers, "--picture": picture, "--report": report}
        if unused := [name for name, value in many.items() if value is not None]:
            raise CommandFailed(f"--seed runs one world: {', '.join(unused)} cannot be given with it")
        _run_one(seed, options, words)
        return
    count, start = SEEDS if seeds is None else seeds, 1 if first is None else first
    began = time.monotonic()

    told: set[int] = set()

    def progress(report: SimulationReport) -> None:
        for number in sorted(report.failures.keys() - told):
            sys.stderr.write(f"\rseed {number}: {report.failures[number][0]}\n")
        told.update(report.failures)
        _show(report, count, time.monotonic() - began)

    try:
        total = run_seeds(range(start, start + count), workers=workers or 1, progress=progress, **options)
    except ValueError as error:
        raise CommandFailed(str(error)) from None
    sys.stderr.write("\n")
    text = _figures(total, time.monotonic() - began)
    sys.stdout.write(text)
    if report is not None:
        report.write_text(text, encoding="utf-8")
    if picture is not None:
        picture.write_text(total.coverage.picture(), encoding="utf-8")
    if total.failures:
        sys.stdout.write("\n")
        _run_one(min(total.failures), options, words, last=40, of=f"{len(total.failures)} of {total.seeds} seeds: ")
    if agent is None and (wrong := total.coverage.contradictions()):
        raise CommandFailed(f"{len(wrong)} pairs that are declared out of reach were reached, such as: {wrong[0]}")


def _options(agent: str | None, invariants: Sequence[str]) -> SeedOptions:
    """Return the settings and the invariants that were given by name, beside those of the gateway."""
    from hermes_trio.testing.simulation import INVARIANTS, WorldSettings

    if not agent and not invariants:
        return {}
    # As for `python -m`: an installed script does not look for modules in the present folder.
    sys.path.insert(0, os.getcwd())
    judges = {name: _imported("--invariant", name) for name in invariants}
    settings = None if agent is None else WorldSettings(agent=_imported("--agent", agent))
    return {"settings": settings, "invariants": {**INVARIANTS, **judges}}


def _imported(option: str, name: str) -> Any:
    """Return the callable that `module:name` names."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise CommandFailed(f"{option} is {name!r}; it must be MODULE:NAME, such as mypackage.agents:agent")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise CommandFailed(f"{option} {name}: {error}") from error
    if not callable(found):
        raise CommandFailed(f"{option} {name} is {found!r}; it must be callable")
    return found


def _run_one(seed: int, options: SeedOptions, words: Sequence[str], *, last: int = 400, of: str = "") -> None:
    """Run one world and print its story; if it breaks a promise, a shorter one, and the command that runs it again."""
    from hermes_trio.testing.simulation import INVARIANTS, run_seed, shrink_failure, versions

    result = run_seed(seed, **options)
    digest = f"trace {result.trace.digest()}, {result.seconds:.0f} simulated seconds ({versions()})\n"
    if not result.violations:
        sys.stdout.write(f"{result.story(last)}\n{digest}")
        if of:
            raise CommandFailed(f"{of}seed {seed} broke a promise in a worker process, and none when it was run again")
        return
    sys.stderr.write("shortening the program …\n")
    shrunk = shrink_failure(result, options.get("settings"), options.get("invariants", INVARIANTS))
    again = shlex.join(["hermes-trio", "simulate", "--seed", str(seed), *words])
    sys.stdout.write(
        f"{shrunk.story(last)}\n\nshortened from {len(result.program.steps)} steps to {len(shrunk.program.steps)}\n"
        f"{digest}again: {again}\n"
    )
    raise CommandFailed(f"{of}seed {seed}: {result.violations[0]}")


def _figures(report: SimulationReport, elapsed: float) -> str:
    """Return the coverage, the sums, and the seeds that broke a promise."""
    from hermes_trio.testing.simulation import versions

    lines = [report.coverage.table(), "", report.coverage.summary(), ""]
    lines.append(
        f"{report.seeds} seeds, {len(report.failures)} with a broken promise; {report.simulated / 3600:.0f} simulated hours in"
        f" {elapsed:.0f} s: {report.seeds / max(elapsed, 0.001):.1f} seeds a second, {report.cpu / max(report.seeds, 1):.2f} CPU"
        " seconds a seed"
    )
    lines.append(versions())
    lines += [f"seed {number}: {report.failures[number][0]}" for number in sorted(report.failures)[:SHOWN_FAILURES]]
    if more := sorted(report.failures)[SHOWN_FAILURES:]:
        lines.append(f"and the seeds {', '.join(map(str, more))}")
    return "\n".join([*lines, ""])


def _show(report: SimulationReport, seeds: int, elapsed: float) -> None:
    done = report.seeds * BAR // max(seeds, 1)
    rate = report.seeds / max(elapsed, 0.001)
    sys.stderr.write(
        f"\r[{'#' * done}{'.' * (BAR - done)}] {report.seeds} of {seeds}, {rate:.1f} a second, {len(report.failures)} broken "
    )
    sys.stderr.flush()
