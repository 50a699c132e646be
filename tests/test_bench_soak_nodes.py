"""The soak with several nodes: a short one, with one kill."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("psycopg", reason="the extra `postgres` is not installed")

from bench import soak_nodes
from bench.report import progress
from tests.postgres_server import PostgresServer


@pytest.mark.slow
# Readers that continue at another node abandon a stream in the middle.
@pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning")
async def test_a_short_soak_with_one_kill_leaves_nothing(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed node is taken over and started again; then all nodes exit with 0, and no row, process or promise is left."""
    monkeypatch.setattr(soak_nodes, "KILL_SECONDS", 4.0)
    with progress() as bar:
        found = await soak_nodes.soak_nodes(postgres, tmp_path, 3, 7.0, bar)
    assert found.scenario is not None
    assert found.scenario.violations == []
    assert found.kills == 1
    assert len(found.scenario.takeovers) >= 1
    assert found.exits == [0, 0, 0]
    assert found.rows_left == []
    assert len(found.scenario.processes) > 4
    assert found.scenario.processes.left() == []
