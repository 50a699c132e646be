"""Approvals: what the API needs of the broker, and the list of all requests.

In a run, the scope of an approval is the run's id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, Protocol

import msgspec

from hermes_trio.http.auth import RequiredScope
from hermes_trio.http.errors import ApiError, not_found
from hermes_trio.http.inputs import whole_number
from hermes_trio.http.requests import HandlerResult, Request, Response
from hermes_trio.http.routing import Route, RouteParameter
from hermes_trio.http.schemas import LOOSE_NUMBER, Deleted
from hermes_trio.store import ApprovalChoice, ApprovalRow, Grant, Page
from hermes_trio.store.records import ApprovalState, tenant_grantee

SHOWN: Final = 50
MOST_SHOWN: Final = 200


class ApprovalsPort(Protocol):
    """Pending requests for approval, by scope. The implementation also emits `approval.responded` or `approval.expired`, once for each request."""

    async def pending(self, scope: str) -> Sequence[ApprovalRow]:
        """Return the pending requests of a scope, oldest first."""
        ...

    async def answer(
        self, scope: str, choice: ApprovalChoice, *, approval_id: str = "", everything: bool = False
    ) -> Sequence[ApprovalRow]:
        """Answer one request by its id, the oldest of a scope, or all of them; return those that were still pending."""
        ...


class NoApprovals:
    """The broker of a server whose agent requests no approvals."""

    async def pending(self, scope: str) -> Sequence[ApprovalRow]:
        """Return nothing."""
        return ()

    async def answer(
        self, scope: str, choice: ApprovalChoice, *, approval_id: str = "", everything: bool = False
    ) -> Sequence[ApprovalRow]:
        """Answer nothing."""
        return ()


def describe(approval: ApprovalRow) -> dict[str, Any]:
    """Return a request in the form of the API."""
    return {
        "approval_id": approval.id,
        "command": approval.command,
        "description": approval.description,
        "pattern_keys": list(approval.categories),
        "choices": [choice.value for choice in approval.choices],
        "requested_at": approval.created_at,
        "expires_at": approval.expires_at,
    }


class AnyApproval(msgspec.Struct):
    """A request for approval, with its owner and its answer."""

    approval_id: str
    command: str
    description: str
    pattern_keys: list[str]
    choices: list[str]
    requested_at: float
    expires_at: float
    state: str
    choice: str | None
    reason: str
    answered_at: float | None
    session_key: str
    session_id: str
    run_id: str
    tenant: str
    object: str = "hermes.approval"


class ApprovalList(msgspec.Struct):
    """Requests for approval."""

    data: list[AnyApproval]
    object: str = "list"


class ApprovalDecision(msgspec.Struct):
    """A person's answer."""

    choice: Literal["once", "session", "always", "deny"]
    reason: str = ""


_answer: Final = msgspec.json.Decoder(ApprovalDecision)


def _whole(row: ApprovalRow) -> AnyApproval:
    return AnyApproval(
        **describe(row),
        state=row.state.value,
        choice=None if row.choice is None else row.choice.value,
        reason=row.reason,
        answered_at=row.answered_at,
        session_key=row.session_key,
        session_id=row.session_id,
        run_id=row.run_id,
        tenant=row.tenant,
    )


async def list_approvals(request: Request) -> HandlerResult:
    """Return all pending requests, the oldest first; with `state=answered` those that were answered or expired, the newest first."""
    store, seen = request.core.store, request.caller.sees
    limit = whole_number(request.query("limit"), SHOWN, least=1, most=MOST_SHOWN)
    wanted = request.query("state") or ApprovalState.PENDING.value
    if wanted == ApprovalState.PENDING.value:
        return Response.of(
            ApprovalList([_whole(row) for row in await store.list_approvals(tenant=seen, page=Page(limit))])
        )
    if wanted != "answered":
        raise ApiError(400, "state must be pending or answered.", param="state")
    rows = await store.list_approvals(state=None, tenant=seen, newest=True, page=Page(limit))
    return Response.of(ApprovalList([_whole(row) for row in rows if row.state is not ApprovalState.PENDING]))


async def answer_approval(request: Request) -> HandlerResult:
    """Answer one request. Raises 409 if it is no longer pending."""
    core = request.core
    approval_id = request.params["approval_id"]
    row = await core.store.get_approval(approval_id)
    if row is None or not request.caller.owns(row.tenant):
        raise not_found("approval", approval_id, "approval_not_found")
    body = await request.json(_answer)
    answered = await core.approvals.answer(row.scope, ApprovalChoice(body.choice), approval_id=row.id)
    if not answered:
        raise ApiError(409, "This approval is not pending any more.", code="approval_not_pending")
    return Response.of(_whole(answered[0]))


class GrantBody(msgspec.Struct):
    """A category of commands that is allowed without asking."""

    id: str
    scope: str
    category: str
    granted_at: float
    object: str = "hermes.grant"


class GrantList(msgspec.Struct):
    """What is allowed without asking."""

    data: list[GrantBody]
    object: str = "list"


async def _grants(request: Request) -> list[Grant]:
    """Return the grants that this key may list and revoke: the permanent ones of its tenant; for the operator, all."""
    tenant = request.caller.sees
    return await request.core.store.list_grants(scope=None if tenant is None else tenant_grantee(tenant))


async def list_grants(request: Request) -> HandlerResult:
    """Return what was allowed with `always`; for the operator also what was allowed for a run or a conversation that is still open."""
    return Response.of(
        GrantList([GrantBody(one.id, one.scope, one.category, one.granted_at) for one in await _grants(request)])
    )


async def revoke_grant(request: Request) -> HandlerResult:
    """Take a grant back: commands of its category are asked about again, from the next one on."""
    grant_id = request.params["grant_id"]
    for grant in await _grants(request):
        if grant.id == grant_id and await request.core.store.revoke_grant(grant.category, scope=grant.scope):
            return Response.of(Deleted(grant_id, "hermes.grant.revoked", True))
    raise not_found("grant", grant_id, "grant_not_found")


def approval_routes() -> list[Route]:
    """Return the routes of this module."""
    return [
        Route(
            name="approvals",
            method="GET",
            path="/v1/approvals",
            handler=list_approvals,
            access=RequiredScope.RUNS,
            summary="List requests for approval",
            answer=ApprovalList,
            errors=(400,),
            parameters=(
                RouteParameter("state", "pending (default) or answered."),
                RouteParameter("limit", "At most so many.", LOOSE_NUMBER),
            ),
            tag="approvals",
        ),
        Route(
            name="approval_answer",
            method="POST",
            path="/v1/approvals/{approval_id}",
            handler=answer_approval,
            access=RequiredScope.RUNS,
            summary="Answer a request for approval",
            body=ApprovalDecision,
            answer=AnyApproval,
            errors=(400, 404, 409),
            tag="approvals",
        ),
        Route(
            name="grants",
            method="GET",
            path="/v1/grants",
            handler=list_grants,
            access=RequiredScope.RUNS,
            summary="What is allowed without asking",
            answer=GrantList,
            tag="approvals",
        ),
        Route(
            name="grant_revoke",
            method="DELETE",
            path="/v1/grants/{grant_id}",
            handler=revoke_grant,
            access=RequiredScope.RUNS,
            summary="Ask about a category of commands again",
            answer=Deleted,
            errors=(404,),
            tag="approvals",
        ),
    ]
