"""The gateway with the HTTP API, ready to be served.

`open_api_gateway` opens the whole product for the body of an `async with`; `hermes_trio.gateway.serving` and `hermes_trio.asgi` add the server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import msgspec

from hermes_trio import __version__
from hermes_trio.adapters.assembly import OpenAdapters, build_assembly
from hermes_trio.adapters.web.adapter import web_platform
from hermes_trio.config import Config
from hermes_trio.console.routes import console_routes
from hermes_trio.http.app import make_app
from hermes_trio.http.auth import AdminKey
from hermes_trio.http.core import ApiCore, ApiServices, ApiSettings, ModelEntry
from hermes_trio.http.requests import HandlerResult, Request, Response
from hermes_trio.http.routing import RequiredScope, Route
from hermes_trio.http.server import ASGIApp
from hermes_trio.messaging.callbacks import CallbackEndpoint
from hermes_trio.providers.routes import ModelRoutes
from hermes_trio.runtime.ports import Agent
from hermes_trio.runtime.runtime import Runtime
from hermes_trio.store.ports import Store

from .gateway import Gateway, open_gateway
from .mounts import route_of


class ApiGateway(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway and its ASGI application."""

    config: Config
    gateway: Gateway
    api: ApiCore
    app: ASGIApp

    @property
    def runtime(self) -> Runtime:
        """Return the runtime of the gateway."""
        return self.gateway.runtime


def model_entries(config: Config, routes: ModelRoutes) -> list[ModelEntry]:
    """Return the entries of `/v1/models`: the advertised name, then every route."""
    advertised = config.server.model_name
    entries = [ModelEntry(advertised, advertised)]
    entries += [ModelEntry(name, routes.served(name), advertised) for name in routes.names if name != advertised]
    return entries


@asynccontextmanager
async def open_api_gateway(
    config: Config,
    key: AdminKey,
    *,
    agent: Agent | None = None,
    in_memory: bool = False,
    store: AbstractAsyncContextManager[Store] | None = None,
) -> AsyncIterator[ApiGateway]:
    """Open the whole gateway for the body of the `async with`. Leaving it stops everything in order.

    `agent` replaces the configured agent, and `store` opens another store. With `in_memory` nothing is stored on disk: for tests, and to measure the
    cost of durability.
    """
    assembly = build_assembly(
        config.tables,
        environment=config.environment,
        host=config.server.host,
        home=config.home,
        platforms=[web_platform()],
    )
    async with open_gateway(
        config, assembly, agent=agent, in_memory=in_memory, store=store, resume_runs=True
    ) as gateway:
        api = ApiCore(
            gateway.runtime,
            gateway.store,
            ApiSettings(
                admin_key=key.value,
                server=config.server,
                limits=config.limits,
                models=tuple(model_entries(config, gateway.routes)),
                version=__version__,
                home=config.home,
            ),
            ApiServices(
                approvals=gateway.approvals,
                cron=gateway.adapters.cron,
                platforms=gateway.adapters.hub.health,
                confinement=gateway.toolbox.confinement.describe,
                mcp=gateway.toolbox.links.health,
            ),
        )
        yield ApiGateway(
            config=config,
            gateway=gateway,
            api=api,
            app=make_app(api, [*console_routes(), *mounted_routes(gateway.adapters)]),
        )


def mounted_routes(adapters: OpenAdapters) -> list[Route]:
    """Return the routes that other systems call: webhooks, and platforms that push. Each verifies its own signatures."""
    routes: list[Route] = []
    if adapters.webhook is not None:
        routes.append(_mounted("webhook", adapters.webhook.endpoint, adapters.webhook))
    routes += [
        _mounted(f"endpoint_{number}", path, endpoint)
        for number, (path, endpoint) in enumerate(adapters.endpoints.items())
    ]
    routes += [route_of(mount) for mount in adapters.mounts]
    return routes


def _mounted(name: str, path: str, endpoint: CallbackEndpoint) -> Route:
    async def handle(request: Request) -> HandlerResult:
        """Pass the request to the adapter of the address."""
        headers = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in request.scope["headers"]]
        status, more, body = await endpoint.handle(request.method, request.path, headers, await request.body())
        pairs = tuple((key.encode("latin-1"), value.encode("latin-1")) for key, value in more)
        media = next((value for key, value in pairs if key.lower() == b"content-type"), b"application/json")
        return Response(body, status, tuple(pair for pair in pairs if pair[0].lower() != b"content-type"), media)

    return Route(
        name=name, method="POST", path=path, handler=handle, access=RequiredScope.OPEN, listed=False, tag="webhooks"
    )
