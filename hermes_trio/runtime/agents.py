"""Agents: the functions that `agent=` accepts, and how each kind is run.

An async function for Trio that takes a turn and returns a reply is an agent already. A synchronous function runs in a worker thread. An asyncio coroutine
function runs on the runtime's asyncio loop (see `asyncio_loop`); it looks like one for Trio, so it is wrapped with `asyncio_agent`, except in an
`AsyncioRuntime`, whose async functions are asyncio's unless they are wrapped with `trio_agent`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

from .errors import AgentFailed
from .outcome import Usage
from .ports import Agent, Message, Reply
from .turn import Turn

AnyAgent = Callable[[Turn], Awaitable[Reply | str]] | Callable[[Turn], Reply | str]
"""What `agent=` takes: an async or a synchronous function of a turn."""


def as_agent(function: AnyAgent) -> Agent:
    """Return `function` as an agent: an async one as it is, a synchronous one in a worker thread. Raises `TypeError` for what cannot be called."""
    if not callable(function):
        raise TypeError(
            f"agent={function!r} cannot be called: give a function that takes a Turn and returns a str or a Reply"
        )
    _check_signature(function)
    if _is_async(function):
        return cast("Agent", function)
    return sync_agent(cast("Callable[[Turn], Reply | str]", function))


def as_reply(answer: object, agent: object) -> Reply:
    """Return what an agent answered as a `Reply`. Raises `AgentFailed`, which names the agent and what to return, for anything else."""
    if isinstance(answer, str):
        return Reply(text=answer)
    if isinstance(answer, Reply):
        plain = type(answer.text) is str and type(answer.usage) is Usage and not answer.messages
        return answer if plain else _checked(answer, agent)
    given = "None (is there a `return` missing?)" if answer is None else f"{type(answer).__name__}"
    raise AgentFailed(
        f"the agent {agent_name(agent)} returned {given}; an agent returns a str or a hermes_trio.Reply",
        "agent_wrong_reply",
    )


def _checked(reply: Reply, agent: object) -> Reply:
    """Return the reply, if its parts can be stored. `AgentFailed` names the part that cannot."""
    parts = {"text": isinstance(reply.text, str), "usage": isinstance(reply.usage, Usage)}  # pyright: ignore[reportUnnecessaryIsInstance]
    if reply.messages:
        parts["messages"] = isinstance(reply.messages, tuple) and all(  # pyright: ignore[reportUnnecessaryIsInstance]
            isinstance(message, Message)  # pyright: ignore[reportUnnecessaryIsInstance]
            for message in reply.messages
        )
    for part, right in parts.items():
        if not right:
            given = type(getattr(reply, part)).__name__
            wanted = {"text": "a str", "usage": "a Usage", "messages": "a tuple of Message"}[part]
            raise AgentFailed(
                f"the agent {agent_name(agent)} returned a Reply whose {part} is {given}; it must be {wanted}",
                "agent_wrong_reply",
            )
    return reply


def _check_signature(function: AnyAgent) -> None:
    """Raise `TypeError` for a function that cannot take a turn as its one argument. A function without a signature passes."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise TypeError(
            f"the agent {agent_name(function)}{signature} cannot be called with a Turn ({error}): an agent takes a Turn as its one argument"
        ) from None


def sync_agent(function: Callable[[Turn], Reply | str]) -> Agent:
    """Make an agent from a synchronous function: it runs in a worker thread, with the turn's context.

    A thread cannot be interrupted: when the turn is stopped, the function has the thread grace to return, then it is shown as abandoned. A function that
    works for long should check `turn.cause` from time to time. If the function returns an awaitable, it is awaited on Trio.
    """

    def call(turn: Turn) -> tuple[Any]:
        return (function(turn),)  # in a tuple, because Trio raises TypeError for a coroutine that a thread returns

    async def agent(turn: Turn) -> Reply | str:
        (answer,) = await turn.core.threads.run_sync(call, turn, name=agent_name(function), pool="agent")
        return await answer if inspect.isawaitable(answer) else answer

    return _named(agent, function)


def asyncio_agent(function: Callable[[Turn], Awaitable[Reply | str]]) -> Agent:
    """Make an agent from an asyncio coroutine function: it runs as a task on the runtime's one asyncio loop, with the turn's context.

    All asyncio agents of a runtime share that loop, so clients and pools that are bound to a loop can be kept between turns. Stopping the turn cancels
    the task as asyncio does it, and waits for it within the thread grace.
    """

    async def agent(turn: Turn) -> Reply | str:
        return await turn.core.asyncio_loop.run(function, turn, name=agent_name(function))

    return _named(agent, function)


def trio_agent(function: Callable[[Turn], Awaitable[Reply | str]]) -> Agent:
    """Mark an async function as written for Trio. Needed only with an `AsyncioRuntime`."""

    async def agent(turn: Turn) -> Reply | str:
        return await function(turn)

    return _named(agent, function)


def runs_on_trio(function: object) -> bool:
    """Return whether an agent was made for Trio by this module or is one of the package's own, such as `ModelAgent`."""
    return hasattr(function, "__hermes_agent__") or type(function).__module__.partition(".")[0] == "hermes_trio"


def agent_name(function: object) -> str:
    """Return the name of an agent for displays and error messages."""
    while isinstance(function, partial):
        function = cast("partial[object]", function).func
    named = getattr(function, "__hermes_agent__", function)
    return getattr(named, "__qualname__", type(named).__name__)


def _is_async(function: object) -> bool:
    while isinstance(function, partial):
        function = cast("partial[object]", function).func
    called = getattr(type(function), "__call__", None)  # noqa: B004 - an object whose __call__ is async is an async function
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def _named(agent: Callable[[Turn], Awaitable[Reply | str]], function: object) -> Agent:
    agent.__hermes_agent__ = function  # pyright: ignore[reportFunctionMemberAccess]
    return agent
