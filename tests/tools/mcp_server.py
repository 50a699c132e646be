"""A real MCP server for the tests, on the official SDK: `python mcp_server.py stdio`, or `python mcp_server.py http PORT`."""

from __future__ import annotations

import os
import sys

import anyio
from mcp import MCPError
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("sample")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail(reason: str) -> str:
    """Fail with a reason."""
    raise ToolError(reason)


@server.tool()
def refuse(reason: str, code: int) -> str:
    """Answer the call with an error of the protocol."""
    raise MCPError(code, reason)


@server.tool()
async def hang(seconds: float) -> str:
    """Answer late."""
    await anyio.sleep(seconds)
    return "at last"


@server.tool()
def die() -> str:
    """End the server in the middle of a call."""
    sys.stderr.write("I am going down\n")
    sys.stderr.flush()
    os._exit(3)


@server.tool()
def environment(name: str) -> str:
    """A variable of the server's environment."""
    return os.environ.get(name, "(unset)")


@server.tool()
def read(path: str) -> str:
    """What a file holds, or why it cannot be read."""
    try:
        with open(path) as file:
            return file.read()
    except OSError as error:
        return f"refused: {error.strerror}"


@server.tool()
def write(path: str) -> str:
    """Write a file, or say why it cannot be written."""
    try:
        with open(path, "w") as file:
            file.write("written")
    except OSError as error:
        return f"refused: {error.strerror}"
    return "written"


@server.tool()
def traced(context: Context) -> str:
    """The trace context that came with the call."""
    return str(context.request_context.meta)


@server.tool(name="odd name/with:marks")
def odd() -> str:
    """A tool whose name no provider would take."""
    return "odd"


@server.tool()
async def grow(context: Context) -> str:
    """Add a tool while the server runs."""
    server.add_tool(lambda: "grown", name="grown", description="Was not there before")
    await context.notify_tools_changed()
    return "grew"


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
