"""What all connections of one server share: the application, the limits, and the tasks that watch over them.

A `Worker` is made by `serve` and lives as long as it; connections only read it.
"""

from __future__ import annotations

import contextvars
from typing import Any, final

import attrs
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.trio.worker_context import WorkerContext

from hermes_trio.http.server.asgi import ASGIApp
from hermes_trio.http.server.config import ServerConfig
from hermes_trio.http.server.departure import DepartureWatch
from hermes_trio.http.server.patience import Patience
from hermes_trio.http.server.responses import FixedLines

RECEIVE_SIZE = 65536


@final
@attrs.define(eq=False, kw_only=True)
class Worker:
    """The shared side of a server's connections."""

    app: ASGIApp
    stock_app: ASGIWrapper
    config: ServerConfig
    state: dict[str, Any]
    watch: DepartureWatch
    patience: Patience
    stock_context: WorkerContext
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

    def log_failure(self, what: str, failure: BaseException) -> None:
        """Write an exception that ended one connection only to Hypercorn's error log."""
        logger = self.config.hypercorn.log.error_logger
        if logger is not None:
            logger.error(what, exc_info=failure)
