"""The HTTP client under the models: TLS, proxies, connections that are kept and connections that died."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from hermes_trio.agent.model import ModelError, ModelErrorKind
from hermes_trio.net.dial import ConnectFailed, Dialer, InvalidURL, Origin, Proxies, parse_base_url
from hermes_trio.net.http1 import ClientConnection, ConnectionPool, ResponseBroken
from hermes_trio.providers.http_model import Retries
from hermes_trio.providers.network_switch import allow_network_models
from hermes_trio.providers.openai import OpenAIModel
from hermes_trio.testing.model_server import Fault, ModelServer, ScriptedAnswer
from tests.certificates import make_certificate

from .conftest import StartServer, answer_of, ask

ONCE = Retries(attempts=1)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def server_tls(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    return context


@pytest.fixture
def client_tls(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate[0]))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


async def serve_raw(nursery: trio.Nursery, answer: Callable[[trio.SocketStream], Awaitable[None]]) -> Origin:
    """A server that does what it is told with each connection."""
    listeners = await nursery.start(partial(trio.serve_tcp, answer, 0, host="127.0.0.1"))
    return Origin("http", "127.0.0.1", listeners[0].socket.getsockname()[1])


async def test_tls(
    start_server: StartServer,
    server_tls: ssl.SSLContext,
    client_tls: ssl.SSLContext,
    mock_clock: trio.testing.MockClock,
) -> None:
    """Calls go over TLS, the connection is kept, and cancelling one is seen by the provider like without TLS."""
    server: ModelServer = await start_server(tls=server_tls)
    async with ConnectionPool(Dialer(tls=client_tls)) as transport:
        model = OpenAIModel("m", transport=transport, base_url=server.openai_url)
        for number in range(2):
            assert (await answer_of(model, ask(f"{number}"))).text == f"You said: {number}"
        assert server.connections == 1
        server.say(ScriptedAnswer(text="x", fault=Fault.STALL, fault_after=2))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer_of, model)
            call = await server.call(2)
            nursery.cancel_scope.cancel()
        with trio.fail_after(5):
            await call.ended.wait()
        assert call.client_gone


async def test_untrusted_certificate_is_refused(start_server: StartServer, server_tls: ssl.SSLContext) -> None:
    """A certificate that nobody vouches for is reported as what it is."""
    server: ModelServer = await start_server(tls=server_tls)
    async with ConnectionPool() as transport:
        model = OpenAIModel("m", transport=transport, base_url=server.openai_url, retries=ONCE)
        with pytest.raises(
            ModelError, match=r"no TLS connection to https://127.*certificate not accepted: self.signed"
        ):
            await answer_of(model)


async def proxy(stream: trio.SocketStream, seen: list[str], refuse: bool, destination: int) -> None:
    """A CONNECT proxy that sends everything to one port of this machine."""
    head = b""
    while b"\r\n\r\n" not in head:
        head += await stream.receive_some(4096)
    seen.append(head.decode("ascii"))
    if refuse:
        await stream.send_all(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
        return
    async with await trio.open_tcp_stream("127.0.0.1", destination) as upstream, trio.open_nursery() as nursery:
        if head.startswith(b"CONNECT"):
            await stream.send_all(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            await upstream.send_all(head)

        async def copy(source: trio.SocketStream, target: trio.SocketStream) -> None:
            async for piece in source:
                await target.send_all(piece)
            nursery.cancel_scope.cancel()

        nursery.start_soon(copy, stream, upstream)
        nursery.start_soon(copy, upstream, stream)


@pytest.mark.parametrize("secure", [True, False])
async def test_proxies(
    start_server: StartServer,
    nursery: trio.Nursery,
    server_tls: ssl.SSLContext,
    client_tls: ssl.SSLContext,
    secure: bool,
    monkeypatch: pytest.MonkeyPatch,
    stack: ExitStack,
) -> None:
    """https goes through a tunnel of the proxy, http through the proxy itself, both with its credentials."""
    monkeypatch.setattr(Origin, "loopback", False)
    server: ModelServer = await start_server(tls=server_tls if secure else None)
    seen: list[str] = []
    origin = await serve_raw(nursery, partial(proxy, seen=seen, refuse=False, destination=server.port))
    proxies = Proxies.from_environment({"ALL_PROXY": f"http://me:p%40ss@127.0.0.1:{origin.port}"})
    async with ConnectionPool(Dialer(proxies=proxies, tls=client_tls)) as transport:
        # The server is on this machine, and only pretends not to be.
        stack.enter_context(allow_network_models())
        model = OpenAIModel("m", transport=transport, base_url=server.openai_url)
        assert (await answer_of(model)).text == "You said: hi"
    first = "CONNECT 127.0.0.1:" if secure else f"POST {server.url}/v1/chat/completions HTTP/1.1"
    assert seen[0].startswith(first)
    assert "Proxy-Authorization: Basic bWU6cEBzcw==" in seen[0]
    assert "p@ss" not in repr(proxies)
    assert "bWU6cEBzcw" not in repr(proxies)


async def test_a_proxy_that_refuses(
    nursery: trio.Nursery, client_tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused tunnel is reported with the proxy's words."""
    monkeypatch.setattr(Origin, "loopback", False)
    origin = await serve_raw(nursery, partial(proxy, seen=[], refuse=True, destination=0))
    dialer = Dialer(proxies=Proxies.from_environment({"https_proxy": f"127.0.0.1:{origin.port}"}), tls=client_tls)
    with pytest.raises(ConnectFailed, match=r"did not connect to https://api\.example: 'HTTP/1.1 407"):
        await dialer.connect(Origin("https", "api.example", 443))


@pytest.mark.parametrize(
    ("host", "proxied"),
    [
        ("api.example.com", True),
        ("internal.corp", False),
        ("deep.internal.corp", False),
        ("notinternal.corp", True),
        ("10.1.2.3", False),
        ("11.1.2.3", True),
        ("ports.example", True),
        ("localhost", False),
        ("127.0.0.1", False),
    ],
)
def test_exemptions_from_the_proxy(host: str, proxied: bool) -> None:
    """`NO_PROXY` names hosts, domains, networks and ports; this machine is always exempt."""
    environment = {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": ".internal.corp, 10.0.0.0/8,ports.example:8443"}
    chosen = Proxies.from_environment(environment).choose(Origin("https", host, 443))
    assert (chosen is not None) == proxied
    assert Proxies.from_environment({**environment, "NO_PROXY": "*"}).choose(Origin("https", host, 443)) is None


@pytest.mark.parametrize(
    ("url", "origin", "path"),
    [
        ("https://api.example.com/v1/", Origin("https", "api.example.com", 443), "/v1"),
        ("http://localhost:11434", Origin("http", "localhost", 11434), ""),
        ("http://[::1]:8080/a/b", Origin("http", "::1", 8080), "/a/b"),
        ("https://bücher.example", Origin("https", "xn--bcher-kva.example", 443), ""),
    ],
)
def test_base_urls(url: str, origin: Origin, path: str) -> None:
    """A base URL is an origin and a path."""
    assert parse_base_url(url) == (origin, path)


@pytest.mark.parametrize(
    "url", ["", "example.com", "ftp://x", "http://", "http://h:99999", "http://h/?q=1", "http://h/a b", "http://a..b/"]
)
def test_invalid_base_urls(url: str) -> None:
    """What is no base URL is refused before anything is called."""
    with pytest.raises(InvalidURL):
        parse_base_url(url)


@pytest.mark.parametrize("origin", [Origin("http", "::1", 80), Origin("https", "h", 8443), Origin("https", "h", 443)])
def test_host_header(origin: Origin) -> None:
    """The Host header has the port only if it is not the scheme's own."""
    assert origin.authority in ("[::1]", "h:8443", "h")


async def test_idle_connection_that_the_server_closed_is_not_used(start_server: StartServer) -> None:
    """A server that restarts between two calls costs nobody an error."""
    async with ConnectionPool() as transport, trio.open_nursery() as nursery:
        server = await nursery.start(ModelServer().run)
        model = OpenAIModel("m", transport=transport, base_url=server.openai_url, retries=ONCE)
        await answer_of(model)
        server.stop()
    assert transport.statistics() == {}
    async with ConnectionPool() as transport, trio.open_nursery() as nursery:
        first = await nursery.start(ModelServer().run)
        model = OpenAIModel("m", transport=transport, base_url=first.openai_url, retries=ONCE)
        await answer_of(model)
        first.stop()
        second = await nursery.start(ModelServer(port=first.port).run)
        assert (await answer_of(model)).text == "You said: hi"
        second.stop()


async def test_idle_connection_that_dies_in_use_is_replaced(nursery: trio.Nursery) -> None:
    """A connection that is closed in the moment in which it is used again is replaced without anybody noticing."""
    served: list[int] = []

    async def once_each(stream: trio.SocketStream) -> None:
        served.append(0)
        await stream.receive_some(65536)
        await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        # The second request is read and left unanswered.
        await stream.receive_some(65536)

    origin = await serve_raw(nursery, once_each)
    async with ConnectionPool() as transport:
        model = OpenAIModel("m", transport=transport, base_url=str(origin), retries=ONCE)
        connection = await transport.take(origin)
        await connection.send("GET", "/", [], b"")
        assert await connection.read() == b"ok"
        assert await connection.read() == b""
        transport.give_back(connection)
        with pytest.raises(ModelError, match="cut off"):
            await answer_of(model)
    assert len(served) == 2


async def test_old_idle_connections_are_not_trusted(
    start_server: StartServer, mock_clock: trio.testing.MockClock
) -> None:
    """A connection that nobody used for half a minute is closed and not used."""
    server: ModelServer = await start_server()
    async with ConnectionPool() as transport:
        model = OpenAIModel("m", transport=transport, base_url=server.openai_url)
        await answer_of(model)
        mock_clock.jump(31)
        await answer_of(model)
    assert server.connections == 2


@pytest.mark.parametrize(
    ("raw", "body"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n", b"hello"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", b"ok"),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil the end", b"until the end"),
    ],
)
async def test_framings(nursery: trio.Nursery, raw: bytes, body: bytes) -> None:
    """Lengths, chunks, interim responses and bodies that end with the connection are all understood."""

    async def answer(stream: trio.SocketStream) -> None:
        await stream.receive_some(65536)
        for byte in raw:
            await stream.send_all(bytes([byte]))
        await stream.aclose()

    origin = await serve_raw(nursery, answer)
    async with ConnectionPool() as transport:
        connection = await transport.take(origin)
        await connection.send("POST", "/", [("A", "b")], b"{}")
        assert connection.status == 200
        received = b""
        while piece := await connection.read():
            received += piece
        assert received == body
        transport.give_back(connection)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhel",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
)
async def test_broken_responses(nursery: trio.Nursery, raw: bytes) -> None:
    """A response that is cut off, or is no HTTP, is an error and never a hang."""

    async def answer(stream: trio.SocketStream) -> None:
        await stream.receive_some(65536)
        if raw:
            await stream.send_all(raw)
        await stream.aclose()

    async def exchange(connection: ClientConnection) -> None:
        await connection.send("POST", "/", [], b"")
        while await connection.read():
            pass

    origin = await serve_raw(nursery, answer)
    async with ConnectionPool() as transport:
        connection = await transport.take(origin)
        with pytest.raises(ResponseBroken) as caught:
            await exchange(connection)
        assert caught.value.untouched == (raw == b"")
        transport.give_back(connection)
        assert connection.aborted


async def test_early_answer_to_a_large_request_is_heard(nursery: trio.Nursery) -> None:
    """A server that answers before it has read everything, and hangs up, is understood all the same."""

    async def impatient(stream: trio.SocketStream) -> None:
        await stream.receive_some(1000)
        await stream.send_all(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\n{}")
        await stream.send_eof()
        with trio.move_on_after(5):
            while await stream.receive_some(65536):
                pass

    origin = await serve_raw(nursery, impatient)
    async with ConnectionPool() as transport:
        model = OpenAIModel("m", transport=transport, base_url=str(origin))
        with pytest.raises(ModelError) as caught:
            await answer_of(model, ask("x" * 5_000_000))
    assert caught.value.kind is ModelErrorKind.CONTEXT_OVERFLOW


async def test_redirects_and_encodings_are_explained(nursery: trio.Nursery) -> None:
    """What we do not follow and do not unpack is reported in words."""
    replies = [
        b"HTTP/1.1 301 Moved\r\nlocation: https://elsewhere/v1\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 1\r\n\r\nx",
    ]

    async def answer(stream: trio.SocketStream) -> None:
        await stream.receive_some(65536)
        await stream.send_all(replies.pop(0))

    origin = await serve_raw(nursery, answer)
    async with ConnectionPool() as transport:
        model = OpenAIModel("m", transport=transport, base_url=str(origin))
        with pytest.raises(ModelError, match="redirects to https://elsewhere/v1"):
            await answer_of(model)
        with pytest.raises(ModelError, match="gzip-encoded"):
            await answer_of(model)


async def test_closed_transport(start_server: StartServer) -> None:
    """After it is closed a transport gives no connection, and keeps none that comes back."""
    server: ModelServer = await start_server()
    origin = Origin("http", "127.0.0.1", server.port)
    transport = ConnectionPool()
    connection = await transport.take(origin)
    transport.close()
    transport.give_back(connection)
    assert connection.aborted
    with pytest.raises(ConnectFailed, match="has been closed"):
        await transport.take(origin)
