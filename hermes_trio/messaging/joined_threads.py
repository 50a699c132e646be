"""The threads in which the agent takes part: it needs no mention there.

Stored in the adapter's cursor, so that conversations continue after a restart. Bounded, LRU: in a dropped thread the agent must be mentioned again.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Final

import msgspec

from hermes_trio.store.errors import StoreError

from .contract import Adapter

logger: Final = logging.getLogger("hermes_trio.messaging.joined_threads")

THREADS: Final = 500


class JoinedThreads:
    """See the module. `load` when the adapter connects, `enter` when the agent is addressed or replies in a thread."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._threads: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, thread: str) -> bool:
        return thread in self._threads

    async def load(self) -> None:
        """Load what an earlier process stored, behind what this one knows already."""
        kept = await self._adapter.gateway.get_cursor(self._adapter)
        if not kept:
            return
        try:
            earlier = msgspec.json.decode(kept, type=list[str])
        except msgspec.DecodeError:
            logger.warning("could not read the stored threads of %s; it starts without them", self._adapter.platform)
            return
        self._threads = OrderedDict.fromkeys([*earlier, *self._threads])

    async def enter(self, thread: str) -> None:
        """Add a thread. If the store fails, the agent must be mentioned again after a restart."""
        if thread in self._threads:
            self._threads.move_to_end(thread)
            return
        self._threads[thread] = None
        while len(self._threads) > THREADS:
            self._threads.popitem(last=False)
        try:
            await self._adapter.gateway.set_cursor(self._adapter, msgspec.json.encode(list(self._threads)).decode())
        except StoreError as error:
            logger.warning(
                "could not store the threads of %s; they are forgotten at the next start: %s",
                self._adapter.platform,
                error,
            )
