"""`/v1/responses`, plain and streaming: turns whose answers can be read, continued and deleted later.

A stored response holds the answer and the transcript behind it, and commits with its turn. A conversation's name points to its newest response; two turns that
start from the same one cannot both move it. A client that leaves cancels the turn, and the response is stored as incomplete.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, cast

import msgspec

from hermes_trio.http.auth import RequiredScope
from hermes_trio.http.content import Content, has_content, normalise, text_of
from hermes_trio.http.errors import ApiError, not_found, redact_text, translate
from hermes_trio.http.inputs import idempotency_key, loose_bool, session_key_header
from hermes_trio.http.requests import EventStream, HandlerResult, Request, Response, encode_json
from hermes_trio.http.routing import Route, RouteParameter
from hermes_trio.http.schemas import Deleted, HistoryMessage, LooseBool, TurnInputs
from hermes_trio.http.streams import StreamWriter
from hermes_trio.http.turns import Captured
from hermes_trio.runtime.outcome import Outcome, TurnState
from hermes_trio.runtime.ports import Message, TurnInput
from hermes_trio.runtime.turn import Turn
from hermes_trio.store import ConversationMoved, StoredResponse

from .chat import failure_of, session_headers, stream_turn
from .response_items import Items, OutputItem

__all__ = ["Chain", "previous_response", "response_routes"]

NAME_LENGTH: Final = 256
AUTO_TRUNCATION: Final = 100


class ResponseRequest(msgspec.Struct):
    """The body of a response. Sampling parameters, tools and the like are accepted and ignored: tools run on the server."""

    input: TurnInputs
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | None = None
    conversation_history: list[HistoryMessage] | None = None
    store: LooseBool = True
    stream: LooseBool = False
    truncation: str | None = None
    model: str | None = None
    metadata: dict[str, Any] | None = None


class ResponseUsage(msgspec.Struct):
    """Tokens of the whole turn."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens_details: dict[str, int]


class ResponseError(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str
    type: str = "server_error"


class ResponseBody(msgspec.Struct):
    """A response, as the official clients read it."""

    id: str
    object: str
    created_at: int
    status: str
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: dict[str, str] | None = None
    metadata: dict[str, Any] = {}
    parallel_tool_calls: bool = True
    tool_choice: str = "auto"
    tools: list[Any] = []
    temperature: float | None = None
    top_p: float | None = None
    truncation: str = "disabled"
    store: bool = True
    background: bool = False


_decoder: Final = msgspec.json.Decoder(ResponseRequest)
_transcripts: Final = msgspec.json.Decoder(list[Message])


class Chain(msgspec.Struct, frozen=True):
    """What an earlier response leaves behind: its transcript, its session, its instructions."""

    id: str
    transcript: tuple[Message, ...]
    session_id: str
    instructions: str


async def previous_response(request: Request, response_id: str) -> Chain:
    """The response to continue from; 404 if there is none, or if it is not the caller's."""
    stored = await find_response(request, response_id)
    body = msgspec.json.decode(stored.body)
    return Chain(
        stored.id,
        tuple(_transcripts.decode(stored.transcript.encode())),
        stored.session_id,
        body.get("instructions") or "",
    )


async def find_response(request: Request, response_id: str) -> StoredResponse:
    """A stored response that the caller may see."""
    stored = await request.front.store.get_response(request.caller.sees, response_id)
    if stored is None:
        raise not_found("response", response_id, "response_not_found")
    return stored


class _Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request, understood: where it starts from and what it says."""

    id: str
    prompt: Content
    history: tuple[Message, ...]
    instructions: str
    session_id: str
    chained: bool
    model: str
    wanted_model: str
    previous: str
    conversation: str
    store: bool
    stream: bool
    truncation: str
    metadata: dict[str, Any]
    created_at: int


def _items(value: Any) -> list[Message]:
    """The messages of `input`."""
    if isinstance(value, str):
        return [Message(role="user", content=value)]
    if not isinstance(value, list):
        raise ApiError(400, "input must be a text or a list of messages.", param="input")
    found: list[Message] = []
    for number, item in enumerate(cast("list[Any]", value)):
        if isinstance(item, str):
            found.append(Message(role="user", content=item))
        elif isinstance(item, dict):
            table = cast("dict[str, Any]", item)
            role: Any = table.get("role", "user")
            if not isinstance(role, str):
                raise ApiError(400, f"input[{number}].role must be a text.", param=f"input[{number}].role")
            content = normalise(table.get("content"), f"input[{number}].content")
            found.append(Message(role="system" if role == "developer" else role, content=content))
        else:
            raise ApiError(400, f"input[{number}] must be a text or a message.", param=f"input[{number}]")
    return found


async def _read(request: Request, body: ResponseRequest) -> _Asked:
    front = request.front
    if body.input is None:
        raise ApiError(400, "input is missing.", param="input")
    if body.conversation and body.previous_response_id:
        raise ApiError(400, "Give conversation or previous_response_id, not both.", param="conversation")
    name = (body.conversation or "").strip()
    if len(name) > NAME_LENGTH or not (name.isprintable() or not name):
        raise ApiError(400, f"conversation must have at most {NAME_LENGTH} printable characters.", param="conversation")
    messages = _items(body.input)
    system = [message.text for message in messages if message.role == "system"]
    messages = [message for message in messages if message.role != "system"]
    if not messages or not has_content(cast("Content", messages[-1].content)):
        raise ApiError(400, "input has no message at its end: neither text nor an image.", param="input")
    *earlier, last = messages
    explicit = tuple(
        Message(role=entry.role, content=normalise(entry.content, f"conversation_history[{number}].content"))
        for number, entry in enumerate(body.conversation_history or ())
    )
    previous = body.previous_response_id or ""
    if name:
        # Names are the caller's own, also for an admin.
        previous = await front.store.latest_response(request.caller.tenant, name) or ""
    chain = await previous_response(request, previous) if previous else None
    history = explicit or (chain.transcript if chain else ())
    history = (*history, *earlier)
    if body.truncation == "auto":
        history = history[-AUTO_TRUNCATION:]
    instructions = body.instructions if body.instructions is not None else (chain.instructions if chain else "")
    response_id = front.ids.make("resp_", 28)
    return _Asked(
        id=response_id,
        prompt=cast("Content", last.content),
        history=history,
        instructions="\n".join(text for text in (instructions, *system) if text),
        session_id=chain.session_id if chain else front.ids.make("api-", 32),
        chained=chain is not None,
        model=body.model or front.public_model,
        wanted_model=body.model or "",
        previous=previous,
        conversation=name,
        store=loose_bool(body.store, True),
        stream=loose_bool(body.stream, False),
        truncation="auto" if body.truncation == "auto" else "disabled",
        metadata=body.metadata or {},
        created_at=int(time.time()),
    )


def _body(asked: _Asked, status: str, output: list[OutputItem], outcome: Outcome | None) -> ResponseBody:
    body = ResponseBody(
        id=asked.id,
        object="response",
        created_at=asked.created_at,
        status=status,
        model=asked.model,
        output=[item.as_dict() for item in output],
        instructions=asked.instructions or None,
        previous_response_id=asked.previous or None,
        conversation={"id": asked.conversation} if asked.conversation else None,
        metadata=asked.metadata,
        truncation=asked.truncation,
        store=asked.store,
    )
    if outcome is not None:
        usage = outcome.usage
        body.usage = ResponseUsage(
            usage.input_tokens,
            usage.output_tokens,
            usage.total_tokens,
            {"cached_tokens": usage.cache_read_tokens},
            {"reasoning_tokens": usage.reasoning_tokens},
        )
        if status == "failed":
            body.error = ResponseError(outcome.error_code or "server_error", redact_text(outcome.error))
        elif status == "incomplete":
            body.incomplete_details = {"reason": _why_incomplete(outcome)}
    return body


def _why_incomplete(outcome: Outcome) -> str:
    if outcome.finish_reason == "length" or outcome.error_code == "output_truncated":
        return "max_output_tokens"
    if outcome.finish_reason == "content_filter":
        return "content_filter"
    return outcome.cause.kind.value if outcome.cause is not None else outcome.error_code or "agent_error"


def _status(outcome: Outcome) -> str:
    if outcome.state is TurnState.CANCELLED:
        return "incomplete"
    if outcome.state is TurnState.FAILED or not outcome.committed:
        return "failed"
    return "incomplete" if outcome.partial or outcome.finish_reason in ("length", "content_filter") else "completed"


class _Writing:
    """One response while its turn runs: its items, its body, and what is stored of it."""

    def __init__(self, request: Request, asked: _Asked) -> None:
        self.asked = asked
        self.captured = Captured()
        self.items = Items(request.front.ids)
        self.tenant = request.caller.tenant
        self.final: ResponseBody | None = None

    def input(self) -> TurnInput:
        """What the turn is about."""
        asked = self.asked
        return TurnInput(
            text=text_of(asked.prompt),
            content="" if isinstance(asked.prompt, str) else asked.prompt,
            history=asked.history,
            instructions=asked.instructions,
            model=asked.wanted_model,
        )

    def stored(self, turn: Turn, outcome: Outcome) -> list[object]:
        """The response as it commits with the turn."""
        self.items.finish(outcome)
        self.final = _body(self.asked, _status(outcome), self.items.output, outcome)
        if not self.asked.store:
            return []
        transcript = [*self.asked.history, *self.captured.messages(turn, outcome)]
        moved = self.asked.conversation and self.final.status != "failed"
        return [
            StoredResponse(
                id=self.asked.id,
                tenant=self.tenant,
                session_id=self.asked.session_id,
                body=encode_json(self.final),
                transcript=encode_json(transcript).decode(),
                conversation=self.asked.conversation if moved else "",
                expected_previous=self.asked.previous if moved else None,
                created_at=self.asked.created_at,
            )
        ]

    def in_progress(self) -> bytes:
        """The response as it is now."""
        return encode_json(_body(self.asked, "in_progress", self.items.output, None))

    def uncommitted(self, outcome: Outcome) -> ResponseBody:
        """The response of a turn whose end could not be written down."""
        return _body(self.asked, "failed", self.items.output, outcome)


async def _has_moved(request: Request, asked: _Asked, outcome: Outcome) -> ApiError | None:
    """409 if a turn's end was refused because its conversation had moved on (its newest response was deleted meanwhile, say)."""
    if outcome.committed or not asked.conversation:
        return None
    latest = await request.front.store.latest_response(request.caller.tenant, asked.conversation) or ""
    return None if latest == asked.previous else translate(ConversationMoved(asked.conversation, latest))


@asynccontextmanager
async def _in_conversation(request: Request, body: ResponseRequest) -> AsyncIterator[_Asked]:
    """The request, understood, while no other request of this conversation runs: they take turns."""
    name = (body.conversation or "").strip() if isinstance(body.conversation, str) else ""
    if not name:
        yield await _read(request, body)
        return
    locks, lock = request.front.conversations, f"{request.caller.tenant} {name}"
    await locks.acquire(lock, "a response")
    try:
        yield await _read(request, body)
    finally:
        locks.release(lock)


@asynccontextmanager
async def _writing(request: Request, body: ResponseRequest) -> AsyncIterator[_Writing]:
    """One response while it is being made: it can be read as `in_progress` meanwhile."""
    async with _in_conversation(request, body) as asked:
        writing = _Writing(request, asked)
        live = request.front.live_responses
        live[asked.id] = (writing.tenant, writing.in_progress)
        try:
            if asked.chained:
                async with request.front.turns.named(request.caller, asked.session_id):
                    yield writing
            else:
                yield writing
        finally:
            del live[asked.id]


async def create_response(request: Request) -> HandlerResult:
    """Answer, and keep the answer for later."""
    body = await request.json(_decoder)
    key = session_key_header(request)
    if loose_bool(body.stream, False):
        return EventStream(lambda writer: _stream(request, body, key, writer))
    once_key = idempotency_key(request)
    tenant = request.caller.tenant
    async with request.front.replies.once(tenant, f"responses {key}", once_key, await request.body()) as once:
        if once.replayed is not None:
            return once.replayed
        async with _writing(request, body) as writing:

            def also(turn: Turn, outcome: Outcome) -> list[object]:
                records = writing.stored(turn, outcome)
                return records + once.record(_answer(writing, outcome, key))

            outcome = await request.front.turns.run(
                request.caller,
                writing.input(),
                writing.asked.session_id,
                key,
                sink=writing.items.take,
                captured=writing.captured,
                also=also,
            )
    moved = await _has_moved(request, writing.asked, outcome)
    if moved is not None:
        raise moved
    return _answer(writing, outcome, key)


def _answer(writing: _Writing, outcome: Outcome, key: str) -> Response:
    headers = session_headers(writing.asked.session_id, key)
    failure = failure_of(outcome)
    if not outcome.committed or (failure is not None and failure.status in (500, 503)):
        assert failure is not None
        return Response(failure.body(), failure.status, [*headers, *failure.headers])
    assert writing.final is not None
    return Response(encode_json(writing.final), 200, headers)


# -- streaming -------------------------------------------------------------------------------------------------------------------


async def _stream(request: Request, body: ResponseRequest, key: str, writer: StreamWriter) -> None:
    async with _writing(request, body) as writing:
        session_id = writing.asked.session_id
        await stream_turn(
            request,
            writing.input(),
            session_id,
            key,
            _ResponseEvents(writing, writer, session_headers(session_id, key)),
            captured=writing.captured,
            also=writing.stored,
        )


class _ResponseEvents:
    """Writes the events of a turn as the official clients expect them, numbered from 0."""

    def __init__(self, writing: _Writing, writer: StreamWriter, headers: list[tuple[bytes, bytes]]) -> None:
        self._writing = writing
        self._writer = writer
        self._headers = headers
        self._number = 0

    def _encode(self, name: str, fields: dict[str, Any]) -> bytes:
        data = encode_json({"type": name, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), data)

    def _drain(self) -> None:
        for name, fields in self._writing.items.events():
            self._writer.put(self._encode(name, fields))

    async def open(self) -> None:
        """`created` and `in_progress`."""
        snapshot = _body(self._writing.asked, "in_progress", [], None)
        first = self._encode("response.created", {"response": snapshot})
        await self._writer.open(first + self._encode("response.in_progress", {"response": snapshot}), self._headers)

    def take(self, event: Mapping[str, Any]) -> None:
        """Items, parts and deltas."""
        self._writing.items.take(event)

    async def write(self) -> None:
        """What was taken."""
        self._drain()
        await self._writer.flush()

    async def keep_alive(self) -> None:
        """A comment."""
        await self._writer.comment("keepalive")

    async def end(self, outcome: Outcome) -> None:
        """What is still open is closed, then the one terminal event."""
        writing = self._writing
        final = writing.final
        if final is None or not outcome.committed:
            writing.items.finish(outcome)
            final = writing.uncommitted(outcome)
        self._drain()
        self._writer.put(self._encode(f"response.{final.status}", {"response": final}))
        await self._writer.flush()


# -- stored responses ------------------------------------------------------------------------------------------------------------


async def get_response(request: Request) -> HandlerResult:
    """A stored response, byte for byte, or one that is being made, as far as it is."""
    response_id = request.params["response_id"]
    live = request.front.live_responses.get(response_id)
    if live is not None and request.caller.owns(live[0]):
        return Response(live[1]())
    return Response((await find_response(request, response_id)).body)


async def delete_response(request: Request) -> HandlerResult:
    """Forget a stored response and the names that point to it."""
    response_id = request.params["response_id"]
    if not await request.front.store.delete_response(request.caller.sees, response_id):
        raise not_found("response", response_id, "response_not_found")
    return Response.of(Deleted(response_id, "response", True))


def response_routes() -> list[Route]:
    """The routes of this module."""
    return [
        Route(
            name="responses",
            provides={"response_id": "$response.body#/id"},
            method="POST",
            path="/v1/responses",
            handler=create_response,
            access=RequiredScope.CHAT,
            turns=True,
            streams=True,
            summary="Answer, and keep the answer for later",
            body=ResponseRequest,
            answer=ResponseBody,
            errors=(400, 404, 409, 429, 503),
            parameters=(RouteParameter("Idempotency-Key", "HandlerResult once for this key.", where="header"),),
            tag="responses",
        ),
        Route(
            name="response",
            method="GET",
            path="/v1/responses/{response_id}",
            handler=get_response,
            access=RequiredScope.CHAT,
            summary="A stored response",
            answer=ResponseBody,
            errors=(404,),
            tag="responses",
        ),
        Route(
            name="response_delete",
            method="DELETE",
            path="/v1/responses/{response_id}",
            handler=delete_response,
            access=RequiredScope.CHAT,
            summary="Forget a stored response",
            answer=Deleted,
            errors=(404,),
            tag="responses",
        ),
    ]
