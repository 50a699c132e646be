"""An address of ours that a platform calls: what is answered, and how headers and forms are read.

An adapter with such an address has `endpoint`, its path, and `handle(method, path, headers, body)`; whoever wires the server mounts it there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol
from urllib.parse import parse_qsl

import msgspec

__all__ = ["CallbackEndpoint", "CallbackResponse", "form_of", "headers_of"]


class CallbackResponse(NamedTuple):
    """An HTTP answer."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""

    @classmethod
    def of(cls, status: int, body: Mapping[str, Any], *headers: tuple[str, str]) -> CallbackResponse:
        """An answer in JSON."""
        return cls(status, (("Content-Type", "application/json"), *headers), msgspec.json.encode(body))

    @classmethod
    def refusal(cls, status: int, error: str, *headers: tuple[str, str]) -> CallbackResponse:
        """An answer that says what was wrong."""
        return cls.of(status, {"error": error}, *headers)


class CallbackEndpoint(Protocol):
    """Something to mount: requests to `endpoint` go to `handle`. Bodies above `max_body_bytes` need not be read."""

    @property
    def endpoint(self) -> str:
        """The path, or empty if there is nothing to mount."""
        ...

    @property
    def max_body_bytes(self) -> int:
        """How much of a body is read at most."""
        ...

    async def handle(self, method: str, path: str, headers: Iterable[tuple[str, str]], body: bytes) -> CallbackResponse:
        """Answer one request. Cancelling it leaves what was accepted accepted."""
        ...


def headers_of(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Headers by lower-case name."""
    return {name.lower(): value for name, value in headers}


def form_of(body: bytes) -> dict[str, str]:
    """The fields of an URL-encoded form."""
    return dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))
