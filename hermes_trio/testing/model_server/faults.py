"""Injects each `Fault` of a provider into a real connection."""

from __future__ import annotations

import struct
from collections.abc import Callable
from socket import SO_LINGER, SOL_SOCKET
from typing import Any, Final, cast

import h11
import trio

from .formats import Format
from .script import Fault, ScriptedCall

LONG_LINE: Final = 10 * 1024 * 1024
INSTEAD_OF_HEADERS: Final = frozenset({Fault.SILENT, Fault.NOT_HTTP, Fault.ENDLESS_HEADERS})


class Dropped(Exception):
    """Raised to close the connection at once."""


def data(connection: h11.Connection, payload: bytes) -> bytes:
    """Return a piece of a response's body, framed."""
    return connection.send(h11.Data(data=payload)) or b""


async def inject_header_fault(stream: trio.abc.Stream, fault: Fault | None) -> None:
    """Inject a fault in the place of the headers. Never returns."""
    if fault is Fault.SILENT:
        await trio.sleep_forever()
    if fault is Fault.NOT_HTTP:
        await stream.send_all(b"SSH-2.0-OpenSSH_9.9\r\n")
        raise Dropped
    await stream.send_all(b"HTTP/1.1 200 OK\r\n")
    while True:
        await stream.send_all(b"x-more: " + b"x" * 8000 + b"\r\n")


async def inject_fault(
    stream: trio.abc.Stream, connection: h11.Connection, fault: Fault, format_: Format, call: ScriptedCall
) -> None:
    """Inject a fault into a streamed answer. Returns if the response is to be ended properly."""

    async def send(payload: bytes) -> None:
        await stream.send_all(data(connection, payload))

    async def for_ever(payload: Callable[[], bytes]) -> None:
        while True:
            await send(payload())

    match fault:
        case Fault.END_EARLY:
            return
        case Fault.HANG_UP:
            await stream.send_all(b"40\r\ndata: {")
            raise Dropped
        case Fault.RESET:
            _reset(stream)
            raise Dropped
        case Fault.GARBAGE:
            await send(b'data: {"choices": [{"delta": {"content": 7}}], "type": 4 oops\n\n')
        case Fault.INVALID_UTF8:
            await send(format_.text(call, "<bad>").replace(b"<bad>", b"caf\xe9 \xff\xfe"))
            for event in format_.closing(call):
                await send(event)
        case Fault.ERROR_EVENT:
            await send(format_.overload())
        case Fault.LONG_LINE:
            await send(b"data: ")
            for _ in range(LONG_LINE // 65536):
                await send(b"x" * 65536)
            await send(b"\n\n")
        case Fault.ENDLESS_LINE:
            await for_ever(lambda: b"x" * 65536)
        case Fault.ENDLESS_TEXT:
            await for_ever(lambda: format_.text(call, "more and more " * 4096))
        case Fault.ENDLESS_TOOL_CALL:
            await send(format_.open_call(call))
            await for_ever(lambda: format_.arguments(call, "y" * 32768))
        case _:
            await trio.sleep_forever()


def _reset(stream: trio.abc.Stream) -> None:
    if isinstance(stream, trio.SSLStream):
        stream = cast("trio.SSLStream[Any]", stream).transport_stream
    if isinstance(stream, trio.SocketStream):
        stream.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
