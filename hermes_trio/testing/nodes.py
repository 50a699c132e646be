"""Opens several runtimes on one store in memory, each a node with a lease, like hosts on one database, in one process and on virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import trio

from hermes_trio.runtime.agents import AnyAgent
from hermes_trio.runtime.core import RuntimeSettings
from hermes_trio.runtime.runtime import Runtime, Stage
from hermes_trio.store import Runner, SqliteStore, open_store

from .faults import StoreFaults


class Nodes:
    """One store and the runtimes that are opened on it. `store` belongs to none of them; tests read it."""

    def __init__(self, store: SqliteStore, lease_seconds: float) -> None:
        self.store = store
        self._lease_seconds = lease_seconds
        self._seed = 0

    def make(
        self,
        agent: AnyAgent,
        name: str = "",
        *,
        faults: StoreFaults | None = None,
        settings: RuntimeSettings | None = None,
        stages: Sequence[Stage] = (),
        clock: Callable[[], float] | None = None,
    ) -> Runtime:
        """Make a runtime that is a separate node; open it with `async with`. `faults` are injected only into its own view of the store."""
        opening: AbstractAsyncContextManager[Any] = self.store.shared(name, lease_seconds=self._lease_seconds)
        self._seed += 1
        return Runtime(
            agent=agent,
            store=opening if faults is None else faults.around(opening),
            settings=RuntimeSettings(watchdog_seconds=0) if settings is None else settings,
            stages=stages,
            seed=self._seed,
            clock=clock,
        )

    @asynccontextmanager
    async def open(self, agent: AnyAgent, count: int) -> AsyncIterator[list[Runtime]]:
        """Open this many runtimes with the same agent for the body of the `async with`; they are closed one after the other."""
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(self.make(agent, f"node-{number}")) for number in range(count)]


@asynccontextmanager
async def open_nodes(*, lease_seconds: float = 15.0, clock: Callable[[], float] | None = None) -> AsyncIterator[Nodes]:
    """Open a store in memory for several runtimes. Its clock, which decides leases, is the loop's unless one is given."""
    opened = open_store(None, runner=Runner.INLINE, clock=clock or trio.current_time, maintenance=False)
    async with opened as store:
        yield Nodes(store, lease_seconds)
