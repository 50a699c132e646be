"""Limits the real time of one test: `trio.fail_after` is virtual on a mock clock and does not detect a blocked loop.

When the time is up the test is cancelled and fails, with the trees of its runtimes as they were at that moment. If the loop does not react, because
something blocks it, every stack is printed and an exception is raised in the thread of the loop. Other tests, and pytest's own `faulthandler_timeout`, are
left alone.
"""

from __future__ import annotations

import ctypes
import faulthandler
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio

from hermes_trio.runtime.runtime import Runtime

REACTION_SECONDS: Final = 2.0
"""Seconds that the loop may take to react before it counts as blocked."""


class TestTooSlow(AssertionError):
    """Raised if a test takes longer than its limit."""

    __test__ = False  # not a class of tests


async def run_limited(test: Callable[[], Awaitable[None]], seconds: float, runtimes: Sequence[Runtime]) -> None:
    """Run a test's body on Trio; raise `TestTooSlow` if it takes more than `seconds` of real time."""
    token = trio.lowlevel.current_trio_token()
    thread = threading.get_ident()
    over = threading.Event()
    reacted = threading.Event()
    trees: list[str] = []

    def cut_off() -> None:
        reacted.set()
        trees.extend(runtime.tree.render() for runtime in runtimes)
        scope.cancel()

    def watch() -> None:
        if over.wait(seconds):
            return
        try:
            token.run_sync_soon(cut_off)
        except trio.RunFinishedError:
            return
        if reacted.wait(REACTION_SECONDS) or over.is_set():
            return
        print(f"\nthe event loop has been blocked; a test is over its {seconds:g} s", file=sys.__stderr__)
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TestTooSlow))

    with trio.CancelScope() as scope:
        watcher = threading.Thread(target=watch, name="trio.hermes time limit", daemon=True)
        watcher.start()
        try:
            await test()
        finally:
            over.set()
    if scope.cancelled_caught:
        drawn = "\n\n".join(trees)
        raise TestTooSlow(
            f"the test took more than {seconds:g} s of real time" + (f"\n\nthe tree:\n{drawn}" if drawn else "")
        )
