"""TLS to the database: `sslmode=require` with a certificate made for the test, in front of the server of the tests, which has no TLS of its own."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

pytest.importorskip("psycopg", reason="the extra `postgres` is not installed")

from hermes_trio.runtime.ports import Message
from hermes_trio.store import NewSession
from hermes_trio.store.errors import StoreUnavailable
from hermes_trio.store.postgres.store import open_postgres
from tests.certificates import make_certificate
from tests.postgres_server import PASSWORD, PostgresServer

pytestmark = pytest.mark.slow

SSL_REQUEST = b"\x00\x00\x00\x08\x04\xd2\x16\x2f"
"""With this a client asks a PostgreSQL server for TLS, before anything else."""


def server_context(folder: Path) -> ssl.SSLContext:
    """A server's context with a certificate for localhost that signs itself; the certificate is in `folder`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*make_certificate(folder))
    return context


class TlsFront:
    """Speaks TLS with clients, and hands what they say to a server without it."""

    def __init__(self, target: int, context: ssl.SSLContext) -> None:
        self._target = target
        self._context = context
        self.port = 0
        self.handshakes = 0
        self.plain = 0
        """Connections that did not ask for TLS."""

    async def handle(self, client: trio.SocketStream) -> None:
        """One connection."""
        if await client.receive_some(len(SSL_REQUEST)) != SSL_REQUEST:
            self.plain += 1
            await client.aclose()
            return
        await client.send_all(b"S")
        secure = trio.SSLStream(client, self._context, server_side=True)
        server = await trio.open_tcp_stream("127.0.0.1", self._target)
        async with server, trio.open_nursery() as nursery:
            nursery.start_soon(self._pump, secure, server, nursery.cancel_scope)
            nursery.start_soon(self._pump, server, secure, nursery.cancel_scope)
        await trio.aclose_forcefully(secure)

    async def _pump(self, source: trio.abc.Stream, target: trio.abc.Stream, scope: trio.CancelScope) -> None:
        try:
            if isinstance(source, trio.SSLStream):
                await source.do_handshake()
                self.handshakes += 1
            while data := await source.receive_some(65_536):
                await target.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        scope.cancel()


@asynccontextmanager
async def tls_front(target: int, context: ssl.SSLContext) -> AsyncIterator[TlsFront]:
    """A front before `target`, for the body of the `async with`."""
    front = TlsFront(target, context)
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        front.port = listeners[0].socket.getsockname()[1]
        nursery.start_soon(trio.serve_listeners, front.handle, listeners)
        try:
            yield front
        finally:
            nursery.cancel_scope.cancel()


async def test_a_store_behind_tls_writes_and_reads(postgres: PostgresServer, postgres_url: str, tmp_path: Path) -> None:
    """All connections use TLS; many tasks write and read texts larger than a TLS record at once, and nothing is lost or mixed up."""
    context = server_context(tmp_path)
    async with tls_front(postgres.port, context) as front:
        through = postgres_url.replace(f":{postgres.port}/", f":{front.port}/") + "?sslmode=require"
        async with open_postgres(through, maintenance=False) as store:

            async def work(number: int) -> None:
                await store.create_session(NewSession(id=f"s{number}", source="api"))
                texts = [f"{number} {size} " + "x" * size for size in (0, 20_000, 90_000)]
                for text in texts:
                    await store.append_messages(f"s{number}", [Message(role="user", content=text)])
                assert [entry.text for entry in await store.load_history(f"s{number}")] == texts

            async with trio.open_nursery() as nursery:
                for number in range(8):
                    nursery.start_soon(work, number)
        assert (front.handshakes >= 6, front.plain) == (True, 0)


async def test_a_certificate_is_checked_if_that_is_asked_for(
    postgres: PostgresServer, postgres_url: str, tmp_path: Path
) -> None:
    """`verify-full` takes the certificate of a host that it was made for, and refuses it for another name; a server without TLS is refused, too."""
    context = server_context(tmp_path)
    async with tls_front(postgres.port, context) as front:
        address = postgres_url.replace(f"127.0.0.1:{postgres.port}/", f"localhost:{front.port}/")
        checked = f"{address}?sslmode=verify-full&sslrootcert={tmp_path / 'cert.pem'}&hostaddr=127.0.0.1"
        async with open_postgres(checked, maintenance=False) as store:
            await store.probe()
        for refused in (
            checked.replace("@localhost:", "@elsewhere.invalid:"),
            f"{postgres_url}?sslmode=require",
        ):
            with pytest.raises(StoreUnavailable) as found:
                async with open_postgres(refused, maintenance=False):
                    raise AssertionError("it was opened")
            assert PASSWORD not in str(found.value)
