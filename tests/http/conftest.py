"""Every test of the front end that takes `fast_path` runs on our own connections and on stock Hypercorn's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.node_mode import parametrize_nodes, set_nodes

NODE_MODULES = frozenset(
    {
        "test_chat_completions",
        "test_detached",
        "test_keys_and_tenants",
        "test_limits_and_headers",
        "test_repeated_requests",
        "test_responses_api",
        "test_run_approvals",
        "test_run_events",
        "test_runs",
        "test_sessions_api",
    }
)
"""Modules whose tests run a second time, with the long ones: on three nodes, with request after request to another of them."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of `NODE_MODULES` on one node, and on three; a sample of them on three with PostgreSQL."""
    parametrize_nodes(metafunc, NODE_MODULES, frozenset({"test_runs", "test_run_approvals"}))


@pytest.fixture(autouse=True)
def nodes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """How many runtimes the gateway of a test has."""
    yield from set_nodes(request, monkeypatch)


@pytest.fixture(params=[True, False], ids=["fast", "stock"])
def fast_path(request: pytest.FixtureRequest) -> bool:
    """Which connections serve the test."""
    return request.param
