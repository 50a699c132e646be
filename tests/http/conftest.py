"""Every test of the front end that takes `fast_path` runs on our own connections and on stock Hypercorn's."""

from __future__ import annotations

import pytest

from . import gateway

NODE_MODULES = frozenset({"test_runs", "test_run_events", "test_run_approvals"})
"""Modules whose tests run a second time, with the long ones: on three nodes, with request after request to another of them."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of `NODE_MODULES` on one node, and on three; those marked `one_node` look into a runtime, and run on one."""
    name = metafunc.module.__name__.rpartition(".")[2]
    if name in NODE_MODULES and metafunc.definition.get_closest_marker("one_node") is None:
        several = pytest.param(3, marks=pytest.mark.slow, id="nodes")
        metafunc.parametrize("nodes", [pytest.param(1, id="alone"), several], indirect=True)


@pytest.fixture(autouse=True)
def nodes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many runtimes the gateway of a test has."""
    count: int = getattr(request, "param", 1)
    monkeypatch.setattr(gateway, "NODES", count)
    return count


@pytest.fixture(params=[True, False], ids=["fast", "stock"])
def fast_path(request: pytest.FixtureRequest) -> bool:
    """Which connections serve the test."""
    return request.param
