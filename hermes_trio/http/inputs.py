"""Validates what clients send: ids, headers, numbers and loose booleans."""

from __future__ import annotations

from typing import Any, Final

from hermes_trio.store import Page

from .errors import ApiError
from .requests import Request

PAGE: Final = 50
LARGEST_PAGE: Final = 200

ID_LENGTH: Final = 256
IDEMPOTENCY_LENGTH: Final = 255

RESERVED_PREFIXES: Final = ("api-", "run_")

_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})
_UNSAFE: Final = ("..", "/", "\\")


def loose_bool(value: Any, default: bool) -> bool:
    """Parse JSON booleans, the usual words for them, and numbers by truthiness; anything else is the default (API-27)."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        word = value.strip().lower()
        return True if word in _TRUE else False if word in _FALSE else default
    if isinstance(value, int | float):
        return bool(value)
    return default


def whole_number(text: str, default: int, *, least: int = 0, most: int | None = None) -> int:
    """Parse a number of a query string; the default for anything else, and at most `most`."""
    try:
        number = int(text)
    except ValueError:
        return default
    if number < least:
        return default
    return number if most is None else min(number, most)


def page_of(request: Request) -> Page:
    """Return the page that `limit` and `offset` of the query ask for: 50 entries by default, at most 200."""
    limit = whole_number(request.query("limit"), PAGE, least=1, most=LARGEST_PAGE)
    return Page(limit, whole_number(request.query("offset"), 0, most=2**31))


def check_length(request: Request, limit: int) -> None:
    """Refuse a body by its announced length, before it is read."""
    value = request.header(b"content-length")
    if value is None:
        return
    if not (value.isascii() and value.isdigit()):
        raise ApiError(400, "Content-Length is not a number.", code="invalid_content_length", param="Content-Length")
    if int(value) > limit:
        raise ApiError(413, f"The request body is larger than {limit} bytes.", code="body_too_large")


def path_safe_id(value: str, param: str) -> str:
    """Return a session id that a client chose, trimmed. Raises 400 for characters with a meaning in a path or a header."""
    trimmed = value.strip()
    problem = ""
    if len(trimmed) > ID_LENGTH:
        problem = f"has {len(trimmed)} characters; at most {ID_LENGTH} are allowed"
    elif any(ord(character) < 32 or ord(character) == 127 for character in trimmed):
        problem = "contains a control character"
    elif any(mark in trimmed for mark in _UNSAFE) or (len(trimmed) > 1 and trimmed[1] == ":" and trimmed[0].isalpha()):
        problem = "must not contain '..', '/', '\\' or begin like a drive letter"
    if problem:
        raise ApiError(400, f"{param} {problem}.", code="invalid_session_id", param=param)
    return trimmed


def is_reserved_id(session_id: str) -> bool:
    """Return whether only the server creates sessions of such an id: derived ones, those of responses and those of runs."""
    return session_id.startswith(RESERVED_PREFIXES)


def session_id_header(request: Request) -> str:
    """Return `X-Hermes-Session-Id`, or an empty text."""
    value = request.header(b"x-hermes-session-id")
    return path_safe_id(value, "X-Hermes-Session-Id") if value else ""


def session_key_header(request: Request) -> str:
    """Return `X-Hermes-Session-Key`, or an empty text."""
    value = request.header(b"x-hermes-session-key")
    if not value:
        return ""
    trimmed = value.strip()
    if len(trimmed) > ID_LENGTH or any(ord(character) < 32 for character in trimmed):
        raise ApiError(
            400,
            f"X-Hermes-Session-Key must have at most {ID_LENGTH} characters and no control characters.",
            code="invalid_session_key",
            param="X-Hermes-Session-Key",
        )
    return trimmed


def detaches(request: Request) -> bool:
    """Return whether the turn of a request continues as a run when its client disconnects: `X-Hermes-On-Disconnect`, else `server.on_disconnect`."""
    value = request.raw_header(b"x-hermes-on-disconnect")
    if value is None:
        return request.core.server.on_disconnect == "detach"
    word = value.strip().lower()
    if word not in (b"detach", b"cancel"):
        raise ApiError(
            400,
            "X-Hermes-On-Disconnect must be detach or cancel.",
            code="invalid_value",
            param="X-Hermes-On-Disconnect",
        )
    return word == b"detach"


def idempotency_key(request: Request) -> str:
    """Return `Idempotency-Key`, or an empty text."""
    value = request.header(b"idempotency-key")
    if value is None:
        return ""
    trimmed = value.strip()
    if not trimmed or len(trimmed) > IDEMPOTENCY_LENGTH or not trimmed.isprintable():
        raise ApiError(
            400,
            f"Idempotency-Key must have 1 to {IDEMPOTENCY_LENGTH} printable characters.",
            code="invalid_idempotency_key",
            param="Idempotency-Key",
        )
    return trimmed
