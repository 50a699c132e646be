"""Plain HTTP/1.1 as clients use it, on the fast connection and on Hypercorn's."""

from __future__ import annotations

from pathlib import Path

import msgspec
import trio

from .loopback import request, running
from .sample_app import SampleApp


async def test_keep_alive_answers_many_requests_on_one_connection(fast: bool) -> None:
    """A connection answers one request after the other, each with its own body and query."""
    async with running(SampleApp(), fast=fast) as server:
        client = await server.connect()
        for number in range(5):
            reply = await client.post(f"/echo?n={number}", b"body %d" % number)
            seen = msgspec.json.decode(reply.body)
            assert reply.status == 200
            assert (seen["query"], seen["body"], seen["version"]) == (f"n={number}", f"body {number}", "1.1")


async def test_pipelined_requests_are_answered_in_order(fast: bool) -> None:
    """Requests sent in one packet are each answered, in the order in which they were sent."""
    async with running(SampleApp(), fast=fast) as server:
        client = await server.connect()
        await client.send(b"".join(request(f"/echo?n={n}", "POST", b"x" * n) for n in range(20)))
        for number in range(20):
            seen = msgspec.json.decode((await client.reply()).body)
            assert (seen["query"], len(seen["body"])) == (f"n={number}", number)


async def test_path_is_decoded_and_headers_are_lower_case(fast: bool) -> None:
    """The application sees the decoded path, and header names in lower case with their values trimmed."""
    async with running(SampleApp(), fast=fast) as server:
        client = await server.connect()
        await client.send(b"GET /ec%68o HTTP/1.1\r\nHost: test\r\nX-Mixed-Case:  padded \t\r\n\r\n")
        seen = msgspec.json.decode((await client.reply()).body)
        assert seen["path"] == "/echo"
        assert ["x-mixed-case", "padded"] in seen["headers"]


async def test_chunked_request_body_arrives_whole_and_trailers_are_dropped(fast: bool) -> None:
    """A chunked body is joined; its trailers do not become headers of a request."""
    async with running(SampleApp(), fast=fast) as server:
        client = await server.connect()
        await client.send(b"POST /echo HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nwiki\r\n")
        await client.send(b"5;ext=1\r\npedia\r\n0\r\nX-Admin: yes\r\n\r\n" + request("/echo"))
        first = msgspec.json.decode((await client.reply()).body)
        second = msgspec.json.decode((await client.reply()).body)
        assert first["body"] == "wikipedia"
        assert "x-admin" not in dict(first["headers"]) | dict(second["headers"])


async def test_body_that_arrives_byte_by_byte(fast: bool) -> None:
    """Packet boundaries do not matter, in the head or in the body."""
    async with running(SampleApp(), fast=fast) as server:
        client = await server.connect()
        for byte in request("/echo", "POST", b"slow body"):
            await client.send(bytes([byte]))
        assert msgspec.json.decode((await client.reply()).body)["body"] == "slow body"


async def test_expect_continue_is_answered_before_the_body(fast: bool) -> None:
    """A client that asks first is told to go on, then gets its answer."""
    async with running(SampleApp(), fast=fast) as server:
        client = await server.connect()
        await client.send(request("/echo", "POST", Expect="100-continue", Content_Length="4"))
        assert (await client.head()).status == 100
        await client.send(b"body")
        assert msgspec.json.decode((await client.reply()).body)["body"] == "body"


async def test_expectation_of_a_refused_request_is_not_encouraged() -> None:
    """A refusal that does not want the body says so instead of asking for it, and closes."""
    async with running(SampleApp()) as server:
        client = await server.connect()
        await client.send(request("/refuse", "POST", Expect="100-continue", Content_Length="100"))
        reply = await client.reply()
        assert (reply.status, reply.headers["connection"]) == (401, "close")
        assert await client.rest() == b""


async def test_head_has_the_headers_of_get_and_no_body(fast: bool) -> None:
    """HEAD is answered without a body and the connection stays in step."""
    async with running(SampleApp(), fast=fast) as server:
        client = await server.connect()
        await client.send(request("/echo", "HEAD") + request("/echo"))
        reply = await client.reply(to_head=True)
        assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
        assert (await client.reply()).status == 200


async def test_no_content_has_no_body_and_no_length(fast: bool) -> None:
    """204 carries neither body nor length and keeps the connection."""
    async with running(SampleApp(), fast=fast) as server:
        client = await server.connect()
        reply = await client.get("/nobody")
        assert reply.status == 204
        assert not {"content-length", "transfer-encoding"} & set(reply.headers)
        assert (await client.get("/echo")).status == 200


async def test_http_1_0_closes_unless_asked_to_stay() -> None:
    """HTTP/1.0 gets one answer and the end of the connection; with keep-alive it gets more."""
    async with running(SampleApp()) as server:
        client = await server.connect()
        await client.send(b"GET /echo HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert (await client.reply()).headers["connection"] == "keep-alive"
        await client.send(b"GET /echo HTTP/1.0\r\n\r\n")
        assert (await client.reply()).status == 200
        assert await client.rest() == b""


async def test_http_1_0_stream_ends_with_the_connection(fast: bool) -> None:
    """HTTP/1.0 knows no chunks: a stream is sent plain and ends by closing."""
    app = SampleApp()
    app.finish.set()
    async with running(app, fast=fast) as server:
        client = await server.connect()
        await client.send(b"GET /stream HTTP/1.0\r\n\r\n")
        reply = await client.reply()
        assert "transfer-encoding" not in reply.headers
        assert reply.body.endswith(b"data: last\n\n")


async def test_connection_close_is_honoured(fast: bool) -> None:
    """A client that says close gets its answer and then the end."""
    async with running(SampleApp(), fast=fast) as server:
        client = await server.connect()
        reply = await client.get("/echo", Connection="close")
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert await client.rest() == b""


async def test_stream_reaches_the_client_event_by_event(fast: bool) -> None:
    """Events are on the wire before the stream ends, and the connection is usable after it."""
    app = SampleApp()
    async with running(app, fast=fast) as server:
        client = await server.connect()
        await client.send(request("/stream"))
        head = await client.head()
        assert head.headers["content-type"] == "text/event-stream; charset=utf-8"
        received = b""
        while received.count(b"\n\n") < 3:
            received += await client.chunk()
        assert received == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
        app.finish.set()
        assert await client.chunk() == b"data: last\n\n"
        assert await client.chunk() == b""
        assert (await client.get("/echo")).status == 200


async def test_large_answer_arrives_whole(fast: bool) -> None:
    """An answer larger than the kernel's buffers is sent to its end."""
    async with running(SampleApp(), fast=fast) as server:
        client = await server.connect()
        assert len((await client.get("/large")).body) == 5_000_000
        assert (await client.get("/echo")).status == 200


async def test_large_body_is_read_and_bounded_by_the_application(fast: bool) -> None:
    """A large body arrives whole; one above the application's limit is answered 413, chunked or not."""
    async with running(SampleApp(), fast=fast) as server:
        client = await server.connect()
        reply = await client.post("/echo", b"x" * 900_000)
        assert len(msgspec.json.decode(reply.body)["body"]) == 900_000
        await client.send(b"POST /echo HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        await client.send(chunk * 17 + b"0\r\n\r\n")
        assert (await client.reply()).status == 413
        assert (await client.get("/echo")).status == 200


async def test_crash_is_answered_500_and_the_server_lives(fast: bool) -> None:
    """An exception of the application, alone or in a group, costs its own request only."""
    async with running(SampleApp(), fast=fast) as server:
        for path in ("/crash", "/crash_in_group", "/silent"):
            client = await server.connect()
            assert (await client.get(path)).status == 500
        assert (await (await server.connect()).get("/echo")).status == 200


async def test_crash_has_the_error_envelope() -> None:
    """The fast path's own 500 has the four-key envelope and says nothing of the exception."""
    async with running(SampleApp()) as server:
        reply = await (await server.connect()).get("/crash")
        error = msgspec.json.decode(reply.body)["error"]
        assert (error["type"], error["param"], error["code"]) == ("server_error", None, "internal_error")
        assert "on purpose" not in error["message"]


async def test_answer_cut_in_half_is_visibly_incomplete(fast: bool) -> None:
    """A crash after half of a chunked answer closes the connection without the last chunk."""
    async with running(SampleApp(), fast=fast) as server:
        client = await server.connect()
        await client.send(request("/cut"))
        assert (await client.rest()).endswith(b"4\r\nhalf\r\n")


async def test_context_variables_do_not_leak_between_requests(fast: bool) -> None:
    """What one request sets in its context, the next on the same connection does not see, pipelined or not."""
    async with running(SampleApp(), fast=fast) as server:
        client = await server.connect()
        assert (await client.get("/remember")).body == b"clean"
        assert (await client.get("/remember")).body == b"clean"
        await client.send(request("/remember") * 3)
        assert [(await client.reply()).body for _ in range(3)] == [b"clean"] * 3


async def test_many_connections_at_once(fast: bool) -> None:
    """A burst of clients is accepted and answered."""
    async with running(SampleApp(), fast=fast) as server:
        clients = [await server.connect() for _ in range(150)]
        async with trio.open_nursery() as nursery:
            for client in clients:
                nursery.start_soon(client.send, request("/echo"))
        assert {(await client.reply()).status for client in clients} == {200}


async def test_unix_socket(fast: bool, tmp_path: Path) -> None:
    """Hypercorn's `unix:` addresses work on both paths."""
    path = f"{tmp_path}/server.sock"
    async with running(SampleApp(), fast=fast, bind=[f"unix:{path}"]) as server:
        assert server.address == f"http://unix:{path}"
        async with await trio.open_unix_socket(path) as stream:
            await stream.send_all(request("/echo", Connection="close"))
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")


async def test_absolute_form_and_asterisk_targets() -> None:
    """A proxy's absolute target is reduced to its path; `OPTIONS *` reaches the application as it is."""
    async with running(SampleApp()) as server:
        client = await server.connect()
        await client.send(b"GET http://test/echo?a=1 HTTP/1.1\r\nHost: test\r\n\r\n")
        seen = msgspec.json.decode((await client.reply()).body)
        assert (seen["path"], seen["query"]) == ("/echo", "a=1")
        await client.send(b"OPTIONS * HTTP/1.1\r\nHost: test\r\n\r\n")
        assert (await client.reply()).status == 404


async def test_server_names_limit_the_hosts_answered_for(fast: bool) -> None:
    """Hypercorn's `server_names` holds on both paths."""
    async with running(SampleApp(), fast=fast, server_names=["test"]) as server:
        assert (await (await server.connect()).get("/echo")).status == 200
        client = await server.connect()
        await client.send(b"GET /echo HTTP/1.1\r\nHost: other\r\nConnection: close\r\n\r\n")
        assert (await client.reply()).status == 404


async def test_lifespan_runs_around_the_requests(fast: bool) -> None:
    """The application's lifespan starts before the first request and ends after the last."""
    app = SampleApp()
    async with running(app, fast=fast) as server:
        assert app.lifespan == ["lifespan.startup"]
        await (await server.connect()).get("/echo")
        await server.stop()
        assert app.lifespan == ["lifespan.startup", "lifespan.shutdown"]
