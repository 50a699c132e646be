"""Requests to several nodes on one store: what one has started, another one shows, follows, answers and stops."""

from __future__ import annotations

import httpx2
import pytest
import trio

from hermes_trio.commands.top import TreeCopy, cluster_line
from hermes_trio.console.routes import console_routes
from hermes_trio.runtime.turn import Turn

from .gateway import Gateway, eventually, open_gateway


@pytest.fixture(autouse=True, params=["memory", pytest.param("postgres", marks=pytest.mark.slow)])
def three(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
    """Three nodes in every test of this module, on a store in memory, and on a real PostgreSQL server."""
    monkeypatch.setattr("tests.node_mode.NODES", 3)
    if request.param == "postgres":
        monkeypatch.setattr("tests.node_mode.URL", request.getfixturevalue("postgres_url"))


async def patient(turn: Turn) -> str:
    """Waits to be stopped."""
    turn.emit("tool.started", tool="x", preview="")
    await trio.sleep_forever()
    raise AssertionError


async def holders(gateway: Gateway, run_id: str) -> list[int]:
    """The nodes on which a run lives."""
    return [number for number, one in enumerate(gateway.runtimes) if one.stateless.runs.find(run_id) is not None]


async def test_a_run_is_seen_followed_and_stopped_from_another_node() -> None:
    """The run lives on one node; the list, the status, the events, the tree and the stop with its receipt come from the others."""
    async with open_gateway(patient) as gateway:
        run_id = await gateway.start()
        assert await holders(gateway, run_id) == [0]

        async def running() -> bool:
            return (await gateway.http.get("/v1/runs", params={"status": "running"})).json()["data"] != []

        await eventually(running)
        async with gateway.events(f"/v1/runs/{run_id}/events") as events:
            first = await events.next()
            assert first is not None
            assert first.data["event"] == "tool.started"
        for _ in range(3):
            tree = (await gateway.http.get(f"/v1/runs/{run_id}/tree")).json()
            assert (tree["live"], len(tree["nodes"])) == (True, 1)
            whole = (await gateway.http.get("/v1/tree")).json()
            assert sorted(other["node"] for other in whole["others"]) in (
                ["node-0", "node-1"],
                ["node-0", "node-2"],
                ["node-1", "node-2"],
            )
        async with gateway.events(
            f"/v1/runs/{run_id}/events", headers={**gateway.http.headers, "Last-Event-ID": first.id}
        ) as events:
            stopped = await gateway.http.post(f"/v1/runs/{run_id}/stop", params={"wait": "true"})
            rest = await events.all()
        assert [event.data["event"] for event in rest if event.data] == ["run.cancelled"]
        assert (stopped.json()["status"], stopped.json()["receipt"]["ok"]) == ("cancelled", True)
        assert [line["kind"] for line in stopped.json()["receipt"]["lines"]] == ["turn"]


async def test_a_revoked_key_is_refused_by_every_node() -> None:
    """The other nodes have seen the key, and would have trusted it for a minute."""
    async with open_gateway() as gateway:
        headers = await gateway.key("runs", name="short")
        for _ in range(3):
            assert (await gateway.http.get("/v1/runs", headers=headers)).status_code == 200
        [key] = await gateway.core.store.list_api_keys()
        assert await gateway.core.store.revoke_api_key(key.id)

        async def refused() -> bool:
            return [(await gateway.http.get("/v1/runs", headers=headers)).status_code for _ in range(3)] == [401] * 3

        await eventually(refused)


async def test_a_browser_signs_in_once_for_all_nodes() -> None:
    """A code is used once on whichever node, its cookie counts on all, and signing out ends it on all; a code that was changed is refused."""
    same = {"Host": "127.0.0.1:8642", "Origin": "http://127.0.0.1:8642"}
    async with open_gateway(routes=console_routes()) as gateway:
        code = (await gateway.http.post("/v1/console/code")).json()["code"]
        del gateway.http.headers["Authorization"]

        async def sign_in(code: str) -> httpx2.Response:
            return await gateway.http.post("/v1/console/session", json={"code": code}, headers=same)

        assert (await sign_in(code[:-1] + ("0" if code[-1] != "0" else "1"))).status_code == 401
        opened = await sign_in(code)
        assert opened.status_code == 200
        for _ in range(3):
            assert (await sign_in(code)).status_code == 401
        cookie = {**same, "Cookie": opened.headers["set-cookie"].partition(";")[0]}
        gateway.http.cookies.clear()
        for _ in range(3):
            assert (await gateway.http.get("/v1/tree", headers=cookie)).status_code == 200
        assert (await gateway.http.delete("/v1/console/session", headers=cookie)).json() == {"signed_out": True}
        for _ in range(3):
            assert (await gateway.http.get("/v1/tree", headers=cookie)).status_code == 401


async def test_one_idempotency_key_on_two_nodes_is_one_turn() -> None:
    """Two requests with one key at once, on two nodes: one is worked on, and the other one gets its answer."""
    turns: list[str] = []

    async def agent(turn: Turn) -> str:
        turns.append(turn.input.text)
        await trio.sleep(0.05)
        return "once"

    answers: list[str] = []
    async with open_gateway(agent) as gateway:

        async def ask() -> None:
            answer = await gateway.chat("x", headers={"Idempotency-Key": "k1"})
            answers.append(answer.json()["choices"][0]["message"]["content"])

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ask)
        runs = {(await gateway.http.post("/v1/runs", json={"input": "r"}, headers={"Idempotency-Key": "k2"})).text}
        for _ in range(2):
            again = await gateway.http.post("/v1/runs", json={"input": "r"}, headers={"Idempotency-Key": "k2"})
            runs.add(again.text)
        assert len(runs) == 1
        await gateway.idle()
    assert (turns, answers) == (["x", "r"], ["once"] * 3)


async def test_the_health_report_names_every_node() -> None:
    """Name, age, lease and load of each, and which of them answered the request."""
    async with open_gateway(patient) as gateway:
        await gateway.start()

        async def counted() -> bool:
            body = (await gateway.http.get("/health/detailed")).json()
            return [node["name"] for node in body["nodes"]] == ["node-0", "node-1", "node-2"]

        await eventually(counted)
        body = (await gateway.http.get("/health/detailed")).json()
        assert [node["here"] for node in body["nodes"]].count(True) == 1
        assert all(0 < node["lease_seconds"] <= 15 for node in body["nodes"])


async def test_the_stream_of_the_tree_tells_of_all_nodes() -> None:
    """Name, age, lease, load and what each has, in a `nodes` event; an admin also sees what only one node runs. The metrics say the same."""
    async with open_gateway(patient) as gateway:
        headers = await gateway.key("runs")
        run_id = await gateway.start(session_id="s")
        [number] = await holders(gateway, run_id)
        [turn] = gateway.runtimes[number].core.live_turns.values()
        await turn.core.hosts.bind(turn)
        await gateway.runtimes[number].store.claim_lease("clock")
        await gateway.runtimes[number].store.renew_node(turn.core.membership.describe())
        for runtime in gateway.runtimes:
            await runtime.membership.read_nodes()
        for reader in (dict(gateway.http.headers), headers):
            async with gateway.events("/v1/tree/events", headers=reader) as events:
                told = await events.next()
                while told is None or told.name != "nodes":
                    told = await events.next()
            assert [node["name"] for node in told.data["nodes"]] == ["node-0", "node-1", "node-2"]
            found = told.data["nodes"][number]
            assert (found["turns"], found["jobs"], found["sessions"], found["answers"]) == (1, 0, 1, True)
            assert 0 < found["lease_seconds"] <= 15
            assert found.get("runs") == (["clock"] if reader is not headers else None)
            copy = TreeCopy()
            copy.apply("nodes", told.data, 0.0)
            line = cluster_line(copy.cluster[number], 1.0).plain
            assert line.startswith(f"node-{number}")
            assert "1 turns · 0 jobs · 1 sessions bound" in line
            silent = {**copy.cluster[number], "answers": False}
            assert "does not answer" in cluster_line(silent, 1.0).plain
            assert "has expired" in cluster_line(silent, 60.0).plain
        metrics = (await gateway.http.get("/metrics")).text
        assert metrics.count("hermes_node_lease_seconds{") == 3
        owner = turn.core.store.owner[:8]
        assert f'hermes_node_sessions{{incarnation="{owner}",node="node-{number}"}} 1.0' in metrics
        await gateway.http.post(f"/v1/runs/{run_id}/stop", params={"wait": "true"})


async def test_a_response_that_is_being_made_is_read_on_every_node() -> None:
    """A foreground response is `in_progress` with its text so far wherever it is asked for, to its own tenant alone."""

    async def agent(turn: Turn) -> str:
        turn.emit("message.delta", delta="half an ans")
        await trio.sleep_forever()
        raise AssertionError

    async with open_gateway(agent) as gateway:
        other = await gateway.key("responses", "chat", name="other")
        body = {"input": "x", "stream": True}
        async with gateway.events("/v1/responses", method="POST", json=body) as events:
            response_id = ""
            while (event := await events.next()) is not None and event.name != "response.output_text.delta":
                if event.name == "response.created":
                    response_id = event.data["response"]["id"]
            for _ in range(3):
                found = (await gateway.http.get(f"/v1/responses/{response_id}")).json()
                assert (found["id"], found["status"]) == (response_id, "in_progress")
                assert "half an ans" in str(found["output"])
                foreign = await gateway.http.get(f"/v1/responses/{response_id}", headers=other)
                assert foreign.status_code == 404
                assert (await gateway.http.get("/v1/responses/resp_nobody")).status_code == 404


async def test_turns_of_a_derived_session_wait_for_each_other_on_all_nodes() -> None:
    """Two requests that continue the same conversation without naming a session, on two nodes: one session, one turn at a time."""
    most = now = 0
    sessions: set[str] = set()

    async def agent(turn: Turn) -> str:
        nonlocal most, now
        now += 1
        most = max(most, now)
        sessions.add(turn.context.session_id)
        await trio.sleep(0.05)
        now -= 1
        return "answered"

    async with open_gateway(agent) as gateway:
        said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "answered"}]
        messages = [*said, {"role": "user", "content": "and then?"}]
        answers: list[int] = []

        async def ask() -> None:
            answer = await gateway.http.post("/v1/chat/completions", json={"messages": messages})
            answers.append(answer.status_code)

        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(ask)
        assert answers == [200, 200]
        assert (most, len(sessions)) == (1, 1)
