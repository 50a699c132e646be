"""What a client that cannot be reached later is told, with the real agent, tools and processes: the honest answer, and no watcher."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio

from hermes_trio.config import load_config
from hermes_trio.gateway.serving import Serving, open_server
from hermes_trio.http.auth import AdminKey
from tests.tools.bench_of_tools import running, until

KEY = "stateless-admin-key-0123"


@asynccontextmanager
async def gateway(home: Path, text: str = "") -> AsyncIterator[tuple[Serving, httpx2.AsyncClient]]:
    """The whole product in this process, with `demo` as its model."""
    (home / "config.toml").write_text(text)
    config = load_config({}, home=home, server={"port": 0})
    with trio.fail_after(60):
        async with (
            open_server(config, AdminKey(KEY)) as serving,
            httpx2.AsyncClient(
                base_url=serving.addresses[0], headers={"Authorization": f"Bearer {KEY}"}, timeout=30, trust_env=False
            ) as http,
        ):
            yield serving, http


async def chat(http: httpx2.AsyncClient, text: str) -> str:
    """Over chat completions."""
    body = {"messages": [{"role": "user", "content": text}]}
    return (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]["content"]


async def streamed_chat(http: httpx2.AsyncClient, text: str) -> str:
    """Over a chat stream."""
    body = {"messages": [{"role": "user", "content": text}], "stream": True}
    answer = await http.post("/v1/chat/completions", json=body)
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


async def responses(http: httpx2.AsyncClient, text: str) -> str:
    """Over responses."""
    body = (await http.post("/v1/responses", json={"input": text})).json()
    return body["output"][-1]["content"][0]["text"]


async def runs(http: httpx2.AsyncClient, text: str) -> str:
    """Over a run."""
    run_id = (await http.post("/v1/runs", json={"input": text})).json()["run_id"]
    run = (await http.get(f"/v1/runs/{run_id}", params={"wait": "ended"})).json()
    assert run["status"] == "completed", run
    return run["output"]


async def session(http: httpx2.AsyncClient, text: str) -> str:
    """Over a session."""
    session_id = (await http.post("/api/sessions")).json()["session"]["id"]
    return (await http.post(f"/api/sessions/{session_id}/chat", json={"message": text})).json()["message"]["content"]


WAYS = [chat, streamed_chat, responses, runs, session]


@pytest.mark.parametrize("way", WAYS)
async def test_background_work_is_not_promised(tmp_path: Path, way: Any) -> None:
    """notify_on_complete and watch_patterns are refused with a note that says to poll; the job runs, and nobody watches it."""
    async with gateway(tmp_path) as (serving, http):
        supervisor = serving.gateway.runtime.supervisor
        for directive in ("!bg sleep 60", "!watch ready sleep 60"):
            text = await way(http, directive)
            assert "Background process started" in text
            assert "poll" in text
            [job] = supervisor.jobs()
            assert not job.watched
            tree = (await http.get("/v1/tree")).text
            assert job.id in tree
            assert "watch" not in tree.lower()
            await job.stop()


@pytest.mark.parametrize("way", WAYS)
async def test_delegation_is_done_within_the_turn(tmp_path: Path, way: Any) -> None:
    """delegate_task(background=true) gives the child's result, synchronously; nothing is left behind."""
    async with gateway(tmp_path) as (serving, http):
        text = await way(http, "!delegate count the stars")
        assert "count the stars" in text
        assert len(serving.gateway.runtime.supervisor) == 0
        assert serving.gateway.runtime.stateless.active == 0


async def test_stopping_a_run_kills_its_process(tmp_path: Path) -> None:
    """A foreground process is dead when the receipt says ok, and so is a background one that the run started."""
    async with gateway(tmp_path) as (serving, http):
        run_id = (await http.post("/v1/runs", json={"input": "!run exec sleep 300.0625"})).json()["run_id"]
        await until(lambda: running("sleep 300.0625"))
        stopped = (await http.post(f"/v1/runs/{run_id}/stop", params={"wait": "true"})).json()
        assert stopped["receipt"]["ok"] is True, stopped
        assert stopped["status"] == "cancelled"
        assert not running("sleep 300.0625")
        assert {"turn", "tool"} <= {line["kind"] for line in stopped["receipt"]["lines"]}
        run = (await http.get(f"/v1/runs/{run_id}", params={"wait": "settled"})).json()
        assert (run["status"], run["settled"]) == ("cancelled", True)

        second = (await http.post("/v1/runs", json={"input": "!bg sleep 300"})).json()["run_id"]
        run = (await http.get(f"/v1/runs/{second}", params={"wait": "ended"})).json()
        assert run["settled"] is False
        assert (await http.post(f"/v1/runs/{second}/stop", params={"wait": "true"})).json()["receipt"]["ok"] is True
        run = (await http.get(f"/v1/runs/{second}", params={"wait": "settled"})).json()
        assert run["settled"] is True
        assert len(serving.gateway.runtime.supervisor) == 0


async def test_a_dangerous_command_in_a_run_asks_first(tmp_path: Path) -> None:
    """The run waits for approval, lists it, and goes on with the answer; over chat nobody can be asked, so it is refused."""
    victim = tmp_path.with_name(f"{tmp_path.name}-victim")  # outside of the home, which commands cannot see
    victim.mkdir()
    async with gateway(tmp_path) as (_, http):
        refused = await chat(http, f"!run rm -rf {victim}")
        assert victim.exists()
        assert "approv" in refused.lower()
        for choice, there in (("deny", True), ("once", False)):
            run_id = (await http.post("/v1/runs", json={"input": f"!run rm -rf {victim}"})).json()["run_id"]
            while not (run := (await http.get(f"/v1/runs/{run_id}")).json()).get("approvals"):
                assert run["status"] in ("queued", "running", "waiting_for_approval"), run
            assert run["status"] == "waiting_for_approval"
            answer = await http.post(
                f"/v1/runs/{run_id}/approval",
                json={"choice": choice, "approval_id": run["approvals"][0]["approval_id"]},
            )
            assert answer.status_code == 200
            run = (await http.get(f"/v1/runs/{run_id}", params={"wait": "settled"})).json()
            assert run["status"] == "completed"
            assert victim.exists() is there
