"""`/v1/responses`, plain and streaming: turns whose responses can be read, continued and deleted later.

A stored response holds the answer and its transcript, and is committed with its turn. A conversation's name points to its newest response; of two
turns that start from the same one, only one can advance it. A client that disconnects cancels the turn, and the response is stored as incomplete.

A background response, and that of a request that detaches, is made by a run whose id has the same digits. It can be read while it is made, streamed
again from any event on, and cancelled; one that a crash interrupted is `failed`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any, Final, cast

import msgspec
from msgspec import Meta

from hermes_trio.agent.loop import with_results
from hermes_trio.agent.model import ModelOptions, TurnOptions
from hermes_trio.http.auth import RequiredScope
from hermes_trio.http.client_retries import note_disconnect, refuse_retry
from hermes_trio.http.client_tools import function_tools, response_choice, split_results
from hermes_trio.http.content import Content, has_content, normalise, text_of
from hermes_trio.http.errors import NOT_AGAIN, ApiError, not_found, redact_text, translate
from hermes_trio.http.idempotency import IdempotentUse
from hermes_trio.http.inputs import detaches, idempotency_key, loose_bool, session_key_header, whole_number
from hermes_trio.http.parameters import (
    RESPONSES_PARAMETERS,
    check_parameters,
    format_option,
    number_option,
    whole_option,
    word_option,
)
from hermes_trio.http.requests import EventStream, HandlerResult, Request, Response, encode_json
from hermes_trio.http.routing import Route, RouteParameter
from hermes_trio.http.schemas import (
    LOOSE_FLAG,
    LOOSE_NUMBER,
    ON_DISCONNECT,
    Deleted,
    HistoryMessage,
    LooseBool,
    TurnInputs,
)
from hermes_trio.http.streams import StreamWriter
from hermes_trio.http.turns import SessionClaim
from hermes_trio.http.unseen_steps import kept_steps, opening_of, restore_steps
from hermes_trio.runtime.ends import End
from hermes_trio.runtime.errors import OutcomeUnknown
from hermes_trio.runtime.outcome import CancelCause, Cause, Outcome, TurnState
from hermes_trio.runtime.ports import Message, ToolCall, TurnInput
from hermes_trio.runtime.run import Run
from hermes_trio.runtime.turn import Turn, TurnHooks
from hermes_trio.store import AlreadyStarted, ConversationMoved, RunRow, StoredResponse

from .chat import failure_of, run_here_or_detached, stream_turn
from .response_input import input_items_of, read_items
from .response_items import Items, OutputItem
from .run_events import TERMINAL, follow

NAME_LENGTH: Final = 256
AUTO_TRUNCATION: Final = 100
INPUT_ITEMS: Final = 20
MOST_INPUT_ITEMS: Final = 100


class ResponseRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a response. `docs/parameters.md` says which parameters are honoured, hints, or refused."""

    input: TurnInputs
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Annotated[
        Any,
        Meta(description="A name, or an object with `id`.", extra_json_schema={"type": ["string", "object", "null"]}),
    ] = None
    conversation_history: list[HistoryMessage] | None = None
    store: LooseBool = True
    stream: LooseBool = False
    background: LooseBool = False
    truncation: str | None = None
    model: str | None = None
    metadata: dict[str, Any] | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    temperature: Any = None
    top_p: Any = None
    max_output_tokens: Any = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    user: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    include: Any = None
    stream_options: Any = None
    max_tool_calls: Any = None
    top_logprobs: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    access_programs: Any = None
    image: Any = None


class ResponseUsage(msgspec.Struct):
    """Tokens of the whole turn."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens_details: dict[str, int]


class InputItems(msgspec.Struct):
    """A page of input items."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


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
    tool_choice: Annotated[Any, Meta(extra_json_schema={"type": ["string", "object"]})] = "auto"
    tools: list[Any] = []
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    truncation: str = "disabled"
    store: bool = True
    background: bool = False


_decoder: Final = msgspec.json.Decoder(ResponseRequest)
_transcripts: Final = msgspec.json.Decoder(list[Message])


class Chain(msgspec.Struct, frozen=True):
    """What an earlier response provides: its transcript, its session, its instructions."""

    id: str
    transcript: tuple[Message, ...]
    session_id: str
    instructions: str


async def previous_response(request: Request, response_id: str) -> Chain:
    """Return the response to continue from. Raises 404 if it does not exist, or is not the caller's."""
    stored = await find_response(request, response_id)
    body = msgspec.json.decode(stored.body)
    return Chain(
        stored.id,
        tuple(_transcripts.decode(stored.transcript.encode())),
        stored.session_id,
        body.get("instructions") or "",
    )


async def find_response(request: Request, response_id: str) -> StoredResponse:
    """Return a stored response that the caller may see. Raises 404."""
    stored = await request.core.store.get_response(request.caller.sees, response_id)
    if stored is None:
        raise not_found("response", response_id, "response_not_found")
    return stored


class _Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed request: where it starts from and its input."""

    id: str
    prompt: Content
    history: tuple[Message, ...]
    options: TurnOptions
    instructions: str
    session_id: str
    chained: bool
    model: str
    wanted_model: str
    previous: str
    conversation: str
    store: bool
    stream: bool
    background: bool
    mcp: bool
    truncation: str
    metadata: dict[str, Any]
    created_at: int
    shown: dict[str, Any]
    """Parameters that the response repeats."""

    @property
    def run_id(self) -> str:
        """Return the run that makes the response, or None."""
        return run_of(self.id)


def run_of(response_id: str) -> str:
    """Return the id of the run of a response."""
    return f"run_{response_id.removeprefix('resp_')}"


def response_of(run_id: str) -> str:
    """Return the id of the response that a run makes."""
    return f"resp_{run_id.removeprefix('run_')}"


def _conversation(body: ResponseRequest) -> str:
    given: Any = body.conversation
    if isinstance(given, dict):
        given = cast("dict[str, Any]", given).get("id")
    if given is None:
        return ""
    name = given.strip() if isinstance(given, str) else None
    if name is None or len(name) > NAME_LENGTH or not (name.isprintable() or not name):
        raise ApiError(400, f"conversation must have at most {NAME_LENGTH} printable characters.", param="conversation")
    return name


def _options(body: ResponseRequest) -> TurnOptions:
    limit = whole_option(body.max_output_tokens, "max_output_tokens", 1, 10_000_000)
    tools = function_tools(body.tools)
    choice = response_choice(body.tool_choice, body.parallel_tool_calls)
    text, reasoning = body.text or {}, body.reasoning or {}
    return TurnOptions(
        model=ModelOptions(
            max_tokens=limit,
            temperature=number_option(body.temperature, "temperature", 0, 2),
            top_p=number_option(body.top_p, "top_p", 0, 1),
            reasoning_effort=word_option(reasoning.get("effort"), "reasoning.effort"),
            verbosity=word_option(text.get("verbosity"), "text.verbosity"),
            response_format=format_option(text.get("format"), "text.format", flat=True),
        ),
        tools=tools,
        choice=choice,
        server_tools=not (choice is not None and choice.mode == "none" and not tools),
    )


def _shown(body: ResponseRequest) -> dict[str, Any]:
    given = {
        "tools": body.tools,
        "tool_choice": body.tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "max_output_tokens": body.max_output_tokens,
        "reasoning": body.reasoning,
        "text": body.text,
    }
    return {name: value for name, value in given.items() if value is not None}


def _as_mcp_calls(request: Request) -> bool:
    """Return whether the server's tool calls are `mcp_call` items: `X-Hermes-Server-Tools`, else `server.server_tools`."""
    value = request.header(b"x-hermes-server-tools")
    word = request.core.server.server_tools if value is None else value.strip().lower()
    if word not in ("mcp_call", "function_call"):
        raise ApiError(
            400,
            "X-Hermes-Server-Tools must be mcp_call or function_call.",
            code="invalid_value",
            param="X-Hermes-Server-Tools",
        )
    return word == "mcp_call"


def _check_background(body: ResponseRequest, name: str) -> bool:
    background = loose_bool(body.background, False)
    if background and not loose_bool(body.store, True):
        raise ApiError(
            400, "A response in the background is stored: leave store out, or set it to true.", param="store"
        )
    if background and name:
        raise ApiError(
            400,
            "A response in the background cannot move a conversation; use previous_response_id.",
            param="conversation",
        )
    return background


async def _read(request: Request, body: ResponseRequest) -> _Asked:
    core = request.core
    if body.input is None:
        raise ApiError(400, "input is missing.", param="input")
    name = _conversation(body)
    if name and body.previous_response_id:
        raise ApiError(400, "Give conversation or previous_response_id, not both.", param="conversation")
    background = _check_background(body, name)
    options = _options(body)
    given = await read_items(request, body.input)
    system = [message.text for message, _ in given if message.role == "system"]
    given = [(message, place) for message, place in given if message.role != "system"]
    explicit = [
        Message(role=entry.role, content=normalise(entry.content, f"conversation_history[{number}].content"))
        for number, entry in enumerate(body.conversation_history or ())
    ]
    previous = body.previous_response_id or ""
    if name:
        # Each caller has its own names, also an admin.
        previous = await core.store.latest_response(request.caller.tenant, name) or ""
    chain = await previous_response(request, previous) if previous else None
    before = explicit or with_results(chain.transcript if chain else ())
    if not given:
        raise ApiError(400, "input has no message at its end: neither text nor an image.", param="input")
    found, results, last = split_results(
        [*before, *(message for message, _ in given)],
        [*("conversation_history" if explicit else "previous_response_id" for _ in before), *(at for _, at in given)],
        len(before),
    )
    prompt = "" if last is None else cast("Content", last.content)
    if not results and not has_content(prompt):
        raise ApiError(400, "input has no message at its end: neither text nor an image.", param="input")
    if results and chain is None:
        # A client that sends its history need not include the steps of the server's own tools.
        found = await restore_steps(core.store, request.caller.tenant, opening_of(found, text_of(prompt)), found)
    history = tuple(found[-AUTO_TRUNCATION:] if body.truncation == "auto" else found)
    instructions = body.instructions if body.instructions is not None else (chain.instructions if chain else "")
    return _Asked(
        id=core.ids.make("resp_", 28),
        prompt=prompt,
        history=history,
        options=msgspec.structs.replace(options, results=tuple(results)),
        instructions="\n".join(text for text in (instructions, *system) if text),
        session_id=chain.session_id if chain else core.ids.make("api-", 32),
        chained=chain is not None,
        model=body.model or core.public_model,
        wanted_model=body.model or "",
        previous=previous,
        conversation=name,
        store=loose_bool(body.store, True),
        stream=loose_bool(body.stream, False),
        background=background,
        mcp=_as_mcp_calls(request),
        truncation="auto" if body.truncation == "auto" else "disabled",
        metadata=body.metadata or {},
        created_at=int(time.time()),
        shown=_shown(body),
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
        background=asked.background,
        **asked.shown,
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


def _status(outcome: Outcome, *, background: bool = False) -> str:
    if outcome.state is TurnState.CANCELLED:
        stopped = outcome.cause is not None and outcome.cause.kind is CancelCause.STOP
        return "cancelled" if background and stopped else "incomplete"
    if outcome.state is TurnState.FAILED or not outcome.committed:
        return "failed"
    return "incomplete" if outcome.partial or outcome.finish_reason in ("length", "content_filter") else "completed"


class _Writing:
    """One response while its turn runs: its items, its body, and what is stored of it."""

    def __init__(self, request: Request, asked: _Asked, claim: SessionClaim) -> None:
        self.asked = asked
        self.items = Items(asked.id, mcp=asked.mcp)
        self.tenant = request.caller.tenant
        self.claim = claim
        self.hooks = TurnHooks(sink=self.items.take, also=self.stored)
        self.final: ResponseBody | None = None

    def input(self) -> TurnInput:
        """Return the input of the turn."""
        asked = self.asked
        return TurnInput(
            text=text_of(asked.prompt),
            content="" if isinstance(asked.prompt, str) else asked.prompt,
            history=asked.history,
            instructions=asked.instructions,
            model=asked.wanted_model,
            payload=asked.options.payload(),
        )

    def stored(self, turn: Turn, outcome: Outcome) -> list[object]:
        """Return the response as it is committed with the turn."""
        self.items.finish(outcome)
        status = _status(outcome, background=self.asked.background)
        self.final = _body(self.asked, status, self.items.output, outcome)
        opening = opening_of(self.asked.history, text_of(self.asked.prompt))
        unseen = kept_steps(self.tenant, opening, outcome.messages, outcome.calls)
        if not self.asked.store:
            return unseen
        transcript = [*self.asked.history, *outcome.messages]
        moved = self.asked.conversation and self.final.status != "failed"
        return [
            *unseen,
            StoredResponse(
                id=self.asked.id,
                tenant=self.tenant,
                session_id=self.asked.session_id,
                body=encode_json(self.final),
                transcript=encode_json(transcript).decode(),
                conversation=self.asked.conversation if moved else "",
                expected_previous=self.asked.previous if moved else None,
                created_at=self.asked.created_at,
            ),
        ]

    def snapshot(self) -> StoredResponse:
        """Return the response before its run has begun: what is read of it if it never ends."""
        asked = self.asked
        waiting = [*asked.history, *([Message(role="user", content=asked.prompt)] if asked.prompt else [])]
        return StoredResponse(
            id=asked.id,
            tenant=self.tenant,
            session_id=asked.session_id,
            body=encode_json(_body(asked, "queued", [], None)),
            transcript=encode_json(waiting).decode(),
            created_at=asked.created_at,
        )

    def in_progress(self) -> bytes:
        """Return the response as it is now."""
        return encode_json(_body(self.asked, "in_progress", self.items.output, None))

    def uncommitted(self, outcome: Outcome) -> ResponseBody:
        """Return the response of a turn whose end could not be stored."""
        return _body(self.asked, "failed", self.items.output, outcome)


async def _has_moved(request: Request, asked: _Asked, outcome: Outcome) -> ApiError | None:
    """Return 409 for a turn whose end was refused because its conversation has advanced (its newest response was deleted meanwhile, for example)."""
    if outcome.committed or not asked.conversation:
        return None
    latest = await request.core.store.latest_response(request.caller.tenant, asked.conversation) or ""
    if latest == asked.previous:
        return None
    moved = translate(ConversationMoved(asked.conversation, latest))
    if moved is not None:
        # The turn has run: a retry would do its work again.
        moved.headers = (*moved.headers, NOT_AGAIN)
    return moved


@asynccontextmanager
async def _in_conversation(request: Request, body: ResponseRequest) -> AsyncIterator[_Asked]:
    """Hold the conversation of a request for the body: requests of one conversation take turns."""
    name = _conversation(body)
    if not name:
        yield await _read(request, body)
        return
    locks, lock = request.core.conversations, f"{request.caller.tenant} {name}"
    await locks.acquire(lock, "a response")
    try:
        async with request.core.runtime.membership.holding(f"conversation {lock}"):
            yield await _read(request, body)
    finally:
        locks.release(lock)


@asynccontextmanager
async def _writing(request: Request, body: ResponseRequest, *, run: bool) -> AsyncIterator[_Writing]:
    """Make one response readable as `in_progress` while it is being made; one that a run makes until the run has ended."""
    key = session_key_header(request)
    async with _in_conversation(request, body) as asked:
        claim = request.core.turns.own(request.caller, asked.session_id, key)
        if asked.chained:
            claim = await request.core.turns.named(request.caller, asked.session_id, key, resumes=True)
        writing = _Writing(request, asked, claim)
        live = request.core.live_responses
        live[asked.id] = (writing.tenant, writing.in_progress)

        async def forget(outcome: Outcome) -> None:
            live.pop(asked.id, None)

        if run:
            writing.hooks = msgspec.structs.replace(writing.hooks, on_end=forget)
        try:
            yield writing
        finally:
            if request.core.runtime.stateless.runs.find(asked.run_id) is None:
                live.pop(asked.id, None)


async def create_response(request: Request) -> HandlerResult:
    """Answer, and store the response."""
    body = await request.json(_decoder)
    check_parameters(RESPONSES_PARAMETERS, body)
    key = session_key_header(request)
    background = loose_bool(body.background, False)
    run = background or detaches(request)
    if loose_bool(body.stream, False):
        return EventStream(lambda writer: _stream(request, body, writer, run=run))
    await refuse_retry(request)
    once_key = idempotency_key(request)
    tenant = request.caller.tenant
    async with request.core.replies.once(tenant, f"responses {key}", once_key, await request.body()) as once:
        if once.replayed is not None:
            return once.replayed
        async with _writing(request, body, run=run) as writing:
            asked = writing.asked
            run_id = asked.run_id if run else ""
            headers = writing.claim.headers(run_id)
            if background:
                return await _start_background(request, writing, headers, once)

            def also(turn: Turn, outcome: Outcome) -> list[object]:
                records = writing.stored(turn, outcome)
                records += once.record(_answer(writing, outcome, headers))
                return records + note_disconnect(request, turn, outcome)

            hooks = msgspec.structs.replace(writing.hooks, also=also)
            outcome = await run_here_or_detached(request, writing.claim, writing.input(), hooks, run_id)
    moved = await _has_moved(request, writing.asked, outcome)
    if moved is not None:
        raise moved
    return _answer(writing, outcome, headers)


async def _start_background(
    request: Request, writing: _Writing, headers: list[tuple[bytes, bytes]], once: IdempotentUse | None = None
) -> Response:
    """Start the run of a background response. Response and run are durable when this returns.

    A repetition of a request (`once`) starts nothing, and returns the response that the first one started, as it is now.
    """
    store, asked = request.core.store, writing.asked
    key = f"{once.route}\x1f{once.key}" if once is not None and once.key else ""  # no key of a client has the separator
    await store.put_response(writing.snapshot())
    refusal: Exception | None = None
    try:
        await request.core.turns.start(
            writing.claim,
            writing.input(),
            writing.hooks,
            run_id=asked.run_id,
            idempotency_key=key,
            fingerprint=once.fingerprint if once is not None and key else "",
        )
    except OutcomeUnknown:
        raise  # the run may still begin, and write this response
    except Exception as error:
        refusal = error
    if refusal is not None:
        forget = partial(store.delete_response, writing.tenant, asked.id)
        await request.core.runtime.stateless.ends.put(End(f"response {asked.id}, which did not begin", forget))
        if isinstance(refusal, AlreadyStarted):
            return await _started_before(request, refusal.run_id)
        raise refusal
    return Response(encode_json(_body(asked, "queued", [], None)), 200, headers)


async def _started_before(request: Request, run_id: str) -> Response:
    """Return the background response that a run makes, to a repetition of the request that started it."""
    body = await _body_of(request, response_of(run_id))
    run = await request.core.store.get_run(run_id)
    session = [] if run is None else [(b"x-hermes-session-id", run.session_id.encode("latin-1", "replace"))]
    replayed = (b"idempotent-replayed", b"true")
    return Response(body, 200, [*session, (b"x-hermes-run-id", run_id.encode()), replayed])


def _answer(writing: _Writing, outcome: Outcome, headers: list[tuple[bytes, bytes]]) -> Response:
    failure = failure_of(outcome)
    if failure is not None and (not outcome.committed or failure.code != "agent_incomplete"):
        return Response(failure.body(), failure.status, [*headers, *failure.headers])
    assert writing.final is not None
    return Response(encode_json(writing.final), 200, headers)


# -- streaming -------------------------------------------------------------------------------------------------------------------


async def _stream(request: Request, body: ResponseRequest, writer: StreamWriter, *, run: bool) -> None:
    async with _writing(request, body, run=run) as writing:
        asked = writing.asked
        run_id = asked.run_id if run else ""
        headers = writing.claim.headers(run_id)
        if asked.background:
            await _start_background(request, writing, headers)
        else:
            events = _ResponseEvents(writing, writer, headers, own=run)
            await stream_turn(request, writing.claim, writing.input(), events, writing.hooks, run_id=run_id)
            return
    await _replay(request, asked.id, writer, -1)


class _Replay:
    """Replays the events of a run as those of its response, numbered from 0, from behind `after` on."""

    def __init__(self, opening: dict[str, Any], *, mcp: bool, after: int) -> None:
        self._items = Items(opening["id"], mcp=mcp)
        self._after = after
        self._number = 0
        self._begun = False
        self._opening = opening

    def encode(self, name: str, fields: dict[str, Any]) -> bytes:
        """Return one encoded event, or nothing if the reader has it."""
        number = self._number
        self._number += 1
        if number <= self._after:
            return b""
        data = encode_json({"type": name, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (name.encode(), data)

    def render(self, event: Mapping[str, Any]) -> bytes:
        """Return the response's events for an event of the run."""
        told: list[bytes] = []
        if not self._begun:
            self._begun = True
            told = [
                self.encode(name, {"response": self._opening}) for name in ("response.created", "response.in_progress")
            ]
        if event["event"] not in TERMINAL:
            self._items.take(event)
            told += [self.encode(name, fields) for name, fields in self._items.events()]
        return b"".join(told)

    def end(self, final: dict[str, Any]) -> bytes:
        """Return the events for items of the final response that no event of the run announced, and the terminal event."""
        told: list[bytes] = []
        outcome = _told_outcome(final)
        self._items.finish(outcome)
        told += [self.encode(name, fields) for name, fields in self._items.events()]
        status = final["status"] if final["status"] in _ENDS else "incomplete"
        return b"".join([*told, self.encode(f"response.{status}", {"response": final})])


_ENDS: Final = frozenset({"completed", "failed", "incomplete"})


def _told_outcome(final: dict[str, Any]) -> Outcome:
    """Return the outcome of a final response, as far as its items need it."""
    output: list[dict[str, Any]] = final["output"]
    results = {item["call_id"] for item in output if item["type"] == "function_call_output"}
    calls = [item for item in output if item["type"] == "function_call" and item["call_id"] not in results]
    return Outcome(
        turn_id="",
        session_id="",
        state=TurnState.COMPLETED,
        text=output[-1]["content"][0]["text"] if output and output[-1].get("content") else "",
        partial=final["status"] != "completed",
        calls=tuple(
            [ToolCall(id=item["call_id"], name=item["name"], arguments=item["arguments"]) for item in calls]
            if final["status"] == "completed"
            else ()
        ),
    )


async def _replay(request: Request, response_id: str, writer: StreamWriter, after: int) -> None:
    """Stream a response that a run makes or has made, from behind event `after` on. Cancelling does not stop the run."""
    body: dict[str, Any] = msgspec.json.decode(await _body_of(request, response_id))
    opening: dict[str, Any] = {
        **body,
        "status": "in_progress",
        "output": [],
        "usage": None,
        "error": None,
        "incomplete_details": None,
    }
    replay = _Replay(opening, mcp=_as_mcp_calls(request), after=after)
    await follow(
        request.core, run_of(response_id), writer, after=None, unknown=False, until="ended", render=replay.render
    )
    writer.put(replay.end(msgspec.json.decode(await _body_of(request, response_id))))
    await writer.flush()


class _ResponseEvents:
    """Writes the events of a turn in the form that the official clients expect, numbered from 0."""

    def __init__(
        self, writing: _Writing, writer: StreamWriter, headers: list[tuple[bytes, bytes]], *, own: bool
    ) -> None:
        self._writing = writing
        # A run feeds the response's items by itself, also without a reader.
        self._items = Items(writing.asked.id, mcp=writing.asked.mcp) if own else writing.items
        self._writer = writer
        self._headers = headers
        self._number = 0

    def _encode(self, name: str, fields: dict[str, Any]) -> bytes:
        data = encode_json({"type": name, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), data)

    def _drain(self) -> None:
        for name, fields in self._items.events():
            self._writer.put(self._encode(name, fields))

    async def open(self) -> None:
        """Write `created` and `in_progress`."""
        snapshot = _body(self._writing.asked, "in_progress", [], None)
        first = self._encode("response.created", {"response": snapshot})
        await self._writer.open(first + self._encode("response.in_progress", {"response": snapshot}), self._headers)

    def take(self, event: Mapping[str, Any]) -> None:
        """Take items, parts and deltas."""
        self._items.take(event)

    async def write(self) -> None:
        """Write what was taken."""
        self._drain()
        await self._writer.flush()

    async def keep_alive(self) -> None:
        """Write a comment."""
        await self._writer.comment("keepalive")

    async def end(self, outcome: Outcome) -> None:
        """Close open items, then write the one terminal event."""
        writing = self._writing
        final = writing.final
        if final is None or not outcome.committed:
            final = writing.uncommitted(outcome)
        self._items.finish(outcome)
        self._drain()
        self._writer.put(self._encode(f"response.{final.status}", {"response": final}))
        await self._writer.flush()


# -- stored responses ------------------------------------------------------------------------------------------------------------


async def _body_of(request: Request, response_id: str) -> bytes:
    """Return a response as it is now. Raises 404 if it does not exist, or is not the caller's."""
    live = request.core.live_responses.get(response_id)
    if live is not None and request.caller.owns(live[0]):
        return live[1]()
    stored = await request.core.store.get_response(request.caller.sees, response_id)
    if stored is None and (elsewhere := await _live_elsewhere(request, response_id)) is not None:
        return elsewhere
    if stored is None:
        stored = await find_response(request, response_id)  # it may have ended meanwhile
    if b'"status":"queued"' not in stored.body[:200]:
        return stored.body
    body: dict[str, Any] = msgspec.json.decode(stored.body)
    if await _is_made(request, run_of(response_id)):
        return await _live_elsewhere(request, response_id) or encode_json({**body, "status": "in_progress"})
    error = {
        "code": "interrupted",
        "message": "The server stopped while this response was made.",
        "type": "server_error",
    }
    return encode_json({**body, "status": "failed", "error": error})


async def _live_elsewhere(request: Request, response_id: str) -> bytes | None:
    """Return a response that another node makes as it is now, with its output so far."""
    if not request.core.shared or not response_id.startswith("resp_"):
        return None
    elsewhere = await request.core.live_elsewhere(response_id)
    return None if elsewhere is None or not request.caller.owns(elsewhere[0]) else elsewhere[1]


async def _is_made(request: Request, run_id: str) -> bool:
    """Return whether the run of a response continues, here or on another node."""
    core = request.core
    if core.runtime.stateless.runs.find(run_id) is not None:
        return True
    # Also with one owner: until the store has said that it was written, a run is only in its row.
    row = await core.store.get_run(run_id)
    return row is not None and not row.status.terminal


async def _run_of_response(request: Request, response_id: str, verb: str) -> Run | RunRow:
    """Return the run that makes a response. Raises 400 if no run does."""
    await _body_of(request, response_id)
    run_id = run_of(response_id)
    run = request.core.runtime.stateless.runs.find(run_id) or await request.core.store.get_run(run_id)
    if run is None:
        raise ApiError(
            400,
            f"Only a response that was made in the background (background: true) can be {verb}.",
            code="not_in_background",
            param="response_id",
        )
    return run


async def get_response(request: Request) -> HandlerResult:
    """Return a stored response, byte for byte, or the present state of one in progress. With `stream`, its events."""
    response_id = request.params["response_id"]
    if not loose_bool(request.query("stream"), False):
        return Response(await _body_of(request, response_id))
    await _run_of_response(request, response_id, "streamed again")
    after = whole_number(request.query("starting_after"), -1)
    return EventStream(lambda writer: _replay(request, response_id, writer, after))


async def cancel_response(request: Request) -> HandlerResult:
    """Stop the run that makes a response, and return the response. One that has ended is unchanged."""
    response_id = request.params["response_id"]
    run = await _run_of_response(request, response_id, "cancelled")
    cause = Cause(CancelCause.STOP, "the response was cancelled")
    if isinstance(run, Run) and not run.ended.is_set():
        run.request_stop(cause)
        await run.ended.wait()
    elif isinstance(run, RunRow) and request.core.shared and not run.status.terminal:
        await request.core.runtime.peers.stop_run(run.run_id, run.owner, cause)
    return Response(await _body_of(request, response_id))


async def list_input_items(request: Request) -> HandlerResult:
    """Return the input items of a response, the newest first."""
    response_id = request.params["response_id"]
    stored = await find_response(request, response_id)
    items = input_items_of(response_id, _transcripts.decode(stored.transcript.encode()))
    if request.query("order", "desc") != "asc":
        items.reverse()
    after = request.query("after")
    if after:
        place = next((number for number, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise not_found("item", after, "item_not_found")
        items = items[place + 1 :]
    limit = whole_number(request.query("limit"), INPUT_ITEMS, least=1, most=MOST_INPUT_ITEMS)
    page = items[:limit]
    return Response.of(
        InputItems(
            data=page,
            first_id=page[0]["id"] if page else None,
            last_id=page[-1]["id"] if page else None,
            has_more=len(items) > limit,
        )
    )


async def delete_response(request: Request) -> HandlerResult:
    """Delete a stored response and the names that point to it."""
    response_id = request.params["response_id"]
    if not await request.core.store.delete_response(request.caller.sees, response_id):
        raise not_found("response", response_id, "response_not_found")
    return Response.of(Deleted(response_id, "response", True))


_SERVER_TOOLS: Final = RouteParameter(
    "X-Hermes-Server-Tools",
    "How the server's own tool calls are shown: `mcp_call` items, or the reference's `function_call` and `function_call_output`.",
    {"type": "string", "enum": ["mcp_call", "function_call"]},
    "header",
)


def response_routes() -> list[Route]:
    """Return the routes of this module."""
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
            summary="Create a response",
            body=ResponseRequest,
            answer=ResponseBody,
            errors=(400, 404, 409, 424, 429, 503),
            parameters=(
                RouteParameter("Idempotency-Key", "Answer once for this key.", where="header"),
                ON_DISCONNECT,
                _SERVER_TOOLS,
            ),
            tag="responses",
        ),
        Route(
            name="response",
            method="GET",
            path="/v1/responses/{response_id}",
            handler=get_response,
            access=RequiredScope.CHAT,
            streams=True,
            summary="Get a stored response, or one in progress; with `stream`, its events",
            answer=ResponseBody,
            errors=(400, 404),
            parameters=(
                RouteParameter("stream", "Tell the events of a response that was made in the background.", LOOSE_FLAG),
                RouteParameter("starting_after", "The number of the last event that you have.", LOOSE_NUMBER),
                _SERVER_TOOLS,
            ),
            tag="responses",
        ),
        Route(
            name="response_input_items",
            method="GET",
            path="/v1/responses/{response_id}/input_items",
            handler=list_input_items,
            access=RequiredScope.CHAT,
            summary="List the input items of a response",
            answer=InputItems,
            errors=(404,),
            parameters=(
                RouteParameter("limit", "Items on a page: 20, up to 100.", LOOSE_NUMBER),
                RouteParameter("order", "`desc`, the newest first, or `asc`."),
                RouteParameter("after", "The id of the item before the page."),
            ),
            tag="responses",
        ),
        Route(
            name="response_cancel",
            method="POST",
            path="/v1/responses/{response_id}/cancel",
            handler=cancel_response,
            access=RequiredScope.CHAT,
            summary="Cancel a background response",
            answer=ResponseBody,
            errors=(400, 404),
            tag="responses",
        ),
        Route(
            name="response_delete",
            method="DELETE",
            path="/v1/responses/{response_id}",
            handler=delete_response,
            access=RequiredScope.CHAT,
            summary="Delete a stored response",
            answer=Deleted,
            errors=(404,),
            tag="responses",
        ),
    ]
