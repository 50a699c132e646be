"""A background process that prints nothing costs nothing while it runs."""

from __future__ import annotations

from collections import Counter

import pytest
import trio
from trio._core._instrumentation import Instruments

from hermes_trio.testing.simulation import Program, Step, World, WorldSettings, boundary, run_program


class Steps(trio.abc.Instrument):
    """Counts the steps of each task by its name."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.counts[task.name.rpartition(".")[2]] += 1


def test_the_reader_of_a_quiet_process_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """It wakes for output, and until the end of that output is stored; not twice a second for as long as the process runs."""
    steps = Steps()
    live = World._live

    async def counted(self: World, after: object) -> None:
        trio.lowlevel.add_instrument(steps)
        await live(self, after)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(World, "_live", counted)
    monkeypatch.setattr(boundary, "_NoInstruments", Instruments)
    program = Program(1, 30, (Step(5.0, "write", 0, 1, "bg 120"),))
    result = run_program(program, WorldSettings(cron="", calm_seconds=200))
    assert result.violations == ()
    assert len(result.trace.of("process ends")) == 1
    assert 0 < steps.counts["_read"] < 20
    assert 0 < steps.counts["_write_down"] < 20
