"""The rules of the source tree that no linter knows."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "hermes_trio"


def test_a_public_class_name_is_defined_once():
    """A reader who searches for a class finds one definition. Wire types carry their platform's own names, and are excepted."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        if place.parts[0] == "adapters" and place.name == "types.py":
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(place))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}
