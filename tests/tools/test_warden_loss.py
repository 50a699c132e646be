"""What happens when the server, the warden or a keeper dies: nothing that they kept lives on."""

import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing

from hermes_trio.tools.warden import ExitStatus, KeptProcess, KillHow, Stdin, Warden, open_warden
from hermes_trio.tools.warden.custody import Custody
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

SERVER = """
import signal, sys, trio
from hermes_trio.tools.warden import Stdin, open_warden
from tests.tools.warden_witness import spec

async def main():
    async with open_warden() as warden:
        mark, *commands = sys.argv[1:]
        for command in commands:
            for stdin in Stdin:
                await warden.spawn(spec(command, mark, stdin=stdin))
        print(warden.warden_pid, *(p.keeper_pid for p in warden.processes), flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


def nasty(path: Path) -> str:
    """The shell command of a program that does everything to escape."""
    return f"{shlex.quote(sys.executable)} -S -c {shlex.quote(NASTY)} {shlex.quote(str(path))}"


async def wait_for_loss(warden: Warden, process: KeptProcess) -> ExitStatus:
    """The status of a process whose warden or keeper was killed, once nothing of it is left."""
    with trio.fail_after(20):
        status = await process.wait()
        await process.wait_empty()
    assert process not in warden.processes
    return status


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGABRT])
def test_nothing_survives_the_server(tmp_path: Path, signum: signal.Signals) -> None:
    """However the server dies, within five seconds no process of it, its keepers and its warden is alive."""
    mark = new_mark()
    paths = [tmp_path / f"pid{number}" for number in range(3)]
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, mark, *map(nasty, paths), "trap '' TERM HUP; sleep 60 & sleep 60"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as server:
        assert server.stdout is not None
        keepers = [int(word) for word in server.stdout.readline().split()]
        deadline = time.monotonic() + 10
        while not all(path.exists() for path in paths) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert len(keepers) == 13
        assert marked(mark)
        server.send_signal(signum)
        server.wait(timeout=20)
    assert gone_blocking(mark) == []
    deadline = time.monotonic() + 5
    while any(map(is_alive, keepers)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [pid for pid in keepers if is_alive(pid)] == []


async def test_a_killed_warden(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The server says so, the jobs are ended and lost, the next start gets another warden, and nothing is left."""
    mark = new_mark()
    caplog.set_level(logging.ERROR)
    with nothing_left():
        async with open_warden() as warden:
            process = await warden.spawn(spec(nasty(tmp_path / "pid") + "; sleep 60", mark))
            done = await warden.spawn(spec("exit 2"))
            await done.wait_empty()
            await appears(tmp_path / "pid")
            first = warden.warden_pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            status = await wait_for_loss(warden, process)
            assert status.lost
            assert await done.wait() == ExitStatus(code=2)
            assert (await process.kill()).how is KillHow.LOST
            await gone(mark)
            again = await warden.spawn(spec("exit 6"))
            assert await again.wait() == ExitStatus(code=6)
            assert warden.warden_pid not in (None, first)
        assert f"the warden (pid {first}) ended unexpectedly" in caplog.text


async def test_a_start_right_after_the_wardens_death() -> None:
    """A start that meets a warden which has just died is taken by the next one, and runs once."""
    with nothing_left():
        async with open_warden() as warden:
            for _ in range(5):
                await (await warden.spawn(spec("true"))).wait_empty()
                assert warden.warden_pid is not None
                os.kill(warden.warden_pid, signal.SIGKILL)
                process = await warden.spawn(spec("echo once; exit 1"))
                assert await process.output.receive_some() == b"once\n"
                assert (await process.wait()).code == 1
                await process.aclose()


async def test_a_start_while_the_warden_is_mourned() -> None:
    """A start that comes to the control socket when the end of its warden has been seen to is taken by the next warden."""

    class LateControl:
        """A control socket that sends only when its warden is over."""

        def __init__(self, custody: Custody) -> None:
            self._custody, self._socket = custody, custody._control

        async def sendmsg(self, *packet: Any) -> int:
            await self._custody.over.wait()
            return await self._socket.sendmsg(*packet)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._socket, name)

    with nothing_left():
        async with open_warden() as warden, trio.open_nursery() as nursery:
            await (await warden.spawn(spec("true"))).wait_empty()
            custody = warden._custody
            assert custody is not None
            custody._control = cast("Any", LateControl(custody))

            @nursery.start_soon
            async def start() -> None:
                process = await warden.spawn(spec("exit 1"))
                assert (await process.wait()).code == 1
                await process.aclose()

            await trio.testing.wait_all_tasks_blocked()
            os.kill(custody.pid, signal.SIGKILL)


async def test_a_killed_keeper(tmp_path: Path) -> None:
    """The job of a dead keeper is ended by the warden and lost; the neighbour lives on."""
    mark, innocent = new_mark(), new_mark()
    with nothing_left():
        async with open_warden() as warden:
            neighbour = await warden.spawn(spec("sleep 60", innocent))
            process = await warden.spawn(spec(nasty(tmp_path / "pid") + "; sleep 60", mark))
            await appears(tmp_path / "pid")
            os.kill(process.keeper_pid, signal.SIGKILL)
            assert await wait_for_loss(warden, process) == ExitStatus(lost=True)
            assert marked(mark) == []
            assert neighbour.status is None
            assert len(marked(innocent)) == 1


async def test_warden_and_keeper_killed_together(tmp_path: Path) -> None:
    """With both gone the processes fall to the server, which finds, kills and reaps them."""
    mark = new_mark()
    with nothing_left():
        async with open_warden() as warden:
            process = await warden.spawn(spec(nasty(tmp_path / "pid") + "; sleep 60", mark))
            await appears(tmp_path / "pid")
            assert warden.warden_pid is not None
            os.kill(warden.warden_pid, signal.SIGSTOP)
            os.kill(process.keeper_pid, signal.SIGKILL)
            os.kill(warden.warden_pid, signal.SIGKILL)
            assert (await wait_for_loss(warden, process)).lost
            assert marked(mark) == []


async def test_a_command_that_kills_its_keeper() -> None:
    """A command cannot free itself by killing the process that keeps it."""
    mark = new_mark()
    with nothing_left():
        async with open_warden() as warden:
            command = "read go; (trap '' TERM; setsid sleep 60) & kill -9 $PPID; sleep 60"
            process = await warden.spawn(spec(command, mark, stdin=Stdin.PIPE))
            await process.write(b"\n")
            assert (await wait_for_loss(warden, process)).lost
            assert marked(mark) == []


async def test_signals_for_a_whole_group_do_not_reach_the_warden() -> None:
    """Warden and keepers are deaf to what a supervisor or a terminal sends to everybody."""
    async with open_warden() as warden:
        process = await warden.spawn(spec("sleep 60"))
        assert warden.warden_pid is not None
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            os.kill(warden.warden_pid, signum)
            os.kill(process.keeper_pid, signum)
        assert await (await warden.spawn(spec("exit 8"))).wait() == ExitStatus(code=8)
        assert process.status is None


async def test_an_interpreter_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no warden can be had, a start fails with that reason instead of hanging."""
    from hermes_trio.tools.warden import SpawnFailed

    with nothing_left():
        async with open_warden() as warden:
            monkeypatch.setattr(sys, "executable", "/bin/false")
            with pytest.raises(SpawnFailed, match="ended before it accepted the command"):
                await warden.spawn(spec("true"))
            monkeypatch.setattr(sys, "executable", "/no/such/python")
            with pytest.raises(SpawnFailed, match="the warden cannot be started: No such file"):
                await warden.spawn(spec("true"))
