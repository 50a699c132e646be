"""What a server recognises at its start: versions, replicas, encodings, poolers and schemas that do not fit are named, with what to do."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import trio

pytest.importorskip("psycopg", reason="the extra `postgres` is not installed")

from hermes_trio.store import StoreError
from hermes_trio.store.postgres import schema
from hermes_trio.store.postgres.link import open_link
from hermes_trio.store.postgres.migrations import MIGRATIONS
from hermes_trio.store.postgres.schema import migrate_schema
from hermes_trio.store.postgres.store import open_postgres
from tests.pooler import pooler
from tests.postgres_server import PostgresServer, postgres_server

pytestmark = pytest.mark.slow


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """Start a PostgreSQL server that only this test uses."""
    with postgres_server() as server:
        yield server


@asynccontextmanager
async def said_to_be(version: bytes, port: int) -> AsyncIterator[int]:
    """Put a proxy before a server, which reports another major version; the value is its port."""

    async def handle(client: trio.SocketStream) -> None:
        server = await trio.open_tcp_stream("127.0.0.1", port)
        async with client, server, trio.open_nursery() as nursery:

            async def forward(source: trio.SocketStream, target: trio.SocketStream) -> None:
                async for data in source:
                    await target.send_all(re.sub(rb"(server_version\0)\d\d", rb"\g<1>" + version, data))
                nursery.cancel_scope.cancel()

            nursery.start_soon(forward, client, server)
            nursery.start_soon(forward, server, client)

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, handle, listeners)
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def refusal(url: str) -> str:
    """Return why a store cannot be opened."""
    with pytest.raises(StoreError) as caught:
        async with open_postgres(url, maintenance=False):
            pass
    return str(caught.value)


async def test_a_server_that_is_too_old_is_named(postgres: PostgresServer, postgres_url: str) -> None:
    """14 is refused, 15 is not."""
    async with said_to_be(b"14", postgres.port) as port:
        told = await refusal(postgres_url.replace(f":{postgres.port}/", f":{port}/"))
    assert "is PostgreSQL 14; hermes-trio needs 15 or newer" in told
    async with (
        said_to_be(b"15", postgres.port) as port,
        open_postgres(postgres_url.replace(f":{postgres.port}/", f":{port}/"), maintenance=False) as store,
    ):
        await store.set_meta("a", "b")


async def test_a_replica_is_named(own_server: PostgresServer) -> None:
    """A standby can be read, and not written."""
    database = own_server.new_database()
    own_server.stop()
    (own_server.data / "standby.signal").touch()
    own_server.start()
    assert "is a replica, which cannot be written; name the primary server" in await refusal(own_server.url(database))


async def test_an_encoding_other_than_utf8_is_named(postgres: PostgresServer) -> None:
    """Texts of users would not fit into LATIN1."""
    postgres.execute("CREATE DATABASE latin OWNER keeper TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'")
    assert "has the encoding LATIN1; make it with ENCODING 'UTF8'" in await refusal(postgres.url("latin"))


async def test_a_schema_that_does_not_fit_is_named(
    postgres: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None, an older and a newer one, each with what to do."""
    told = await refusal(postgres.url(postgres.new_database()))
    assert "has no store yet; run `hermes-trio store init`" in told
    with monkeypatch.context() as newer:
        newer.setattr(schema, "VERSION", schema.VERSION + 1)
        told = await refusal(postgres_url)
    assert f"has schema version {schema.VERSION}, and this program needs {schema.VERSION + 1}" in told
    assert "stop all nodes, then run `hermes-trio store migrate`" in told
    number = schema.VERSION + 1
    postgres.execute(
        f"INSERT INTO hermes_trio.schema_version (version) VALUES ({number})", postgres_url.rpartition("/")[2]
    )
    assert f"has schema version {number}, and this program knows {schema.VERSION}" in await refusal(postgres_url)


async def test_a_migration_is_refused_while_a_node_works(postgres_url: str) -> None:
    """It names the node, changes nothing, and is made when the node has left."""
    newer = (*MIGRATIONS, ("CREATE TABLE added (n bigint)",))
    async with open_postgres(postgres_url, node_name="the worker", maintenance=False) as store:
        await store.recover("epoch")
        async with open_link(postgres_url, "it") as link:
            with pytest.raises(StoreError, match=r"nodes work on the database it \(the worker\); stop all of them"):
                await migrate_schema(link, "it", newer)
        async with open_link(postgres_url, "it") as link:
            assert await schema.version_of(link) == schema.VERSION
        await store.set_meta("a", "b")
    async with open_link(postgres_url, "it") as link:
        assert await migrate_schema(link, "it", newer) == schema.VERSION
        assert await schema.version_of(link) == schema.VERSION + 1


@pytest.mark.parametrize("session", [False, True], ids=["transaction", "session"])
async def test_a_pooler_in_transaction_mode_is_named(
    postgres: PostgresServer, postgres_url: str, session: bool
) -> None:
    """Each time, also with the statements that an earlier start has left in its connections; in session mode it is no hindrance."""
    database = postgres_url.rpartition("/")[2]
    socket = f"{postgres.directory}/.s.PGSQL.{postgres.port}"
    async with pooler(socket, "keeper", database, session=session) as port:
        address = postgres.url(database, port=port)
        for _ in range(3):
            if session:
                async with open_postgres(address, maintenance=False) as store:
                    await store.set_meta("a", "b")
            else:
                assert "is behind a pooler in transaction mode" in await refusal(address)
