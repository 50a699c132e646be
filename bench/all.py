"""Runs every benchmark that there is, one at a time, and writes `bench/results/README.md`: `python -m bench.all [--quick] [--only NAME …] [--page]`.

Each benchmark runs in a process of its own, so that none inherits another's memory, and keeps its figures and its plot under `bench/results/`. The page is made
from those files: with `--page` nothing is run, and the page shows the last results of all. A benchmark that fails or takes too long does not
keep the others from running; `--strict` makes this program exit with 1 when a bound is missed.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.report import RESULTS

NAMES = (
    "isolation",
    "runtime",
    "store",
    "stop",
    "spawn",
    "model",
    "serve",
    "sse",
    "start",
    "growth",
    "scale",
    "tails",
    "disk",
    "soak",
)
"""In the order of the page."""

VARIANTS = {
    "isolation-sabotage": ("isolation", "--sabotage"),
    "isolation-nodes": ("isolation", "--nodes", "3"),
    "isolation-nodes-sabotage": ("isolation", "--nodes", "3", "--sabotage"),
    "soak-nodes": ("soak", "--nodes", "3"),
}
"""Further runs of a benchmark, under names of their own."""

TIMEOUT = 3600.0
"""Seconds that one benchmark may take."""

ROOT = Path(__file__).parents[1]


def present() -> list[str]:
    """Return the names of all benchmarks, each followed by its variants."""
    found: list[str] = []
    for name in NAMES:
        if find_spec(f"bench.{name}") is not None:
            found.append(name)
            found += [variant for variant, (of, *_) in VARIANTS.items() if of == name]
    return found


def run(name: str, *, quick: bool) -> str:
    """Run one benchmark; return the last line that it printed, or how it failed."""
    module, *options = VARIANTS.get(name, (name,))
    command = [sys.executable, "-m", f"bench.{module}", *options, *(["--quick"] if quick else [])]
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return f"{name}: stopped after {TIMEOUT:.0f} s"
    print(done.stdout, end="", flush=True)
    lines = done.stdout.splitlines()
    if lines and lines[-1].startswith(module):
        return lines[-1]
    return f"{name}: failed with exit status {done.returncode}; run `python -m bench.{module}` to see why"


def purpose(name: str) -> str:
    """The first sentence of a benchmark's docstring, without the command."""
    module = VARIANTS.get(name, (name,))[0]
    spec = find_spec(f"bench.{module}")
    assert spec is not None
    assert spec.origin is not None
    words = ast.get_docstring(ast.parse(Path(spec.origin).read_text())) or module
    return words.partition("`")[0].strip().rstrip(":")


def figures(name: str, folder: Path) -> dict[str, Any]:
    """Return the stored result of a benchmark; empty if there is none."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def bounds_of(kept: dict[str, Any]) -> dict[str, bool]:
    """Return the bounds in a result, by their text."""
    found: dict[str, bool] = kept.get("bounds", {})
    return found


def page(folder: Path) -> str:
    """Return the page of results, made from the files."""
    lines = [
        "# The last results",
        "",
        "Written by `make bench`; what each benchmark does, and how to read it, is in [the folder above](../README.md).",
        "",
    ]
    sections: list[str] = []
    rows = ["| benchmark | bound | |", "| --- | --- | --- |"]
    for name in present():
        kept = figures(name, folder)
        if not kept:
            continue
        for text, held in bounds_of(kept).items():
            rows.append(f"| [{name}](#{name}) | {text} | {'holds' if held else '**missed**'} |")
        sections += [f"## {name}", "", purpose(name), ""]
        facts: dict[str, object] = kept.get("machine", {})
        if facts:
            sections += [", ".join(f"{fact} {value}" for fact, value in facts.items()) + ".", ""]
        if (folder / f"{name}.png").exists():
            sections += [f"![{name}]({name}.png)", ""]
        sections += [f"All figures: [{name}.json]({name}.json).", ""]
    return "\n".join([*lines, *rows, "", *sections]).rstrip() + "\n"


def main() -> int:
    """Run, then write the page."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less work, for a first look")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a bound is missed")
    parser.add_argument("--only", nargs="+", choices=present(), help="run only these; the page still shows all")
    parser.add_argument("--page", action="store_true", help="run nothing: write the page from what is there")
    options = parser.parse_args()
    chosen = [] if options.page else [name for name in present() if options.only is None or name in options.only]
    summary: list[str] = []
    for number, name in enumerate(chosen, 1):
        print(f"-- {name} ({number} of {len(chosen)})", file=sys.stderr, flush=True)
        began = time.perf_counter()
        line = run(name, quick=options.quick)
        summary.append(f"{line}  [{time.perf_counter() - began:.0f} s]")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "README.md").write_text(page(RESULTS))
    print("\n".join(summary))
    missed = [
        f"{name}: {text}" for name in present() for text, held in bounds_of(figures(name, RESULTS)).items() if not held
    ]
    total = sum(len(bounds_of(figures(name, RESULTS))) for name in present())
    print(f"bench: {total - len(missed)} of {total} bounds hold" + "".join(f"; missed {text}" for text in missed))
    return int(options.strict and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
