"""Sessions that are bound to a node: their turns run there, whichever node a request comes in on, and the model is told when that node is gone."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from hermes_trio.runtime.runtime import Runtime
from hermes_trio.runtime.turn import Turn

from .gateway import Gateway, eventually, open_gateway

NAMED = {"X-Hermes-Session-Id": "bound"}


@pytest.fixture(autouse=True, params=["memory", pytest.param("postgres", marks=pytest.mark.slow)])
def three(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
    """Three nodes in every test of this module, on a store in memory, and on a real PostgreSQL server."""
    monkeypatch.setattr("tests.node_mode.NODES", 3)
    if request.param == "postgres":
        monkeypatch.setattr("tests.node_mode.URL", request.getfixturevalue("postgres_url"))


async def where(turn: Turn) -> str:
    """Says on which node it runs, in two pieces; `bind` does what a command does before it runs, and `wait` waits to be stopped."""
    if "bind" in turn.input.text:
        await turn.core.hosts.bind(turn)
    turn.emit("message.delta", delta="node ")
    if "wait" in turn.input.text:
        await trio.sleep_forever()
    turn.emit("message.delta", delta=turn.core.store.owner)
    return f"node {turn.core.store.owner}"


async def bound_owner(gateway: Gateway) -> str:
    """Bind the session `bound`, and say to which node."""
    answer = await gateway.chat("bind", headers={**gateway.http.headers, **NAMED})
    return answer.json()["choices"][0]["message"]["content"].removeprefix("node ")


def turns_of(gateway: Gateway) -> list[int]:
    """How many turns live on each node."""
    return [len(runtime.core.live_turns) for runtime in gateway.runtimes]


async def test_the_turns_of_a_bound_session_run_on_its_node() -> None:
    """Completions, plain and streaming, runs and responses, on whichever node they come in; those of another session run where they come in."""
    async with open_gateway(where) as gateway:
        owner = await bound_owner(gateway)
        headers = {**gateway.http.headers, **NAMED}
        for _ in range(3):
            answer = await gateway.chat("where", headers=headers)
            assert answer.json()["choices"][0]["message"]["content"] == f"node {owner}"
            assert answer.headers["x-hermes-session-id"] == "bound"
        body = {"messages": [{"role": "user", "content": "where"}], "stream": True}
        for _ in range(3):
            async with gateway.events("/v1/chat/completions", method="POST", json=body, headers=headers) as events:
                told = await events.all()
            assert told[-1].data == "[DONE]"
            texts = [event.data["choices"][0]["delta"].get("content") or "" for event in told[:-1]]
            assert "".join(texts) == f"node {owner}"
        for _ in range(3):
            run_id = await gateway.start("where", session_id="bound")
            assert (await gateway.ended(run_id))["output"] == f"node {owner}"
        made = await gateway.http.post("/v1/responses", json={"input": "bind"})
        first = made.json()["output"][-1]["content"][0]["text"]
        for _ in range(3):
            more = {"input": "where", "previous_response_id": made.json()["id"]}
            made = await gateway.http.post("/v1/responses", json=more)
            assert made.json()["output"][-1]["content"][0]["text"] == first
        free = {(await gateway.chat(f"other {n}")).json()["choices"][0]["message"]["content"] for n in range(3)}
        assert len(free) == 3


async def test_what_was_wrong_with_a_request_is_told_through_another_node() -> None:
    """An error of the node that has the session is the answer here, with its status; an idempotency key holds on both nodes."""

    async def once(turn: Turn) -> str:
        if turn.input.text == "bind":
            await turn.core.hosts.bind(turn)
        calls.append(turn.input.text)
        return f"answer {len(calls)}"

    calls: list[str] = []
    async with open_gateway(once) as gateway:
        headers = {**gateway.http.headers, **NAMED}
        await gateway.chat("bind", headers=headers)
        repeated = {**headers, "Idempotency-Key": "k1"}
        answers = [(await gateway.chat("again", headers=repeated)).json() for _ in range(3)]
        assert answers[0] == answers[1] == answers[2]
        assert calls == ["bind", "again"]
        wrong = [
            await gateway.http.post("/v1/chat/completions", json={"messages": []}, headers=headers) for _ in range(3)
        ]
        assert {answer.status_code for answer in wrong} == {400}


async def test_a_client_that_leaves_is_told_to_the_node_that_works_for_it() -> None:
    """Leaving the stream on one node cancels the turn on the other; nothing is left there."""
    async with open_gateway(where) as gateway:
        await bound_owner(gateway)
        body = {"messages": [{"role": "user", "content": "wait"}], "stream": True}
        for _ in range(3):
            headers = {**gateway.http.headers, **NAMED}
            async with gateway.events("/v1/chat/completions", method="POST", json=body, headers=headers) as events:
                assert (await events.next()) is not None

                async def working() -> bool:
                    return sum(turns_of(gateway)) == 1

                await eventually(working)
            await gateway.idle()


async def test_no_key_is_written_into_a_row() -> None:
    """The other node is told who is asking, and not with which key."""
    async with open_gateway(where) as gateway:
        headers = {**await gateway.key("chat"), **NAMED}
        await gateway.chat("bind", headers=headers)
        asked: list[dict[str, Any]] = []
        for runtime in gateway.runtimes:
            _note_requests(runtime, asked)
        for _ in range(3):
            assert (await gateway.chat("where", headers=headers)).status_code == 200
        handed = [one for one in asked if "headers" in one]
        assert len(handed) == 2
        assert headers["Authorization"].split()[1] not in json.dumps(asked)


def _note_requests(runtime: Runtime, asked: list[dict[str, Any]]) -> None:
    store = runtime.store
    ask = store.ask_node

    async def noting(request: Any) -> bool:
        asked.append(dict(request.payload))
        return await ask(request)

    store.ask_node = noting  # type: ignore[method-assign]


async def test_the_model_is_told_once_what_was_lost() -> None:
    """The node of a session is gone: its next turn runs on another one and begins with what was lost; the turn after it does not."""
    said: list[str] = []

    async def listen(turn: Turn) -> str:
        said.append(turn.input.text)
        if turn.input.text == "bind":
            await turn.core.hosts.bind(turn)
        return turn.core.store.owner

    async with open_gateway(listen) as gateway:
        headers = {**gateway.http.headers, **NAMED}
        await gateway.chat("bind", headers=headers)
        first = gateway.runtimes[0]
        host = await first.store.session_host("bound")
        assert host is not None
        assert host.node == first.store.owner
        assert [node.hosted for node in await first.store.list_nodes()] == [1, 0, 0]
        await first.store.leave_node(first.core.epoch)
        answers: list[str] = []
        for _ in range(4):
            answer = await gateway.chat("hello", headers=headers)
            if answer.status_code == 200:
                answers.append(answer.json()["choices"][0]["message"]["content"])
        assert len(said) - 1 == len(answers) >= 2
        assert "is gone" in said[1]
        assert said[1].endswith("\n\nhello")
        assert said[2:] == ["hello"] * len(said[2:])
        assert first.store.owner not in answers
        assert await gateway.runtimes[1].store.session_host("bound") is None


async def test_a_session_that_ends_is_bound_no_more() -> None:
    """Its row of the binding goes with it."""
    async with open_gateway(where) as gateway:
        owner = await bound_owner(gateway)
        host = await gateway.core.store.session_host("bound")
        assert host is not None
        assert (host.node, host.gone) == (owner, False)
        assert (await gateway.http.delete("/api/sessions/bound")).status_code == 200
        assert await gateway.core.store.session_host("bound") is None
