"""The connections to all configured MCP servers: opened and closed together, by the toolbox."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, final

import msgspec
import trio

from hermes_trio.runtime.turn import Turn
from hermes_trio.tools.warden import Profile, Sandbox, Warden

from .settings import McpSettings

if TYPE_CHECKING:
    from .link import McpLink, McpTool


@final
class McpLinks(msgspec.Struct, frozen=True):
    """All connections, by name."""

    links: Mapping[str, McpLink]

    def health(self) -> dict[str, dict[str, Any]]:
        """Return the state of every server, by name, for `/health/detailed`."""
        return {name: link.health() for name, link in self.links.items()}

    def tools(self, turn: Turn, profile: Profile) -> Iterator[McpTool]:
        """Return the tools of the servers that a turn may use and that have ever been connected; those of a broken connection return its error.

        A server acts with its own profile, so a turn that is confined to a workspace uses only those that name its tenant or platform.
        """
        for link in self.links.values():
            if not profile.confines_files or not {turn.spec.tenant, turn.context.platform}.isdisjoint(link.allowed):
                yield from link.tools


@asynccontextmanager
async def open_links(
    settings: McpSettings | None, warden: Warden, environment: Mapping[str, str], sandbox: Sandbox
) -> AsyncIterator[McpLinks]:
    """Open the connections for the body of the `async with`. Slow or dead servers delay the start by at most `startup_seconds`.

    Leaving closes every connection, also when cancelled; a server's process gets an end of input, a grace period, and is then killed.
    """
    settings = McpSettings() if settings is None else settings
    links: dict[str, McpLink] = {}
    for name, server in settings.servers.items():
        if server.enabled:
            from .link import McpLink  # only where there is a server: without one its parts are never loaded

            links[name] = McpLink(name, server, warden, environment, sandbox)
    try:
        async with trio.open_nursery() as nursery:
            for link in links.values():
                nursery.start_soon(link.run)
            with trio.move_on_after(settings.startup_seconds):
                for link in links.values():
                    await link.wait_settled()
            try:
                yield McpLinks(links)
            finally:
                nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        # Unwrap the nursery's group: the caller sees what the body raised.
        raised = group.exceptions[0] if len(group.exceptions) == 1 else group
        raise raised from raised.__cause__
