"""The scope that owns every process: no process is started outside it, and none outlives it.

`open_warden` starts a warden process when the first command needs one, and another when that one dies. Leaving the
scope, for whatever reason, kills every process in parallel and waits for the last; `Warden.receipt` has the result.
"""

import contextlib
import contextvars
import itertools
import socket
import sys
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator
from typing import final

import attrs
import msgspec
import trio

from hermes_trio.tools.warden.custody import Custody
from hermes_trio.tools.warden.daemon import prctl
from hermes_trio.tools.warden.daemon.wire import Spaces
from hermes_trio.tools.warden.errors import NotTaken, SpawnFailed, TooManyProcesses, UnsupportedPlatform, WardenClosed
from hermes_trio.tools.warden.process import KeptProcess, explain_failure
from hermes_trio.tools.warden.spec import KillReport, ProcessSpec, Stdin
from hermes_trio.tools.warden.streams import open_streams

CLOSE_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL for jobs that still run when the scope ends."""

DISMISS_LIMIT = 5.0
"""Seconds that a warden without jobs may take to end."""

ABANDON_LIMIT = 20.0
"""Seconds that a failed or cancelled `spawn` may wait for the end of the job that it had begun."""

DEATH_LIMIT = 2.0
"""Seconds to wait for the death of a warden that did not take a command."""

ATTEMPTS = 3
"""The number of wardens that may die before they take a command; then the command is refused."""


class WardenReceipt(msgspec.Struct, frozen=True):
    """The result of leaving the scope. `survivors` is the number of processes that survived SIGKILL."""

    killed: int
    survivors: int


@final
@attrs.define(eq=False)
class Warden:
    """Starts processes and owns all of them. Made by `open_warden` only."""

    max_processes: int
    _nursery: trio.Nursery = attrs.field(repr=False)
    """The nursery of the attendants. It is shielded, so that they observe the end of every process."""
    cgroup: str = ""
    """The delegated control group of the jobs, if there is one."""
    _context: contextvars.Context = attrs.field(init=False, factory=contextvars.copy_context, repr=False)
    _placing: set[int] = attrs.field(init=False, factory=set[int], repr=False)
    """Jobs that a `spawn` is starting. They count against the limit, with or without a process."""
    _kept: dict[int, KeptProcess] = attrs.field(init=False, factory=dict[int, KeptProcess], repr=False)
    _handles: weakref.WeakSet[KeptProcess] = attrs.field(init=False, factory=weakref.WeakSet[KeptProcess], repr=False)
    """The processes whose streams the end of the scope closes, unless their owner has."""
    _custody: Custody | None = attrs.field(init=False, default=None, repr=False)
    _starting: trio.Lock = attrs.field(init=False, factory=trio.Lock, repr=False)
    _numbers: Iterator[int] = attrs.field(init=False, factory=itertools.count, repr=False)
    _closing: trio.Event = attrs.field(init=False, factory=trio.Event, repr=False)
    receipt: WardenReceipt | None = attrs.field(init=False, default=None)
    """Set when the scope has ended."""

    @property
    def processes(self) -> tuple[KeptProcess, ...]:
        """Return the jobs that are not empty yet."""
        return tuple(process for process in self._kept.values() if not process.empty)

    @property
    def running(self) -> int:
        """Return the number of jobs that are not empty yet, including those that are being started."""
        return len(self._placing.union(process.job for process in self.processes))

    @property
    def warden_pid(self) -> int | None:
        """Return the process id of the warden; None if none is running."""
        return None if self._custody is None or self._custody.died.is_set() else self._custody.pid

    async def spawn(self, spec: ProcessSpec) -> KeptProcess:
        """Start a command and return once it runs (its `exec` has happened).

        Raises `SpawnFailed`, `TooManyProcesses` or `WardenClosed`; then nothing runs. Cancelled before it returns, it
        ends what it may have started and raises `Cancelled` when that has ended (bounded). The result belongs to the
        caller.
        """
        with self._place() as job:
            for _ in range(ATTEMPTS - 1):
                with contextlib.suppress(NotTaken):
                    return await self._attempt(job, spec)
            return await self._attempt(job, spec)

    @contextlib.contextmanager
    def _place(self) -> Generator[int]:
        if self._closing.is_set():
            raise WardenClosed("the warden is closing: no process can be started any more")
        if self.running >= self.max_processes:
            raise TooManyProcesses(self.max_processes)
        job = next(self._numbers)
        self._placing.add(job)
        try:
            yield job
        finally:
            self._placing.discard(job)

    async def _attempt(self, job: int, spec: ProcessSpec) -> KeptProcess:
        custody = await self._ready_custody()
        template = None
        if spec.spaces & Spaces.MOUNT:
            assert spec.confinement is not None
            spec.confinement.terminal = spec.stdin is Stdin.PTY
            common, own = spec.confinement.divided()
            template = await custody.template(common)
            plan = spec.plan(custody.token, own).encode()
        else:
            plan = spec.plan(custody.token, spec.confinement).encode()
        with contextlib.ExitStack() as undo:
            try:
                theirs = undo.enter_context(contextlib.ExitStack())
                ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                theirs.callback(other.close)
                link = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
                undo.callback(link.socket.close)
                streams, descriptors = theirs.enter_context(open_streams(spec))
            except OSError as error:
                raise SpawnFailed(f"no descriptors for the streams of a process: {error.strerror}") from error
            undo.pop_all()
        process = KeptProcess(spec, job, custody, streams, link)
        self._kept[job] = process
        self._handles.add(process)
        self._start_attendant(self._wait_for_end, process)
        try:
            with theirs:
                await custody.hand_over(process, [other.fileno(), *descriptors, *spec.inherited], template)
            await process.launch(plan)
        except NotTaken as error:
            with trio.move_on_after(ABANDON_LIMIT, shield=True):
                await process.abandon()
                if template is not None:
                    custody.forget(job)
                    custody.forget_template(template)
                if template is None or custody.ended:
                    await self._confirm_death(custody)
            if template is not None and (refusal := template.refusal()):
                raise explain_failure(spec, *refusal) from error
            raise
        except BaseException:
            with trio.move_on_after(ABANDON_LIMIT, shield=True):
                await process.abandon()
            raise
        return process

    async def _confirm_death(self, custody: Custody) -> None:
        """Wait for the warden's death after it did not take a command, so that another is tried. Raises `SpawnFailed` if it lives."""
        with trio.move_on_after(DEATH_LIMIT):
            await custody.died.wait()
        if not custody.died.is_set():
            raise SpawnFailed("the keeper ended before the command began; the warden still runs")

    async def _ready_custody(self) -> Custody:
        async with self._starting:
            if self._closing.is_set():
                raise WardenClosed("the warden is closing: no process can be started any more")
            if self._custody is None or self._custody.died.is_set():
                with trio.CancelScope(shield=True):
                    self._custody = await Custody.begin(self.cgroup)
                    self._start_attendant(self._custody.attend)
            assert self._custody is not None
            return self._custody

    def _start_attendant(self, attendant: Callable[..., Awaitable[object]], *arguments: object) -> None:
        # A task inherits the context of its creator: attendants must not inherit that of a turn or a request.
        self._context.copy().run(self._nursery.start_soon, attendant, *arguments)

    async def _wait_for_end(self, process: KeptProcess) -> None:
        await process.attend()
        if self._kept.get(process.job) is process:
            del self._kept[process.job]

    async def _close(self) -> None:
        reports: list[KillReport] = []

        async def end(process: KeptProcess) -> None:
            reports.append(await process.kill(CLOSE_GRACE))

        async with trio.open_nursery() as nursery:
            for process in self.processes:
                nursery.start_soon(end, process)
        async with self._starting:
            if self._custody is not None:
                await self._custody.dismiss(DISMISS_LIMIT)
        for process in list(self._handles):
            await process.close_streams()
        self.receipt = WardenReceipt(len(reports), sum(report.survivors for report in reports))


class _WardenTask:
    """Runs the attendants in a shielded task, so that a cancelled scope still observes the end of every process."""

    def __init__(self, max_processes: int, cgroup: str) -> None:
        self._max_processes = max_processes
        self._cgroup = cgroup
        self._opened = trio.Event()
        self._warden: Warden | None = None

    async def keep_open(self) -> None:
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                self._warden = Warden(self._max_processes, nursery, self._cgroup)
                self._opened.set()
                await self._warden._closing.wait()
                await self._warden._close()

    async def opened(self) -> Warden:
        with trio.CancelScope(shield=True):
            await self._opened.wait()
        assert self._warden is not None
        return self._warden


@contextlib.asynccontextmanager
async def open_warden(*, max_processes: int = 256, cgroup: str = "") -> AsyncGenerator[Warden]:
    """Open the scope of all processes, with at most `max_processes` jobs at a time. No process outlives it.

    `cgroup` is a delegated control group, prepared for jobs; a job whose plan names it gets its own group below it.
    Leaving it, cancelled or not, kills every job in parallel (SIGTERM, 2 seconds, SIGKILL), waits for the end of the
    last process and of the warden itself, and sets `Warden.receipt`; this is not interrupted by cancellation, but
    bounded. The server is a sub-reaper while such a scope is open. Raises `UnsupportedPlatform` on systems other than Linux.
    """
    if sys.platform != "linux":
        raise UnsupportedPlatform(f"processes need Linux sub-reapers, and this is {sys.platform}")
    task = _WardenTask(max_processes, cgroup)
    try:
        with _subreaper():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(task.keep_open, name="warden")
                warden = await task.opened()
                try:
                    yield warden
                finally:
                    warden._closing.set()
    except BaseExceptionGroup as group:
        # The nursery is an implementation detail: an exception of the body is raised without its group.
        raised = _unwrapped(group)
        raise raised from raised.__cause__


def _unwrapped(group: BaseExceptionGroup[BaseException]) -> BaseException:
    return group.exceptions[0] if len(group.exceptions) == 1 else group


_subreaper_scopes = 0
"""The number of open scopes. The sub-reaper attribute belongs to the whole process: the last scope clears it."""


@contextlib.contextmanager
def _subreaper() -> Generator[None]:
    global _subreaper_scopes
    if _subreaper_scopes == 0 and prctl.is_subreaper():
        # Other code has set the attribute: count it as a scope that never ends.
        _subreaper_scopes += 1
    _subreaper_scopes += 1
    prctl.become_subreaper()
    try:
        yield
    finally:
        _subreaper_scopes -= 1
        if _subreaper_scopes == 0:
            prctl.become_subreaper(False)
