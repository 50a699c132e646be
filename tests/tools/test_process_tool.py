"""The process tool: looking, waiting, talking and ending, each for one's own session only (TOOL-56 to TOOL-77, TOOL-97, TOOL-98)."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
import trio

from hermes_trio import Turn
from hermes_trio.agent.command_policy import ApprovalSettings
from hermes_trio.runtime.outcome import JobState

from .bench_of_tools import Bench, call, gone, open_bench, until

ANYTHING = ApprovalSettings(mode=False)


async def use(bench: Bench, action: str, started: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """The process tool in a turn of its own."""
    arguments = {"action": action, **more}
    if started is not None:
        arguments["session_id"] = started["session_id"]
    return await bench.use("process", arguments)


async def finished(bench: Bench, started: dict[str, Any]) -> None:
    """Wait for the end without marking it as seen."""
    record = bench.box.processes.find(started["session_id"], "s1")
    assert record is not None
    with trio.fail_after(15):
        await record.job.wait()


async def written(bench: Bench, started: dict[str, Any], text: str) -> None:
    """Wait until a process has written something."""
    record = bench.box.processes.find(started["session_id"], "s1")
    assert record is not None
    await until(lambda: text in record.output.text)


async def inbox(bench: Bench) -> int:
    return (await bench.runtime.store.backlog())["inbox"]


async def test_mistakes_are_told() -> None:
    """TOOL-56, TOOL-57: a missing id, an unknown action or id, and wrong arguments are errors that say what would be right; numbers are taken as ids."""
    async with open_bench() as bench:
        assert "session_id is needed" in (await use(bench, "poll"))["error"]
        assert "the actions are list, poll" in (await use(bench, "look"))["error"]
        unknown = await use(bench, "poll", session_id="proc_nobody")
        assert unknown["status"] == "not_found"
        assert "process(action='list')" in unknown["error"]
        assert (await use(bench, "poll", session_id=123456))["status"] == "not_found"
        assert "timeout" in (await use(bench, "wait", session_id="x", timeout=0))["error"]


async def test_list() -> None:
    """TOOL-58, H22: a session lists all of its own processes, running and ended, with these fields."""
    async with open_bench() as bench:
        running = await bench.run("echo up; sleep 60", background=True)
        over = await bench.run("echo gone; exit 3", background=True, notify_on_complete=True)
        await finished(bench, over)
        await written(bench, running, "up")
        first, second = (await use(bench, "list"))["processes"]
        assert first["session_id"] == running["session_id"]
        assert (first["command"], first["pid"], first["status"]) == ("echo up; sleep 60", running["pid"], "running")
        assert first["output_preview"] == "up\n"
        assert "exit_code" not in first
        assert datetime.fromisoformat(first["started_at"]).tzinfo is not None
        assert first["uptime_seconds"] >= 0
        assert first["cwd"]
        assert (second["status"], second["exit_code"], second["notify_on_complete"]) == ("exited", 3, True)


async def test_a_session_sees_and_touches_only_its_own() -> None:
    """TOOL-69: another session's id is unknown, whatever is asked of it."""
    async with open_bench() as bench:
        started = await bench.run("cat", background=True, session="owner")
        for action in ("poll", "log", "wait", "kill", "write", "submit", "close"):
            answer = await use(bench, action, started, data="x", timeout=1)
            assert answer["status"] == "not_found"
        assert (await use(bench, "list"))["processes"] == []
        assert not gone(started["pid"])


async def test_poll() -> None:
    """TOOL-60, TOOL-98: poll shows status and last output, changes nothing, and does not swallow the promised notice."""
    async with open_bench() as bench:
        started = await bench.run("seq 1 1000; exit 5", background=True, notify_on_complete=True)
        await finished(bench, started)
        polled = await use(bench, "poll", started)
        assert (polled["status"], polled["exit_code"]) == ("exited", 5)
        assert (polled["completion_reason"], polled["termination_source"]) == ("exited", "")
        assert polled["output_preview"].endswith("999\n1000\n")
        assert len(polled["output_preview"]) == 1000
        assert await use(bench, "poll", started) == polled
        assert await inbox(bench) == 1


async def test_log() -> None:
    """TOOL-61: the log shows the last lines, or a slice, and says which; reading an ended one to its end counts as having seen the end."""
    async with open_bench() as bench:
        started = await bench.run("seq 1 500", background=True, notify_on_complete=True)
        await finished(bench, started)
        some = await use(bench, "log", started, offset=10, limit=2)
        assert (some["output"], some["total_lines"], some["showing"]) == ("11\n12", 500, "lines 11-12 of 500")
        assert await inbox(bench) == 1
        last = await use(bench, "log", started)
        assert last["output"].split("\n")[0] == "301"
        assert last["showing"] == "lines 301-500 of 500"
        assert await inbox(bench) == 0


async def test_wait_for_the_end() -> None:
    """TOOL-62, TOOL-63, TOOL-97: wait wakes at the exit with its data, and the end is not told a second time."""
    async with open_bench() as bench:
        started = await bench.run("sleep 0.3; echo over; exit 6", background=True, notify_on_complete=True)
        ended = await use(bench, "wait", started)
        assert (ended["status"], ended["exit_code"], ended["output"]) == ("exited", 6, "over\n")
        assert await inbox(bench) == 0
        job = await bench.runtime.store.get_job(started["session_id"])  # type: ignore[attr-defined]
        assert job.state is JobState.EXITED


async def test_wait_that_times_out() -> None:
    """TOOL-62, TOOL-63: a wait ends at its own time limit with what there is; it is not stopped, and the notice still comes."""
    async with open_bench(table={"terminal": {"timeout": 1}}) as bench:
        started = await bench.run("echo begun; sleep 2", background=True, notify_on_complete=True)
        waited = await use(bench, "wait", started, timeout=9999)
        assert (waited["status"], waited["output"]) == ("timeout", "begun\n")
        assert "shortened to the limit of 1 s" in waited["timeout_note"]
        assert not gone(started["pid"])
        await finished(bench, started)
        assert await inbox(bench) == 1


async def test_wait_does_not_hang_on_a_held_pipe() -> None:
    """H8: a wait keeps its own deadline although a descendant holds the pipe and writes nothing."""
    async with open_bench(policy=ANYTHING, table={"terminal": {"leftover_grace": 30}}) as bench:
        started = await bench.run("(sleep 60 &); exit 0", background=True)
        with trio.fail_after(5):
            assert (await use(bench, "wait", started, timeout=1))["status"] == "timeout"
            assert (await use(bench, "poll", started))["status"] == "exited"


async def test_a_stop_does_not_wait_for_leftovers() -> None:
    """A job whose command has exited is stopped at once, whatever its leftovers were allowed; its end stays an exit."""
    async with open_bench(policy=ANYTHING, table={"terminal": {"leftover_grace": 60}}) as bench:
        started = await bench.run("(sleep 60 &); exit 3", background=True, notify_on_complete=True)
        record = bench.box.processes.find(started["session_id"], "s1")
        assert record is not None
        await until(lambda: record.status is not None)
        with trio.fail_after(5):
            answer = await use(bench, "kill", started)
        assert (answer["status"], answer["exit_code"], answer["completion_reason"]) == ("already_exited", 3, "exited")
        assert not bench.box.warden.processes
        job = await bench.runtime.store.get_job(started["session_id"])  # type: ignore[attr-defined]
        assert job.state is JobState.EXITED


async def test_stopping_the_turn_ends_the_wait_and_not_the_process() -> None:
    """TOOL-62: an interrupted wait leaves what it had; the process goes on."""
    async with open_bench() as bench:
        started = await bench.run("echo begun; sleep 60", background=True)
        await written(bench, started, "begun")
        turns: list[Turn] = []

        async def body(turn: Turn) -> None:
            turns.append(turn)
            await call(bench.box, turn, "process", {"action": "wait", "session_id": started["session_id"]})

        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.in_turn, body)
            await until(lambda: turns and f"process {started['session_id']}" in turns[0].node.waits_on)
            assert (await turns[0].stop()).ok
        (kept,) = (value for key, value in (turns[0].state or {}).items() if key.startswith("partial"))
        left = msgspec.json.decode(kept)
        assert (left["status"], left["output"]) == ("interrupted", "begun\n")
        assert not gone(started["pid"])


async def test_kill() -> None:
    """TOOL-64, TOOL-97: kill ends the process and everything of it, says how, and its end is not told a second time."""
    async with open_bench() as bench:
        started = await bench.run("echo up; sleep 60", background=True, notify_on_complete=True)
        await written(bench, started, "up")
        killed = await use(bench, "kill", started)
        assert (killed["status"], killed["exit_code"], killed["signal"]) == ("killed", -15, "SIGTERM")
        assert (killed["completion_reason"], killed["termination_source"]) == ("killed", "process.kill")
        assert (killed["how"], killed["output"]) == ("SIGTERM", "up\n")
        assert gone(started["pid"])
        again = await use(bench, "kill", started)
        assert (again["status"], again["exit_code"]) == ("already_exited", -15)
        assert await inbox(bench) == 0


async def test_kill_tells_sigkill_and_last_words_truthfully() -> None:
    """TOOL-76: a process that needs SIGKILL has -9; one that ends itself at SIGTERM has its own code and its last words."""
    async with open_bench(policy=ANYTHING, table={"terminal": {"kill_grace": 0.3}}) as bench:
        deaf = await bench.run("trap '' TERM; echo up; while :; do sleep 1; done", background=True)
        await written(bench, deaf, "up")
        killed = await use(bench, "kill", deaf)
        assert (killed["exit_code"], killed["how"], killed["signal"]) == (-9, "SIGKILL", "SIGKILL")
    async with open_bench(policy=ANYTHING) as bench:
        tidy = await bench.run(
            "trap 'echo tidied; exit 7' TERM; echo up; while :; do sleep 0.05; done", background=True
        )
        await written(bench, tidy, "up")
        killed = await use(bench, "kill", tidy)
        assert (killed["exit_code"], killed["how"]) == (7, "SIGTERM")
        assert killed["output"].endswith("tidied\n")
        assert "signal" not in killed


async def test_kill_is_never_reported_as_an_exit() -> None:
    """H16: however often it is tried, a killed process is killed, in its result, its row and nowhere told as exited."""
    async with open_bench() as bench:
        for _ in range(10):
            started = await bench.run("sleep 60", background=True, notify_on_complete=True)
            assert (await use(bench, "kill", started))["completion_reason"] == "killed"
            job = await bench.runtime.store.get_job(started["session_id"])  # type: ignore[attr-defined]
            assert job.state is JobState.KILLED
        assert await inbox(bench) == 0


async def test_kill_after_its_own_end_says_so() -> None:
    """A process that had ended by itself is reported as such, and its waiting notice is taken back."""
    async with open_bench() as bench:
        started = await bench.run("exit 3", background=True, notify_on_complete=True)
        await finished(bench, started)
        assert await inbox(bench) == 1
        answer = await use(bench, "kill", started)
        assert (answer["status"], answer["exit_code"], answer["completion_reason"]) == ("already_exited", 3, "exited")
        assert await inbox(bench) == 0


async def test_talking_through_a_pipe() -> None:
    """TOOL-65, TOOL-66: write sends text as it is, submit adds Enter, close ends the input; all of it works without a terminal, too."""
    async with open_bench() as bench:
        started = await bench.run("while read line; do echo got: $line; done; echo over", background=True)
        assert (await use(bench, "write", started, data="one\ntw"))["bytes_written"] == 6
        assert (await use(bench, "submit", started, data="o"))["status"] == "ok"
        assert (await use(bench, "close", started))["status"] == "ok"
        ended = await use(bench, "wait", started)
        assert ended["output"] == "got: one\ngot: two\nover\n"
        for action in ("write", "submit", "close"):
            late = await use(bench, action, started, data="x")
            assert late["status"] == "already_exited"
            assert late["error"]


async def test_talking_to_a_terminal() -> None:
    """TOOL-6, TOOL-65: with pty the command has a terminal of 30 by 120, echoes what is typed, and takes an end of input."""
    async with open_bench() as bench:
        started = await bench.run("test -t 0 && stty size; cat; echo over", background=True, pty=True)
        await written(bench, started, "30 120")
        await use(bench, "submit", started, data="hello")
        await written(bench, started, "hello\r\nhello\r\n")
        await use(bench, "close", started)
        ended = await use(bench, "wait", started)
        assert ended["exit_code"] == 0
        assert "over" in ended["output"]


async def test_a_closed_input_is_an_error() -> None:
    """Writing after close is an error and not a hang."""
    async with open_bench() as bench:
        started = await bench.run("sleep 60", background=True)
        await use(bench, "close", started)
        answer = await use(bench, "write", started, data="x")
        assert (answer["status"], "closed" in answer["error"]) == ("error", True)


async def test_a_command_that_reads_a_token_gets_no_terminal() -> None:
    """TOOL-7: where input is piped in, a terminal would be in the way; the result says so."""
    async with open_bench() as bench:
        started = await bench.run("test -t 0 || echo piped; true --with-token", background=True, pty=True)
        assert "without a terminal" in started["pty_note"]
        assert (await use(bench, "wait", started))["output"] == "piped\n"


async def test_secrets_are_masked_everywhere() -> None:
    """TOOL-68: command and output are shown without secrets by every action, the list included."""
    secret = "ghp_" + "a1B2" * 9
    async with open_bench() as bench:
        started = await bench.run(f"echo {secret}; export API_TOKEN={secret}", background=True, notify_on_complete=True)
        await finished(bench, started)
        for answer in (
            started,
            await use(bench, "list"),
            await use(bench, "poll", started),
            await use(bench, "log", started),
            await use(bench, "wait", started),
            await use(bench, "kill", started),
        ):
            assert secret not in str(answer)
        job = await bench.runtime.store.get_job(started["session_id"])  # type: ignore[attr-defined]
        assert secret not in str(job)
        assert secret not in bench.runtime.tree.render()


async def test_the_ring_keeps_the_last_output() -> None:
    """TOOL-70: only the last characters are kept, and the log says that some are missing."""
    async with open_bench(table={"terminal": {"ring_characters": 1000}}) as bench:
        started = await bench.run("seq 1 10000", background=True)
        await finished(bench, started)
        log = await use(bench, "log", started, limit=1000)
        assert log["output"].endswith("10000")
        assert log["dropped_characters"] > 40_000
        assert log["total_lines"] < 250


async def test_ended_processes_are_kept_for_a_while_after_their_end() -> None:
    """TOOL-71, TOOL-72: the time counts from the end, not from the start; running ones are never forgotten; there is a bound."""
    async with open_bench(table={"terminal": {"keep_seconds": 0.5, "keep_count": 2}}) as bench:
        running = await bench.run("sleep 60", background=True)
        lasting = await bench.run("sleep 1", background=True)
        await finished(bench, lasting)
        assert (await use(bench, "poll", lasting))["status"] == "exited"
        await trio.sleep(0.6)
        assert (await use(bench, "poll", lasting))["status"] == "not_found"
        many = [await bench.run("true", background=True) for _ in range(4)]
        for one in many:
            record = bench.box.processes.find(one["session_id"], "s1")
            if record is not None:
                await record.job.wait()
        assert len((await use(bench, "list"))["processes"]) <= 3
        assert (await use(bench, "poll", running))["status"] == "running"


async def test_a_program_outside_any_turn() -> None:
    """The tool can be used by a program, too."""
    async with open_bench() as bench:
        started = await bench.box.terminal("echo hello", background=True)
        assert (await bench.box.process("wait", started["session_id"]))["output"] == "hello\n"


async def test_previews() -> None:
    """What people see of a call names the action and the process."""
    async with open_bench() as bench:
        assert bench.box.process.preview('{"action": "kill", "session_id": "proc_1"}') == "kill proc_1"
        assert bench.box.process.preview("nonsense") == "process"
