"""Tools of MCP servers: one owner task for each server, through the official SDK. Imported when a server is configured, the SDK when it connects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes_trio.base.lazy import lazy_attributes

from .links import McpLinks, open_links
from .settings import McpServer, McpSettings

if TYPE_CHECKING:
    from .link import LinkState, McpLink, McpTool

__all__ = ["LinkState", "McpLink", "McpLinks", "McpServer", "McpSettings", "McpTool", "open_links"]

__getattr__ = lazy_attributes(__name__, {".link": ("LinkState", "McpLink", "McpTool")})
