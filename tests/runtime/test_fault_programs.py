"""Random programs of turns, runs, jobs, messages and drains, on virtual time, with a store that fails at random verbs.

After the faults end and everything has had time to end, the rows say what happened, once, and nothing is held by nobody.
"""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing

from hermes_trio import Runtime, SessionContext
from hermes_trio.runtime.errors import RuntimeProblem
from hermes_trio.runtime.outcome import RunStatus
from hermes_trio.runtime.ports import TurnInput
from hermes_trio.runtime.turn import Turn
from hermes_trio.store import Store, open_store
from hermes_trio.testing.clock import virtual_clock as make_clock
from hermes_trio.testing.fakes import FakeAdapter, ScriptedAgent, fake_job
from hermes_trio.testing.faults import StoreFaults

FAULTY = ("begin_turn", "start_job", "append_events", "accept_message", "resolve_session", "take_inbox", "add_notice")
"""The verbs that fail in these programs: every beginning, and what is told in between."""

STEPS = 12


async def program(seed: int) -> None:
    """Run one program and check its end."""
    dice = random.Random(seed)
    faults = StoreFaults(seed=seed)
    agent = ScriptedAgent()

    async def act(turn: Turn) -> str:
        await trio.sleep(dice.random() * 5)
        turn.emit("tool.started", tool="x")
        channel = getattr(turn, "channel", None)
        if channel is not None and not turn.input.notices and dice.random() < 0.4:
            await turn.core.supervisor.start_watched(fake_job(dice.random() * 20), turn.owner, channel)
        return f"re: {turn.input.text}"

    accepted: list[str] = []
    runs: set[str] = set()

    async def say(adapter: FakeAdapter, number: int) -> None:
        text = f"message {number}"
        for _ in range(5):  # as a platform does: again with the same id until it is taken
            try:
                await adapter.say(text, chat=str(number % 3), dedupe_key=text)
            except RuntimeProblem:
                await trio.sleep(1)
            else:
                accepted.append(text)
                return

    async def start_run(runtime: Runtime, number: int) -> None:
        where = SessionContext(session_id=f"run-session-{number}", session_key=f"run-session-{number}")
        try:
            with trio.move_on_after(dice.random() * 3 + 0.01):
                run = await runtime.stateless.start_run(TurnInput(text="go"), where, run_id=f"run_{number}")
                if dice.random() < 0.3:
                    run.request_stop()
        except RuntimeProblem:
            return

    agent.steps.extend([act] * 200)
    async with Runtime(agent=agent, store=faults.around(open_store(None)), seed=seed) as runtime:
        store: Store = runtime.store  # type: ignore[assignment]
        async with FakeAdapter().connect(runtime) as adapter:
            for verb in FAULTY:
                faults.fail(verb, chance=0.15, times=None, after_commit=dice.random() < 0.5)
            if dice.random() < 0.3:
                faults.slow("begin_turn", "start_job", seconds=dice.choice([2, 15]), times=2)
            async with trio.open_nursery() as nursery:
                for number in range(STEPS):
                    if dice.random() < 0.5:
                        nursery.start_soon(say, adapter, number)
                    else:
                        runs.add(f"run_{number}")
                        nursery.start_soon(start_run, runtime, number)
                    await trio.sleep(dice.random() * 2)
                await trio.sleep(5)
                faults.heal()
            await trio.sleep(600)

            rows = {row.run_id: row for row in await store.list_runs(limit=100)}
            assert set(rows) <= runs
            for row in rows.values():
                assert row.status in (RunStatus.COMPLETED, RunStatus.CANCELLED, RunStatus.FAILED), row
                numbers = [event.number for event in await store.events_after(row.run_id)]
                assert numbers == sorted(set(numbers))
            assert await store.list_jobs(live_only=True) == []
            backlog = await store.backlog()
            assert (backlog["runs"], backlog["jobs"], backlog["inbox"]) == (0, 0, 0), backlog
            begun = [turn.input.text for turn in adapter.started]
            assert set(begun) >= set(accepted), "each message that was accepted has had a turn"
            assert len(adapter.sent) == len(adapter.started), "and its sender was told how each turn ended"
            assert max(map(begun.count, accepted), default=0) <= 3
            assert runtime.lanes == 0
            assert runtime.core.live_turns == {}
            assert runtime.core.admission.active == 0
            report = await runtime.drain(1)
            assert report.ok, report


def run_program(seed: int) -> None:
    """Run one program on a virtual clock of its own."""
    try:
        trio.run(program, seed, clock=make_clock())
    except BaseException as error:
        error.add_note(f"the program of seed {seed}")
        raise


@pytest.mark.parametrize("seed", range(40))
def test_programs_hold_their_promises_while_beginnings_fail(seed: int) -> None:
    """Whatever begins while the store fails, before or after its commit, ends: no run, job, message or place is held by nobody."""
    run_program(seed)


@pytest.mark.slow
def test_many_programs_hold_their_promises_while_beginnings_fail() -> None:
    """The same, two thousand times."""
    for seed in range(1000, 3000):
        run_program(seed)
