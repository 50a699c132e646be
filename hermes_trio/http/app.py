"""The application: one front door, then Quart for what is routed and plain callables for what is hot or streams.

Both carriers call the same handlers through `Door.answer`, so errors, keys, limits and headers cannot differ between them.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, Final, cast, final

import trio
from quart import Response as QuartResponse
from quart import request as quart_request
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from hermes_trio.http.server import (
    ASGIApp,
    BodyTooLarge,
    ClientLeft,
    Message,
    Receive,
    RemediedQuartTrio,
    Scope,
    Send,
    read_body,
)
from hermes_trio.http.server.faults import EXCHANGE_EXTENSION

from .admin import admin_routes
from .auth import Access
from .chat import chat_routes
from .errors import ApiError, translate
from .front import FrontEnd
from .headers import JSON_ANSWER, JSON_ANSWER_NAMES, Cors, with_security
from .health import health_routes
from .jobs import job_routes
from .limits import check_length
from .message import JSON_TYPE, Answer, EventStream, HeaderPairs, Request, Response
from .models import model_routes
from .openapi import openapi_routes
from .responses import response_routes
from .routes import Route, match_direct
from .runs import run_routes
from .sessions import session_routes
from .sse import StreamWriter
from .tree import tree_routes

__all__ = ["Door", "make_app", "standard_routes"]

logger: Final = logging.getLogger("hermes_trio.http")


def standard_routes(front: FrontEnd) -> list[Route]:
    """All routes of the front end."""
    return [
        *health_routes(),
        *model_routes(),
        *chat_routes(),
        *response_routes(),
        *run_routes(),
        *session_routes(),
        *tree_routes(),
        *(job_routes() if front.cron is not None else ()),
        *admin_routes(),
        *openapi_routes(),
    ]


def make_app(front: FrontEnd, more: Sequence[Route] = ()) -> ASGIApp:
    """The ASGI application of a front end; `more` are routes of other interfaces, such as webhooks."""
    return Door(front, [*standard_routes(front), *more])


def internal_error() -> ApiError:
    """500, without a word about what went wrong inside."""
    return ApiError(500, "The server failed while it handled this request; its log has the details.")


@final
class Door:
    """Lets requests in: origins and preflights first, then the route's carrier."""

    def __init__(self, front: FrontEnd, routes: list[Route]) -> None:
        self._front = front
        front.routes = routes
        self._cors = Cors(front.server.cors_origins)
        self._match = match_direct(routes)
        self.quart = _quart(self, front, routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Cancellation means that the client has left, or that the server stops."""
        if scope["type"] != "http":
            await self.quart(cast("Any", scope), cast("Any", receive), cast("Any", send))
            return
        origin: bytes | None = None
        for name, value in scope["headers"]:
            if name == b"origin":
                origin = value
                break
        if origin is not None or scope["method"] == "OPTIONS":
            if origin is None or not self._cors.allows(origin):
                self._front.metrics.refused("origin")
                error = ApiError(403, "This origin is not allowed to use this server.", code="origin_not_allowed")
                await _send(send, _error(error))
                return
            send = _with_cors(send, self._cors.headers(origin))
            if scope["method"] == "OPTIONS":
                await _send(send, Response(b""))
                return
        found = self._match(scope["method"], scope["path"])
        if found is None:
            await self.quart(cast("Any", scope), cast("Any", receive), cast("Any", send))
        elif EXCHANGE_EXTENSION in scope.get("extensions", ()):
            await self._direct(found[0], found[1], scope, receive, send)
        else:
            await self._watched(found[0], found[1], scope, receive, send)

    async def _direct(
        self, route: Route, params: Mapping[str, str], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer in this task; whoever serves us cancels it when the client leaves."""
        began = perf_counter()
        front = self._front
        request = Request(front, scope, partial(read_body, receive, front.limits.body_bytes), params)
        status = 0
        try:
            answer = await self.answer(route, request)
            if type(answer) is EventStream:
                answer = await self._run_stream(route, answer, send)
            if answer is None:
                status = 200
            else:
                status = answer.status
                await _send(send, answer)
        except ClientLeft:
            return
        finally:
            if status:
                front.metrics.answered(route.name, status, perf_counter() - began)
            else:
                front.metrics.left(route.name)

    async def _watched(
        self, route: Route, params: Mapping[str, str], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """The same behind a server that says only through `receive` that the client has left."""
        body_read = trio.Event()
        if scope["method"] in ("GET", "HEAD"):
            # Nobody will read a body, so nobody else is in `receive`.
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
            await self._direct(route, params, scope, receiving, send)
            nursery.cancel_scope.cancel()

    async def _run_stream(self, route: Route, stream: EventStream, send: Send) -> Response | None:
        writer = StreamWriter(send, with_security)
        try:
            await stream.run(writer)
        except Exception as error:
            told = translate(error)
            if told is None:
                logger.exception("%s failed", route.name)
                told = internal_error()
            if not writer.opened:
                return _error(told)
            # The stream is cut off here: a client that sees no end knows that something went wrong.
            raise
        await writer.close()
        return None

    async def answer(self, route: Route, request: Request) -> Answer:
        """Call a route's handler, after everything that comes before it; errors become answers."""
        front = self._front
        try:
            check_length(request, front.limits.body_bytes)
            if route.access is not Access.OPEN:
                caller = request.caller = await front.keyring.identify(request)
                if not caller.may(route.access):
                    raise ApiError(
                        403,
                        f"This key may not use {route.path}: it lacks the scope {route.access.value!r}.",
                        code="insufficient_scope",
                    )
                if not caller.admin:
                    front.rate.check(caller.key_id)
            if route.turns:
                front.check_intake()
            return await route.handler(request)
        except ClientLeft:
            raise
        except Exception as error:
            told = translate(error)
            if told is None:
                if isinstance(error, HTTPException):
                    raise
                logger.exception("%s failed", route.name)
                told = internal_error()
            return _error(told)


def _error(error: ApiError) -> Response:
    return Response(error.body(), error.status, error.headers)


def headers_of(response: Response) -> HeaderPairs:
    """All headers of an answer, except those that belong to the connection."""
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


# -- Quart -----------------------------------------------------------------------------------------------------------------------


def _quart(door: Door, front: FrontEnd, routes: list[Route]) -> RemediedQuartTrio:
    quart = RemediedQuartTrio("hermes_trio.http", static_folder=None)
    quart.config["MAX_CONTENT_LENGTH"] = front.limits.body_bytes
    quart.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    quart.url_map.strict_slashes = False
    quart.url_map.merge_slashes = False
    for route in routes:
        quart.add_url_rule(
            route.quart_path, endpoint=route.name, view_func=_view(door, front, route), methods=[route.method]
        )
    quart.register_error_handler(HTTPException, cast("Any", _routing_error))
    quart.register_error_handler(Exception, cast("Any", _unexpected_error))
    return quart


async def _quart_body() -> bytes:
    try:
        return cast("bytes", await quart_request.get_data(cache=True))
    except RequestEntityTooLarge:
        raise BodyTooLarge(quart_request.max_content_length or 0) from None


def _view(door: Door, front: FrontEnd, route: Route) -> Callable[..., Awaitable[QuartResponse]]:
    async def view(**params: str) -> QuartResponse:
        began = perf_counter()
        request = Request(front, cast("Scope", quart_request.scope), _quart_body, params)
        answer = await door.answer(route, request)
        if type(answer) is EventStream:
            # Only a HEAD comes here: streams are served in front of Quart.
            answer = Response(b"", media=b"text/event-stream")
        front.metrics.answered(route.name, answer.status, perf_counter() - began)
        return _to_quart(answer)

    return view


def _to_quart(response: Response) -> QuartResponse:
    made = QuartResponse(response.body, status=response.status)
    made.headers.clear()
    for name, value in headers_of(response):
        made.headers.add(name.decode("latin-1").title(), value.decode("latin-1"))
    made.headers["Content-Length"] = str(len(response.body))
    return made


async def _routing_error(error: HTTPException) -> QuartResponse:
    status = error.code or 500
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if status == 404:
        told = ApiError(
            404, "There is nothing at this path; GET /openapi.json lists what there is.", code="unknown_path"
        )
    elif status == 405:
        allow = ", ".join(sorted(getattr(error, "valid_methods", None) or ()))
        headers = ((b"allow", allow.encode()),)
        told = ApiError(405, f"This path takes {allow}.", code="method_not_allowed", headers=headers)
    else:
        told = ApiError(status, error.description or error.name)
    return _to_quart(_error(told))


async def _unexpected_error(error: Exception) -> QuartResponse:
    logger.error("a request failed", exc_info=error)
    return _to_quart(_error(internal_error()))
