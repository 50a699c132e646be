"""Runs that are begun again after an interruption: by another node, or at the next start. All on virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from hermes_trio import Runtime, SessionContext, Turn, TurnSpec
from hermes_trio.runtime.core import RuntimeSettings
from hermes_trio.runtime.errors import MembershipLost
from hermes_trio.runtime.outcome import CancelCause, Cause, RunStatus
from hermes_trio.runtime.ports import Message, NewRun, Resumption, TurnInput, TurnStart
from hermes_trio.runtime.run import Run
from hermes_trio.store import Runner, RunRow, SqliteStore, open_store
from hermes_trio.store.sqlite.nodes import remove_node
from hermes_trio.testing.faults import StoreFaults
from hermes_trio.testing.nodes import Nodes, open_nodes

LEASE = 15.0


class Work:
    """An agent that counts its turns. Turn `hangs` and those before it never end."""

    def __init__(self, hangs: int = 1) -> None:
        self.hangs = hangs
        self.begun: list[tuple[str, str]] = []
        """The node and the text of each turn."""
        self.now = 0
        self.most = 0
        """How many turns ran at once, at most."""

    async def __call__(self, turn: Turn) -> str:
        """One turn."""
        self.begun.append((turn.core.store.node_name, turn.input.text))
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            turn.emit("message.delta", delta="so far ")
            await trio.sleep(float("inf") if len(self.begun) <= self.hangs else 5)
        finally:
            self.now -= 1
        return f"done {len(self.begun)}"


class Life:
    """Keeps a runtime open until its lease is lost."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.opened = trio.Event()
        self.over = trio.Event()

    async def run(self) -> None:
        """The life itself."""
        try:
            async with self.runtime:
                self.opened.set()
                await trio.sleep_forever()
        except MembershipLost:
            pass
        self.over.set()


async def start(runtime: Runtime, session_id: str = "s", text: str = "go") -> Run:
    """Start a run that is begun again when it is interrupted."""
    spec = TurnSpec(
        input=TurnInput(text=text, instructions="be brief", history=(Message(role="user", content="before"),)),
        context=SessionContext(session_id=session_id, session_key=f"key {session_id}"),
        source="x",
    )
    run = await runtime.stateless.start_run(spec, idempotency_key=f"k {session_id}", fingerprint="f", resumable=True)
    await trio.testing.wait_all_tasks_blocked()
    return run


async def row_of(store: SqliteStore, run_id: str) -> RunRow:
    """The run's row."""
    row = await store.get_run(run_id)
    assert row is not None
    return row


async def names(store: SqliteStore, run_id: str) -> list[str]:
    """The names of a run's events, whose numbers have no gap."""
    rows = await store.events_after(run_id)
    assert [row.number for row in rows] == list(range(1, len(rows) + 1))
    return [row.event["event"] for row in rows]


@asynccontextmanager
async def doomed_and_alive(work: Work, faults: StoreFaults | None = None) -> AsyncIterator[tuple[Nodes, Life, Runtime]]:
    """A node that will be lost, and one that stays."""
    async with (
        open_nodes(lease_seconds=LEASE) as nodes,
        nodes.make(work, "alive") as alive,
        trio.open_nursery() as nursery,
    ):
        life = Life(nodes.make(work, "doomed", faults=faults))
        nursery.start_soon(life.run)
        await life.opened.wait()
        yield nodes, life, alive
        nursery.cancel_scope.cancel()


async def test_a_run_of_a_lost_node_goes_on_at_another_one(virtual_clock: object) -> None:
    """It keeps its id, session and key, begins with the same input, and its log goes on with one event; a cut-off node tells no end of it."""
    faults, work = StoreFaults(), Work()
    async with doomed_and_alive(work, faults) as (nodes, life, alive):
        run = await start(life.runtime)
        await trio.sleep(1)
        before = await row_of(nodes.store, run.id)
        faults.fail(times=None)
        await life.over.wait()
        assert (run.lost, run.ended.is_set(), run.terminal) == (True, False, None)
        await trio.sleep(LEASE + 1)
        row = await row_of(nodes.store, run.id)
        assert work.begun == [("doomed", "go"), ("alive", "go")]
        assert work.most == 1
        assert (row.status, row.output, row.attempt) == (RunStatus.COMPLETED, "done 2", 2)
        kept = ("run_id", "session_id", "idempotency_key", "fingerprint", "created_at", "input_preview")
        assert [getattr(row, name) for name in kept] == [getattr(before, name) for name in kept]
        log = await names(nodes.store, run.id)
        assert log == ["message.delta", "run.resumed", "message.delta", "run.completed", "run.settled"]
        (resumed,) = [one for one in await nodes.store.events_after(run.id) if one.event["event"] == "run.resumed"]
        assert (resumed.epoch, resumed.event["attempt"], resumed.event["attempts"]) == (alive.core.epoch, 2, 3)
        assert [message.text for message in await nodes.store.load_history("s")] == ["go", "done 2"]
        assert not await nodes.store._reads.point(lambda db: db.execute("SELECT 1 FROM resumptions").fetchall())


async def test_a_paused_node_that_wakes_up_writes_nothing_of_its_attempt(virtual_clock: object) -> None:
    """What it had sent is refused: the events and the end are those of the attempt that followed."""
    faults, work = StoreFaults(), Work()
    async with doomed_and_alive(work, faults) as (nodes, life, _):
        run = await start(life.runtime)
        faults.slow("renew_node", seconds=60)  # every later write of this node waits behind it
        await trio.sleep(LEASE - 2)
        run.emit({"event": "tool.started", "tool": "late", "preview": ""})
        with trio.fail_after(120):
            await life.over.wait()
        await trio.sleep(LEASE)
        assert (await row_of(nodes.store, run.id)).output == "done 2"
        assert "tool.started" not in await names(nodes.store, run.id)
        assert work.most == 1 or work.begun == [("doomed", "go"), ("alive", "go")]


async def test_the_attempts_are_bounded(virtual_clock: object) -> None:
    """A run that takes its node down with it is begun three times, then it has failed."""
    work = Work(hangs=9)
    async with open_nodes(lease_seconds=LEASE) as nodes, trio.open_nursery() as nursery:
        run_id = ""
        for number in range(4):
            life = Life(nodes.make(work, f"node-{number}"))
            nursery.start_soon(life.run)
            await life.opened.wait()
            run_id = run_id or (await start(life.runtime)).id
            await trio.testing.wait_all_tasks_blocked()
            assert (await row_of(nodes.store, run_id)).attempt == min(number + 1, 3)
            await nodes.store._writer.submit(remove_node, life.runtime.store.owner)
            await life.over.wait()
        row = await row_of(nodes.store, run_id)
        assert len(work.begun) == 3
        assert (row.status, row.error_code, row.attempt) == (RunStatus.FAILED, "interrupted", 3)
        assert (await names(nodes.store, run_id))[-1] == "run.failed"


async def test_a_node_that_dies_between_claim_and_begin_loses_nothing(virtual_clock: object) -> None:
    """Each claim counts as an attempt, also if its node never began it; the next node goes on."""
    work = Work()
    async with doomed_and_alive(work) as (nodes, life, alive):
        run = await start(life.runtime)
        async with nodes.store.shared("claimer", lease_seconds=LEASE) as claimer:
            await nodes.store._writer.submit(remove_node, life.runtime.store.owner)
            await claimer.recover("e9")
            assert [one.run.run_id for one in await claimer.claim_interrupted("e9")] == [run.id]
            assert (await row_of(nodes.store, run.id)).owner == claimer.owner
        await trio.sleep(2 * LEASE)
        row = await row_of(nodes.store, run.id)
        assert (row.status, row.output, row.attempt) == (RunStatus.COMPLETED, "done 2", 3)
        assert (await names(nodes.store, run.id)).count("run.resumed") == 2
        assert alive.stateless.runs.find(run.id) is None


@pytest.mark.parametrize("verb", ["claim_interrupted", "begin_turn", "session_host"])
@pytest.mark.parametrize("written", [False, True])
async def test_a_store_that_fails_at_the_next_attempt_delays_it(
    virtual_clock: object, verb: str, written: bool
) -> None:
    """Whether the claim, the placing or the begin was refused, or written without an answer: the run is begun once more, by one node."""
    faults, work = StoreFaults(), Work()
    async with (
        open_nodes(lease_seconds=LEASE) as nodes,
        nodes.make(work, "alive", faults=faults),
        trio.open_nursery() as nursery,
    ):
        life = Life(nodes.make(work, "doomed"))
        nursery.start_soon(life.run)
        await life.opened.wait()
        run = await start(life.runtime)
        faults.fail(verb, after_commit=written)
        await nodes.store._writer.submit(remove_node, life.runtime.store.owner)
        await life.over.wait()
        async with nodes.make(work, "third"):  # its start reaps
            await trio.sleep(2 * LEASE)
        row = await row_of(nodes.store, run.id)
        assert (row.status, row.output, row.attempt, work.most) == (RunStatus.COMPLETED, "done 2", 2, 1)
        assert (await names(nodes.store, run.id)).count("run.resumed") == 1


async def test_a_resumed_run_waits_for_its_session(virtual_clock: object) -> None:
    """A turn of another node that has the session ends first."""
    work = Work(hangs=0)
    order: list[str] = []

    async def agent(turn: Turn) -> str:
        order.append(turn.input.text)
        await trio.sleep(300 if turn.input.text == "first" else 5)
        return turn.input.text

    async with open_nodes(lease_seconds=LEASE) as nodes, nodes.open(agent, 2) as (one, two):
        await start(one, text="first")
        async with nodes.store.shared("crashed", lease_seconds=LEASE) as crashed:
            await crashed.recover("e9")
            doomed = await _accept(crashed, "s")
        await trio.sleep(3 * LEASE)
        row = await row_of(nodes.store, doomed)
        assert (row.status, row.attempt, order) == (RunStatus.QUEUED, 2, ["first"])
        await trio.sleep(300)
        assert (await row_of(nodes.store, doomed)).output == "second"
        assert (order, two.core.membership.lost, work.begun) == (["first", "second"], "", [])


async def _accept(store: SqliteStore, session_id: str) -> str:
    """Accept a run as a node that dies at once."""
    context = SessionContext(session_id=session_id, session_key=f"key {session_id}")
    await store.begin_turn(
        TurnStart(
            turn_id="",
            context=context,
            source="x",
            run=NewRun(run_id="run_1", session_id=session_id, resumable=True),
            resumption=Resumption(context=context, source="x", input=TurnInput(text="second")),
        )
    )
    return "run_1"


@pytest.mark.parametrize("when", ["before", "released", "claimed"])
async def test_a_stop_holds_across_the_hand_over(virtual_clock: object, when: str) -> None:
    """Whether its node is lost already, the run waits for a claim, or another node has claimed it: the agent does not get it once more."""
    work = Work(hangs=9)
    async with open_nodes(lease_seconds=LEASE) as nodes, trio.open_nursery() as nursery:
        life = Life(nodes.make(work, "doomed"))
        nursery.start_soon(life.run)
        await life.opened.wait()
        run = await start(life.runtime)
        async with nodes.store.shared("other", lease_seconds=LEASE) as other:
            await other.recover("e8")
            if when == "before":
                await other.stop_resuming("e8", run_id=run.id)
            await nodes.store._writer.submit(remove_node, life.runtime.store.owner)
            await life.over.wait()
            await other.reap("e8")
            if when == "released":
                assert (await row_of(nodes.store, run.id)).owner == ""
                await other.stop_resuming("e8", session_id="s")
            async with nodes.make(work, "next") as after:
                if when == "claimed":
                    await trio.testing.wait_all_tasks_blocked()
                    row = await row_of(nodes.store, run.id)
                    assert (row.owner, len(work.begun)) == (after.store.owner, 2)
                    await other.stop_resuming("e8", run_id=run.id)
                    cause = Cause(CancelCause.STOP)
                    assert (await after.peers.stop_run(run.id, row.owner, cause)).ok
                await trio.sleep(LEASE)
        row = await row_of(nodes.store, run.id)
        assert (row.status, len(work.begun)) == (RunStatus.CANCELLED, 2 if when == "claimed" else 1)
        assert (await names(nodes.store, run.id)).count("run.cancelled") == 1


async def test_a_stop_that_comes_while_a_run_is_being_claimed_waits_for_it(virtual_clock: object) -> None:
    """The claim is committed and the run is not there yet: the node answers when it is, and stops it."""
    faults, work = StoreFaults(), Work(hangs=9)
    async with (
        open_nodes(lease_seconds=LEASE) as nodes,
        nodes.make(work, "alive", faults=faults) as alive,
        nodes.make(work, "asking") as asking,
    ):
        async with nodes.store.shared("crashed", lease_seconds=LEASE) as crashed:
            await crashed.recover("e9")
            run_id = await _accept(crashed, "s")
            await nodes.store._writer.submit(remove_node, crashed.owner)
        faults.slow("session_host", seconds=3)
        await asking.stateless.runs.claiming.acquire()  # it leaves the claim to the other node
        await asking.store.reap("e7")
        with trio.fail_after(LEASE):
            while not (row := await row_of(nodes.store, run_id)).owner:  # noqa: ASYNC110
                await trio.sleep(0.1)
        asking.stateless.runs.claiming.release()
        assert row.owner == alive.store.owner
        await asking.stateless.stop_resuming(run_id)
        receipt = await asking.peers.stop_run(run_id, row.owner, Cause(CancelCause.STOP))
        assert (receipt.ok, receipt.already_ended) == (True, False)
        assert ((await row_of(nodes.store, run_id)).status, work.now) == (RunStatus.CANCELLED, 0)


async def test_a_drain_ends_a_resumable_run(virtual_clock: object) -> None:
    """A planned stop is no loss: the run is cancelled as any other, and no node begins it again."""
    work = Work()
    async with open_nodes(lease_seconds=LEASE) as nodes, nodes.make(work, "stays"):
        async with nodes.make(work, "leaves") as leaves:
            run = await start(leaves)
        await trio.sleep(LEASE)
        row = await row_of(nodes.store, run.id)
        assert (row.status, row.error_code, len(work.begun)) == (RunStatus.CANCELLED, "drain", 1)


async def test_a_draining_node_leaves_a_released_run_to_others(virtual_clock: object) -> None:
    """It reaps, but does not begin; a node that starts later does."""
    work = Work()
    async with open_nodes(lease_seconds=LEASE) as nodes:
        async with nodes.make(work, "draining") as draining:
            async with nodes.store.shared("crashed", lease_seconds=LEASE) as crashed:
                await crashed.recover("e9")
                run_id = await _accept(crashed, "s")
            await draining.drain(0)
            await trio.sleep(3 * LEASE)
            assert (await row_of(nodes.store, run_id)).owner == ""
        async with nodes.make(work, "next"):
            await trio.sleep(1)
            assert work.begun == [("next", "second")]


async def test_a_run_goes_on_after_a_crash_of_the_only_server(virtual_clock: object, tmp_path: Path) -> None:
    """At the next start, before anything else is served, with the status that its client saw; the store has followed no run from status to status."""
    work = Work()
    path = tmp_path / "state.db"
    run_id = await _crash(path, work, ["s"])
    async with Runtime(agent=work, store=open_store(path, runner=Runner.INLINE)) as runtime:
        run = runtime.stateless.runs.find(run_id[0])
        assert run is not None
        assert (run.status, run.attempt) == (RunStatus.RUNNING, 2)
        await run.settled.wait()
        assert await names(runtime.store, run.id) == ["run.resumed", "message.delta", "run.completed"]  # type: ignore[arg-type]
        assert (run.status, run.outcome is not None and run.outcome.text) == (RunStatus.COMPLETED, "done 2")


async def test_more_interrupted_runs_than_turns_wait_for_a_place(virtual_clock: object, tmp_path: Path) -> None:
    """The limit of turns holds; a shutdown meanwhile ends those that wait, too."""
    work = Work(hangs=3)
    path = tmp_path / "state.db"
    ids = await _crash(path, work, ["a", "b", "c"])
    settings = RuntimeSettings(max_turns=1, watchdog_seconds=0)
    async with Runtime(agent=work, store=open_store(path, runner=Runner.INLINE), settings=settings) as runtime:
        await trio.testing.wait_all_tasks_blocked()
        assert (len(work.begun), len(runtime.stateless.runs)) == (4, 3)
        await trio.sleep(6)
        assert len(work.begun) == 5
    async with open_store(path, runner=Runner.INLINE) as store:
        found = [(await row_of(store, run_id)).status.value for run_id in ids]
    assert sorted(found) == ["cancelled", "cancelled", "completed"]


async def test_an_interrupted_run_that_waits_for_a_place_is_stopped_at_once(
    virtual_clock: object, tmp_path: Path
) -> None:
    """It needs no place to end: neither a stop nor a drain of the others waits until a turn that goes on has ended."""
    work = Work(hangs=9)
    path = tmp_path / "state.db"
    await _crash(path, work, ["a", "b", "c"])
    settings = RuntimeSettings(max_turns=1, watchdog_seconds=0)
    async with Runtime(agent=work, store=open_store(path, runner=Runner.INLINE), settings=settings) as runtime:
        await trio.testing.wait_all_tasks_blocked()
        (running,) = [run for run in runtime.stateless.runs.all() if run.turn.locked]
        first, second = [run for run in runtime.stateless.runs.all() if run is not running]
        with trio.fail_after(1):
            assert (await first.stop()).ok
            await first.settled.wait()
            report = await runtime.drain(0, asking=running.turn)
        assert report.cancelled == 1
        for run, code in ((first, "stop"), (second, "drain")):
            row = await row_of(runtime.store, run.id)  # type: ignore[arg-type]
            assert (row.status, row.error_code) == (RunStatus.CANCELLED, code)
        assert runtime.core.admission.active == 1
        assert (await running.stop()).ok
        await running.settled.wait()
        assert runtime.core.admission.active == 0


async def test_nodes_share_the_runs_of_a_lost_node(virtual_clock: object) -> None:
    """A node claims what it has a place for and one run more, which waits in line: the rest is begun elsewhere, and loses no attempt with this node."""
    work = Work(hangs=6)
    settings = RuntimeSettings(max_turns=2, watchdog_seconds=0)
    async with open_nodes(lease_seconds=LEASE) as nodes, trio.open_nursery() as nursery:
        life = Life(nodes.make(work, "doomed"))
        nursery.start_soon(life.run)
        await life.opened.wait()
        runs = [await start(life.runtime, f"s{number}") for number in range(6)]
        await nodes.store._writer.submit(remove_node, life.runtime.store.owner)
        await life.over.wait()
        async with nodes.make(work, "one", settings=settings) as one:
            await one.store.reap("e9")
            await trio.sleep(1)
            rows = [await row_of(nodes.store, run.id) for run in runs]
            assert sorted(row.attempt for row in rows) == [1, 1, 1, 2, 2, 2]
            async with nodes.make(work, "two", settings=settings):
                await trio.sleep(1)
                assert sorted(work.begun[6:]) == [("one", "go")] * 2 + [("two", "go")] * 2
                await trio.sleep(2 * LEASE)
                rows = [await row_of(nodes.store, run.id) for run in runs]
                assert [(row.status, row.attempt) for row in rows] == [(RunStatus.COMPLETED, 2)] * 6
        assert work.most <= 6


async def test_a_runtime_that_serves_no_clients_of_runs_leaves_them_to_one_that_does(
    virtual_clock: object, tmp_path: Path
) -> None:
    """It releases them, at its start and as a node; its own end is not theirs."""
    work = Work()
    path = tmp_path / "state.db"
    (run_id,) = await _crash(path, work, ["s"])
    settings = RuntimeSettings(resume_runs=False, watchdog_seconds=0)
    async with Runtime(agent=work, store=open_store(path, runner=Runner.INLINE), settings=settings) as runtime:
        await trio.sleep(60)
        row = await row_of(runtime.store, run_id)  # type: ignore[arg-type]
        assert (row.owner, row.attempt, len(work.begun)) == ("", 1, 1)
    async with Runtime(agent=work, store=open_store(path, runner=Runner.INLINE)) as runtime:
        await trio.sleep(60)
        assert (await row_of(runtime.store, run_id)).attempt == 2  # type: ignore[arg-type]
    async with open_nodes(lease_seconds=LEASE) as nodes, nodes.make(work, "terminal", settings=settings):
        async with nodes.store.shared("crashed", lease_seconds=LEASE) as crashed:
            await crashed.recover("e9")
            await _accept(crashed, "s")
        await trio.sleep(3 * LEASE)
        assert (await row_of(nodes.store, "run_1")).owner == ""
        async with nodes.make(work, "server"):
            await trio.sleep(6)
            assert work.begun[-1] == ("server", "second")


async def _crash(path: Path, work: Work, sessions: Sequence[str]) -> list[str]:
    """Start runs in a server whose store takes nothing any more when it ends; return their ids."""
    faults = StoreFaults()
    settings = RuntimeSettings(finish_seconds=0.1, watchdog_seconds=0)
    opened = faults.around(open_store(path, runner=Runner.INLINE))
    async with Runtime(agent=work, store=opened, settings=settings) as runtime:
        runs = [await start(runtime, session_id) for session_id in sessions]
        faults.fail(times=None)
    assert [run.ended.is_set() for run in runs] == [False] * len(runs)
    return [run.id for run in runs]
