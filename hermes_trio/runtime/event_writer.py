"""Writes the events of all runs down, in batches: one task for the whole runtime, not one a run.

Text deltas that follow each other quickly become one event. The terminal event of a run is not written here but with the end of its turn, in the same
transaction, together with whatever of that run was still waiting.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import trio

from .outcome import Outcome
from .ports import EventRow
from .turn import Turn

if TYPE_CHECKING:
    from .core import RuntimeCore
    from .run import Run

__all__ = ["COALESCE_SECONDS", "EventWriter"]

logger: Final = logging.getLogger("hermes_trio.runtime.event_writer")

COALESCE_SECONDS: Final = 0.05
"""How long text deltas are collected, and how often events are committed."""

RETRY_SECONDS: Final = 1.0


class EventWriter:
    """Collects events of live runs; `run` is its one task, ended by the runtime after the last run."""

    def __init__(self, core: RuntimeCore) -> None:
        self._core = core
        self._runs: dict[str, Run] = {}
        self._waiting: dict[str, list[EventRow]] = {}
        self._dirty: set[Run] = set()
        self._wake = trio.Event()

    def open(self, run: Run) -> None:
        """Take a run's events from now on."""
        self._runs[run.id] = run

    def close(self, run: Run) -> None:
        """The run has settled: nothing more of it will come. What waits is still written."""
        self._runs.pop(run.id, None)
        self._dirty.discard(run)

    def record(self, row: EventRow) -> None:
        """An event has been appended to a run's log; it will be durable soon."""
        self._waiting.setdefault(row.run_id, []).append(row)
        self._wake.set()

    def touch(self, run: Run) -> None:
        """A run holds back text that is to be coalesced."""
        self._dirty.add(run)
        self._wake.set()

    def terminal(self, turn: Turn, outcome: Outcome) -> tuple[EventRow, ...]:
        """The rows that must commit with the end of this turn: what waits of its run, and the terminal event."""
        assert turn.plan.run is not None
        run = self._runs[turn.plan.run.run_id]
        run.flush()
        rows = self._waiting.pop(run.id, [])
        run.terminal = run.terminal_event(outcome)
        rows.append(run.row(run.log.last + 1, run.terminal))
        return tuple(rows)

    def ended(self, turn: Turn, outcome: Outcome) -> None:
        """The end of this turn has been written down, or could not be: the readers of its run may know."""
        assert turn.plan.run is not None
        self._runs[turn.plan.run.run_id].conclude(outcome)

    async def run(self) -> None:
        """Write batches until cancelled. A store that fails is tried again; readers of the live log do not notice."""
        while True:
            await self._wake.wait()
            await trio.sleep(COALESCE_SECONDS)
            await self.flush()

    async def flush(self) -> None:
        """Write what waits, now. Cancelling abandons the wait, never the write."""
        self._wake = trio.Event()
        for run in list(self._dirty):
            run.flush()
        self._dirty.clear()
        rows = [row for waiting in self._waiting.values() for row in waiting]
        self._waiting.clear()
        if not rows:
            return
        try:
            await self._core.store.append_events(rows)
        except Exception as error:
            logger.warning("%d events could not be written down yet: %s", len(rows), error)
            for row in reversed(rows):
                self._waiting.setdefault(row.run_id, []).insert(0, row)
            await trio.sleep(RETRY_SECONDS)
            self._wake.set()
