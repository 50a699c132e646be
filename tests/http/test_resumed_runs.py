"""Runs that are begun again after a crash, as their clients see them. A copy of the database is what a server leaves that is killed at that moment."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import trio

from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.ports import NewRun, Resumption, TurnInput, TurnStart
from hermes_trio.runtime.turn import Turn
from hermes_trio.store.sqlite.rows import write

from .gateway import Gateway, eventually, open_gateway


class Work:
    """An agent whose first turn never ends, also if it is cancelled."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.release = trio.Event()

    async def __call__(self, turn: Turn) -> str:
        """One turn."""
        self.begun.append(turn.input.text)
        turn.emit("message.delta", delta="so far ")
        if len(self.begun) == 1:
            with trio.CancelScope(shield=True):
                await self.release.wait()
        await trio.sleep(0.05)
        return f"done {len(self.begun)}"


async def crash(gateway: Gateway, run_id: str, place: Path) -> str:
    """Copy the database when the run's first event is in it; return the path of the copy."""

    async def is_stored() -> bool:
        return bool(await gateway.core.store.events_after(run_id))

    await eventually(is_stored)
    for name in ("state.db", "state.db-wal"):
        shutil.copy(place / name, place / f"copy-{name}")
    return str(place / "copy-state.db")


async def post(gateway: Gateway, **more: Any) -> str:
    """Start a run with an idempotency key that is begun again when it is interrupted."""
    body = {"input": "go", "if_interrupted": "resume", **more}
    answer = await gateway.http.post("/v1/runs", json=body, headers={"Idempotency-Key": "k"})
    assert answer.status_code == 202, answer.text
    return answer.json()["run_id"]


async def test_a_client_follows_its_run_across_a_crash(tmp_path: Path) -> None:
    """The run has the same id and key, and goes on with its second attempt; a reader that returns gets the events behind the last one, without a gap."""
    work = Work()
    async with open_gateway(work, path=str(tmp_path / "state.db")) as gateway:
        run_id = await post(gateway)
        assert (await gateway.http.get(f"/v1/runs/{run_id}")).json()["attempt"] == 1
        async with gateway.events(f"/v1/runs/{run_id}/events") as events:
            first = await events.next()
            assert first is not None
        path = await crash(gateway, run_id, tmp_path)
        work.release.set()
        work.begun.append("the end of the first server")
    async with open_gateway(work, path=path) as gateway:
        run = (await gateway.http.get(f"/v1/runs/{run_id}")).json()
        assert (run["status"] in ("running", "completed"), run["attempt"]) == (True, 2)
        headers = {**gateway.http.headers, "Last-Event-ID": first.id}
        async with gateway.events(f"/v1/runs/{run_id}/events", headers=headers) as events:
            rest = [event for event in await events.all() if event.data]
        assert [event.data["event"] for event in rest] == ["run.resumed", "message.delta", "run.completed"]
        assert [event.id.partition("-")[2] for event in rest] == ["2", "3", "4"]
        assert (rest[0].data["attempt"], rest[0].data["attempts"], rest[0].data["run_id"]) == (2, 3, run_id)
        assert await post(gateway) == run_id
        ended = await gateway.ended(run_id)
        assert (ended["status"], ended["output"], ended["attempt"]) == ("completed", "done 3", 2)
        assert (await gateway.http.get("/v1/runs")).json()["data"][0]["attempt"] == 2
        unknown = {**gateway.http.headers, "Last-Event-ID": f"{first.id.partition('-')[0]}-9"}
        async with gateway.events(f"/v1/runs/{run_id}/events", headers=unknown) as events:
            all_of_it = [event.data["event"] for event in await events.all() if event.data]
        assert all_of_it == ["resync", "message.delta", "run.resumed", "message.delta", "run.completed"]


@pytest.mark.parametrize("by", ["run", "node", "session"])
async def test_a_stop_that_was_answered_holds_after_a_crash(tmp_path: Path, by: str) -> None:
    """The client was told that its run is being stopped, and the server died before it had ended: it is not begun again."""
    work = Work()
    async with open_gateway(work, path=str(tmp_path / "state.db")) as gateway, trio.open_nursery() as nursery:
        run_id = await post(gateway)
        if by == "run":
            answer = await gateway.http.post(f"/v1/runs/{run_id}/stop")
            assert answer.json()["status"] == "stopping"
        elif by == "node":
            await eventually(lambda: _has_begun(work))
            (turn,) = gateway.runtime.core.live_turns.values()
            await gateway.http.post(f"/v1/tree/{turn.node.key}/stop", params={"timeout": "0"})
        else:
            await eventually(lambda: _has_begun(work))
            nursery.start_soon(gateway.runtime.stop_session, run_id)
            await trio.sleep(0.1)
        path = await crash(gateway, run_id, tmp_path)
        work.release.set()
    async with open_gateway(work, path=path) as gateway:
        run = await gateway.ended(run_id)
        assert (run["status"], run["error_code"], len(work.begun)) == ("cancelled", "stop", 1)
        assert "not begun again" in run["error"]


async def _has_begun(work: Work) -> bool:
    return bool(work.begun)


async def test_a_run_that_waits_for_its_claim_can_be_stopped(tmp_path: Path) -> None:
    """The start could not claim it, because the store refused that write: a stop ends it, and a second one finds nothing."""
    async with open_gateway(path=str(tmp_path / "state.db")) as gateway:
        store = gateway.core.store
        context = SessionContext(session_id="s", session_key="api::s")
        run = NewRun(run_id="run_1", session_id="s", resumable=True)
        kept = Resumption(context=context, source="api_server", input=TurnInput(text="go"))
        await store.begin_turn(TurnStart(turn_id="", context=context, source="api_server", run=run, resumption=kept))
        await store._writer.submit(write, "UPDATE runs SET owner = ''", ())  # type: ignore[attr-defined]
        answer = await gateway.http.post("/v1/runs/run_1/stop", params={"wait": "true"})
        assert (answer.status_code, answer.json()["status"]) == (200, "cancelled"), answer.text
        assert answer.json()["receipt"]["ok"] is True
        ended = await gateway.ended("run_1")
        assert (ended["status"], ended["error_code"], ended["attempt"]) == ("cancelled", "stop", 1)
        assert (await gateway.http.post("/v1/runs/run_1/stop")).status_code == 404


async def test_other_runs_fail_as_before(tmp_path: Path) -> None:
    """By default, and if it is asked for; the answer has no attempt, and a word that means nothing is refused."""
    work = Work()
    async with open_gateway(work, path=str(tmp_path / "state.db")) as gateway:
        refused = await gateway.http.post("/v1/runs", json={"input": "go", "if_interrupted": "retry"})
        assert (refused.status_code, "if_interrupted" in refused.text) == (400, True)
        run_id = await gateway.start("go", if_interrupted="fail")
        assert "attempt" not in (await gateway.http.get(f"/v1/runs/{run_id}")).json()
        path = await crash(gateway, run_id, tmp_path)
        work.release.set()
    async with open_gateway(work, path=path) as gateway:
        run = await gateway.ended(run_id)
        assert (run["status"], run["error_code"], "attempt" in run) == ("failed", "interrupted", False)
