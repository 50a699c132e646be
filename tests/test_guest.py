"""`AsyncioRuntime`: the runtime inside a program that runs asyncio. Each test is a synchronous function with a loop of its own."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import trio
import trio.lowlevel

from hermes_trio import (
    DeliveringTurn,
    Job,
    JobSpec,
    JobState,
    RuntimeClosed,
    SessionContext,
    StopReceipt,
    Turn,
    TurnState,
    current_context,
    get_session_env,
)
from hermes_trio.guest import AsyncioRuntime
from hermes_trio.runtime.agents import asyncio_agent, trio_agent
from hermes_trio.store import open_store


def names() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


async def echo(turn: Turn) -> str:
    await asyncio.sleep(0)
    return f"{get_session_env('HERMES_SESSION_ID')}: {turn.input.text}"


def test_an_asyncio_agent_runs_on_the_hosts_own_loop():
    """Clients and pools that are bound to the program's loop can be used by its agent."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        seen: list[Any] = []

        async def agent(turn: Turn) -> str:
            seen.append((asyncio.get_running_loop(), threading.current_thread()))
            return await echo(turn)

        async with AsyncioRuntime(agent=agent) as rt:
            outcome = await rt.run_turn("hello", SessionContext(session_id="s1"))
        assert outcome.text == "s1: hello"
        assert seen == [(loop, threading.current_thread())]

    asyncio.run(main())
    assert "hermes-trio runtime" not in names()


def test_a_synchronous_agent_and_one_for_trio_work_too():
    """What is given as `agent=` is recognised; only an async function for Trio must be marked."""

    async def on_trio(turn: Turn) -> str:
        await trio.lowlevel.checkpoint()
        return f"trio: {turn.input.text}"

    async def main() -> None:
        async with AsyncioRuntime(agent=lambda turn: turn.input.text.upper()) as rt:
            assert (await rt.run_turn("hello")).text == "HELLO"
            assert (await rt.run_turn("hello", agent=trio_agent(on_trio))).text == "trio: hello"

    asyncio.run(main())


def test_a_thousand_turns_at_once_keep_their_identities():
    """No turn sees the session of another, on either side of the bridge."""

    async def agent(turn: Turn) -> str:
        before = current_context().session_id
        await asyncio.sleep(0)
        after = get_session_env("HERMES_SESSION_ID")
        return f"{before} {after}"

    async def main() -> None:
        async with AsyncioRuntime(agent=agent) as rt:
            outcomes = await asyncio.gather(
                *(rt.run_turn("x", SessionContext(session_id=f"s{number}")) for number in range(1000))
            )
        assert [outcome.text for outcome in outcomes] == [f"s{number} s{number}" for number in range(1000)]

    asyncio.run(main())


def test_cancelling_the_hosts_task_stops_the_turn_with_its_receipt():
    """The host's `CancelledError` is raised after the turn's scope is empty, not before."""

    async def main() -> None:
        started = asyncio.Event()
        ended: list[str] = []
        receipts: list[StopReceipt] = []

        async def agent(turn: Turn) -> str:
            started.set()
            try:
                await asyncio.sleep(3600)
            finally:
                ended.append("agent")
            return "never"

        async with AsyncioRuntime(agent=agent) as rt:
            task = asyncio.create_task(rt.run_turn("go", on_receipt=receipts.append))
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert ended == ["agent"]
            await asyncio.sleep(0)
            assert [receipt.ok for receipt in receipts] == [True]
            assert "turn" in {line.kind for line in receipts[0].lines}
            assert "turn_" not in await rt.render_tree()

    asyncio.run(main())


def test_stopping_the_turn_cancels_the_asyncio_task():
    """The other direction: a stop from inside the runtime reaches the agent's task as asyncio's cancellation."""

    async def main() -> None:
        started = asyncio.Event()
        seen: list[str] = []

        async def agent(turn: Turn) -> str:
            started.set()
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise
            return "never"

        async with AsyncioRuntime(agent=agent) as rt:
            task = asyncio.create_task(rt.run_turn("go", SessionContext(session_id="s1")))
            await started.wait()
            receipts = await rt.stop_session("s1")
            outcome = await task
        assert [receipt.ok for receipt in receipts] == [True]
        assert (outcome.state, seen) == (TurnState.CANCELLED, ["cancelled"])

    asyncio.run(main())


def test_events_of_a_turn_are_told_on_the_hosts_loop():
    """A sink is the host's: it is called in the host's thread, in order."""

    async def main() -> None:
        told: list[tuple[str, threading.Thread]] = []

        async def agent(turn: Turn) -> str:
            for number in range(3):
                turn.emit("message.delta", delta=str(number))
            return "done"

        async with AsyncioRuntime(agent=agent) as rt:
            await rt.run_turn("go", sink=lambda event: told.append((event["delta"], threading.current_thread())))
        assert told == [(str(number), threading.current_thread()) for number in range(3)]

    asyncio.run(main())


def test_a_watched_job_reports_back_to_the_host():
    """A job that the turn left behind is told by `completions`, once."""

    async def measure(job: Job) -> JobState:
        job.started()
        job.text = "the measurement says 42"
        return JobState.EXITED

    async def start(turn: Turn) -> str:
        assert isinstance(turn, DeliveringTurn)
        await turn.watch_job(JobSpec(kind="measurement", title="a measurement", run=measure))
        return "I will tell you"

    async def main() -> None:
        async with AsyncioRuntime(agent=trio_agent(start)) as rt:
            await rt.run_turn("measure")
            async for notice in rt.completions():
                assert notice.text == "the measurement says 42"
                break

    asyncio.run(main())


def test_a_host_that_is_cancelled_still_ends_the_runtime_in_its_order():
    """asyncio cancels the task that holds the `async with`: the thread is gone when it has ended."""

    async def main() -> None:
        opened = asyncio.Event()

        async def hold() -> None:
            async with AsyncioRuntime(agent=echo) as rt:
                await rt.run_turn("one")
                opened.set()
                await asyncio.sleep(3600)

        task = asyncio.create_task(hold())
        await opened.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert "hermes-trio runtime" not in names()

    asyncio.run(main())


def test_a_runtime_that_cannot_open_says_why():
    """What kept the store from opening is raised by `async with`, and no thread is left."""

    class Broken:
        async def __aenter__(self) -> Any:
            raise OSError("no such disk")

        async def __aexit__(self, *error: object) -> None: ...

    async def main() -> None:
        with pytest.raises(OSError, match="no such disk"):
            async with AsyncioRuntime(agent=echo, store=Broken()):
                pass

    asyncio.run(main())
    assert "hermes-trio runtime" not in names()


def test_a_closed_runtime_takes_no_turn():
    """A call after the `async with` is refused with a sentence, and does not hang."""

    async def main() -> None:
        rt = AsyncioRuntime(agent=echo)
        with pytest.raises(RuntimeClosed, match="not open"):
            await rt.run_turn("too early")
        async with rt:
            pass
        with pytest.raises(RuntimeClosed, match="not open"):
            await rt.run_turn("too late")

    asyncio.run(main())


def test_the_runtimes_end_fails_what_the_host_still_waits_for():
    """A turn under way when the runtime closes ends, and its caller is answered."""

    async def main() -> None:
        started = asyncio.Event()

        async def agent(turn: Turn) -> str:
            started.set()
            await asyncio.sleep(3600)
            return "never"

        async with AsyncioRuntime(agent=agent) as rt:
            task = asyncio.create_task(rt.run_turn("go"))
            await started.wait()
        with pytest.raises(RuntimeClosed):
            await task

    asyncio.run(main())


class SlowToOpen:
    """A store that takes a while to open, and says whether it was closed."""

    def __init__(self) -> None:
        self.opening = threading.Event()
        self.closed = False
        self._store = open_store(None, runner="inline")

    async def __aenter__(self) -> Any:
        self.opening.set()
        await trio.sleep(0.05)
        return await self._store.__aenter__()

    async def __aexit__(self, *error: Any) -> Any:
        self.closed = True
        return await self._store.__aexit__(*error)


def test_a_host_that_is_cancelled_while_the_runtime_opens_leaves_no_thread():
    """`async with` that never began has no end that could close it: what was started is ended before `CancelledError` is raised."""

    async def main() -> None:
        slow = SlowToOpen()
        runtime = AsyncioRuntime(agent=echo, store=slow)
        task = asyncio.create_task(runtime.__aenter__())
        while not slow.opening.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert "hermes-trio runtime" not in names()

    asyncio.run(main())


def test_a_loop_that_is_closed_under_the_runtime_ends_it():
    """A host that closes its loop without leaving the `async with` leaves no thread and no open store."""
    loop = asyncio.new_event_loop()
    slow = SlowToOpen()
    started = threading.Event()

    async def agent(turn: Turn) -> str:
        started.set()
        await asyncio.sleep(3600)
        return "never"

    runtime = AsyncioRuntime(agent=agent, store=slow)
    loop.run_until_complete(runtime.__aenter__())
    task = loop.create_task(runtime.run_turn("go"))
    while not started.is_set():
        loop.run_until_complete(asyncio.sleep(0.001))
    task._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]
    for other in asyncio.all_tasks(loop):
        other._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]
    loop.close()
    thread = runtime._thread
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()
    assert slow.closed


def test_no_notice_is_lost_when_its_reader_is_cancelled():
    """A reader of `completions` that is cancelled while a notice comes in leaves it to the next one."""

    async def measure(job: Job) -> JobState:
        job.started()
        job.text = "42"
        return JobState.EXITED

    async def start(turn: Turn) -> str:
        assert isinstance(turn, DeliveringTurn)
        await turn.watch_job(JobSpec(kind="measurement", title="a measurement", run=measure))
        return "later"

    async def read(rt: AsyncioRuntime) -> str:
        async for notice in rt.completions():
            return notice.text
        return ""

    async def main() -> None:
        async with AsyncioRuntime(agent=trio_agent(start)) as rt:
            for number in range(20):
                reader = asyncio.create_task(read(rt))
                await rt.run_turn("measure")
                for _ in range(number):
                    await asyncio.sleep(0)
                reader.cancel()
                got = (await asyncio.gather(reader, return_exceptions=True))[0]
                if isinstance(got, asyncio.CancelledError):
                    got = await asyncio.wait_for(read(rt), 10)
                assert got == "42"

    asyncio.run(main())


def test_an_asyncio_agent_uses_its_turn():
    """History, threads, children and jobs: what an agent for Trio has, an agent for asyncio has."""

    async def measure(job: Job) -> JobState:
        job.started()
        job.text = "42"
        return JobState.EXITED

    async def agent(turn: Turn) -> str:
        assert isinstance(turn, DeliveringTurn)
        if turn.input.text == "child":
            return "from the child"
        child = await turn.run_child("child", agent=asyncio_agent(agent))
        job = await turn.watch_job(JobSpec(kind="measurement", title="a measurement", run=measure))
        upper = await turn.run_sync(str.upper, turn.input.text)
        return f"{len(await turn.history())} {upper} {child.text} {job.id[:4]}"

    async def main() -> None:
        async with AsyncioRuntime(agent=agent) as rt:
            for before in (0, 2):
                outcome = await rt.run_turn("hello", SessionContext(session_id="s1"))
                assert outcome.text.startswith(f"{before} HELLO from the child "), outcome
            async for notice in rt.completions():
                assert notice.text == "42"
                break

    asyncio.run(main())


def test_what_a_method_of_the_turn_raises_is_the_agents():
    """An error comes to the agent, which may handle it; a wait that is given up ends the work, and the turn goes on."""

    async def agent(turn: Turn) -> str:
        def fail() -> None:
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await turn.run_sync(fail)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(turn.run_child("x", agent=trio_agent(forever)), 0.05)
        return "went on"

    async def forever(turn: Turn) -> str:
        await trio.sleep_forever()
        return ""

    async def main() -> None:
        async with AsyncioRuntime(agent=agent) as rt:
            outcome = await asyncio.wait_for(rt.run_turn("go"), 20)
            assert (outcome.text, outcome.error) == ("went on", "")

    asyncio.run(main())


def test_a_job_is_used_by_the_host():
    """The host awaits the methods of a job as they are, on its own loop, also when the turn that started it is over."""

    async def work(job: Job) -> JobState:
        job.started()
        await trio.sleep(0.05)
        return JobState.EXITED

    async def main() -> None:
        jobs: list[Job] = []

        async def agent(turn: Turn) -> str:
            jobs.append(await turn.start_job(JobSpec(kind="k", title="t", run=work)))
            return (await turn.run_child("x", agent=echo)).text

        async with AsyncioRuntime(agent=agent) as rt:
            assert (await rt.run_turn("go")).text.endswith(": x")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(jobs[0].wait(), 0.001)
            assert await jobs[0].wait() is JobState.EXITED
            assert await rt.run(jobs[0].wait) is JobState.EXITED
        with pytest.raises(RuntimeClosed):
            await jobs[0].wait()

    asyncio.run(main())


def test_an_agent_that_awaits_what_was_cancelled_leaves_the_runtime_alone():
    """`CancelledError` of something else than the turn fails the turn; the runtime and its other turns go on."""

    async def agent(turn: Turn) -> str:
        raise asyncio.CancelledError

    async def main() -> None:
        async with AsyncioRuntime(agent=agent) as rt:
            outcome = await rt.run_turn("go")
            assert (outcome.state, outcome.error_code) == (TurnState.FAILED, "agent_cancelled_itself")
            assert (await rt.run_turn("go", agent=echo)).text.endswith(": go")

    asyncio.run(main())
