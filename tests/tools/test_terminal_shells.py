"""What a session's shell remembers, and that nobody else's does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from hermes_trio import SessionContext, Turn
from hermes_trio.agent.command_policy import ApprovalSettings
from hermes_trio.runtime.outcome import CancelCause, Cause
from hermes_trio.tools.terminal import shell_state as shells
from hermes_trio.tools.terminal.shell_state import Lease, ShellStates, base_environment

from .bench_of_tools import call, open_bench


async def test_state_between_commands(tmp_path: Path) -> None:
    """TOOL-17, TOOL-18: directory, exported variables, functions and aliases are there for the next command, plain variables are not."""
    async with open_bench() as bench:
        await bench.run(
            f"cd {tmp_path}; export NAME='two  words\nand lines'; greet() {{ echo \"hello $1\"; }}; alias hi='greet alias'; PLAIN=1"
        )
        result = await bench.run('pwd; echo "$NAME"; greet you; hi; echo "[$PLAIN]"')
        assert result["output"] == f"{tmp_path}\ntwo  words\nand lines\nhello you\nhello alias\n[]"


async def test_sessions_do_not_share_state(tmp_path: Path) -> None:
    """H21: what one session exports, defines, or where it goes, no other session sees."""
    async with open_bench() as bench:
        await bench.run(f"cd {tmp_path}; export SECRET=mine; f() {{ :; }}; alias a=b", session="one")
        result = await bench.run("pwd; echo [$SECRET]; type f a 2>&1 | grep -c 'not found'", session="two")
        assert result["output"] == f"{os.getcwd()}\n[]\n2"


async def test_commands_side_by_side_keep_each_others_changes(tmp_path: Path) -> None:
    """H21: two commands of one session at the same time are each credited with their own changes, and neither undoes the other's."""
    async with open_bench() as bench:
        await bench.run("export A=old B=old")
        (tmp_path / "x").mkdir()

        async def body(turn: Turn) -> None:
            async with trio.open_nursery() as both:
                both.start_soon(call, bench.box, turn, "terminal", {"command": "export A=new; sleep 0.4"})
                both.start_soon(
                    call, bench.box, turn, "terminal", {"command": f"export B=new; cd {tmp_path}/x; sleep 0.1"}
                )

        await bench.in_turn(body)
        assert (await bench.run("echo $A $B; pwd"))["output"] == f"new new\n{tmp_path}/x"


@pytest.mark.parametrize(
    "command",
    [
        "cd /usr; export KEPT=1; exit 3",
        "set -e; cd /usr; export KEPT=1; false; echo never",
        "set -eu; cd /usr; export KEPT=1; : $unset_variable",
        "trap 'echo handler $?' EXIT; cd /usr; export KEPT=1; exit 7",
        "trap 'exit 5' EXIT; cd /usr; export KEPT=1; false",
        "trap - EXIT; cd /usr; export KEPT=1",
        "set -o noclobber; set -f; IFS=:; cd /usr; export KEPT=1",
        "set -o posix; cd /usr; export KEPT=1",
        "cd /usr; export KEPT=1; false | true; return 2>/dev/null",
        "cd /usr; export KEPT=1; (exit 4); (cd /; export KEPT=2; exit 1)",
        "cd /usr && export KEPT=1 && exec 2>&-",
        "printf() { :; }; declare() { :; }; cd /usr; export KEPT=1",
        "PATH=/nowhere; cd /usr; export KEPT=1",
    ],
)
async def test_state_survives_the_ways_in_which_a_shell_ends(command: str) -> None:
    """State is learned from the shell itself, not from its output: after `exit`, `set -e`, `set -u`, traps, noclobber and worse."""
    async with open_bench(policy=ApprovalSettings(mode=False)) as bench:
        await bench.run(command)
        assert (await bench.run("builtin echo $KEPT; builtin pwd"))["output"] == "1\n/usr"


async def test_a_handler_of_the_command_still_works() -> None:
    """An EXIT trap of the command runs, sees the exit status, and may change it."""
    async with open_bench() as bench:
        assert (await bench.run("trap 'echo bye $?' EXIT; exit 7")) == {
            "output": "bye 7",
            "exit_code": 7,
            "error": None,
        }
        assert (await bench.run("trap 'exit 5' EXIT; exit 7"))["exit_code"] == 5


async def test_output_that_looks_like_our_own_means_nothing() -> None:
    """TOOL-17: no marker is read from the output, so a command cannot be mistaken for one."""
    async with open_bench() as bench:
        where = (await bench.run("pwd"))["output"]
        await bench.run("printf '/etc\\0A=1\\0#\\0'; echo __hermes_file")
        assert (await bench.run("pwd; echo [$A]"))["output"] == f"{where}\n[]"


async def test_a_command_that_replaces_the_shell_changes_nothing() -> None:
    """`exec` leaves nobody to write the state down: it stays as it was."""
    async with open_bench() as bench:
        await bench.run("export A=1")
        await bench.run("export A=2; exec true")
        assert (await bench.run("echo $A"))["output"] == "1"


async def test_a_time_out_changes_nothing() -> None:
    """A command that was ended by force leaves the state as it was."""
    async with open_bench() as bench:
        where = (await bench.run("pwd"))["output"]
        await bench.run("cd /; sleep 30", timeout=1)
        assert (await bench.run("pwd"))["output"] == where


async def test_a_directory_that_was_removed_does_not_wedge_the_session(tmp_path: Path) -> None:
    """A session whose directory has gone starts again in the default one."""
    (tmp_path / "gone").mkdir()
    async with open_bench(table={"terminal": {"cwd": str(tmp_path)}}) as bench:
        await bench.run("cd gone")
        (tmp_path / "gone").rmdir()
        assert (await bench.run("pwd"))["output"] == str(tmp_path)


async def test_a_background_command_starts_with_the_state_and_does_not_change_it(tmp_path: Path) -> None:
    """A background command sees the session's directory, variables and functions; its own changes stay its own."""
    async with open_bench() as bench:
        await bench.run(f"cd {tmp_path}; export A=1; f() {{ echo from f; }}")
        started = await bench.run("pwd; echo $A; f; cd /; export A=2", background=True)
        ended = await bench.use("process", {"action": "wait", "session_id": started["session_id"]})
        assert ended["output"] == f"{tmp_path}\n1\nfrom f\n"
        assert (await bench.run("pwd; echo $A"))["output"] == f"{tmp_path}\n1"


async def test_identity_cannot_be_forged() -> None:
    """A session that exports another session's variables gets its own back with the next command."""
    async with open_bench() as bench:
        await bench.run("export HERMES_SESSION_ID=somebody-else HERMES_SESSION_PLATFORM=telegram")
        assert (await bench.run("echo $HERMES_SESSION_ID,$HERMES_SESSION_PLATFORM"))["output"] == "s1,"


async def test_the_gateway_s_environment_stays_with_the_gateway() -> None:
    """Commands get an allow-list of the server's environment: no key, no session of whoever started the server; the operator may add names."""
    server = {
        "PATH": os.environ["PATH"],
        "HOME": "/tmp",
        "LC_ALL": "C.UTF-8",
        "OPENAI_API_KEY": "sk-secret",
        "HERMES_SESSION_ID": "of the parent",
        "DATABASE_URL": "postgres://u:p@h/d",
        "MY_TOOL_HOME": "/opt",
    }
    async with open_bench(environment=server, table={"terminal": {"pass_environment": ["MY_TOOL_*"]}}) as bench:
        shown = (await bench.run("env"))["output"]
        assert "sk-secret" not in shown
        assert "of the parent" not in shown
        assert "DATABASE_URL" not in shown
        assert "MY_TOOL_HOME=/opt" in shown
        assert "LC_ALL=C.UTF-8" in shown


def test_idle_and_surplus_sessions_are_forgotten_but_none_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """H29: state goes when it was idle for long or there is too much of it, never while a command holds a lease."""
    now = [0.0]
    monkeypatch.setattr(shells, "MAX_SESSIONS", 3)
    held = ShellStates(base_environment({}), "/", lambda: now[0])
    used = SessionContext(session_id="used")
    with held.lease(used):
        now[0] = 2 * shells.IDLE_SECONDS
        for number in range(6):
            held.inherit(used, SessionContext(session_id=f"s{number}"))
        assert "used" in held._sessions
        assert len(held) <= 4
    now[0] *= 3
    held.cwd_of(SessionContext(session_id="new"))
    assert list(held._sessions) == ["new"]


async def test_a_session_that_is_over_leaves_nothing_to_the_next_one_of_its_id(tmp_path: Path) -> None:
    """Directory, variables, functions and aliases are gone for it, and for no other session; nothing else may be known of it either."""
    async with open_bench(table={"terminal": {"cwd": str(tmp_path)}}) as bench:
        for session in ("s1", "s2"):
            await bench.run("cd /usr; export KEPT=1; greet() { echo hello; }; alias hi='echo hi'", session=session)
        await bench.box.end_conversation("s1", "s1", "the conversation was started anew")
        await bench.box.end_conversation("s1", "", "there was no session")
        look = "pwd; echo ${KEPT-nothing}; type -t greet hi"
        assert (await bench.run(look))["output"].split() == [str(tmp_path), "nothing"]
        assert (await bench.run(look, session="s2"))["output"].split() == ["/usr", "1", "function", "alias"]


def leave(lease: Lease, state: bytes) -> None:
    """Write as the shell does: through the descriptor that it inherits, whose position it moves."""
    descriptor = lease.inherited[-1]
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.write(descriptor, state)


def test_a_command_that_outlives_its_session_leaves_nothing_behind() -> None:
    """It keeps the state that it was given; what it changed is not merged into what came after it."""
    held = ShellStates(base_environment({}), "/", lambda: 0.0)
    context = SessionContext(session_id="s")
    with held.lease(context, cwd="/usr") as outlived:
        outlived.argv("true", keep=True)
        held.forget("s")
        with held.lease(context) as next_one:
            assert (next_one.cwd, len(held)) == ("/", 1)
        leave(outlived, b"/tmp\0LEFT=behind\0#\0\0#\0")
        outlived.take_back()
    assert outlived.cwd == "/usr"
    assert held.cwd_of(context) == "/"
    with held.lease(context) as later:
        assert "LEFT" not in later.environment


def test_state_travels_in_files_without_a_name() -> None:
    """Nothing of a shell's state lies in a folder, and what the command inherits is closed with the lease."""
    held = ShellStates(base_environment({}), "/", lambda: 0.0)
    context = SessionContext(session_id="s")
    with held.lease(context) as first:
        first.argv("true", keep=True)
        leave(first, b"/usr\0A=1\0#\0greet () { echo; }\0#\0")
        first.take_back()
    with held.lease(context) as second:
        second.argv("true", keep=True)
        given, left = second.inherited
        assert os.readlink(f"/proc/self/fd/{given}").startswith("/memfd:")
        assert os.pread(given, 100, 0) == b"greet () { echo; }"
        with pytest.raises(PermissionError):
            os.write(given, b"more")
        with pytest.raises(PermissionError):
            os.pwrite(left, b"more", 2 * shells.MAX_STATE)
    for descriptor in (given, left):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_a_state_that_is_too_large_or_cut_off_is_not_kept() -> None:
    """A session cannot fill the server's memory with variables, and a shell that was killed while it wrote changes nothing."""
    held = ShellStates(base_environment({}), "/", lambda: 0.0)
    with held.lease(SessionContext(session_id="s")) as lease:
        lease.argv("true", keep=True)
        for state in (
            b"/usr\0A=" + b"x" * shells.MAX_STATE + b"\0#\0\0#\0",
            b"/usr\0A=1\0",
            b"/usr\0A=1\0#\0f () { :",
            b"/usr\0A=1\0#\0" + b"f" * (shells.MAX_STATE + 1) + b"\0#\0",
        ):
            leave(lease, state)
            lease.take_back()
            assert held.cwd_of(SessionContext(session_id="s")) == "/"
        leave(lease, b"/usr\0A=1\0#\0\0#\0")
        lease.take_back()
        assert held.cwd_of(SessionContext(session_id="s")) == "/usr"


async def test_without_bash_commands_still_run() -> None:
    """Where there is no bash, commands run in sh; only the state between them is missing."""
    async with open_bench() as bench:
        bench.box.shells.bash = None
        assert (await bench.run("echo $0; cd /usr"))["output"] == "/bin/sh"


@pytest.mark.parametrize("how", ["ended", "stopped", "one shot"])
async def test_a_session_that_has_ended_leaves_no_shell(tmp_path: Path, how: str) -> None:
    """However a session ends, what comes under its id afterwards starts where every session starts."""
    async with open_bench() as bench:
        before = (await bench.run("pwd"))["output"]
        command = {"command": f"cd {tmp_path}; export LEFT=behind"}
        if how == "one shot":

            async def agent(turn: Turn) -> str:
                await call(bench.box, turn, "terminal", command)
                return "done"

            context = SessionContext(session_id="s1", session_key="s1")
            await bench.runtime.run_turn("go", context, agent=agent, one_shot="run_complete")
        else:
            await bench.use("terminal", command)
            assert (await bench.run("echo $LEFT"))["output"] == "behind"
        if how == "ended":
            await bench.runtime.core.end_session("s1", "user")
        elif how == "stopped":
            await bench.runtime.stop_session("s1", Cause(CancelCause.SESSION_ENDED))
        assert (await bench.run("pwd; echo [$LEFT]"))["output"] == f"{before}\n[]"


async def test_a_stop_keeps_the_shell() -> None:
    """A session whose work is stopped goes on: its variables are still there."""
    async with open_bench() as bench:
        await bench.run("export LEFT=behind")
        await bench.runtime.stop_session("s1")
        assert (await bench.run("echo $LEFT"))["output"] == "behind"
