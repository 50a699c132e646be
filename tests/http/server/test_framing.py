"""Where requests begin and end: what is accepted, what is refused, and that packet boundaries do not matter."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_trio.http.server import ServerConfig
from hermes_trio.http.server.framing import HTTP2_PREFACE, RequestReader

POST = b"POST / HTTP/1.1\r\nHost: a\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"

REFUSED = {
    "length and chunked": (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "chunked and length": (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", 400),
    "two lengths": (POST + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello", 400),
    "two different lengths": (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", 400),
    "list of lengths": (POST + b"Content-Length: 5, 5\r\n\r\nhello", 400),
    "signed length": (POST + b"Content-Length: +5\r\n\r\nhello", 400),
    "negative length": (POST + b"Content-Length: -5\r\n\r\nhello", 400),
    "hexadecimal length": (POST + b"Content-Length: 0x5\r\n\r\nhello", 400),
    "empty length": (POST + b"Content-Length: \r\n\r\n", 400),
    "overflowing length": (POST + b"Content-Length: 99999999999999999999999\r\n\r\n", 400),
    "identity coding": (POST + b"Transfer-Encoding: identity\r\n\r\n", 501),
    "gzip coding": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    "unknown coding": (POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 501),
    "chunked twice": (POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", 501),
    "a coding behind chunked": (POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n", 501),
    "a coding in a header before": (
        POST + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        501,
    ),
    "a coding in a header behind": (
        POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: gzip\r\n\r\n0\r\n\r\n",
        501,
    ),
    "identity in a header before": (
        POST + b"TE: x\r\ntransfer-encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        501,
    ),
    "a coding with parameters": (POST + b"Transfer-Encoding: chunked;q=1\r\n\r\n0\r\n\r\n", 501),
    "a coding in capitals": (POST + b"TRANSFER-ENCODING: GZIP, Chunked\r\n\r\n0\r\n\r\n", 501),
    "chunked in HTTP/1.0": (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "letter in chunk size": (CHUNKED + b"5x\r\nhello\r\n0\r\n\r\n", 400),
    "space in chunk size": (CHUNKED + b"5 \r\nhello\r\n0\r\n\r\n", 400),
    "huge chunk size": (CHUNKED + b"fffffffffffffffff\r\nhello\r\n", 400),
    "line feed after chunk size": (CHUNKED + b"5\nhello\r\n0\r\n\r\n", 400),
    "line feed after chunk": (CHUNKED + b"5\r\nhello\n0\r\n\r\n", 400),
    "no line end after chunk": (CHUNKED + b"5\r\nhelloXX0\r\n\r\n", 400),
    "length in trailers": (CHUNKED + b"0\r\nContent-Length: 5\r\n\r\n", 400),
    "bare line feeds": (b"GET / HTTP/1.1\nHost: a\n\n", 400),
    "bare line feed in a header": (b"GET / HTTP/1.1\r\nHost: a\nX: 1\r\n\r\n", 400),
    "bare carriage return": (b"GET / HTTP/1.1\r\nHost: a\rX: 1\r\n\r\n", 400),
    "folded header": (b"GET / HTTP/1.1\r\nHost: a\r\n b\r\n\r\n", 400),
    "folded by a tab": (b"GET / HTTP/1.1\r\nHost: a\r\n\tb\r\n\r\n", 400),
    "space before the first header": (b"GET / HTTP/1.1\r\n Host: a\r\n\r\n", 400),
    "space before the colon": (b"GET / HTTP/1.1\r\nHost : a\r\n\r\n", 400),
    "header without a colon": (b"GET / HTTP/1.1\r\nHost\r\n\r\n", 400),
    "header without a name": (b"GET / HTTP/1.1\r\n: a\r\n\r\n", 400),
    "NUL in a value": (b"GET / HTTP/1.1\r\nHost: a\0b\r\n\r\n", 400),
    "NUL in a name": (b"GET / HTTP/1.1\r\nHo\0st: a\r\n\r\n", 400),
    "NUL in the target": (b"GET /\0 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "control character in a value": (b"GET / HTTP/1.1\r\nHost: a\x01\r\n\r\n", 400),
    "raw byte in the target": (b"GET /\xe9 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "fragment in the target": (b"GET /a#b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    "HTTP/0.9": (b"GET /\r\n\r\n", 505),
    "HTTP/2 without the preface": (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
    "HTTP/1.2": (b"GET / HTTP/1.2\r\nHost: a\r\n\r\n", 400),
    "lower-case method": (b"get / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "a method of RTSP": (b"PLAY / RTSP/1.0\r\nHost: a\r\n\r\n", 501),
    "a tunnel": (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 501),
    "a TLS hello": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "unknown expectation": (POST + b"Content-Length: 1\r\nExpect: magic\r\n\r\n1", 417),
}


def parse(*packets: bytes, **limits: int) -> RequestReader:
    reader = RequestReader(ServerConfig(**limits))  # pyright: ignore[reportArgumentType]
    for packet in packets:
        reader.feed(memoryview(packet))
    return reader


def described(reader: RequestReader) -> list[tuple[str, bytes, list[tuple[bytes, bytes]], bytes, bool]]:
    return [(r.method, r.target, r.headers, b"".join(r.chunks), r.complete) for r in reader.ready]


@pytest.mark.parametrize("name", REFUSED)
def test_ambiguous_framing_is_refused(name: str) -> None:
    """Each of these is refused with its status, and no complete request comes out of it."""
    data, status = REFUSED[name]
    reader = parse(data)
    assert reader.fault is not None
    assert reader.fault.status == status
    assert not [request for request in reader.ready if request.complete]


@pytest.mark.parametrize("name", REFUSED)
def test_a_fault_does_not_take_the_requests_before_it(name: str) -> None:
    """A valid request before the malformed one is still there to be answered."""
    reader = parse(b"GET /first HTTP/1.1\r\nHost: a\r\n\r\n" + REFUSED[name][0])
    assert reader.fault is not None
    assert (reader.ready[0].target, reader.ready[0].complete) == (b"/first", True)


STREAM = (
    b"\r\nPOST /one?x=%20 HTTP/1.1\r\nHost: a\r\nContent-Length: 5 \r\nX-A:  b \r\n\r\nhello"
    b"GET /two HTTP/1.1\r\nHost: b\r\n\r\n"
    + CHUNKED.replace(b"/ ", b"/three ")
    + b"4;x=y\r\nwiki\r\n5\r\npedia\r\n0\r\nX-Trailer: t\r\n\r\n"
    b"DELETE /four HTTP/1.1\r\nHost: d\r\nX-Empty:\r\n\r\n"
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_packet_boundaries_do_not_matter(cuts: list[int]) -> None:
    """However the same bytes are cut, the same requests come out."""
    edges = [0, *sorted(cuts), len(STREAM)]
    packets = [STREAM[a:b] for a, b in pairwise(edges)]
    assert described(parse(*packets)) == described(parse(STREAM))


def test_requests_are_what_was_sent() -> None:
    """Method, target, trimmed headers and joined bodies, without the trailers."""
    one, two, three, four = described(parse(STREAM))
    assert one == ("POST", b"/one?x=%20", [(b"host", b"a"), (b"content-length", b"5"), (b"x-a", b"b")], b"hello", True)
    assert two == ("GET", b"/two", [(b"host", b"b")], b"", True)
    assert three[1:2] + three[3:] == (b"/three", b"wikipedia", True)
    assert four == ("DELETE", b"/four", [(b"host", b"d"), (b"x-empty", b"")], b"", True)


@given(st.binary(max_size=400), st.integers(0, 400))
def test_no_input_raises(data: bytes, cut: int) -> None:
    """Whatever is fed, the reader answers with requests or a fault, never with an exception."""
    parse(data[:cut], data[cut:])
    parse(b"POST / HTTP/1.1\r\nHost: a\r\n" + data[:cut], data[cut:])
    parse(CHUNKED + data[:cut], data[cut:])


@pytest.mark.parametrize("packet_size", [1, 100, 100_000])
def test_sizes_are_bounded(packet_size: int) -> None:
    """A target, a head, a header that never ends, chunk extensions and trailers all have a limit, in any packets."""

    def status(data: bytes) -> int | None:
        packets = [data[i : i + packet_size] for i in range(0, len(data), packet_size)]
        fault = parse(*packets, head_bytes=2000, target_bytes=500).fault
        return None if fault is None else fault.status

    assert status(b"GET /" + b"a" * 400 + b" HTTP/1.1\r\nHost: a\r\n\r\n") is None
    assert status(b"GET /" + b"a" * 600 + b" HTTP/1.1\r\nHost: a\r\n\r\n") == 414
    assert status(b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"b" * 1500 + b"\r\n\r\n") is None
    assert status(b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"b" * 2500 + b"\r\n\r\n") == 431
    assert status(b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: 1\r\n" * 500 + b"\r\n") == 431
    assert status(CHUNKED + b"0\r\n" + b"X: 1\r\n" * 500 + b"\r\n") == 400
    if packet_size < 2000:
        assert status(b"\r\n" * 2000) in {414, 431}
        assert status(CHUNKED + b"5;" + b"e" * 5000) == 400


def test_a_large_body_is_no_large_head() -> None:
    """The limit on heads does not count the body that follows in the same packets."""
    reader = parse(
        POST + b"Content-Length: 50000\r\n\r\n" + b"x" * 50000, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", head_bytes=1000
    )
    assert reader.fault is None
    assert len(reader.ready) == 2


def test_bytes_after_the_last_request_are_ignored() -> None:
    """Requests after `connection: close` are neither answered nor refused."""
    reader = parse(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\nGET /2 HTTP/1.1\r\nHost: a\r\n\r\n")
    assert reader.fault is None
    assert [request.target for request in reader.ready] == [b"/"]


def test_malformed_body_of_the_last_request_is_a_fault() -> None:
    """Saying close does not excuse a bad chunk."""
    reader = parse(POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
    assert reader.fault is not None
    assert not reader.ready[0].complete


@pytest.mark.parametrize("cut", range(len(HTTP2_PREFACE) + 8))
def test_http2_preface_is_recognised_in_any_packets(cut: int) -> None:
    """The preface, cut anywhere, is kept whole for the protocol that understands it."""
    data = HTTP2_PREFACE + b"SETTINGS"
    reader = RequestReader(ServerConfig())
    taken = 0
    for packet in (data[:cut], data[cut:]):
        if packet and reader.http2 is None:
            reader.feed(memoryview(packet))
            taken += len(packet)
    assert reader.http2 == data[:taken]


def test_upgrade_keeps_the_bytes_behind_it() -> None:
    """An upgrade request is written out again as it was, and what follows it is not parsed."""
    head = b"GET /ws HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\n"
    reader = parse(head + b"\x81\x00")
    assert reader.ready[0].upgrade
    assert reader.ready[0].head() + reader.rest == head + b"\x81\x00"
