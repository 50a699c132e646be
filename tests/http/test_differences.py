"""Claims of `docs/differences.md` that a running server can be asked about: the words stand on the page, and the server does what they say."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from hermes_trio.http.core import ModelEntry
from hermes_trio.http.settings import Limits

from .gateway import Gateway, open_gateway
from .test_responses_api import with_tools

PAGE = (Path(__file__).parents[2] / "docs" / "differences.md").read_text(encoding="utf-8")
Check = Callable[[Gateway], Awaitable[object]]


async def _mcp_calls(gateway: Gateway) -> None:
    answer = await gateway.http.post("/v1/responses", json={"input": "x"})
    assert [item["type"] for item in answer.json()["output"]] == ["message", "mcp_call", "message"]


async def _parameters(gateway: Gateway) -> None:
    assert (await gateway.chat("x", n=2)).status_code == 400
    assert (await gateway.chat("x", user="ada")).status_code == 200


async def _challenge(gateway: Gateway) -> None:
    refused = await gateway.http.get("/v1/models", headers={"Authorization": "Bearer no"})
    assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")


async def _envelope(gateway: Gateway) -> None:
    for method, path, status, code in (
        ("GET", "/nowhere", 404, "unknown_path"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ):
        answer = await gateway.http.request(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.json()["error"]["code"] == code


async def _shape(gateway: Gateway) -> None:
    answer = await gateway.http.post("/v1/chat/completions", json={"messages": "x"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


async def _too_large(gateway: Gateway) -> None:
    assert (await gateway.http.post("/v1/chat/completions", content=b" " * 5000)).status_code == 413


async def _head(gateway: Gateway) -> None:
    assert (await gateway.http.head("/v1/models")).status_code == 200


async def _utf8(gateway: Gateway) -> None:
    answer = await gateway.http.get("/v1/models/ü")
    assert "ü".encode() in answer.content
    assert answer.headers["content-type"] == "application/json"


async def _origin(gateway: Gateway) -> None:
    answer = await gateway.http.get("/v1/models", headers={"Origin": "https://elsewhere.example"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")


async def _roots(gateway: Gateway) -> None:
    gateway.core.models[:] = [ModelEntry("hermes-trio", "openai/gpt-x"), ModelEntry("fast", "openai/gpt-y")]
    found = (await gateway.http.get("/v1/models")).json()["data"]
    assert [(model["id"], model["root"]) for model in found] == [
        ("hermes-trio", "openai/gpt-x"),
        ("fast", "openai/gpt-y"),
    ]


def _absent(path: str, method: str = "GET") -> Check:
    async def check(gateway: Gateway) -> None:
        answer = await gateway.http.request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_path")

    return check


CLAIMS: dict[str, Check] = {
    'One `mcp_call` item with `server_label: "hermes"`': _mcp_calls,
    "parameters are [honoured, hints, or refused](parameters.md) with a 400": _parameters,
    "With `WWW-Authenticate: Bearer`.": _challenge,
    "One envelope of four keys everywhere": _envelope,
    "400 with the path of the mistake in `param`.": _shape,
    "413, announced or not.": _too_large,
    "It works where `GET` does.": _head,
    "UTF-8 as it is; the type is `application/json`.": _utf8,
    "403 `origin_not_allowed`": _origin,
    "`root` is the real model": _roots,
    "`GET /v1/skills`, `GET /v1/toolsets` (API-40)": _absent("/v1/skills"),
    "`/p/{profile}/…` (API-6)": _absent("/p/other/v1/models"),
    "`POST /api/cron/fire` (API-121)": _absent("/api/cron/fire", "POST"),
    "`POST /api/platforms/{platform}/events` (API-122)": _absent("/api/platforms/slack/events", "POST"),
}


@pytest.mark.parametrize("claim", CLAIMS)
async def test_a_claim_of_the_page(claim: str) -> None:
    """What the page says is what the server does."""
    assert claim in PAGE
    async with open_gateway(with_tools, limits=Limits(body_bytes=4000)) as gateway:
        await CLAIMS[claim](gateway)
