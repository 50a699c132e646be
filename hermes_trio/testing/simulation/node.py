"""A node: one simulated process with a gateway. It can be started, drained, paused, partitioned, and crashed at any instant.

Trio still unwinds the tasks of a crashed node, but without effect: the verbs of its store raise `StoreClosed`, its
connections are shut down and its processes are gone, so that its `finally` blocks can neither write nor send.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from contextvars import Context, ContextVar, copy_context
from functools import partial
from typing import Any, Final, cast

import msgspec
import trio

from hermes_trio.config import Config
from hermes_trio.gateway.api import ApiGateway, open_api_gateway
from hermes_trio.http.auth import AdminKey
from hermes_trio.http.server import ServerConfig, hypercorn_config, serve
from hermes_trio.runtime.errors import MembershipLost
from hermes_trio.runtime.ports import Agent, Wake
from hermes_trio.store import SqliteStore, Store
from hermes_trio.store.errors import CommitUncertain, StoreClosed, StoreError, StoreUnavailable
from hermes_trio.testing.faults import READ_VERBS, STORE_VERBS, StoreFaults

from .boundary import socket_pair
from .cluster import LEASE_SECONDS, NodeSignals, SignalNetwork, WatchedWrites
from .embedding_program import MAILBOX, EmbeddingProgram, EmbeddingSeen
from .processes import SimulatedKernel
from .trace import Trace

ADMIN_KEY: Final = "simulated-admin-key-0123456789"

current_node: ContextVar[SimulatedNode | None] = ContextVar("simulated_node", default=None)
"""The node that the current task belongs to; None for users, platforms and models."""


RESTART_SECONDS: Final = 10.0
"""Seconds until a server that has ended by itself is started again."""


STORE_SECONDS: Final = 2.0
"""Seconds until a verb fails during a partition."""

UNNOTICED_SECONDS: Final = 5.0
"""Seconds for which the balancer sends requests to a node that does not answer."""


def first_error(error: BaseException, kind: type[BaseException]) -> BaseException | None:
    """Return the first exception of this kind in an exception or group; None if there is none."""
    if isinstance(error, BaseExceptionGroup):
        leaves: Any = cast("Any", error).exceptions
        return next((found for one in leaves if (found := first_error(one, kind)) is not None), None)
    return error if isinstance(error, kind) else None


class PowerLost(StoreClosed):
    """Raised by every verb after the calling node has crashed: nothing was written, or the result was not received."""


class BrokenReceiver(Exception):
    """Raised in a receiver by the fault `receiver`."""


class CrashPoint:
    """Crashes the node at the next call of a verb, before or after its commit."""

    def __init__(self, verb: str, *, after: bool, down: float) -> None:
        self.verb = verb
        self.after = after
        self.down = down


class SimulatedNode:
    """One node of a world. See the module. `starts` is the number of its starts."""

    def __init__(
        self, name: str, *, store: SqliteStore, faults: StoreFaults, trace: Trace, nursery: trio.Nursery, config: Config
    ) -> None:
        self.name = name
        self.agent: Agent | None = None
        self.starts = 0
        self.alive = False
        self.ready = trio.Event()
        self.ended = trio.Event()
        self.crash_points: list[CrashPoint] = []
        self.on_crash: Callable[[float], None] = lambda down: None
        self.wake_faults: list[str] = []
        """The faults of the next signals of the store."""
        self.mcp_faults: list[str] = []
        """The faults of the next calls of MCP servers."""
        self.report: dict[str, Any] | None = None
        """The report of the last drain."""
        self.embedding_seen = EmbeddingSeen()
        self.spare = ""
        """What is scarce: `jobs` or `tokens` for the embedding program, or the `mailbox`."""
        self.on_end: Callable[[], None] = lambda: None
        """Called when a life has ended without a crash."""
        self.failure: BaseException | None = None
        self.network: SignalNetwork | None = None
        """Carries signals between nodes; None for a single node."""
        self.calm = False
        """Whether the faults have ended."""
        self.clock_offset = 0.0
        """The error of its host's clock, in seconds."""
        self.cut = ""
        """The partition from the store: `away` if requests are lost, `deaf` if answers are; empty without one."""
        self.on_pause: Callable[[], None] = lambda: None
        """Called after a pause has begun or ended."""
        self.gateway: ApiGateway | None = None
        self._root = store
        self._faults = faults
        self._trace = trace
        self._nursery = nursery
        self._config = config
        self._context: Context = copy_context()
        self._healed = trio.Event()
        self._life: _Life | None = None
        self._lives: list[_Life] = []
        self.kernels: list[SimulatedKernel] = []

    @property
    def kernel(self) -> SimulatedKernel:
        """Return the processes of the present life."""
        return self.kernels[-1]

    def start(self) -> None:
        """Start a new life. The node must not be running."""
        assert not self.alive
        self.starts += 1
        self.alive = True
        self.ready = trio.Event()
        self.ended = trio.Event()
        self._trace.note("start", f"{self.name} for the {self.starts}. time")
        self._life = _Life(self)
        self._lives.append(self._life)
        self.kernels.append(SimulatedKernel(self._nursery, self._life.note, self._context))
        self.kernel.mcp_faults = self.mcp_faults
        self._life.kernel = self.kernel  # before its first step: it may crash in the instant of its start
        self._nursery.start_soon(self._life.run, name=f"{self.name} life {self.starts}")

    def crash(self, down: float) -> None:
        """Crash now, and call `on_crash` with `down`. Does nothing if the node is not running."""
        if not self.alive or self._life is None:
            return
        self._trace.note("crash", f"{self._life.name} for {down:g} s")
        self.alive = False
        self._life.power_off()
        self.ended.set()
        self.on_crash(down)

    # -- faults of one of several nodes ----------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Pause the process, like a suspended machine: none of its tasks runs, time passes, and its connections stay open."""
        if self.alive and self._life is not None and not self._life.paused:
            self._trace.note("pause", self._life.name)
            self._life.paused = True
            self._life.paused_at = trio.current_time()
            self.on_pause()

    def resume(self) -> None:
        """End a pause."""
        life = self._life
        if life is not None and life.paused:
            self._trace.note("resume", life.name)
            life.paused = False
            if life.signals is not None:
                life.signals.catch_up()
            self.on_pause()

    def partition(self, how: str) -> None:
        """Begin a partition from the store, or end it if `how` is empty."""
        if how != self.cut:
            self._trace.note("partition", f"{self.name}: {how or 'healed'}")
        self.cut = how
        if not how:
            self._healed.set()
            self._healed = trio.Event()

    def is_served(self) -> bool:
        """Return whether the balancer sends requests here. A node that does not answer is noticed after `UNNOTICED_SECONDS`."""
        life = self._life
        if life is None or not self.alive or not self.ready.is_set():
            return False
        return not life.paused or trio.current_time() - life.paused_at < UNNOTICED_SECONDS

    @property
    def paused(self) -> bool:
        """Return whether its process is paused."""
        return self._life is not None and self._life.paused

    @property
    def draining(self) -> bool:
        """Return whether it was asked to drain."""
        return self._life is not None and self._life.asked.is_set()

    def drain(self) -> None:
        """Ask it to drain and end, as SIGTERM does."""
        if self._life is not None:
            self._life.asked.set()

    def note_of_life(self) -> Callable[[str, str], None]:
        """Return a function that notes events of the present life in the trace."""
        assert self._life is not None
        return self._life.note

    def break_receiver(self) -> None:
        """Make a receiver fail with an unexpected error, which ends the whole process."""
        if self._life is not None:
            self._life.broken.set()

    @property
    def embedding(self) -> EmbeddingProgram | None:
        """Return the program that embeds the runtime in this life; None while the node is down."""
        return self._life.embedding if self._life is not None and self.alive else None

    def zombies(self) -> list[str]:
        """Describe the commands of any life that still run, and the crashed lives that have not ended."""
        found = [f"the process {one.pid} runs: {one.text}" for kernel in self.kernels for one in kernel.alive]
        return found + [
            f"a life of {self.name} that lost its power goes on" for life in self._lives if life.dead and not life.over
        ]

    def left_servers(self) -> list[str]:
        """Describe the MCP servers that still run."""
        return [
            f"the MCP server {one.pid} of {self.name} runs"
            for kernel in self.kernels
            for one in kernel.servers
            if one.alive
        ]

    def connect(self) -> trio.SocketStream:
        """Connect a client to its server. Raises `ConnectionRefusedError` while it does not listen."""
        if not self.alive or self._life is None or not self.ready.is_set():
            raise ConnectionRefusedError("the node does not listen")
        return self._life.connect()

    async def dial(self, serve_host: Callable[[trio.SocketStream], Any]) -> trio.SocketStream:
        """Connect this node to a host, which `serve_host` serves. Raises `ConnectionRefusedError` after a crash."""
        life = self._life_of_caller()
        await trio.lowlevel.checkpoint()
        if life.dead:
            raise ConnectionRefusedError("no power")
        ours, theirs = socket_pair()
        life.sockets.append(ours.socket)
        called = self._context.copy()
        called.run(caller_of.set, life.name)
        called.run(self._nursery.start_soon, serve_host, theirs)
        return ours

    def custody(self) -> Any:
        """Return a new warden of this node."""
        return self._life_of_caller().kernel.custody()

    def _life_of_caller(self) -> _Life:
        life = _life.get()
        assert life is not None, "only a node has connections and processes"
        return life


_life: ContextVar[_Life | None] = ContextVar("simulated_life", default=None)


caller_of: ContextVar[str] = ContextVar("simulated_caller", default="")
"""In a task that serves a connection of a node: the name of the life that opened it."""


def is_paused(task: trio.lowlevel.Task) -> bool:
    """Return whether a task belongs to a paused process."""
    life = task.context.get(_life)
    return life is not None and life.paused


class _Life:
    """A life of a node: from a start to its end or a crash."""

    def __init__(self, node: SimulatedNode) -> None:
        self.node = node
        self.name = f"{node.name}.{node.starts}"
        self.paused = False
        self.paused_at = 0.0
        self.signals: NodeSignals | None = None
        self.dead = False
        self.over = False
        self.asked = trio.Event()
        self.broken = trio.Event()
        self.embedding: EmbeddingProgram | None = None
        self.sockets: list[Any] = []
        self.clients: list[Any] = []
        self.kernel: SimulatedKernel
        self._scope = trio.CancelScope()
        self._gateway: ApiGateway | None = None
        self._listener: socket.socket | None = None
        self._address: Any = None

    @property
    def is_cut(self) -> bool:
        """Return whether the node is partitioned from the store."""
        return bool(self.node.cut)

    @property
    def is_calm(self) -> bool:
        """Return whether the faults have ended."""
        return self.node.calm

    @property
    def wake_faults(self) -> list[str]:
        """Return the faults of the next signals from other nodes."""
        return self.node.wake_faults

    def note(self, kind: str, text: str) -> None:
        """Note an event of this life in the trace."""
        self.node._trace.note(kind, f"{self.name} {text}")

    async def run(self) -> None:
        node = self.node
        current_node.set(node)
        _life.set(self)
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
                node.on_end()
            if self._listener is not None:
                self._listener.close()

    def _failed(self, error: Exception) -> None:
        """Schedule a restart, as a service manager does. The error is the node's failure, unless the store made the start fail or a fault ended it."""
        node = self.node
        node._trace.note("node fails", f"{node.name}: {type(error).__name__}: {error}")
        if first_error(error, MembershipLost) is not None and node.network is not None:
            node._trace.note("lease lost", self.name)
        elif not node.ready.is_set() and first_error(error, StoreError) is not None:
            node._trace.note("start fails", node.name)
        elif self.broken.is_set():
            node.on_end()
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

        async def fail() -> None:
            await self.broken.wait()
            raise BrokenReceiver("a receiver fails on purpose")

        self.embedding = EmbeddingProgram(node.embedding_seen, node._trace.note, node.spare)
        if node.spare == "mailbox":
            core = gateway.runtime.core
            core.settings = msgspec.structs.replace(core.settings, mailbox=MAILBOX)
        gateway.runtime.start_receiver("http", receive)
        gateway.runtime.start_receiver("broken", fail)
        gateway.runtime.start_receiver("embedding", partial(self.embedding.receive, gateway.runtime))
        await self.asked.wait()
        node._trace.note("drain", self.name)
        node.report = await gateway.api.drain.run(node._config.server.drain_seconds)
        node._trace.note("drained", f"{self.name} {node.report.get('ok')}")
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
        """Open the store: a single node owns the database, one of several nodes has a lease."""
        root = self.node._root
        if self.node.network is not None:
            return self._open_shared(self.node.network)
        handle = SqliteStore(root.database)
        handle.secret = root.secret
        return _opened(handle)

    @asynccontextmanager
    async def _open_shared(self, network: SignalNetwork) -> AsyncGenerator[SqliteStore]:
        node = self.node
        async with node._root.shared(node.name, lease_seconds=LEASE_SECONDS) as handle:
            self.signals = signals = NodeSignals(self, handle, network, node._nursery)
            handle._writer = WatchedWrites(handle._writer, signals, node._trace)
            network.attach(signals)
            looking = trio.CancelScope()

            async def look() -> None:
                with looking:
                    await signals.run()

            node._nursery.start_soon(look)
            try:
                yield handle
            finally:
                looking.cancel()
                network.detach(signals)

    def connect(self) -> trio.SocketStream:
        """Return the client's end of a new connection. Raises `ConnectionRefusedError` if the server does not listen."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(self._address)
        except OSError:
            sock.close()
            raise ConnectionRefusedError("the node does not listen") from None
        sock.setblocking(False)
        self.clients.append(sock)
        return trio.SocketStream(cast("Any", trio.socket.from_stdlib_socket(sock)))

    def power_off(self) -> None:
        """Crash: from this instant, nothing of this life has an effect."""
        self.dead = True
        if self.paused:
            self.paused = False
            self.node.on_pause()
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
    """A store whose verbs raise `PowerLost` once `is_off` returns True; all other attributes are those of the wrapped store."""

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
            raise PowerLost(f"no power: the answer of {name} was lost")
        return value


class _NodeStore(FencedStore):
    """The store of one life, with crash points at verbs, partitions, and late, doubled or reordered signals."""

    def __init__(self, store: SqliteStore, life: _Life) -> None:
        super().__init__(store, lambda: life.dead)
        self._life = life
        self._trace = life.node._trace

    async def _call(self, name: str, verb: Callable[..., Any], *args: Any, **named: Any) -> Any:
        node = self._life.node
        if not (self._life.dead or node.crash_points or node.cut):
            try:
                value = await verb(*args, **named)
            except Exception as error:
                self._trace.note("verb", f"{name}: {type(error).__name__}")
                raise
            self._trace.note("verb", name)
            if self._life.dead:
                raise PowerLost(f"no power: the answer of {name} was lost")
            return value
        point = None if self._life.dead else next((one for one in node.crash_points if one.verb == name), None)
        if point is not None:
            node.crash_points.remove(point)
            if not point.after:
                self._trace.note("power fails", f"before {name}")
                node.crash(point.down)

        async def traced() -> Any:
            try:
                value = await self._reach(name, partial(verb, *args, **named))
            except Exception as error:
                self._trace.note("verb", f"{name}: {type(error).__name__}")
                raise
            self._trace.note("verb", name)
            if point is not None and not self._life.dead:
                self._trace.note("power fails", f"after {name}")
                node.crash(point.down)
            return value

        return await super()._call(name, traced)

    async def _reach(self, name: str, verb: Callable[[], Any]) -> Any:
        """Call a verb. During a partition wait for its end, and after `STORE_SECONDS` raise `CommitUncertain` or `StoreUnavailable`."""
        node = self._life.node
        if not node.cut:
            return await verb()
        written = node.cut == "deaf" and name not in READ_VERBS
        value = await verb() if written else None
        with trio.move_on_after(STORE_SECONDS):
            await node._healed.wait()
        if node.cut:
            kind = CommitUncertain if written else StoreUnavailable
            raise kind(f"the store cannot be reached: {name}")
        return value if written else await verb()

    def subscribe(self, topic: str, wake: Wake, key: str | None = None) -> AbstractContextManager[None]:
        """Subscribe as in `SignalStore.subscribe`, with the faults of signals."""
        if self._life.signals is not None:
            return self._life.signals.subscribe(topic, wake, key)
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
