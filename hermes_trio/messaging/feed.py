"""What a chat shows while a turn runs: a typing sign, the answer as it is being written, and requests for approval.

A `TurnFeed` is the turn's event sink: it never blocks; slow actions run as small tasks in the gateway's scope. It outlives its turn, because a child
that the turn left running may still ask for an approval.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import trio

from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.tree import working

from .addresses import Address
from .contract import Outgoing, PlatformError, SendResult
from .core import MessagingCore
from .platforms import Platform

EDIT_SECONDS: Final = 0.8
FIRST_CHARACTERS: Final = 24
"""A shorter preview would only flicker."""

TYPING_BOUND: Final = 1.5
PREVIEW_BOUND: Final = 30.0
COMMAND_SHOWN: Final = 1500
"""The maximum of characters of a command inside the question; a longer one is shown before it, in as many messages as necessary."""
COMMAND_LONGEST: Final = 12_000
"""A longer command is refused instead of shown: a person could not read what they approve."""


class Preview:
    """An answer that is shown while it is being written. `done` is set when no edit is in progress any more."""

    def __init__(self, platform: Platform, address: Address, reply_to: str) -> None:
        self._platform = platform
        self._address = address
        self._reply_to = reply_to
        self._changed = trio.Event()
        self.text = ""
        self.message_id = ""
        self.closed = False
        self.done = trio.Event()

    def show(self, text: str) -> None:
        """Set the text to show."""
        self.text = text
        self._changed.set()

    def close(self) -> None:
        """Show nothing more: the final text is sent by the outbox."""
        self.closed = True
        self._changed.set()

    async def run(self) -> None:
        """Show the text, at a limited rate, until closed."""
        try:
            with working("preview", f"{self._address.platform}:{self._address.chat_id}"):
                shown = ""
                while not self.closed:
                    await self._changed.wait()
                    self._changed = trio.Event()
                    text = self.text.strip()
                    if self.closed or text == shown or (not self.message_id and len(text) < FIRST_CHARACTERS):
                        continue
                    if not await self._put(text):
                        return
                    shown = text
                    with trio.move_on_after(EDIT_SECONDS):
                        while not self.closed:
                            await self._changed.wait()
                            if not self.closed:
                                self._changed = trio.Event()
                    if self.text.strip() != shown:
                        self._changed.set()
        finally:
            self.done.set()

    async def _put(self, text: str) -> bool:
        adapter, address = self._platform.adapter, self._address
        pieces = adapter.split(f"{text} …")
        piece = pieces[0] if pieces else "…"
        chat, thread = address.chat_id or "", address.thread_id or ""
        try:
            if self.message_id:
                result = await adapter.edit(chat, thread, self.message_id, piece)
            else:
                result = await adapter.send(
                    Outgoing(chat_id=chat, thread_id=thread, text=piece, reply_to=self._reply_to, notify=False)
                )
                self.message_id = result.message_id
        except PlatformError as error:
            result = SendResult.failed(error)
        # Previews are optional: if the platform refuses one, the whole answer is still sent at the end.
        return result.success


class Previews:
    """The previews whose final text has not been sent yet, by turn."""

    def __init__(self) -> None:
        self._open: dict[str, Preview] = {}

    def __len__(self) -> int:
        return len(self._open)

    def put(self, turn_id: str, preview: Preview) -> None:
        """Add the preview of a turn."""
        self._open[turn_id] = preview

    def forget(self, turn_id: str) -> None:
        """Remove the preview of a turn: its final text has been sent, or there is none."""
        preview = self._open.pop(turn_id, None)
        if preview is not None:
            preview.close()

    async def message_of(self, turn_id: str) -> str:
        """Return the message that the final text replaces, after the last edit of the preview."""
        preview = self._open.get(turn_id)
        if preview is None:
            return ""
        preview.close()
        with trio.move_on_after(PREVIEW_BOUND):
            await preview.done.wait()
        return preview.message_id


class Prompts:
    """The messages of pending approvals, so that they can be edited when they end."""

    def __init__(self) -> None:
        self._sent: dict[str, tuple[Address, str, str]] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def sent(self, approval_id: str, address: Address, message_id: str, text: str) -> None:
        """Record the message of a question."""
        self._sent[approval_id] = (address, message_id, text)

    def settle(self, approval_id: str) -> tuple[Address, str, str] | None:
        """Return the message of a question that has ended, or None if it was never sent."""
        return self._sent.pop(approval_id, None)


class TurnFeed:
    """The event sink of a turn; see the module."""

    def __init__(
        self,
        messaging: MessagingCore,
        platform: Platform,
        context: SessionContext,
        previews: Previews,
        prompts: Prompts,
    ) -> None:
        self._messaging = messaging
        self._platform = platform
        self._context = context
        self._previews = previews
        self._prompts = prompts
        self._reply_to = platform.adapter.anchor(context)
        self._questions: list[Mapping[str, Any]] = []
        self._asking = False
        self._waiting = 0
        self._text: list[str] = []
        self._over = trio.Event()
        self.address = Address(platform.name, context.chat_id, context.thread_id or None)
        self.preview: Preview | None = None
        self.turn_id = ""

    def start(self, turn_id: str) -> None:
        """Handle the start of the turn."""
        self.turn_id = turn_id
        adapter, settings = self._platform.adapter, self._platform.settings
        if settings.typing and adapter.typing_seconds is not None:
            self._messaging.spawn(f"the typing sign of turn {turn_id}", self._type, adapter.typing_seconds)
        if settings.stream and adapter.supports_edit:
            preview = Preview(self._platform, self.address, self._reply_to)
            if self._messaging.spawn(f"the preview of turn {turn_id}", preview.run):
                self.preview = preview
                self._previews.put(turn_id, preview)

    def finish(self) -> None:
        """Handle the committed end of the turn. A preview stays until its final text has been sent."""
        self._over.set()

    def __call__(self, event: Mapping[str, Any]) -> None:
        name = event.get("event")
        self._platform.adapter.on_event(self._context, event)
        if name == "message.delta" and self.preview is not None:
            self._text.append(str(event.get("delta", "")))
            self.preview.show("".join(self._text))
        elif name == "tool.started":
            self._text.clear()
        elif name in ("approval.request", "approval.responded", "approval.expired"):
            self._waiting += 1 if name == "approval.request" else -1
            self._questions.append(event)
            if not self._asking:
                self._asking = self._messaging.spawn(f"asking for an approval of turn {self.turn_id}", self._ask)

    async def _type(self, seconds: float) -> None:
        adapter, chat, thread = self._platform.adapter, self.address.chat_id or "", self.address.thread_id or ""
        with working("typing", f"{adapter.platform}:{chat}"):
            while not self._over.is_set():
                # No typing sign while a person is asked something.
                if self._waiting <= 0:
                    with trio.move_on_after(TYPING_BOUND):
                        try:
                            await adapter.typing(chat, thread)
                        except PlatformError:
                            pass
                with trio.move_on_after(seconds):
                    await self._over.wait()

    async def _ask(self) -> None:
        try:
            with working("prompt", f"{self.address.platform}:{self.address.chat_id}"):
                while self._questions:
                    event = self._questions.pop(0)
                    length = len(str(event.get("command", "")))
                    if event["event"] == "approval.request" and length > COMMAND_LONGEST:
                        await self._refuse_long(event)
                    elif event["event"] == "approval.request":
                        if length > COMMAND_SHOWN:
                            shown = {"reply_to": self._reply_to, "question": event["approval_id"]}
                            await self._messaging.post(self.address, fenced_command(event), shown)
                        await self._messaging.post(
                            self.address,
                            question_text(event, self._platform.adapter.command_prefix),
                            {
                                "reply_to": self._reply_to,
                                "approval_id": event["approval_id"],
                                "choices": list(event["choices"]),
                            },
                        )
                    else:
                        await self._settle(event)
        finally:
            self._asking = False

    async def _refuse_long(self, event: Mapping[str, Any]) -> None:
        """Refuse a command that is too long to be shown whole; the agent receives the reason and the remedy."""
        length = len(str(event["command"]))
        reason = (
            f"the command has {length} characters, and a chat is shown {COMMAND_LONGEST} at most; what cannot be shown whole is not asked about:"
            " write it to a file and run the file, or split it up"
        )
        if self._messaging.approvals is not None:
            await self._messaging.approvals.withdraw(str(event["approval_id"]), reason)
        await self._messaging.post(self.address, f"A command was refused: {reason}.", {"reply_to": self._reply_to})

    async def _settle(self, event: Mapping[str, Any]) -> None:
        """Edit the message of a question to show its result."""
        result = settled_text(event)
        place = self._prompts.settle(str(event["approval_id"]))
        adapter = self._platform.adapter
        if place is not None and adapter.supports_edit:
            address, message_id, text = place
            try:
                done = await adapter.edit(
                    address.chat_id or "", address.thread_id or "", message_id, f"{text}\n\n{result}"
                )
            except PlatformError as error:
                done = SendResult.failed(error)
            if done.success:
                return
        if event["event"] == "approval.expired":
            await self._messaging.post(self.address, result)


def fenced_command(event: Mapping[str, Any]) -> str:
    """Return the whole command of a question as a code block that nothing in the command can end."""
    shown = str(event.get("command", "")).replace("``", "`\u200b`")
    return f"```\n{shown}\n```"


def question_text(event: Mapping[str, Any], prefix: str) -> str:
    """Return the text of a question. A long command is sent before it, in messages of its own."""
    length = len(str(event.get("command", "")))
    shown = fenced_command(event) if length <= COMMAND_SHOWN else f"The command is above, whole: {length} characters."
    why = str(event.get("description", "")) or "this needs your approval"
    always = " `always`," if event.get("allow_permanent") else ""
    return (
        f"**Approval needed**: {why}\n\n{shown}\n\n"
        f"Answer `yes`, `session`,{always} or `no`; or {prefix}approve and {prefix}deny with a reason."
        f" Without an answer within {float(event.get('timeout', 60)):g} s it is refused."
    )


def settled_text(event: Mapping[str, Any]) -> str:
    """Return the text that shows the result of a question."""
    if event["event"] == "approval.expired":
        reason = str(event.get("reason", ""))
        return "Refused: no answer in time." if reason == "timeout" else f"Withdrawn: {reason or 'the work ended'}."
    choice = str(event.get("choice", ""))
    return "Refused." if choice == "deny" else f"Approved ({choice})."
