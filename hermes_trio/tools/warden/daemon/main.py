"""The warden: the parent of every keeper, in a session of its own.

It forks a keeper for each SPAWN, reaps keepers that have ended, and is itself a sub-reaper: when a keeper dies before
its job does, the job's processes become its children and are killed. It also forks the templates, whose keepers are its children
like any other and report themselves. It ends when its standard input, the control socket, ends:
then the server has ended or has dismissed it, and it waits for the last keeper and the last orphan.
"""

import _socket
import gc
import os
import select
import signal
import sys
import time

# Run as a file by an isolated interpreter, which does not look for modules beside the file.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import cgroup
import confine
import keeper
import prctl
import process_table
from template import Template
from wire import ABANDONED_GRACE, CGROUP_VARIABLE, FRAME, Kind, Spaces, Stage, receive

KEEPER_LIMIT = ABANDONED_GRACE + 2.0
"""Seconds that keepers have to end their jobs after the end of the control socket; then the warden kills both."""

GIVE_UP = 30.0
"""Seconds after the end of the control socket after which the warden ends even if SIGKILL has not ended every process."""

ORPHAN_PAUSE = 10
"""Milliseconds between two rounds against the orphans of a dead keeper."""


GROUP_ATTEMPTS = 500
"""The number of attempts to remove an ended control group: the kernel may still be removing its last process."""


class WardenDaemon:
    """Forks and reaps keepers and templates, and ends the jobs whose keeper died before them."""

    def __init__(self, control: _socket.socket) -> None:
        self._pid = os.getpid()
        self._control = control
        self._keepers: dict[int, int] = {}
        self._orphaned_jobs: set[int] = set()
        self._templates: set[int] = set()
        self._to_kill: set[int] = set()
        """Jobs to kill as soon as their keeper has reported itself."""
        self._group = os.environ.get(CGROUP_VARIABLE, "")
        # The groups of an earlier warden have no keeper any more.
        self._ended: dict[str, int] = dict.fromkeys(cgroup.jobs(self._group) if self._group else (), 0)
        """The control groups of ended keepers that are not removed yet, with the number of attempts."""
        self._closed_at: float | None = None
        # Only this process holds the writing end: keepers read end-of-file when it dies, however it dies.
        self._life, self._life_writer = os.pipe2(os.O_CLOEXEC)
        self._claims, self._claim = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._claims, False)
        self._wake = keeper.open_wake()

    def run(self) -> None:
        """Serve until the control socket has ended and no keeper, template or orphan is left."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(self._claims, select.POLLIN)
        poll.register(self._control.fileno(), select.POLLIN)
        while True:
            self._reap()
            if self._ended:
                self._ended = {
                    name: tried + 1
                    for name, tried in self._ended.items()
                    if tried < GROUP_ATTEMPTS and not cgroup.end(self._group, name)
                }
            self._kill_orphans()
            if self._closed_at is not None and self._finished(time.monotonic() - self._closed_at):
                return
            for descriptor, _ in poll.poll(ORPHAN_PAUSE if self._busy else None):
                if descriptor == self._wake:
                    keeper.drain(self._wake)
                elif descriptor == self._claims:
                    self._hear_claims()
                elif not self._serve():
                    poll.unregister(self._control.fileno())
                    self._closed_at = time.monotonic()
                    for pid in self._templates:
                        os.kill(pid, signal.SIGKILL)

    @property
    def _busy(self) -> bool:
        """Return whether the loop has to run again without an event."""
        return bool(self._orphaned_jobs or self._ended or self._closed_at is not None)

    def _serve(self) -> bool:
        """Handle one packet. Return False at the end of the control socket."""
        packet, descriptors = receive(self._control)
        if not packet:
            return False
        kind, job, second = FRAME.unpack(packet)
        if kind == Kind.SPAWN:
            self._fork(job, Spaces(second), descriptors)
        elif kind == Kind.DISCARD:
            found = [pid for pid, kept in self._keepers.items() if kept == job]
            for pid in found:
                os.kill(pid, signal.SIGKILL)
            if not found:
                self._to_kill.add(job)
        elif kind == Kind.TEMPLATE:
            self._fork_template(Spaces(job), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def _fork(self, job: int, spaces: Spaces, descriptors: list[int]) -> None:
        link, *streams = descriptors
        uid, gid = os.geteuid(), os.getegid()
        try:
            pid = confine.fork(spaces) if spaces else os.fork()
        except OSError as error:
            stage = Stage.CONFINE if spaces else Stage.FORK
            os.write(link, FRAME.pack(Kind.FAILED, stage, error.errno or 0) + FRAME.pack(Kind.EMPTY, 0, 0))
            self._tell(Kind.CLOSED, job)
            return
        if pid:
            self._keepers[pid] = job
            return
        status = 70
        try:
            os.close(self._life_writer)
            self._control.close()
            os.close(self._wake)
            confine.settle(spaces, uid, gid)
            keeper.keep(link, self._life, streams)
            status = 0
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            os._exit(status)

    def _fork_template(self, spaces: Spaces, descriptors: list[int]) -> None:
        """Fork a template. If that fails, send the reason over its control socket and close it."""
        own, description = descriptors
        warden = self._pid
        try:
            pid = confine.fork(spaces)
        except OSError as error:
            os.write(own, FRAME.pack(Kind.FAILED, Stage.CONFINE, error.errno or 0))
            return
        if pid:
            self._templates.add(pid)
            return
        status = 70
        try:
            os.close(self._life_writer)
            os.close(self._wake)
            os.close(self._claims)
            self._control.close()
            with open(description, "rb", closefd=False) as file:
                described = file.read()
            Template(own, self._life, self._claim).run(described, spaces, warden)
            status = 0
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            os._exit(status)

    def _hear_claims(self) -> None:
        """Record the keepers that templates have forked."""
        while True:
            try:
                claims = os.read(self._claims, FRAME.size * 64)
            except BlockingIOError:
                return
            for at in range(0, len(claims), FRAME.size):
                _, job, pid = FRAME.unpack_from(claims, at)
                if pid == 0:
                    self._tell(Kind.CLOSED, job)
                    continue
                self._keepers[pid] = job
                if job in self._to_kill:
                    self._to_kill.discard(job)
                    os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
                if pid == 0:
                    return
                if os.WIFSTOPPED(status):
                    # A command may stop its keeper with SIGSTOP: continue it.
                    os.kill(pid, signal.SIGCONT)
                    continue
                self._templates.discard(pid)
                if pid not in self._keepers:
                    # Its reports are still to be read.
                    self._hear_claims()
                job = self._keepers.pop(pid, None)
                if self._group and job is not None:
                    self._ended[f"{cgroup.PREFIX}{pid}"] = 0
                if job is not None and status == 0:
                    self._tell(Kind.CLOSED, job)
                elif job is not None:
                    self._orphaned_jobs.add(job)
        except ChildProcessError:
            return

    def _kill_orphans(self) -> None:
        """Kill the orphans of dead keepers. Their job cannot be determined, so the jobs are closed together."""
        if not self._orphaned_jobs and self._closed_at is None:
            return
        if unknown := self._unknown_children():
            fresh = {child.pid for child in unknown if child.session == self._pid}
            spared = fresh.union(self._keepers, self._templates)
            process_table.kill_listed(process_table.descendants(self._pid, without=spared), self._pid)
            return
        for job in self._orphaned_jobs:
            self._tell(Kind.CLOSED, job)
        self._orphaned_jobs.clear()

    def _unknown_children(self) -> list[process_table.ProcessEntry]:
        """Return the children that are no known keepers or templates: orphans of commands, in other sessions, and keepers not yet reported."""
        return [
            child
            for child in process_table.children(self._pid)
            if child.pid not in self._keepers and child.pid not in self._templates
        ]

    def _finished(self, elapsed: float) -> bool:
        unknown = self._unknown_children()
        if elapsed > KEEPER_LIMIT:
            for pid in (*self._keepers, *(child.pid for child in unknown)):
                os.kill(pid, signal.SIGKILL)
        return not (self._keepers or self._templates or unknown) or elapsed > GIVE_UP

    def _tell(self, kind: Kind, job: int) -> None:
        try:
            self._control.send(FRAME.pack(kind, job, 0))
        except OSError:
            # The server has ended; the next read returns its end of file.
            return


def main() -> None:
    """Take the control socket from standard input, ignore signals, reduce the process, and serve."""
    # No descriptor that arrives later may become a standard one, even if the server runs without them.
    while os.open(os.devnull, os.O_RDWR) <= 2:
        pass
    control = _socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    prctl.set_name("hermes-warden")
    prctl.become_subreaper()
    prctl.set_dumpable(False)
    for signum in keeper.IGNORED_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # Collections would copy pages that keepers share, and this process makes no reference cycles.
    gc.disable()
    gc.freeze()
    WardenDaemon(control).run()


if __name__ == "__main__":
    main()
