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
import socket
import subprocess
import sys
from pathlib import Path
from typing import final

import attrs
import trio

from hermes_trio.tools.warden.daemon import descent, oom
from hermes_trio.tools.warden.daemon.wire import ABANDONED_GRACE, CGROUP_VARIABLE, FRAME, TOKEN_VARIABLE, Kind
from hermes_trio.tools.warden.errors import NotTaken, SpawnFailed
from hermes_trio.tools.warden.process import KeptProcess

log = logging.getLogger(__name__)

PROGRAM = Path(__file__).parent / "daemon" / "main.py"

KEEPER_PATIENCE = ABANDONED_GRACE + 2.0
"""Seconds that keepers have for their jobs after the warden's death; then the server kills them and takes over."""

SWEEP_LIMIT = 9.0
"""Seconds after which the server stops trying to end what a dead warden left: it has no power over that."""

SWEEP_PAUSE = 0.01

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


@final
@attrs.define(eq=False)
class Custody:
    """A running warden process and the jobs that it was given."""

    token: str
    _process: trio.Process
    _control: trio.socket.SocketType
    _kept: dict[int, KeptProcess] = attrs.field(init=False, factory=dict[int, KeptProcess])
    _sending: trio.Lock = attrs.field(init=False, factory=trio.Lock)
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

    async def hand_over(self, process: KeptProcess, descriptors: list[int]) -> None:
        """Have a keeper forked for this process. Cancelling sends nothing.

        Raises `NotTaken` if the warden is gone, and `SpawnFailed` if the kernel does not pass the descriptors on.
        """
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        async with self._sending:
            self._kept[process.job] = process
            try:
                await self._control.sendmsg([FRAME.pack(Kind.SPAWN, process.job, process.spec.spaces)], [rights])
            except (OSError, trio.ClosedResourceError) as error:
                self._forget(process.job)
                if self.died.is_set() or not isinstance(error, OSError) or isinstance(error, ConnectionError):
                    raise NotTaken("the warden died before it took the command") from error
                raise SpawnFailed(f"the warden cannot be given the streams of a process: {error.strerror}") from error
            except trio.Cancelled:
                self._forget(process.job)
                raise

    def _forget(self, job: int) -> None:
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
                    descent.kill_all(condemned, me)
            await trio.sleep(SWEEP_PAUSE)

    def _left_behind(self, child: descent.Relative) -> bool:
        """Whether a child of the server came from this warden: its keeper, of a command's session, or so marked.

        A server that has claimed its children asks none of that.
        """
        if _owns_every_child:
            return child.pid not in _wardens
        for process in self._kept.values():
            if child.pid == process.keeper_pid or (process.pid and child.session == process.pid):
                return True
        if not child.alive:
            own = oom.score(os.getpid())
            return own is not None and oom.score(child.pid) == oom.command_score(own) != own
        try:
            environment = Path(f"/proc/{child.pid}/environ").read_bytes()
        except OSError:
            return False
        return f"{TOKEN_VARIABLE}={self.token}".encode() in environment.split(b"\0")
