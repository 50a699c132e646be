"""HTTP endpoints that a platform calls: responses, headers and forms.

An adapter with such an endpoint has `endpoint`, its path, and `handle(method, path, headers, body)`; the gateway mounts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol
from urllib.parse import parse_qsl

import msgspec


class CallbackResponse(NamedTuple):
    """An HTTP response."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""

    @classmethod
    def of(cls, status: int, body: Mapping[str, Any], *headers: tuple[str, str]) -> CallbackResponse:
        """Return a response in JSON."""
        return cls(status, (("Content-Type", "application/json"), *headers), msgspec.json.encode(body))

    @classmethod
    def refusal(cls, status: int, error: str, *headers: tuple[str, str]) -> CallbackResponse:
        """Return a response that says what was wrong."""
        return cls.of(status, {"error": error}, *headers)


class CallbackEndpoint(Protocol):
    """An endpoint: requests to the path `endpoint` go to `handle`. Bodies above `max_body_bytes` need not be read."""

    @property
    def endpoint(self) -> str:
        """Return the path, or empty if there is none."""
        ...

    @property
    def max_body_bytes(self) -> int:
        """Return the maximum size of a body."""
        ...

    async def handle(self, method: str, path: str, headers: Iterable[tuple[str, str]], body: bytes) -> CallbackResponse:
        """Answer one request. Cancelling it does not undo what was accepted."""
        ...


def headers_of(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the headers by lower-case name."""
    return {name.lower(): value for name, value in headers}


def form_of(body: bytes) -> dict[str, str]:
    """Return the fields of a URL-encoded form."""
    return dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))
