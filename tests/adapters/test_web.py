"""The chat in the browser: its addresses, its delivering turns, its tenants, and what a page that comes back finds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio

from hermes_trio.adapters.web.adapter import FEED_LENGTH, OwnerFeed
from hermes_trio.config import load_config
from hermes_trio.gateway.serving import Serving, open_server
from hermes_trio.http.auth import AdminKey
from hermes_trio.net.sse import EventReader

KEY = "web-admin-key-0123456789"
BASE = "/v1/web/conversations"


@asynccontextmanager
async def open_chat(home: Path) -> AsyncIterator[tuple[Serving, httpx2.AsyncClient]]:
    """The whole gateway behind its server, with a client that has the admin key."""
    config = load_config({}, home=home, server={"port": 0})
    with trio.fail_after(60):
        async with open_server(config, AdminKey(KEY)) as serving:
            headers = {"Authorization": f"Bearer {KEY}"}
            async with httpx2.AsyncClient(
                base_url=serving.addresses[0], headers=headers, trust_env=False, timeout=30
            ) as http:
                yield serving, http


async def until(http: httpx2.AsyncClient, path: str, check: Any, **more: Any) -> Any:
    """What an address answers as soon as it satisfies `check`."""
    while True:
        found = (await http.get(path, **more)).json()
        if check(found):
            return found
        await trio.sleep(0.02)


def texts(found: dict[str, Any], role: str) -> list[str]:
    """What one side has said."""
    return [one["text"] for one in found["data"] if one["role"] == role and one["text"]]


async def test_background_work_comes_back_to_a_conversation_that_nobody_has_open(tmp_path: Path) -> None:
    """A delivering turn: the completion is a turn of its own, in the transcript, after a restart of the page or the server."""
    async with open_chat(tmp_path) as (_, http):
        path = f"{BASE}/kernel/messages"
        said = await http.post(path, json={"text": "!bg sleep 0.2; echo the-build-is-ready", "id": "1"})
        assert (said.status_code, said.json()["receipt"]) == (202, "accepted")
        again = await http.post(path, json={"text": "!bg sleep 0.2; echo the-build-is-ready", "id": "1"})
        assert again.json()["receipt"] == "duplicate"
        await until(http, path, lambda found: len(texts(found, "user")) == 2)
    async with open_chat(tmp_path) as (_, http):
        found = (await http.get(path)).json()
        assert texts(found, "user")[0].startswith("!bg")
        assert "the-build-is-ready" in texts(found, "user")[1]
        (one,) = (await http.get(BASE)).json()["data"]
        assert (one["id"], one["title"][:3]) == ("kernel", "!bg")


async def test_events_are_streamed_and_resume_without_loss(tmp_path: Path) -> None:
    """Text as it is written, tools, the end; a page that comes back with the last id goes on behind it, an unknown id is told to read again."""

    async def read(http: httpx2.AsyncClient, last: str, enough: Any) -> tuple[list[dict[str, Any]], str]:
        import msgspec

        events: list[dict[str, Any]] = []
        reader = EventReader()
        newest = last
        async with http.stream("GET", "/v1/web/events", headers={"Last-Event-ID": last}, timeout=30) as answer:
            assert answer.status_code == 200
            async for piece in answer.aiter_bytes():
                events += [msgspec.json.decode(event.data) for event in reader.feed(piece)]
                ids = [line[4:] for line in piece.decode().splitlines() if line.startswith("id: ")]
                newest = ids[-1] if ids else newest
                if enough(events):
                    break
        return events, newest

    async with open_chat(tmp_path) as (_, http):
        path = f"{BASE}/a/messages"
        start = (await http.get(path)).json()["event_id"]
        await http.post(path, json={"text": "!run echo hello"})
        first, last = await read(http, start, lambda events: any(event["event"] == "turn.ended" for event in events))
        names = [event["event"] for event in first]
        assert names[0] in ("said", "turn.started")
        assert {"tool.started", "tool.completed", "message.delta"} <= set(names)
        assert {event["conversation"] for event in first} == {"a"}
        await http.post(path, json={"text": "again"})
        second, _ = await read(http, last, lambda events: any(event["event"] == "turn.ended" for event in events))
        assert "!run echo hello" not in [event.get("text") for event in second]
        assert "again" in [event.get("text") for event in second]
        lost, _ = await read(http, "other-7", lambda events: bool(events))
        assert lost[0]["event"] == "resync"


async def test_a_tenant_has_its_own_conversations_and_its_work_is_filed_under_it(tmp_path: Path) -> None:
    """The same name in two tenants is two conversations; turns, sessions and nodes carry the tenant; without `chat` there is nothing."""
    async with open_chat(tmp_path) as (serving, http):
        store = serving.gateway.gateway.store
        keys: dict[str, dict[str, str]] = {}
        for name, scopes in (("acme", ("chat", "runs", "sessions")), ("other", ("chat",)), ("none", ("runs",))):
            _, secret = await store.create_api_key(name, scopes=scopes, tenant=name)
            keys[name] = {"Authorization": f"Bearer {secret}"}
        path = f"{BASE}/plan/messages"
        await http.post(path, json={"text": "!sleep 300"}, headers=keys["acme"])
        await http.post(path, json={"text": "hello from other"}, headers=keys["other"])
        tree = await until(http, "/v1/tree", lambda found: "!sleep 300" in str(found), headers=keys["acme"])
        assert "hello from other" not in str(tree)
        lanes = [node for node in serving.gateway.runtime.tree.root.walk() if node.kind == "lane"]
        assert "acme" in {lane.tenant for lane in lanes}
        await until(http, path, lambda found: texts(found, "assistant"), headers=keys["other"])
        assert (await http.get(BASE)).json()["data"] == []
        (mine,) = (await http.get(BASE, headers=keys["acme"])).json()["data"] or [None]
        assert mine is None or mine["id"] == "plan"
        assert (await http.get(BASE, headers=keys["none"])).status_code == 403
        stopped = await http.post(path, json={"text": "/stop"}, headers=keys["acme"])
        assert stopped.json()["receipt"] == "command"
        found = await until(http, path, lambda found: found["asides"], headers=keys["acme"])
        assert "nothing of it runs any more" in found["asides"][0]["text"]
        (session,) = (await http.get("/api/sessions", headers=keys["acme"])).json()["data"]
        assert session["source"] == "web"


async def test_an_approval_is_answered_in_place_and_only_by_its_owner(tmp_path: Path) -> None:
    """The question is there for a page that is opened later; another tenant cannot answer it."""
    async with open_chat(tmp_path) as (serving, http):
        _, secret = await serving.gateway.gateway.store.create_api_key("b", scopes=("chat",), tenant="b")
        path = f"{BASE}/x/messages"
        await http.post(path, json={"text": "!run rm -rf ./build"})
        found = await until(http, path, lambda found: found["approvals"])
        (asked,) = found["approvals"]
        assert asked["command"] == "rm -rf ./build"
        decide = f"{BASE}/x/approvals/{asked['approval_id']}"
        wrong = await http.post(decide, json={"choice": "once"}, headers={"Authorization": f"Bearer {secret}"})
        assert "Nothing waits" in wrong.json()["text"]
        assert (await http.post(decide, json={"choice": "perhaps"})).status_code == 400
        assert (await http.get(path)).json()["approvals"]
        await http.post(decide, json={"choice": "deny"})
        ended = await until(http, path, lambda found: texts(found, "assistant"))
        assert ended["approvals"] == []


@pytest.mark.parametrize("name", ["a.b", "a:b", "%2e%2e", "x" * 65, "ä"])
async def test_a_conversation_cannot_be_called_like_somebody_elses(tmp_path: Path, name: str) -> None:
    """Names have no character that a key or an owner is separated by."""
    async with open_chat(tmp_path) as (_, http):
        answer = await http.post(f"{BASE}/{name}/messages", json={"text": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_conversation")
        assert (await http.post(f"{BASE}/a/messages", json={"text": " "})).status_code == 400
        assert (await http.post(f"{BASE}/a/messages", json={"words": "x"})).status_code == 400


async def test_a_feed_forgets_what_is_too_old_and_says_so() -> None:
    """A reader that is too far behind reads the messages again; it is never given a part without saying so."""
    feed = OwnerFeed()
    assert feed.after(0) == []
    assert feed.after(3) is None
    for number in range(FEED_LENGTH + 5):
        feed.put({"event": "x", "n": number})
    assert feed.after(0) is None
    assert len(feed.after(feed.last - 2) or []) == 2
    assert feed.after(feed.last + 1) is None
