"""Nodes: a lease that is renewed, lost and taken over; singletons; sessions that several nodes use. All on virtual time."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from hermes_trio import Runtime, SessionContext, Turn, TurnSpec
from hermes_trio.runtime.errors import Fenced, MembershipLost
from hermes_trio.runtime.membership import BEATS, MARGIN
from hermes_trio.runtime.outcome import TurnState
from hermes_trio.runtime.ports import RUN_TOPIC, Message, NewRun, NodeRequest, TurnFinish, TurnInput, TurnStart
from hermes_trio.store import SqliteStore, StoreError, open_store
from hermes_trio.store.sqlite.nodes import remove_node
from hermes_trio.testing.fakes import FakeAdapter
from hermes_trio.testing.faults import StoreFaults
from hermes_trio.testing.nodes import open_nodes

LEASE = 15.0


async def sleeper(turn: Turn) -> str:
    """Sleeps for as long as it is told, or for ever."""
    await trio.sleep(float(turn.input.text or "inf"))
    return "slept"


async def start(runtime: Runtime, text: str = "", session_id: str = "s") -> str:
    """Start a run and return its id."""
    run = await runtime.stateless.start_run(
        TurnSpec(input=TurnInput(text=text), context=SessionContext(session_id=session_id))
    )
    await trio.testing.wait_all_tasks_blocked()
    return run.id


async def status(store: SqliteStore, run_id: str) -> tuple[str, str]:
    """What a run's row says."""
    row = await store.get_run(run_id)
    assert row is not None
    return row.status.value, row.error_code


async def test_a_store_with_one_owner_has_no_timer(virtual_clock: object) -> None:
    """A store with one owner has no lease to renew: a heartbeat would advance a virtual clock for ever."""
    async with Runtime(agent=sleeper, store=open_store(None)) as runtime:
        await trio.testing.wait_all_tasks_blocked()
        assert trio.lowlevel.current_statistics().seconds_to_next_deadline == float("inf")
        ran: list[str] = []

        async def once() -> None:
            ran.append("here")

        await runtime.core.membership.run_alone("cron", once)
        assert ran == ["here"]


async def test_a_lease_is_kept_for_as_long_as_the_node_lives(virtual_clock: object) -> None:
    """Two nodes that live see nothing of each other's leases for an hour."""
    async with open_nodes() as nodes, nodes.open(sleeper, 2) as (one, two):
        run_id = await start(one, "3600")
        await trio.sleep(3601)
        assert await status(nodes.store, run_id) == ("completed", "")
        assert [node.name for node in await two.store.list_nodes()] == ["node-0", "node-1"]
        assert not one.core.membership.lost


class Life:
    """Keeps a runtime open until its lease is lost."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.opened = trio.Event()
        self.over = trio.Event()
        self.why = ""

    async def run(self) -> None:
        """The life itself."""
        try:
            async with self.runtime:
                self.opened.set()
                await trio.sleep_forever()
        except MembershipLost as lost:
            self.why = str(lost)
        self.over.set()


async def test_a_node_that_is_cut_off_ends_its_work_before_it_is_taken_over(virtual_clock: object) -> None:
    """Without an answer to its heartbeats a node stops within its lease; its neighbour gives what it held its end within a second of the lease's."""
    faults = StoreFaults()
    stopped: list[float] = []

    async def working(turn: Turn) -> str:
        try:
            await trio.sleep_forever()
        finally:
            stopped.append(trio.current_time())
        return "never"

    async with open_nodes() as nodes, nodes.make(sleeper, "alive") as alive, trio.open_nursery() as nursery:
        doomed = nodes.make(working, "doomed", faults=faults)
        life = Life(doomed)
        nursery.start_soon(life.run)
        await life.opened.wait()
        run_id = await start(doomed)
        began = trio.current_time()
        await trio.sleep(6)  # one heartbeat was answered
        faults.fail(times=None)
        await trio.sleep(began + 5 + LEASE - 1 - trio.current_time())
        assert len(stopped) == 1
        assert await status(nodes.store, run_id) == ("running", "")
        await trio.sleep(2)
        assert await status(nodes.store, run_id) == ("failed", "interrupted")
        assert [node.name for node in await alive.store.list_nodes()] == ["alive"]
        faults.heal()
        with trio.fail_after(60):
            await life.over.wait()
        assert "was not renewed within 15 s" in life.why


async def test_a_node_that_is_paused_past_its_lease_commits_nothing_afterwards(virtual_clock: object) -> None:
    """What it had sent, or sends when it wakes, is refused: the run has the one end that its neighbour gave it."""
    faults = StoreFaults()
    async with open_nodes() as nodes, nodes.make(sleeper, "alive"), trio.open_nursery() as nursery:
        paused = nodes.make(sleeper, "paused", faults=faults)
        life = Life(paused)
        nursery.start_soon(life.run)
        await life.opened.wait()
        run_id = await start(paused, "7")
        faults.slow("renew_node", seconds=40)  # every later write of this node waits behind it
        await trio.sleep(30)
        assert await status(nodes.store, run_id) == ("failed", "interrupted")
        with trio.fail_after(60):
            await life.over.wait()
        assert await status(nodes.store, run_id) == ("failed", "interrupted")
        assert [row.event["event"] for row in await nodes.store.events_after(run_id)] == ["run.failed"]
        assert await nodes.store.load_history("s") == []


async def test_a_node_that_claims_after_it_was_taken_over_says_that_its_lease_is_lost(virtual_clock: object) -> None:
    """The node ends for the same reason, whether a heartbeat or a claim detects the loss first."""
    async with open_nodes() as nodes, nodes.make(sleeper, "alive") as alive, trio.open_nursery() as nursery:
        done = trio.Event()
        alive.start_receiver("clock", lambda: alive.membership.run_alone("clock", done.wait))
        taken = nodes.make(sleeper, "taken over")
        life = Life(taken)
        nursery.start_soon(life.run)
        await life.opened.wait()
        await trio.sleep(1)
        taken.start_receiver("clock", lambda: taken.membership.run_alone("clock", trio.sleep_forever))
        await trio.sleep(1)
        await nodes.store._writer.submit(remove_node, taken.store.owner)  # type: ignore[attr-defined]
        done.set()
        with trio.fail_after(1):  # before the next heartbeat
            await life.over.wait()
        assert "taken over" in life.why


@pytest.mark.parametrize("answered", [True, False])
async def test_a_receiver_that_notices_the_takeover_first_ends_its_node_as_a_lost_lease(
    virtual_clock: object, answered: bool
) -> None:
    """Also if the store does not answer then: the node joins again, as after a heartbeat that was refused, and does not fail with the receiver's error."""
    faults = StoreFaults()
    async with open_nodes() as nodes, trio.open_nursery() as nursery:
        paused = nodes.make(sleeper, "paused", faults=faults)
        life = Life(paused)
        nursery.start_soon(life.run)
        await life.opened.wait()

        async def receive() -> None:
            await trio.sleep(1)
            await nodes.store._writer.submit(remove_node, paused.store.owner)
            if not answered:
                faults.fail("renew_node", times=None)
            await paused.store.supersede("job")

        paused.start_receiver("notices it", receive)
        with trio.fail_after(LEASE):
            await life.over.wait()
        assert ("taken over" if answered else "was not renewed within 15 s") in life.why


async def test_a_refused_write_of_a_node_that_has_its_lease_is_an_error_of_the_receiver(virtual_clock: object) -> None:
    """The store refuses the end of work that another node has: the lease is held, and the receiver's error is raised as any other."""

    async def receive() -> None:
        raise Fenced("the row belongs to another node")

    async with open_nodes() as nodes:
        alive = nodes.make(sleeper, "alive")

        async def live() -> None:
            async with alive:
                alive.start_receiver("refused", receive)
                await trio.sleep_forever()

        with pytest.raises(ExceptionGroup) as raised:
            await live()
        assert raised.group_contains(Fenced)
        assert not alive.core.membership.lost


async def test_what_a_crashed_node_held_is_ended_within_a_second_of_its_lease(
    virtual_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    """Another node reaps when the lease ends, not at its own next heartbeat, and logs which node took over from which."""
    async with open_nodes() as nodes, nodes.make(sleeper, "alive") as alive:
        await trio.sleep(3)
        async with nodes.store.shared("crashed", lease_seconds=LEASE) as crashed:
            await crashed.recover("e9")
            new = NewRun(run_id="run_1", session_id="s")
            await crashed.begin_turn(TurnStart(turn_id="", context=SessionContext(session_id="s"), source="x", run=new))
        ended = trio.Event()
        began = trio.current_time()
        with alive.store.subscribe(RUN_TOPIC, lambda _: ended.set(), "run_1"):
            await ended.wait()
        assert LEASE <= trio.current_time() - began <= LEASE + 1
        assert await status(nodes.store, "run_1") == ("failed", "interrupted")
        await trio.testing.wait_all_tasks_blocked()
        taken = f"node {alive.store.owner[:8]} took over the work of expired nodes ({crashed.owner[:8]})"
        assert taken in caplog.text


@pytest.mark.parametrize("problem", ["no answer to the reap", "the reap fails", "the settling fails", "nothing fails"])
async def test_what_waits_for_a_reap_is_settled_although_the_store_fails(virtual_clock: object, problem: str) -> None:
    """The expired node is gone from the store whether or not its reaper has heard so: who waits for that is called until it has succeeded, once."""
    faults = StoreFaults()
    settled: list[str] = []

    async def settle() -> None:
        assert "crashed" not in [node.name for node in await nodes.store.list_nodes()]
        if problem == "the settling fails" and not settled:
            settled.append("failed")
            raise StoreError("the database is away")
        settled.append("done")

    async with open_nodes() as nodes, nodes.make(sleeper, "alive", faults=faults) as alive:
        with alive.membership.after_reap(settle):
            async with nodes.store.shared("crashed", lease_seconds=LEASE):
                pass
            if "reap" in problem:
                faults.fail("reap", after_commit=problem == "no answer to the reap")
            await trio.sleep(LEASE + 1 + 2 * LEASE / BEATS)
            assert settled == (["failed", "done"] if problem == "the settling fails" else ["done"])
            await trio.sleep(3 * LEASE)
            assert settled[-1:] == ["done"]
            assert settled.count("done") == 1


@pytest.mark.parametrize("unfinished", [True, False])
async def test_what_a_node_leaves_unfinished_is_settled_by_another_one(virtual_clock: object, unfinished: bool) -> None:
    """A node stops in order and the store refuses the end of its turn: its leaving interrupts the turn, and another node settles that once."""
    settled: list[str] = []

    async def settle() -> None:
        settled.append("done")

    async with open_nodes() as nodes, nodes.make(sleeper, "alive") as alive:
        with alive.membership.after_reap(settle):
            faults = StoreFaults()
            adapter = FakeAdapter(one_shot="over")
            async with nodes.make(sleeper, "leaving", faults=faults) as leaving, adapter.connect(leaving):
                await adapter.say("3600")
                await trio.sleep(1)
                if unfinished:
                    faults.fail("finish_turn", times=None)
            await trio.sleep(3 * LEASE)
    assert settled == (["done"] if unfinished else [])


async def test_a_restart_within_the_lease_is_a_new_node(virtual_clock: object) -> None:
    """A node of the same name starts while the lease of its last life runs: what that held is ended when it has expired, and the new one keeps its own."""
    async with open_nodes() as nodes:
        async with nodes.store.shared("a", lease_seconds=LEASE) as before:
            assert await before.claim_lease("cron")
        await trio.sleep(2)
        async with nodes.make(sleeper, "a") as again:
            run_id = await start(again)
            assert [node.name for node in await again.store.list_nodes()] == ["a", "a"]
            assert not await again.store.claim_lease("cron")
            await trio.sleep(LEASE)
            assert await again.store.claim_lease("cron")
            assert [node.incarnation for node in await again.store.list_nodes()] == [again.store.owner]
            assert await status(nodes.store, run_id) == ("running", "")


async def test_two_nodes_with_one_name_are_two_nodes(virtual_clock: object) -> None:
    """Nothing is decided by a name: the end of one touches nothing of the other."""
    async with open_nodes() as nodes, nodes.make(sleeper, "same") as stays:
        kept = await start(stays, session_id="s1")
        async with nodes.make(sleeper, "same") as goes:
            assert goes.store.owner != stays.store.owner
            await start(goes, session_id="s2")
        await trio.sleep(100)
        assert await status(nodes.store, kept) == ("running", "")


async def test_a_singleton_moves_at_once_when_its_node_stops_as_planned(virtual_clock: object) -> None:
    """One node at a time runs it; a planned stop hands it over without waiting for a lease."""
    where: list[str] = []
    at_once: list[int] = []

    async with open_nodes() as nodes:

        def receiver(runtime: Runtime, name: str) -> None:
            async def run() -> None:
                where.append(name)
                at_once.append(len(where))
                try:
                    await trio.sleep_forever()
                finally:
                    at_once.pop()
                    where.append(f"{name} stopped")

            runtime.start_receiver("clock", lambda: runtime.core.membership.run_alone("clock", run))

        async with nodes.make(sleeper, "b") as second:
            async with nodes.make(sleeper, "a") as first:
                receiver(first, "a")
                await trio.testing.wait_all_tasks_blocked()
                receiver(second, "b")
                await trio.testing.wait_all_tasks_blocked()
                assert where == ["a"]
                assert next(node.leases for node in await second.store.list_nodes() if node.name == "a") == ("clock",)
                stopped = trio.current_time()
            await trio.testing.wait_all_tasks_blocked()
            assert (where, trio.current_time()) == (["a", "a stopped", "b"], stopped)
            assert len(at_once) == 1
            assert [node.name for node in await second.store.list_nodes()] == ["b"]


async def hold(runtime: Runtime, name: str) -> None:
    """Hold a lease for a moment."""
    async with runtime.core.membership.holding(name):
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("problem", ["a claim that is given up", "a claim without an answer", "a release that fails"])
async def test_a_lease_whose_holder_has_left_is_free_after_the_next_heartbeat(
    virtual_clock: object, problem: str
) -> None:
    """Whatever kept its node from releasing it: the node lives, and others must not wait for its end."""
    faults = StoreFaults()
    async with (
        open_nodes() as nodes,
        nodes.make(sleeper, "a", faults=faults) as first,
        nodes.make(sleeper, "b") as second,
    ):
        if problem == "a claim that is given up":
            faults.slow("claim_lease", seconds=2)
            with trio.move_on_after(1):
                await hold(first, "conversation")
            await trio.sleep(2)  # now it is claimed
        elif problem == "a claim without an answer":
            faults.fail("claim_lease", after_commit=True)
            with pytest.raises(StoreError):
                await hold(first, "conversation")
        else:
            faults.fail("release_lease")
            await hold(first, "conversation")
        with trio.fail_after(LEASE / BEATS + 2):
            await hold(second, "conversation")
        await hold(first, "conversation")
        assert all("conversation" not in node.leases for node in await second.store.list_nodes())


async def test_a_lease_is_held_for_as_long_as_one_task_of_the_node_holds_it(virtual_clock: object) -> None:
    """The first of two tasks that leaves releases nothing."""
    async with open_nodes() as nodes, nodes.open(sleeper, 2) as (one, two):
        async with one.core.membership.holding("x"):
            await hold(one, "x")
            await trio.sleep(LEASE)
            with trio.move_on_after(1) as bound:
                await hold(two, "x")
            assert bound.cancelled_caught
        await hold(two, "x")


async def test_a_request_does_not_wait_for_a_store_that_fails(virtual_clock: object) -> None:
    """Who holds a lease for a request gets the error of the store at once; a singleton tries again."""
    faults = StoreFaults()
    async with open_nodes() as nodes, nodes.make(sleeper, "a", faults=faults) as runtime:
        faults.fail("claim_lease", times=2)
        with pytest.raises(StoreError):
            await hold(runtime, "idempotency")
        ran: list[str] = []

        async def once() -> None:
            ran.append("here")

        await runtime.core.membership.run_alone("cron", once)
        assert ran == ["here"]


async def test_the_end_of_a_run_is_written_once_although_another_node_has_used_its_session_since(
    virtual_clock: object,
) -> None:
    """A node whose commit raised an error writes the end again; another node may have run a turn in between."""

    def end_of(number: int) -> TurnFinish:
        new = NewRun(run_id=f"run_{number}", session_id="s")
        context = SessionContext(session_id="s")
        begun = TurnStart(turn_id=f"turn_{number}", context=context, source="x", run=new, hold=True)
        messages = (Message(role="user", content=f"ask {number}"), Message(role="assistant", content="done"))
        return TurnFinish(start=begun, state=TurnState.COMPLETED, messages=messages, text="done")

    async with open_nodes() as nodes, nodes.store.shared("one") as one, nodes.store.shared("two") as two:
        for number, store in enumerate((one, two)):
            await store.begin_turn(end_of(number).start)
            await store.finish_turn(end_of(number))
        await one.finish_turn(end_of(0))
        said = [message.content for message in await nodes.store.load_history("s") if message.role == "user"]
        assert said == ["ask 0", "ask 1"]


async def test_a_run_that_waits_for_another_node_is_queued_for_everybody(virtual_clock: object) -> None:
    """The node that has the run says what its row says: a client that asks one node after the other never sees an earlier status."""
    async with open_nodes() as nodes, nodes.open(sleeper, 2) as (one, two):
        await start(one, "10")
        spec = TurnSpec(input=TurnInput(text="10"), context=SessionContext(session_id="s"))
        run = await two.stateless.start_run(spec)
        await trio.sleep(5)
        assert (run.status.value, await status(nodes.store, run.id)) == ("queued", ("queued", ""))
        await trio.sleep(10)
        assert (run.status.value, await status(nodes.store, run.id)) == ("running", ("running", ""))


async def test_a_session_is_used_by_one_node_at_a_time(virtual_clock: object) -> None:
    """A turn on B waits for the end of a turn on A in the same session, and sees what that has said."""
    order: list[str] = []

    async def agent(turn: Turn) -> str:
        order.append(f"{turn.input.text} begins after {len(await turn.history())}")
        await trio.sleep(10)
        order.append(f"{turn.input.text} ends")
        return "ok"

    async with open_nodes() as nodes, nodes.open(agent, 3) as runtimes, trio.open_nursery() as nursery:
        for number, runtime in enumerate(runtimes):
            nursery.start_soon(runtime.run_turn, f"turn {number}", SessionContext(session_id="s"))
            await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(5)
        assert order == ["turn 0 begins after 0"]
        nursery.start_soon(runtimes[0].run_turn, "elsewhere", SessionContext(session_id="t"))
        await trio.sleep(1)
        assert order[-1] == "elsewhere begins after 0"
    talk = [line for line in order if line.startswith("turn")]
    begins = [line for line in talk if "begins" in line]
    assert [line.rpartition(" ")[2] for line in begins] == ["0", "2", "4"]
    assert [("ends" in line) for line in talk] == [False, True] * 3


async def test_a_turn_that_waits_for_another_node_can_be_stopped(virtual_clock: object) -> None:
    """It ends without the session, and takes nothing from the turn that has it."""
    async with open_nodes() as nodes, nodes.open(sleeper, 2) as (one, two):
        first = await start(one, "20")
        second = await start(two, "20")
        assert await status(nodes.store, second) == ("queued", "")
        run = two.stateless.runs.find(second)
        assert run is not None
        assert (await run.stop()).ok
        assert await status(nodes.store, second) == ("cancelled", "stop")
        third = await start(two, "1")
        assert await status(nodes.store, third) == ("queued", "")
        await trio.sleep(30)
        assert [await status(nodes.store, id) for id in (first, third)] == [("completed", "")] * 2


async def test_a_session_of_a_dead_node_is_free_when_it_is_reaped(virtual_clock: object) -> None:
    """Who waits for it goes on then, without polling."""
    async with open_nodes() as nodes, nodes.make(sleeper, "alive") as alive:
        async with nodes.store.shared("dead", lease_seconds=LEASE) as dead:
            await dead.begin_turn(TurnStart(turn_id="t", context=SessionContext(session_id="s"), source="x", hold=True))
        began = trio.current_time()
        outcome = await alive.run_turn("1", SessionContext(session_id="s"))
        assert outcome.ok
        assert LEASE <= trio.current_time() - began <= LEASE + 2.5


async def test_a_node_answers_what_another_asks(virtual_clock: object) -> None:
    """A request reaches its node, an error is told by its name, and of a node that is gone the answer says so."""
    async with open_nodes() as nodes, nodes.open(sleeper, 2) as (one, two):

        async def double(request: NodeRequest) -> dict[str, int]:
            await trio.sleep(3)
            return {"twice": 2 * int(request.target)}

        with two.core.membership.answering("double", double):
            asked = one.core.membership.ask
            answer = await asked(two.store.owner, "double", "21")
            assert answer is not None
            assert dict(answer.value) == {"twice": 42}
            assert await asked(two.store.owner, "double", "21", seconds=1) is None
            answer = await asked(two.store.owner, "double", "x")
            assert answer is not None
            assert answer.value["error"] == "the node failed with ValueError"
        answer = await asked(two.store.owner, "double", "1")
        assert answer is not None
        assert "answers no requests" in answer.value["error"]
        answer = await asked("0" * 32, "double", "1")
        assert answer is not None
        assert answer.gone


async def test_one_lost_heartbeat_is_no_loss(virtual_clock: object) -> None:
    """A node that lives renews before it would give up, also if the answer to one heartbeat never comes."""
    assert 2 / BEATS < 1 - MARGIN
    faults = StoreFaults()
    async with open_nodes() as nodes, nodes.make(sleeper, "a", faults=faults) as runtime:
        faults.fail("renew_node", times=4)
        faults.fail("renew_node", after_commit=True, times=4)
        await trio.sleep(100)
        assert not runtime.core.membership.lost
        assert faults.calls["renew_node"] > 20
