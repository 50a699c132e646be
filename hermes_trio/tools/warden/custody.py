"""One warden process, as the server sees it: its start, its control socket, and the clean-up after its end.

A `Custody` lives as long as its warden. When the warden dies too early, the keepers (now the server's children) end
their jobs and themselves; the server waits for that, kills what has no keeper any more, reaps it all, and only then
reports that the jobs of this custody have ended.
"""

import array
import contextlib
import logging
import os
import secrets
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO, final

import attrs
import trio

from hermes_trio.tools.warden.daemon import oom, process_table
from hermes_trio.tools.warden.daemon.wire import (
    ABANDONED_GRACE,
    CGROUP_VARIABLE,
    FRAME,
    TEMPLATE_SPACES,
    TOKEN_VARIABLE,
    Confinement,
    Kind,
    Spaces,
    Stage,
    describe,
    mark,
)
from hermes_trio.tools.warden.errors import NotTaken, SpawnFailed
from hermes_trio.tools.warden.process import KeptProcess

log = logging.getLogger(__name__)

PROGRAM = Path(__file__).parent / "daemon" / "main.py"

KEEPER_LIMIT = ABANDONED_GRACE + 2.0
"""Seconds that keepers have to end their jobs after the warden's death; then the server kills both."""

SWEEP_LIMIT = 9.0
"""Seconds after which the server gives up on processes of a dead warden that SIGKILL does not end."""

SWEEP_PAUSE = 0.01

MAX_TEMPLATES = 8
"""The maximum number of templates of a warden: one for each profile, and a few for files that have changed."""

INHERITED_VARIABLES = ("LD_LIBRARY_PATH",)
"""The variables that the warden inherits from the server: some interpreters do not start without them."""


_wardens: set[int] = set()
"""The processes that this one started itself."""

_owns_every_child = False


def claim_children() -> None:
    """Declare that this process starts only wardens, so that every other child is an orphan of a command.

    For a process that only serves, like `hermes-trio serve`.
    """
    global _owns_every_child
    _owns_every_child = True


def _in_memory(data: bytes) -> BinaryIO:
    file = os.fdopen(os.memfd_create("template"), "w+b", buffering=0)
    file.write(data)
    file.seek(0)
    return file


class MountWatch:
    """Detects changes of the mount table of this process."""

    def __init__(self) -> None:
        self._table = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._table, select.POLLPRI)
        self.generation = 0

    def look(self) -> int:
        """Return a generation number, which is higher after each change."""
        self.generation += bool(self._poll.poll(0))
        return self.generation

    def close(self) -> None:
        """Close the table."""
        os.close(self._table)


@final
@attrs.define(eq=False)
class TemplateLink:
    """The server's end of one template's control socket."""

    control: trio.socket.SocketType
    sending: trio.Lock = attrs.field(init=False, factory=trio.Lock)
    _refused: tuple[Stage, int] | None = attrs.field(init=False, default=None)

    def refusal(self) -> tuple[Stage, int] | None:
        """Return the stage and errno of the step that the kernel refused, if the template has reported one; else None. Does not wait."""
        if self._refused is None and self.control.fileno() >= 0:
            with socket.socket(fileno=os.dup(self.control.fileno())) as own:
                # The first read may fail because the template ended without reading everything.
                for _ in range(2):
                    with contextlib.suppress(OSError):
                        if packet := own.recv(FRAME.size, socket.MSG_DONTWAIT):
                            _, stage, number = FRAME.unpack(packet)
                            self._refused = (Stage(stage), number)
                            break
        return self._refused


@final
@attrs.define(eq=False)
class Custody:
    """A running warden process and the jobs that it was given."""

    token: str
    _process: trio.Process
    _control: trio.socket.SocketType
    _kept: dict[int, KeptProcess] = attrs.field(init=False, factory=dict[int, KeptProcess])
    _sending: trio.Lock = attrs.field(init=False, factory=trio.Lock)
    _making: trio.Lock = attrs.field(init=False, factory=trio.Lock)
    _mounts: MountWatch = attrs.field(init=False, factory=MountWatch)
    _templates: dict[tuple[bytes, int, int], TemplateLink] = attrs.field(
        init=False, factory=dict[tuple[bytes, int, int], TemplateLink]
    )
    """By what they were made of, the least recently used first."""
    _dismissed: bool = attrs.field(init=False, default=False)
    over: trio.Event = attrs.field(init=False, factory=trio.Event)
    """Set when the warden and all processes of its jobs have ended."""
    died: trio.Event = attrs.field(init=False, factory=trio.Event)
    """Set when the warden takes no more jobs; processes of its jobs may still run."""

    @classmethod
    async def begin(cls, cgroup: str = "") -> "Custody":
        """Start a warden, which `dismiss` ends. Call it shielded: it takes some milliseconds and must not be cancelled halfway.

        `cgroup` is the delegated control group of its jobs.
        """
        if not sys.executable:
            raise SpawnFailed("the path of the Python interpreter is not known (sys.executable is empty)")
        token = secrets.token_hex(8)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                process = await trio.lowlevel.open_process(
                    [sys.executable, "-I", "-S", str(PROGRAM)],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    cwd="/",
                    env={name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
                    | {TOKEN_VARIABLE: token}
                    | ({CGROUP_VARIABLE: cgroup} if cgroup else {}),
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise SpawnFailed(f"the warden cannot be started: {error.strerror}") from error
        _wardens.add(process.pid)
        return cls(token, process, trio.socket.from_stdlib_socket(ours))

    @property
    def pid(self) -> int:
        """Return the warden's process number."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Return whether the warden has ended, even if `attend` has not noticed yet."""
        return self._process.poll() is not None

    async def template(self, common: Confinement) -> TemplateLink:
        """Return a template of this confinement for the files as they are now. Raises as `hand_over` does; cancelling sends nothing."""
        description = describe(common, map(mark, common.paths))
        key = (description, self._mounts.look(), os.stat("/dev").st_mtime_ns if common.guards_devices else 0)
        async with self._making:
            found = self._templates.pop(key, None)
            if found is None:
                while len(self._templates) >= MAX_TEMPLATES:
                    self.forget_template(next(iter(self._templates.values())))
                found = await self._make_template(common.spaces & TEMPLATE_SPACES, description)
            self._templates[key] = found
        return found

    async def _make_template(self, spaces: Spaces, description: bytes) -> TemplateLink:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link = TemplateLink(trio.socket.from_stdlib_socket(ours))
        try:
            with theirs, _in_memory(description) as file:
                await self._deliver(Kind.TEMPLATE, spaces, 0, [theirs.fileno(), file.fileno()])
        except BaseException:
            ours.close()
            raise
        return link

    def forget_template(self, link: TemplateLink) -> None:
        """Close the control socket of a template, which ends it; the keepers that it has forked continue."""
        self._templates = {key: other for key, other in self._templates.items() if other is not link}
        link.refusal()
        link.control.close()

    async def hand_over(
        self, process: KeptProcess, descriptors: list[int], template: TemplateLink | None = None
    ) -> None:
        """Have a keeper forked for this process, by a template if there is one. Cancelling sends nothing.

        Raises `NotTaken` if the warden or the template has ended, and `SpawnFailed` if the kernel does not pass the descriptors on.
        """
        self._kept[process.job] = process
        try:
            await self._deliver(Kind.SPAWN, process.job, process.spec.spaces, descriptors, template)
        except BaseException:
            self.forget(process.job)
            raise

    async def _deliver(
        self, kind: Kind, first: int, second: int, descriptors: list[int], template: TemplateLink | None = None
    ) -> None:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        control, sending = (self._control, self._sending) if template is None else (template.control, template.sending)
        async with sending:
            try:
                await control.sendmsg([FRAME.pack(kind, first, second)], [rights])
            except (OSError, trio.ClosedResourceError) as error:
                if self.died.is_set() or not isinstance(error, OSError) or isinstance(error, ConnectionError):
                    raise NotTaken("the warden ended before it accepted the command") from error
                raise SpawnFailed(f"the warden cannot be given the streams of a process: {error.strerror}") from error

    def forget(self, job: int) -> None:
        """Remove a job for which no keeper was forked."""
        # Sending is a checkpoint, also when it fails: `attend` may have noticed the warden's death, and cleared the list, in between.
        self._kept.pop(job, None)

    async def discard(self, job: int) -> None:
        """Order the warden to kill the keeper of this job and all its processes. Does nothing if the warden has ended."""
        async with self._sending:
            with contextlib.suppress(OSError):
                await self._control.send(FRAME.pack(Kind.DISCARD, job, 0))

    def fail(self) -> None:
        """Kill the warden; `attend` cleans up after it."""
        self._process.kill()

    async def dismiss(self, limit: float) -> None:
        """Tell the warden to end when its last job has ended, and wait for that; kill it after `limit` seconds."""
        self._dismissed = True
        for link in [*self._templates.values()]:
            self.forget_template(link)
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        with trio.move_on_after(limit):
            await self.over.wait()
        if not self.over.is_set():
            self.fail()
            await self.over.wait()

    async def attend(self) -> None:
        """Read the warden's reports until it ends, then end and reap the processes that it left. Must not be cancelled."""
        while packet := await self._receive():
            kind, job, _ = FRAME.unpack(packet)
            assert kind == Kind.CLOSED
            process = self._kept.pop(job, None)
            if process is not None:
                process.clear()
        self.died.set()
        with trio.move_on_after(1):
            await self._process.wait()
        self.fail()
        await self._process.wait()
        if not self._dismissed:
            log.error(
                "the warden (pid %d) ended unexpectedly (status %s): its %d jobs are killed and reported as lost",
                self.pid,
                self._process.returncode,
                len(self._kept),
            )
        _wardens.discard(self.pid)
        await self._sweep()
        self._control.close()
        self._mounts.close()
        for link in [*self._templates.values()]:
            self.forget_template(link)
        for process in self._kept.values():
            process.clear()
        self._kept.clear()
        self.over.set()

    async def _receive(self) -> bytes:
        try:
            return await self._control.recv(FRAME.size)
        except OSError:
            return b""

    async def _sweep(self) -> None:
        """Kill and reap the processes of a dead warden, whose sub-reaper is the server."""
        me = os.getpid()
        began = trio.current_time()
        # A zombie has no readable environment: processes that were identified alive are remembered until they are reaped.
        known: set[tuple[int, int]] = set()
        while leftovers := [
            child
            for child in process_table.children(me)
            if (child.pid, child.started) in known or self._left_behind(child)
        ]:
            elapsed = trio.current_time() - began
            if elapsed > SWEEP_LIMIT:
                log.error("processes %s of a dead warden cannot be ended", [leftover.pid for leftover in leftovers])
                return
            keepers = {process.keeper_pid for process in self._kept.values()}
            for leftover in leftovers:
                if not leftover.alive:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(leftover.pid, os.WNOHANG)  # noqa: ASYNC222 - WNOHANG does not wait
                elif leftover.pid not in keepers or elapsed > KEEPER_LIMIT:
                    found = [leftover, *process_table.descendants(leftover.pid)]
                    known.update((one.pid, one.started) for one in found)
                    process_table.kill_listed(found, me)
            await trio.sleep(SWEEP_PAUSE)

    def _left_behind(self, child: process_table.ProcessEntry) -> bool:
        """Return whether a child of the server came from this warden, by its session, a command's session, its OOM score or its environment.

        After `claim_children` every child does that is not a warden.
        """
        if _owns_every_child:
            return child.pid not in _wardens
        if child.session == self.pid:
            return True
        for process in self._kept.values():
            if process.pid and child.session == process.pid:
                return True
        if not child.alive:
            own = oom.score(os.getpid())
            return own is not None and oom.score(child.pid) == oom.command_score(own) != own
        try:
            environment = Path(f"/proc/{child.pid}/environ").read_bytes()
        except OSError:
            return False
        return f"{TOKEN_VARIABLE}={self.token}".encode() in environment.split(b"\0")
