"""Crossing tenants: every route, with everything that has an owner, for its owner, for another tenant, and for a key without the scope."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import attrs
import httpx2
import pytest
import trio

from hermes_trio.config import load_config
from hermes_trio.gateway.serving import Serving, open_server
from hermes_trio.http.auth import AdminKey, RequiredScope
from hermes_trio.http.routing import Route
from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.outcome import TurnState
from hermes_trio.runtime.ports import NewRun, TurnFinish, TurnStart
from hermes_trio.runtime.turn import Turn
from hermes_trio.store import CronJob, ForeignSession, NewApproval, NewSession, StoredResponse, open_store
from hermes_trio.store.errors import UnknownRecord
from hermes_trio.testing.rows import grant_category
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
    query: str = ""
    owner: tuple[int, ...] = (200, 201, 202)
    elsewhere: tuple[tuple[Any, Mapping[str, str]], ...] = ()


SHARED = Case()
"""No owner: the answer is the same for all keys, and holds nothing of any of them."""
OPERATOR = Case()
"""The operator's alone."""
MESSAGES = [{"role": "user", "content": "hello"}]

CASES: Mapping[str, Case] = {
    **dict.fromkeys(
        ("health", "health_v1", "health_detailed", "health_load", "metrics", "models", "model", "capabilities"), SHARED
    ),
    **dict.fromkeys(("openapi", "docs", "docs_script"), SHARED),
    **dict.fromkeys(("drain_start", "drain", "keys", "key_create", "key_revoke"), OPERATOR),
    **dict.fromkeys(("jobs", "job_create", "job", "job_update", "job_delete"), OPERATOR),
    **dict.fromkeys(("job_pause", "job_resume", "job_run", "outbox", "outbox_retry"), OPERATOR),
    **dict.fromkeys(("job_executions", "inbox", "inbox_retry"), OPERATOR),
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
    "grants": Case("grant"),
    "grant_revoke": Case("grant"),
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
    "search": Case("session", query="?q=owner"),
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
        return (await gateway.core.store.create_approval(asked)).id
    if what == "grant":
        await grant_category(gateway.core.store, MARK, scope="tenant owner")
        return (await gateway.core.store.list_grants())[0].id
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
        routes = {route.name: route for route in gateway.core.routes}
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
        route = {route.name: route for route in gateway.core.routes}[name]
        owner, other = await gateway.key(*SCOPES, tenant="owner"), await gateway.key(*SCOPES, tenant="other")
        scopes = [scope for scope in SCOPES if scope != route.access.value]
        unscoped = await gateway.key(*scopes, tenant="owner")

        async def ask(headers: dict[str, str], id: str, body: Any = case.body, more: Mapping[str, str] = {}) -> Any:
            target = path_of(route, id) + case.query
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
            if case.query:
                assert id in (await ask(owner, id)).text
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
        row = await gateway.core.store.get_session("fresh")
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


# -- what a served gateway adds to the API: the console, the chat in the browser, addresses that other systems call ----------------


PAGE = "page"
"""A file of the console: the same for all."""
OWN = "own"
"""About the key or cookie that it is asked with, and nothing else."""
SIGNED = "signed"
"""Asked by other systems, which sign what they send."""
CONVERSATION = "conversation"
"""Names a conversation among those of the caller's tenant."""

SERVED: Mapping[str, str] = {
    **dict.fromkeys(("console", "console_chat", "console_file", "console_file_2", "console_file_3"), PAGE),
    **dict.fromkeys(("console_sign_in", "console_who", "console_sign_out", "console_code"), OWN),
    **dict.fromkeys(("webhook", "endpoint_0"), SIGNED),
    **dict.fromkeys(("web_conversations", "web_messages", "web_say", "web_seen", "web_file"), CONVERSATION),
    **dict.fromkeys(("web_decide", "web_events"), CONVERSATION),
}

CONFIGURATION = """
[approvals]
timeout = 600
[webhook.routes.build]
secret = "a-webhook-secret-0123456789"
prompt = "hello"
[telegram]
token = "1:a-telegram-token-0123456789"
mode = "webhook"
webhook_url = "https://example.org/telegram"
base_url = "http://127.0.0.1:9"
"""


def _written(home: Path) -> Path:
    home.mkdir(mode=0o700, exist_ok=True)
    (home / "config.toml").write_text(CONFIGURATION)
    (home / "config.toml").chmod(0o600)
    return home


@asynccontextmanager
async def open_served(home: Path) -> AsyncIterator[tuple[Serving, httpx2.AsyncClient]]:
    """The whole gateway with everything that has an address, and a client without a key."""
    config = load_config({}, home=_written(home), server={"port": 0})
    with trio.fail_after(60):
        async with (
            open_server(config, AdminKey("tenants-admin-key-0123456789")) as serving,
            httpx2.AsyncClient(base_url=serving.addresses[0], trust_env=False, timeout=30) as http,
        ):
            yield serving, http


async def test_every_route_of_a_served_gateway_is_in_a_table(tmp_path: Path) -> None:
    """The URL map of the real composition, with console, chat, webhooks and platforms that push: a new address cannot be forgotten."""
    async with open_served(tmp_path / "home") as (serving, http):
        routes = {route.name: route for route in serving.gateway.api.routes}
        assert set(routes) == set(CASES) | set(SERVED)
        for name, kind in SERVED.items():
            route = routes[name]
            assert (kind == CONVERSATION) is (route.access is RequiredScope.CHAT), name
            if kind == SIGNED:
                answer = await http.post(path_of(route, "build"), json={"text": MARK})
                assert answer.status_code in (401, 403), (name, answer.text)


async def test_the_console_and_the_chat_show_a_tenant_its_own_alone(tmp_path: Path) -> None:
    """Every address of both: the owner finds its words, its file and its question there; another tenant finds nothing, changes nothing and decides nothing."""
    async with open_served(tmp_path / "home") as (serving, http):
        store = serving.gateway.gateway.store
        routes = {route.name: route for route in serving.gateway.api.routes}
        keys: dict[str, dict[str, str]] = {}
        for name, scopes in (("owner", SCOPES), ("other", SCOPES), ("unscoped", ("runs", "sessions"))):
            _, secret = await store.create_api_key(name, scopes=scopes, tenant=name.replace("unscoped", "owner"))
            keys[name] = {"Authorization": f"Bearer {secret}"}

        async def until_shown(path: str, what: str) -> Any:
            while True:
                found = (await http.get(path, headers=keys["owner"])).json()
                if found[what]:
                    return found
                await trio.sleep(0.02)

        base = "/v1/web/conversations/plan"
        note = {"name": "a.txt", "media": "text/plain", "data": b64encode(MARK.encode()).decode()}
        said = {"text": f"!run rm -rf ./{MARK}", "id": "1"}
        await http.post(f"{base}/messages", headers=keys["owner"], json={"text": MARK, "attachments": [note]})
        mine = next(one for one in (await until_shown(f"{base}/messages", "data"))["data"] if one["role"] == "user")
        await http.post(f"{base}/messages", headers=keys["owner"], json=said)
        found = await until_shown(f"{base}/messages", "approvals")
        paths = {
            "web_conversations": ("/v1/web/conversations", None),
            "web_messages": (f"{base}/messages", None),
            "web_say": (f"{base}/messages", {"text": "/status"}),
            "web_seen": (f"{base}/seen", {"mark": found["mark"]}),
            "web_file": (f"{base}/messages/{mine['place']}/parts/{mine['attachments'][0]['part']}", None),
            "web_decide": (f"{base}/approvals/{found['approvals'][0]['approval_id']}", {"choice": "once"}),
        }
        assert set(paths) | {"web_events"} == {name for name, kind in SERVED.items() if kind == CONVERSATION}
        for name, (path, body) in paths.items():
            method = routes[name].method
            assert (await http.request(method, path, json=body)).status_code == 401
            assert (await http.request(method, path, json=body, headers=keys["unscoped"])).status_code == 403
            theirs = await http.request(method, path, json=body, headers=keys["other"])
            assert MARK not in theirs.text, name
            assert found["session_id"] not in theirs.text, name
            if name in ("web_conversations", "web_messages", "web_file"):
                assert MARK in (await http.get(path, headers=keys["owner"])).text, name
        (waiting,) = (await http.get(f"{base}/messages", headers=keys["owner"])).json()["approvals"]
        assert waiting["approval_id"] == found["approvals"][0]["approval_id"]
        start = f"{found['event_id'].partition('-')[0]}-0"
        for key, seen in (("owner", True), ("other", False)):
            headers = {**keys[key], "Last-Event-ID": start}
            async with (
                http.stream("GET", "/v1/web/events", headers=headers) as stream,
                aclosing(stream.aiter_text()) as pieces,
            ):
                read = ""
                while "data:" not in read:
                    # Everything that has happened comes first, at once; both have said something.
                    read += await anext(pieces)
                assert (MARK in read) is seen
        for key in ("owner", "other"):
            who = (await http.get("/v1/console/session", headers=keys[key])).json()
            assert who["tenant"] == key
            code = (await http.post("/v1/console/code", headers=keys[key])).json()["code"]
            page = {"Origin": serving.addresses[0].rstrip("/")}
            signed = await http.post("/v1/console/session", json={"code": code}, headers=page)
            assert (signed.status_code, signed.json()["tenant"]) == (200, key)
            http.cookies.clear()
        for name, kind in SERVED.items():
            if kind == PAGE and "{" not in routes[name].path:
                assert MARK not in (await http.get(routes[name].path, headers=keys["other"])).text
        await http.post(paths["web_decide"][0], headers=keys["owner"], json={"choice": "deny"})
