"""The ASGI application: checks origins and keys, then calls handlers, through Quart for ordinary routes and directly for hot routes and streams.

Both paths call the same handlers through `ApiApp.answer`, so that errors, keys, limits and headers cannot differ between them. Quart is in
`quart_app`, which is imported when it is first needed.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast, final

import outcome
import trio

from hermes_trio.base.line_limiter import LineLimiter
from hermes_trio.http.server import (
    ASGIApp,
    ClientLeft,
    Message,
    Receive,
    Scope,
    Send,
    read_body,
)
from hermes_trio.http.server.endings import EXCHANGE_EXTENSION
from hermes_trio.runtime.errors import HandledElsewhere
from hermes_trio.store import StoreError

from .api.admin import admin_routes
from .api.approvals import approval_routes
from .api.chat import chat_routes
from .api.health import health_routes
from .api.jobs import job_routes
from .api.messages import message_routes
from .api.models import model_routes
from .api.openapi import openapi_routes
from .api.responses import response_routes
from .api.runs import run_routes
from .api.sessions import session_routes
from .api.tree import tree_routes
from .auth import Principal, RequiredScope, no_longer_valid
from .core import ApiCore
from .errors import ApiError, retry_after, translate
from .headers import JSON_ANSWER, JSON_ANSWER_NAMES, Cors, with_security
from .inputs import check_length
from .relay import HostGone, Relay
from .requests import JSON_TYPE, EventStream, HandlerResult, HeaderPairs, Request, Response
from .routing import Route, match_direct
from .signin import is_own_origin
from .streams import StreamWriter

if TYPE_CHECKING:
    from hermes_trio.http.server import FixedQuartTrio

logger: Final = logging.getLogger("hermes_trio.http")

T = TypeVar("T")


REJOIN_SECONDS: Final = 2.0
"""The value of `Retry-After` while a node joins again."""

SESSION_CHECK_SECONDS: Final = 15.0
"""How often a stream checks whether its browser session is still valid."""


def standard_routes(core: ApiCore) -> list[Route]:
    """Return all routes of the API."""
    return [
        *health_routes(),
        *model_routes(),
        *chat_routes(),
        *response_routes(),
        *message_routes(),
        *run_routes(),
        *session_routes(),
        *tree_routes(),
        *approval_routes(),
        *(job_routes() if core.services.cron is not None else ()),
        *admin_routes(),
        *openapi_routes(),
    ]


def make_app(core: ApiCore, more: Sequence[Route] = ()) -> ASGIApp:
    """Return the ASGI application of an API; `more` are routes of other interfaces, such as webhooks."""
    return ApiApp(core, [*standard_routes(core), *more])


async def unavailable_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Return the application of a node that has lost its lease and joins again: 503 to every request, with `Retry-After`."""
    if scope["type"] != "http":
        return
    error = ApiError(
        503,
        "This node has lost its connection to the database for longer than its lease, and joins again; try again in a moment.",
        code="node_rejoining",
        headers=retry_after(REJOIN_SECONDS),
    )
    await _send(send, error_response(error))


def internal_error() -> ApiError:
    """Return 500, without the cause."""
    return ApiError(500, "The server failed while it handled this request; its log has the details.")


@final
class ApiApp:
    """The ASGI application: checks origins and preflights first, then dispatches to the route."""

    def __init__(self, core: ApiCore, routes: list[Route]) -> None:
        self._core = core
        core.routes = routes
        self._cors = Cors(core.server.cors_origins)
        self._routes = routes
        self._match = match_direct(routes)
        self._quart: FixedQuartTrio | None = None
        self._passed: tuple[type[Exception], ...] = ()
        """Exceptions that Quart handles itself."""
        self._store_lines = LineLimiter()
        self._relay: Relay | None = Relay(core, self) if core.shared else None

    @property
    def quart(self) -> FixedQuartTrio:
        """Return the Quart application. It is made on first use: a server that only chats never imports it."""
        if self._quart is None:
            from .quart_app import PASSED, make_quart

            self._passed = PASSED
            self._quart = make_quart(self, self._core, self._routes)
        return self._quart

    async def _carry(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._quart is None:
            # Loading it takes a while: not on the loop.
            await trio.to_thread.run_sync(import_module, "hermes_trio.http.quart_app")
        await self.quart(cast("Any", scope), cast("Any", receive), cast("Any", send))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Cancellation means that the client has disconnected, or that the server stops."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        if scope["type"] != "http":
            await self._carry(scope, receive, send)
            return
        tracer = self._core.runtime.tree.tracer
        if tracer is None:
            await self._admit(scope, receive, send)
        else:
            with tracer.received(scope["headers"]):
                await self._admit(scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        # From the last to the first, so that of two headers of one name the first stays.
        headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        origin = headers.get(b"origin")
        if origin is not None or scope["method"] == "OPTIONS":
            if origin is not None and scope["method"] != "OPTIONS" and self._is_own(scope, origin):
                pass  # a page of this server: its cookie decides what it may do
            elif origin is None or not self._cors.allows(origin):
                self._core.metrics.refused("origin")
                error = ApiError(403, "This origin is not allowed to use this server.", code="origin_not_allowed")
                await _send(send, error_response(error))
                return
            else:
                send = _with_cors(send, self._cors.headers(origin))
                if scope["method"] == "OPTIONS":
                    await _send(send, Response(b""))
                    return
        found = self._match(scope["method"], scope["path"])
        if found is None:
            await self._carry(scope, receive, send)
        elif EXCHANGE_EXTENSION in scope.get("extensions", ()):
            await self._direct(found[0], found[1], scope, receive, send, headers)
        else:
            await self._watched(found[0], found[1], scope, receive, send, headers)

    def _is_own(self, scope: Scope, origin: bytes) -> bool:
        """Return whether a request comes from a page of this server, opened under one of its names."""
        host = next((value for name, value in scope["headers"] if name == b"host"), None)
        return is_own_origin(origin, host) and self._core.signin.knows_host_header(host or b"")

    async def _identify(self, request: Request) -> Principal:
        """Return who makes a request with a cookie: by its bearer key, else by the cookie, which is valid for pages of this server only."""
        core = self._core
        if request.raw_header(b"authorization") is None:
            found = await core.signin.find(request)
            if found is not None:
                core.signin.check_page(request)
                request.signed_in = True
                return found[0]
        return await core.keyring.identify(request)

    async def _direct(
        self,
        route: Route,
        params: Mapping[str, str],
        scope: Scope,
        receive: Receive,
        send: Send,
        headers: dict[bytes, bytes],
    ) -> None:
        """Answer in this task; the server cancels it when the client disconnects."""
        began = perf_counter()
        core = self._core
        request = Request(core, scope, partial(read_body, receive, core.limits.body_bytes), params, headers)
        status = 0
        try:
            answer = await self.answer(route, request)
            if type(answer) is EventStream:
                answer = await self.run_stream(route, request, answer, StreamWriter(send, with_security))
            if answer is None:
                status = 200
            else:
                status = answer.status
                await _send(send, answer)
        except ClientLeft:
            return
        finally:
            if status:
                core.metrics.answered(route.name, status, perf_counter() - began)
            else:
                core.metrics.left(route.name)

    async def _watched(
        self,
        route: Route,
        params: Mapping[str, str],
        scope: Scope,
        receive: Receive,
        send: Send,
        headers: dict[bytes, bytes],
    ) -> None:
        """Answer like `_direct`, behind a server that reports a disconnected client only through `receive`: that cancels the handler."""
        body_read = trio.Event()
        if scope["method"] in ("GET", "HEAD"):
            # The handler reads no body, so no other task is in `receive`.
            body_read.set()

        async def receiving() -> Message:
            message = await receive()
            if message["type"] != "http.request" or not message.get("more_body", False):
                body_read.set()
            return message

        async def watch(scope: trio.CancelScope) -> None:
            await body_read.wait()
            while (await receive())["type"] != "http.disconnect":
                pass
            scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, nursery.cancel_scope)
            await self._direct(route, params, scope, receiving, send, headers)
            nursery.cancel_scope.cancel()

    async def run_stream(
        self, route: Route, request: Request, stream: EventStream, writer: StreamWriter
    ) -> Response | None:
        """Run a stream to its end; return a response that came in its place. If it fails after the first bytes, raise the error, which cuts the stream off.

        A stream that is only read is cut off when its reader's key expires or is revoked, or when its browser session ends.
        """
        reads = route.method == "GET" and route.access is not RequiredScope.OPEN and not request.relayed
        work = partial(self._stream, route, request, stream, writer)
        try:
            if not reads:
                answer = await work()
            else:
                with self._core.keyring.while_valid(request.caller) as valid:
                    answer = await self._while_signed_in(request, work, valid)
                if valid.cancelled_caught:
                    # The response stays incomplete, and the connection closes: a piece may have been sent in part.
                    return None if writer.opened else error_response(no_longer_valid(), route.dialect)
            if answer is not None:
                return answer
        except Exception as error:
            told = translate(error)
            failed = told is None
            if told is None:
                logger.exception("%s failed", route.name)
                told = internal_error()
            elif told.code == "session_db_unavailable":
                self._note_store(route, error)
            if not writer.opened:
                return error_response(told, route.dialect)
            # The stream is cut off here: a client that sees no end knows that something went wrong.
            if failed or request.relayed:
                raise
            logger.warning("%s was cut off: %s", route.name, told)
            return None
        await writer.close()
        return None

    async def _stream(
        self, route: Route, request: Request, stream: EventStream, writer: StreamWriter
    ) -> Response | None:
        """Write a stream, from here or from the node that has to write it; return a response that came in its place."""
        if self._relay is None:
            await stream.run(writer)
            return None
        answer = await self._relayed(self._relay, route, request, partial(stream.run, writer))
        if isinstance(answer, EventStream):
            await answer.run(writer)
            return None
        return answer

    async def _while_signed_in(self, request: Request, work: Callable[[], Awaitable[T]], scope: trio.CancelScope) -> T:
        """Return the result of `work`; cancel the scope when the browser session of the request has ended. One with a key has none."""
        if not request.signed_in:
            return await work()

        async def watch() -> None:
            while True:
                await trio.sleep(SESSION_CHECK_SECONDS)
                try:
                    valid = await self._core.signin.find(request) is not None
                except StoreError:
                    continue
                if not valid:
                    scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            result = await outcome.acapture(work)
            nursery.cancel_scope.cancel()
        return result.unwrap()

    async def answer(self, route: Route, request: Request) -> HandlerResult:
        """Call a route's handler, after all checks; errors become responses."""
        core = self._core
        try:
            check_length(request, core.limits.body_bytes)
            if route.access is not RequiredScope.OPEN:
                identify = core.keyring.identify if request.raw_header(b"cookie") is None else self._identify
                caller = request.caller = await identify(request)
                if not caller.may(route.access):
                    raise ApiError(
                        403,
                        f"This key may not use {route.path}: it lacks the scope {route.access.value!r}.",
                        code="insufficient_scope",
                    )
                if not caller.admin:
                    core.rate.check(caller.key_id)
        except ClientLeft:
            raise
        except Exception as error:
            return self._refusal(route, error)
        return await self.handle(route, request)

    async def handle(self, route: Route, request: Request) -> HandlerResult:
        """Call a route's handler for an authorised caller, here or on the node that has to handle it; errors become responses."""
        try:
            if route.turns:
                self._core.check_intake()
            if self._relay is None:
                return await route.handler(request)
            return await self._relayed(self._relay, route, request, partial(route.handler, request))
        except ClientLeft:
            raise
        except Exception as error:
            return self._refusal(route, error)

    async def _relayed(
        self, relay: Relay, route: Route, request: Request, work: Callable[[], Awaitable[T]]
    ) -> T | HandlerResult:
        """Return the result of `work`, or the response of the node that has to do it. If that node ends meanwhile, call `work` again here."""
        while True:
            try:
                return await work()
            except HandledElsewhere as error:
                elsewhere = error
            try:
                return await relay.hand_on(route, request, elsewhere)
            except HostGone:
                continue

    def _refusal(self, route: Route, error: Exception) -> Response:
        """Return the response to a request that failed. Raises exceptions that Quart handles itself."""
        told = translate(error)
        if told is None:
            if isinstance(error, self._passed):
                raise error
            logger.error("%s failed", route.name, exc_info=error)
            told = internal_error()
        elif told.code == "session_db_unavailable":
            self._note_store(route, error)
        return error_response(told, route.dialect)

    def _note_store(self, route: Route, error: Exception) -> None:
        """Log what the client does not see about an unavailable store: where it is, and the error of the system."""
        left_out = self._store_lines.admit(trio.current_time())
        if left_out is not None:
            more = f" ({left_out} more failures were not logged)" if left_out else ""
            logger.error("%s: the store cannot be used: %s%s", route.name, error, more)


async def _live(receive: Receive, send: Send) -> None:
    """Handle the lifespan of the application, which has nothing to start or end: the runtime owns what it serves."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def error_response(error: ApiError, dialect: str = "") -> Response:
    """Return an error as a response, in the shape of that API."""
    return Response(error.body(dialect), error.status, error.headers)


def headers_of(response: Response) -> HeaderPairs:
    """Return all headers of a response, except those of the connection."""
    if response.media is JSON_TYPE:
        own = tuple(response.headers)
        if not own:
            return JSON_ANSWER
        if JSON_ANSWER_NAMES.isdisjoint([name for name, _ in own]):
            return JSON_ANSWER.plus(own)
    return with_security([(b"content-type", response.media), *response.headers])


async def _send(send: Send, response: Response) -> None:
    await send({"type": "http.response.start", "status": response.status, "headers": headers_of(response)})
    await send({"type": "http.response.body", "body": response.body})


def _with_cors(send: Send, headers: HeaderPairs) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *headers]}
        await send(message)

    return sending
