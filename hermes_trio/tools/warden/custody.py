"""One warden process, seen from the server: started, spoken to over its control socket, and mourned.

A `Custody` lives as long as its warden. When the warden dies too early, the keepers (now the server's children) end
their jobs and themselves; the server waits for that, kills what has no keeper any more, reaps it all, and only then
says that the jobs of this custody are gone.
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

from hermes_trio.tools.warden.daemon import descent, oom
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

KEEPER_PATIENCE = ABANDONED_GRACE + 2.0
"""Seconds that keepers have for their jobs after the warden's death; then the server kills them and takes over."""

SWEEP_LIMIT = 9.0
"""Seconds after which the server stops trying to end what a dead warden left: it has no power over that."""

SWEEP_PAUSE = 0.01

MAX_TEMPLATES = 8
"""How many templates a warden has at most: one for each profile, and a few for files that have changed."""

INHERITED_VARIABLES = ("LD_LIBRARY_PATH",)
"""All that the warden needs of the server's environment: some interpreters do not start without it."""


_wardens: set[int] = set()
"""The processes that this one started itself."""

_owns_every_child = False


def claim_children() -> None:
    """Say that this process starts nothing but wardens: any other child is an orphan of a command, whatever it looks like.

    For a process that is a server and nothing else, like `hermes-trio serve`.
    """
    global _owns_every_child
    _owns_every_child = True


def _in_memory(data: bytes) -> BinaryIO:
    file = os.fdopen(os.memfd_create("template"), "w+b", buffering=0)
    file.write(data)
    file.seek(0)
    return file


class MountWatch:
    """Whether the mount table of this process has changed since the last look."""

    def __init__(self) -> None:
        self._table = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._table, select.POLLPRI)
        self.generation = 0

    def look(self) -> int:
        """A number that is another one after each change."""
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
        """What the kernel did not let it do, if it has said so: the stage and the error's number. Does not wait."""
        if self._refused is None and self.control.fileno() >= 0:
            with socket.socket(fileno=os.dup(self.control.fileno())) as own:
                # The first answer may be that it ended without reading everything.
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
    """Set when the warden has ended and nothing of it is left."""
    died: trio.Event = attrs.field(init=False, factory=trio.Event)
    """Set when the warden takes no more jobs; it may have left something to clean up."""

    @classmethod
    async def begin(cls, cgroup: str = "") -> "Custody":
        """Start a warden, which `dismiss` ends. Call it shielded: it takes some milliseconds, and must not be torn.

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
        """The warden's process number."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the warden has ended, known or not."""
        return self._process.poll() is not None

    async def template(self, common: Confinement) -> TemplateLink:
        """A template of this confinement that fits the files as they are now. Raises as `hand_over` does; cancelling sends nothing."""
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
        """Let a template end; the keepers that it has forked go on."""
        self._templates = {key: other for key, other in self._templates.items() if other is not link}
        link.refusal()
        link.control.close()

    async def hand_over(
        self, process: KeptProcess, descriptors: list[int], template: TemplateLink | None = None
    ) -> None:
        """Have a keeper forked for this process, by a template if there is one. Cancelling sends nothing.

        Raises `NotTaken` if the warden or the template is gone, and `SpawnFailed` if the kernel does not pass the descriptors on.
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
                    raise NotTaken("the warden died before it took the command") from error
                raise SpawnFailed(f"the warden cannot be given the streams of a process: {error.strerror}") from error

    def forget(self, job: int) -> None:
        """No keeper was forked for this job."""
        # Sending is a checkpoint, also when it fails: `attend` may have mourned the warden, and cleared the list, in between.
        self._kept.pop(job, None)

    async def discard(self, job: int) -> None:
        """Have the keeper of this job killed, and all that it kept."""
        async with self._sending:
            with contextlib.suppress(OSError):
                await self._control.send(FRAME.pack(Kind.DISCARD, job, 0))

    def condemn(self) -> None:
        """Kill the warden; `attend` sees to the rest."""
        self._process.kill()

    async def dismiss(self, limit: float) -> None:
        """Let the warden go, which it does when it has nothing left to keep; killed if it takes longer than `limit`."""
        self._dismissed = True
        for link in [*self._templates.values()]:
            self.forget_template(link)
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        with trio.move_on_after(limit):
            await self.over.wait()
        if not self.over.is_set():
            self.condemn()
            await self.over.wait()

    async def attend(self) -> None:
        """Listen to the warden until it ends, then make sure that nothing of it is left. Must not be cancelled."""
        while packet := await self._receive():
            kind, job, _ = FRAME.unpack(packet)
            assert kind == Kind.CLOSED
            process = self._kept.pop(job, None)
            if process is not None:
                process.clear()
        self.died.set()
        with trio.move_on_after(1):
            await self._process.wait()
        self.condemn()
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
        """End and reap what a dead warden left to us, its sub-reaper."""
        me = os.getpid()
        began = trio.current_time()
        # A zombie shows no environment any more: whoever was recognised alive is remembered until it is reaped.
        known: set[tuple[int, int]] = set()
        while relics := [
            child for child in descent.children(me) if (child.pid, child.started) in known or self._left_behind(child)
        ]:
            elapsed = trio.current_time() - began
            if elapsed > SWEEP_LIMIT:
                log.error("processes %s of a dead warden cannot be ended", [relic.pid for relic in relics])
                return
            keepers = {process.keeper_pid for process in self._kept.values()}
            for relic in relics:
                if not relic.alive:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(relic.pid, os.WNOHANG)  # noqa: ASYNC222 - WNOHANG does not wait
                elif relic.pid not in keepers or elapsed > KEEPER_PATIENCE:
                    condemned = [relic, *descent.descendants(relic.pid)]
                    known.update((one.pid, one.started) for one in condemned)
                    descent.kill_listed(condemned, me)
            await trio.sleep(SWEEP_PAUSE)

    def _left_behind(self, child: descent.Relative) -> bool:
        """Whether a child of the server came from this warden: of its session as keepers and templates are, of a command's, or so marked.

        A server that has claimed its children asks none of that.
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
