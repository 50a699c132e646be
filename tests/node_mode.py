"""The second mode of tests: several runtimes on one store in memory, with whatever comes in going to one after the other."""

from __future__ import annotations

import pytest

COUNT = 3

NODES = 1
"""How many runtimes a harness opens; `set_nodes` sets it for one test."""


def parametrize_nodes(metafunc: pytest.Metafunc, modules: frozenset[str]) -> None:
    """Run the tests of these modules on one node, and, with the long ones, on three. Those marked `one_node` look into a runtime, and run on one."""
    name = metafunc.module.__name__.rpartition(".")[2]
    if name in modules and metafunc.definition.get_closest_marker("one_node") is None:
        several = pytest.param(COUNT, marks=pytest.mark.slow, id="nodes")
        metafunc.parametrize("nodes", [pytest.param(1, id="alone"), several], indirect=True)


def set_nodes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """What the fixture `nodes` does: set `NODES` for its test, and return it."""
    count: int = getattr(request, "param", 1)
    monkeypatch.setattr("tests.node_mode.NODES", count)
    return count
