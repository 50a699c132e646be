"""`/v1/models` and `/v1/capabilities`."""

from __future__ import annotations

import time

import msgspec

from hermes_trio.http.auth import RequiredScope
from hermes_trio.http.core import ModelEntry
from hermes_trio.http.errors import ApiError
from hermes_trio.http.requests import HandlerResult, Request, Response
from hermes_trio.http.routing import Route
from hermes_trio.http.turns import PLATFORM


class ModelBody(msgspec.Struct):
    """A model, by the name that clients use."""

    id: str
    created: int
    root: str
    parent: str | None
    object: str = "model"
    owned_by: str = "hermes-trio"
    permission: list[str] = msgspec.field(default_factory=list[str])


class ModelList(msgspec.Struct):
    """All models, the default first."""

    data: list[ModelBody]
    object: str = "list"


class Auth(msgspec.Struct):
    """How to authenticate."""

    required: bool = True
    type: str = "bearer"


class RuntimeFacts(msgspec.Struct):
    """Where tools and models run."""

    mode: str
    tool_execution: str
    split_runtime: bool
    description: str


class EndpointBody(msgspec.Struct):
    """A method and a path."""

    method: str
    path: str


class Capabilities(msgspec.Struct):
    """What this server can do."""

    object: str
    platform: str
    version: str
    model: str
    auth: Auth
    runtime: RuntimeFacts
    features: dict[str, bool | str]
    endpoints: dict[str, EndpointBody]


def _model(entry: ModelEntry) -> ModelBody:
    return ModelBody(entry.id, int(time.time()), entry.root or entry.id, entry.parent)


async def list_models(request: Request) -> HandlerResult:
    """Return the models."""
    return Response.of(ModelList([_model(entry) for entry in request.core.models]))


async def get_model(request: Request) -> HandlerResult:
    """Return one model."""
    wanted = request.params["model_id"]
    for entry in request.core.models:
        if entry.id == wanted:
            return Response.of(_model(entry))
    raise ApiError(404, f"There is no model {wanted[:64]!r}.", code="model_not_found", param="model")


async def capabilities(request: Request) -> HandlerResult:
    """Return what this server can do, and where."""
    core = request.core
    features: dict[str, bool | str] = {
        "chat_completions": True,
        "chat_completions_streaming": True,
        "responses": True,
        "responses_streaming": True,
        "run_submission": True,
        "run_status": True,
        "run_events_sse": True,
        "run_events_resume": True,
        "run_stop": True,
        "run_stop_receipt": True,
        "run_approval": True,
        "run_settled": True,
        "session_resources": True,
        "session_chat": True,
        "session_chat_streaming": True,
        "session_fork": True,
        "task_tree": True,
        "drain": True,
        "jobs": core.services.cron is not None,
        "async_delivery": core.runtime.stateless.supports_async_delivery,
        "client_tools": True,
        "responses_background": True,
        "anthropic_messages": True,
        "on_disconnect_header": "X-Hermes-On-Disconnect",
        "server_tools_header": "X-Hermes-Server-Tools",
        "session_continuity_header": "X-Hermes-Session-Id",
        "session_key_header": "X-Hermes-Session-Key",
        "cors": bool(core.server.cors_origins),
    }
    return Response.of(
        Capabilities(
            object="hermes.api_server.capabilities",
            platform=PLATFORM,
            version=core.version,
            model=core.public_model,
            auth=Auth(),
            runtime=RuntimeFacts(
                "server_agent", "server", False, "Tools run on the server; every piece of work has an owner and an end."
            ),
            features=features,
            endpoints={route.name: EndpointBody(route.method, route.path) for route in core.routes if route.listed},
        )
    )


def model_routes() -> list[Route]:
    """Return the routes of this module."""
    return [
        Route(
            name="models",
            method="GET",
            path="/v1/models",
            handler=list_models,
            summary="List the models",
            answer=ModelList,
            tag="models",
        ),
        Route(
            name="model",
            method="GET",
            path="/v1/models/{model_id}",
            handler=get_model,
            summary="Get a model",
            answer=ModelBody,
            errors=(404,),
            tag="models",
        ),
        Route(
            name="capabilities",
            method="GET",
            path="/v1/capabilities",
            handler=capabilities,
            access=RequiredScope.ANY,
            summary="Show what this server can do",
            answer=Capabilities,
            tag="models",
        ),
    ]
