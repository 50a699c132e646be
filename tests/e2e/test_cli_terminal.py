"""`hermes-trio chat` at a real pseudo-terminal, and `chat` and `run` in a pipe."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from tests.tools.bench_of_tools import running

from .pseudo_terminal import at_terminal, piped, plain_environment
from .server_process import server_process

READY = r"Ctrl-D leaves(.|\n)*›"


def sessions(home: Path, name: str = "state.db") -> list[tuple[str, str | None]]:
    """Source and end reason of all sessions, oldest first."""
    with sqlite3.connect(home / name) as db:
        return db.execute("SELECT source, end_reason FROM sessions ORDER BY n").fetchall()


def test_a_conversation_from_the_first_line_to_the_last(tmp_path: Path) -> None:
    """Answer, background work that reports while a line is being typed, a command, stop with a receipt, leave, resume."""
    built = tmp_path.with_name(f"{tmp_path.name}-built")  # outside of the home, which commands cannot see
    with at_terminal(["chat"], tmp_path) as terminal:
        terminal.expect(READY)
        terminal.enter("good morning")
        terminal.expect("You said: good morning")
        terminal.enter(f"!bg while ! test -e {built}; do sleep 0.1; done; echo the-build-is-ready")
        terminal.expect(r"Background process\s+started")
        terminal.settle()
        terminal.type("half a li")
        terminal.expect("half a li")
        built.touch()  # not before: on a busy machine a second may be over before something is typed
        shown = terminal.expect(r"the-build-is-ready(.|\n)*half a li")
        assert "background work reports" in shown
        terminal.enter("ne")
        terminal.expect("You said: half a line")
        terminal.enter("/status")
        terminal.expect("The agent is idle")
        terminal.enter("!sleep 1000")
        terminal.expect("Sleeping 1000 s")
        terminal.press("c")
        terminal.expect("nothing of it runs any more")
        terminal.press("c")
        terminal.expect("Nothing is running")
        terminal.press("d")
        assert terminal.wait() == 0
        resumed = re.search(r"--resume (\S+)", terminal.screen)
    assert resumed is not None
    assert sessions(tmp_path) == [("cli", "cli_close")]
    with at_terminal(["chat", "--resume", "last"], tmp_path) as terminal:
        terminal.expect("half a line(.|\n)*" + READY)
        terminal.press("d")
        assert terminal.wait() == 0
        assert resumed.group(1) in terminal.screen
    assert sessions(tmp_path) == [("cli", "cli_close")]


def test_an_approval_is_answered_by_a_word(tmp_path: Path) -> None:
    """Refused once, allowed once."""
    victim = tmp_path.with_name(f"{tmp_path.name}-victim")  # outside of the home, which commands cannot see
    victim.mkdir()
    home = tmp_path / "home"  # what is in the home directory no command may touch
    home.mkdir()
    with at_terminal(["chat"], home) as terminal:
        terminal.expect(READY)
        terminal.enter(f"!run rm -rf {victim}")
        terminal.expect("Approval needed")
        terminal.enter("no")
        terminal.expect("Refused")
        time.sleep(0.2)
        assert victim.exists()
        terminal.enter(f"!run rm -rf {victim}")
        terminal.expect("Approval needed")
        terminal.enter("yes")
        terminal.expect("Approved")
        deadline = time.monotonic() + 10
        while victim.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not victim.exists()
        terminal.press("d")
        assert terminal.wait() == 0


def test_a_delegated_child_reports_back(tmp_path: Path) -> None:
    """In a turn of its own, after the turn that started it."""
    with at_terminal(["chat"], tmp_path) as terminal:
        terminal.expect(READY)
        terminal.enter("!delegate say something wise")
        terminal.expect("background work reports(.|\n)*say something wise")
        terminal.press("d")
        assert terminal.wait() == 0


def test_leaving_while_work_runs_is_asked_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """The first Ctrl-D warns, the second leaves; the process is gone."""
    with at_terminal(["chat"], tmp_path) as terminal:
        terminal.expect(READY)
        terminal.enter("!bg exec sleep 1000.0625")
        terminal.expect(r"Background process\s+started")
        assert running("sleep 1000.0625")
        terminal.press("d")
        terminal.expect("would be stopped")
        terminal.press("d")
        assert terminal.wait() == 0
    assert not running("sleep 1000.0625")


def test_after_a_kill_the_owner_of_lost_work_is_told_exactly_once(tmp_path: Path) -> None:
    """The next conversation begins with the one truthful notice; the one after that does not."""
    with at_terminal(["chat"], tmp_path) as terminal:
        terminal.expect(READY)
        terminal.enter("!bg echo half-done; sleep 1000")
        terminal.expect(r"Background process\s+started")
        time.sleep(1.5)
        os.killpg(terminal.process.pid, signal.SIGKILL)
    with at_terminal(["chat"], tmp_path) as terminal:
        shown = terminal.expect("was lost")
        terminal.expect(READY)
        time.sleep(1)
        terminal.enter("/status")
        terminal.expect("idle")
        assert terminal.screen.count("background work reports") == 1, shown
        terminal.press("d")
        assert terminal.wait() == 0
    with at_terminal(["chat"], tmp_path) as terminal:
        terminal.expect(READY)
        terminal.enter("hello")
        terminal.expect("You said: hello")
        assert "was lost" not in terminal.screen
        terminal.press("d")
        terminal.wait()


def test_a_pipe_is_read_line_by_line_and_everything_is_answered_before_it_ends(tmp_path: Path) -> None:
    """Plain text, in order, with the reports of background work."""
    done = piped(["chat"], tmp_path, "one\n!bg sleep 0.5; echo built\ntwo\n")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    first, second, report = (done.stdout.index(text) for text in ("You said: one", "You said: two", "built"))
    assert first < second
    assert report > first
    assert {reason for _, reason in sessions(tmp_path)} == {"cli_close"}


def test_run_streams_and_says_by_its_exit_code_how_it_ended(tmp_path: Path) -> None:
    """0 completed, 1 failed, 124 deadline; and one JSON object if wanted."""
    assert piped(["run", "hello"], tmp_path).stdout == "You said: hello\n"
    failed = piped(["run", "!fail no luck"], tmp_path)
    assert (failed.returncode, "no luck" in failed.stdout) == (1, True)
    assert piped(["run", "!sleep 60", "--deadline", "0.5"], tmp_path).returncode == 124
    data = msgspec.json.decode(piped(["run", "--json", "!bg sleep 0.3; echo built"], tmp_path).stdout)
    assert (data["status"], len(data["turns"])) == ("completed", 2)
    assert "built" in data["text"]
    assert piped(["run", " "], tmp_path).returncode == 1
    assert {reason for _, reason in sessions(tmp_path)} == {"run_complete"}


def arguments(pid: int) -> str:
    """The arguments of a process; those of the gateway for one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return "hermes_trio"


def test_run_is_stopped_by_a_signal_with_a_receipt(tmp_path: Path) -> None:
    """130, what was running is named, and it is gone."""
    command = f"sleep 1000.{os.getpid()}"
    process = subprocess.Popen(
        [sys.executable, "-m", "hermes_trio", "run", f"!run exec {command}"],
        env=plain_environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    # A child of the gateway that has not called exec yet has the gateway's arguments, which contain the command.
    while not any("hermes_trio" not in arguments(pid) for pid in running(command)) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "nothing of it runs any more" in errors
    assert not running(command)
    assert sessions(tmp_path) == [("cli", "run_complete")]


@pytest.mark.slow
def test_jobs_outbox_and_pairing_are_managed_without_a_server(tmp_path: Path) -> None:
    """What is written is what the next server finds."""
    added = piped(["cron", "add", "every 2h", "look at the disks"], tmp_path)
    assert added.returncode == 0, added.stderr
    job = added.stdout.split()[0]
    assert "look at the disks" in piped(["cron", "list"], tmp_path).stdout
    assert "paused" in piped(["cron", "pause", job], tmp_path).stdout
    assert '"state": "paused"' in piped(["cron", "show", job], tmp_path).stdout
    assert "is resumed" in piped(["cron", "resume", job], tmp_path).stdout
    assert "no server runs" in piped(["cron", "run", job], tmp_path).stderr
    assert piped(["cron", "remove", job], tmp_path).returncode == 0
    assert piped(["cron", "show", job], tmp_path).returncode == 1
    assert "not understood" in piped(["cron", "add", "sometimes", "x"], tmp_path).stderr
    assert "no dead replies" in piped(["outbox", "list"], tmp_path).stdout
    assert "is not a dead letter" in piped(["outbox", "retry", "1"], tmp_path).stderr
    with closing(sqlite3.connect(tmp_path / "state.db")) as db, db:
        db.execute("INSERT INTO grants (scope, category, granted_at) VALUES ('platform telegram', 'disk', 0)")
    given = piped(["grants", "list"], tmp_path).stdout
    assert "platform telegram  disk" in given
    assert "asked about again" in piped(["grants", "revoke", given.split()[0]], tmp_path).stdout
    assert "Nothing was allowed" in piped(["grants"], tmp_path).stdout
    assert "there is no grant x" in piped(["grants", "revoke", "x"], tmp_path).stderr
    assert "may talk" in piped(["pairing", "allow", "telegram", "42", "--name", "Ann"], tmp_path).stdout
    assert "Ann" in piped(["pairing", "list"], tmp_path).stdout
    assert "no open code" in piped(["pairing", "approve", "telegram", "ABCD2345"], tmp_path).stderr
    assert piped(["pairing", "revoke", "telegram", "42"], tmp_path).returncode == 0


def test_a_conversation_is_found_whether_or_not_a_server_runs(tmp_path: Path) -> None:
    """`--resume` takes up what was said last, by id too: begun without a server, gone on beside one, and taken up again without it."""
    assert piped(["chat", "--plain"], tmp_path, "first\n").returncode == 0
    with server_process(tmp_path, environment=plain_environment(tmp_path)):
        beside = piped(["chat", "--plain", "--resume", "last"], tmp_path, "second\n")
        assert "first" in beside.stdout, beside.stderr
        assert "You said: second" in beside.stdout
    after = piped(["chat", "--plain", "--resume", "last"], tmp_path, "third\n")
    assert "second" in after.stdout
    with sqlite3.connect(tmp_path / "state.db") as db:
        [(id,)] = db.execute("SELECT id FROM sessions WHERE source = 'cli'").fetchall()
    with server_process(tmp_path, environment=plain_environment(tmp_path)):
        assert "third" in piped(["chat", "--plain", "--resume", id], tmp_path, "").stdout
        assert "no session 'nonsense'" in piped(["chat", "--plain", "--resume", "nonsense"], tmp_path, "").stderr


def test_a_prompt_can_be_read_from_standard_input(tmp_path: Path) -> None:
    """`git diff | hermes-trio run -`, with options around it; an unknown model is an error that names those that there are."""
    assert piped(["run", "-"], tmp_path, "the diff\n").stdout.startswith("You said: the diff")
    assert msgspec.json.decode(piped(["run", "--json", "-"], tmp_path, "x").stdout)["text"] == "You said: x"
    assert msgspec.json.decode(piped(["run", "-", "--json"], tmp_path, "x").stdout)["text"] == "You said: x"
    for words in (["run", "hi"], ["chat", "--plain"]):
        done = piped([*words, "--model", "nope"], tmp_path)
        assert (done.returncode, done.stderr) == (1, "hermes-trio: there is no model 'nope'; there are: demo\n")
