"""The terminal in the background: starting, telling, watching, and every way to end (TOOL-35 to TOOL-55, TOOL-84 to TOOL-100)."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from hermes_trio import CancelCause, Cause, InboxRow, NoticeKind, SessionContext, bind
from hermes_trio.agent.command_policy import ApprovalSettings
from hermes_trio.runtime.outcome import JobState
from hermes_trio.store import open_store
from hermes_trio.testing.fakes import FakeAdapter
from hermes_trio.tools.terminal.watching import OutputWatch
from hermes_trio.tools.warden import KeptProcess, KillHow, KillReport

from .bench_of_tools import Bench, gone, open_bench, open_demo, running, tool_results, until

ANYTHING = ApprovalSettings(mode=False)


async def next_notice(bench: Bench, seconds: float = 10.0) -> InboxRow:
    """The next notice of the in-process inbox."""
    with trio.fail_after(seconds):
        return await bench.runtime.completions().__anext__()


async def no_notice(bench: Bench) -> bool:
    """Whether nothing waits: everything that has ended is written down by now."""
    return (await bench.runtime.store.backlog())["inbox"] == 0


async def ended(bench: Bench, id: str, session: str = "s1") -> None:
    """Wait for the end of a process without looking at it through the tool."""
    record = bench.box.processes.find(id, session)
    assert record is not None
    with trio.fail_after(15):
        await record.job.wait()


async def test_the_result_of_a_start() -> None:
    """TOOL-35, TOOL-37: a start returns the id, the pid and a hint that nobody will be told."""
    async with open_bench() as bench:
        result = await bench.run("sleep 30", background=True)
        assert result["session_id"].startswith("proc_")
        assert len(result["session_id"]) == 17
        assert not gone(result["pid"])
        assert (result["exit_code"], result["error"]) == (0, None)
        assert "process(action='poll')" in result["hint"]


async def test_being_told_of_the_end() -> None:
    """TOOL-36, TOOL-85, TOOL-86: with notify_on_complete one notice comes, complete in itself, with routing and the facts as data."""
    async with open_bench() as bench:
        result = await bench.run("echo working; exit 4", background=True, notify_on_complete=True)
        assert result["notify_on_complete"] is True
        notice = await next_notice(bench)
        id = result["session_id"]
        assert notice.text == (
            f"[IMPORTANT: Background process {id} exited (exit code 4).\nCommand: echo working; exit 4\nOutput:\nworking]"
        )
        assert notice.notice is NoticeKind.COMPLETION
        assert (notice.session_key, notice.job_id) == ("s1", id)
        wanted = {
            "type": "completion",
            "session_id": id,
            "exit_code": 4,
            "completion_reason": "exited",
            "output": "working\n",
        }
        assert wanted.items() <= notice.payload.items()


async def test_a_very_fast_end_and_an_early_match_are_told() -> None:
    """H5, H6: routing, channel and patterns are fixed before the process exists, so nothing that happens at once is lost."""
    async with open_bench() as bench:
        told = []
        for _ in range(10):
            await bench.run("true", background=True, notify_on_complete=True)
            told.append((await next_notice(bench)).text)
        assert all("completed normally (exit code 0)" in text for text in told)
        await bench.run("echo ready", background=True, watch_patterns=["ready"])
        assert (await next_notice(bench)).notice is NoticeKind.WATCH_MATCH


async def test_both_options_exclude_each_other() -> None:
    """TOOL-10: with both, the end is told, the patterns are dropped, and the result says so."""
    async with open_bench() as bench:
        result = await bench.run("echo x", background=True, notify_on_complete=True, watch_patterns=["x"])
        assert result["notify_on_complete"] is True
        assert "dropped" in result["watch_patterns_ignored"]
        assert (await next_notice(bench)).notice is NoticeKind.COMPLETION


@pytest.mark.parametrize("options", [{"notify_on_complete": True}, {"watch_patterns": ["x"]}])
async def test_a_stateless_turn_promises_nothing(options: dict[str, Any]) -> None:
    """TOOL-38: without a channel the process runs, nothing is watched, the result says so and names poll, and poll works."""
    async with open_bench() as bench:
        result = await bench.run("echo x; sleep 30", stateless=True, background=True, **options)
        assert result["notify_on_complete"] is False
        assert "process(action='poll')" in result["notify_unsupported"]
        assert "watch_patterns" not in result
        (job,) = bench.runtime.supervisor.jobs("s1")
        assert not job.watched
        assert job.scope.deadline < trio.current_time() + 90_000
        polled = await bench.use("process", {"action": "poll", "session_id": result["session_id"]}, stateless=True)
        assert polled["status"] == "running"


async def test_a_launch_that_fails() -> None:
    """TOOL-39, TOOL-41: what cannot be started is an error with the reason; no process and no job is left."""
    async with open_bench() as bench:
        bench.box.shells.bash = "/no/such/shell"
        result = await bench.run("true", background=True, notify_on_complete=True)
        assert (result["output"], result["exit_code"]) == ("", -1)
        assert "/no/such/shell" in result["error"]
        assert await bench.use("process", {"action": "list"}) == {"processes": []}
        assert not bench.runtime.supervisor.jobs()
        assert await no_notice(bench)


async def test_routing_is_that_of_the_launching_turn() -> None:
    """TOOL-42, TOOL-92, TOOL-93: the notice carries platform, chat, thread, user and message of the turn that started the process."""
    async with open_demo() as bench, FakeAdapter().connect(bench.runtime) as adapter:
        await adapter.say("!bg echo done", chat="7", thread_id="t3", user_id="u1", message_id="m9")
        first, second = await adapter.wait_for(2)
        (started,) = tool_results(await bench.runtime.store.load_history(first.context.session_id))
        assert started["notify_on_complete"] is True
        assert "completed normally" in second.text
        assert second.context == first.context
        assert (second.context.chat_id, second.context.thread_id, second.context.message_id) == ("7", "t3", "m9")
        (notice,) = second.notices
        assert notice.routing.thread_id == "t3"


async def test_an_idle_conversation_is_told_of_a_match_at_once() -> None:
    """H3: a match reaches a chat in which nobody says anything."""
    async with open_demo() as bench, FakeAdapter().connect(bench.runtime) as adapter:
        await adapter.say("!watch ready echo starting; sleep 0.5; echo server ready; sleep 30")
        replies = await adapter.wait_for(2)
        assert 'matched watch pattern "ready"' in replies[1].text
        assert "server ready" in replies[1].text


async def test_a_match_across_chunks_and_in_an_unfinished_line() -> None:
    """H24: a pattern whose bytes come in two pieces matches, and so does a prompt without a line end."""
    async with open_bench() as bench:
        await bench.run("printf 'rea'; sleep 0.2; printf 'dy\\n'; sleep 20", background=True, watch_patterns=["ready"])
        assert "ready" in (await next_notice(bench)).text
        await bench.run("printf 'login: '; sleep 20", background=True, watch_patterns=["login:"])
        assert "login:" in (await next_notice(bench)).text


async def test_characters_cut_by_a_read_are_whole() -> None:
    """H24: a character whose bytes come apart is not broken."""
    async with open_bench() as bench:
        started = await bench.run("printf '\\xe2\\x82'; sleep 0.3; printf '\\xac\\n'", background=True)
        ended_ = await bench.use("process", {"action": "wait", "session_id": started["session_id"]})
        assert ended_["output"] == "€\n"


async def test_a_process_that_matches_too_often_is_told_of_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """H4, TOOL-48: when watching is given up the promised notice of the end comes, in an idle conversation too."""
    monkeypatch.setattr("hermes_trio.tools.terminal.watching.COOL_DOWN", 0.15)
    async with open_bench() as bench:
        await bench.run(
            "for i in $(seq 40); do echo hit $i; sleep 0.03; done; exit 2", background=True, watch_patterns=["hit"]
        )
        kinds: list[NoticeKind | None] = []
        while NoticeKind.COMPLETION not in kinds:
            notice = await next_notice(bench)
            kinds.append(notice.notice)
        assert NoticeKind.WATCH_DISABLED in kinds
        assert kinds[-1] is NoticeKind.COMPLETION
        assert "exit code 2" in notice.text


async def test_a_watch_that_can_match_no_more_is_told() -> None:
    """A watched process that ends without a match is reported; one that did match is not reported a second time."""
    async with open_bench() as bench:
        await bench.run("echo nothing; exit 1", background=True, watch_patterns=["ready"])
        notice = await next_notice(bench)
        assert "exit code 1" in notice.text
        assert "before any of its watch patterns had matched: ready" in notice.text
        started = await bench.run("echo ready", background=True, watch_patterns=["ready"])
        assert (await next_notice(bench)).notice is NoticeKind.WATCH_MATCH
        await ended(bench, started["session_id"])
        assert await no_notice(bench)


async def test_overflow_is_routed_to_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    """TOOL-54: when all processes together match too often, the conversation that is cut off is told."""
    monkeypatch.setattr("hermes_trio.tools.terminal.watching.WINDOW_EVENTS", 1)
    async with open_bench() as bench:
        await bench.run("echo hit; sleep 20", background=True, watch_patterns=["hit"])
        assert (await next_notice(bench)).notice is NoticeKind.WATCH_MATCH
        await bench.run("echo hit; sleep 20", background=True, watch_patterns=["hit"], session="s2")
        notice = await next_notice(bench)
        assert (notice.notice, notice.session_key) == (NoticeKind.WATCH_OVERFLOW, "s2")
        assert "matches are not reported for 30 s" in notice.text


async def test_patterns_that_cannot_match_are_refused() -> None:
    """An empty pattern, or one with a line break, is an error before anything runs."""
    async with open_bench() as bench:
        for patterns in ([""], ["a\nb"]):
            result = await bench.run("echo x", background=True, watch_patterns=patterns)
            assert (result["exit_code"], result["status"]) == (-1, "error")
        assert not bench.box.warden.processes


async def test_closing_its_output_is_no_exit(tmp_path: Path) -> None:
    """H15: a program that closes stdout and runs on is running, and its real exit is the one that is told."""
    go = tmp_path / "go"
    async with open_bench() as bench:
        started = await bench.run(
            f"exec >&- 2>&-; while [ ! -e {go} ]; do sleep 0.02; done; exit 9", background=True, notify_on_complete=True
        )
        await trio.sleep(0.7)
        polled = await bench.use("process", {"action": "poll", "session_id": started["session_id"]})
        assert polled["status"] == "running"
        assert await no_notice(bench)
        go.touch()
        assert "exit code 9" in (await next_notice(bench)).text


async def test_descendants_do_not_outlive_the_command() -> None:
    """H7: what a background command leaves behind, re-parented or not, is ended when the command has exited."""
    async with open_bench(policy=ANYTHING) as bench:
        started = await bench.run(
            "(sleep 77.0625 & echo one); (setsid sleep 78.0625 & echo two); sleep 0.2",
            background=True,
            notify_on_complete=True,
        )
        notice = await next_notice(bench)
        assert "left behind were ended" in notice.text
        record = bench.box.processes.find(started["session_id"], "s1")
        assert record is not None
        assert record.exit_code == 0
        assert record.output.text.split() == ["one", "two"]
        assert not running("77.0625")
        assert not running("78.0625")


async def test_stopping_a_session_ends_its_processes_and_no_others() -> None:
    """H14, H28: a session's processes are stopped together, by session; another session's go on."""
    async with open_bench(policy=ANYTHING) as bench:
        stubborn = [
            await bench.run("trap '' TERM; echo up; sleep 60 & wait; wait; sleep 60", background=True) for _ in range(4)
        ]
        innocent = await bench.run("sleep 60", background=True, session="s2")
        for one in stubborn:
            record = bench.box.processes.find(one["session_id"], "s1")
            assert record is not None
            await until(lambda record=record: "up" in record.output.text)
        with trio.fail_after(10):
            receipts = await bench.runtime.stop_session("s1")
        assert len(receipts) == 4
        assert all(receipt.ok for receipt in receipts)
        assert {line.how for receipt in receipts for line in receipt.lines} == {"SIGKILL"}
        assert all(gone(one["pid"]) for one in stubborn)
        assert not gone(innocent["pid"])


async def test_the_deadline_of_an_unwatched_process_is_told_truthfully() -> None:
    """A process that nobody is told of is stopped at its maximum age, and its record says so."""
    from hermes_trio import RuntimeSettings

    async with open_bench(settings=RuntimeSettings(unwatched_job_seconds=0.5)) as bench:
        started = await bench.run("sleep 60", background=True)
        await ended(bench, started["session_id"])
        polled = await bench.use("process", {"action": "poll", "session_id": started["session_id"]})
        assert (polled["completion_reason"], polled["termination_source"]) == ("killed", "max_lifetime")
        job = await bench.runtime.store.get_job(started["session_id"])  # type: ignore[attr-defined]
        assert job.state is JobState.TIMED_OUT


async def test_a_process_lost_with_the_warden_is_told_as_lost() -> None:
    """TOOL-67: when the process layer dies the owner is told that the process was lost, once."""
    async with open_bench() as bench:
        await bench.run("sleep 60", background=True, notify_on_complete=True)
        pid = bench.box.warden.warden_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        notice = await next_notice(bench)
        assert "was lost with its backend" in notice.text
        assert notice.payload["completion_reason"] == "lost"


async def test_after_a_crash_the_owner_gets_the_last_output(tmp_path: Path) -> None:
    """H18, TOOL-79, TOOL-100: a promise outlives a crash: the next start tells the owner that the process was lost, with its last output."""
    import subprocess
    import sys

    program = f"""
import trio
from tests.tools.bench_of_tools import open_bench
from hermes_trio.store import open_store
async def main():
    async with open_bench(store=open_store({str(tmp_path / "state.db")!r})) as bench:
        await bench.run("echo the last words; sleep 60", background=True, notify_on_complete=True)
        store = bench.runtime.store
        while "last words" not in (await store.list_jobs(live_only=True))[0].output_tail:
            await trio.sleep(0.02)
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
trio.run(main)
"""
    done = await trio.to_thread.run_sync(
        lambda: subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    async with open_bench(store=open_store(tmp_path / "state.db")) as bench:
        notice = await next_notice(bench)
        assert notice.notice is NoticeKind.LOST
        assert "the last words" in notice.text


async def test_outside_any_turn_the_runtime_s_own_channel_carries_the_end() -> None:
    """Bare use: a program is told of its processes through `completions`, also under a session that it has bound itself."""
    async with open_bench() as bench:
        result = await bench.box.terminal("echo bare", background=True, notify_on_complete=True)
        assert result["notify_on_complete"] is True
        assert "bare" in (await next_notice(bench)).text
        with bind(SessionContext(session_id="mine")):
            await bench.box.terminal("echo $HERMES_SESSION_ID", background=True, notify_on_complete=True)
            assert len((await bench.box.process("list"))["processes"]) == 1
        notice = await next_notice(bench)
        assert (notice.session_id, "mine" in notice.text) == ("mine", True)


async def test_a_failing_store_does_not_break_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A match that cannot be written down becomes a notice of the end."""
    async with open_bench() as bench:

        async def broken(*_: object) -> int:
            raise OSError("the disk is full")

        monkeypatch.setattr(bench.runtime.store, "add_notice", broken)
        await bench.run("echo ready; sleep 0.2", background=True, watch_patterns=["ready"])
        assert (await next_notice(bench)).notice is NoticeKind.COMPLETION


async def test_a_job_that_cannot_be_written_down_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """H10: if the row cannot be written there is no process, no slot is taken, and the model is told."""
    async with open_bench() as bench:

        async def locked(*_: object) -> None:
            raise OSError("database is locked")

        with monkeypatch.context() as patch:
            patch.setattr(bench.runtime.store, "start_job", locked)
            for _ in range(40):
                with pytest.raises(OSError, match="locked"):
                    await bench.run("sleep 60", background=True)
        assert not bench.runtime.supervisor.jobs()
        assert not bench.box.warden.processes
        assert "session_id" in await bench.run("sleep 60", background=True)


async def test_a_session_end_abandons_what_it_was_promised() -> None:
    """A session that ends stops its processes, and no late notice revives it."""
    async with open_bench() as bench:
        started = await bench.run("sleep 60", background=True, notify_on_complete=True)
        await bench.runtime.supervisor.stop_session("s1", Cause(CancelCause.SESSION_ENDED))
        assert gone(started["pid"])
        assert await no_notice(bench)


async def test_watching_is_the_watch_s_own_affair() -> None:
    """The list shows the patterns and whether they have matched (TOOL-58)."""
    async with open_bench() as bench:
        await bench.run("echo ready; sleep 30", background=True, watch_patterns=["ready"])
        await next_notice(bench)
        (line,) = (await bench.use("process", {"action": "list"}))["processes"]
        assert (line["watch_patterns"], line["watch_hit"]) == (["ready"], True)
        (record,) = bench.box.processes.of_session("s1")
        assert isinstance(record.watch, OutputWatch)
        assert msgspec.json.encode(line)


async def test_what_survives_sigkill_is_remaining_until_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop that could not end every process is not `ok`, nor is a drain: the survivors stand in both until they have ended."""
    kill = KeptProcess.kill
    withstood = KillReport(KillHow.SIGKILL, 3_000.0, survivors=2)

    async def in_vain(process: KeptProcess, grace: float = 2.0) -> KillReport:
        await trio.lowlevel.checkpoint()
        return withstood

    async with open_bench() as bench:
        started = await bench.run("sleep 60", background=True)
        record = bench.box.processes.find(started["session_id"], "s1")
        assert record is not None
        assert record.process is not None
        monkeypatch.setattr(KeptProcess, "kill", in_vain)
        (receipt,) = await bench.runtime.stop_session("s1")
        name = f"process_{started['pid']}"
        assert (receipt.ok, receipt.remaining) == (False, (name,))
        assert receipt.lines[0].how == "2 survived SIGKILL"
        assert not (await record.job.stop()).ok
        report = await bench.runtime.drain(0)
        assert (report.ok, report.remaining, report.threads) == (False, (name,), 0)
        monkeypatch.setattr(KeptProcess, "kill", kill)
        await record.process.kill(0)
        assert (await bench.runtime.drain(0)).remaining == ()
        assert (await record.job.stop()).ok


async def test_a_store_that_is_slow_keeps_no_output_from_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last output of a process cannot be written down for a while: its end comes in time, and the notice has all that it said."""
    async with open_bench() as bench:
        asked = trio.Event()

        class Slow:
            async def note_job_output(self, job_id: str, tail: str) -> None:
                asked.set()
                await trio.sleep(4)

        monkeypatch.setattr(bench.box.processes, "_log", Slow())
        await bench.run("echo begun; sleep 1.5; echo said-$((6*7))", background=True, notify_on_complete=True)
        notice = await next_notice(bench)
        assert "said-42" in notice.text
        assert asked.is_set()
