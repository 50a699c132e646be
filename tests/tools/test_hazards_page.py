"""The page of hazards and the tests that name them agree."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_hazard_of_the_page_is_named_by_a_test_and_the_other_way_round() -> None:
    """Each id of `docs/hazards.md` is in some test's docstring, and each id that a test or the package names is explained there."""
    explained = set(re.findall(r"^\| (H\d+) \|", (ROOT / "docs" / "hazards.md").read_text(), re.MULTILINE))
    assert explained == {f"H{number}" for number in range(1, 30)}
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__))
    docstrings = "\n".join(re.findall(r'"""(.*?)"""', tests, re.DOTALL))
    assert explained - set(re.findall(r"\bH\d{1,2}\b", docstrings)) == set()
