"""The conversations of a chat platform: the `Interface` of every adapter.

It builds a turn's input, chooses the session of a message (reset policies apply here, at the turn boundary), and composes the reply after each
outcome. The reply is committed with the turn; the senders deliver it afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import trio

from hermes_trio.runtime.budget import Budget
from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.interface import Interface
from hermes_trio.runtime.outcome import STORE_ERROR, CancelCause, Outcome, TurnState
from hermes_trio.runtime.ports import InboxRow, NewReply, RuntimeStore, TurnInput
from hermes_trio.runtime.turn import EventSink, Turn

from .addresses import Address
from .command_text import is_silence_narration, is_silent_reply
from .core import MessagingCore
from .feed import Previews, Prompts, TurnFeed
from .platforms import Platform
from .remote_lanes import NEWER_MESSAGE
from .reset_policy import policy_for, reset_reason

NOTHING_SAID: Final = "(The agent ended its turn without an answer.)"
REFUSED: Final = "(This message could not be handled. It is kept, and the operator can queue it again.)"
INTERRUPTED: Final = (
    "(Interrupted: the server was stopped before this was finished. It is not continued by itself; send it again if it is"
    " still wanted.)"
)


def reply_text(turn: Turn, outcome: Outcome) -> str:
    """Return the text for the person after a turn; empty for none. Texts of exceptions are never shown."""
    text = outcome.text.strip()
    if outcome.state is TurnState.COMPLETED:
        if is_silent_reply(text) or is_silence_narration(text):
            return ""
        note = f"({outcome.error})" if outcome.error else ""
        return "\n\n".join(part for part in (text, note) if part) or NOTHING_SAID
    if outcome.state is TurnState.FAILED:
        # The store has refused the transcript of this turn, with the message in it.
        lost = _lost(turn) if outcome.error_code == STORE_ERROR else ""
        note = f". This conversation does not contain the message: {lost}" if lost else ""
        return "\n\n".join(part for part in (text, f"(This failed: {outcome.error}{note})") if part)
    assert outcome.cause is not None
    match outcome.cause.kind:
        case CancelCause.DRAIN:
            # Notices that a drain interrupted are delivered again after the next start.
            return "" if turn.input.notices else "\n\n".join(part for part in (text, INTERRUPTED) if part)
        case CancelCause.STOP:
            # The person who stopped it gets the receipt; a turn that a newer message interrupted sends no reply.
            return f"{text}\n\n(stopped)" if text and outcome.cause is not NEWER_MESSAGE else ""
        case CancelCause.SESSION_ENDED:
            return ""
        case _:
            return "\n\n".join(part for part in (text, f"(Stopped: {outcome.cause})") if part)


def _lost(turn: Turn) -> str:
    """Return the messages of a turn whose transcript the store has refused: its own, and those that it was steered by."""
    used = turn.used_rows()
    steered = [text for row, text in turn.steered if row in used]
    return "; ".join([*(() if turn.input.notices else (turn.title(),)), *steered])


class ChatInterface(Interface):
    """The interface of one adapter, registered with the runtime while the gateway is open."""

    def __init__(self, messaging: MessagingCore, platform: Platform, previews: Previews, prompts: Prompts) -> None:
        self.platform = platform.name
        self.interactive = platform.adapter.interactive
        self._messaging = messaging
        self._platform = platform
        self._previews = previews
        self._prompts = prompts
        self._turns: dict[str, Turn] = {}
        self._told_model: dict[str, str] = {}
        self._told_user: dict[str, str] = {}

    def prepare(self, rows: Sequence[InboxRow]) -> TurnInput:
        given = super().prepare(rows)
        note = self._told_model.get(rows[0].session_key, "")
        content: Any = given.payload.get("content", "")
        return msgspec.structs.replace(
            given, instructions=note, content=content or "", model=self._platform.adapter.model
        )

    def budget(self, rows: Sequence[InboxRow]) -> Budget | None:
        seconds = self._platform.settings.deadline
        return None if seconds is None else Budget(seconds=seconds)

    def sink(self, context: SessionContext) -> EventSink | None:
        return TurnFeed(self._messaging, self._platform, context, self._previews, self._prompts)

    async def session_for(self, store: RuntimeStore, context: SessionContext) -> str:
        """Return the session of the key, a new one if the reset policy says so. Without a readable last activity nothing is reset."""
        key = context.session_key
        policy = policy_for(self._platform.settings, _chat_type(key))
        if policy.mode != "none":
            found = await self._messaging.store.session_of(key)
            if found is not None and found.ended_at is None:
                now = trio.current_time()
                ages = [now - job.node.opened_at for job in self._messaging.runtime.supervisor.jobs(found.id)]
                reason = reset_reason(
                    policy, last_active=found.last_active, now=self._messaging.runtime.core.clock(), job_ages=ages
                )
                if reason is not None:
                    self._told_model[key] = reason.told_model()
                    if policy.notify:
                        self._told_user[key] = reason.told_user(policy)
                    # Before the new session: if this fails, the reset is tried again, and nothing allowed here can outlive it.
                    await self._messaging.end_conversation(key, found.id)
                    return await self._messaging.store.new_session(key, source=self.platform, reason=reason.value)
        return await super().session_for(store, context)

    def replies(self, turn: Turn, outcome: Outcome) -> Sequence[NewReply]:
        feed = turn.sink
        assert isinstance(feed, TurnFeed)
        text = reply_text(turn, outcome)
        reset = self._told_user.pop(outcome.session_key, "")
        text = "\n\n".join(part for part in (reset, text) if part)
        payload: dict[str, Any] = {"reply_to": self._platform.adapter.anchor(turn.context), "turn": turn.id}
        if feed.preview is not None:
            feed.preview.close()
            payload |= {"preview": turn.id, "edits": feed.preview.message_id}
        return self._messaging.platforms.compose(feed.address, text, payload) if text else ()

    def refusal(self, rows: Sequence[InboxRow], reason: str) -> Sequence[NewReply]:
        where = rows[-1].routing
        address = Address(self.platform, where.chat_id or where.user_id, where.thread_id or None)
        return self._messaging.platforms.compose(address, REFUSED, {"reply_to": self._platform.adapter.anchor(where)})

    async def on_turn_start(self, turn: Turn) -> None:
        self._turns[turn.id] = turn
        feed = turn.sink
        assert isinstance(feed, TurnFeed)
        feed.start(turn.id)
        await self._platform.adapter.on_turn_start(turn)

    async def on_turn_end(self, outcome: Outcome) -> None:
        turn = self._turns.pop(outcome.turn_id)
        feed = turn.sink
        assert isinstance(feed, TurnFeed)
        feed.finish()
        if outcome.committed:
            self._told_model.pop(turn.context.session_key, None)
        if feed.preview is not None and not reply_text(turn, outcome):
            self._previews.forget(turn.id)
        await self._platform.adapter.on_turn_end(outcome)


def _chat_type(key: str) -> str:
    parts = key.split(":")
    return parts[3] if len(parts) > 3 else ""
