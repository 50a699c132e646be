"""Delivery: how waiting rows of an inbox become a turn of their session.

A delivering adapter implements an `Interface`; registering it returns an `Inbox`, with the channel that its turns carry. A finishing
job commits its notice, which wakes the lane of its session; the lane reads the inbox when it is idle, and the rows leave with the commit of their
turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Final, Literal

import trio

from .agents import AnyAgent
from .budget import Budget
from .channel import CompletionChannel, mint
from .context import SessionContext, check_id
from .core import RuntimeCore
from .ends import End
from .errors import Draining, RuntimeProblem
from .outcome import Cause, Outcome
from .ports import InboxKind, InboxRow, NewMessage, NewReply, RuntimeStore, TurnInput, inbox_topic
from .stop_receipt import StopReceipt
from .tree import waiting
from .turn import EventSink, Turn

if TYPE_CHECKING:
    from .lane import Lanes

IN_PROCESS: Final = "in-process"
"""The name of the runtime's own inbox."""


class Interface:
    """How a delivering interface plugs into the runtime. Subclass it; every method has a default.

    `one_shot` is the end reason of sessions that end when their work has settled (a webhook delivery, a cron slot); empty for conversations.
    `interactive` says that a person reads the events of `sink` and can answer an approval.
    """

    supports_async_delivery: ClassVar[Literal[True]] = True

    platform: str = ""
    one_shot: str = ""
    linger: float | None = None
    interactive: bool = False
    agent: AnyAgent | None = None

    def prepare(self, rows: Sequence[InboxRow]) -> TurnInput:
        """Return the input of the turn for these rows: one message, or a burst of notices."""
        text = "\n\n".join(row.text for row in rows)
        notices = tuple(row for row in rows if row.kind is InboxKind.NOTICE)
        return TurnInput(text=text, notices=notices, payload={} if notices else rows[0].payload)

    def budget(self, rows: Sequence[InboxRow]) -> Budget | None:
        """Return the budget of the turn for these rows. `wakes` bounds the total number of turns that notices of one root start, on all nodes."""
        return None

    def linger_of(self, context: SessionContext) -> float | None:
        """Return the seconds that a one-shot session waits for its background work after its first turn; None for the runtime's setting."""
        return self.linger

    def refusal(self, rows: Sequence[InboxRow], reason: str) -> Sequence[NewReply]:
        """Return the replies to the senders of rows that become dead letters. Pure: the replies are committed with them."""
        return ()

    def sink(self, context: SessionContext) -> EventSink | None:
        """Return the sink for the events of this session's turns, or None."""
        return None

    def replies(self, turn: Turn, outcome: Outcome) -> Sequence[NewReply]:
        """Return the replies to send after this outcome. Pure: the replies are committed with the turn, and sent afterwards."""
        return ()

    async def session_for(self, store: RuntimeStore, context: SessionContext) -> str:
        """Return the session of a key. Called before each turn, so `/new` and `/resume` take effect between turns, never inside one."""
        return await store.resolve_session(context, source=self.platform)

    async def on_turn_start(self, turn: Turn) -> None:
        """Called before a turn runs, for example to show a typing indicator."""

    async def on_turn_end(self, outcome: Outcome) -> None:
        """Called once for each turn, after its commit, or when it could not begin (`outcome.begun`)."""

    async def on_refused(self, rows: Sequence[InboxRow], reason: str) -> None:
        """Called when rows have become dead letters: no turn begins with them unless they are queued again."""


class Inbox:
    """A registered interface. `channel` names its inbox and outlives reconnects."""

    def __init__(self, core: RuntimeCore, lanes: Lanes, interface: Interface) -> None:
        self._core = core
        self._lanes = lanes
        self.interface = interface
        self.channel: CompletionChannel = mint(interface.platform)

    async def accept(self, message: NewMessage) -> bool:
        """Accept a message for its session: durable when this returns. Returns False if it was accepted before (`dedupe_key`).

        Raises `MailboxFull` or `Draining`, with nothing stored, if the message is refused.
        """
        check_id(message.session_key, "session_key")
        if not message.session_key:
            raise RuntimeProblem("session_key is empty; a message must say which conversation it is for")
        if self._core.draining:
            raise Draining()
        return await self._lanes.accept(message)

    def current_turn(self, session_key: str) -> Turn | None:
        """Return the turn that the lane of a key runs now, or None."""
        return self._lanes.current(self.interface.platform, session_key)

    async def stop_turn(self, session_key: str, cause: Cause) -> StopReceipt | None:
        """Stop the running turn of a lane, on any node; return None if it is idle. Rows that are queued behind it stay queued."""
        turn = self._lanes.current(self.interface.platform, session_key)
        if turn is not None:
            return await turn.stop(cause)
        if self._core.shared:
            return await self._core.peers.stop_turn(self.interface.platform, session_key, cause)
        return None

    async def sweep(self) -> int:
        """Wake the lane of every key for which a row waits in this inbox; return their number."""
        keys = await self._core.store.waiting_sessions(self.interface.platform)
        for key in keys:
            self._lanes.wake(self.interface.platform, key)
        return len(keys)


class Completions:
    """The runtime's own inbox: `async for notice in runtime.completions(): …`.

    A notice is acknowledged when it is returned, so each is returned once. Several readers share the notices. While the store refuses to write that
    acknowledgement, the next notice waits.
    """

    def __init__(self, core: RuntimeCore) -> None:
        self._core = core
        self._lock = trio.Lock()
        self._last: End | None = None
        """The acknowledgement of the last notice, which the store may not have written yet."""
        self.channel: CompletionChannel = mint(IN_PROCESS)

    def __aiter__(self) -> Completions:
        return self

    async def __anext__(self) -> InboxRow:
        """Wait for the next notice and return it. Cancelling the wait loses nothing."""
        store = self._core.store
        async with self._lock:
            if self._last is not None and self._last.over is not None:
                await self._last.over.wait()
            while True:
                woken = trio.Event()
                with store.subscribe(inbox_topic(IN_PROCESS), lambda _, woken=woken: woken.set()):
                    for key in await store.waiting_sessions(IN_PROCESS):
                        for row in await store.take_inbox(IN_PROCESS, key, 1):
                            ids = [row.id]
                            self._last = End(f"notice {row.id}", lambda ids=ids: store.acknowledge(ids))
                            await self._core.ends.put(self._last)
                            return row
                    with waiting("channel in-process"):
                        await woken.wait()
