"""What all connections of one server share: the application, the limits, and the tasks that watch over them.

A `ServerCore` is made by `serve` and lives as long as it; connections only read it.
"""

from __future__ import annotations

import contextvars
from typing import TYPE_CHECKING, Any, final

import attrs

from hermes_trio.http.server.asgi import ASGIApp
from hermes_trio.http.server.config import ServerConfig
from hermes_trio.http.server.disconnects import DisconnectWatch
from hermes_trio.http.server.open_connections import Connections
from hermes_trio.http.server.responses import FixedLines

if TYPE_CHECKING:
    from hermes_trio.http.server.hypercorn_connection import HypercornSide

RECEIVE_SIZE = 65536


@final
@attrs.define(eq=False, kw_only=True)
class ServerCore:
    """The shared side of a server's connections."""

    app: ASGIApp
    config: ServerConfig
    state: dict[str, Any]
    watch: DisconnectWatch
    connections: Connections
    fixed: FixedLines
    root_path: str = ""
    logs_access: bool = False
    server_names: frozenset[str] = frozenset()
    draining: bool = False
    """The server stops: every answer from now on is the last of its connection."""
    context: contextvars.Context = attrs.field(factory=contextvars.copy_context)
    """What each request starts from; a connection's task never hands one request's variables to the next."""
    buffer: memoryview = attrs.field(factory=lambda: memoryview(bytearray(RECEIVE_SIZE)))
    """One receive buffer for all connections: it is filled and parsed without a checkpoint in between."""

    _stock: HypercornSide | None = attrs.field(init=False, default=None)

    def stock(self) -> HypercornSide:
        """Hypercorn's side, for connections that are not plain HTTP/1.1. Most servers never need it: it is loaded when one does."""
        if self._stock is None:
            from hermes_trio.http.server.hypercorn_connection import HypercornSide

            self._stock = HypercornSide(self)
        return self._stock

    async def dismiss(self) -> None:
        """End idle connections at once, and the others with their next answer: the server stops."""
        self.draining = True
        if self._stock is not None:
            await self._stock.dismiss()

    def log_failure(self, what: str, failure: BaseException) -> None:
        """Write an exception that ended one connection only to Hypercorn's error log."""
        logger = self.config.hypercorn.log.error_logger
        if logger is not None:
            logger.error(what, exc_info=failure)
