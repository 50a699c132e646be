"""Virtual time: it jumps to the next deadline whenever every task is blocked.

A call that is in flight in a worker thread (see `hermes_trio.runtime.threads`) holds it, so that a timeout never fires only because a thread needed a
real millisecond.
"""

from __future__ import annotations

from trio.testing import MockClock

__all__ = ["virtual_clock"]


def virtual_clock(start: float = 0.0) -> MockClock:
    """A clock for `trio.run(..., clock=...)` that starts at `start` seconds (an epoch time, if the test wants dates)."""
    clock = MockClock(autojump_threshold=0)
    clock.jump(start)
    return clock
