"""Server-sent events, read from untrusted bytes with bounded memory.

An `EventReader` is fed what the socket gave and returns the events that have become complete. It copies each byte a
constant number of times however the stream is cut, and refuses an event that grows beyond its limit.
"""

from __future__ import annotations

from typing import Final, final

import msgspec

EVENT_LIMIT: Final = 4 * 1024 * 1024
"""Bytes of one event. Some servers send a whole tool call, with the file that it writes, as one event."""

_LINE_COST: Final = 16
"""What a data line counts besides its bytes, so that endless empty ones come to an end, too."""

_BOM: Final = b"\xef\xbb\xbf"


class EventTooLarge(Exception):
    """An event, or a line of one, is longer than the reader accepts."""


class ServerEvent(msgspec.Struct, frozen=True):
    """One event: its type (`message` if the server named none) and the bytes of its data lines."""

    name: str
    data: bytes


@final
class EventReader:
    """Turns bytes into events.

    Lines end with LF or CR LF; comments and fields other than `event` and `data` are skipped.
    """

    __slots__ = ("_data", "_data_size", "_limit", "_name", "_partial", "_started")

    def __init__(self, limit: int = EVENT_LIMIT) -> None:
        self._limit = limit
        self._partial = bytearray()
        self._name = ""
        self._data: list[bytes] = []
        self._data_size = 0
        self._started = False

    def feed(self, chunk: bytes) -> list[ServerEvent]:
        """Take the next bytes of the stream; return the events that they complete."""
        lines = chunk.split(b"\n")
        rest = lines.pop()
        events: list[ServerEvent] = []
        for line in lines:
            if self._partial:
                line = bytes(self._partial) + line
                self._partial.clear()
            event = self._line(line)
            if event is not None:
                events.append(event)
        if rest:
            self._partial += rest
            if len(self._partial) + self._data_size > self._limit:
                raise self._too_large()
        return events

    def finish(self) -> list[ServerEvent]:
        """End the stream.

        Return an event that lacks only its final blank line, which careless servers leave out.
        """
        return self.feed(b"\n\n") if self._partial or self._data else []

    def _too_large(self) -> EventTooLarge:
        return EventTooLarge(f"an event of the stream is longer than {self._limit} bytes")

    def _line(self, line: bytes) -> ServerEvent | None:
        if not self._started:
            self._started = True
            line = line.removeprefix(_BOM)
        if line.endswith(b"\r"):
            line = line[:-1]
        if not line:
            return self._dispatch()
        field, _, value = line.partition(b":")
        if value.startswith(b" "):
            value = value[1:]
        if field == b"data":
            self._data_size += len(value) + _LINE_COST
            if self._data_size > self._limit + _LINE_COST:
                raise self._too_large()
            self._data.append(value)
        elif field == b"event":
            self._name = value[:100].decode("utf-8", "replace")
        return None

    def _dispatch(self) -> ServerEvent | None:
        name, self._name = self._name, ""
        if not self._data:
            return None
        data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
        self._data.clear()
        self._data_size = 0
        return ServerEvent(name or "message", data)
