"""What a chat sees while a turn runs: a typing sign, the answer as it is being written, and the questions that wait for a person.

A `TurnFeed` is the turn's event sink: it never blocks, and what takes time is done by small tasks in the gateway's scope. It outlives its turn,
because a child that the turn left behind may still ask for an approval.
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

__all__ = ["Preview", "Previews", "Prompts", "TurnFeed"]

EDIT_SECONDS: Final = 0.8
FIRST_CHARACTERS: Final = 24
"""Below this a preview would only flicker."""

TYPING_BOUND: Final = 1.5
PREVIEW_BOUND: Final = 30.0
COMMAND_SHOWN: Final = 1500
"""Characters of a command that stand in the question itself; a longer one is shown before it, in as many messages as it takes."""
COMMAND_LONGEST: Final = 12_000
"""Characters of a command that a chat is shown; a longer one is not asked about there, because nobody would read what they approve."""


class Preview:
    """An answer that is shown while it is being written. `done` is set when nothing of it is under way any more."""

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
        """This is what there is now."""
        self.text = text
        self._changed.set()

    def close(self) -> None:
        """The last word comes by the outbox; show nothing more."""
        self.closed = True
        self._changed.set()

    async def run(self) -> None:
        """Show what there is, at most once in a while, until closed."""
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
        # A preview is a courtesy: when the platform does not want it now, there is none, and the whole answer comes in the end.
        return result.success


class Previews:
    """The previews whose last word has not been sent yet, by turn."""

    def __init__(self) -> None:
        self._open: dict[str, Preview] = {}

    def __len__(self) -> int:
        return len(self._open)

    def put(self, turn_id: str, preview: Preview) -> None:
        """A turn shows its answer."""
        self._open[turn_id] = preview

    def forget(self, turn_id: str) -> None:
        """The last word has been sent, or there is none."""
        preview = self._open.pop(turn_id, None)
        if preview is not None:
            preview.close()

    async def message_of(self, turn_id: str) -> str:
        """The message that the last word replaces, once nothing of the preview is under way."""
        preview = self._open.get(turn_id)
        if preview is None:
            return ""
        preview.close()
        with trio.move_on_after(PREVIEW_BOUND):
            await preview.done.wait()
        return preview.message_id


class Prompts:
    """Where the questions that wait for a person were sent, so that they can be settled in place."""

    def __init__(self) -> None:
        self._sent: dict[str, tuple[Address, str, str]] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def sent(self, approval_id: str, address: Address, message_id: str, text: str) -> None:
        """A question is there."""
        self._sent[approval_id] = (address, message_id, text)

    def settle(self, approval_id: str) -> tuple[Address, str, str] | None:
        """A question is over: where it is, or None if it was never sent."""
        return self._sent.pop(approval_id, None)


class TurnFeed:
    """See the module. Called with each event of the turn."""

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
        """The turn begins."""
        self.turn_id = turn_id
        adapter, settings = self._platform.adapter, self._platform.settings
        if settings.typing and adapter.typing_seconds is not None:
            self._messaging.spawn(self._type, adapter.typing_seconds)
        if settings.stream and adapter.supports_edit:
            preview = Preview(self._platform, self.address, self._reply_to)
            if self._messaging.spawn(preview.run):
                self.preview = preview
                self._previews.put(turn_id, preview)

    def finish(self) -> None:
        """The turn is over and committed. A preview stays until its last word has been sent."""
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
                self._asking = self._messaging.spawn(self._ask)

    async def _type(self, seconds: float) -> None:
        adapter, chat, thread = self._platform.adapter, self.address.chat_id or "", self.address.thread_id or ""
        with working("typing", f"{adapter.platform}:{chat}"):
            while not self._over.is_set():
                # While a person is asked something, it is not the agent who is expected to write.
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
        """Nobody can approve what the chat cannot show whole: the agent is told so, and what would do."""
        length = len(str(event["command"]))
        reason = (
            f"the command has {length} characters, and a chat is shown {COMMAND_LONGEST} at most; what cannot be shown whole is not asked about:"
            " write it to a file and run the file, or split it up"
        )
        if self._messaging.approvals is not None:
            await self._messaging.approvals.withdraw(str(event["approval_id"]), reason)
        await self._messaging.post(self.address, f"A command was refused: {reason}.", {"reply_to": self._reply_to})

    async def _settle(self, event: Mapping[str, Any]) -> None:
        """Say at the question what became of it."""
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
    """The whole command of a question, as a code block that nothing in the command can end."""
    shown = str(event.get("command", "")).replace("``", "`\u200b`")
    return f"```\n{shown}\n```"


def question_text(event: Mapping[str, Any], prefix: str) -> str:
    """What a person is asked. A long command stands in messages of its own before the question."""
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
    """What became of a question."""
    if event["event"] == "approval.expired":
        reason = str(event.get("reason", ""))
        return (
            "Refused: nobody answered in time." if reason == "timeout" else f"Withdrawn: {reason or 'the work ended'}."
        )
    choice = str(event.get("choice", ""))
    return "Refused." if choice == "deny" else f"Approved ({choice})."
