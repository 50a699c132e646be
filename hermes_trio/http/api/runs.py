"""`/v1/runs`: turns that survive their client. Started durably, listed, waited for, approved, stopped with a receipt.

A live run is read from the runtime, a settled one from the store, also after a restart. A key sees only its own runs.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, cast

import msgspec
import trio
from msgspec import Meta

from hermes_trio.http.auth import RequiredScope
from hermes_trio.http.content import Content, has_content, normalise, text_of
from hermes_trio.http.errors import ApiError, not_found, redact_text
from hermes_trio.http.idempotency import fingerprint_of
from hermes_trio.http.inputs import idempotency_key, loose_bool, page_of, path_safe_id, session_key_header
from hermes_trio.http.requests import EventStream, HandlerResult, Request, Response
from hermes_trio.http.routing import Route, RouteParameter
from hermes_trio.http.schemas import LOOSE_FLAG, LOOSE_NUMBER, HistoryMessage, LooseBool, TurnInputs, UsageBody
from hermes_trio.http.streams import StreamWriter
from hermes_trio.runtime.outcome import CancelCause, Cause, RunStatus
from hermes_trio.runtime.peers import watch_run
from hermes_trio.runtime.ports import Message, TurnInput
from hermes_trio.runtime.run import Run
from hermes_trio.runtime.stop_receipt import StopReceipt
from hermes_trio.store import LISTED_OUTPUT, AlreadyStarted, ApprovalChoice, RunFilter, RunRow

from .approvals import describe
from .responses import previous_response
from .run_events import follow, parse_event_id

DEFAULT_WAIT: Final = 30.0
STOP_SECONDS: Final = 30.0

_APPROVE: Final = {"approve": "once", "approved": "once", "allow": "once"}


class RunRequest(msgspec.Struct):
    """The body that starts a run. `input` is a text, or a list whose last item is the message and whose others are the history.

    `if_interrupted` says what happens to the run if the process that works on it ends unexpectedly: `fail`, or `resume`, which begins it again.
    """

    input: TurnInputs
    instructions: str | None = None
    conversation_history: list[HistoryMessage] | None = None
    previous_response_id: str | None = None
    session_id: str | None = None
    model: str | None = None
    if_interrupted: Literal["fail", "resume"] = "fail"


class RunStarted(msgspec.Struct):
    """The run is durable."""

    run_id: str
    status: str = "started"


class PendingApproval(msgspec.Struct):
    """A pending request for approval."""

    approval_id: str
    command: str
    description: str
    pattern_keys: list[str]
    choices: list[str]
    requested_at: float
    expires_at: float


class RunBody(msgspec.Struct, omit_defaults=True):
    """The present state of a run. `settled` says that everything that it started has ended, too.

    `input_preview` is the beginning of the input. `model` is the one that answers, once that is known; before, the requested one, or the public name
    of the default model. `attempt` counts how often a run that asked to be resumed was begun.
    """

    object: str
    run_id: str
    status: str
    created_at: float
    updated_at: float
    session_id: str
    model: str
    settled: bool
    input_preview: str = ""
    last_event: str | None = None
    ended_at: float | None = None
    output: str | None = None
    output_truncated: bool = False
    usage: UsageBody | None = None
    error: str | None = None
    error_code: str | None = None
    approvals: list[PendingApproval] = []
    attempt: int = 0


class RunList(msgspec.Struct):
    """A page of runs, the newest first."""

    data: list[RunBody]
    limit: int
    offset: int
    has_more: bool
    object: str = "list"


class ApprovalRequest(msgspec.Struct):
    """An answer: to the request of that id, else to the oldest, or to all."""

    choice: Annotated[Any, Meta(extra_json_schema={"type": "string"})] = None
    approval_id: str | None = None
    all: LooseBool = False
    resolve_all: LooseBool = False


class ApprovalAnswered(msgspec.Struct):
    """How many requests were answered."""

    run_id: str
    choice: str
    resolved: int
    approval_ids: list[str]
    object: str = "hermes.run.approval_response"


class StopAnswer(msgspec.Struct, omit_defaults=True):
    """The stop was requested; with `wait=true` also its receipt."""

    run_id: str
    status: str
    receipt: dict[str, Any] | None = None


_run_decoder: Final = msgspec.json.Decoder(RunRequest)
_approval_decoder: Final = msgspec.json.Decoder(ApprovalRequest)


# -- finding -----------------------------------------------------------------------------------------------------------------------


async def find_run(request: Request) -> Run | RunRow:
    """Return the run of the path, live or stored. Raises 404 if it does not exist, or is not the caller's."""
    run_id = request.params["run_id"]
    live = request.core.runtime.stateless.runs.find(run_id)
    if live is not None:
        if request.caller.owns(live.record.tenant):
            return live
    else:
        row = await request.core.store.get_run(run_id)
        if row is not None and request.caller.owns(row.tenant):
            return row
    raise not_found("run", run_id, "run_not_found")


def _live_body(run: Run, default_model: str, approvals: list[PendingApproval] | None = None) -> RunBody:
    outcome = run.outcome
    body = RunBody(
        object="hermes.run",
        run_id=run.id,
        # A request is stored a moment before its event, and must not be listed beside `running` in between.
        status=(RunStatus.WAITING_FOR_APPROVAL if approvals and run.status is RunStatus.RUNNING else run.status).value,
        created_at=run.created_at,
        updated_at=run.updated_at,
        session_id=run.record.session_id,
        model=run.model or default_model,
        settled=run.settled.is_set(),
        input_preview=run.record.input_preview,
        last_event=run.last_event or None,
        approvals=approvals or [],
        attempt=run.attempt,
    )
    if outcome is not None:
        body.ended_at = run.updated_at
        body.output = outcome.text
        body.usage = UsageBody(outcome.usage.input_tokens, outcome.usage.output_tokens, outcome.usage.total_tokens)
        body.error = redact_text(outcome.error) or None
        body.error_code = outcome.error_code or None
    return body


def _stored_body(
    row: RunRow, default_model: str, *, settled: bool, approvals: list[PendingApproval] | None = None
) -> RunBody:
    usage = row.usage
    return RunBody(
        object="hermes.run",
        run_id=row.run_id,
        status=(RunStatus.WAITING_FOR_APPROVAL if approvals and row.status is RunStatus.RUNNING else row.status).value,
        created_at=row.created_at,
        updated_at=row.updated_at,
        session_id=row.session_id,
        model=row.model or default_model,
        settled=settled,
        input_preview=row.input_preview,
        last_event=row.last_event or None,
        approvals=approvals or [],
        ended_at=row.ended_at,
        output=row.output,
        usage=None
        if usage is None
        else UsageBody(usage.get("input_tokens", 0), usage.get("output_tokens", 0), usage.get("total_tokens", 0)),
        error=redact_text(row.error) or None,
        error_code=row.error_code or None,
        attempt=row.attempt,
    )


async def _describe(request: Request, run: Run | RunRow) -> RunBody:
    core = request.core
    default_model = core.public_model
    if isinstance(run, RunRow):
        if run.status.terminal or not core.shared:
            settled = run.status.terminal and not (core.shared and await core.store.root_open(run.run_id))
            return _stored_body(run, default_model, settled=settled)
        return _stored_body(run, default_model, settled=False, approvals=await _asked(request, run.run_id))
    if run.ended.is_set():
        return _live_body(run, default_model)
    return _live_body(run, default_model, await _asked(request, run.id))


async def _asked(request: Request, run_id: str) -> list[PendingApproval]:
    """Return the pending requests of a run."""
    return [PendingApproval(**describe(approval)) for approval in await request.core.approvals.pending(run_id)]


async def _wait_for_row(request: Request, row: RunRow, *, settled: bool) -> RunRow:
    """Return the row of a run when it has ended, or settled: one on another node, or one that is stored and has not begun here."""
    store = request.core.store
    while True:
        woken = trio.Event()
        with watch_run(store, row.run_id, woken.set):
            found = await store.get_run(row.run_id)
            if found is None:
                return row
            if found.status.terminal and not (settled and await store.root_open(row.run_id)):
                return found
            row = found
            await woken.wait()


# -- starting ----------------------------------------------------------------------------------------------------------------------


def _read_input(body: RunRequest) -> tuple[Content, list[Message]]:
    """Return the message of a run, and the items before it."""
    given = body.input
    if isinstance(given, str):
        prompt: Content = given
        earlier: list[Any] = []
    elif isinstance(given, list) and given:
        *earlier, last = cast("list[Any]", given)
        if isinstance(last, dict):
            content: Any = cast("dict[str, Any]", last).get("content")
        else:
            content = last if isinstance(last, str) else None
        prompt = normalise(content, f"input[{len(earlier)}].content")
    else:
        raise ApiError(400, "input must be a string or a list of messages, and not empty.", param="input")
    if not has_content(prompt):
        raise ApiError(400, "input has no message: neither text nor an image.", param="input")
    return prompt, [message for number, item in enumerate(earlier) if (message := _earlier(item, number)) is not None]


def _earlier(item: Any, number: int) -> Message | None:
    if isinstance(item, str):
        return Message(role="user", content=item)
    if not isinstance(item, dict):
        return None
    table = cast("dict[str, Any]", item)
    role, content = table.get("role"), table.get("content")
    if not isinstance(role, str) or content is None:
        return None
    return Message(role=role, content=normalise(content, f"input[{number}].content"))


def explicit_history(entries: list[HistoryMessage] | None) -> tuple[Message, ...]:
    """Return `conversation_history`, checked."""
    return tuple(
        Message(role=entry.role, content=normalise(entry.content, f"conversation_history[{number}].content"))
        for number, entry in enumerate(entries or ())
    )


async def start_run(request: Request) -> HandlerResult:
    """Start a run. It is durable when the response is sent, and belongs to the runtime."""
    core = request.core
    key = session_key_header(request)
    once = idempotency_key(request)
    body = await request.json(_run_decoder)
    prompt, earlier = _read_input(body)
    history: tuple[Message, ...] | None = explicit_history(body.conversation_history)
    instructions = body.instructions or ""
    run_id = core.ids.make("run_")
    session_id = path_safe_id(body.session_id, "session_id") if body.session_id else ""
    if body.previous_response_id:
        chain = await previous_response(request, body.previous_response_id)
        history = history or chain.transcript
        session_id = session_id or chain.session_id
        instructions = instructions or chain.instructions
    history = history or tuple(earlier)
    claim = core.turns.own(request.caller, run_id, key)
    if session_id:
        claim = await core.turns.named(request.caller, session_id, key, resumes=not body.session_id)
        # A named session has its own transcript, unless the client sends one.
        history = history or None
        instructions = "\n".join(text for text in (claim.prompt, instructions) if text)
    input = TurnInput(
        text=text_of(prompt),
        content="" if isinstance(prompt, str) else prompt,
        history=history,
        instructions=instructions,
        model=body.model or "",
    )
    fingerprint = fingerprint_of(await request.body()) if once else ""
    try:
        run = await core.turns.start(
            claim,
            input,
            run_id=run_id,
            idempotency_key=once,
            fingerprint=fingerprint,
            resumable=body.if_interrupted == "resume",
        )
        started = run.id
    except AlreadyStarted as known:
        started = known.run_id
    headers = [(b"location", b"/v1/runs/%b" % started.encode())]
    if key:
        headers.append((b"x-hermes-session-key", key.encode("latin-1", "replace")))
    return Response.of(RunStarted(started), 202, headers)


# -- reading -----------------------------------------------------------------------------------------------------------------------


async def get_run(request: Request) -> HandlerResult:
    """Return a run as it is now, or when it has ended or settled, as requested, within a time limit."""
    run = await find_run(request)
    wait = request.query("wait")
    if wait not in ("", "ended", "settled"):
        raise ApiError(400, "wait must be `ended` or `settled`.", param="wait")
    seconds = _seconds(request)
    if wait:
        with trio.move_on_after(seconds):
            if isinstance(run, Run):
                await (run.ended if wait == "ended" else run.settled).wait()
            elif request.core.shared or not run.status.terminal:
                await _wait_for_row(request, run, settled=wait == "settled")
        if isinstance(run, RunRow):
            run = await find_run(request)
    return Response.of(await _describe(request, run))


def _seconds(request: Request) -> float:
    text = request.query("timeout")
    if not text:
        return DEFAULT_WAIT
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    most = request.core.limits.wait_seconds
    if not 0 <= seconds <= most:
        raise ApiError(400, f"timeout must be a number of seconds from 0 to {most:g}.", param="timeout")
    return seconds


def _listed(body: RunBody) -> RunBody:
    """Return a run for a list: with the beginning of its output."""
    if body.output is not None and len(body.output) > LISTED_OUTPUT:
        body.output = body.output[:LISTED_OUTPUT]
        body.output_truncated = True
    return body


async def list_runs(request: Request) -> HandlerResult:
    """Return the caller's runs, the newest first."""
    core = request.core
    page = page_of(request)
    session_id = request.query("session_id") or None
    wanted: RunStatus | None = None
    if text := request.query("status"):
        try:
            wanted = RunStatus(text)
        except ValueError:
            known = ", ".join(status.value for status in RunStatus)
            raise ApiError(400, f"status must be one of {known}.", param="status") from None
    live = core.runtime.stateless.runs
    if wanted is not None and not wanted.terminal and not core.shared:
        # The store does not follow a live run from status to status; the run itself knows.
        found = [
            run
            for run in reversed(live.all())
            if run.status is wanted
            and request.caller.owns(run.record.tenant)
            and session_id in (None, run.record.session_id)
        ]
        data = [_listed(await _describe(request, run)) for run in found[page.offset : page.offset + page.limit]]
        more = len(found) > page.offset + page.limit
    else:
        which = RunFilter(status=wanted, session_id=session_id, tenant=request.caller.sees)
        rows = await core.store.list_runs(which, page.peek)
        more = len(rows) > page.limit
        data = [_listed(await _describe(request, live.find(row.run_id) or row)) for row in rows[: page.limit]]
    return Response.of(RunList(data, page.limit, page.offset, more))


async def run_events(request: Request) -> HandlerResult:
    """Stream the events of a run: all of them, or those behind `Last-Event-ID`, to its end."""
    run = await find_run(request)
    until = request.query("until") or "ended"
    if until not in ("ended", "settled"):
        raise ApiError(400, "until must be `ended` or `settled`.", param="until")
    run_id = run.id if isinstance(run, Run) else run.run_id
    last = request.header(b"last-event-id") or request.query("last_event_id")
    after = parse_event_id(last) if last else None

    async def stream(writer: StreamWriter) -> None:
        with request.core.readers.reading(request.caller.key_id):
            await follow(request.core, run_id, writer, after=after, unknown=bool(last) and after is None, until=until)

    return EventStream(stream)


# -- approving and stopping --------------------------------------------------------------------------------------------------------


async def answer_approval(request: Request) -> HandlerResult:
    """Answer a run's request for approval: one by its id, the oldest, or all."""
    run = await find_run(request)
    run_id = request.params["run_id"]
    body = await request.json(_approval_decoder)
    word = body.choice.strip().lower() if isinstance(body.choice, str) else ""
    word = _APPROVE.get(word, word)
    try:
        choice = ApprovalChoice(word)
    except ValueError:
        known = ", ".join(choice.value for choice in ApprovalChoice)
        raise ApiError(400, f"choice must be one of {known}.", code="invalid_approval_choice", param="choice") from None
    if (run.status.terminal or not request.core.shared) if isinstance(run, RunRow) else run.ended.is_set():
        raise ApiError(409, f"The run {run_id} has ended; nothing waits for approval.", code="approval_not_active")
    everything = loose_bool(body.all, False) or loose_bool(body.resolve_all, False)
    answered = await request.core.approvals.answer(
        run_id, choice, approval_id=body.approval_id or "", everything=everything
    )
    if not answered:
        what = f"the approval {body.approval_id!r}" if body.approval_id else "no approval"
        raise ApiError(
            409,
            f"The run {run_id} does not wait for {what}."
            if body.approval_id
            else f"The run {run_id} waits for {what}.",
            code="approval_not_pending",
            param="approval_id" if body.approval_id else None,
        )
    return Response.of(ApprovalAnswered(run_id, choice.value, len(answered), [approval.id for approval in answered]))


async def _stop_elsewhere(request: Request, row: RunRow, cause: Cause, seconds: float) -> StopReceipt:
    """Stop a run on the node that has it. A resumable one is not begun again from now on; if it waited for a claim, that ends it, and if a node has claimed
    it before, that one stops it."""
    core = request.core
    if row.attempt:
        await core.runtime.stateless.stop_resuming(row.run_id)
        waited = not row.owner
        row = await core.store.get_run(row.run_id) or row
        if waited and row.status.terminal:  # no node had it
            return StopReceipt(target=row.run_id, cause=cause, ok=True, milliseconds=0.0)
        if (claimed := core.runtime.stateless.runs.find(row.run_id)) is not None:
            return await claimed.stop_all(cause, seconds)
    while True:
        receipt = await core.runtime.peers.stop_run(row.run_id, row.owner, cause, seconds)
        found = await core.store.get_run(row.run_id) if row.attempt else None
        if found is None or found.status.terminal or found.owner == row.owner:
            return receipt
        row = found


async def stop_run(request: Request) -> HandlerResult:
    """Stop a run and everything that it started. With `wait=true` the response is the receipt."""
    run = await find_run(request)
    core = request.core
    wait = loose_bool(request.query("wait"), False)
    cause = Cause(CancelCause.STOP, f"asked for by key {request.caller.name}"[:200])
    if isinstance(run, RunRow):
        waits = run.attempt and not run.status.terminal and not run.owner
        if not (core.shared or waits) or (run.status.terminal and not await core.store.root_open(run.run_id)):
            raise not_found("running run", run.run_id, "run_not_found")
        seconds = STOP_SECONDS if wait else 0.0
        receipt = await _stop_elsewhere(request, run, cause, seconds)
        if not wait:
            return Response.of(StopAnswer(run.run_id, "stopping"))
        with trio.move_on_after(1.0):
            await _wait_for_row(request, run, settled=False)
        found = await core.store.get_run(run.run_id) or run
        return Response.of(StopAnswer(run.run_id, found.status.value, receipt.as_dict()))
    jobs = run.jobs()
    if run.ended.is_set() and not jobs:
        raise not_found("running run", run.id, "run_not_found")
    if run.record.resumable:
        run.request_stop(cause)
        await core.runtime.stateless.stop_resuming(run.id)
    if not wait:
        run.request_stop(cause)
        for job in jobs:
            job.cancel(cause)
        return Response.of(StopAnswer(run.id, "stopping"))
    receipt = await run.stop_all(cause, STOP_SECONDS)
    return Response.of(StopAnswer(run.id, run.status.value, receipt.as_dict()))


def run_routes() -> list[Route]:
    """Return the routes of this module."""
    route = msgspec.structs.replace
    base = Route(name="", method="GET", path="", handler=get_run, access=RequiredScope.RUNS, tag="runs")
    return [
        route(
            base,
            name="runs_start",
            provides={"run_id": "$response.body#/run_id"},
            method="POST",
            path="/v1/runs",
            handler=start_run,
            turns=True,
            direct=True,
            summary="Start a run that survives its client",
            body=RunRequest,
            answer=RunStarted,
            status=202,
            errors=(400, 404, 409, 429, 503),
            parameters=(RouteParameter("Idempotency-Key", "Start at most one run for this key.", where="header"),),
        ),
        route(
            base,
            name="runs_list",
            path="/v1/runs",
            handler=list_runs,
            summary="List your runs, the newest first",
            answer=RunList,
            errors=(400,),
            parameters=(
                RouteParameter(
                    "status",
                    "Only runs in this status; empty for all.",
                    {"type": "string", "enum": ["", *(status.value for status in RunStatus)]},
                ),
                RouteParameter("session_id", "Only runs of this session."),
                RouteParameter("limit", "How many.", LOOSE_NUMBER),
                RouteParameter("offset", "Behind how many.", LOOSE_NUMBER),
            ),
        ),
        route(
            base,
            name="run",
            path="/v1/runs/{run_id}",
            handler=get_run,
            summary="Get a run as it is now, or as it ends",
            answer=RunBody,
            errors=(400, 404),
            parameters=(
                RouteParameter(
                    "wait",
                    "Wait until the run has ended, or settled; empty for no wait.",
                    {"type": "string", "enum": ["", "ended", "settled"]},
                ),
                RouteParameter("timeout", "Seconds to wait at most.", {"type": "number", "minimum": 0, "maximum": 600}),
            ),
        ),
        route(
            base,
            name="run_events",
            path="/v1/runs/{run_id}/events",
            handler=run_events,
            streams=True,
            summary="Stream the events of a run; the stream can be resumed",
            errors=(400, 404),
            media="text/event-stream",
            parameters=(
                RouteParameter("Last-Event-ID", "Resume behind this event.", where="header"),
                RouteParameter(
                    "until",
                    "Where the stream ends; empty for `ended`.",
                    {"type": "string", "enum": ["", "ended", "settled"]},
                ),
            ),
        ),
        route(
            base,
            name="run_approval",
            method="POST",
            path="/v1/runs/{run_id}/approval",
            handler=answer_approval,
            summary="Answer a run's requests for approval",
            body=ApprovalRequest,
            answer=ApprovalAnswered,
            errors=(400, 404, 409),
        ),
        route(
            base,
            name="run_stop",
            method="POST",
            path="/v1/runs/{run_id}/stop",
            handler=stop_run,
            summary="Stop a run and everything that it started",
            answer=StopAnswer,
            errors=(404,),
            parameters=(RouteParameter("wait", "HandlerResult with the receipt.", LOOSE_FLAG),),
        ),
    ]
