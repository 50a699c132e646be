"""The background processes of all sessions: started, read, watched, and each ended by one owner.

A background command is a job of the supervisor. Its task starts the process through the warden with routing, channel and patterns already fixed (H5,
H6), is the only reader of its output (H8), and records its end (H15, H16). When the command has exited, processes that it left running get a grace
period and are then killed: a job ends only when no process of it is left. The output of a process can be read for half an hour after its end.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol, final

import attrs
import trio

from hermes_trio.runtime.errors import JobRefused
from hermes_trio.runtime.outcome import CancelCause, Cause, JobState
from hermes_trio.runtime.ports import NoticeKind
from hermes_trio.runtime.supervisor import Job, JobSpec
from hermes_trio.runtime.tree import waiting
from hermes_trio.tools.confinement import CommandConfinement
from hermes_trio.tools.context import ToolContext
from hermes_trio.tools.settings import TerminalSettings
from hermes_trio.tools.warden import ExitStatus, KeptProcess, KillHow, ProcessSpec, Stdin, Warden, WardenError
from hermes_trio.tools.warden.daemon import process_table

from .notices import completion_text, watch_text
from .output import AnsiFilter, OutputDecoder, RingText, mask_secrets
from .shell_state import ShellStates
from .watching import Breaker, Disabled, Match, OutputWatch, WatchEvent

logger: Final = logging.getLogger("hermes_trio.tools.terminal.processes")

KILLED_BY_TOOL: Final = "process.kill"

SETTLE_SECONDS: Final = 0.5
"""After this long without output, an unfinished line (a prompt) is examined, too."""

END_OF_OUTPUT_SECONDS: Final = 0.3
"""How long the end of the output may take after the last process of the job has ended."""

STORE_SECONDS: Final = 5.0
"""How long the end of a process waits until matches in its output are stored."""

END_LIMIT: Final = 120.0
"""The bound of the shield in which a job is ended: far above every grace period, for a very slow machine."""

NOTE_SECONDS: Final = 2.0
"""How often the last output is stored, for the notice after a crash."""

NOTED_CHARACTERS: Final = 2000

MASK_MARGIN: Final = 8000
"""Text before a cut that is examined, too, so that a secret whose beginning was cut off is still redacted."""


class OutputLog(Protocol):
    """The verb of the store that keeps the last output of a running job."""

    async def note_job_output(self, job_id: str, tail: str) -> None: ...


@final
@attrs.define(eq=False, kw_only=True)
class BackgroundProcess:
    """One background command, from before its process exists until it is forgotten. Only its own job's task changes it."""

    id: str
    session_id: str
    command: str = attrs.field(repr=False)
    shown: str
    """The command as it may be displayed: without secrets."""
    cwd: str
    pty: bool = False
    notify: bool = False
    watch: OutputWatch | None = None
    started_at: float = 0.0
    started: float = 0.0
    ended: float | None = None
    output: RingText = attrs.Factory(RingText)
    process: KeptProcess | None = None
    how: KillHow | None = None
    """What was necessary to end it, if it did not exit by itself."""
    leftovers: bool = False
    """Whether processes that it had left running had to be killed."""
    completion_reason: str = ""
    termination_source: str = ""
    told_killed: bool = False
    job: Job = attrs.field(init=False)
    end_of_output: trio.Event = attrs.Factory(trio.Event)

    @property
    def pid(self) -> int:
        """Return the pid of the process."""
        return 0 if self.process is None else self.process.pid

    @property
    def running(self) -> bool:
        """Return whether the command runs. Processes that it left may run a moment longer."""
        return self.ended is None and (self.process is None or self.process.status is None)

    @property
    def status(self) -> ExitStatus | None:
        """Return the exit status, as reported by the kernel."""
        return None if self.process is None else self.process.status

    @property
    def exit_code(self) -> int | None:
        """Return the exit code, minus the signal, or None if neither is known."""
        return None if self.status is None else self.status.returncode

    def uptime(self, now: float) -> float:
        """Return the seconds from its start to its end, or to now."""
        return round((now if self.ended is None else self.ended) - self.started, 1)

    def tail(self, characters: int) -> str:
        """Return the last output, redacted."""
        return mask_secrets(self.output.tail(characters + MASK_MARGIN))[-characters:]

    @property
    def has_notice(self) -> bool:
        """Return whether the owner gets a notice of the end: requested, or because the watch was disabled or can no longer match."""
        return self.notify or (self.watch is not None and (self.watch.disabled or self.watch.events == 0))


@final
class Processes:
    """The registry of background processes. A session sees only its own."""

    def __init__(
        self,
        warden: Warden,
        shells: ShellStates,
        settings: TerminalSettings,
        output_log: OutputLog | None,
        confinement: CommandConfinement,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        self._warden = warden
        self._shells = shells
        self._settings = settings
        self._log = output_log
        self._confinement = confinement
        self._clock = clock
        self._breaker = Breaker(clock)
        self._known: OrderedDict[str, BackgroundProcess] = OrderedDict()
        self._slots: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._known)

    @property
    def settings(self) -> TerminalSettings:
        """Return the limits that hold here."""
        return self._settings

    # -- finding processes --------------------------------------------------------------------------------------------------------

    def find(self, id: str, session_id: str) -> BackgroundProcess | None:
        """Return a process of this session, running or recently ended, or None."""
        self._forget_old()
        found = self._known.get(id)
        return found if found is not None and found.session_id == session_id else None

    def find_pid(self, pid: int, session_id: str) -> BackgroundProcess | None:
        """Return the process of this session that has this pid, or that started the process that has it."""
        for found in self.of_session(session_id):
            process = found.process
            if process is None or process.empty:
                continue
            if pid == process.pid or any(one.pid == pid for one in process_table.descendants(process.keeper_pid)):
                return found
        return None

    def of_session(self, session_id: str) -> list[BackgroundProcess]:
        """Return all processes of a session, oldest first."""
        self._forget_old()
        return [found for found in self._known.values() if found.session_id == session_id]

    @contextmanager
    def slot(self, session_id: str) -> Iterator[None]:
        """Reserve one of a session's processes. Raises `JobRefused` beyond the limit."""
        limit = self._settings.max_processes_per_session
        if self._slots[session_id] >= limit:
            raise JobRefused(
                f"this session already runs {limit} processes, which is the limit; wait for one to end or stop one with process(action='kill')"
            )
        self._slots[session_id] += 1
        try:
            yield
        finally:
            self._slots[session_id] -= 1
            if not self._slots[session_id]:
                del self._slots[session_id]

    # -- starting ----------------------------------------------------------------------------------------------------------------

    async def start(
        self,
        place: ToolContext,
        command: str,
        *,
        cwd: str = "",
        pty: bool = False,
        notify: bool = False,
        watch: Sequence[str] = (),
    ) -> BackgroundProcess:
        """Start a command in the background and return once it runs; it belongs to the session from then on.

        Raises `JobRefused` if it cannot be started, and `ValueError` for patterns that could never match. Cancelled before it returns, nothing runs.
        """
        if (notify or watch) and place.channel is None:
            raise ValueError("a watched process needs a channel for its notice")
        record = BackgroundProcess(
            id=place.core.ids.make("proc_", 12),
            session_id=place.session_id,
            command=command,
            shown=mask_secrets(command),
            cwd=cwd or self._shells.cwd_of(place.context),
            pty=pty,
            notify=notify,
            watch=OutputWatch(watch, self._breaker, self._clock) if watch else None,
            output=RingText(self._settings.ring_characters),
        )
        spec = JobSpec(
            kind="process",
            id=record.id,
            title=record.shown,
            run=lambda job: self._live(job, record, place, cwd),
            details={"command": record.shown, "cwd": record.cwd, "watch_patterns": list(watch)},
        )
        supervisor = place.core.supervisor
        if (notify or watch) and place.channel is not None:
            job = await supervisor.start_watched(spec, place.owner, place.channel)
        else:
            job = await supervisor.start(spec, place.owner)
        if record.process is None:
            raise JobRefused(f"the process was stopped before it had started ({job.cause or job.state.value})")
        return record

    # -- the life of one process -------------------------------------------------------------------------------------------------

    async def _live(self, job: Job, record: BackgroundProcess, place: ToolContext, cwd: str) -> JobState:
        """Run the job's process. Cancelling kills it and all its descendants, and keeps its output."""
        record.job = job
        with self.slot(record.session_id), self._shells.lease(place.context, cwd=cwd) as lease:
            record.cwd = lease.cwd
            try:
                argv = lease.argv(record.command, keep=False)
                confinement = self._confinement.plan(place, lease.root)
                own = self._confinement.environment(place, lease.root)
            except WardenError as error:
                raise JobRefused(str(error)) from error
            spec = ProcessSpec(
                argv=argv,
                inherited=lease.inherited,
                confinement=confinement,
                cwd=lease.cwd,
                env={
                    **lease.environment,
                    **own,
                    "PYTHONUNBUFFERED": "1",
                    "TERM": "xterm-256color" if record.pty else "dumb",
                    **place.context.environ(),
                },
                stdin=Stdin.PTY if record.pty else Stdin.PIPE,
            )
            try:
                process = record.process = await self._warden.spawn(spec)
            except WardenError as error:
                raise JobRefused(str(error)) from error
            record.started, record.started_at = self._clock(), place.core.clock()
            self._known[record.id] = record
            job.details["pid"] = process.pid
            job.started(record)
            by_itself = False
            reading, stop, storage = trio.CancelScope(shield=True), _StopSignal(), _OutputStorage()
            # In the job's own nursery: one around the wait would raise a cancellation that comes after the exit, and call an exit a kill.
            job.nursery.start_soon(self._read, record, reading, storage)
            job.nursery.start_soon(self._write_down, record, storage)
            job.nursery.start_soon(stop.wait_for_cancellation)
            try:
                with waiting(f"process {process.pid}"):
                    await process.wait()
                by_itself = True
            finally:
                with trio.move_on_after(END_LIMIT, shield=True):
                    await self._end_leftovers(record, process, by_itself, stop)
                reading.cancel()
                stop.scope.cancel()
                with place.core.waits.bound(STORE_SECONDS):
                    await storage.finish()  # noqa: ASYNC102 - `bound` shields, with a deadline
                storage.scope.cancel()
                with trio.move_on_after(END_LIMIT, shield=True):
                    await self._conclude(record, by_itself)
            return JobState.LOST if process.status is not None and process.status.lost else JobState.EXITED

    async def _end_leftovers(
        self, record: BackgroundProcess, process: KeptProcess, by_itself: bool, stop: _StopSignal
    ) -> None:
        """End what is left of the job and read the rest of its output. The caller shields it, with a bound.

        Processes that an exited command left running get a grace period, unless the job is stopped meanwhile.
        """
        if by_itself:
            with trio.move_on_after(self._settings.leftover_grace):
                async with trio.open_nursery() as either:
                    either.start_soon(stop.pass_on, either.cancel_scope)
                    await process.wait_empty()
                    either.cancel_scope.cancel()
        report = await process.kill(self._settings.kill_grace)
        if by_itself:
            record.leftovers = report.how in (KillHow.SIGTERM, KillHow.SIGKILL)
        else:
            record.how = report.how
        if not by_itself or report.survivors:
            process.account_for(report, record.job.node)
        with trio.move_on_after(END_OF_OUTPUT_SECONDS):
            await record.end_of_output.wait()

    async def _conclude(self, record: BackgroundProcess, by_itself: bool) -> None:
        """Record how it ended, for the row, the notice and later reads."""
        job, process = record.job, record.process
        assert process is not None
        await process.close_streams()
        record.ended = self._clock()
        lost = process.status is not None and process.status.lost
        if lost and record.how is None:
            record.completion_reason, record.termination_source = "lost", "backend_lost"
        elif by_itself:
            record.completion_reason = "exited"
        else:
            record.completion_reason, record.termination_source = "killed", _source_of(job.cause)
        job.summary = "unknown" if process.status is None else str(process.status)
        job.text = completion_text(record)
        job.details.update(
            type="completion",
            session_id=record.id,
            command=record.shown,
            exit_code=record.exit_code,
            completion_reason=record.completion_reason,
            termination_source=record.termination_source,
            output=record.tail(NOTED_CHARACTERS),
            started_at=record.started_at,
        )
        if not record.has_notice:
            job.seen = True
        self._forget_old()

    # -- output ------------------------------------------------------------------------------------------------------------------

    async def _read(self, record: BackgroundProcess, reading: trio.CancelScope, storage: _OutputStorage) -> None:
        """Read the output until the pipe is closed or nothing more will come. Never waits for the store."""
        assert record.process is not None
        decoder, escapes, watch = OutputDecoder(), AnsiFilter(), record.watch
        settled = watch is None
        with reading:
            while True:
                data: bytes | None = None
                # A quiet process wakes its reader only until its last output is examined and stored.
                quiet = settled and (not record.job.watched or storage.noted == record.output.total)
                with trio.move_on_after(math.inf if quiet else SETTLE_SECONDS):
                    try:
                        data = await record.process.output.receive_some()
                    except (trio.BrokenResourceError, trio.ClosedResourceError):
                        data = b""
                if data is None:
                    storage.add(() if watch is None else watch.settle())
                    settled = True
                    continue
                settled = watch is None
                text = escapes.feed(decoder.feed(data) if data else decoder.finish())
                record.output.append(text)
                if data:
                    storage.add(() if watch is None else watch.feed(text))
                    continue
                storage.add(() if watch is None else watch.finish())
                record.end_of_output.set()
                return

    async def _write_down(self, record: BackgroundProcess, storage: _OutputStorage) -> None:
        """Store matches in the output, and periodically its end, until nothing more will come."""
        note_at = self._clock() + SETTLE_SECONDS
        with storage.scope:
            while True:
                await storage.wait()
                over = storage.closed
                await self._tell(record, storage.take())
                if record.job.watched and record.output.total != storage.noted and (over or self._clock() >= note_at):
                    storage.noted, note_at = record.output.total, self._clock() + NOTE_SECONDS
                    await self._note(record)
                if over:
                    storage.over.set()
                    return
        if storage.take():
            record.notify = True  # what is not stored in time is part of the notice of its end

    async def _note(self, record: BackgroundProcess) -> None:
        if self._log is None:
            return
        try:
            await self._log.note_job_output(record.id, record.tail(NOTED_CHARACTERS))
        except Exception as error:
            logger.warning("could not store the last output of %s; retrying with the next output: %s", record.id, error)

    async def _tell(self, record: BackgroundProcess, events: Sequence[WatchEvent]) -> None:
        for event in events:
            try:
                await record.job.notify(
                    _KINDS.get(type(event), NoticeKind.WATCH_OVERFLOW), watch_text(record, event), type=event.kind
                )
            except Exception:
                # What is not stored now is part of the notice of its end.
                logger.exception("could not store a match in the output of %s; it is reported with its end", record.id)
                record.notify = True
            except trio.Cancelled:
                record.notify = True
                raise

    # -- forgetting --------------------------------------------------------------------------------------------------------------

    def _forget_old(self) -> None:
        """Drop processes that ended long ago, or beyond a number."""
        oldest = self._clock() - self._settings.keep_seconds
        ended = [found for found in self._known.values() if found.ended is not None]
        surplus = len(ended) - self._settings.keep_count
        for index, found in enumerate(sorted(ended, key=lambda record: record.ended or 0.0)):
            if index < surplus or (found.ended or 0.0) < oldest:
                del self._known[found.id]


_KINDS: Final[dict[type[object], NoticeKind]] = {Match: NoticeKind.WATCH_MATCH, Disabled: NoticeKind.WATCH_DISABLED}


class _OutputStorage:
    """Passes what the reader found to the task that stores it, so that a slow store does not delay reading."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope(shield=True)
        self.closed = False
        self.over = trio.Event()
        self.noted = -1
        """The length of the output when its end was last stored; -1 if it was not."""
        self._events: list[WatchEvent] = []
        self._woken = trio.Event()

    def add(self, events: Sequence[WatchEvent]) -> None:
        """Add matches, and note that there may be more output."""
        self._events.extend(events)
        self._woken.set()

    def take(self) -> list[WatchEvent]:
        """Return the matches that are not stored yet."""
        events, self._events = self._events, []
        return events

    async def wait(self) -> None:
        """Wait until the reader has added something."""
        await self._woken.wait()
        if not self.closed:
            self._woken = trio.Event()

    async def finish(self) -> None:
        """Wait, after the last output, until everything is stored."""
        self.closed = True
        self._woken.set()
        await self.over.wait()


class _StopSignal:
    """Tells a shielded task that its job is being stopped, so that it skips grace periods."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self._cancelled = trio.Event()

    async def wait_for_cancellation(self) -> None:
        """Wait to be cancelled with the job, beside the shielded task, or through `scope` when it is no longer needed."""
        with self.scope:
            try:
                await trio.sleep_forever()
            finally:
                self._cancelled.set()

    async def pass_on(self, scope: trio.CancelScope) -> None:
        """Cancel `scope` when the job is cancelled."""
        await self._cancelled.wait()
        scope.cancel()


def _source_of(cause: Cause | None) -> str:
    """Return who ended it, in the words of the interface."""
    if cause is None:
        return "max_lifetime"
    if cause.detail == KILLED_BY_TOOL:
        return KILLED_BY_TOOL
    return "max_lifetime" if cause.kind is CancelCause.DEADLINE else "kill_all"
