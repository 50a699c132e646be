"""What every benchmark shares: bounds, tables, progress bars, and the files under `bench/results/`.

A `Report` belongs to one benchmark. It collects figures and bounds, prints its tables, writes `NAME.json` (with the facts about the machine that
matter to a reader: no host names, no paths) and `NAME.png`, and prints one summary line, last.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import attrs
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

__all__ = ["RESULTS", "Bound", "Report", "arguments_for", "machine", "progress", "spread"]

RESULTS = Path(__file__).parent / "results"

WIDTH = 110
"""Columns of a table, on every terminal and in every log."""


def machine() -> dict[str, object]:
    """What a reader needs to judge the figures."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "architecture": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "trio": version("trio"),
        "load": round(os.getloadavg()[0], 1),
    }


def spread(samples: Sequence[float], digits: int = 1) -> str:
    """The median of some samples, and the smallest and the largest."""
    return f"{statistics.median(samples):,.{digits}f}  ({min(samples):,.{digits}f} to {max(samples):,.{digits}f})"


def progress() -> Progress:
    """A progress bar on standard error, gone from the screen when it is done. Silent where standard error is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def arguments_for(what: str | None) -> ArgumentParser:
    """A parser with the options that every benchmark has: `--quick`, `--strict`, `--results` and `--no-plot`."""
    parser = ArgumentParser(description=what, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less work, for a first look")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a bound is missed")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder for the figures and the plot")
    parser.add_argument("--no-plot", dest="plot", action="store_false", help="figures only")
    return parser


@attrs.frozen
class Bound:
    """Something that a benchmark has to show: the words, with the figure and the limit in them, and whether it holds."""

    text: str
    held: bool

    def __str__(self) -> str:
        return f"{self.text} {'PASS' if self.held else 'FAIL'}"


@attrs.define
class Report:
    """The results of one benchmark, on their way to the screen and to the disk."""

    name: str
    folder: Path = RESULTS
    plots: bool = True
    figures: dict[str, Any] = attrs.Factory(dict[str, Any])
    bounds: list[Bound] = attrs.Factory(list[Bound])

    def bound(self, text: str, held: bool) -> None:
        """Add a bound."""
        self.bounds.append(Bound(text, held))

    @property
    def held(self) -> bool:
        """Whether every bound holds."""
        return all(bound.held for bound in self.bounds)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table; every column but the first is of figures."""
        table = Table(title=title, title_justify="left")
        for number, column in enumerate(columns):
            table.add_column(column, justify="right" if number else "left")
        for row in rows:
            table.add_row(*row)
        Console(width=WIDTH).print(table)

    def plot(self, draw: Callable[[Any], None], *, panels: int = 1, width: float = 5.5, height: float = 4.0) -> None:
        """Write `NAME.png`: `draw` gets the panels (matplotlib's axes; one alone, or a sequence), each so many inches wide."""
        if not self.plots:
            return
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(1, panels, figsize=(width * panels, height), layout="constrained")
        try:
            draw(axes)
            self.folder.mkdir(parents=True, exist_ok=True)
            cast(Any, figure).savefig(self.folder / f"{self.name}.png", dpi=110, metadata={"Software": None})
        finally:
            pyplot.close(figure)

    def finish(self, summary: str = "", *, strict: bool = False) -> int:
        """Write `NAME.json`, print the summary line, and return the exit status: 1 for a missed bound, if `strict`."""
        words = "; ".join(part for part in (summary, *map(str, self.bounds)) if part)
        line = f"{self.name}: {words}"
        self.folder.mkdir(parents=True, exist_ok=True)
        document = {
            "name": self.name,
            "summary": line,
            "held": self.held,
            "bounds": {bound.text: bound.held for bound in self.bounds},
            "machine": machine(),
            **self.figures,
        }
        (self.folder / f"{self.name}.json").write_text(json.dumps(document, indent=2) + "\n")
        sys.stdout.flush()
        print(line, flush=True)
        return int(strict and not self.held)
