"""Responses: plain and streaming, stored, chained, named, deleted."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from hermes_trio.http.settings import ServerSettings
from hermes_trio.runtime.errors import AgentFailed
from hermes_trio.runtime.outcome import Usage
from hermes_trio.runtime.ports import Message, Reply, ToolCall
from hermes_trio.runtime.turn import StatelessTurn, Turn

from .gateway import Event, Gateway, eventually, open_gateway


async def with_tools(turn: Turn) -> Reply:
    """Says something, uses a tool, says something more."""
    turn.emit("message.delta", delta="Let me ")
    turn.emit("message.delta", delta="see.")
    turn.emit("tool.started", tool="terminal", preview="ls", tool_call_id="call_1", arguments='{"command":"ls"}')
    turn.emit("tool.completed", tool="terminal", tool_call_id="call_1", duration=0.1, error=False, result="file")
    turn.emit("message.delta", delta="One file.")
    return Reply(
        text="One file.",
        usage=Usage(input_tokens=5, output_tokens=4),
        messages=(
            Message(role="user", content=turn.input.prompt),
            Message(role="assistant", content="Let me see.", tool_calls=(ToolCall(id="call_1", name="terminal"),)),
            Message(role="tool", content="file", tool_call_id="call_1", tool_name="terminal"),
            Message(role="assistant", content="One file."),
        ),
    )


async def create(gateway: Gateway, **body: Any) -> dict[str, Any]:
    """A response that succeeded."""
    answer = await gateway.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def stream(gateway: Gateway, **body: Any) -> list[Event]:
    """All events of a streamed response."""
    async with gateway.events("/v1/responses", method="POST", json={**body, "stream": True}) as events:
        assert events.response.status_code == 200
        return await events.all()


async def test_a_plain_response(fast_path: bool) -> None:
    """A response has its items in order, usage, and can be read again byte for byte."""
    async with open_gateway(with_tools, fast_path=fast_path) as gateway:
        answer = await gateway.http.post("/v1/responses", json={"input": "what is there?", "model": "m"})
        body = answer.json()
        assert body["id"].startswith("resp_")
        assert len(body["id"]) == len("resp_") + 28
        assert (body["object"], body["status"], body["model"], body["error"]) == ("response", "completed", "m", None)
        assert [item["type"] for item in body["output"]] == ["message", "mcp_call", "message"]
        call = body["output"][1]
        assert (call["server_label"], call["name"], call["status"]) == ("hermes", "terminal", "completed")
        assert (call["arguments"], call["output"], call["error"]) == ('{"command":"ls"}', "file", None)
        assert body["output"][2]["content"][0]["text"] == "One file."
        assert body["usage"]["total_tokens"] == 9
        assert answer.headers["x-hermes-session-id"].startswith("api-")
        stored = await gateway.http.get(f"/v1/responses/{body['id']}")
        assert stored.content == answer.content


async def test_the_event_sequence(fast_path: bool) -> None:
    """A stream has the events that the official clients expect, numbered from 0, and the same output as a plain response."""
    async with open_gateway(with_tools, fast_path=fast_path) as gateway:
        found = await stream(gateway, input="what is there?")
        assert [event.name for event in found] == [event.data["type"] for event in found]
        assert [event.data["sequence_number"] for event in found] == list(range(len(found)))
        message = [
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
        ]
        assert [event.name for event in found] == [
            "response.created",
            "response.in_progress",
            *message,
            "response.output_item.added",
            "response.mcp_call.in_progress",
            "response.mcp_call_arguments.delta",
            "response.mcp_call_arguments.done",
            "response.mcp_call.completed",
            "response.output_item.done",
            *message,
            "response.completed",
        ]
        final = found[-1].data["response"]
        done = {
            event.data["output_index"]: event.data["item"]
            for event in found
            if event.name == "response.output_item.done"
        }
        assert final["output"] == [done[index] for index in range(3)]
        assert (await gateway.http.get(f"/v1/responses/{final['id']}")).json() == final
        plain = await create(gateway, input="what is there?")
        assert [{**item, "id": ""} for item in plain["output"]] == [{**item, "id": ""} for item in final["output"]]


@pytest.mark.parametrize("by", ["header", "setting"])
async def test_the_shape_of_the_reference(by: str) -> None:
    """The setting, or a request's header, gives `function_call` and `function_call_output` items for the server's tools."""
    server = ServerSettings(server_tools="function_call") if by == "setting" else None
    async with open_gateway(with_tools, server=server) as gateway:
        if by == "header":
            gateway.http.headers["X-Hermes-Server-Tools"] = "function_call"
        body = await create(gateway, input="what is there?")
        assert [item["type"] for item in body["output"]] == [
            "message",
            "function_call",
            "function_call_output",
            "message",
        ]
        assert body["output"][2]["output"] == "file"
        found = [event.name for event in await stream(gateway, input="what is there?")]
        assert "response.function_call_arguments.done" in found
        assert "response.mcp_call.completed" not in found
        gateway.http.headers["X-Hermes-Server-Tools"] = "something"
        refused = await gateway.http.post("/v1/responses", json={"input": "x"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-Hermes-Server-Tools")


async def test_text_without_deltas_is_streamed() -> None:
    """Final text that was never streamed comes as one delta before the end."""

    async def agent(turn: Turn) -> str:
        return "all at once"

    async with open_gateway(agent) as gateway:
        found = await stream(gateway, input="x")
        assert [event.data["delta"] for event in found if event.name == "response.output_text.delta"] == ["all at once"]


async def test_chaining_restores_transcript_session_and_instructions() -> None:
    """previous_response_id continues from the full transcript, in the same session, with the same instructions."""
    seen: list[tuple[list[str], str, str]] = []

    async def agent(turn: Turn) -> Reply:
        history = [f"{message.role}:{message.text}" for message in await turn.history()]
        seen.append((history, turn.context.session_id, turn.input.instructions))
        assert isinstance(turn, StatelessTurn)
        return await with_tools(turn)

    async with open_gateway(agent) as gateway:
        first = await create(gateway, input="one", instructions="be kind")
        second = await create(gateway, input="two", previous_response_id=first["id"])
        assert second["previous_response_id"] == first["id"]
        await create(gateway, input="three", previous_response_id=second["id"], instructions="be brief")
        assert seen[0][0] == []
        assert seen[1][0] == ["user:one", "assistant:Let me see.", "tool:file", "assistant:One file."]
        assert len(seen[2][0]) == 8
        assert len({session for _, session, _ in seen}) == 1
        assert [instructions for _, _, instructions in seen] == ["be kind", "be kind", "be brief"]


async def test_conversations_advance_and_take_turns() -> None:
    """A conversation's name points to its newest response; requests at once on one name do not fork it."""
    lengths: list[int] = []

    async def agent(turn: Turn) -> str:
        lengths.append(len(await turn.history()))
        await trio.sleep(0.001)
        return "ok"

    async with open_gateway(agent) as gateway:
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(lambda number=number: create(gateway, input=f"{number}", conversation="talk"))
        last = await create(gateway, input="end", conversation="talk")
        assert lengths == [0, 2, 4, 6, 8]
        assert last["conversation"] == {"id": "talk"}
        await create(gateway, input="x", conversation="talk", store=False)
        assert await gateway.core.store.latest_response("", "talk") == last["id"]
        await gateway.http.delete(f"/v1/responses/{last['id']}")
        await create(gateway, input="again", conversation="talk")
        assert lengths[-1] == 0


async def test_deleting_the_newest_response_during_a_turn_is_a_conflict() -> None:
    """The pointer is compared and set: a conversation that changed under a turn is 409, and nothing is stored."""
    inside, go = trio.Event(), trio.Event()

    async def agent(turn: Turn) -> str:
        if turn.input.text == "second":
            inside.set()
            await go.wait()
        return "ok"

    async with open_gateway(agent) as gateway:
        first = await create(gateway, input="first", conversation="talk")
        answers: list[int] = []

        async def second() -> None:
            answer = await gateway.http.post("/v1/responses", json={"input": "second", "conversation": "talk"})
            answers.append(answer.status_code)
            assert answer.json()["error"]["code"] == "conversation_moved"

        async with trio.open_nursery() as nursery:
            nursery.start_soon(second)
            await inside.wait()
            await gateway.http.delete(f"/v1/responses/{first['id']}")
            go.set()
        assert answers == [409]


async def test_what_is_not_stored_cannot_be_read() -> None:
    """store: false is neither retrievable nor chainable; deleted and unknown ones are 404."""
    async with open_gateway() as gateway:
        body = await create(gateway, input="x", store="off")
        kept = await create(gateway, input="x")
        deleted = await gateway.http.delete(f"/v1/responses/{kept['id']}")
        assert deleted.json() == {"id": kept["id"], "object": "response", "deleted": True}
        for response_id in (body["id"], kept["id"], "resp_nope"):
            for method in ("GET", "DELETE"):
                assert (await gateway.http.request(method, f"/v1/responses/{response_id}")).status_code == 404
            answer = await gateway.http.post("/v1/responses", json={"input": "x", "previous_response_id": response_id})
            assert answer.status_code == 404


async def test_failed_turns_say_failed() -> None:
    """A turn that fails is a response with status failed and an error; an exception is 500; secrets are taken out."""

    async def agent(turn: Turn) -> str:
        if turn.input.text == "raise":
            raise RuntimeError("inner")
        raise AgentFailed("no model sk-abcdefghijklmnop", code="model_auth")

    async with open_gateway(agent) as gateway:
        body = await create(gateway, input="fail")
        assert body["status"] == "failed"
        assert body["error"]["code"] == "model_auth"
        assert "sk-" not in body["error"]["message"]
        assert (await gateway.http.post("/v1/responses", json={"input": "raise"})).status_code == 500
        found = await stream(gateway, input="fail")
        assert found[-1].name == "response.failed"
        assert found[-1].data["response"]["error"]["message"].startswith("no model")


@pytest.mark.one_node
async def test_a_client_that_leaves_leaves_an_incomplete_response(fast_path: bool) -> None:
    """Meanwhile the response reads in_progress; after its client left it is incomplete, with the text so far, and chainable."""
    ended = trio.Event()

    async def agent(turn: Turn) -> str:
        if turn.input.text == "go on":
            return " / ".join(message.text for message in await turn.history())
        turn.emit("message.delta", delta="half an ans")
        turn.progress = Reply(text="half an ans")
        try:
            await trio.sleep_forever()
        finally:
            ended.set()
        raise AssertionError

    async with open_gateway(agent, fast_path=fast_path) as gateway:
        body = {"input": "x", "stream": True}
        async with gateway.events("/v1/responses", method="POST", json=body) as events:
            while (event := await events.next()) is not None and event.name != "response.output_text.delta":
                if event.name == "response.created":
                    response_id = event.data["response"]["id"]
            live = (await gateway.http.get(f"/v1/responses/{response_id}")).json()
            assert live["status"] == "in_progress"
        await ended.wait()

        async def over() -> bool:
            return not gateway.core.live_responses

        await eventually(over)
        stored = (await gateway.http.get(f"/v1/responses/{response_id}")).json()
        assert stored["status"] == "incomplete"
        assert stored["incomplete_details"] == {"reason": "client_gone"}
        assert stored["output"][0]["content"][0]["text"] == "half an ans"
        chained = await create(gateway, input="go on", previous_response_id=response_id)
        assert chained["output"][0]["content"][0]["text"] == "x / half an ans"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": 5, "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content"),
        ({"input": "x", "conversation": "a", "previous_response_id": "b"}, "conversation"),
        ({"input": "x", "conversation": 5}, "conversation"),
        ({"input": "x", "conversation": "n" * 300}, "conversation"),
        ({"input": "x", "conversation_history": "no"}, "conversation_history"),
        ({"input": "x", "conversation_history": [{"content": "x"}]}, "conversation_history[0].role"),
    ],
)
async def test_mistakes_say_where(body: dict[str, Any], param: str) -> None:
    """A wrong body is a 400 whose param points at the mistake, plain or streaming."""
    async with open_gateway() as gateway:
        for more in ({}, {"stream": True}):
            answer = await gateway.http.post("/v1/responses", json={**body, **more})
            assert answer.status_code == 400
            assert answer.headers["content-type"] == "application/json"
            assert answer.json()["error"]["param"] == param


async def test_long_arguments_and_results_are_shown_short_and_kept_whole() -> None:
    """Whole in an `mcp_call`; abbreviated in the reference's shape, as it does, and whole in the transcript that is chained from."""
    long = "x" * 5000

    async def agent(turn: Turn) -> Reply:
        arguments = f'{{"content":"{long}","path":"a"}}'
        turn.emit("tool.started", tool="write", preview="", tool_call_id="c", arguments=arguments)
        turn.emit("tool.completed", tool="write", tool_call_id="c", result=long, error=False)
        history = await turn.history()
        call = ToolCall(id="c", name="write", arguments=arguments)
        return Reply(
            text=str(sum(len(message.text) + sum(len(c.arguments) for c in message.tool_calls) for message in history)),
            messages=(
                Message(role="assistant", tool_calls=(call,)),
                Message(role="tool", content=long, tool_call_id="c"),
            ),
        )

    async with open_gateway(agent) as gateway:
        whole = (await create(gateway, input="x"))["output"][0]
        assert (len(whole["arguments"]), len(whole["output"])) == (5000 + len('{"content":"","path":"a"}'), 5000)
        gateway.http.headers["X-Hermes-Server-Tools"] = "function_call"
        first = await create(gateway, input="x")
        call, result, _ = first["output"]
        assert len(call["arguments"]) < 600
        assert '"path":"a"' in call["arguments"]
        assert len(result["output"]) < 1100
        second = await create(gateway, input="x", previous_response_id=first["id"])
        assert int(second["output"][-1]["content"][0]["text"]) > 10_000
