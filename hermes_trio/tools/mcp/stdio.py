"""An MCP server as a process of the warden, over its standard streams.

The SDK would start the process itself, and a killed gateway would leave it running. Under the warden it ends with the connection, with the runtime,
and with this process, including everything that it forked (see `hermes_trio.tools.warden`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import trio

from hermes_trio.tools.terminal.output import OutputDecoder, RingText
from hermes_trio.tools.warden import KeptProcess, ProcessSpec, StdinClosed, Warden

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp.client import Transport
    from mcp.shared.message import SessionMessage

MAX_MESSAGE: Final = 16 * 1024 * 1024
"""The maximum size of one message in bytes; a server that sends a longer line is disconnected."""

END_GRACE: Final = 1.0
"""Seconds that a server may take to exit after its input has ended."""

STDERR_SECONDS: Final = 0.5
"""How long to wait for the last output on standard error of a server that has exited."""

ERROR_CHARACTERS: Final = 2000


class StdioServer:
    """One start of a server. `errors` holds the end of its standard error; `ended` is set when its output has ended."""

    def __init__(self, warden: Warden, spec: ProcessSpec) -> None:
        self._warden = warden
        self._spec = spec
        self.errors = RingText(ERROR_CHARACTERS)
        self.ended = trio.Event()
        self._errors_over = trio.Event()

    @asynccontextmanager
    async def transport(self) -> AsyncIterator[Transport]:
        """Start the process and give the SDK its streams. Leaving ends the process in a bounded time, also when cancelled: first its input, then by force."""
        import anyio
        from mcp.shared.message import SessionMessage

        process = await self._warden.spawn(self._spec)
        try:
            incoming, to_session = anyio.create_memory_object_stream[SessionMessage | Exception](0)
            from_session, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read, process, incoming)
                nursery.start_soon(self._write, process, outgoing)
                nursery.start_soon(self._read_errors, process)
                try:
                    yield _Opened(to_session, from_session)
                finally:
                    if self.ended.is_set():
                        with trio.move_on_after(STDERR_SECONDS, shield=True):
                            await self._errors_over.wait()
                    nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                with trio.move_on_after(END_GRACE):
                    try:
                        await process.close_stdin()
                    except StdinClosed:
                        pass
                    await process.wait_empty()
                await process.aclose()

    async def _read(self, process: KeptProcess, incoming: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        """Read one message from each line. The end of the output ends the session."""
        import anyio
        from mcp.shared.message import SessionMessage
        from mcp_types import jsonrpc_message_adapter

        unread = bytearray()
        async with incoming:
            try:
                while data := await process.output.receive_some():
                    unread += data
                    if len(unread) > MAX_MESSAGE:
                        break
                    if b"\n" not in data:
                        continue
                    *lines, rest = bytes(unread).split(b"\n")
                    unread = bytearray(rest)
                    for line in lines:
                        if not line.strip():
                            continue
                        try:
                            message = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
                        except ValueError as error:
                            await incoming.send(error)
                        else:
                            await incoming.send(message)
            except (
                trio.BrokenResourceError,
                trio.ClosedResourceError,
                anyio.BrokenResourceError,
                anyio.ClosedResourceError,
            ):
                pass
        self.ended.set()

    async def _write(self, process: KeptProcess, outgoing: MemoryObjectReceiveStream[SessionMessage]) -> None:
        async with outgoing:
            async for message in outgoing:
                line = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                try:
                    await process.write(line.encode() + b"\n")
                except StdinClosed:
                    self.ended.set()
                    return

    async def _read_errors(self, process: KeptProcess) -> None:
        decoder = OutputDecoder()
        assert process.errors is not None
        try:
            while data := await process.errors.receive_some():
                self.errors.append(decoder.feed(data))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        self._errors_over.set()


class _Opened:
    """The streams in the context manager that the SDK expects. Their opener closes them."""

    def __init__(
        self,
        incoming: MemoryObjectReceiveStream[SessionMessage | Exception],
        outgoing: MemoryObjectSendStream[SessionMessage],
    ) -> None:
        self._streams = incoming, outgoing

    async def __aenter__(
        self,
    ) -> tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]:
        return self._streams

    async def __aexit__(self, *_: object) -> None:
        incoming, outgoing = self._streams
        incoming.close()
        outgoing.close()
