"""A world is decided by its seed: the same number, the same trace, byte for byte."""

from __future__ import annotations

import importlib
import inspect
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from hermes_trio.commands.options import CommandFailed
from hermes_trio.commands.simulate import simulate
from hermes_trio.testing.simulation import (
    Program,
    SimulationBreach,
    Step,
    World,
    WorldSettings,
    make_program,
    run_program,
    run_seed,
)
from hermes_trio.testing.simulation.boundary import Boundary
from hermes_trio.testing.simulation.habits import EPOCH
from hermes_trio.testing.simulation.node import SimulatedNode
from hermes_trio.testing.simulation.processes import SimulatedCustody, SimulatedKernel
from hermes_trio.tools.warden import warden
from hermes_trio.tools.warden.custody import Custody

DIGESTS = """
from hermes_trio.testing.simulation import run_seed
for seed in range({first}, {last}):
    print(seed, run_seed(seed, nodes=1 + seed % 3).trace.digest(), flush=True)
"""


def digests(first: int, last: int, hash_seed: str) -> list[str]:
    """The traces of some seeds, made by another process."""
    code = DIGESTS.format(first=first, last=last)
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_a_seed_gives_the_same_trace_in_another_process() -> None:
    """The trace depends neither on hashes of strings nor on addresses in memory."""
    first = digests(1, 3, "1")
    assert len(first) == 2
    assert first == digests(1, 3, "77")


@pytest.mark.slow
def test_two_hundred_seeds_give_the_same_traces_in_another_process() -> None:
    """The same, two hundred times."""
    assert digests(1, 201, "1") == digests(1, 201, "4242")


def test_seeds_differ() -> None:
    """Another number is another world, and another order of the same one."""
    assert len({run_seed(seed).trace.digest() for seed in (1, 2)}) == 2
    assert make_program(1) == make_program(1)
    assert make_program(1) != make_program(2)


@pytest.mark.parametrize(
    ("kind", "words", "told"),
    [
        ("store", "finish_turn sideways", "one of before, after"),
        ("store", "finish_turn after time=2", "has the option time"),
        ("pause", "secs=3", "has the option secs"),
        ("crash", "now", "needs the option down=NUMBER"),
        ("partition", "seconds=3", "one of away, deaf"),
    ],
)
def test_a_fault_that_would_be_misread_is_named(kind: str, words: str, told: str) -> None:
    """A misspelt fault does not make a program pass: the world breaks, and says what is wrong with the step."""
    result = run_program(Program(1, 10, (Step(5.0, kind, words=words),)), WorldSettings(cron="", calm_seconds=10))
    (violation,) = result.violations
    assert told in violation


@pytest.mark.parametrize("option", ["seeds", "workers", "minutes"])
def test_a_command_that_would_simulate_nothing_is_refused(option: str) -> None:
    """No world is no proof."""
    given: dict[str, Any] = {option: 0}
    with pytest.raises(CommandFailed, match=f"--{option} is 0"):
        simulate(**given)


def test_commands_run_in_a_world() -> None:
    """Worlds whose tools fail would satisfy every invariant untested: a command runs, a background one is reported, and a broken tool is a violation."""
    program = Program(1, 30, (Step(5.0, "write", 0, 1, "run 5"), Step(6.0, "write", 1, 2, "bg 5")))
    settings = WorldSettings(cron="", calm_seconds=60)
    result = run_program(program, settings)
    assert result.violations == ()
    assert len(result.trace.of("process ends")) == 2
    assert sorted(one.text for one in result.trace.of("chat")) == ["500: 'done m1'", "501: 'done m2'", "501: 'told m2'"]
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(SimulatedNode, "custody", lambda node: node.nothing)
        assert run_program(program, settings).invariants == {"no defect"}


def test_a_run_that_is_being_started_has_not_settled() -> None:
    """Its row is written, the store's answer is lost, and the start is retried: a client that reads its events meanwhile gets those of the whole run."""
    faults = Step(8.0, "store", words="begin_turn after seconds=60")
    program = Program(1, 180, (faults, Step(8.6, "run", 1, 2, "think 10")))
    result = run_program(program, WorldSettings(cron="", calm_seconds=60))
    (told,) = result.trace.of("run")
    assert "[503, 202]" in told.text
    assert result.violations == (), result.story()


def test_a_node_may_crash_in_the_instant_of_its_start() -> None:
    """Before its first step."""
    crashes = (Step(10.0, "crash", words="now down=5"), Step(15.0, "crash", words="now down=0.5"))
    result = run_program(Program(4, 30, crashes), WorldSettings(cron="", calm_seconds=60))
    assert len(result.trace.of("crash")) == 2
    assert result.violations == (), result.story()


async def test_a_command_that_was_handed_over_in_the_instant_of_a_crash_does_not_start() -> None:
    """The power fails before its keeper has run: the keeper ends, and its link is closed."""
    async with trio.open_nursery() as nursery:
        kernel = SimulatedKernel(nursery, lambda kind, text: None, copy_context())
        ours, theirs = socket.socketpair()
        kept: Any = None
        with ours:
            with theirs:
                kernel.begin(kernel.custody(), kept, [theirs.fileno()])
            kernel.power_off()
            await trio.testing.wait_all_tasks_blocked()
            ours.setblocking(False)
            assert ours.recv(1) == b""
        nursery.cancel_scope.cancel()


def test_the_simulated_warden_has_the_port_of_the_real_one() -> None:
    """What stands in for `Custody` takes the same arguments, and has everything that a warden uses of one whose commands are not confined."""
    for name in ("hand_over", "discard", "fail", "dismiss", "attend"):
        real, simulated = (inspect.signature(getattr(kind, name)) for kind in (Custody, SimulatedCustody))
        assert list(real.parameters) == list(simulated.parameters), name
    confined = {"template", "forget", "forget_template"}
    used = set(re.findall(r"custody\.(\w+)", inspect.getsource(warden))) - {"Custody", *confined}
    kernel: Any = None
    assert used <= set(dir(SimulatedCustody(kernel)))


class Nothing:
    """A world without I/O outside of the process."""

    def custody(self) -> object:
        raise AssertionError

    async def dial(self, host: str, port: int) -> trio.SocketStream:
        raise OSError(f"no host {host}")


@pytest.mark.parametrize("what", ["thread", "socket", "process"])
def test_the_machine_is_out_of_reach(what: str) -> None:
    """A thread, a socket that leaves the process and a process fail, and are remembered also where the exception was swallowed."""
    world = World(make_program(1))
    use = {
        "thread": lambda: threading.Thread(target=print).start(),
        "socket": lambda: socket.socket(socket.AF_INET),
        "process": lambda: subprocess.Popen(["true"]),
    }[what]
    with Boundary(1, world.clock, Nothing()) as boundary:
        with pytest.raises(SimulationBreach):
            use()
        assert len(boundary.breaches) == 1
    socket.socket(socket.AF_INET).close()


def test_time_and_chance_are_the_worlds() -> None:
    """Inside, the clocks show the world's time and random bytes come from the seed; outside, everything is as before."""
    real = time.time
    drawn = []
    for _ in range(2):
        world = World(make_program(5))
        with Boundary(5, world.clock, Nothing()) as boundary:
            assert time.time() == EPOCH
            boundary.offset = 60
            assert time.time() == EPOCH + 60
            assert time.monotonic() == EPOCH
            drawn.append(os.urandom(8))
    assert drawn[0] == drawn[1]
    assert time.time is real


LATE = """
import os, random, threading
from os import urandom
from time import monotonic
DRAWN = random.random(), os.urandom(4), urandom(4)
WORKER = threading.Thread(target=int)
WORKER.start()
WORKER.join()
"""


def test_a_module_that_a_world_loads_first_takes_nothing_from_it_and_keeps_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading draws nothing from the seed and may use the machine; what the module has bound by name is that of the world in which it is used."""
    (tmp_path / "loaded_late.py").write_text(LATE)
    monkeypatch.syspath_prepend(str(tmp_path))
    drawn = []
    for _ in range(2):
        world = World(make_program(5))
        with Boundary(5, world.clock, Nothing()) as boundary:
            world.clock.jump(len(drawn))
            with pytest.raises(ImportError):
                importlib.import_module("loaded_never")
            late = importlib.import_module("loaded_late")
            assert late.monotonic() == EPOCH + len(drawn)
            drawn.append((random.random(), os.urandom(8), late.urandom(8)))
        assert not boundary.breaches
    assert drawn[0] == drawn[1]
    assert late.monotonic is time.monotonic
    assert late.urandom is os.urandom
    del sys.modules["loaded_late"]
