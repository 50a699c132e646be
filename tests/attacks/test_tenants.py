"""Crossing tenants: every route, with everything that has an owner, for its owner, for another tenant, and for a key without the scope."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from hermes_trio.http.auth import RequiredScope
from hermes_trio.http.routing import Route
from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.outcome import TurnState
from hermes_trio.runtime.ports import NewRun, TurnFinish, TurnStart
from hermes_trio.runtime.turn import Turn
from hermes_trio.store import CronJob, ForeignSession, NewApproval, NewSession, StoredResponse, open_store
from hermes_trio.store.errors import UnknownRecord
from tests.http.gateway import Gateway, open_gateway
from tests.http.test_discovery import _Cron  # pyright: ignore[reportPrivateUsage]

MARK = "owner-words-0123456789"
SCOPES = ("chat", "runs", "sessions")


@attrs.frozen
class Case:
    """How a route is asked. `made` names what its path refers to, `owner` what its owner is answered.

    `elsewhere` are requests that name the object outside of the path: each as (body, headers), with `{id}` for the object's id.
    """

    made: str = ""
    body: Any = None
    owner: tuple[int, ...] = (200, 201, 202)
    elsewhere: tuple[tuple[Any, Mapping[str, str]], ...] = ()


SHARED = Case()
"""No owner: the answer is the same for all keys, and holds nothing of any of them."""
OPERATOR = Case()
"""The operator's alone."""
MESSAGES = [{"role": "user", "content": "hello"}]

CASES: Mapping[str, Case] = {
    **dict.fromkeys(("health", "health_v1", "health_detailed", "metrics", "models", "model", "capabilities"), SHARED),
    **dict.fromkeys(("openapi", "docs", "docs_script"), SHARED),
    **dict.fromkeys(("drain_start", "drain", "keys", "key_create", "key_revoke"), OPERATOR),
    **dict.fromkeys(("jobs", "job_create", "job", "job_update", "job_delete"), OPERATOR),
    **dict.fromkeys(("job_pause", "job_resume", "job_run", "outbox", "outbox_retry"), OPERATOR),
    "chat_completions": Case(
        "session",
        {"messages": MESSAGES},
        elsewhere=(({"messages": MESSAGES}, {"X-Hermes-Session-Id": "{id}"}),),
    ),
    "messages": Case(
        "session",
        {"messages": MESSAGES, "max_tokens": 16},
        elsewhere=(({"messages": MESSAGES, "max_tokens": 16}, {"X-Hermes-Session-Id": "{id}"}),),
    ),
    "count_tokens": Case("session", {"messages": MESSAGES}),
    "approvals": Case("approval"),
    "approval_answer": Case("approval", {"choice": "once"}, owner=(409,)),
    "responses": Case("response", {"input": "x"}, elsewhere=(({"input": "x", "previous_response_id": "{id}"}, {}),)),
    "response": Case("response"),
    "response_input_items": Case("response"),
    "response_cancel": Case("response", owner=(400,)),
    "response_delete": Case("response"),
    "runs_start": Case("session", {"input": "x"}, elsewhere=(({"input": "x", "session_id": "{id}"}, {}),)),
    "runs_list": Case("run"),
    "run": Case("run"),
    "run_events": Case("run"),
    "run_approval": Case("live run", {"choice": "once"}, owner=(409,)),
    "run_stop": Case("live run"),
    "run_tree": Case("live run"),
    "tree": Case("live run"),
    "tree_events": Case("live run"),
    "tree_stop": Case("node"),
    "sessions": Case("session"),
    "session_create": Case("session"),
    "session": Case("session"),
    "session_patch": Case("session", {"title": "another"}),
    "session_delete": Case("session"),
    "session_messages": Case("session"),
    "session_fork": Case("session"),
    "session_chat": Case("session", {"message": "x"}),
    "session_chat_stream": Case("session", {"message": "x"}),
}


async def agent(turn: Turn) -> str:
    """Answers, or waits to be stopped."""
    if turn.input.text.startswith("wait"):
        await trio.sleep_forever()
    return MARK


async def make(gateway: Gateway, what: str, headers: dict[str, str], number: int) -> str:
    """Something that the holder of this key owns; returns its id."""
    post = gateway.http.post
    if what == "session":
        id = f"owned-{number}"
        answer = await gateway.chat(MARK, headers={**headers, "X-Hermes-Session-Id": id})
        assert answer.status_code == 200
        return id
    if what == "response":
        return (await post("/v1/responses", json={"input": MARK}, headers=headers)).json()["id"]
    if what == "approval":
        asked = NewApproval(id="appr_1", scope="run_1", command=MARK, expires_at=9e9, tenant="owner")
        return (await gateway.front.store.create_approval(asked)).id
    text = MARK if what == "run" else f"wait {MARK}"
    run_id = (await post("/v1/runs", json={"input": text}, headers=headers)).json()["run_id"]
    if what == "run":
        await gateway.ended(run_id)
    elif what == "node":
        return str(next(node for node in gateway.runtime.tree.root.walk() if node.tenant == "owner").key)
    return run_id


def filled(value: Any, id: str) -> Any:
    """A body or headers with the object's id in its place."""
    return {key: id if item == "{id}" else item for key, item in value.items()} if isinstance(value, dict) else value


def path_of(route: Route, id: str) -> str:
    """The path with the object's id; routes of the operator and of everybody get one that is nobody's."""
    head, brace, rest = route.path.partition("{")
    return route.path if not brace else f"{head}{id}{rest.partition('}')[2]}"


async def test_every_route_is_in_the_table() -> None:
    """A route that this module does not know fails here: say who owns what it shows, then add it."""
    async with open_gateway(cron=_Cron()) as gateway:
        routes = {route.name: route for route in gateway.front.routes}
        assert set(routes) == set(CASES)
        for name, case in CASES.items():
            access = routes[name].access
            assert (case is OPERATOR) is (access is RequiredScope.ADMIN), name
            assert (case is SHARED) is (access in (RequiredScope.OPEN, RequiredScope.ANY)), name
            assert bool(case.elsewhere) or "{" in routes[name].path or not routes[name].turns, name


@pytest.mark.parametrize("name", CASES)
async def test_a_route_shows_an_object_to_its_owner_alone(name: str) -> None:
    """Its owner is answered; another tenant is told that there is none, in the words for an id that nobody has; a key without the scope is refused."""
    case = CASES[name]
    async with open_gateway(agent, cron=_Cron()) as gateway:
        route = {route.name: route for route in gateway.front.routes}[name]
        owner, other = await gateway.key(*SCOPES, tenant="owner"), await gateway.key(*SCOPES, tenant="other")
        scopes = [scope for scope in SCOPES if scope != route.access.value]
        unscoped = await gateway.key(*scopes, tenant="owner")

        async def ask(headers: dict[str, str], id: str, body: Any = case.body, more: Mapping[str, str] = {}) -> Any:
            target = path_of(route, id)
            return await gateway.http.request(route.method, target, json=body, headers={**headers, **more})

        if case is OPERATOR:
            for key in (owner, other, unscoped):
                assert (await ask(key, "any")).status_code == 403
            return
        if case is SHARED:
            await make(gateway, "session", owner, 0)
            for what in ("run", "response"):
                await make(gateway, what, owner, 0)
            if route.access is RequiredScope.ANY and name != "model":
                assert MARK not in (await ask(other, "any")).text
            return
        id = await make(gateway, case.made, owner, 0)
        assert (await ask(unscoped, id)).status_code == 403
        if "{" in route.path:
            refused, unknown = await ask(other, id), await ask(other, "nobodys")
            assert refused.status_code == unknown.status_code == 404
            assert refused.text.replace(id, "nobodys") == unknown.text
        elif name == "tree_events":
            for key, seen in ((owner, True), (other, False)):
                async with gateway.events(route.path, headers=key) as stream:
                    first = await stream.next()
                    assert first is not None
                    assert (id in str(first.data)) is seen
        else:
            answer = await ask(other, id)
            assert id not in answer.text
            assert MARK not in answer.text or route.turns
        for body, headers in case.elsewhere:
            refused = await ask(other, id, filled(body, id), filled(dict(headers), id))
            assert refused.status_code == 404, refused.text
            mine = await ask(owner, id, filled(body, id), filled(dict(headers), id))
            assert mine.status_code in case.owner
        if name != "tree_events":
            assert (await ask(owner, id)).status_code in case.owner
        for run in gateway.runtime.stateless.runs.all():
            await run.stop()


async def test_a_derived_session_cannot_be_taken_beforehand() -> None:
    """The id of a conversation cannot be computed without the store's secret, and ids of that kind are made by the server alone."""
    async with open_gateway(agent) as gateway:
        other = await gateway.key(*SCOPES, tenant="other")
        opening = "\n" + MARK
        for tenant in ("", "other"):
            guess = "api-" + sha256(f"{tenant}\0{opening}".encode()).hexdigest()[:16]
            taken = await gateway.http.post("/api/sessions", json={"id": guess}, headers=other)
            assert (taken.status_code, taken.json()["error"]["code"]) == (409, "session_exists")
            named = await gateway.chat("x", headers={**other, "X-Hermes-Session-Id": guess})
            assert named.status_code == 404
        session_id = (await gateway.chat(MARK)).headers["x-hermes-session-id"]
        assert session_id != guess
        assert len(session_id) == len("api-") + 32
        assert (await gateway.http.get(f"/api/sessions/{session_id}", headers=other)).status_code == 404
        assert (await gateway.chat(MARK, headers=other)).headers["x-hermes-session-id"] != session_id


async def test_an_id_cannot_be_taken_during_the_owners_first_turn() -> None:
    """A named session is its owner's from the moment in which it is named: neither making, branching nor naming it takes it away."""
    async with open_gateway(agent) as gateway:
        owner, other = await gateway.key(*SCOPES, tenant="owner"), await gateway.key(*SCOPES, tenant="other")
        async with gateway.events(
            "/v1/chat/completions",
            method="POST",
            json={"messages": [{"role": "user", "content": f"wait {MARK}"}], "stream": True},
            headers={**owner, "X-Hermes-Session-Id": "fresh"},
        ) as stream:
            await stream.next()
            made = await gateway.http.post("/api/sessions", json={"id": "fresh"}, headers=other)
            assert made.status_code == 409
            assert (await gateway.http.post("/api/sessions", json={"id": "mine"}, headers=other)).status_code == 201
            forked = await gateway.http.post("/api/sessions/mine/fork", json={"id": "fresh"}, headers=other)
            assert forked.status_code == 409
            assert made.json()["error"]["message"] == forked.json()["error"]["message"]
            named = await gateway.chat("x", headers={**other, "X-Hermes-Session-Id": "fresh"})
            assert named.status_code == 404
        await gateway.idle()
        row = await gateway.front.store.get_session("fresh")
        assert row is not None
        assert (row.tenant, row.message_count > 0) == ("owner", True)
        assert (await gateway.http.get("/api/sessions/fresh/messages", headers=other)).status_code == 404


async def test_a_client_cannot_name_the_key_of_a_chat() -> None:
    """Whatever id or key a client chooses, its session key begins with `api:` and its tenant: grants of a chat are not for it."""
    chat, seen = "agent:main:telegram:dm:42", list[Turn]()

    async def noting(turn: Turn) -> str:
        seen.append(turn)
        return "ok"

    async with open_gateway(noting) as gateway:
        tenant = await gateway.key(*SCOPES, tenant="a:b")
        for key in ({}, tenant):
            for headers in ({"X-Hermes-Session-Id": f"{chat}{len(key)}"}, {"X-Hermes-Session-Key": chat}):
                assert (await gateway.chat("x", headers={**key, **headers})).status_code == 200
    assert [turn.context.session_key for turn in seen] == [
        f"api::{chat}0",
        f"api::{chat}",
        f"api:a%3Ab:{chat}1",
        f"api:a%3Ab:{chat}",
    ]


async def test_a_turn_of_the_admin_in_a_tenants_session_is_the_tenants() -> None:
    """An admin may talk to any session; what it adds stays where it is, and the session keeps its owner."""
    async with open_gateway(agent) as gateway:
        owner = await gateway.key(*SCOPES, tenant="owner")
        id = await make(gateway, "session", owner, 0)
        assert (await gateway.chat("x", headers={"X-Hermes-Session-Id": id})).status_code == 200
        assert (await gateway.http.post(f"/api/sessions/{id}/chat", json={"message": "x"})).status_code == 200
        run_id = await gateway.start("x", session_id=id)
        await gateway.ended(run_id)
        assert (await gateway.http.get(f"/v1/runs/{run_id}", headers=owner)).status_code == 200
        messages = (await gateway.http.get(f"/api/sessions/{id}/messages", headers=owner)).json()["data"]
        assert len([message for message in messages if message["role"] == "user"]) == 4


async def test_the_secret_belongs_to_the_store(tmp_path: Path) -> None:
    """Every process that opens a store derives the same ids; another store has another secret."""
    found: list[bytes] = []
    for name in ("one.db", "one.db", "two.db"):
        async with open_store(tmp_path / name, maintenance=False) as store:
            found.append(store.secret)
    assert found[0] == found[1] != found[2]
    assert {len(secret) for secret in found} == {32}


async def test_each_statement_checks_the_tenant(tmp_path: Path) -> None:
    """A session, run, response or cron job of one tenant is not changed by a write of another, whatever was checked before."""
    async with open_store(tmp_path / "store.db", maintenance=False) as store:
        context = SessionContext(session_id="s", session_key="api:red:s")
        await store.claim_session(NewSession(id="s", source="api_server", tenant="red"))
        run = NewRun(run_id="run_1", session_id="s", tenant="red")
        red = TurnStart(turn_id="t1", context=context, source="api_server", tenant="red", run=run)
        await store.begin_turn(red)
        blue = TurnStart(turn_id="t2", context=context, source="api_server", tenant="blue")
        with pytest.raises(ForeignSession):
            await store.claim_session(NewSession(id="s", source="api_server", tenant="blue"))
        with pytest.raises(ForeignSession):
            await store.begin_turn(blue)
        for end in ("", "done"):
            with pytest.raises(ForeignSession):
                await store.finish_turn(
                    TurnFinish(start=blue, state=TurnState.COMPLETED, text="taken", end_session=end)
                )
        for verb in (store.delete_session, store.fork_session, store.patch_session):
            with pytest.raises(ForeignSession):
                await verb("s", tenant="blue")
        await store.finish_turn(TurnFinish(start=red, state=TurnState.COMPLETED, text="kept"))
        found = await store.get_run("run_1")
        assert found is not None
        assert found.output == "kept"
        await store.put_response(StoredResponse(id="r", tenant="red", session_id="s", body=b"{}"))
        with pytest.raises(UnknownRecord):
            await store.put_response(StoredResponse(id="r", tenant="blue", session_id="s", body=b"taken"))
        kept = await store.get_response("red", "r")
        assert kept is not None
        assert kept.body == b"{}"
        await store.put_cron_job(CronJob(id="j", name="n", schedule="* * * * *", tenant="red"))
        with pytest.raises(UnknownRecord):
            await store.put_cron_job(CronJob(id="j", name="taken", schedule="* * * * *", tenant="blue"))
