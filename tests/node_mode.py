"""The second mode of tests: several runtimes on one store in memory, with whatever comes in going to one after the other."""

from __future__ import annotations

import pytest

COUNT = 3

NODES = 1
"""How many runtimes a harness opens; `set_nodes` sets it for one test."""


LEASE = 1e7
"""The lease of nodes on virtual time: heartbeats that nothing depends on would drive the clock through days of it in steps of seconds."""


URL = ""
"""The PostgreSQL database that the nodes share; empty for a store in memory."""


def parametrize_nodes(
    metafunc: pytest.Metafunc, modules: frozenset[str], on_postgres: frozenset[str] = frozenset()
) -> None:
    """Run the tests of these modules on one node, and, with the long ones, on three, on a store in memory and, if so named, on a PostgreSQL server.

    Those marked `one_node` look into a runtime, and run on one.
    """
    name = metafunc.module.__name__.rpartition(".")[2]
    if name in modules and metafunc.definition.get_closest_marker("one_node") is None:
        modes = [pytest.param("alone", id="alone"), pytest.param("memory", marks=pytest.mark.slow, id="nodes")]
        if name in on_postgres:
            modes.append(pytest.param("postgres", marks=pytest.mark.slow, id="postgres"))
        metafunc.parametrize("nodes", modes, indirect=True)


def set_nodes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """What the fixture `nodes` does: set `NODES` and `URL` for its test, and return how many there are."""
    mode: str = getattr(request, "param", "alone")
    count = 1 if mode == "alone" else COUNT
    monkeypatch.setattr("tests.node_mode.NODES", count)
    if mode == "postgres":
        monkeypatch.setattr("tests.node_mode.URL", request.getfixturevalue("postgres_url"))
    return count
