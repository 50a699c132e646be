"""What the parts of the gateway share: the runtime, the store, the broker of approvals, the senders, and a scope for small tasks of their own.

Made by the gateway; its scope is open while the gateway's receiver runs, and everything in it ends with that.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVarTuple, cast

import trio

from hermes_trio.agent.approvals import Approvals
from hermes_trio.runtime.delivery import Delivery
from hermes_trio.runtime.runtime import Runtime
from hermes_trio.store.port import Store

from .directory import Directory
from .outbox import Senders
from .targets import Address

__all__ = ["Desk"]

logger: Final = logging.getLogger("hermes_trio.adapters.gateway")

COMMIT_SECONDS: Final = 30.0

Ts = TypeVarTuple("Ts")


class Desk:
    """See the module."""

    def __init__(self, runtime: Runtime, directory: Directory, senders: Senders, approvals: Approvals | None) -> None:
        self.runtime = runtime
        self.directory = directory
        self.senders = senders
        self.approvals = approvals
        self.deliveries: dict[str, Delivery] = {}
        self.steered: dict[str, list[tuple[int, str]]] = {}
        """Inbox rows that were handed to a running turn, by the turn's id, oldest first."""
        self.scope: trio.Nursery | None = None

    @property
    def store(self) -> Store:
        """The store, with all of its verbs."""
        return cast("Store", self.runtime.store)

    def spawn(self, function: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> bool:
        """Run a small task in the gateway's scope, from its context; False if the gateway is closing and nobody would see the effect."""
        if self.scope is None or self.scope.cancel_scope.cancel_called:
            return False
        self.runtime.core.base_context.copy().run(self.scope.start_soon, self._guarded, function, args)
        return True

    @staticmethod
    async def _guarded(function: Callable[..., Awaitable[object]], args: tuple[Any, ...]) -> None:
        """A courtesy that fails (a typing sign, a settled prompt) must not take the gateway with it."""
        try:
            await function(*args)
        except Exception:
            logger.exception("a task of the gateway failed")

    def committing(self) -> trio.CancelScope:
        """A bounded shield around accepting something and waking whoever works on it.

        A write that was asked for happens even if whoever asked is cancelled; without the shield it could be there with nobody woken for it.
        """
        return trio.CancelScope(shield=True, deadline=trio.current_time() + COMMIT_SECONDS)

    async def post(self, address: Address, text: str, payload: Mapping[str, Any] | None = None) -> None:
        """Say something in a chat, outside any turn: committed when this returns, then sent in the chat's order."""
        entries = self.directory.compose(address, text, payload)
        if entries:
            await self.store.add_outbox(entries)
            self.senders.wake(address.platform)
