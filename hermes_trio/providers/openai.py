"""The OpenAI chat completions protocol, as implemented by OpenAI, OpenRouter, Ollama, vLLM, llama.cpp and others.

`OpenAIModel` is the model; `ChatDecoder` reads one streamed answer. Servers differ in what they accept and send: an optional field that a server
refuses is left out of later requests, and the known variations of the answer are read.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Final, Unpack, final

import msgspec

from hermes_trio.agent.model import (
    NO_OPTIONS,
    Finished,
    ModelError,
    ModelErrorKind,
    ModelEvent,
    ModelOptions,
    ModelRequest,
    ReasoningDelta,
    TextDelta,
    ToolCallReady,
    ToolChoice,
    ToolSpec,
)
from hermes_trio.base.redaction import Secret
from hermes_trio.net.sse import ServerEvent
from hermes_trio.runtime.outcome import Usage
from hermes_trio.runtime.ports import Message, ToolCall

from .failures import failure_error
from .http_model import OPENAI_URL, AnswerLimits, HttpModel, HttpModelOptions
from .tool_calls import CallAssembler
from .transcript import paired, result_text


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _Call(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    reasoning: str | dict[str, Any] | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: dict[str, Any] | str | None = None


_chunks: Final = msgspec.json.Decoder(_Chunk)


def _decode_chunk(name: str, data: bytes) -> _Chunk:
    try:
        return _chunks.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    # Some servers cut a character in half between two tokens: the text is kept, with a mark where the character was.
    try:
        return _chunks.decode(data.decode("utf-8", "replace"))
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelError(
            ModelErrorKind.BROKEN_STREAM, f"{name}: an event of the answer cannot be read: {error}"
        ) from None


def _text(content: str | list[dict[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(str(part.get("text") or "") for part in content if part.get("type", "text") == "text")


@final
class ChatDecoder:
    """Decodes one answer of the chat completions API, streamed or whole."""

    def __init__(self, name: str, limits: AnswerLimits) -> None:
        self._name = name
        self._calls = CallAssembler(name, limits)
        self._finish_reason = ""
        self._usage = Usage(api_calls=1)
        self._content = False
        self._finished = False

    @property
    def finished(self) -> bool:
        """Return whether the answer is complete."""
        return self._finished

    def event(self, event: ServerEvent) -> Sequence[ModelEvent]:
        """Read one event of the stream."""
        if event.data.strip() == b"[DONE]":
            if not self._finish_reason and (self._content or self._calls):
                self._finish_reason = "stop"
            return self.end()
        chunk = _decode_chunk(self._name, event.data)
        return self._take(chunk)

    def whole(self, body: bytes) -> Sequence[ModelEvent]:
        """Read the answer of a server that does not stream."""
        events = list(self._take(_decode_chunk(self._name, body)))
        if not self._finish_reason and (self._content or self._calls):
            self._finish_reason = "stop"
        return [*events, *self.end()]

    def end(self) -> Sequence[ModelEvent]:
        """Return the remaining tool calls and the final event at the end of the stream. Raises `ModelError` if the answer is incomplete."""
        if not self._finish_reason:
            raise ModelError(
                ModelErrorKind.BROKEN_STREAM, f"{self._name}: the answer was cut off before it was finished"
            )
        self._finished = True
        calls = self._calls.finish()
        reason = "tool_calls" if calls and self._finish_reason in ("stop", "function_call") else self._finish_reason
        return [*(ToolCallReady(call) for call in calls), Finished(finish_reason=reason, usage=self._usage)]

    def _take(self, chunk: _Chunk) -> Sequence[ModelEvent]:
        if chunk.error:
            raise failure_error(self._name, {"error": chunk.error})
        if chunk.usage is not None:
            self._usage = _read_usage(chunk.usage)
        events: list[ModelEvent] = []
        for choice in chunk.choices or ():
            if choice.index != 0:
                continue
            delta = choice.delta or choice.message
            if delta is not None:
                self._read_delta(delta, events)
            if choice.finish_reason:
                self._finish_reason = choice.finish_reason
        return events

    def _read_delta(self, delta: _Delta, events: list[ModelEvent]) -> None:
        reasoning = delta.reasoning_content or (delta.reasoning if isinstance(delta.reasoning, str) else "")
        if reasoning:
            self._content = True
            events.append(ReasoningDelta(reasoning))
        text = _text(delta.content) or delta.refusal
        if text:
            self._content = True
            events.append(TextDelta(text))
        for call in delta.tool_calls or ():
            function = call.function or _Function()
            arguments = function.arguments
            if isinstance(arguments, dict):
                arguments = msgspec.json.encode(arguments).decode()
            self._calls.add(call.index, call.id or "", function.name or "", arguments or "")


def _read_usage(usage: _Usage) -> Usage:
    prompt, completion = usage.prompt_tokens_details or _Details(), usage.completion_tokens_details or _Details()
    return Usage(
        input_tokens=usage.prompt_tokens or 0,
        output_tokens=usage.completion_tokens or 0,
        cache_read_tokens=prompt.cached_tokens or 0,
        reasoning_tokens=completion.reasoning_tokens or 0,
        api_calls=1,
    )


class _Dialect(msgspec.Struct):
    """What this server is known to accept."""

    stream_options: bool = True
    temperature: bool = True
    token_field: str = "max_tokens"


@final
class OpenAIModel(HttpModel):
    """A model behind an OpenAI-compatible chat completions endpoint."""

    provider = "openai"
    default_url = OPENAI_URL

    def __init__(self, model: str, **options: Unpack[HttpModelOptions]) -> None:
        super().__init__(model, **options)
        self._dialect = _Dialect()

    def _address(self, base: str) -> str:
        return f"{base}/chat/completions"

    def _headers(self, key: Secret) -> tuple[tuple[str, str], ...]:
        return (("Authorization", f"Bearer {key.reveal()}"),) if key else ()

    def decoder(self) -> ChatDecoder:
        """Return a decoder for one answer."""
        return ChatDecoder(self.name, self._endpoint.limits)

    def encode(self, request: ModelRequest) -> bytes:
        """Return the body of the request, with the fields that this server accepts."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [_encode_message(message) for message in paired(request.messages)],
            "stream": True,
        }
        if self._dialect.stream_options:
            body["stream_options"] = {"include_usage": True}
        if request.tools:
            body["tools"] = [{"type": "function", "function": _encode_tool(tool)} for tool in request.tools]
            if request.choice is not None:
                body.update(_encode_choice(request.choice))
        options = request.options
        max_tokens = options.max_tokens or request.max_tokens or self._max_tokens
        if max_tokens:
            body[self._dialect.token_field] = max_tokens
        if request.temperature is not None and self._dialect.temperature:
            body["temperature"] = request.temperature
        if options is not NO_OPTIONS:
            body.update(_encode_options(options))
        return msgspec.json.encode(body)

    def adapt_to_refusal(self, body: bytes, error: ModelError) -> bool:
        """Leave out an optional field that the server has just refused, from now on. Fields that the client asked for are never left out."""
        if error.status not in (400, 422):
            return False
        dialect, words = self._dialect, error.message
        if "stream_options" in words and b'"stream_options"' in body:
            dialect.stream_options = False
        elif "max_completion_tokens" in words and b'"max_tokens"' in body:
            dialect.token_field = "max_completion_tokens"
        elif "temperature" in words and b'"temperature"' in body and dialect.temperature:
            dialect.temperature = False
        else:
            return False
        return True


def _encode_tool(tool: ToolSpec) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    if tool.strict is not None:
        function["strict"] = tool.strict
    return function


def _encode_choice(choice: ToolChoice) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if choice.mode == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice.mode != "auto":
        fields["tool_choice"] = choice.mode
    if choice.parallel is not None:
        fields["parallel_tool_calls"] = choice.parallel
    return fields


def _encode_options(options: ModelOptions) -> dict[str, Any]:
    """Return the fields that the client asked for, except the limit of tokens, whose name depends on the server."""
    fields: dict[str, Any] = {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "stop": list(options.stop) or None,
        "seed": options.seed,
        "reasoning_effort": options.reasoning_effort or None,
        "verbosity": options.verbosity or None,
        "response_format": options.response_format,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _encode_message(message: Message) -> dict[str, Any]:
    match message.role:
        case "tool":
            return {"role": "tool", "tool_call_id": message.tool_call_id, "content": result_text(message)}
        case "assistant":
            encoded: dict[str, Any] = {
                "role": "assistant",
                "content": message.text or (None if message.tool_calls else ""),
            }
            if message.tool_calls:
                encoded["tool_calls"] = [_encode_call(call) for call in message.tool_calls]
            return encoded
        case role:
            content = message.content if isinstance(message.content, str) else [dict(part) for part in message.content]
            return {"role": role, "content": content}


def _encode_call(call: ToolCall) -> dict[str, Any]:
    identity = call.id or f"call_{uuid.uuid4().hex[:24]}"
    return {"id": identity, "type": "function", "function": {"name": call.name, "arguments": call.arguments or "{}"}}
