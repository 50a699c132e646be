"""Writes the events of all runs to the store in batches: one task for the whole runtime, not one per run.

Text deltas that follow each other quickly become one event. The terminal event of a run is not written here but with the end of its turn, in the same
transaction, together with the events of that run that were still waiting.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import trio

from .errors import Refused
from .outcome import Outcome, RunStatus
from .ports import EventRow
from .turn import Turn

if TYPE_CHECKING:
    from .core import RuntimeCore
    from .run import Run

logger: Final = logging.getLogger("hermes_trio.runtime.event_writer")

COALESCE_SECONDS: Final = 0.05
"""The time for which text deltas are joined, and the interval between commits of events."""

RETRY_SECONDS: Final = 1.0

LONGEST_SECONDS: Final = 60.0

REFUSALS: Final = 3
"""Attempts for the events of one run while the store accepts those of others; a single refusal may be a fault of the store."""


class EventWriter:
    """Collects events of live runs; `run` is its one task, ended by the runtime after the last run."""

    def __init__(self, core: RuntimeCore) -> None:
        self._core = core
        self._runs: dict[str, Run] = {}
        self._waiting: dict[str, list[EventRow]] = {}
        self._writing: dict[str, list[EventRow]] = {}
        """The events that are being written. The end of a run writes those of the run again."""
        self._dirty: set[Run] = set()
        self._failed: bool = False
        """Whether the last batch was refused: the next is written run by run, so that one run's events cannot delay the others'."""
        self._statuses: dict[str, RunStatus] = {}
        """Statuses of live runs that are not in their rows yet, where several nodes share the store."""
        self._refusals: Counter[str] = Counter()
        """How often a run's events were refused while those of others were accepted."""
        self._wake = trio.Event()
        self._noted = trio.Event()

    def open(self, run: Run) -> None:
        """Accept a run's events from now on."""
        self._runs[run.id] = run

    def close(self, run: Run) -> None:
        """Stop accepting events of a run that has settled. Its waiting events are still written."""
        self._runs.pop(run.id, None)
        self._dirty.discard(run)

    def record(self, row: EventRow) -> None:
        """Queue an event that was appended to a run's log; the next batch writes it."""
        self._waiting.setdefault(row.run_id, []).append(row)
        self._wake.set()

    def note_status(self, run: Run) -> None:
        """Queue the new status of a live run for its row."""
        self._statuses[run.id] = run.status
        self._noted.set()

    def touch(self, run: Run) -> None:
        """Mark a run that buffers text, so that the next batch flushes it."""
        self._dirty.add(run)
        self._wake.set()

    def give_back(self, rows: Sequence[EventRow]) -> None:
        """Queue events again that could not be written, before later ones of their run. Events that are queued already are left alone."""
        for row in reversed(rows):
            queued = self._waiting.setdefault(row.run_id, [])
            if row not in queued:
                queued.insert(0, row)
        if rows:
            self._wake.set()

    async def write_before(self, rows: Sequence[EventRow]) -> None:
        """Write events of a run whose end is written next without them. Those that the store refuses are queued again; the end does not wait for them."""
        if not rows:
            return
        try:
            await self._core.store.append_events(rows)
        except Exception as error:
            logger.warning("could not write %d events of run %s; retrying: %s", len(rows), rows[0].run_id, error)
            self.give_back(rows)
        except BaseException:
            self.give_back(rows)
            raise

    def terminal(self, turn: Turn, outcome: Outcome) -> tuple[EventRow, ...]:
        """Return the rows that must commit with the end of this turn: the events of its run that may not have been written, and the terminal event.

        They include events that are being written: if the store refused those, the terminal event would be stored before them.
        """
        run = self._run_of(turn)
        run.flush()
        self._statuses.pop(run.id, None)
        return (*self._writing.get(run.id, ()), *self._waiting.pop(run.id, ()), self.last(turn, outcome))

    def last(self, turn: Turn, outcome: Outcome) -> EventRow:
        """Return the row of the terminal event of this turn's run."""
        run = self._run_of(turn)
        run.terminal = run.terminal_event(outcome)
        return run.row(run.log.last + 1, run.terminal)

    def choose(self, turn: Turn, rows: Sequence[EventRow]) -> None:
        """Set the terminal event of this turn's run to the last of the rows that are about to be written: readers get the one that was."""
        if rows:
            self._run_of(turn).terminal = rows[-1].event

    def begun(self, turn: Turn) -> None:
        """Move the run of a turn whose beginning was committed to `running`."""
        self._run_of(turn).move(RunStatus.RUNNING)

    def ended(self, turn: Turn, outcome: Outcome) -> None:
        """Conclude the run of a turn whose end was committed or given up: its readers get the terminal event."""
        self._run_of(turn).conclude(outcome)

    def lose(self, turn: Turn) -> None:
        """Leave the run of a turn whose end is not written without an end, if it is begun again: its readers find it in the store."""
        run = self._run_of(turn)
        run.lost = run.record.resumable

    def _run_of(self, turn: Turn) -> Run:
        assert turn.origin.run is not None
        return self._runs[turn.origin.run.run_id]

    async def run(self) -> None:
        """Write batches until cancelled. Retries if the store fails; readers of the live log are not affected."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_statuses)
            while True:
                await self._wake.wait()
                await trio.sleep(COALESCE_SECONDS)
                await self.flush()

    async def _keep_statuses(self) -> None:
        """Write the statuses of live runs. Those that the store refuses delay no others: they wait for a pause, which grows, or for the next status."""
        pause = RETRY_SECONDS
        while True:
            with trio.move_on_after(pause if self._statuses else math.inf):
                await self._noted.wait()
            await trio.sleep(COALESCE_SECONDS)
            self._noted = trio.Event()
            for run_id, status in list(self._statuses.items()):
                try:
                    await self._core.store.set_run_status(run_id, status)
                except Exception as error:
                    if not isinstance(error, Refused):
                        logger.warning("could not write the status of run %s; retrying: %s", run_id, error)
                        continue
                if self._statuses.get(run_id) is status:
                    del self._statuses[run_id]
            pause = min(2 * pause, LONGEST_SECONDS) if self._statuses else RETRY_SECONDS

    async def flush(self) -> None:
        """Write the waiting events now. When cancelled, events that may not have been written are queued again."""
        self._wake = trio.Event()
        for run in list(self._dirty):
            run.flush()
        self._dirty.clear()
        waiting, self._waiting = self._waiting, {}
        if not waiting:
            return
        batches = list(waiting.values()) if self._failed else [[row for rows in waiting.values() for row in rows]]
        refused: list[tuple[list[EventRow], Exception]] = []
        self._writing = waiting
        try:
            for rows in batches:
                try:
                    await self._core.store.append_events(rows)
                except Exception as error:
                    refused.append((rows, error))
        except BaseException:
            # Cancelled, perhaps before the store wrote them: the write is idempotent.
            for unknown in waiting.values():
                self.give_back(unknown)
            raise
        finally:
            self._writing = {}
        self._failed = bool(refused)
        if not refused:
            self._refusals.clear()
        for rows, error in refused:
            self._refusals[rows[0].run_id] += len(refused) < len(batches)
            if self._refusals[rows[0].run_id] >= REFUSALS:
                # The store works, and has refused these `REFUSALS` times: they stay only in the live log.
                logger.error(
                    "the store refused %d events of run %s; only the live log has them: %s",
                    len(rows),
                    rows[0].run_id,
                    error,
                )
                continue
            logger.warning("could not write %d events of run %s; retrying: %s", len(rows), rows[0].run_id, error)
            self.give_back(rows)
        if self._waiting and refused:
            await trio.sleep(RETRY_SECONDS)
            self._wake.set()
