"""A run: a turn that has an id, a status and an event log, and that belongs to the runtime, not to the request that started it.

It is a state machine with one writer. It leaves memory when it has settled; from then on it is read from the store.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from .core import RuntimeCore
from .event_log import EventLog, LogEvent
from .event_writer import COALESCE_SECONDS
from .outcome import TERMINAL_STATUSES, CancelCause, Cause, Outcome, RunStatus, TurnState
from .ports import EventRow, NewRun, ResumedRun
from .settlement import Settlement
from .stop_receipt import StopReceipt, stop_each
from .turn import EventSink, Turn, TurnOrigin, TurnSpec
from .turn_lifecycle import holds_session, run_turn

if TYPE_CHECKING:
    from .supervisor import Job

logger: Final = logging.getLogger("hermes_trio.runtime.run")


_LEGAL: Final[Mapping[RunStatus, frozenset[RunStatus]]] = {
    RunStatus.QUEUED: frozenset({RunStatus.RUNNING, RunStatus.STOPPING, *TERMINAL_STATUSES}),
    RunStatus.RUNNING: frozenset({RunStatus.WAITING_FOR_APPROVAL, RunStatus.STOPPING, *TERMINAL_STATUSES}),
    RunStatus.WAITING_FOR_APPROVAL: frozenset({RunStatus.RUNNING, RunStatus.STOPPING, *TERMINAL_STATUSES}),
    RunStatus.STOPPING: TERMINAL_STATUSES,
}
_ENDS: Final = {
    TurnState.COMPLETED: RunStatus.COMPLETED,
    TurnState.FAILED: RunStatus.FAILED,
    TurnState.CANCELLED: RunStatus.CANCELLED,
}
DELTA_CHARACTERS: Final = 16_384
"""The most text in one event; longer text is split into several events."""

TOLD_OUTPUT: Final = 65_536
"""Characters of the output in the terminal event; the run's row has all of it."""

_UNLOGGED: Final = frozenset({"message.delta"})


class Run:
    """A live run. `log` holds its events; `ended` and `settled` can be waited for."""

    def __init__(self, core: RuntimeCore, record: NewRun) -> None:
        self._core = core
        self.record = record
        self.id: str = record.run_id
        self.status: RunStatus = RunStatus.QUEUED
        self.created_at: float = core.clock()
        self.updated_at: float = self.created_at
        self.last_event: str = ""
        self.attempt: int = int(record.resumable)
        """Which attempt this is, if the run is begun again when it is interrupted; else 0."""
        self.lost: bool = False
        """Whether its end will not be written by this process: the run has not ended, and is begun again."""
        self.outcome: Outcome | None = None
        self.log = EventLog(core.settings.event_limit, on_append=self._appended)
        self.ended = trio.Event()
        self.settled = trio.Event()
        self.turn: Turn
        self.terminal: Mapping[str, Any] | None = None
        """The terminal event, as the last attempt to commit the end of the turn wrote it."""
        self._delta: list[str] = []
        self._delta_at: float = float("-inf")
        self._approvals: int = 0
        self._held: list[Mapping[str, Any]] = []
        """Events that arrived while the end was being committed. They are appended after the terminal event, whose number is already fixed."""

    @property
    def model(self) -> str:
        """Return the model that the agent has chosen; before that the requested one, or empty."""
        if self.outcome is not None:
            return self.outcome.model
        progress = self.turn.progress
        return (progress.model if progress is not None else "") or self.record.model

    # -- the log -----------------------------------------------------------------------------------------------------------------

    def emit(self, event: Mapping[str, Any]) -> None:
        """Append an event of the run's turn to the log, or buffer a text delta to join it with the next ones."""
        name = event["event"]
        if name == "message.delta":
            if len(event["delta"]) > DELTA_CHARACTERS:
                self._delta.append(event["delta"])
                self.flush()
                return
            now = trio.current_time()
            if self._delta or now - self._delta_at < COALESCE_SECONDS:
                self._delta.append(event["delta"])
                self._core.journal.touch(self)
                return
            self._delta_at = now
        else:
            self.flush()
            if name == "approval.request":
                self._wait_for_approval(+1)
            elif name in ("approval.responded", "approval.expired"):
                self._wait_for_approval(-1)
        self._append(event)

    def flush(self) -> None:
        """Append the buffered text."""
        if self._delta:
            text = "".join(self._delta)
            self._delta.clear()
            self._delta_at = trio.current_time()
            for start in range(0, len(text), DELTA_CHARACTERS):
                self._append({"event": "message.delta", "delta": text[start : start + DELTA_CHARACTERS]})

    def terminal_event(self, outcome: Outcome) -> dict[str, Any]:
        """Return the terminal event for an outcome. A run has exactly one."""
        if outcome.state is TurnState.COMPLETED:
            usage = outcome.usage
            return self._event(
                {
                    "event": "run.completed",
                    "output": outcome.text[:TOLD_OUTPUT],
                    **({"output_truncated": True} if len(outcome.text) > TOLD_OUTPUT else {}),
                    "usage": {
                        "input_tokens": usage.input_tokens,
                        "output_tokens": usage.output_tokens,
                        "total_tokens": usage.total_tokens,
                    },
                }
            )
        if outcome.state is TurnState.CANCELLED:
            cause = outcome.cause or Cause(CancelCause.STOP)
            return self._event({"event": "run.cancelled", "cause": cause.kind.value, "detail": cause.detail})
        return self._event({"event": "run.failed", "error": outcome.error, "error_code": outcome.error_code})

    def row(self, number: int, event: Mapping[str, Any]) -> EventRow:
        """Return an event of this run as a row for the store."""
        return EventRow(run_id=self.id, epoch=self._core.epoch, number=number, event=event)

    def _event(self, event: Mapping[str, Any]) -> dict[str, Any]:
        return {"event": event["event"], "run_id": self.id, "timestamp": self._core.clock(), **event}

    def _append(self, event: Mapping[str, Any]) -> None:
        if self.terminal is not None and not self.ended.is_set():
            self._held.append(event)
            return
        if event["event"] not in _UNLOGGED:
            event = _as_json(event, self.id)
            self.last_event = event["event"]
            self.updated_at = self._core.clock()
        self.log.append(self._event(event))

    def _appended(self, event: LogEvent) -> None:
        if event.data["event"] not in ("run.completed", "run.failed", "run.cancelled"):
            self._core.journal.record(self.row(event.number, event.data))

    # -- the state machine -------------------------------------------------------------------------------------------------------

    def move(self, status: RunStatus) -> bool:
        """Move to a status if the transition is legal; return whether it was."""
        if status not in _LEGAL.get(self.status, frozenset()):
            return False
        # The first and the last status are committed with the turn. Other nodes read the row, so the statuses between are written to it, too.
        told = (
            self._core.shared and not status.terminal and (self.status, status) != (RunStatus.QUEUED, RunStatus.RUNNING)
        )
        self.status = status
        self.updated_at = self._core.clock()
        if told:
            self._core.journal.note_status(self)
        return True

    def _wait_for_approval(self, change: int) -> None:
        self._approvals += change
        self.move(RunStatus.WAITING_FOR_APPROVAL if self._approvals > 0 else RunStatus.RUNNING)

    def continue_from(self, resumed: ResumedRun) -> None:
        """Continue the row and the log of the attempt before."""
        self.attempt = resumed.attempt
        self.status = resumed.status
        self.created_at = resumed.created_at
        self.log.last = resumed.last
        self.last_event = "run.resumed"

    def request_stop(self, cause: Cause | None = None) -> None:
        """Cancel the run's turn without waiting for its end."""
        if self.move(RunStatus.STOPPING):
            self.last_event = "run.stopping"
        self.turn.cancel(Cause(CancelCause.STOP) if cause is None else cause)

    async def stop(self, cause: Cause | None = None, timeout: float = 30.0) -> StopReceipt:
        """Stop the run; wait for its end and return the receipt."""
        self.request_stop(cause)
        return await self.turn.stop(cause, timeout)

    async def stop_all(self, cause: Cause, timeout: float = 30.0) -> StopReceipt:
        """Stop the run and the jobs that it has started; return one receipt for all of them."""
        receipts = await stop_each([self, *self.jobs()], cause, timeout)
        # Jobs that the turn started while it was being stopped are part of the run, too.
        receipts += await stop_each(self.jobs(), cause, timeout)
        with trio.move_on_after(1.0):
            await self.ended.wait()
        return StopReceipt(
            target=self.id,
            cause=cause,
            ok=all(receipt.ok for receipt in receipts),
            milliseconds=max((receipt.milliseconds for receipt in receipts), default=0.0),
            lines=tuple(line for receipt in receipts for line in receipt.lines),
            remaining=tuple(node for receipt in receipts for node in receipt.remaining),
            already_ended=all(receipt.already_ended for receipt in receipts),
        )

    def jobs(self) -> list[Job]:
        """Return the live jobs that this run has started."""
        return self._core.supervisor.jobs_of_root(self.id)

    def snapshot(self) -> list[dict[str, Any]]:
        """Return the nodes of this run in the tree: its turn, and the jobs that it has started."""
        nodes = [self.turn.node, *(job.node for job in self.jobs())]
        return [self._core.tree.snapshot(node) for node in nodes if node.closed_at is None]

    async def live(self) -> None:
        """Run the turn in the run's own task, then conclude the run with its outcome."""
        if self.turn.cause is None and not holds_session(self.turn):
            # On a shared store the run stays queued, here and in its row, until its turn has the session.
            self.move(RunStatus.RUNNING)
        try:
            outcome = await run_turn(self._core, self.turn)
        finally:
            self._core.admission.release()
        if outcome.committed or self.turn.unwritten is None:
            self.conclude(outcome)
        await self.ended.wait()
        await self.turn.root.wait(self._core)
        self._settle()

    def conclude(self, outcome: Outcome) -> None:
        """Set the outcome of the run, append the terminal event and set `ended`. Does nothing if the run has been concluded, or is lost here."""
        if self.ended.is_set() or self.lost:
            return
        self.outcome = outcome
        if self.terminal is None:
            self.flush()
        self.move(_ENDS[outcome.state])
        # Readers get the event as it was stored, or a new one if the commit failed.
        event = self.terminal if outcome.committed and self.terminal is not None else self.terminal_event(outcome)
        self.last_event = event["event"]
        self.log.append(event)
        self.ended.set()
        held, self._held = self._held, []
        for late in held:
            self._append(late)
        self.flush()

    def _settle(self) -> None:
        self.log.append(self._event({"event": "run.settled"}))
        self.log.close()
        self.settled.set()
        self._core.journal.close(self)


def _as_json(event: Mapping[str, Any], run_id: str) -> Mapping[str, Any]:
    """Return the event, or a replacement if it cannot be written as JSON, so that it breaks neither this log nor the events of other runs."""
    try:
        msgspec.json.encode(event)
    except Exception as error:
        logger.error("event %r of run %s is not JSON; its payload is dropped: %s", event["event"], run_id, error)
        return {"event": str(event["event"]), "problem": f"this event is not JSON: {type(error).__name__}"}
    return event


def _both(first: EventSink, second: EventSink) -> EventSink:
    def sink(event: Mapping[str, Any]) -> None:
        first(event)
        second(event)

    return sink


class Runs:
    """The live runs. Settled ones are only in the store."""

    def __init__(self, core: RuntimeCore) -> None:
        self._core = core
        self._live: dict[str, Run] = {}
        self.claiming = trio.Lock()
        """Held while interrupted runs are claimed and made: a stop that does not find a run waits for it."""

    def __len__(self) -> int:
        return len(self._live)

    def find(self, run_id: str) -> Run | None:
        """Return a live run by its id, or None."""
        return self._live.get(run_id)

    def all(self) -> list[Run]:
        """Return all live runs, oldest first."""
        return list(self._live.values())

    def make(self, spec: TurnSpec, record: NewRun) -> Run:
        """Make a run that is about to start; the caller has admitted it and written its row. Its turn's events go to its log."""
        run = Run(self._core, record)
        sink = run.emit if spec.hooks.sink is None else _both(run.emit, spec.hooks.sink)
        hooks = msgspec.structs.replace(spec.hooks, sink=sink, asks=run.emit)
        origin = TurnOrigin(run=record, outer_cause=Cause(CancelCause.DRAIN))
        run.turn = self._core.make_turn(
            msgspec.structs.replace(spec, hooks=hooks), None, origin, root=Settlement(run.id)
        )
        self._live[run.id] = run
        self._core.journal.open(run)
        return run

    def drop(self, run: Run) -> None:
        """Discard a run that was made and will not be executed here."""
        self._core.drop_turn(run.turn)
        self._core.journal.close(run)
        del self._live[run.id]

    async def live(self, run: Run) -> None:
        """Execute a run until it has settled, then remove it from the live runs, also when cancelled."""
        try:
            await run.live()
        finally:
            self._live.pop(run.id, None)
