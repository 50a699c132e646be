"""A template: a process that does the common part of a confinement once, and forks the keepers of all commands with it.

It lives in a mount namespace that shows what the commands will see, and has given up what they will not have. A keeper that it forks has a copy of
that namespace, in namespaces of its own, and is a child of the warden like every other keeper; the template itself knows no job. The server, which
speaks to it over a control socket of its own, decides whether a template still fits the files that it was made of, and closes that socket if not.
"""

import _socket
import fcntl
import os
import select
import signal
import sys

import confine
import keeper
import prctl
from wire import FRAME, Kind, Spaces, Stage, mark, read_description, receive

FIRST_PIN = 64
"""The first number of the descriptors that hold files: above all others that a template has, so that a keeper closes them at once."""

IDLE = 60.0
"""Seconds without a command after which a template ends: its namespace keeps file systems in use that were unmounted outside."""


class _Outdated(Exception):
    """Raised if the files differ from those that the server has described."""


class Template:
    """Runs a process as a template until its control socket ends. `life` and `claims` are for its keepers."""

    def __init__(self, control: int, life: int, claims: int) -> None:
        self._control = _socket.socket(fileno=control)
        self._life = life
        self._claims = claims
        self._pins: list[int] = []
        self._group = ""
        self._prepared: confine.Prepared | None = None
        self._uid, self._gid = os.geteuid(), os.getegid()

    def run(self, description: bytes, spaces: Spaces, warden: int) -> None:
        """Prepare, then fork a keeper for each SPAWN. A step that the kernel refuses is reported over the control socket.

        If the files have changed it ends without a report: the server reads them again and makes another template.
        """
        prctl.set_name("hermes-template")
        try:
            confine.settle(spaces, self._uid, self._gid)
            self._prepare(description)
        except _Outdated:
            return
        except OSError as error:
            self._control.send(FRAME.pack(Kind.FAILED, Stage.CONFINE, error.errno or 0))
            return
        # After everything that changes credentials: the kernel forgets it then.
        prctl.die_with_parent(signal.SIGKILL)
        if os.getppid() != warden:
            return
        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLIN)
        while poll.poll(IDLE * 1000) and self._serve():
            pass

    def _prepare(self, description: bytes) -> None:
        plan, marks = read_description(description)
        for path, seen in zip(plan.paths, marks, strict=True):
            # Held open, so that no other file gets the inode number that the server compares.
            try:
                pin = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                pin = -1
            if pin >= 0:
                self._pins.append(fcntl.fcntl(pin, fcntl.F_DUPFD_CLOEXEC, FIRST_PIN))
                os.close(pin)
            if mark(path) != seen:
                raise _Outdated
        if plan.cgroup:
            # Commands do not see it, and from here on neither does this process.
            self._group = f"/proc/self/fd/{os.open(plan.cgroup[0], os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)}"
        confine.arrange(plan)
        self._prepared = confine.prepare(plan)

    def _serve(self) -> bool:
        """Handle one packet. Return False at the end of the control socket."""
        packet, descriptors = receive(self._control)
        if not packet:
            return False
        kind, job, second = FRAME.unpack(packet)
        assert kind == Kind.SPAWN
        link, *streams = descriptors
        try:
            pid = confine.fork(Spaces(second), sibling=True)
        except OSError as error:
            os.write(link, FRAME.pack(Kind.FAILED, Stage.CONFINE, error.errno or 0) + FRAME.pack(Kind.EMPTY, 0, 0))
            os.write(self._claims, FRAME.pack(Kind.CLAIMED, job, 0))
        else:
            if pid == 0:
                self._keep(job, Spaces(second), link, streams)
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def _keep(self, job: int, spaces: Spaces, link: int, streams: list[int]) -> None:
        """Run a forked keeper to its end."""
        status = 70
        try:
            self._control.close()
            if self._pins:
                os.closerange(self._pins[0], self._pins[-1] + 1)
            confine.settle(spaces, self._uid, self._gid)
            assert self._prepared is not None
            keeper.keep(link, self._life, streams, keeper.Inheritance(job, self._claims, self._group, self._prepared))
            status = 0
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            os._exit(status)
