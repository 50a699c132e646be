"""The live tree: what runs, its owner, its start, its deadline, and what it waits on."""

import logging
import threading
import time

import msgspec
import trio

from hermes_trio import Budget, Runtime, RuntimeSettings, SessionContext, Turn, TurnHooks, waiting, working
from hermes_trio.runtime.outcome import JobState
from hermes_trio.runtime.stop_receipt import stop_work
from hermes_trio.runtime.supervisor import Job, JobSpec
from hermes_trio.runtime.tree import REMEMBERED_ENDS, WATCHER_BUFFER, Tree
from hermes_trio.testing.fakes import ScriptedAgent


def find(tree: dict, kind: str) -> dict:
    """The first node of a kind in a snapshot."""
    pending = [tree]
    while pending:
        node = pending.pop(0)
        if node["kind"] == kind:
            return node
        pending += node["children"]
    raise AssertionError(f"no {kind} in {tree}")


async def during(runtime: Runtime, agent, look, *, asks=None) -> None:
    """Run a turn, look at the tree while everything is blocked, then stop it."""
    turns: list[Turn] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            lambda: runtime.run_turn("x", agent=agent, hooks=TurnHooks(asks=asks, on_start=turns.append))
        )
        await trio.testing.wait_all_tasks_blocked()
        look(turns[0])
        await turns[0].stop()


async def test_each_primitive_says_what_it_waits_on(runtime: Runtime):
    """Model, approval, process, lock, channel and thread, each in its own words."""
    from hermes_trio.agent.approvals import Approvals, Question
    from hermes_trio.agent.model import ModelRequest, collect
    from hermes_trio.providers.demo import DemoModel
    from hermes_trio.runtime.ports import Message

    release = threading.Event()
    approvals = Approvals(runtime.store)  # pyright: ignore

    async def ask_model(turn: Turn) -> str:
        request = ModelRequest(messages=(Message(role="user", content="!sleep 60"),), metadata={"directives": True})
        async with DemoModel().stream(request) as stream:
            return (await collect(stream)).text

    async def ask_person(turn: Turn) -> str:
        await approvals.ask(turn, Question(shown="rm -r x", description="recursive delete"))
        return ""

    async def use_thread(turn: Turn) -> str:
        await turn.run_sync(release.wait, name="slow")
        return ""

    def waits(kind: str, words: str):
        def look(turn: Turn) -> None:
            node = find(runtime.tree.snapshot(turn.node), kind)
            assert node["waits_on"].startswith(words), node

        return look

    await during(runtime, ask_model, waits("turn", "model demo"))
    await during(runtime, ask_person, waits("turn", "approval appr_"), asks=lambda event: None)
    threading.Timer(0.05, release.set).start()
    await during(runtime, use_thread, waits("thread", "thread slow"))

    # A lock: the second turn of a session waits for the first. Its own node says so.
    same = SessionContext(session_id="same")
    turns: list[Turn] = []
    async with trio.open_nursery() as nursery:

        async def forever(turn: Turn) -> str:
            await trio.sleep_forever()
            return ""

        nursery.start_soon(lambda: runtime.run_turn("1", same, agent=forever, hooks=TurnHooks(on_start=turns.append)))
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(lambda: runtime.run_turn("2", same, agent=forever, hooks=TurnHooks(on_start=turns.append)))
        await trio.testing.wait_all_tasks_blocked()
        assert turns[1].node.waits_on == f"lock session same held by {turns[0].id}"
        await turns[1].stop()
        await turns[0].stop()

    # A channel: the reader of in-process completions waits on it.
    async with trio.open_nursery() as nursery:

        async def read() -> None:
            with working("reader", "reader"):
                async for _ in runtime.completions():
                    pass

        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        assert find(runtime.tree.snapshot(), "reader")["waits_on"] == "channel in-process"
        nursery.cancel_scope.cancel()

    # A process: the job says which one it waits for.
    async def body(job: Job) -> JobState:
        job.started()
        with waiting("process 4120"):
            await trio.sleep(5)
        return JobState.EXITED

    job = await runtime.supervisor.start(JobSpec(kind="process", title="sleep", run=body), runtime.owner())
    await trio.testing.wait_all_tasks_blocked()
    assert find(runtime.tree.snapshot(), "process")["waits_on"] == "process 4120"
    await job.wait()


async def test_a_node_has_owner_age_and_deadline(runtime: Runtime):
    """The snapshot is JSON-ready data, and the rendering is for people."""

    async def agent(turn: Turn) -> str:
        await trio.sleep(3)
        node = find(runtime.tree.snapshot(), "turn")
        assert node["owner"] == "key"
        assert (node["age"], node["deadline"]) == (3.0, 7.0)
        text = runtime.tree.render()
        assert f"turn {turn.id}" in text
        assert "age 3.0s" in text
        assert "deadline in 7.0s" in text
        return "ok"

    context = SessionContext(session_key="key", session_id="s")
    outcome = await runtime.run_turn("x", context, agent=agent, budget=Budget(seconds=10))
    assert outcome.text == "ok"


class Copy:
    """A reader's copy of the tree, made from a snapshot and differences only."""

    def __init__(self, tree: dict) -> None:
        self.nodes: dict[int, dict] = {}
        self.how: dict[int, str] = {}
        pending = [(tree, None)]
        while pending:
            node, parent = pending.pop()
            self.nodes[node["key"]] = {**node, "parent": parent}
            pending += [(child, node["key"]) for child in node["children"]]

    def apply(self, difference) -> None:
        for node in difference.nodes:
            self.nodes[node.key] = msgspec.to_builtins(node)
        for key, how in difference.closed:
            del self.nodes[key]
            self.how[key] = how

    def shape(self) -> dict[int, tuple]:
        return {
            key: (node["parent"], node["id"], node["note"], node["waits_on"], node["deadline"] is None)
            for key, node in self.nodes.items()
        }


async def test_differences_rebuild_the_tree(runtime: Runtime):
    """Every change of a node is an event: opening, closing, waits, notes, deadlines and moves. A reader's copy is the tree."""
    tree = runtime.tree
    with tree.watch() as watcher:
        copy = Copy(msgspec.to_builtins(watcher.view()[0]))
        node = tree.root.open("x", "same")
        other = tree.root.open("x", "same")
        short = tree.root.open("x", "came and went")
        short.close()
        copy.apply(watcher.take())
        assert copy.shape() == Copy(tree.snapshot()).shape()
        assert node.key != other.key

        node.note = "said"
        node.waits = ["a thing"]
        other.scope = trio.CancelScope()
        other.deadline = trio.current_time() + 5
        other.move(node)
        copy.apply(watcher.take())
        assert copy.shape() == Copy(tree.snapshot()).shape()
        assert copy.nodes[other.key]["parent"] == node.key

        with waiting("approval 7", node):
            copy.apply(watcher.take())
            assert copy.nodes[node.key]["waits_on"] == "a thing; approval 7"
        other.close("cancelled")
        node.close()
        copy.apply(watcher.take())
        assert copy.shape() == Copy(tree.snapshot()).shape()
        assert copy.how == {other.key: "cancelled", node.key: "finished"}
        assert watcher.take().nodes == ()


async def test_a_reader_that_was_away_learns_what_changed(runtime: Runtime):
    """From a version on: what is alive and changed, and how the rest ended. Further back than the tree remembers there is only a snapshot."""
    tree = runtime.tree
    gone, stays = tree.root.open("x", "gone"), tree.root.open("x", "stays")
    version = tree.version
    copy = Copy(tree.snapshot())
    gone.close("cancelled")
    stays.note = "changed"
    new = tree.root.open("x", "new")
    tree.root.open("x", "never seen").close()
    missed = tree.since(version)
    assert missed is not None
    copy.apply(missed)
    assert copy.shape() == Copy(tree.snapshot()).shape()
    assert copy.how == {gone.key: "cancelled"}
    assert tree.since(tree.version + 1) is None
    for number in range(REMEMBERED_ENDS + 1):
        tree.root.open("x", str(number)).close()
    assert tree.since(version) is None
    stays.close()
    new.close()


async def test_a_watcher_that_is_too_slow_is_told_to_start_over(runtime: Runtime):
    """It must take a snapshot; nothing grows without bound for it, and the work does not wait for it."""
    tree = runtime.tree
    with tree.watch() as watcher:
        nodes = [tree.root.open("x", str(number)) for number in range(WATCHER_BUFFER + 2)]
        assert watcher.behind
        assert watcher.view()[1] > WATCHER_BUFFER
        assert not watcher.behind
        for node in nodes:
            node.close()


async def test_a_watcher_waits_until_something_changes(runtime: Runtime):
    """An idle reader sleeps; a change of another tenant does not wake it."""
    tree = runtime.tree
    woken = []
    async with trio.open_nursery() as nursery:
        with tree.watch("acme") as watcher:

            async def read() -> None:
                await watcher.wait()
                woken.append(watcher.take())

            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            other = tree.root.open("turn", "theirs", tenant="other")
            await trio.testing.wait_all_tasks_blocked()
            assert not woken
            mine = tree.root.open("turn", "mine", tenant="acme")
            await trio.testing.wait_all_tasks_blocked()
            assert [node.id for node in woken[0].nodes] == ["mine"]
    other.close()
    mine.close()


def ids_of(tree: dict) -> list[str]:
    """The ids in a snapshot."""
    return [tree["id"], *(id for child in tree["children"] for id in ids_of(child))]


async def test_a_tenant_sees_its_own_nodes_and_the_places_that_hold_them(runtime: Runtime):
    """Filtered by the tenant on the node, in the snapshot and in the differences; what places say is not for it."""
    tree = runtime.tree
    tree.root.note = "the loop was blocked by a turn of somebody else"
    receiver = tree.root.open("receiver", "adapter")
    with tree.watch("acme") as watcher:
        turns = runtime.core.turns_node
        mine = turns.open("turn", "mine", tenant="acme")
        tool = mine.open("tool", "call")
        deep = receiver.open("send", "mine too", tenant="acme")
        theirs = turns.open("turn", "theirs", tenant="other")
        seen = tree.snapshot(tenant="acme")
        assert sorted(ids_of(seen)) == ["abandoned", "call", "mine", "mine too", "runtime", "supervisor", "turns"]
        assert seen["note"] == ""
        difference = watcher.take()
        told = {node.id: node.parent for node in difference.nodes}
        assert told == {"mine": turns.key, "call": mine.key, "mine too": tree.root.key}
        theirs.close()
        assert watcher.take() == difference.__class__(tree.version, -1, (), ())
    for node in (tool, mine, deep, receiver):
        node.close()
    tree.root.note = ""


async def test_every_kind_of_work_can_be_stopped_by_its_node(runtime: Runtime):
    """A turn, a job and all jobs of a session: each has a receipt, told line by line as its nodes end."""
    from hermes_trio import CancelCause, Cause
    from hermes_trio.testing.fakes import fake_job

    cause = Cause(CancelCause.STOP, "by Ada")
    lines = []

    async def agent(turn: Turn) -> str:
        with working("tool", "call", "slow"):
            await trio.sleep_forever()
        return ""

    turns: list[Turn] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: runtime.run_turn("x", agent=agent, hooks=TurnHooks(on_start=turns.append)))
        await trio.testing.wait_all_tasks_blocked()
        receipt = await stop_work(turns[0].node, cause, 5, lines.append)
    assert receipt.ok
    assert [(line.node, line.how) for line in lines] == [("call", "cancelled"), (turns[0].id, "cancelled")]
    assert turns[0].cause == cause
    assert (await stop_node_again(runtime, turns[0])) == "cannot be stopped"

    jobs = [await runtime.supervisor.start(fake_job(10_000), runtime.owner()) for _ in range(3)]
    assert (await stop_work(jobs[0].node, cause, 5)).ok
    session = jobs[1].node.parent
    assert session is not None
    receipt = await stop_work(session, cause, 5, lines.append)
    assert receipt.ok
    assert len(receipt.lines) == 3
    assert {job.state for job in jobs} == {JobState.KILLED}


async def stop_node_again(runtime: Runtime, turn: Turn) -> str:
    """What a second stop of the same node says."""
    from hermes_trio import CancelCause, Cause

    try:
        await stop_work(turn.node, Cause(CancelCause.STOP), 1)
    except ValueError as error:
        return "cannot be stopped" if "cannot be stopped" in str(error) else str(error)
    return ""


async def test_a_lane_says_what_waits_and_its_stop_is_the_stop_of_its_turn(runtime: Runtime):
    """Messages behind a turn are noted on the lane's node; stopping the lane ends the turn, and the next message is taken."""
    from hermes_trio import CancelCause, Cause, Interface, NewMessage

    asked: list[str] = []

    async def agent(turn: Turn) -> str:
        asked.append(turn.input.text)
        if turn.input.text == "first":
            await trio.sleep_forever()
        return "ok"

    class Chat(Interface):
        platform = "chat"

    interface = Chat()
    interface.agent = agent
    async with runtime.delivering(interface) as inbox:
        routing = SessionContext(platform="chat", chat_id="1", session_key="k")
        for text in ("first", "second"):
            await inbox.accept(NewMessage(inbox="chat", session_key="k", text=text, routing=routing))
            await trio.testing.wait_all_tasks_blocked()
        lane = find(runtime.tree.snapshot(), "lane")
        assert (lane["note"], lane["stops"]) == ("more waits in its inbox", True)
        await trio.sleep(90)
        assert find(runtime.tree.snapshot(), "lane")["since"] >= 90
        node = runtime.tree.find_key(lane["key"])
        assert node is not None
        receipt = await stop_work(node, Cause(CancelCause.STOP), 5)
        assert receipt.ok
        await trio.testing.wait_all_tasks_blocked()
        assert asked == ["first", "second"]


async def test_without_a_watcher_a_change_leaves_nothing_behind():
    """Nothing is collected for readers that are not there."""
    tree = Tree()
    assert tree.watchers == 0
    node = tree.root.open("x", "x")
    for number in range(1000):
        node.note = str(number)
    node.close()
    assert len(tree._ended) == 1


async def test_the_loop_is_watched_and_whoever_blocks_it_is_named(caplog):
    """A step above the limit is logged with the session and the stack, and shown in the tree."""

    async def rude(turn: Turn) -> str:
        deadline = time.monotonic() + 5
        while not runtime.watchdog.blocked and time.monotonic() < deadline:
            time.sleep(0.01)  # noqa: ASYNC251 - rudeness is what is tested
        return ""

    async with Runtime(agent=rude, settings=RuntimeSettings(watchdog_seconds=0.05)) as runtime:
        assert runtime.watchdog is not None
        with caplog.at_level(logging.WARNING):
            await runtime.run_turn("x", SessionContext(session_id="rude-one"))
        assert runtime.watchdog.blocked >= 1
        await trio.testing.wait_all_tasks_blocked()
        assert "of session rude-one" in runtime.tree.root.note
        assert "in rude" in caplog.text


async def test_a_snapshot_of_many_nodes_is_complete(runtime: Runtime):
    """Ten thousand nodes, one step."""
    nodes = [runtime.tree.root.open("leaf", str(number)) for number in range(10_000)]
    assert len(runtime.tree.snapshot()["children"]) >= 10_000
    for node in nodes:
        node.close()
    assert runtime.tree.find("17") is None


async def test_draining_refuses_new_work_and_proves_that_nothing_is_left(
    runtime: Runtime, scripted_agent: ScriptedAgent
):
    """Turns get their time, then they are cancelled; the report is all zero."""
    import pytest

    from hermes_trio import CancelCause, Draining
    from hermes_trio.testing.fakes import fake_job

    causes = []

    async def on_end(outcome) -> None:
        causes.append(outcome.cause)

    async def slow(turn: Turn) -> str:
        await turn.core.supervisor.start(fake_job(10_000), turn.owner)
        await trio.sleep(float(turn.input.text))
        return "ok"

    async with trio.open_nursery() as nursery:
        for seconds in ("5", "5000"):

            async def one(seconds=seconds) -> None:
                await runtime.run_turn(seconds, agent=slow, hooks=TurnHooks(on_end=on_end))

            nursery.start_soon(one)
        await trio.testing.wait_all_tasks_blocked()
        report = await runtime.drain(60)
    assert report.ok
    assert (report.turns, report.jobs, report.threads, report.cancelled, report.seconds) == (0, 0, 0, 1, 60.0)
    assert [cause and cause.kind for cause in causes] == [None, CancelCause.DRAIN]
    with pytest.raises(Draining):
        await runtime.run_turn("x")


async def test_the_turn_that_asks_for_a_drain_is_not_waited_for(runtime: Runtime):
    """No deadlock of a restart with itself: neither the turn nor its parent is waited for or cancelled."""

    async def child(turn: Turn) -> str:
        report = await runtime.drain(60, asking=turn)
        return f"drained {report.turns} {report.seconds}"

    async def parent(turn: Turn) -> str:
        return (await turn.run_child("restart", agent=child)).text

    outcome = await runtime.run_turn("x", agent=parent)
    assert outcome.text == "drained 0 0.0"
