"""A platform's WebSocket: through the platform's own proxy, and with failures in the words of platforms."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

from hermes_trio.messaging.errors import PlatformError, PlatformErrorKind
from hermes_trio.net.dial import ConnectFailed, Dialer, Proxies
from hermes_trio.net.websocket import CONNECT_TIMEOUT, UpgradeRefused, WebSocket, open_websocket


@functools.cache
def _dialer(proxy: str | None) -> Dialer:
    """Return the dialer of a proxy: one for each, because its TLS context is made once."""
    return Dialer(proxies=None if proxy is None else Proxies.through(proxy))


@asynccontextmanager
async def open_platform_socket(
    url: str, *, proxy: str | None = None, connect_timeout: float = CONNECT_TIMEOUT
) -> AsyncGenerator[WebSocket, None]:
    """Connect to a `ws://` or `wss://` address that a platform gave out, and end the connection when the block ends.

    Raises `PlatformError`: `UNAUTHORIZED` and permanent for an upgrade that is refused with 401 or 403, `TRANSIENT` for everything else. The
    path and query are not quoted in errors: Slack's hold a ticket. Cancellation closes the connection.
    """
    async with AsyncExitStack() as stack:
        try:
            socket = await stack.enter_async_context(
                open_websocket(url, _dialer(proxy), connect_timeout=connect_timeout)
            )
        except ConnectFailed as error:
            raise PlatformError(PlatformErrorKind.TRANSIENT, str(error)) from None
        except UpgradeRefused as error:
            permanent = error.status in {401, 403}
            kind = PlatformErrorKind.UNAUTHORIZED if permanent else PlatformErrorKind.TRANSIENT
            raise PlatformError(kind, str(error), permanent=permanent, code=error.status) from None
        yield socket
