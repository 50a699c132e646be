"""Conversations whose lane lives on another node: a message that came in here reaches the turn that runs there.

What is asked is a hint to a running turn. The message itself is a committed row, which the lane takes next in any case.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from hermes_trio.runtime.outcome import CancelCause, Cause
from hermes_trio.runtime.ports import NodeRequest
from hermes_trio.runtime.turn import Turn

if TYPE_CHECKING:
    from .core import MessagingCore

__all__ = ["NEWER_MESSAGE", "LanesElsewhere", "has_children"]

NEWER_MESSAGE: Final = Cause(CancelCause.STOP, "a newer message came in")

STEER: Final = "steer"
INTERRUPT: Final = "interrupt"
STEER_SECONDS: Final = 5.0


def has_children(turn: Turn) -> bool:
    """Whether sub-agents work inside the turn: interrupting would throw their work away (GW-51)."""
    return any(node.kind == "turn" and node is not turn.node for node in turn.node.walk())


class LanesElsewhere:
    """Steers and interrupts turns on other nodes, and here when they ask for it."""

    def __init__(self, messaging: MessagingCore) -> None:
        self._messaging = messaging

    @contextmanager
    def answering(self) -> Generator[None]:
        """Answer other nodes, for the body of the `with`."""
        membership = self._messaging.runtime.core.membership
        with membership.answering(STEER, self._steer_here), membership.answering(INTERRUPT, self._interrupt_here):
            yield

    async def node_of(self, platform: str, session_key: str) -> str:
        """The other node on which the lane of a conversation works now; empty if none does."""
        core = self._messaging.runtime.core
        if not core.shared:
            return ""
        node = await core.store.lane_owner(platform, session_key)
        return "" if node == core.store.owner else node

    async def steer(self, node: str, platform: str, session_key: str, number: int, text: str) -> bool:
        """Hand a message, which is inbox row `number`, to the turn that runs there; False if it was not taken up."""
        payload = {"platform": platform, "number": number, "text": text}
        ask = self._messaging.runtime.core.membership.ask
        answer = await ask(node, STEER, session_key, payload, seconds=STEER_SECONDS)
        return answer is not None and answer.value.get("steered") is True

    async def interrupt(self, node: str, platform: str, session_key: str) -> None:
        """Ask for the turn that runs there to end, unless sub-agents work inside it. Not waited for."""
        await self._messaging.runtime.core.membership.ask(
            node, INTERRUPT, session_key, {"platform": platform}, seconds=0
        )

    async def _steer_here(self, request: NodeRequest) -> Mapping[str, Any]:
        turn = self._turn(request)
        if turn is None or turn.node.closed_at is not None:
            return {"steered": False}
        self._messaging.steer(turn, int(request.payload["number"]), str(request.payload["text"]))
        return {"steered": True}

    async def _interrupt_here(self, request: NodeRequest) -> Mapping[str, Any]:
        turn = self._turn(request)
        if turn is None or has_children(turn):
            return {"interrupted": False}
        turn.cancel(NEWER_MESSAGE)
        return {"interrupted": True}

    def _turn(self, request: NodeRequest) -> Turn | None:
        inbox = self._messaging.inboxes.get(str(request.payload.get("platform", "")))
        return None if inbox is None else inbox.current_turn(request.target)
