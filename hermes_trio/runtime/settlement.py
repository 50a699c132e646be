"""Settlement: everything that one input started is over. The store decides: no job of its root is live, and no notice of it waits or is in a turn.

A run has two ends: its turn has ended, and it has *settled*. Nothing is counted here; a `Settlement` is the id that rows carry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from .budget import UNLIMITED, Allowance
from .ports import ROOT_TOPIC
from .retrying import retried

if TYPE_CHECKING:
    from .core import RuntimeCore


class Settlement:
    """The root of what one input started. `branched` says that it has had a job or a notice; a root without either settles without a read."""

    __slots__ = ("allowance", "branched", "id")

    def __init__(self, id: str, allowance: Allowance = UNLIMITED, *, branched: bool = False) -> None:
        self.id = id
        self.allowance = allowance
        self.branched = branched

    async def wait(self, core: RuntimeCore) -> None:
        """Wait until nothing of this root is open, after its turn has ended. Cancelling abandons the wait.

        A job of this process whose row the store has not taken yet is waited for, too.
        """
        if not self.branched:
            return
        while jobs := core.supervisor.jobs_of_root(self.id):
            await jobs[0].wait()
        store = core.store
        while True:
            woken = trio.Event()
            with store.subscribe(ROOT_TOPIC, lambda _, woken=woken: woken.set(), self.id):
                if not await retried(lambda: store.root_open(self.id), f"read whether {self.id} has settled"):
                    return
                await woken.wait()
