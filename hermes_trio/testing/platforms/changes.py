"""Wakes the tasks that wait for a change. Waiting is level-triggered: check first, then wait for the next change, then check again."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import trio


@final
class Changes:
    """A condition variable without a lock. It owns no task."""

    def __init__(self) -> None:
        self._next = trio.Event()

    def tell(self) -> None:
        """Wake all tasks that wait now."""
        changed, self._next = self._next, trio.Event()
        changed.set()

    async def wait(self) -> None:
        """Wait for the next change. Cancelling has no other effect."""
        await self._next.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; check it now and after each change. Without a wait there is no checkpoint."""
        while not condition():
            await self._next.wait()
