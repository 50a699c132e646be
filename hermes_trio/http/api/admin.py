"""Administration: drain the server, manage keys, and handle dead letters."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from hermes_trio.http.auth import SCOPES, RequiredScope
from hermes_trio.http.errors import ApiError, not_found
from hermes_trio.http.inputs import page_of
from hermes_trio.http.requests import HandlerResult, Request, Response
from hermes_trio.http.routing import Route, RouteParameter
from hermes_trio.http.schemas import LOOSE_NUMBER, Deleted
from hermes_trio.store import ApiKey
from hermes_trio.store.records import InboxState, OutboxRow, OutboxState

LONGEST_DRAIN: Final = 3600.0


REPLY_EXCERPT: Final = 2000
"""The maximum of characters of a reply in the list."""


class DrainBody(msgspec.Struct):
    """The state of the drain. `report` says what was left when it ended."""

    draining: bool
    finished: bool
    active_turns: int
    report: dict[str, Any] | None = None
    object: str = "hermes.drain"


class KeyRequest(msgspec.Struct):
    """A key to be created. Without a tenant it is a tenant of its own."""

    name: Annotated[str, Meta(min_length=1, max_length=100)]
    scopes: Annotated[list[Literal["chat", "runs", "sessions", "admin"]], Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: ["chat", "runs"]
    )
    tenant: Annotated[str, Meta(max_length=100)] = ""
    days: Annotated[float, Meta(gt=0, le=36_500)] | None = None


class KeyBody(msgspec.Struct, omit_defaults=True):
    """A key; its secret `key` is only in the response that created it."""

    id: str
    name: str
    tenant: str
    scopes: list[str]
    created_at: float
    last_used_at: float | None
    expires_at: float | None
    revoked_at: float | None
    key: str | None = None
    object: str = "hermes.key"


class KeyList(msgspec.Struct):
    """All keys, oldest first."""

    data: list[KeyBody]
    object: str = "list"


_key_decoder: Final = msgspec.json.Decoder(KeyRequest)


def _drain(request: Request) -> DrainBody:
    core = request.core
    return DrainBody(
        draining=core.runtime.draining,
        finished=core.drain.report is not None,
        active_turns=core.runtime.stateless.active,
        report=core.drain.report,
    )


async def start_drain(request: Request) -> HandlerResult:
    """Refuse new work, let turns end, stop the jobs, and return what is left. Reads are still answered."""
    text = request.query("timeout")
    seconds = request.core.server.drain_seconds
    if text:
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds <= LONGEST_DRAIN:
            raise ApiError(400, f"timeout must be a number of seconds from 0 to {LONGEST_DRAIN:g}.", param="timeout")
    await request.core.drain.run(seconds)
    return Response.of(_drain(request))


async def get_drain(request: Request) -> HandlerResult:
    """Return whether the server drains, and the report of the drain."""
    return Response.of(_drain(request))


# -- keys --------------------------------------------------------------------------------------------------------------------------


def _key(key: ApiKey, secret: str | None = None) -> KeyBody:
    return KeyBody(
        id=key.id,
        name=key.name,
        tenant=key.tenant,
        scopes=list(key.scopes),
        created_at=key.created_at,
        last_used_at=key.last_used_at,
        expires_at=key.expires_at,
        revoked_at=key.revoked_at,
        key=secret,
    )


def check_scopes(scopes: list[str]) -> tuple[str, ...]:
    """Return the scopes, each once. Raises 400 for an unknown one."""
    for scope in scopes:
        if scope not in SCOPES:
            raise ApiError(400, f"scopes holds {scope[:64]!r}; accepted are {', '.join(SCOPES)}.", param="scopes")
    if not scopes:
        raise ApiError(400, f"scopes must hold at least one of {', '.join(SCOPES)}.", param="scopes")
    return tuple(dict.fromkeys(scopes))


async def create_key(request: Request) -> HandlerResult:
    """Create a key. Only this response holds its secret."""
    body = await request.json(_key_decoder)
    expires_at = None if body.days is None else request.core.store.now() + body.days * 86_400
    key, secret = await request.core.store.create_api_key(
        body.name, scopes=check_scopes(list(body.scopes)), tenant=body.tenant, expires_at=expires_at
    )
    return Response.of(_key(key, secret), 201)


async def list_keys(request: Request) -> HandlerResult:
    """Return all keys, without their secrets."""
    found = await request.core.store.list_api_keys(include_revoked=True)
    return Response.of(KeyList([_key(key) for key in found]))


async def revoke_key(request: Request) -> HandlerResult:
    """Revoke a key at once."""
    key_id = request.params["key_id"]
    if not await request.core.store.revoke_api_key(key_id):
        raise not_found("key in force", key_id, "key_not_found")
    return Response.of(Deleted(key_id, "hermes.key.revoked", True))


# -- the outbox ------------------------------------------------------------------------------------------------------------------


class OutboxBody(msgspec.Struct):
    """A reply to a platform."""

    id: int
    platform: str
    target: dict[str, Any]
    text: str
    session_id: str
    state: str
    attempts: int
    next_at: float
    error: str
    maybe_duplicate: bool
    created_at: float
    settled_at: float | None
    object: str = "hermes.reply"


class OutboxList(msgspec.Struct):
    """Replies in one state, oldest first."""

    data: list[OutboxBody]
    limit: int
    offset: int
    has_more: bool
    object: str = "list"


def _reply(row: OutboxRow) -> OutboxBody:
    return OutboxBody(
        id=row.id,
        platform=row.platform,
        target=dict(row.target),
        text=row.text[:REPLY_EXCERPT],
        session_id=row.session_id,
        state=row.state.value,
        attempts=row.attempts,
        next_at=row.next_at,
        error=row.error,
        maybe_duplicate=row.maybe_duplicate > 0,
        created_at=row.created_at,
        settled_at=row.settled_at,
    )


async def list_outbox(request: Request) -> HandlerResult:
    """Return the replies in a state."""
    page = page_of(request)
    try:
        state = OutboxState(request.query("state") or OutboxState.PENDING.value)
    except ValueError:
        known = ", ".join(state.value for state in OutboxState)
        raise ApiError(400, f"state must be one of {known}.", param="state") from None
    found = await request.core.store.list_outbox(state, page.peek, platform=request.query("platform") or None)
    data = [_reply(row) for row in found[: page.limit]]
    return Response.of(OutboxList(data, page.limit, page.offset, len(found) > page.limit))


async def retry_outbox(request: Request) -> HandlerResult:
    """Queue a dead letter again."""
    text = request.params["reply_id"]
    number = int(text) if text.isdecimal() and len(text) <= 18 else -1
    if not await request.core.store.revive_outbox(number):
        raise not_found("reply that was given up", text, "reply_not_found")
    return Response.of({"id": number, "state": OutboxState.PENDING.value, "object": "hermes.reply.retried"})


# -- the inbox -------------------------------------------------------------------------------------------------------------------


class InboxBody(msgspec.Struct):
    """A message or notice of an inbox; `reason` says why it is a dead letter."""

    id: int
    kind: str
    inbox: str
    session_key: str
    text: str
    attempts: int
    created_at: float
    reason: str
    object: str = "hermes.inbox.row"


class InboxList(msgspec.Struct):
    """Rows in one state, oldest first."""

    data: list[InboxBody]
    limit: int
    offset: int
    has_more: bool
    object: str = "list"


async def list_inbox(request: Request) -> HandlerResult:
    """Return the messages and notices in a state; by default the dead letters."""
    page = page_of(request)
    try:
        state = InboxState(request.query("state") or InboxState.DEAD.value)
    except ValueError:
        known = ", ".join(state.value for state in InboxState)
        raise ApiError(400, f"state must be one of {known}.", param="state") from None
    found = await request.core.store.list_inbox(state, page.peek)
    rows = [
        InboxBody(
            id=row.id,
            kind=row.kind.value,
            inbox=row.inbox,
            session_key=row.session_key,
            text=row.text[:REPLY_EXCERPT],
            attempts=row.attempts,
            created_at=row.created_at,
            reason=reason,
        )
        for row, reason in found[: page.limit]
    ]
    return Response.of(InboxList(rows, page.limit, page.offset, len(found) > page.limit))


async def retry_inbox(request: Request) -> HandlerResult:
    """Queue a dead letter again: its conversation takes it at once."""
    text = request.params["row_id"]
    number = int(text) if text.isdecimal() and len(text) <= 18 else -1
    if not await request.core.store.revive_inbox(number):
        raise not_found("dead letter", text, "row_not_found")
    return Response.of({"id": number, "state": InboxState.PENDING.value, "object": "hermes.inbox.retried"})


def admin_routes() -> list[Route]:
    """Return the routes of this module."""
    return [
        Route(
            name="drain_start",
            method="POST",
            path="/admin/drain",
            handler=start_drain,
            access=RequiredScope.ADMIN,
            summary="Drain the server and report what is left",
            answer=DrainBody,
            errors=(400,),
            parameters=(RouteParameter("timeout", "Seconds that running turns have.", {"type": "number"}),),
            tag="admin",
        ),
        Route(
            name="drain",
            method="GET",
            path="/admin/drain",
            handler=get_drain,
            access=RequiredScope.ADMIN,
            summary="Show the state of the drain",
            answer=DrainBody,
            tag="admin",
        ),
        Route(
            name="keys",
            method="GET",
            path="/admin/keys",
            handler=list_keys,
            access=RequiredScope.ADMIN,
            summary="List the keys, without their secrets",
            answer=KeyList,
            tag="admin",
        ),
        Route(
            name="key_create",
            provides={"key_id": "$response.body#/id"},
            method="POST",
            path="/admin/keys",
            handler=create_key,
            access=RequiredScope.ADMIN,
            summary="Create a key",
            body=KeyRequest,
            answer=KeyBody,
            status=201,
            errors=(400,),
            tag="admin",
        ),
        Route(
            name="outbox",
            method="GET",
            path="/admin/outbox",
            handler=list_outbox,
            access=RequiredScope.ADMIN,
            summary="List replies by state",
            answer=OutboxList,
            errors=(400,),
            parameters=(
                RouteParameter("state", "pending (default), sending, sent or dead."),
                RouteParameter("platform", "Only of this platform."),
                RouteParameter("limit", "At most so many.", LOOSE_NUMBER),
                RouteParameter("offset", "Leave out so many.", LOOSE_NUMBER),
            ),
            tag="admin",
        ),
        Route(
            name="outbox_retry",
            method="POST",
            path="/admin/outbox/{reply_id}/retry",
            handler=retry_outbox,
            access=RequiredScope.ADMIN,
            summary="Queue a dead letter again",
            answer=dict[str, Any],
            errors=(404,),
            tag="admin",
        ),
        Route(
            name="inbox",
            method="GET",
            path="/admin/inbox",
            handler=list_inbox,
            access=RequiredScope.ADMIN,
            summary="List messages and notices by state",
            answer=InboxList,
            errors=(400,),
            parameters=(
                RouteParameter(
                    "state", "dead (default), pending, taken, delivered, superseded, abandoned or interrupted."
                ),
                RouteParameter("limit", "At most so many.", LOOSE_NUMBER),
                RouteParameter("offset", "Leave out so many.", LOOSE_NUMBER),
            ),
            tag="admin",
        ),
        Route(
            name="inbox_retry",
            method="POST",
            path="/admin/inbox/{row_id}/retry",
            handler=retry_inbox,
            access=RequiredScope.ADMIN,
            summary="Queue a dead letter again",
            answer=dict[str, Any],
            errors=(404,),
            tag="admin",
        ),
        Route(
            name="key_revoke",
            method="DELETE",
            path="/admin/keys/{key_id}",
            handler=revoke_key,
            access=RequiredScope.ADMIN,
            summary="Revoke a key",
            answer=Deleted,
            errors=(404,),
            tag="admin",
        ),
    ]
