"""`POST /v1/messages` and `/v1/messages/count_tokens`: the turns of chat completions in the format of Anthropic's Messages API.

The key may be in `x-api-key`, and errors have that API's shape. Tools of the server run in the turn and are not shown; a call of a client tool is a
`tool_use` block that ends the turn, and a `tool_result` block continues it. A turn belongs to its request, as in chat completions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, cast

import msgspec

from hermes_trio.agent.compaction import estimate_tokens
from hermes_trio.agent.model import ModelOptions, ToolChoice, TurnOptions
from hermes_trio.http.auth import RequiredScope
from hermes_trio.http.client_retries import note_disconnect, refuse_retry
from hermes_trio.http.client_tools import function_tools, split_results
from hermes_trio.http.content import Content, flat_text, has_content, normalise, text_of
from hermes_trio.http.errors import ApiError, anthropic_error_type
from hermes_trio.http.inputs import detaches, loose_bool
from hermes_trio.http.parameters import (
    MESSAGES_PARAMETERS,
    check_parameters,
    format_option,
    number_option,
    stop_option,
    word_option,
)
from hermes_trio.http.requests import EventStream, HandlerResult, Request, Response
from hermes_trio.http.routing import Route
from hermes_trio.http.schemas import ON_DISCONNECT, LooseBool
from hermes_trio.http.streams import StreamWriter, named_event
from hermes_trio.runtime.outcome import Outcome, Usage
from hermes_trio.runtime.ports import Message, ToolCall, TurnInput
from hermes_trio.runtime.turn import Turn, TurnHooks

from .chat import (
    AskedTurn,
    failure_of,
    finish_reason_of,
    run_here_or_detached,
    stream_turn,
    turn_session,
    unseen_steps,
)

_STOP_REASONS: Final[Mapping[str, str]] = {
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
_MODES: Final[Mapping[str, str]] = {"auto": "auto", "any": "required", "tool": "tool", "none": "none"}
_SKIPPED_BLOCKS: Final = frozenset({"thinking", "redacted_thinking"})


class MessagesInput(msgspec.Struct):
    """One message of a request: text, or content blocks."""

    role: str
    content: Any


class CountRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a count of tokens."""

    messages: list[MessagesInput]
    model: str | None = None
    system: Any = None
    tools: Any = None
    tool_choice: Any = None
    cache_control: Any = None
    output_config: Any = None
    speed: Any = None
    thinking: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None


class MessagesRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a message. `docs/parameters.md` says which parameters are honoured, hints, or refused."""

    messages: list[MessagesInput]
    max_tokens: int
    model: str | None = None
    system: Any = None
    stream: LooseBool = False
    tools: Any = None
    tool_choice: Any = None
    temperature: Any = None
    top_p: Any = None
    stop_sequences: Any = None
    output_config: Any = None
    metadata: Any = None
    cache_control: Any = None
    service_tier: Any = None
    inference_geo: Any = None
    speed: Any = None
    diagnostics: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None
    thinking: Any = None
    top_k: Any = None
    container: Any = None
    context_management: Any = None
    mcp_servers: Any = None


class MessageUsage(msgspec.Struct):
    """Tokens of the whole turn, including all inner model calls."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class MessagesBody(msgspec.Struct):
    """The response."""

    id: str
    model: str
    content: list[dict[str, Any]]
    usage: MessageUsage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    type: str = "message"
    role: str = "assistant"


class TokenCount(msgspec.Struct):
    """An estimate of the tokens of the messages, the system prompt and the client's tools. The server's own are not counted."""

    input_tokens: int


_decoder: Final = msgspec.json.Decoder(MessagesRequest)
_count_decoder: Final = msgspec.json.Decoder(CountRequest)


def _usage(usage: Usage) -> MessageUsage:
    """Return the usage in the form of the Messages API, which counts cached tokens separately."""
    cached = usage.cache_read_tokens + usage.cache_write_tokens
    return MessageUsage(
        max(0, usage.input_tokens - cached), usage.output_tokens, usage.cache_write_tokens, usage.cache_read_tokens
    )


# -- reading -----------------------------------------------------------------------------------------------------------------------


def _blocks(content: Any, place: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or any(not isinstance(block, dict) for block in cast("list[Any]", content)):
        raise ApiError(400, f"{place} must be a string or a list of content blocks.", param=place)
    return cast("list[dict[str, Any]]", content)


def _image(block: dict[str, Any], place: str) -> dict[str, Any]:
    source: Any = block.get("source")
    table = cast("dict[str, Any]", source) if isinstance(source, dict) else {}
    if table.get("type") == "base64":
        return {"type": "image_url", "image_url": {"url": f"data:{table.get('media_type')};base64,{table.get('data')}"}}
    if table.get("type") == "url":
        return {"type": "image_url", "image_url": {"url": table.get("url")}}
    raise ApiError(
        400, f"{place}.source must be base64 or url.", code="unsupported_content_type", param=f"{place}.source"
    )


def _identity(block: dict[str, Any], name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str) or not value:
        raise ApiError(400, f"{place}.{name} must be a string.", param=f"{place}.{name}")
    return value


def _result(block: dict[str, Any], place: str) -> Message:
    content: Any = block.get("content")
    text = content if isinstance(content, str) else flat_text(content)
    if block.get("is_error") and not text:
        text = "the tool failed"
    return Message(role="tool", content=text, tool_call_id=_identity(block, "tool_use_id", place))


def _read_messages(sent: list[MessagesInput]) -> tuple[list[Message], list[str]]:
    """Return the messages, each with its place in the body."""
    messages: list[Message] = []
    places: list[str] = []

    def add(message: Message, place: str) -> None:
        messages.append(message)
        places.append(place)

    for number, message in enumerate(sent):
        where = f"messages[{number}]"
        if message.role not in ("user", "assistant"):
            raise ApiError(400, f"{where}.role must be user or assistant.", param=f"{where}.role")
        parts: list[dict[str, Any]] = []
        calls: list[ToolCall] = []
        for index, block in enumerate(_blocks(message.content, f"{where}.content")):
            place = f"{where}.content[{index}]"
            match block.get("type"):
                case "text":
                    parts.append({"type": "text", "text": block.get("text")})
                case "image" if message.role == "user":
                    parts.append(_image(block, place))
                case "tool_result" if message.role == "user":
                    add(_result(block, place), place)
                case "tool_use" if message.role == "assistant":
                    arguments = msgspec.json.encode(block.get("input") or {}).decode()
                    call_id, name = _identity(block, "id", place), _identity(block, "name", place)
                    calls.append(ToolCall(id=call_id, name=name, arguments=arguments))
                case kind if kind in _SKIPPED_BLOCKS:
                    pass
                case kind:
                    raise ApiError(
                        400,
                        f"{place} has the type {kind!r}, which a message of the {message.role} cannot have here.",
                        code="unsupported_content_type",
                        param=f"{place}.type",
                    )
        if parts or calls:
            content = normalise(parts, f"{where}.content") if parts else ""
            add(Message(role=message.role, content=content, tool_calls=tuple(calls)), where)
    return messages, places


def _choice(value: Any) -> ToolChoice | None:
    if value is None:
        return None
    table = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    mode = _MODES.get(str(table.get("type")))
    name: Any = table.get("name")
    if mode is None or (mode == "tool" and not (isinstance(name, str) and name)):
        raise ApiError(
            400,
            "tool_choice must be an object of type auto, any, none, or tool with a name.",
            code="invalid_value",
            param="tool_choice",
        )
    serial: Any = table.get("disable_parallel_tool_use")
    return ToolChoice(
        mode=mode,
        name=name if mode == "tool" else "",
        parallel=not serial if isinstance(serial, bool) else None,
    )


def _options(body: MessagesRequest) -> TurnOptions:
    tools = function_tools(body.tools, "input_schema")
    choice = _choice(body.tool_choice)
    config = cast("dict[str, Any]", body.output_config) if isinstance(body.output_config, dict) else {}
    number_option(body.max_tokens, "max_tokens", 1, 10_000_000)
    return TurnOptions(
        model=ModelOptions(
            max_tokens=body.max_tokens,
            temperature=number_option(body.temperature, "temperature", 0, 1),
            top_p=number_option(body.top_p, "top_p", 0, 1),
            stop=stop_option(body.stop_sequences, "stop_sequences"),
            reasoning_effort=word_option(config.get("effort"), "output_config.effort"),
            response_format=format_option(config.get("format"), "output_config.format", flat=True),
        ),
        tools=tools,
        choice=choice,
        server_tools=not (choice is not None and choice.mode == "none" and not tools),
    )


def _read(body: MessagesRequest, public_model: str) -> AskedTurn:
    messages, places = _read_messages(body.messages)
    history, results, last = split_results(messages, places)
    prompt = "" if last is None else cast("Content", last.content)
    if not results and not has_content(prompt):
        raise ApiError(
            400, "The last message must be the user's, with text, an image or a tool_result.", param="messages"
        )
    instructions = flat_text(body.system) if body.system is not None else ""
    first = next((message.text for message in messages if message.role == "user"), "")
    options = msgspec.structs.replace(_options(body), results=tuple(results))
    return AskedTurn(
        TurnInput(
            text=text_of(prompt),
            content="" if isinstance(prompt, str) else prompt,
            history=tuple(history),
            instructions=instructions,
            model=body.model or "",
            payload=options.payload(),
        ),
        f"{instructions}\n{first}",
        body.model or public_model,
        loose_bool(body.stream, False),
        None,
        False,
        bool(options.tools) or any(message.tool_calls for message in messages),
    )


# -- answering ---------------------------------------------------------------------------------------------------------------------


async def create_message(request: Request) -> HandlerResult:
    """Answer one conversation turn."""
    body = await request.json(_decoder)
    check_parameters(MESSAGES_PARAMETERS, body)
    asked = _read(body, request.core.public_model)
    run_id = request.core.ids.make("run_") if detaches(request) else ""
    message_id = request.core.ids.make("msg_", 24)
    if asked.stream:
        return EventStream(lambda writer: _stream(request, asked, message_id, writer, run_id))
    await refuse_retry(request)
    async with turn_session(request, asked) as (claim, input):

        def also(turn: Turn, outcome: Outcome) -> list[object]:
            return unseen_steps(request, asked, outcome) + note_disconnect(request, turn, outcome)

        outcome = await run_here_or_detached(request, claim, input, TurnHooks(also=also), run_id)
    failure = _failure(outcome)
    if failure is not None:
        raise failure
    content: list[dict[str, Any]] = []
    if outcome.reasoning:
        content.append({"type": "thinking", "thinking": outcome.reasoning, "signature": ""})
    if outcome.text:
        content.append({"type": "text", "text": outcome.text})
    content += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _arguments(call)} for call in outcome.calls
    ]
    answer = MessagesBody(message_id, asked.model, content, _usage(outcome.usage), _stop_reason(outcome))
    return Response.of(answer, headers=claim.headers(run_id))


def _failure(outcome: Outcome) -> ApiError | None:
    """Return the error for an outcome. The format has no incomplete response: the text of a failed turn is in its session."""
    failure = failure_of(outcome)
    if failure is None and finish_reason_of(outcome) == "error":
        failure = failure_of(msgspec.structs.replace(outcome, text=""))
    return failure


def _stop_reason(outcome: Outcome) -> str:
    return _STOP_REASONS.get(finish_reason_of(outcome), "end_turn")


def _arguments(call: ToolCall) -> Any:
    try:
        return msgspec.json.decode(call.arguments or "{}")
    except msgspec.DecodeError:
        return {"_invalid_arguments": call.arguments}


async def _stream(request: Request, asked: AskedTurn, message_id: str, writer: StreamWriter, run_id: str) -> None:
    async with turn_session(request, asked) as (claim, input):
        start = MessagesBody(message_id, asked.model, [], MessageUsage(0, 0))
        events = _MessageEvents(start, writer, partial(claim.headers, run_id))
        hooks = TurnHooks(also=lambda turn, outcome: unseen_steps(request, asked, outcome))
        await stream_turn(request, claim, input, events, hooks, run_id=run_id)


class _MessageEvents:
    """Writes the events of a turn as those of the Messages API. Unwritten text is joined."""

    def __init__(
        self, start: MessagesBody, writer: StreamWriter, headers: Callable[[], list[tuple[bytes, bytes]]]
    ) -> None:
        self._start = start
        self._writer = writer
        self._headers = headers
        self._index = -1
        self._open = ""
        self._pending: list[str] = []
        self._said = False

    def _put(self, name: str, **fields: Any) -> None:
        self._writer.put(named_event(name, {"type": name, **fields}))

    def _begin(self, kind: str, block: dict[str, Any]) -> None:
        self._close()
        self._index += 1
        self._open = kind
        self._put("content_block_start", index=self._index, content_block={"type": kind, **block})

    def _join(self) -> None:
        if self._pending:
            text = "".join(self._pending)
            self._pending.clear()
            field = "thinking" if self._open == "thinking" else "text"
            delta = {"type": f"{field}_delta", field: text}
            self._put("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> None:
        if self._open:
            self._join()
            self._open = ""
            self._put("content_block_stop", index=self._index)

    def take(self, event: Mapping[str, Any]) -> None:
        """Take an event. Text and thinking are blocks; a tool of the server ends the block before it."""
        match event["event"]:
            case "message.delta":
                self._said = True
                if self._open != "text":
                    self._begin("text", {"text": ""})
                self._pending.append(event["delta"])
            case "reasoning.delta":
                if self._open != "thinking":
                    self._begin("thinking", {"thinking": "", "signature": ""})
                self._pending.append(event["delta"])
            case "tool.started":
                self._close()
            case _:
                pass

    async def open(self) -> None:
        """Write the head, and an empty message."""
        first = named_event("message_start", {"type": "message_start", "message": self._start})
        await self._writer.open(first, self._headers())

    async def write(self) -> None:
        """Write what was taken."""
        self._join()
        await self._writer.flush()

    async def keep_alive(self) -> None:
        """Write a ping."""
        self._put("ping")
        await self._writer.flush()

    async def end(self, outcome: Outcome) -> None:
        """Write the calls of client tools, then the end; or the turn's error."""
        failure = _failure(outcome)
        if failure is not None:
            self._close()
            self._put("error", error={"type": anthropic_error_type(failure.status), "message": str(failure)})
            await self._writer.flush()
            return
        if outcome.text and not self._said:
            self.take({"event": "message.delta", "delta": outcome.text})
        self._close()
        for call in outcome.calls:
            self._begin("tool_use", {"id": call.id, "name": call.name, "input": {}})
            delta = {"type": "input_json_delta", "partial_json": call.arguments or "{}"}
            self._put("content_block_delta", index=self._index, delta=delta)
            self._close()
        delta = {"stop_reason": _stop_reason(outcome), "stop_sequence": None}
        self._put("message_delta", delta=delta, usage=_usage(outcome.usage))
        self._put("message_stop")
        await self._writer.flush()


async def count_tokens(request: Request) -> HandlerResult:
    """Estimate the tokens of a request."""
    body = await request.json(_count_decoder)
    messages, _ = _read_messages(body.messages)
    if not messages:
        raise ApiError(400, "messages must hold a message of the user.", param="messages")
    if body.system is not None:
        messages.append(Message(role="system", content=flat_text(body.system)))
    return Response.of(TokenCount(estimate_tokens(messages, function_tools(body.tools, "input_schema"))))


def message_routes() -> list[Route]:
    """Return the routes of this module."""
    return [
        Route(
            name="messages",
            method="POST",
            path="/v1/messages",
            handler=create_message,
            access=RequiredScope.CHAT,
            turns=True,
            streams=True,
            summary="Answer the last message of a conversation, in the format of Anthropic's Messages API",
            body=MessagesRequest,
            answer=MessagesBody,
            errors=(400, 404, 424, 429, 502, 503),
            parameters=(ON_DISCONNECT,),
            tag="messages",
            dialect="anthropic",
        ),
        Route(
            name="count_tokens",
            method="POST",
            path="/v1/messages/count_tokens",
            handler=count_tokens,
            access=RequiredScope.CHAT,
            summary="Estimate the tokens of a message",
            body=CountRequest,
            answer=TokenCount,
            errors=(400,),
            tag="messages",
            dialect="anthropic",
        ),
    ]
