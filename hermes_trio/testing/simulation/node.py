"""A node: one process with a gateway in it, as the world sees it. It can be started, drained, and lose its power at any instant.

A node that has lost its power is still unwound by Trio, but nothing that it does reaches anything any more: its store answers `StoreClosed`, its
connections are shut, its processes are gone. So nothing of its `finally` blocks is ever written or sent.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, cast

import trio

from hermes_trio.config import Config
from hermes_trio.gateway.api import ApiGateway, open_api_gateway
from hermes_trio.http.auth import AdminKey
from hermes_trio.http.server import ServerConfig, hypercorn_config, serve
from hermes_trio.runtime.ports import Agent, Wake
from hermes_trio.store import SqliteStore, Store
from hermes_trio.store.errors import StoreClosed, StoreError
from hermes_trio.testing.faults import STORE_VERBS, StoreFaults

from .boundary import socket_pair
from .processes import SimulatedKernel
from .trace import Trace

__all__ = ["ADMIN_KEY", "CrashPoint", "FencedStore", "PowerLost", "SimulatedNode", "current_node"]

ADMIN_KEY: Final = "simulated-admin-key-0123456789"

current_node: ContextVar[SimulatedNode | None] = ContextVar("simulated_node", default=None)
"""The node that this task belongs to; None for people, platforms and models."""


RESTART_SECONDS: Final = 10.0
"""How long after a server has ended by itself it is started again."""


def first_store_error(error: BaseException) -> StoreError | None:
    """The store's error, if that is what an exception is about."""
    if isinstance(error, BaseExceptionGroup):
        leaves: Any = cast("Any", error).exceptions
        return next((found for one in leaves if (found := first_store_error(one)) is not None), None)
    return error if isinstance(error, StoreError) else None


class PowerLost(StoreClosed):
    """The node that asks has no power any more. Nothing was written."""


class CrashPoint:
    """Lose the power at the next call of a verb, before or after it is committed."""

    def __init__(self, verb: str, *, after: bool, down: float) -> None:
        self.verb = verb
        self.after = after
        self.down = down


class SimulatedNode:
    """See the module. `starts` counts how often it was started."""

    def __init__(
        self, name: str, *, store: SqliteStore, faults: StoreFaults, trace: Trace, nursery: trio.Nursery, config: Config
    ) -> None:
        self.name = name
        self.agent: Agent | None = None
        self.alone = True
        """Whether the database is this node's own."""
        self.starts = 0
        self.alive = False
        self.ready = trio.Event()
        self.ended = trio.Event()
        self.crash_points: list[CrashPoint] = []
        self.on_crash: Callable[[float], None] = lambda down: None
        self.wake_faults: list[str] = []
        """How the next signals of the store are spoilt."""
        self.report: dict[str, Any] | None = None
        """What the last drain said."""
        self.failure: BaseException | None = None
        self.gateway: ApiGateway | None = None
        self._root = store
        self._faults = faults
        self._trace = trace
        self._nursery = nursery
        self._config = config
        self._life: _Life | None = None
        self._lives: list[_Life] = []
        self.kernels: list[SimulatedKernel] = []

    @property
    def kernel(self) -> SimulatedKernel:
        """The processes of this life."""
        return self.kernels[-1]

    def start(self) -> None:
        """Switch it on."""
        assert not self.alive
        self.starts += 1
        self.alive = True
        self.ready = trio.Event()
        self.ended = trio.Event()
        self._trace.note("start", f"{self.name} for the {self.starts}. time")
        self._life = _Life(self)
        self._lives.append(self._life)
        self.kernels.append(SimulatedKernel(self._nursery, self._trace.note))
        self._nursery.start_soon(self._life.run, name=f"{self.name} life {self.starts}")

    def crash(self, down: float) -> None:
        """Lose the power, now."""
        if not self.alive or self._life is None:
            return
        self._trace.note("crash", f"{self.name}, for {down:g} s")
        self.alive = False
        self._life.power_off()
        self.ended.set()
        self.on_crash(down)

    @property
    def draining(self) -> bool:
        """Whether it was asked to end."""
        return self._life is not None and self._life.asked.is_set()

    def drain(self) -> None:
        """Ask it to end as a signal does."""
        if self._life is not None:
            self._life.asked.set()

    def undead(self) -> list[str]:
        """What of this node lives although it should not: commands of any life, and lives that have lost their power."""
        found = [f"the process {one.pid} runs: {one.text}" for kernel in self.kernels for one in kernel.alive]
        return found + [
            f"a life of {self.name} that lost its power goes on" for life in self._lives if life.dead and not life.over
        ]

    def connect(self) -> trio.SocketStream:
        """A client's connection to its server; `ConnectionRefusedError` while it does not listen."""
        if not self.alive or self._life is None or not self.ready.is_set():
            raise ConnectionRefusedError("nobody listens")
        return self._life.connect()

    async def dial(self, serve_host: Callable[[trio.SocketStream], Any]) -> trio.SocketStream:
        """A connection of this node to somebody outside."""
        life = self._life_of_caller()
        await trio.lowlevel.checkpoint()
        if life.dead:
            raise ConnectionRefusedError("no power")
        ours, theirs = socket_pair()
        life.sockets.append(ours.socket)
        self._nursery.start_soon(serve_host, theirs)
        return ours

    def custody(self) -> Any:
        """A warden of this node."""
        return self._life_of_caller().kernel.custody()

    def _life_of_caller(self) -> _Life:
        life = _life.get()
        assert life is not None, "only a node has connections and processes"
        return life


_life: ContextVar[_Life | None] = ContextVar("simulated_life", default=None)


class _Life:
    """One start of a node, to its end or its loss of power."""

    def __init__(self, node: SimulatedNode) -> None:
        self.node = node
        self.dead = False
        self.over = False
        self.asked = trio.Event()
        self.sockets: list[Any] = []
        self.clients: list[Any] = []
        self.kernel: SimulatedKernel
        self._scope = trio.CancelScope()
        self._gateway: ApiGateway | None = None
        self._listener: socket.socket | None = None
        self._address: Any = None

    async def run(self) -> None:
        node = self.node
        current_node.set(node)
        _life.set(self)
        self.kernel = node.kernel
        try:
            with self._scope:
                await self._serve()
        except Exception as error:
            if not self.dead:
                self._failed(error)
        finally:
            self.over = True
            if not self.dead:
                node.alive = False
                node.ended.set()
                node._trace.note("end", node.name)
            if self._listener is not None:
                self._listener.close()

    def _failed(self, error: Exception) -> None:
        """A start that fails is tried again, as the service manager of a machine does; a server that ends by itself is a failure."""
        node = self.node
        node._trace.note("node fails", f"{node.name}: {type(error).__name__}: {error}")
        if not node.ready.is_set() and first_store_error(error) is not None:
            node._trace.note("start fails", node.name)
        else:
            node.failure = error
        self.dead = True
        node.alive = False
        node.ended.set()
        node.on_crash(RESTART_SECONDS)

    async def _serve(self) -> None:
        node = self.node
        opening = open_api_gateway(node._config, AdminKey(ADMIN_KEY), agent=node.agent, store=self._open_store())
        async with opening as gateway:
            self._gateway = node.gateway = gateway
            await self._listen(gateway)

    async def _listen(self, gateway: ApiGateway) -> None:
        node = self.node
        closing, closed = trio.Event(), trio.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("")  # the kernel names it
        self._listener.listen(64)
        self._address = self._listener.getsockname()
        config = hypercorn_config(f"fd://{self._listener.detach()}")
        config.graceful_timeout = node._config.server.graceful_seconds
        config.errorlog = None
        self._listener = None
        settings = ServerConfig(hypercorn=config, lifespan=False, raise_descriptor_limit=False)

        async def receive() -> None:
            async with trio.open_nursery() as nursery:
                await nursery.start(partial(serve, gateway.app, settings, shutdown=closing))
                node.ready.set()
            closed.set()

        gateway.runtime.start_receiver("http", receive)
        await self.asked.wait()
        node._trace.note("drain", node.name)
        node.report = await gateway.api.drain.run(node._config.server.drain_seconds)
        node._trace.note("drained", f"{node.name}: {node.report.get('ok')}")
        closing.set()
        await closed.wait()

    @asynccontextmanager
    async def _open_store(self) -> AsyncGenerator[Store]:
        async with (
            self._open_handle() as handle,
            self.node._faults.around(cast("Any", _opened(_NodeStore(handle, self)))) as store,
        ):
            yield store

    def _open_handle(self) -> AbstractAsyncContextManager[SqliteStore]:
        """Alone, a node owns the database as a server owns its file; with others it is one of several, and has a lease."""
        root = self.node._root
        if not self.node.alone:
            return root.shared(self.node.name)
        handle = SqliteStore(root.database)
        handle.secret = root.secret
        return _opened(handle)

    def connect(self) -> trio.SocketStream:
        """A client's end."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(self._address)
        except OSError:
            sock.close()
            raise ConnectionRefusedError("nobody listens") from None
        sock.setblocking(False)
        self.clients.append(sock)
        return trio.SocketStream(cast("Any", trio.socket.from_stdlib_socket(sock)))

    def power_off(self) -> None:
        """From this instant on nothing of this life reaches anything."""
        self.dead = True
        self.kernel.power_off()
        for sock in (*self.sockets, *self.clients):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        if self._gateway is not None:
            self._gateway.runtime.abort()
        self._scope.cancel()


@asynccontextmanager
async def _opened(store: Any) -> AsyncGenerator[Any]:
    yield store


class FencedStore:
    """A store whose verbs do nothing any more once `is_off` says that the power is gone; everything else is the wrapped store's own."""

    def __init__(self, store: SqliteStore, is_off: Callable[[], bool]) -> None:
        self._store = store
        self._is_off = is_off

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._store, name)
        if name not in STORE_VERBS:
            return value
        called: Any = functools.partial(self._call, name, value)
        self.__dict__[name] = called
        return called

    async def _call(self, name: str, verb: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if self._is_off():
            await trio.lowlevel.checkpoint()
            raise PowerLost(f"no power: {name} was not written")
        value = await verb(*args, **named)
        if self._is_off():
            raise PowerLost(f"no power: the answer of {name} was not heard")
        return value


class _NodeStore(FencedStore):
    """The store of one life. It may be told to lose the power at a verb; its signals may be late, come twice, or in another order."""

    def __init__(self, store: SqliteStore, life: _Life) -> None:
        super().__init__(store, lambda: life.dead)
        self._life = life
        self._trace = life.node._trace

    async def _call(self, name: str, verb: Callable[..., Any], *args: Any, **named: Any) -> Any:
        node = self._life.node
        point = None if self._life.dead else next((one for one in node.crash_points if one.verb == name), None)
        if point is not None:
            node.crash_points.remove(point)
            if not point.after:
                self._trace.note("power fails", f"before {name}")
                node.crash(point.down)

        async def traced() -> Any:
            try:
                value = await verb(*args, **named)
            except Exception as error:
                self._trace.note("verb", f"{name}: {type(error).__name__}")
                raise
            self._trace.note("verb", name)
            if point is not None and not self._life.dead:
                self._trace.note("power fails", f"after {name}")
                node.crash(point.down)
            return value

        return await super()._call(name, traced)

    def subscribe(self, topic: str, wake: Wake, key: str | None = None) -> AbstractContextManager[None]:
        """As the store does, with the faults of signals."""
        return self._store.subscribe(topic, partial(self._wake, wake), key)

    def _wake(self, wake: Wake, key: str) -> None:
        life = self._life
        if life.dead:
            return
        faults = life.node.wake_faults
        if not faults:
            wake(key)
            return
        how = faults.pop(0)
        self._trace.note("signal", f"{how}: {key}")
        seconds = {"late": 7.0, "reordered": 0.0, "twice": 3.0}[how]
        if how == "twice":
            wake(key)
        life.node._nursery.start_soon(self._wake_later, wake, key, seconds)

    async def _wake_later(self, wake: Wake, key: str, seconds: float) -> None:
        await trio.sleep(seconds)
        if not self._life.dead:
            wake(key)
