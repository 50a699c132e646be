"""Bring your own agent: a synchronous function or an asyncio coroutine function, made into an agent of this runtime.

An async function for Trio that takes a turn and returns a reply is an agent already.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable

import trio

from .ports import Agent, Reply
from .turn import Turn

__all__ = ["asyncio_agent", "sync_agent"]


def sync_agent(function: Callable[[Turn], Reply | str]) -> Agent:
    """An agent from a synchronous function: it runs in a worker thread, with the turn's context.

    A thread cannot be interrupted: when the turn is stopped it has the thread grace to return, then it is shown as abandoned. A function that
    works for long should look at `turn.cause` now and then.
    """

    async def agent(turn: Turn) -> Reply | str:
        return await turn.core.threads.run_sync(function, turn, name=_name(function), pool="agent")

    return agent


def asyncio_agent(function: Callable[[Turn], Awaitable[Reply | str]]) -> Agent:
    """An agent from an asyncio coroutine function: it runs in an event loop of its own in a worker thread.

    Stopping the turn cancels the coroutine as asyncio does it, and waits for it within the thread grace.
    """

    import asyncio  # only here: loading it takes longer than loading Trio, and few programs need it

    async def agent(turn: Turn) -> Reply | str:
        loop: asyncio.AbstractEventLoop | None = None
        task: asyncio.Task[Reply | str] | None = None
        stopped = False
        lock = threading.Lock()

        async def main() -> Reply | str:
            nonlocal loop, task
            with lock:
                loop = asyncio.get_running_loop()
                task = asyncio.current_task()
                if stopped:
                    raise asyncio.CancelledError
            return await function(turn)

        def call() -> Reply | str | None:
            try:
                return asyncio.run(main())
            except asyncio.CancelledError:  # noqa: ASYNC103 - of the loop in this thread, which ends here
                return None  # noqa: ASYNC104

        def cancel() -> None:
            nonlocal stopped
            with lock:
                stopped = True
                if loop is not None and task is not None and not loop.is_closed():
                    loop.call_soon_threadsafe(task.cancel)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(_on_cancel, cancel)
            reply = await turn.core.threads.run_sync(call, name=_name(function), pool="agent")
            nursery.cancel_scope.cancel()
        if reply is None:
            raise asyncio.CancelledError("the agent cancelled itself")
        return reply

    return agent


async def _on_cancel(cancel: Callable[[], None]) -> None:
    try:
        await trio.sleep_forever()
    finally:
        cancel()


def _name(function: object) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
