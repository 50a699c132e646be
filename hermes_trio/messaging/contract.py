"""The adapter contract: what a platform must bring, and what the gateway gives to it.

An `Adapter` is a platform behind a `Front` of the runtime, which the gateway makes for it. Its life has two scopes. `open()` is the outer one:
whatever *sending* needs (an HTTP client); it is entered before the first turn can run and left after the last reply was sent. `run()` is the inner
one: *receiving*, until it is cancelled. The gateway supervises `run`, and may end it and start it again; a reply that was computed meanwhile goes out
all the same.

An adapter hands everything that comes in to `self.gateway` and never talks to a lane, a turn or the store by itself.
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

__all__ = [
    "Adapter",
    "AdapterState",
    "Button",
    "Disposition",
    "HubPort",
    "Incoming",
    "Missing",
    "Outgoing",
    "PlatformError",
    "PlatformErrorKind",
    "Received",
    "SendResult",
]

DEFAULT_LIMIT: Final = Limit(4000)


# -- what comes in -----------------------------------------------------------------------------------------------------------------


class Incoming(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a person (or a machine) wrote on a platform.

    `event_id` identifies the platform's event, so that a redelivered one is done once. `anchor` is the message that the answer should be a reply to, empty
    for none; left out, it is `source.message_id`. `addressed` is false for talk in a group that is not meant for the agent: it is ignored. Text that no
    person typed is `LiteralText`: never a command, never an answer to an approval (SC-31).
    """

    source: Source
    text: str | LiteralText
    event_id: str = ""
    anchor: str | None = None
    addressed: bool = True
    payload: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])

    @property
    def plain_text(self) -> str:
        """The text, whoever wrote it."""
        return self.text.text if isinstance(self.text, LiteralText) else self.text


class Disposition(Enum):
    """What became of something that came in. After any of these the adapter may move its cursor on."""

    ACCEPTED = "accepted"
    """Committed; a turn will begin with it, also after a crash."""
    STEERED = "steered"
    """Committed, and handed to the running turn; what that turn does not take up becomes a turn of its own."""
    COMMAND = "command"
    ANSWERED = "answered"
    """It answered an approval."""
    DUPLICATE = "duplicate"
    IGNORED = "ignored"
    """Not addressed to the agent, empty, or from a bot."""
    UNAUTHORISED = "unauthorised"
    PAIRING = "pairing"
    """An unknown person was offered a pairing code."""
    REFUSED = "refused"
    """The conversation's mailbox is full; the person was told."""


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
        """A short ASCII text that platforms can carry in a button: `appr:<id>:<choice>` (below 64 bytes)."""
        return f"appr:{self.approval_id}:{self.choice.value}"

    @staticmethod
    def parse(value: str) -> tuple[str, ApprovalChoice] | None:
        """The approval id and the choice in a button's value, or None if it is none of ours."""
        parts = value.split(":")
        if len(parts) != 3 or parts[0] != "appr" or parts[2] not in {choice.value for choice in ApprovalChoice}:
            return None
        return parts[1], ApprovalChoice(parts[2])


class Outgoing(msgspec.Struct, frozen=True, kw_only=True):
    """One message for a platform. `text` is what a model writes (CommonMark) and is within the adapter's limit; the adapter puts it into its own markup.

    With `plain`, it is sent without markup: the platform refused it with markup. `edits` is the id of a message that this text replaces; if that message
    cannot be edited any more the adapter says so (NOT_FOUND), and the text is sent as a new message. `reply_to` is a wish: a message that is gone does not
    fail the send. `notify` is false for progress that should not make a phone ring.
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
    """How a send ended (GW-4, GW-5). `ambiguous`: the platform may have it although no answer came."""

    success: bool
    message_id: str = ""
    continuation_message_ids: tuple[str, ...] = ()
    error: str = ""
    error_kind: PlatformErrorKind | None = None
    retryable: bool = False
    retry_after: float | None = None
    ambiguous: bool = False
    missing: Missing | None = None

    @classmethod
    def sent(cls, message_id: str | int = "", *more: str) -> SendResult:
        """It is there. `message_id` is the last one if it took several."""
        return cls(success=True, message_id=str(message_id), continuation_message_ids=more)

    @classmethod
    def failed(cls, error: PlatformError) -> SendResult:
        """It was refused, or could not be brought there."""
        return cls(
            success=False,
            error=str(error),
            error_kind=error.kind,
            retryable=not error.permanent,
            retry_after=error.retry_after,
            ambiguous=error.ambiguous,
            missing=error.missing,
        )


# -- the adapter -------------------------------------------------------------------------------------------------------------------


class AdapterState(Enum):
    """Where an adapter is in its life (GW-192)."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    RETRYING = "retrying"
    FATAL = "fatal"
    DISCONNECTED = "disconnected"
    STANDBY = "standby"
    """Another node that shares the store runs it; this one takes over when that node stops or dies."""


class HubPort(Protocol):
    """What an adapter may ask of the gateway. All of it is safe to cancel: what was committed stays, what was not leaves no trace."""

    async def receive(self, adapter: Adapter, incoming: Incoming) -> Received:
        """Hand over what came in. Durable when it returns; whatever must be said to the person is in the outbox."""
        ...

    async def approval_clicked(self, adapter: Adapter, source: Source, approval_id: str, choice: ApprovalChoice) -> str:
        """A person pressed a button below an approval; returns a short text to show (what was done, or why not)."""
        ...

    async def get_cursor(self, adapter: Adapter) -> str | None:
        """How far the adapter has read, across restarts."""
        ...

    async def set_cursor(self, adapter: Adapter, value: str) -> None:
        """Note how far the adapter has read; after `receive` has returned."""
        ...


class Adapter:
    """Subclass it for a platform: `platform`, `limit`, `run` and `send` are needed, the rest has a working default.

    The prefix of typed commands is `command_prefix`. `typing_seconds` is how often `typing` must be repeated to stay visible; None means that there
    is no such thing. With `supports_edit`, answers may be shown while they are being written (`edit`).
    """

    supports_async_delivery: ClassVar[Literal[True]] = True

    limit: Limit = DEFAULT_LIMIT
    command_prefix: str = "/"
    typing_seconds: float | None = None
    supports_edit: bool = False
    own_commands: Sequence[tuple[str, str]] = ()
    """Commands that the adapter carries out itself, with what they do, for the list of commands."""
    model: str = ""
    """The model route that answers this adapter's turns; empty for the default."""
    bot_name: str = ""
    """The name by which commands can be addressed to this bot (`/stop@name`); empty accepts every addressee."""
    interactive: bool = True
    """Whether a person reads what is sent, and can answer an approval."""
    singleton: bool = True
    """Whether `run` is for one node at a time, where several share the store (a bot has one connection); False if every node receives for itself."""
    platform: str = ""

    gateway: HubPort
    """Put there by the gateway before `run` is called."""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """What sending needs, for as long as something may be sent. Entering must not need the platform to be there."""
        yield

    async def run(self, connected: Callable[[], None]) -> None:
        """Connect, call `connected()` once messages can come in, and receive until cancelled.

        Raise `PlatformError` when that is not possible (any more): a permanent one (a bad token) ends the adapter for good, every other error and a
        plain return are tried again after 30, 60, 120, 240, then 300 s. Turns are not touched by it.
        """
        raise NotImplementedError

    async def send(self, message: Outgoing) -> SendResult:
        """Send or edit one message. Failing by raising `PlatformError` is as good as returning `SendResult.failed(error)`.

        Cancelling it leaves open whether the platform has the message; the outbox then sends it again with a label.
        """
        raise NotImplementedError

    async def edit(self, chat_id: str, thread_id: str, message_id: str, text: str) -> SendResult:
        """Show `text` in a message that was sent before, while more of it is still being written. It is not the last word: that one comes by `send`."""
        return SendResult(
            success=False, error="this platform cannot edit messages", error_kind=PlatformErrorKind.UNKNOWN
        )

    async def typing(self, chat_id: str, thread_id: str) -> None:
        """Show that the agent is working. Called every `typing_seconds` while a turn runs; errors are ignored."""

    def split(self, text: str) -> list[str]:
        """The messages that a long text becomes, each within the limit."""
        return split_text(text, self.limit)

    def anchor(self, context: SessionContext) -> str:
        """The message that an answer in this context replies to; the inbound message by default (GW-194)."""
        return context.message_id

    def on_event(self, context: SessionContext, event: Mapping[str, Any]) -> None:
        """Follow the turns of this platform live (`message.delta`, `tool.started`, …). It must not block and must not raise."""

    async def on_turn_start(self, turn: Turn) -> None:
        """Called before each turn of this platform's conversations."""

    async def on_turn_end(self, outcome: Outcome) -> None:
        """Called once for each turn, after its commit."""
