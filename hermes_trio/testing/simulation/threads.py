"""Worker threads of a world: a tool that uses one, and the simulation of the thread.

A simulated thread takes a given virtual time and cannot be interrupted, like a real one that blocks in a library call. No real thread is started.
"""

from __future__ import annotations

from contextvars import ContextVar
from importlib.metadata import EntryPoint
from typing import Final

import trio

from hermes_trio.plugins import TOOLS
from hermes_trio.runtime.turn import Turn
from hermes_trio.tools.registry import tool

PLUGIN: Final = "simulated"
THREAD_TOOL: Final = "ponder"

thread_work: ContextVar[tuple[float, str]] = ContextVar("simulated_thread_work", default=(0.0, ""))
"""The duration of the next thread of this task, and its owner."""


@tool(name=THREAD_TOOL)
async def ponder(turn: Turn, seconds: float, says: str) -> str:
    """Think in a worker thread, which cannot be interrupted."""
    token = thread_work.set((seconds, says))
    try:
        await turn.run_sync(_nothing, name=f"{THREAD_TOOL} {says}")
    finally:
        thread_work.reset(token)
    return f"{says} pondered"


def _nothing() -> None:
    """Do nothing: the function that the thread calls."""


def simulated_entry_points(*, group: str) -> list[EntryPoint]:
    """Return the one plugin that is installed in a world. Replaces `hermes_trio.plugins.entry_points`."""
    return [EntryPoint(PLUGIN, f"{__name__}:{ponder.spec.name}", group)] if group == TOOLS else []


async def wait_out_virtually(over: trio.Event, returned: object, grace: float, clock: object) -> None:
    """Wait until a call in a thread has ended, for at most the grace in virtual time."""
    with trio.move_on_after(grace):
        await over.wait()
