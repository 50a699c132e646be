"""`serve --workers N` on a real PostgreSQL server: one address, several processes, restarts, one drain report."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.attacks.attacked_server import eventually

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


def test_workers_need_a_store_that_can_be_shared(tmp_path: Path) -> None:
    """With SQLite the start is refused, with the remedy."""
    command = [sys.executable, "-m", "hermes_trio", "serve", "--port", "0", "--workers", "2"]
    found = subprocess.run(command, env=environment(tmp_path, ""), capture_output=True, text=True, timeout=60)
    assert found.returncode == 1
    assert "--workers 2 needs a store that several processes share" in found.stderr
    assert "HERMES_STORE_URL" in found.stderr
