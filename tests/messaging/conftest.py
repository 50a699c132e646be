"""The tests of conversations run on one node, and a second time on three: message after message comes in on another of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.node_mode import parametrize_nodes, set_nodes

NODE_MODULES = frozenset({"test_hub", "test_inbound", "test_senders", "test_starting_anew", "test_unsent_questions"})


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of `NODE_MODULES` on one node, and on three."""
    parametrize_nodes(metafunc, NODE_MODULES)


@pytest.fixture(autouse=True)
def nodes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """How many runtimes the gateway of a test has."""
    yield from set_nodes(request, monkeypatch)
