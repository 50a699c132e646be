"""A gateway with its server: serve, drain on a signal, report, end.

The server is a receiver of the runtime, the innermost scope. A signal refuses new work and lets turns end while reads are still answered; then the
server closes its connections; then the runtime ends. A second signal cancels everything at once.
"""

from __future__ import annotations

import gc
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from functools import partial
from typing import Any, Final, cast

import msgspec
import trio

from hermes_trio.config import Config
from hermes_trio.http.auth import AdminKey, keep_key
from hermes_trio.http.load import sample_load
from hermes_trio.http.server import ServerConfig, hypercorn_config, serve
from hermes_trio.runtime.errors import MembershipLost
from hermes_trio.runtime.ports import Agent
from hermes_trio.runtime.turn_lifecycle import first_cause
from hermes_trio.store.errors import StoreUnavailable
from hermes_trio.store.ownership import announced
from hermes_trio.store.ports import Store

from .api import ApiGateway, open_api_gateway
from .listening import CONFIGURED, AddressUnusable, Listening, UnavailableServer, address_of, kept_open

logger: Final = logging.getLogger("hermes_trio.gateway.serving")

JOIN_PAUSE: Final = 1.0
"""The delay of a node that has lost its lease before each attempt to join again."""

COLLECTOR_THRESHOLDS: Final = (100_000, 10, 10)
"""Allocations before the cycle collector runs. A thousand turns at once hold some forty thousand objects, hardly one of them in a cycle; with
the interpreter's 700 it looked at all of them again and again, which was a third of the CPU time of a busy server, with 20,000 a tenth."""


class Serving(msgspec.Struct):
    """A server that listens: its addresses, and how to close it."""

    gateway: ApiGateway
    addresses: list[str]
    closing: trio.Event = msgspec.field(default_factory=trio.Event)
    closed: trio.Event = msgspec.field(default_factory=trio.Event)

    async def close(self) -> None:
        """Close the connections, give open requests their grace period, and wait for both."""
        self.closing.set()
        await self.closed.wait()


def server_config(config: Config, bind: str = "", others: tuple[int, ...] = ()) -> ServerConfig:
    """Return the settings of the serving layer. `bind` replaces the configured address; `others` are the sockets of other workers."""
    hypercorn = hypercorn_config(bind or address_of(config))
    hypercorn.graceful_timeout = config.server.graceful_seconds
    hypercorn.errorlog = logging.getLogger("hermes_trio.http.server")
    if config.server.access_log:
        hypercorn.accesslog = logging.getLogger("hermes_trio.http.access")
    return ServerConfig(hypercorn=hypercorn, fast_path=config.server.fast_path, lifespan=False, others=others)


@asynccontextmanager
async def open_server(
    config: Config,
    key: AdminKey,
    *,
    agent: Agent | None = None,
    in_memory: bool = False,
    store: AbstractAsyncContextManager[Store] | None = None,
    listening: Listening = CONFIGURED,
) -> AsyncIterator[Serving]:
    """Open a gateway with a listening server for the body of the `async with`. Raises `AddressUnusable` if the address is taken.

    A generated key is stored after the address is bound, so that a failed start leaves none. `agent`, `in_memory` and `store` are for `open_api_gateway`;
    `listening` overrides the configured address.
    """
    async with open_api_gateway(config, key, agent=agent, in_memory=in_memory, store=store) as gateway:
        serving = Serving(gateway, [])
        ready = trio.Event()
        failure: list[OSError] = []

        async def receive() -> None:
            try:
                async with trio.open_nursery() as sampling:
                    sampling.start_soon(sample_load, gateway.api)
                    async with trio.open_nursery() as nursery:
                        settings = server_config(config, listening.once(), listening.others)
                        run = partial(serve, gateway.app, settings, shutdown=serving.closing)
                        serving.addresses = await nursery.start(run)
                        ready.set()
                    sampling.cancel_scope.cancel()
            except* OSError as group:
                if ready.is_set():
                    raise
                failure.append(cast("OSError", first_cause(group)))
            finally:
                ready.set()
                serving.closed.set()

        gateway.runtime.start_receiver("http", receive)
        await ready.wait()
        if failure:
            raise AddressUnusable(
                f"{address_of(config)} cannot be used: {failure[0].strerror or failure[0]}"
            ) from failure[0]
        keep_key(key)
        try:
            with ExitStack() as stack:
                if listening.announces and not in_memory:
                    _announce(stack, config, serving.addresses)
                yield serving
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + config.server.graceful_seconds + 1):
                await serving.close()


def _announce(stack: ExitStack, config: Config, addresses: list[str]) -> None:
    """Announce the server's addresses to the commands. The server runs even if they cannot be written."""
    try:
        stack.enter_context(announced(config.database, addresses))
    except OSError as error:
        logger.warning(
            "could not write the address file in %s; commands will use the configured address: %s", config.home, error
        )


def settle_heap() -> None:
    """Exclude everything that the start has allocated from later garbage collections, and collect less often.

    For a process that is only a server: the collector belongs to the whole process.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
    gc.enable()


async def run_server(
    config: Config,
    key: AdminKey,
    *,
    agent: Agent | None = None,
    in_memory: bool = False,
    listening: Listening = CONFIGURED,
    announce: Callable[[Serving], None],
    draining: Callable[[Serving], None],
    report: Callable[[dict[str, Any]], None],
) -> None:
    """Serve until a signal, then end as the module describes. `draining` is called when the drain begins; `report` receives its report.

    Signals are handled until everything is closed. A node that has lost its lease stops all its work and opens the gateway again, as a new node, when
    the database can be reached; until then every request gets 503 with `Retry-After`.
    """
    failure: Exception | None = None
    lives, asked, serving = 0, False, None
    with (
        trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals,
        kept_open(config, listening) as listens,
    ):
        async with trio.open_nursery() as listeners:
            unavailable = UnavailableServer(listeners)
            while not asked and failure is None:
                serving = None
                try:
                    opened = open_server(config, key, agent=agent, in_memory=in_memory, listening=listens)
                    async with opened as serving:
                        settle_heap()
                        await serving.gateway.gateway.toolbox.confinement.sandbox.ready()
                        unavailable.end()
                        if lives:
                            logger.warning("this node lost its lease, has joined again, and serves")
                        else:
                            announce(serving)
                        lives, key = lives + 1, msgspec.structs.replace(key, made=False)
                        await _until_asked(signals, serving)
                        if serving.gateway.runtime.membership.lost:
                            await unavailable.begin(server_config(config, listens.once()))
                            continue
                        asked = True
                        # Until everything is closed, not only the server: the operator may cancel a job that does not end.
                        listeners.start_soon(_abort_on_signal, signals, serving)  # noqa: ASYNC111
                        draining(serving)
                        report(await serving.gateway.api.drain.run(config.server.drain_seconds))
                        await serving.close()
                except Exception as error:
                    if asked or not _may_join_again(error, serving, first=not lives):
                        failure = error  # raised below as it is, not in a group
                    else:
                        logger.warning("could not join again; retrying in %g s: %s", JOIN_PAUSE, error)
                        asked = await _asked_within(JOIN_PAUSE, signals)
            listeners.cancel_scope.cancel()
    if failure is not None:
        raise failure


def _may_join_again(error: Exception, serving: Serving | None, *, first: bool) -> bool:
    """Return whether a gateway ended because its node lost its lease, or could not be reopened because the database is unavailable."""
    if serving is not None and serving.gateway.runtime.membership.lost:
        return True
    if isinstance(error, ExceptionGroup):
        return cast("ExceptionGroup[Exception]", error).subgroup(MembershipLost) is not None
    return isinstance(error, MembershipLost) or (isinstance(error, StoreUnavailable) and not first and serving is None)


async def _asked_within(seconds: float, signals: AsyncIterator[int]) -> bool:
    """Wait for a signal, at most `seconds`; return whether one arrived."""
    with trio.move_on_after(seconds):
        async for number in signals:
            logger.info("received %s: this node does not join again", signal.Signals(number).name)
            return True
    return False


async def _until_asked(signals: AsyncIterator[int], serving: Serving) -> None:
    """Return when a signal has arrived, or when the server has ended by itself."""
    async with trio.open_nursery() as nursery:

        async def first_signal() -> None:
            async for number in signals:
                logger.info("received %s: draining", signal.Signals(number).name)
                break
            nursery.cancel_scope.cancel()

        async def server_ended() -> None:
            await serving.closed.wait()
            nursery.cancel_scope.cancel()

        nursery.start_soon(first_signal)
        nursery.start_soon(server_ended)


async def _abort_on_signal(signals: AsyncIterator[int], serving: Serving) -> None:
    async for number in signals:
        logger.warning("received %s again: cancelling everything", signal.Signals(number).name)
        serving.closing.set()
        serving.gateway.runtime.abort()
