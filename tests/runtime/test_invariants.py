"""Random programs of turns, jobs, stops, busy lanes and crashing agents keep the promise, and leave an empty tree.

For every watched start there is exactly one of delivered, superseded, abandoned(reason). No threads, fake processes, seeded ids and Trio's own seeded
scheduler: a failing example replays.
"""

import random
from typing import Any

import attrs
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hermes_trio import (
    CancelCause,
    Cause,
    DeliveringTurn,
    Runtime,
    RuntimeSettings,
    SessionContext,
    Turn,
)
from hermes_trio.store import open_store
from hermes_trio.testing.clock import virtual_clock
from hermes_trio.testing.fakes import FakeAdapter, fake_job
from hermes_trio.testing.rows import completion_states

CHATS = ["a", "b", "c"]


@attrs.frozen
class Say:
    """A user writes; the turn starts jobs, takes time, and may fail or wait for one of its jobs."""

    chat: str
    jobs: tuple[float, ...]
    seconds: float
    fails: bool
    sees: bool


@attrs.frozen
class StopTurn:
    """Stop the turn of the lane."""

    chat: str


@attrs.frozen
class StopJobs:
    """The jobs of a chat's session are stopped."""

    chat: str


@attrs.frozen
class EndSession:
    """The session ends under its jobs."""

    chat: str


@attrs.frozen
class Wait:
    """Time passes."""

    seconds: float


@attrs.frozen
class Reconnect:
    """The adapter is away for a while."""

    seconds: float


times = st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0, 7.0])
chats = st.sampled_from(CHATS)
steps = st.one_of(
    st.builds(Say, chats, st.lists(times, max_size=3).map(tuple), times, st.booleans(), st.booleans()),
    st.builds(StopTurn, chats),
    st.builds(StopJobs, chats),
    st.builds(EndSession, chats),
    st.builds(Wait, times),
    st.builds(Reconnect, times),
)


class World:
    """One random program."""

    def __init__(self, program: list[Any]) -> None:
        self.program = program
        self.adapter = FakeAdapter("fake")
        self.started: list[str] = []
        self.sessions: dict[str, str] = {}
        self.told: list[str] = []

    async def agent(self, turn: Turn) -> str:
        self.sessions[turn.context.chat_id] = turn.context.session_id
        if turn.input.notices:
            await trio.sleep(0.5)
            self.told += [row.job_id for row in turn.input.notices]
            return "told"
        assert isinstance(turn, DeliveringTurn)
        say = self.program[int(turn.input.text)]
        for number, seconds in enumerate(say.jobs):
            job = await turn.core.supervisor.start_watched(fake_job(seconds), turn.owner, turn.channel)
            self.started.append(job.id)
            if say.sees and number == 0:
                await job.wait()
                await job.mark_seen()
        await trio.sleep(say.seconds)
        if say.fails:
            raise RuntimeError("the agent crashed")
        return "ok"

    async def play(self, runtime: Runtime) -> None:
        async with trio.open_nursery() as nursery:
            connection = trio.CancelScope()

            async def stay() -> None:
                with connection:
                    async with self.adapter.connect(runtime):
                        await trio.sleep_forever()

            nursery.start_soon(stay)
            await trio.testing.wait_all_tasks_blocked()
            for index, step in enumerate(self.program):
                match step:
                    case Say(chat=chat):
                        await self.adapter.say(str(index), chat=chat)
                    case StopTurn(chat=chat):
                        await self.adapter.inbox.stop_turn(self.adapter.key(chat), Cause(CancelCause.STOP))
                    case StopJobs(chat=chat):
                        await runtime.supervisor.stop_session(self.sessions.get(chat, ""), Cause(CancelCause.STOP))
                    case EndSession(chat=chat):
                        session = self.sessions.get(chat, "")
                        if session:
                            await runtime.core.end_session(session, "by the test")
                    case Wait(seconds=seconds):
                        await trio.sleep(seconds)
                    case Reconnect(seconds=seconds):
                        connection.cancel()
                        await trio.sleep(seconds)
                        connection = trio.CancelScope()
                        nursery.start_soon(stay)
                        await trio.testing.wait_all_tasks_blocked()
                    case _:
                        raise AssertionError(step)
            await trio.sleep(1000)
            nursery.cancel_scope.cancel()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(program=st.lists(steps, max_size=12), seed=st.integers(0, 2**16))
def test_every_watched_start_is_told_once_or_superseded_or_abandoned(program: list[Any], seed: int):
    """And nothing is left: no lane, no job, no lock, no root, no node beyond the idle tree."""

    async def main() -> None:
        world = World(program)
        async with open_store(None, runner="inline", clock=trio.current_time) as store:
            async with Runtime(
                agent=world.agent, store=_lend(store), seed=seed, settings=RuntimeSettings(mailbox=100)
            ) as runtime:
                await world.play(runtime)
                assert {node.kind for node in runtime.tree.root.walk()} == {
                    "runtime",
                    "abandoned",
                    "turns",
                    "supervisor",
                }
                assert (runtime.lanes, len(runtime.core.locks), len(runtime.core.ends)) == (0, 0, 0)
                assert runtime.core.admission.active == 0
            # A turn that was stopped while a job of its was starting does not know of it; if the job had ended by then, it is told all the same.
            known = {*world.started, *world.told}
            states = await completion_states(store, sorted(known))
        assert set(states) == known
        for job, (state, reason) in states.items():
            assert state in {"delivered", "superseded", "abandoned"}, (job, state)
            assert state != "abandoned" or reason
        assert len(world.told) == len(set(world.told)), "told twice"
        delivered = {job for job, (state, _) in states.items() if state == "delivered"}
        assert set(world.told) <= delivered

    random.seed(seed)
    trio.run(main, clock=virtual_clock())


def _lend(store):
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def lent():
        yield store

    return lent()


def test_a_day_of_timers_passes_in_no_time():
    """Virtual time: every minute of a day, a job; nothing is late and nothing is left."""

    async def main() -> None:
        async def agent(turn: Turn) -> str:
            return "x"

        async with Runtime(agent=agent, seed=1) as runtime:
            owner = runtime.owner(SessionContext(session_id="s", session_key="s"))
            for _ in range(24 * 60):
                job = await runtime.supervisor.start(fake_job(60), owner)
                await job.wait()
            assert trio.current_time() == 24 * 3600
            assert len(runtime.supervisor) == 0

    trio.run(main, clock=virtual_clock())
