"""Delivery: how what waits in an inbox becomes a turn of the session that it is for.

An `Interface` is what a delivering adapter tells the runtime about itself; registering it gives an `Inbox`, with the channel that its turns carry. A finishing
job
commits its notice and wakes; the lane of that session reads the inbox when it is idle, and the rows leave by the commit of the turn that told them.
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
from .outcome import Cause, Outcome, StopReceipt
from .ports import InboxKind, InboxRow, NewMessage, NewReply, RuntimeStore, TurnInput, inbox_topic
from .tree import waiting
from .turn import EventSink, Turn

if TYPE_CHECKING:
    from .lane import Lanes

__all__ = ["IN_PROCESS", "Completions", "Inbox", "Interface"]

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
        """The input of the turn for these rows: one message, or a burst of notices."""
        text = "\n\n".join(row.text for row in rows)
        notices = tuple(row for row in rows if row.kind is InboxKind.NOTICE)
        return TurnInput(text=text, notices=notices, payload={} if notices else rows[0].payload)

    def budget(self, rows: Sequence[InboxRow]) -> Budget | None:
        """The budget of the turn for these rows. `wakes` bounds the turns that notices of one root start, all of them together."""
        return None

    def linger_of(self, context: SessionContext) -> float | None:
        """Seconds that a one-shot session waits for its background work after its first turn; None for the runtime's setting."""
        return self.linger

    def refusal(self, rows: Sequence[InboxRow], reason: str) -> Sequence[NewReply]:
        """What the senders of rows are told that became dead letters. Pure: it is committed with them."""
        return ()

    def sink(self, context: SessionContext) -> EventSink | None:
        """Who follows the events of this session's turns."""
        return None

    def replies(self, turn: Turn, outcome: Outcome) -> Sequence[NewReply]:
        """What is to be sent after this outcome. Pure: it is committed with the turn, and sent afterwards."""
        return ()

    async def session_for(self, store: RuntimeStore, context: SessionContext) -> str:
        """The session behind a key: asked at each turn boundary, so `/new` and `/resume` take effect there and never inside a turn."""
        return await store.resolve_session(context, source=self.platform)

    async def on_turn_start(self, turn: Turn) -> None:
        """Called when a turn is about to be conducted (typing indicators and the like)."""

    async def on_turn_end(self, outcome: Outcome) -> None:
        """Called once for each turn, after its commit, or when it could not begin (`outcome.begun`)."""

    async def on_refused(self, rows: Sequence[InboxRow], reason: str) -> None:
        """Called when rows have become dead letters: no turn is begun with them unless they are queued again."""


class Inbox:
    """A registered front. `channel` names its inbox and outlives reconnects."""

    def __init__(self, core: RuntimeCore, lanes: Lanes, interface: Interface) -> None:
        self._core = core
        self._lanes = lanes
        self.interface = interface
        self.channel: CompletionChannel = mint(interface.platform)

    async def accept(self, message: NewMessage) -> bool:
        """Take a message for its session: durable when this returns. False if it was accepted before (`dedupe_key`).

        Raises `MailboxFull` or `Draining` when it is refused; nothing is stored then.
        """
        check_id(message.session_key, "session_key")
        if not message.session_key:
            raise RuntimeProblem("session_key is empty; a message must say which conversation it is for")
        if self._core.draining:
            raise Draining()
        return await self._lanes.accept(message)

    def current_turn(self, session_key: str) -> Turn | None:
        """The turn that a lane is running now."""
        return self._lanes.current(self.interface.platform, session_key)

    async def stop_turn(self, session_key: str, cause: Cause) -> StopReceipt | None:
        """Stop the turn that a lane is running, on whichever node; None if it is idle. What is queued behind it stays queued."""
        turn = self._lanes.current(self.interface.platform, session_key)
        if turn is not None:
            return await turn.stop(cause)
        if self._core.shared:
            return await self._core.neighbours.stop_turn(self.interface.platform, session_key, cause)
        return None

    async def sweep(self) -> int:
        """Wake every lane for which something waits in this inbox; returns how many."""
        keys = await self._core.store.waiting_sessions(self.interface.platform)
        for key in keys:
            self._lanes.wake(self.interface.platform, key)
        return len(keys)


class Completions:
    """The runtime's own inbox: `async for notice in runtime.completions(): …`.

    A notice counts as delivered when it is handed over: each is told once. Several readers share what there is. While the store refuses to write that
    one was handed over, the next waits.
    """

    def __init__(self, core: RuntimeCore) -> None:
        self._core = core
        self._lock = trio.Lock()
        self._last: End | None = None
        """That the last notice was handed over, if the store has not taken it yet."""
        self.channel: CompletionChannel = mint(IN_PROCESS)

    def __aiter__(self) -> Completions:
        return self

    async def __anext__(self) -> InboxRow:
        """The next notice, waiting for one. Cancelling the wait loses nothing."""
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
