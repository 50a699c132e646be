"""The isolation benchmark, small: it finds nothing in the runtime, and it finds something when there is something to find."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def isolation(results: Path, *options: str) -> tuple[str, dict[str, Any]]:
    """Run the benchmark with six sessions of two turns; give its last line and its figures."""
    command = [sys.executable, "-m", "bench.isolation", "--sessions=6", "--turns=2", "--sample=0.3", "--strict"]
    done = subprocess.run(
        [*command, f"--results={results}", *options], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [figures] = results.glob("*.json")
    return done.stdout.splitlines()[-1], json.loads(figures.read_text())


def test_the_runtime_has_no_crossings(tmp_path: Path) -> None:
    """No read gives another session's identity in the runtime; process-global state and a plain thread pool give many."""
    line, figures = isolation(tmp_path, "--seed=3")
    assert "crossings: 0 PASS" in line
    assert (tmp_path / "isolation.png").exists()
    assert figures["crossings"]["runtime"] == 0
    assert figures["crossings"]["os.environ"] > 0
    assert figures["crossings"]["thread pool"] > 0
    for place, counts in figures["places"]["runtime"].items():
        assert counts["reads"] > 0, place


def test_the_benchmark_can_fail(tmp_path: Path) -> None:
    """With a process global in the place of the ContextVar the runtime crosses sessions, too, and the benchmark says so."""
    line, figures = isolation(tmp_path, "--sabotage", "--no-plot", "--seed=3")
    assert "sabotaged" in line
    assert figures["crossings"]["runtime"] > 0
