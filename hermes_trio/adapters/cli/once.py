"""`hermes-trio run`: send one prompt, stream the answer, wait until all work has settled, and return the exit code.

The session is a one-shot session like a webhook's: background work is awaited and its reports are answered, at most for the linger time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Final

import msgspec
import trio

from hermes_trio.adapters.cli.screen import Screen
from hermes_trio.runtime.budget import Budget
from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.interface import Inbox, Interface
from hermes_trio.runtime.outcome import CancelCause, Cause, Outcome, TurnState
from hermes_trio.runtime.ports import InboxRow, NewMessage, TurnInput
from hermes_trio.runtime.runtime import Runtime
from hermes_trio.runtime.stop_receipt import StopReceipt
from hermes_trio.runtime.turn import EventSink, Turn

RUN: Final = "cli"
RUN_COMPLETE: Final = "run_complete"


class ExitCode(IntEnum):
    """The exit codes."""

    COMPLETED = 0
    FAILED = 1
    DEADLINE = 124
    STOPPED = 130


class RunResult(msgspec.Struct, kw_only=True):
    """The result of a run: all of its turns, the first one and those that answered reports of background work."""

    session_id: str = ""
    outcomes: list[Outcome] = msgspec.field(default_factory=list[Outcome])
    seconds: float = 0.0
    receipt: StopReceipt | None = None

    @property
    def last(self) -> Outcome | None:
        """Return the last turn."""
        return self.outcomes[-1] if self.outcomes else None

    @property
    def exit_code(self) -> ExitCode:
        """Return the exit code of the first turn that did not complete, else success."""
        if self.receipt is not None:
            return ExitCode.STOPPED
        for outcome in self.outcomes or [None]:
            if outcome is None or outcome.state is TurnState.FAILED:
                return ExitCode.FAILED
            if outcome.cause is not None:
                late = outcome.cause.kind in (CancelCause.DEADLINE, CancelCause.BUDGET)
                return ExitCode.DEADLINE if late else ExitCode.STOPPED
        return ExitCode.COMPLETED

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        last = self.last
        return {
            "status": self.exit_code.name.lower(),
            "exit_code": int(self.exit_code),
            "session_id": self.session_id,
            "text": "" if last is None else last.text,
            "error": next((one.error for one in self.outcomes if one.error), None),
            "turns": [
                {
                    "state": one.state.value,
                    "text": one.text,
                    "error": one.error or None,
                    "usage": msgspec.structs.asdict(one.usage),
                    "seconds": round(one.seconds, 3),
                }
                for one in self.outcomes
            ],
            "usage": msgspec.structs.asdict(
                sum((one.usage for one in self.outcomes), start=type(self.outcomes[0].usage)())
            )
            if self.outcomes
            else None,
            "seconds": round(self.seconds, 3),
            "receipt": None if self.receipt is None else self.receipt.as_dict(),
        }


class _RunFront(Interface):
    """The interface of the run."""

    platform = RUN
    one_shot = RUN_COMPLETE

    def __init__(self, screen: Screen | None, *, model: str, deadline: float | None, linger: float | None) -> None:
        self.linger = linger
        self.result = RunResult()
        self.first: Turn | None = None
        self.begun = trio.Event()
        self._screen = screen
        self._model = model
        self._deadline = deadline

    def prepare(self, rows: Sequence[InboxRow]) -> TurnInput:
        return msgspec.structs.replace(super().prepare(rows), model=self._model)

    def budget(self, rows: Sequence[InboxRow]) -> Budget | None:
        return None if self._deadline is None else Budget(seconds=self._deadline)

    def sink(self, context: SessionContext) -> EventSink | None:
        return self._follow

    def _follow(self, event: Mapping[str, Any]) -> None:
        if self._screen is None:
            return
        match event.get("event"):
            case "message.delta":
                self._screen.stream(str(event.get("delta", "")))
            case "tool.started":
                self._screen.end_stream()
                self._screen.tool(f"⚙ {event.get('tool')}: {str(event.get('preview', ''))[:200]}")
            case _:
                pass

    async def on_turn_start(self, turn: Turn) -> None:
        if self.first is None:
            self.first = turn
            self.result.session_id = turn.context.session_id
            self.begun.set()

    async def on_turn_end(self, outcome: Outcome) -> None:
        self.result.outcomes.append(outcome)
        if self._screen is not None:
            self._screen.end_stream()
            if outcome.error:
                self._screen.note(f"({outcome.error})")


async def run_once(
    runtime: Runtime,
    prompt: str,
    *,
    screen: Screen | None,
    model: str = "",
    deadline: float | None = None,
    linger: float | None = None,
    stop: trio.Event | None = None,
) -> RunResult:
    """Run a prompt until it has settled. Setting `stop` stops everything and sets the receipt.

    Cancelling it leaves the run to the runtime, which ends it with everything else.
    """
    interface = _RunFront(screen, model=model, deadline=deadline, linger=linger)
    began = trio.current_time()
    key = f"agent:main:cli:run:{runtime.core.ids.hex(16)}"
    context = SessionContext(platform=RUN, source=RUN, chat_id="run", user_id="owner", session_key=key)
    async with runtime.delivering(interface) as delivery:
        await delivery.accept(NewMessage(inbox=RUN, session_key=key, routing=context, text=prompt))
        await interface.begun.wait()
        assert interface.first is not None
        turn = interface.first
        async with trio.open_nursery() as nursery:
            if stop is not None:
                nursery.start_soon(_stop_when_asked, runtime, delivery, interface, stop)
            # The lane ends the session when every notice has been delivered, and then itself.
            lane = turn.node.parent
            assert lane is not None
            await lane.wait_closed()
            if stop is None or not stop.is_set():
                nursery.cancel_scope.cancel()
    interface.result.seconds = trio.current_time() - began
    return interface.result


async def _stop_when_asked(runtime: Runtime, delivery: Inbox, interface: _RunFront, stop: trio.Event) -> None:
    """Stop the running turn (or the first one, which reports that it had ended), then its background work."""
    await stop.wait()
    assert interface.first is not None
    cause = Cause(CancelCause.STOP, "Ctrl-C")
    context = interface.first.context
    turn = delivery.current_turn(context.session_key) or interface.first
    interface.result.receipt = await turn.stop(cause)
    await runtime.core.end_session(context.session_id, RUN_COMPLETE, cause)
