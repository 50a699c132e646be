"""Run synchronous code on the loop: the verbs are plain functions of a connection, whose answers come from a socket.

The code runs in a greenlet. Where it needs an answer, it passes an awaitable to the task that runs it, and continues with the value. No thread
is involved, and the verbs' code does not depend on it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

from greenlet import getcurrent, greenlet

T = TypeVar("T")


async def run_waiting(work: Callable[[], T]) -> T:
    """Run `work`, which may call `wait_here`; return its value. An error or a cancellation of what it waits for is raised there, inside `work`."""
    running: Any = greenlet(work)
    asked: Any = running.switch()
    while not running.dead:
        try:
            value = await asked
        except BaseException as error:  # noqa: ASYNC103 - raised inside `work`, and out of it unless it handles it
            asked = running.throw(error)
        else:
            asked = running.switch(value)
    return cast(T, asked)


def wait_here(wanted: Awaitable[T]) -> T:
    """Await `wanted`, in code that runs under `run_waiting`."""
    waiter: Any = getcurrent().parent
    return cast(T, waiter.switch(wanted))
