"""The scripted provider speaks the real formats: the providers' own client libraries understand it."""

from __future__ import annotations

import gc

import anthropic
import openai
import pytest

from hermes_trio.runtime.outcome import Usage
from hermes_trio.runtime.ports import ToolCall
from hermes_trio.testing.model_server import ModelServer, ScriptedAnswer, ScriptedRefusal

from .conftest import StartServer

CALL = ToolCall(id="call_1", name="terminal", arguments='{"command": "ls"}')
ANSWER = ScriptedAnswer(text="Here you are.", tool_calls=(CALL,), usage=Usage(input_tokens=12, output_tokens=5))
QUESTION = {"role": "user", "content": "list the files"}
TOOL = {"name": "terminal", "description": "runs", "input_schema": {"type": "object", "properties": {}}}


# The library leaves the generators of its HTTP client to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_openai_library(start_server: StartServer) -> None:
    """The OpenAI library reads a stream, a whole answer and an error of the server as it would the real one's."""
    server: ModelServer = await start_server(
        ANSWER, ANSWER, ScriptedRefusal(status=429, message="slow down"), key="sk-x"
    )
    async with openai.AsyncOpenAI(base_url=server.openai_url, api_key="sk-x", max_retries=0) as client:
        async with client.chat.completions.stream(
            model="m", messages=[QUESTION], stream_options={"include_usage": True}
        ) as stream:
            text = "".join([event.delta async for event in stream if event.type == "content.delta"])
            final = await stream.get_final_completion()
        assert text == "Here you are."
        assert final.choices[0].finish_reason == "tool_calls"
        assert final.choices[0].message.tool_calls[0].function.arguments == CALL.arguments
        assert final.usage.prompt_tokens == 12
        whole = await client.chat.completions.create(model="m", messages=[QUESTION])
        assert whole.choices[0].message.content == "Here you are."
        assert whole.choices[0].message.tool_calls[0].function.name == "terminal"
        with pytest.raises(openai.RateLimitError, match="slow down"):
            await client.chat.completions.create(model="m", messages=[QUESTION])
    gc.collect()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_anthropic_library(start_server: StartServer) -> None:
    """The Anthropic library reads a stream, a whole answer and an error of the server as it would the real one's."""
    server: ModelServer = await start_server(
        ANSWER, ANSWER, ScriptedRefusal(status=529, message="busy"), key="sk-ant-x"
    )
    request = {"model": "m", "max_tokens": 10, "messages": [QUESTION]}
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="sk-ant-x", max_retries=0) as client:
        async with client.messages.stream(**request, tools=[TOOL]) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert text == "Here you are."
        assert final.stop_reason == "tool_use"
        assert final.content[1].input == {"command": "ls"}
        assert (final.usage.input_tokens, final.usage.output_tokens) == (12, 5)
        whole = await client.messages.create(**request)
        assert [block.type for block in whole.content] == ["text", "tool_use"]
        with pytest.raises(anthropic.APIStatusError, match="busy") as caught:
            await client.messages.create(**request)
        assert caught.value.status_code == 529
    gc.collect()
