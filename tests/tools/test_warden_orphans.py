"""Fifty rounds against processes that do everything to escape: whatever ends a job, nothing of it is alive afterwards.

Beside every victim runs an innocent job that must live on wherever its own end was not asked for.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trio

from hermes_trio.tools.warden import Stdin, open_warden
from tests.tools.test_warden_loss import SERVER
from tests.tools.warden_witness import (
    NASTY,
    appears,
    gone,
    gone_blocking,
    is_alive,
    marked,
    new_mark,
    nothing_left,
    spec,
)

pytestmark = pytest.mark.slow

ROUNDS = 50


def nasty(path: Path, tail: str = "") -> str:
    """The shell command of the escaping program, and what the shell does after it."""
    return f"{shlex.quote(sys.executable)} -S -c {shlex.quote(NASTY)} {shlex.quote(str(path))}{tail}"


@pytest.mark.parametrize("stdin", list(Stdin))
async def test_rounds_of_kill(tmp_path: Path, stdin: Stdin) -> None:
    """Killed before or after its command has exited, a job is empty when the kill returns; the neighbour lives on."""
    innocent = new_mark()
    with nothing_left():
        async with open_warden() as warden:
            neighbour = await warden.spawn(spec("sleep 3600 & sleep 3600", innocent))
            for number in range(ROUNDS):
                mark, path = new_mark(), tmp_path / str(number)
                process = await warden.spawn(spec(nasty(path, "; sleep 60" if number % 2 else ""), mark, stdin=stdin))
                pid = int(await appears(path))
                report = await process.kill(grace=0.05)
                assert (report.survivors, is_alive(pid), marked(mark)) == (0, False, [])
                await process.aclose()
            assert neighbour.status is None
            assert len(marked(innocent)) >= 2


async def test_rounds_of_scopes(tmp_path: Path) -> None:
    """Each scope that ends, by itself or cancelled, leaves no process, child or descriptor; another scope's job lives."""
    innocent = new_mark()
    async with open_warden() as elsewhere:
        neighbour = await elsewhere.spawn(spec("sleep 3600", innocent))
        for number in range(ROUNDS):
            mark, path = new_mark(), tmp_path / str(number)
            with nothing_left(), trio.CancelScope() as scope:
                async with open_warden() as warden:
                    process = await warden.spawn(spec(nasty(path), mark))
                    await appears(path)
                    if number % 2:
                        scope.cancel()
                    else:
                        await process.kill(grace=0)
            assert marked(mark) == []
        assert neighbour.status is None
        assert len(marked(innocent)) == 1


@pytest.mark.parametrize("victim", ["warden", "keeper", "both"])
async def test_rounds_of_loss(tmp_path: Path, victim: str) -> None:
    """With the warden, the keeper or both killed, the job is gone when it says so, and the next one starts."""
    with nothing_left():
        async with open_warden() as warden:
            for number in range(ROUNDS):
                mark, path = new_mark(), tmp_path / str(number)
                process = await warden.spawn(spec(nasty(path, "; sleep 60" if number % 2 else ""), mark))
                await appears(path)
                assert warden.warden_pid is not None
                if victim == "both":
                    os.kill(warden.warden_pid, signal.SIGSTOP)
                if victim != "warden":
                    os.kill(process.keeper_pid, signal.SIGKILL)
                if victim != "keeper":
                    os.kill(warden.warden_pid, signal.SIGKILL)
                with trio.fail_after(20):
                    await process.wait_empty()
                await gone(mark)
                await process.aclose()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_rounds_of_dead_servers(tmp_path: Path, signum: signal.Signals) -> None:
    """Whenever the server dies, in the middle of its starts or after them, all is gone within five seconds."""
    innocent = new_mark()
    with subprocess.Popen(["sleep", "3600"], env={"HERMES_TEST_MARK": innocent, "PATH": os.environ["PATH"]}) as other:
        try:
            for number in range(ROUNDS):
                mark, path = new_mark(), tmp_path / f"{signum}-{number}"
                with subprocess.Popen(
                    [sys.executable, "-c", SERVER, mark, nasty(path), "trap '' TERM; sleep 60 & sleep 60"],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                ) as server:
                    assert server.stdout is not None
                    wardens: list[int] = []
                    if number % 2:
                        wardens = [int(word) for word in server.stdout.readline().split()]
                    deadline = time.monotonic() + 10
                    while not path.exists() and time.monotonic() < deadline:
                        time.sleep(0.002)
                    server.send_signal(signum)
                    server.wait()
                assert gone_blocking(mark) == []
                deadline = time.monotonic() + 5
                while any(map(is_alive, wardens)) and time.monotonic() < deadline:
                    time.sleep(0.01)
                assert [pid for pid in wardens if is_alive(pid)] == []
            assert other.poll() is None
        finally:
            other.kill()
