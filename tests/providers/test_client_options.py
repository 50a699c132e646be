"""What a client asks of the model arrives at the provider, in its words; what it does not take is said, not left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from hermes_trio.agent.model import (
    ModelError,
    ModelErrorKind,
    ModelOptions,
    ModelRequest,
    ToolChoice,
    ToolSpec,
    collect,
)
from hermes_trio.net.http1 import ConnectionPool
from hermes_trio.providers.anthropic import AnthropicModel
from hermes_trio.providers.demo import DemoModel
from hermes_trio.providers.openai import OpenAIModel
from hermes_trio.runtime.ports import Message

from .conftest import StartServer

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "size": {"type": "integer", "minimum": 3}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
OPTIONS = ModelOptions(
    max_tokens=77,
    temperature=0.5,
    top_p=0.9,
    stop=("END",),
    seed=5,
    reasoning_effort="minimal",
    verbosity="low",
    response_format=FORMAT,
)


def request(**more: Any) -> ModelRequest:
    """A request with everything that a client may ask for."""
    fields: dict[str, Any] = {
        "messages": (Message(role="user", content="x"),),
        "tools": (ToolSpec(name="weather", strict=True),),
        "choice": ToolChoice(mode="tool", name="weather", parallel=False),
        "max_tokens": 9,
        "temperature": 1.0,
        "options": OPTIONS,
    }
    return ModelRequest(**{**fields, **more})


async def sent(
    kind: str, start_server: StartServer, transport: ConnectionPool, asked: ModelRequest
) -> Mapping[str, Any]:
    """The body that the provider got."""
    server = await start_server()
    made = OpenAIModel if kind == "openai" else AnthropicModel
    model = made("m", base_url=server.openai_url if kind == "openai" else server.url, transport=transport)
    async with model.stream(asked) as stream:
        await collect(stream)
    return server.calls[-1].body


async def test_chat_completions(start_server: StartServer, transport: ConnectionPool) -> None:
    """By the names of the chat completions API; the client's limit and temperature go before the agent's."""
    body = await sent("openai", start_server, transport, request())
    assert (body["max_tokens"], body["temperature"], body["top_p"]) == (77, 0.5, 0.9)
    assert (body["stop"], body["seed"], body["reasoning_effort"], body["verbosity"]) == (["END"], 5, "minimal", "low")
    assert body["response_format"] == FORMAT
    assert body["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert body["parallel_tool_calls"] is False
    assert body["tools"][0]["function"]["strict"] is True


async def test_messages(start_server: StartServer, transport: ConnectionPool) -> None:
    """By the names of the Messages API, which has no seed and no verbosity."""
    body = await sent("anthropic", start_server, transport, request())
    assert (body["max_tokens"], body["temperature"], body["top_p"]) == (77, 0.5, 0.9)
    assert body["stop_sequences"] == ["END"]
    assert body["output_config"] == {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}
    assert body["tool_choice"] == {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    assert "seed" not in body


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
@pytest.mark.parametrize("mode", ["none", "required", "auto"])
async def test_the_choice_of_tools(kind: str, mode: str, start_server: StartServer, transport: ConnectionPool) -> None:
    """Each mode in the provider's word."""
    body = await sent(kind, start_server, transport, request(choice=ToolChoice(mode=mode)))
    if kind == "openai":
        assert body.get("tool_choice", "auto") == mode
    else:
        assert body["tool_choice"] == {"type": "any" if mode == "required" else mode}


async def test_a_shape_that_cannot_be_asked_for_is_said(transport: ConnectionPool, start_server: StartServer) -> None:
    """The Messages API takes a JSON schema only."""
    asked = request(options=ModelOptions(response_format={"type": "json_object"}))
    with pytest.raises(ModelError, match="json_schema") as refused:
        await sent("anthropic", start_server, transport, asked)
    assert refused.value.kind is ModelErrorKind.BAD_REQUEST


async def test_a_clients_temperature_is_never_left_out(start_server: StartServer, transport: ConnectionPool) -> None:
    """A server that refuses it is quoted; the agent's own setting is left out silently, as before."""
    server = await start_server(rejects={"temperature"})
    model = OpenAIModel("m", base_url=server.openai_url, transport=transport)
    with pytest.raises(ModelError, match="temperature"):
        async with model.stream(request()) as stream:
            await collect(stream)
    async with model.stream(request(options=ModelOptions(top_p=0.9))) as stream:
        assert (await collect(stream)).text


async def test_the_demo_model_obeys() -> None:
    """It answers in the shape that was asked for, stops where it should, and says when it was cut off."""

    async def answer(**options: Any) -> tuple[str, str]:
        asked = ModelRequest(messages=(Message(role="user", content="x END y"),), options=ModelOptions(**options))
        async with DemoModel().stream(asked) as stream:
            done = await collect(stream)
        return done.text, done.finish_reason

    assert await answer(response_format=FORMAT) == ('{"city":"You said: x END y","size":3}', "stop")
    assert await answer(response_format={"type": "json_object"}) == ('{"answer":"You said: x END y"}', "stop")
    assert (await answer(stop=("END",)))[0].endswith("x ")
    assert await answer(max_tokens=1) == ("You ", "length")
