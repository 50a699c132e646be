"""Starting, feeding, reading and awaiting real processes through the warden."""

import os
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing

from hermes_trio.tools.warden import (
    ExitStatus,
    KillHow,
    ProcessPhase,
    ProcessSpec,
    SpawnFailed,
    Stdin,
    StdinClosed,
    TooManyProcesses,
    UnsupportedPlatform,
    WardenClosed,
    open_warden,
)
from hermes_trio.tools.warden.daemon import oom, prctl
from tests.tools.warden_witness import MARK, gone, marked, new_mark, nothing_left, read_all, read_until, shown_of, spec


async def test_output_and_exit_code() -> None:
    """A command's output and error arrive merged, and its exit code is told as it is."""
    with nothing_left():
        async with open_warden() as warden:
            process = await warden.spawn(spec("echo out; echo err >&2; exit 3"))
            assert await read_all(process) == b"out\nerr\n"
            assert await process.wait() == ExitStatus(code=3)
            await process.wait_empty()
            assert process.phase is ProcessPhase.EMPTY
            assert warden.running == 0


async def test_separate_stderr() -> None:
    """Standard error can be had apart from standard output."""
    async with open_warden() as warden:
        process = await warden.spawn(spec("echo out; echo err >&2", merge_stderr=False))
        assert process.errors is not None
        assert await read_all(process) == b"out\n"
        assert await process.errors.receive_some() == b"err\n"


async def test_argv_without_a_shell(tmp_path: Path) -> None:
    """An argv runs as it is, in its directory, with exactly the environment that was given and the warden's mark."""
    async with open_warden() as warden:
        process = await warden.spawn(
            ProcessSpec(argv=("/usr/bin/env",), cwd=str(tmp_path), env={"ONLY": "a b=c", "UML": "ä"})
        )
        lines = (await read_all(process)).decode().split("\n")
        assert [line for line in lines if not line.startswith("HERMES_TRIO_WARDEN=")] == ["ONLY=a b=c", "UML=ä", ""]
        where = await warden.spawn(ProcessSpec(argv=("pwd",), cwd=str(tmp_path), env={"PATH": os.environ["PATH"]}))
        assert (await read_all(where)).decode().strip() == str(tmp_path)


async def test_own_session_and_fresh_signals() -> None:
    """A command leads its own session and has no signal ignored or blocked by us."""
    async with open_warden() as warden:
        process = await warden.spawn(spec("grep -E 'Sig(Ign|Blk)' /proc/self/status; ps -o sid= -p $$"))
        lines = (await read_all(process)).decode().split()
        # 32 and 33 belong to the C library, which lets nobody change them; whoever started the tests may have them ignored.
        ours = ~(0b11 << 31)
        assert (int(lines[1], 16) & ours, int(lines[3], 16) & ours) == (0, 0)
        assert int(lines[4]) == process.pid


async def test_a_signal_is_told_truthfully() -> None:
    """A command that kills itself is reported with that signal, not with a code."""
    async with open_warden() as warden:
        process = await warden.spawn(spec("kill -USR1 $$"))
        status = await process.wait()
        assert status == ExitStatus(signal=10)
        assert (str(status), status.returncode) == ("killed by SIGUSR1", -10)


async def test_nothing_is_inherited_but_the_streams() -> None:
    """A command holds no descriptor of the server, the warden or its keeper."""
    async with open_warden() as warden:
        bystander = await warden.spawn(spec("cat", stdin=Stdin.PIPE))
        process = await warden.spawn(spec("ls /proc/$$/fd; true"))
        assert (await read_all(process)).split() == [b"0", b"1", b"2"]
        await bystander.aclose()


async def test_secrets_stay_out_of_the_process_list() -> None:
    """Neither the warden nor a keeper shows a command or its environment."""
    async with open_warden() as warden:
        process = await warden.spawn(
            ProcessSpec(argv=("sleep", "60"), cwd="/", env={"PATH": os.environ["PATH"], "KEY": "hush-hush"})
        )
        assert warden.warden_pid is not None
        for pid in (warden.warden_pid, process.keeper_pid):
            shown = shown_of(pid)
            assert b"hush-hush" not in shown
            assert b"sleep" not in shown
        assert "hush-hush" not in repr(process)
        assert "hush-hush" not in repr(process.spec)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cwd": "/no/such/place"}, "cannot start in '/no/such/place': No such file or directory"),
        ({"cwd": "relative"}, "cwd must be an absolute path, got 'relative'"),
        ({"command": None, "argv": ("/no/such/program",)}, "cannot execute '/no/such/program': No such file"),
        ({"command": None, "argv": ("/etc/passwd",)}, "cannot execute '/etc/passwd': Permission denied"),
        ({"command": None, "argv": ()}, "argv is empty"),
        ({"argv": ("ls",)}, "exactly one of them"),
        ({"command": "echo \0"}, "contains a NUL byte"),
        ({"env": {"A=B": "c"}}, "environment variable 'A=B'"),
    ],
)
async def test_spawn_failures_say_why(changes: dict[str, object], words: str) -> None:
    """What cannot be started is refused with the step, the thing and the reason, and leaves nothing."""
    with nothing_left():
        async with open_warden() as warden:
            with pytest.raises(SpawnFailed) as caught:
                await warden.spawn(msgspec.structs.replace(spec("true"), **changes))
            assert words in str(caught.value)
            assert warden.running == 0


async def test_a_large_command_line_and_environment() -> None:
    """A plan far larger than a socket's buffer arrives whole."""
    async with open_warden() as warden:
        env = {f"V{number}": "x" * 100_000 for number in range(10)} | {"PATH": os.environ["PATH"]}
        process = await warden.spawn(ProcessSpec(argv=("sh", "-c", "echo ${#V9}"), cwd="/", env=env))
        assert await read_all(process) == b"100000\n"


async def test_pipe_stdin() -> None:
    """What is written arrives, closing gives an end of file, and the process ends by itself."""
    async with open_warden() as warden:
        process = await warden.spawn(spec("cat; echo bye", stdin=Stdin.PIPE))
        await process.write(b"one\n")
        assert await read_until(process, b"one\n") == b"one\n"
        await process.close_stdin()
        await process.close_stdin()
        assert await read_all(process) == b"bye\n"
        assert await process.wait() == ExitStatus(code=0)
        with pytest.raises(StdinClosed, match="closed before"):
            await process.write(b"more")


async def test_stdin_that_nobody_reads() -> None:
    """Writing to a process without standard input, or one that has ended, is a clear error."""
    async with open_warden() as warden:
        silent = await warden.spawn(spec("cat"))
        assert await read_all(silent) == b""
        with pytest.raises(StdinClosed, match="no standard input"):
            await silent.write(b"x")
        with pytest.raises(StdinClosed, match="no standard input"):
            await silent.close_stdin()
        ended = await warden.spawn(spec("true", stdin=Stdin.PIPE))
        await ended.wait_empty()
        with pytest.raises(StdinClosed, match="no longer reads"):
            await ended.write(b"x")


async def test_a_terminal() -> None:
    """With a terminal the command has a controlling one, of the asked size, and reads what is written."""
    async with open_warden() as warden:
        process = await warden.spawn(
            msgspec.structs.replace(spec("tty; stty size; cat", stdin=Stdin.PTY), rows=11, cols=77)
        )
        shown = await read_until(process, b"11 77\r\n")
        assert b"/dev/pts/" in shown
        await process.write(b"hello\n")
        await read_until(process, b"hello\r\nhello\r\n")
        await process.close_stdin()
        assert await process.wait() == ExitStatus(code=0)
        assert await read_all(process) == b""


async def test_end_of_file_on_an_unfinished_terminal_line() -> None:
    """Closing the input of a terminal ends it even in the middle of a line."""
    async with open_warden() as warden:
        process = await warden.spawn(spec("stty -echo; echo ready; cat", stdin=Stdin.PTY))
        await read_until(process, b"ready\r\n")
        await process.write(b"half a line")
        await process.close_stdin()
        assert await read_all(process) == b"half a line"
        assert await process.wait() == ExitStatus(code=0)


async def test_control_c_reaches_the_foreground_of_a_terminal() -> None:
    """The interrupt character sent to a terminal kills the command: it is its controlling terminal."""
    async with open_warden() as warden:
        process = await warden.spawn(
            ProcessSpec(argv=("sleep", "60"), cwd="/", env={"PATH": os.environ["PATH"]}, stdin=Stdin.PTY)
        )
        await process.write(b"\x03")
        assert await process.wait() == ExitStatus(signal=2)


async def test_a_closed_output_is_no_exit() -> None:
    """A program that closes its output and runs on is running, and its real exit is told later (H15)."""
    async with open_warden() as warden:
        process = await warden.spawn(spec("exec >&- 2>&-; read line; exit 7", stdin=Stdin.PIPE))
        assert await read_all(process) == b""
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert (process.status, process.phase, warden.running) == (None, ProcessPhase.RUNNING, 1)
        await process.write(b"go\n")
        assert await process.wait() == ExitStatus(code=7)


async def test_an_exit_does_not_wait_for_descendants() -> None:
    """The command's exit is told at once; a descendant that runs on keeps the job from being empty (H8)."""
    mark = new_mark()
    async with open_warden() as warden:
        process = await warden.spawn(spec("sleep 60 & exit 5", mark))
        assert await process.wait() == ExitStatus(code=5)
        assert (process.phase, process.empty, len(marked(mark))) == (ProcessPhase.EXITED, False, 1)
        assert warden.running == 1
        report = await process.kill()
        assert (report.how, report.survivors) == (KillHow.SIGTERM, 0)
        assert await process.wait() == ExitStatus(code=5)
        assert (process.empty, marked(mark), warden.running) == (True, [], 0)


async def test_the_cap() -> None:
    """At the limit a start is refused with the number, and possible again as soon as one job is empty."""
    async with open_warden(max_processes=2) as warden:
        first = await warden.spawn(spec("sleep 60"))
        await warden.spawn(spec("sleep 60 & exit 0"))
        with pytest.raises(TooManyProcesses, match="limit of 2 running") as caught:
            await warden.spawn(spec("true"))
        assert caught.value.limit == 2
        await first.kill()
        await (await warden.spawn(spec("true"))).wait_empty()


async def test_the_cap_holds_for_starts_at_the_same_time() -> None:
    """Concurrent starts cannot pass the limit together."""
    refused = 0
    async with open_warden(max_processes=3) as warden:

        async def start() -> None:
            nonlocal refused
            try:
                await warden.spawn(spec("sleep 60"))
            except TooManyProcesses:
                refused += 1

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(start)
        assert (warden.running, refused) == (3, 7)


async def test_leaving_the_scope_kills_everything() -> None:
    """After the scope no process, child or descriptor is left, and the receipt says how many there were."""
    mark = new_mark()
    with nothing_left():
        async with open_warden() as warden:
            for number in range(5):
                await warden.spawn(spec("sleep 60 & sleep 60", mark, stdin=list(Stdin)[number % 3]))
        assert marked(mark) == []
        assert warden.receipt is not None
        assert (warden.receipt.killed, warden.receipt.survivors) == (5, 0)
    with pytest.raises(WardenClosed):
        await warden.spawn(spec("true"))


async def test_a_scope_that_starts_nothing_starts_no_warden() -> None:
    """The warden process is started by the first command, not by the scope."""
    with nothing_left():
        async with open_warden() as warden:
            assert warden.warden_pid is None


async def test_a_cancelled_scope_kills_everything() -> None:
    """Cancelling the owner of the scope ends it only when every process has ended."""
    mark = new_mark()
    with nothing_left():
        with trio.CancelScope() as scope:
            async with open_warden() as warden:
                await warden.spawn(spec("trap '' TERM; sleep 60", mark))
                scope.cancel()
                await trio.sleep_forever()
        assert scope.cancelled_caught
        assert marked(mark) == []


async def test_an_error_leaves_the_scope_as_it_is() -> None:
    """What the body raises comes out unwrapped, after everything was killed."""
    mark = new_mark()

    async def fail() -> None:
        async with open_warden() as warden:
            await warden.spawn(spec("sleep 60", mark))
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        await fail()
    assert marked(mark) == []


@pytest.mark.parametrize("steps", range(12))
async def test_a_cancelled_spawn_leaves_nothing(steps: int) -> None:
    """Wherever in its course a start is cancelled, nothing of it runs when it returns."""
    mark = new_mark()
    with nothing_left():
        async with open_warden() as warden:
            if steps % 2:
                await (await warden.spawn(spec("true"))).wait_empty()
            started = False
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:

                    async def cancel() -> None:
                        for _ in range(steps // 2):
                            await trio.lowlevel.checkpoint()
                        scope.cancel()

                    nursery.start_soon(cancel)
                    await warden.spawn(spec("sleep 60", mark))
                    started = True
            assert started or marked(mark) == []
            assert started or warden.running == 0
        assert marked(mark) == []


async def test_cancelling_a_wait_leaves_the_process() -> None:
    """A cancelled wait or read is only that: the process runs on, and can be waited for again."""
    async with open_warden() as warden:
        process = await warden.spawn(spec("read line; exit 4", stdin=Stdin.PIPE))
        with trio.move_on_after(0.01):
            await process.wait()
        with trio.move_on_after(0.01):
            await process.output.receive_some()
        assert process.status is None
        await process.write(b"\n")
        assert await process.wait() == ExitStatus(code=4)


async def test_an_owner_that_leaves() -> None:
    """Used as a context manager, a process does not outlive the block."""
    mark = new_mark()
    async with open_warden() as warden:
        async with await warden.spawn(spec("sleep 60", mark)) as process:
            assert process.phase is ProcessPhase.RUNNING
        assert marked(mark) == []
        with pytest.raises(trio.ClosedResourceError):
            await process.output.receive_some()


async def test_attendants_do_not_inherit_the_context_of_a_caller() -> None:
    """The tasks that look after a process carry the context of the scope, not that of whoever called spawn."""
    from contextvars import ContextVar

    turn: ContextVar[str] = ContextVar("turn", default="none")
    async with open_warden() as warden:
        turn.set("a turn")
        await warden.spawn(spec("sleep 60"))
        seen = {task.name: task.context.get(turn) for task in warden._nursery.child_tasks}
        assert len(seen) == 2
        assert set(seen.values()) == {None}


async def test_the_server_is_a_subreaper_only_inside() -> None:
    """The sub-reaper attribute is on while a scope is open, nested or not, and off after the last."""
    assert not prctl.is_subreaper()
    async with open_warden():
        async with open_warden():
            assert prctl.is_subreaper()
        assert prctl.is_subreaper()
    assert not prctl.is_subreaper()


async def test_commands_are_offered_to_the_kernel_first() -> None:
    """When memory runs out, a command and its descendants are likelier to be chosen than the server."""
    async with open_warden() as warden:
        process = await warden.spawn(spec("(cat /proc/self/oom_score_adj)"))
        own = oom.score(os.getpid())
        assert own is not None
        assert int(await read_all(process)) == oom.command_score(own) > own
        assert warden.warden_pid is not None
        assert oom.score(warden.warden_pid) == own


async def test_the_mark_of_the_test_is_in_the_environment() -> None:
    """The witness itself works: it finds what runs and does not find what has ended."""
    mark = new_mark()
    async with open_warden() as warden:
        process = await warden.spawn(spec(f"test -n ${MARK} && sleep 60", mark))
        assert process.pid in marked(mark)
        await process.kill()
        await gone(mark)


async def test_another_system_than_linux_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that embeds the tools elsewhere reads what its kernel lacks, before any process is started."""
    monkeypatch.setattr("hermes_trio.tools.warden.warden.sys.platform", "darwin")
    with pytest.raises(UnsupportedPlatform, match="Linux sub-reapers, and this is darwin"):
        async with open_warden():
            pass
