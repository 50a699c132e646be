"""The tests of chat platforms run on one node, and a second time on three: what a platform brings, comes in on one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.node_mode import parametrize_nodes, set_nodes

NODE_MODULES = frozenset({"test_chat_platforms", "test_chat_platforms_crowd", "test_chat_platforms_restart"})


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of `NODE_MODULES` on one node, and on three; a sample of them on three with PostgreSQL."""
    parametrize_nodes(metafunc, NODE_MODULES, frozenset({"test_chat_platforms"}))


@pytest.fixture(autouse=True)
def nodes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """How many gateways the chat platforms have."""
    yield from set_nodes(request, monkeypatch)
