"""What can end a request from outside the application, and the words in which a client is told.

`Ending` is why a request was cut short, recorded before its scope is cancelled and readable by the application
through `ending_of(scope)`. `ProtocolFault` is a request that the server itself refuses; it is answered with the same
four-key error envelope that the front end uses.
"""

from __future__ import annotations

import enum
from typing import final

import msgspec

from hermes_trio.http.server.asgi import Scope

EXCHANGE_EXTENSION = "hermes.exchange"


@enum.unique
class Ending(enum.Enum):
    """Why the server cancelled a request or closed a connection."""

    CLIENT_LEFT = "client left"
    SLOW_READER = "slow reader"
    SLOW_BODY = "slow request body"
    SLOW_HEAD = "slow request head"
    BAD_FRAMING = "malformed request body"
    IDLE = "idle connection"
    SHUTDOWN = "server shutdown"


@final
class RequestEnd(msgspec.Struct):
    """The application's view of one request; `ending` is set before the request is cancelled."""

    ending: Ending | None = None


def ending_of(scope: Scope) -> Ending | None:
    """Return why this request was cancelled, or None if it was not the server that cancelled it."""
    request_end = scope.get("extensions", {}).get(EXCHANGE_EXTENSION)
    return request_end.ending if request_end is not None else None


@final
class ProtocolFault(msgspec.Struct, frozen=True):
    """A request that cannot be served: the status, the machine-readable code and the sentence for its sender."""

    status: int
    code: str
    message: str

    def body(self) -> bytes:
        """Return the four-key error envelope."""
        kind = "server_error" if self.status >= 500 and self.status not in {501, 505} else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": None, "code": self.code}
        return msgspec.json.encode({"error": error})


FAULT_OF_ENDING = {
    Ending.SLOW_HEAD: ProtocolFault(408, "request_timeout", "The request's head did not arrive in time."),
    Ending.SLOW_BODY: ProtocolFault(408, "request_timeout", "The request's body did not arrive in time."),
}
CRASHED = ProtocolFault(500, "internal_error", "The server failed while it handled this request.")
STOPPED = ProtocolFault(503, "server_shutdown", "The server stopped before this request was finished; try again.")
UNANSWERED = ProtocolFault(500, "internal_error", "The server ended this request without an answer.")
