"""`serve --workers N` on a real PostgreSQL server: one address, several processes, restarts, one drain report."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.attacks.attacked_server import eventually
from tests.postgres_server import PostgresServer

KEY = "workers-admin-key-0123456789"


def environment(home: Path, url: str) -> dict[str, str]:
    """What a server of these tests is started with."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HERMES_", "API_SERVER"))}
    return {**kept, "HERMES_HOME": str(home), "HERMES_STORE_URL": url, "API_SERVER_KEY": KEY}


class Pool:
    """A parent with its workers."""

    def __init__(self, process: subprocess.Popen[str], address: str, first: str) -> None:
        self.process = process
        self.address = address
        self.first = first

    def get(self, path: str) -> Any:
        """Ask for JSON, on a connection of its own."""
        request = Request(self.address + path, headers={"Authorization": f"Bearer {KEY}", "Connection": "close"})
        with urlopen(request, timeout=20) as answer:
            return json.load(answer)

    def post(self, path: str, body: Any) -> Any:
        """Send JSON, on a connection of its own."""
        headers = {"Authorization": f"Bearer {KEY}", "Connection": "close", "Content-Type": "application/json"}
        with urlopen(Request(self.address + path, json.dumps(body).encode(), headers), timeout=20) as answer:
            return json.load(answer)

    def ask(self, path: str, body: Any, more: dict[str, str]) -> str:
        """Send JSON with more headers, on a connection of its own; the answer as text."""
        headers = {"Authorization": f"Bearer {KEY}", "Connection": "close", "Content-Type": "application/json", **more}
        with urlopen(Request(self.address + path, json.dumps(body).encode(), headers), timeout=60) as answer:
            return answer.read().decode()

    def nodes(self) -> list[dict[str, Any]]:
        """The nodes, as one of them sees them."""
        return self.get("/health/detailed")["nodes"]

    def node_of(self, pid: int) -> str:
        """The name of the node that a process is."""
        while True:
            found = self.get("/health/detailed")
            if found["pid"] == pid:
                return next(node["name"] for node in found["nodes"] if node["here"])

    def pids(self) -> set[int]:
        """The processes that answer."""
        return {self.get("/health/detailed")["pid"] for _ in range(30)}


@contextmanager
def serving(home: Path, url: str, workers: int) -> Iterator[Pool]:
    """A pool for the body of the `with`; it is ended with SIGTERM, or killed."""
    command = [sys.executable, "-m", "hermes_trio", "serve", "--port", "0", "--workers", str(workers)]
    process = subprocess.Popen(command, env=environment(home, url), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        found = re.search(r"http://[\w.:]+", first)
        assert found is not None, first
        yield Pool(process, found.group(), first)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
        process.stdout.close()


@pytest.mark.slow
def test_two_workers_share_an_address_a_store_and_an_end(tmp_path: Path, postgres_url: str) -> None:
    """Both answer; a run of one is seen by both; one that is killed is started again, what it ran is given an end, and SIGTERM ends all with one report."""
    with serving(tmp_path, postgres_url, 2) as pool:
        assert "with 2 workers" in pool.first
        eventually(lambda: len(pool.pids()) == 2, seconds=30)
        run_id = pool.post("/v1/runs", {"input": "hello"})["run_id"]
        for _ in range(10):
            assert pool.get(f"/v1/runs/{run_id}?wait=settled")["status"] == "completed"
        nodes = pool.get("/health/detailed")["nodes"]
        assert len({node["name"] for node in nodes}) == 2
        assert len({node["configuration"] for node in nodes} - {""}) <= 1
        victim = next(iter(pool.pids()))
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: len(pool.pids() - {victim}) == 2, seconds=60)
        pool.process.send_signal(signal.SIGTERM)
        assert pool.process.stdout is not None
        rest = pool.process.stdout.read()
        assert pool.process.wait(30) == 0
        assert "2 workers drained in" in rest
        assert rest.count("drained in") == 1


@pytest.mark.slow
def test_a_drain_goes_on_when_the_parent_is_killed(tmp_path: Path, postgres: PostgresServer, postgres_url: str) -> None:
    """What the workers drain ends as it would have: the end of the parent is no second signal."""
    killed = tmp_path / "killed"
    waits = f"!run until [ -e {killed} ]; do sleep 0.1; done; sleep 2; echo slept well"
    database = postgres_url.rpartition("/")[2]

    def nodes() -> str:
        return postgres.execute("SELECT count(*) FROM hermes_trio.nodes", database)

    with serving(tmp_path / "home", postgres_url, 2) as pool:
        eventually(lambda: nodes() == "2", seconds=60)
        run_id = pool.post("/v1/runs", {"input": waits})["run_id"]
        eventually(lambda: pool.get(f"/v1/runs/{run_id}")["status"] == "running", seconds=60)
        pool.process.send_signal(signal.SIGTERM)
        # Then only the worker of the run is left to say that it drains. What reaches the other one while it ends is not always answered.
        eventually(lambda: nodes() == "1", seconds=60)

        def drains() -> bool:
            try:
                pool.post("/v1/runs", {"input": "too late"})
            except HTTPError as refused:
                return refused.code == 503
            return False

        eventually(drains, seconds=60)
        pool.process.kill()
        pool.process.wait()
        killed.touch()
        sql = f"SELECT status FROM hermes_trio.runs WHERE run_id = '{run_id}'"
        eventually(lambda: postgres.execute(sql, database) not in ("queued", "running"), seconds=60)
        assert postgres.execute(sql, database) == "completed"
        eventually(lambda: nodes() == "0", seconds=60)


@pytest.mark.slow
def test_a_shell_stays_on_its_worker_and_the_model_is_told_when_that_is_killed(
    tmp_path: Path, postgres_url: str
) -> None:
    """Directory and variables of a session are there whichever worker a request reaches, plain and streamed, and a chat in the browser is handled once.

    After the worker of the shell was killed, the next turn says what was lost, and the one after it does not.
    """

    def say(text: str, **more: Any) -> str:
        message = {"messages": [{"role": "user", "content": text}], **more}
        told = pool.ask("/v1/chat/completions", message, {"X-Hermes-Session-Id": "bound"})
        if not more:
            return json.loads(told)["choices"][0]["message"]["content"]
        pieces = [json.loads(line[6:]) for line in told.splitlines() if line.startswith("data: {")]
        assert "data: [DONE]" in told
        return "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces)

    with serving(tmp_path, postgres_url, 2) as pool:
        eventually(lambda: len(pool.pids()) == 2, seconds=60)
        say("!run cd / && export SHADE=blue")
        # Before the chat in the browser: its session may be bound to the other worker.
        eventually(lambda: any(node["sessions"] for node in pool.nodes()), seconds=60)
        host = next(node for node in pool.nodes() if node["sessions"])
        for _ in range(8):
            assert "/ blue" in say("!run echo $PWD $SHADE")
            assert "/ blue" in say("!run echo $PWD $SHADE", stream=True)
        for number in range(6):
            sent = {"text": f"!run echo n$(({number}+40))", "id": str(number)}
            assert pool.post("/v1/web/conversations/c/messages", sent)["receipt"] == "accepted"
            assert pool.post("/v1/web/conversations/c/messages", sent)["receipt"] == "duplicate"

        def answers() -> list[str]:
            page = pool.get("/v1/web/conversations/c/messages?limit=100")["data"]
            return [one["text"] for one in page if one["role"] == "assistant" and one["text"]]

        eventually(lambda: [n for n in range(6) if any(f"n{n + 40}" in one for one in answers())] == list(range(6)), 60)
        victim = next(pid for pid in pool.pids() if pool.node_of(pid) == host["name"])
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: host["incarnation"] not in {one["incarnation"] for one in pool.nodes()}, seconds=60)
        assert "Its shell is lost" in say("hello")
        assert "Its shell is lost" not in say("hello again").split("hello again")[-1]


@pytest.mark.slow
def test_every_connection_is_answered_while_one_worker_is_stopped_drained_or_killed(
    tmp_path: Path, postgres_url: str
) -> None:
    """The kernel spreads connections over the sockets of all workers; those of one that does not accept are taken by the other. None is refused or reset.

    After the pool has drained, connections are refused.
    """
    with serving(tmp_path, postgres_url, 2) as pool:
        eventually(lambda: len(pool.pids()) == 2, seconds=60)
        answered = Counter(pool.get("/health/detailed")["pid"] for _ in range(60))
        assert min(answered.values()) >= 15, answered
        stopped, other = answered
        os.kill(stopped, signal.SIGSTOP)
        try:
            assert {pool.get("/health/detailed")["pid"] for _ in range(12)} == {other}
        finally:
            os.kill(stopped, signal.SIGCONT)
        eventually(lambda: len(pool.pids()) == 2, seconds=30)
        for sent in (signal.SIGTERM, signal.SIGKILL):
            victim = min(pool.pids())
            os.kill(victim, sent)
            # Each waits less than half a second longer than the look at the other worker's socket; a restart takes longer.
            for _ in range(8):
                pool.get("/health")
            eventually(lambda victim=victim: len(pool.pids() - {victim}) == 2, seconds=60)
        port = int(pool.address.rpartition(":")[2])
        pool.process.send_signal(signal.SIGTERM)
        assert pool.process.wait(30) == 0
        with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), 5):
            pass


_LOOK_AT_THE_PARENT = """
import ctypes, trio
from hermes_trio.commands import serve

async def run(pool):
    print("dumpable", ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))
    return 0

serve.WorkerPool.run = run
trio.run(lambda: serve.serve(port=0, workers=2))
"""


def test_no_process_of_the_same_user_looks_into_the_parent(tmp_path: Path) -> None:
    """The parent of the workers has the same keys and passwords as they, and the kernel shows its environment and memory to no other process."""
    url = "postgresql://hermes:nobody@127.0.0.1:1/hermes"
    command = [sys.executable, "-c", _LOOK_AT_THE_PARENT]
    found = subprocess.run(command, env=environment(tmp_path, url), capture_output=True, text=True, timeout=60)
    assert found.stdout == "dumpable 0\n", found.stderr


def test_workers_need_a_store_that_can_be_shared(tmp_path: Path) -> None:
    """With SQLite the start is refused, with the remedy."""
    command = [sys.executable, "-m", "hermes_trio", "serve", "--port", "0", "--workers", "2"]
    found = subprocess.run(command, env=environment(tmp_path, ""), capture_output=True, text=True, timeout=60)
    assert found.returncode == 1
    assert "--workers 2 needs a store that several processes share" in found.stderr
    assert "HERMES_STORE_URL" in found.stderr
