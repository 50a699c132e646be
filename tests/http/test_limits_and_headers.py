"""What is let through, and what every answer carries."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import trio

from hermes_trio.http.app import ApiApp
from hermes_trio.http.errors import ApiError
from hermes_trio.http.inputs import loose_bool, path_safe_id
from hermes_trio.http.settings import Limits, ServerSettings
from hermes_trio.runtime.turn import StatelessTurn, Turn

from .gateway import Gateway, eventually, open_gateway

SECURITY = {
    "content-security-policy",
    "permissions-policy",
    "strict-transport-security",
    "x-content-type-options",
    "x-frame-options",
    "x-xss-protection",
    "referrer-policy",
}


async def test_bodies_above_the_limit_are_413_announced_or_chunked(fast_path: bool) -> None:
    """Content-Length and chunked bodies above the limit are 413 body_too_large, before the key is looked at."""

    async def chunks() -> Any:
        for _ in range(20):
            yield b"x" * 1000

    async with open_gateway(fast_path=fast_path, limits=Limits(body_bytes=10_000)) as gateway:
        for method, path in (
            ("POST", "/v1/chat/completions"),
            ("POST", "/v1/runs"),
            ("POST", "/v1/responses"),
            ("POST", "/api/sessions"),
        ):
            announced = await gateway.http.request(method, path, content=b"x" * 10_001, headers={"Authorization": ""})
            assert (announced.status_code, announced.json()["error"]["code"]) == (413, "body_too_large"), path
            chunked = await gateway.http.request(method, path, content=chunks())
            assert (chunked.status_code, chunked.json()["error"]["code"]) == (413, "body_too_large"), path
            assert set(announced.headers) >= SECURITY
        assert (await gateway.chat("x" * 9000)).status_code == 200


@pytest.mark.parametrize("length", [b"", b"x", b"+5", b"-5", b"5_0"])
async def test_a_length_that_another_server_let_pass_is_refused(length: bytes) -> None:
    """Our own server takes no such request; behind another one, the application does not trust the number."""
    messages: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        messages.append(message)

    async with open_gateway() as gateway:
        await gateway.app(
            {
                "type": "http",
                "asgi": {"version": "3.0"},
                "http_version": "1.1",
                "method": "POST",
                "scheme": "http",
                "path": "/v1/runs",
                "raw_path": b"/v1/runs",
                "query_string": b"",
                "root_path": "",
                "headers": [(b"content-length", length)],
                "client": None,
                "server": ("127.0.0.1", 80),
            },
            receive,
            send,
        )
    error = msgspec.json.decode(messages[1]["body"])["error"]
    assert (messages[0]["status"], error["code"], error["param"]) == (400, "invalid_content_length", "Content-Length")


@pytest.mark.one_node  # each node has a bound of its own
async def test_concurrent_turns_are_bounded_by_a_token_that_moves_with_the_turn(fast_path: bool) -> None:
    """Above the limit chat, responses, runs and streams are 429 with Retry-After; a token is free when the work has ended."""
    go = trio.Event()
    inside = trio.Event()

    async def agent(turn: Turn) -> str:
        if turn.input.text == "hold":
            inside.set()
            await go.wait()
        return "ok"

    async with open_gateway(agent, fast_path=fast_path, limits=Limits(concurrent_turns=1)) as gateway:
        run_id = await gateway.start("hold")
        await inside.wait()
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True}),
            ("/v1/responses", {"input": "x"}),
            ("/v1/responses", {"input": "x", "stream": True}),
            ("/v1/runs", {"input": "x"}),
        ):
            answer = await gateway.http.post(path, json=body)
            assert answer.status_code == 429, path
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert answer.headers["retry-after"] == "1"
        for path, body, headers in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, {"X-Hermes-Session-Id": "new"}),
            ("/v1/runs", {"input": "x", "session_id": "new"}, {}),
        ):
            answer = await gateway.http.post(path, json=body, headers=headers)
            assert answer.status_code == 429, path
            assert (await gateway.http.get("/api/sessions/new")).status_code == 404, "a refused turn left a session"
        go.set()
        await gateway.ended(run_id)
        assert (await gateway.chat()).status_code == 200


@pytest.mark.one_node  # nodes that have not heard of each other let more through; see test_shared_limits
async def test_a_key_that_asks_too_often_is_told_when_to_come_back() -> None:
    """The rate limit is per key, answers 429 with Retry-After, and does not bind the admin key."""
    async with open_gateway(limits=Limits(requests_per_minute=60, burst=3)) as gateway:
        one, other = await gateway.key("chat", name="a"), await gateway.key("chat", name="b")
        statuses = [(await gateway.http.get("/v1/models", headers=one)).status_code for _ in range(5)]
        assert statuses == [200, 200, 200, 429, 429]
        refused = await gateway.http.get("/v1/models", headers=one)
        assert int(refused.headers["retry-after"]) >= 1
        assert (await gateway.http.get("/v1/models", headers=other)).status_code == 200
        assert (await gateway.http.get("/v1/models")).status_code == 200


@pytest.mark.one_node  # the other nodes do not drain
async def test_a_draining_server_refuses_work_and_answers_reads(fast_path: bool) -> None:
    """While draining, everything that starts a turn is 503 with Retry-After; status, events, stop and lists still work."""
    go = trio.Event()

    async def agent(turn: Turn) -> str:
        await go.wait()
        return "ok"

    async with open_gateway(agent, fast_path=fast_path) as gateway:
        run_id = await gateway.start()
        await gateway.http.post("/api/sessions", json={"id": "s"})
        reports: list[dict[str, Any]] = []

        async def drain() -> None:
            reports.append((await gateway.http.post("/admin/drain", params={"timeout": "15"})).json())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(drain)

            async def draining() -> object:
                return (await gateway.http.get("/admin/drain")).json()["draining"]

            await eventually(draining)
            for route in gateway.core.routes:
                if route.turns:
                    path = route.path.replace("{session_id}", "s")
                    answer = await gateway.http.request(route.method, path, json={})
                    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "gateway_draining"), path
                    assert answer.headers["retry-after"] == "1"
            assert (await gateway.http.get(f"/v1/runs/{run_id}")).json()["status"] == "running"
            assert (await gateway.http.get("/health")).status_code == 200
            assert (await gateway.http.get("/api/sessions")).status_code == 200
            assert (await gateway.http.get("/health/detailed")).json()["gateway_state"] == "draining"
            go.set()
        [report] = reports
        assert report["finished"] is True
        assert report["report"]["ok"] is True
        assert (report["report"]["turns"], report["report"]["jobs"], report["report"]["cancelled"]) == (0, 0, 0)
        assert (await gateway.http.get("/admin/drain")).json() == report
        assert (await gateway.ended(run_id))["output"] == "ok"


@pytest.mark.one_node  # the other nodes do not drain
async def test_a_drain_that_runs_out_of_time_cancels() -> None:
    """Turns that do not end in time are cancelled, and the report counts them."""

    async def agent(turn: Turn) -> str:
        await trio.sleep_forever()
        raise AssertionError

    async with open_gateway(agent) as gateway:
        run_id = await gateway.start()
        report = (await gateway.http.post("/admin/drain", params={"timeout": "0"})).json()["report"]
        assert (report["ok"], report["cancelled"]) == (True, 1)
        run = await gateway.ended(run_id)
        assert (run["status"], run["error_code"]) == ("cancelled", "drain")
        assert (await gateway.http.post("/admin/drain", params={"timeout": "x"})).status_code == 400


async def test_a_drain_survives_whoever_asked_for_it(fast_path: bool) -> None:
    """A client that asks for a drain and leaves does not keep the next one, or a signal, waiting for ever."""
    go = trio.Event()

    async def agent(turn: Turn) -> str:
        await go.wait()
        return "ok"

    async with open_gateway(agent, fast_path=fast_path) as gateway:
        run_id = await gateway.start()

        async def draining() -> object:
            return (await gateway.http.get("/admin/drain")).json()["draining"]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: gateway.http.post("/admin/drain", params={"timeout": "25"}))
            await eventually(draining)
            nursery.cancel_scope.cancel()
        go.set()
        report = await gateway.core.drain.run(20)
        assert report["ok"] is True
        assert (await gateway.ended(run_id))["output"] == "ok"


async def test_security_headers_are_everywhere(fast_path: bool) -> None:
    """Answers, errors, unknown paths, wrong methods and streams carry the security headers and the envelope."""
    async with open_gateway(fast_path=fast_path) as gateway:
        for method, path, status in (
            ("GET", "/health", 200),
            ("GET", "/v1/models", 200),
            ("GET", "/nope", 404),
            ("POST", "/health", 405),
            ("DELETE", "/v1/runs", 405),
            ("GET", "/v1/chat/completions", 405),
            ("PUT", "/v1/runs/x/events", 405),
            ("GET", "/v1/runs/x/events", 404),
            ("POST", "/v1/chat/completions", 400),
            ("OPTIONS", "/health", 403),
        ):
            answer = await gateway.http.request(method, path)
            assert answer.status_code == status, (method, path)
            assert set(answer.headers) >= SECURITY, (method, path)
            if status >= 400:
                assert answer.headers["content-type"] == "application/json"
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            if status == 405:
                assert answer.headers["allow"]


async def test_origins(fast_path: bool) -> None:
    """A foreign origin is 403 before anything else; an allowed one is echoed, on streams too; preflights are answered."""
    settings = ServerSettings(cors_origins=["https://app.example"])
    async with open_gateway(fast_path=fast_path, server=settings) as gateway:
        for path in ("/health", "/v1/models", "/nope"):
            answer = await gateway.http.get(path, headers={"Origin": "https://evil.example"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
        origin = {"Origin": "https://app.example"}
        preflight = await gateway.http.options("/anything", headers={**origin, "Authorization": ""})
        assert preflight.status_code == 200
        assert preflight.content == b""
        assert "PATCH" in preflight.headers["access-control-allow-methods"]
        assert "X-Hermes-Session-Id" in preflight.headers["access-control-allow-headers"]
        run_id = await gateway.start()
        await gateway.ended(run_id)
        for path in ("/health", "/v1/models", "/nope", f"/v1/runs/{run_id}/events"):
            answer = await gateway.http.get(path, headers=origin)
            assert answer.headers["access-control-allow-origin"] == "https://app.example", path
            assert answer.headers["vary"] == "Origin"
            assert "X-Hermes-Session-Id" in answer.headers["access-control-expose-headers"]
        assert "access-control-allow-origin" not in (await gateway.http.get("/health")).headers
    async with open_gateway(fast_path=fast_path, server=ServerSettings(cors_origins=["*"])) as gateway:
        answer = await gateway.http.get("/health", headers={"Origin": "https://x.example"})
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "vary" not in answer.headers


@pytest.mark.parametrize("header", ["../x", "a/b", "a\\b", "C:x", "x" * 257])
async def test_session_ids_that_mean_something_elsewhere(header: str) -> None:
    """Session ids with paths, drive letters, control characters or too many characters are 400."""
    async with open_gateway() as gateway:
        answer = await gateway.chat(headers={"X-Hermes-Session-Id": header})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_session_id")
        answer = await gateway.chat(headers={"X-Hermes-Session-Key": "k" * 257})
        assert answer.status_code == 400


async def test_idempotent_answers_are_repeated_byte_for_byte(fast_path: bool) -> None:
    """A key repeats the identical body; at once only one turn runs; another body is 409; failures are tried again."""
    turns = 0

    async def agent(turn: Turn) -> str:
        nonlocal turns
        turns += 1
        await trio.sleep(0.005)
        if turn.input.text == "fail" and turns < 3:
            raise ValueError("first time")
        return f"answer {turns}"

    async with open_gateway(agent, fast_path=fast_path) as gateway:
        bodies: list[bytes] = []

        async def ask(text: str = "x") -> None:
            bodies.append((await gateway.chat(text, headers={"Idempotency-Key": "k1"})).content)

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(ask)
        await ask()
        assert len(set(bodies)) == 1
        assert turns == 1
        conflict = await gateway.chat("y", headers={"Idempotency-Key": "k1"})
        assert (conflict.status_code, conflict.json()["error"]["code"]) == (409, "idempotency_conflict")
        failed = await gateway.chat("fail", headers={"Idempotency-Key": "k2"})
        assert failed.status_code == 500
        assert (await gateway.chat("fail", headers={"Idempotency-Key": "k2"})).status_code == 200
        replayed = await gateway.chat("fail", headers={"Idempotency-Key": "k2"})
        assert replayed.headers["idempotent-replayed"] == "true"
        responses = [
            await gateway.http.post("/v1/responses", json={"input": "x"}, headers={"Idempotency-Key": "k1"})
            for _ in range(2)
        ]
        assert responses[0].content == responses[1].content
        assert responses[0].content not in bodies
        assert (await gateway.chat(headers={"Idempotency-Key": "k" * 300})).status_code == 400


async def test_every_route_that_starts_a_turn_is_stateless() -> None:
    """Walk the URL map: each route that may start a turn binds api_server and has no channel; no other route starts one."""
    seen: list[Turn] = []

    async def agent(turn: Turn) -> str:
        seen.append(turn)
        return "ok"

    async with open_gateway(agent) as gateway:
        await gateway.http.post("/api/sessions", json={"id": "s"})
        chat = {"messages": [{"role": "user", "content": "x"}]}
        bodies = {
            "chat_completions": chat,
            "messages": {**chat, "max_tokens": 100},
            "count_tokens": chat,
            "responses": {"input": "x"},
        }
        other = {"input": "x", "message": "x", "name": "n", "choice": "once"}
        rules = {(method, rule.rule) for rule in _quart(gateway).url_map.iter_rules() for method in rule.methods or ()}
        assert {(route.method, route.quart_path) for route in gateway.core.routes} <= rules
        for route in gateway.core.routes:
            if route.name in ("tree_events", "drain_start", "session_delete", "session_patch", "session_fork"):
                continue
            seen.clear()
            path = route.path.replace("{session_id}", "s").replace("{", "").replace("}", "")
            body = bodies.get(route.name, other) if route.method != "GET" else None
            answer = await gateway.http.request(route.method, path, json=body)
            if route.turns:
                assert answer.status_code < 300, (route.name, answer.text)
                await gateway.idle()
            assert len(seen) == (1 if route.turns else 0), route.name
            for turn in seen:
                assert isinstance(turn, StatelessTurn)
                assert turn.supports_async_delivery is False
                context = turn.context
                assert context.platform == "api_server"
                assert context.session_id
                assert context.chat_id == context.session_id
                assert context.session_key


def _quart(gateway: Gateway) -> Any:
    assert isinstance(gateway.app, ApiApp)
    return gateway.app.quart


@pytest.mark.one_node
def test_loose_booleans() -> None:
    """Words, numbers and booleans; everything else is the default."""
    assert all(loose_bool(value, False) for value in (True, "1", "TRUE", " yes ", "on", 1, 2.5))
    assert not any(loose_bool(value, True) for value in (False, "0", "False", "no", "OFF", 0, 0.0))
    assert all(loose_bool(value, default) is default for default in (True, False) for value in (None, "maybe", [], {}))


@pytest.mark.one_node
def test_path_safe_ids() -> None:
    """Ids are trimmed; what could be a path is refused."""
    assert path_safe_id(" ok-1.2_3 ", "id") == "ok-1.2_3"
    for text in ("a/b", "..", "x\ny", "\x00", "d:evil"):
        with pytest.raises(ApiError):
            path_safe_id(text, "id")
