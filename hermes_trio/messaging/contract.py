"""The adapter contract: what a platform implements, and what the gateway offers to it.

The gateway registers an `Interface` with the runtime for each `Adapter`. An adapter has two scopes. `open()` is the outer one, for what *sending*
needs (an HTTP client): it is entered before the first turn can run and left after the last reply was sent. `run()` is the inner one, for *receiving*,
until it is cancelled. The gateway supervises `run`, and may end and restart it; replies are sent meanwhile.

An adapter passes every inbound event to `self.gateway`. It does not use lanes, turns or the store itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from enum import Enum
from typing import Any, ClassVar, Final, Literal, Protocol

import msgspec

from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.outcome import Outcome
from hermes_trio.runtime.turn import Turn
from hermes_trio.store.records import ApprovalChoice

from .chunking import Limit, split_text
from .command_text import LiteralText
from .errors import Missing, PlatformError, PlatformErrorKind
from .session_keys import Source

DEFAULT_LIMIT: Final = Limit(4000)


# -- what comes in -----------------------------------------------------------------------------------------------------------------


class Incoming(msgspec.Struct, frozen=True, kw_only=True):
    """An inbound message of a person or a machine.

    `event_id` identifies the platform's event, so that a redelivered one is handled once. `anchor` is the message that the answer should reply to,
    empty for none; by default it is `source.message_id`. `addressed` is false for talk in a group that is not meant for the agent: it is ignored.
    Text that no person typed is `LiteralText`: never a command, never an answer to an approval (SC-31).
    """

    source: Source
    text: str | LiteralText
    event_id: str = ""
    anchor: str | None = None
    addressed: bool = True
    payload: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])

    @property
    def plain_text(self) -> str:
        """Return the text, also of a `LiteralText`."""
        return self.text.text if isinstance(self.text, LiteralText) else self.text


class Disposition(Enum):
    """What became of an inbound message. After any of these the adapter may advance its cursor."""

    ACCEPTED = "accepted"
    """Committed; a turn will begin with it, also after a crash."""
    STEERED = "steered"
    """Committed, and passed to the running turn; if that turn does not use it, it becomes a turn of its own."""
    COMMAND = "command"
    ANSWERED = "answered"
    """It answered an approval."""
    DUPLICATE = "duplicate"
    """An earlier delivery of this event was handled to its end."""
    IGNORED = "ignored"
    """Not addressed to the agent, empty, or from a bot."""
    UNAUTHORISED = "unauthorised"
    PAIRING = "pairing"
    """An unknown person was offered a pairing code."""
    REFUSED = "refused"
    """The conversation's inbox is full; the person was told. Nothing is stored, and the same event may be delivered again."""


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `HubPort.receive`."""

    disposition: Disposition
    session_key: str = ""
    text: str = ""


# -- what goes out -----------------------------------------------------------------------------------------------------------------


class Button(msgspec.Struct, frozen=True):
    """A choice below a message. `value` comes back through `HubPort.approval_clicked`: an approval id and a choice."""

    label: str
    approval_id: str
    choice: ApprovalChoice

    @property
    def value(self) -> str:
        """Return a short ASCII text that platforms can carry in a button: `appr:<id>:<choice>` (below 64 bytes)."""
        return f"appr:{self.approval_id}:{self.choice.value}"

    @staticmethod
    def parse(value: str) -> tuple[str, ApprovalChoice] | None:
        """Return the approval id and the choice in a button's value, or None if it is not one of ours."""
        parts = value.split(":")
        if len(parts) != 3 or parts[0] != "appr" or parts[2] not in {choice.value for choice in ApprovalChoice}:
            return None
        return parts[1], ApprovalChoice(parts[2])


class Outgoing(msgspec.Struct, frozen=True, kw_only=True):
    """One message for a platform. `text` is CommonMark from a model, within the adapter's limit; the adapter converts it to its own markup.

    With `plain`, it is sent without markup, after the platform refused it with markup. `edits` is the id of a message that this text replaces; if
    that message cannot be edited any more the adapter reports NOT_FOUND, and the text is sent as a new message. `reply_to` is optional: a deleted
    message does not fail the send. `notify` is false for progress that should not notify a phone.
    """

    chat_id: str
    thread_id: str = ""
    text: str
    reply_to: str = ""
    edits: str = ""
    plain: bool = False
    buttons: tuple[Button, ...] = ()
    notify: bool = True
    payload: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])


class SendResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a send (GW-4, GW-5). `ambiguous`: the platform may have the message although the send failed.

    `unanswered`: no response that can be read arrived, so that the platform probably has the message.
    """

    success: bool
    message_id: str = ""
    continuation_message_ids: tuple[str, ...] = ()
    error: str = ""
    error_kind: PlatformErrorKind | None = None
    retryable: bool = False
    retry_after: float | None = None
    ambiguous: bool = False
    unanswered: bool = False
    missing: Missing | None = None

    @classmethod
    def sent(cls, message_id: str | int = "", *more: str) -> SendResult:
        """Return a success. `message_id` is the last one of several."""
        return cls(success=True, message_id=str(message_id), continuation_message_ids=more)

    @classmethod
    def failed(cls, error: PlatformError) -> SendResult:
        """Return a failure: refused, or not delivered."""
        return cls(
            success=False,
            error=str(error),
            error_kind=error.kind,
            retryable=not error.permanent,
            retry_after=error.retry_after,
            ambiguous=error.ambiguous,
            unanswered=error.ambiguous and error.code in (None, 200),
            missing=error.missing,
        )


# -- the adapter -------------------------------------------------------------------------------------------------------------------


class AdapterState(Enum):
    """The state of an adapter (GW-192)."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    RETRYING = "retrying"
    FATAL = "fatal"
    DISCONNECTED = "disconnected"
    STANDBY = "standby"
    """Another node of the store runs it; this one takes over when that node stops or dies."""


class HubPort(Protocol):
    """What the gateway offers to an adapter. All of it is safe to cancel: what was committed stays, the rest has no effect."""

    async def receive(self, adapter: Adapter, incoming: Incoming) -> Received:
        """Handle an inbound message. It is durable when this returns; replies to the person are in the outbox."""
        ...

    async def approval_clicked(self, adapter: Adapter, source: Source, approval_id: str, choice: ApprovalChoice) -> str:
        """Handle a press of an approval's button. Return a short text to show: what was done, or why not."""
        ...

    async def get_cursor(self, adapter: Adapter) -> str | None:
        """Return how far the adapter has read, across restarts."""
        ...

    async def set_cursor(self, adapter: Adapter, value: str) -> None:
        """Store how far the adapter has read, after `receive` has returned."""
        ...


class Adapter:
    """Base class of adapters: `platform`, `limit`, `run` and `send` are required, the rest has a working default.

    `command_prefix` is the prefix of typed commands. `typing_seconds` is how often `typing` must be repeated to stay visible; None if the platform
    has no such sign. With `supports_edit`, answers may be shown while they are being written, and a settled approval shows its result and loses its
    buttons; both need `edit`.
    """

    supports_async_delivery: ClassVar[Literal[True]] = True

    limit: Limit = DEFAULT_LIMIT
    command_prefix: str = "/"
    typing_seconds: float | None = None
    supports_edit: bool = False
    own_commands: Sequence[tuple[str, str]] = ()
    """Commands that the adapter executes itself, with their descriptions."""
    model: str = ""
    """The model route for this adapter's turns; empty for the default."""
    bot_name: str = ""
    """The name by which commands can be addressed to this bot (`/stop@name`); empty accepts every addressee."""
    interactive: bool = True
    """Whether a person reads the replies and can answer an approval."""
    singleton: bool = True
    """Whether `run` is for one node at a time (a bot has one connection); False if every node receives for itself."""
    platform: str = ""

    gateway: HubPort
    """Set by the gateway before `run` is called."""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Open what sending needs, for as long as something may be sent. Entering must work while the platform is unreachable."""
        yield

    async def run(self, connected: Callable[[], None]) -> None:
        """Connect, call `connected()` once messages can arrive, and receive until cancelled.

        Raise `PlatformError` if that is not possible: a permanent one (a bad token) ends the adapter; every other error, and a plain return, is
        retried after 30, 60, 120, 240, then 300 s. Turns continue meanwhile.
        """
        raise NotImplementedError

    async def send(self, message: Outgoing) -> SendResult:
        """Send or edit one message. Raising `PlatformError` is equivalent to returning `SendResult.failed(error)`.

        If it is cancelled, it is unknown whether the platform has the message; the outbox then sends it again with a label.
        """
        raise NotImplementedError

    async def edit(self, chat_id: str, thread_id: str, message_id: str, text: str) -> SendResult:
        """Show `text` in a message that was sent before, while the rest is still being written. The final text is sent by `send`."""
        return SendResult(
            success=False, error="this platform cannot edit messages", error_kind=PlatformErrorKind.UNKNOWN
        )

    async def typing(self, chat_id: str, thread_id: str) -> None:
        """Show that the agent is working. Called every `typing_seconds` while a turn runs; errors are ignored."""

    def split(self, text: str) -> list[str]:
        """Split a long text into messages within the limit."""
        return split_text(text, self.limit)

    def anchor(self, context: SessionContext) -> str:
        """Return the message that an answer in this context replies to; by default the inbound message (GW-194)."""
        return context.message_id

    def on_event(self, context: SessionContext, event: Mapping[str, Any]) -> None:
        """Observe the turns of this platform (`message.delta`, `tool.started`, …). Must not block or raise."""

    async def on_turn_start(self, turn: Turn) -> None:
        """Called before each turn of this platform's conversations."""

    async def on_turn_end(self, outcome: Outcome) -> None:
        """Called once for each turn, after its commit."""
