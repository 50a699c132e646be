"""Stock Hypercorn connections: TLS, HTTP/2, WebSocket, and plain HTTP/1.1 when the fast path is off.

`HypercornSide.run` runs Hypercorn's own connection over any stream, with the bytes that have already been read, and
lets nothing but cancellation out. `HypercornConnection` changes what Hypercorn's class gets wrong: a send is shielded for
a bounded time only, the server can break that shield after a time limit, a head that comes too slowly ends the
connection, the connection of a client that has disconnected ends at once, and its socket is closed in every case.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias, cast, final

import h11
import trio
from h2.errors import ErrorCodes
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState

from hermes_trio.http.server.endings import FAULT_OF_ENDING, Ending
from hermes_trio.http.server.http2_frames import bound_frames, drop_late_bodies
from hermes_trio.http.server.hypercorn_fixes import (
    SendBound,
    SlowClient,
    bound_stream_buffers,
    bounded_send,
    with_fixes,
)
from hermes_trio.http.server.responses import status_line

if TYPE_CHECKING:
    from hermes_trio.http.server.core import ServerCore

MOST_RECEIVED = 65536
_FRAME_HEADER, _DATA_FRAME = 9, 0
_PREFACE = 24

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
        self._worker = worker
        self._received = 0
        self._head: int | None = None
        self._head_due = inf

    async def protocol_send(self, event: Event) -> None:
        """Send bytes under a bounded shield; other events as Hypercorn does."""
        if isinstance(event, RawData):
            await bounded_send(self, event.data, self._bound)
        elif not (isinstance(event, Updated) and self._read_out):
            await super().protocol_send(event)

    async def _read_data(self) -> None:
        data = self._opening
        while True:
            if data:
                self._received += len(data)
                # Handling may wait for the application, which is not the client's fault.
                self.due = inf
                before = self.protocol.protocol
                await self.protocol.handle(RawData(data))
                now = self.protocol.protocol
                if now is not before and isinstance(now, H2Protocol) and now.idle:
                    # The preface of HTTP/2 looks like a request to HTTP/1.1, and ends the idle time; no request has come.
                    await self.protocol_send(Updated(idle=True))
                self._await_head()
            self._opened.set()
            try:
                with trio.fail_after(self.config.read_timeout or inf):
                    data = bytes(await self.stream.receive_some(MOST_RECEIVED))
            except (trio.ClosedResourceError, trio.BrokenResourceError, trio.TooSlowError):
                break
            if not data:
                break
        self.due = inf
        await self.protocol.handle(Closed())
        # Hypercorn would keep the socket of a client that has disconnected for the rest of the keep-alive timeout.
        self._read_out = True
        await self.idle_task.stop()

    def _await_head(self) -> None:
        """Note until when the head must be complete that the client has begun. One that trickles in gets no more time by trickling."""
        head = self._begun_head()
        if head is not None and head != self._head:
            self._head_due = self._worker.connections.now + self._worker.config.head_timeout
        self._head = head
        self.due = inf if head is None else self._head_due

    def _begun_head(self) -> int | None:
        """Return which byte of this connection begins the request or frame that is not complete; None if there is none, or if it carries a body."""
        protocol = self.protocol.protocol
        if not isinstance(protocol, H2Protocol):
            connection: object = protocol.connection
            if not isinstance(connection, h11.Connection) or connection.their_state is not h11.IDLE:
                return None
            waiting = connection.trailing_data[0]
            return self._received - len(waiting) if waiting else None
        buffer = protocol.connection.incoming_buffer
        data: bytearray = buffer._data  # pyright: ignore[reportPrivateUsage]
        begins = self._received - len(data)
        if buffer._headers_buffer:  # pyright: ignore[reportPrivateUsage]
            # A head in several frames: it began with the first of them.
            return begins if self._head is None else self._head
        if 0 < buffer._preamble_len < _PREFACE:  # pyright: ignore[reportPrivateUsage]
            return 0
        if not data or (len(data) >= _FRAME_HEADER and data[3] == _DATA_FRAME):
            return None
        return begins

    async def _idle_timeout(self) -> None:
        # In a server that stops, an idle connection ends at once: not before what it was handed over with has been looked at.
        await self._opened.wait()
        await super()._idle_timeout()

    def close(self) -> None:
        """Close the socket, which Hypercorn leaves open when a TLS handshake fails or when closing is cancelled."""
        self._socket.close()

    def expire(self) -> None:
        """Answer that the head did not come in time, and close. For everything else Hypercorn keeps its own timers."""
        self.due = inf
        self._task_group.spawn(self._refuse_slow_head)  # pyright: ignore[reportUnknownMemberType]

    async def _refuse_slow_head(self) -> None:
        protocol, fault = self.protocol.protocol, FAULT_OF_ENDING[Ending.SLOW_HEAD]
        if isinstance(protocol, H2Protocol):
            protocol.connection.close_connection(ErrorCodes.ENHANCE_YOUR_CALM, fault.message.encode())
            data = protocol.connection.data_to_send()
        else:
            body = fault.body()
            data = b"%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (
                status_line(fault.status),
                len(body),
                body,
            )
        await bounded_send(self, data, self._bound)
        await self._close()

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
        bound_frames()
        drop_late_bodies()
        slow = SlowClient(config.body_timeout, config.body_rate, config.write_timeout)
        fixed = with_fixes(worker.app, drain_bytes=config.drain_bytes, drain_timeout=config.drain_timeout, slow=slow)
        self.worker = worker
        self.app = ASGIWrapper(cast("Any", fixed))
        self.context = WorkerContext(None)

    async def dismiss(self) -> None:
        """End idle connections, and the others after the request under way: the server stops."""
        await self.context.terminated.set()

    async def run(self, stream: ClientStream, opening: bytes = b"") -> None:
        """Serve one connection with Hypercorn and close it. Failures are logged; only cancellation leaves."""
        worker = self.worker
        if worker.draining:
            await self.dismiss()
        connection = HypercornConnection(worker, self, stream, opening)
        worker.connections.add(connection)
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
            worker.connections.remove(connection)
