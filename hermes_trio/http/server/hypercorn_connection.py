"""Stock Hypercorn connections: TLS, HTTP/2, WebSocket, and plain HTTP/1.1 when the fast path is off.

`HypercornSide.run` runs Hypercorn's own connection over any stream, with the bytes that somebody else has already read, and
lets nothing but cancellation out. `HypercornConnection` changes what Hypercorn's class gets wrong: a send is shielded for
a bounded time only, the server can break that shield when it is out of patience, the connection of a client that has
left ends at once, and its socket is closed in every case.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias, cast, final

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.events import Event, RawData, Updated
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState

from hermes_trio.http.server.hypercorn_fixes import SendBound, SlowClient, bound_stream_buffers, bounded_send, remedied

if TYPE_CHECKING:
    from hermes_trio.http.server.core import ServerCore

ClientStream: TypeAlias = "trio.SocketStream | trio.SSLStream[trio.SocketStream]"


@final
class HypercornConnection(TCPServer):
    """Hypercorn's connection, bounded. Run it with `HypercornSide.run`."""

    def __init__(self, worker: ServerCore, side: HypercornSide, stream: ClientStream, opening: bytes) -> None:
        super().__init__(
            side.app,
            worker.config.hypercorn,
            side.context,
            ConnectionState(worker.state.copy()),
            # Hypercorn takes plain streams too; its annotation does not say so.
            cast("trio.SSLStream[trio.SocketStream]", stream),
        )
        self._socket = stream.socket if isinstance(stream, trio.SocketStream) else stream.transport_stream.socket
        self.due = inf
        self._opening = opening
        self._opened = trio.Event()
        self._read_out = False
        self._bound = SendBound(worker.config.write_timeout)

    async def protocol_send(self, event: Event) -> None:
        """Send bytes under a bounded shield; other events as Hypercorn does."""
        if isinstance(event, RawData):
            await bounded_send(self, event.data, self._bound)
        elif not (isinstance(event, Updated) and self._read_out):
            await super().protocol_send(event)

    async def _read_data(self) -> None:
        if self._opening:
            await self.protocol.handle(RawData(self._opening))
        self._opened.set()
        await super()._read_data()
        # Hypercorn would keep the socket of a client that has left for the rest of the keep-alive timeout.
        self._read_out = True
        await self.idle_task.stop()

    async def _idle_timeout(self) -> None:
        # In a server that stops, an idle connection ends at once: not before what it was handed over with has been looked at.
        await self._opened.wait()
        await super()._idle_timeout()

    def close(self) -> None:
        """Close the socket, which Hypercorn leaves open when a TLS handshake fails or when closing is cancelled."""
        self._socket.close()

    def expire(self) -> None:
        """Never due: Hypercorn keeps its own timers."""

    def dismiss(self) -> None:
        """Hypercorn's own shutdown event ends idle connections."""

    def sever(self) -> None:
        """Let go of a send that the reader has stalled."""
        self._bound.cut()


@final
class HypercornSide:
    """What the stock connections of one server share, made and loaded with the first of them."""

    def __init__(self, worker: ServerCore) -> None:
        config = worker.config
        bound_stream_buffers()
        slow = SlowClient(config.body_timeout, config.body_rate, config.write_timeout)
        remedy = remedied(worker.app, drain_bytes=config.drain_bytes, drain_timeout=config.drain_timeout, slow=slow)
        self.worker = worker
        self.app = ASGIWrapper(cast("Any", remedy))
        self.context = WorkerContext(None)

    async def dismiss(self) -> None:
        """The server stops: idle connections end, the others after what they are at."""
        await self.context.terminated.set()

    async def run(self, stream: ClientStream, opening: bytes = b"") -> None:
        """Serve one connection with Hypercorn and close it. Failures are logged; only cancellation leaves."""
        worker = self.worker
        if worker.draining:
            await self.dismiss()
        connection = HypercornConnection(worker, self, stream, opening)
        worker.patience.add(connection)
        try:
            await connection.run()
        except BaseExceptionGroup as group:
            cancelled, failures = group.split(trio.Cancelled)
            if failures is not None:
                worker.log_failure("Error in a connection", failures)
            if cancelled is not None:
                raise cancelled from None
        except Exception as failure:  # one connection's failure must not end the server
            worker.log_failure("Error in a connection", failure)
        finally:
            connection.close()
            worker.patience.remove(connection)
