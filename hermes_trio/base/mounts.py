"""Addresses that an adapter has on the server: what it is given for a request, and what it answers, as types that both sides may import.

The server authenticates, checks the scope and carries the bytes; the adapter gets the caller, and never a credential.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import msgspec

MountSend: TypeAlias = Callable[[bytes], Awaitable[None]]
"""Sends some bytes of a streamed answer. Cancelling it means that the client has disconnected."""


class MountCaller(msgspec.Struct, frozen=True, kw_only=True):
    """The authenticated caller of a request."""

    key_id: str
    name: str
    tenant: str
    scopes: frozenset[str]
    admin: bool


class MountRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `params` are the placeholders of the path; `last_event_id` is where a stream goes on."""

    method: str
    path: str
    params: Mapping[str, str]
    query: Callable[[str], str]
    body: bytes
    caller: MountCaller
    last_event_id: str = ""


class MountResponse(msgspec.Struct, frozen=True):
    """An answer in JSON."""

    body: Any
    status: int = 200


class MountFile(msgspec.Struct, frozen=True):
    """A file. The server lets a browser show a picture, and only keep anything else; nothing in it can run."""

    body: bytes
    media: str
    name: str


class MountStream(msgspec.Struct, frozen=True):
    """An answer that goes on: `run(send)` sends server-sent events until it returns or is cancelled."""

    run: Callable[[MountSend], Awaitable[None]]


class MountProblem(Exception):
    """A request that is refused: the status, a code and words for the client."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one path. `scope` is what the caller's key must be allowed."""

    name: str
    method: str
    path: str
    scope: str
    handler: Callable[[MountRequest], Awaitable[MountResponse | MountFile | MountStream]]
    streams: bool = False
    status: int = 200
    body: type | None = None
    """The type of the request's body."""
    media: str = "application/json"
    """The type of the answer, if it is no stream."""
    summary: str = ""
    tag: str = ""
