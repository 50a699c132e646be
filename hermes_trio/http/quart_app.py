"""Dispatches requests through Quart: ordinary routes, and every path that does not exist.

Imported on first use, because Quart and its dependencies are a fifth of a server's start time and memory.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, cast

from quart import Response as QuartResponse
from quart import request as quart_request
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from hermes_trio.http.server import BodyTooLarge, FixedQuartTrio, Scope

from .app import ApiApp, error_response, headers_of, internal_error
from .errors import ApiError
from .requests import EventStream, Request, Response

if TYPE_CHECKING:
    from .core import ApiCore
    from .routing import Route

logger: Final = logging.getLogger("hermes_trio.http")

PASSED: Final = (HTTPException,)
"""Exceptions that are left to Quart's error handlers."""


def make_quart(app: ApiApp, core: ApiCore, routes: list[Route]) -> FixedQuartTrio:
    """Return a Quart application that passes each route's requests to `app`."""
    quart = FixedQuartTrio("hermes_trio.http", static_folder=None)
    quart.config["MAX_CONTENT_LENGTH"] = core.limits.body_bytes
    quart.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    quart.url_map.strict_slashes = False
    quart.url_map.merge_slashes = False
    for route in routes:
        quart.add_url_rule(
            route.quart_path, endpoint=route.name, view_func=_view(app, core, route), methods=[route.method]
        )
    quart.register_error_handler(HTTPException, cast("Any", _routing_error))
    quart.register_error_handler(Exception, cast("Any", _unexpected_error))
    return quart


async def _quart_body() -> bytes:
    try:
        return cast("bytes", await quart_request.get_data(cache=True))
    except RequestEntityTooLarge:
        raise BodyTooLarge(quart_request.max_content_length or 0) from None


def _view(app: ApiApp, core: ApiCore, route: Route) -> Callable[..., Awaitable[QuartResponse]]:
    async def view(**params: str) -> QuartResponse:
        began = perf_counter()
        request = Request(core, cast("Scope", quart_request.scope), _quart_body, params)
        answer = await app.answer(route, request)
        if type(answer) is EventStream:
            # Only a HEAD request gets here: `ApiApp` serves streams without Quart.
            answer = Response(b"", media=b"text/event-stream")
        core.metrics.answered(route.name, answer.status, perf_counter() - began)
        return _to_quart(answer)

    return view


def _to_quart(response: Response) -> QuartResponse:
    made = QuartResponse(response.body, status=response.status)
    made.headers.clear()
    for name, value in headers_of(response):
        made.headers.add(name.decode("latin-1").title(), value.decode("latin-1"))
    made.headers["Content-Length"] = str(len(response.body))
    return made


def _what_to_change(path: str) -> str:
    """Return the message for an unknown path, with advice if the client's base URL seems to be wrong."""
    if path.startswith("/v1/v1/"):
        return "There is nothing at this path: set the client's base URL without /v1, which it adds by itself."
    if path in _UNPREFIXED:
        return f"There is nothing at this path: add /v1 to the client's base_url, so that it requests /v1{path}."
    return "There is nothing at this path; GET /openapi.json lists the routes."


_UNPREFIXED: Final = frozenset(
    {"/chat/completions", "/completions", "/responses", "/models", "/messages", "/embeddings"}
)


async def _routing_error(error: HTTPException) -> QuartResponse:
    status = error.code or 500
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if status == 404:
        told = ApiError(404, _what_to_change(quart_request.path), code="unknown_path")
    elif status == 405:
        allow = ", ".join(sorted(getattr(error, "valid_methods", None) or ()))
        headers = ((b"allow", allow.encode()),)
        told = ApiError(405, f"This path accepts {allow}.", code="method_not_allowed", headers=headers)
    else:
        told = ApiError(status, error.description or error.name)
    return _to_quart(error_response(told))


async def _unexpected_error(error: Exception) -> QuartResponse:
    rule = quart_request.url_rule
    logger.error("%s failed in Quart", "an unknown route" if rule is None else rule.rule, exc_info=error)
    return _to_quart(error_response(internal_error()))
