"""What comes in from a platform is worked on in order within a chat, and side by side across chats.

A command may take seconds (`/stop` waits for what it stops), and other people must not wait for it. An `Intake` lives in its adapter's nursery, starts a
task for each chat that has something to do, and is gone with that nursery. `hand_over` is the one way from there to the gateway.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from hermes_trio.store.errors import StoreError

from .contract import Adapter, Disposition, Incoming, Received

__all__ = ["HEARD", "Intake", "hand_over"]

logger: Final = logging.getLogger("hermes_trio.messaging.intake")

Work = Callable[[], Awaitable[object]]

AT_ONCE: Final = 256
"""Pieces of work that may wait or run. Above that the platform's connection is read more slowly."""

STORE_DELAYS: Final = (0.2, 1.0, 4.0)
"""How long a store that fails is waited for before the connection is given up: not every platform tells a thing twice."""

HEARD: Final = frozenset({Disposition.ACCEPTED, Disposition.STEERED, Disposition.COMMAND, Disposition.ANSWERED})
"""What becomes of something that was said to the agent by somebody who may."""


class Intake:
    """See the module."""

    def __init__(self, nursery: trio.Nursery, at_once: int = AT_ONCE) -> None:
        self._nursery = nursery
        self._room = trio.Semaphore(at_once)
        self._chats: dict[str, deque[Work]] = {}

    async def put(self, chat: str, work: Work) -> None:
        """Have `work` done after everything that was put there for this chat before; waits for room.

        What the work raises ends the nursery, and with it the connection: it must not be swallowed, because then nobody would repeat it.
        """
        await self._room.acquire()
        waiting = self._chats.get(chat)
        if waiting is not None:
            waiting.append(work)
            return
        self._chats[chat] = deque([work])
        self._nursery.start_soon(self._work_off, chat)

    async def _work_off(self, chat: str) -> None:
        waiting = self._chats[chat]
        while waiting:
            try:
                await waiting.popleft()()
            finally:
                self._room.release()
        # Without a checkpoint since the loop saw that nothing waits, so that nothing can be put into a queue that nobody reads.
        del self._chats[chat]


async def hand_over(adapter: Adapter, incoming: Incoming) -> Received:
    """Give something to the gateway, patiently if the store fails. When this returns, the platform may be told that it is safe."""
    for delay in STORE_DELAYS:
        try:
            return await adapter.gateway.receive(adapter, incoming)
        except StoreError as error:
            logger.warning("a message of %s could not be written down, trying again: %s", adapter.platform, error)
            await trio.sleep(delay)
    return await adapter.gateway.receive(adapter, incoming)
