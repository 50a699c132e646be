"""The errors of the API, in one envelope of four keys: `message`, `type`, `param`, `code`.

Handlers raise `ApiError`; exceptions of the layers below are translated here. Messages are redacted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import ceil
from typing import Any, Final

import msgspec

from hermes_trio.base.redaction import redact
from hermes_trio.runtime.errors import Draining, InvalidContext, OutcomeUnknown, RuntimeClosed, TooBusy
from hermes_trio.store import (
    ConversationMoved,
    IdempotencyConflict,
    InvalidTitle,
    SessionExists,
    StoreError,
    UnknownSession,
)

_KINDS: Final[Mapping[int, str]] = {429: "rate_limit_error"}
_PATH: Final = re.compile(r" - at `(?P<path>[^`]*)`$")
_MISSING: Final = re.compile(r"^Object missing required field `(?P<field>.*)`$")
_UNKNOWN: Final = re.compile(r"^Object contains unknown field `(?P<field>.*)`$")
_encode: Final = msgspec.json.Encoder().encode


NOT_AGAIN: Final = (b"x-should-retry", b"false")
"""The header that tells the official clients not to retry."""


class ApiError(Exception):
    """An error response that says what was wrong, where, and what is accepted. `more` is added to the envelope's four keys."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        kind: str = "",
        headers: tuple[tuple[bytes, bytes], ...] = (),
        more: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.kind: str = kind or _KINDS.get(status) or ("server_error" if status >= 500 else "invalid_request_error")
        self.headers = headers
        self.more: Mapping[str, Any] = {} if more is None else more

    def body(self, dialect: str = "") -> bytes:
        """Return the envelope in the form of that `dialect`."""
        if dialect == "anthropic":
            kind = anthropic_error_type(self.status)
            told = {"type": kind, "message": redact(str(self)), "param": self.param, "code": self.code, **self.more}
            return _encode({"type": "error", "error": told})
        error = {"message": redact(str(self)), "type": self.kind, "param": self.param, "code": self.code, **self.more}
        return _encode({"error": error})


_ANTHROPIC_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    424: "api_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error_type(status: int) -> str:
    """Return the error type of Anthropic's API for a status."""
    return _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def body_too_large(limit: int) -> ApiError:
    """Return 413."""
    return ApiError(413, f"The request body is larger than {limit} bytes.", code="body_too_large")


def not_found(what: str, id: str, code: str | None) -> ApiError:
    """Return 404 for a resource that does not exist, or is not the caller's."""
    return ApiError(404, f"There is no {what} {id[:64]!r}.", code=code)


def invalid_body(error: msgspec.ValidationError) -> ApiError:
    """Return 400 with the path into the body as `param`, also for a missing field."""
    text, path = str(error), ""
    if match := _PATH.search(text):
        path = match["path"].removeprefix("$").removeprefix(".")
        text = text[: match.start()]
    if missing := _MISSING.match(text):
        path = f"{path}.{missing['field']}".removeprefix(".")
        text = "this field is required, and missing"
    if unknown := _UNKNOWN.match(text):
        path = f"{path}.{unknown['field']}".removeprefix(".")
        return ApiError(
            400, f"{path} is not a parameter of this request. Leave it out.", code="unknown_parameter", param=path
        )
    where = f"{path}: " if path else "The body: "
    return ApiError(400, f"{where}{text}.", param=path or None)


def retry_after(seconds: float) -> tuple[tuple[bytes, bytes], ...]:
    """Return the `Retry-After` header."""
    return ((b"retry-after", b"%d" % max(1, ceil(seconds))),)


def translate(error: BaseException) -> ApiError | None:
    """Return the `ApiError` for an exception of a lower layer, or None for an unexpected one."""
    match error:
        case ApiError():
            return error
        case Draining():
            return ApiError(
                503,
                "The server is draining and takes no new work; try again in a moment.",
                code="gateway_draining",
                headers=retry_after(error.retry_after),
            )
        case TooBusy():
            return ApiError(429, str(error), code="rate_limit_exceeded", headers=retry_after(error.retry_after))
        case RuntimeClosed():
            return ApiError(503, "The server is stopping.", code="gateway_draining", headers=retry_after(1))
        case InvalidContext():
            return ApiError(400, str(error), code="invalid_session_id")
        case IdempotencyConflict():
            return ApiError(409, str(error), code="idempotency_conflict", param="Idempotency-Key")
        case ConversationMoved():
            return ApiError(409, str(error), code="conversation_moved", param="conversation")
        case SessionExists():
            return ApiError(409, str(error), code="session_exists", param="id")
        case UnknownSession():
            return ApiError(404, str(error), code="session_not_found")
        case InvalidTitle():
            return ApiError(400, str(error), code="invalid_title", param="title")
        case OutcomeUnknown():
            return ApiError(503, error.public, code="outcome_unknown", headers=retry_after(1))
        case StoreError():
            return ApiError(
                503,
                f"The session store cannot be used now: {error.public}.",
                code="session_db_unavailable",
                headers=retry_after(1),
            )
        case _:
            return None


def redact_text(text: str) -> str:
    """Return an error's text, redacted for a client."""
    return redact(text) if text else ""
