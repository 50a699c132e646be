"""Deliberate defects, applied by a test: an invariant that cannot fail proves nothing.

`MUTANTS` has one or more for each invariant; `DEFECTS` reintroduces former defects, as small patches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import trio

from hermes_trio.adapters.cron import scheduler as cron
from hermes_trio.agent import approvals as agent_approvals
from hermes_trio.http.api import runs as api_runs
from hermes_trio.messaging.conversations import ChatInterface
from hermes_trio.messaging.one_shot import OneShotInterface
from hermes_trio.messaging.senders import Senders
from hermes_trio.runtime import supervisor, turn
from hermes_trio.runtime.admission import Admission
from hermes_trio.runtime.ends import End, Ends
from hermes_trio.runtime.event_writer import EventWriter
from hermes_trio.runtime.interface import Inbox
from hermes_trio.runtime.lane import Lanes
from hermes_trio.runtime.outcome import CancelCause, Cause
from hermes_trio.runtime.ports import InboxKind, JobFinish, NewMessage, TurnFinish
from hermes_trio.runtime.run import Run
from hermes_trio.runtime.stateless import StatelessEntry
from hermes_trio.runtime.stop_receipt import StopReceipt, stop_each
from hermes_trio.runtime.supervisor import Supervisor
from hermes_trio.store.errors import StoreError
from hermes_trio.store.sqlite import inbox, recovery, turns
from hermes_trio.store.sqlite.store import SqliteStore
from hermes_trio.testing.simulation import FAULT_KINDS, run_seed

Patch = tuple[Any, str, Callable[[Any], Any]]
"""An object, the name of its attribute, and the new value."""


@contextmanager
def patched(*patches: Patch) -> Iterator[None]:
    """Change attributes for the body of the `with`. One that does not exist any more is an `AttributeError`."""
    with pytest.MonkeyPatch.context() as patching:
        for owner, name, make in patches:
            patching.setattr(owner, name, make(getattr(owner, name)))
        yield


def seeds_until_found(
    patches: tuple[Patch, ...],
    invariant: str,
    most: int,
    faults: Sequence[str] = FAULT_KINDS,
    nodes: int | None = 1,
    platform: str | None = "telegram",
) -> int | None:
    """How many seeds, from 1 on, it takes until that invariant is broken; None if it is not within `most`.

    The same world without the patches keeps all promises: it is the defect that was convicted.
    """
    for count in range(1, most + 1):
        with patched(*patches):
            found = run_seed(count, faults=faults, nodes=nodes, platform=platform).violations
        if any(text.startswith(invariant) for text in found):
            assert run_seed(count, faults=faults, nodes=nodes, platform=platform).violations == ()
            return count
    return None


# -- one for each invariant --------------------------------------------------------------------------------------------------------


def _forgets_the_notice(real: Any) -> Any:
    async def finish_job(self: Any, job: JobFinish) -> Any:
        return await real(self, msgspec.structs.replace(job, notice=None))

    return finish_job


def _sends_without_label(real: Any) -> Any:
    async def try_forms(self: Any, sender: Any, row: Any, replaces: str) -> Any:
        return await real(self, sender, msgspec.structs.replace(row, maybe_duplicate=0), replaces)

    return try_forms


def _acknowledges_without_writing(real: Any) -> Any:
    calls = 0

    async def accept_message(self: Any, message: NewMessage, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            return 1
        return await real(self, message, **named)

    return accept_message


def _answers_somebody_else(real: Any) -> Any:
    calls = 0

    async def finish_turn(self: Any, finish: TurnFinish) -> Any:
        nonlocal calls
        calls += bool(finish.outbox)
        if finish.outbox and calls % 3 == 0:
            outbox = tuple(msgspec.structs.replace(one, target={"chat_id": "501"}) for one in finish.outbox)
            finish = msgspec.structs.replace(finish, outbox=outbox)
        return await real(self, finish)

    return finish_turn


def _loses_tool_results(real: Any) -> Any:
    async def finish_turn(self: Any, finish: TurnFinish) -> Any:
        kept = tuple(message for message in finish.messages if message.role != "tool")
        return await real(self, msgspec.structs.replace(finish, messages=kept))

    return finish_turn


def _loses_an_event(real: Any) -> Any:
    async def append_events(self: Any, events: Any) -> Any:
        return await real(self, events[1:])

    return append_events


def _says_ok_at_once(real: Any) -> Any:
    async def stop(self: Run, cause: Cause | None = None, timeout: float = 30.0) -> StopReceipt:
        await trio.lowlevel.checkpoint()
        return StopReceipt(
            target=self.id, cause=cause or self.turn.cause or Cause(CancelCause.STOP), ok=True, milliseconds=0.0
        )

    return stop


def _says_stopped_at_once(real: Any) -> Any:
    async def stop_turn(self: Inbox, session_key: str, cause: Cause) -> StopReceipt | None:
        await trio.lowlevel.checkpoint()
        return StopReceipt(target=session_key, cause=cause, ok=True, milliseconds=0.0)

    return stop_turn


def _never_repeats(real: Any) -> Any:
    async def attempt(self: Ends, end: End, until: float) -> bool:
        if not end.attempts:
            return await real(self, end, until)
        await trio.lowlevel.checkpoint()
        return False

    return attempt


def _admits_everybody(real: Any) -> Any:
    async def admit(self: Admission) -> None:
        await trio.lowlevel.checkpoint()
        self.active += 1

    return admit


def _lets_everybody_in(real: Any) -> Any:
    def check(self: Admission) -> None:
        return None

    return check


def _forgets_answers(real: Any) -> Any:
    async def finish_turn(self: Any, finish: TurnFinish) -> Any:
        kept = tuple(message for message in finish.messages if message.role != "assistant" or message.tool_calls)
        return await real(self, msgspec.structs.replace(finish, messages=kept))

    return finish_turn


def _forgets_history(real: Any) -> Any:
    async def load_history(self: Any, session_id: str) -> list[Any]:
        await real(self, session_id)
        return []

    return load_history


def _loses_output(real: Any) -> Any:
    def finish_run(db: Any, now: float, owner: str, run: Any, finish: TurnFinish) -> None:
        real(db, now, owner, run, msgspec.structs.replace(finish, text=""))

    return finish_run


def _says_nothing(real: Any) -> Any:
    async def finish_job(self: Any, job: JobFinish) -> Any:
        notice = None if job.notice is None else msgspec.structs.replace(job.notice, text="nothing")
        return await real(self, msgspec.structs.replace(job, notice=notice))

    return finish_job


def _answers_no_hooks(real: Any) -> Any:
    def replies(self: Any, turn: Any, outcome: Any) -> tuple[Any, ...]:
        return ()

    return replies


def _gives_up_sending(real: Any) -> Any:
    def delay(self: Any, row: Any, result: Any) -> None:
        return None

    return delay


def _takes_silence_for_consent(real: Any) -> Any:
    def answer(waiter: Any, id: str, seconds: float) -> Any:
        result = real(waiter, id, seconds)
        return msgspec.structs.replace(result, allowed=True) if result.timed_out else result

    return answer


def _lets_others_act(real: Any) -> Any:
    """Every tenant may stop a run, and answer its requests for approval."""

    async def find_run(request: Any) -> Any:
        live = request.core.runtime.stateless.runs.find(request.params["run_id"])
        return live if live is not None and request.method == "POST" else await real(request)

    return find_run


def _skips_slots(real: Any) -> Any:
    calls = 0

    def next_after(schedule: Any, at: Any) -> Any:
        nonlocal calls
        calls += 1
        found = real(schedule, at)
        return real(schedule, found) if found is not None and calls % 3 == 0 else found

    return next_after


def _shows_all_tenants(real: Any) -> Any:
    """A list or a search of every tenant."""

    async def shown(self: Any, which: Any = None, *more: Any, **named: Any) -> Any:
        everybody = which if which is None else msgspec.structs.replace(which, tenant=None)
        return await real(self, *(() if everybody is None else (everybody,)), *more, **named)

    return shown


def _shows_all_approvals(real: Any) -> Any:
    async def list_approvals(self: Any, **named: Any) -> Any:
        return await real(self, **{**named, "tenant": None})

    return list_approvals


def _shows_all_grants(real: Any) -> Any:
    async def list_grants(self: Any, *, scope: str | None = None) -> Any:
        return await real(self)

    return list_grants


def _spares_jobs(real: Any) -> Any:
    async def stop_session(self: Supervisor, session_id: str, cause: Cause) -> list[StopReceipt]:
        await trio.lowlevel.checkpoint()
        return []

    return stop_session


def _tells_twice(real: Any) -> Any:
    """A notice that starts a turn is in its message twice."""

    def prepare(self: ChatInterface, rows: Any) -> Any:
        twice = (rows[0], *rows) if rows[0].kind is InboxKind.NOTICE else rows
        return real(self, twice)

    return prepare


def _repeats_at_once(real: Any) -> Any:
    def delay(self: Any, row: Any, result: Any) -> float | None:
        return None if real(self, row, result) is None else 0.01

    return delay


MUTANTS: dict[str, tuple[str, tuple[Patch, ...]]] = {
    "a job's end without its notice": ("1 watched", ((SqliteStore, "finish_job", _forgets_the_notice),)),
    "a repeated reply without its label": ("1 watched", ((Senders, "_try_forms", _sends_without_label),)),
    "a message acknowledged and not written": (
        "2 acknowledged",
        ((SqliteStore, "accept_message", _acknowledges_without_writing),),
    ),
    "a reply to somebody else": ("3 isolation", ((SqliteStore, "finish_turn", _answers_somebody_else),)),
    "a transcript without the results of tools": (
        "4 transcripts",
        ((SqliteStore, "finish_turn", _loses_tool_results),),
    ),
    "an event that is not kept": ("5 events", ((SqliteStore, "append_events", _loses_an_event),)),
    "a stop that says ok and does nothing": ("7 stops", ((Run, "stop", _says_ok_at_once),)),
    "a /stop in a chat that says ok and does nothing": ("7 stops", ((Inbox, "stop_turn", _says_stopped_at_once),)),
    "an end that is tried once": ("8 calm", ((Ends, "_attempt", _never_repeats),)),
    "an answer that its transcript does not have": ("4 transcripts", ((SqliteStore, "finish_turn", _forgets_answers),)),
    "a turn that begins without its history": ("4 transcripts", ((SqliteStore, "load_history", _forgets_history),)),
    "a run without its output": ("2 acknowledged", ((turns, "finish_run", _loses_output),)),
    "a notice that does not say what ended": ("1 watched", ((SqliteStore, "finish_job", _says_nothing),)),
    "a webhook that is not answered": ("2 acknowledged", ((OneShotInterface, "replies", _answers_no_hooks),)),
    "a reply that is given up at its first failure": ("1 watched", ((Senders, "_delay", _gives_up_sending),)),
    "silence that counts as consent": ("3 isolation", ((agent_approvals, "_answer", _takes_silence_for_consent),)),
    "a run that every tenant may stop": ("3 isolation", ((api_runs, "find_run", _lets_others_act),)),
    "a slot of cron that is skipped": ("2 acknowledged", ((cron, "next_after", _skips_slots),)),
    "runs of all tenants in a list": ("3 isolation", ((SqliteStore, "list_runs", _shows_all_tenants),)),
    "sessions of all tenants in a list": ("3 isolation", ((SqliteStore, "list_sessions", _shows_all_tenants),)),
    "words of all tenants in a search": ("3 isolation", ((SqliteStore, "search_messages", _shows_all_tenants),)),
    "approvals of all tenants in a list": ("3 isolation", ((SqliteStore, "list_approvals", _shows_all_approvals),)),
    "grants of all tenants in a list": ("3 isolation", ((SqliteStore, "list_grants", _shows_all_grants),)),
    "a /new that spares the old processes": ("7 stops", ((Supervisor, "stop_session", _spares_jobs),)),
    "a notice that is told twice in one message": ("1 watched", ((ChatInterface, "prepare", _tells_twice),)),
    "a reply that is repeated without a pause": ("9 limits", ((Senders, "_delay", _repeats_at_once),)),
    "turns beyond the limit": (
        "9 limits",
        ((Admission, "admit", _admits_everybody), (Admission, "check", _lets_everybody_in)),
    ),
}
"""By the defect: the invariant that it must violate, and the patches."""


# -- former defects ------------------------------------------------------------------------------------------------------------------


def _gives_up(*names: str) -> Callable[[Any], Any]:
    """An end of this kind that fails once is not retried."""

    def make(real: Any) -> Any:
        async def put(self: Ends, end: End) -> bool:
            if not end.name.startswith(names):
                return await real(self, end)
            try:
                with trio.CancelScope(shield=True):
                    end.value = await end.write()
            except Exception as error:
                end.problem, end.error = str(error), error
                self._settle(end)
                return False
            end.written = True
            self._settle(end)
            return True

        return put

    return make


def _wakes_by_hand(real: Any) -> Any:
    """Waiting tasks are woken by the caller of a commit: one that is cancelled, or gets an error, wakes none."""

    async def accept(self: Lanes, message: NewMessage) -> bool:
        accepted = await self._core.store.accept_message(message, limit=self._core.settings.mailbox) is not None
        if accepted:
            self.wake(message.inbox, message.session_key)
        return accepted

    return accept


def _signals_no_message(real: Any) -> Any:
    def accept(db: Any, *args: Any) -> Any:
        before = len(db.signals)
        value = real(db, *args)
        del db.signals[before:]
        return value

    return accept


def _cannot_read_thoughts(real: Any) -> Any:
    """A message that the interface cannot prepare."""

    def prepare(self: ChatInterface, rows: Any) -> Any:
        if "think" in rows[0].text:
            raise ValueError("poison")
        return real(self, rows)

    return prepare


def _lets_errors_out(real: Any) -> Any:
    async def failed(self: Lanes, lane: Any, delivery: Any, rows: Any, error: Exception, failures: int) -> None:
        await trio.lowlevel.checkpoint()
        raise error

    return failed


def _reaps_no_runs(real: Any) -> Any:
    def nothing(*args: Any) -> tuple[int, int]:
        return 0, 0

    return nothing


def _reaps_nothing(real: Any) -> Any:
    def nothing(*args: Any) -> int:
        return 0

    return nothing


def _takes_a_number_twice(real: Any) -> Any:
    def last(self: EventWriter, turn: Any, outcome: Any) -> Any:
        row = real(self, turn, outcome)
        return msgspec.structs.replace(row, number=max(1, row.number - 1))

    return last


def _drops_refused_events(real: Any) -> Any:
    async def flush(self: EventWriter) -> None:
        waiting, self._waiting = self._waiting, {}
        self._wake = trio.Event()
        for rows in waiting.values():
            try:
                await self._core.store.append_events(rows)
            except StoreError:
                pass

    return flush


def _writes_again(real: Any) -> Any:
    """The end of a turn that is written twice is two ends: the mark in its session's row is not read."""

    async def finish_turn(self: Any, finish: TurnFinish) -> Any:
        db = self._writer._db
        session_id = finish.start.context.session_id
        db.execute("UPDATE sessions SET last_turn = '' WHERE id = ?", (session_id,))
        return await real(self, finish)

    return finish_turn


def _releases_nothing(real: Any) -> Any:
    async def release_claims(self: Lanes) -> None:
        await trio.lowlevel.checkpoint()

    return release_claims


def _lingers_through_a_drain(real: Any) -> Any:
    async def end_or_linger(self: Lanes, lane: Any, interface: Any) -> None:
        with trio.CancelScope(shield=True):
            await real(self, lane, interface)

    return end_or_linger


def _spares_promised_jobs(real: Any) -> Any:
    """A drain does not see the jobs that a one-shot session lingers for."""

    async def stop_all(self: Supervisor, cause: Cause) -> list[StopReceipt]:
        jobs = [job for job in self.jobs() if job.channel is None or job.channel.inbox not in ("webhook", "cron")]
        return await stop_each(jobs, cause)

    return stop_all


def _tries_without_a_pause(real: Any) -> Any:
    """A lane whose turn cannot be begun tries again at once, and for ever."""

    async def failed(self: Lanes, lane: Any, delivery: Any, rows: Any, error: Exception, failures: int) -> None:
        await trio.lowlevel.checkpoint()
        if rows:
            await self._core.ends.put(End("a claim", lambda: self._core.store.release_inbox(rows)))

    return failed


def _forgets_a_slow_start(real: Any) -> Any:
    """A run whose row is written after its caller was told of a time-out has a row, and no task."""

    async def write_down(self: StatelessEntry, start: Any) -> None:
        began = trio.current_time()
        await real(self, start)
        if trio.current_time() - began > self._core.settings.finish_seconds:
            raise TimeoutError("the shield has expired")

    return write_down


def _thread_is_not_counted(real: Any) -> Any:
    def adopt_thread(self: Supervisor, name: str, owner: Any, over: trio.Event) -> None:
        return None

    return adopt_thread


def _ended_is_ended(real: Any) -> Any:
    """A stop of an ended turn is `ok`, even if work that the turn left behind still runs."""

    async def stop_node(node: Any, cancel: Any, cause: Cause, timeout: float, tell: Any = None) -> StopReceipt:
        if node.closed_at is not None:
            return StopReceipt(target=node.id, cause=cause, ok=True, milliseconds=0.0, already_ended=True)
        return await real(node, cancel, cause, timeout, tell)

    return stop_node


def _knows_no_groups(real: Any) -> Any:
    def split(error: BaseException) -> tuple[BaseException | None, BaseException | None]:
        return (error, None) if isinstance(error, trio.Cancelled) else (None, error)

    return split


def _counts_no_wakes(real: Any) -> Any:
    async def root_wakes(self: Any, root_id: str) -> int:
        await trio.lowlevel.checkpoint()
        return 0

    return root_wakes


def _counts_none(real: Any) -> Any:
    return lambda db, root_id: 0


NONE = ()
RECEIVER = ("receiver",)
STORE = ("store",)
CRASH = ("crash",)

DEFECTS: dict[str, tuple[str, Sequence[str], tuple[Patch, ...]]] = {
    "1 a drain is over while one-shot sessions linger": (
        "8 calm",
        NONE,
        (
            (Lanes, "release_claims", _releases_nothing),
            (Lanes, "_end_or_linger", _lingers_through_a_drain),
            (Supervisor, "stop_all", _spares_promised_jobs),
        ),
    ),
    "2a a job's end that fails once": ("8 calm", STORE, ((Ends, "put", _gives_up("job")),)),
    "2b a turn's end that fails once": ("8 calm", STORE, ((Ends, "put", _gives_up("turn")),)),
    "2c an attempt to send whose end fails once": ("1 watched", STORE, ((Ends, "put", _gives_up("the attempt")),)),
    "2d a slot's end that fails once": ("8 calm", STORE, ((Ends, "put", _gives_up("slot")),)),
    "3 a lane that fails tries again without a pause": (
        "9 limits",
        STORE,
        ((Lanes, "_failed", _tries_without_a_pause),),
    ),
    "4 events that are refused once are gone": ("5 events", STORE, ((EventWriter, "flush", _drops_refused_events),)),
    "5 a poison message ends the process": (
        "the server ended",
        STORE,
        ((ChatInterface, "prepare", _cannot_read_thoughts), (Lanes, "_failed", _lets_errors_out)),
    ),
    "6 a run that is written after a time-out has no task": (
        "8 calm",
        STORE,
        ((StatelessEntry, "_write_down", _forgets_a_slow_start),),
    ),
    "8 the second stop of a turn with a deaf thread says ok": (
        "7 stops",
        NONE,
        ((turn, "stop_node", _ended_is_ended), (Supervisor, "adopt_thread", _thread_is_not_counted)),
    ),
    "9 a receiver that crashes leaves job ends unwritten": (
        "1 watched",
        RECEIVER,
        ((supervisor, "split_cancelled", _knows_no_groups),),
    ),
    "10 the terminal event takes a number twice": ("5 events", STORE, ((EventWriter, "last", _takes_a_number_twice),)),
    "11 whoever writes must wake": (
        "8 calm",
        STORE,
        ((Lanes, "accept", _wakes_by_hand), (inbox, "accept_message", _signals_no_message)),
    ),
    "15 the budget of wakes does nothing": (
        "9 limits",
        NONE,
        ((SqliteStore, "root_wakes", _counts_no_wakes), (turns, "root_wakes", _counts_none)),
    ),
    "shape 2 a turn's end written twice": ("4 transcripts", STORE, ((SqliteStore, "finish_turn", _writes_again),)),
    "shape 3 runs of a dead owner stay": ("8 calm", CRASH, ((recovery, "_end_runs", _reaps_no_runs),)),
    "shape 3 jobs of a dead owner stay": ("8 calm", CRASH, ((recovery, "_lose_jobs", _reaps_nothing),)),
    "shape 3 rows of a dead owner stay": ("8 calm", CRASH, ((recovery, "_interrupt_messages", _reaps_nothing),)),
}
"""By a number for each kind of defect (`shape` for those of signals, ends and claims): the invariant that it must violate, the faults, and the patches."""
