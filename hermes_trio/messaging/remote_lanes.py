"""Conversations whose lane runs on another node: passes messages that arrive here to the turn that runs there.

A request is a hint to a running turn. The message itself is a committed row, which the lane takes next in any case.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from hermes_trio.runtime.outcome import CancelCause, Cause
from hermes_trio.runtime.ports import InboxKind, NodeRequest
from hermes_trio.runtime.turn import Turn

if TYPE_CHECKING:
    from hermes_trio.runtime.interface import Inbox
    from hermes_trio.store.ports import Store

    from .core import MessagingCore

NEWER_MESSAGE: Final = Cause(CancelCause.STOP, "a newer message came in")

STEER: Final = "steer"
INTERRUPT: Final = "interrupt"
STEER_SECONDS: Final = 5.0


def has_children(turn: Turn) -> bool:
    """Return whether sub-agents work inside the turn: interrupting it would lose their work (GW-51)."""
    return any(node.kind == "turn" and node is not turn.node for node in turn.node.walk())


async def steer_in_order(
    store: Store, inbox: Inbox, turn: Turn | None, session_key: str, number: int, text: str
) -> bool:
    """Pass a message, inbox row `number`, to the running turn; return False if it becomes a turn of its own.

    It does if older messages wait, which the turn will not get: otherwise it would be answered before them.
    """
    if turn is None:
        return False
    waiting = await store.inbox_waiting(inbox=inbox.channel.inbox, session_key=session_key, kind=InboxKind.MESSAGE)
    if (
        waiting > len(turn.steered) + 1
        or inbox.current_turn(session_key) is not turn
        or turn.node.closed_at is not None
    ):
        return False
    turn.steer(number, text)
    return True


class RemoteLanes:
    """Steers and interrupts turns on other nodes, and turns here on their request."""

    def __init__(self, messaging: MessagingCore) -> None:
        self._messaging = messaging

    @contextmanager
    def answering(self) -> Generator[None]:
        """Answer other nodes for the body of the `with`."""
        membership = self._messaging.runtime.core.membership
        with membership.answering(STEER, self._steer_here), membership.answering(INTERRUPT, self._interrupt_here):
            yield

    async def node_of(self, platform: str, session_key: str) -> str:
        """Return the other node that runs the lane of a conversation; empty if none does."""
        core = self._messaging.runtime.core
        if not core.shared:
            return ""
        node = await core.store.lane_owner(platform, session_key)
        return "" if node == core.store.owner else node

    async def steer(self, node: str, platform: str, session_key: str, number: int, text: str) -> bool:
        """Pass a message, inbox row `number`, to the turn that runs there; return False if it was not accepted."""
        payload = {"platform": platform, "number": number, "text": text}
        ask = self._messaging.runtime.core.membership.ask
        answer = await ask(node, STEER, session_key, payload, seconds=STEER_SECONDS)
        return answer is not None and answer.value.get("steered") is True

    async def interrupt(self, node: str, platform: str, session_key: str) -> None:
        """Ask the node to cancel its turn, unless sub-agents work inside it. Does not wait."""
        await self._messaging.runtime.core.membership.ask(
            node, INTERRUPT, session_key, {"platform": platform}, seconds=0
        )

    async def _steer_here(self, request: NodeRequest) -> Mapping[str, Any]:
        payload, turn = request.payload, self._turn(request)
        if turn is None:
            return {"steered": False}
        inbox, store = self._messaging.inboxes[str(payload["platform"])], self._messaging.store
        number, text = int(payload["number"]), str(payload["text"])
        return {"steered": await steer_in_order(store, inbox, turn, request.target, number, text)}

    async def _interrupt_here(self, request: NodeRequest) -> Mapping[str, Any]:
        turn = self._turn(request)
        if turn is None or has_children(turn):
            return {"interrupted": False}
        turn.cancel(NEWER_MESSAGE)
        return {"interrupted": True}

    def _turn(self, request: NodeRequest) -> Turn | None:
        inbox = self._messaging.inboxes.get(str(request.payload.get("platform", "")))
        return None if inbox is None else inbox.current_turn(request.target)
