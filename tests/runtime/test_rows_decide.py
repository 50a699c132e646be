"""What is woken, retried and settled is decided by rows: the promises hold when the store fails once, before or after a commit."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from hermes_trio import (
    Budget,
    CancelCause,
    Cause,
    DeliveringTurn,
    Runtime,
    RuntimeSettings,
    SessionContext,
    Turn,
    TurnHooks,
    TurnInput,
    TurnSpec,
    TurnState,
)
from hermes_trio.runtime.errors import Fenced, OutcomeUnknown
from hermes_trio.runtime.outcome import Outcome
from hermes_trio.runtime.ports import InboxRow, NewNotice, NewReply, NoticeKind, RuntimeStore, TurnStart
from hermes_trio.runtime.turn import EventSink
from hermes_trio.store import InboxState, open_store
from hermes_trio.testing.fakes import FakeAdapter, ScriptedAgent, fake_job
from hermes_trio.testing.faults import StoreFaults
from hermes_trio.testing.rows import completion_states, inbox_states

KEY = "agent:main:fake:dm:1"
OURS = "hermes_trio."


def notice(inbox: str, text: str, key: str = KEY) -> NewNotice:
    """A notice for a session of an inbox."""
    context = SessionContext(session_id="s1", session_key=key)
    return NewNotice(inbox=inbox, routing=context, kind=NoticeKind.INFORMATION, text=text)


async def watched(turn: Turn) -> str:
    """Start a watched job of one second."""
    if turn.input.notices:
        return "told"
    assert isinstance(turn, DeliveringTurn)
    await turn.core.supervisor.start_watched(fake_job(1), turn.owner, turn.channel)
    return "started"


async def test_completions_take_nothing_of_another_inbox(runtime: Runtime) -> None:
    """Two inboxes may have equal session keys: the in-process reader gets its own rows, and leaves the others waiting."""
    theirs = await runtime.store.add_notice(notice("telegram", "theirs"))
    await runtime.store.add_notice(notice("in-process", "mine"))
    row = await anext(aiter(runtime.completions()))
    assert (row.inbox, row.text) == ("in-process", "mine")
    store: Any = runtime.store
    assert await inbox_states(store, [theirs]) == {theirs: ("pending", "")}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("verb", ["finish_turn", "finish_job", "begin_turn", "start_job", "take_inbox"])
async def test_an_end_that_fails_once_is_written_without_a_restart(
    virtual_clock: object, verb: str, after: bool
) -> None:
    """A verb fails once, before or after its commit: nothing stays `running` or `taken`, and the watched job is told at most once."""
    faults = StoreFaults()
    faults.fail(verb, after_commit=after)
    async with (
        Runtime(agent=watched, store=faults.around(open_store(None))) as runtime,
        FakeAdapter().connect(runtime) as adapter,
    ):
        await adapter.say("go")
        await trio.sleep(200)
        store: Any = runtime.store
        assert await store.backlog() == {"inbox": 0, "outbox": 0, "approvals": 0, "runs": 0, "jobs": 0}
        assert await store.list_inbox(InboxState.TAKEN) == []
        assert len(runtime.core.ends) == 0
        assert len(runtime.core.locks) == 0
        jobs = [job.job_id for job in await store.list_jobs()]
        states = await completion_states(store, jobs)
        assert len(states) == len(jobs)
        assert len(adapter.sent) == 1 + sum(state == "delivered" for state, _ in states.values())
        if verb != "start_job":
            assert [sent.text for sent in adapter.sent] == ["started", "told"]
        for sent in adapter.sent:
            assert sum(m.role == "assistant" for m in await store.load_history(sent.context.session_id)) <= 2


async def test_a_message_whose_beginning_is_refused_for_good_is_a_dead_letter(virtual_clock: object) -> None:
    """The store works, and refuses to begin one message's turn: no agent sees it, it is a dead letter with the reason, and the next one is answered."""
    faults = StoreFaults()
    agent = ScriptedAgent()

    class Telling(FakeAdapter):
        def refusal(self, rows: Sequence[InboxRow], reason: str) -> Sequence[NewReply]:
            return [NewReply(platform="fake", target={"chat_id": "1"}, text=rows[0].text)]

    async with (
        Runtime(agent=agent, store=faults.around(open_store(None))) as runtime,
        Telling().connect(runtime) as adapter,
    ):
        faults.fail("begin_turn", times=3 * 4)
        await adapter.say("cursed")
        await adapter.say("fine")
        await trio.sleep(600)
        store: Any = runtime.store
        assert [turn.input.text for turn in agent.turns] == ["fine"]
        ((row, reason),) = await store.list_inbox(InboxState.DEAD)
        assert (row.text, "begin_turn" in reason) == ("cursed", True)
        assert [reply.text for reply in await store.claim_outbox("fake")] == ["cursed"]
        assert (len(adapter.started), len(adapter.sent)) == (4, 4), "each turn that was announced is said to have ended"
        assert (runtime.lanes, len(runtime.core.locks)) == (0, 0)


@pytest.mark.parametrize("after", [False, True])
async def test_a_drain_leaves_a_message_whose_beginning_fails_for_the_next_start(
    virtual_clock: object, after: bool
) -> None:
    """No agent has seen the message, so it is not ended as cancelled: it waits, and the next runtime answers it."""
    faults = StoreFaults()
    agent = ScriptedAgent()
    async with faults.around(open_store(None)) as store:
        async with (
            Runtime(agent=agent, store=_opened(store)) as runtime,
            FakeAdapter().connect(runtime) as adapter,
        ):
            faults.fail("begin_turn", times=None, after_commit=after)
            await adapter.say("work")
            await trio.sleep(5)
            report = await runtime.drain(1)
            assert (report.ok, report.backlog["inbox"]) == (True, 1)
        faults.heal()
        assert agent.turns == []
        async with Runtime(agent=agent, store=_opened(store)) as runtime, FakeAdapter().connect(runtime) as adapter:
            (sent,) = await adapter.wait_for(1)
            assert sent.text == "echo: work"


async def test_a_turn_that_never_had_its_session_does_not_free_it(virtual_clock: object) -> None:
    """A turn is stopped while another one has the session, and its end cannot be written yet: the session stays with the other one."""
    faults = StoreFaults()
    gate = trio.Event()
    turns: list[Turn] = []

    async def agent(turn: Turn) -> str:
        await gate.wait()
        return "done"

    async with Runtime(agent=agent, store=faults.around(open_store(None))) as runtime, trio.open_nursery() as nursery:
        where = SessionContext(session_id="s")

        async def run(text: str) -> None:
            await runtime.run_turn(text, where, hooks=TurnHooks(on_start=turns.append))

        nursery.start_soon(run, "first")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(run, "second")
        await trio.testing.wait_all_tasks_blocked()
        faults.fail("finish_turn", "probe", times=None)
        turns[1].cancel(Cause(CancelCause.STOP))
        await trio.sleep(60)
        faults.heal()
        await trio.sleep(60)
        assert (len(runtime.core.ends), len(runtime.core.locks)) == (0, 1), "the end is written, and the first goes on"
        nursery.start_soon(run, "third")
        await trio.sleep(1)
        assert set(runtime.core.live_turns) == {turns[0].id, turns[2].id}
        gate.set()
    assert len(runtime.core.locks) == 0


async def test_a_turn_that_never_had_its_session_does_not_make_another_be_written_twice(virtual_clock: object) -> None:
    """The end of a turn is committed and its answer is lost; another turn of the session is stopped before the end is written again. It is written once."""
    faults = StoreFaults()
    turns: list[Turn] = []

    async def agent(turn: Turn) -> str:
        await trio.sleep(10)
        return "done"

    async with Runtime(agent=agent, store=faults.around(open_store(None))) as runtime, trio.open_nursery() as nursery:

        async def run(text: str) -> None:
            await runtime.run_turn(text, SessionContext(session_id="s"), hooks=TurnHooks(on_start=turns.append))

        for text in ("first", "second"):
            nursery.start_soon(run, text)
            await trio.sleep(1)
        faults.fail("finish_turn", after_commit=True)
        await trio.sleep(8.001)
        assert len(runtime.core.ends) == 1
        turns[1].cancel(Cause(CancelCause.STOP))
        await trio.sleep(30)
        assert [message.text for message in await runtime.store.load_history("s")] == ["first", "done"]


async def test_a_run_whose_end_is_reduced_has_its_last_event_in_the_store(virtual_clock: object) -> None:
    """The stored log of a run never ends without a terminal event, and it is the one that the row tells."""
    faults = StoreFaults()
    async with Runtime(agent=ScriptedAgent("done"), store=faults.around(open_store(None))) as runtime:
        faults.fail("finish_turn", times=5)
        run = await runtime.stateless.start_run(
            TurnSpec(input=TurnInput(text="x"), context=SessionContext(session_id="s")), run_id="run_1"
        )
        await run.settled.wait()
        store: Any = runtime.store
        row = await store.get_run("run_1")
        assert (row.status.value, row.error_code) == ("failed", "store_error")
        stored = [event.event["event"] for event in await store.events_after("run_1")]
        assert [name for name in stored if name != "run.settled"] == ["run.failed"]
        assert run.last_event == "run.failed"


async def test_a_drain_does_not_fail_for_its_report(virtual_clock: object) -> None:
    """What waits in a store that cannot be read is left out of the report; everything is stopped all the same."""
    faults = StoreFaults()
    async with Runtime(agent=ScriptedAgent(), store=faults.around(open_store(None))) as runtime:
        faults.fail("backlog", times=None)
        report = await runtime.drain(1)
        assert (report.ok, report.backlog) == (True, {})


@pytest.mark.parametrize(
    "verb", ["begin_turn", "finish_turn", "append_events", "finish_job", "backlog", "release_inbox"]
)
async def test_a_store_that_does_not_answer_holds_up_no_drain(virtual_clock: object, verb: str) -> None:
    """A verb hangs for a day: a drain and the close of the runtime end within bounds, and what may still begin is not called ended."""
    faults = StoreFaults()

    async def agent(turn: Turn) -> str:
        turn.emit("tool.started", tool="x")
        await turn.core.supervisor.start(fake_job(5), turn.owner)
        await trio.sleep(5)
        return "done"

    over: list[float] = []

    @asynccontextmanager
    async def stage(runtime: Runtime) -> AsyncIterator[None]:
        yield
        over.append(trio.current_time())

    async with Runtime(agent=agent, store=faults.around(open_store(None)), stages=[stage]) as runtime:
        async with trio.open_nursery() as nursery, FakeAdapter().connect(runtime) as adapter:
            nursery.start_soon(adapter.say, "message")
            if verb != "begin_turn":
                await trio.sleep(1)
            faults.slow(verb, seconds=86_400, times=None)
            if verb == "begin_turn":

                async def start() -> None:
                    with pytest.raises(OutcomeUnknown):
                        await runtime.stateless.start_run(
                            TurnSpec(input=TurnInput(text="x"), context=SessionContext(session_id="r"))
                        )

                nursery.start_soon(start)
                await trio.sleep(1)
            began = trio.current_time()
            report = await runtime.drain(1)
            assert trio.current_time() - began < 120
            assert report.ok is (verb != "begin_turn")
        began = trio.current_time()
    assert over[0] - began < 120, "the store itself is waited for, and nothing else"


async def test_a_run_that_is_written_after_a_drain_does_not_run(virtual_clock: object) -> None:
    """The store answers for a run's row when the drain is over: no agent is called for long, and the run's end says why."""
    faults = StoreFaults()
    agent = ScriptedAgent(sleeping, sleeping)
    async with Runtime(agent=agent, store=faults.around(open_store(None))) as runtime, trio.open_nursery() as nursery:
        faults.slow("begin_turn", seconds=60)

        async def start() -> None:
            spec = TurnSpec(input=TurnInput(text="x"), context=SessionContext(session_id="r"))
            with pytest.raises(OutcomeUnknown):
                await runtime.stateless.start_run(spec, run_id="run_1")

        nursery.start_soon(start)
        await trio.sleep(1)
        assert not (await runtime.drain(1)).ok
        await trio.sleep(120)
        store: Any = runtime.store
        row = await store.get_run("run_1")
        assert (row.status.value, runtime.core.live_turns) == ("cancelled", {})


async def sleeping(turn: Turn) -> str:
    """A turn that takes an hour."""
    await trio.sleep(3600)
    return "late"


async def test_an_end_is_reduced_only_if_it_is_refused_beside_a_write_that_succeeds(virtual_clock: object) -> None:
    """A store that fails four times and then works again has the whole of the turn, not its state alone."""
    faults = StoreFaults()
    async with Runtime(agent=ScriptedAgent("first"), store=faults.around(open_store(None))) as runtime:
        faults.fail("finish_turn", times=4)
        outcome = await runtime.run_turn("a", SessionContext(session_id="s"))
        assert outcome.state is TurnState.COMPLETED
        assert [message.text for message in await runtime.store.load_history("s")] == ["a", "first"]


async def test_a_turn_whose_end_is_refused_keeps_its_session_until_it_is_written(virtual_clock: object) -> None:
    """The next turn of the session waits, and its history holds the turn whose end failed first; the report names what waits."""
    faults = StoreFaults()
    agent = ScriptedAgent("first", "second")
    async with Runtime(agent=agent, store=faults.around(open_store(None))) as runtime:
        where = SessionContext(session_id="s")
        faults.fail("finish_turn", times=8)
        # Refused for longer than the caller waits: it is told so, and the end goes on being written.
        faults.fail("probe", times=8)
        first = await runtime.run_turn("a", where)
        assert (first.state, first.error_code, first.committed) == (TurnState.FAILED, "store_error", False)
        assert "turn turn_" in runtime.core.ends.describe()[0]
        second = await runtime.run_turn("b", where)
        assert second.state is TurnState.COMPLETED
        history = [message.text for message in await runtime.store.load_history("s")]
        assert history == ["a", "first", "b", "second"]
        assert len(runtime.core.ends) == 0


async def test_an_end_that_alone_is_refused_is_reduced_to_its_state_and_error(virtual_clock: object) -> None:
    """A turn whose record the store does not know is not tried for ever: the row of its run says that it failed, and the session is free."""
    async with Runtime(agent=ScriptedAgent("first", "second"), store=open_store(None)) as runtime:
        where = SessionContext(session_id="s")
        stateless = runtime.stateless
        hooks = TurnHooks(also=lambda turn, outcome: (object(),))
        run = await stateless.start_run(
            TurnSpec(input=TurnInput(text="a"), context=where, source="x", hooks=hooks), run_id="run_1"
        )
        await run.settled.wait()
        store: Any = runtime.store
        row = await store.get_run("run_1")
        assert (row.status.value, row.error_code) == ("failed", "store_error")
        assert (await store.backlog())["runs"] == 0
        assert (
            await stateless.run_turn(TurnSpec(input=TurnInput(text="b"), context=where, source="x"))
        ).state is TurnState.COMPLETED
        assert [m.text for m in await runtime.store.load_history("s")] == ["b", "second"]


async def test_the_sender_of_a_turn_whose_end_is_reduced_is_told(virtual_clock: object) -> None:
    """The answer could not be kept, and the message counts as handled: its sender is told once that it failed."""

    class Telling(FakeAdapter):
        def replies(self, turn: Turn, outcome: Outcome) -> Sequence[NewReply]:
            return [NewReply(platform="fake", target={"chat_id": "1"}, text=outcome.text or outcome.error)]

    faults = StoreFaults()
    faults.fail("finish_turn", times=5)
    async with (
        Runtime(agent=ScriptedAgent("the answer"), store=faults.around(open_store(None))) as runtime,
        Telling().connect(runtime) as adapter,
    ):
        await adapter.say("go")
        await trio.sleep(60)
        store: Any = runtime.store
        (reply,) = await store.claim_outbox("fake")
        assert reply.text.startswith("the turn's end could not be stored")
        assert await store.list_inbox(InboxState.TAKEN) == []


@pytest.mark.parametrize("method", ["prepare", "budget", "sink", "session_for"])
async def test_a_poison_message_is_a_dead_letter_that_can_be_queued_again(virtual_clock: object, method: str) -> None:
    """An interface that cannot handle a message ends that message alone: it is tried a bounded number of times, its sender is told once."""

    class Poisoned(FakeAdapter):
        tries = 0
        broken = True

        def fail(self, name: str, text: str) -> None:
            if name == method and text == "poison" and self.broken:
                self.tries += 1
                raise ValueError("cannot read this")

        def prepare(self, rows: Sequence[InboxRow]) -> TurnInput:
            self.fail("prepare", rows[0].text)
            return super().prepare(rows)

        def budget(self, rows: Sequence[InboxRow]) -> Budget | None:
            self.fail("budget", rows[0].text)
            return super().budget(rows)

        def sink(self, context: SessionContext) -> EventSink | None:
            self.fail("sink", context.chat_name)
            return super().sink(context)

        async def session_for(self, store: RuntimeStore, context: SessionContext) -> str:
            self.fail("session_for", context.chat_name)
            return await super().session_for(store, context)

        def refusal(self, rows: Sequence[InboxRow], reason: str) -> Sequence[NewReply]:
            return [NewReply(platform="fake", target={"chat_id": "1"}, text=reason)]

    async with (
        Runtime(agent=ScriptedAgent(), store=open_store(None)) as runtime,
        Poisoned().connect(runtime) as adapter,
    ):
        await adapter.say("poison", chat_name="poison")
        await adapter.say("fine")
        await adapter.wait_for(1)
        store: Any = runtime.store
        assert [sent.text for sent in adapter.sent] == ["echo: fine"]
        assert adapter.tries == runtime.settings.inbox_attempts
        ((row, reason),) = await store.list_inbox(InboxState.DEAD)
        assert (row.text, reason) == ("poison", "ValueError: cannot read this")
        assert [reply.text for reply in await store.claim_outbox("fake")] == [reason]
        adapter.broken = False
        assert await store.revive_inbox(row.id)
        await adapter.wait_for(2)
        assert [sent.text for sent in adapter.sent] == ["echo: fine", "echo: poison"]


async def test_a_message_whose_sender_leaves_during_its_commit_is_answered(virtual_clock: object) -> None:
    """Cancelling `accept` abandons the wait, never the write: the row is durable, its lane is woken, and a repetition is known as one."""
    faults = StoreFaults()
    async with (
        Runtime(agent=ScriptedAgent(), store=faults.around(open_store(None))) as runtime,
        FakeAdapter().connect(runtime) as adapter,
    ):
        faults.slow("accept_message", seconds=5)
        with trio.move_on_after(1) as left:
            await adapter.say("hello", dedupe_key="1")
        assert left.cancelled_caught
        assert await adapter.say("hello", dedupe_key="1") is False
        await trio.sleep(1)
        assert [sent.text for sent in adapter.sent] == ["echo: hello"]


async def test_a_burst_has_one_destination(virtual_clock: object) -> None:
    """Notices of one conversation that go to different places are told in turns of their own, each with its own routing; those of one place together."""
    agent = ScriptedAgent()
    async with Runtime(agent=agent, store=open_store(None)) as runtime:
        for thread, text in (("a", "one"), ("a", "two"), ("b", "three"), ("a", "four")):
            context = SessionContext(session_id="s1", session_key=KEY, chat_id="1", thread_id=thread)
            await runtime.store.add_notice(
                NewNotice(
                    inbox="fake",
                    routing=context,
                    kind=NoticeKind.INFORMATION,
                    text=text,
                )
            )
        async with FakeAdapter().connect(runtime) as adapter:
            await adapter.wait_for(3)
        told = [(turn.context.thread_id, [row.text for row in turn.input.notices]) for turn in agent.turns]
        assert told == [("a", ["one", "two"]), ("b", ["three"]), ("a", ["four"])]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("slow", [False, True])
async def test_a_job_that_is_seen_while_its_end_is_committed_is_not_told(
    virtual_clock: object, after: bool, slow: bool
) -> None:
    """`mark_seen` in the middle of the commit of a job's end: the notice is superseded, also if the write that says so fails first."""
    faults = StoreFaults()
    agent = ScriptedAgent()

    async def start(turn: Turn) -> str:
        assert isinstance(turn, DeliveringTurn)
        faults.fail("supersede", after_commit=after)
        faults.slow("finish_job", seconds=5 if slow else 0.5)
        job = await turn.core.supervisor.start_watched(fake_job(1), turn.owner, turn.channel)
        await trio.sleep(1.2)
        await job.mark_seen()
        assert await job.wait()
        await trio.sleep(60)
        return job.id

    agent.then(start)
    async with (
        Runtime(agent=agent, store=faults.around(open_store(None))) as runtime,
        FakeAdapter().connect(runtime) as adapter,
    ):
        await adapter.say("go")
        (sent,) = await adapter.wait_for(1)
        await trio.sleep(60)
        store: Any = runtime.store
        assert len(adapter.sent) == 1
        assert await completion_states(store, [sent.text]) == {sent.text: ("superseded", "")}
        assert len(runtime.core.ends) == 0


@pytest.mark.parametrize("how", ["new", "end", "fork", "delete"])
async def test_a_session_with_a_waiting_notice_that_is_left_leaves_nothing(virtual_clock: object, how: str) -> None:
    """`/new`, ending, forking and deleting a session with a job and a waiting notice, again and again: no object of the runtime is kept for them."""

    async def agent(turn: Turn) -> str:
        assert isinstance(turn, DeliveringTurn)
        assert not turn.input.notices
        for seconds in (5, 500):
            await turn.core.supervisor.start_watched(fake_job(seconds), turn.owner, turn.channel)
        return "ok"

    def kept() -> dict[str, int]:
        gc.collect()
        names = Counter(
            type(thing).__name__ for thing in gc.get_objects() if str(type(thing).__module__).startswith(OURS)
        )
        return {name: count for name, count in names.items() if name not in ("Turn", "DeliveringTurn")}

    async with Runtime(agent=agent, store=open_store(None)) as runtime:
        store: Any = runtime.store
        counts: list[dict[str, int]] = []
        for number in range(8):
            chat = f"c{number}"
            async with FakeAdapter().connect(runtime) as adapter:
                await adapter.say("go", chat=chat)
                (sent,) = await adapter.wait_for(1)
            session, key, stop = sent.context.session_id, adapter.key(chat), Cause(CancelCause.SESSION_ENDED)
            del adapter, sent
            await trio.sleep(10)  # one job has ended while its platform was away
            assert (await store.inbox_waiting(), len(runtime.supervisor)) == (1, 1)
            match how:
                case "new":
                    await store.new_session(key, source="fake", reason="new")
                    await runtime.supervisor.stop_session(session, stop)
                case "end":
                    await store.patch_session(session, end_reason="ended")
                    await runtime.supervisor.stop_session(session, stop)
                case "fork":
                    await store.fork_session(session, new_id=f"fork-{number}")
                    await runtime.supervisor.stop_session(session, stop)
                case _:
                    await runtime.stop_session(session, stop)
                    await store.delete_session(session)
            await trio.sleep(100)
            counts.append(kept())
        assert counts[3] == counts[-1], {
            name: (counts[3].get(name), count) for name, count in counts[-1].items() if counts[3].get(name) != count
        }
        assert (runtime.lanes, len(runtime.supervisor), len(runtime.core.locks)) == (0, 0, 0)


async def test_a_lane_says_itself_that_it_lingers(virtual_clock: object) -> None:
    """The tree shows on the node of the lane, and on no other, what a one-shot session waits for."""
    async with (
        Runtime(agent=watched, store=open_store(None)) as runtime,
        FakeAdapter(one_shot="webhook_complete", linger=10).connect(runtime) as adapter,
    ):
        await adapter.say("go")
        await adapter.wait_for(1)
        await trio.sleep(0.5)
        waits = {node.kind: node.waits_on for node in runtime.tree.root.walk() if "one-shot" in node.waits_on}
        assert waits == {"lane": "1 watched jobs of a one-shot session"}
        await adapter.wait_for(2)


async def test_a_store_that_fails_makes_no_hot_loop(virtual_clock: object) -> None:
    """While every write fails a lane pauses, longer each time; no message is given to the agent more often than the bound."""
    faults = StoreFaults()
    agent = ScriptedAgent()
    async with (
        Runtime(agent=agent, store=faults.around(open_store(None))) as runtime,
        FakeAdapter().connect(runtime) as adapter,
    ):
        await adapter.say("x")
        await adapter.wait_for(1)
        faults.fail("begin_turn", times=1000)
        faults.fail("finish_turn", times=1000)
        faults.fail("take_inbox", times=1000)
        before = sum(faults.calls.values())
        await runtime.store.add_notice(notice("fake", "news"))
        await trio.sleep(600)
        assert len(agent.turns) <= 1 + runtime.settings.inbox_attempts
        assert sum(faults.calls.values()) - before < 300


async def test_a_deaf_thread_is_a_job_and_keeps_its_run_unsettled(virtual_clock: object) -> None:
    """A thread that outlives its turn is counted: the second stop says what remains, and the run settles when the thread has ended."""
    gate = threading.Event()

    async def agent(turn: Turn) -> str:
        await turn.run_sync(gate.wait)
        return "never"

    settings = RuntimeSettings(thread_grace=0.05)
    async with Runtime(agent=agent, store=open_store(None), settings=settings) as runtime:
        run = await runtime.stateless.start_run(
            TurnSpec(input=TurnInput(text="x"), context=SessionContext(session_id="s"))
        )
        await trio.testing.wait_all_tasks_blocked()
        try:
            first = await run.stop()
            again = await run.stop()
            assert (first.ok, again.ok, again.already_ended) == (False, False, True)
            assert again.remaining
            await trio.testing.wait_all_tasks_blocked()
            assert (run.ended.is_set(), run.settled.is_set()) == (True, False)
            assert [job.spec.kind for job in runtime.supervisor.jobs("s")] == ["thread"]
        finally:
            gate.set()
        await run.settled.wait()
        assert (await runtime.store.backlog())["jobs"] == 0


async def test_a_zombie_is_fenced_and_what_it_held_is_handed_over(virtual_clock: object) -> None:
    """Two runtimes on one store: what the dead one held is ended or handed over once, and it can write no end any more."""
    gate = trio.Event()

    async def held(turn: Turn) -> str:
        await gate.wait()
        return "late"

    living = ScriptedAgent()
    async with open_store(None) as store, store.shared() as one, store.shared() as two:
        one_again, two_again = _opened(one), _opened(two)
        async with Runtime(agent=held, store=one_again) as dead, Runtime(agent=living, store=two_again) as alive:
            assert one.owner != two.owner
            async with FakeAdapter().connect(dead) as adapter:
                await adapter.say("work")
                await trio.testing.wait_all_tasks_blocked()
                await one.leave_node("e8")
                assert await two.inbox_waiting() == 1
                gate.set()
                (sent,) = await adapter.wait_for(1)
                assert (sent.outcome.committed, sent.outcome.error_code) == (False, "store_error")
                ((row, _),) = await store.list_inbox(InboxState.INTERRUPTED)
                assert row.text == "work"
                with pytest.raises(Fenced):
                    await one.begin_turn(
                        TurnStart(turn_id="t", context=sent.context, source="fake", inbox_ids=(row.id,))
                    )
            async with FakeAdapter().connect(alive) as neighbour:
                await neighbour.wait_for(1)
            assert "was not completed" in living.turns[0].input.text


def _opened(store: Any) -> Any:
    @asynccontextmanager
    async def opened():  # type: ignore[no-untyped-def]
        yield store

    return opened()
