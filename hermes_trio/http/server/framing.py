"""Where one request ends and the next begins: HTTP/1.1 framing on httptools, refusing everything ambiguous.

`RequestReader` is fed bytes and yields requests in order; it does no I/O. httptools (llhttp) is strict
about line ends, folding, control characters, duplicate or overflowing lengths and chunk syntax; what it leaves to its
caller is checked here: the HTTP version, transfer codings other than plain `chunked`, the Host header, methods of
other protocols, and every size. After a fault the reader takes no more input; requests that were complete before it
are still served.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import httptools

from hermes_trio.http.server.endings import ProtocolFault

if TYPE_CHECKING:
    from hermes_trio.http.server.asgi import HeaderPairs
    from hermes_trio.http.server.config import ServerConfig

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

# llhttp also knows the methods of RTSP and Icecast; those are not requests to this server.
_METHODS = {
    name.encode(): name
    for name in [
        "GET",
        "HEAD",
        "POST",
        "PUT",
        "PATCH",
        "DELETE",
        "OPTIONS",
        "TRACE",
        "COPY",
        "LOCK",
        "MKCOL",
        "MOVE",
        "PROPFIND",
        "PROPPATCH",
        "SEARCH",
        "UNLOCK",
        "BIND",
        "REBIND",
        "UNBIND",
        "ACL",
        "REPORT",
        "MKACTIVITY",
        "CHECKOUT",
        "MERGE",
        "NOTIFY",
        "SUBSCRIBE",
        "UNSUBSCRIBE",
        "PURGE",
        "MKCALENDAR",
        "LINK",
        "UNLINK",
        "QUERY",
    ]
}
_NOTED = frozenset({b"host", b"content-length", b"transfer-encoding", b"expect"})

_SPEAKS_HTTP2 = ProtocolFault(505, "http_version_not_supported", "This connection speaks HTTP/2.")
_TOO_LONG_TARGET = ProtocolFault(414, "uri_too_long", "The request target is longer than this server accepts.")
_TOO_LARGE_HEAD = ProtocolFault(
    431, "headers_too_large", "The request's header fields are larger than this server accepts."
)
_TOO_LARGE_TRAILER = ProtocolFault(
    400,
    "malformed_request",
    "The chunk extensions or trailers of the request body are larger than this server accepts.",
)
_OTHER_CODING = ProtocolFault(
    501, "transfer_encoding_not_implemented", "The only transfer coding accepted is chunked, once."
)


def _malformed(detail: str) -> ProtocolFault:
    return ProtocolFault(400, "malformed_request", f"The request is not valid HTTP/1.1: {detail}.")


class _Refused(Exception):
    """Leaves a parser callback after `RequestReader.fault` was set."""


@final
class ParsedRequest:
    """One request as it was framed: its head, and as much of its body as has arrived and was not taken."""

    __slots__ = (
        "chunks",
        "complete",
        "expects_continue",
        "headers",
        "keep_alive",
        "length",
        "method",
        "received",
        "target",
        "upgrade",
        "version",
    )

    def __init__(
        self, method: str, target: bytes, version: str, headers: HeaderPairs, keep_alive: bool, length: int | None
    ) -> None:
        self.method = method
        self.target = target
        self.version = version
        self.headers = headers
        self.keep_alive = keep_alive
        self.length = length
        self.expects_continue = False
        self.upgrade = False
        self.chunks: list[bytes] = []
        self.received = 0
        self.complete = False

    def take(self) -> bytes:
        """Return the body bytes that have arrived since the last call."""
        chunks = self.chunks
        if not chunks:
            return b""
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        self.chunks = []
        return body

    def head(self) -> bytes:
        """Return the head written out again, for the protocol that takes this connection over."""
        lines = [f"{self.method} ".encode(), self.target, f" HTTP/{self.version}\r\n".encode()]
        for name, value in self.headers:
            lines += (name, b": ", value, b"\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)


@final
class RequestReader:
    """Turns the bytes of one connection into requests.

    `ready` holds requests whose head is complete, in order; only the last of them can still lack body bytes. `fault`
    is set once, when the input stops being HTTP/1; `rest` holds the bytes behind an upgrade request, and `http2` all
    bytes of a connection that opened with the HTTP/2 preface.
    """

    __slots__ = (
        "_content_length",
        "_expect",
        "_feed_size",
        "_head_bytes",
        "_headers",
        "_hosts",
        "_in_body",
        "_opening",
        "_parser",
        "_pending",
        "_progress",
        "_request",
        "_target",
        "_target_bytes",
        "_trailer_bytes",
        "_transfer_encoding",
        "begun",
        "fault",
        "http2",
        "ready",
        "rest",
    )

    def __init__(self, config: ServerConfig) -> None:
        self._head_bytes = config.head_bytes
        self._target_bytes = config.target_bytes
        self._parser = httptools.HttpRequestParser(self)
        self._request: ParsedRequest | None = None
        self._target = b""
        self._headers: HeaderPairs = []
        self._hosts = 0
        self._content_length: int | None = None
        self._transfer_encoding: bytes | None = None
        self._expect: bytes | None = None
        self._in_body = False
        self._trailer_bytes = 0
        self._feed_size = 0
        self._pending = 0
        self._opening = b""
        self._progress = 0
        self.ready: list[ParsedRequest] = []
        self.begun = False
        self.fault: ProtocolFault | None = None
        self.rest = b""
        self.http2: bytes | None = None

    def feed(self, data: memoryview) -> None:
        """Take bytes from the network. Never raises: what is wrong with them is in `fault`."""
        if self.fault is not None:
            return
        progress = self._progress
        self._feed_size = len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self.rest = bytes(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if self._request is None:
                opening = self._opening + data
                if opening.startswith(HTTP2_PREFACE):
                    self.http2, self.fault = opening, _SPEAKS_HTTP2
                    return
            # A client that announced its last request and sends on is not answered, and is no fault either.
            last = self._request
            closed_before = last is not None and last.complete and not last.keep_alive and not self.begun
            if self.fault is None and not closed_before:
                # The parser refuses what stands behind `chunked` itself, and does not say what it was.
                refused_coding = "`Transfer-Encoding` header value" in str(error)
                self.fault = _OTHER_CODING if refused_coding else _malformed(str(error) or "it cannot be parsed")
            return
        if progress == self._progress:
            if self._request is None and self._pending < len(HTTP2_PREFACE):
                self._opening += data
            self._pending += len(data)
            if self._pending > self._head_bytes:
                if self._in_body:
                    self.fault = _TOO_LARGE_TRAILER
                else:
                    self.fault = _TOO_LARGE_HEAD if self._headers else _TOO_LONG_TARGET
        else:
            self._pending = 0

    def close(self) -> None:
        """Break the cycle between this reader and its parser, so that a closed connection leaves no garbage."""
        del self._parser

    def _refuse(self, fault: ProtocolFault) -> None:
        self.fault = fault
        raise _Refused

    def on_message_begin(self) -> None:
        self.begun = True
        self._in_body = False
        self._target = b""
        self._headers = []
        self._hosts = 0
        self._content_length = self._transfer_encoding = self._expect = None

    def on_url(self, url: bytes) -> None:
        self._target = self._target + url if self._target else url
        if len(self._target) > self._target_bytes:
            self._refuse(_TOO_LONG_TARGET)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            self._trailer_bytes += len(name) + len(value) + 4
            if self._trailer_bytes > self._head_bytes:
                self._refuse(_TOO_LARGE_TRAILER)
            return
        name = name.lower()
        value = value.rstrip(b" \t")
        self._headers.append((name, value))
        if name in _NOTED:
            if name == b"host":
                self._hosts += 1
            elif name == b"content-length":
                self._content_length = int(value)
            elif name == b"transfer-encoding":
                # Several headers are one list (RFC 9110, 5.3): the last one alone says nothing about those before it.
                given = self._transfer_encoding
                self._transfer_encoding = value if given is None else given + b", " + value
            else:
                self._expect = value

    def on_headers_complete(self) -> None:
        parser = self._parser
        version = parser.get_http_version()
        method = _METHODS.get(parser.get_method())
        if version != "1.1":
            if version != "1.0":
                self._refuse(
                    ProtocolFault(
                        505, "http_version_not_supported", "This server speaks HTTP/1.0, HTTP/1.1 and HTTP/2."
                    )
                )
            if self._transfer_encoding is not None:
                self._refuse(_malformed("HTTP/1.0 has no Transfer-Encoding"))
            if self._hosts > 1:
                self._refuse(_malformed("there is more than one Host header"))
        elif self._hosts != 1:
            self._refuse(_malformed("there must be exactly one Host header"))
        if method is None:
            self._refuse(ProtocolFault(501, "method_not_implemented", "This server does not implement that method."))
            return
        if self._transfer_encoding is not None and self._transfer_encoding.lower() != b"chunked":
            self._refuse(_OTHER_CODING)
        if self._pending + self._feed_size > self._head_bytes:
            size = len(self._target) + sum(len(name) + len(value) + 4 for name, value in self._headers)
            if size > self._head_bytes:
                self._refuse(_TOO_LARGE_HEAD)
        target = self._target
        if b"#" in target:
            self._refuse(_malformed("the request target has a fragment"))
        request = ParsedRequest(
            method, target, version, self._headers, parser.should_keep_alive(), self._content_length
        )
        if self._expect is not None:
            if self._expect.lower() != b"100-continue":
                self._refuse(ProtocolFault(417, "expectation_failed", "The only expectation met is 100-continue."))
            request.expects_continue = version == "1.1" and (
                self._transfer_encoding is not None or bool(self._content_length)
            )
        request.upgrade = parser.should_upgrade()
        self._request = request
        self._in_body = True
        self.begun = False
        self._trailer_bytes = 0
        self._progress += 1
        self.ready.append(request)

    def on_body(self, body: bytes) -> None:
        request = self._request
        if request is not None:
            request.chunks.append(body)
            request.received += len(body)
            request.expects_continue = False
        self._progress += 1

    def on_message_complete(self) -> None:
        request = self._request
        if request is not None:
            request.complete = True
            request.expects_continue = False
        self._progress += 1
