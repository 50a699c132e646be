"""The whole gateway inside the lifespan of an ASGI application: `hypercorn --worker-class trio hermes_trio.asgi:app`.

The runtime runs in the lifespan task: it is open when start-up is complete, and drained at shutdown. If it crashes, the process exits, because a
server without its runtime would answer every request with an error. The ASGI server chooses the address, so a generated key is accepted on loopback
addresses only.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Final, final

import msgspec

from hermes_trio.config import load_config, loose_modes
from hermes_trio.gateway.api import open_api_gateway
from hermes_trio.http.auth import AdminKey, admin_key, is_loopback, keep_key
from hermes_trio.http.errors import ApiError
from hermes_trio.http.server import ASGIApp, Receive, Scope, Send, bound_stock_sends, with_fixes
from hermes_trio.logs import configure_logging

logger: Final = logging.getLogger("hermes_trio.asgi")

CRASHED: Final = 70
"""The exit status of a process whose runtime crashed (EX_SOFTWARE)."""


@final
class Application:
    """The ASGI application. It is created when this module is imported, and does nothing before its lifespan begins."""

    def __init__(self) -> None:
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or run the gateway for the lifespan of the server."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self._app is None:
            raise RuntimeError("the gateway is not open: the server must support the ASGI lifespan protocol")
        else:
            await self._app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        started = False
        try:
            config = load_config(os.environ)
            config.home.mkdir(mode=0o700, parents=True, exist_ok=True)
            key = admin_key(config.server.key, config.home, [])
            keep_key(key)
            configure_logging(level=config.log.level, format=config.log.format, secrets=[key.value])
            for problem in loose_modes(config):
                logger.warning("%s", problem)
            # The ASGI server chooses the address; the configured one is not used.
            config = msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, host="asgi"))
            undo = bound_stock_sends()
            try:
                async with open_api_gateway(config, key) as gateway:
                    self._app = with_fixes(gateway.app if key.path is None else _loopback_only(gateway.app))
                    _announce(key)
                    await send({"type": "lifespan.startup.complete"})
                    started = True
                    await receive()
                    report = await gateway.api.drain.run(config.server.drain_seconds)
                    logger.info("drained: %s", report)
            finally:
                self._app = None
                undo()
            await send({"type": "lifespan.shutdown.complete"})
        except Exception as error:
            if started:
                logger.critical("the runtime has crashed; exiting", exc_info=error)
                logging.shutdown()
                os._exit(CRASHED)
            await send({"type": "lifespan.startup.failed", "message": f"{type(error).__name__}: {error}"})


def _announce(key: AdminKey) -> None:
    if key.made:
        os.write(2, f"An API key was made; it is in {key.path} (mode 0600)\n".encode())


def _loopback_only(app: ASGIApp) -> ASGIApp:
    """Return the application, restricted to requests that arrived at a loopback address. Others are refused, whatever their key."""
    body = ApiError(
        403,
        "This server has no configured key and answers on loopback addresses only; set API_SERVER_KEY.",
        code="loopback_only",
    ).body()

    async def guarded(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        server = scope.get("server")
        if scope["type"] == "http" and not (server and (server[1] is None or is_loopback(server[0]))):
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        await app(scope, receive, send)

    return guarded


app: Final = Application()
