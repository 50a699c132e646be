"""Anthropic's own client, unmodified, on `/v1/messages`: plain, streamed, tools of both sides, errors."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsBase

from hermes_trio.agent.model import ReasoningDelta
from hermes_trio.http.api.messages import CountRequest, MessagesRequest
from hermes_trio.http.parameters import MESSAGES_PARAMETERS
from hermes_trio.runtime.errors import AgentFailed
from hermes_trio.runtime.turn import Turn
from tests.agent.scripted import tool_call

from .gateway import KEY, open_gateway
from .test_client_tools import well_formed, world

WEATHER: Any = {
    "name": "weather",
    "description": "The weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def client_of(url: str, key: str = KEY) -> anthropic.AsyncAnthropic:
    """The official client; it sends the key as `x-api-key`."""
    return anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)


def test_the_table_is_closed() -> None:
    """The table has exactly the fields of the request, and every parameter that the pinned client can send."""
    assert set(MESSAGES_PARAMETERS) == set(MessagesRequest.__struct_fields__)
    assert {*MessageCreateParamsBase.__annotations__, "stream"} <= set(MESSAGES_PARAMETERS)
    assert set(MessageCountTokensParams.__annotations__) <= set(CountRequest.__struct_fields__)


async def test_a_plain_message_and_a_stream() -> None:
    """Text, thinking, usage and the stop reason, plain and streamed; the system prompt is given to the model."""
    thought = [ReasoningDelta("Hm."), "Hello ", "Ada."]
    async with world(thought, thought) as w, client_of(w.gateway.url) as client:
        asked: Any = {
            "model": "m",
            "max_tokens": 50,
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [{"role": "user", "content": "I am Ada."}],
        }
        done = await client.messages.create(**asked)
        assert [block.type for block in done.content] == ["thinking", "text"]
        assert done.content[1].text == "Hello Ada."  # type: ignore[union-attr]
        assert (done.stop_reason, done.model, done.role) == ("end_turn", "m", "assistant")
        assert done.usage.output_tokens == 5
        assert "Be brief." in w.model.requests[0].messages[0].text
        assert w.model.requests[0].options.max_tokens == 50
        async with client.messages.stream(**asked) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_message()
        assert [block.model_dump() for block in streamed.content] == [block.model_dump() for block in done.content]
        assert (streamed.stop_reason, streamed.usage.output_tokens) == ("end_turn", 5)


async def test_twenty_rounds_of_alternating_tools_streamed() -> None:
    """Twenty streamed rounds: in each the server's tool runs once and the client's is called once, and the model always sees a legal transcript."""
    rounds = 20
    answers: list[Any] = [
        [tool_call("note", f"call_s{number}", text=f"n{number}"), tool_call("weather", f"call_c{number}", city="Rome")]
        for number in range(rounds)
    ]
    ran_here: list[str] = []
    async with world(*answers, ["Done."]) as w, client_of(w.gateway.url) as client:
        messages: list[Any] = [{"role": "user", "content": "Go"}]
        for _ in range(rounds + 1):
            async with client.messages.stream(model="m", max_tokens=100, messages=messages, tools=[WEATHER]) as stream:
                async for _ in stream:
                    pass
                answer = await stream.get_final_message()
            uses = [block for block in answer.content if block.type == "tool_use"]
            messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
            if answer.stop_reason != "tool_use":
                break
            [use] = uses
            assert use.name == "weather"
            assert use.input == {"city": "Rome"}
            ran_here.append(use.id)
            result = {"type": "tool_result", "tool_use_id": use.id, "content": f"result of {use.id}"}
            messages.append({"role": "user", "content": [result]})
        assert answer.content[0].text == "Done."  # type: ignore[union-attr]
        assert w.ran == [f"n{number}" for number in range(rounds)]
        assert ran_here == [f"call_c{number}" for number in range(rounds)]
        assert all(well_formed(request) for request in w.model.requests)
        assert len(w.sent()) == 1 + 3 * rounds


async def test_errors_have_the_shape_of_the_api() -> None:
    """A wrong key, a missing field, an unknown parameter and a failed turn raise the client's own classes."""

    async def agent(turn: Turn) -> str:
        raise AgentFailed("no model today", code="model_auth")

    async with open_gateway(agent) as gateway:
        asked: Any = {"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": "x"}]}
        async with client_of(gateway.url, "sk-ant-wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await client.messages.create(**asked)
        assert isinstance(refused.value.body, dict)
        assert refused.value.body["type"] == "error"
        assert refused.value.body["error"]["type"] == "authentication_error"
        async with client_of(gateway.url) as client:
            with pytest.raises(anthropic.InternalServerError, match="no model today"):
                await client.messages.create(**asked)
            with pytest.raises(anthropic.BadRequestError, match="top_k"):
                await client.messages.create(**asked, extra_body={"top_k": 3})
            async with client.messages.stream(**asked) as stream:
                with pytest.raises(anthropic.APIStatusError, match="no model today"):
                    await stream.get_final_message()
        answer = await gateway.http.post("/v1/messages", json={"messages": []})
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_counting_tokens_and_tools_that_are_off() -> None:
    """The count grows with the messages and tools; `tool_choice: none` without tools leaves the model without any."""
    async with world(["a"]) as w, client_of(w.gateway.url) as client:
        short = await client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "x"}])
        long = await client.messages.count_tokens(
            model="m", messages=[{"role": "user", "content": "x" * 4000}], tools=[WEATHER]
        )
        assert 0 < short.input_tokens < 20
        assert long.input_tokens > 1000
        await client.messages.create(
            model="m", max_tokens=9, messages=[{"role": "user", "content": "x"}], tool_choice={"type": "none"}
        )
        assert w.model.requests[0].tools == ()


async def test_a_base_url_with_too_much_or_too_little() -> None:
    """A path with `/v1` missing or twice is a 404 that says what to change."""
    async with open_gateway() as gateway:
        for path, words in (
            ("/chat/completions", "/v1"),
            ("/responses", "/v1"),
            ("/models", "/v1"),
            ("/v1/v1/messages", "without /v1"),
        ):
            answer = await gateway.http.post(path, json={})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_path")
            assert words in answer.json()["error"]["message"], path
            assert "base" in answer.json()["error"]["message"], path


async def test_the_wording_for_a_wrong_key() -> None:
    """A wrong key is told in OpenAI's words, without the key; a missing one is told how to send it."""
    async with open_gateway() as gateway, httpx2.AsyncClient(base_url=gateway.url, trust_env=False) as http:
        wrong = await http.get("/v1/models", headers={"Authorization": "Bearer sk-abcdefghijklmnopqrstuvwxyz"})
        error = wrong.json()["error"]
        assert (wrong.status_code, error["code"], error["type"]) == (401, "invalid_api_key", "invalid_request_error")
        assert error["message"].startswith("Incorrect API key provided: sk-a")
        assert "efghijkl" not in error["message"]
        missing = await http.get("/v1/models")
        assert missing.json()["error"]["message"].startswith("You didn't provide an API key")
        named = await http.get("/v1/models", headers={"x-api-key": KEY})
        assert named.status_code == 200
