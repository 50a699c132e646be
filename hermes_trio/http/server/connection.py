"""One plain-text HTTP/1.1 connection: its task reads requests and runs the application inline, one after the other.

There is no task, lock, channel or timer per request. The connection's one cancel scope is cancelled when the client
leaves, when it is too slow, or when its body turns out to be malformed; the cause is recorded first. A protocol
upgrade or the HTTP/2 preface ends this class's work: `run` hands the socket and the bytes already read to stock
Hypercorn. Whatever happens inside, `run` closes the socket and raises nothing but cancellation from outside.
"""

from __future__ import annotations

import enum
import socket
from math import inf
from time import time
from typing import TYPE_CHECKING, Any, cast, final

import trio

from hermes_trio.http.server.endings import CRASHED, FAULT_OF_ENDING, STOPPED, UNANSWERED, Ending, ProtocolFault
from hermes_trio.http.server.exchange import Exchange, ResponseState
from hermes_trio.http.server.framing import ParsedRequest, RequestReader
from hermes_trio.http.server.responses import status_line

if TYPE_CHECKING:
    from hermes_trio.http.server.core import ServerCore


@enum.unique
class ConnectionPhase(enum.Enum):
    """What the connection waits for; decides what an expired wait means."""

    IDLE = enum.auto()
    HEAD = enum.auto()
    HANDLING = enum.auto()
    DRAINING = enum.auto()
    LINGERING = enum.auto()


_IDLE, _HEAD, _HANDLING = ConnectionPhase.IDLE, ConnectionPhase.HEAD, ConnectionPhase.HANDLING
_DONE = ResponseState.DONE
_ENDING_OF_PHASE = {
    ConnectionPhase.IDLE: Ending.IDLE,
    ConnectionPhase.HEAD: Ending.SLOW_HEAD,
    ConnectionPhase.HANDLING: Ending.SLOW_BODY,
    ConnectionPhase.DRAINING: Ending.SLOW_BODY,
    ConnectionPhase.LINGERING: Ending.IDLE,
}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@final
class Connection:
    """A client's connection on the fast path. Made and watched by the listener, run by one task, closed by `run`."""

    __slots__ = (
        "_body_since",
        "_client_gone",
        "_descriptor",
        "_exchange",
        "_handover",
        "_linger",
        "_phase",
        "_read_due",
        "_reader",
        "_scope",
        "_sock",
        "_write_due",
        "broken",
        "client",
        "due",
        "ending",
        "server",
        "worker",
    )

    def __init__(
        self, worker: ServerCore, sock: socket.socket, client: tuple[str, int] | None, server: tuple[str, int] | None
    ) -> None:
        self.worker = worker
        self.client = client
        self.server = server
        self.due = inf
        self.ending: Ending | None = None
        self.broken = False
        """The kernel refuses to send: nothing will reach the client any more."""
        self._sock = sock
        self._descriptor = sock.fileno()
        self._reader = RequestReader(worker.config)
        self._scope = trio.CancelScope()
        self._phase = _IDLE
        self._exchange: Exchange | None = None
        self._client_gone = False
        self._linger = False
        self._handover: bytes | None = None
        self._body_since = 0.0
        # An application may read its body in one task and write its answer in another; each wait has its own end.
        self._read_due = self._write_due = inf

    async def run(self) -> None:
        """Serve the connection until it ends, then close it.

        Cancellation from outside cancels the request under way and closes the socket at once.
        """
        worker = self.worker
        worker.connections.add(self)
        try:
            fault: ProtocolFault | None = None
            try:
                with self._scope:
                    await self._serve()
            except BaseExceptionGroup as group:
                cancelled, failures = group.split(trio.Cancelled)
                if failures is not None:
                    fault = CRASHED
                    worker.log_failure("Error in ASGI Framework", failures)
                if cancelled is not None:
                    raise cancelled from None
            except Exception as failure:  # an application's failure ends its own connection, never the server
                fault = CRASHED
                worker.log_failure("Error in ASGI Framework", failure)
            if self._handover is None:
                await self._close_gracefully(fault)
        finally:
            worker.watch.forget(self._descriptor)
            worker.connections.remove(self)
            self._reader.close()
            self._exchange = None
            if self._handover is None:
                self._sock.close()
        if self._handover is not None:
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(self._sock))
            await worker.stock().run(stream, self._handover)

    async def _serve(self) -> None:
        """Answer requests until the connection should close."""
        worker = self.worker
        reader = self._reader
        ready = reader.ready
        task = trio.lowlevel.current_task()
        idle_timeout = worker.config.hypercorn.keep_alive_timeout
        descriptor = self._descriptor
        app = worker.app
        wait_readable = trio.lowlevel.wait_readable
        connections = worker.connections
        self.due = connections.now + idle_timeout
        while True:
            # A task's context takes effect at its next step, so a fresh one is always followed by a wait.
            task.context = worker.context.copy()
            if ready:
                await trio.lowlevel.checkpoint()
            while not ready:
                if reader.fault is not None:
                    self._handover = reader.http2
                    return
                await wait_readable(descriptor)
                if not self._pull():
                    return
                if not ready and reader.begun and self._phase is _IDLE:
                    self._phase = _HEAD
                    self.due = connections.now + worker.config.head_timeout
            request = ready.pop(0)
            self._phase = _HANDLING
            self.due = inf
            if request.upgrade:
                self._handover = request.head() + reader.rest
                return
            exchange = self._exchange = Exchange(self, request)
            if self._client_gone:
                self.end(Ending.CLIENT_LEFT)
            if worker.logs_access or worker.server_names:
                await self._run_observed(exchange)
            else:
                await app(exchange.scope, exchange.receive, exchange.send)
            if exchange.answer is not _DONE or not exchange.keep_alive:
                self._linger = not request.complete
                return
            if not request.complete and not await self._drain(request):
                self._linger = True
                return
            self._exchange = None
            if worker.draining:
                return
            if ready or reader.begun:
                self._phase = _HEAD
                self.due = connections.now + worker.config.head_timeout
            else:
                self._phase = _IDLE
                self.due = connections.now + idle_timeout

    async def _run_observed(self, exchange: Exchange) -> None:
        """Run the application with the checks and the access line that are off by default."""
        worker = self.worker
        started = time()
        if worker.server_names and not any(
            name == b"host" and value.decode("latin-1") in worker.server_names
            for name, value in exchange.request.headers
        ):
            unknown = ProtocolFault(404, "unknown_host", "This server does not answer for that host name.")
            await self.write(exchange.refusal(unknown), 0)
            exchange.answer = _DONE
        else:
            await worker.app(exchange.scope, exchange.receive, exchange.send)
        if worker.logs_access:
            log = worker.config.hypercorn.log
            await log.access(cast("Any", exchange.scope), cast("Any", exchange.start), time() - started)

    def _pull(self) -> bool:
        """Take what has arrived and parse it; false when the client has closed its side or the connection broke."""
        view = self.worker.buffer
        try:
            size = self._sock.recv_into(view)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not size:
            return False
        self._reader.feed(view[:size])
        return True

    async def read_body(self, request: ParsedRequest) -> None:
        """Wait for the next part of the request's body, telling the client first to go on if it asked.

        Returns with body bytes, with the body complete, or with the request ended. Cancellation loses no bytes.
        """
        config = self.worker.config
        connections = self.worker.connections
        if request.expects_continue:
            request.expects_continue = False
            await self.write(_CONTINUE, 0)
        if not self._body_since:
            self._body_since = connections.now
        try:
            while not request.chunks and not request.complete and self.ending is None:
                if self._reader.fault is not None:
                    self.end(Ending.BAD_FRAMING)
                    return
                self._read_due = self._body_since + config.body_timeout + request.received / config.body_rate
                self.due = min(self._read_due, self._write_due)
                await trio.lowlevel.wait_readable(self._descriptor)
                if not self._pull():
                    self.end(Ending.CLIENT_LEFT)
        finally:
            self._read_due = inf
            self.due = self._write_due
            if request.complete:
                self._body_since = 0.0

    def worth_draining(self, request: ParsedRequest) -> bool:
        """Return whether an incomplete body is small enough to be read to its end after an early answer."""
        if request.expects_continue or self._reader.fault is not None:
            return False
        return request.length is None or request.length - request.received <= self.worker.config.drain_bytes

    async def _drain(self, request: ParsedRequest) -> bool:
        """Read the unwanted rest of a body; false when it is too long or the client has disconnected."""
        config = self.worker.config
        self._phase = ConnectionPhase.DRAINING
        self.due = self.worker.connections.now + config.drain_timeout
        self._body_since = 0.0
        limit = request.received + config.drain_bytes
        while not request.complete:
            if self._reader.fault is not None or request.received > limit:
                return False
            request.chunks.clear()
            await trio.lowlevel.wait_readable(self._descriptor)
            if not self._pull():
                return False
        return True

    def try_send(self, data: bytes) -> int:
        """Give the kernel what it takes at once; returns how much that was."""
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self.broken = True
            self.end(Ending.CLIENT_LEFT)
            return 0

    async def write(self, data: bytes, sent: int) -> None:
        """Send `data` from `sent` on, waiting for the reader; ends the connection when the reader takes
        nothing for too long.
        """
        connections = self.worker.connections
        timeout = self.worker.config.write_timeout
        try:
            with memoryview(data) as view:
                while sent < len(data):
                    if self.broken:
                        await trio.lowlevel.checkpoint()
                        return
                    self._write_due = connections.now + timeout
                    self.due = min(self._read_due, self._write_due)
                    await trio.lowlevel.wait_writable(self._descriptor)
                    try:
                        sent += self._sock.send(view[sent:])
                    except BlockingIOError:
                        continue
                    except OSError:
                        self.broken = True
                        self.end(Ending.CLIENT_LEFT)
        finally:
            self._write_due = inf
            self.due = self._read_due

    def end(self, ending: Ending) -> None:
        """Cancel whatever the connection does, for this reason; the first reason stays."""
        if self.ending is None:
            self.ending = ending
            if self._exchange is not None:
                self._exchange.end(ending)
        self._scope.cancel(reason=self.ending.value)

    def disconnected(self) -> None:
        """Record that the client has closed its side and does not wait for the response under way."""
        self._client_gone = True
        exchange = self._exchange
        if exchange is not None and exchange.answer is not _DONE:
            self.end(Ending.CLIENT_LEFT)

    def expire(self) -> None:
        """End the wait under way, which has lasted too long."""
        self.due = inf
        if self._write_due < self.worker.connections.now:
            self.end(Ending.SLOW_READER)
            self._break()
        else:
            self.end(_ENDING_OF_PHASE[self._phase])

    def dismiss(self) -> None:
        """Close the connection if it is idle and no request is on its way in: the server stops."""
        if self._phase is _IDLE:
            try:
                self._sock.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                self.end(Ending.SHUTDOWN)
            except OSError:
                self.end(Ending.CLIENT_LEFT)

    def sever(self) -> None:
        """End the request and break the connection under any shield: the server has waited long enough."""
        exchange = self._exchange
        if (
            exchange is not None
            and exchange.answer in {ResponseState.WAITING, ResponseState.STARTED}
            and not self.broken
        ):
            self.try_send(exchange.refusal(STOPPED))
        self.end(Ending.SHUTDOWN)
        self._break()

    def _break(self) -> None:
        # A write that the application shields does not see the cancelled scope; it does see the broken socket.
        self.broken = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    async def _close_gracefully(self, fault: ProtocolFault | None) -> None:
        """Say why the connection closes, if the client can still be told, and see that it can read that."""
        exchange = self._exchange
        ending = self.ending
        if ending in {Ending.CLIENT_LEFT, Ending.SLOW_READER, Ending.IDLE}:
            return
        if exchange is not None and exchange.answer in {ResponseState.STREAMING, ResponseState.DONE}:
            fault = None
        elif ending is not None:
            fault = self._reader.fault if ending is Ending.BAD_FRAMING else FAULT_OF_ENDING.get(ending)
        elif fault is None:
            fault = UNANSWERED if exchange is not None else self._reader.fault
        if fault is not None:
            self.ending = None
            self.try_send(exchange.refusal(fault) if exchange is not None else self._refusal(fault))
        if self._linger or fault is not None:
            await self._read_out()

    def _refusal(self, fault: ProtocolFault) -> bytes:
        body = fault.body()
        return b"%bcontent-type: application/json\r\n%bcontent-length: %d\r\nconnection: close\r\n\r\n%b" % (
            status_line(fault.status),
            self.worker.fixed.lines(dated=False),
            len(body),
            body,
        )

    async def _read_out(self) -> None:
        """Close our side and drop what still arrives, bounded: closing over unread bytes would reset the
        answer away.
        """
        config = self.worker.config
        self._phase = ConnectionPhase.LINGERING
        # A client that is still uploading reads the answer when it has sent its body: that is bounded by time, however long the body is.
        seconds, left = (config.drain_timeout, inf) if self._linger else (config.linger_timeout, config.drain_bytes)
        self.due = self.worker.connections.now + seconds
        self._scope = trio.CancelScope()
        view = self.worker.buffer
        with self._scope:
            try:
                self._sock.shutdown(socket.SHUT_WR)
                while left > 0:
                    await trio.lowlevel.wait_readable(self._descriptor)
                    size = self._sock.recv_into(view)
                    if not size:
                        return
                    left -= size
            except OSError:
                return
