"""The server as a process: first start, signals, drain, crash and restart, plain Hypercorn, and the keys command."""

from __future__ import annotations

import json
import re
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest

from .server_process import KEY, ServerProcess, clean_environment, server_process


def client_of(server: ServerProcess) -> httpx2.Client:
    """A client with the admin key."""
    return httpx2.Client(base_url=server.url, headers=server.headers, timeout=30, trust_env=False)


def start(http: httpx2.Client, text: str) -> str:
    """Start a run."""
    answer = http.post("/v1/runs", json={"input": text})
    assert answer.status_code == 202, answer.text
    return answer.json()["run_id"]


def events(http: httpx2.Client, run_id: str, last: str = "", most: int = 10**6) -> list[tuple[str, dict[str, Any]]]:
    """Id and data of the events of a run, up to `most`."""
    found: list[tuple[str, dict[str, Any]]] = []
    id = ""
    headers = {"Last-Event-ID": last} if last else {}
    with http.stream("GET", f"/v1/runs/{run_id}/events", headers=headers) as response:
        for line in response.iter_lines():
            if line.startswith("id: "):
                id = line[4:]
            elif line.startswith("data: "):
                found.append((id, json.loads(line[6:])))
                id = ""
                if len(found) == most:
                    break
    return found


def command(home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `hermes-trio` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "hermes_trio", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=clean_environment(home, **environment),
    )


def test_every_start_prints_how_to_talk_to_the_server(tmp_path: Path) -> None:
    """Without a key one is made and kept with mode 0600; every start prints model, chat, docs and a curl line that works as it is and holds no key."""
    home = tmp_path / "home"
    for _ in range(2):
        check_a_start(home)


def check_a_start(home: Path) -> None:
    """Start, read what is printed, do what it says."""
    with server_process(home, key="") as server:
        path = home / "api_server.key"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        key = path.read_text().strip()
        server.wait_for(r"Ctrl-C stops the server")
        assert key not in server.output
        assert f"chat   {sys.executable} -m hermes_trio chat" in server.output
        assert "model  demo" in server.output
        with httpx2.Client(trust_env=False) as http:
            assert http.get(server.wait_for(r"docs   (\S+)")[1]).status_code == 200
        line = next(line for line in server.output.splitlines() if line.strip().startswith("curl "))
        ran = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=30, check=True)
        assert json.loads(ran.stdout)["choices"][0]["message"]["content"] == "You said: Hello"
        assert server.stop() == 0
        assert "Stopping." in server.output


def test_a_start_without_a_port_makes_no_key(tmp_path: Path) -> None:
    """A server whose address is taken says so and leaves no key behind."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = command(tmp_path / "home", "serve", "--port", str(port))
    assert (ran.returncode, "cannot be used" in ran.stderr) == (1, True)
    assert not (tmp_path / "home" / "api_server.key").exists()


def test_a_drain_says_what_it_waits_for_and_counts_what_it_cuts_off(tmp_path: Path) -> None:
    """Ctrl-C names the turns, the time and what a second one does; after the second one the turns that were cut off are counted."""
    with server_process(tmp_path) as server, client_of(server) as http:
        runs = [start(http, "!sleep 600") for _ in range(2)]
        for run_id in runs:
            events(http, run_id, most=2)
        server.signal(signal.SIGINT)
        server.wait_for(
            r"Stopping: waiting at most \d+ s for 2 turns to end\. Ctrl-C \(or the signal\) again stops everything"
        )
        server.signal(signal.SIGINT)
        assert server.wait(20) == 0
        assert "2 turns were cancelled" in server.output


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_drains_and_ends_with_0(tmp_path: Path, number: int) -> None:
    """A signal lets the running turn end, refuses new work, answers reads, reports, and exits with 0."""
    with server_process(tmp_path) as server, client_of(server) as http:
        run_id = start(http, "!sleep 1")
        server.signal(number)
        refused = http.post("/v1/runs", json={"input": "x"})
        while refused.status_code == 202:
            refused = http.post("/v1/runs", json={"input": "x"})
        assert refused.status_code == 503
        assert http.get(f"/v1/runs/{run_id}").json()["status"] in ("running", "completed")
        assert server.wait() == 0
        assert "0 turns, 0 jobs, 0 threads left" in server.output
    with server_process(tmp_path) as server, client_of(server) as http:
        assert http.get(f"/v1/runs/{run_id}").json()["status"] == "completed"


@pytest.mark.slow
def test_a_second_signal_cancels_at_once(tmp_path: Path) -> None:
    """The second signal does not wait for the drain; the run is written down as cancelled."""
    with server_process(tmp_path) as server, client_of(server) as http:
        run_id = start(http, "!sleep 600")
        server.signal(signal.SIGTERM)
        while not http.get("/admin/drain").json()["draining"]:
            pass
        server.signal(signal.SIGTERM)
        assert server.wait(20) == 0
    with server_process(tmp_path) as server, client_of(server) as http:
        run = http.get(f"/v1/runs/{run_id}").json()
        assert (run["status"], run["settled"]) == ("cancelled", True)


def test_a_reader_resumes_after_the_server_was_killed(tmp_path: Path) -> None:
    """After SIGKILL and a restart the run is failed/interrupted, and a reader goes on behind the last event that it saw."""
    with server_process(tmp_path) as server, client_of(server) as http:
        finished = start(http, "Hello")
        before = events(http, finished)
        interrupted = start(http, "!sleep 600")
        seen = events(http, interrupted, most=1)
        server.kill()
    with server_process(tmp_path) as server, client_of(server) as http:
        assert [id for id, _ in events(http, finished, before[0][0])] == [id for id, _ in before[1:]]
        assert events(http, finished)[-1][1]["output"] == "You said: Hello"
        run = http.get(f"/v1/runs/{interrupted}", params={"wait": "settled"}).json()
        assert (run["status"], run["error_code"], run["settled"]) == ("failed", "interrupted", True)
        assert run["error"]
        rest = events(http, interrupted, seen[0][0])
        assert rest[-1][1]["event"] == "run.failed"
        assert rest[-1][1]["error_code"] == "interrupted"
        assert http.post(f"/v1/runs/{interrupted}/stop").status_code == 404


@pytest.mark.slow
def test_a_run_that_asks_for_it_goes_on_after_the_server_was_killed(tmp_path: Path) -> None:
    """After SIGKILL in the middle of a command and a restart the run begins again in its session, and a reader sees both attempts without a gap."""
    body = {"input": "!run sleep 5", "session_id": "work", "if_interrupted": "resume"}
    with server_process(tmp_path) as server, client_of(server) as http:
        answer = http.post("/v1/runs", json=body, headers={"Idempotency-Key": "k"})
        assert answer.status_code == 202, answer.text
        run_id = answer.json()["run_id"]
        seen = events(http, run_id, most=1)
        server.kill()
    with server_process(tmp_path) as server, client_of(server) as http:
        run = http.get(f"/v1/runs/{run_id}", params={"wait": "settled"}).json()
        assert (run["status"], run["attempt"], run["session_id"]) == ("completed", 2, "work")
        assert run["output"]
        rest = events(http, run_id, seen[0][0])
        # An event that the reader saw and the store had not taken yet is unknown: all that there are follow.
        numbers = [int(id.partition("-")[2]) for id, _ in rest if id]
        first = 1 if rest[0][1]["event"] == "resync" else 2
        assert numbers == list(range(first, first + len(numbers)))
        names = [event["event"] for _, event in rest]
        assert (names.count("run.resumed"), names.count("run.completed")) == (1, 1)
        messages = http.get("/api/sessions/work/messages").json()["data"]
        assert [message["role"] for message in messages].count("user") == 1
        assert http.post("/v1/runs", json=body, headers={"Idempotency-Key": "k"}).json()["run_id"] == run_id


@pytest.mark.slow
def test_a_command_in_the_terminal_leaves_interrupted_runs_to_the_server(tmp_path: Path) -> None:
    """`hermes-trio run` in the same home after a kill neither executes a run of the API nor ends it with itself; the next server begins it again."""
    body = {"input": "!sleep 3", "if_interrupted": "resume"}
    with server_process(tmp_path) as server, client_of(server) as http:
        run_id = http.post("/v1/runs", json=body).json()["run_id"]
        server.kill()
    ran = command(tmp_path, "run", "hello")
    assert (ran.returncode, "You said: hello" in ran.stdout) == (0, True), ran.stderr
    with server_process(tmp_path) as server, client_of(server) as http:
        run = http.get(f"/v1/runs/{run_id}", params={"wait": "settled"}).json()
        assert (run["status"], run["attempt"]) == ("completed", 2)


@pytest.mark.slow
def test_plain_hypercorn_serves_the_same(tmp_path: Path) -> None:
    """`hypercorn --worker-class trio hermes_trio.asgi:app` serves chats, streams and runs, and ends on SIGTERM."""
    hypercorn = Path(sys.executable).with_name("hypercorn")
    ran = [str(hypercorn), "--worker-class", "trio", "--bind", "127.0.0.1:0", "hermes_trio.asgi:app"]
    with server_process(tmp_path, command=ran, wait=False) as server:
        server.url = server.wait_for(r"Running on (http://[\d.:]+)")[1]
        with client_of(server) as http:
            body = {"messages": [{"role": "user", "content": "Hello"}]}
            answer = http.post("/v1/chat/completions", json=body)
            assert answer.json()["choices"][0]["message"]["content"] == "You said: Hello"
            streamed = http.post("/v1/chat/completions", json={**body, "stream": True})
            assert streamed.text.endswith("data: [DONE]\n\n")
            run_id = start(http, "Hello")
            assert http.get(f"/v1/runs/{run_id}", params={"wait": "settled"}).json()["status"] == "completed"
            assert events(http, run_id)[-1][1]["event"] == "run.completed"
        assert server.stop() == 0


@pytest.mark.slow
def test_a_second_server_on_the_same_home_is_refused(tmp_path: Path) -> None:
    """The second one ends with 1 and names the first one's pid; so does one whose port is taken."""
    with server_process(tmp_path / "a") as server:
        second = command(tmp_path / "a", "serve", "--port", "0", API_SERVER_KEY=KEY)
        assert second.returncode == 1
        assert str(server.pid) in second.stderr
        port = server.url.rpartition(":")[2]
        taken = command(tmp_path / "b", "serve", "--port", port, API_SERVER_KEY=KEY)
        assert taken.returncode == 1
        assert "Traceback" not in taken.stderr
        assert f"127.0.0.1:{port}" in taken.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_keys_from_the_command_line(tmp_path: Path) -> None:
    """Keys are added, listed and revoked without a server and through a running one; a revoked key is refused at once."""
    made = command(tmp_path, "keys", "add", "offline", "--scope", "chat")
    assert made.returncode == 0, made.stderr
    offline = re.search(r"htk_\S+", made.stdout)
    assert offline
    with server_process(tmp_path) as server, client_of(server) as http:
        environment = {"API_SERVER_KEY": KEY}
        online = command(tmp_path, "keys", "add", "online", "--scope", "runs", "--scope", "chat", **environment)
        assert online.returncode == 0, online.stderr
        secret = re.search(r"htk_\S+", online.stdout)
        key_id = re.search(r"key_\w+", online.stdout)
        assert secret
        assert key_id
        for key in (offline[0], secret[0]):
            answer = http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == 200
        listed = command(tmp_path, "keys", "list", **environment)
        assert "offline" in listed.stdout
        assert "online" in listed.stdout
        assert "htk_" not in listed.stdout
        assert command(tmp_path, "keys", "revoke", key_id[0], **environment).returncode == 0
        answer = http.get("/v1/models", headers={"Authorization": f"Bearer {secret[0]}"})
        assert answer.status_code == 401
        again = command(tmp_path, "keys", "revoke", key_id[0], **environment)
        assert again.returncode == 1
        refused = command(tmp_path, "keys", "list", API_SERVER_KEY="not-the-key")
        assert refused.returncode == 1
        assert "the running server refused" in refused.stderr
        assert "Traceback" not in refused.stderr


@pytest.mark.slow
def test_no_secret_is_shown_by_the_process_list(tmp_path: Path) -> None:
    """The key stands neither in the command line of the server nor in its output."""
    with server_process(tmp_path) as server:
        assert KEY.encode() not in Path(f"/proc/{server.pid}/cmdline").read_bytes()
        with client_of(server) as http:
            http.post("/v1/chat/completions", json={"messages": "wrong"})
            http.get("/v1/models", headers={"Authorization": f"Bearer {KEY}-not-quite"})
        assert server.stop() == 0
        assert KEY not in server.output
