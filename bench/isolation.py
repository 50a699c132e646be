"""Does any session see another's identity? `python -m bench.isolation [--sessions 1000] [--turns 20] [--seed N] [--quick] [--sabotage]`.

All sessions work at once. Each of their turns is bound to an identity (session key, user, message, working directory) and reads it back, after other
sessions had the chance to run: in the turn itself, in child tasks, in a worker thread, in a nested child turn, in a real process for a sample (its
environment and its working directory), and in a background job after the turn has ended. The job's completion must come back to the session
that started it. Every other session of the runtime is a conversation of a delivering front with lanes; the rest run in-process.

A read that does not give the turn's own identity is a crossing, whether it gives another's or none. Three designs do the same work in one run:

- runtime: hermes-trio, on its store in memory, with processes from its warden;
- os.environ: the identity is process-global state (environment variables and `chdir`), saved and restored around each turn;
- thread pool: each turn sets a context variable in the pool thread that it runs in, and hands its tools to the same pool, which does not
  propagate the context: a tool reads what its thread was last used for.

`--nodes 3` lets sessions hop between nodes on a PostgreSQL server with every turn instead (see `isolation_nodes`).

`--sabotage` puts a process global in the place of the runtime's own ContextVar: a benchmark that cannot fail proves nothing. The work follows from the
seed; the crossings of designs that have races differ a little from run to run.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import msgspec
import trio
from rich.progress import Progress, TaskID

from bench.report import Report, arguments_for, progress
from hermes_trio import (
    DeliveringTurn,
    Inbox,
    Interface,
    Job,
    JobSpec,
    JobState,
    NewMessage,
    Outcome,
    Runtime,
    RuntimeSettings,
    SessionContext,
    Turn,
    current_context,
    get_session_env,
)
from hermes_trio.tools.warden import ProcessSpec, Warden, open_warden

PLACES = ("turn", "child task", "worker thread", "child turn", "process", "job after the turn", "completion")
VARIABLES = ("HERMES_SESSION_KEY", "HERMES_SESSION_USER_ID", "HERMES_SESSION_MESSAGE_ID", "HERMES_SESSION_CWD")
TELL = 'printf "%s\\n" "$HERMES_SESSION_KEY" "$HERMES_SESSION_USER_ID" "$HERMES_SESSION_MESSAGE_ID" "$(pwd -P)"'
"""The command of a process: prints its environment and its working directory."""

TASKS = 2
"""Child tasks a turn."""
PROCESSES = 8
"""Processes at once; all designs take turns in the same way."""
POOL_THREADS = 64
POOL_TURNS = 16
"""Concurrent turns in the thread pool: few enough that their tools always get a thread."""
LONGEST_PAUSE = 0.004
"""Seconds that a turn may wait between binding its identity and reading it."""
TIMEOUT = 120.0
"""Seconds without any completion after which the missing ones count as lost."""


@attrs.frozen
class Identity:
    """The identity that a turn is bound to."""

    key: str = ""
    user: str = ""
    message: str = ""
    cwd: str = ""

    @classmethod
    def of(cls, context: SessionContext | None) -> Identity:
        """The identity in a session's context."""
        if context is None:
            return NOBODY
        return cls(context.session_key, context.user_id, context.message_id, context.cwd)

    def child(self) -> Identity:
        """The identity of the child turn: same conversation, another message."""
        return attrs.evolve(self, message=f"{self.message}.child")


NOBODY = Identity()


@attrs.frozen
class Step:
    """One turn of one session."""

    session: int
    number: int
    identity: Identity
    pause: float
    process: bool


@attrs.frozen
class Workload:
    """The workload of all designs. The same seed gives the same work."""

    sessions: int
    turns: int
    seed: int
    sample: float
    folder: Path

    def step(self, session: int, number: int) -> Step:
        """The turn `number` of a session."""
        chance = random.Random(f"{self.seed}/{session}/{number}")
        key = f"agent:main:bench:dm:{session}"
        identity = Identity(key, f"user-{session}", f"{session}.{number}", str(self.folder / str(session)))
        return Step(session, number, identity, chance.random() * LONGEST_PAUSE, chance.random() < self.sample)


class Tally:
    """Reads and crossings by place. Threads write to it, too."""

    def __init__(self) -> None:
        self.reads: Counter[str] = Counter()
        self.foreign: Counter[str] = Counter()
        self.missing: Counter[str] = Counter()
        self._lock = threading.Lock()

    def check(self, place: str, expected: Identity, found: Identity) -> None:
        """Count one read."""
        with self._lock:
            self.reads[place] += 1
            if found != expected:
                (self.foreign if found.key or found.message else self.missing)[place] += 1

    def lost(self, place: str, count: int) -> None:
        """Count a read that did not arrive."""
        self.reads[place] += count
        self.missing[place] += count

    def crossings(self, place: str) -> int:
        """Return the number of reads in this place that returned another identity than the turn's."""
        return self.foreign[place] + self.missing[place]

    @property
    def total(self) -> int:
        """All crossings."""
        return self.foreign.total() + self.missing.total()

    def as_dict(self) -> dict[str, dict[str, int]]:
        """A JSON-ready form."""
        return {
            place: {"reads": self.reads[place], "another": self.foreign[place], "none": self.missing[place]}
            for place in PLACES
        }


# -- the runtime ------------------------------------------------------------------------------------------------------------------


def read_here() -> Identity:
    """Return the identity in the session variables of this task or thread."""
    return Identity(*map(get_session_env, VARIABLES))


class Conversations(Interface):
    """A delivering interface: its sessions are lanes. `ended` signals the end of a turn."""

    platform = "bench"

    def __init__(self, ended: Callable[[str], None]) -> None:
        self._ended = ended

    async def on_turn_end(self, outcome: Outcome) -> None:
        self._ended(outcome.turn_id)


class Hosted:
    """The workload on the runtime."""

    def __init__(self, work: Workload, tally: Tally, advance: Callable[[], None]) -> None:
        self.work = work
        self.tally = tally
        self.advance = advance
        self.warden: Warden
        self.spawning = trio.CapacityLimiter(PROCESSES)
        self.gates: dict[str, trio.Event] = {}
        """By turn id: the event that the job of the turn waits for."""
        self.answers: dict[str, trio.Event] = {}
        """By message id: the event that the conversation waits for before its next message."""
        self.promised: dict[str, Step] = {}
        """By job id: the identity that its completion must have."""
        self.told = 0
        self.news = trio.Event()

    async def run(self) -> None:
        """All sessions, then all completions."""
        settings = RuntimeSettings(max_turns=self.work.sessions, watchdog_seconds=0)
        async with (
            Runtime(agent=self.agent, settings=settings, stages=[self.open_warden], seed=self.work.seed) as runtime,
            runtime.delivering(Conversations(self.ended)) as inbox,
            trio.open_nursery() as reading,
        ):
            reading.start_soon(self.read_completions, runtime)
            async with trio.open_nursery() as sessions:
                for session in range(self.work.sessions):
                    if session % 2:
                        sessions.start_soon(self.converse, inbox, session)
                    else:
                        sessions.start_soon(self.embed, runtime, session)
            await self.all_told()
            reading.cancel_scope.cancel()

    @asynccontextmanager
    async def open_warden(self, runtime: Runtime) -> AsyncIterator[None]:
        """The stage that owns the processes."""
        async with open_warden() as self.warden:
            yield

    async def converse(self, inbox: Inbox, session: int) -> None:
        """Run a session of the interface: one message after the other."""
        for number in range(self.work.turns):
            step = self.work.step(session, number)
            answered = self.answers[step.identity.message] = trio.Event()
            await inbox.accept(
                NewMessage(
                    inbox="bench",
                    session_key=step.identity.key,
                    routing=context_of(step.identity, "bench"),
                    text=f"{session} {number}",
                )
            )
            await answered.wait()

    async def embed(self, runtime: Runtime, session: int) -> None:
        """Run a session of a program that embeds the runtime."""
        for number in range(self.work.turns):
            step = self.work.step(session, number)
            outcome = await runtime.run_turn(f"{session} {number}", context_of(step.identity, "embedded"))
            self.ended(outcome.turn_id)

    def ended(self, turn_id: str) -> None:
        """Handle the end of a turn: its job may read its identity now."""
        gate = self.gates.pop(turn_id, None)
        if gate is not None:
            gate.set()

    async def agent(self, turn: Turn) -> str:
        """One turn. What it expects comes with its input, never from what is being tested."""
        if turn.input.notices:
            for row in turn.input.notices:
                self.completed(row.job_id, Identity.of(row.routing))
            last = self.promised[turn.input.notices[-1].job_id]
            await trio.sleep(last.pause)
            self.tally.check("completion", last.identity, read_here())
            return "noted"
        session, number = map(int, turn.input.text.split())
        step = self.work.step(session, number)
        mine, check = step.identity, self.tally.check
        assert isinstance(turn, DeliveringTurn)
        check("turn", mine, read_here())
        for task in range(TASKS):
            turn.start_soon(self.task, step.pause * (task + 1), mine)
        await trio.sleep(step.pause)
        check("worker thread", mine, await turn.run_sync(read_here))
        theirs = mine.child()
        context = msgspec.structs.replace(turn.context, message_id=theirs.message, session_id=f"child-{theirs.message}")
        await turn.run_child("child", agent=partial(self.child, step.pause, theirs), context=context)
        if step.process:
            check("process", mine, await self.ask_process())
        gate = self.gates[turn.id] = trio.Event()
        spec = JobSpec(kind="bench", title="bench", run=partial(self.job, step, gate))
        await turn.core.supervisor.start_watched(spec, turn.owner, turn.channel)
        await trio.sleep(step.pause)
        check("turn", mine, read_here())
        self.advance()
        if mine.message in self.answers:
            self.answers.pop(mine.message).set()
        return "done"

    async def task(self, pause: float, mine: Identity) -> None:
        """A child task of a turn."""
        await trio.sleep(pause)
        self.tally.check("child task", mine, read_here())

    async def child(self, pause: float, mine: Identity, turn: Turn) -> str:
        """A nested turn."""
        await trio.sleep(pause)
        self.tally.check("child turn", mine, read_here())
        return "child"

    async def ask_process(self) -> Identity:
        """Return the identity that a real process of this session reads."""
        context = current_context() or SessionContext()
        async with self.spawning:
            spec = ProcessSpec(command=TELL, cwd=context.cwd or "/", env={"PATH": os.defpath, **context.environ()})
            async with await self.warden.spawn(spec) as process:
                told = b""
                while some := await process.output.receive_some():
                    told += some
        return Identity(*told.decode().splitlines())

    async def job(self, step: Step, gate: trio.Event, job: Job) -> JobState:
        """Run background work: it reads its identity after the turn that started it has ended."""
        self.promised[job.id] = step
        job.started()
        await gate.wait()
        await trio.sleep(step.pause)
        self.tally.check("job after the turn", step.identity, read_here())
        return JobState.EXITED

    async def read_completions(self, runtime: Runtime) -> None:
        """Read the in-process completions."""
        async for row in runtime.completions():
            self.completed(row.job_id, Identity.of(row.routing))

    def completed(self, job_id: str, routing: Identity) -> None:
        """Count a completion with this routing."""
        self.tally.check("completion", self.promised[job_id].identity, routing)
        self.told += 1
        self.news.set()

    async def all_told(self) -> None:
        """Wait for every completion; those that do not arrive count as lost."""
        promised = self.work.sessions * self.work.turns
        while self.told < promised:
            self.news = trio.Event()
            with trio.move_on_after(TIMEOUT) as patience:
                await self.news.wait()
            if patience.cancelled_caught:
                self.tally.lost("completion", promised - self.told)
                return


def context_of(identity: Identity, platform: str) -> SessionContext:
    """Return the context that an interface binds for this identity."""
    return SessionContext(
        platform=platform,
        session_key=identity.key,
        session_id=identity.key if platform == "embedded" else "",
        user_id=identity.user,
        message_id=identity.message,
        cwd=identity.cwd,
    )


class ProcessGlobal:
    """Has the methods of a ContextVar, but one value for all tasks and threads."""

    def __init__(self) -> None:
        self._value: Any = None

    def get(self) -> Any:
        """Return the value that was set last, by any task."""
        return self._value

    def set(self, value: Any) -> Any:
        """Set the value for all tasks; the token is the previous value."""
        before, self._value = self._value, value
        return before

    def reset(self, token: Any) -> None:
        """Restore the value of a token, for all tasks."""
        self._value = token


def sabotage() -> None:
    """Replace the runtime's ContextVar in every module that holds it."""
    from hermes_trio.runtime.context import _binding as ours

    shared = ProcessGlobal()
    for name, module in list(sys.modules.items()):
        if name.startswith("hermes_trio.") and getattr(module, "_binding", None) is ours:
            setattr(module, "_binding", shared)  # noqa: B010 - there is no such name for a type checker


# -- process-global state ---------------------------------------------------------------------------------------------------------


def read_environ() -> Identity:
    """Return the session in the environment of this process."""
    return Identity(*(os.environ.get(name, "") for name in VARIABLES))


def write_environ(identity: Identity) -> None:
    """Set the session of the whole process."""
    for name, value in zip(VARIABLES, attrs.astuple(identity), strict=True):
        os.environ[name] = value
    if identity.cwd:
        os.chdir(identity.cwd)


def ask_shell(env: dict[str, str] | None = None, cwd: str | None = None) -> Identity:
    """Return the session that a child process reads, with the inherited environment or this one."""
    told = subprocess.run(["/bin/sh", "-c", TELL], env=env, cwd=cwd, capture_output=True, text=True, check=True)
    return Identity(*told.stdout.splitlines())


async def run_environ(work: Workload, tally: Tally, advance: Callable[[], None]) -> None:
    """The workload on Trio with `os.environ` for the identity."""
    check = tally.check
    spawning = trio.CapacityLimiter(PROCESSES)

    async def task(pause: float, mine: Identity) -> None:
        await trio.sleep(pause)
        check("child task", mine, read_environ())

    async def child(pause: float, mine: Identity) -> None:
        before = read_environ()
        write_environ(mine)
        await trio.sleep(pause)
        check("child turn", mine, read_environ())
        write_environ(before)

    async def job(step: Step, over: trio.Event, routing: Identity) -> None:
        await over.wait()
        await trio.sleep(step.pause)
        check("job after the turn", step.identity, read_environ())
        check("completion", step.identity, routing)

    async def turn(step: Step, jobs: trio.Nursery) -> None:
        mine, over = step.identity, trio.Event()
        before = read_environ()
        write_environ(mine)
        async with trio.open_nursery() as nursery:
            check("turn", mine, read_environ())
            for number in range(TASKS):
                nursery.start_soon(task, step.pause * (number + 1), mine)
            await trio.sleep(step.pause)
            check("worker thread", mine, await trio.to_thread.run_sync(read_environ))
            await child(step.pause, mine.child())
            if step.process:
                check("process", mine, await trio.to_thread.run_sync(ask_shell, limiter=spawning))
            jobs.start_soon(job, step, over, read_environ())
            await trio.sleep(step.pause)
            check("turn", mine, read_environ())
        write_environ(before)
        over.set()
        advance()

    async def session(number: int, jobs: trio.Nursery) -> None:
        for turn_number in range(work.turns):
            await turn(work.step(number, turn_number), jobs)

    async with trio.open_nursery() as jobs, trio.open_nursery() as sessions:
        for number in range(work.sessions):
            sessions.start_soon(session, number, jobs)


# -- a thread pool ----------------------------------------------------------------------------------------------------------------

pooled: ContextVar[Identity] = ContextVar("pooled", default=NOBODY)


def run_pool(work: Workload, tally: Tally, advance: Callable[[], None]) -> None:
    """The workload in pool threads: each turn sets the variable of its thread, as the next one will set its own."""
    check = tally.check
    room = threading.BoundedSemaphore(POOL_TURNS)
    spawning = threading.BoundedSemaphore(PROCESSES)

    def read(pause: float = 0.0) -> Identity:
        time.sleep(pause)
        return pooled.get()

    def child(pause: float, mine: Identity) -> None:
        pooled.set(mine)
        check("child turn", mine, read(pause))

    def ask_process() -> Identity:
        seen = pooled.get()
        with spawning:
            env = {"PATH": os.defpath, **dict(zip(VARIABLES, attrs.astuple(seen), strict=True))}
            return attrs.evolve(ask_shell(env, seen.cwd or "/"), cwd=seen.cwd)

    def job(step: Step, over: threading.Event) -> None:
        routing = pooled.get()
        over.wait()
        check("job after the turn", step.identity, read(step.pause))
        check("completion", step.identity, routing)

    def turn(step: Step) -> None:
        mine, over = step.identity, threading.Event()
        try:
            pooled.set(mine)
            check("turn", mine, read())
            tasks = [pool.submit(read, step.pause * (number + 1)) for number in range(TASKS)]
            time.sleep(step.pause)
            check("worker thread", mine, pool.submit(read).result())
            pool.submit(child, step.pause, mine.child()).result()
            if step.process:
                check("process", mine, pool.submit(ask_process).result())
            jobs.append(pool.submit(job, step, over))
            for task in tasks:
                check("child task", mine, task.result())
            check("turn", mine, read(step.pause))
        finally:
            over.set()
            room.release()
            advance()

    jobs: list[Any] = []
    turns: list[Any] = []
    with ThreadPoolExecutor(POOL_THREADS) as pool:
        for number in range(work.turns):
            for session in range(work.sessions):
                room.acquire()
                turns.append(pool.submit(turn, work.step(session, number)))
        for future in [*turns, *jobs]:
            future.result()


# -- all of them ------------------------------------------------------------------------------------------------------------------


def run_all(work: Workload, bar: Progress) -> dict[str, tuple[Tally, float]]:
    """Every design, one after the other; its tally and its seconds."""
    results: dict[str, tuple[Tally, float]] = {}
    total = work.sessions * work.turns
    environment, place = dict(os.environ), Path.cwd()

    def measured(name: str, run: Callable[[Tally, Callable[[], None]], None]) -> None:
        row: TaskID = bar.add_task(name, total=total)
        tally, began = Tally(), time.perf_counter()
        run(tally, partial(bar.advance, row))
        results[name] = (tally, time.perf_counter() - began)

    measured("runtime", lambda tally, advance: trio.run(Hosted(work, tally, advance).run))
    try:
        measured("os.environ", lambda tally, advance: trio.run(run_environ, work, tally, advance))
    finally:
        os.chdir(place)
        for name in VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(environment)
    measured("thread pool", lambda tally, advance: run_pool(work, tally, advance))
    return results


def draw(results: dict[str, tuple[Tally, float]], axes: Any) -> None:
    """One group of bars a place: the share of reads that crossed."""
    width = 0.8 / len(results)
    for number, (name, (tally, _)) in enumerate(results.items()):
        shares = [100 * tally.crossings(place) / max(1, tally.reads[place]) for place in PLACES]
        places = [index + width * number for index in range(len(PLACES))]
        bars = axes.bar(places, shares, width, label=f"{name}: {tally.total:,}")
        axes.bar_label(bars, [f"{share:.0f}" if share else "0" for share in shares], fontsize=7)
    axes.set_xticks([index + 0.27 for index in range(len(PLACES))], PLACES, rotation=20)
    axes.set_ylabel("reads of a wrong identity, %")
    axes.set_title("Crossings by where the identity is read")
    axes.set_ylim(0, 135)
    axes.set_yticks(range(0, 101, 20))
    axes.legend(loc="upper center", ncols=len(results))


def main() -> int:
    """Run, print, keep."""
    parser = arguments_for(__doc__)
    parser.add_argument("--sessions", type=int, default=None, help="concurrent sessions (1000; 100 with --quick)")
    parser.add_argument("--turns", type=int, default=None, help="turns of each (20; 5 with --quick)")
    parser.add_argument("--seed", type=int, default=1, help="what the work follows from (1)")
    parser.add_argument("--sample", type=float, default=0.02, help="share of turns that ask a real process (0.02)")
    parser.add_argument("--sabotage", action="store_true", help="use a process global for the runtime's own ContextVar")
    parser.add_argument("--nodes", type=int, default=1, help="sessions hop between so many nodes on a PostgreSQL (1)")
    options = parser.parse_args()
    several = options.nodes > 1
    sessions = options.sessions or (100 if options.quick else 300 if several else 1000)
    turns = options.turns or (5 if options.quick else 10 if several else 20)
    name = ("isolation-nodes" if several else "isolation") + ("-sabotage" if options.sabotage else "")
    report = Report(name, options.results, options.plot)
    if options.sabotage:
        sabotage()
    with tempfile.TemporaryDirectory() as folder, progress() as bar:
        work = Workload(sessions, turns, options.seed, options.sample, Path(folder).resolve())
        for session in range(sessions):
            (work.folder / str(session)).mkdir()
        if several:
            from bench import isolation_nodes

            isolation_nodes.main(report, work, options.nodes, bar, sabotaged=options.sabotage)
            return report.finish(strict=options.strict)
        results = run_all(work, bar)
    publish(report, work, results, sabotaged=options.sabotage)
    return report.finish(strict=options.strict)


def publish(report: Report, work: Workload, results: dict[str, tuple[Tally, float]], *, sabotaged: bool) -> None:
    """The table, the figures, the plot and the bounds."""
    cells = [
        [place, *(f"{tally.crossings(place):,} of {tally.reads[place]:,}" for tally, _ in results.values())]
        for place in PLACES
    ]
    cells.append(["crossings", *(f"{tally.total:,}" for tally, _ in results.values())])
    cells.append(["  of these, another's identity", *(f"{tally.foreign.total():,}" for tally, _ in results.values())])
    cells.append(["seconds", *(f"{seconds:.1f}" for _, seconds in results.values())])
    title = f"Crossings, {work.sessions:,} sessions x {work.turns} turns, seed {work.seed}"
    report.table(title, ["the identity is read in", *results], cells)
    ours = results["runtime"][0].total
    others = {name: tally.total for name, (tally, _) in results.items() if name != "runtime"}
    report.figures = {
        "sessions": work.sessions,
        "turns": work.turns,
        "seed": work.seed,
        "sabotaged": sabotaged,
        "crossings": {name: tally.total for name, (tally, _) in results.items()},
        "seconds": {name: round(seconds, 2) for name, (_, seconds) in results.items()},
        "places": {name: tally.as_dict() for name, (tally, _) in results.items()},
    }
    report.plot(partial(draw, results), width=9.0)
    words = "crossings with a sabotaged ContextVar" if sabotaged else "crossings"
    report.bound(f"{words}: {ours}", bool(ours) is sabotaged)
    for name, count in others.items():
        report.bound(f"{name}: {count} > 0", count > 0)


if __name__ == "__main__":
    sys.exit(main())
