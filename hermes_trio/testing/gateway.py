"""A gateway for tests: the real runtime, store, senders, approvals and message hub in this process, around the platforms that a test gives.

`open_test_gateway` opens one, `eventually` waits for a condition. Both work in real time and on trio's `MockClock`.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Final, cast

import attrs
import trio

from hermes_trio.agent.approvals import Approvals
from hermes_trio.messaging.contract import Adapter, AdapterState
from hermes_trio.messaging.core import ConversationEnd
from hermes_trio.messaging.hub import MessageHub
from hermes_trio.messaging.platforms import Platform, Platforms
from hermes_trio.messaging.senders import Senders
from hermes_trio.messaging.settings import OutboxSettings, PlatformSettings
from hermes_trio.runtime.core import RuntimeSettings
from hermes_trio.runtime.runtime import AnyAgent, Runtime, Stage
from hermes_trio.store import Runner, Store, open_store

POLL_SECONDS: Final = 0.01

JOB_KINDS: Final = ("process", "delegation")


async def eventually(condition: Callable[[], object | Awaitable[object]], *, seconds: float = 60.0) -> None:
    """Wait until `condition` returns, or resolves to, something true. Raises `trio.TooSlowError` after `seconds`.

    Checks a hundred times a second, because what a test waits for often ends in another task or process. Use an event where there is one.
    """
    with trio.fail_after(seconds):
        while True:
            found = condition()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return
            await trio.sleep(POLL_SECONDS)


@attrs.frozen(kw_only=True)
class GatewayOptions:
    """What a test may choose. The outbox polls once a day, so that virtual time does not run ahead while nothing happens."""

    platform: PlatformSettings = attrs.field(factory=lambda: PlatformSettings(allow_all=True))
    """The settings of adapters that are given without settings."""
    runtime: RuntimeSettings = attrs.field(factory=lambda: RuntimeSettings(watchdog_seconds=0))
    outbox: OutboxSettings = attrs.field(factory=lambda: OutboxSettings(look_seconds=86_400))
    approval_seconds: float = 60.0
    approvals: Callable[[], Approvals] | None = None
    """Returns the approvals that a stage has made, to use them instead of new ones."""
    seed: int | None = None
    """Makes ids and retry delays repeatable."""
    clock: Callable[[], float] | None = None
    ends: Callable[[Approvals], ConversationEnd] | None = None
    """Makes the function that is called when a conversation starts anew."""


@attrs.frozen(kw_only=True)
class OpenTestGateway:
    """An open gateway and its parts."""

    runtime: Runtime
    store: Store
    hub: MessageHub
    senders: Senders
    approvals: Approvals
    nodes: Sequence[OpenTestGateway] = ()
    """The gateways of all nodes on the same store, this one among them."""

    async def connected(self, *platforms: str, seconds: float = 60.0) -> None:
        """Wait until these platforms, or all of them, are connected."""
        runners = self.hub.runners
        wanted = platforms or tuple(runners)
        await eventually(lambda: all(runners[name].state is AdapterState.CONNECTED for name in wanted), seconds=seconds)

    async def idle(self, *, jobs: bool = False, seconds: float = 86_400.0) -> None:
        """Wait until no lane runs and the outbox is empty; with `jobs`, also until no background job runs."""
        nodes = self.nodes or (self,)

        async def check() -> bool:
            if any(node.runtime.lanes or (jobs and node.jobs) for node in nodes):
                return False
            return not await self.store.outbox_unsent()

        await eventually(check, seconds=seconds)

    @property
    def jobs(self) -> int:
        """Return the number of running background jobs."""
        return sum(node.kind in JOB_KINDS for node in self.runtime.tree.root.walk())


def memory_store(
    path: Path | None = None, clock: Callable[[], float] | None = None
) -> AbstractAsyncContextManager[Store]:
    """Open a store, in memory or at `path`, that works on the loop and tells the time by `clock` (default: `trio.current_time`)."""
    return open_store(path, runner=Runner.INLINE, clock=clock or trio.current_time, maintenance=False)


@asynccontextmanager
async def open_test_gateway(
    agent: AnyAgent,
    *platforms: Adapter | Platform,
    store: AbstractAsyncContextManager[Any] | None = None,
    stages: Sequence[Stage] = (),
    options: GatewayOptions | None = None,
) -> AsyncIterator[OpenTestGateway]:
    """Open a gateway with these platforms for the body of the `async with`. When it ends, or is cancelled, everything that it started has ended.

    `store` is opened by the runtime (default: `memory_store`). `stages` are entered before the senders, with the runtime: a stage may set
    `runtime.core.agent`.
    """
    options = options or GatewayOptions()
    configured = [one if isinstance(one, Platform) else Platform(one, options.platform) for one in platforms]
    senders = Senders([platform.adapter for platform in configured], options.outbox)
    runtime = Runtime(
        agent=agent,
        store=memory_store(clock=options.clock) if store is None else store,
        settings=options.runtime,
        stages=[*stages, senders.stage],
        seed=options.seed,
        clock=options.clock,
    )
    async with runtime:
        opened = cast("Store", runtime.store)
        made = options.approvals
        approvals = Approvals(opened, seconds=options.approval_seconds) if made is None else made()
        ends = None if options.ends is None else options.ends(approvals)
        hub = MessageHub(runtime, Platforms(configured), senders, approvals, ends=ends)
        async with hub.open():
            yield OpenTestGateway(runtime=runtime, store=opened, hub=hub, senders=senders, approvals=approvals)
