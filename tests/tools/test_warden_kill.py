"""Killing: every descendant and nobody else, with a truthful receipt."""

import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
import trio

from hermes_trio.tools.warden import ExitStatus, KillHow, KillReport, SpawnFailed, Stdin, open_warden
from hermes_trio.tools.warden import custody as custody_module
from hermes_trio.tools.warden import process as process_module
from hermes_trio.tools.warden.daemon import process_table
from tests.tools.warden_witness import (
    NASTY,
    appears,
    is_alive,
    marked,
    new_mark,
    nothing_left,
    read_until,
    spec,
)


def nasty(path: Path) -> str:
    """The shell command of a program that does everything to escape."""
    return f"{shlex.quote(sys.executable)} -S -c {shlex.quote(NASTY)} {shlex.quote(str(path))}"


async def test_an_obedient_process() -> None:
    """A process that obeys SIGTERM is ended by it, and the exit says so."""
    with nothing_left():
        async with open_warden() as warden:
            process = await warden.spawn(spec("sleep 60"))
            report = await process.kill()
            assert (report.how, report.survivors) == (KillHow.SIGTERM, 0)
            assert report.milliseconds > 0
            assert await process.wait() == ExitStatus(signal=signal.SIGTERM)


async def test_a_deaf_process() -> None:
    """A process that ignores SIGTERM gets SIGKILL after the grace, and both receipt and exit say SIGKILL."""
    async with open_warden() as warden:
        process = await warden.spawn(spec("trap '' TERM; echo deaf; while :; do sleep 60; done"))
        await read_until(process, b"deaf")
        report = await process.kill(grace=0.05)
        assert report.how is KillHow.SIGKILL
        assert await process.wait() == ExitStatus(signal=signal.SIGKILL)


async def test_a_process_that_cleans_up() -> None:
    """A process may use its grace: its own exit code is told, not the signal that it handled (H16)."""
    async with open_warden() as warden:
        process = await warden.spawn(spec("trap 'echo cleaned; exit 9' TERM; echo ready; while :; do sleep 0.01; done"))
        await read_until(process, b"ready\n")
        report = await process.kill(grace=10)
        assert report.how is KillHow.SIGTERM
        assert await process.wait() == ExitStatus(code=9)
        await read_until(process, b"cleaned\n")


async def test_cleaning_up_with_other_programs() -> None:
    """What a process starts after SIGTERM, in order to clean up, is left alone within the grace."""
    async with open_warden() as warden:
        process = await warden.spawn(
            spec("trap 'sleep 0.3 && echo cleaned; exit 9' TERM; echo ready; while :; do sleep 0.01; done")
        )
        await read_until(process, b"ready\n")
        assert (await process.kill(grace=30)).how is KillHow.SIGTERM
        await read_until(process, b"cleaned\n")
        assert await process.wait() == ExitStatus(code=9)


async def test_forks_during_a_kill() -> None:
    """A process that is being forked while the others are told to end is told, too, and nobody waits out the grace."""
    async with open_warden() as warden:
        for _ in range(20):
            process = await warden.spawn(spec("sleep 60 & (sleep 60 &) ; sleep 60"))
            assert (await process.kill(grace=20)).how is KillHow.SIGTERM
            await process.aclose()


async def test_no_grace() -> None:
    """With a grace of 0 there is no SIGTERM at all."""
    async with open_warden() as warden:
        process = await warden.spawn(spec("trap 'exit 9' TERM; echo ready; while :; do sleep 0.01; done"))
        await read_until(process, b"ready\n")
        assert (await process.kill(grace=0)).how is KillHow.SIGKILL
        assert await process.wait() == ExitStatus(signal=signal.SIGKILL)


async def test_a_kill_after_the_exit() -> None:
    """Killing an ended job changes nothing about how it ended."""
    async with open_warden() as warden:
        process = await warden.spawn(spec("exit 3"))
        await process.wait_empty()
        assert await process.kill() == KillReport(KillHow.ALREADY_EXITED, 0.0)
        assert await process.wait() == ExitStatus(code=3)


async def test_a_second_kill_shortens_the_grace() -> None:
    """While one kill waits out a long grace, another with none ends the job, and both get the same receipt."""
    reports: list[KillReport] = []
    async with open_warden() as warden:
        process = await warden.spawn(spec("trap 'echo no' TERM; echo deaf; while :; do sleep 60; done"))
        await read_until(process, b"deaf")

        async def patient() -> None:
            reports.append(await process.kill(grace=3600))

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(patient)
                await read_until(process, b"no\n")
                reports.append(await process.kill(grace=0))
        assert [report.how for report in reports] == [KillHow.SIGKILL] * 2


async def test_a_stopped_process() -> None:
    """A process that was stopped hears SIGTERM all the same."""
    async with open_warden() as warden:
        process = await warden.spawn(spec("exec sleep 60"))
        os.kill(process.pid, signal.SIGSTOP)
        assert (await process.kill(grace=30)).how is KillHow.SIGTERM


@pytest.mark.parametrize("stdin", list(Stdin))
async def test_a_nasty_process(tmp_path: Path, stdin: Stdin) -> None:
    """Forked twice, in its own session, deaf, its streams closed: it is killed, and the neighbour lives on (H7)."""
    mark, innocent = new_mark(), new_mark()
    with nothing_left():
        async with open_warden() as warden:
            neighbour = await warden.spawn(spec("sleep 60 & sleep 60", innocent))
            process = await warden.spawn(spec(nasty(tmp_path / "pid"), mark, stdin=stdin))
            pid = int(await appears(tmp_path / "pid"))
            assert await process.wait() == ExitStatus(code=0)
            assert (is_alive(pid), process.empty) == (True, False)
            report = await process.kill(grace=0.1)
            assert (report.how, report.survivors) == (KillHow.SIGKILL, 0)
            assert (is_alive(pid), marked(mark), process.empty) == (False, [], True)
            assert neighbour.status is None
            assert len(marked(innocent)) >= 2


async def test_a_fork_bomb() -> None:
    """Processes that fork faster than they can be listed are ended as a group."""
    mark = new_mark()
    bomb = (
        "import os\nprint('go', flush=True)\nfor _ in range(3): os.fork()\nwhile True:\n    if os.fork(): os._exit(0)\n"
    )
    async with open_warden() as warden:
        process = await warden.spawn(spec(f"{shlex.quote(sys.executable)} -S -c {shlex.quote(bomb)}", mark))
        await read_until(process, b"go")
        report = await process.kill(grace=0)
        assert (report.survivors, marked(mark)) == (0, [])


async def test_many_at_once() -> None:
    """Kills run side by side: twenty deaf jobs take one grace, not twenty (H28)."""
    mark = new_mark()
    async with open_warden() as warden:
        processes = [
            await warden.spawn(spec("trap '' TERM; echo deaf; while :; do sleep 60; done", mark)) for _ in range(20)
        ]
        for process in processes:
            await read_until(process, b"deaf")
        ends: list[KillReport] = []

        async def end(number: int) -> None:
            ends.append(await processes[number].kill(grace=0.5))

        with trio.fail_after(9):
            async with trio.open_nursery() as nursery:
                for number in range(20):
                    nursery.start_soon(end, number)
        assert [report.how for report in ends] == [KillHow.SIGKILL] * 20
        assert marked(mark) == []


async def test_kill_is_a_shield() -> None:
    """A kill in a cancelled scope is carried out, and its receipt returned."""
    mark = new_mark()
    report: KillReport | None = None
    async with open_warden() as warden:
        process = await warden.spawn(spec("sleep 60", mark))
        with trio.CancelScope() as scope:
            scope.cancel()
            report = await process.kill()
        assert report is not None
        assert (report.how, marked(mark)) == (KillHow.SIGTERM, [])


@pytest.mark.parametrize("command", ["kill -STOP $PPID; sleep 60 & sleep 60", "while :; do kill -STOP $PPID; done"])
async def test_a_command_that_stops_its_keeper(command: str) -> None:
    """The warden continues a stopped keeper, so the job is ended like any other, however soon it tried."""
    mark = new_mark()
    with nothing_left():
        async with open_warden() as warden:
            process = await warden.spawn(spec(command, mark))
            report = await process.kill(grace=0.1)
            assert (report.survivors, marked(mark), process.empty) == (0, [], True)


async def test_a_warden_that_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """If neither keeper nor warden answers, the server kills both and ends the job itself."""
    monkeypatch.setattr(process_module, "KEEPER_ANSWER_LIMIT", 0.2)
    monkeypatch.setattr(process_module, "WARDEN_ANSWER_LIMIT", 0.2)
    monkeypatch.setattr(custody_module, "KEEPER_LIMIT", 0.2)
    mark = new_mark()
    with nothing_left():
        async with open_warden() as warden:
            process = await warden.spawn(spec("sleep 60 & sleep 60", mark))
            assert warden.warden_pid is not None
            os.kill(warden.warden_pid, signal.SIGSTOP)
            os.kill(process.keeper_pid, signal.SIGSTOP)
            report = await process.kill(grace=0)
            assert (report.how, report.survivors, marked(mark)) == (KillHow.LOST, 0, [])
            assert (await process.wait()).lost


async def test_a_start_through_a_stopped_warden(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that nobody answers fails after a while, nothing runs, and the next start gets another warden."""
    monkeypatch.setattr(process_module, "LAUNCH_LIMIT", 0.2)
    monkeypatch.setattr(process_module, "KEEPER_ANSWER_LIMIT", 0.2)
    monkeypatch.setattr(process_module, "WARDEN_ANSWER_LIMIT", 0.2)
    mark = new_mark()
    with nothing_left():
        async with open_warden() as warden:
            await (await warden.spawn(spec("true"))).wait_empty()
            assert warden.warden_pid is not None
            os.kill(warden.warden_pid, signal.SIGSTOP)
            with pytest.raises(SpawnFailed, match=r"did not start within 0\.2 seconds"):
                await warden.spawn(spec("sleep 60", mark))
            assert (warden.running, marked(mark)) == (0, [])
            monkeypatch.undo()
            assert await (await warden.spawn(spec("exit 4"))).wait() == ExitStatus(code=4)


def test_a_recycled_number_is_not_signalled() -> None:
    """A signal meant for a process that is gone does not reach the one that has its number now."""
    seen = process_table.look(os.getpid())
    assert seen is not None
    seen.started -= 1
    assert process_table.send(seen, signal.SIGKILL) is False
    assert process_table._send_by_number(seen, signal.SIGKILL) is False


def test_relatives_without_the_kernels_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel lists no children, the table of all processes gives the same answer."""
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        with_list = {entry.pid for entry in process_table.descendants(os.getpid())}
        monkeypatch.setattr(process_table, "_listed_children", lambda _parent: None)
        assert {entry.pid for entry in process_table.descendants(os.getpid())} == with_list
        assert child in with_list
        assert process_table.descendants(os.getpid(), without=with_list) == []
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
