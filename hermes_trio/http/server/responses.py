"""Response heads: status lines, header blocks and the Date line, rendered with as little work as a head allows.

`HeaderBlock` is a set of headers rendered once and sent often; every server takes it as the plain sequence of pairs
that it is. The connection owns framing: a Transfer-Encoding or Connection header of the application is read for its
intent and never copied.
"""

from __future__ import annotations

import http
from collections.abc import Iterable
from time import gmtime, time
from typing import final

import msgspec

_STATUS_LINES = {code.value: f"HTTP/1.1 {code.value} {code.phrase}\r\n".encode() for code in http.HTTPStatus}
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_OWNED = frozenset({b"content-length", b"transfer-encoding", b"connection", b"date"})


class InvalidHeader(ValueError):
    """The application's response headers cannot be sent as they are."""


def status_line(status: int) -> bytes:
    """Return the first line of a response."""
    line = _STATUS_LINES.get(status)
    return line if line is not None else b"HTTP/1.1 %d \r\n" % status


def _join(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    parts: list[bytes] = []
    lines = 0
    for name, value in pairs:
        parts += (name, b": ", value, b"\r\n")
        lines += 1
    block = b"".join(parts)
    # Counting line ends over the finished block finds an injected one in any name or value, at the price of three
    # scans in C.
    if block.count(b"\n") != lines or block.count(b"\r") != lines or b"\0" in block:
        raise InvalidHeader("a response header contains CR, LF or NUL; remove it from the name or value")
    return block


@final
class HeaderBlock(tuple[tuple[bytes, bytes], ...]):
    """Response headers that are the same for many answers, checked and rendered once.

    Headers that belong to one answer or to the connection (Content-Length, Transfer-Encoding, Connection, Date) are
    refused.
    """

    block: bytes

    def __new__(cls, headers: Iterable[tuple[bytes, bytes]]) -> HeaderBlock:
        pairs = tuple((name.lower(), value) for name, value in headers)
        owned = [name.decode("latin-1") for name, _ in pairs if name in _OWNED]
        if owned:
            raise InvalidHeader(
                f"{', '.join(owned)} cannot be part of a HeaderBlock: the server writes it for each answer"
            )
        self = super().__new__(cls, pairs)
        self.block = _join(pairs)
        return self

    def plus(self, own: tuple[tuple[bytes, bytes], ...]) -> HeaderBlock:
        """Return these headers and an answer's own, of which only those are rendered now. Their names are in lower case."""
        for name, _ in own:
            if name in _OWNED:
                raise InvalidHeader(f"{name.decode('latin-1')} cannot be part of a HeaderBlock: the server writes it")
        made = super().__new__(type(self), self + own)
        made.block = self.block + _join(own)
        return made


class RenderedHeaders(msgspec.Struct, frozen=True):
    """An application's headers as they go out, and what they say about the answer."""

    block: bytes
    length: int | None = None
    close: bool = False
    dated: bool = False


def render_headers(headers: Iterable[tuple[bytes, bytes]]) -> RenderedHeaders:
    """Render the headers of one answer.

    :raises InvalidHeader: for line breaks in a header or a Content-Length that is not one number.
    """
    pairs: list[tuple[bytes, bytes]] = []
    length: int | None = None
    close = dated = False
    for name, value in headers:
        name = name.lower()
        if name in _OWNED:
            if name == b"content-length":
                if length is not None or not value.isdigit():
                    raise InvalidHeader(f"content-length must be one number, got {value!r}")
                length = int(value)
            elif name == b"date":
                dated = True
            else:
                close = close or (name == b"connection" and b"close" in value.lower())
                continue
        pairs.append((name, value))
    return RenderedHeaders(_join(pairs), length, close, dated)


def http_date(second: int) -> bytes:
    """Return a moment as the Date header has it, in no matter which locale."""
    year, month, day, hour, minute, seconds, weekday, _, _ = gmtime(second)
    text = f"{_DAYS[weekday]}, {day:02} {_MONTHS[month - 1]} {year:04} {hour:02}:{minute:02}:{seconds:02} GMT"
    return text.encode()


@final
class FixedLines:
    """The lines that the server adds to every head; the Date is rendered once a second."""

    __slots__ = ("_date", "_lines", "_second", "_server")

    def __init__(self, *, date: bool, server: bool) -> None:
        self._date = date
        self._server = b"server: hermes-trio\r\n" if server else b""
        self._second = -1
        self._lines = self._server

    def lines(self, *, dated: bool) -> bytes:
        """Return the added lines; `dated` when the application wrote a Date of its own."""
        if dated or not self._date:
            return self._server
        second = int(time())
        if second != self._second:
            self._second = second
            self._lines = b"date: %b\r\n%b" % (http_date(second), self._server)
        return self._lines
