"""The load of the last minutes: a sample every two seconds, for pages that are opened later.

The history is bounded and has counts only: nodes by kind, responses a second, the lag of the loop, waiting replies. `sample_load` runs inside the
server's receiver. It does nothing on a virtual clock, because its timer would advance that clock.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from hermes_trio.runtime.threads import virtual_clock_of

if TYPE_CHECKING:
    from .core import ApiCore

EVERY_SECONDS: Final = 2.0
KEPT: Final = 180
STORE_EVERY: Final = 5
"""The store is read for one sample of this many; the others reuse its last count."""

STORE_SECONDS: Final = 1.0
"""Seconds that a sample waits for the store."""


class LoadSample(msgspec.Struct, frozen=True):
    """One sample. `number` increases by one with each; `requests` is a rate per second, `late` the lag of the loop in milliseconds."""

    number: int
    kinds: dict[str, int]
    requests: float
    late: float
    outbox: int


class LoadHistory:
    """The newest samples of one server."""

    def __init__(self) -> None:
        self._samples: deque[LoadSample] = deque(maxlen=KEPT)
        self._number = 0
        self._answers = 0
        self._outbox = 0

    def after(self, number: int) -> list[LoadSample]:
        """Return the samples whose number is above `number`, the oldest first."""
        return [one for one in self._samples if one.number > number]

    async def take(self, core: ApiCore, seconds: float, late: float) -> None:
        """Take a sample of the last `seconds`. If reading the store fails or takes too long, reuse its last count."""
        if self._number % STORE_EVERY == 0:
            with trio.move_on_after(STORE_SECONDS), suppress(Exception):
                self._outbox = (await core.store.backlog()).get("outbox", 0)
        kinds: dict[str, int] = {}
        for node in core.runtime.tree.root.walk():
            kinds[node.kind] = kinds.get(node.kind, 0) + 1
        answers = sum(core.metrics.answers.values())
        rate = (answers - self._answers) / seconds if seconds > 0 else 0.0
        self._answers = answers
        self._number += 1
        self._samples.append(LoadSample(self._number, kinds, round(rate, 2), round(1000 * late, 1), self._outbox))


async def sample_load(core: ApiCore) -> None:
    """Take a sample every `EVERY_SECONDS` until cancelled. Returns at once on a virtual clock."""
    if virtual_clock_of(trio.lowlevel.current_clock()) is not None:
        return
    last = trio.current_time()
    while True:
        due = trio.current_time() + EVERY_SECONDS
        await trio.sleep_until(due)
        now = trio.current_time()
        await core.load.take(core, now - last, now - due)
        last = now
