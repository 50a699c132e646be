"""Handles inbound events in order within a chat, and concurrently across chats.

A command may take seconds (`/stop` waits for what it stops), and other chats must not wait for it. An `Intake` runs in its adapter's nursery, with a
task for each chat that has work, and ends with that nursery. `hand_over` passes events to the gateway.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from hermes_trio.store.errors import StoreError

from .contract import Adapter, Disposition, Incoming, Received

logger: Final = logging.getLogger("hermes_trio.messaging.intake")

Work = Callable[[], Awaitable[object]]

AT_ONCE: Final = 256
"""The maximum of events that wait or run. Beyond it the platform's connection is read more slowly."""

STORE_DELAYS: Final = (0.2, 1.0, 4.0)
"""The delays before a failing store is retried; after the last one the connection ends. Not every platform redelivers."""

FOR_THE_AGENT: Final = frozenset({Disposition.ACCEPTED, Disposition.STEERED, Disposition.COMMAND, Disposition.ANSWERED})
"""The dispositions of messages that were meant for the agent, from senders with access."""


class Intake:
    """See the module."""

    def __init__(self, nursery: trio.Nursery, at_once: int = AT_ONCE) -> None:
        self._nursery = nursery
        self._room = trio.Semaphore(at_once)
        self._chats: dict[str, deque[Work]] = {}

    async def put(self, chat: str, work: Work) -> None:
        """Run `work` after everything that was put for this chat before; wait for room.

        An exception of the work ends the nursery, and with it the connection, so that the platform redelivers the event.
        """
        await self._room.acquire()
        waiting = self._chats.get(chat)
        if waiting is not None:
            waiting.append(work)
            return
        self._chats[chat] = deque([work])
        self._nursery.start_soon(self._run_chat, chat)

    async def _run_chat(self, chat: str) -> None:
        waiting = self._chats[chat]
        while waiting:
            try:
                await waiting.popleft()()
            finally:
                self._room.release()
        # No checkpoint since the loop found the queue empty, so that nothing can be put into a queue without a reader.
        del self._chats[chat]


async def hand_over(adapter: Adapter, incoming: Incoming) -> Received:
    """Pass an event to the gateway; retry while the store fails. When this returns, the event may be acknowledged."""
    for delay in STORE_DELAYS:
        try:
            return await adapter.gateway.receive(adapter, incoming)
        except StoreError as error:
            logger.warning(
                "could not store event %s of chat %s on %s; retrying: %s",
                incoming.event_id or "without an id",
                incoming.source.chat_id,
                adapter.platform,
                error,
            )
            await trio.sleep(delay)
    return await adapter.gateway.receive(adapter, incoming)
