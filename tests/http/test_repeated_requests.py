"""What the official clients repeat by themselves, and what they must not: counted by what the tools of the server did.

The model is a scripted provider on loopback, the clients are unmodified and have their default of two repetitions.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import attrs
import openai
import pytest
import trio

from hermes_trio.agent.loop import ModelAgent
from hermes_trio.base.redaction import Secret
from hermes_trio.net.http1 import ConnectionPool
from hermes_trio.providers.http_model import Retries
from hermes_trio.providers.openai import OpenAIModel
from hermes_trio.runtime.turn import Turn
from hermes_trio.testing.model_server import (
    ModelServer,
    Reply,
    ScriptedAnswer,
    ScriptedCall,
    ScriptedRefusal,
    open_model_server,
)
from hermes_trio.tools.registry import Tools, tool
from tests.agent.scripted import Routes, tool_call

from .gateway import KEY, Gateway, open_gateway

MESSAGES: Any = [{"role": "user", "content": "do it"}]
REFUSALS = [(401, "model_auth"), (400, "model_bad_request"), (404, "model_bad_request"), (429, "model_rate_limited")]


@attrs.define
class World:
    """A gateway in front of a scripted provider, and what its one tool did."""

    gateway: Gateway
    provider: ModelServer
    ran: list[str]

    def client(self) -> openai.AsyncOpenAI:
        """The official client, with its defaults."""
        http = openai.DefaultAsyncHttpxClient(event_hooks=self.gateway.rotate())
        return openai.AsyncOpenAI(base_url=f"{self.gateway.url}/v1", api_key=KEY, http_client=http)


@asynccontextmanager
async def world(otherwise: Reply) -> AsyncIterator[World]:
    """Everything for the body of the `async with`."""
    ran: list[str] = []

    @tool()
    async def note(turn: Turn, text: str) -> dict[str, str]:
        """Write something down."""
        await trio.lowlevel.checkpoint()
        ran.append(text)
        return {"noted": text}

    async with open_model_server(otherwise=otherwise) as provider, ConnectionPool() as pool:
        model = OpenAIModel(
            "m", base_url=provider.openai_url, key=Secret("sk-x"), transport=pool, retries=Retries(attempts=1)
        )
        async with open_gateway(ModelAgent(Routes(model), Tools([note]))) as gateway:
            yield World(gateway, provider, ran)


def tool_then(status: int) -> Reply:
    """A provider that calls the tool first, and refuses the call that brings its result."""

    def answer(call: ScriptedCall) -> ScriptedAnswer | ScriptedRefusal:
        if call.body["messages"][-1]["role"] == "tool":
            return ScriptedRefusal(status=status, message="not now")
        return ScriptedAnswer(tool_calls=(tool_call("note", text="once"),))

    return answer


@pytest.mark.parametrize(("status", "code"), [*REFUSALS, (500, "model_unavailable"), (503, "model_unavailable")])
async def test_a_turn_that_did_something_is_not_repeated(
    status: int, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The tool runs once, whatever the provider says afterwards; the error and one warning name the cause."""
    async with world(tool_then(status)) as w, w.client() as client:
        with caplog.at_level(logging.WARNING, "hermes_trio.agent"), pytest.raises(openai.APIStatusError) as failed:
            await client.chat.completions.create(model="m", messages=MESSAGES)
        assert w.ran == ["once"]
        assert failed.value.status_code == 424
        assert failed.value.response.headers["x-should-retry"] == "false"
        assert isinstance(failed.value.body, dict)
        assert failed.value.body["hermes"]["error_code"] == code
        assert len([record for record in caplog.records if code in record.getMessage()]) == 1


@pytest.mark.parametrize("streamed", [True, False])
async def test_responses_and_streams_are_not_repeated(streamed: bool) -> None:
    """A response that failed says so in its status, a stream in its events; the tool has run once."""
    async with world(tool_then(503)) as w, w.client() as client:
        if streamed:
            stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            with pytest.raises(openai.APIError, match="not now"):
                _ = [chunk async for chunk in stream]
        else:
            response = await client.responses.create(model="m", input="do it")
            assert response.status == "failed"
            assert response.error is not None
            assert response.error.code == "model_unavailable"
        assert w.ran == ["once"]


async def test_the_client_of_messages_does_not_repeat_it_either() -> None:
    """Anthropic's client, with its defaults."""
    async with (
        world(tool_then(503)) as w,
        anthropic.AsyncAnthropic(
            base_url=w.gateway.url,
            api_key=KEY,
            http_client=anthropic.DefaultAsyncHttpxClient(event_hooks=w.gateway.rotate()),
        ) as client,
    ):
        with pytest.raises(anthropic.APIStatusError, match="not now"):
            await client.messages.create(model="m", max_tokens=10, messages=MESSAGES)
        assert w.ran == ["once"]


async def test_a_client_that_gave_up_waiting_does_not_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's own time is over while the turn goes on: it leaves, repeats the request by itself, and is refused; the tool has run once."""

    def answer(call: ScriptedCall) -> ScriptedAnswer:
        if call.body["messages"][-1]["role"] == "tool":
            return ScriptedAnswer(text="too late", gate=trio.Event())
        return ScriptedAnswer(tool_calls=(tool_call("note", text="once"),))

    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
    async with world(answer) as w, w.client() as client:
        with pytest.raises(openai.APIStatusError, match="This request retries one") as refused:
            await client.with_options(timeout=1.0).chat.completions.create(model="m", messages=MESSAGES)
        assert refused.value.status_code == 424
        assert w.ran == ["once"]


async def test_what_nothing_was_done_for_may_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure before any tool ran is a 502, which clients repeat; one that would come again is not repeated."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
    async with world(ScriptedRefusal(status=503, message="busy")) as w, w.client() as client:
        with pytest.raises(openai.InternalServerError) as failed:
            await client.chat.completions.create(model="m", messages=MESSAGES)
        assert failed.value.status_code == 502
        assert len(w.provider.calls) == 3
    async with world(ScriptedRefusal(status=401, message="who are you")) as w, w.client() as client:
        with pytest.raises(openai.InternalServerError) as failed:
            await client.chat.completions.create(model="m", messages=MESSAGES)
        assert failed.value.response.headers["x-should-retry"] == "false"
        assert len(w.provider.calls) == 1
