"""A process that is meant to be killed: it writes without pause and says on standard output what was acknowledged.

`python -m tests.store.crash_writer` forks one for each line of its input. Each line is a word and a name, written only after the verb has returned.
Every name carries the generation, so that no two processes use the same one.
"""

from __future__ import annotations

import os
import random
import sys
from itertools import count

import trio

from hermes_trio.runtime.outcome import JobState
from hermes_trio.runtime.ports import EventRow, JobFinish, Message, NewReply
from hermes_trio.store import Retention, SqliteStore, open_store

from .turns import finish, job, message, notice, run, start

numbers = count()


def say(word: str, name: str) -> None:
    """One line, in one write."""
    os.write(1, f"{word} {name}\n".encode())


async def converse(store: SqliteStore, generation: str, lane: int) -> None:
    """A chat: a message is accepted, begun, and finished with everything that a turn leaves behind."""
    key = f"lane-{generation}-{lane}"
    session = f"session-{generation}-{lane}"
    while True:
        name = f"turn-{generation}-{next(numbers)}"
        accepted = await store.accept_message(message(name, key=key, dedupe=name))
        assert accepted is not None
        say("accepted", name)
        begun = start(name, session, key, run=run(name, session), inbox_ids=(accepted,))
        await store.begin_turn(begun)
        say("begun", name)
        if random.random() < 0.3:
            await store.append_events(
                [EventRow(run_id=name, epoch=generation, number=1, event={"event": "tool.started"})]
            )
        pair = tuple(Message(role=role, content=name, platform_message_id=name) for role in ("user", "assistant"))
        await store.finish_turn(
            finish(
                begun,
                messages=pair,
                text=name,
                outbox=(NewReply(platform="telegram", target={"lane": key}, text=name),),
                events=(EventRow(run_id=name, epoch=generation, number=2, event={"event": "run.completed"}),),
            )
        )
        say("finished", name)
        for row in await store.claim_outbox("telegram", limit=4):
            if await store.outbox_sent(row):  # another lane may have claimed it again, and sent it
                say("sent", row.text)


async def deliver(store: SqliteStore, generation: str, lane: int) -> None:
    """One-shot sessions: each begins, ends with its turn, and is over."""
    while True:
        name = f"shot-{generation}-{lane}-{next(numbers)}"
        begun = start(name, name, f"hook:{name}", one_shot=True, source="webhook")
        await store.begin_turn(begun)
        say("shot-begun", name)
        await store.finish_turn(finish(begun, "q", "a", end_session="webhook_complete"))
        say("shot-ended", name)


async def work(store: SqliteStore, generation: str, lane: int) -> None:
    """Watched jobs: each starts, and ends with a notice that waits."""
    key = f"jobs-{generation}-{lane}"
    session = await store.resolve_session(start("", "", key).context, source="telegram")
    while True:
        name = f"job-{generation}-{next(numbers)}"
        await store.start_job(job(name, session, key=key))
        say("started", name)
        if random.random() < 0.5:
            await store.note_job_output(name, f"tail of {name}")
        told = await store.finish_job(
            JobFinish(job_id=name, state=JobState.EXITED, notice=notice(name, session, key, name))
        )
        assert told
        say("ended", name)


async def main(path: str, generation: str) -> None:
    """Recover, then write until killed."""
    # Maintenance runs all the time; the counts are above what is written, so that it removes nothing that the test looks for.
    plenty = 10_000_000
    retention = Retention(
        interval=0.2, batch=20, run_count=plenty, job_count=plenty, inbox_count=plenty, outbox_count=plenty
    )
    async with open_store(path, retention=retention) as store:
        await store.recover(f"epoch-{generation}")
        say("ready", generation)
        async with trio.open_nursery() as nursery:
            for lane in range(8):
                nursery.start_soon(converse, store, generation, lane)
            for lane in range(4):
                nursery.start_soon(deliver, store, generation, lane)
                nursery.start_soon(work, store, generation, lane)


def serve() -> None:
    """Fork a process for each line of standard input, `MODULE PATH GENERATION`, and say when it is dead: the imports are made once."""
    from . import crash_runtime

    lives = {"verbs": main, "runtime": crash_runtime.main}
    for line in sys.stdin:
        kind, path, generation = line.split()
        pid = os.fork()
        if pid == 0:
            random.seed()
            say("pid", str(os.getpid()))
            try:
                trio.run(lives[kind], path, generation)
            finally:
                os._exit(1)
        os.waitpid(pid, 0)
        say("dead", generation)


if __name__ == "__main__":
    serve()
