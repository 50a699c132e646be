"""Clients that may leave: requests whose turn a run does, and responses in the background."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import httpx2
import msgspec
import openai
import pytest
import trio

from hermes_trio.http.settings import ServerSettings
from hermes_trio.runtime.ports import Message, Reply, ToolCall, TurnStart
from hermes_trio.runtime.turn import Turn
from hermes_trio.store import CommitUncertain, StoreError, open_store
from hermes_trio.store.ports import Store

from .gateway import KEY, Gateway, eventually, open_gateway

DETACH = {"X-Hermes-On-Disconnect": "detach"}


class Slow:
    """An agent that says something, uses a tool, and waits to be let go on."""

    def __init__(self) -> None:
        self.go = trio.Event()
        self.begun = trio.Event()
        self.ended: list[str] = []

    async def __call__(self, turn: Turn) -> Reply:
        turn.emit("message.delta", delta="One ")
        turn.emit("tool.started", tool="t", preview="", tool_call_id="c1", arguments="{}")
        turn.emit("tool.completed", tool="t", tool_call_id="c1", duration=0.1, error=False, result="r")
        self.begun.set()
        try:
            await self.go.wait()
        except BaseException:
            self.ended.append("cancelled")
            raise
        turn.emit("message.delta", delta="two.")
        self.ended.append("done")
        return Reply(
            text="two.",
            messages=(
                Message(role="user", content=turn.input.prompt),
                Message(role="assistant", content="One ", tool_calls=(ToolCall(id="c1", name="t"),)),
                Message(role="tool", content="r", tool_call_id="c1", tool_name="t"),
                Message(role="assistant", content="two."),
            ),
        )


def client_of(gateway: Gateway) -> openai.AsyncOpenAI:
    """The official client."""
    http = openai.DefaultAsyncHttpxClient(event_hooks=gateway.rotate())
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0, http_client=http)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("by", ["header", "setting"])
async def test_the_run_goes_on_without_its_client(path: str, by: str) -> None:
    """The answer names the run; the client leaves in the middle, and the run ends by itself and can be read."""
    agent = Slow()
    messages = [{"role": "user", "content": "x"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": messages},
        "/v1/responses": {"input": "x"},
        "/v1/messages": {"messages": messages, "max_tokens": 10},
    }
    server = ServerSettings(on_disconnect="detach") if by == "setting" else None
    async with open_gateway(agent, server=server) as gateway:
        headers = {} if by == "setting" else DETACH
        body = {**bodies[path], "stream": True}
        async with gateway.events(path, method="POST", json=body, headers=headers) as events:
            run_id = events.response.headers["x-hermes-run-id"]
            await events.next()
            await agent.begun.wait()
        run = (await gateway.http.get(f"/v1/runs/{run_id}")).json()
        assert run["status"] == "running"
        agent.go.set()
        assert (await gateway.ended(run_id))["output"] == "two."
        assert agent.ended == ["done"]
        if path == "/v1/responses":
            response = (await gateway.http.get(f"/v1/responses/resp_{run_id.removeprefix('run_')}")).json()
            assert response["status"] == "completed"
            assert [item["type"] for item in response["output"]] == ["message", "mcp_call", "message"]


async def test_a_detached_request_is_answered_like_any_other() -> None:
    """A client that stays gets the same answer, plain and streamed; without the header a client that leaves cancels its turn."""
    agent = Slow()
    agent.go.set()
    async with open_gateway(agent) as gateway, client_of(gateway) as client:
        client = client.with_options(default_headers=DETACH)
        done = await client.chat.completions.with_raw_response.create(
            model="m", messages=[{"role": "user", "content": "x"}]
        )
        assert done.parse().choices[0].message.content == "two."
        assert done.headers["x-hermes-run-id"].startswith("run_")
        text = ""
        async for chunk in await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], stream=True
        ):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert text == "One two."
        response = await client.responses.create(model="m", input="x")
        assert [item.type for item in response.output] == ["message", "mcp_call", "message"]
        async with client.responses.stream(model="m", input="x") as stream:
            async for _ in stream:
                pass
            assert (await stream.get_final_response()).output_text == "One two."
        refused = await gateway.chat(headers={"X-Hermes-On-Disconnect": "perhaps"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-Hermes-On-Disconnect")


async def test_a_response_in_the_background() -> None:
    """It is there at once, can be read while it is made, streamed from any event on, and its events are the same each time."""
    agent = Slow()
    async with open_gateway(agent) as gateway, client_of(gateway) as client:
        queued = await client.responses.create(model="m", input="x", background=True)
        assert (queued.status, queued.background) == ("queued", True)
        await agent.begun.wait()
        now = await client.responses.retrieve(queued.id)
        assert now.status == "in_progress"
        assert [item.type for item in now.output] == ["message", "mcp_call"]
        agent.go.set()

        async def completed() -> bool:
            return (await client.responses.retrieve(queued.id)).status == "completed"

        await eventually(completed)
        final = await client.responses.retrieve(queued.id)
        assert final.output_text == "One two."
        events = [event async for event in await client.responses.retrieve(queued.id, stream=True)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].type == "response.completed"
        assert events[-1].response.output == final.output
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert done == final.output
        rest = [event async for event in await client.responses.retrieve(queued.id, stream=True, starting_after=5)]
        assert rest == events[6:]


async def test_a_background_response_is_made_once_for_each_idempotency_key() -> None:
    """Repetitions get the same response as it is now, also after its end; another body is a conflict. Runs and other sessions have keys of their own."""
    agent = Slow()
    async with open_gateway(agent) as gateway:
        ids: list[str] = []

        async def ask(key: str = "k", text: str = "x", **headers: str) -> httpx2.Response:
            body = {"input": text, "background": True}
            answer = await gateway.http.post("/v1/responses", json=body, headers={"Idempotency-Key": key, **headers})
            if answer.is_success:
                ids.append(answer.json()["id"])
            return answer

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(ask)
        await agent.begun.wait()
        again = await ask()
        assert (again.json()["status"], again.headers["idempotent-replayed"]) == ("in_progress", "true")
        agent.go.set()
        run_id = again.headers["x-hermes-run-id"]
        await gateway.ended(run_id)
        done = await ask()
        assert (done.json()["status"], len(set(ids))) == ("completed", 1)
        assert done.headers["x-hermes-session-id"] == (await gateway.ended(run_id))["session_id"]
        conflict = await ask(text="y")
        assert (conflict.status_code, conflict.json()["error"]["code"]) == (409, "idempotency_conflict")
        run = await gateway.http.post("/v1/runs", json={"input": "x"}, headers={"Idempotency-Key": "k"})
        assert (run.status_code, run.json()["run_id"] == run_id) == (202, False)
        await ask(**{"X-Hermes-Session-Key": "other"})
        assert len(set(ids)) == 2
        assert len((await gateway.http.get("/v1/runs")).json()["data"]) == 3
        await gateway.idle()


async def test_a_response_whose_beginning_has_a_lost_answer_is_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its run is only a row until the store has repeated its answer: a repetition finds it, does not say that it has failed, and can wait for it."""
    agent = Slow()
    lost, again = trio.Event(), trio.Event()

    def loses(begin: Callable[[TurnStart], Awaitable[None]]) -> Callable[[TurnStart], Awaitable[None]]:
        async def begin_turn(start: TurnStart) -> None:
            await begin(start)
            if not lost.is_set():
                lost.set()
                await again.wait()
                raise CommitUncertain("the answer was lost")

        return begin_turn

    async with open_gateway(agent) as gateway:
        for runtime in gateway.runtimes or [gateway.runtime]:
            monkeypatch.setattr(runtime.store, "begin_turn", loses(runtime.store.begin_turn))
            impatient = msgspec.structs.replace(runtime.core.settings, finish_seconds=0.3)
            monkeypatch.setattr(runtime.core, "settings", impatient)
        answers: list[httpx2.Response] = []

        async def ask() -> None:
            body = {"input": "x", "background": True}
            answers.append(await gateway.http.post("/v1/responses", json=body, headers={"Idempotency-Key": "k"}))

        statuses: list[str] = []

        async def wait_for(run_id: str) -> None:
            statuses.append((await gateway.ended(run_id, "ended"))["status"])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await lost.wait()
            await ask()
            [repeated] = [answer for answer in answers if answer.is_success]
            assert repeated.json()["status"] == "in_progress"
            nursery.start_soon(wait_for, repeated.headers["x-hermes-run-id"])
            await gateway.http.get(f"/v1/runs/{repeated.headers['x-hermes-run-id']}")
            again.set()
            agent.go.set()
        assert [answer.is_success for answer in answers].count(False) == 1
        assert agent.ended == ["done"]
        assert statuses == ["completed"]


async def test_a_response_that_did_not_begin_is_removed_though_that_fails_at_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client is told that nothing was started, and no queued response is left behind."""
    removed: list[str] = []

    async def refused(start: TurnStart) -> None:
        raise StoreError("no")

    async with open_gateway(Slow()) as gateway:
        for runtime in gateway.runtimes or [gateway.runtime]:
            delete = cast("Store", runtime.store).delete_response

            async def fails_once(
                tenant: str | None, id: str, delete: Callable[[str | None, str], Awaitable[bool]] = delete
            ) -> bool:
                removed.append(id)
                if len(removed) == 1:
                    raise StoreError("no")
                return await delete(tenant, id)

            monkeypatch.setattr(runtime.store, "begin_turn", refused)
            monkeypatch.setattr(runtime.store, "delete_response", fails_once)
        answer = await gateway.http.post("/v1/responses", json={"input": "x", "background": True})
        assert answer.status_code >= 500

        async def gone() -> bool:
            return len(removed) > 1 and await gateway.core.store.get_response(None, removed[0]) is None

        await eventually(gone)


async def test_a_background_response_is_streamed_while_it_is_made() -> None:
    """The first stream is cut off in the middle; the second goes on behind the last event, nothing twice and nothing left out."""
    agent = Slow()
    async with open_gateway(agent) as gateway, client_of(gateway) as client:
        first: list[Any] = []
        stream = await client.responses.create(model="m", input="x", background=True, stream=True)
        async with stream:
            async for event in stream:
                first.append(event)
                if event.type == "response.mcp_call.completed":
                    break
        agent.go.set()
        response_id = first[0].response.id
        last = first[-1].sequence_number
        rest = [e async for e in await client.responses.retrieve(response_id, stream=True, starting_after=last)]
        numbers = [event.sequence_number for event in [*first, *rest]]
        assert numbers == list(range(len(numbers)))
        assert rest[-1].type == "response.completed"
        assert rest[-1].response.output_text == "One two."


async def test_cancelling_a_response() -> None:
    """The run is stopped, the response reads `cancelled` from then on; one that no run makes cannot be cancelled."""
    agent = Slow()
    async with open_gateway(agent) as gateway, client_of(gateway) as client:
        queued = await client.responses.create(model="m", input="x", background=True)
        await agent.begun.wait()
        assert (await client.responses.cancel(queued.id)).status == "cancelled"
        assert agent.ended == ["cancelled"]
        assert (await client.responses.retrieve(queued.id)).status == "cancelled"
        assert (await client.responses.cancel(queued.id)).status == "cancelled"
        agent.go.set()
        plain = await client.responses.create(model="m", input="x")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.cancel(plain.id)
        assert refused.value.code == "not_in_background"
        with pytest.raises(openai.NotFoundError):
            await client.responses.cancel("resp_0")
        with pytest.raises(openai.BadRequestError, match="stored"):
            await client.responses.create(model="m", input="x", background=True, store=False)


async def test_a_response_that_a_crash_cut_off_reads_failed(tmp_path: Any) -> None:
    """The response was durable when it was promised; after a restart nothing makes it any more, and it says so."""
    path = str(tmp_path / "store.db")
    agent = Slow()
    async with open_gateway(agent, path=path) as gateway, client_of(gateway) as client:
        queued = await client.responses.create(model="m", input="x", background=True)
        await agent.begun.wait()
        snapshot = await gateway.core.store.get_response("", queued.id)
        assert snapshot is not None
    other = str(tmp_path / "after.db")
    async with open_store(other) as store:
        await store.put_response(snapshot)
    async with open_gateway(Slow(), path=other) as gateway, client_of(gateway) as client:
        failed = await client.responses.retrieve(queued.id)
        assert failed.status == "failed"
        assert failed.error is not None
        assert failed.error.code == "interrupted"


async def test_input_items() -> None:
    """What a response was made from: its own input and the history that it continued, the newest first, in pages."""
    agent = Slow()
    agent.go.set()
    async with open_gateway(agent) as gateway, client_of(gateway) as client:
        first = await client.responses.create(model="m", input="first")
        second = await client.responses.create(
            model="m", input=[{"role": "user", "content": "second"}], previous_response_id=first.id
        )
        page = await client.responses.input_items.list(second.id, order="asc", limit=2)
        found: list[Any] = [item async for item in page]
        assert [item.type for item in found] == ["message", "message", "mcp_call", "message", "message"]
        assert [item.content[0].text for item in found if item.type == "message"] == ["first", "One ", "two.", "second"]
        newest = await client.responses.input_items.list(second.id, limit=1)
        assert newest.data[0].id == found[-1].id
        assert newest.has_more
