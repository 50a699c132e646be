"""A chat platform in memory: `say` sends a message of a user, `sent` has the messages of the agent, and faults can be injected.

It is an adapter like any other, so that a gateway uses its real code to receive and send; only the network is missing.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs
import trio

from hermes_trio.messaging.chunking import Limit
from hermes_trio.messaging.command_text import LiteralText
from hermes_trio.messaging.contract import Adapter, Incoming, Outgoing, PlatformError, Received, SendResult
from hermes_trio.messaging.session_keys import Source
from hermes_trio.store.records import ApprovalChoice

_instances = itertools.count(1)


@attrs.define(eq=False)
class Delivered:
    """A message in a chat. `edits` are the texts that it had before, oldest first."""

    message_id: str
    chat: str
    thread: str
    text: str
    reply_to: str
    message: Outgoing
    edits: list[str] = attrs.Factory(list[str])


class MemoryPlatform(Adapter):
    """The adapter and the controls of a test. `connect_faults` and `send_faults` are raised one by one; None lets one attempt pass."""

    def __init__(
        self, platform: str = "memory", *, limit: int = 4000, edits: bool = False, typing: float | None = None
    ):
        self.platform = platform
        self.limit = Limit(limit)
        self.supports_edit = edits
        self.typing_seconds = typing
        self.sent: list[Delivered] = []
        self.connect_times: list[float] = []
        self.typed: list[tuple[str, str]] = []
        self.connect_faults: deque[BaseException | None] = deque()
        self.send_faults: deque[BaseException | None] = deque()
        self.refuses: Callable[[Outgoing], PlatformError | None] = lambda message: None
        self.gate: trio.Event | None = None
        """If not None, sends wait for this event after the platform has taken the message."""
        self._changed = trio.Event()
        self._events = 0
        self._instance = next(_instances)
        self._broken = trio.Event()
        self._breaks: BaseException | None = None

    @property
    def connects(self) -> int:
        """Return the number of attempts to connect."""
        return len(self.connect_times)

    # -- the adapter -----------------------------------------------------------------------------------------------------------------

    async def run(self, connected: Callable[[], None]) -> None:
        self.connect_times.append(trio.current_time())
        self._tell()
        self._broken = trio.Event()
        self._breaks = None
        fault = self.connect_faults.popleft() if self.connect_faults else None
        if fault is not None:
            raise fault
        connected()
        self._tell()
        await self._broken.wait()
        if self._breaks is not None:
            raise self._breaks

    async def send(self, message: Outgoing) -> SendResult:
        await trio.lowlevel.checkpoint()
        fault = self.send_faults.popleft() if self.send_faults else None
        if fault is not None:
            raise fault
        refusal = self.refuses(message)
        if refusal is not None:
            raise refusal
        if message.edits:
            shown = next(one for one in self.sent if one.message_id == message.edits)
            shown.edits.append(shown.text)
            shown.text = message.text
        else:
            shown = Delivered(
                f"{self.platform}-{len(self.sent) + 1}",
                message.chat_id,
                message.thread_id,
                message.text,
                message.reply_to,
                message,
            )
            self.sent.append(shown)
        self._tell()
        if self.gate is not None:
            await self.gate.wait()
        return SendResult.sent(shown.message_id)

    async def edit(self, chat_id: str, thread_id: str, message_id: str, text: str) -> SendResult:
        await trio.lowlevel.checkpoint()
        for shown in self.sent:
            if shown.message_id == message_id:
                shown.edits.append(shown.text)
                shown.text = text
                self._tell()
        return SendResult.sent(message_id)

    async def typing(self, chat_id: str, thread_id: str) -> None:
        self.typed.append((chat_id, thread_id))
        self._tell()

    # -- the people ------------------------------------------------------------------------------------------------------------------

    def source(
        self, *, chat: str = "1", user: str = "u1", name: str = "Ann", thread: str = "", kind: str = "dm", id: str = ""
    ) -> Source:
        """Return the source of a message: platform, chat and user."""
        return Source(
            platform=self.platform,
            chat_type=kind,
            chat_id=chat,
            user_id=user,
            user_name=name,
            thread_id=thread,
            message_id=id,
        )

    async def say(
        self,
        text: str | LiteralText,
        *,
        chat: str = "1",
        user: str = "u1",
        name: str = "Ann",
        thread: str = "",
        kind: str = "dm",
        event_id: str | None = None,
        addressed: bool = True,
        **payload: Any,
    ) -> Received:
        """Send a message of a user. Each call is a new event, unless it names the one that it repeats."""
        self._events += 1
        # A restarted platform has new event ids.
        identity = f"{self._instance}.{self._events}" if event_id is None else event_id
        source = self.source(chat=chat, user=user, name=name, thread=thread, kind=kind, id=f"in-{self._events}")
        incoming = Incoming(source=source, text=text, event_id=identity, addressed=addressed, payload=payload)
        return await self.gateway.receive(self, incoming)

    async def click(
        self, approval_id: str, choice: ApprovalChoice, *, chat: str = "1", user: str = "u1", kind: str = "dm"
    ) -> str:
        """Press a button as a user."""
        return await self.gateway.approval_clicked(
            self, self.source(chat=chat, user=user, kind=kind), approval_id, choice
        )

    def disconnect(self, error: BaseException | None = None) -> None:
        """Break the connection."""
        self._breaks = error
        self._broken.set()

    def texts(self, chat: str | None = None, thread: str = "") -> list[str]:
        """Return the texts of the agent, in one chat or in all of them."""
        return [one.text for one in self.sent if chat is None or (one.chat == chat and one.thread == thread)]

    async def wait_sent(self, count: int) -> list[Delivered]:
        """Wait until `count` messages have been sent in all, and return them."""
        await self.until(lambda: len(self.sent) >= count)
        return self.sent

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition on this platform is true."""
        while not condition():
            self._changed = trio.Event()
            await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
