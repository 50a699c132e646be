"""What may be given as `agent=`, and what is said of an agent that answers with something else."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest
import trio

from hermes_trio import Reply, Runtime, SessionContext, Turn, TurnState, asyncio_agent, get_session_env


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
