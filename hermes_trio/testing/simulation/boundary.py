"""The boundary of a simulated process: time, randomness, the network and processes are those of the world; everything else is refused.

`Boundary` is entered around one `trio.run`. While it is entered, the clocks of `time` show the world's time, every source of random bytes draws from the
seed, Trio's scheduler shuffles each batch by the seed, connections and processes are the world's, and an audit hook refuses threads, processes and
sockets of the machine. Leaving it restores everything. Only one can be entered at a time, because its patches affect the whole process.

A module that a world imports first stays in the process, so it is loaded outside of the world: it draws nothing from the seed, and keeps no clock of it.
"""

from __future__ import annotations

import gc
import os
import random
import socket
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from math import inf
from types import MethodType, ModuleType
from typing import Any, Final, NoReturn, Protocol, Self, cast

import apsw
import trio
from trio._core import _run as scheduler
from trio.testing import MockClock
from werkzeug.routing import Rule

import hermes_trio.plugins as plugins_module
import hermes_trio.runtime.threads as threads_module
import hermes_trio.store.sqlite.store as store_module
import hermes_trio.tools.warden.sandbox as sandbox_module
import hermes_trio.tools.warden.warden as warden_module
from hermes_trio.guard import load_steps
from hermes_trio.runtime import runtime as runtime_module
from hermes_trio.runtime.ports import RuntimeStore
from hermes_trio.store.sqlite.files import MEMORY, connect
from hermes_trio.store.sqlite.schema import migrate
from hermes_trio.tools.warden.sandbox import Protections

from .threads import simulated_entry_points, wait_out_virtually

MOST_BATCHES: Final = 50_000
"""The number of scheduler rounds in one instant of virtual time that counts as an endless loop, which fails the simulation."""

_CLOCKS: Final = ("time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "perf_counter_ns")
_REAL: Final = {name: getattr(time, name) for name in _CLOCKS}

_BOUND: Final[Mapping[str, Callable[..., Any]]] = {
    **_REAL,
    "urandom": os.urandom,
    "run_sync": trio.to_thread.run_sync,
    "open_tcp_stream": trio.open_tcp_stream,
}
"""What is replaced also in the modules that have imported it by name."""

_KEEP: Final = sys.stdlib_module_names | {"trio", "pytest", "_pytest"}
"""The packages whose own bindings stay: those below a world, and those around it."""

for _ in load_steps():  # here, so that the first command of a process is scheduled like all others
    pass

_AT_ONCE: Final = frozenset({"hermes_trio.tools.session_folders"})
"""Modules whose blocking calls run inline in a world, without virtual time."""

_REFUSED: Final = {
    "subprocess.Popen": "a process",
    "os.fork": "a process",
    "os.forkpty": "a process",
    "os.posix_spawn": "a process",
    "os.system": "a process",
    "socket.getaddrinfo": "a look-up of names",
}

_WATCHED: Final = frozenset({*_REFUSED, "socket.__new__"})


class SimulationBreach(AssertionError):
    """Raised if code inside a simulation uses a real thread, process or network socket, or does not end."""


class OutsideWorld(Protocol):
    """What a boundary needs of the world: wardens, connections and threads."""

    def custody(self) -> Any:
        """Return a new warden process, as `Custody.begin` does."""
        ...

    async def dial(self, host: str, port: int) -> trio.SocketStream:
        """Connect to a host of this world. Raises `OSError` if there is none."""
        ...

    async def in_thread(self, call: Callable[[], Any]) -> Any:
        """Run a call in a simulated worker thread. Cancelling abandons the thread."""
        ...


_current: Boundary | None = None
_hooked = False
_sites: list[tuple[ModuleType, str, str]] = []
"""Where something of `_BOUND` is bound by name: a module, its attribute, and which."""
_looked: set[str] = set()
_modules_seen = 0


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event not in _WATCHED:
        return
    boundary = _current
    if boundary is None or threading.get_ident() != boundary.thread:
        return
    what = _REFUSED.get(event)
    if event == "socket.__new__" and args[1] not in (socket.AF_UNIX, -1):
        what = "a socket that leaves this process"
    if what is not None:
        boundary.breach(f"{what} ({event}) inside a simulation")


class Boundary:
    """Isolates one `trio.run`. See the module. `breaches` lists what was refused, because the code may have swallowed the exception."""

    def __init__(self, seed: int, clock: MockClock, outside: OutsideWorld) -> None:
        self.clock = clock
        self.offset = 0.0
        """The error of the wall clock against the time of the world, in seconds. Faults step it."""
        self.skew: Callable[[], float] = lambda: 0.0
        """Returns the error of the clock of the current task's host, in addition to `offset`."""
        self.thread = threading.get_ident()
        self.breaches: list[str] = []
        self._outside = outside
        # Separate generators: random numbers that the code under test draws must not change the scheduler's order.
        self._bytes = random.Random(f"{seed} bytes")
        self._order = _Order(f"{seed} order", clock)
        self._global = f"{seed} global"
        self._patches: list[tuple[Any, str, Any]] = []
        """What was replaced: its owner, its name and its value before, in order."""
        self._bound: dict[str, Callable[..., Any]] = {}
        self._sites = 0
        self._collects = False

    def wall(self) -> float:
        """Return the time of day on the host of the current task."""
        return self.clock.current_time() + self.offset + self.skew()

    def store_wall(self) -> float:
        """Return the time of day on the database's clock."""
        return self.clock.current_time() + self.offset

    def end_by(self, until: float) -> None:
        """Fail the simulation with `SimulationBreach` if it has not ended by this time, even if tasks are shielded."""
        self._order.until = until

    def hold(self, is_held: Callable[[trio.lowlevel.Task], bool] | None) -> None:
        """Suspend the tasks for which `is_held` is true, until the next call; None suspends none. Wake-ups are kept, and deadlines pass."""
        self._order.is_held = is_held
        waiting, self._order.held = self._order.held, []
        scheduler.GLOBAL_RUN_CONTEXT.runner.runq.extend(waiting)

    def breach(self, text: str) -> NoReturn:
        """Record a breach and raise `SimulationBreach`."""
        frames = traceback.extract_stack(limit=8)[:-2]
        where = " < ".join(f"{os.path.basename(one.filename)}:{one.lineno} {one.name}" for one in reversed(frames))
        self.breaches.append(f"{text}: {where}")
        raise SimulationBreach(self.breaches[-1])

    def __enter__(self) -> Self:
        global _current, _hooked
        if _current is not None:
            raise RuntimeError("a simulation is running in this process: one at a time")
        if not hasattr(scheduler, "_ALLOW_DETERMINISTIC_SCHEDULING") or not hasattr(scheduler, "_r"):
            raise RuntimeError(f"Trio {trio.__version__} has no switch for a seeded scheduler that is known here")
        if not _hooked:
            sys.addaudithook(_audit)
            _hooked = True
        self._random = random.getstate()
        self._collects = gc.isenabled()
        try:
            self._replace()
        except BaseException:
            self._restore()
            raise
        _current = self
        return self

    def __exit__(self, *error: object) -> None:
        global _current
        _current = None
        self._restore()

    def _replace(self) -> None:
        _migrated()
        # The time of a collection, and of its finalizers, depends on earlier allocations: the runner collects between two worlds.
        gc.disable()
        random.seed(self._global)
        self._patch(scheduler, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
        self._patch(scheduler, "_r", self._order)
        self._patch(scheduler, "Instruments", _NoInstruments)
        self._patch(scheduler.CancelScope, "_might_change_registered_deadline", _change_deadline)
        self._patch(self.clock, "_autojump", self._jump)
        self._patch(os, "urandom", self._bytes.randbytes)
        self._patch(random, "_urandom", self._bytes.randbytes)
        self._patch(trio, "open_tcp_stream", self._dial)
        self._patch(trio.to_thread, "run_sync", self._in_thread)
        self._patch(threading.Thread, "start", self._start_thread)
        # A simulated thread takes virtual time, so it does not hold the clock as a real one does.
        self._patch(threads_module, "hold_clock", _hold_nothing)
        self._patch(threads_module, "release_clock", _hold_nothing)
        self._patch(threads_module, "wait_out", wait_out_virtually)
        self._patch(plugins_module, "entry_points", simulated_entry_points)
        self._patch(warden_module, "Custody", _Custody(self._outside.custody))
        self._patch(warden_module.prctl, "become_subreaper", lambda on=True: None)
        self._patch(sandbox_module, "probe_protections", _no_protections)
        self._patch(runtime_module, "_wall_clock", self._runtime_clock)
        self._patch(Rule, "compile", _compile_once)
        self._patch(store_module, "migrate", _migrate_once)
        self._patch(self.clock, "current_time", partial(getattr, self.clock, "_virtual_base"))
        self._patch(_importing, "_find_and_load", _load_outside)
        self._bound = {name: self._clock_of(name) for name in _CLOCKS}
        self._bound |= {"urandom": self._bytes.randbytes, "run_sync": self._in_thread, "open_tcp_stream": self._dial}
        for name in _CLOCKS:
            self._patch(time, name, self._bound[name])
        self._patch_sites()

    def _restore(self) -> None:
        while self._patches:
            setattr(*self._patches.pop())
        random.setstate(self._random)
        if self._collects:
            gc.enable()

    def _patch(self, owner: object, name: str, value: object) -> None:
        self._patches.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def _patch_sites(self) -> None:
        """Replace what modules have imported by name, in those that are loaded since the last call."""
        _look_for_sites()
        for module, attribute, name in _sites[self._sites :]:
            self._patch(module, attribute, self._bound[name])
        self._sites = len(_sites)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Be outside of the world for the body of the `with`: everything is as before it, and nothing is drawn from the seed."""
        global _current
        state = random.getstate()
        replaced = [(owner, name, getattr(owner, name)) for owner, name, _ in self._patches]
        _current = None
        for one in reversed(self._patches):
            setattr(*one)
        try:
            yield
        finally:
            for one in replaced:
                setattr(*one)
            random.setstate(state)
            _current = self
            self._patch_sites()

    def _clock_of(self, name: str) -> Callable[[], float]:
        real = _REAL[name]
        read = self.wall if name.startswith("time") else self.clock.current_time
        nanoseconds = name.endswith("_ns")

        def now() -> float:
            if threading.get_ident() != self.thread:
                return real()  # a watchdog of the test runner, which is not simulated
            return int(read() * 1e9) if nanoseconds else read()

        return now

    def _jump(self) -> None:
        """Jump to the next deadline, as `MockClock` does, without the statistics that it reads."""
        clock = self.clock
        runner: Any = scheduler.GLOBAL_RUN_CONTEXT.runner
        seconds = runner.deadlines.next_deadline() - clock.current_time()
        if 0 < seconds < inf:
            clock.jump(seconds)

    def _runtime_clock(self, store: RuntimeStore) -> Callable[[], float]:
        return store.now if store.lease_seconds > 0 else self.wall

    def _start_thread(self) -> None:
        self.breach("a thread inside a simulation")

    async def _in_thread(self, function: Callable[..., Any], *args: Any, **options: object) -> Any:
        """Run imports and reads of session folders, of which a world has none, inline.

        The runtime's own threads are simulated. Any other call is a breach.
        """
        await trio.lowlevel.checkpoint()
        if getattr(function, "__module__", "") == threads_module.__name__:
            return await self._outside.in_thread(function)
        if function is import_module or getattr(function, "__module__", "") in _AT_ONCE:
            return function(*args)
        return self.breach(f"a thread (for {function!r}) inside a simulation")

    async def _dial(self, host: str, port: int, **options: object) -> trio.SocketStream:
        return await self._outside.dial(host, port)


class _Order(random.Random):
    """Decides the order in which the tasks of a batch run, and which tasks are suspended."""

    def __init__(self, seed: str, clock: MockClock) -> None:
        super().__init__(seed)
        self._clock = clock
        self._instant = (0.0, 0)
        self.until = float("inf")
        self.is_held: Callable[[trio.lowlevel.Task], bool] | None = None
        self.held: list[trio.lowlevel.Task] = []

    def shuffle(self, x: Any) -> None:
        """Shuffle the tasks that the scheduler is about to run, and remove those that are suspended."""
        if len(x) > 1:
            super().shuffle(x)
        at, count = self._instant
        now = self._clock.current_time()
        self._instant = (now, count + 1 if now == at else 0)
        if now > self.until:
            raise SimulationBreach("the world does not end")
        if count > MOST_BATCHES:
            raise SimulationBreach(f"{count} rounds of the scheduler in one instant: a task loops without waiting")
        if self.is_held is not None:
            self.held += [task for task in x if self.is_held(task)]
            x[:] = [task for task in x if not self.is_held(task)]


class _NoInstruments(dict[str, Any]):
    """Replaces Trio's `Instruments`, of which a world has none: the scheduler looks into it for each step of a task."""

    def __init__(self, incoming: object) -> None:
        super().__init__()


class _DeadlineChange:
    """Replaces the context manager in which Trio changes the deadline of a scope: the same steps, without a generator."""

    __slots__ = ("_scope",)

    def __init__(self, scope: Any) -> None:
        self._scope = scope

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        scope = self._scope
        old = scope._registered_deadline
        new = inf if scope._cancel_status is None or scope._cancel_called else scope._deadline
        if old != new:
            scope._registered_deadline = new
            deadlines = scheduler.GLOBAL_RUN_CONTEXT.runner.deadlines
            if old != inf:
                deadlines.remove(old, scope)
            if new != inf:
                deadlines.add(new, scope)


def _change_deadline(scope: object) -> _DeadlineChange:
    return _DeadlineChange(scope)


class _Custody:
    """Replaces the class `Custody`: begins wardens of the world."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    async def begin(self, cgroup: str = "") -> Any:
        await trio.lowlevel.checkpoint()
        return self._make()


def _hold_nothing(clock: object) -> bool:
    return False


_compile: Final[Callable[[Rule], None]] = Rule.compile
_compiled: dict[tuple[object, ...], dict[str, Any]] = {}
_COMPILED: Final = ("_parts", "_trace", "_converters", "arguments", "_build", "_build_unknown")
"""What `Rule.compile` makes."""


def _compile_once(rule: Rule) -> None:
    """Compile a route once. All servers have the same routes, and compiling takes a tenth of a world's time."""
    state = vars(rule)
    key = (rule.rule, rule.subdomain, rule.host, rule.merge_slashes)
    if key not in _compiled:
        _compile(rule)
        made = {name: state[name] for name in _COMPILED}
        _compiled[key] = {name: value.__func__ if name.startswith("_build") else value for name, value in made.items()}
        return
    made = _compiled[key]
    state.update(made, _build=MethodType(made["_build"], rule), _build_unknown=MethodType(made["_build_unknown"], rule))


@cache
def _migrated() -> apsw.Connection:
    """Return an empty database in memory with the schema."""
    db = connect(MEMORY)
    migrate(db, MEMORY)
    return cast("apsw.Connection", db)


def _migrate_once(db: apsw.Connection, path: str) -> int:
    """Create the schema of an empty database in memory by a copy of one that is migrated once."""
    if path != MEMORY:
        return migrate(cast("Any", db), path)
    with db.backup("main", _migrated(), "main") as copying:
        copying.step()
    return 0


async def _no_protections() -> Protections:
    await trio.lowlevel.checkpoint()
    return Protections()


_importing: Final[Any] = sys.modules["_frozen_importlib"]
_load: Final[Callable[..., Any]] = _importing._find_and_load


def _load_outside(name: str, *given: Any) -> Any:
    """Load a module outside of the world: in the next world it is loaded already."""
    boundary = _current
    if boundary is None or name in sys.modules or threading.get_ident() != boundary.thread:
        return _load(name, *given)
    with boundary.lifted():
        return _load(name, *given)


def _look_for_sites() -> None:
    global _modules_seen
    if _modules_seen == len(sys.modules):
        return
    _modules_seen = len(sys.modules)
    names = {id(value): name for name, value in _BOUND.items()}
    for key, module in list(sys.modules.items()):
        if key in _looked:
            continue
        _looked.add(key)
        if key == __name__ or key.partition(".")[0] in _KEEP:
            continue
        bound: dict[str, Any] = getattr(module, "__dict__", {})  # not everything there is a module
        _sites.extend((module, attribute, names[id(value)]) for attribute, value in bound.items() if id(value) in names)


Handler = Callable[[trio.SocketStream], Awaitable[None]]


def socket_pair() -> tuple[trio.SocketStream, trio.SocketStream]:
    """Return the two ends of a new connection inside this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return _stream(ours), _stream(theirs)


def _stream(sock: socket.socket) -> trio.SocketStream:
    sock.setblocking(False)
    return trio.SocketStream(cast("Any", trio.socket.from_stdlib_socket(sock)))
