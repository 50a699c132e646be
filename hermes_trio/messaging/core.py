"""What the parts of the gateway share: the runtime, the store, the broker of approvals, the senders, and a scope for small tasks of their own.

Made by the gateway; its scope is open while the gateway's receiver runs, and everything in it ends with that.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Protocol, TypeVarTuple, cast

import trio

from hermes_trio.agent.approvals import Approvals
from hermes_trio.runtime.interface import Inbox
from hermes_trio.runtime.runtime import Runtime
from hermes_trio.runtime.turn import Turn
from hermes_trio.store.ports import Store

from .addresses import Address
from .elsewhere import LanesElsewhere
from .platforms import Platforms
from .senders import Senders

__all__ = ["ConversationEnd", "MessagingCore"]

logger: Final = logging.getLogger("hermes_trio.messaging.hub")

COMMIT_SECONDS: Final = 30.0

STARTED_ANEW: Final = "the conversation was started anew before anybody answered"
"""What is said about a question of a conversation that is over."""

Ts = TypeVarTuple("Ts")


class ConversationEnd(Protocol):
    """Ends what a conversation has beside its transcript, and must not hand on to the next one: whoever owns such things gives one to the gateway.

    It may be called again for the same conversation if it failed; cancelling it leaves nothing that a second call would not end.
    """

    async def __call__(self, session_key: str, session_id: str, reason: str) -> None: ...


class MessagingCore:
    """See the module. Without `ends`, a conversation has nothing but its approvals."""

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
        self.steered: dict[str, list[tuple[int, str]]] = {}
        """Inbox rows that were handed to a running turn, by the turn's id, oldest first."""
        self.scope: trio.Nursery | None = None
        self.elsewhere = LanesElsewhere(self)

    def steer(self, turn: Turn, number: int, text: str) -> None:
        """Hand inbox row `number` to a running turn, which takes its text up at its next step."""
        turn.steering.append(text)
        self.steered.setdefault(turn.id, []).append((number, text))

    @property
    def store(self) -> Store:
        """The store, with all of its verbs."""
        return cast("Store", self.runtime.store)

    async def end_conversation(self, session_key: str, session_id: str) -> None:
        """The conversation behind a key starts anew: nothing that was allowed in the old one is allowed in the next, and what waits is refused.

        `session_id` is the session that is over, or empty if there was none. Cancelling it may leave questions that wait for their time-out, never a
        bypass.
        """
        if self._ends is not None:
            await self._ends(session_key, session_id, STARTED_ANEW)
        elif self.approvals is not None:
            await self.approvals.end_scope(session_key, STARTED_ANEW)

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
        entries = self.platforms.compose(address, text, payload)
        if entries:
            await self.store.add_outbox(entries)
