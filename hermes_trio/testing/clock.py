"""Virtual time, which jumps to the next deadline when every task is blocked.

A call in a worker thread (see `hermes_trio.runtime.threads`) holds it, so that a time-out never expires only because a thread needed a
real millisecond.
"""

from __future__ import annotations

from trio.testing import MockClock


def virtual_clock(start: float = 0.0) -> MockClock:
    """Return a clock for `trio.run(..., clock=...)` that starts at `start` seconds, which may be a Unix time."""
    clock = MockClock(autojump_threshold=0)
    clock.jump(start)
    return clock
