"""What stock Hypercorn still serves: TLS, HTTP/2 and WebSocket, reached through the same listener."""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
import httpx2
import msgspec
import pytest
import trio
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, CloseConnection, Request, TextMessage

from hermes_trio.http.server.asgi import Receive, Scope, Send
from hermes_trio.http.server.endings import Ending, ending_of
from tests.certificates import make_certificate

from .loopback import RawClient, RunningServer, request, running
from .sample_app import SampleApp

SOON = 0.08

LONG = 3600.0


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for loopback and its key."""
    return make_certificate(tmp_path_factory.mktemp("tls"))


@asynccontextmanager
async def running_tls(
    app: SampleApp, certificate: tuple[Path, Path], http2: bool, **settings: float
) -> AsyncGenerator[tuple[RunningServer, httpx2.AsyncClient]]:
    certfile, keyfile = certificate
    async with running(app, certfile=str(certfile), keyfile=str(keyfile), **settings) as server:
        context = ssl.create_default_context(cafile=str(certfile))
        async with httpx2.AsyncClient(http1=not http2, http2=http2, verify=context, base_url=server.address) as client:
            yield server, client


@pytest.mark.parametrize("http2", [True, False], ids=["h2", "h1"])
async def test_tls(certificate: tuple[Path, Path], http2: bool) -> None:
    """A TLS client is served over HTTP/2 and HTTP/1.1, many requests on one connection."""
    async with running_tls(SampleApp(), certificate, http2) as (_, client):
        for number in range(3):
            reply = await client.post("/echo", params={"n": number}, content=b"body")
            assert reply.http_version == ("HTTP/2" if http2 else "HTTP/1.1")
            assert (reply.json()["body"], reply.json()["query"]) == ("body", f"n={number}")


async def test_http2_streams_share_a_connection(certificate: tuple[Path, Path]) -> None:
    """A waiting HTTP/2 request does not keep another one on its connection from being answered."""
    app = SampleApp()
    async with running_tls(app, certificate, True) as (_, client), trio.open_nursery() as nursery:
        replies: list[int] = []

        async def wait() -> None:
            replies.append((await client.get("/wait")).status_code)

        nursery.start_soon(wait)
        await app.waiting.wait()
        assert (await client.get("/echo")).status_code == 200
        app.finish.set()
    assert replies == [200]


async def test_http2_departure_cancels_the_handler(certificate: tuple[Path, Path]) -> None:
    """Leaving over HTTP/2 cancels the request as on the fast path."""
    app = SampleApp()
    async with running_tls(app, certificate, True) as (_, client):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.get, "/wait")
            await app.waiting.wait()
            nursery.cancel_scope.cancel()
        await client.aclose()
        await app.cancelled.wait()
        assert app.endings == [Ending.CLIENT_LEFT]


@pytest.mark.parametrize("http2", [True, False], ids=["h2", "h1"])
async def test_tls_idle_connections_close_at_shutdown(certificate: tuple[Path, Path], http2: bool) -> None:
    """An idle TLS client does not use up the grace."""
    async with running_tls(SampleApp(), certificate, http2, graceful_timeout=LONG) as (server, client):
        assert (await client.get("/echo")).status_code == 200
        await trio.testing.wait_all_tasks_blocked(0.01)
        await server.stop()


async def test_failed_handshake_costs_one_connection(certificate: tuple[Path, Path]) -> None:
    """Plain text on the TLS port is refused; the server goes on."""
    async with running_tls(SampleApp(), certificate, False) as (server, client):
        raw = await server.connect()
        await raw.send(request("/echo"))
        await raw.rest()
        assert (await client.get("/echo")).status_code == 200


async def exchange_http2(client: RawClient, connection: h2.connection.H2Connection, stream: int) -> tuple[int, bytes]:
    """Drive a raw HTTP/2 connection until this stream's answer is complete."""
    status, body = 0, b""
    while True:
        await client.send(connection.data_to_send())
        data, client.buffer = client.buffer, b""
        for event in connection.receive_data(data or await client.stream.receive_some(65536)):
            if isinstance(event, h2.events.ResponseReceived) and event.stream_id == stream:
                status = int(dict(event.headers)[b":status"])
            elif isinstance(event, h2.events.DataReceived) and event.stream_id == stream:
                body += event.data
            elif isinstance(event, h2.events.StreamEnded) and event.stream_id == stream:
                return status, body


@pytest.mark.parametrize("packet", [1, 20, 1000])
async def test_http2_with_prior_knowledge(fast: bool, packet: int) -> None:
    """The HTTP/2 preface on a plain-text connection is handed to Hypercorn, in however small packets it comes."""
    async with running(SampleApp(), fast=fast) as server:
        client = await server.connect()
        connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=False))
        connection.initiate_connection()
        headers = [(":method", "GET"), (":path", "/echo"), (":authority", "test"), (":scheme", "http")]
        connection.send_headers(1, headers, end_stream=True)
        data = connection.data_to_send()
        for start in range(0, len(data), packet):
            await client.send(data[start : start + packet])
        status, body = await exchange_http2(client, connection, 1)
        assert (status, msgspec.json.decode(body)["version"]) == (200, "2")


async def test_http2_by_upgrade(fast: bool) -> None:
    """`Upgrade: h2c` switches to HTTP/2 and answers the request that asked for it."""
    async with running(SampleApp(), fast=fast) as server:
        client = await server.connect()
        connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=False))
        settings = connection.initiate_upgrade_connection()
        assert settings is not None
        upgrade = request(
            "/echo", Connection="Upgrade, HTTP2-Settings", Upgrade="h2c", HTTP2_Settings=settings.decode()
        )
        await client.send(upgrade)
        assert (await client.head()).status == 101
        status, body = await exchange_http2(client, connection, 1)
        assert (status, msgspec.json.decode(body)["path"]) == (200, "/echo")


async def test_websocket(fast: bool) -> None:
    """A WebSocket is upgraded, echoes, and closes, also after ordinary requests on the same connection."""
    async with running(SampleApp(), fast=fast) as server:
        client = await server.connect()
        if fast:
            assert (await client.get("/echo")).status == 200
        ws = WSConnection(ConnectionType.CLIENT)
        opening = ws.send(Request(host="test", target="/ws"))
        await client.send(opening)
        received: list[object] = []

        async def next_event() -> object:
            while not received:
                ws.receive_data(await client.stream.receive_some(65536))
                received.extend(ws.events())
            return received.pop(0)

        assert isinstance(await next_event(), AcceptConnection)
        await client.send(ws.send(TextMessage(data="hello")))
        echoed = await next_event()
        assert isinstance(echoed, TextMessage)
        assert echoed.data == "HELLO"
        await client.send(ws.send(CloseConnection(code=1000)))
        assert isinstance(await next_event(), CloseConnection)


async def test_unknown_upgrade_is_answered_as_an_ordinary_request(fast: bool) -> None:
    """An upgrade to an unknown protocol is ignored, and its body is read as a body."""
    async with running(SampleApp(), fast=fast) as server:
        client = await server.connect()
        await client.send(
            request("/echo", "POST", b"GET /smuggled HTTP/1.1", Connection="Upgrade", Upgrade="carrier-pigeon")
        )
        reply = await client.reply()
        assert msgspec.json.decode(reply.body)["body"] == "GET /smuggled HTTP/1.1"
        assert (await client.get("/echo")).status == 200


async def test_quic_is_refused_with_a_word() -> None:
    """A setting that this server cannot honour is an error that names it."""
    with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="quic_bind"), flatten_subgroups=True):
        async with running(SampleApp(), quic_bind=["127.0.0.1:0"]):
            raise AssertionError("it started")


async def test_a_slow_body_ends_over_http2(fast: bool) -> None:
    """A request whose body does not come is answered with 408; it does not wait for ever."""
    async with running(SampleApp(), fast=fast, body_timeout=0.3) as server:
        client = await server.connect()
        connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=False))
        connection.initiate_connection()
        headers = [(":method", "POST"), (":path", "/echo"), (":authority", "test"), (":scheme", "http")]
        connection.send_headers(1, headers)
        assert (await exchange_http2(client, connection, 1))[0] == 408


@pytest.mark.parametrize("endless", [False, True])
async def test_a_body_after_its_answer_is_dropped_over_http2(
    fast: bool, endless: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The rest of an upload that was refused early ends neither its connection nor the other requests on it; one without an end is reset."""
    app = SampleApp()
    async with running(app, fast=fast) as server:
        client = await server.connect()
        connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=False))
        connection.initiate_connection()

        def head(stream: int, path: str, **options: bool) -> None:
            names = [(":method", "POST"), (":path", path), (":authority", "test"), (":scheme", "http")]
            connection.send_headers(stream, names, **options)

        head(1, "/wait", end_stream=True)
        head(3, "/refuse")
        assert (await exchange_http2(client, connection, 3))[0] == 401
        reset = False
        for _ in range(200 if endless else 20):
            # More than the window in all: the server has to give back what it drops.
            connection.send_data(3, b"x" * 16_000)
            await client.send(connection.data_to_send())
            while not reset and connection.local_flow_control_window(3) < 16_000:
                data = await client.stream.receive_some(65536)
                assert data, "the connection has ended"
                reset = any(isinstance(event, h2.events.StreamReset) for event in connection.receive_data(data))
            if reset:
                break
        assert reset is endless
        if not reset:
            connection.end_stream(3)
        head(5, "/echo", end_stream=True)
        assert (await exchange_http2(client, connection, 5))[0] == 200
        app.finish.set()
        assert (await exchange_http2(client, connection, 1))[0] == 200
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_body_that_ends_short_after_its_answer_ends_no_connection_over_http2(fast: bool) -> None:
    """A client that reads a refusal stops its upload, before its announced length: the other requests of its connection go on."""
    app = SampleApp()
    async with running(app, fast=fast) as server:
        client = await server.connect()
        connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=False))
        connection.initiate_connection()
        common = [(":method", "POST"), (":authority", "test"), (":scheme", "http")]
        connection.send_headers(1, [*common, (":path", "/wait")], end_stream=True)
        connection.send_headers(3, [*common, (":path", "/refuse"), ("content-length", "100000")])
        connection.send_data(3, b"x" * 1000)
        assert (await exchange_http2(client, connection, 3))[0] == 401
        connection.end_stream(3)
        connection.send_headers(5, [*common, (":path", "/echo")], end_stream=True)
        assert (await exchange_http2(client, connection, 5))[0] == 200
        app.finish.set()
        assert (await exchange_http2(client, connection, 1))[0] == 200


async def test_a_reader_that_gives_no_window_ends_over_http2(fast: bool) -> None:
    """A stream whose reader takes nothing is ended, and its application is told why."""
    endings: list[Ending | None] = []
    ended = trio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        finally:
            endings.append(ending_of(scope))
            ended.set()

    async with running(app, fast=fast, write_timeout=0.3, lifespan=False) as server:
        client = await server.connect()
        connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=False))
        connection.initiate_connection()
        headers = [(":method", "GET"), (":path", "/"), (":authority", "test"), (":scheme", "http")]
        connection.send_headers(1, headers, end_stream=True)
        await client.send(connection.data_to_send())
        await ended.wait()
    assert endings == [Ending.SLOW_READER]


def opened_http2() -> tuple[h2.connection.H2Connection, bytes, bytes]:
    """A client's connection, its preface with its settings, and one complete head."""
    connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=False))
    connection.initiate_connection()
    opening = connection.data_to_send()
    headers = [(":method", "GET"), (":path", "/echo"), (":authority", "test"), (":scheme", "http"), ("x", "y" * 64)]
    connection.send_headers(1, headers, end_stream=True)
    return connection, opening, connection.data_to_send()


def unended(head: bytes) -> bytes:
    """A HEADERS frame that says that more of its head will come."""
    return head[:4] + bytes([head[4] & ~4]) + head[5:]


@pytest.mark.parametrize("sent", ["preface", "settings", "frame header", "half a frame", "unended head"])
async def test_a_slow_head_ends_over_http2(fast: bool, sent: str) -> None:
    """Whatever of a request comes first, the rest must follow in time, trickling or not; then the client is told to calm down."""
    connection, opening, head = opened_http2()
    told = {
        "preface": opening[:20],
        "settings": opening[:26],
        "frame header": opening + head[:5],
        "half a frame": opening + head[:30],
        "unended head": opening + unended(head),
    }[sent]
    trickle = b"\0\0\0\x09\0\0\0\0\1" if sent == "unended head" else b""
    async with running(SampleApp(), fast=fast, head_timeout=SOON) as server:
        client = await server.connect()
        await client.send(told)
        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:

                async def more() -> None:
                    for _ in range(40):
                        await trio.sleep(SOON / 10)
                        try:
                            await client.send(trickle)
                        except trio.BrokenResourceError:
                            return

                nursery.start_soon(more)
                events = connection.receive_data(await client.rest())
                nursery.cancel_scope.cancel()
    if sent not in ("preface", "settings"):
        (ended,) = [event for event in events if isinstance(event, h2.events.ConnectionTerminated)]
        assert ended.error_code == h2.errors.ErrorCodes.ENHANCE_YOUR_CALM


async def test_a_slow_head_is_answered_408_on_a_stock_connection() -> None:
    """HTTP/1.1 over TLS has the same bound as without."""
    async with running(SampleApp(), fast=False, head_timeout=SOON) as server:
        client = await server.connect()
        assert (await client.get("/echo")).status == 200
        await client.send(b"GET / HTTP/1.1\r\nX: 1")
        reply = await client.reply()
        assert (reply.status, msgspec.json.decode(reply.body)["error"]["code"]) == (408, "request_timeout")
        assert await client.rest() == b""


async def test_a_body_over_http2_is_not_taken_for_a_head(fast: bool) -> None:
    """A frame of a body may come as slowly as a body may."""
    async with running(SampleApp(), fast=fast, head_timeout=SOON) as server:
        client = await server.connect()
        connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=False))
        connection.initiate_connection()
        headers = [(":method", "POST"), (":path", "/echo"), (":authority", "test"), (":scheme", "http")]
        connection.send_headers(1, headers)
        await client.send(connection.data_to_send())
        connection.send_data(1, b"x" * 10, end_stream=True)
        data = connection.data_to_send()
        await client.send(data[:12])
        await trio.sleep(SOON * 3)
        await client.send(data[12:])
        status, body = await exchange_http2(client, connection, 1)
        assert (status, msgspec.json.decode(body)["body"]) == (200, "x" * 10)


@pytest.mark.parametrize("requests", [0, 2])
async def test_an_idle_connection_ends_over_http2(fast: bool, requests: int) -> None:
    """Before the first request and after the last; pings do not keep it."""
    connection, opening, head = opened_http2()
    async with running(SampleApp(), fast=fast, keep_alive_timeout=SOON) as server:
        client = await server.connect()
        await client.send(opening)
        for number in range(requests):
            if number:
                headers = [(":method", "GET"), (":path", "/echo"), (":authority", "test"), (":scheme", "http")]
                connection.send_headers(1 + 2 * number, headers, end_stream=True)
                head = connection.data_to_send()
            await client.send(head)
            assert (await exchange_http2(client, connection, 1 + 2 * number))[0] == 200
        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:

                async def ping() -> None:
                    while True:
                        connection.ping(b"12345678")
                        await trio.sleep(SOON / 10)
                        try:
                            await client.send(connection.data_to_send())
                        except trio.BrokenResourceError:
                            return

                nursery.start_soon(ping)
                await client.rest()
                nursery.cancel_scope.cancel()


async def test_a_reader_that_takes_no_byte_ends_over_http2(fast: bool) -> None:
    """With a window of its own but a full socket, the connection is closed: nothing can be sent on it."""
    app = SampleApp()
    async with running(app, fast=fast, write_timeout=SOON) as server:
        client = await server.connect(receive_buffer=4096)
        connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=False))
        connection.initiate_connection()
        connection.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 2**31 - 1})
        connection.increment_flow_control_window(2**31 - 2**16)
        headers = [(":method", "GET"), (":path", "/shielded_flood"), (":authority", "test"), (":scheme", "http")]
        connection.send_headers(1, headers, end_stream=True)
        await client.send(connection.data_to_send())
        with trio.fail_after(5):
            await app.cancelled.wait()


async def test_a_slow_but_steady_reader_gets_everything_over_http2() -> None:
    """One large part, a window of a few KiB at a time: longer in all than one write may take."""
    async with running(SampleApp(), write_timeout=1.0) as server:
        client = await server.connect()
        connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=False))
        connection.initiate_connection()
        headers = [(":method", "GET"), (":path", "/large"), (":authority", "test"), (":scheme", "http")]
        connection.send_headers(1, headers, end_stream=True)
        received, started = 0, trio.current_time()
        while True:
            await client.send(connection.data_to_send())
            for event in connection.receive_data(await client.stream.receive_some(65536)):
                if isinstance(event, h2.events.DataReceived):
                    received += len(event.data)
                    connection.acknowledge_received_data(event.flow_controlled_length, 1)
                    await trio.sleep(0.004)
                elif isinstance(event, h2.events.StreamEnded):
                    assert received == 5_000_000
                    assert trio.current_time() - started > 1.0
                    return


async def test_a_reader_that_gives_windows_for_every_frame_is_no_flood(fast: bool) -> None:
    """Some clients answer each piece of a stream with two windows; a long answer does not use up what a connection may send for nothing."""
    pieces = 1200

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(pieces):
            await send({"type": "http.response.body", "body": b"x" * 100, "more_body": number < pieces - 1})

    async with running(app, fast=fast, lifespan=False) as server:
        client = await server.connect()
        connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=False))
        connection.initiate_connection()
        headers = [(":method", "GET"), (":path", "/"), (":authority", "test"), (":scheme", "http")]
        connection.send_headers(1, headers, end_stream=True)
        await client.send(connection.data_to_send())
        received, ended = 0, False
        while not ended:
            for event in connection.receive_data(await client.stream.receive_some(65536)):
                assert not isinstance(event, h2.events.ConnectionTerminated)
                ended = ended or isinstance(event, h2.events.StreamEnded)
                if isinstance(event, h2.events.DataReceived) and event.data:
                    received += len(event.data)
                    connection.increment_flow_control_window(len(event.data))
                    connection.increment_flow_control_window(len(event.data), 1)
            await client.send(connection.data_to_send())
        assert received == 100 * pieces
