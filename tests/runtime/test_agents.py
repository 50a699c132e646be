"""What may be given as `agent=`, and what is said of an agent that answers with something else."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import trio

from hermes_trio import (
    CancelCause,
    Cause,
    Job,
    JobSpec,
    JobState,
    Reply,
    Runtime,
    SessionContext,
    Turn,
    TurnState,
    asyncio_agent,
    get_session_env,
)
from hermes_trio.base.redaction import Redactor
from hermes_trio.logs import EntryFormatter
from hermes_trio.runtime.agents import as_agent


def plain(turn: Turn) -> str:
    return f"{get_session_env('HERMES_SESSION_ID')} {turn.input.text}"


class Shouting:
    async def __call__(self, turn: Turn) -> str:
        return turn.input.text.upper()


@pytest.mark.parametrize(
    ("agent", "expected"),
    [
        (plain, "s1 hello"),
        (lambda turn: Reply(text="from a lambda"), "from a lambda"),
        (Shouting(), "HELLO"),
        (partial(Shouting()), "HELLO"),
        (lambda turn: Shouting()(turn), "HELLO"),
    ],
    ids=["function", "lambda", "object", "partial", "returns an awaitable"],
)
async def test_a_synchronous_or_async_callable_is_recognised(agent, expected):
    """A program gives what it has; it need not know how the runtime calls it."""
    async with Runtime(agent=agent) as rt:
        assert (await rt.run_turn("hello", SessionContext(session_id="s1"))).text == expected


async def test_what_cannot_be_called_is_refused_at_once():
    """The mistake is named where it is made, not in the first turn."""
    with pytest.raises(TypeError, match="cannot be called"):
        Runtime(agent="gpt")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("answer", "words"), [(None, "None (is there a `return` missing?)"), (42, "int"), ({"text": "x"}, "dict")]
)
async def test_an_agent_that_returns_something_else_is_told(runtime, answer, words):
    """It is a failed turn whose error names the agent, what came and what to return; nothing leaves `run_turn`."""

    async def forgetful(turn: Turn):
        return answer

    outcome = await runtime.run_turn("hello", SessionContext(session_id="s1"), agent=forgetful)
    assert (outcome.state, outcome.error_code) == (TurnState.FAILED, "agent_wrong_reply")
    assert "forgetful returned " + words in outcome.error
    assert "returns a str or a hermes_trio.Reply" in outcome.error


async def test_asyncio_agents_share_one_loop_that_ends_with_the_runtime():
    """A client that is bound to a loop can be kept between turns; no thread is left when the runtime has closed."""
    loops: list[asyncio.AbstractEventLoop] = []

    async def agent(turn: Turn) -> str:
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return get_session_env("HERMES_SESSION_ID")

    async with Runtime(agent=asyncio_agent(agent)) as rt:
        for name in ("s1", "s2"):
            assert (await rt.run_turn("x", SessionContext(session_id=name))).text == name
    assert loops[0] is loops[1]
    assert loops[0].is_closed()
    assert not any(thread.name == "hermes-trio asyncio" for thread in threading.enumerate())


async def test_an_asyncio_agent_waits_for_its_turn_on_virtual_time(runtime: Runtime) -> None:
    """While it waits for work on Trio the virtual clock goes on: an hour of a child takes no time."""

    async def child(turn: Turn) -> str:
        await trio.sleep(3600)
        return "an hour later"

    async def agent(turn: Turn) -> str:
        return (await turn.run_child("x", agent=child)).text

    assert (await runtime.run_turn("go", agent=asyncio_agent(agent))).text == "an hour later"
    assert trio.current_time() >= 3600


def no_parameters() -> str:
    return ""


async def two_parameters(turn: Turn, other: str) -> str:
    return ""


@pytest.mark.parametrize("agent", [no_parameters, two_parameters, partial(Shouting(), "a turn")])
async def test_a_function_that_takes_no_turn_is_refused_at_once(agent: Any, runtime: Runtime):
    """The error says what an agent takes."""
    for give in (lambda: Runtime(agent=agent), lambda: as_agent(agent)):
        with pytest.raises(TypeError, match="an agent takes a Turn as its one argument"):
            give()
    with pytest.raises(TypeError, match="cannot be called with a Turn"):
        await runtime.run_turn("hi", agent=agent)


@pytest.mark.parametrize("part", ["text", "usage", "messages"])
async def test_a_reply_with_a_wrong_part_is_told(runtime: Runtime, part: str):
    """It is the agent's mistake, and not the store's."""

    async def agent(turn: Turn) -> Reply:
        return Reply(**{part: [3]})  # pyright: ignore[reportArgumentType]

    outcome = await runtime.run_turn("hi", agent=agent)
    assert (outcome.state, outcome.error_code) == (TurnState.FAILED, "agent_wrong_reply")
    assert f"whose {part} is list" in outcome.error


class Silent(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no words")

    __str__ = __repr__


async def test_an_exception_that_cannot_be_printed_fails_its_turn_or_job_alone(runtime: Runtime):
    """The nursery of the turn writes down what left it; an exception without words must not break that."""

    async def raises(*_: object) -> Any:
        raise Silent

    async def starts(turn: Turn) -> str:
        turn.start_soon(raises)
        await trio.sleep_forever()
        return ""

    for agent in (raises, starts):
        outcome = await runtime.run_turn("hi", agent=agent)
        assert (outcome.state, outcome.error_code) == (TurnState.FAILED, "agent_error")
    with pytest.raises(RuntimeError, match="Silent was raised, which cannot be printed"):
        await runtime.supervisor.start(JobSpec(kind="k", title="t", run=raises), runtime.owner())
    assert (await runtime.run_turn("hi")).text == "echo: hi"


async def test_an_exit_in_a_thread_ends_that_call_only(runtime: Runtime):
    """`sys.exit` in a worker thread, or on the runtime's own asyncio loop, is a failed turn: it does not end the program."""

    def exits(turn: Turn) -> str:
        sys.exit(2)

    async def exits_in_asyncio(turn: Turn) -> str:
        sys.exit(2)

    async def answers(turn: Turn) -> str:
        return "still there"

    for agent in (exits, asyncio_agent(exits_in_asyncio)):
        outcome = await runtime.run_turn("hi", agent=agent)
        assert (outcome.state, outcome.error_code) == (TurnState.FAILED, "agent_error")
    assert (await runtime.run_turn("hi", agent=asyncio_agent(answers))).text == "still there"


async def test_an_asyncio_agent_that_awaits_what_was_cancelled_is_a_failed_turn(runtime: Runtime):
    """`CancelledError` that does not come from the turn stays in the turn."""

    async def agent(turn: Turn) -> str:
        task = asyncio.create_task(asyncio.sleep(60))
        task.cancel()
        await task
        return "unreachable"

    outcome = await runtime.run_turn("hi", agent=asyncio_agent(agent))
    assert (outcome.state, outcome.error_code) == (TurnState.FAILED, "agent_cancelled_itself")
    assert (await runtime.run_turn("hi")).text == "echo: hi"


async def test_a_child_takes_every_kind_of_agent(runtime: Runtime):
    """What `Runtime(agent=…)` takes, `run_child` takes."""

    async def parent(turn: Turn) -> str:
        return (await turn.run_child("hello", agent=plain)).text

    assert (await runtime.run_turn("hi", agent=parent)).text.endswith(" hello")


def emits_in_a_thread(turn: Turn) -> str:
    for number in range(50):
        turn.emit("message.delta", delta=number)
    return "done"


async def emits_in_asyncio(turn: Turn) -> str:
    await asyncio.sleep(0)
    return emits_in_a_thread(turn)


@pytest.mark.parametrize("agent", [emits_in_a_thread, asyncio_agent(emits_in_asyncio)], ids=["thread", "asyncio"])
async def test_events_are_told_in_the_thread_of_trio_in_order_and_before_the_end(runtime: Runtime, agent: Any):
    """A sink may use Trio: the gateway's put events into channels and set events of Trio."""
    sending, receiving = trio.open_memory_channel[Any](100)
    threads: set[int] = set()

    def sink(event: Mapping[str, Any]) -> None:
        threads.add(threading.get_ident())
        sending.send_nowait(event["delta"])

    assert (await runtime.run_turn("hi", agent=agent, sink=sink)).text == "done"
    assert [receiving.receive_nowait() for _ in range(50)] == list(range(50))
    assert threads == {threading.get_ident()}


async def test_a_sink_that_fails_off_the_thread_of_trio_costs_its_event(
    runtime: Runtime, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """The agent is in another thread: the error cannot reach it, and must not end the runtime. Its log entry names the session."""
    monkeypatch.setattr(caplog.handler, "formatter", EntryFormatter(Redactor(()), text=True))

    def sink(event: Mapping[str, Any]) -> None:
        raise ValueError("a broken sink")

    outcome = await runtime.run_turn("hi", SessionContext(session_id="s-7"), agent=emits_in_a_thread, sink=sink)
    assert outcome.text == "done"
    assert "a call from another thread failed" in caplog.text
    assert "session=s-7" in caplog.text


async def test_a_synchronous_agent_may_run_its_own_asyncio(runtime: Runtime):
    """`asyncio.run` in the agent: the methods of the turn are awaited there as well."""

    def agent(turn: Turn) -> str:
        async def work() -> str:
            return f"{len(await turn.history())} before"

        return asyncio.run(work())

    assert (await runtime.run_turn("hi", agent=agent)).text == "0 before"


async def test_an_asyncio_agent_may_await_several_methods_at_once(runtime: Runtime):
    """On virtual time, too: the clock goes on while one of them waits on Trio."""

    async def child(turn: Turn) -> str:
        await trio.sleep(3600)
        return "an hour later"

    async def agent(turn: Turn) -> str:
        history, outcome, _ = await asyncio.gather(turn.history(), turn.run_child("x", agent=child), turn.history())
        return f"{len(history)} {outcome.text}"

    outcome = await runtime.run_turn("hi", agent=asyncio_agent(agent))
    assert outcome.text == "0 an hour later"


async def test_an_agent_of_another_thread_cancels_its_turn(runtime: Runtime):
    """`cancel` may be called from any thread."""

    async def agent(turn: Turn) -> str:
        turn.cancel(Cause(CancelCause.STOP, "by itself"))
        await asyncio.sleep(60)
        return "unreachable"

    outcome = await runtime.run_turn("hi", agent=asyncio_agent(agent))
    assert outcome.cause == Cause(CancelCause.STOP, "by itself")


async def test_a_job_is_used_from_asyncio(runtime: Runtime):
    """Waiting, stopping and seeing are awaited by an asyncio agent as they are; a job that ends tells its waiters."""

    async def work(job: Job) -> JobState | None:
        job.started("ready")
        await trio.sleep(60 if job.spec.title == "short" else math.inf)
        return JobState.EXITED

    async def agent(turn: Turn) -> str:
        short = await turn.start_job(JobSpec(kind="k", title="short", run=work))
        long = await turn.start_job(JobSpec(kind="k", title="long", run=work))
        assert await long.wait_started() == "ready"
        assert await short.wait() is JobState.EXITED
        receipt = await long.stop()
        await long.mark_seen()
        return f"{receipt.ok} {(await long.wait()).value}"

    assert (await runtime.run_turn("hi", agent=asyncio_agent(agent))).text == "True killed"
