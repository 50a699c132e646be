"""The Messages protocol: how a transcript is translated, and what comes back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hermes_trio.agent.model import Finished, Model, ModelError, ModelErrorKind, ModelRequest, ToolCallReady, ToolSpec
from hermes_trio.base.redaction import Secret
from hermes_trio.net.http1 import ConnectionPool
from hermes_trio.net.sse import ServerEvent
from hermes_trio.providers.anthropic import AnthropicModel, MessagesDecoder
from hermes_trio.providers.http_model import AnswerLimits
from hermes_trio.providers.transcript import MISSING_RESULT
from hermes_trio.runtime.outcome import Usage
from hermes_trio.runtime.ports import Message, ToolCall
from hermes_trio.testing.model_server import ScriptedAnswer

from .conftest import StartServer, answer_of, ask


def model_at(transport: ConnectionPool, url: str = "http://127.0.0.1:1", **options: Any) -> AnthropicModel:
    return AnthropicModel("m", transport=transport, base_url=url, **options)


def encoded(transport: ConnectionPool, *messages: Message, **more: Any) -> dict[str, Any]:
    body = model_at(transport, cache=False).encode(ModelRequest(messages=messages, **more))
    return msgspec.json.decode(body, type=dict[str, Any])


def event(**value: Any) -> ServerEvent:
    return ServerEvent(value["type"], msgspec.json.encode(value))


async def test_is_a_model(transport: ConnectionPool) -> None:
    """The class fulfils the port, and both spellings of the base URL mean the same."""
    model = model_at(transport, "http://127.0.0.1:1/v1/")
    assert isinstance(model, Model)
    assert model._endpoint.path == model_at(transport)._endpoint.path == "/v1/messages"


async def test_request_body(transport: ConnectionPool) -> None:
    """System messages become the system prompt, tool calls and results become blocks, neighbours are merged."""
    call = ToolCall(id="functions.ls:0", name="terminal", arguments='{"command":"ls"}')
    body = encoded(
        transport,
        Message(role="system", content="be brief"),
        Message(role="developer", content="and kind"),
        Message(role="user", content="list"),
        Message(role="user", content=[{"type": "text", "text": "please"}]),
        Message(role="assistant", content="looking", tool_calls=(call,)),
        Message(role="tool", tool_call_id=call.id, content="a.txt"),
        Message(role="user", content="thanks"),
        tools=(ToolSpec(name="terminal", description="runs", parameters={"type": "object"}),),
        temperature=1.7,
    )
    assert body == {
        "model": "m",
        "max_tokens": 8192,
        "stream": True,
        "temperature": 1.0,
        "system": [{"type": "text", "text": "be brief\n\nand kind"}],
        "tools": [{"name": "terminal", "description": "runs", "input_schema": {"type": "object"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "list"}, {"type": "text", "text": "please"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "looking"},
                    {"type": "tool_use", "id": "functions_ls_0", "name": "terminal", "input": {"command": "ls"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "functions_ls_0", "content": "a.txt"},
                    {"type": "text", "text": "thanks"},
                ],
            },
        ],
    }


async def test_images(transport: ConnectionPool) -> None:
    """Data URLs and addresses become image blocks; anything else is refused with the reason."""

    def image(url: str) -> Message:
        return Message(role="user", content=[{"type": "image_url", "image_url": {"url": url}}])

    body = encoded(transport, image("data:image/png;base64,aGk="), image("https://example.com/a.png"))
    assert [block["source"] for block in body["messages"][0]["content"]] == [
        {"type": "base64", "media_type": "image/png", "data": "aGk="},
        {"type": "url", "url": "https://example.com/a.png"},
    ]
    with pytest.raises(ModelError, match="an image is given as") as caught:
        encoded(transport, image("file:///etc/passwd"))
    assert caught.value.kind is ModelErrorKind.BAD_REQUEST


async def test_a_cut_transcript_is_accepted(start_server: StartServer, transport: ConnectionPool) -> None:
    """Half pairs of calls and results, empty texts and a missing beginning are mended before they are sent."""
    server = await start_server(ScriptedAnswer(text="fine"), key="k" * 20)
    calls = (ToolCall(id="a", name="t", arguments="[1]"), ToolCall(id="b", name="t", arguments="{broken"))
    request = ModelRequest(
        messages=(
            Message(role="tool", tool_call_id="gone", content="orphan"),
            Message(role="assistant", content="hello"),
            Message(role="user", content="  "),
            Message(role="assistant", tool_calls=calls),
            Message(role="tool", tool_call_id="b", content=""),
            Message(role="user", content="go on"),
        )
    )
    assert (await answer_of(model_at(transport, server.url, key=Secret("k" * 20)), request)).text == "fine"
    sent = server.calls[0].body["messages"]
    assert sent[0]["role"] == "user"
    assert {block.get("content") for block in sent[2]["content"]} == {MISSING_RESULT, "(empty)", None}
    assert [block["input"] for block in sent[1]["content"] if block["type"] == "tool_use"] == [
        {"_invalid_arguments": [1]},
        {"_invalid_arguments": "{broken"},
    ]


async def test_nothing_to_say_is_refused_here(transport: ConnectionPool) -> None:
    """A request without any message of a user never leaves."""
    with pytest.raises(ModelError, match="at least one message"):
        await answer_of(model_at(transport), ModelRequest(messages=(Message(role="system", content="x"),)))


async def test_prompt_is_marked_for_the_cache_until_refused(
    start_server: StartServer, transport: ConnectionPool
) -> None:
    """The system prompt and the end of the conversation carry the mark, so that the next call can read them."""
    server = await start_server(ScriptedAnswer(usage=Usage(input_tokens=30, output_tokens=1, cache_write_tokens=20)))
    request = ModelRequest(messages=(Message(role="system", content="s"), Message(role="user", content="u")))
    answer = await answer_of(model_at(transport, server.url), request)
    mark = {"type": "ephemeral"}
    assert server.calls[0].body["system"][0]["cache_control"] == mark
    assert server.calls[0].body["messages"][-1]["content"][-1]["cache_control"] == mark
    assert (answer.usage.input_tokens, answer.usage.cache_write_tokens) == (30, 20)


async def test_server_that_does_not_know_the_mark(transport: ConnectionPool) -> None:
    """A refusal that names the mark is learnt from, once."""
    model = model_at(transport)
    body = model.encode(ask())
    refusal = ModelError(ModelErrorKind.BAD_REQUEST, "cache_control: Extra inputs are not permitted", status=400)
    assert model.adapt_to_refusal(body, refusal)
    assert b"cache_control" not in model.encode(ask())
    assert not model.adapt_to_refusal(model.encode(ask()), refusal)


@pytest.mark.parametrize(
    ("stop_reason", "finish_reason"),
    [
        ("end_turn", "stop"),
        ("max_tokens", "length"),
        ("tool_use", "tool_calls"),
        ("refusal", "content_filter"),
        ("new", "stop"),
    ],
)
def test_stop_reasons(stop_reason: str, finish_reason: str) -> None:
    """Stop reasons are translated into the one vocabulary."""
    decoder = MessagesDecoder("m", AnswerLimits())
    decoder.event(event(type="message_delta", delta={"stop_reason": stop_reason}, usage={"output_tokens": 2}))
    assert list(decoder.event(event(type="message_stop"))) == [
        Finished(finish_reason=finish_reason, usage=Usage(output_tokens=2, api_calls=1))
    ]


def test_input_that_comes_at_once() -> None:
    """A server that sends a tool's whole input with the start of its block is understood."""
    decoder = MessagesDecoder("m", AnswerLimits())
    block = {"type": "tool_use", "id": "t1", "name": "ls", "input": {"path": "/"}}
    decoder.event(event(type="content_block_start", index=0, content_block=block))
    decoder.event(event(type="something_new", data=[1]))
    decoder.event(event(type="message_delta", delta={"stop_reason": "tool_use"}))
    found = list(decoder.event(event(type="message_stop")))
    assert found[0] == ToolCallReady(ToolCall(id="t1", name="ls", arguments='{"path":"/"}'))


@pytest.mark.parametrize(
    ("type_", "kind"),
    [
        ("overloaded_error", ModelErrorKind.OVERLOADED),
        ("rate_limit_error", ModelErrorKind.RATE_LIMITED),
        ("api_error", ModelErrorKind.UNAVAILABLE),
        ("authentication_error", ModelErrorKind.AUTH),
        ("invalid_request_error", ModelErrorKind.BAD_REQUEST),
    ],
)
def test_error_events(type_: str, kind: ModelErrorKind) -> None:
    """An error event has the kind that it would have had as a status."""
    with pytest.raises(ModelError, match="words") as caught:
        MessagesDecoder("m", AnswerLimits()).event(event(type="error", error={"type": type_, "message": "words"}))
    assert caught.value.kind is kind
