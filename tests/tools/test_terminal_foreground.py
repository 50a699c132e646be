"""The terminal in the foreground: results, limits, refusals, time-outs, and what is left behind (TOOL-1 to TOOL-34)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from hermes_trio import SessionContext, Turn
from hermes_trio.agent.command_policy import ApprovalSettings
from hermes_trio.runtime.errors import NoRuntime

from .bench_of_tools import call, open_bench, running, until

ANYTHING = ApprovalSettings(mode=False)
"""Nobody is asked: for tests whose commands would otherwise need approval."""


async def test_output_and_exit_code() -> None:
    """TOOL-14, TOOL-15: output and errors come merged and trimmed, without escape sequences; a failing command is no error."""
    async with open_bench() as bench:
        assert await bench.run("printf '  \\033[31mred\\033[0m\\n'; echo err >&2; exit 3") == {
            "output": "red\nerr",
            "exit_code": 3,
            "error": None,
        }


async def test_wrong_arguments_are_told_and_nothing_runs() -> None:
    """TOOL-1: a command that is no text, is missing or empty, or an argument that does not exist, gives exit code -1 and says what is wrong."""
    async with open_bench() as bench:
        for arguments, words in (
            ({"command": 7}, "Expected `str`, got `int` - at `$.command`"),
            ({}, "missing required field `command`"),
            ({"command": "  "}, "command is empty"),
            ({"command": "true", "comand": 1}, "unknown field `comand`"),
            ({"command": "true", "timeout": 0}, ">= 1"),
            ({"command": "echo \0"}, "NUL"),
        ):
            result = await bench.use("terminal", arguments)
            assert (result["exit_code"], result["status"]) == (-1, "error")
            assert words in result["error"]


async def test_a_timeout_above_the_ceiling_is_refused() -> None:
    """TOOL-4: a foreground time limit above the ceiling is rejected before anything runs, with nothing but an error."""
    async with open_bench() as bench:
        result = await bench.run("true", timeout=601)
        assert list(result) == ["error"]
        assert "limit of 600 s" in result["error"]


async def test_workdir(tmp_path: Path) -> None:
    """TOOL-5: a working directory is for one call, may be relative, is refused with odd characters, and a missing one is the shell's own error."""
    (tmp_path / "in ner").mkdir()
    async with open_bench(table={"terminal": {"cwd": str(tmp_path)}}) as bench:
        assert (await bench.run("pwd", workdir="in ner"))["output"] == str(tmp_path / "in ner")
        assert (await bench.run("pwd"))["output"] == str(tmp_path)
        assert (await bench.run("pwd", workdir=str(tmp_path)))["output"] == str(tmp_path)
        odd = await bench.run("pwd", workdir="/tmp; rm x")
        assert (odd["status"], odd["exit_code"]) == ("blocked", -1)
        missing = await bench.run("touch ran", workdir="none")
        assert missing == {"output": "cd: none: No such file or directory", "exit_code": 126, "error": None}
        assert not (tmp_path / "ran").exists()


async def test_a_command_has_no_input_and_its_own_session() -> None:
    """TOOL-16: each call is a new shell that leads its own session, with the null device as input."""
    async with open_bench() as bench:
        result = await bench.run("cat; ps -o sid= -p $$ | tr -d ' '; echo $$")
        sid, pid = result["output"].split()
        assert sid == pid


async def test_a_command_that_takes_too_long() -> None:
    """TOOL-20: at the time limit the whole group is ended, what it wrote is kept, and the exit code is 124."""
    async with open_bench(policy=ANYTHING) as bench:
        result = await bench.run("echo begun; sh -c 'exec sleep 60.0625'", timeout=1)
        begun, note = result["output"].split("\n")
        assert (begun, result["exit_code"], result["error"]) == ("begun", 124, None)
        assert "timed out after 1 s" in note
        assert not running("sleep 60.0625")


async def test_a_command_that_ignores_sigterm_is_killed() -> None:
    """TOOL-20: what does not end at SIGTERM is killed after the grace, also while it floods its output."""
    async with open_bench(table={"terminal": {"foreground_grace": 0.2}}) as bench:
        result = await bench.run("trap '' TERM; echo begun; while :; do echo yyyy-flood; done", timeout=1)
        assert result["exit_code"] == 124
        assert result["output"].startswith("begun")
        assert not running("yyyy-flood")


async def test_stopping_the_turn_ends_the_command_and_keeps_its_output() -> None:
    """TOOL-21: stop ends the group at once; the receipt says how, and the partial output stays with exit code 130."""
    async with open_bench() as bench:
        turns: list[Turn] = []

        async def body(turn: Turn) -> None:
            turns.append(turn)
            await call(bench.box, turn, "terminal", {"command": "echo begun; sleep 60"})

        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.in_turn, body)
            await until(
                lambda: any(node.kind == "process" and node.waits_on for node in bench.runtime.tree.root.walk())
            )
            await trio.sleep(0.1)
            receipt = await turns[0].stop()
        assert receipt.ok
        (line,) = [line for line in receipt.lines if line.kind == "process"]
        assert line.how == "SIGTERM"
        assert line.waited_on.startswith("process ")
        assert not bench.box.warden.processes
        (kept,) = (value for key, value in (turns[0].state or {}).items() if key.startswith("partial"))
        assert msgspec.json.decode(kept) == {
            "output": "begun\n[Command interrupted: the turn was stopped]",
            "exit_code": 130,
            "error": None,
        }


async def test_what_a_command_leaves_behind_ends_with_it() -> None:
    """TOOL-22, H7: output ends soon after the shell although a grandchild holds the pipe, and that grandchild is not left running."""
    async with open_bench(policy=ANYTHING) as bench:
        code = "import os,time\nif os.fork(): print('parent done', flush=True); os._exit(0)\nos.setsid(); print('child too', flush=True); time.sleep(60.0626)"
        result = await bench.run(f'python3 -c "{code}"')
        assert "parent done" in result["output"]
        assert "left behind were ended" in result["note"]
        assert "child too" in result["output"]
        assert not running("60.0626")


async def test_long_output_keeps_both_ends() -> None:
    """TOOL-23: output above the cap keeps its beginning and its end and says how much is missing."""
    async with open_bench(table={"terminal": {"output_characters": 1000}}) as bench:
        result = await bench.run("echo first; seq 1 100000; echo last")
        assert result["output"].startswith("first\n1\n")
        assert result["output"].endswith("100000\nlast")
        assert "characters left out" in result["output"]
        assert len(result["output"]) < 1200


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("grep nothing /dev/null", 1, "nothing matched"),
        ("echo a | grep b", 1, "nothing matched"),
        ("diff <(echo a) <(echo b)", 1, "differ"),
        ("[ 1 = 2 ]", 1, "false"),
        ("false", 1, None),
    ],
)
async def test_benign_exit_codes_are_explained(command: str, code: int, words: str | None) -> None:
    """TOOL-25: the exit code of a known command that only says no comes with its meaning."""
    async with open_bench() as bench:
        result = await bench.run(command)
        assert result["exit_code"] == code
        assert result.get("exit_code_meaning", "") == "" if words is None else words in result["exit_code_meaning"]


@pytest.mark.parametrize(
    "command", ["sleep 9 &", "nohup sleep 9", "setsid sleep 9", "python3 -m http.server", "npm run dev"]
)
async def test_what_would_detach_or_never_end_is_refused(command: str) -> None:
    """TOOL-26: in the foreground such commands are refused with the advice to use the background."""
    async with open_bench(policy=ANYTHING) as bench:
        result = await bench.run(command)
        assert (result["exit_code"], result["status"]) == (-1, "error")
        assert "background=true" in result["error"]


async def test_stopping_the_gateway_is_refused() -> None:
    """TOOL-33: a command that would stop this very gateway is refused in every mode."""
    async with open_bench(policy=ANYTHING) as bench:
        result = await bench.run("pkill -f hermes-trio")
        assert result["exit_code"] == 1
        assert "gateway" in result["error"]


async def test_a_signal_is_told_as_such() -> None:
    """A command that a signal ended has the negative code and the signal's name."""
    async with open_bench(policy=ANYTHING) as bench:
        result = await bench.run("python3 -c 'import os; os.kill(os.getppid(), 10)'; sleep 9")
        assert (result["exit_code"], result["signal"]) == (-10, "SIGUSR1")


async def test_secrets_in_the_output_are_masked() -> None:
    """TOOL-15: what looks like a secret is not shown."""
    async with open_bench() as bench:
        result = await bench.run("echo API_KEY=abcdef123456 ok")
        assert result["output"] == "API_KEY=*** ok"


async def test_too_many_processes_of_a_session_are_refused() -> None:
    """A session's processes are limited, foreground ones included; the refusal says what to do, and other sessions are not touched."""
    async with open_bench(table={"terminal": {"max_processes_per_session": 2}}) as bench:
        for _ in range(2):
            assert "session_id" in await bench.run("sleep 60", background=True)
        for background in (True, False):
            refused = await bench.run("echo hello", background=background)
            assert refused["exit_code"] == -1
            assert "2 processes, which is the limit" in refused["error"]
        assert (await bench.run("echo hello", session="other"))["output"] == "hello"


async def test_the_limit_of_all_processes() -> None:
    """The limit over all sessions is a clear refusal too."""
    async with open_bench(table={"terminal": {"max_processes": 1}}) as bench:
        await bench.run("sleep 60", background=True)
        refused = await bench.run("echo hello", session="other")
        assert "limit of 1 running processes" in refused["error"]


async def test_parallel_commands_of_a_turn() -> None:
    """TOOL-34: commands of one turn run side by side, without a batch deadline."""
    async with open_bench() as bench:
        found: list[dict[str, Any]] = []

        async def body(turn: Turn) -> None:
            async def one(number: int) -> None:
                found.append(await call(bench.box, turn, "terminal", {"command": f"sleep 0.3; echo {number}"}))

            async with trio.open_nursery() as nursery:
                for number in range(8):
                    nursery.start_soon(one, number)

        with trio.fail_after(20):
            await bench.in_turn(body)
        assert sorted(result["output"] for result in found) == [str(number) for number in range(8)]


async def test_use_by_a_program_outside_any_turn() -> None:
    """Outside any turn the terminal belongs to the open Runtime; without one it says so."""
    async with open_bench() as bench:
        assert (await bench.box.terminal("echo hello"))["output"] == "hello"
        terminal = bench.box.terminal
    with pytest.raises(NoRuntime, match="open one with"):
        await terminal("echo hello")


async def test_identity_of_a_command() -> None:
    """A command's environment carries its own turn's session variables, all of them."""
    async with open_bench() as bench:
        found: dict[str, Any] = {}

        async def body(turn: Turn) -> None:
            found.update(await call(bench.box, turn, "terminal", {"command": "env | grep ^HERMES_SESSION_"}))

        await bench.in_turn(body, session="s7", platform="telegram", chat_id="42", thread_id="9")
        shown = dict(line.split("=", 1) for line in found["output"].split("\n"))
        context = SessionContext(session_id="s7", session_key="s7", platform="telegram", chat_id="42", thread_id="9")
        wanted = {name: value for name, value in context.environ().items() if name.startswith("HERMES_SESSION_")}
        assert {**shown, "HERMES_SESSION_KEY": "s7"} == wanted


def test_a_preview_is_one_line_without_secrets() -> None:
    """What people see of a call shows no secret."""
    from hermes_trio.tools.terminal.terminal import Terminal

    terminal = Terminal.__new__(Terminal)
    assert Terminal.preview(terminal, '{"command": "export API_KEY=abcdef123456\\n ls"}') == "export API_KEY=*** ls"


async def test_schema(tmp_path: Path) -> None:
    """The model sees the parameters of the reference and no others (TOOL-2 to TOOL-12)."""
    async with open_bench() as bench:
        parameters = bench.box.terminal.spec.parameters
        assert list(parameters["properties"]) == [
            "command",
            "background",
            "timeout",
            "workdir",
            "pty",
            "notify_on_complete",
            "watch_patterns",
        ]
        assert parameters["required"] == ["command"]


async def test_a_lost_warden_is_an_error_and_no_hang() -> None:
    """When the process layer loses a running command the result says so, and the next command works."""
    import os
    import signal

    async with open_bench() as bench:
        found: list[dict[str, Any]] = []

        async def lose() -> None:
            await until(lambda: any(process.pid for process in bench.box.warden.processes))
            pid = bench.box.warden.warden_pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

        async def use() -> None:
            found.append(await bench.run("sleep 60"))

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(use)
                nursery.start_soon(lose)
            assert found[0]["error"] or found[0].get("signal")
            assert (await bench.run("echo again"))["output"] == "again"
