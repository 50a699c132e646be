"""The server: connections, the record of calls, and answers by the script."""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, cast

import h11
import msgspec
import trio

from .faults import INSTEAD_OF_HEADERS, Dropped, data, inject_fault, inject_header_fault
from .formats import CHAT, Format, format_of
from .script import Fault, Reply, ScriptedAnswer, ScriptedCall, ScriptedRefusal

BODY_LIMIT: Final = 64 * 1024 * 1024


class _Refused(Exception):
    def __init__(self, refusal: ScriptedRefusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class ModelServer:
    """A scripted provider. The script is used up in order; after it, `otherwise` answers, by default with an echo.

    With a `key`, other keys are refused. `rejects` names fields of a request that this provider does not know.
    """

    def __init__(
        self,
        *script: Reply,
        key: str = "",
        rejects: frozenset[str] = frozenset(),
        otherwise: Reply | None = None,
        tls: ssl.SSLContext | None = None,
        port: int = 0,
    ) -> None:
        self.calls: list[ScriptedCall] = []
        self.port = port
        self.connections = 0
        self._script = list(script)
        self._key = key
        self._rejects = rejects
        self._otherwise = otherwise if otherwise is not None else _echo
        self._tls = tls
        self._scope = trio.CancelScope()
        self._new_call = trio.Event()

    @property
    def url(self) -> str:
        """Return the server's address without a path: the base URL for Anthropic clients."""
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def openai_url(self) -> str:
        """Return the base URL for OpenAI clients."""
        return f"{self.url}/v1"

    def say(self, *replies: Reply) -> None:
        """Append answers to the script."""
        self._script.extend(replies)

    def stop(self) -> None:
        """End the server and all its connections."""
        self._scope.cancel()

    async def call(self, number: int = 0) -> ScriptedCall:
        """Wait until the call of that number, counted from 0, has arrived; return it."""
        while len(self.calls) <= number:
            await self._new_call.wait()
        return self.calls[number]

    async def run(self, *, task_status: trio.TaskStatus[ModelServer] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until stopped or cancelled. `started` is reported with the server itself, once it can be called."""
        with self._scope:
            tcp = await trio.open_tcp_listeners(self.port, host="127.0.0.1", backlog=4096)
            self.port = int(tcp[0].socket.getsockname()[1])
            async with trio.open_nursery() as nursery:
                if self._tls is None:
                    await nursery.start(trio.serve_listeners, self._serve, tcp)
                else:
                    secure = [trio.SSLListener(listener, self._tls, https_compatible=True) for listener in tcp]
                    await nursery.start(trio.serve_listeners, self._serve, secure)
                task_status.started(self)

    async def _serve(self, stream: trio.abc.Stream) -> None:
        self.connections += 1
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=256 * 1024)
        try:
            while await self._exchange(stream, connection):
                connection.start_next_cycle()
        except (trio.BrokenResourceError, trio.ClosedResourceError, h11.ProtocolError, Dropped):
            pass
        finally:
            await trio.aclose_forcefully(stream)

    async def _exchange(self, stream: trio.abc.Stream, connection: h11.Connection) -> bool:
        """Handle one request and its response. Return whether the connection can be used for another."""
        read = await _read_request(stream, connection)
        if read is None:
            return False
        request, body = read
        path = request.target.decode("ascii").partition("?")[0]
        format_ = format_of(path)
        try:
            call = self._record(request, path, body, format_)
        except _Refused as error:
            await _send_refusal(stream, connection, error.refusal, format_ or CHAT)
            return _can_go_on(connection)
        assert format_ is not None
        usable = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch, stream, connection, call, nursery.cancel_scope)
            try:
                await self._answer(stream, connection, call, format_)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                if call.gone_at is None:
                    call.gone_at = trio.current_time()
            except Dropped:
                usable = False
            finally:
                call.ended.set()
            nursery.cancel_scope.cancel()
        return usable and not call.client_gone and _can_go_on(connection)

    def _record(self, request: h11.Request, path: str, body: bytes, format_: Format | None) -> ScriptedCall:
        headers = {name.decode("ascii"): value.decode("latin-1") for name, value in request.headers}
        if format_ is None or request.method != b"POST":
            raise _Refused(ScriptedRefusal(status=404, message=f"Unknown request URL: {path}", type="not_found_error"))
        try:
            decoded = msgspec.json.decode(body, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise _Refused(_invalid(f"We could not parse the JSON body of your request: {error}")) from None
        call = ScriptedCall(len(self.calls), path, headers, decoded, trio.current_time())
        self.calls.append(call)
        self._new_call.set()
        self._new_call = trio.Event()
        refusal = self._refusal_of(call, format_)
        if refusal is not None:
            call.ended.set()
            raise _Refused(refusal)
        return call

    def _refusal_of(self, call: ScriptedCall, format_: Format) -> ScriptedRefusal | None:
        given = format_.key(call.headers)
        if self._key and given != self._key:
            # As with some real providers, the error contains the key, whole and with its middle replaced by stars.
            words = f"Incorrect API key provided: {given[:4]}****{given[-4:]}. The header was: Bearer {given}"
            return ScriptedRefusal(status=401, message=words, type="authentication_error", code="invalid_api_key")
        for field in sorted(self._rejects & call.body.keys()):
            hint = " Use 'max_completion_tokens' instead." if field == "max_tokens" else ""
            return _invalid(f"Unsupported parameter: '{field}' is not supported with this model.{hint}")
        problem = format_.problem(call.body, call.headers)
        return _invalid(problem) if problem else None

    def _reply(self, call: ScriptedCall) -> ScriptedAnswer | ScriptedRefusal:
        reply = self._script.pop(0) if self._script else self._otherwise
        return reply if isinstance(reply, (ScriptedAnswer, ScriptedRefusal)) else reply(call)

    async def _answer(
        self, stream: trio.abc.Stream, connection: h11.Connection, call: ScriptedCall, format_: Format
    ) -> None:
        reply = self._reply(call)
        if isinstance(reply, ScriptedRefusal):
            await _send_refusal(stream, connection, reply, format_)
            return
        if reply.gate is not None:
            await reply.gate.wait()
        if reply.fault in INSTEAD_OF_HEADERS:
            await inject_header_fault(stream, reply.fault)
        if not call.body.get("stream") or reply.whole:
            await trio.sleep(reply.pause)
            await _send(stream, connection, 200, {}, format_.whole(reply, call))
            return
        headers = [("content-type", "text/event-stream"), ("transfer-encoding", "chunked")]
        await stream.send_all(connection.send(h11.Response(status_code=200, headers=headers)) or b"")
        for event in format_.events(reply, call):
            repeats = reply.fault is Fault.REPEAT
            if reply.fault is not None and not repeats and call.events_sent >= reply.fault_after:
                await inject_fault(stream, connection, reply.fault, format_, call)
                break
            if reply.pause:
                await trio.sleep(reply.pause)
            await stream.send_all(data(connection, event))
            if repeats and call.events_sent == reply.fault_after:
                await stream.send_all(data(connection, event))
            call.events_sent += 1
        await stream.send_all(connection.send(h11.EndOfMessage()) or b"")


@asynccontextmanager
async def open_model_server(*script: Reply, **options: Any) -> AsyncGenerator[ModelServer]:
    """Run a server in a separate nursery for the body of the `async with`. Exceptions of the body are raised in a group."""
    async with trio.open_nursery() as nursery:
        server = await nursery.start(ModelServer(*script, **options).run)
        yield server
        server.stop()


def _can_go_on(connection: h11.Connection) -> bool:
    return connection.our_state is h11.DONE and connection.their_state is h11.DONE


async def _read_request(stream: trio.abc.Stream, connection: h11.Connection) -> tuple[h11.Request, bytes] | None:
    request: h11.Request | None = None
    body = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(bytes(await stream.receive_some(64 * 1024)))
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > BODY_LIMIT:
                return None
        elif isinstance(event, h11.EndOfMessage):
            assert request is not None
            return request, bytes(body)
        else:
            return None


async def _watch(
    stream: trio.abc.Stream, connection: h11.Connection, call: ScriptedCall, scope: trio.CancelScope
) -> None:
    """Wait until the client disconnects, and cancel its answer."""
    try:
        while received := await stream.receive_some(4096):
            connection.receive_data(bytes(received))
    except trio.BrokenResourceError:
        pass
    call.gone_at = trio.current_time()
    scope.cancel()


async def _send(
    stream: trio.abc.Stream,
    connection: h11.Connection,
    status: int,
    headers: Mapping[str, str],
    value: Mapping[str, Any],
) -> None:
    body = msgspec.json.encode(value)
    fields = [("content-type", "application/json"), *headers.items(), ("content-length", str(len(body)))]
    head = connection.send(h11.Response(status_code=status, headers=fields)) or b""
    await stream.send_all(head + data(connection, body) + (connection.send(h11.EndOfMessage()) or b""))


async def _send_refusal(
    stream: trio.abc.Stream, connection: h11.Connection, refusal: ScriptedRefusal, format_: Format
) -> None:
    await _send(stream, connection, refusal.status, refusal.headers, format_.refusal(refusal))


def _invalid(message: str) -> ScriptedRefusal:
    return ScriptedRefusal(status=400, message=message, type="invalid_request_error")


def _echo(call: ScriptedCall) -> ScriptedAnswer:
    messages = cast("list[dict[str, Any]]", call.body.get("messages") or [{}])
    content: Any = messages[-1].get("content") or ""
    if not isinstance(content, str):
        parts = cast("list[dict[str, Any]]", content)
        content = " ".join(str(part.get("text") or part.get("content") or "") for part in parts).strip()
    return ScriptedAnswer(text=f"You said: {content}")
