"""Telling whoever waits that something has changed. Waiting is level-triggered: look first, then wait for the next change, then look again."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import trio

__all__ = ["Changes"]


@final
class Changes:
    """One thing that changes, and everyone who waits for it. It owns no task."""

    def __init__(self) -> None:
        self._next = trio.Event()

    def tell(self) -> None:
        """Wake everyone who waits now."""
        changed, self._next = self._next, trio.Event()
        changed.set()

    async def wait(self) -> None:
        """Wait for the next change. Cancelling forgets the wait."""
        await self._next.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds, looking now and after each change; without a change to wait for there is no checkpoint."""
        while not condition():
            await self._next.wait()
