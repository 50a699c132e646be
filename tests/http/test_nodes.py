"""Requests to several nodes on one store: what one has started, another one shows, follows, answers and stops."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import h11
import httpx2
import msgspec
import pytest
import trio

from hermes_trio.commands.top import TreeCopy, cluster_line
from hermes_trio.commands.tree import other_lines
from hermes_trio.console.routes import console_routes
from hermes_trio.runtime.ports import NodeRequest, NodeRow
from hermes_trio.runtime.runtime import Runtime
from hermes_trio.runtime.turn import Turn
from hermes_trio.store.errors import StoreUnavailable

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


async def only_one_alive(gateway: Gateway, run_id: str) -> tuple[Runtime, str]:
    """The node that runs a run, and the key of its turn in the tree of that node."""
    [number] = await holders(gateway, run_id)
    [turn] = gateway.runtimes[number].core.live_turns.values()
    return gateway.runtimes[number], str(turn.node.key)


async def test_the_trees_of_all_nodes_are_whole_and_belong_to_their_tenants() -> None:
    """Each node shows the trees of the others; a key of a tenant finds only its own turns in them, and a session only its part."""
    async with open_gateway(patient) as gateway:
        runs: dict[str, str] = {}
        for name in ("one", "two"):
            headers = await gateway.key("runs", name=name, tenant=name)
            answer = await gateway.http.post("/v1/runs", json={"input": "x", "session_id": name}, headers=headers)
            runs[name] = answer.json()["run_id"]
            await eventually(partial(only_one_alive_now, gateway, runs[name]))
            for _ in range(3):
                body = (await gateway.http.get("/v1/tree", headers=headers)).json()
                trees = [body["tree"], *(other["tree"] for other in body["others"])]
                assert all(other["answers"] for other in body["others"])
                assert sorted(turn["tenant"] for tree in trees for turn in kinds_in(tree, "turn")) == [name]
        for _ in range(3):
            body = (await gateway.http.get("/v1/tree")).json()
            turns = {body["node"]: kinds_in(body["tree"], "turn")}
            turns |= {other["incarnation"]: kinds_in(other["tree"], "turn") for other in body["others"]}
            assert {node: len(found) for node, found in turns.items()} == {
                one.store.owner: len(one.core.live_turns) for one in gateway.runtimes
            }
            assert all(other["size"] == count_in(other["tree"]) for other in body["others"])
            [session] = {turn["owner"] for found in turns.values() for turn in found if turn["tenant"] == "two"}
            part = (await gateway.http.get("/v1/tree", params={"session": session})).json()
            found = [kinds_in(tree, "turn") for tree in (part["tree"], *(other["tree"] for other in part["others"]))]
            assert sorted(map(len, found)) == [0, 0, 1]


async def only_one_alive_now(gateway: Gateway, run_id: str) -> bool:
    """Whether the turn of a run is in a tree."""
    return any(one.stateless.runs.find(run_id) is not None and one.core.live_turns for one in gateway.runtimes)


def kinds_in(tree: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """The nodes of a kind in a tree."""
    return [
        *([tree] if tree["kind"] == kind else []),
        *(one for child in tree["children"] for one in kinds_in(child, kind)),
    ]


def count_in(tree: dict[str, Any]) -> int:
    """How many nodes a tree has."""
    return 1 + sum(count_in(child) for child in tree["children"])


async def test_a_large_tree_of_another_node_is_cut_near_its_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes nearest to the root stay, and the number of all is told; asked for by name, the tree is whole."""
    monkeypatch.setattr("hermes_trio.runtime.peers.MOST_NODES", 40)
    monkeypatch.setattr("hermes_trio.runtime.peers.LEAST_NODES", 10)
    async with open_gateway(patient) as gateway:
        large = gateway.runtimes[1]
        opened = [large.tree.root.open("receiver", f"r{number}") for number in range(50)]
        for _ in range(3):
            body = (await gateway.http.get("/v1/tree")).json()
            for other in body["others"]:
                if other["incarnation"] == large.store.owner:
                    assert (other["size"], count_in(other["tree"])) == (large.tree.size + 1, 20)
            whole = (await gateway.http.get("/v1/tree", params={"node": "node-1"})).json()
            assert (whole["node"], "others" in whole) == (large.store.owner, False)
            assert count_in(whole["tree"]) >= 51
        for node in opened:
            node.close()


async def test_a_node_of_a_tree_is_stopped_from_every_node_with_its_receipt() -> None:
    """Plain, and line by line; to the key of another tenant, and on a node that does not have it, it does not exist."""
    async with open_gateway(patient) as gateway:
        other = await gateway.key("runs", name="other")
        for accept in ("application/json", "text/event-stream"):
            for _ in range(3):
                run_id = await gateway.start()
                await eventually(partial(only_one_alive_now, gateway, run_id))
                holder, key = await only_one_alive(gateway, run_id)
                path, params = f"/v1/tree/{key}/stop", {"node": holder.store.owner}
                foreign = await gateway.http.post(path, params=params, headers=other)
                assert (foreign.status_code, foreign.json()["error"]["code"]) == (404, "node_not_found")
                headers = {**gateway.http.headers, "accept": accept}
                if accept == "application/json":
                    receipt = (await gateway.http.post(path, params=params, headers=headers)).json()
                else:
                    async with gateway.events(path, method="POST", headers=headers, params=params) as events:
                        told = await events.all()
                    assert [event.name for event in told] == ["stopping", "line", "receipt"]
                    receipt = told[-1].data
                assert (receipt["ok"], [line["kind"] for line in receipt["lines"]]) == (True, ["turn"])
                assert receipt["detail"] == "by admin"
                assert (await gateway.ended(run_id))["status"] == "cancelled"
                gone = await gateway.http.post(path, params=params)
                assert gone.status_code == 404


async def test_the_changes_of_any_tree_are_followed_through_any_node() -> None:
    """With `node`, a stream is that of the named node, resumes there, and ends for a node that is gone with 404."""
    async with open_gateway(patient) as gateway:
        target = gateway.runtimes[2]
        for _ in range(3):
            async with gateway.events("/v1/tree/events", params={"node": "node-2"}) as events:
                first = await events.next()
                assert first is not None
                assert (first.name, first.data["node"]) == ("snapshot", target.store.owner)
                with target.tree.watch():
                    opened = target.tree.root.open("receiver", "new")
                    told = await events.next()
                    while told is not None and told.name != "difference":
                        told = await events.next()
                assert told is not None
                assert "new" in [node["id"] for node in told.data["nodes"]]
            opened.close()
            resumed = {**gateway.http.headers, "Last-Event-ID": told.id}
            async with gateway.events("/v1/tree/events", params={"node": "node-2"}, headers=resumed) as events:
                again = await events.next()
                assert again is not None
                assert again.name == "difference"
                assert opened.key in [key for key, _ in again.data["closed"]]
        for path in ("/v1/tree", "/v1/tree/events"):
            answer = await gateway.http.get(path, params={"node": "nobody"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_node")

        async def left() -> bool:
            return not [node for node in target.tree.root.walk() if node.id.startswith("relay")]

        await eventually(left)


async def test_a_stream_of_a_node_that_stops_answering_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fast_path: bool
) -> None:
    """Its reader sees no end, and the log names the reason in one line, without a traceback."""

    async def forgets(request: NodeRequest) -> dict[str, Any]:
        return {"error": f"no request {request.target} is handled here"}

    async with open_gateway(fast_path=fast_path) as gateway:
        target = gateway.runtimes[2]
        async with gateway.events(f"{gateway.urls[0]}/v1/tree/events", params={"node": "node-2"}) as events:
            first = await events.next()
            assert first is not None
            assert first.name == "snapshot"
            monkeypatch.setitem(target.membership._handlers, "http_more", forgets)  # pyright: ignore[reportPrivateUsage]
            with pytest.raises(h11.RemoteProtocolError):
                await events.all()
        found = [record for record in caplog.records if "was cut off" in record.message]
        assert [(record.levelname, record.exc_info) for record in found] == [("WARNING", None)]
        assert target.store.owner[:8] in found[0].message


async def test_a_relayed_request_whose_end_was_not_told_ends_when_nobody_asks_for_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store fails while the client disconnects: the other node does not buffer a stream without a reader. One with a reader stays."""
    monkeypatch.setattr("hermes_trio.http.relay.POLL_SECONDS", 0.02)
    monkeypatch.setattr("hermes_trio.http.relay.KEPT_SECONDS", 0.5)
    monkeypatch.setattr("hermes_trio.http.api.tree.HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr("hermes_trio.http.api.tree.LOOK_SECONDS", 0.1)
    async with open_gateway() as gateway:
        target = gateway.runtimes[2]

        def relayed() -> list[str]:
            return [node.id for node in target.tree.root.walk() if node.id.startswith("relay")]

        for number, one in enumerate(gateway.runtimes[:2]):
            ask_node = one.store.ask_node

            async def ask(request: NodeRequest, ask_node: Callable[[NodeRequest], Awaitable[bool]] = ask_node) -> bool:
                if request.kind == "http_leave":
                    raise StoreUnavailable("the database does not answer")
                return await ask_node(request)

            monkeypatch.setattr(one.store, "ask_node", ask)
            path = f"{gateway.urls[number]}/v1/tree/events"
            async with gateway.events(path, params={"node": "node-2"}) as events:
                with trio.move_on_after(1.0):
                    while await events.next() is not None:
                        pass
                    raise AssertionError("the stream ended while it was read")
                assert relayed()

            async def left() -> bool:
                return not relayed()

            await eventually(left)


async def test_a_node_that_does_not_answer_is_shown_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tree is null within the bound, and asked for by name it is unavailable; two nodes with one name are told apart by their incarnations."""
    monkeypatch.setattr("hermes_trio.runtime.peers.LOOK_SECONDS", 0.2)
    async with open_gateway(patient) as gateway:
        silent, loud = gateway.runtimes[2], gateway.runtimes[1]
        monkeypatch.setitem(silent.membership._handlers, "tree", never)  # pyright: ignore[reportPrivateUsage]
        for url in gateway.urls[:2]:
            body = (await gateway.http.get(f"{url}/v1/tree")).json()
            found = {other["incarnation"]: other for other in body["others"]}
            assert (found[silent.store.owner]["answers"], found[silent.store.owner]["tree"]) == (False, None)
            lines = other_lines(found[silent.store.owner])
            assert lines == ["", f"node node-2 {silent.store.owner[:8]} · ! does not answer"]
            if (told := found.get(loud.store.owner)) is not None:
                assert other_lines(told)[:2] == ["", f"node node-1 {loud.store.owner[:8]}"]
        monkeypatch.setattr("hermes_trio.http.nodes.ANSWERS", 2.0)
        for url in gateway.urls[:2]:
            answer = await gateway.http.get(f"{url}/v1/tree", params={"node": silent.store.owner[:8]})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "node_unreachable")
            assert answer.headers["retry-after"] == "1"
        rows = [msgspec.structs.replace(row, name="same") for row in await loud.store.list_nodes()]

        async def same() -> list[NodeRow]:
            return rows

        monkeypatch.setattr(loud.store, "list_nodes", same)
        answer = await gateway.http.get(f"{gateway.urls[1]}/v1/tree", params={"node": "same"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "ambiguous_node")
        assert silent.store.owner in answer.json()["error"]["message"]


async def test_a_relayed_stream_ends_with_the_browser_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cookie is not passed on: the node that has received the request checks it, for as long as the stream lasts."""
    monkeypatch.setattr("hermes_trio.http.app.SESSION_CHECK_SECONDS", 0.02)
    monkeypatch.setattr("hermes_trio.http.api.tree.HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr("hermes_trio.http.api.tree.LOOK_SECONDS", 0.02)
    same = {"Host": "127.0.0.1:8642", "Origin": "http://127.0.0.1:8642"}
    async with open_gateway(routes=console_routes()) as gateway:
        code = (await gateway.http.post("/v1/console/code")).json()["code"]
        del gateway.http.headers["Authorization"]
        opened = await gateway.http.post("/v1/console/session", json={"code": code}, headers=same)
        cookie = {**same, "Cookie": opened.headers["set-cookie"].partition(";")[0]}
        gateway.http.cookies.clear()
        for target in range(3):
            params = {"node": f"node-{target}"}
            async with gateway.events("/v1/tree/events", params=params, headers=cookie) as events:
                for _ in range(4):
                    assert await events.next() is not None
                if target == 2:
                    assert (await gateway.http.delete("/v1/console/session", headers=cookie)).is_success
                    with pytest.raises(h11.RemoteProtocolError):
                        await events.all()


async def test_a_store_that_fails_while_other_nodes_are_asked_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trees of the others, a response of another node, and a deleted session: 503 with Retry-After, like every other request then."""

    async def fails(request: NodeRequest) -> bool:
        raise StoreUnavailable("the database does not answer")

    async with open_gateway() as gateway:
        assert (await gateway.http.post("/api/sessions", json={"id": "s"})).status_code == 201
        for one in gateway.runtimes:
            monkeypatch.setattr(one.store, "ask_node", fails)
        for method, path in (("GET", "/v1/tree"), ("GET", "/v1/responses/resp_x"), ("DELETE", "/api/sessions/s")):
            answer = await gateway.http.request(method, path)
            assert (answer.status_code, answer.headers.get("retry-after")) == (503, "1"), answer.text
            assert answer.json()["error"]["code"] == "session_db_unavailable"
        assert (await gateway.http.get("/api/sessions/s")).status_code == 200


async def test_deleting_a_session_ends_the_turns_that_wait_for_it_on_every_node() -> None:
    """They do not begin after the turn that they waited for, which would create the session again."""
    begun: list[str] = []

    async def agent(turn: Turn) -> str:
        begun.append(turn.input.text)
        return await patient(turn)

    async with open_gateway(agent) as gateway:
        assert (await gateway.http.post("/api/sessions", json={"id": "s"})).status_code == 201
        answers: list[httpx2.Response] = []

        async def say(url: str, text: str) -> None:
            answers.append(await gateway.http.post(f"{url}/api/sessions/s/chat", json={"message": text}))

        async with trio.open_nursery() as nursery:
            for number, url in enumerate(gateway.urls[:2]):
                nursery.start_soon(say, url, str(number))
                runtime = gateway.runtimes[number]

                async def alive(runtime: Runtime = runtime) -> bool:
                    return bool(runtime.core.live_turns)

                await eventually(alive)
                if not number:

                    async def first_has_begun() -> bool:
                        return begun == ["0"]

                    await eventually(first_has_begun)
            deleted = await gateway.http.delete(f"{gateway.urls[2]}/api/sessions/s")
            assert deleted.status_code == 200
        assert [answer.json()["error"]["hermes"]["error_code"] for answer in answers] == ["session_ended"] * 2
        assert [(await gateway.http.get("/api/sessions/s")).status_code for _ in range(3)] == [404] * 3


async def never(request: NodeRequest) -> dict[str, Any]:
    """Answers no request."""
    await trio.sleep_forever()
    raise AssertionError(request)


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


async def test_concurrent_conversations_with_one_opening_do_not_wait_for_those_of_other_nodes() -> None:
    """Nine requests with the same first words, three on each node, run at once, each in a session of its own, which the answer names; the next one
    that is alone, on whichever node, is in the session of the first.
    """
    live: list[str] = []
    all_live = trio.Event()
    named: list[str] = []

    async def agent(turn: Turn) -> str:
        live.append(turn.context.session_id)
        if len(live) == 9:
            all_live.set()
        await all_live.wait()
        turn.emit("message.delta", delta="done")
        return "done"

    async def stream(gateway: Gateway) -> None:
        body = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
        async with gateway.events("/v1/chat/completions", method="POST", json=body) as events:
            named.append(events.response.headers["x-hermes-session-id"])
            await events.all()

    async def ask(gateway: Gateway) -> None:
        named.append((await gateway.chat()).headers["x-hermes-session-id"])

    async with open_gateway(agent) as gateway:
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                for number in range(9):
                    nursery.start_soon(stream if number % 2 else ask, gateway)
                    while len(live) <= number:  # noqa: ASYNC110
                        await trio.sleep(0.001)
            assert len(set(live)) == 9
            assert sorted(named) == sorted(live)
            for _ in range(3):
                await ask(gateway)
        assert named[9:] == [live[0]] * 3


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
            line = cluster_line(copy.cluster[number], 1.0, turn.core.store.owner).plain
            assert line.startswith(f"▸ node-{number}")
            assert "1 turns · 0 jobs · 1 sessions bound" in line
            silent = {**copy.cluster[number], "answers": False}
            assert "does not answer" in cluster_line(silent, 1.0, "").plain
            assert "has expired" in cluster_line(silent, 60.0, "").plain
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


async def test_a_derived_session_has_one_turn_at_a_time_on_all_nodes() -> None:
    """Requests that continue the same conversation without naming a session, on three nodes at the same moment: no session has two turns at once."""
    live: list[str] = []

    async def agent(turn: Turn) -> str:
        assert turn.context.session_id not in live
        live.append(turn.context.session_id)
        await trio.sleep(0.05)
        live.remove(turn.context.session_id)
        return "answered"

    async with open_gateway(agent) as gateway:
        said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "answered"}]
        messages = [*said, {"role": "user", "content": "and then?"}]
        answers: list[int] = []

        async def ask() -> None:
            answer = await gateway.http.post("/v1/chat/completions", json={"messages": messages})
            answers.append(answer.status_code)

        async with trio.open_nursery() as nursery:
            for _ in range(12):
                nursery.start_soon(ask)
        assert answers == [200] * 12
