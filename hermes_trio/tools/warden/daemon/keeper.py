"""Keeps one job: the command and all its descendants.

A keeper is the sub-reaper of the command that it starts, so a descendant that forks twice, leaves its session or
loses its parent is still its child, and "no children left" means that the whole job has ended. It reports to the server over
its link when the command starts, when it exits, and when no process of the job is left; it kills the job on an order, and
also when the server or the warden dies. It ends when the job is empty.
"""

import errno
import fcntl
import os
import select
import signal
import struct
import termios
import time

import cgroup
import confine
import oom
import prctl
import process_table
from wire import ABANDONED_GRACE, FIRST_INHERITED, FRAME, Confinement, Kind, Means, Plan, Stage, Streams

SEARCH_TIME, SEARCH_PAUSE = 0.2, 0.02
"""Duration and interval, in seconds, of the search for processes after an order to end: a pass may have missed some
that were being forked or re-parented. Later the tree is read only when a child has ended."""

KILL_LIMIT = 3.0
"""Seconds of SIGKILL after which survivors are reported: they may not be signalled, or are stuck in the kernel."""

GIVE_UP = 30.0
"""Seconds of SIGKILL after which a keeper without a server ends."""

FIRST_PAUSE, LAST_PAUSE = 0.002, 0.25
"""The first and the longest pause between two rounds of SIGKILL, in seconds; it is doubled each time."""

COUNT_PAUSE = 1.0
"""Seconds between two counts of a job's processes, if they are limited."""

IGNORED_SIGNALS = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGPIPE,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
)
"""Signals that the warden and keepers ignore: a supervisor that signals the whole group ends the server, which ends them."""

_RESET_FOR_COMMAND = (*IGNORED_SIGNALS, signal.SIGCHLD, signal.SIGXFSZ)
_REPORT = struct.Struct("!ii")


def open_wake() -> int:
    """Return a descriptor that becomes readable at every SIGCHLD of this process."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    inherited = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if inherited != -1:
        os.close(inherited)
    # Only a signal with a Python handler is written to the descriptor.
    signal.signal(signal.SIGCHLD, _noted)
    return reader


def _noted(_signum: int, _frame: object) -> None:
    """Do nothing: the signal was written to the wake descriptor."""


def drain(wake: int) -> None:
    """Read and discard everything in a wake descriptor."""
    try:
        while os.read(wake, 4096):
            pass
    except BlockingIOError:
        return


class Inheritance:
    """What a keeper inherits from the template that forked it."""

    __slots__ = ("claims", "group", "job", "prepared")

    def __init__(self, job: int, claims: int, group: str, prepared: confine.Prepared) -> None:
        self.job = job
        self.claims = claims
        """The pipe over which the keeper reports its job to the warden."""
        self.group = group
        """The path of the delegated control group, as the keeper sees it; empty for none."""
        self.prepared = prepared


def keep(link: int, life: int, streams: list[int], origin: Inheritance | None = None) -> None:
    """Run one job to its end. `life` reads end of file when the warden is dead; `streams` are the command's."""
    prctl.set_name("hermes-keeper")
    prctl.become_subreaper()
    keeper = Keeper(link, life, open_wake())
    # The ids that the server and the warden know: those inside a PID namespace differ.
    outside = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    own = _own_number(outside)
    if origin is not None:
        # Before the HELLO to the server, so that the warden knows the job when the server refers to it.
        os.write(origin.claims, FRAME.pack(Kind.CLAIMED, origin.job, own))
        os.close(origin.claims)
    keeper.tell(Kind.HELLO, own)
    plan = _read_plan(link)
    if plan is None:
        keeper.tell(Kind.EMPTY)
        return
    entrance, exit_ = -1, -1
    try:
        entrance, exit_ = _confine(plan.confinement, own, origin, streams)
    except OSError as error:
        pid, stage, number = 0, int(Stage.CONFINE), error.errno or 0
    else:
        prepared = None if origin is None else origin.prepared
        pid, stage, number = _start(plan, streams, (outside, entrance), prepared)
    if entrance >= 0:
        os.close(entrance)
    os.close(outside)
    for descriptor in streams:
        os.close(descriptor)
    if pid == 0:
        keeper.tell(Kind.FAILED, stage, number)
        keeper.tell(Kind.EMPTY)
        return
    keeper.tell(Kind.STARTED, number)
    keeper.group = exit_
    keeper.run(pid, 0 if plan.confinement is None else plan.confinement.processes)


def _confine(plan: Confinement | None, number: int, origin: Inheritance | None, streams: list[int]) -> tuple[int, int]:
    """Set up the namespaces and file systems of the command. Return two descriptors of the job's control group, -1 without one."""
    if (plan is not None and plan.prepared) != (origin is not None):
        raise OSError(errno.EINVAL, "a plan for a keeper of a template reached another keeper, or the reverse")
    group = (-1, -1)
    if plan is None:
        return group
    if plan.cgroup:
        # The warden, which knows the keeper by the same id, removes it.
        folder = os.fsdecode(plan.cgroup[0]) if origin is None else origin.group
        group = cgroup.make(folder, f"{cgroup.PREFIX}{number}", processes=plan.tasks, memory=plan.memory_bytes)
    if origin is None:
        confine.arrange(plan)
    confine.complete(plan, streams[0])
    return group


def _own_number(proc: int) -> int:
    return int(os.readlink("self", dir_fd=proc))


class Keeper:
    """Supervises a job after its command was started."""

    def __init__(self, link: int, life: int, wake: int) -> None:
        self._pid = os.getpid()
        self._link = link
        self._life = life
        self._wake = wake
        self._command = 0
        self._most = 0
        self._count_at = 0.0
        self._heard = b""
        self._served = True
        self._means = Means.NONE
        self._told: set[tuple[int, int]] = set()
        self._search_ends = 0.0
        self._grace_ends: float | None = None
        self._killing_since: float | None = None
        self._pause = FIRST_PAUSE
        self._survivors_told = False
        self.group = -1
        """The descriptor that kills the job's control group; -1 without one."""

    def tell(self, kind: Kind, first: int = 0, second: int = 0) -> None:
        """Send a frame to the server; a failure is recorded, not raised."""
        try:
            os.write(self._link, FRAME.pack(kind, first, second))
        except OSError:
            self._served = False

    def run(self, command: int, most: int = 0) -> None:
        """Reap, obey orders and kill until the job is empty. `most` is the limit of its processes; 0 for none."""
        poll = select.poll()
        for descriptor in (self._link, self._life, self._wake):
            poll.register(descriptor, select.POLLIN)
        self._command = command
        self._most = most
        self._count_at = time.monotonic() + COUNT_PAUSE
        while self._reap():
            self._count()
            if not self._press():
                return
            for descriptor, _ in poll.poll(self._poll_timeout()):
                if descriptor == self._wake:
                    drain(self._wake)
                elif descriptor == self._life:
                    poll.unregister(self._life)
                    self.tell(Kind.ORPHANED)
                    self._end(ABANDONED_GRACE)
                elif not self._listen():
                    poll.unregister(self._link)
                    self._served = False
                    self._end(ABANDONED_GRACE)
        self.tell(Kind.EMPTY, self._means)

    def _reap(self) -> bool:
        """Reap every ended child. Return False if no child is left."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if pid == self._command:
                    # The id may be reused by another descendant.
                    self._command = 0
                    if os.WIFSIGNALED(status):
                        self.tell(Kind.EXITED, -1, os.WTERMSIG(status))
                    else:
                        self.tell(Kind.EXITED, os.WEXITSTATUS(status), 0)
        except ChildProcessError:
            return False

    def _count(self) -> None:
        """Kill a job that has more processes than its limit."""
        now = time.monotonic()
        if not self._most or self._grace_ends is not None or now < self._count_at:
            return
        self._count_at = now + COUNT_PAUSE
        found = len(process_table.descendants(self._pid))
        if found > self._most:
            self.tell(Kind.CROWDED, found, self._most)
            self._end(0)

    def _listen(self) -> bool:
        """Obey the orders of the server. Return False if the server has ended."""
        try:
            received = os.read(self._link, 4096)
        except OSError:
            received = b""
        self._heard += received
        while len(self._heard) >= FRAME.size:
            kind, milliseconds, _ = FRAME.unpack_from(self._heard)
            self._heard = self._heard[FRAME.size :]
            if kind == Kind.KILL:
                self._end(milliseconds / 1000)
        return bool(received)

    def _end(self, grace: float) -> None:
        """Begin to end the job. A second order can only shorten the grace of the first."""
        ends = time.monotonic() + grace
        if self._grace_ends is None:
            self._grace_ends = ends
            self._search_ends = time.monotonic() + SEARCH_TIME
        else:
            self._grace_ends = min(self._grace_ends, ends)
        self._survivors_told = False

    def _terminate(self) -> None:
        """Send SIGTERM to every process that has not got it.

        Leaves out the children that a living process started after its SIGTERM, in order to clean up.
        """
        found = [one for one in process_table.descendants(self._pid) if one.alive]
        informed = {one.pid for one in found if (one.pid, one.started) in self._told}
        fresh = [one for one in found if one.pid not in informed and one.parent not in informed]
        for one in fresh:
            self._means = max(self._means, Means.SIGTERM)
            self._told.add((one.pid, one.started))
            process_table.send(one, signal.SIGTERM)
            # A stopped process handles SIGTERM only after SIGCONT.
            process_table.send(one, signal.SIGCONT)

    def _press(self) -> bool:
        """Send what is due: nothing, SIGTERM, or a round of SIGKILL. Return False if the keeper should give up."""
        now = time.monotonic()
        if self._grace_ends is None:
            return True
        if now < self._grace_ends:
            self._terminate()
            return True
        if self._killing_since is None:
            self._killing_since = now
        cgroup.kill(self.group)
        alive = process_table.kill_listed(process_table.descendants(self._pid), self._pid)
        if alive:
            self._means = Means.SIGKILL
        killing = now - self._killing_since
        if killing > KILL_LIMIT and not self._survivors_told:
            self._survivors_told = True
            self.tell(Kind.SURVIVORS, alive)
        return self._served or killing < GIVE_UP

    def _poll_timeout(self) -> float | None:
        """Return the time-out of the next poll in milliseconds; None for no time-out."""
        now = time.monotonic()
        if self._grace_ends is None:
            return max(0.0, self._count_at - now) * 1000 + 1 if self._most else None
        if self._killing_since is None:
            pause = max(0.0, self._grace_ends - now) + 0.001
            return 1000 * (min(pause, SEARCH_PAUSE) if now < self._search_ends else pause)
        pause, self._pause = self._pause, min(self._pause * 2, LAST_PAUSE)
        return pause * 1000


def _read_plan(link: int) -> Plan | None:
    """Read the plan. Return None if the link ended before it was complete; then nothing is started."""
    header = _read_exactly(link, Plan.HEADER.size)
    if header is None:
        return None
    body = _read_exactly(link, Plan.HEADER.unpack(header)[0])
    return None if body is None else Plan.decode(header, body)


def _read_exactly(link: int, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        try:
            chunk = os.read(link, size - len(data))
        except OSError:
            return None
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def _start(
    plan: Plan, streams: list[int], ways: tuple[int, int], prepared: confine.Prepared | None
) -> tuple[int, int, int]:
    """Start the command and wait until it runs. Return its pid and its pid outside, or 0 with the stage and errno of the failure.

    `ways` are the descriptors of /proc outside and of the job's control group.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    keeper = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        os.close(reader)
        os.close(writer)
        return 0, Stage.FORK, error.errno or 0
    if pid == 0:
        _become_command(plan, streams, writer, keeper, ways, prepared)
    os.close(writer)
    told = b""
    while part := os.read(reader, 64):
        told += part
    os.close(reader)
    reports = [_REPORT.unpack_from(told, at) for at in range(0, len(told), _REPORT.size)]
    if len(reports) == 1:
        return pid, 0, reports[0][1]
    os.waitpid(pid, 0)
    return (0, *reports[-1]) if reports else (0, Stage.SETUP, 0)


def _become_command(
    plan: Plan, streams: list[int], report: int, keeper: int, ways: tuple[int, int], prepared: confine.Prepared | None
) -> None:
    stage = Stage.SETUP
    outside, entrance = ways
    try:
        os.setsid()
        # The exec does so anyway; before it the kernel would refuse writes to its own files below /proc.
        prctl.set_dumpable(True)
        os.write(report, _REPORT.pack(0, _own_number(outside)))
        _take_streams(plan.streams, streams)
        oom.prefer_own_process()
        for signum in _RESET_FOR_COMMAND:
            signal.signal(signum, signal.SIG_DFL)
        if plan.confinement is not None:
            stage = Stage.CONFINE
            if entrance >= 0:
                cgroup.enter(entrance)
            confine.restrict(plan.confinement, prepared)
        stage = Stage.SETUP
        # After everything that changes credentials: the kernel forgets it then.
        prctl.die_with_parent(signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(127)
        stage = Stage.CHDIR
        os.chdir(plan.cwd)
        stage = Stage.EXEC
        os.execvpe(plan.argv[0], plan.argv, plan.env)
    except OSError as error:
        os.write(report, _REPORT.pack(stage, error.errno or 0))
    finally:
        os._exit(127)


def _take_streams(kinds: Streams, streams: list[int]) -> None:
    rest = iter(streams)
    if kinds & Streams.TERMINAL:
        stdin = stdout = stderr = next(rest)
        fcntl.ioctl(stdin, termios.TIOCSCTTY, 0)
    else:
        stdin = next(rest) if kinds & Streams.STDIN else os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        stdout = next(rest)
        stderr = next(rest) if kinds & Streams.STDERR else stdout
    for target, source in enumerate((stdin, stdout, stderr)):
        os.dup2(source, target)
    for target, source in enumerate(rest, FIRST_INHERITED):
        os.dup2(source, target)
