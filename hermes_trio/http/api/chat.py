"""`POST /v1/chat/completions`, plain and streaming.

A turn belongs to its request: a client that leaves cancels it at once, and what there was is stored as incomplete.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final, cast

import msgspec
import trio
from msgspec import Meta

from hermes_trio.http.auth import RequiredScope
from hermes_trio.http.content import Content, flat_text, has_content, normalise, text_of
from hermes_trio.http.errors import ApiError, redact_text, retry_after
from hermes_trio.http.inputs import idempotency_key, loose_bool, session_id_header, session_key_header
from hermes_trio.http.requests import EventStream, HandlerResult, Request, Response, encode_json
from hermes_trio.http.routing import Route
from hermes_trio.http.schemas import LooseBool, MessageContent
from hermes_trio.http.streams import Bell, StreamWriter, TurnEvents, named_event
from hermes_trio.http.turns import Captured
from hermes_trio.runtime.errors import AgentFailed, BudgetExhausted
from hermes_trio.runtime.outcome import CancelCause, Outcome, TurnState, Usage
from hermes_trio.runtime.ports import Message, TurnInput
from hermes_trio.runtime.turn import Turn

__all__ = ["chat_routes", "failure_of", "session_headers", "stream_turn", "usage_of"]


class StreamOptions(msgspec.Struct):
    """What a streaming client asks for. `include_tool_events` is ours: named events that tell of tools."""

    include_usage: LooseBool = None
    include_tool_events: LooseBool = False


class ChatMessage(msgspec.Struct):
    """One message of a request. Other keys are accepted and ignored."""

    role: str
    content: MessageContent = None


class ChatRequest(msgspec.Struct):
    """The body of a chat completion. Sampling parameters, tools and the like are accepted and ignored: tools run on the server."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    model: str | None = None
    stream: LooseBool = False
    stream_options: StreamOptions | None = None


class ChatUsage(msgspec.Struct):
    """Tokens of the whole turn, all inner model calls included."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AssistantMessage(msgspec.Struct):
    """What the assistant said."""

    content: str
    role: str = "assistant"


class ChatChoice(msgspec.Struct):
    """The one choice."""

    message: AssistantMessage
    finish_reason: str
    index: int = 0


class Incomplete(msgspec.Struct):
    """How a turn that has text fell short."""

    completed: bool
    partial: bool
    failed: bool
    error: str
    error_code: str


class ChatCompletion(msgspec.Struct, omit_defaults=True):
    """The answer."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage
    hermes: Incomplete | None = None


_decoder: Final = msgspec.json.Decoder(ChatRequest)


def usage_of(usage: Usage) -> ChatUsage:
    """Usage by its names in chat completions."""
    return ChatUsage(usage.input_tokens, usage.output_tokens, usage.total_tokens)


class _Asked(msgspec.Struct):
    """A request, understood. Never changed; not frozen, which would double the cost of making one for every request."""

    input: TurnInput
    opening: str
    model: str
    stream: bool
    include_usage: bool | None
    tool_events: bool


def _read(body: ChatRequest, public_model: str) -> _Asked:
    system: list[str] = []
    kept: list[tuple[str, Content]] = []
    for number, message in enumerate(body.messages):
        role = message.role
        if role == "user" or role == "assistant":
            kept.append((role, normalise(message.content, f"messages[{number}].content")))
        elif role == "system" or role == "developer":
            system.append(flat_text(message.content))
    if not kept:
        raise ApiError(400, "messages must hold a message of the user.", param="messages")
    _, prompt = kept.pop()
    if not has_content(prompt):
        raise ApiError(400, "The last message has neither text nor an image.", param="messages")
    instructions = "\n".join(system)
    text = text_of(prompt)
    first = next((text_of(content) for role, content in kept if role == "user"), text) if kept else text
    options = body.stream_options
    return _Asked(
        TurnInput(
            text=text,
            content="" if isinstance(prompt, str) else prompt,
            history=tuple([Message(role=role, content=content) for role, content in kept]) if kept else (),
            instructions=instructions,
            model=body.model or "",
        ),
        f"{instructions}\n{first}",
        body.model or public_model,
        loose_bool(body.stream, False),
        None if options is None or options.include_usage is None else loose_bool(options.include_usage, False),
        options is not None and loose_bool(options.include_tool_events, False),
    )


@asynccontextmanager
async def _session(request: Request, asked: _Asked) -> AsyncIterator[tuple[str, TurnInput]]:
    """The session of a request and its input: a named session brings its own transcript."""
    turns = request.front.turns
    named = session_id_header(request)
    if not named:
        with turns.derived(request.caller, asked.opening) as session_id:
            yield session_id, asked.input
        return
    async with turns.named(request.caller, named) as claim:
        instructions = "\n".join(text for text in (claim.prompt, asked.input.instructions) if text)
        yield named, msgspec.structs.replace(asked.input, history=None, instructions=instructions)


async def create_chat_completion(request: Request) -> HandlerResult:
    """Answer one conversation turn."""
    asked = _read(await request.json(_decoder), request.front.public_model)
    key = session_key_header(request)
    if asked.stream:
        return EventStream(lambda writer: _stream(request, asked, key, writer))
    once_key = idempotency_key(request)
    named = session_id_header(request)
    if not once_key and not named:
        # Most requests: no context that is not needed is opened for them.
        with request.front.turns.derived(request.caller, asked.opening) as session_id:
            outcome = await request.front.turns.run(request.caller, asked.input, session_id, key)
        return _render(request, asked, outcome, session_id, key)
    route = f"chat {named} {key}"
    async with request.front.replies.once(request.caller.tenant, route, once_key, await request.body()) as once:
        if once.replayed is not None:
            return once.replayed
        async with _session(request, asked) as (session_id, input):
            rendered: list[Response] = []

            def also(turn: Turn, outcome: Outcome) -> list[object]:
                rendered.append(_render(request, asked, outcome, session_id, key))
                return once.record(rendered[0])

            outcome = await request.front.turns.run(
                request.caller, input, session_id, key, also=also if once_key else None
            )
    if rendered and outcome.committed:
        return rendered[0]
    return _render(request, asked, outcome, session_id, key)


def session_headers(session_id: str, key: str) -> list[tuple[bytes, bytes]]:
    """The session, as the client is told."""
    headers = [(b"x-hermes-session-id", session_id.encode("latin-1", "replace"))]
    if key:
        headers.append((b"x-hermes-session-key", key.encode("latin-1", "replace")))
    return headers


def finish_reason_of(outcome: Outcome) -> str:
    """`stop`, `length` or `error`, or what the model said."""
    if outcome.error and (outcome.partial or outcome.state is not TurnState.COMPLETED):
        return "length" if outcome.error_code == "output_truncated" else "error"
    return outcome.finish_reason or "stop"


def failure_of(outcome: Outcome) -> ApiError | None:
    """The error that an outcome without any text is, or None if there is something to show."""
    if not outcome.committed:
        return ApiError(503, outcome.error, code="session_db_unavailable", headers=retry_after(1))
    if outcome.state is TurnState.COMPLETED and not (outcome.error and not outcome.text):
        return None
    if outcome.exception is not None and not isinstance(outcome.exception, AgentFailed | BudgetExhausted):
        return ApiError(500, outcome.error) if outcome.state is TurnState.FAILED else None
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
            }
        },
    )


def incomplete_of(outcome: Outcome) -> Incomplete | None:
    """How an outcome that has text fell short, or None if it did not."""
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


def _render(request: Request, asked: _Asked, outcome: Outcome, session_id: str, key: str) -> Response:
    failure = failure_of(outcome)
    headers = session_headers(session_id, key)
    if failure is not None:
        return Response(failure.body(), failure.status, [*headers, *failure.headers])
    shortfall = incomplete_of(outcome)
    if shortfall is not None:
        headers += [
            (b"x-hermes-completed", b"true" if shortfall.completed else b"false"),
            (b"x-hermes-partial", b"true" if shortfall.partial else b"false"),
        ]
        if shortfall.error:
            headers.append((b"x-hermes-error", _header_text(shortfall.error)))
    completion = ChatCompletion(
        id=request.front.ids.make("chatcmpl-", 29),
        object="chat.completion",
        created=int(time.time()),
        model=asked.model,
        choices=[ChatChoice(AssistantMessage(outcome.text), finish_reason_of(outcome))],
        usage=usage_of(outcome.usage),
        hermes=shortfall,
    )
    return Response(encode_json(completion), 200, headers)


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

    def finish(self, reason: str, **more: Any) -> bytes:
        return self._rest(choices=[{"index": 0, "delta": {}, "finish_reason": reason}], **more)

    def usage(self, usage: ChatUsage) -> bytes:
        return self._rest(choices=[], usage=usage)

    def _rest(self, **fields: Any) -> bytes:
        return b"%b,%b\n\n" % (self._head, encode_json(fields)[1:])


async def _stream(request: Request, asked: _Asked, key: str, writer: StreamWriter) -> None:
    async with _session(request, asked) as (session_id, input):
        events = _ChatEvents(request, asked, writer, session_headers(session_id, key))
        await stream_turn(request, input, session_id, key, events)


class _ChatEvents:
    """Writes the events of a turn as chunks."""

    def __init__(
        self, request: Request, asked: _Asked, writer: StreamWriter, headers: list[tuple[bytes, bytes]]
    ) -> None:
        self._asked = asked
        self._writer = writer
        self._headers = headers
        self._chunks = _Chunks(request.front.ids.make("chatcmpl-", 29), int(time.time()), asked.model)
        self._said = False
        self._shown: set[str] = set()
        self._text: list[str] = []

    def take(self, event: Mapping[str, Any]) -> None:
        """Text is joined until it is written; tools are told in between if they were asked for."""
        name = event["event"]
        if name == "message.delta":
            self._said = True
            self._text.append(event["delta"])
        elif self._asked.tool_events and name in ("tool.started", "tool.completed"):
            self._join()
            self._tool(event)

    def _join(self) -> None:
        if self._text:
            self._writer.put(self._chunks.text("".join(self._text)))
            self._text.clear()

    async def open(self) -> None:
        """The head and the role."""
        await self._writer.open(self._chunks.role(), self._headers)

    async def write(self) -> None:
        """What was taken."""
        self._join()
        await self._writer.flush()

    async def keep_alive(self) -> None:
        """A comment."""
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
        """The finish chunk, and usage where it is wanted."""
        writer, chunks = self._writer, self._chunks
        self._join()
        if outcome.text and not self._said:
            writer.put(chunks.text(outcome.text))
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
    input: TurnInput,
    session_id: str,
    key: str,
    events: TurnEvents,
    *,
    captured: Captured | None = None,
    also: Callable[[Turn, Outcome], Sequence[object]] | None = None,
) -> None:
    """Run a turn and write its events while it runs. What refuses the turn is raised before the stream is opened.

    Cancelling it means that the client has left: the turn is cancelled too, and its end is still written down.
    """
    bell = Bell()
    admitted = trio.Event()
    outcome: Outcome | None = None
    refusal: Exception | None = None

    def sink(event: Mapping[str, Any]) -> None:
        events.take(event)
        bell.ring()

    async def run() -> None:
        nonlocal outcome, refusal
        try:
            outcome = await request.front.turns.run(
                request.caller,
                input,
                session_id,
                key,
                sink=sink,
                captured=captured,
                also=also,
                on_start=lambda turn: admitted.set(),
            )
        except Exception as error:  # handed to the writing task, which raises it outside of the nursery
            refusal = error
        finally:
            bell.close()
            admitted.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await admitted.wait()
        if refusal is None:
            nursery.start_soon(bell.beat)
            await events.open()
            while not bell.closed:
                if await bell.wait():
                    await events.write()
                else:
                    await events.keep_alive()
        # The turn has ended, or was refused: only the beat is left.
        nursery.cancel_scope.cancel()
    if refusal is not None:
        raise cast("Exception", refusal)
    assert outcome is not None
    await events.end(outcome)


def chat_routes() -> list[Route]:
    """The routes of this module."""
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
            errors=(400, 404, 409, 429, 502, 503),
            tag="chat",
        )
    ]
