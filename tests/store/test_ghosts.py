"""No ghosts after a crash: a one-shot session whose server was killed has an end and a reason once the next one is up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hermes_trio import Runtime
from hermes_trio.store import open_store
from hermes_trio.testing.fakes import FakeAdapter, ScriptedAgent

ROOT = Path(__file__).parents[2]


def crash_at(path: Path, moment: str) -> None:
    """Run a server into the middle of a one-shot session, and kill it there."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.store.doomed_server", str(path), moment], stdout=subprocess.PIPE, cwd=ROOT
    ) as server:
        assert server.stdout is not None
        said = server.stdout.readline()
        server.kill()
    assert said == b"now\n"


@pytest.mark.parametrize(("moment", "reason"), [("turn", "interrupted"), ("linger", "webhook_complete")])
async def test_a_killed_one_shot_session_ends_after_the_reboot(tmp_path: Path, moment: str, reason: str) -> None:
    """Killed in its turn it ends at boot; killed while it waited for its job it is told, settles, and ends."""
    path = tmp_path / "store.db"
    crash_at(path, moment)

    async with open_store(path, maintenance=False) as store:
        (left,) = await store.list_sessions()
    assert left.ended_at is None

    agent = ScriptedAgent()
    async with (
        Runtime(agent=agent, store=open_store(path)) as runtime,
        FakeAdapter("hook", one_shot="webhook_complete").connect(runtime) as adapter,
    ):
        if moment == "linger":
            (told,) = await adapter.wait_for(1)
            assert "was lost" in told.text

    async with open_store(path, maintenance=False) as store:
        (session,) = await store.list_sessions()
        assert (session.end_reason, session.ended_at is not None) == (reason, True)
        assert (await store.backlog()) == {"inbox": 0, "outbox": 0, "approvals": 0, "runs": 0, "jobs": 0}
        assert await store.prune_sessions(older_than_days=-1) == 1
