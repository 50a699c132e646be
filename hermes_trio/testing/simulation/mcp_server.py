"""A simulated MCP server: a process behind the warden that speaks JSON-RPC on its standard streams.

It has one tool, `wait`, which takes `seconds` and `says` a mark. Its next calls may `stall` (no answer), answer `garbage` before the result, fail with an
`error`, make the server `exit`, or make its tool `vanish` for `AWAY_SECONDS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import msgspec
import trio

MCP_COMMAND: Final = "simulated-mcp"
AWAY_SECONDS: Final = 30.0
VERSION: Final = "2025-06-18"

_TOOL: Final[dict[str, Any]] = {
    "name": "wait",
    "description": "Wait, and say something.",
    "inputSchema": {
        "type": "object",
        "properties": {"seconds": {"type": "number"}, "says": {"type": "string"}},
        "required": ["seconds", "says"],
    },
}


class SimulatedMcpServer:
    """One process. `faults` are those of the next calls, and are taken from the list; `told` notes a call in the trace."""

    def __init__(self, stdin: int, stdout: int, faults: list[str], told: Callable[[str, str], None]) -> None:
        self._input = trio.lowlevel.FdStream(os.dup(stdin))
        self._output = trio.lowlevel.FdStream(os.dup(stdout))
        self._faults = faults
        self._told = told
        self._away = False
        self._calls: dict[Any, trio.CancelScope] = {}
        self._nursery: trio.Nursery
        self._sending = trio.Lock()

    async def run(self) -> None:
        """Serve until the input ends, a fault ends the process, or this is cancelled."""
        async with self._input, self._output, trio.open_nursery() as self._nursery:
            unread = b""
            while data := bytes(await self._input.receive_some(65536)):
                *lines, unread = (unread + data).split(b"\n")
                for line in lines:
                    await self._obey(msgspec.json.decode(line))
            self._nursery.cancel_scope.cancel()

    async def _obey(self, message: Any) -> None:
        id, method = message.get("id"), message.get("method")
        params: dict[str, Any] = message.get("params") or {}
        match method:
            case "initialize":
                capabilities = {"tools": {"listChanged": True}}
                info = {"name": "simulated", "version": "1"}
                await self._answer(id, {"protocolVersion": VERSION, "capabilities": capabilities, "serverInfo": info})
            case "tools/list":
                await self._answer(id, {"tools": [] if self._away else [_TOOL]})
            case "tools/call":
                arguments: dict[str, Any] = params.get("arguments") or {}
                self._nursery.start_soon(self._call, id, arguments)
            case "ping":
                await self._answer(id, {})
            case "notifications/cancelled":
                scope = self._calls.get(params.get("requestId"))
                if scope is not None:
                    scope.cancel()
            case _ if id is not None:
                await self._send({"id": id, "error": {"code": -32601, "message": f"no method {method}"}})
            case _:
                pass

    async def _call(self, id: Any, arguments: Any) -> None:
        how = self._faults.pop(0) if self._faults else ""
        said = str(arguments.get("says", ""))
        self._told("mcp starts", f"{said} {how}".strip())
        with trio.CancelScope() as scope:
            self._calls[id] = scope
            match how:
                case "stall":
                    await trio.sleep_forever()
                case "garbage":
                    await self._write(b"this is no JSON\n")
                case "exit":
                    self._nursery.cancel_scope.cancel()
                case "vanish":
                    self._nursery.start_soon(self._vanish)
                case _:
                    pass
            await trio.sleep(float(arguments.get("seconds", 0)))
            if how == "error":
                await self._send({"id": id, "error": {"code": -32000, "message": f"{said} failed"}})
            else:
                await self._answer(id, {"content": [{"type": "text", "text": f"{said} waited"}]})
        del self._calls[id]

    async def _vanish(self) -> None:
        for away in (True, False):
            self._away = away
            await self._send({"method": "notifications/tools/list_changed"})
            await trio.sleep(AWAY_SECONDS)

    async def _answer(self, id: Any, result: Any) -> None:
        await self._send({"id": id, "result": result})

    async def _send(self, message: dict[str, Any]) -> None:
        await self._write(msgspec.json.encode({"jsonrpc": "2.0", **message}) + b"\n")

    async def _write(self, data: bytes) -> None:
        async with self._sending:
            try:
                await self._output.send_all(data)
            except trio.BrokenResourceError:
                self._nursery.cancel_scope.cancel()
