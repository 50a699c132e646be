"""The tests of delivering adapters run on one node, and a second time on three: what comes in, comes in on one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.node_mode import parametrize_nodes, set_nodes

NODE_MODULES = frozenset(
    {
        "test_contract",
        "test_cron",
        "test_discord",
        "test_hazards",
        "test_slack",
        "test_telegram",
        "test_web",
        "test_webhook",
    }
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of `NODE_MODULES` on one node, and on three."""
    parametrize_nodes(metafunc, NODE_MODULES, frozenset({"test_discord", "test_telegram", "test_web"}))


@pytest.fixture(autouse=True)
def nodes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """How many gateways the test of an adapter has."""
    yield from set_nodes(request, monkeypatch)
