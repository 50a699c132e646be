"""`POST /v1/chat/completions`, plain and streaming.

A turn belongs to its request: a client that disconnects cancels it at once, and the partial answer is stored as incomplete. With `X-Hermes-On-Disconnect:
detach` a run does the turn instead, which continues when the client disconnects.

Tools of the server run in the turn and are not in `tool_calls`; a turn in which the model calls a tool of the client ends with that call.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any, Final, cast

import msgspec
import trio
from msgspec import Meta

from hermes_trio.agent.model import ModelOptions, TurnOptions
from hermes_trio.http.auth import RequiredScope
from hermes_trio.http.client_retries import note_disconnect, refuse_retry
from hermes_trio.http.client_tools import chat_choice, chat_tool_calls, chat_tools, split_results
from hermes_trio.http.content import TEXT_LENGTH, Content, flat_text, has_content, normalise, text_of
from hermes_trio.http.errors import NOT_AGAIN, ApiError, redact_text, retry_after
from hermes_trio.http.inputs import (
    detaches,
    idempotency_key,
    loose_bool,
    session_id_header,
    session_key_header,
)
from hermes_trio.http.parameters import (
    CHAT_PARAMETERS,
    format_option,
    number_option,
    read_plain_or_full,
    stop_option,
    whole_option,
    word_option,
)
from hermes_trio.http.requests import EventStream, HandlerResult, Request, Response, encode_json
from hermes_trio.http.routing import Route
from hermes_trio.http.schemas import ON_DISCONNECT, LooseBool, MessageContent
from hermes_trio.http.streams import StreamWakeup, StreamWriter, TurnEvents, named_event
from hermes_trio.http.turns import SessionClaim
from hermes_trio.http.unseen_steps import kept_steps, restore_steps
from hermes_trio.runtime.errors import AgentFailed, BudgetExhausted
from hermes_trio.runtime.event_log import LogEvent
from hermes_trio.runtime.outcome import CancelCause, Outcome, TurnState, Usage
from hermes_trio.runtime.ports import Message, ToolCall, TurnInput
from hermes_trio.runtime.run import Run
from hermes_trio.runtime.turn import NO_HOOKS, Turn, TurnHooks

from .run_events import TERMINAL


class StreamOptions(msgspec.Struct):
    """Options of a streaming client. `include_tool_events` is ours: named events about tools."""

    include_usage: LooseBool = None
    include_tool_events: LooseBool = False


class ChatMessage(msgspec.Struct):
    """One message of a request. Other keys are accepted and ignored."""

    role: str
    content: MessageContent = None
    tool_calls: Annotated[Any, Meta(description="Calls of client tools, as they were answered.")] = None
    tool_call_id: Annotated[Any, Meta(description="The call that a message of role `tool` is the result of.")] = None


class PlainChatRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The fields that most bodies have, and no others."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    model: str | None = None
    stream: LooseBool = False
    stream_options: StreamOptions | None = None


class ChatRequest(PlainChatRequest, forbid_unknown_fields=True):
    """The body of a chat completion. `docs/parameters.md` says which parameters are honoured, hints, or refused."""

    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    temperature: Any = None
    top_p: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    stop: Any = None
    seed: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    response_format: Any = None
    user: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    metadata: Any = None
    store: Any = None
    n: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    logit_bias: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    moderation: Any = None
    functions: Any = None
    function_call: Any = None


class ChatUsage(msgspec.Struct):
    """Tokens of the whole turn, including all inner model calls."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CalledFunction(msgspec.Struct):
    """A client tool and the JSON text of its arguments."""

    name: str
    arguments: str


class CalledTool(msgspec.Struct):
    """A call that the client has to run."""

    id: str
    function: CalledFunction
    type: str = "function"


class AssistantMessage(msgspec.Struct):
    """The assistant's message."""

    content: str | None
    role: str = "assistant"
    tool_calls: list[CalledTool] | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    """The only choice."""

    message: AssistantMessage
    finish_reason: str
    index: int = 0


class Incomplete(msgspec.Struct):
    """Why a turn with text is incomplete."""

    completed: bool
    partial: bool
    failed: bool
    error: str
    error_code: str


class ChatCompletion(msgspec.Struct, omit_defaults=True):
    """The response."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage
    hermes: Incomplete | None = None


_plain: Final = msgspec.json.Decoder(PlainChatRequest)
_full: Final[msgspec.json.Decoder[PlainChatRequest]] = msgspec.json.Decoder(ChatRequest)


def usage_of(usage: Usage) -> ChatUsage:
    """Return the usage in the form of chat completions."""
    return ChatUsage(usage.input_tokens, usage.output_tokens, usage.total_tokens)


class AskedTurn(msgspec.Struct):
    """A parsed request. Never changed; not frozen, which would double the cost of making one for every request."""

    input: TurnInput
    opening: str
    model: str
    stream: bool
    include_usage: bool | None
    tool_events: bool
    tools: bool = False
    """Whether client tools are involved: their calls may be in the history, or end the turn."""


def _read(body: PlainChatRequest, public_model: str) -> AskedTurn:
    system: list[str] = []
    kept: list[tuple[str, Content]] = []
    for number, message in enumerate(body.messages):
        role = message.role
        if message.tool_calls or role == "tool":
            return _read_with_calls(body, public_model)
        if role == "user" or role == "assistant":
            content = message.content
            if type(content) is not str or len(content) > TEXT_LENGTH:
                content = normalise(content, f"messages[{number}].content")
            kept.append((role, content))
        elif role == "system" or role == "developer":
            system.append(flat_text(message.content))
    if not kept:
        raise ApiError(400, "messages must hold a message of the user.", param="messages")
    _, prompt = kept.pop()
    if not has_content(prompt):
        raise ApiError(400, "The last message has neither text nor an image.", param="messages")
    text = text_of(prompt)
    first = next((text_of(content) for role, content in kept if role == "user"), text) if kept else text
    history = tuple([Message(role=role, content=content) for role, content in kept]) if kept else ()
    instructions = "\n".join(system)
    if type(body) is not PlainChatRequest or body.stream_options is not None:
        return _asked(body, public_model, instructions, prompt, first, history)
    input = TurnInput(
        text=text,
        content="" if isinstance(prompt, str) else prompt,
        history=history,
        instructions=instructions,
        model=body.model or "",
    )
    stream = body.stream is not False and loose_bool(body.stream, False)
    return AskedTurn(input, f"{instructions}\n{first}", body.model or public_model, stream, None, False)


def _read_with_calls(body: PlainChatRequest, public_model: str) -> AskedTurn:
    """Parse a conversation in which client tools were called."""
    system: list[str] = []
    messages: list[Message] = []
    places: list[str] = []
    for number, message in enumerate(body.messages):
        where = f"messages[{number}]"
        if message.role in ("system", "developer"):
            system.append(flat_text(message.content))
            continue
        content = normalise(message.content, f"{where}.content")
        if message.role == "tool":
            call_id: Any = message.tool_call_id
            if not isinstance(call_id, str) or not call_id:
                raise ApiError(400, f"{where}.tool_call_id is missing.", param=f"{where}.tool_call_id")
            messages.append(Message(role="tool", content=content, tool_call_id=call_id))
        elif message.role == "assistant":
            calls = chat_tool_calls(message.tool_calls, f"{where}.tool_calls") if message.tool_calls else ()
            messages.append(Message(role="assistant", content=content, tool_calls=calls))
        elif message.role == "user":
            messages.append(Message(role="user", content=content))
        else:
            continue
        places.append(where)
    history, results, last = split_results(messages, places)
    prompt = "" if last is None else cast("Content", last.content)
    if not results and not has_content(prompt):
        raise ApiError(400, "The last message has neither text nor an image.", param="messages")
    first = next((message.text for message in messages if message.role == "user"), "")
    return _asked(body, public_model, "\n".join(system), prompt, first, tuple(history), tuple(results), tools=True)


def _asked(
    body: PlainChatRequest,
    public_model: str,
    instructions: str,
    prompt: Content,
    first: str,
    history: tuple[Message, ...],
    results: tuple[Message, ...] = (),
    *,
    tools: bool = False,
) -> AskedTurn:
    input = TurnInput(
        text=text_of(prompt),
        content="" if isinstance(prompt, str) else prompt,
        history=history,
        instructions=instructions,
        model=body.model or "",
    )
    if results or isinstance(body, ChatRequest):
        options = msgspec.structs.replace(_options(body), results=results)
        tools = tools or bool(options.tools)
        input = msgspec.structs.replace(input, payload=options.payload())
    options = body.stream_options
    return AskedTurn(
        input,
        f"{instructions}\n{first}",
        body.model or public_model,
        loose_bool(body.stream, False),
        None if options is None or options.include_usage is None else loose_bool(options.include_usage, False),
        options is not None and loose_bool(options.include_tool_events, False),
        tools,
    )


def _options(body: PlainChatRequest) -> TurnOptions:
    """Return the client's options for the model, and its tools."""
    if not isinstance(body, ChatRequest):
        return TurnOptions()
    limit = whole_option(body.max_tokens, "max_tokens", 1, 10_000_000)
    limit = whole_option(body.max_completion_tokens, "max_completion_tokens", 1, 10_000_000) or limit
    tools = chat_tools(body.tools)
    choice = chat_choice(body.tool_choice, body.parallel_tool_calls)
    return TurnOptions(
        model=ModelOptions(
            max_tokens=limit,
            temperature=number_option(body.temperature, "temperature", 0, 2),
            top_p=number_option(body.top_p, "top_p", 0, 1),
            stop=stop_option(body.stop, "stop"),
            seed=whole_option(body.seed, "seed", -(2**63), 2**63 - 1),
            reasoning_effort=word_option(body.reasoning_effort, "reasoning_effort"),
            verbosity=word_option(body.verbosity, "verbosity"),
            response_format=format_option(body.response_format, "response_format", flat=False),
        ),
        tools=tools,
        choice=choice,
        server_tools=not (choice is not None and choice.mode == "none" and not tools),
    )


@asynccontextmanager
async def turn_session(request: Request, asked: AskedTurn) -> AsyncIterator[tuple[SessionClaim, TurnInput]]:
    """Return the session of a request and its input: a named session has its own transcript."""
    turns = request.core.turns
    named, key = session_id_header(request), session_key_header(request)
    if not named:
        input = asked.input
        if asked.tools and input.history:
            steps = await restore_steps(request.core.store, request.caller.tenant, asked.opening, input.history)
            input = msgspec.structs.replace(input, history=tuple(steps))
        with turns.derived(request.caller, asked.opening, key) as claim:
            yield claim, input
        return
    claim = await turns.named(request.caller, named, key)
    instructions = "\n".join(text for text in (claim.prompt, asked.input.instructions) if text)
    yield claim, msgspec.structs.replace(asked.input, history=None, instructions=instructions)


async def create_chat_completion(request: Request) -> HandlerResult:
    """Answer one conversation turn."""
    body = await read_plain_or_full(request, _plain, _full, CHAT_PARAMETERS)
    asked = _read(body, request.core.public_model)
    key = session_key_header(request)
    run_id = request.core.ids.make("run_") if detaches(request) else ""
    if asked.stream:
        return EventStream(lambda writer: _stream(request, asked, writer, run_id))
    await refuse_retry(request)
    once_key = idempotency_key(request)
    named = session_id_header(request)
    if not once_key and not named and not asked.tools and not run_id:
        # Most requests: no context that is not needed is opened for them.
        with request.core.turns.derived(request.caller, asked.opening, key) as claim:
            hooks = TurnHooks(also=partial(note_disconnect, request))
            outcome = await request.core.turns.run(claim, asked.input, hooks)
        return _render(request, asked, outcome, claim.headers())
    route = f"chat {named} {key}"
    async with request.core.replies.once(request.caller.tenant, route, once_key, await request.body()) as once:
        if once.replayed is not None:
            return once.replayed
        async with turn_session(request, asked) as (claim, input):
            rendered: list[Response] = []

            def also(turn: Turn, outcome: Outcome) -> list[object]:
                rendered.append(_render(request, asked, outcome, claim.headers(run_id)))
                records = once.record(rendered[0]) + unseen_steps(request, asked, outcome)
                return records + note_disconnect(request, turn, outcome)

            outcome = await run_here_or_detached(request, claim, input, TurnHooks(also=also), run_id)
    if rendered and outcome.committed:
        return rendered[0]
    return _render(request, asked, outcome, claim.headers(run_id))


def unseen_steps(request: Request, asked: AskedTurn, outcome: Outcome) -> list[object]:
    """Return the steps of a turn that its client does not see, if it ended with a call of a client tool."""
    if not outcome.calls:
        return []
    return kept_steps(request.caller.tenant, asked.opening, outcome.messages, outcome.calls)


async def run_here_or_detached(
    request: Request, claim: SessionClaim, input: TurnInput, hooks: TurnHooks, run_id: str
) -> Outcome:
    """Run a request's turn in this task or, with `run_id`, in a run, and wait for its end.

    Cancelling means that the client has disconnected: a turn is cancelled, a run continues.
    """
    if not run_id:
        return await request.core.turns.run(claim, input, hooks)
    run = await request.core.turns.start(claim, input, hooks, run_id=run_id)
    await run.ended.wait()
    assert run.outcome is not None
    return run.outcome


def finish_reason_of(outcome: Outcome) -> str:
    """Return `stop`, `length` or `error`, or the model's own reason."""
    if outcome.error and (outcome.partial or outcome.state is not TurnState.COMPLETED):
        return "length" if outcome.error_code == "output_truncated" else "error"
    return outcome.finish_reason or "stop"


_PERMANENT_ERRORS: Final = frozenset(
    {"model_auth", "model_bad_request", "model_context_overflow", "model_content_filter"}
)
"""Failures that a retry of the request would meet again."""


def failure_of(outcome: Outcome) -> ApiError | None:
    """Return the error for an outcome without any text, or None if there is text.

    A client must not retry a turn whose tools have run: its failure is a 424, which no client retries by itself, with `x-should-retry: false`.
    """
    failure = _failure_of(outcome)
    if failure is None:
        return None
    if outcome.usage.tool_calls:
        return ApiError(
            424,
            f"{failure} Tools had run in this turn by then: repeat it only if it may be done twice.",
            code="agent_incomplete",
            kind="server_error",
            headers=(*(pair for pair in failure.headers if pair[0] != b"retry-after"), NOT_AGAIN),
            more=failure.more or {"hermes": {"error_code": failure.code or outcome.error_code or "agent_error"}},
        )
    if outcome.error_code in _PERMANENT_ERRORS:
        failure.headers = (*failure.headers, NOT_AGAIN)
    return failure


def _failure_of(outcome: Outcome) -> ApiError | None:
    if not outcome.committed:
        return ApiError(503, outcome.error, code="session_db_unavailable", headers=retry_after(1))
    if outcome.state is TurnState.COMPLETED and not (outcome.error and not outcome.text):
        return None
    if outcome.exception is not None and not isinstance(outcome.exception, AgentFailed | BudgetExhausted):
        return ApiError(500, outcome.error) if outcome.state is TurnState.FAILED else None
    if outcome.error_code == "unknown_tool_call":
        return ApiError(400, f"{outcome.error}.", code="unknown_tool_call", param="messages")
    if outcome.text:
        return None
    if outcome.cause is not None and outcome.cause.kind is CancelCause.DRAIN:
        return ApiError(
            503, "The server stopped while it worked on this.", code="gateway_draining", headers=retry_after(1)
        )
    return ApiError(
        502,
        outcome.error or "The agent ended without an answer.",
        code="agent_incomplete",
        headers=(
            (b"x-hermes-completed", b"false"),
            (b"x-hermes-partial", b"true" if outcome.partial else b"false"),
        ),
        more={
            "hermes": {
                "completed": False,
                "partial": outcome.partial,
                "failed": outcome.state is TurnState.FAILED,
                "error_code": outcome.error_code or "agent_error",
            }
        },
    )


def incomplete_of(outcome: Outcome) -> Incomplete | None:
    """Return why an outcome with text is incomplete, or None if it is complete."""
    if outcome.ok and not outcome.partial:
        return None
    code = "output_truncated" if outcome.finish_reason == "length" else outcome.error_code or "agent_error"
    return Incomplete(
        completed=outcome.state is TurnState.COMPLETED,
        partial=outcome.partial,
        failed=outcome.state is TurnState.FAILED,
        error=redact_text(outcome.error),
        error_code=code,
    )


def _render(request: Request, asked: AskedTurn, outcome: Outcome, headers: list[tuple[bytes, bytes]]) -> Response:
    failure = failure_of(outcome)
    if failure is not None:
        return Response(failure.body(), failure.status, [*headers, *failure.headers])
    shortfall = incomplete_of(outcome)
    if shortfall is not None:
        headers = [
            *headers,
            (b"x-hermes-completed", b"true" if shortfall.completed else b"false"),
            (b"x-hermes-partial", b"true" if shortfall.partial else b"false"),
        ]
        if shortfall.error:
            headers.append((b"x-hermes-error", _header_text(shortfall.error)))
    message = AssistantMessage(outcome.text)
    if outcome.calls:
        message.content = outcome.text or None
        message.tool_calls = [_called(call) for call in outcome.calls]
    if outcome.reasoning:
        message.reasoning_content = outcome.reasoning
    completion = ChatCompletion(
        id=request.core.ids.make("chatcmpl-", 29),
        object="chat.completion",
        created=int(time.time()),
        model=asked.model,
        choices=[ChatChoice(message, finish_reason_of(outcome))],
        usage=usage_of(outcome.usage),
        hermes=shortfall,
    )
    return Response(encode_json(completion), 200, headers)


def _called(call: ToolCall) -> CalledTool:
    return CalledTool(call.id, CalledFunction(call.name, call.arguments))


def _header_text(text: str) -> bytes:
    return "".join(character if " " <= character <= "~" else "?" for character in text[:200]).encode()


# -- streaming -------------------------------------------------------------------------------------------------------------------


class _Chunks:
    """Renders the chunks of one completion; everything that they share is encoded once."""

    def __init__(self, id: str, created: int, model: str) -> None:
        head = encode_json({"id": id, "object": "chat.completion.chunk", "created": created, "model": model})[:-1]
        self._head = b"data: %b" % head
        self._delta = b'%b,"choices":[{"index":0,"delta":{"content":' % self._head

    def role(self) -> bytes:
        return self._rest(choices=[{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}])

    def text(self, delta: str) -> bytes:
        return b'%b%b},"finish_reason":null}]}\n\n' % (self._delta, encode_json(delta))

    def reasoning(self, delta: str) -> bytes:
        return self._rest(
            choices=[{"index": 0, "delta": {"reasoning_content": delta}, "finish_reason": None}],
        )

    def calls(self, calls: Sequence[ToolCall]) -> bytes:
        called = [{"index": index, **msgspec.structs.asdict(_called(call))} for index, call in enumerate(calls)]
        return self._rest(choices=[{"index": 0, "delta": {"tool_calls": called}, "finish_reason": None}])

    def finish(self, reason: str, **more: Any) -> bytes:
        return self._rest(choices=[{"index": 0, "delta": {}, "finish_reason": reason}], **more)

    def usage(self, usage: ChatUsage) -> bytes:
        return self._rest(choices=[], usage=usage)

    def _rest(self, **fields: Any) -> bytes:
        return b"%b,%b\n\n" % (self._head, encode_json(fields)[1:])


async def _stream(request: Request, asked: AskedTurn, writer: StreamWriter, run_id: str) -> None:
    async with turn_session(request, asked) as (claim, input):
        events = _ChatEvents(request, asked, writer, partial(claim.headers, run_id))
        hooks = TurnHooks(also=lambda turn, outcome: unseen_steps(request, asked, outcome)) if asked.tools else NO_HOOKS
        await stream_turn(request, claim, input, events, hooks, run_id=run_id)


class _ChatEvents:
    """Writes the events of a turn as chunks."""

    def __init__(
        self,
        request: Request,
        asked: AskedTurn,
        writer: StreamWriter,
        headers: Callable[[], list[tuple[bytes, bytes]]],
    ) -> None:
        self._asked = asked
        self._writer = writer
        self._headers = headers
        self._chunks = _Chunks(request.core.ids.make("chatcmpl-", 29), int(time.time()), asked.model)
        self._said = False
        self._shown: set[str] = set()
        self._text: list[str] = []
        self._thought: list[str] = []

    def take(self, event: Mapping[str, Any]) -> None:
        """Take an event. Text is joined until it is written; tools are reported in between if the client asked for it."""
        name = event["event"]
        if name == "message.delta":
            self._said = True
            self._text.append(event["delta"])
        elif name == "reasoning.delta":
            if self._text:
                self._join()
            self._thought.append(event["delta"])
        elif self._asked.tool_events and name in ("tool.started", "tool.completed"):
            self._join()
            self._tool(event)

    def _join(self) -> None:
        if self._thought:
            self._writer.put(self._chunks.reasoning("".join(self._thought)))
            self._thought.clear()
        if self._text:
            self._writer.put(self._chunks.text("".join(self._text)))
            self._text.clear()

    async def open(self) -> None:
        """Write the head and the role."""
        await self._writer.open(self._chunks.role(), self._headers())

    async def write(self) -> None:
        """Write what was taken."""
        self._join()
        await self._writer.flush()

    async def keep_alive(self) -> None:
        """Write a comment."""
        await self._writer.comment("keepalive")

    def _tool(self, event: Mapping[str, Any]) -> None:
        call, tool = event.get("tool_call_id", ""), event.get("tool", "")
        if not call or tool.startswith("_"):
            return
        if event["event"] == "tool.started":
            self._shown.add(call)
            data = {"tool": tool, "label": event.get("preview", ""), "toolCallId": call, "status": "running"}
        elif call in self._shown:
            data = {"tool": tool, "toolCallId": call, "status": "completed"}
        else:
            return
        self._writer.put(named_event("hermes.tool.progress", data))

    async def end(self, outcome: Outcome) -> None:
        """Write the finish chunk, and the usage if the client asked for it."""
        writer, chunks = self._writer, self._chunks
        self._join()
        if outcome.text and not self._said:
            writer.put(chunks.text(outcome.text))
        if outcome.calls:
            writer.put(chunks.calls(outcome.calls))
        more: dict[str, Any] = {}
        reason = finish_reason_of(outcome)
        shortfall = incomplete_of(outcome)
        if shortfall is not None or not outcome.committed:
            more["error"] = {
                "message": redact_text(outcome.error),
                "type": "server_error",
                "param": None,
                "code": outcome.error_code or None,
            }
            more["hermes"] = shortfall
            reason = "error" if reason == "stop" else reason
        usage = usage_of(outcome.usage)
        if self._asked.include_usage is None:
            more["usage"] = usage
        writer.put(chunks.finish(reason, **more))
        if self._asked.include_usage:
            writer.put(chunks.usage(usage))
        writer.put(b"data: [DONE]\n\n")
        await writer.flush()


async def stream_turn(
    request: Request,
    claim: SessionClaim,
    input: TurnInput,
    events: TurnEvents,
    hooks: TurnHooks = NO_HOOKS,
    *,
    run_id: str = "",
) -> None:
    """Run a turn and write its events while it runs. If the turn is refused, raise before the stream is opened.

    Cancelling it means that the client has disconnected: the turn is cancelled, too, and its end is still stored. With `run_id` a run of that id does the
    turn, and continues.
    """
    wakeup = StreamWakeup()
    admitted = trio.Event()
    outcome: Outcome | None = None
    refusal: Exception | None = None

    def sink(event: Mapping[str, Any]) -> None:
        events.take(event)
        wakeup.set()

    def start(turn: Turn) -> None:
        admitted.set()

    async def run() -> None:
        nonlocal outcome, refusal
        try:
            if run_id:
                run = await request.core.turns.start(claim, input, hooks, run_id=run_id)
                admitted.set()
                outcome = await _follow(run, sink)
                return
            own = msgspec.structs.replace(hooks, sink=sink, on_start=start)
            outcome = await request.core.turns.run(claim, input, own)
        except Exception as error:  # handed to the writing task, which raises it outside of the nursery
            refusal = error
        finally:
            wakeup.close()
            admitted.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await admitted.wait()
        if refusal is None:
            nursery.start_soon(wakeup.beat)
            await events.open()
            while not wakeup.closed:
                if await wakeup.wait():
                    await events.write()
                else:
                    await events.keep_alive()
        # The turn has ended, or was refused: only the beat is left.
        nursery.cancel_scope.cancel()
    if refusal is not None:
        raise cast("Exception", refusal)
    assert outcome is not None
    await events.end(outcome)


async def _follow(run: Run, sink: Callable[[Mapping[str, Any]], None]) -> Outcome:
    """Pass a run's events to `sink` as they arrive, and return its outcome. Cancelling it does not stop the run."""
    cursor = run.log.cursor()
    while batch := await cursor.read():
        for item in batch:
            if isinstance(item, LogEvent):
                if item.data["event"] in TERMINAL:
                    assert run.outcome is not None
                    return run.outcome
                sink(item.data)
    await run.ended.wait()
    assert run.outcome is not None
    return run.outcome


def chat_routes() -> list[Route]:
    """Return the routes of this module."""
    return [
        Route(
            name="chat_completions",
            method="POST",
            path="/v1/chat/completions",
            handler=create_chat_completion,
            access=RequiredScope.CHAT,
            turns=True,
            streams=True,
            summary="Answer the last message of a conversation",
            body=ChatRequest,
            answer=ChatCompletion,
            errors=(400, 404, 409, 424, 429, 502, 503),
            parameters=(ON_DISCONNECT,),
            tag="chat",
        )
    ]
