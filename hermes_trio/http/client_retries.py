"""Requests that a client retries by itself after a time-out.

A client that disconnects cancels its turn. The official clients then send the same request again, with `x-stainless-retry-count`. If tools had run
in the cancelled turn, that is stored with the turn's end, and the retry is refused: it would do the same work again.
"""

from __future__ import annotations

from typing import Final

from hermes_trio.runtime.outcome import CancelCause, Outcome
from hermes_trio.runtime.turn import Turn
from hermes_trio.store import IdempotentReply

from .errors import NOT_AGAIN, ApiError
from .idempotency import fingerprint_of
from .requests import Request

ROUTE: Final = "turns whose client left"
REMEMBERED_SECONDS: Final = 3600.0


def note_disconnect(request: Request, turn: Turn, outcome: Outcome) -> list[object]:
    """Return the record to commit with a turn whose client disconnected after tools had run; none for any other turn."""
    if outcome.cause is None or outcome.cause.kind is not CancelCause.CLIENT_GONE or not outcome.usage.tool_calls:
        return []
    return [
        IdempotentReply(
            tenant=request.caller.tenant,
            route=ROUTE,
            key=_key(request),
            fingerprint="",
            status=424,
            headers=(),
            body=turn.context.session_id.encode(),
            ttl=REMEMBERED_SECONDS,
        )
    ]


async def refuse_retry(request: Request) -> None:
    """Raise 424 for a client's automatic retry if tools had run when it disconnected. The body must have been read."""
    count = request.raw_header(b"x-stainless-retry-count")
    if count is None or count == b"0":
        return
    found = await request.core.store.get_reply(request.caller.tenant, ROUTE, _key(request), "")
    if found is not None:
        raise ApiError(
            424,
            "This request retries one whose client disconnected after tools had run. Their results are in the session"
            f" {found.body.decode()!r}. Use a longer time-out, or detach the request (X-Hermes-On-Disconnect: detach).",
            code="agent_incomplete",
            kind="server_error",
            headers=(NOT_AGAIN,),
        )


def _key(request: Request) -> str:
    return f"{request.path} {fingerprint_of(request.read_body)}"
