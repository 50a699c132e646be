"""Sessions over HTTP: made, listed, changed, branched, deleted, and talked to."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import trio

from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.errors import AgentFailed
from hermes_trio.runtime.outcome import TurnState
from hermes_trio.runtime.ports import Message, Reply, TurnFinish, TurnStart
from hermes_trio.runtime.supervisor import Job, JobSpec
from hermes_trio.runtime.turn import Turn

from .gateway import Gateway, eventually, open_gateway


async def test_a_session_from_birth_to_death(fast_path: bool) -> None:
    """Create, read, rename, end, delete; prompts are never shown."""
    async with open_gateway(fast_path=fast_path) as gateway:
        body = {"id": "s1", "title": "First", "system_prompt": "be kind", "model": "m"}
        made = await gateway.http.post("/api/sessions", json=body)
        assert made.status_code == 201
        session = made.json()["session"]
        assert made.json()["object"] == "hermes.session"
        assert (session["id"], session["title"], session["source"], session["model"]) == (
            "s1",
            "First",
            "api_server",
            "m",
        )
        assert session["has_system_prompt"] is True
        assert "be kind" not in made.text
        assert (await gateway.http.get("/api/sessions/s1")).json()["session"] == session
        renamed = await gateway.http.patch("/api/sessions/s1", json={"title": "Second"})
        assert renamed.json()["session"]["title"] == "Second"
        assert (await gateway.http.patch("/api/sessions/s1", json={"title": ""})).json()["session"]["title"] is None
        ended = await gateway.http.patch("/api/sessions/s1", json={"end_reason": "done"})
        assert ended.json()["session"]["end_reason"] == "done"
        again = await gateway.http.patch("/api/sessions/s1", json={"end_reason": "other"})
        assert again.json()["session"]["end_reason"] == "done"
        gone = await gateway.http.delete("/api/sessions/s1")
        assert gone.json() == {"object": "hermes.session.deleted", "id": "s1", "deleted": True}
        for path in ("", "/messages"):
            assert (await gateway.http.get(f"/api/sessions/s1{path}")).status_code == 404


async def test_a_session_without_a_body_gets_an_id() -> None:
    """A POST without a body makes a session with an id of ours."""
    async with open_gateway() as gateway:
        made = await gateway.http.post("/api/sessions")
        assert made.status_code == 201
        assert made.json()["session"]["id"].startswith("api_")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"id": "../x"}, "invalid_session_id"),
        ({"id": " "}, "invalid_session_id"),
        ({"title": "t" * 101}, "invalid_title"),
        ({"title": 5}, "invalid_title"),
        ({"title": "taken"}, "invalid_title"),
        ({"system_prompt": 5}, "invalid_system_prompt"),
    ],
)
async def test_what_cannot_be_made(body: object, code: str) -> None:
    """Wrong ids, titles and prompts are 400 and make nothing; an id that exists is 409."""
    async with open_gateway() as gateway:
        await gateway.http.post("/api/sessions", json={"id": "known", "title": "taken"})
        answer = await gateway.http.post("/api/sessions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
        exists = await gateway.http.post("/api/sessions", json={"id": "known"})
        assert (exists.status_code, exists.json()["error"]["code"]) == (409, "session_exists")
        assert len((await gateway.http.get("/api/sessions")).json()["data"]) == 1


async def test_patches_that_cannot_be_made() -> None:
    """Other fields are 400 unsupported_session_field; a long title is 400 invalid_title; an unknown session is 404."""
    async with open_gateway() as gateway:
        await gateway.http.post("/api/sessions", json={"id": "s"})
        for body, code in (({"model": "x"}, "unsupported_session_field"), ({"title": "t" * 101}, "invalid_title")):
            answer = await gateway.http.patch("/api/sessions/s", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
        assert (await gateway.http.patch("/api/sessions/nope", json={"title": "x"})).status_code == 404
        assert (await gateway.http.patch("/api/sessions/s", json=[])).status_code == 400


async def test_lists_are_paged() -> None:
    """The newest activity is first; wrong limits and offsets are the defaults; has_more is exact."""
    async with open_gateway() as gateway:
        for number in range(3):
            await gateway.http.post("/api/sessions", json={"id": f"s{number}"})
        page = (await gateway.http.get("/api/sessions", params={"limit": "2"})).json()
        assert [session["id"] for session in page["data"]] == ["s2", "s1"]
        assert (page["limit"], page["offset"], page["has_more"]) == (2, 0, True)
        rest = (await gateway.http.get("/api/sessions", params={"limit": "2", "offset": "2"})).json()
        assert ([session["id"] for session in rest["data"]], rest["has_more"]) == (["s0"], False)
        odd = (await gateway.http.get("/api/sessions", params={"limit": "-1", "offset": "x"})).json()
        assert (odd["limit"], odd["offset"]) == (50, 0)
        assert (await gateway.http.get("/api/sessions", params={"limit": "9999"})).json()["limit"] == 200
        assert (await gateway.http.get("/api/sessions", params={"source": "telegram"})).json()["data"] == []


async def test_talking_to_a_session(fast_path: bool) -> None:
    """A chat adds to the transcript, uses the session's prompt and history, and answers with usage."""
    seen: list[tuple[str, list[str]]] = []

    async def agent(turn: Turn) -> str:
        seen.append((turn.input.instructions, [message.text for message in await turn.history()]))
        return f"answer to {turn.input.text}"

    async with open_gateway(agent, fast_path=fast_path) as gateway:
        await gateway.http.post("/api/sessions", json={"id": "s", "system_prompt": "be kind"})
        answer = await gateway.http.post("/api/sessions/s/chat", json={"message": "one"})
        assert answer.json() == {
            "object": "hermes.session.chat.completion",
            "session_id": "s",
            "message": {"role": "assistant", "content": "answer to one"},
            "usage": {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0},
        }
        assert answer.headers["x-hermes-session-id"] == "s"
        await gateway.http.post("/api/sessions/s/chat", json={"input": "two", "system_message": "be brief"})
        assert seen == [("be kind", []), ("be kind\nbe brief", ["one", "answer to one"])]
        messages = (await gateway.http.get("/api/sessions/s/messages")).json()
        assert [message["content"] for message in messages["data"]] == ["one", "answer to one", "two", "answer to two"]
        for body, code in (({}, "missing_message"), ({"message": "x", "instructions": 5}, "invalid_system_message")):
            wrong = await gateway.http.post("/api/sessions/s/chat", json=body)
            assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, code)
        assert (await gateway.http.post("/api/sessions/nope/chat", json={"message": "x"})).status_code == 404


async def test_the_events_of_a_session_stream(fast_path: bool) -> None:
    """Named events in order, each with session, run, number and time; always `done`."""

    async def agent(turn: Turn) -> Reply:
        turn.emit("message.delta", delta="hel")
        turn.emit("tool.started", tool="t", preview="p", tool_call_id="c", arguments="{}")
        turn.emit("tool.completed", tool="t", tool_call_id="c", error=True, result="x")
        turn.emit("message.delta", delta="lo")
        return Reply(text="hello", messages=(Message(role="assistant", content="hello"),))

    async with open_gateway(agent, fast_path=fast_path) as gateway:
        await gateway.http.post("/api/sessions", json={"id": "s"})
        async with gateway.events("/api/sessions/s/chat/stream", method="POST", json={"message": "x"}) as events:
            assert events.response.headers["x-hermes-session-id"] == "s"
            found = await events.all()
        assert [event.name for event in found] == [
            "run.started",
            "message.started",
            "assistant.delta",
            "tool.started",
            "tool.failed",
            "assistant.delta",
            "assistant.completed",
            "run.completed",
            "done",
        ]
        assert [event.data["seq"] for event in found] == list(range(1, 10))
        assert {event.data["session_id"] for event in found} == {"s"}
        assert found[6].data["content"] == "hello"
        assert found[7].data["messages"] == [{"role": "assistant", "content": "hello"}]


async def test_a_failing_session_stream_says_error() -> None:
    """A turn that fails is an `error` event, then `done`; plain it is 502."""

    async def agent(turn: Turn) -> str:
        raise AgentFailed("no model")

    async with open_gateway(agent) as gateway:
        await gateway.http.post("/api/sessions", json={"id": "s"})
        async with gateway.events("/api/sessions/s/chat/stream", method="POST", json={"message": "x"}) as events:
            found = await events.all()
        assert [event.name for event in found][-2:] == ["error", "done"]
        assert found[-2].data["message"] == "no model"
        assert (await gateway.http.post("/api/sessions/s/chat", json={"message": "x"})).status_code == 502


async def test_leaving_a_session_stream_cancels_the_turn() -> None:
    """The agent is not left working unseen (API-118)."""
    ended = trio.Event()

    async def agent(turn: Turn) -> str:
        turn.emit("message.delta", delta="x")
        try:
            await trio.sleep_forever()
        finally:
            ended.set()
        raise AssertionError

    async with open_gateway(agent) as gateway:
        await gateway.http.post("/api/sessions", json={"id": "s"})
        async with gateway.events("/api/sessions/s/chat/stream", method="POST", json={"message": "x"}) as events:
            await events.next()
        await ended.wait()
        await gateway.idle()


@pytest.mark.parametrize(
    ("method", "path", "body", "param", "code"),
    [
        ("POST", "", {"title": "t" * 101}, "title", "invalid_title"),
        ("POST", "", {"title": "t" * 10_001}, "title", "invalid_title"),
        ("POST", "", {"system_prompt": "p" * 65_537}, "system_prompt", "invalid_system_prompt"),
        ("PATCH", "/s", {"title": "t" * 101}, "title", "invalid_title"),
        ("PATCH", "/s", {"end_reason": "r" * 101}, "end_reason", "invalid_request"),
        ("PATCH", "/s", {"model": "m"}, "model", "unsupported_session_field"),
        ("POST", "/s/chat", {"message": " "}, "message", "missing_message"),
        (
            "POST",
            "/s/chat",
            {"message": "x", "system_message": "p" * 65_537},
            "system_message",
            "invalid_system_message",
        ),
    ],
)
async def test_what_a_session_does_not_take_is_named(
    method: str, path: str, body: dict[str, Any], param: str, code: str
) -> None:
    """Each refusal has a code and the field; nothing is made or changed."""
    async with open_gateway() as gateway:
        before = (await gateway.http.post("/api/sessions", json={"id": "s"})).json()["session"]
        answer = await gateway.http.request(method, f"/api/sessions{path}", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
        assert (await gateway.http.get("/api/sessions")).json()["data"] == [before]


async def test_messages_are_found_by_their_words_in_ones_own_sessions_alone() -> None:
    """Full-text search with its operators and pages; a tenant finds nothing of another one; what cannot be a query is named."""
    async with open_gateway() as gateway:
        acme, other = (
            await gateway.key("chat", "sessions", name="acme"),
            await gateway.key("chat", "sessions", name="b"),
        )
        for headers, text in ((acme, "the kernel build is green"), (other, "the kernel of truth")):
            await gateway.chat(text, headers={**headers, "X-Hermes-Session-Id": f"of-{text[-5:]}"})
        await gateway.core.store.index_messages()
        find = partial(gateway.http.get, "/api/search")
        found = (await find(params={"q": "kernel build"}, headers=acme)).json()
        assert {hit["session_id"] for hit in found["data"]} == {"of-green"}
        assert ">>>kernel<<<" in found["data"][0]["snippet"]
        assert (await find(params={"q": "truth"}, headers=acme)).json()["data"] == []
        assert len((await find(params={"q": "kern*", "limit": "1"})).json()["data"]) == 1
        assert (await find(params={"q": "kern*", "limit": "1"})).json()["has_more"] is True
        for wrong in ({}, {"q": " "}, {"q": "x" * 1001}, {"q": "x", "order": "best"}):
            assert (await find(params=wrong)).status_code == 400, wrong
        assert (await find(params={"q": "x"}, headers=await gateway.key("runs"))).status_code == 403


async def test_branches(fast_path: bool) -> None:
    """A branch has a copy of the messages, a parent and a numbered title; the old session ends as branched."""
    async with open_gateway(fast_path=fast_path) as gateway:
        await gateway.http.post("/api/sessions", json={"id": "s", "title": "Plan"})
        await gateway.http.post("/api/sessions/s/chat", json={"message": "one"})
        branch = await gateway.http.post("/api/sessions/s/fork", json={"id": "b"})
        assert branch.status_code == 201
        session = branch.json()["session"]
        assert (session["id"], session["parent_session_id"], session["title"]) == ("b", "s", "Plan #2")
        assert len((await gateway.http.get("/api/sessions/b/messages")).json()["data"]) == 2
        assert (await gateway.http.get("/api/sessions/s")).json()["session"]["end_reason"] == "branched"
        assert (await gateway.http.post("/api/sessions/s/fork", json={"id": "b"})).status_code == 409
        assert (await gateway.http.post("/api/sessions/s/fork", json={"id": "a/b"})).status_code == 400
        assert (await gateway.http.post("/api/sessions/s/fork")).status_code == 201


@pytest.mark.parametrize("how", ["done", "branched", "idle"])
async def test_a_turn_in_an_ended_session_opens_it_again(how: str, fast_path: bool) -> None:
    """However it ended, its next message takes the end back, and it can be ended anew; so does a run in it."""

    async def end(gateway: Gateway) -> None:
        match how:
            case "branched":
                await gateway.http.post("/api/sessions/s/fork")
            case _:
                await gateway.http.patch("/api/sessions/s", json={"end_reason": how})
        assert (await state(gateway))[1] == how

    async def state(gateway: Gateway) -> tuple[Any, Any]:
        session = (await gateway.http.get("/api/sessions/s")).json()["session"]
        return session["ended_at"], session["end_reason"]

    async with open_gateway(fast_path=fast_path) as gateway:
        await gateway.http.post("/api/sessions", json={"id": "s"})
        await end(gateway)
        await gateway.http.post("/api/sessions/s/chat", json={"message": "x"})
        assert await state(gateway) == (None, None)
        await end(gateway)
        await gateway.ended(await gateway.start(session_id="s"))
        assert await state(gateway) == (None, None)
        assert len((await gateway.http.get("/api/sessions/s/messages")).json()["data"]) == 4


async def test_a_session_that_ends_under_its_turn_stays_ended() -> None:
    """The turn began before the end, so it does not take it back."""
    begun, go_on = trio.Event(), trio.Event()

    async def agent(turn: Turn) -> str:
        begun.set()
        await go_on.wait()
        return "late"

    async with open_gateway(agent) as gateway:
        await gateway.http.post("/api/sessions", json={"id": "s"})
        run = await gateway.start(session_id="s")
        await begun.wait()
        await gateway.http.patch("/api/sessions/s", json={"end_reason": "done"})
        go_on.set()
        await gateway.ended(run)
        session = (await gateway.http.get("/api/sessions/s")).json()["session"]
        assert (session["end_reason"], session["message_count"]) == ("done", 2)


async def test_a_session_for_one_piece_of_work_is_opened_by_a_run_and_not_by_a_chat() -> None:
    """The session of a scheduled job or a webhook ended with its work: a chat adds to it, a run goes on with it."""
    context = SessionContext(session_id="s", session_key="agent:main:cron:dm:1", platform="cron")
    start = TurnStart(turn_id="turn_1", context=context, source="cron", one_shot=True)
    work = TurnFinish(start=start, state=TurnState.COMPLETED, end_session="cron_complete")
    async with open_gateway() as gateway:
        await gateway.core.store.finish_turn(work)
        await gateway.http.post("/api/sessions/s/chat", json={"message": "x"})
        session = (await gateway.http.get("/api/sessions/s")).json()["session"]
        assert (session["end_reason"], session["message_count"]) == ("cron_complete", 2)
        await gateway.ended(await gateway.start(session_id="s"))
        session = (await gateway.http.get("/api/sessions/s")).json()["session"]
        assert (session["end_reason"], session["message_count"]) == (None, 4)


@pytest.mark.parametrize("how", ["end", "delete", "fork"])
async def test_the_end_of_a_session_stops_its_jobs(how: str) -> None:
    """Ending, deleting or branching a session over HTTP leaves none of its jobs running."""

    async def work(job: Job) -> None:
        job.started()
        await trio.sleep_forever()

    async def agent(turn: Turn) -> str:
        await turn.core.supervisor.start(JobSpec(run=work, kind="process", title="job"), turn.owner)
        return "started"

    async with open_gateway(agent) as gateway:
        await gateway.http.post("/api/sessions", json={"id": "s"})
        await gateway.http.post("/api/sessions/s/chat", json={"message": "x"})
        assert gateway.jobs == 1
        match how:
            case "end":
                answer = await gateway.http.patch("/api/sessions/s", json={"end_reason": "done"})
            case "delete":
                answer = await gateway.http.delete("/api/sessions/s")
            case _:
                answer = await gateway.http.post("/api/sessions/s/fork")
        assert answer.status_code < 300
        assert gateway.jobs == 0


async def test_deleting_a_session_in_use_stops_its_turn_first() -> None:
    """A turn that runs in a deleted session is cancelled, and does not make the session again."""
    inside = trio.Event()

    async def agent(turn: Turn) -> str:
        inside.set()
        await trio.sleep_forever()
        raise AssertionError

    async with open_gateway(agent) as gateway:
        run_id = await gateway.start(session_id="s")
        await inside.wait()
        assert (await gateway.http.delete("/api/sessions/s")).status_code == 200
        assert (await gateway.http.get("/api/sessions/s")).status_code == 404
        run = await gateway.ended(run_id)
        assert (run["status"], run["error_code"]) == ("cancelled", "session_ended")


@pytest.mark.one_node
async def test_the_tree_shows_what_runs() -> None:
    """The tree, its parts and its differences: a turn is seen to open and to close."""
    go = trio.Event()

    async def agent(turn: Turn) -> str:
        await go.wait()
        return "ok"

    async with open_gateway(agent) as gateway:
        async with gateway.events("/v1/tree/events") as events:
            first = await events.next()
            assert first is not None
            assert first.name == "snapshot"
            run_id = await gateway.start()
            opened = await events.next()
            assert opened is not None
            assert opened.name == "difference"
            (turn,) = opened.data["nodes"]
            assert (turn["kind"], turn["name"], turn["stops"]) == ("turn", "hello", True)
            tree = (await gateway.http.get("/v1/tree")).json()
            assert tree["object"] == "hermes.tree"
            assert turn["id"] in _ids(tree["tree"])
            mine = (await gateway.http.get(f"/v1/runs/{run_id}/tree")).json()
            assert [node["id"] for node in mine["nodes"]] == [turn["id"]]
            go.set()
            while (event := await events.next()) is not None and not event.data["closed"]:
                pass
            assert event is not None
            assert event.data["closed"] == [[turn["key"], "completed"]]
        assert (await gateway.ended(run_id))["settled"] is True
        await _idle_tree(gateway)


def _ids(node: dict[str, object]) -> list[object]:
    return [node["id"], *(id for child in node["children"] for id in _ids(child))]  # type: ignore[attr-defined]


async def _idle_tree(gateway: Gateway) -> None:
    async def idle() -> bool:
        tree = (await gateway.http.get("/v1/tree")).json()["tree"]
        return not any(str(id).startswith("turn_") for id in _ids(tree))

    await eventually(idle)
