"""`/api/sessions…`: durable sessions, and turns in them.

A key sees only its own sessions. Prompts and model configurations are never returned, only whether there is one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from hermes_trio.http.auth import RequiredScope
from hermes_trio.http.content import Content, has_content, normalise, text_of
from hermes_trio.http.errors import ApiError, not_found, redact_text
from hermes_trio.http.inputs import is_reserved_id, loose_bool, page_of, path_safe_id, session_key_header
from hermes_trio.http.requests import EventStream, HandlerResult, Request, Response, encode_json
from hermes_trio.http.routing import Route, RouteParameter
from hermes_trio.http.schemas import LOOSE_FLAG, LOOSE_NUMBER, Deleted, MessageContent, OptionalText, UsageBody
from hermes_trio.http.streams import StreamWriter
from hermes_trio.http.turns import PLATFORM, SessionClaim
from hermes_trio.runtime.outcome import CancelCause, Cause, Outcome, TurnState
from hermes_trio.runtime.ports import TurnInput
from hermes_trio.store import NewSession, Page, SessionExists, SessionFilter, SessionRow, StoredMessage
from hermes_trio.store.records import SearchHit, SearchOrder, SearchQuery

from .chat import failure_of, incomplete_of, stream_turn

QUERY_LENGTH: Final = 1000
MESSAGES: Final = 10_000
PROMPT_LENGTH: Final = 65_536


class SessionBody(msgspec.Struct, omit_defaults=True):
    """A session. Costs are not known and stay null."""

    id: str
    source: str
    user_id: str | None
    model: str | None
    title: str | None
    started_at: float
    ended_at: float | None
    end_reason: str | None
    message_count: int
    tool_call_count: int
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    reasoning_tokens: int
    estimated_cost_usd: float | None
    actual_cost_usd: float | None
    api_call_count: int
    parent_session_id: str | None
    has_system_prompt: bool
    has_model_config: bool
    last_active: float
    preview: str


class SessionEnvelope(msgspec.Struct):
    """One session."""

    session: SessionBody
    object: str = "hermes.session"


class SessionList(msgspec.Struct):
    """A page of sessions, the newest activity first."""

    data: list[SessionBody]
    limit: int
    offset: int
    has_more: bool
    object: str = "list"


class SearchList(msgspec.Struct):
    """A page of messages that a search found. A `snippet` marks the match with `>>>` and `<<<`."""

    data: list[SearchHit]
    limit: int
    offset: int
    has_more: bool
    object: str = "list"


class MessageBody(msgspec.Struct, omit_defaults=True):
    """A message of a transcript; keys without a value are left out."""

    id: int
    session_id: str
    role: str
    content: MessageContent
    timestamp: float
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None
    token_count: int | None = None
    finish_reason: str | None = None
    reasoning: str | None = None


class MessageList(msgspec.Struct):
    """A transcript."""

    session_id: str
    data: list[MessageBody]
    object: str = "list"


class NewSessionRequest(msgspec.Struct):
    """A session to be created. All fields are optional."""

    id: str | None = None
    session_id: str | None = None
    model: str | None = None
    system_prompt: OptionalText = None
    title: OptionalText = None


class ForkRequest(msgspec.Struct):
    """A branch to be created."""

    id: str | None = None
    session_id: str | None = None
    title: OptionalText = None


class SessionPatch(msgspec.Struct, forbid_unknown_fields=True):
    """What can be changed: the title (empty or null clears it), and whether the session has ended."""

    title: OptionalText = None
    end_reason: OptionalText = None


class SessionChatRequest(msgspec.Struct):
    """A message for a session."""

    message: MessageContent = None
    input: MessageContent = None
    system_message: OptionalText = None
    instructions: OptionalText = None
    model: str | None = None


class SpokenMessage(msgspec.Struct):
    """The assistant's message."""

    content: str
    role: str = "assistant"


class SessionChatBody(msgspec.Struct, omit_defaults=True):
    """The response to a message."""

    object: str
    session_id: str
    message: SpokenMessage
    usage: UsageBody
    hermes: Any = None


_new: Final = msgspec.json.Decoder(NewSessionRequest)
_fork: Final = msgspec.json.Decoder(ForkRequest)
_chat: Final = msgspec.json.Decoder(SessionChatRequest)
_patch: Final = msgspec.json.Decoder(dict[str, Any])


def _body(record: SessionRow) -> SessionBody:
    return SessionBody(
        id=record.id,
        source=record.source,
        user_id=record.user_id or None,
        model=record.model or None,
        title=record.title,
        started_at=record.started_at,
        ended_at=record.ended_at,
        end_reason=record.end_reason,
        message_count=record.message_count,
        tool_call_count=record.tool_call_count,
        input_tokens=record.input_tokens,
        output_tokens=record.output_tokens,
        cache_read_tokens=record.cache_read_tokens,
        cache_write_tokens=record.cache_write_tokens,
        reasoning_tokens=record.reasoning_tokens,
        estimated_cost_usd=None,
        actual_cost_usd=None,
        api_call_count=record.api_call_count,
        parent_session_id=record.parent_session_id,
        has_system_prompt=record.has_system_prompt,
        has_model_config=record.has_model_config,
        last_active=record.last_active,
        preview=record.preview,
    )


async def find_session(request: Request) -> SessionRow:
    """Return the session of the path. Raises 404 if it does not exist, or is not the caller's."""
    session_id = request.params["session_id"]
    record = await request.core.store.get_session(session_id)
    if record is None or not request.caller.owns(record.tenant):
        raise not_found("session", session_id, "session_not_found")
    return record


def _text(value: Any, param: str, code: str, most: int) -> str | None:
    """Return an optional text of limited length."""
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > most:
        raise ApiError(400, f"{param} must be a string of at most {most} characters.", code=code, param=param)
    return value


def _chosen_id(request: Request, *given: str | None) -> str:
    for value in given:
        if value is not None:
            chosen = path_safe_id(value, "id")
            if not chosen:
                raise ApiError(400, "id must not be blank.", code="invalid_session_id", param="id")
            if is_reserved_id(chosen):
                raise SessionExists(f"the session id {chosen!r} cannot be used; choose another one, or none")
            return chosen
    return f"api_{int(time.time())}_{request.core.ids.hex(8)}"


# -- the sessions ------------------------------------------------------------------------------------------------------------------


async def list_sessions(request: Request) -> HandlerResult:
    """Return the caller's sessions."""
    page = page_of(request)
    which = SessionFilter(
        source=request.query("source") or None,
        tenant=request.caller.sees,
        include_children=loose_bool(request.query("include_children"), False),
    )
    found = await request.core.store.list_sessions(which, page.peek)
    data = [_body(record) for record in found[: page.limit]]
    return Response.of(SessionList(data, page.limit, page.offset, len(found) > page.limit))


async def search_messages(request: Request) -> HandlerResult:
    """Return the messages of the caller's sessions that contain all words of `q`; the best first, or by `order`."""
    page = page_of(request)
    text = request.query("q").strip()
    if not 0 < len(text) <= QUERY_LENGTH:
        raise ApiError(400, f"q must have 1 to {QUERY_LENGTH} characters.", param="q")
    try:
        order = SearchOrder(request.query("order") or SearchOrder.RELEVANCE.value)
    except ValueError:
        known = ", ".join(order.value for order in SearchOrder)
        raise ApiError(400, f"order must be one of {known}.", param="order") from None
    query = SearchQuery(
        text=text,
        source=request.query("source") or None,
        tenant=request.caller.sees,
        session_id=request.query("session_id") or None,
        order=order,
    )
    found = await request.core.store.search_messages(query, page.peek)
    return Response.of(SearchList(found[: page.limit], page.limit, page.offset, len(found) > page.limit))


async def create_session(request: Request) -> HandlerResult:
    """Create a session before its first message."""
    body = await request.json(_new) if await request.body() else NewSessionRequest()
    session_id = _chosen_id(request, body.id, body.session_id)
    record = await request.core.store.create_session(
        NewSession(
            id=session_id,
            source=PLATFORM,
            tenant=request.caller.tenant,
            model=body.model or "",
            title=_text(body.title, "title", "invalid_title", 10_000),
            system_prompt=_text(body.system_prompt, "system_prompt", "invalid_system_prompt", PROMPT_LENGTH),
            routing=SessionClaim(session_id, request.caller.tenant).context(),
        )
    )
    return Response.of(SessionEnvelope(_body(record)), 201)


async def get_session(request: Request) -> HandlerResult:
    """Return one session."""
    return Response.of(SessionEnvelope(_body(await find_session(request))))


async def patch_session(request: Request) -> HandlerResult:
    """Change the title, or end the session; one that has ended keeps its reason. Its next turn reopens it."""
    record = await find_session(request)
    fields = await request.json(_patch)
    for name in fields:
        if name not in ("title", "end_reason"):
            raise ApiError(
                400,
                f"{name[:64]} cannot be changed; title and end_reason can.",
                code="unsupported_session_field",
                param=name[:64],
            )
    reason = _text(fields.get("end_reason"), "end_reason", "invalid_request", 100)
    changed = await request.core.store.patch_session(
        record.id,
        title=_text(fields.get("title"), "title", "invalid_title", 10_000),
        set_title="title" in fields,
        end_reason=(reason or "").strip() or None,
        tenant=record.tenant,
    )
    if changed.ended_at is not None:
        await _stop_jobs(request, record.id)
    return Response.of(SessionEnvelope(_body(changed)))


async def _stop_jobs(request: Request, session_id: str) -> None:
    """Stop the jobs of a session that ends; a turn that runs in it may still end."""
    await request.core.runtime.supervisor.stop_session(session_id, Cause(CancelCause.SESSION_ENDED))


async def delete_session(request: Request) -> HandlerResult:
    """Stop the work of a session, then delete it and its sub-agents' sessions; branches stay."""
    record = await find_session(request)
    # First the work, whose end is stored, then the rows: a turn that ended later would create them again.
    await request.core.runtime.stop_session(record.id, Cause(CancelCause.SESSION_ENDED))
    await request.core.store.delete_session(record.id, tenant=record.tenant)
    return Response.of(Deleted(record.id, "hermes.session.deleted", True))


async def list_messages(request: Request) -> HandlerResult:
    """Return the transcript of a session."""
    record = await find_session(request)
    stored = await request.core.store.list_messages(record.id, Page(MESSAGES))
    return Response.of(MessageList(record.id, [_message(message) for message in stored]))


def _message(stored: StoredMessage) -> MessageBody:
    message = stored.message
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    return MessageBody(
        id=stored.id,
        session_id=stored.session_id,
        role=message.role,
        content=message.content,
        timestamp=message.timestamp,
        tool_call_id=message.tool_call_id or None,
        tool_calls=calls or None,
        tool_name=message.tool_name or None,
        token_count=message.token_count or None,
        finish_reason=message.finish_reason or None,
        reasoning=message.reasoning or None,
    )


async def fork_session(request: Request) -> HandlerResult:
    """Branch a session: a new one with a copy of its messages; the old one ends as `branched`."""
    record = await find_session(request)
    body = await request.json(_fork) if await request.body() else ForkRequest()
    made = await request.core.store.fork_session(
        record.id,
        new_id=_chosen_id(request, body.id, body.session_id),
        title=_text(body.title, "title", "invalid_title", 10_000),
        tenant=record.tenant,
    )
    await _stop_jobs(request, record.id)
    return Response.of(SessionEnvelope(_body(made)), 201)


# -- turns in a session ------------------------------------------------------------------------------------------------------------


async def _read_chat(request: Request) -> tuple[SessionRow, TurnInput]:
    record = await find_session(request)
    body = await request.json(_chat)
    prompt: Content = normalise(body.message if body.message is not None else body.input, "message")
    if not has_content(prompt):
        raise ApiError(400, "message has neither text nor an image.", code="missing_message", param="message")
    given = body.system_message if body.system_message is not None else body.instructions
    own, _ = await request.core.store.session_prompt(record.id) if record.has_system_prompt else (None, None)
    more = _text(given, "system_message", "invalid_system_message", PROMPT_LENGTH)
    return record, TurnInput(
        text=text_of(prompt),
        content="" if isinstance(prompt, str) else prompt,
        instructions="\n".join(text for text in (own, more) if text),
        model=body.model or record.model,
    )


async def session_chat(request: Request) -> HandlerResult:
    """Send one message to a session, and return the answer."""
    key = session_key_header(request)
    record, input = await _read_chat(request)
    claim = request.core.turns.own(request.caller, record.id, key, record.tenant)
    outcome = await request.core.turns.run(claim, input)
    headers = claim.headers()
    failure = failure_of(outcome)
    if failure is not None:
        return Response(failure.body(), failure.status, [*headers, *failure.headers])
    body = SessionChatBody(
        object="hermes.session.chat.completion",
        session_id=record.id,
        message=SpokenMessage(outcome.text),
        usage=_usage(outcome),
        hermes=incomplete_of(outcome),
    )
    return Response(encode_json(body), 200, headers)


def _usage(outcome: Outcome) -> UsageBody:
    return UsageBody(outcome.usage.input_tokens, outcome.usage.output_tokens, outcome.usage.total_tokens)


async def session_chat_stream(request: Request) -> HandlerResult:
    """Send one message to a session, and stream the answer as named events."""
    key = session_key_header(request)
    record, input = await _read_chat(request)
    return EventStream(lambda writer: _stream(request, record, input, key, writer))


async def _stream(request: Request, record: SessionRow, input: TurnInput, key: str, writer: StreamWriter) -> None:
    claim = request.core.turns.own(request.caller, record.id, key, record.tenant)
    events = _SessionEvents(request, record, input, writer, claim.headers())
    await stream_turn(request, claim, input, events)


_TOOLS: Final = {"tool.started": "tool.started", "tool.completed": "tool.completed"}


class _SessionEvents:
    """Writes the events of a turn by their names in session chats; every payload has session, run, number and time."""

    def __init__(
        self,
        request: Request,
        record: SessionRow,
        input: TurnInput,
        writer: StreamWriter,
        headers: list[tuple[bytes, bytes]],
    ) -> None:
        self._session_id = record.id
        self._writer = writer
        self._headers = headers
        self._run_id = request.core.ids.make("turn_", 32)
        self._message_id = request.core.ids.make("msg_", 24)
        self._number = 0
        self._said = False
        self._text: list[str] = []
        # Numbered first: the turn may emit events before the stream is open.
        self._first = self._encode(
            "run.started", user_message={"role": "user", "content": input.prompt}
        ) + self._encode("message.started", message={"id": self._message_id, "role": "assistant"})

    def _encode(self, name: str, **fields: Any) -> bytes:
        self._number += 1
        data = {
            "session_id": self._session_id,
            "run_id": self._run_id,
            "seq": self._number,
            "ts": time.time(),
            **fields,
        }
        return b"event: %b\ndata: %b\n\n" % (name.encode(), encode_json(data))

    def _join(self) -> None:
        if self._text:
            delta = "".join(self._text)
            self._text.clear()
            self._writer.put(self._encode("assistant.delta", message_id=self._message_id, delta=delta))

    def take(self, event: Mapping[str, Any]) -> None:
        """Take an event. Text is joined until it is written."""
        name = event["event"]
        if name == "message.delta":
            self._said = True
            self._text.append(event["delta"])
            return
        self._join()
        if name in _TOOLS:
            failed = name == "tool.completed" and event.get("error")
            self._writer.put(
                self._encode(
                    "tool.failed" if failed else _TOOLS[name],
                    message_id=self._message_id,
                    tool_name=event.get("tool", ""),
                    tool_call_id=event.get("tool_call_id", ""),
                    preview=event.get("preview", ""),
                    args=event.get("arguments", ""),
                )
            )
        elif name == "reasoning.available":
            self._writer.put(
                self._encode(
                    "tool.progress", message_id=self._message_id, tool_name="_thinking", delta=event.get("text", "")
                )
            )

    async def open(self) -> None:
        """Write `run.started` and `message.started`."""
        await self._writer.open(self._first, self._headers)

    async def write(self) -> None:
        """Write what was taken."""
        self._join()
        await self._writer.flush()

    async def keep_alive(self) -> None:
        """Write a comment."""
        await self._writer.comment("keepalive")

    async def end(self, outcome: Outcome) -> None:
        """Write `assistant.completed` and `run.completed`, or `error`; always `done`."""
        writer = self._writer
        self._join()
        if failure_of(outcome) is not None:
            writer.put(self._encode("error", message=redact_text(outcome.error), code=outcome.error_code or None))
        else:
            if outcome.text and not self._said:
                writer.put(self._encode("assistant.delta", message_id=self._message_id, delta=outcome.text))
            completed = outcome.state is TurnState.COMPLETED
            writer.put(
                self._encode(
                    "assistant.completed",
                    message_id=self._message_id,
                    content=outcome.text,
                    completed=completed,
                    partial=outcome.partial,
                    interrupted=outcome.state is TurnState.CANCELLED,
                )
            )
            writer.put(
                self._encode(
                    "run.completed",
                    message_id=self._message_id,
                    completed=completed,
                    messages=[{"role": message.role, "content": message.content} for message in outcome.messages],
                    usage=_usage(outcome),
                )
            )
        writer.put(self._encode("done"))
        await writer.flush()


def session_routes() -> list[Route]:
    """Return the routes of this module."""
    base = Route(name="", method="GET", path="", handler=get_session, access=RequiredScope.SESSIONS, tag="sessions")

    def route(**fields: Any) -> Route:
        return msgspec.structs.replace(base, **fields)

    page = (
        RouteParameter("limit", "How many.", LOOSE_NUMBER),
        RouteParameter("offset", "Behind how many.", LOOSE_NUMBER),
        RouteParameter("source", "Only sessions from there."),
        RouteParameter("include_children", "Sub-agents' sessions, too.", LOOSE_FLAG),
    )
    one = "/api/sessions/{session_id}"
    return [
        route(
            name="sessions",
            path="/api/sessions",
            handler=list_sessions,
            summary="List your sessions, most recently active first",
            answer=SessionList,
            parameters=page,
        ),
        route(
            name="search",
            path="/api/search",
            handler=search_messages,
            summary="Search the messages of your sessions",
            answer=SearchList,
            errors=(400,),
            parameters=(
                RouteParameter("q", 'Words; `"a phrase"`, `begin*`, `this OR that`.'),
                RouteParameter("limit", "How many.", LOOSE_NUMBER),
                RouteParameter("offset", "Behind how many.", LOOSE_NUMBER),
                RouteParameter("source", "Only sessions from there."),
                RouteParameter("session_id", "Only this session."),
                RouteParameter("order", "relevance (default), newest or oldest."),
            ),
        ),
        route(
            name="session_create",
            provides={"session_id": "$response.body#/session/id"},
            method="POST",
            path="/api/sessions",
            handler=create_session,
            summary="Create a session before its first message",
            body=NewSessionRequest,
            body_required=False,
            answer=SessionEnvelope,
            status=201,
            errors=(400, 409),
        ),
        route(
            name="session",
            path=one,
            handler=get_session,
            summary="Get a session",
            answer=SessionEnvelope,
            errors=(404,),
        ),
        route(
            name="session_patch",
            method="PATCH",
            path=one,
            handler=patch_session,
            summary="Change a session's title, or end it",
            body=SessionPatch,
            answer=SessionEnvelope,
            errors=(400, 404),
        ),
        route(
            name="session_delete",
            method="DELETE",
            path=one,
            handler=delete_session,
            summary="Delete a session",
            answer=Deleted,
            errors=(404,),
        ),
        route(
            name="session_messages",
            path=f"{one}/messages",
            handler=list_messages,
            summary="List the messages of a session",
            answer=MessageList,
            errors=(404,),
        ),
        route(
            name="session_fork",
            method="POST",
            path=f"{one}/fork",
            handler=fork_session,
            summary="Branch a session",
            body=ForkRequest,
            body_required=False,
            answer=SessionEnvelope,
            status=201,
            errors=(400, 404, 409),
        ),
        route(
            name="session_chat",
            method="POST",
            path=f"{one}/chat",
            handler=session_chat,
            turns=True,
            summary="Send a message to a session",
            body=SessionChatRequest,
            answer=SessionChatBody,
            errors=(400, 404, 429, 502, 503),
        ),
        route(
            name="session_chat_stream",
            method="POST",
            path=f"{one}/chat/stream",
            handler=session_chat_stream,
            turns=True,
            streams=True,
            summary="Send a message to a session and stream the answer",
            body=SessionChatRequest,
            media="text/event-stream",
            errors=(400, 404, 429, 503),
        ),
    ]
