"""The connection to one MCP server. One task owns it, connects, makes the calls, and reconnects when it breaks.

Callers queue their calls and wait, never longer than the server's time limit. A server that is dead, slow or broken is an error result for the model,
never a hang or a failed turn. Cancelling a call cancels it at the server.
"""

from __future__ import annotations

import importlib
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

import msgspec
import trio

from hermes_trio.agent.model import ToolSpec
from hermes_trio.agent.tool import error_result
from hermes_trio.runtime.tree import Node, current_node, waiting, working
from hermes_trio.runtime.turn import Turn
from hermes_trio.runtime.turn_lifecycle import first_cause
from hermes_trio.tools.terminal.output import mask_secrets
from hermes_trio.tools.warden import ProcessSpec, Sandbox, Stdin, Warden, WardenError, Workspace

from .settings import McpServer
from .stdio import StdioServer

if TYPE_CHECKING:
    from mcp import Client, MCPError
    from mcp.client import Transport
    from mcp_types import CallToolResult, Tool

logger: Final = logging.getLogger("hermes_trio.tools.mcp")

FIRST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 60.0
"""The longest delay before a reconnect; delays double, and start over after a connection of `STABLE_SECONDS` seconds."""
STABLE_SECONDS: Final = 30.0

RELISTEN_SECONDS: Final = 5.0

MAX_WAITING: Final = 64
STDERR_CHARACTERS: Final = 500
LOST: Final = "the connection was lost"
CLOSING: Final = "the gateway is closing"
MAX_PAGES: Final = 50
MAX_NAME: Final = 64


class LinkState(Enum):
    """The state of a connection."""

    CONNECTING = "connecting"
    READY = "ready"
    BROKEN = "broken"
    CLOSED = "closed"


class _Broken(Exception):
    """Raised when the connection cannot be used any more. The text says why."""


class _Call:
    """A call on its way to the owner and back."""

    def __init__(self, tool: str, arguments: Mapping[str, Any]) -> None:
        self.tool = tool
        self.arguments = arguments
        self.scope = trio.CancelScope()
        self.over = trio.Event()
        self.result = ""
        self.node = current_node()
        """The node of the caller, whose trace context is sent along."""

    def answer(self, result: str) -> None:
        if not self.over.is_set():
            self.result = result
            self.over.set()


@final
class McpTool:
    """One tool of a server, under a name that includes the server's."""

    def __init__(self, link: McpLink, name: str, tool: Tool) -> None:
        self._link = link
        self._tool = tool.name
        self._spec = ToolSpec(
            name=name,
            description=tool.description or tool.title or tool.name,
            parameters=tool.input_schema or {"type": "object", "properties": {}},
        )

    @property
    def spec(self) -> ToolSpec:
        """Return the description for the model."""
        return self._spec

    def preview(self, arguments: str) -> str:
        """Return the tool and its arguments, shortened and redacted."""
        line = f"{self._link.name}: {self._tool} {mask_secrets(arguments)}"
        return line if len(line) <= 120 else line[:119] + "…"

    async def call(self, turn: Turn, arguments: str) -> str:
        """Call the tool. Cancelling cancels the call at the server."""
        try:
            given = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except msgspec.MsgspecError as error:
            return error_result(f"wrong arguments for {self._spec.name}: {error}")
        return await self._link.call(self._tool, given)


@final
class McpLink:
    """See the module. `tools` are those of the last working connection.

    `problem` says what is wrong now, to operators. Callers are told of it only if the connection never worked: after that it may quote the calls of other
    sessions, as in the server's last output.
    """

    def __init__(
        self, name: str, server: McpServer, warden: Warden, environment: Mapping[str, str], sandbox: Sandbox
    ) -> None:
        self.name = name
        self.allowed: tuple[str, ...] = server.allowed
        self.state: LinkState = LinkState.CONNECTING
        self.problem: str = ""
        self._told: str = ""
        """What callers are told of `problem`."""
        self.connections: int = 0
        self.since: float = time.time()
        """The wall-clock time of the last change of `state`."""
        self.tools: tuple[McpTool, ...] = ()
        self._server = server
        self._warden = warden
        self._environment = environment
        self._sandbox = sandbox
        self._settled = trio.Event()
        self._changed = trio.Event()
        self._calls, self._taken = trio.open_memory_channel[_Call](MAX_WAITING)

    def __repr__(self) -> str:
        return f"<McpLink {self.name} {self.state.value}>"

    # -- for callers -------------------------------------------------------------------------------------------------------------

    async def wait_settled(self) -> None:
        """Wait until the first attempt to connect has ended, well or badly."""
        await self._settled.wait()

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Queue a call for the owner and wait for its result, within the server's time limit. Cancelling cancels the call."""
        call = _Call(tool, arguments)
        seconds = self._server.timeout
        with trio.move_on_after(seconds), waiting(f"mcp {self.name} {tool}"):
            try:
                await self._ready()
                self._calls.send_nowait(call)
                await call.over.wait()
            except trio.WouldBlock:
                return error_result(f"MCP server {self.name!r} has {MAX_WAITING} calls waiting; try again later")
            except _Broken as error:
                return error_result(str(error))
            finally:
                call.scope.cancel()
        if call.over.is_set():
            return call.result
        return error_result(f"MCP server {self.name!r} did not answer within {seconds:g} s; the call was cancelled")

    async def _ready(self) -> None:
        """Wait for the first connection. Raises `_Broken` for a broken one."""
        await self._settled.wait()
        if self.state is not LinkState.READY:
            raise _Broken(f"MCP server {self.name!r} cannot be reached: {self._told or self.state.value}; reconnecting")

    # -- the owner ---------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Connect, serve, and reconnect after a delay when that breaks. Ends only by cancellation."""
        pause = FIRST_PAUSE
        with working("mcp", f"mcp_{self.name}", self._server.command or self._server.url) as node:
            try:
                while True:
                    began = trio.current_time()
                    try:
                        await self._connect(node)
                    except* Exception as error:
                        # If closing meets a failing connection, the group holds both, and only the cancellation propagates.
                        self._break(error, node)
                    if trio.current_time() - began > STABLE_SECONDS:
                        pause = FIRST_PAUSE
                    with waiting(f"{pause:g} s before it is connected again"):
                        await trio.sleep(pause * random.uniform(0.8, 1.2))
                    pause = min(pause * 2, LONGEST_PAUSE)
            finally:
                self._move(LinkState.CLOSED, CLOSING, CLOSING)
                self._refuse_waiting()

    def _move(self, state: LinkState, problem: str = "", told: str = "") -> None:
        if state is not self.state:
            self.since = time.time()
        self.state, self.problem, self._told = state, problem, told

    def _break(self, error: Exception, node: Node | None) -> None:
        cause = first_cause(error)
        was_ready = self.state is LinkState.READY
        problem = mask_secrets(self._without_secrets(str(cause) or type(cause).__name__))
        self._move(LinkState.BROKEN, problem, LOST if was_ready else problem)
        self._settled.set()
        self._refuse_waiting()
        if node is not None:
            node.note = f"lost: {self.problem}" if self.connections else f"not reached: {self.problem}"
        what = "was lost" if was_ready else "cannot be reached"
        logger.warning("MCP server %s %s: %s; reconnecting", self.name, what, self.problem)

    def _connected(self, node: Node | None) -> None:
        again = self.connections > 0
        lost_for = time.time() - self.since
        self._move(LinkState.READY)
        self.connections += 1
        self._settled.set()
        if node is not None:
            node.note = f"ready, {len(self.tools)} tools"
        if again:
            logger.info(
                "reconnected to MCP server %s after %.0f s, with %d tools", self.name, lost_for, len(self.tools)
            )
        else:
            logger.info("connected to MCP server %s, with %d tools", self.name, len(self.tools))

    def health(self) -> dict[str, Any]:
        """Return the entry of the health report."""
        return {
            "state": self.state.value,
            "since": self.since,
            "tools": len(self.tools),
            "connections": self.connections,
            "error": self.problem or None,
        }

    def _without_secrets(self, text: str) -> str:
        for value in (*self._server.headers.values(), *self._server.env.values()):
            if len(value) >= 6:
                text = text.replace(value, "***")
        return text

    def _refuse_waiting(self) -> None:
        while True:
            try:
                call = self._taken.receive_nowait()
            except trio.WouldBlock:
                return
            call.answer(error_result(f"MCP server {self.name!r} cannot be reached: {self._told}"))

    async def _connect(self, node: Node | None) -> None:
        """Run one connection, from its start to its end. Always raises: `_Broken`, or the cause."""
        await _import_sdk()
        from mcp import Client

        # One scope for the whole connection, because a nursery that is opened inside must end inside; its deadline holds until the link is up.
        with trio.CancelScope(deadline=trio.current_time() + self._server.connect_timeout) as scope:
            async with (
                self._transport() as (transport, ended),
                Client(transport, message_handler=self._on_message, cache=None) as client,
            ):
                await self._list(client)
                scope.deadline = math.inf
                self._connected(node)
                await self._serve(client, ended)
        raise _Broken(f"no connection within {self._server.connect_timeout:g} s")

    async def _serve(self, client: Client, ended: StdioServer | None) -> None:
        """Take calls until the connection breaks, each in a task of its own."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._relist, client)
            nursery.start_soon(self._listen, client)
            if ended is not None:
                nursery.start_soon(self._watch, ended)
            async for call in self._taken:
                nursery.start_soon(self._carry_out, client, call)

    async def _watch(self, server: StdioServer) -> None:
        await server.ended.wait()
        raise _Broken("the server has ended")

    async def _relist(self, client: Client) -> None:
        """List the tools again after the server reported a change."""
        while True:
            await self._changed.wait()
            self._changed = trio.Event()
            await self._list(client)

    async def _listen(self, client: Client) -> None:
        """Subscribe to changes, if the server's protocol requires it; older servers send them unasked (`_on_message`)."""
        from mcp import MCPError
        from mcp.client.subscriptions import ListenNotSupportedError, SubscriptionLost

        while True:
            try:
                async with client.listen(tools_list_changed=True) as changes:
                    async for _ in changes:
                        self._changed.set()
            except (ListenNotSupportedError, MCPError):
                return
            except SubscriptionLost:
                self._changed.set()
            await trio.sleep(RELISTEN_SECONDS)

    async def _on_message(self, message: Any) -> None:
        from mcp_types import ToolListChangedNotification

        if isinstance(message, ToolListChangedNotification):
            self._changed.set()

    async def _list(self, client: Client) -> None:
        found: list[Tool] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if not cursor:
                break
        wanted = self._server.tools
        taken: set[str] = set()
        kept = [tool for tool in found if not wanted or tool.name in wanted]
        self.tools = tuple(McpTool(self, _tool_name(self.name, tool.name, taken), tool) for tool in kept)

    async def _carry_out(self, client: Client, call: _Call) -> None:
        from mcp import MCPError

        try:
            with call.scope:
                node = call.node
                tracer = None if node is None else node.tree.tracer
                with nullcontext() if node is None or tracer is None else tracer.attached(node):
                    call.answer(_result_of(await client.call_tool(call.tool, dict(call.arguments))))
        except MCPError as error:
            said = mask_secrets(error.message)
            if not _may_be_closed(error):
                call.answer(error_result(f"MCP server {self.name!r} answered with an error: {said}"))
                return
            call.answer(
                error_result(f"MCP server {self.name!r} answered with an error, or the link to it broke: {said}")
            )
            await self._check(client)
        except Exception as error:
            cause = mask_secrets(self._without_secrets(str(first_cause(error)) or type(error).__name__))
            call.answer(error_result(f"the call of MCP server {self.name!r} failed, or the link to it broke: {cause}"))
            await self._check(client)
        finally:
            call.answer(error_result(f"the link to MCP server {self.name!r} broke during the call"))

    async def _check(self, client: Client) -> None:
        """Ask the server for its tools, and raise `_Broken` if the connection is closed.

        The error of a call does not tell: servers use the code of a closed connection for errors of their own, and the SDK refuses results that do not match
        their schema. A server that is slow to answer is not broken.
        """
        from mcp import MCPError

        try:
            with trio.move_on_after(self._server.connect_timeout):
                await client.list_tools()
        except MCPError as error:
            if _may_be_closed(error):
                raise _Broken(error.message) from error
        except Exception as error:
            raise _Broken(str(first_cause(error)) or type(error).__name__) from error

    @asynccontextmanager
    async def _transport(self) -> AsyncIterator[tuple[Transport, StdioServer | None]]:
        server = self._server
        if server.command:
            await self._sandbox.ready()
            cwd = server.cwd or self._environment["HOME"]
            try:
                confinement = self._sandbox.plan(server.profile, Workspace(cwd))
            except WardenError as error:
                raise _Broken(str(error)) from error
            stdio = StdioServer(
                self._warden,
                ProcessSpec(
                    argv=(server.command, *server.args),
                    confinement=confinement,
                    cwd=cwd,
                    env={**self._environment, **server.env},
                    stdin=Stdin.PIPE,
                    merge_stderr=False,
                ),
            )
            try:
                async with stdio.transport() as transport:
                    yield transport, stdio
            except WardenError as error:
                raise _Broken(str(error)) from error
            except Exception as error:
                said = stdio.errors.text.strip()
                if not stdio.ended.is_set() or not said:
                    raise
                raise _Broken(f"{first_cause(error)}; its last output: {said[-STDERR_CHARACTERS:]}") from error
            return
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        # It reads the certificates of the machine, which takes a tenth of a second.
        client = await trio.to_thread.run_sync(partial(create_mcp_http_client, headers=dict(server.headers)))
        async with client as http:
            yield streamable_http_client(server.url, http_client=http), None


def _may_be_closed(error: MCPError) -> bool:
    from mcp_types import CONNECTION_CLOSED

    return error.code == CONNECTION_CLOSED or "Session terminated" in error.message


async def _import_sdk() -> None:
    """Import the SDK in a thread, when there is a server: it takes most of a second. It imports `jsonschema` at its first result."""
    try:
        for module in ("mcp", "mcp.client.streamable_http", "jsonschema"):
            await trio.to_thread.run_sync(importlib.import_module, module)
    except ImportError as error:
        raise _Broken(f"{error}; install hermes-trio[mcp]") from error


def _tool_name(server: str, tool: str, taken: set[str]) -> str:
    """Return `mcp_<server>_<tool>` in the characters and length that every provider accepts; a second one of the same name gets a number."""
    plain = "".join(
        character if character.isascii() and (character.isalnum() or character in "_-") else "_" for character in tool
    )
    name = f"mcp_{server}_{plain}"[:MAX_NAME]
    number = 2
    while name in taken:
        end = f"_{number}"
        name = f"mcp_{server}_{plain}"[: MAX_NAME - len(end)] + end
        number += 1
    taken.add(name)
    return name


def _result_of(result: CallToolResult) -> str:
    parts: list[str] = []
    for block in result.content:
        match block.type:
            case "text":
                parts.append(block.text)
            case "image" | "audio":
                parts.append(f"[{block.type}, {block.mime_type}, {len(block.data) * 3 // 4} bytes]")
            case "resource_link":
                parts.append(f"[resource {block.uri}]")
            case "resource":
                parts.append(getattr(block.resource, "text", "") or f"[resource {block.resource.uri}]")
    text = "\n".join(parts)
    if result.is_error:
        return error_result(text or "the tool failed and did not say why")
    answer: dict[str, Any] = {"result": text}
    if result.structured_content is not None:
        answer["structured_content"] = result.structured_content
    return msgspec.json.encode(answer).decode()
