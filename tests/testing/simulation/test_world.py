"""A world is decided by its seed: the same number, the same trace, byte for byte."""

from __future__ import annotations

import inspect
import os
import re
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import trio

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
from hermes_trio.testing.simulation.boundary import EPOCH, Boundary
from hermes_trio.testing.simulation.node import SimulatedNode
from hermes_trio.testing.simulation.processes import SimulatedCustody
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
    """Neither the hashes of strings nor addresses in memory decide anything."""
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


def test_commands_run_in_a_world() -> None:
    """A world whose tools fail would keep every promise and show nothing: a command runs, a background one is reported, and a broken tool is a violation."""
    program = Program(1, 30, (Step(5.0, "write", 0, 1, "run 5"), Step(6.0, "write", 1, 2, "bg 5")))
    settings = WorldSettings(cron="", calm_seconds=60)
    result = run_program(program, settings)
    assert result.violations == ()
    assert len(result.trace.of("process ends")) == 2
    assert sorted(one.text for one in result.trace.of("chat")) == ["500: 'done m1'", "501: 'done m2'", "501: 'told m2'"]
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(SimulatedNode, "custody", lambda node: node.nothing)
        assert run_program(program, settings).invariants == {"no defect"}


def test_the_simulated_warden_has_the_port_of_the_real_one() -> None:
    """What stands in for `Custody` takes the same arguments, and has everything that a warden uses of one whose commands are not confined."""
    for name in ("hand_over", "discard", "condemn", "dismiss", "attend"):
        real, simulated = (inspect.signature(getattr(kind, name)) for kind in (Custody, SimulatedCustody))
        assert list(real.parameters) == list(simulated.parameters), name
    confined = {"template", "forget", "forget_template"}
    used = set(re.findall(r"custody\.(\w+)", inspect.getsource(warden))) - {"Custody", *confined}
    kernel: Any = None
    assert used <= set(dir(SimulatedCustody(kernel)))


class Nothing:
    """A world with nothing outside."""

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
