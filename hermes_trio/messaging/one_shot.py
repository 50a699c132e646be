"""Sessions that end when their work has settled: webhook deliveries and cron slots.

The answer of each turn goes to the addresses that were fixed when the work was accepted. They are part of the session's routing, by value, so that
background work which ends hours later, or after a restart, still has them (SC-8). The session stays open while something that was promised is
outstanding, at most for `linger`; then its jobs are stopped and it ends, with its reason.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import msgspec

from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.ends import End
from hermes_trio.runtime.interface import Inbox, Interface
from hermes_trio.runtime.outcome import CancelCause, Outcome, TurnState
from hermes_trio.runtime.ports import InboxRow, NewReply
from hermes_trio.runtime.turn import Turn
from hermes_trio.store import Page, SessionFilter
from hermes_trio.store.records import OWED

from .addresses import Address
from .command_text import is_silence_narration, is_silent_reply
from .core import MessagingCore

logger: Final = logging.getLogger("hermes_trio.messaging.one_shot")

LOG: Final = "log"
"""The target that only writes to the log."""

LOG_CHARACTERS: Final = 200
PAGE: Final = 500
REFUSED: Final = "failed. It could not be handled, and is kept as a dead letter; the server's log has the details."
BOOT_REASON: Final = "interrupted"


def delivery_fields(address: Address | None) -> dict[str, str]:
    """Return an address as the routing fields of a session and its jobs."""
    if address is None:
        return {}
    return {
        "cron_deliver_platform": address.platform,
        "cron_deliver_chat_id": address.chat_id or "",
        "cron_deliver_thread_id": address.thread_id or "",
    }


def delivery_address(context: SessionContext) -> Address | None:
    """Return the address in a session's routing."""
    if not context.cron_deliver_platform:
        return None
    return Address(
        context.cron_deliver_platform, context.cron_deliver_chat_id or None, context.cron_deliver_thread_id or None
    )


class OneShotInterface(Interface):
    """Base class. A subclass decides how long a session may linger, and where and how an outcome is reported."""

    interactive = False

    def __init__(self, messaging: MessagingCore, platform: str, reason: str) -> None:
        self.platform = platform
        self.one_shot = reason
        self.inbox: Inbox
        self._messaging = messaging
        self._turns: dict[str, Turn] = {}
        self._owed: set[str] = set()

    # -- what a subclass says --------------------------------------------------------------------------------------------------------

    def places(self, turn: Turn) -> Sequence[Address]:
        """Return the addresses for the answer of this turn."""
        address = delivery_address(turn.context)
        return () if address is None else (address,)

    def told(self, turn: Turn, outcome: Outcome, place: Address) -> str:
        """Return the text for an address; empty for none."""
        if outcome.state is not TurnState.COMPLETED:
            return failure_text(turn, outcome, self.title(turn.context))
        text = outcome.text.strip()
        return "" if is_silent_reply(text) or is_silence_narration(text) else text

    def title(self, context: SessionContext) -> str:
        """Return a title of this work for people."""
        return context.chat_name or context.chat_id

    async def ended(self, turn: Turn, outcome: Outcome) -> None:
        """Called after each turn of the session, after its commit."""

    # -- the front -------------------------------------------------------------------------------------------------------------------

    def replies(self, turn: Turn, outcome: Outcome) -> Sequence[NewReply]:
        entries: list[NewReply] = []
        for place in self.places(turn):
            text = "" if place.platform == LOG else self.told(turn, outcome, place)
            if text:
                entries += self._messaging.platforms.compose(place, text)
        return entries

    def refusal(self, rows: Sequence[InboxRow], reason: str) -> Sequence[NewReply]:
        place = delivery_address(rows[-1].routing)
        if place is None or place.platform == LOG:
            return ()
        return self._messaging.platforms.compose(place, f"[{self.title(rows[-1].routing)}: {REFUSED}]")

    async def on_turn_start(self, turn: Turn) -> None:
        self._turns[turn.id] = turn
        places = [place for place in self.places(turn) if place.platform != LOG]
        if places:
            owed = {"title": self.title(turn.context), "places": [msgspec.structs.astuple(place) for place in places]}
            self._owed.add(turn.id)
            await self._put_owed(turn, msgspec.json.encode(owed).decode())

    async def _put_owed(self, turn: Turn, owed: str) -> None:
        """Write where the answer of a turn goes: if the server dies in this turn, the next one knows the addresses. Retried until the turn has ended."""

        async def write() -> None:
            if turn.id in self._owed:
                await self._messaging.store.set_meta(_owed(turn.context.session_id), owed)

        await self._messaging.runtime.core.ends.put(End(f"where the answer of turn {turn.id} goes", write))

    async def on_turn_end(self, outcome: Outcome) -> None:
        turn = self._turns.pop(outcome.turn_id)
        await self.ended(turn, outcome)
        said = (outcome.text or outcome.error)[:LOG_CHARACTERS]
        logger.info("%s %s %s: %s", self.platform, self.title(turn.context), outcome.state.value, said)
        owed_here = turn.id in self._owed
        self._owed.discard(turn.id)
        # Whether a turn that was cancelled while it began is written is unknown. If it is not, the next attempt writes the same again.
        if owed_here and outcome.begun:
            store, owed = self._messaging.store, _owed(turn.context.session_id)
            await self._messaging.runtime.core.ends.put(
                End(f"what is owed for session {turn.context.session_id}", lambda: store.set_meta(owed, None))
            )

    @asynccontextmanager
    async def settling(self) -> AsyncIterator[None]:
        """Settle turns that died with the last server, and, for the body of the `async with`, those of other nodes that are reaped here."""
        membership = self._messaging.runtime.core.membership
        name = f"interrupted {self.platform}"

        async def settle() -> None:
            await membership.run_alone(name, self.settle_interrupted)

        with membership.after_reap(settle):
            await settle()
            yield

    async def settle_interrupted(self) -> int:
        """Settle turns that died with the last server: end their sessions with this interface's end reason, and report the interruption once.

        Return how many there were.
        """
        store, found, offset = self._messaging.store, 0, 0
        while True:
            page = await store.list_sessions(SessionFilter(source=self.platform), Page(PAGE, offset))
            for session in page:
                if session.end_reason == BOOT_REASON:
                    found += await self._conclude_interrupted(session.id)
            if len(page) < PAGE:
                return found
            offset += PAGE

    async def _conclude_interrupted(self, session_id: str) -> bool:
        store, mark = self._messaging.store, _owed(session_id)
        replies: list[NewReply] = []
        written = await store.get_meta(mark)
        if written is not None:
            owed = msgspec.json.decode(written)
            for place in owed["places"]:
                replies += self._messaging.platforms.compose(Address(*place), interrupted_text(owed["title"]))
        return await store.conclude_interrupted(session_id, reason=self.one_shot, mark=mark, replies=replies)


def failure_text(turn: Turn, outcome: Outcome, title: str) -> str:
    """Return a failure, marked as one: it must not pass for an answer (SC-6)."""
    if outcome.cause is not None and outcome.cause.kind is CancelCause.DRAIN:
        if turn.input.notices:
            return ""
        return interrupted_text(title)
    if outcome.cause is not None and outcome.cause.kind is CancelCause.SESSION_ENDED:
        return ""
    return f"[{title}: {outcome.state.value}. {outcome.error}]"


def interrupted_text(title: str) -> str:
    """Return the text about work that the end of the server interrupted."""
    return (
        f"[{title}: interrupted. The server was stopped before this was finished; it is not started again by itself.]"
    )


def _owed(session_id: str) -> str:
    return OWED + session_id
