"""Answers as applications write them: heads, lengths, hot routes, and the mistakes that must not reach the wire."""

from __future__ import annotations

import logging
from email.utils import formatdate

import pytest

from hermes_trio.http.server import HeaderBlock, HotRoutes, Message, Receive, Scope, Send, send_json
from hermes_trio.http.server.responses import FixedLines, InvalidHeader, http_date, render_headers, status_line

from .loopback import RunningServer, running
from .sample_app import SampleApp


def answering(*messages: Message) -> SampleApp:
    """An application that sends exactly these messages."""

    class Answering(SampleApp):
        async def on_answer(self, scope: Scope, receive: Receive, send: Send) -> None:
            for message in messages:
                await send(message)

    return Answering()


def start(*headers: tuple[bytes, bytes], status: int = 200) -> Message:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(data: bytes, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def get(server: RunningServer) -> tuple[int, bytes]:
    client = await server.connect()
    reply = await client.get("/answer")
    return reply.status, reply.body


async def test_answer_of_known_length_in_parts(fast: bool) -> None:
    """Parts that add up to the announced length are sent as they are, and the connection stays."""
    app = answering(start((b"content-length", b"6")), body(b"one", True), body(b"two"))
    async with running(app, fast=fast) as server:
        client = await server.connect()
        for _ in range(2):
            reply = await client.get("/answer")
            assert (reply.headers["content-length"], reply.body) == ("6", b"onetwo")


async def test_answer_without_length_in_parts_is_chunked(fast: bool) -> None:
    """Empty parts end nothing, and the last part may have content."""
    parts = [body(b"", True), body(b"one", True), body(b"", True), body(b"two")]
    async with running(answering(start(), *parts), fast=fast) as server:
        assert await get(server) == (200, b"onetwo")


async def test_longer_body_than_announced_is_cut_before_the_wire() -> None:
    """Bytes above the announced length would be read as the next answer; they are never sent."""
    async with running(answering(start((b"content-length", b"3")), body(b"four"))) as server:
        status, _ = await get(server)
        assert status == 500


async def test_shorter_body_than_announced_closes() -> None:
    """An answer that falls short ends with its connection, so that nothing can fill the gap."""
    async with running(answering(start((b"content-length", b"9")), body(b"half", True), body(b""))) as server:
        client = await server.connect()
        await client.send(b"GET /answer HTTP/1.1\r\nHost: a\r\n\r\n" * 2)
        assert (await client.rest()).endswith(b"\r\n\r\nhalf")


@pytest.mark.parametrize(
    "messages",
    [
        [body(b"no start")],
        [start(), start()],
        [start(status=99)],
        [start(), {"type": "http.response.push"}],
        [start((b"x", b"a\r\nset-cookie: b")), body(b"")],
        [start((b"x\r\ny", b"a")), body(b"")],
        [start((b"content-length", b"many")), body(b"")],
        [start((b"content-length", b"1"), (b"content-length", b"1")), body(b"1")],
    ],
)
async def test_impossible_answers_become_500(messages: list[Message]) -> None:
    """A message out of place or a header that would split the answer costs its request, not the client's trust."""
    async with running(answering(*messages)) as server:
        status, _ = await get(server)
        assert status == 500
        assert (await (await server.connect()).get("/echo")).status == 200


async def test_message_after_the_end_is_refused() -> None:
    """A part after the last one is an error of the application and is not sent."""
    async with running(answering(start(), body(b"done"), body(b"more"))) as server:
        client = await server.connect()
        assert (await client.get("/answer")).body == b"done"
        assert await client.rest() == b""


async def test_application_owns_neither_framing_nor_connection() -> None:
    """An application's Connection header is understood; its Transfer-Encoding is not copied."""
    async with running(
        answering(start((b"Connection", b"close"), (b"transfer-encoding", b"gzip")), body(b"x"))
    ) as server:
        client = await server.connect()
        reply = await client.get("/answer")
        assert (reply.headers["connection"], reply.headers["content-length"]) == ("close", "1")
        assert "transfer-encoding" not in reply.headers
        assert await client.rest() == b""


async def test_server_and_date_headers_follow_hypercorn() -> None:
    """`include_server_header` and `include_date_header` mean on the fast path what they mean to Hypercorn."""
    async with running(SampleApp(), include_server_header=True, include_date_header=False) as server:
        headers = (await (await server.connect()).get("/echo")).headers
        assert headers["server"] == "hermes-trio"
        assert "date" not in headers


async def test_access_log_is_written_when_asked_for(fast: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Hypercorn's access log has a line a request on both paths."""
    logger = logging.getLogger("tests.access")
    with caplog.at_level(logging.INFO, logger="tests.access"):
        async with running(SampleApp(), fast=fast, accesslog=logger, access_log_format="%(m)s %(U)s %(s)s") as server:
            client = await server.connect()
            await client.get("/echo")
            await client.get("/refuse")
            await client.get("/echo")
        assert caplog.messages[:2] == ["GET /echo 200", "GET /refuse 401"]


async def test_hot_routes_answer_exact_matches_only(fast: bool) -> None:
    """A hit goes to its callable; another method, another path and the lifespan go to the fallback."""

    async def hot(scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, b'"hot"')

    app = SampleApp()
    async with running(HotRoutes(app, {("GET", "/hot"): hot}), fast=fast) as server:
        client = await server.connect()
        reply = await client.get("/hot?x=1")
        assert (reply.body, reply.headers["content-type"], reply.headers["content-length"]) == (
            b'"hot"',
            "application/json",
            "5",
        )
        assert (await client.post("/hot", b"")).status == 404
        assert (await client.get("/hot/")).status == 404
        assert (await client.get("/echo")).status == 200
        assert app.lifespan == ["lifespan.startup"]


async def test_send_json_with_headers_of_its_own(fast: bool) -> None:
    """Plain pairs work as well as a block rendered once."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        block = [(b"Content-Type", b"application/problem+json"), (b"X-Request", b"1")]
        await send_json(send, 400, b"{}", HeaderBlock(block) if scope["path"] == "/block" else block)

    async with running(app, fast=fast) as server:
        client = await server.connect()
        for path in ("/block", "/pairs"):
            headers = (await client.get(path)).headers
            assert (headers["content-type"], headers["x-request"], headers["content-length"]) == (
                "application/problem+json",
                "1",
                "2",
            )


def test_header_block_refuses_what_belongs_to_one_answer() -> None:
    """Lengths, dates and connection headers cannot be shared between answers."""
    for name in (b"Content-Length", b"connection", b"Date", b"transfer-encoding"):
        with pytest.raises(InvalidHeader, match=name.decode().lower()):
            HeaderBlock([(name, b"1")])
    with pytest.raises(InvalidHeader, match="CR, LF"):
        HeaderBlock([(b"x", b"a\nb")])


def test_rendered_headers_say_what_they_mean() -> None:
    """Lengths, close and dates are noticed in any case."""
    rendered = render_headers([(b"Content-Length", b"5"), (b"DATE", b"now"), (b"Connection", b"Close"), (b"X", b"y")])
    assert rendered.block == b"content-length: 5\r\ndate: now\r\nx: y\r\n"
    assert (rendered.length, rendered.close, rendered.dated) == (5, True, True)


def test_status_lines() -> None:
    """Known and unknown codes have a line."""
    assert status_line(404) == b"HTTP/1.1 404 Not Found\r\n"
    assert status_line(599) == b"HTTP/1.1 599 \r\n"


def test_date_is_not_added_twice() -> None:
    """An application's own Date stands alone."""
    fixed = FixedLines(date=True, server=False)
    assert fixed.lines(dated=True) == b""
    assert fixed.lines(dated=False).startswith(b"date: ")


@pytest.mark.parametrize("moment", [0, 951_782_400, 1_000_000_000, 1_798_761_599, 4_102_444_800])
def test_the_date_is_that_of_the_standard_library(moment: int) -> None:
    """The Date header's own rendering agrees with the one in the standard library."""
    assert http_date(moment).decode() == formatdate(moment, usegmt=True)
