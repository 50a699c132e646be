"""Where everything is put together: a host (models, tools, agent, adapters on a runtime) and the HTTP front end before it.

`open_gateway` is the whole product for the body of an `async with`, without a server in front of it. The command line and `hermes_trio.asgi` add one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from hermes_trio import __version__
from hermes_trio.adapters.assembly import Mount, OpenAdapters, build_assembly
from hermes_trio.config import Config
from hermes_trio.gateway.host import Host, open_host
from hermes_trio.http.app import make_app
from hermes_trio.http.auth import AdminKey
from hermes_trio.http.core import ApiCore, ModelEntry
from hermes_trio.http.requests import HandlerResult, Request, Response
from hermes_trio.http.routing import RequiredScope, Route
from hermes_trio.http.server import ASGIApp
from hermes_trio.providers.routes import ModelRoutes
from hermes_trio.runtime.ports import Agent
from hermes_trio.runtime.runtime import Runtime

__all__ = ["Gateway", "open_gateway"]


class Gateway(msgspec.Struct, frozen=True, kw_only=True):
    """A running gateway: what a server needs to serve it."""

    config: Config
    host: Host
    front: ApiCore
    app: ASGIApp

    @property
    def runtime(self) -> Runtime:
        """The runtime that everything runs in."""
        return self.host.runtime


def model_entries(config: Config, routes: ModelRoutes) -> list[ModelEntry]:
    """What `/v1/models` lists: the advertised name, then every route."""
    advertised = config.server.model_name
    entries = [ModelEntry(advertised, advertised)]
    entries += [ModelEntry(name, routes.served(name), advertised) for name in routes.names if name != advertised]
    return entries


@asynccontextmanager
async def open_gateway(
    config: Config, key: AdminKey, *, agent: Agent | None = None, in_memory: bool = False
) -> AsyncIterator[Gateway]:
    """Open everything for the body of the `async with`; leaving it stops everything in its order.

    `agent` replaces the configured one. With `in_memory` nothing is kept: for tests, and to measure what durability costs.
    """
    tables = {name: getattr(config, name) for name in ("telegram", "discord", "slack", "webhook", "cron")}
    assembly = build_assembly(tables, environment=config.environment, host=config.server.host, home=config.home)
    async with open_host(config, assembly, agent=agent, in_memory=in_memory) as host:
        front = ApiCore(
            host.runtime,
            host.store,
            admin_key=key.value,
            server=config.server,
            limits=config.limits,
            models=model_entries(config, host.routes),
            approvals=host.approvals,
            cron=host.adapters.cron,
            platforms=host.adapters.gateway.health,
            version=__version__,
            home=config.home,
        )
        yield Gateway(config=config, host=host, front=front, app=make_app(front, mounted_routes(host.adapters)))


def mounted_routes(adapters: OpenAdapters) -> list[Route]:
    """The addresses that other systems call: webhooks, and the platforms that push. Each checks its own signatures."""
    routes: list[Route] = []
    if adapters.webhook is not None:
        routes.append(_mounted("webhook", "/webhooks/{route}", adapters.webhook))
    routes += [
        _mounted(f"endpoint_{number}", path, mount) for number, (path, mount) in enumerate(adapters.endpoints.items())
    ]
    return routes


def _mounted(name: str, path: str, mount: Mount) -> Route:
    async def handle(request: Request) -> HandlerResult:
        """Hand the request to the adapter that owns the address."""
        headers = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in request.scope["headers"]]
        status, more, body = await mount.handle(request.method, request.path, headers, await request.body())
        pairs = tuple((key.encode("latin-1"), value.encode("latin-1")) for key, value in more)
        media = next((value for key, value in pairs if key.lower() == b"content-type"), b"application/json")
        return Response(body, status, tuple(pair for pair in pairs if pair[0].lower() != b"content-type"), media)

    return Route(
        name=name, method="POST", path=path, handler=handle, access=RequiredScope.OPEN, listed=False, tag="webhooks"
    )
