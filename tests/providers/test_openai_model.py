"""The chat completions protocol: how requests are written, and the many ways in which servers answer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hermes_trio.agent.model import (
    Finished,
    Model,
    ModelError,
    ModelErrorKind,
    ModelRequest,
    TextDelta,
    ToolCallReady,
    ToolSpec,
)
from hermes_trio.net.http1 import ConnectionPool
from hermes_trio.net.sse import ServerEvent
from hermes_trio.providers.http_model import AnswerLimits
from hermes_trio.providers.openai import ChatDecoder, OpenAIModel
from hermes_trio.runtime.ports import Message, ToolCall
from hermes_trio.testing.model_server import ScriptedAnswer

from .conftest import StartServer, answer_of, ask


def model_at(transport: ConnectionPool, url: str = "http://127.0.0.1:1/v1", **options: Any) -> OpenAIModel:
    return OpenAIModel("m", transport=transport, base_url=url, **options)


def chunk(delta: dict[str, Any] | None = None, finish_reason: str | None = None, **more: Any) -> ServerEvent:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
    return ServerEvent("message", msgspec.json.encode({"choices": choices, **more}))


DONE = ServerEvent("message", b"[DONE]")


def decode(*events: ServerEvent, limits: AnswerLimits | None = None) -> list[Any]:
    decoder = ChatDecoder("m", limits or AnswerLimits())
    return [found for event in events for found in decoder.event(event)]


async def test_is_a_model(transport: ConnectionPool) -> None:
    """The class fulfils the port, and shows neither key nor transport."""
    model = model_at(transport, name="fast", context_window=1000)
    assert isinstance(model, Model)
    assert (model.name, model.context_window) == ("fast", 1000)
    assert repr(model) == "OpenAIModel('m', base_url='http://127.0.0.1:1')"


async def test_request_body(transport: ConnectionPool) -> None:
    """A transcript, tools and settings become the body that the API documents."""
    request = ModelRequest(
        messages=(
            Message(role="system", content="be brief"),
            Message(role="user", content=[{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]),
            Message(role="assistant", tool_calls=(ToolCall(id="c1", name="terminal", arguments='{"command":"ls"}'),)),
            Message(role="tool", tool_call_id="c1", content="a.txt"),
            Message(role="assistant", content="one file"),
        ),
        tools=(ToolSpec(name="terminal", description="runs", parameters={"type": "object"}),),
        max_tokens=50,
        temperature=0.5,
        metadata={"directives": True},
    )
    assert msgspec.json.decode(model_at(transport).encode(request)) == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 50,
        "temperature": 0.5,
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "terminal", "arguments": '{"command":"ls"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
            {"role": "assistant", "content": "one file"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "terminal", "description": "runs", "parameters": {"type": "object"}},
            }
        ],
    }


async def test_refused_optional_fields_are_left_out(start_server: StartServer, transport: ConnectionPool) -> None:
    """A server that does not know an optional field gets the request again without it, and is not asked again."""
    server = await start_server(rejects=frozenset({"stream_options", "max_tokens", "temperature"}))
    model = model_at(transport, server.openai_url)
    request = ask("hello", max_tokens=10, temperature=0.1)
    assert (await answer_of(model, request)).text == "You said: hello"
    assert len(server.calls) == 4
    assert server.calls[-1].body["max_completion_tokens"] == 10
    assert (await answer_of(model, request)).usage.api_calls == 1
    assert len(server.calls) == 5


async def test_field_that_stays_refused_is_an_error(start_server: StartServer, transport: ConnectionPool) -> None:
    """A server that refuses a field that we cannot leave out is not asked for ever."""
    server = await start_server(rejects=frozenset({"messages"}))
    with pytest.raises(ModelError, match="'messages' is not supported") as caught:
        await answer_of(model_at(transport, server.openai_url))
    assert caught.value.kind is ModelErrorKind.BAD_REQUEST
    assert len(server.calls) == 1


async def test_no_key_no_header(start_server: StartServer, transport: ConnectionPool) -> None:
    """A local server without keys is not sent an empty one."""
    server = await start_server(ScriptedAnswer(text="ok"))
    await answer_of(model_at(transport, server.openai_url, headers=(("X-Title", "tests"),)))
    assert "authorization" not in server.calls[0].headers
    assert server.calls[0].headers["x-title"] == "tests"


def test_tool_calls_without_index_or_id() -> None:
    """Servers that number nothing are understood: a new name begins a new call, and ids are made."""
    events = decode(
        chunk({"tool_calls": [{"function": {"name": "a", "arguments": {"x": 1}}}]}),
        chunk({"tool_calls": [{"function": {"name": "b", "arguments": '{"y"'}}]}),
        chunk({"tool_calls": [{"function": {"arguments": ": 2}"}}]}),
        chunk({}, "stop"),
        DONE,
    )
    calls = [event.call for event in events if isinstance(event, ToolCallReady)]
    assert [(call.name, call.arguments) for call in calls] == [("a", '{"x":1}'), ("b", '{"y": 2}')]
    assert len({call.id for call in calls}) == 2
    assert events[-1].finish_reason == "tool_calls"


def test_tool_calls_interleaved_and_with_repeated_names() -> None:
    """Pieces go to the call of their index, and a name that is repeated is not doubled."""
    events = decode(
        chunk({"tool_calls": [{"index": 1, "id": "b", "function": {"name": "second", "arguments": "{"}}]}),
        chunk({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "first", "arguments": ""}}]}),
        chunk({"tool_calls": [{"index": 1, "id": "b", "function": {"name": "second", "arguments": "}"}}]}),
        chunk({}, "tool_calls"),
        DONE,
    )
    assert [event.call for event in events[:-1]] == [
        ToolCall(id="a", name="first", arguments="{}"),
        ToolCall(id="b", name="second", arguments="{}"),
    ]


def test_too_many_tool_calls() -> None:
    """More calls than anybody means are refused."""
    pieces = [chunk({"tool_calls": [{"index": number, "function": {"name": "t"}}]}) for number in range(4)]
    with pytest.raises(ModelError, match="more than 3 tool calls"):
        decode(*pieces, limits=AnswerLimits(calls=3))


@pytest.mark.parametrize(
    "event",
    [
        chunk({"content": [{"type": "text", "text": "hi"}]}),
        chunk({"content": "hi", "unknown": {"deep": [1]}}, system_fingerprint=None),
        chunk({"content": None, "refusal": "hi"}),
    ],
)
def test_variations_of_text(event: ServerEvent) -> None:
    """Text comes as a string, as parts, or as a refusal; fields that are not known are skipped."""
    assert decode(event) == [TextDelta("hi")]


def test_end_without_a_reason() -> None:
    """`[DONE]` after some content is an end, before any it is a broken stream."""
    assert decode(chunk({"content": "x"}), DONE)[-1] == Finished(finish_reason="stop")
    with pytest.raises(ModelError) as caught:
        decode(chunk(None), DONE)
    assert caught.value.kind is ModelErrorKind.BROKEN_STREAM


def test_stream_that_ends_after_its_reason() -> None:
    """A server that leaves out `[DONE]` is understood if it gave a reason."""
    decoder = ChatDecoder("m", AnswerLimits())
    decoder.event(chunk({"content": "x"}, "length"))
    assert list(decoder.end()) == [Finished(finish_reason="length")]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"message": "slow down", "code": 429}, ModelErrorKind.RATE_LIMITED),
        ({"message": "boom", "type": "server_error"}, ModelErrorKind.UNAVAILABLE),
        ({"message": "maximum context length is 8", "type": "invalid_request_error"}, ModelErrorKind.CONTEXT_OVERFLOW),
        ("just words", ModelErrorKind.UNAVAILABLE),
    ],
)
def test_errors_inside_a_stream(error: Any, kind: ModelErrorKind) -> None:
    """An error that arrives as an event has the kind that it would have had as a status."""
    with pytest.raises(ModelError) as caught:
        decode(ServerEvent("message", msgspec.json.encode({"error": error})))
    assert caught.value.kind is kind


def test_deep_nesting_is_a_broken_stream() -> None:
    """JSON that is nested beyond reason is refused like any other that cannot be read."""
    with pytest.raises(ModelError, match="cannot be read"):
        decode(ServerEvent("message", b'{"choices":' + b"[" * 100_000))
