"""Random programs of turns, runs, jobs, stops, lanes, approvals and drains, on virtual time, with a store that fails at any verb.

A verb fails before its commit, after it, or is slow. After the faults end and everything has had time to end, the rows say what happened, once, and
nothing is held by nobody: without a restart, unless the program itself drained the runtime and opened another one.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from importlib import import_module
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from hermes_trio import Budget, CancelCause, Cause, DeliveringTurn, Runtime, RuntimeSettings, SessionContext
from hermes_trio.agent.approvals import Approvals, Question
from hermes_trio.messaging.contract import Outgoing, PlatformError, PlatformErrorKind
from hermes_trio.messaging.senders import Senders
from hermes_trio.messaging.settings import OutboxSettings
from hermes_trio.runtime.errors import RuntimeProblem
from hermes_trio.runtime.outcome import TERMINAL_STATUSES, JobState, Outcome
from hermes_trio.runtime.ports import InboxRow, NewReply, NoticeKind, TurnInput
from hermes_trio.runtime.supervisor import Job, JobSpec
from hermes_trio.runtime.turn import EventSink, Turn, TurnSpec
from hermes_trio.store import Page, Store, open_store
from hermes_trio.store.records import ApprovalChoice, OutboxState
from hermes_trio.testing.clock import virtual_clock as make_clock
from hermes_trio.testing.fakes import FakeAdapter, fake_job
from hermes_trio.testing.faults import STORE_VERBS, StoreFaults
from hermes_trio.testing.memory_platform import MemoryPlatform
from hermes_trio.testing.rows import completion_states

STEPS = 16
FAULTY = sorted(STORE_VERBS - {"recover", "reap"})
"""Every verb but the first of a start: a runtime that cannot open its store does not open."""

IDLE = {"runtime", "abandoned", "turns", "supervisor", "sender"}
"""What is in the tree of a runtime that does nothing."""


ENDS = {f"run.{status.value}" for status in TERMINAL_STATUSES}


class Chat(FakeAdapter):
    """An adapter whose replies go through the outbox, and whose user can answer approvals."""

    interactive = True

    def sink(self, context: SessionContext) -> EventSink | None:
        return lambda event: None

    def replies(self, turn: Turn, outcome: Outcome) -> Sequence[NewReply]:
        return [self._reply(turn.context, f"{turn.id}: {outcome.text or outcome.error}")]

    def prepare(self, rows: Sequence[InboxRow]) -> TurnInput:
        if "poison" in rows[0].text:
            raise ValueError("this cannot be read")
        return super().prepare(rows)

    def budget(self, rows: Sequence[InboxRow]) -> Budget | None:
        return Budget(wakes=2) if self.one_shot else None

    def refusal(self, rows: Sequence[InboxRow], reason: str) -> Sequence[NewReply]:
        return [self._reply(row.routing, f"refused: {row.text or row.id}") for row in rows]

    def _reply(self, context: SessionContext, text: str) -> NewReply:
        return NewReply(platform=self.platform, target={"chat_id": context.chat_id}, text=text)


def noisy_job(seconds: float) -> JobSpec:
    """A job that says something in the middle."""
    spec = fake_job(seconds)

    async def run(job: Job) -> JobState | None:
        async def speak() -> None:
            await trio.sleep(seconds / 2)
            try:
                await turn_store(job).note_job_output(job.id, "half of it")
                await job.notify(NoticeKind.INFORMATION, "half of it is done")
            except RuntimeProblem:
                pass

        job.nursery.start_soon(speak)
        return await spec.run(job)

    return msgspec.structs.replace(spec, run=run)


def turn_store(job: Job) -> Any:
    """The store that a job's runtime writes to."""
    return job.core.store


class Program:
    """One random program: what it does, what was promised to it, and what its agent saw."""

    def __init__(self, seed: int) -> None:
        self.healed = False
        self.problems: list[str] = []
        self.dice = random.Random(seed)
        self.faults = StoreFaults(seed=seed)
        self.chat, self.hook = Chat("chat"), Chat("hook", one_shot="webhook_complete", linger=60)
        self.platforms = [MemoryPlatform("chat"), MemoryPlatform("hook")]
        for platform in self.platforms:
            platform.refuses = self.refuse
        self.accepted: set[str] = set()
        self.calls: Counter[str] = Counter()
        self.told: Counter[str] = Counter()
        self.said: dict[str, list[tuple[str, str]]] = {}
        """The turns that have answered, and their texts, by session, oldest first."""
        self.reduced: set[str] = set()
        """The ends that the store has refused for so long that their state alone was written."""
        self.started: list[str] = []
        self.runs: set[str] = set()
        self.drained = False
        self.approvals: Approvals
        self.plain: Any
        """The store without its faults."""

    # -- the agent ---------------------------------------------------------------------------------------------------------------

    async def agent(self, turn: Turn) -> str:
        text, session = turn.input.text, turn.context.session_id
        known = " ".join(message.text for message in await self.plain.load_history(session))
        for id, earlier in self.said.get(session, ()):
            if earlier not in known and f"turn {id}" not in self.reduced:
                self.problems.append(f"the turn of {text!r} does not know of {earlier!r}")
        for row in turn.input.notices:
            self.told[str(row.id)] += 1
        if not turn.input.notices:
            self.calls[text] += 1
        turn.emit("tool.started", tool="x")
        await trio.sleep(self.dice.random() * 5)
        chance = self.dice.random()
        try:
            if chance < 0.3 and isinstance(turn, DeliveringTurn) and not turn.input.notices:
                job = await turn.core.supervisor.start_watched(noisy_job(chance * 60), turn.owner, turn.channel)
                self.started.append(job.id)
                if chance < 0.1:
                    await job.wait()
                    await job.mark_seen()
            elif chance < 0.5:
                await self.approvals.ask(turn, Question(shown="rm x", description="delete"))
            elif chance < 0.6:
                await turn.core.supervisor.start(fake_job(3), turn.owner)
            elif chance < 0.65:
                raise ValueError("the agent crashed")
        except RuntimeProblem:
            pass  # as a tool does: the model is told, and goes on
        if not turn.input.notices:
            self.said.setdefault(session, []).append((turn.id, text))
        return f"re: {text[:40]}"

    def refuse(self, message: Outgoing) -> PlatformError | None:
        """Now and then a platform is busy."""
        if self.healed or self.dice.random() > 0.1:
            return None
        return PlatformError(PlatformErrorKind.TRANSIENT, "busy")

    # -- the people --------------------------------------------------------------------------------------------------------------

    async def say(self, adapter: Chat, chat: str, text: str) -> None:
        while True:  # as a platform does: again with the same id until it is taken
            try:
                await adapter.say(text, chat=chat, dedupe_key=text)
            except RuntimeProblem:
                if self.drained:
                    return
                await trio.sleep(1)
            else:
                self.accepted.add(text)
                return

    async def run(self, runtime: Runtime, number: int) -> None:
        where = SessionContext(session_id=f"run-session-{number % 2}", session_key=f"run-session-{number % 2}")
        try:
            with trio.move_on_after(self.dice.random() * 3 + 0.01):
                run = await runtime.stateless.start_run(
                    TurnSpec(input=TurnInput(text=f"run {number}"), context=where), run_id=f"run_{number}"
                )
                if self.dice.random() < 0.3:
                    run.request_stop()
        except RuntimeProblem:
            pass

    async def embedded(self, runtime: Runtime, number: int) -> None:
        try:
            await runtime.run_turn(f"embedded {number}", SessionContext(session_id="embedded", session_key="embedded"))
        except RuntimeProblem:
            pass

    async def answer(self, number: int) -> None:
        try:
            for row in await self.plain.list_approvals():
                choice = ApprovalChoice.ONCE if number % 2 else ApprovalChoice.DENY
                await self.approvals.answer(row.scope, choice, approval_id=row.id if number % 3 else "")
        except RuntimeProblem:
            pass

    async def stop(self, runtime: Runtime, chat: str) -> None:
        try:
            await self.chat.inbox.stop_turn(self.chat.key(chat), Cause(CancelCause.STOP))
            session = await self.plain.session_of(self.chat.key(chat))
            if session is not None and self.dice.random() < 0.5:
                await runtime.supervisor.stop_session(session.id, Cause(CancelCause.STOP))
        except RuntimeProblem:
            pass

    async def end(self, runtime: Runtime, chat: str) -> None:
        try:
            session = await self.plain.session_of(self.chat.key(chat))
            if session is not None:
                await self.approvals.end_scope(self.chat.key(chat), "started anew")
                await runtime.core.end_session(session.id, "by the program")
        except RuntimeProblem:
            pass

    async def read(self, runtime: Runtime) -> None:
        while True:
            try:
                async for row in runtime.completions():
                    self.told[str(row.id)] += 1
            except (RuntimeProblem, TimeoutError):
                await trio.sleep(1)

    # -- one run of it -----------------------------------------------------------------------------------------------------------

    async def play(self, runtime: Runtime, first: int, last: int) -> None:
        dice = self.dice
        async with trio.open_nursery() as nursery:
            for number in range(first, last):
                match dice.choice(("say", "say", "say", "hook", "run", "run", "embedded", "answer", "stop", "end")):
                    case "say":
                        text = f"poison {number}." if dice.random() < 0.1 else f"message {number}."
                        nursery.start_soon(self.say, self.chat, str(number % 3), text)
                    case "hook":
                        nursery.start_soon(self.say, self.hook, f"h{number}", f"delivery {number}.")
                    case "run":
                        self.runs.add(f"run_{number}")
                        nursery.start_soon(self.run, runtime, number)
                    case "embedded":
                        nursery.start_soon(self.embedded, runtime, number)
                    case "answer":
                        nursery.start_soon(self.answer, number)
                    case "stop":
                        nursery.start_soon(self.stop, runtime, str(number % 3))
                    case _:
                        nursery.start_soon(self.end, runtime, str(number % 3))
                await trio.sleep(dice.random() * 2)
            if last == STEPS:
                await trio.sleep(5)
                self.faults.heal()
                self.healed = True

    def break_the_store(self) -> None:
        dice, faults = self.dice, self.faults
        chance = dice.choice([0.03, 0.1, 0.25])
        for verb in FAULTY:
            faults.fail(verb, chance=chance, times=None, after_commit=dice.random() < 0.5)
        for verb in dice.sample(FAULTY, 8):
            faults.fail(verb, times=dice.randint(1, 4), skip=dice.randint(0, 3), after_commit=dice.random() < 0.5)
        if dice.random() < 0.3:
            faults.slow(*dice.sample(FAULTY, 5), seconds=dice.choice([2, 15]), times=2)

    @asynccontextmanager
    async def open(self, store: Store) -> AsyncIterator[Runtime]:
        senders = Senders(self.platforms, OutboxSettings(look_seconds=86_400, first_delay=1))
        runtime = Runtime(
            agent=self.agent,
            store=_lend(store),
            seed=self.dice.randrange(2**32),
            settings=RuntimeSettings(mailbox=100),
            stages=[senders.stage],
        )
        async with runtime, trio.open_nursery() as readers:
            self.approvals = Approvals(store, seconds=20)
            async with self.chat.connect(runtime), self.hook.connect(runtime):
                readers.start_soon(self.read, runtime)
                yield runtime
            readers.cancel_scope.cancel()

    async def main(self) -> None:
        with reduced_ends(self.reduced):
            await self.live()

    async def live(self) -> None:
        async with (
            open_store(None, runner="inline", clock=trio.current_time) as self.plain,
            self.faults.around(_lend(self.plain)) as store,
        ):
            drains = self.dice.random() < 0.25
            async with self.open(store) as runtime:
                self.break_the_store()
                await self.play(runtime, 0, STEPS // 2)
                if drains:
                    self.drained = True
                    starting = len(runtime.core.starting)
                    report = await runtime.drain(self.dice.random() * 3)
                    # A run whose row a slow store has not written yet may still begin: the report says so.
                    assert (report.turns <= starting, report.jobs) == (True, 0), report
                else:
                    await self.play(runtime, STEPS // 2, STEPS)
                    await self.check(runtime)
            if drains:
                self.drained = False
                self.faults.heal()
                async with self.open(store) as runtime:
                    self.break_the_store()
                    await self.play(runtime, STEPS // 2, STEPS)
                    await self.check(runtime, restarted=True)

    # -- what must be true ---------------------------------------------------------------------------------------------------------

    async def check(self, runtime: Runtime, *, restarted: bool = False) -> None:
        store = self.plain
        await trio.sleep(1000)
        assert self.problems == [], self.problems
        for run_id in self.runs:
            row = await store.get_run(run_id)
            if row is None:
                continue
            assert row.status in TERMINAL_STATUSES, row
            events = await store.events_after(run_id)
            numbers = [event.number for event in events]
            assert numbers == sorted(set(numbers)), events
            ends = [event.event["event"] for event in events if event.event["event"] in ENDS]
            assert ends == [f"run.{row.status.value}"], (row, ends)
        assert (live := await store.list_jobs(live_only=True)) == [], live
        held = await store._read(_held)
        assert not any(held.values()), held
        states = await store._read(_inbox)
        for kind, number, text, state, reason in states:
            assert state in {"delivered", "superseded", "abandoned", "interrupted", "dead"}, (kind, text, state)
            assert state not in {"abandoned", "dead"} or reason
            if state == "dead":
                assert any(f"refused: {text or number}" in shown.text for p in self.platforms for shown in p.sent)
        kept = {text: state for kind, _, text, state, _ in states if kind == "message"}
        assert set(kept) >= self.accepted
        stopped = {turn.input.text for one in (self.chat, self.hook) for turn in one.started if turn.cause is not None}
        for text, state in kept.items():
            if state == "delivered" and text not in stopped:
                assert self.calls[text], f"{text!r} is delivered, and no agent was given it"
        most = 2 if restarted else 1
        assert max(self.calls.values(), default=0) <= most, self.calls
        assert max(self.told.values(), default=0) <= most, self.told
        for job_id, notices in await store._read(_watched):
            assert notices == 1, f"watched job {job_id} has {notices} completions"
        completions = await completion_states(store, sorted(self.started))
        assert set(completions) == set(self.started), (completions, self.started)
        for state in (OutboxState.PENDING, OutboxState.ATTEMPTING, OutboxState.DEAD):
            assert (left := await store.list_outbox(state)) == [], left
        shown = Counter(one.text for platform in self.platforms for one in platform.sent)
        for reply in await store.list_outbox(OutboxState.SENT, Page(1000)):
            assert shown[reply.text] == 1 or (restarted and reply.maybe_duplicate), (reply.text, shown[reply.text])
        for session in await store.list_sessions(page=Page(1000)):
            messages = await store.list_messages(session.id)
            assert session.message_count == len(messages), session
            asked = Counter(message.message.text for message in messages if message.message.role == "user")
            assert max((asked[text] for text in asked if text in self.calls), default=0) <= 1, asked
        core = runtime.core
        assert (runtime.lanes, len(core.locks), len(core.ends), len(core.starting)) == (0, 0, 0, 0)
        assert (core.live_turns, core.admission.active, len(runtime.stateless.runs)) == ({}, 0, 0)
        assert {node.kind for node in runtime.tree.root.walk()} <= IDLE
        report = await runtime.drain(1)
        assert report.ok, report


def _held(db: Any) -> dict[str, list[Any]]:
    """Return the held rows, by kind."""
    held = {
        "sessions": "SELECT id FROM sessions WHERE open_turn IS NOT NULL OR (one_shot = 1 AND ended_at IS NULL)",
        "approvals": "SELECT id FROM approvals WHERE state = 'pending'",
        "runs": "SELECT run_id FROM runs WHERE ended_at IS NULL",
        "inbox": "SELECT id, text FROM inbox WHERE settled_at IS NULL",
    }
    return {name: list(db.execute(sql)) for name, sql in held.items()}


def _watched(db: Any) -> list[tuple[str, int]]:
    """The watched jobs, and how many completions of each there are."""
    sql = (
        "SELECT job_id, (SELECT count(*) FROM inbox WHERE inbox.job_id = jobs.job_id AND notice IN ('completion', 'lost'))"
        " FROM jobs WHERE inbox <> ''"
    )
    return list(db.execute(sql))


def _inbox(db: Any) -> list[tuple[str, int, str, str, str]]:
    return list(db.execute("SELECT kind, id, text, state, reason FROM inbox"))


@contextmanager
def reduced_ends(into: set[str]) -> Iterator[None]:
    """Collect the names of the ends that are reduced, from the log."""

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "only its state and error are written" in str(record.msg) and record.args:
                into.add(str(record.args[0]))  # type: ignore[index]

    log, collector = logging.getLogger("hermes_trio.runtime.ends"), Collector()
    log.addHandler(collector)
    try:
        yield
    finally:
        log.removeHandler(collector)


def _lend(store: Any) -> Any:
    @asynccontextmanager
    async def lent() -> AsyncIterator[Any]:
        yield store

    return lent()


def run_program(seed: int) -> None:
    """Run one program on a virtual clock of its own, with a scheduler that follows the seed: a program that fails can be played again."""
    scheduler: Any = import_module("trio._core._run")
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True
    scheduler._r.seed(seed)
    try:
        trio.run(Program(seed).main, clock=make_clock())
    except BaseException as error:
        error.add_note(f"the program of seed {seed}")
        raise


async def test_a_reduced_end_is_collected(virtual_clock: object) -> None:
    """The programs excuse a turn whose record the store has refused, and know it by its name."""

    async def echo(turn: Turn) -> str:
        return turn.input.text

    faults, reduced = StoreFaults(), set[str]()
    async with Runtime(agent=echo, store=faults.around(open_store(None))) as runtime:
        faults.fail("finish_turn", times=5)
        with reduced_ends(reduced):
            outcome = await runtime.run_turn("hi", SessionContext(session_id="s", session_key="s"))
            await trio.sleep(10)
    assert reduced == {f"turn {outcome.turn_id}"}


@pytest.mark.parametrize("seed", range(40))
def test_programs_hold_their_promises_while_the_store_fails(seed: int) -> None:
    """Whatever begins or ends while the store fails, before or after its commit, is what the rows say, once, and every held row has a live holder."""
    run_program(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 3000, 250))
def test_many_programs_hold_their_promises_while_the_store_fails(first: int, caplog: pytest.LogCaptureFixture) -> None:
    """The same, two thousand times in all."""
    caplog.set_level(logging.CRITICAL, "hermes_trio")
    caplog.set_level(logging.ERROR, "hermes_trio.runtime.ends")
    for seed in range(first, first + 250):
        run_program(seed)
