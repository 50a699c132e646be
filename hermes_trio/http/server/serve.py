"""A server's whole life: lifespan, sockets, connections, drain.

`serve` runs Hypercorn's trio server inside the caller's nursery. Hypercorn brings the configuration, the sockets,
TLS, the lifespan and every connection that is not plain HTTP/1.1; this package brings the listener, the fast
connection and the time limits of both.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import partial
from ssl import SSLContext
from typing import Any, Protocol, cast

import msgspec
import trio
from hypercorn.config import Config

from hermes_trio.http.server.asgi import ASGIApp, Message, Receive, Scope, Send
from hermes_trio.http.server.config import ServerConfig
from hermes_trio.http.server.connection import Connection
from hermes_trio.http.server.core import ServerCore
from hermes_trio.http.server.disconnects import DisconnectWatch
from hermes_trio.http.server.listener import (
    accept_forever,
    accept_left,
    accept_waiting,
    addresses_of,
    bind_of,
    open_copies,
    raise_descriptor_limit,
)
from hermes_trio.http.server.open_connections import Connections
from hermes_trio.http.server.responses import FixedLines


class LifespanCrashed(Exception):
    """The application's lifespan ended by itself while the server was serving; its cause is what it raised."""


class ShutdownSignal(Protocol):
    """What ends a server: a `trio.Event`, or anything that can be waited for like one."""

    async def wait(self) -> object:
        """Return when the server should stop."""
        ...


class _Listener(msgspec.Struct, frozen=True):
    sock: socket.socket
    tls: SSLContext | None

    @property
    def address(self) -> str:
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://{bind_of(self.sock)}"


@contextmanager
def _open_listeners(config: Config) -> Generator[list[_Listener]]:
    if config.quic_bind:
        raise ValueError("quic_bind: this server has no QUIC; remove it, or use bind with a certificate for HTTP/2")
    tls = config.create_ssl_context()
    sockets = config.create_sockets()
    listeners = [_Listener(sock, tls) for sock in sockets.secure_sockets]
    listeners += [_Listener(sock, None) for sock in sockets.insecure_sockets]
    try:
        for listener in listeners:
            listener.sock.listen(config.backlog)
        yield listeners
    finally:
        for listener in listeners:
            listener.sock.close()


class _LifespanWatch(msgspec.Struct):
    """Sees the lifespan crash, which Hypercorn's own lifespan only logs: the requests after it would all fail."""

    app: ASGIApp
    started: bool = False
    crash: BaseException | None = None
    crashed: trio.Event = msgspec.field(default_factory=trio.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noting_send(message: Message) -> None:
            await send(message)
            self.started = self.started or message["type"] == "lifespan.startup.complete"

        try:
            await self.app(scope, receive, noting_send)
        except (Exception, BaseExceptionGroup) as error:
            self.crash = error
            if self.started:
                self.crashed.set()
            raise

    async def wait(self) -> None:
        await self.crashed.wait()
        raise LifespanCrashed("the application's lifespan crashed; the server stops") from self.crash


@asynccontextmanager
async def _run_lifespan(
    app: ASGIApp, config: Config, state: dict[str, Any]
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Start the application for the body of the `async with`, which gets what raises when the lifespan crashes; then shut it down."""
    from hypercorn.app_wrappers import ASGIWrapper
    from hypercorn.trio.lifespan import Lifespan
    from hypercorn.utils import LifespanFailureError

    watch = _LifespanWatch(app)
    lifespan = Lifespan(ASGIWrapper(cast("Any", watch)), config, cast("Any", state))
    async with trio.open_nursery() as nursery:
        await nursery.start(lifespan.handle_lifespan)
        await lifespan.wait_for_startup()
        if isinstance(watch.crash, LifespanFailureError):
            # A failed startup also sets the event that was waited for; the error itself is on its way to our nursery.
            await trio.sleep_forever()
        yield watch.wait
        await lifespan.wait_for_shutdown()
        nursery.cancel_scope.cancel()


async def _run_tls(worker: ServerCore, sock: socket.socket, tls: SSLContext) -> None:
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
    await worker.stock().run(trio.SSLStream(stream, tls, server_side=True, https_compatible=True))


async def _run_plain_stock(worker: ServerCore, sock: socket.socket) -> None:
    await worker.stock().run(trio.SocketStream(trio.socket.from_stdlib_socket(sock)))


def _accept(worker: ServerCore, nursery: trio.Nursery, tls: SSLContext | None, sock: socket.socket) -> None:
    """Start the task of a new connection, from the server's own context."""
    if tls is not None:
        worker.context.copy().run(nursery.start_soon, _run_tls, worker, sock, tls)
    elif not worker.config.fast_path:
        worker.context.copy().run(nursery.start_soon, _run_plain_stock, worker, sock)
    else:
        try:
            connection = Connection(worker, sock, *addresses_of(sock))
            worker.watch.watch(sock.fileno(), connection)
        except OSError:
            sock.close()
            return
        worker.context.copy().run(nursery.start_soon, connection.run)


async def _sever_when_cancelled(connections: Connections) -> None:
    try:
        await trio.sleep_forever()
    finally:
        connections.sever()


async def serve(
    app: ASGIApp,
    config: ServerConfig,
    *,
    shutdown: ShutdownSignal,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `app` until `shutdown`, then drain and return.

    `task_status.started` is told the addresses, as Hypercorn writes them, once connections are accepted. On shutdown
    the listening sockets close, idle connections close at once, active requests may finish until Hypercorn's
    `graceful_timeout`, then are cancelled, and reads or writes that a client has stalled are broken off. Then the
    application's lifespan ends.

    Cancellation closes everything at once, without the grace. The sockets that this function opens it closes.

    :raises LifespanCrashed: (in a group) if the application's lifespan ends with an error while serving.
    """
    hypercorn = config.hypercorn
    if config.raise_descriptor_limit:
        raise_descriptor_limit()
    state: dict[str, Any] = {}
    async with (
        _run_lifespan(app, hypercorn, state) if config.lifespan else nullcontext(trio.sleep_forever) as until_crash
    ):
        with DisconnectWatch.open() as watch:
            connections = Connections(
                hypercorn.keep_alive_timeout,
                config.head_timeout,
                config.body_timeout,
                config.write_timeout,
                config.drain_timeout,
                config.linger_timeout,
            )
            worker = ServerCore(
                app=app,
                config=config,
                state=state,
                watch=watch,
                connections=connections,
                fixed=FixedLines(date=hypercorn.include_date_header, server=hypercorn.include_server_header),
                root_path=hypercorn.root_path,
                logs_access=hypercorn.accesslog is not None,
                server_names=frozenset(hypercorn.server_names),
            )
            async with trio.open_nursery() as guards:
                guards.start_soon(watch.run)
                guards.start_soon(connections.run)
                guards.start_soon(_sever_when_cancelled, connections)
                guards.start_soon(until_crash)
                await _serve_connections(worker, shutdown, lambda addresses: task_status.started(addresses))
                guards.cancel_scope.cancel()


async def _serve_connections(
    worker: ServerCore, shutdown: ShutdownSignal, is_ready: Callable[[list[str]], None]
) -> None:
    """Accept and serve until `shutdown`, then drain."""
    hypercorn = worker.config.hypercorn
    connections = worker.connections
    async with trio.open_nursery() as nursery:
        with _open_listeners(hypercorn) as listeners, open_copies(worker.config.others) as others:
            takers = [(listener.sock, partial(_accept, worker, nursery, listener.tls)) for listener in listeners]
            if not worker.config.fast_path or any(listener.tls for listener in listeners):
                worker.stock()  # loaded now rather than under the first connection
            async with trio.open_nursery() as accepting:
                for sock, accept in takers:
                    accepting.start_soon(accept_forever, sock, accept, connections)
                if others:
                    accepting.start_soon(accept_left, others, takers[0][1])
                for listener in listeners:
                    await hypercorn.log.info(f"Running on {listener.address} (CTRL + C to quit)")
                is_ready([listener.address for listener in listeners])
                await shutdown.wait()
                accepting.cancel_scope.cancel()
            for sock, accept in takers:
                accept_waiting(sock, accept)
        await worker.dismiss()
        await trio.lowlevel.checkpoint()
        connections.dismiss()
        with trio.move_on_after(hypercorn.graceful_timeout):
            await connections.wait_empty()
        nursery.cancel_scope.cancel()
        connections.sever()
