"""The guard is imported with the first command, in steps between which other tasks run."""

from __future__ import annotations

import subprocess
import sys

LOAD_BESIDE_ANOTHER_TASK = """
import sys, trio
from hermes_trio import guard
from hermes_trio.agent.command_policy import load_guard

def modules():
    return {name for name in sys.modules if name.startswith("hermes_trio.guard.")}

seen = []

async def watch():
    while True:
        seen.append(len(modules()))
        await trio.lowlevel.checkpoint()

async def main():
    assert not guard.is_loaded()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await load_guard()
        assert guard.is_loaded()
        nursery.cancel_scope.cancel()
    before = modules()
    guard.inspect_command("cd /tmp && rm -rf x | python3 -c 'print(1)'", home="/root", cwd="/tmp")
    guard.detaches("sleep 1 &"), guard.exit_code_meaning("grep x y", 1), guard.normalise("ls"), guard.strip_comments("ls # x")
    print(len(set(seen)), *sorted(modules() - before))

trio.run(main)
"""


def test_other_tasks_run_while_the_guard_is_imported() -> None:
    """They see it grow in several steps, and nothing is left for the first command to import."""
    ran = subprocess.run([sys.executable, "-c", LOAD_BESIDE_ANOTHER_TASK], capture_output=True, text=True, check=True)
    steps, *late = ran.stdout.split()
    assert int(steps) >= 5
    assert late == []
