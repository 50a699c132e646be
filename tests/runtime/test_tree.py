"""The live tree: who runs, for whom, since when, until when, and what it waits on."""

import logging
import threading
import time

import trio

from hermes_trio import Budget, Runtime, RuntimeSettings, SessionContext, Turn, waiting, working
from hermes_trio.runtime.outcome import JobState
from hermes_trio.runtime.supervisor import Job, JobSpec
from hermes_trio.runtime.tree import WATCHER_BUFFER
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


async def during(runtime: Runtime, agent, look, **options) -> None:
    """Run a turn, look at the tree while everything is blocked, then stop it."""
    turns: list[Turn] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: runtime.run_turn("x", agent=agent, on_start=turns.append, **options))
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

        nursery.start_soon(lambda: runtime.run_turn("1", same, agent=forever, on_start=turns.append))
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(lambda: runtime.run_turn("2", same, agent=forever, on_start=turns.append))
        await trio.testing.wait_all_tasks_blocked()
        assert turns[1].node.waits_on == f"lock session same held by {turns[0].id}"
        await turns[1].stop()
        await turns[0].stop()

    # A channel: whoever reads the in-process completions waits on it.
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


async def test_differences_can_be_watched_and_rebuild_the_tree(runtime: Runtime):
    """Opened and closed nodes arrive in order, so a reader's copy is the tree."""

    async def agent(turn: Turn) -> str:
        turn.start_soon(trio.sleep, 1, name="nap")
        await trio.sleep(2)
        return ""

    with runtime.tree.watch() as watcher:
        await runtime.run_turn("x", agent=agent)
        seen = []
        async for event in watcher:
            seen.append((event["event"], event["node"]["kind"], event["how"]))
            if event["event"] == "closed" and event["node"]["kind"] == "turn":
                break
    assert [entry for entry in seen if entry[0] != "changed"] == [
        ("opened", "turn", ""),
        ("opened", "task", ""),
        ("closed", "task", "finished"),
        ("closed", "turn", "completed"),
    ]


async def test_a_watcher_that_is_too_slow_is_told_to_start_over(runtime: Runtime):
    """It gets `resync` and what comes after; the work does not wait for it."""
    with runtime.tree.watch() as watcher:
        for number in range(WATCHER_BUFFER + 1):
            runtime.tree.root.open("x", str(number)).close()
        first = await anext(watcher)
        assert first == {"event": "resync"}


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
                await runtime.run_turn(seconds, agent=slow, on_end=on_end)

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
