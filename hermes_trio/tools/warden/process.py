"""One started command, as its owner in the server sees it.

The state has one writer: the attendant task, which is the only reader of the link to the keeper. So an exit, a kill and
a loss cannot be confused (H16): the exit status is what the kernel told the keeper, and a kill is a separate receipt.
The end of the output is not an exit (H15), and an exit is not the end of the job: see `wait_empty`.
"""

import enum
import os
import socket
import time
from typing import Protocol, final

import attrs
import trio

from hermes_trio.runtime.tree import Node
from hermes_trio.tools.warden.daemon.wire import FRAME, Kind, Means, Stage
from hermes_trio.tools.warden.errors import NotTaken, SpawnFailed, StdinClosed
from hermes_trio.tools.warden.spec import ExitStatus, KillHow, KillReport, ProcessSpec
from hermes_trio.tools.warden.streams import OutputStream, OwnStreams

KEEPER_ANSWER_LIMIT = 5.0
"""Seconds beyond the grace that a keeper may take to answer a kill; it reports survivors after 3."""

LAUNCH_LIMIT = 30.0
"""Seconds from handing over a command until it runs; only a slow file system takes more than a few milliseconds."""

WARDEN_ANSWER_LIMIT = 2.0
"""Seconds that the warden may take to end the job of a keeper that did not answer."""

LOSS_LIMIT = 10.0
"""Seconds that the server itself may take after it had to kill the warden too."""

_HOW = {
    Means.NONE: KillHow.ALREADY_EXITED,
    Means.SIGTERM: KillHow.SIGTERM,
    Means.SIGKILL: KillHow.SIGKILL,
}


class ProcessPhase(enum.Enum):
    """The phase of a job. It only moves down this list."""

    PLANNED = enum.auto()
    """Sent to the warden; no keeper has answered yet."""
    KEPT = enum.auto()
    """A keeper exists; the command may or may not run."""
    RUNNING = enum.auto()
    EXITED = enum.auto()
    """The command has ended; descendants of it may still run."""
    EMPTY = enum.auto()
    """No process of this job is alive."""


class Custodian(Protocol):
    """What a process needs of its warden if its keeper fails."""

    async def discard(self, job: int) -> None:
        """Order the warden to kill this job's keeper and all its processes."""
        ...

    def fail(self) -> None:
        """Kill the warden, because it does not answer either."""
        ...


@final
@attrs.define(eq=False)
class KeptProcess:
    """A command and all its descendants, until the last of them has ended.

    Made by `Warden.spawn` only. The owner is the only reader of `output`, and closes it with `aclose`, or leaves that
    to the end of the warden's scope, which kills whatever is left. `launch`, `abandon`, `attend`, `clear` and
    `close_streams` are the warden's.
    """

    spec: ProcessSpec
    job: int
    """Its number in this warden."""
    _custodian: Custodian = attrs.field(repr=False)
    _streams: OwnStreams = attrs.field(repr=False)
    _link: trio.SocketStream = attrs.field(repr=False)
    pid: int = attrs.field(init=False, default=0)
    keeper_pid: int = attrs.field(init=False, default=0)
    phase: ProcessPhase = attrs.field(init=False, default=ProcessPhase.PLANNED)
    survivors: int = attrs.field(init=False, default=0)
    """The number of processes that survived the last SIGKILL, as far as the keeper could tell."""
    count_exceeded: tuple[int, int] | None = attrs.field(init=False, default=None)
    """The number of processes and its limit, if the job was killed because it exceeded the limit."""
    _status: ExitStatus | None = attrs.field(init=False, default=None)
    _how: KillHow = attrs.field(init=False, default=KillHow.ALREADY_EXITED)
    _lost: bool = attrs.field(init=False, default=False)
    _failure: SpawnFailed | None = attrs.field(init=False, default=None, repr=False)
    _launched: trio.Event = attrs.field(init=False, factory=trio.Event, repr=False)
    _exited: trio.Event = attrs.field(init=False, factory=trio.Event, repr=False)
    _empty: trio.Event = attrs.field(init=False, factory=trio.Event, repr=False)
    _cleared: trio.Event = attrs.field(init=False, factory=trio.Event, repr=False)
    _verdict: trio.Event = attrs.field(init=False, factory=trio.Event, repr=False)
    _sending: trio.Lock = attrs.field(init=False, factory=trio.Lock, repr=False)
    _left_behind: Node | None = attrs.field(init=False, default=None, repr=False)

    @property
    def output(self) -> OutputStream:
        """Return standard output, with standard error unless `merge_stderr` is off. Only the owner reads it."""
        return self._streams.output

    @property
    def errors(self) -> OutputStream | None:
        """Return standard error; None if it is merged with the output."""
        return self._streams.errors

    @property
    def status(self) -> ExitStatus | None:
        """Return how the command ended; None while it runs."""
        return self._status

    @property
    def empty(self) -> bool:
        """Return whether no process of this job is alive."""
        return self._empty.is_set()

    async def write(self, data: bytes) -> None:
        """Write to standard input. Raises `StdinClosed` if there is none, or its reading end is closed.

        Waits while the process does not read; cancelling the wait may leave a part of the data written.
        """
        if self._streams.stdin is None:
            raise StdinClosed("this process has no standard input: start it with a pipe or a terminal to write to it")
        await self._streams.stdin.write(data)

    async def close_stdin(self) -> None:
        """Send an end of file to the command, without killing it. Raises `StdinClosed` if it has no standard input."""
        if self._streams.stdin is None:
            raise StdinClosed("this process has no standard input: start it with a pipe or a terminal to close it")
        await self._streams.stdin.end()

    async def wait(self) -> ExitStatus:
        """Wait until the command ends, and return how. Cancelling ends the wait, not the process."""
        await self._exited.wait()
        assert self._status is not None
        return self._status

    async def wait_empty(self) -> None:
        """Wait until no process of this job is alive. Cancelling ends the wait, not the process."""
        await self._empty.wait()

    async def kill(self, grace: float = 2.0) -> KillReport:
        """Send SIGTERM to every process of the job, wait `grace` seconds, and send SIGKILL until none is left.

        Cancellation does not interrupt it: it is shielded, and bounded by the grace and a few seconds. A second kill at the
        same time can only shorten the grace. If the keeper does not answer, the warden ends it and its job; if
        the warden does not either, the server does.
        """
        if self.empty:
            return KillReport(KillHow.LOST if self._lost else KillHow.ALREADY_EXITED, 0.0)
        began = time.monotonic()
        with trio.CancelScope(shield=True):
            await self._end(max(grace, 0.0))
        elapsed = round((time.monotonic() - began) * 1000, 3)
        if self.empty:
            return KillReport(KillHow.LOST if self._lost else self._how, elapsed)
        return KillReport(KillHow.SIGKILL, elapsed, survivors=max(self.survivors, 1))

    def account_for(self, report: KillReport, node: Node | None) -> None:
        """Record in the tree how a kill ended `node`. Processes that survived SIGKILL stay below `abandoned` until they end."""
        if node is None:
            return
        if not report.survivors:
            node.how = str(report.how)
        elif self.empty:
            node.how = f"{report.survivors} ended late"
        elif self._left_behind is None:
            how = f"{report.survivors} survived SIGKILL"
            self._left_behind = node.leave_behind("process", f"process_{self.pid}", how)

    async def aclose(self, grace: float = 2.0) -> None:
        """Kill what is left of the job and close its streams; not interrupted by cancellation (see `kill`)."""
        await self.kill(grace)
        await self.close_streams()

    async def __aenter__(self) -> "KeptProcess":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _end(self, grace: float) -> None:
        if self._verdict.is_set():
            self._verdict = trio.Event()
        with trio.move_on_after(grace + KEEPER_ANSWER_LIMIT):
            await self._launched.wait()
            await self._send(FRAME.pack(Kind.KILL, round(grace * 1000), 0))
            await self._verdict.wait()
        if not self._verdict.is_set():
            await self._force()

    async def _force(self) -> None:
        """End a job whose keeper does not answer: through the warden, or else through the server."""
        with trio.CancelScope(shield=True):
            with trio.move_on_after(WARDEN_ANSWER_LIMIT):
                await self._custodian.discard(self.job)
                await self._verdict.wait()
            if not self._verdict.is_set():
                self._custodian.fail()
                with trio.move_on_after(LOSS_LIMIT):
                    await self._verdict.wait()

    async def _send(self, data: bytes) -> None:
        async with self._sending:
            try:
                await self._link.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                # The keeper has ended; the attendant reads the end of the link and updates the state.
                return

    async def launch(self, plan: bytes) -> None:
        """Send the plan and wait until the command runs. Raises `SpawnFailed`. If it fails or is cancelled, call `abandon`."""
        with trio.move_on_after(LAUNCH_LIMIT):
            await self._send(plan)
            await self._launched.wait()
        if self._failure is not None:
            raise self._failure
        if not self._launched.is_set():
            raise SpawnFailed(f"the command did not start within {LAUNCH_LIMIT:g} seconds")

    async def abandon(self) -> None:
        """Close the link of a process without an owner, which makes the keeper end the job, and wait for that. Shielded and bounded."""
        with trio.move_on_after(KEEPER_ANSWER_LIMIT, shield=True):
            try:
                self._link.socket.shutdown(socket.SHUT_WR)
            except OSError:
                pass
            await self._empty.wait()
        if not self.empty:
            await self._force()
        await self.close_streams()

    async def close_streams(self) -> None:
        """Close the server's ends of the streams; not interrupted by cancellation."""
        await self._streams.aclose()

    def clear(self) -> None:
        """Record that the warden, or the server in its place, has verified that no process of this job is left."""
        self._cleared.set()

    async def attend(self) -> None:
        """Read the link to its end, and update the state. Runs in the warden's scope, so that it outlives the owner."""
        unread = b""
        while received := await self._receive():
            unread += received
            while len(unread) >= FRAME.size:
                self._hear(*FRAME.unpack_from(unread))
                unread = unread[FRAME.size :]
        if self.phase is ProcessPhase.PLANNED:
            self._failure = NotTaken("the warden or the keeper ended before it accepted the command")
        elif self.phase is not ProcessPhase.EMPTY:
            self._lose()
            await self._cleared.wait()
        self._finish()
        await self._link.aclose()

    async def _receive(self) -> bytes:
        try:
            return bytes(await self._link.receive_some())
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return b""

    def _hear(self, kind: int, first: int, second: int) -> None:
        match kind:
            case Kind.HELLO:
                self.phase, self.keeper_pid = ProcessPhase.KEPT, first
            case Kind.STARTED:
                self.phase, self.pid = ProcessPhase.RUNNING, first
                self._launched.set()
            case Kind.FAILED:
                self._failure = explain_failure(self.spec, Stage(first), second)
            case Kind.ORPHANED:
                self._lost = self._status is None
            case Kind.EXITED:
                self.phase = ProcessPhase.EXITED
                self._exit(ExitStatus.from_frame(first, second, lost=self._lost))
            case Kind.SURVIVORS:
                self.survivors = first
                self._verdict.set()
            case Kind.CROWDED:
                self.count_exceeded = (first, second)
            case Kind.EMPTY:
                self._how = _HOW[Means(first)]
                self._finish()
            case _:
                raise AssertionError(f"a keeper sent a frame of kind {kind}, which keepers do not send")

    def _lose(self) -> None:
        """Handle the death of the keeper before the end of its job."""
        self._lost = True
        if self._failure is None and self.phase is ProcessPhase.KEPT:
            self._failure = SpawnFailed("the keeper ended before it reported that the command runs")
        if self._status is None:
            self._exit(ExitStatus(lost=True))
        self._launched.set()

    def _exit(self, status: ExitStatus) -> None:
        assert self._status is None
        self._status = status
        self._exited.set()

    def _finish(self) -> None:
        if self.phase is ProcessPhase.EMPTY:
            return
        self.phase = ProcessPhase.EMPTY
        self.survivors = 0
        if self._status is None:
            self._exit(ExitStatus(lost=self._lost))
        self._launched.set()
        self._empty.set()
        self._verdict.set()
        if self._left_behind is not None:
            self._left_behind.close("ended late")


def explain_failure(spec: ProcessSpec, stage: Stage, errno: int) -> SpawnFailed:
    """Return a sentence that says why a command does not run."""
    why = os.strerror(errno)
    match stage:
        case Stage.CHDIR:
            return SpawnFailed(f"cannot start in {spec.cwd!r}: {why}")
        case Stage.EXEC:
            program = spec.argv[0] if spec.argv else "the shell"
            return SpawnFailed(f"cannot execute {program!r}: {why}")
        case Stage.FORK:
            return SpawnFailed(f"no more processes can be forked: {why}")
        case Stage.CONFINE:
            return SpawnFailed(
                f"the kernel refused a part of the confinement of the command, so it was not started: {why};"
                " `hermes-trio doctor` says which protections this machine offers"
            )
        case Stage.SETUP:
            return SpawnFailed(f"cannot set up the command's session and streams: {why}")
