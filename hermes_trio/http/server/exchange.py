"""One request and its answer on the fast path: the `receive` and `send` that the application is given.

An exchange belongs to its connection and ends with its request: after the application has returned, its callables are
inert. It renders the answer's framing and puts a short answer on the wire in one system call; everything that can
wait (the rest of a body, a full kernel buffer, the client's disconnect) it asks of the connection.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, final
from urllib.parse import unquote

import trio

from hermes_trio.http.server.endings import EXCHANGE_EXTENSION, Ending, ProtocolFault, RequestEnd
from hermes_trio.http.server.responses import HeaderBlock, render_headers, status_line

if TYPE_CHECKING:
    from hermes_trio.http.server.asgi import Message, Scope
    from hermes_trio.http.server.connection import Connection
    from hermes_trio.http.server.framing import ParsedRequest

_ASGI = {"version": "3.0", "spec_version": "2.4"}
# A stream whose reader keeps up never has to wait; it still lets the others run after so many sends.
_SENDS_PER_TURN = 16


class UnexpectedMessage(RuntimeError):
    """The application sent an ASGI message that its response has no place for."""


@enum.unique
class ResponseState(enum.Enum):
    """How far the answer has come."""

    WAITING = enum.auto()
    STARTED = enum.auto()
    STREAMING = enum.auto()
    DONE = enum.auto()


@enum.unique
class BodyFraming(enum.Enum):
    """How the client knows where the answer's body ends."""

    NONE = enum.auto()
    LENGTH = enum.auto()
    CHUNKED = enum.auto()
    CLOSE = enum.auto()


_WAITING, _STARTED, _STREAMING, _DONE = (
    ResponseState.WAITING,
    ResponseState.STARTED,
    ResponseState.STREAMING,
    ResponseState.DONE,
)
_LENGTH, _CHUNKED = BodyFraming.LENGTH, BodyFraming.CHUNKED


def _path_of(target: bytes) -> tuple[bytes, bytes]:
    """Split a request target into raw path and query; the absolute form is reduced to its path."""
    if not target.startswith(b"/") and target != b"*":
        _, _, rest = target.partition(b"://")
        _, slash, path = rest.partition(b"/")
        target = slash + path or b"/"
    raw_path, _, query = target.partition(b"?")
    return raw_path, query


@final
class Exchange:
    """A request being answered. Made by the connection's task; `receive` and `send` may be called from its child
    tasks.
    """

    __slots__ = (
        "_connection",
        "_delivered",
        "_framing",
        "_gone",
        "_left",
        "_sends",
        "_start",
        "answer",
        "keep_alive",
        "request",
        "request_end",
        "scope",
    )

    def __init__(self, connection: Connection, request: ParsedRequest) -> None:
        self._connection = connection
        self.request = request
        self.keep_alive = request.keep_alive
        self.answer = _WAITING
        self.request_end = RequestEnd()
        self._delivered = False
        self._start: Message | None = None
        self._framing = BodyFraming.NONE
        self._left = 0
        self._sends = 0
        self._gone: trio.Event | None = None
        target = request.target
        if target[0] == 47 and b"?" not in target:
            raw_path, query = target, b""
        else:
            raw_path, query = _path_of(target)
        path = raw_path.decode("ascii")
        self.scope: Scope = {
            "type": "http",
            "asgi": _ASGI,
            "http_version": request.version,
            "method": request.method,
            "scheme": "http",
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
            "root_path": connection.worker.root_path,
            "headers": request.headers,
            "client": connection.client,
            "server": connection.server,
            "state": connection.worker.state.copy(),
            "extensions": {EXCHANGE_EXTENSION: self.request_end},
        }

    @property
    def start(self) -> Message | None:
        """Return the message that opened the answer."""
        return self._start

    async def receive(self) -> Message:
        """Return the next part of the body, then `http.disconnect` once the client has disconnected or the answer is complete.

        Cancellation loses nothing: body bytes stay with the request until they are returned.
        """
        request = self.request
        if self._delivered or self.answer is _DONE:
            return await self._disconnect_message()
        if not request.complete and not request.chunks:
            await self._connection.read_body(request)
            if self.request_end.ending is not None:
                return await self._disconnect_message()
        self._delivered = complete = request.complete
        return {"type": "http.request", "body": request.take(), "more_body": not complete}

    async def send(self, message: Message) -> None:
        """Take the next message of the answer; returns when the kernel has its bytes.

        Once the connection is broken nothing is sent and every call is a checkpoint. Cancellation during a write that
        the reader has stalled leaves the answer incomplete, and the connection closes.
        """
        connection = self._connection
        if connection.broken:
            await trio.lowlevel.checkpoint()
            return
        kind = message["type"]
        if kind == "http.response.body":
            body = message.get("body", b"")
            more = message.get("more_body", False)
            if self.answer is _STARTED:
                data = self._open(body, more)
            elif self.answer is _STREAMING:
                data = self._continue(body, more)
            else:
                raise UnexpectedMessage(f"{kind} does not fit a response that is {self.answer.name.lower()}")
            self.answer = _STREAMING if more else _DONE
            if data:
                sent = connection.try_send(data)
                if sent != len(data):
                    await connection.write(data, sent)
            if not more:
                if self._gone is not None:
                    self._gone.set()
            else:
                self._sends += 1
                if self._sends % _SENDS_PER_TURN:
                    await trio.lowlevel.checkpoint_if_cancelled()
                else:
                    await trio.lowlevel.checkpoint()
        elif kind == "http.response.start" and self.answer is _WAITING:
            if not 200 <= message["status"] <= 599:
                raise UnexpectedMessage(f"a final response has a status from 200 to 599, got {message['status']!r}")
            self._start = message
            self.answer = _STARTED
        else:
            raise UnexpectedMessage(f"{kind} does not fit a response that is {self.answer.name.lower()}")

    def end(self, ending: Ending) -> None:
        """Record why this request is cut short and wake the task that waits for the client to disconnect."""
        self.request_end.ending = ending
        if self._gone is not None:
            self._gone.set()

    def refusal(self, fault: ProtocolFault) -> bytes:
        """Return the whole answer that says `fault`, closing the connection."""
        self.keep_alive = False
        self.answer = _STARTED
        headers = [(b"content-type", b"application/json")]
        if fault.status >= 500:
            # What the application had done by then is not known here: no client is to repeat it by itself.
            headers.append((b"x-should-retry", b"false"))
        self._start = {"status": fault.status, "headers": headers}
        return self._open(fault.body(), False)

    async def _disconnect_message(self) -> Message:
        if self.request_end.ending is None and self.answer is not _DONE:
            if self._gone is None:
                self._gone = trio.Event()
            await self._gone.wait()
        else:
            await trio.lowlevel.checkpoint()
        return {"type": "http.disconnect"}

    def _open(self, body: bytes, more: bool) -> bytes:
        """Return the head, and the part of the body that came with it."""
        start = self._start
        assert start is not None, "a body is rendered only after http.response.start"
        connection = self._connection
        request = self.request
        status: int = start["status"]
        headers = start.get("headers", ())
        if type(headers) is HeaderBlock:
            block, length, close, dated = headers.block, None, False, False
        else:
            rendered = render_headers(headers)
            block, length, close, dated = rendered.block, rendered.length, rendered.close, rendered.dated
        parts = [status_line(status), block, connection.worker.fixed.lines(dated=dated)]
        bodiless = request.method == "HEAD" or status == 204 or status == 304
        if length is not None:
            if not bodiless:
                self._framing = _LENGTH
                self._left = length
        elif not more and status != 204 and status != 304:
            if body or request.method != "HEAD":
                parts.append(b"content-length: %d\r\n" % len(body))
            if not bodiless:
                self._framing = _LENGTH
                self._left = len(body)
        elif not bodiless:
            if request.version == "1.1":
                self._framing = _CHUNKED
                parts.append(b"transfer-encoding: chunked\r\n")
            else:
                self._framing = BodyFraming.CLOSE
                self.keep_alive = False
        if (
            close
            or connection.worker.draining
            or self.request_end.ending is not None
            or (not request.complete and not connection.worth_draining(request))
        ):
            self.keep_alive = False
        if not self.keep_alive:
            parts.append(b"connection: close\r\n\r\n")
        elif request.version == "1.1":
            parts.append(b"\r\n")
        else:
            parts.append(b"connection: keep-alive\r\n\r\n")
        if not bodiless:
            parts.append(self._continue(body, more))
        return b"".join(parts)

    def _continue(self, body: bytes, more: bool) -> bytes:
        """Return a later part of the body, framed."""
        framing = self._framing
        if framing is _LENGTH:
            self._left -= len(body)
            if self._left < 0 or (self._left and not more):
                self.keep_alive = False
                how = "longer" if self._left < 0 else "shorter"
                raise UnexpectedMessage(f"the response body is {how} than its content-length")
            return body
        if framing is _CHUNKED:
            if body:
                return b"%x\r\n%b\r\n%b" % (len(body), body, b"" if more else b"0\r\n\r\n")
            return b"" if more else b"0\r\n\r\n"
        return body if framing is BodyFraming.CLOSE else b""
