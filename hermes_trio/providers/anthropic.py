"""The Anthropic Messages protocol.

`AnthropicModel` is the model; `MessagesDecoder` reads one streamed answer. The transcript is translated both ways: system messages become the system
prompt, tool calls and results become content blocks, adjacent messages of one role are merged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
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
from hermes_trio.runtime.ports import Content, Message

from .failures import failure_error
from .http_model import ANTHROPIC_URL, AnswerLimits, HttpModel, HttpModelOptions
from .tool_calls import CallAssembler
from .transcript import arguments_object, paired, result_text

API_VERSION: Final = "2023-06-01"
CONTEXT_WINDOW: Final = 200_000
MAX_TOKENS: Final = 8192
"""The limit of tokens if none is configured: the protocol requires one."""

_FINISH: Final[Mapping[str, str]] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}

_DATA_URL: Final = re.compile(r"data:(?P<type>[\w.+/-]+);base64,(?P<data>[A-Za-z0-9+/=\s]+)", re.ASCII)

Block = dict[str, Any]


class _Usage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None


class _Delta(msgspec.Struct):
    type: str = ""
    text: str = ""
    thinking: str = ""
    partial_json: str = ""
    stop_reason: str | None = None


class _Block(msgspec.Struct):
    type: str = ""
    id: str = ""
    name: str = ""
    text: str = ""
    thinking: str = ""
    input: Any = None


class _Message(msgspec.Struct):
    usage: _Usage | None = None


class _Event(msgspec.Struct):
    type: str = ""
    index: int = 0
    message: _Message | None = None
    delta: _Delta | None = None
    content_block: _Block | None = None
    usage: _Usage | None = None
    error: dict[str, Any] | str | None = None


class _Whole(msgspec.Struct):
    content: list[_Block]
    stop_reason: str | None = None
    usage: _Usage | None = None


_events: Final = msgspec.json.Decoder(_Event)
_wholes: Final = msgspec.json.Decoder(_Whole)


@final
class MessagesDecoder:
    """Decodes one answer of the Messages API, streamed or whole."""

    def __init__(self, name: str, limits: AnswerLimits) -> None:
        self._name = name
        self._calls = CallAssembler(name, limits)
        self._stop_reason = ""
        self._usage = _Usage()
        self._finished = False

    @property
    def finished(self) -> bool:
        """Return whether the answer is complete."""
        return self._finished

    def event(self, event: ServerEvent) -> Sequence[ModelEvent]:
        """Read one event of the stream. Unknown kinds are skipped, as the protocol requires."""
        try:
            read = _events.decode(event.data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            read = self._read_leniently(event.data)
        match read.type or event.name:
            case "message_start":
                if read.message is not None and read.message.usage is not None:
                    self._usage = read.message.usage
            case "content_block_start":
                return self._start(read.index, read.content_block)
            case "content_block_delta":
                return self._delta(read.index, read.delta)
            case "message_delta":
                if read.delta is not None and read.delta.stop_reason:
                    self._stop_reason = read.delta.stop_reason
                if read.usage is not None:
                    self._usage = _later(self._usage, read.usage)
            case "message_stop":
                return self.end()
            case "error":
                raise failure_error(self._name, {"error": read.error})
            case _:
                pass
        return ()

    def whole(self, body: bytes) -> Sequence[ModelEvent]:
        """Read the answer of a server that does not stream."""
        try:
            read = _wholes.decode(body.decode("utf-8", "replace"))
        except (msgspec.DecodeError, RecursionError) as error:
            raise ModelError(
                ModelErrorKind.BROKEN_STREAM, f"{self._name}: the answer cannot be read: {error}"
            ) from None
        events: list[ModelEvent] = []
        for index, block in enumerate(read.content):
            events.extend(self._start(index, block))
        self._usage = read.usage or self._usage
        self._stop_reason = read.stop_reason or "end_turn"
        return [*events, *self.end()]

    def end(self) -> Sequence[ModelEvent]:
        """Return the remaining tool calls and the final event at the end of the stream. Raises `ModelError` if the answer is incomplete."""
        if not self._stop_reason:
            raise ModelError(
                ModelErrorKind.BROKEN_STREAM, f"{self._name}: the answer was cut off before it was finished"
            )
        self._finished = True
        calls = self._calls.finish()
        reason = _FINISH.get(self._stop_reason, "stop")
        return [
            *(ToolCallReady(call) for call in calls),
            Finished(finish_reason=reason, usage=_read_usage(self._usage)),
        ]

    def _read_leniently(self, data: bytes) -> _Event:
        try:
            return _events.decode(data.decode("utf-8", "replace"))
        except (msgspec.DecodeError, RecursionError) as error:
            raise ModelError(
                ModelErrorKind.BROKEN_STREAM, f"{self._name}: an event of the answer cannot be read: {error}"
            ) from None

    def _start(self, index: int, block: _Block | None) -> Sequence[ModelEvent]:
        if block is None:
            return ()
        if block.type == "tool_use":
            # The API sends an empty input here and the real one in pieces; servers that imitate it may send all of
            # it at once.
            arguments = msgspec.json.encode(block.input).decode() if block.input else ""
            self._calls.add(index, block.id, block.name, arguments)
        elif block.type == "text" and block.text:
            return (TextDelta(block.text),)
        elif block.type == "thinking" and block.thinking:
            return (ReasoningDelta(block.thinking),)
        return ()

    def _delta(self, index: int, delta: _Delta | None) -> Sequence[ModelEvent]:
        if delta is None:
            return ()
        if delta.type == "text_delta" and delta.text:
            return (TextDelta(delta.text),)
        if delta.type == "thinking_delta" and delta.thinking:
            return (ReasoningDelta(delta.thinking),)
        if delta.type == "input_json_delta":
            self._calls.add(index, "", "", delta.partial_json)
        return ()


def _later(first: _Usage, last: _Usage) -> _Usage:
    """Merge two reports of usage. Counts are cumulative: a count that the later report leaves out keeps its value."""

    def pick(new: int | None, old: int | None) -> int | None:
        return old if new is None else new

    return _Usage(
        input_tokens=pick(last.input_tokens, first.input_tokens),
        output_tokens=pick(last.output_tokens, first.output_tokens),
        cache_creation_input_tokens=pick(last.cache_creation_input_tokens, first.cache_creation_input_tokens),
        cache_read_input_tokens=pick(last.cache_read_input_tokens, first.cache_read_input_tokens),
    )


def _read_usage(usage: _Usage) -> Usage:
    written, read = usage.cache_creation_input_tokens or 0, usage.cache_read_input_tokens or 0
    return Usage(
        # The API counts cached tokens apart from the input; we count the whole prompt for every provider.
        input_tokens=(usage.input_tokens or 0) + written + read,
        output_tokens=usage.output_tokens or 0,
        cache_read_tokens=read,
        cache_write_tokens=written,
        api_calls=1,
    )


@final
class AnthropicModel(HttpModel):
    """A model behind an Anthropic Messages endpoint.

    `cache` marks the prompt so that the next call of a conversation reads it from the cache. `bearer` is
    for compatible servers that want the key as a bearer token instead of in the API's own header.
    """

    provider = "anthropic"
    default_url = ANTHROPIC_URL
    default_window = CONTEXT_WINDOW

    def __init__(
        self, model: str, *, cache: bool = True, bearer: bool = False, **options: Unpack[HttpModelOptions]
    ) -> None:
        self._cache = cache
        self._bearer = bearer
        super().__init__(model, **options)

    def _address(self, base: str) -> str:
        # Both spellings of the base URL are in use, with the version and without.
        return f"{base.removesuffix('/v1')}/v1/messages"

    def _headers(self, key: Secret) -> tuple[tuple[str, str], ...]:
        version = ("anthropic-version", API_VERSION)
        if not key:
            return (version,)
        return (("Authorization", f"Bearer {key.reveal()}") if self._bearer else ("x-api-key", key.reveal()), version)

    def decoder(self) -> MessagesDecoder:
        """Return a decoder for one answer."""
        return MessagesDecoder(self.name, self._endpoint.limits)

    def encode(self, request: ModelRequest) -> bytes:
        """Return the body of the request. Raises `ModelError` without a message of a user."""
        messages = _encode_messages(request.messages)
        if not messages:
            raise ModelError(ModelErrorKind.BAD_REQUEST, f"{self.name}: a request needs at least one message of a user")
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.options.max_tokens or request.max_tokens or self._max_tokens or MAX_TOKENS,
            "messages": messages,
            "stream": True,
        }
        system = "\n\n".join(message.text for message in request.messages if message.role in _SYSTEM and message.text)
        if system:
            block: Block = {"type": "text", "text": system}
            body["system"] = [self._marked(block)]
        if request.tools:
            body["tools"] = [_encode_tool(tool) for tool in request.tools]
            if request.choice is not None:
                body["tool_choice"] = _encode_choice(request.choice)
        if request.temperature is not None:
            body["temperature"] = min(request.temperature, 1.0)
        if request.options is not NO_OPTIONS:
            body.update(self._encode_options(request.options))
        last = messages[-1]["content"]
        last[-1] = self._marked(last[-1])
        return msgspec.json.encode(body)

    def adapt_to_refusal(self, body: bytes, error: ModelError) -> bool:
        """Stop marking the prompt for the cache if this server does not accept the mark."""
        if error.status in (400, 422) and "cache_control" in error.message and b'"cache_control"' in body:
            self._cache = False
            return True
        return False

    def _encode_options(self, options: ModelOptions) -> dict[str, Any]:
        """Return the fields that the client asked for. The API has no `seed`, and accepts a response format only as a JSON schema."""
        output: dict[str, Any] = {}
        if (effort := _EFFORTS.get(options.reasoning_effort, "")) != "":
            output["effort"] = effort
        if options.response_format is not None and options.response_format.get("type") != "text":
            described: Mapping[str, Any] = options.response_format.get("json_schema") or {}
            schema = described.get("schema")
            if schema is None:
                raise ModelError(
                    ModelErrorKind.BAD_REQUEST,
                    f"{self.name}: this model takes response_format with a JSON schema (type json_schema) only",
                )
            output["format"] = {"type": "json_schema", "schema": schema}
        fields: dict[str, Any] = {
            "temperature": None if options.temperature is None else min(options.temperature, 1.0),
            "top_p": options.top_p,
            "stop_sequences": list(options.stop) or None,
            "output_config": output or None,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def _marked(self, block: Block) -> Block:
        return {**block, "cache_control": {"type": "ephemeral"}} if self._cache else block


_SYSTEM: Final = frozenset({"system", "developer"})
_EFFORTS: Final[Mapping[str, str]] = {
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "xhigh",
    "max": "max",
}
_CHOICES: Final[Mapping[str, str]] = {"auto": "auto", "none": "none", "required": "any", "tool": "tool"}


def _encode_tool(tool: ToolSpec) -> dict[str, Any]:
    encoded: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description,
        "input_schema": tool.parameters,
    }
    if tool.strict:
        encoded["strict"] = True
    return encoded


def _encode_choice(choice: ToolChoice) -> dict[str, Any]:
    encoded: dict[str, Any] = {"type": _CHOICES[choice.mode]}
    if choice.mode == "tool":
        encoded["name"] = choice.name
    if choice.parallel is not None and choice.mode != "none":
        encoded["disable_parallel_tool_use"] = not choice.parallel
    return encoded


def _encode_messages(messages: Iterable[Message]) -> list[dict[str, Any]]:
    encoded: list[dict[str, Any]] = []

    def add(role: str, blocks: list[Block]) -> None:
        if not blocks:
            return
        if encoded and encoded[-1]["role"] == role:
            encoded[-1]["content"].extend(blocks)
        else:
            encoded.append({"role": role, "content": blocks})

    for message in paired(message for message in messages if message.role not in _SYSTEM):
        match message.role:
            case "tool":
                result: Block = {
                    "type": "tool_result",
                    "tool_use_id": _identifier(message.tool_call_id),
                    "content": result_text(message),
                }
                add("user", [result])
            case "assistant":
                blocks = _encode_content(message.text)
                for call in message.tool_calls:
                    blocks.append(
                        {
                            "type": "tool_use",
                            "id": _identifier(call.id),
                            "name": call.name,
                            "input": arguments_object(call),
                        }
                    )
                add("assistant", blocks)
            case _:
                add("user", _encode_content(message.content))
    if encoded and encoded[0]["role"] != "user":
        encoded.insert(0, {"role": "user", "content": [{"type": "text", "text": "(the conversation continues)"}]})
    return encoded


def _identifier(identity: str) -> str:
    """Return a tool call's id in the alphabet that the API accepts; ids in a transcript may come from another provider."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", identity) or "call"


def _encode_content(content: Content) -> list[Block]:
    if isinstance(content, str):
        # The API refuses blocks without any visible character.
        return [{"type": "text", "text": content}] if content.strip() else []
    blocks: list[Block] = []
    for part in content:
        if part.get("type") == "image_url":
            blocks.append({"type": "image", "source": _image_source(part)})
        else:
            blocks.extend(_encode_content(str(part.get("text") or "")))
    return blocks


def _image_source(part: Mapping[str, Any]) -> Block:
    image: Any = part.get("image_url")
    url = str(image.get("url", "") if isinstance(image, Mapping) else image or "")  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    if match := _DATA_URL.fullmatch(url):
        return {"type": "base64", "media_type": match["type"], "data": "".join(match["data"].split())}
    if url.startswith(("https://", "http://")):
        return {"type": "url", "url": url}
    raise ModelError(
        ModelErrorKind.BAD_REQUEST,
        "an image is given as an https:// address or as data:image/png;base64,…; this one begins with "
        + repr(url[:30]),
    )
