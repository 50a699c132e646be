"""The headers of every response, and CORS."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, final

from hermes_trio.http.server import HeaderBlock

from .requests import HeaderPairs

SECURITY: Final = (
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
    (b"strict-transport-security", b"max-age=31536000; includeSubDomains"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"x-xss-protection", b"0"),
    (b"referrer-policy", b"no-referrer"),
)

JSON_ANSWER: Final = HeaderBlock([(b"content-type", b"application/json"), *SECURITY])
"""All headers of a JSON response that has none of its own."""

JSON_ANSWER_NAMES: Final = frozenset(name for name, _ in JSON_ANSWER)

_METHODS: Final = b"GET, POST, PATCH, DELETE, OPTIONS"
_REQUEST_HEADERS: Final = (
    b"Authorization, Content-Type, Idempotency-Key, Last-Event-ID, X-Hermes-Session-Id, X-Hermes-Session-Key,"
    b" X-Hermes-On-Disconnect, X-Hermes-Server-Tools, X-Api-Key, Anthropic-Version"
)
_EXPOSED: Final = (
    b"X-Hermes-Session-Id, X-Hermes-Session-Key, X-Hermes-Run-Id, X-Hermes-Completed, X-Hermes-Partial, X-Hermes-Error, Retry-After,"
    b" Idempotent-Replayed"
)


def with_security(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return these headers and the security headers; a header that a response sets itself is kept."""
    own = list(headers)
    names = {name for name, _ in own}
    return own + [pair for pair in SECURITY if pair[0] not in names]


@final
class Cors:
    """The configured origins."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(
            origin.strip().rstrip("/").encode("latin-1", "replace") for origin in origins if origin.strip()
        )
        self._any = b"*" in self._origins

    def allows(self, origin: bytes) -> bool:
        """Return whether this origin may read responses."""
        return self._any or origin.rstrip(b"/") in self._origins

    def headers(self, origin: bytes) -> HeaderPairs:
        """Return the headers for an allowed origin."""
        headers = [
            (b"access-control-allow-origin", b"*" if self._any else origin),
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-allow-headers", _REQUEST_HEADERS),
            (b"access-control-expose-headers", _EXPOSED),
            (b"access-control-max-age", b"600"),
        ]
        if not self._any:
            headers.append((b"vary", b"Origin"))
        return headers
