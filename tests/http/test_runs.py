"""Runs: started durably, read, listed, waited for, and stopped with a receipt."""

from __future__ import annotations

import pytest
import trio

from hermes_trio.runtime.errors import AgentFailed
from hermes_trio.runtime.outcome import Usage
from hermes_trio.runtime.ports import Message, Reply
from hermes_trio.runtime.supervisor import Job, JobSpec
from hermes_trio.runtime.tree import waiting, working
from hermes_trio.runtime.turn import StatelessTurn, Turn

from .gateway import eventually, open_gateway


async def test_a_run_from_start_to_end(fast_path: bool) -> None:
    """A start is 202 with an id; the run ends completed, with output and usage."""

    async def agent(turn: Turn) -> Reply:
        return Reply(text="the answer", usage=Usage(input_tokens=2, output_tokens=3))

    async with open_gateway(agent, fast_path=fast_path) as gateway:
        answer = await gateway.http.post("/v1/runs", json={"input": "question", "model": "m"})
        assert answer.status_code == 202
        body = answer.json()
        assert set(body) == {"run_id", "status"}
        assert body["status"] == "started"
        assert body["run_id"].startswith("run_")
        assert len(body["run_id"]) == len("run_") + 32
        assert answer.headers["location"] == f"/v1/runs/{body['run_id']}"
        run = await gateway.ended(body["run_id"])
        assert run["object"] == "hermes.run"
        assert run["status"] == "completed"
        assert run["output"] == "the answer"
        assert run["usage"] == {"input_tokens": 2, "output_tokens": 3, "total_tokens": 5}
        assert run["session_id"] == body["run_id"]
        assert run["last_event"] in ("run.completed", "run.settled")
        assert run["settled"] is True
        assert "error" not in run


@pytest.mark.parametrize(("asked", "shown"), [({"model": "asked"}, "asked"), ({}, "hermes-trio")])
async def test_a_live_run_names_its_model(asked: dict[str, str], shown: str) -> None:
    """A run names a model from its first moment on: the one asked for or the default, and the one that answers once it is chosen."""
    choose, chosen, finish = trio.Event(), trio.Event(), trio.Event()

    async def agent(turn: Turn) -> Reply:
        await choose.wait()
        turn.progress = Reply(model="chosen", partial=True)
        chosen.set()
        await finish.wait()
        return Reply(text="x", model="chosen")

    async with open_gateway(agent) as gateway:
        run_id = await gateway.start(**asked)
        path = f"/v1/runs/{run_id}"
        assert (await gateway.http.get(path)).json()["model"] == shown
        assert (await gateway.http.get("/v1/runs")).json()["data"][0]["model"] == shown
        choose.set()
        await chosen.wait()
        assert (await gateway.http.get(path)).json()["model"] == "chosen"
        finish.set()
        assert (await gateway.ended(run_id))["model"] == "chosen"


async def test_the_start_is_durable_before_the_answer() -> None:
    """When the id is known, the row is in the store, whatever the agent does."""
    never = trio.Event()

    async def agent(turn: Turn) -> str:
        await never.wait()
        return "x"

    async with open_gateway(agent) as gateway:
        run_id = await gateway.start()
        row = await gateway.core.store.get_run(run_id)
        assert row is not None
        assert row.input_preview == "hello"
        await gateway.http.post(f"/v1/runs/{run_id}/stop", params={"wait": "true"})


async def test_runs_bind_the_real_session() -> None:
    """A run is stateless and bound to its real session id and key, and its chat id is the session id."""
    seen: list[Turn] = []

    async def agent(turn: Turn) -> str:
        seen.append(turn)
        return "ok"

    async with open_gateway(agent) as gateway:
        first = await gateway.start()
        await gateway.ended(first)
        answer = await gateway.http.post(
            "/v1/runs", json={"input": "x", "session_id": "mine"}, headers={"X-Hermes-Session-Key": "key-1"}
        )
        assert answer.headers["x-hermes-session-key"] == "key-1"
        await gateway.ended(answer.json()["run_id"])
        assert all(isinstance(turn, StatelessTurn) and turn.context.platform == "api_server" for turn in seen)
        assert [(turn.context.session_id, turn.context.session_key, turn.context.chat_id) for turn in seen] == [
            (first, f"api::{first}", first),
            ("mine", "api::key-1", "mine"),
        ]


async def test_history_by_priority() -> None:
    """Explicit history beats a stored response, which beats earlier input items, which beat the session's transcript."""
    histories: list[list[str]] = []

    async def agent(turn: Turn) -> str:
        histories.append([message.text for message in await turn.history()])
        return "answer"

    async with open_gateway(agent) as gateway:
        response = (await gateway.http.post("/v1/responses", json={"input": "chained"})).json()["id"]
        items = [{"role": "user", "content": "earlier"}, {"role": "user", "content": "now"}]
        explicit = [{"role": "user", "content": "explicit"}]
        for body in (
            {"input": items, "conversation_history": explicit, "previous_response_id": response, "session_id": "s"},
            {"input": items, "previous_response_id": response},
            {"input": items, "session_id": "s2"},
            {"input": "again", "session_id": "s2"},
            {"input": "fresh"},
        ):
            await gateway.ended(await gateway.start(body.pop("input"), **body))
        assert histories[1:] == [
            ["explicit"],
            ["chained", "answer"],
            ["earlier"],
            ["now", "answer"],
            [],
        ]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": "   "}, "input"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": {}}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [5]}, "input"),
        ({"input": "x", "conversation_history": "no"}, "conversation_history"),
        ({"input": "x", "conversation_history": [{"role": "user"}]}, "conversation_history[0].content"),
        ({"input": "x", "conversation_history": [5]}, "conversation_history[0]"),
        ({"input": "x", "session_id": "../up"}, "session_id"),
        ({"input": "x", "session_id": "s" * 300}, "session_id"),
        ({"input": "x", "instructions": 5}, "instructions"),
    ],
)
async def test_mistakes_create_nothing(body: object, param: str) -> None:
    """A wrong body is a 400 that names the field, and nothing was created."""
    async with open_gateway() as gateway:
        answer = await gateway.http.post("/v1/runs", json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == param
        assert param in error["message"]
        assert (await gateway.http.get("/v1/runs")).json()["data"] == []
        assert (await gateway.http.get("/api/sessions")).json()["data"] == []


async def test_unknown_runs_are_404_everywhere() -> None:
    """Status, events, tree, stop and approval of an unknown run are 404 run_not_found; so is an unknown previous response."""
    async with open_gateway() as gateway:
        for method, path in (
            ("GET", ""),
            ("GET", "/events"),
            ("GET", "/tree"),
            ("POST", "/stop"),
            ("POST", "/approval"),
        ):
            answer = await gateway.http.request(method, f"/v1/runs/run_nope{path}", json={"choice": "once"})
            assert answer.status_code == 404, path
            assert answer.json()["error"]["code"] == "run_not_found"
        answer = await gateway.http.post("/v1/runs", json={"input": "x", "previous_response_id": "resp_nope"})
        assert answer.status_code == 404


async def test_finished_runs_cannot_be_stopped_or_approved() -> None:
    """A finished run: stop is 404, approval is 409 approval_not_active, a bad choice is 400 before that."""
    async with open_gateway() as gateway:
        run_id = await gateway.start()
        await gateway.ended(run_id)
        assert (await gateway.http.post(f"/v1/runs/{run_id}/stop")).json()["error"]["code"] == "run_not_found"
        answer = await gateway.http.post(f"/v1/runs/{run_id}/approval", json={"choice": "once"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "approval_not_active")
        answer = await gateway.http.post(f"/v1/runs/{run_id}/approval", json={"choice": "maybe"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_approval_choice")


async def test_nothing_pending_is_a_conflict() -> None:
    """An approval for a running run that waits for none is 409 approval_not_pending."""
    never = trio.Event()

    async def agent(turn: Turn) -> str:
        await never.wait()
        return ""

    async with open_gateway(agent) as gateway:
        run_id = await gateway.start()
        answer = await gateway.http.post(f"/v1/runs/{run_id}/approval", json={"choice": "Approve"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "approval_not_pending")
        await gateway.http.post(f"/v1/runs/{run_id}/stop", params={"wait": "true"})


async def test_failures_are_told() -> None:
    """A failed run says what and why, without secrets; a partial one is completed."""

    async def agent(turn: Turn) -> Reply:
        if turn.input.text == "partial":
            return Reply(text="half", error="cut", partial=True)
        raise AgentFailed("no model, key sk-abcdefghijklmnop", code="model_auth")

    async with open_gateway(agent) as gateway:
        failed = await gateway.ended(await gateway.start("fail"))
        assert failed["status"] == "failed"
        assert failed["error_code"] == "model_auth"
        assert "no model" in failed["error"]
        assert "sk-" not in failed["error"]
        assert (await gateway.ended(await gateway.start("partial")))["status"] == "completed"


async def test_stop_answers_at_once_or_with_a_receipt(fast_path: bool) -> None:
    """A stop answers `stopping` at once; with wait=true the answer is the receipt, ok only when nothing is left."""
    ended = trio.Event()

    async def agent(turn: Turn) -> str:
        with working("tool", "call_1", "terminal"), waiting("a process"):
            try:
                await trio.sleep_forever()
            finally:
                ended.set()
        raise AssertionError

    async with open_gateway(agent, fast_path=fast_path) as gateway:
        run_id = await gateway.start()

        async def works() -> object:
            return (await gateway.http.get(f"/v1/runs/{run_id}/tree")).json()["nodes"][0]["children"]

        await eventually(works)
        answer = await gateway.http.post(f"/v1/runs/{run_id}/stop", params={"wait": "true"})
        assert answer.status_code == 200
        assert ended.is_set()
        body = answer.json()
        assert (body["run_id"], body["status"]) == (run_id, "cancelled")
        receipt = body["receipt"]
        assert receipt["ok"] is True
        assert receipt["remaining"] == []
        assert receipt["cause"] == "stop"
        assert {line["kind"] for line in receipt["lines"]} == {"turn", "tool"}
        tool = next(line for line in receipt["lines"] if line["kind"] == "tool")
        assert (tool["how"], tool["waited_on"]) == ("cancelled", "a process")
        assert (await gateway.ended(run_id))["status"] == "cancelled"

        second = await gateway.start()
        answer = await gateway.http.post(f"/v1/runs/{second}/stop")
        assert answer.json() == {"run_id": second, "status": "stopping"}
        assert (await gateway.ended(second))["status"] == "cancelled"


async def test_an_agent_that_raises_while_being_stopped_is_cancelled() -> None:
    """The cause was recorded before the scope was cancelled, so the run is cancelled, and its stream says so."""

    async def agent(turn: Turn) -> str:
        turn.emit("message.delta", delta="x")
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("while stopping")

    async with open_gateway(agent) as gateway:
        run_id = await gateway.start()
        async with gateway.events(f"/v1/runs/{run_id}/events") as events:
            assert (await events.next()).data["event"] == "message.delta"
            await gateway.http.post(f"/v1/runs/{run_id}/stop")
            rest = await events.all()
        assert rest[-2].data["event"] == "run.cancelled"
        assert rest[-2].data["cause"] == "stop"
        assert rest[-1].comment == "stream closed"
        assert (await gateway.ended(run_id))["status"] == "cancelled"


async def test_a_run_settles_when_its_jobs_have_ended() -> None:
    """wait=ended returns with the turn, wait=settled with everything that it started; a stop ends both."""
    release = trio.Event()

    async def work(job: Job) -> None:
        job.started()
        await release.wait()

    async def agent(turn: Turn) -> str:
        await turn.core.supervisor.start(JobSpec(run=work, kind="process", title="job"), turn.owner)
        return "started a job"

    async with open_gateway(agent) as gateway:
        run_id = await gateway.start()
        run = await gateway.ended(run_id, "ended")
        assert (run["status"], run["settled"]) == ("completed", False)
        tree = (await gateway.http.get(f"/v1/runs/{run_id}/tree")).json()
        assert tree["live"] is True
        assert [node["kind"] for node in tree["nodes"]] == ["process"]
        answer = await gateway.http.get(f"/v1/runs/{run_id}", params={"wait": "settled", "timeout": "0"})
        assert answer.json()["settled"] is False
        release.set()
        assert (await gateway.ended(run_id))["settled"] is True
        assert (await gateway.http.get(f"/v1/runs/{run_id}/tree")).json()["nodes"] == []

        release = trio.Event()
        second = await gateway.start()
        await gateway.ended(second, "ended")
        receipt = (await gateway.http.post(f"/v1/runs/{second}/stop", params={"wait": "1"})).json()["receipt"]
        assert receipt["ok"] is True
        assert (await gateway.ended(second))["settled"] is True


@pytest.mark.parametrize("query", [{"wait": "forever"}, {"timeout": "-1"}, {"timeout": "x"}, {"timeout": "1e9"}])
async def test_wrong_waits(query: dict[str, str]) -> None:
    """A wait or timeout that cannot be understood is 400."""
    async with open_gateway() as gateway:
        run_id = await gateway.start()
        answer = await gateway.http.get(f"/v1/runs/{run_id}", params=query)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] in query
        await gateway.ended(run_id)


async def test_lists_are_filtered_and_paged() -> None:
    """The newest run is first; status, session and paging work, for live and for ended runs."""
    hold = trio.Event()

    async def agent(turn: Turn) -> str:
        if turn.input.text == "hold":
            await hold.wait()
        if turn.input.text == "fail":
            raise AgentFailed("x")
        return "ok"

    async with open_gateway(agent) as gateway:
        done = [await gateway.start("ok", session_id="s") for _ in range(2)]
        failed = await gateway.start("fail")
        for run_id in (*done, failed):
            await gateway.ended(run_id)
        held = await gateway.start("hold")

        async def ids(**query: str) -> list[str]:
            answer = await gateway.http.get("/v1/runs", params=query)
            assert answer.status_code == 200
            return [run["run_id"] for run in answer.json()["data"]]

        assert await ids() == [held, failed, *reversed(done)]
        assert await ids(status="failed") == [failed]
        assert await ids(status="running") == [held]
        assert await ids(session_id="s") == [*reversed(done)]
        assert await ids(limit="1", offset="1") == [failed]
        page = (await gateway.http.get("/v1/runs", params={"limit": "2"})).json()
        assert (page["object"], page["limit"], page["offset"], page["has_more"]) == ("list", 2, 0, True)
        assert (await gateway.http.get("/v1/runs", params={"status": "odd"})).status_code == 400
        hold.set()
        await gateway.ended(held)


async def test_an_idempotency_key_starts_one_run() -> None:
    """The same key and body lead to the same run, also after it ended; another body is 409 and starts nothing."""
    starts = 0

    async def agent(turn: Turn) -> str:
        nonlocal starts
        starts += 1
        return "ok"

    async with open_gateway(agent) as gateway:
        headers = {"Idempotency-Key": "once"}
        bodies: list[bytes] = []

        async def start() -> None:
            answer = await gateway.http.post("/v1/runs", json={"input": "x"}, headers=headers)
            assert answer.status_code == 202
            bodies.append(answer.content)

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(start)
        await start()
        assert len(set(bodies)) == 1
        answer = await gateway.http.post("/v1/runs", json={"input": "y"}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "idempotency_conflict")
        [run] = (await gateway.http.get("/v1/runs")).json()["data"]
        await gateway.ended(run["run_id"])
        assert starts == 1


async def test_two_turns_on_one_session_are_serialised() -> None:
    """Runs and chats on one session wait for each other, and never share a transcript."""
    inside = 0
    most = 0
    seen: list[list[Message]] = []

    async def agent(turn: Turn) -> str:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        seen.append(await turn.history())
        await trio.sleep(0.001)
        inside -= 1
        return "ok"

    async with open_gateway(agent) as gateway:
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(lambda: gateway.chat("c", headers={"X-Hermes-Session-Id": "one"}))
                nursery.start_soon(lambda number=number: gateway.start(f"r{number}", session_id="one"))
        await gateway.idle()
        assert most == 1
        assert sorted(len(history) for history in seen) == [2 * number for number in range(8)]
