"""A runtime that is meant to be killed, on a store that fails at any verb: chats, runs, watched jobs and replies, without pause.

It says on standard output what was acknowledged, a word and a name in each line, as `crash_writer` does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, suppress
from itertools import count

import trio

from hermes_trio import DeliveringTurn, Runtime, RuntimeSettings, SessionContext, Turn, TurnInput, TurnSpec
from hermes_trio.messaging.contract import Outgoing, SendResult
from hermes_trio.messaging.senders import DUPLICATE_LABEL, Senders
from hermes_trio.messaging.settings import OutboxSettings
from hermes_trio.runtime.errors import RuntimeProblem
from hermes_trio.runtime.outcome import Outcome
from hermes_trio.runtime.ports import NewReply, RuntimeStore
from hermes_trio.store import Retention, open_store
from hermes_trio.testing.fakes import FakeAdapter, fake_job
from hermes_trio.testing.faults import STORE_VERBS, StoreFaults
from hermes_trio.testing.memory_platform import MemoryPlatform

from .crash_writer import say

PLENTY = 10_000_000
CHATS = 6
numbers = count()


class Chat(FakeAdapter):
    """An adapter whose replies go through the outbox."""

    def replies(self, turn: Turn, outcome: Outcome) -> Sequence[NewReply]:
        return [NewReply(platform="chat", target={"chat_id": turn.context.chat_id}, text=outcome.text or outcome.error)]


class Platform(MemoryPlatform):
    """Says what has arrived."""

    async def send(self, message: Outgoing) -> SendResult:
        label = DUPLICATE_LABEL in message.text
        say("labelled" if label else "sent", message.text.rpartition("\n")[2].replace(" ", "_"))
        return await super().send(message)


async def agent(turn: Turn) -> str:
    """Answer a message, sometimes with a job; tell notices."""
    if turn.input.notices:
        for row in turn.input.notices:
            say("told", str(row.id))
        return f"told_{next(numbers)}_{turn.id}"
    say("called", turn.input.text)
    await trio.sleep(random.random() * 0.02)
    if random.random() < 0.3 and isinstance(turn, DeliveringTurn):
        with suppress(RuntimeProblem):
            job = await turn.core.supervisor.start_watched(fake_job(random.random() * 0.05), turn.owner, turn.channel)
            say("started", job.id)
    return f"re_{turn.input.text}"


async def converse(adapter: FakeAdapter, chat: str, generation: str) -> None:
    """A person writes on and on; what the store refuses is written again, under the same id."""
    while True:
        name = f"message-{generation}-{next(numbers)}"
        while True:
            try:
                await adapter.say(name, chat=chat, dedupe_key=name)
                break
            except RuntimeProblem:
                await trio.sleep(0.01)
        say("accepted", name)


async def start_runs(runtime: Runtime, generation: str) -> None:
    """Runs, one after the other."""
    while True:
        name = f"run_{generation}_{next(numbers)}"
        with suppress(RuntimeProblem):
            run = await runtime.stateless.start_run(
                TurnSpec(input=TurnInput(text=name), context=SessionContext(session_id="runs", session_key="runs")),
                run_id=name,
            )
            say("begun", name)
            await run.settled.wait()


def retention() -> Retention:
    """Maintenance runs all the time, and removes nothing that the test looks for."""
    return Retention(
        interval=0.2, batch=20, run_count=PLENTY, job_count=PLENTY, inbox_count=PLENTY, outbox_count=PLENTY
    )


def runtime_on(opening: AbstractAsyncContextManager[RuntimeStore]) -> Runtime:
    """A runtime with senders."""
    senders = Senders([Platform("chat")], OutboxSettings(first_delay=0.05))
    settings = RuntimeSettings(mailbox=4, watchdog_seconds=0)
    return Runtime(agent=agent, store=opening, settings=settings, stages=[senders.stage])


async def main(path: str, generation: str) -> None:
    """Work until killed, while every verb fails now and then."""
    faults = StoreFaults(seed=int(generation))
    opening = faults.around(open_store(path, retention=retention()))
    async with runtime_on(opening) as runtime, Chat("chat").connect(runtime) as adapter, trio.open_nursery() as nursery:
        for verb in sorted(STORE_VERBS - {"recover", "reap"}):
            faults.fail(verb, chance=0.05, times=None, after_commit=random.random() < 0.5)
        say("ready", generation)
        for number in range(CHATS):
            nursery.start_soon(converse, adapter, str(number), generation)
        nursery.start_soon(start_runs, runtime, generation)


async def finish(path: str) -> None:
    """The last generation: no faults, no kill, until nothing waits any more."""
    async with runtime_on(open_store(path, retention=retention())) as runtime, Chat("chat").connect(runtime):
        with trio.fail_after(60):
            while True:
                waits = await runtime.store.backlog()
                if not any(waits.values()):
                    return
                await trio.sleep(0.05)
