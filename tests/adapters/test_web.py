"""The chat in the browser: its addresses, its delivering turns, its tenants, and what a page that comes back finds."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
import trio

from hermes_trio.adapters.web.feeds import FEED_LENGTH, OwnerFeed
from hermes_trio.config import load_config
from hermes_trio.gateway.serving import Serving, open_server
from hermes_trio.http.auth import AdminKey
from hermes_trio.net.sse import EventReader
from hermes_trio.runtime.ports import Message
from hermes_trio.store import open_store
from tests import node_mode
from tests.http.gateway import RotatingClient

KEY = "web-admin-key-0123456789"
BASE = "/v1/web/conversations"


@asynccontextmanager
async def open_chat(home: Path) -> AsyncIterator[tuple[Serving, httpx2.AsyncClient]]:
    """The whole gateway behind its server, with a client that has the admin key.

    While `node_mode.NODES` is more than one it is so many gateways on one store, and each request goes to another one.
    """
    with trio.fail_after(60):
        async with AsyncExitStack() as stack:
            stores = await stack.enter_async_context(node_mode.open_stores(open_store(home / "state.db")))
            homes = [home / f"node-{number}" for number in range(len(stores))]
            if len(stores) == 1:
                homes, stores = [home], [None]
            servings = [
                await stack.enter_async_context(
                    open_server(load_config({}, home=one, server={"port": 0}), AdminKey(KEY), store=store)
                )
                for one, store in zip(homes, stores, strict=True)
            ]
            urls = [serving.addresses[0] for serving in servings]
            headers = {"Authorization": f"Bearer {KEY}"}
            async with RotatingClient(urls, headers=headers, trust_env=False, timeout=30) as http:
                yield servings[0], http


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


def lanes_in(tree: dict[str, Any]) -> list[dict[str, Any]]:
    """The lanes in a tree."""
    return [
        *([tree] if tree["kind"] == "lane" else []),
        *(one for child in tree["children"] for one in lanes_in(child)),
    ]


async def events_of(http: httpx2.AsyncClient, opened: trio.Event, enough: Any) -> list[dict[str, Any]]:
    """What a page that is open hears until it is enough."""
    events: list[dict[str, Any]] = []
    reader = EventReader()
    async with http.stream("GET", "/v1/web/events", timeout=30) as answer, aclosing(answer.aiter_bytes()) as pieces:
        async for piece in pieces:
            opened.set()
            events += [msgspec.json.decode(event.data) for event in reader.feed(piece)]
            if enough(events):
                return events
    raise AssertionError(events)


async def test_every_page_hears_a_conversation_whichever_node_it_is_connected_to(tmp_path: Path) -> None:
    """Text, tools and ends, each once and in order, on pages of all nodes; what runs on one node is in the history of all."""
    async with open_chat(tmp_path) as (_, http):
        path, heard = f"{BASE}/a/messages", list[list[dict[str, Any]]]()

        def ended(events: list[dict[str, Any]]) -> bool:
            return sum(event["event"] == "turn.ended" for event in events) == 2

        async def page(opened: trio.Event) -> None:
            heard.append(await events_of(http, opened, ended))

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                opened = trio.Event()
                nursery.start_soon(page, opened)
                await opened.wait()
            await http.post(path, json={"text": "!run echo hello; sleep 0.6", "id": "1"})
            for _ in range(3):
                live = (await until(http, path, lambda found: "turn.started" in str(found["live"])))["live"]
                assert [one["said"]["id"] for one in live if one["event"] == "turn.started"] == ["1"]
            await until(http, path, lambda found: not found["live"] and texts(found, "assistant"))
            await http.post(path, json={"text": "again", "id": "2"})
        assert len(heard) == 3
        for events in heard:
            assert {event["conversation"] for event in events} == {"a"}
            names = [event["event"] for event in events]
            assert [names.count(name) for name in ("turn.started", "turn.ended", "tool.started", "tool.completed")] == [
                2,
                2,
                1,
                1,
            ]
            assert "hello" in next(event["result"] for event in events if event["event"] == "tool.completed")
            written = "".join(event["delta"] for event in events if event["event"] == "message.delta")
            assert written.count("again") == 1
        for _ in range(3):
            found = (await http.get(path)).json()
            assert (len(texts(found, "user")), found["live"]) == (2, [])


@pytest.mark.one_node  # a page that reconnects to another node is told to read again
async def test_events_are_streamed_and_resume_without_loss(tmp_path: Path) -> None:
    """Text as it is written, tools, the end; a page that comes back with the last id goes on behind it, an unknown id is told to read again."""

    async def read(http: httpx2.AsyncClient, last: str, enough: Any) -> tuple[list[dict[str, Any]], str]:
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
        whole = (await http.get("/v1/tree")).json()
        trees = [whole["tree"], *(other["tree"] for other in whole.get("others", ()))]
        assert "acme" in {lane["tenant"] for tree in trees for lane in lanes_in(tree)}
        await until(http, path, lambda found: texts(found, "assistant"), headers=keys["other"])
        assert (await http.get(BASE)).json()["data"] == []
        (mine,) = (await http.get(BASE, headers=keys["acme"])).json()["data"] or [None]
        assert mine is None or mine["id"] == "plan"
        assert (await http.get(BASE, headers=keys["none"])).status_code == 403
        stopped = await http.post(path, json={"text": "/stop"}, headers=keys["acme"])
        assert stopped.json()["receipt"] == "command"
        await until(
            http, path, lambda found: "nothing of it runs any more" in str(found["asides"]), headers=keys["acme"]
        )
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


async def test_what_is_in_no_transcript_comes_from_rows_also_after_a_restart(tmp_path: Path) -> None:
    """Answers to commands and how a turn failed: each once, in order; a conversation that is started anew begins empty."""
    path = f"{BASE}/a/messages"
    async with open_chat(tmp_path) as (_, http):
        await http.post(path, json={"text": "hello"})
        await until(http, path, lambda found: texts(found, "assistant"))
        await http.post(path, json={"text": "/status"})
        await http.post(path, json={"text": "!fail because it must"})
        before = await until(http, path, lambda found: len(found["asides"]) == 2)
    async with open_chat(tmp_path) as (_, http):
        after = (await http.get(path)).json()
        assert after["asides"] == before["asides"]
        assert "hello" not in str(after["asides"][0])
        assert "This failed" in after["asides"][1]["text"]
        assert texts(after, "assistant") == texts(before, "assistant")
        await http.post(path, json={"text": "/new"})
        anew = await until(http, path, lambda found: found["session_id"] != after["session_id"])
        anew = await until(http, path, lambda found: found["asides"])
        assert len(anew["asides"]) == 1


async def test_a_message_that_waits_is_shown_until_its_own_turn_has_ended(tmp_path: Path) -> None:
    """The end of the turn before it does not take it off a page, and it is not shown twice."""

    def said(found: dict[str, Any]) -> list[str]:
        live = [one["said"] if one["event"] == "turn.started" else one for one in found["live"]]
        return [*texts(found, "user"), *{one["id"]: one["text"] for one in live if one.get("text")}.values()]

    async with open_chat(tmp_path) as (_, http):
        path = f"{BASE}/a/messages"
        await http.post(path, json={"text": "!sleep 0.3", "id": "1"})
        await http.post(path, json={"text": "!sleep 0.4"})
        shown = 0
        while True:
            found = (await http.get(path)).json()
            both = sorted(said(found)) == ["!sleep 0.3", "!sleep 0.4"]
            # Each request goes to another node, and the event of a message reaches the others a moment after it was accepted.
            assert both or (node_mode.NODES > 1 and shown < node_mode.NODES), found
            shown = shown + 1 if both else 0
            if len(texts(found, "user")) == 2:
                break
            await trio.sleep(0.02)
        assert shown >= node_mode.NODES
        assert found["live"] == []


async def test_unread_counts_are_kept_for_each_key_and_conversation(tmp_path: Path) -> None:
    """What came while nobody looked is unread, after a restart as well, until that key has read it; another key of the tenant has its own count."""

    async def unread(http: httpx2.AsyncClient, **more: Any) -> list[int]:
        return [one["unread"] for one in (await http.get(BASE, **more)).json()["data"]]

    path = f"{BASE}/a/messages"
    async with open_chat(tmp_path) as (serving, http):
        keys: list[dict[str, str]] = []
        for name in ("one", "two"):
            _, secret = await serving.gateway.gateway.store.create_api_key(name, scopes=("chat",), tenant="acme")
            keys.append({"Authorization": f"Bearer {secret}"})
        one, two = keys
        await http.post(path, json={"text": "!bg sleep 0.1; echo done"}, headers=one)
        await until(http, path, lambda found: len(texts(found, "user")) == 2, headers=one)
        assert await unread(http, headers=one) == [2]
        assert await unread(http, headers=two) == [0]
    async with open_chat(tmp_path) as (_, http):
        assert await unread(http, headers=one) == [2]
        older = (await http.get(path, headers=one)).json()["mark"]
        await http.post(path, json={"text": "/status"}, headers=two)
        found = await until(http, path, lambda found: found["asides"], headers=one)
        assert await unread(http, headers=one) == [3]
        await http.post(f"{BASE}/a/seen", json={"mark": found["mark"]}, headers=one)
        assert await unread(http, headers=one) == [0]
        # A page that is behind takes nothing back.
        await http.post(f"{BASE}/a/seen", json={"mark": older}, headers=one)
        assert await unread(http, headers=one) == [0]
        assert await unread(http, headers=two) != [0]
        for mark in ("", "7", '["x", "y"]'):
            assert (await http.post(f"{BASE}/a/seen", json={"mark": mark}, headers=one)).status_code == 400


PIXEL = b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")


def attached(name: str, body: bytes, media: str = "") -> dict[str, str]:
    """A file as a page sends it."""
    return {"name": name, "media": media, "data": b64encode(body).decode()}


async def test_attachments_go_to_the_agent_and_come_back_with_the_transcript(tmp_path: Path) -> None:
    """Pictures and text files reach the model; a page finds their names and fetches them, a browser runs nothing in them, other tenants find nothing."""
    async with open_chat(tmp_path) as (serving, http):
        store = serving.gateway.gateway.store
        path, name = f"{BASE}/a/messages", "<img src=x onerror=alert(1)>.png"
        files = [attached(name, PIXEL, "text/html"), attached("notes.txt", b"first line\n<b>second</b>")]
        said = await http.post(path, json={"text": "look", "attachments": files})
        assert said.json()["receipt"] == "accepted"
        found = await until(http, path, lambda found: texts(found, "assistant"))
        assert "(with 1 image)" in texts(found, "assistant")[0]
        assert "first line" in texts(found, "assistant")[0]
        (mine,) = [one for one in found["data"] if one["role"] == "user"]
        assert mine["text"] == "look"
        assert [(one["name"], one["media"], one["bytes"]) for one in mine["attachments"]] == [
            (name, "image/png", len(PIXEL)),
            ("notes.txt", "text/plain", 24),
        ]
        picture, notes = (f"{path}/{mine['place']}/parts/{one['part']}" for one in mine["attachments"])
        answer = await http.get(picture)
        assert (answer.content, answer.headers["content-type"]) == (PIXEL, "image/png")
        assert answer.headers["content-disposition"].startswith("inline; filename*=UTF-8''%3Cimg")
        for fetched in (answer, await http.get(notes)):
            assert "sandbox" in fetched.headers["content-security-policy"]
            assert fetched.headers["x-content-type-options"] == "nosniff"
        assert (await http.get(notes)).headers["content-disposition"].startswith("attachment;")
        _, secret = await store.create_api_key("b", scopes=("chat",), tenant="b")
        foreign = {"Authorization": f"Bearer {secret}"}
        assert (await http.get(picture, headers=foreign)).status_code == 404
        for wrong in (f"{mine['place']}/parts/9", f"7.{mine['id']}/parts/1", "x/parts/1", f"{mine['place']}/parts/0"):
            assert (await http.get(f"{path}/{wrong}")).status_code == 404, wrong
        # What an agent puts into its answer is shown in the same way.
        url = "data:image/png;base64," + b64encode(PIXEL).decode()
        parts = [{"type": "text", "text": "a chart"}, {"type": "image_url", "image_url": {"url": url}}]
        await store.append_messages(found["session_id"], [Message(role="assistant", content=parts)])
        drawn = (await http.get(path)).json()["data"][-1]
        assert (drawn["text"], [one["name"] for one in drawn["attachments"]]) == ("a chart", ["picture"])
        assert (await http.get(f"{path}/{drawn['place']}/parts/1")).content == PIXEL


REFUSED = [
    ([attached("a.bin", b"\x00\x01\x02")], "unsupported_attachment"),
    ([{"name": "a.png", "data": "not base64!"}], "unsupported_attachment"),
    ([attached("a.webp", b"RIFF\x00\x00\x00\x00WAVE")], "unsupported_attachment"),
    ([attached("a.txt", b"x" * 300_000)], "unsupported_attachment"),
    ([attached("a.txt", b"x")] * 9, "too_many_attachments"),
    ([{"name": "a.txt", "data": "eA==", "path": "/etc/passwd"}], "invalid_body"),
]


async def test_a_file_that_no_agent_could_read_is_refused(tmp_path: Path) -> None:
    """400, with what would be right; nothing of the message is taken. A command takes no file."""
    async with open_chat(tmp_path) as (_, http):
        for files, code in REFUSED:
            answer = await http.post(f"{BASE}/a/messages", json={"text": "x", "attachments": files})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
        command = await http.post(f"{BASE}/a/messages", json={"text": "/stop", "attachments": [attached("a", b"x")]})
        assert command.status_code == 400
        assert (await http.get(BASE)).json()["data"] == []


@pytest.mark.parametrize("name", ["a.b", "a:b", "%2e%2e", "x" * 65, "ä"])
async def test_a_conversation_cannot_be_called_like_somebody_elses(tmp_path: Path, name: str) -> None:
    """Names have no character that a key or an owner is separated by."""
    async with open_chat(tmp_path) as (_, http):
        answer = await http.post(f"{BASE}/{name}/messages", json={"text": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_conversation")
        assert (await http.post(f"{BASE}/a/messages", json={"text": " "})).status_code == 400
        assert (await http.post(f"{BASE}/a/messages", json={"words": "x"})).status_code == 400


@pytest.mark.one_node
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
