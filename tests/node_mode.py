"""The second mode of tests: several runtimes on one store in memory, with whatever comes in going to one after the other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from hermes_trio.store.backend import open_backend

COUNT = 3

NODES = 1
"""How many runtimes a harness opens; `set_nodes` sets it for one test."""


LEASE = 1e7
"""The lease of nodes on virtual time: heartbeats that nothing depends on would drive the clock through days of it in steps of seconds."""


URL = ""
"""The PostgreSQL database that the nodes share; empty for a store in memory."""


opened: list[int] = []
"""How many nodes each harness of the test has opened. A test that opens none in the second mode would be counted in it and run as in the first."""


@asynccontextmanager
async def open_stores(alone: AbstractAsyncContextManager[Any], **shared: Any) -> AsyncIterator[list[Any]]:
    """The stores of all nodes, each to be opened by its runtime: `alone`, or handles to it, or to the database `URL`, for the body of the `async with`.

    `shared` is for the handles.
    """
    opened.append(NODES)
    names = [f"node-{number}" for number in range(NODES)]
    if NODES == 1:
        yield [alone]
    elif URL:
        yield [open_backend(URL, node_name=name) for name in names]
    else:
        async with alone as base:
            yield [base.shared(name, **shared) for name in names]


def parametrize_nodes(
    metafunc: pytest.Metafunc, modules: frozenset[str], on_postgres: frozenset[str] = frozenset()
) -> None:
    """Run the tests of these modules on one node, and, with the long ones, on three, on a store in memory and, if so named, on a PostgreSQL server.

    Those marked `one_node` look into a runtime or open none, and run once.
    """
    name = metafunc.module.__name__.rpartition(".")[2]
    # What the contract of adapters says about the adapter alone needs no gateway.
    needless = name == "test_contract" and not metafunc.function.__name__.startswith("test_the_whole_way")
    if name in modules and not needless and metafunc.definition.get_closest_marker("one_node") is None:
        modes = [pytest.param("alone", id="alone"), pytest.param("memory", marks=pytest.mark.slow, id="nodes")]
        if name in on_postgres:
            modes.append(pytest.param("postgres", marks=pytest.mark.slow, id="postgres"))
        metafunc.parametrize("nodes", modes, indirect=True)


def set_nodes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """What the fixture `nodes` does: set `NODES` and `URL` for its test, give how many there are, and see afterwards that they were opened."""
    mode: str = getattr(request, "param", "alone")
    count = 1 if mode == "alone" else COUNT
    monkeypatch.setattr("tests.node_mode.NODES", count)
    if mode == "postgres":
        monkeypatch.setattr("tests.node_mode.URL", request.getfixturevalue("postgres_url"))
    opened.clear()
    yield count
    assert count == 1 or set(opened) == {count}, "this test does not open its nodes: mark it one_node"
