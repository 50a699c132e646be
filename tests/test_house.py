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


def test_every_verb_of_the_stores_port_is_called():
    """A verb that nothing in the product calls is work for every backend without a use. Its backends and the tests do not count as callers."""
    verbs: set[str] = set()
    for ports in ("runtime/ports.py", "store/ports.py"):
        for node in ast.parse((PACKAGE / ports).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Store"):
                verbs |= {one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
    called: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE).parts
        if place[0] == "testing" or place[:2] in {("store", "sqlite"), ("store", "postgres")}:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                called.add(node.attr)
    assert verbs - called == set()


def test_values_are_structs_and_attrs_has_state():
    """attrs is for objects whose fields change; a frozen value is a msgspec struct. The test tools are excepted."""
    frozen: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        if place.parts[0] == "testing":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                made_by = " ".join(ast.unparse(one) for one in node.decorator_list)
                if "dataclass" in made_by or ("attrs." in made_by and "frozen" in made_by):
                    frozen.append(f"{place}: {node.name}")
    assert frozen == []
