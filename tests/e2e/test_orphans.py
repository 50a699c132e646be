"""Nothing survives: fifty rounds of commands that fork twice, ignore SIGTERM and close their streams, started by the real agent.

Beside each runs an innocent job of another session, which lives on where only the first session was to end. `ORPHAN_ROUNDS` changes the number of rounds.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.tools.warden_witness import MARK, NASTY, is_alive, marked, new_mark

pytestmark = pytest.mark.slow

ROUNDS = int(os.environ.get("ORPHAN_ROUNDS", "50"))
LIMIT = 5.0
"""Seconds after which no descendant of what should end is alive."""


class Server:
    """A miniature server in a process of its own."""

    def __init__(self, pid: int, link: socket.socket) -> None:
        self.pid = pid
        self.warden = 0
        self.link = link
        self._lines = link.makefile("rb")

    def order(self, *words: str) -> dict[str, Any]:
        """Have something done; the answer."""
        self.link.sendall(json.dumps(words).encode() + b"\n")
        return self.hear()

    def hear(self) -> dict[str, Any]:
        """The next thing that it says; nothing if it has ended."""
        try:
            line = self._lines.readline()
        except ConnectionResetError:
            line = b""
        return json.loads(line) if line else {}

    def close(self) -> None:
        """Make sure that it is gone."""
        if is_alive(self.pid):
            os.kill(self.pid, signal.SIGKILL)
        # A process whose main thread is a zombie may still hold its files.
        wait(lambda: not Path(f"/proc/{self.pid}").exists(), "the server survived SIGKILL")
        self._lines.close()
        self.link.close()

    def start(self, session: str, command: str) -> int:
        """Start a background command in a session, through the agent, and return its process id."""
        answer = self.order("say", session, f"!bg {command}")
        assert not answer["error"], answer
        self.warden = answer["warden"]
        found = re.search(r"Background process started: (\S+), pid (\d+)", answer["text"])
        assert found, answer
        return int(found[2])


Servers = Callable[[], AbstractContextManager[Server]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Servers]:
    """Opens servers on one store, forked from a template that has imported everything once."""
    ours, theirs = socket.socketpair()
    with ours, theirs, subprocess.Popen([sys.executable, "-m", "tests.e2e.orphan_server"], stdin=theirs) as template:

        @contextmanager
        def opened() -> Iterator[Server]:
            link, other = socket.socketpair()
            with other:
                socket.send_fds(ours, [str(tmp_path / "state.db").encode()], [other.fileno()])
                pid = int(ours.recv(64))
            made = Server(pid, link)
            try:
                yield made
            finally:
                made.close()

        try:
            yield opened
        finally:
            template.kill()


class Round:
    """One victim and one innocent job."""

    def __init__(self, server: Server, folder: Path, number: int) -> None:
        self.mark, self.innocent = new_mark(), new_mark()
        where = folder / f"escaped-{number}"
        program = folder / "nasty.py"
        program.write_text(NASTY)
        tail = "; sleep 3600" if number % 2 else ""
        command = f"export {MARK}={self.mark}; {sys.executable} -S {program} {where}{tail}"
        self.victim_pid = server.start("victim", command)
        self.innocent_pid = server.start("innocent", f"export {MARK}={self.innocent}; sleep 3600 | sleep 3600")
        wait(where.exists, "the victim never said where it is")
        wait(lambda: len(marked(self.innocent)) == 2, "the innocent job did not start")

    def victim_is_gone(self) -> bool:
        return not is_alive(self.victim_pid) and marked(self.mark) == []

    def innocent_lives(self) -> bool:
        return is_alive(self.innocent_pid) and len(marked(self.innocent)) == 2

    def innocent_is_gone(self) -> bool:
        return not is_alive(self.innocent_pid) and marked(self.innocent) == []


def wait(condition: Callable[[], object], otherwise: str, seconds: float = LIMIT) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.01)


@pytest.mark.parametrize("how", ["stop", "end"])
def test_the_end_of_one_session(server: Servers, tmp_path: Path, how: str) -> None:
    """Stop and session end take everything of that session, whatever it did to escape, and nothing of another."""
    with server() as gateway:
        for number in range(ROUNDS):
            this = Round(gateway, tmp_path, number)
            receipt = gateway.order(how, "victim")
            assert receipt["ok"]
            assert this.victim_is_gone(), "a receipt that is ok means that nothing is left"
            assert this.innocent_lives()
            gateway.order("stop", "innocent")
            assert this.innocent_is_gone()


def test_a_drain(server: Servers, tmp_path: Path) -> None:
    """When a drain says that nothing runs, nothing runs; the server is still there to say it."""
    for number in range(ROUNDS):
        with server() as gateway:
            this = Round(gateway, tmp_path, number)
            report = gateway.order("drain")
            assert report["ok"], report
            assert this.victim_is_gone()
            assert this.innocent_is_gone()
            assert is_alive(gateway.pid)


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL", "end of input", "SIGKILL of server and warden"])
def test_the_end_of_the_server(server: Servers, tmp_path: Path, how: str) -> None:
    """However the server ends, and with the warden killed too, everything that it had started is gone within five seconds."""
    for number in range(ROUNDS):
        with server() as gateway:
            this = Round(gateway, tmp_path, number)
            match how:
                case "SIGTERM":
                    os.kill(gateway.pid, signal.SIGTERM)
                case "end of input":
                    gateway.link.shutdown(socket.SHUT_WR)
                case "SIGKILL":
                    os.kill(gateway.pid, signal.SIGKILL)
                case _:
                    os.kill(gateway.warden, signal.SIGKILL)
                    os.kill(gateway.pid, signal.SIGKILL)
            wait(this.victim_is_gone, f"the victim survived {how}")
            wait(this.innocent_is_gone, f"the innocent job survived {how}")
            wait(lambda: not is_alive(gateway.warden), f"the warden survived {how}")
            if how in ("SIGTERM", "end of input"):
                assert gateway.hear() == {"closed": True}


def test_the_end_of_the_warden(server: Servers, tmp_path: Path) -> None:
    """With the warden killed under a living server all jobs are gone and told as lost, and the next ones start."""
    with server() as gateway:
        for number in range(ROUNDS):
            this = Round(gateway, tmp_path, number)
            os.kill(gateway.warden, signal.SIGKILL)
            wait(this.victim_is_gone, "the victim survived the warden")
            wait(this.innocent_is_gone, "the innocent job survived the warden")
        answer = gateway.order("say", "victim", '!tool process {"action": "list"}')
        assert '"status": "exited"' in answer["text"]
        assert '"status": "running"' not in answer["text"]
