"""A call of the store that fails once, before or after its commit, costs its own repetition and nothing else. On virtual time, on one node or two."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import trio
import trio.testing

from hermes_trio import CancelCause, Cause, Runtime, SessionContext, Turn, TurnHooks
from hermes_trio.runtime.errors import OutcomeUnknown
from hermes_trio.runtime.outcome import Outcome, RunStatus, TurnState
from hermes_trio.runtime.peers import STOP_RUN
from hermes_trio.runtime.ports import NewMessage, NodeRequest, TurnInput
from hermes_trio.runtime.supervisor import Job, JobSpec
from hermes_trio.runtime.turn import DeliveringTurn, TurnSpec
from hermes_trio.store import StoreError, open_store
from hermes_trio.store.errors import AlreadyStarted, CommitUncertain
from hermes_trio.store.records import InboxState
from hermes_trio.testing.fakes import FakeAdapter
from hermes_trio.testing.faults import StoreFaults
from hermes_trio.testing.nodes import open_nodes

WHERE = SessionContext(platform="api", session_id="s", session_key="k")


async def agent(turn: Turn) -> str:
    """Runs a command if it is asked to, and answers."""
    if turn.input.prompt.endswith("bind"):
        await turn.core.hosts.bind(turn)
    return "ok"


def spec(text: str = "hi", session_id: str = "s") -> TurnSpec:
    """A turn of a session."""
    return TurnSpec(input=TurnInput(text=text), context=SessionContext(session_id=session_id, session_key=session_id))


# -- beginnings ------------------------------------------------------------------------------------------------------------------


async def test_a_beginning_that_its_rows_refuse_is_not_retried(virtual_clock: object) -> None:
    """After one unknown outcome, a refusal of the rows ends the attempts at once: the caller learns it, and no token is held."""
    faults = StoreFaults()
    async with Runtime(agent=agent, store=faults.around(open_store(None))) as runtime:
        first = await runtime.stateless.start_run(spec(), idempotency_key="k", fingerprint="f")
        await first.ended.wait()
        faults.fail("begin_turn", error=CommitUncertain)
        begun = faults.calls["begin_turn"]
        with pytest.raises(AlreadyStarted):
            await runtime.stateless.start_run(spec(), idempotency_key="k", fingerprint="f")
        assert faults.calls["begin_turn"] - begun == 2
        assert (runtime.core.admission.active, runtime.core.starting) == (0, set())


@pytest.mark.parametrize("after", [False, True])
async def test_a_run_that_may_be_written_begins_however_often_its_beginning_is_refused(
    virtual_clock: object, after: bool
) -> None:
    """After an unknown outcome the row of a run may exist, also if a store that accepts other writes refuses this one again and again: the run begins."""
    faults = StoreFaults()
    async with Runtime(agent=agent, store=faults.around(open_store(None))) as runtime:
        if after:
            faults.fail("begin_turn", after_commit=True)
        else:
            faults.fail("begin_turn", error=CommitUncertain)
        faults.fail("begin_turn", times=5)
        run = await runtime.stateless.start_run(spec(), run_id="run_a")
        await run.settled.wait()
        row = await runtime.store.get_run("run_a")
        assert row is not None
        assert (row.status, row.output) == (RunStatus.COMPLETED, "ok")
        assert (runtime.core.admission.active, runtime.core.starting) == (0, set())


async def test_a_run_that_may_be_written_and_is_refused_ends_with_its_runtime(virtual_clock: object) -> None:
    """The caller gets `OutcomeUnknown` while the beginning is refused. A drain gives it up, and the next start ends the row: none is held by nobody."""
    faults = StoreFaults()
    async with open_store(None) as store:
        async with Runtime(agent=agent, store=faults.around(nullcontext(store))) as runtime:
            faults.fail("begin_turn", after_commit=True)
            faults.fail("begin_turn", times=None)
            with pytest.raises(OutcomeUnknown):
                await runtime.stateless.start_run(spec(), run_id="run_a")
            assert (await runtime.drain(1)).ok
            assert (runtime.core.admission.active, runtime.core.starting) == (0, set())
        async with Runtime(agent=agent, store=nullcontext(store)):
            row = await store.get_run("run_a")
            assert row is not None
            assert (row.status, row.error_code) == (RunStatus.FAILED, "interrupted")


@pytest.mark.parametrize("after", [False, True])
async def test_the_row_that_only_the_tree_needs_does_not_cost_a_message(virtual_clock: object, after: bool) -> None:
    """A message is handled although the number of those behind it cannot be read."""
    faults = StoreFaults()
    faults.fail("inbox_waiting", times=None, after_commit=after)
    chat = FakeAdapter("chat")
    async with (
        Runtime(agent=agent, store=faults.around(open_store(None))) as runtime,
        runtime.delivering(chat) as inbox,
    ):
        await inbox.accept(_message("chat"))
        await trio.sleep(60)
        assert [sent.text for sent in chat.sent] == ["ok"]
        assert await runtime.store.list_inbox(InboxState.DEAD) == []


# -- requests of other nodes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("verb", ["ask_node", "take_requests", "answer_request", "get_answer"])
@pytest.mark.parametrize("times", [1, 3])
async def test_a_request_is_handled_once_and_answered(
    virtual_clock: object, verb: str, after: bool, times: int
) -> None:
    """Whatever fails on the node that asks or on the one that handles it: the action is done once, and the node that asked gets its answer in time."""
    handled: list[str] = []

    async def write(request: NodeRequest) -> Mapping[str, Any]:
        handled.append(request.id)
        assert request.payload == {"keys": "secret"}
        return {"done": True}

    faults = StoreFaults()
    async with (
        open_nodes(lease_seconds=3.0) as nodes,
        nodes.make(agent, "one", faults=faults) as one,
        nodes.make(agent, "two", faults=faults) as two,
    ):
        with two.membership.answering("write", write):
            faults.fail(verb, after_commit=after, times=times)
            answer = await one.membership.ask(two.store.owner, "write", "job", {"keys": "secret"}, seconds=30)
            await trio.testing.wait_all_tasks_blocked()
            assert answer is not None
            assert dict(answer.value) == {"done": True}
            await trio.sleep(10)
        assert len(handled) == 1
        assert two.membership._answering == set()


async def test_a_stop_that_nobody_waits_for_happens(virtual_clock: object) -> None:
    """A stop with `seconds` 0 stays durable: it is carried out although the answer of the store that handed it over was lost."""

    async def sleeper(turn: Turn) -> str:
        await trio.sleep_forever()
        return ""

    faults = StoreFaults()
    async with (
        open_nodes(lease_seconds=3.0) as nodes,
        nodes.make(sleeper, "one") as one,
        nodes.make(sleeper, "two", faults=faults) as two,
    ):
        run = await two.stateless.start_run(spec())
        await trio.testing.wait_all_tasks_blocked()
        faults.fail("take_requests", after_commit=True)
        payload = {"cause": "stop", "detail": "", "seconds": 0.0}
        assert await one.membership.ask(two.store.owner, STOP_RUN, run.id, payload, seconds=0) is None
        await trio.sleep(5)
        assert run.status is RunStatus.CANCELLED


# -- hosts -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True])
async def test_a_hook_is_called_although_the_old_binding_cannot_be_removed(virtual_clock: object, after: bool) -> None:
    """The end of a turn that reports a lost host reaches its interface; the binding is removed as soon as the store works."""
    ends: list[TurnState] = []
    faults = StoreFaults()

    async def on_end(outcome: Outcome) -> None:
        ends.append(outcome.state)

    async with open_nodes() as nodes, nodes.make(agent, "two", faults=faults) as two:
        async with nodes.make(agent, "one") as one:
            await one.stateless.run_turn(spec("bind"))
        host = await two.store.session_host("s")
        assert host is not None
        assert host.gone
        faults.fail("release_host", after_commit=after, times=3)
        await two.run_turn("work", WHERE, hooks=TurnHooks(on_end=on_end))
        assert ends == [TurnState.COMPLETED]
        await trio.sleep(5)
        assert await two.store.session_host("s") is None


async def test_the_binding_of_a_session_is_what_its_row_says(virtual_clock: object) -> None:
    """A session that another node has ended is bound anew by its next command, and the node with its shell is told of the end."""
    ended: list[str] = []
    async with open_nodes() as nodes, nodes.make(agent, "one") as one, nodes.make(agent, "two") as two:
        with one.core.at_session_end(ended.append):
            await one.stateless.run_turn(spec("bind"))
            assert await two.core.end_session("s", "by hand")
            assert ended == ["s"]
            assert await two.store.session_host("s") is None
            await one.stateless.run_turn(spec("bind"))
            host = await two.store.session_host("s")
        assert host is not None
        assert host.node == one.store.owner


# -- runs ------------------------------------------------------------------------------------------------------------------------


async def test_a_status_that_is_refused_delays_no_other(virtual_clock: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The statuses of other runs, and the events of all, are written at once; the refused one is tried again with growing pauses."""
    tries: list[float] = []

    async def sleeper(turn: Turn) -> str:
        await trio.sleep_forever()
        return ""

    async with open_nodes() as nodes, nodes.make(sleeper, "one") as one:
        bad, good = [await one.stateless.start_run(spec(session_id=name)) for name in ("a", "b")]
        await trio.testing.wait_all_tasks_blocked()
        written = one.store.set_run_status

        async def picky(run_id: str, status: RunStatus) -> None:
            if run_id == bad.id:
                tries.append(trio.current_time())
                raise StoreError("no")
            await written(run_id, status)

        monkeypatch.setattr(one.store, "set_run_status", picky)
        for run in (bad, good):
            run.emit({"event": "approval.request"})
        await trio.sleep(0.2)
        row = await nodes.store.get_run(good.id)
        assert row is not None
        assert row.status is good.status is RunStatus.WAITING_FOR_APPROVAL
        assert len(await nodes.store.events_after(bad.id)) == bad.log.last
        await trio.sleep(600)
        assert len(tries) <= 15
        await bad.stop_all(Cause(CancelCause.STOP), 1)
        await good.stop_all(Cause(CancelCause.STOP), 1)


# -- one-shot sessions -----------------------------------------------------------------------------------------------------------


async def test_a_job_that_takes_its_time_is_no_failing_store(virtual_clock: object) -> None:
    """While the jobs of a one-shot session end, the health report does not say that the store does not answer."""

    async def slow(job: Job) -> None:
        job.started()
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(25)

    async def starts(turn: Turn) -> str:
        if isinstance(turn, DeliveringTurn) and not turn.input.notices:
            await turn.watch_job(JobSpec(kind="process", title="x", run=slow))
        return "ok"

    hook = FakeAdapter("hook", one_shot="done", linger=60)
    async with Runtime(agent=starts, store=open_store(None)) as runtime, runtime.delivering(hook) as inbox:
        await inbox.accept(_message("hook"))
        named: set[str] = set()
        for _ in range(200):
            await trio.sleep(1)
            named.update(runtime.unwritten)
        assert named == set()
        assert len(runtime.supervisor) == 0


# -- the log ---------------------------------------------------------------------------------------------------------------------


async def test_an_outage_is_logged_when_its_pauses_grow(
    virtual_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    """A task that waits for a lease through an hour without a store says so a few times, not once a second."""
    faults = StoreFaults()
    ran = trio.Event()

    async def work() -> None:
        ran.set()

    async with open_nodes() as nodes, nodes.make(agent, "one", faults=faults) as one:
        faults.fail("claim_lease", seconds=3600, times=None)
        with caplog.at_level(logging.WARNING):
            await one.membership.run_alone("cron", work)
        assert ran.is_set()
        assert 1 <= len([line for line in caplog.messages if "claim the lease cron" in line]) <= 6
        assert trio.current_time() < 3700
        assert faults.calls["claim_lease"] < 400


def _message(inbox: str) -> NewMessage:
    return NewMessage(
        inbox=inbox,
        session_key="a",
        routing=SessionContext(platform=inbox, session_key="a", chat_id="1"),
        text="hello",
    )
