"""Delivery: what a job reports reaches the session that started it, once, with its routing."""

import msgspec
import pytest
import trio

from hermes_trio import (
    Budget,
    CancelCause,
    Cause,
    CompletionChannel,
    DeliveringTurn,
    InboxRow,
    JobRefused,
    JobState,
    MailboxFull,
    NoRuntime,
    Runtime,
    RuntimeProblem,
    RuntimeSettings,
    SessionContext,
    StatelessTurn,
    Turn,
    TurnInput,
    TurnSpec,
    TurnState,
    async_delivery_supported,
    current_runtime,
)
from hermes_trio.runtime.ports import NewNotice, NoticeKind, TurnFinish, TurnStart
from hermes_trio.testing.fakes import FakeAdapter, ScriptedAgent, fake_job
from hermes_trio.testing.rows import completion_states


async def watch(turn: Turn, seconds: float = 10, text: str = "done"):
    """Start a watched fake job from a delivering turn."""
    assert isinstance(turn, DeliveringTurn)
    return await turn.core.supervisor.start_watched(fake_job(seconds, text), turn.owner, turn.channel)


def starts(seconds: float = 10, text: str = "done"):
    """An agent step that starts a watched job and answers with its id."""

    async def step(turn: Turn) -> str:
        return (await watch(turn, seconds, text)).id

    return step


async def test_a_completion_becomes_a_turn_of_the_originating_session_with_its_routing(
    fake_adapter: FakeAdapter, scripted_agent: ScriptedAgent, runtime: Runtime
):
    """Platform, chat, thread and reply anchor are those of the message that started the work."""
    scripted_agent.then(starts(3600))
    await fake_adapter.say("go", chat="42", thread_id="7", message_id="m1", user_id="u")
    (first,) = await fake_adapter.wait_for(1)
    _, second = await fake_adapter.wait_for(2)
    context = second.context
    assert (context.platform, context.chat_id, context.thread_id, context.message_id) == ("fake", "42", "7", "m1")
    assert context.session_id == first.context.session_id
    assert second.notices[0].job_id == first.text
    assert trio.current_time() == 3600


async def test_a_busy_session_is_not_interrupted_and_a_burst_becomes_one_turn(
    fake_adapter: FakeAdapter, scripted_agent: ScriptedAgent, runtime: Runtime
):
    """Three jobs end while a turn is running: they wait, in order, and are told together."""

    async def start_three(turn: Turn) -> str:
        for number in (3, 1, 2):
            await watch(turn, number, f"number {number}")
        return "started"

    async def long(turn: Turn) -> str:
        await trio.sleep(100)
        return "long"

    scripted_agent.then(start_three, long)
    await fake_adapter.say("start")
    await fake_adapter.say("long work")
    sent = await fake_adapter.wait_for(3)
    assert [entry.text for entry in sent[:2]] == ["started", "long"]
    assert ["number 1" in sent[2].notices[0].text, len(sent[2].notices)] == [True, 3]
    assert [row.text.split()[3].rstrip("]") for row in sent[2].notices] == ["1", "2", "3"]


async def test_the_decision_follows_the_interface_and_not_the_session(
    fake_adapter: FakeAdapter, scripted_agent: ScriptedAgent, runtime: Runtime
):
    """The same session key, first over the stateless entry, then on an adapter: unsupported, then supported and delivered."""
    key = fake_adapter.key("5")
    said: list[bool] = []

    async def over_http(turn: Turn) -> str:
        said.append(async_delivery_supported())
        assert isinstance(turn, StatelessTurn)
        job = await turn.core.supervisor.start(fake_job(5), turn.owner)
        assert not job.watched
        return "unwatched"

    outcome = await runtime.stateless.run_turn(
        TurnSpec(
            input=TurnInput(text="x"),
            context=SessionContext(platform="api_server", session_key=key, session_id="the-session"),
            agent=over_http,
        )
    )
    assert outcome.state is TurnState.COMPLETED

    async def on_adapter(turn: Turn) -> str:
        said.append(async_delivery_supported())
        return (await watch(turn, 5)).id

    scripted_agent.then(on_adapter)
    await fake_adapter.say("x", chat="5")
    sent = await fake_adapter.wait_for(2)
    assert said == [False, True]
    assert sent[1].notices[0].job_id == sent[0].text


async def test_a_completion_that_was_seen_is_not_told(
    fake_adapter: FakeAdapter, scripted_agent: ScriptedAgent, runtime: Runtime
):
    """`wait` by the agent supersedes the notice, whether the job ended before or after it was marked."""

    async def wait_for_it(turn: Turn) -> str:
        job = await watch(turn, 5)
        assert await job.wait() is JobState.EXITED
        await job.mark_seen()
        other = await watch(turn, 5)
        await other.mark_seen()
        await other.wait()
        return "seen"

    scripted_agent.then(wait_for_it)
    await fake_adapter.say("x")
    await fake_adapter.wait_for(1)
    await trio.sleep(1000)
    assert len(fake_adapter.sent) == 1
    assert await runtime.store.backlog() == {"inbox": 0, "outbox": 0, "approvals": 0, "runs": 0, "jobs": 0}


async def test_notices_wait_for_a_front_that_is_not_connected(runtime: Runtime, scripted_agent: ScriptedAgent):
    """The channel names an inbox, not a connection: a reconnecting adapter finds what came meanwhile."""
    adapter = FakeAdapter("flaky")
    scripted_agent.then(starts(50))
    async with adapter.connect(runtime):
        await adapter.say("x")
        await adapter.wait_for(1)
    await trio.sleep(100)
    assert len(adapter.sent) == 1
    async with adapter.connect(runtime):
        await adapter.wait_for(2)
    assert len(adapter.sent) == 2


async def test_in_process_work_is_read_with_completions(runtime: Runtime):
    """A program that embeds the runtime reads its own inbox; a job started outside any turn reports there, too."""

    async def agent(turn: Turn) -> str:
        return (await watch(turn, 5, "from a turn")).id

    outcome = await runtime.run_turn("x", SessionContext(session_id="s"), agent=agent)
    bare = await runtime.supervisor.start_watched(fake_job(7, "bare"), runtime.owner(), runtime.channel)
    told: list[InboxRow] = []
    async for notice in runtime.completions():
        told.append(notice)
        if len(told) == 2:
            break
    assert [notice.job_id for notice in told] == [outcome.text, bare.id]


async def test_a_channel_cannot_be_made_by_hand():
    """Only a delivering front and the runtime itself make one."""
    with pytest.raises(TypeError, match="cannot be constructed"):
        CompletionChannel("telegram")


async def test_watching_without_a_runtime_is_a_clear_error():
    """Background work needs an owner."""
    with pytest.raises(NoRuntime, match="open one with `async with Runtime"):
        current_runtime()


async def test_a_message_is_accepted_once_per_dedupe_key(fake_adapter: FakeAdapter):
    """A platform that delivers twice starts one turn."""
    assert await fake_adapter.say("x", dedupe_key="update-1") is True
    assert await fake_adapter.say("x", dedupe_key="update-1") is False
    await fake_adapter.wait_for(1)
    await trio.sleep(10)
    assert len(fake_adapter.sent) == 1


async def test_lanes_are_first_in_first_out_and_one_turn_at_a_time(
    fake_adapter: FakeAdapter, runtime: Runtime, scripted_agent: ScriptedAgent
):
    """Messages of one chat never overlap; other chats do not wait for them."""
    running: dict[str, int] = {}

    async def step(turn: Turn) -> str:
        chat = turn.context.chat_id
        running[chat] = running.get(chat, 0) + 1
        assert running[chat] == 1
        await trio.sleep(1)
        running[chat] -= 1
        return turn.input.text

    scripted_agent.then(*[step] * 12)
    for number in range(6):
        await fake_adapter.say(f"a{number}", chat="a")
        await fake_adapter.say(f"b{number}", chat="b")
    sent = await fake_adapter.wait_for(12)
    for chat in "ab":
        assert [entry.text for entry in sent if entry.context.chat_id == chat] == [f"{chat}{n}" for n in range(6)]
    assert trio.current_time() == 6


async def test_a_full_mailbox_is_a_refusal_and_never_a_silent_drop(virtual_clock):
    """Nothing is stored, and everything that was accepted is answered."""
    gate = trio.Event()

    async def agent(turn: Turn) -> str:
        await gate.wait()
        return turn.input.text

    async with (
        Runtime(agent=agent, settings=RuntimeSettings(mailbox=3)) as runtime,
        FakeAdapter().connect(runtime) as adapter,
    ):
        await adapter.say("current")
        await trio.testing.wait_all_tasks_blocked()
        for number in range(3):
            await adapter.say(f"waiting {number}")
        with pytest.raises(MailboxFull, match="3 messages already wait in this conversation"):
            await adapter.say("one too many")
        gate.set()
        sent = await adapter.wait_for(4)
        assert [entry.text for entry in sent] == ["current", "waiting 0", "waiting 1", "waiting 2"]


async def test_a_message_without_a_conversation_is_refused(fake_adapter: FakeAdapter):
    """An id that cannot be one is named, with what is wrong."""
    from hermes_trio import NewMessage

    routing = SessionContext(platform="fake")
    with pytest.raises(RuntimeProblem, match="session_key is empty"):
        await fake_adapter.inbox.accept(NewMessage(inbox="fake", session_key="", routing=routing, text="x"))
    with pytest.raises(RuntimeProblem, match="session_key contains a NUL"):
        await fake_adapter.inbox.accept(NewMessage(inbox="fake", session_key="a\0", routing=routing, text="x"))


async def test_keys_that_were_used_once_leave_nothing_behind(fake_adapter: FakeAdapter, runtime: Runtime):
    """A thousand conversations of one message: no lane, no lock, no node."""
    size = runtime.tree.size
    for number in range(1_000):
        await fake_adapter.say("x", chat=str(number))
    await fake_adapter.wait_for(1_000)
    await trio.testing.wait_all_tasks_blocked()
    assert (runtime.lanes, runtime.tree.size, len(runtime.core.locks)) == (0, size, 0)


async def test_a_failing_turn_does_not_stop_its_lane(fake_adapter: FakeAdapter, scripted_agent: ScriptedAgent):
    """The next message is answered."""
    scripted_agent.then(RuntimeError("boom"), "fine")
    await fake_adapter.say("one")
    await fake_adapter.say("two")
    sent = await fake_adapter.wait_for(2)
    assert [entry.outcome.state for entry in sent] == [TurnState.FAILED, TurnState.COMPLETED]


async def test_jobs_of_a_session_are_bounded(virtual_clock, scripted_agent: ScriptedAgent):
    """The refusal says what to do."""
    async with Runtime(agent=scripted_agent, settings=RuntimeSettings(max_jobs_per_session=2)) as runtime:
        owner = runtime.owner(SessionContext(session_id="s", session_key="s"))
        for _ in range(2):
            await runtime.supervisor.start(fake_job(50), owner)
        with pytest.raises(JobRefused, match="already runs 2 jobs, which is the limit; wait for one or stop one"):
            await runtime.supervisor.start(fake_job(50), owner)


async def test_an_unwatched_job_has_a_maximum_lifetime(runtime: Runtime):
    """It sends no notice, so it does not run for ever."""
    job = await runtime.supervisor.start(fake_job(10_000_000), runtime.owner())
    assert await job.wait() is JobState.TIMED_OUT
    assert trio.current_time() == 24 * 3600


async def test_a_failing_job_does_not_touch_its_siblings(runtime: Runtime):
    """Each job is its own boundary."""
    good = await runtime.supervisor.start(fake_job(10), runtime.owner())
    bad = await runtime.supervisor.start(fake_job(5, fails=RuntimeError("boom")), runtime.owner())
    assert (await bad.wait(), await good.wait()) == (JobState.FAILED, JobState.EXITED)


async def test_a_job_has_its_sessions_identity_and_no_handle_on_the_turn(runtime: Runtime):
    """It starts from the supervisor's context: the session by value, no current turn."""
    import contextvars

    from hermes_trio import JobSpec, current_turn, get_session_env

    marker: contextvars.ContextVar[str] = contextvars.ContextVar("marker", default="")
    seen: list[object] = []

    async def body(job) -> JobState:
        job.started()
        await trio.sleep(1)
        seen.extend([get_session_env("HERMES_SESSION_ID"), current_turn(), marker.get()])
        return JobState.EXITED

    async def agent(turn: Turn) -> str:
        marker.set("of the turn")
        await turn.core.supervisor.start(JobSpec(kind="process", title="x", run=body), turn.owner)
        return ""

    await runtime.run_turn("x", SessionContext(session_id="mine"), agent=agent)
    await trio.sleep(2)
    assert seen == ["mine", None, ""]


async def test_a_budget_of_jobs_is_shared_with_the_children_and_cancels_the_scope(runtime: Runtime):
    """Children spend from their parent's rest; running out cancels the scope that owns the budget, with the cause."""

    async def child(turn: Turn) -> str:
        await turn.core.supervisor.start(fake_job(1), turn.owner)
        return "ok"

    async def agent(turn: Turn) -> str:
        await turn.run_child("a", agent=child)
        assert turn.allowance.rest("jobs") == 1
        await turn.run_child("b", agent=child, budget=Budget(jobs=100))
        await turn.run_child("c", agent=child)
        return "unreachable"

    outcome = await runtime.run_turn("x", agent=agent, budget=Budget(jobs=2))
    assert outcome.state is TurnState.CANCELLED
    assert outcome.cause is not None
    assert outcome.cause.kind is CancelCause.BUDGET
    assert outcome.cause.detail == "jobs: 2 of 2 used, 1 more requested"
    await trio.sleep(2)


async def test_wakes_are_a_budget_too(virtual_clock, scripted_agent: ScriptedAgent):
    """An input that may wake its session twice does not wake it a third time: the rest is abandoned with the reason, its jobs are stopped."""

    class Bounded(FakeAdapter):
        def budget(self, rows):
            return Budget(wakes=2)

    async def start_four(turn: Turn) -> str:
        assert isinstance(turn, DeliveringTurn)
        for seconds in (1, 2, 3, 4):
            await turn.core.supervisor.start_watched(fake_job(seconds), turn.owner, turn.channel)
        return "started"

    scripted_agent.then(start_four)
    async with Runtime(agent=scripted_agent) as runtime, Bounded().connect(runtime) as adapter:
        await adapter.say("x")
        await trio.sleep(100)
        assert len(adapter.sent) == 1 + 2
        assert (await runtime.store.backlog()) == {"inbox": 0, "outbox": 0, "approvals": 0, "runs": 0, "jobs": 0}
        states = await completion_states(runtime.store, [job.job_id for job in await runtime.store.list_jobs()])  # pyright: ignore
        assert sorted(state for state, _ in states.values()) == ["abandoned", "abandoned", "delivered", "delivered"]


@pytest.mark.parametrize("spent_is_first", [False, True])
async def test_the_wakes_of_each_input_are_counted_by_themselves(
    virtual_clock, scripted_agent: ScriptedAgent, spent_is_first: bool
):
    """Notices of two inputs that wait together: the input whose wakes are used up starts no turn, and takes nothing from the other one."""

    class Bounded(FakeAdapter):
        def budget(self, rows):
            return Budget(wakes=2)

    def start_all(*jobs: tuple[float, str]):
        async def step(turn: Turn) -> str:
            for seconds, text in jobs:
                await watch(turn, seconds, text)
            return "started"

        return step

    async def work(turn: Turn) -> str:
        await trio.sleep(20)
        return "worked"

    third, other = (8, 12) if spent_is_first else (12, 8)
    scripted_agent.then(start_all((1, "a1"), (2, "a2"), (third, "a3"), (60, "a4")), "one", "two")
    scripted_agent.then(start_all((other - 3, "b1"), (67, "b2")), work)
    async with Runtime(agent=scripted_agent) as runtime, Bounded().connect(runtime) as adapter:
        await adapter.say("a")
        await trio.sleep(3)
        await adapter.say("b")
        await trio.sleep(1)
        await adapter.say("c")
        await trio.sleep(100)
        told = [[row.text[-3:-1] for row in sent.notices] for sent in adapter.sent]
        assert told == [[], ["a1"], ["a2"], [], [], ["b1"], ["b2"]]
        jobs = {job.job_id: job for job in await runtime.store.list_jobs()}  # pyright: ignore
        states = await completion_states(runtime.store, list(jobs))  # pyright: ignore
        reason = "the budget is used up (wakes: 2 of 2 used)"
        assert sorted(states.values()) == [("abandoned", reason)] * 2 + [("delivered", "")] * 4
        assert (await runtime.store.backlog()) == {"inbox": 0, "outbox": 0, "approvals": 0, "runs": 0, "jobs": 0}


async def test_a_wake_that_is_used_before_the_turn_begins_is_not_used_twice(
    virtual_clock, scripted_agent: ScriptedAgent
):
    """The store decides when the turn begins: a turn that was within the budget when its rows were claimed does not begin if it is not any more."""

    class Bounded(FakeAdapter):
        def budget(self, rows):
            return Budget(wakes=1)

        async def on_turn_start(self, turn: Turn) -> None:
            await super().on_turn_start(turn)
            if not turn.input.notices:
                return
            row, store = turn.input.notices[0], turn.core.store
            elsewhere = msgspec.structs.replace(row.routing, session_id="elsewhere", session_key="elsewhere")
            number = await store.add_notice(
                NewNotice(
                    inbox=row.inbox,
                    routing=elsewhere,
                    kind=NoticeKind.WATCH_MATCH,
                    text="",
                    job_id="",
                    root_id=row.root_id,
                )
            )
            assert number is not None
            start = TurnStart(turn_id="turn_other", context=elsewhere, source="fake", inbox_ids=(number,))
            await store.finish_turn(TurnFinish(start=start, state=TurnState.COMPLETED, acknowledged=(number,)))

    scripted_agent.then(starts(5))
    async with Runtime(agent=scripted_agent) as runtime, Bounded().connect(runtime) as adapter:
        await adapter.say("x")
        await trio.sleep(100)
        assert len(scripted_agent.turns) == 1
        (job,) = await runtime.store.list_jobs()  # pyright: ignore
        states = await completion_states(runtime.store, [job.job_id])  # pyright: ignore
        assert states == {job.job_id: ("abandoned", "the budget is used up (wakes: 1 of 1 used)")}


async def test_a_notice_for_a_session_that_ended_is_abandoned(
    fake_adapter: FakeAdapter, scripted_agent: ScriptedAgent, runtime: Runtime
):
    """A session's end stops its jobs; a late notice never revives it."""
    scripted_agent.then(starts(50))
    await fake_adapter.say("x")
    (sent,) = await fake_adapter.wait_for(1)
    await runtime.supervisor.stop_session(sent.context.session_id, Cause(CancelCause.SESSION_ENDED, "by the test"))
    await trio.sleep(100)
    assert len(fake_adapter.sent) == 1
    assert (await runtime.store.backlog())["inbox"] == 0


async def test_a_message_that_waits_for_a_slot_when_a_drain_begins_is_kept(virtual_clock):
    """It has not begun, so it is not begun and cancelled: it waits for the next start."""
    gate = trio.Event()

    async def agent(turn: Turn) -> str:
        await gate.wait()
        return turn.input.text

    async with (
        Runtime(agent=agent, settings=RuntimeSettings(max_turns=1)) as runtime,
        FakeAdapter().connect(runtime) as adapter,
    ):
        await adapter.say("first", chat="1")
        await trio.testing.wait_all_tasks_blocked()
        await adapter.say("second", chat="2")
        await trio.testing.wait_all_tasks_blocked()
        report = await runtime.drain(0)
        assert report.ok
        assert [entry.outcome.cause.kind for entry in adapter.sent] == [CancelCause.DRAIN]
        waiting = await runtime.store.take_inbox(adapter.platform, adapter.key("2"))
        assert [row.text for row in waiting] == ["second"]
