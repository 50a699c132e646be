"""Fakes of what surrounds a runtime: a scripted agent, an adapter that records replies, and jobs that take virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.interface import Inbox, Interface
from hermes_trio.runtime.outcome import JobState, Outcome
from hermes_trio.runtime.ports import InboxRow, NewMessage, Reply
from hermes_trio.runtime.runtime import Runtime
from hermes_trio.runtime.supervisor import Job, JobSpec
from hermes_trio.runtime.turn import Turn

Step = str | Reply | BaseException | Callable[[Turn], Awaitable[Reply | str]]


class ScriptedAgent:
    """An agent that plays one step a turn: a text, a reply, an exception to raise, or an async function. Without a step it echoes.

    `turns` records the turns that it was given, in order.
    """

    def __init__(self, *steps: Step) -> None:
        self.steps: list[Step] = list(steps)
        self.turns: list[Turn] = []

    def then(self, *steps: Step) -> ScriptedAgent:
        """Append steps to the script."""
        self.steps.extend(steps)
        return self

    async def __call__(self, turn: Turn, /) -> Reply | str:
        self.turns.append(turn)
        if not self.steps:
            return f"echo: {turn.input.text}"
        step = self.steps.pop(0)
        if isinstance(step, BaseException):
            raise step
        if isinstance(step, str | Reply):
            await trio.lowlevel.checkpoint()
            return step
        return await step(turn)


@attrs.frozen
class Sent:
    """A reply that a fake adapter would have sent: its target, its text, and the outcome of its turn."""

    context: SessionContext
    text: str
    outcome: Outcome
    notices: tuple[InboxRow, ...] = ()


class FakeAdapter(Interface):
    """A delivering adapter without a platform. `sent` has one entry for each ended turn, in order."""

    def __init__(self, platform: str = "fake", *, one_shot: str = "", linger: float | None = None) -> None:
        self.platform = platform
        self.one_shot = one_shot
        self.linger = linger
        self.sent: list[Sent] = []
        self.started: list[Turn] = []
        self._turns: dict[str, Turn] = {}
        self._changed = trio.Event()
        self.inbox: Inbox

    @asynccontextmanager
    async def connect(self, runtime: Runtime) -> AsyncIterator[FakeAdapter]:
        """Register with a runtime for the body of the `async with`."""
        async with runtime.delivering(self) as self.inbox:
            yield self

    def key(self, chat: str) -> str:
        """Return the session key of a chat."""
        return f"agent:main:{self.platform}:dm:{chat}"

    async def say(self, text: str, *, chat: str = "1", dedupe_key: str = "", **fields: Any) -> bool:
        """Send a message of a user. It is durable when this returns."""
        context = SessionContext(platform=self.platform, chat_id=chat, session_key=self.key(chat), **fields)
        return await self.inbox.accept(
            NewMessage(
                inbox=self.platform, session_key=self.key(chat), routing=context, text=text, dedupe_key=dedupe_key
            )
        )

    async def wait_for(self, count: int) -> list[Sent]:
        """Wait until `count` replies have been recorded in all, and return them."""
        while len(self.sent) < count:
            self._changed = trio.Event()
            await self._changed.wait()
        return self.sent

    async def on_turn_start(self, turn: Turn) -> None:
        self.started.append(turn)
        self._turns[turn.id] = turn

    async def on_turn_end(self, outcome: Outcome) -> None:
        turn = self._turns.pop(outcome.turn_id)
        self.sent.append(Sent(turn.context, outcome.text or outcome.error, outcome, turn.input.notices))
        self._changed.set()


def fake_job(
    seconds: float = 1.0,
    text: str = "done",
    *,
    state: JobState = JobState.EXITED,
    fails: BaseException | None = None,
    kind: str = "process",
    watches: Sequence[str] = (),
) -> JobSpec:
    """Return a job that takes virtual time instead of running a process."""

    async def run(job: Job) -> JobState:
        job.started(job.id)
        job.text = f"[job {job.id} stopped]"
        await trio.sleep(seconds)
        if fails is not None:
            raise fails
        job.text = f"[job {job.id} {text}]"
        job.summary = text
        return state

    return JobSpec(kind=kind, title=f"fake {text}", run=run, details={"watches": list(watches)})
