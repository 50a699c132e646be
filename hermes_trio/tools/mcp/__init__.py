"""Tools of MCP servers: one owner task a server, through the official SDK, which is imported when the first server is connected."""

from __future__ import annotations

from .link import LinkState, McpLink, McpTool
from .links import McpLinks, open_links
from .settings import McpServer, McpSettings

__all__ = ["LinkState", "McpLink", "McpLinks", "McpServer", "McpSettings", "McpTool", "open_links"]
