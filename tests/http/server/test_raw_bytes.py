"""Anything on the socket: whatever one client sends, the server answers the next one."""

from __future__ import annotations

import msgspec
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .loopback import RunningServer, request, running
from .sample_app import SampleApp
from .test_framing import CHUNKED, REFUSED

CORPUS = {
    **{name: data for name, (data, _) in REFUSED.items()},
    "nothing": b"",
    "line ends": b"\r\n" * 50,
    "binary": bytes(range(256)),
    "half a head": b"GET / HTTP/1.1\r\nHost",
    "half a body": request("/echo", "POST", Content_Length="10") + b"half",
    "half a chunk": CHUNKED + b"10\r\nhalf",
    "an HTTP/2 preface and rubbish": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 40,
    "half an HTTP/2 preface": b"PRI * HT",
    "a broken WebSocket": request("/ws", Connection="Upgrade", Upgrade="websocket") + b"\xff" * 20,
    "a WebSocket with rubbish behind it": request(
        "/ws",
        Connection="Upgrade",
        Upgrade="websocket",
        Sec_WebSocket_Version="13",
        Sec_WebSocket_Key="dGhlIHNhbXBsZSBub25jZQ==",
    )
    + b"\xff" * 200,
    "a broken h2c upgrade": request("/", Connection="Upgrade, HTTP2-Settings", Upgrade="h2c", HTTP2_Settings="!!!"),
    "oversize target": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    "oversize header": b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"b" * 100_000 + b"\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: 1\r\n" * 20_000 + b"\r\n",
    "endless chunk extension": CHUNKED + b"5;" + b"e" * 200_000,
    "many pipelined requests": request("/echo") * 500,
    "request after a bad one": b"BAD\r\n\r\n" + request("/echo"),
    "crash": request("/crash"),
    "half an answer": request("/cut"),
}


async def assert_serves(server: RunningServer) -> None:
    client = await server.connect()
    assert (await client.post("/echo", b"still here")).status == 200
    await client.close()


@pytest.mark.parametrize("ending", ["close", "half-close", "reset"])
async def test_corpus(fast: bool, ending: str) -> None:
    """After each of these, ended in any way, the server answers, and nothing of the connection is left."""
    async with running(SampleApp(), fast=fast, linger_timeout=0.05, keep_alive_timeout=0.5, body_timeout=0.5) as server:
        before = trio.lowlevel.current_statistics().tasks_living
        for data in CORPUS.values():
            client = await server.connect()
            try:
                await client.send(data)
                if ending == "half-close":
                    await client.half_close()
                    await client.rest()
            except trio.BrokenResourceError:
                pass
            await (client.reset() if ending == "reset" else client.close())
            await assert_serves(server)
        while trio.lowlevel.current_statistics().tasks_living > before:  # noqa: ASYNC110 - tasks end without an event
            await trio.sleep(0.001)


@pytest.mark.parametrize("name", REFUSED)
async def test_refusals_have_the_error_envelope(name: str) -> None:
    """A malformed request is answered with its status and the four-key envelope, and its connection closed."""
    data, status = REFUSED[name]
    async with running(SampleApp()) as server:
        client = await server.connect()
        await client.send(data.replace(b"POST / ", b"POST /echo "))
        reply = await client.reply()
        error = msgspec.json.decode(reply.body)["error"]
        assert (reply.status, reply.headers["connection"], reply.headers["content-type"]) == (
            status,
            "close",
            "application/json",
        )
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["param"]) == ("invalid_request_error", None)
        await client.half_close()
        assert await client.rest() == b""


@pytest.mark.parametrize(
    ("name", "status"), [("oversize target", 414), ("oversize header", 431), ("many headers", 431)]
)
async def test_oversize_heads(name: str, status: int) -> None:
    """A head above the limit is answered, although the client is still sending it."""
    async with running(SampleApp()) as server:
        client = await server.connect()
        async with trio.open_nursery() as nursery:

            async def keep_sending() -> None:
                try:
                    await client.send(CORPUS[name])
                except trio.BrokenResourceError:
                    return

            nursery.start_soon(keep_sending)
            assert (await client.reply()).status == status


async def test_valid_requests_before_a_bad_one_are_answered() -> None:
    """In one packet: two good requests get their answers, the bad one its refusal."""
    async with running(SampleApp()) as server:
        client = await server.connect()
        await client.send(request("/echo?n=1") + request("/echo?n=2") + b"GET / HTTP/1.1\nHost: a\n\n")
        assert [(await client.reply()).status for _ in range(3)] == [200, 200, 400]
        await client.half_close()
        assert await client.rest() == b""


async def test_smuggled_request_is_never_seen() -> None:
    """None of the ambiguous framings lets a second request through behind the first."""
    app = SampleApp()
    async with running(app) as server:
        for data, _ in REFUSED.values():
            before = app.started
            client = await server.connect()
            await client.send(data + request("/echo"))
            await client.half_close()
            await client.rest()
            assert app.started - before <= 1, data


HEADERS = st.sampled_from(
    [
        b"Host: a\r\n",
        b"Content-Length: 5\r\n",
        b"Content-Length: 0\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Connection: close\r\n",
        b"Connection: Upgrade\r\n",
        b"Upgrade: websocket\r\n",
        b"Upgrade: h2c\r\n",
        b"Expect: 100-continue\r\n",
        b"X: y\r\n",
        b" folded\r\n",
        b"broken\n",
    ]
)
LINES = st.sampled_from(
    [
        b"GET /echo HTTP/1.1\r\n",
        b"POST /echo HTTP/1.1\r\n",
        b"POST /refuse HTTP/1.0\r\n",
        b"HEAD /large HTTP/1.1\r\n",
        b"PRI * HTTP/2.0\r\n",
    ]
)
BODIES = st.sampled_from([b"", b"hello", b"5\r\nhello\r\n0\r\n\r\n", b"5\r\nhel", b"zz\r\n", b"\0\0\0"])
REQUESTS = st.builds(
    lambda line, headers, body: line + b"".join(headers) + b"\r\n" + body, LINES, st.lists(HEADERS, max_size=5), BODIES
)
PACKETS = st.lists(st.one_of(REQUESTS, st.binary(max_size=60)), min_size=1, max_size=4)


async def survive(fast: bool, conversations: list[tuple[list[bytes], bool]]) -> None:
    async with running(SampleApp(), fast=fast, linger_timeout=0.05, drain_timeout=0.05, graceful_timeout=0.1) as server:
        for packets, half_closes in conversations:
            client = await server.connect()
            try:
                for packet in packets:
                    await client.send(packet)
                    await trio.lowlevel.checkpoint()
                if half_closes:
                    await client.half_close()
                    await client.rest()
            except trio.BrokenResourceError:
                pass
            await client.close()
            await assert_serves(server)


CONVERSATIONS = st.lists(st.tuples(PACKETS, st.booleans()), min_size=1, max_size=8)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(conversations=CONVERSATIONS)
async def test_fuzzed_conversations(fast: bool, conversations: list[tuple[list[bytes], bool]]) -> None:
    """Random mixtures of valid and broken pieces leave the server answering."""
    await survive(fast, conversations)


@pytest.mark.slow
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(conversations=CONVERSATIONS)
async def test_fuzzed_conversations_at_length(fast: bool, conversations: list[tuple[list[bytes], bool]]) -> None:
    """The same, many more times."""
    await survive(fast, conversations)
