"""Worker threads of a world: a tool that works in one, and what stands for the thread itself.

A thread of a world takes as long as it says and cannot be interrupted, as a real one that hangs in a call of a library. Nothing runs beside the loop.
"""

from __future__ import annotations

from contextvars import ContextVar
from importlib.metadata import EntryPoint
from typing import Final

import trio

from hermes_trio.plugins import TOOLS
from hermes_trio.runtime.turn import Turn
from hermes_trio.tools.registry import tool

__all__ = ["PLUGIN", "THREAD_TOOL", "ponder", "simulated_entry_points", "thread_work", "wait_out_virtually"]

PLUGIN: Final = "simulated"
THREAD_TOOL: Final = "ponder"

thread_work: ContextVar[tuple[float, str]] = ContextVar("simulated_thread_work", default=(0.0, ""))
"""How long the next thread of this task takes, and whose it is."""


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
    """What the thread computes."""


def simulated_entry_points(*, group: str) -> list[EntryPoint]:
    """Stands for `importlib.metadata.entry_points`: the one plugin that is installed in a world."""
    return [EntryPoint(PLUGIN, f"{__name__}:{ponder.spec.name}", group)] if group == TOOLS else []


async def wait_out_virtually(over: trio.Event, returned: object, grace: float, clock: object) -> None:
    """Wait for the end of a call in a thread, but not longer than the grace, which is virtual time here."""
    with trio.move_on_after(grace):
        await over.wait()
