"""What the parts of the message gateway share: the runtime, the store, the approvals, the senders, and a scope for small tasks.

The scope is open while the gateway's receiver runs, and its tasks end with it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Protocol, TypeVarTuple, cast

import trio

from hermes_trio.agent.approvals import Approvals
from hermes_trio.runtime.interface import Inbox
from hermes_trio.runtime.runtime import Runtime
from hermes_trio.store.ports import Store

from .addresses import Address
from .platforms import Platforms
from .remote_lanes import RemoteLanes
from .senders import Senders

logger: Final = logging.getLogger("hermes_trio.messaging.hub")

COMMIT_SECONDS: Final = 30.0

STARTED_ANEW: Final = "a new conversation was started before an answer arrived"
"""The reason for refusing the pending requests of a conversation that was replaced by a new one."""

Ts = TypeVarTuple("Ts")


class ConversationEnd(Protocol):
    """Ends the state that a conversation has beside its transcript, so that the next one does not get it.

    May be called again for the same conversation after a failure. If it is cancelled, a second call ends what is left.
    """

    async def __call__(self, session_key: str, session_id: str, reason: str) -> None: ...


class MessagingCore:
    """See the module. Without `ends`, a conversation has no state but its approvals."""

    def __init__(
        self,
        runtime: Runtime,
        platforms: Platforms,
        senders: Senders,
        approvals: Approvals | None,
        ends: ConversationEnd | None = None,
    ) -> None:
        self.runtime = runtime
        self.platforms = platforms
        self.senders = senders
        self.approvals = approvals
        self._ends = ends
        self.inboxes: dict[str, Inbox] = {}
        self.scope: trio.Nursery | None = None
        self.remote_lanes = RemoteLanes(self)

    @property
    def store(self) -> Store:
        """Return the store, as its whole port."""
        return cast("Store", self.runtime.store)

    async def end_conversation(self, session_key: str, session_id: str) -> None:
        """End the conversation of a key: its grants end, and its pending requests are refused.

        `session_id` is the session that ended, or empty if there was none. Cancelling it may leave requests that wait for their time-out.
        """
        if self._ends is not None:
            await self._ends(session_key, session_id, STARTED_ANEW)
        elif self.approvals is not None:
            await self.approvals.end_scope(session_key, STARTED_ANEW)

    def spawn(self, name: str, function: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> bool:
        """Start a small task in the gateway's scope, with its context; return False if the gateway is closing. `name` is for the log."""
        if self.scope is None or self.scope.cancel_scope.cancel_called:
            return False
        self.runtime.core.base_context.copy().run(self.scope.start_soon, self._guarded, name, function, args)
        return True

    @staticmethod
    async def _guarded(name: str, function: Callable[..., Awaitable[object]], args: tuple[Any, ...]) -> None:
        """Run a task whose failure must not end the gateway (a typing sign, an edited prompt)."""
        try:
            await function(*args)
        except Exception:
            logger.exception("%s failed", name)

    def committing(self) -> trio.CancelScope:
        """Shield accepting a message and waking its lane, with a bound.

        A write that was submitted happens even if its caller is cancelled; without the shield its lane might not be woken.
        """
        return trio.CancelScope(shield=True, deadline=self.runtime.core.waits.until(COMMIT_SECONDS))

    async def post(self, address: Address, text: str, payload: Mapping[str, Any] | None = None) -> None:
        """Send a text to a chat, outside any turn: committed when this returns, then sent in the chat's order."""
        entries = self.platforms.compose(address, text, payload)
        if entries:
            await self.store.add_outbox(entries)
