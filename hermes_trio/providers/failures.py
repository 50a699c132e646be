"""Classifies a provider's error: from status, headers and body to one `ModelError`.

Both protocols, and the servers that imitate them, are read here, so that the same failure has the same kind everywhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, cast

import msgspec

from hermes_trio.agent.model import ModelError, ModelErrorKind

_BY_WORD: Final[Mapping[str, ModelErrorKind]] = {
    "authentication_error": ModelErrorKind.AUTH,
    "permission_error": ModelErrorKind.AUTH,
    "billing_error": ModelErrorKind.AUTH,
    "invalid_api_key": ModelErrorKind.AUTH,
    "insufficient_quota": ModelErrorKind.RATE_LIMITED,
    "rate_limit_error": ModelErrorKind.RATE_LIMITED,
    "rate_limit_exceeded": ModelErrorKind.RATE_LIMITED,
    "overloaded_error": ModelErrorKind.OVERLOADED,
    "server_error": ModelErrorKind.UNAVAILABLE,
    "api_error": ModelErrorKind.UNAVAILABLE,
    "timeout_error": ModelErrorKind.TIMEOUT,
    "request_too_large": ModelErrorKind.CONTEXT_OVERFLOW,
    "context_length_exceeded": ModelErrorKind.CONTEXT_OVERFLOW,
    "string_above_max_length": ModelErrorKind.CONTEXT_OVERFLOW,
    "content_filter": ModelErrorKind.CONTENT_FILTER,
    "content_policy_violation": ModelErrorKind.CONTENT_FILTER,
    "not_found_error": ModelErrorKind.BAD_REQUEST,
    "model_not_found": ModelErrorKind.BAD_REQUEST,
}

_BY_STATUS: Final[Mapping[int, ModelErrorKind]] = {
    401: ModelErrorKind.AUTH,
    402: ModelErrorKind.AUTH,
    403: ModelErrorKind.AUTH,
    407: ModelErrorKind.AUTH,
    408: ModelErrorKind.TIMEOUT,
    409: ModelErrorKind.UNAVAILABLE,
    413: ModelErrorKind.CONTEXT_OVERFLOW,
    425: ModelErrorKind.UNAVAILABLE,
    429: ModelErrorKind.RATE_LIMITED,
    503: ModelErrorKind.OVERLOADED,
    504: ModelErrorKind.TIMEOUT,
    529: ModelErrorKind.OVERLOADED,
}

# Most servers answer a prompt that is too long with a plain 400, recognised only by its words.
_OVERFLOW: Final = re.compile(
    r"prompt is too long|context (?:length|window|size)|maximum context|too many (?:input )?tokens"
    r"|exceeds? the (?:available )?context|input (?:length|tokens).{0,40}exceed",
    re.IGNORECASE,
)

_FINAL_WORDS: Final = frozenset({"insufficient_quota", "billing_error", "billing_hard_limit_reached"})
"""Errors with a retryable status that a retry does not cure."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The relevant parts of a provider's error, from any of the usual shapes."""

    message: str = ""
    type: str = ""
    code: str = ""
    param: str = ""


def read_failure(body: bytes) -> Failure:
    """Find the error in the body of a response. Text that is not JSON is quoted, shortened; HTML is not quoted."""
    try:
        value: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        text = body[:400].decode("utf-8", "replace").strip()
        return Failure(message="" if text.startswith("<") else " ".join(text.split()))
    return failure_of(value)


def failure_of(value: Any) -> Failure:
    """Find the error in a decoded JSON value."""
    if isinstance(value, list):
        value = cast("list[Any]", value)[:1]
        value = value[0] if value else None
    if not isinstance(value, dict):
        return Failure(message=str(value)[:400] if value is not None else "")
    outer = cast("dict[str, Any]", value)
    inner: Any = outer.get("error", outer)
    if isinstance(inner, str):
        return Failure(message=inner[:2000])
    if not isinstance(inner, dict):
        inner = outer
    error = cast("dict[str, Any]", inner)

    def text(*names: str) -> str:
        for name in names:
            found = error.get(name)
            if isinstance(found, (str, int)) and not isinstance(found, bool):
                return str(found)
        return ""

    message = text("message", "detail", "msg")
    if not message and (detail := error.get("detail") or error.get("errors")):
        message = msgspec.json.encode(detail).decode("utf-8", "replace")
    return Failure(message=message[:2000], type=text("type", "status"), code=text("code"), param=text("param"))


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds to wait, from `retry-after-ms` or `Retry-After` (a number or a date); None without either."""
    for name, scale in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(name, "").strip()
        if not value:
            continue
        try:
            seconds = float(value) * scale
        except ValueError:
            from email.utils import parsedate_to_datetime

            try:
                date = parsedate_to_datetime(value)
            except ValueError:
                continue
            if date.tzinfo is None:
                date = date.replace(tzinfo=UTC)
            seconds = (date - datetime.now(UTC)).total_seconds()
        if math.isfinite(seconds):
            return max(0.0, seconds)
    return None


def _kind(status: int, failure: Failure) -> ModelErrorKind:
    for word in (failure.code, failure.type):
        if word in _BY_WORD:
            kind = _BY_WORD[word]
            break
    else:
        kind = _BY_STATUS.get(
            status, ModelErrorKind.UNAVAILABLE if status >= 500 or status == 0 else ModelErrorKind.BAD_REQUEST
        )
        if not status and failure.code.isdigit():
            return _kind(int(failure.code), Failure(message=failure.message))
        if not status and failure.type == "invalid_request_error":
            kind = ModelErrorKind.BAD_REQUEST
    if kind is ModelErrorKind.BAD_REQUEST and _OVERFLOW.search(failure.message):
        return ModelErrorKind.CONTEXT_OVERFLOW
    return kind


def response_error(name: str, status: int, headers: Mapping[str, str], body: bytes) -> ModelError:
    """Return the error for a response whose status is not 200."""
    failure = read_failure(body)
    if 300 <= status < 400:
        where = headers.get("location", "another address")
        return ModelError(
            ModelErrorKind.BAD_REQUEST,
            f"{name}: the base URL redirects to {where}; configure that address instead",
            status=status,
        )
    kind = _kind(status, failure)
    words = (
        failure.message
        or f"the server answered without an explanation ({headers.get('content-type', 'no content type')})"
    )
    error = ModelError(kind, f"{name}: {words} (HTTP {status})", status=status, retry_after=retry_after(headers))
    if failure.code in _FINAL_WORDS or failure.type in _FINAL_WORDS or headers.get("x-should-retry") == "false":
        error.retryable = False
    return error


def failure_error(name: str, value: Any) -> ModelError:
    """Return the error for an error event inside a stream."""
    failure = failure_of(value)
    kind = _kind(0, failure)
    words = failure.message or failure.type or "the provider reported an error without an explanation"
    error = ModelError(kind, f"{name}: {words}")
    if failure.code in _FINAL_WORDS or failure.type in _FINAL_WORDS:
        error.retryable = False
    return error
