"""A program that embeds the runtime, inside the process of a simulated node: an interface of its own, turns in its own task, and a reader of completions.

Its inbox and the runtime's own use equal session keys, as two inboxes may. The notices that it gets are in `World.seen.embedding`.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Final

import attrs
import trio

from hermes_trio.runtime.budget import Budget
from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.errors import Draining, RuntimeProblem
from hermes_trio.runtime.interface import Inbox, Interface
from hermes_trio.runtime.outcome import Outcome
from hermes_trio.runtime.ports import InboxRow, NewMessage
from hermes_trio.runtime.runtime import Runtime

EMBEDDING: Final = "embedding"

WAKES: Final = 2
"""The number of turns that the notices of one message may start."""

JOBS: Final = 2
"""The number of background jobs that a turn may start, in worlds where they are scarce."""

TOKENS: Final = 5
"""The number of tokens that a turn may use, in worlds where they are scarce: fewer than one model call uses."""

MAILBOX: Final = 3
"""The size of the mailboxes in worlds with small ones."""

ATTEMPTS: Final = 20
"""The number of attempts to hand over a message that was refused."""


@attrs.define
class EmbeddingSeen:
    """The messages that the runtime accepted from an embedding program, and the notices that it got, over all lives of its nodes."""

    accepted: list[str] = attrs.Factory(list[str])
    """Texts that the runtime has accepted."""
    told: list[tuple[str, str]] = attrs.Factory(list["tuple[str, str]"])
    """The session key and the text of each notice that the reader of completions got."""


class EmbeddingProgram(Interface):
    """The embedding program of one life of a node."""

    platform = EMBEDDING

    def __init__(self, seen: EmbeddingSeen, note: Callable[[str, str], None], spare: str = "") -> None:
        self._spare = spare
        self._seen = seen
        self._note = note
        self._runtime: Runtime | None = None
        self._nursery: trio.Nursery | None = None
        self._context: contextvars.Context
        self._inbox: Inbox

    def budget(self, rows: Sequence[InboxRow]) -> Budget | None:
        """Return the budget that bounds the turns started by the notices of one message."""
        jobs = JOBS if self._spare == "jobs" else None
        return Budget(wakes=WAKES, jobs=jobs, tokens=TOKENS if self._spare == "tokens" else None)

    async def on_turn_end(self, outcome: Outcome) -> None:
        """Record the outcome in the trace."""
        self._note(EMBEDDING, f"{outcome.session_key}: {outcome.state.value} {outcome.text!r}")

    async def receive(self, runtime: Runtime) -> None:
        """Register the interface and read completions until cancelled. A registration that fails is retried after a second."""
        self._runtime = runtime
        self._context = contextvars.copy_context()
        while True:
            try:
                async with runtime.delivering(self) as self._inbox, trio.open_nursery() as self._nursery:
                    try:
                        await self._read(runtime)
                    finally:
                        self._nursery = None
            except RuntimeProblem as error:
                self._note(EMBEDDING, f"could not register: {type(error).__name__}")
            await trio.sleep(1)

    def act(self, who: int, number: int, text: str, *, in_process: bool) -> None:
        """Hand a message to the interface, or run a turn in a task of this program. Does nothing if the process has ended."""
        if self._nursery is None:
            return
        work = self._turn if in_process else self._give
        # In the context of its own process, whatever the context of the caller.
        self._context.copy().run(self._nursery.start_soon, work, f"{EMBEDDING}:{who}", number, text)

    async def _give(self, key: str, number: int, text: str) -> None:
        context = SessionContext(platform=EMBEDDING, chat_id=key, session_key=key)
        message = NewMessage(
            inbox=EMBEDDING, session_key=key, routing=context, text=text, dedupe_key=f"{EMBEDDING}-{number}"
        )
        for _ in range(ATTEMPTS):
            try:
                await self._inbox.accept(message)
            except Draining:
                return
            except RuntimeProblem as error:
                self._note(EMBEDDING, f"{text!r} was refused: {type(error).__name__}")
                await trio.sleep(5)
            else:
                self._seen.accepted.append(text)
                return

    async def _turn(self, key: str, number: int, text: str) -> None:
        assert self._runtime is not None
        context = SessionContext(session_id=f"{key}:{number}", session_key=key)
        try:
            outcome = await self._runtime.run_turn(text, context)
        except RuntimeProblem as error:
            self._note(EMBEDDING, f"{text!r} was refused: {type(error).__name__}")
        else:
            self._note(EMBEDDING, f"in process: {outcome.state.value} {outcome.text!r}")

    async def _read(self, runtime: Runtime) -> None:
        """Read the completions until cancelled. A read that the store refuses is retried."""
        completions = runtime.completions()
        while True:
            try:
                async for row in completions:
                    self._seen.told.append((row.routing.session_key, row.text))
                    self._note(EMBEDDING, f"is told: {row.text[:80]!r}")
            except (RuntimeProblem, TimeoutError) as error:
                self._note(EMBEDDING, f"could not read: {type(error).__name__}")
                await trio.sleep(1)
