"""The OpenAPI document, generated from the route table and the types of bodies, and its page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from hermes_trio.http.auth import RequiredScope
from hermes_trio.http.requests import HandlerResult, Request, Response, encode_json
from hermes_trio.http.routing import Route
from hermes_trio.http.schemas import ErrorEnvelope

_SECURITY: Final = [{"bearer": list[str]()}]
_REASONS: Final = {
    400: "The request cannot be understood; `param` says where.",
    401: "The key is missing or not valid.",
    403: "The key lacks the scope, or the origin is not allowed.",
    404: "There is no such thing, or it is not yours.",
    405: "The path does not take this method.",
    408: "The request did not arrive in time.",
    409: "It contradicts what is there already.",
    413: "The body is too large.",
    421: "The server does not answer for this host name.",
    424: "The turn failed after its tools had run; do not repeat it blindly.",
    429: "Too many at once; retry after `Retry-After`.",
    500: "The server failed; its log has the details.",
    501: "This server does not have that.",
    502: "The agent ended without an answer.",
    503: "The server accepts no new work now; retry after `Retry-After`.",
}
_ID_SCHEMA: Final = {"type": "string", "minLength": 1, "maxLength": 256, "pattern": "^[A-Za-z0-9_.-]+$"}


def document(routes: list[Route], version: str) -> dict[str, Any]:
    """Return the document for these routes."""
    shown = [route for route in routes if route.listed]
    types: list[Any] = [ErrorEnvelope]
    for route in shown:
        types += [kind for kind in (route.body, route.answer) if kind is not None and kind not in types]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(map(_name, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in shown:
        operation = paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of)
        if route.provides:
            operation["responses"][str(route.status)]["links"] = _links(route, shown)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "hermes-trio",
            "version": version,
            "description": "An OpenAI-compatible API and a run API for hosted LLM agents.",
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "tags": [{"name": tag} for tag in dict.fromkeys(route.tag for route in shown)],
    }


def _links(route: Route, routes: list[Route]) -> dict[str, Any]:
    """Return links from the ids in this route's response to other routes."""
    return {
        other.name: {"operationId": other.name, "parameters": {name: place}}
        for name, place in route.provides.items()
        for other in routes
        if f"{{{name}}}" in other.path
    }


def _name(kind: Any) -> str:
    return repr(kind)


def _operation(route: Route, schema_of: dict[str, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": schema_of[_name(ErrorEnvelope)]}}
    answers: dict[str, Any] = {}
    content: dict[str, Any] = {}
    if route.answer is not None:
        content["application/json"] = {"schema": schema_of[_name(route.answer)]}
    if route.streams or route.answer is None:
        media = "text/event-stream" if route.streams else route.media
        content[media] = {} if route.streams else {"schema": {"type": "string"}}
    answers[str(route.status)] = {"description": route.summary, "content": content}
    statuses = {*route.errors, 405, 500}
    if route.access is not RequiredScope.OPEN:
        statuses |= {401, 403, 429}
    if route.body is not None:
        statuses |= {400, 408, 413}
    statuses.add(503)
    for status in sorted(statuses):
        answers[str(status)] = {"description": _REASONS[status], "content": error}
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "tags": [route.tag],
        "responses": answers,
        "security": [] if route.access is RequiredScope.OPEN else _SECURITY,
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _ID_SCHEMA}
        for part in route.path.split("/")
        if part.startswith("{") and (name := part.strip("{}"))
    ]
    parameters += [
        {
            "name": parameter.name,
            "in": parameter.where,
            "required": False,
            "description": parameter.description,
            "schema": dict(parameter.schema),
        }
        for parameter in route.parameters
    ]
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        operation["requestBody"] = {
            "required": route.body_required,
            "content": {"application/json": {"schema": schema_of[_name(route.body)], "example": _example(route)}},
        }
    return operation


async def openapi(request: Request) -> HandlerResult:
    """Return the document."""
    core = request.core
    if core.openapi_body is None:
        core.openapi_body = encode_json(document(core.routes, core.version))
    return Response(core.openapi_body)


async def docs(request: Request) -> HandlerResult:
    """Return the document as a page; see `docs_page`."""
    from .docs_page import page, page_policy  # for this page alone

    core = request.core
    return Response(
        page(document(core.routes, core.version)),
        headers=((b"content-security-policy", page_policy()),),
        media=b"text/html; charset=utf-8",
    )


async def docs_script(request: Request) -> HandlerResult:
    """Return the script of the page, whose forms call this server."""
    from .docs_page import SCRIPT

    return Response(SCRIPT.encode(), media=b"text/javascript; charset=utf-8")


def _example(route: Route) -> Mapping[str, Any]:
    """Return an example body with the route's required fields."""
    from .docs_page import EXAMPLES

    return EXAMPLES.get(route.name, {})


def openapi_routes() -> list[Route]:
    """Return the routes of this module."""
    return [
        Route(
            name="openapi",
            method="GET",
            path="/openapi.json",
            handler=openapi,
            access=RequiredScope.OPEN,
            summary="This document",
            answer=dict[str, Any],
            tag="docs",
        ),
        Route(
            name="docs",
            method="GET",
            path="/docs",
            handler=docs,
            access=RequiredScope.OPEN,
            summary="This document as a page",
            media="text/html",
            tag="docs",
        ),
        Route(
            name="docs_script",
            method="GET",
            path="/docs.js",
            handler=docs_script,
            access=RequiredScope.OPEN,
            summary="The script of that page",
            media="text/javascript",
            tag="docs",
        ),
    ]
