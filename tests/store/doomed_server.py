"""A runtime that is meant to be killed in the middle of a one-shot session.

`python -m tests.store.doomed_server PATH (turn|linger)`. It says `now` on standard output when the moment has come: its turn is under way, or
is over and its watched job is still running.
"""

from __future__ import annotations

import os
import sys

import trio

from hermes_trio import DeliveringTurn, Runtime, Turn
from hermes_trio.store import open_store
from hermes_trio.testing.fakes import FakeAdapter, fake_job

FOR_EVER = 1e6


async def main(path: str, moment: str) -> None:
    """Take one delivery, and wait to be killed."""

    async def agent(turn: Turn) -> str:
        assert isinstance(turn, DeliveringTurn)
        if moment == "turn":
            os.write(1, b"now\n")
            await trio.sleep(FOR_EVER)
        await turn.core.supervisor.start_watched(fake_job(FOR_EVER), turn.owner, turn.channel)
        return "started"

    async with (
        Runtime(agent=agent, store=open_store(path)) as runtime,
        FakeAdapter("hook", one_shot="webhook_complete", linger=FOR_EVER).connect(runtime) as adapter,
    ):
        await adapter.say("event")
        await adapter.wait_for(1)
        os.write(1, b"now\n")
        await trio.sleep(FOR_EVER)


if __name__ == "__main__":
    trio.run(main, sys.argv[1], sys.argv[2])
