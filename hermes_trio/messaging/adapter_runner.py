"""Keeps adapters running: each with its own back-off, its own node in the tree and its own entry in the health report.

A failing adapter affects no other. A permanent error (a bad token) stops it; everything else is retried after 30, 60, 120, 240, then every 300
seconds. A store that cannot be reached is tried every five seconds, and does not lengthen the pauses after other failures. Turns continue while it is
disconnected, and their replies wait in the outbox.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import attrs
import trio

from hermes_trio.runtime.membership import Membership
from hermes_trio.runtime.runtime import Runtime
from hermes_trio.runtime.tree import Node, waiting, working
from hermes_trio.runtime.turn_lifecycle import first_cause
from hermes_trio.store.errors import StoreUnavailable

from .contract import Adapter, AdapterState, PlatformError

logger: Final = logging.getLogger("hermes_trio.messaging.adapter_runner")

BACKOFF_SECONDS: Final = (30.0, 60.0, 120.0, 240.0, 300.0)

STORE_SECONDS: Final = 5.0
"""The pause after a failure of the store."""

HEALTHY_SECONDS: Final = 300.0
"""A connection that lasted this long resets the back-off when it ends."""


@asynccontextmanager
async def receiving(runtime: Runtime, name: str, function: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Run a receiver of the runtime for the body of the `async with`; leaving it cancels the receiver and waits for it."""
    scope, ended = trio.CancelScope(), trio.Event()

    async def receive() -> None:
        try:
            with scope:
                await function()
        finally:
            ended.set()

    runtime.start_receiver(name, receive)
    try:
        yield
    finally:
        scope.cancel()
        with trio.CancelScope(shield=True):
            await ended.wait()


@attrs.define(eq=False)
class AdapterRunner:
    """Runs one adapter and holds its state."""

    adapter: Adapter
    clock: Callable[[], float]
    state: AdapterState = AdapterState.DISCONNECTED
    error: str = ""
    error_code: str = ""
    failures: int = 0
    attempts: int = 0
    since: float = 0.0
    retry_at: float | None = None
    _connected_at: float | None = None

    async def run_alone(self, membership: Membership) -> None:
        """Like `run`, on one node at a time for an adapter that is a singleton: on the other nodes it stands by."""
        if not self.adapter.singleton:
            await self.run()
            return
        self._move(AdapterState.STANDBY)
        await membership.run_alone(f"adapter {self.adapter.platform}", self.run)

    async def run(self) -> None:
        """Keep the adapter running until cancelled. After a permanent error it stays off, and visible."""
        try:
            with working("adapter", self.adapter.platform) as node:
                await self._live(node)
        finally:
            self._move(AdapterState.DISCONNECTED)

    async def _live(self, node: Node | None) -> None:
        platform = self.adapter.platform
        while True:
            self._move(AdapterState.CONNECTING)
            self.attempts += 1
            self._connected_at = None
            problem = await self._once()
            if isinstance(problem, PlatformError) and problem.permanent:
                self.error, self.error_code = str(problem), problem.kind.value
                self._move(AdapterState.FATAL)
                if node is not None:
                    node.note = f"fatal: {problem}"
                logger.error("the adapter %s is off until its settings are changed: %s", platform, problem)
                with waiting("its settings to be changed, and a restart"):
                    await trio.sleep_forever()
            delay = self._delay(problem)
            self.retry_at = self.clock() + delay
            self._move(AdapterState.RETRYING)
            logger.warning("the adapter %s failed; next attempt in %.0f s: %s", platform, delay, self.error)
            with waiting(f"the next attempt ({self.error})"):
                await trio.sleep(delay)
            self.retry_at = None

    async def _once(self) -> BaseException | None:
        """Run the adapter once; return its failure, or None if it ended by itself."""

        def connected() -> None:
            self._connected_at = trio.current_time()
            self.error = self.error_code = ""
            self._move(AdapterState.CONNECTED)

        problem: BaseException | None = None
        try:
            await self.adapter.run(connected)
        except* Exception as group:
            problem = first_cause(group)
            if not isinstance(problem, (PlatformError, StoreUnavailable)):
                logger.error("the adapter for %s failed", self.adapter.platform, exc_info=problem)
        return problem

    def _delay(self, problem: BaseException | None) -> float:
        if self._connected_at is not None and trio.current_time() - self._connected_at > HEALTHY_SECONDS:
            self.failures = 0
        if isinstance(problem, StoreUnavailable):
            self.error, self.error_code = problem.public, "store"
            return STORE_SECONDS
        self.failures += 1
        delay = BACKOFF_SECONDS[min(self.failures, len(BACKOFF_SECONDS)) - 1]
        if isinstance(problem, PlatformError):
            self.error, self.error_code = str(problem), problem.kind.value
            return max(delay, problem.retry_after or 0.0)
        if problem is None:
            self.error, self.error_code = "the connection was ended", "ended"
        else:
            # The text of an unknown exception may hold anything, so only its type is shown.
            self.error, self.error_code = f"it failed with {type(problem).__name__}", "unknown"
        return delay

    def _move(self, state: AdapterState) -> None:
        self.state = state
        self.since = self.clock()

    def health(self) -> dict[str, Any]:
        """Return the entry of the health report."""
        return {
            "state": self.state.value,
            "since": self.since,
            "attempts": self.attempts,
            "error": self.error or None,
            "error_code": self.error_code or None,
            "retry_at": self.retry_at,
        }
