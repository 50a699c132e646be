"""Two faults in one scenario: beginning a job, or asking a person, and a later step of the same work."""

from __future__ import annotations

from itertools import product
from typing import cast

import pytest
import trio

from hermes_trio import Runtime
from hermes_trio.store import StoreError, open_store
from hermes_trio.store.ports import Store
from hermes_trio.store.records import ApprovalChoice, ApprovalState
from hermes_trio.testing.fakes import ScriptedAgent, fake_job
from hermes_trio.testing.faults import StoreFaults

from .asking import Asker, asking

KINDS = ("before", "after", "slow", "full")
PAIRS = list(product(KINDS, KINDS))

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("virtual_clock")]


def inject(faults: StoreFaults, kind: str, verb: str) -> None:
    """Let a verb fail twice, before or after its commit or because the disk is full, or take 40 seconds once."""
    if kind == "slow":
        faults.slow(verb, seconds=40)
    elif kind == "full":
        faults.full(verb, times=2)
    else:
        faults.fail(verb, after_commit=kind == "after", times=2)


async def say_yes(person: Asker) -> None:
    """Allow the question that was shown; tried again while the store fails."""
    for _ in range(4):
        try:
            await person.approvals.answer("chat", ApprovalChoice.ONCE, approval_id=person.asked[0])
        except StoreError:
            await trio.sleep(1)
        else:
            return


@pytest.mark.parametrize("answered", [True, False], ids=["answered", "silent"])
@pytest.mark.parametrize("verb", ["expire_approval", "get_approval", "answer_approval", "finish_turn"])
@pytest.mark.parametrize(("first", "second"), PAIRS)
async def test_a_question_has_one_end_that_everyone_agrees_on(
    first: str, second: str, verb: str, answered: bool
) -> None:
    """No request stays pending, what was shown is ended once, and a command is allowed exactly if its row says so."""
    faults = StoreFaults()
    async with (
        Runtime(agent=ScriptedAgent(), store=faults.around(open_store(None)), seed=1) as runtime,
        asking(runtime) as person,
    ):
        inject(faults, first, "create_approval")
        inject(faults, second, verb)
        person.ask()
        await trio.sleep(50)
        if answered and person.asked:
            await say_yes(person)
        await trio.sleep(400)
        faults.heal()
        store = cast("Store", runtime.store)
        assert await store.list_approvals() == []
        rows = [await store.get_approval(id) for id in person.asked]
        assert len([name for name in person.told if name != "approval.request"]) == len(rows) <= 1
        approved = [row is not None and row.state is ApprovalState.APPROVED for row in rows]
        assert [answer.allowed for answer in person.answers] == approved
        assert (dict(runtime.core.live_turns), runtime.unwritten) == ({}, [])


@pytest.mark.parametrize("verb", ["finish_job", "take_inbox", "get_job"])
@pytest.mark.parametrize(("first", "second"), PAIRS)
async def test_a_job_ends_and_is_told_once(first: str, second: str, verb: str) -> None:
    """No row says that a job runs which does not; one that has started is told exactly once, one that was refused at most once."""
    faults = StoreFaults()
    async with Runtime(agent=ScriptedAgent(), store=faults.around(open_store(None)), seed=1) as runtime:
        inject(faults, first, "start_job")
        inject(faults, second, verb)
        try:
            await runtime.supervisor.start_watched(fake_job(1), runtime.owner(), runtime.channel)
            least = 1
        except StoreError:
            least = 0
        await trio.sleep(500)
        faults.heal()
        store = cast("Store", runtime.store)
        assert await store.list_jobs(live_only=True) == []
        assert (len(runtime.supervisor), runtime.unwritten) == (0, [])
        told = 0
        with trio.move_on_after(30):
            async for _ in runtime.completions():
                told += 1
        assert least <= told <= 1
