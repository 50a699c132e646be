"""That a stateless turn cannot hold a watcher is said by the type system."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@pytest.fixture(scope="module")
def findings() -> dict[str, list[tuple[str, str]]]:
    """What basedpyright says about the small files in `typing_cases`, by file name."""
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "--level", "error", str(HERE / "typing_cases")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=110,
    )
    found: dict[str, list[tuple[str, str]]] = {}
    for problem in json.loads(done.stdout)["generalDiagnostics"]:
        found.setdefault(Path(problem["file"]).name, []).append((problem.get("rule", ""), problem["message"]))
    return found


def test_a_stateless_turn_has_no_channel_to_give(findings):
    """The attribute does not exist, and the checker names the class."""
    by_rule = dict(findings["rejected.py"])
    assert 'Cannot access attribute "channel" for class "StatelessTurn"' in by_rule["reportAttributeAccessIssue"]


def test_a_watched_start_needs_a_channel(findings):
    """The parameter is required."""
    ((rule, message),) = findings["rejected_without_a_channel.py"]
    assert rule == "reportCallIssue"
    assert 'Argument missing for parameter "channel"' in message


def test_the_accepted_twin_passes(findings):
    """A delivering turn may watch, a stateless one may start."""
    assert "accepted.py" not in findings
