"""A real server on a real PostgreSQL: it answers, finds, survives its database, and nobody reads the password."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.postgres_server import PASSWORD, PostgresServer, free_port, postgres_server

from .server_process import KEY, ServerProcess, clean_environment, server_process

pytestmark = pytest.mark.slow


def command(home: Path, url: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `hermes-trio` with an address, and more, in its environment."""
    return subprocess.run(
        [sys.executable, "-m", "hermes_trio", *words],
        env=clean_environment(home, HERMES_STORE_URL=url, **environment),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def client_of(server: ServerProcess) -> httpx2.Client:
    """A client with the server's key."""
    return httpx2.Client(base_url=server.url, headers=server.headers, timeout=30, trust_env=False)


def chat(client: httpx2.Client, text: str, session: str = "") -> httpx2.Response:
    """One turn."""
    headers = {"X-Hermes-Session-Id": session} if session else {}
    if session:
        client.post("/api/sessions", json={"id": session})
    body = {"model": "demo", "messages": [{"role": "user", "content": text}]}
    return client.post("/v1/chat/completions", json=body, headers=headers)


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """A PostgreSQL that this test alone may stop."""
    with postgres_server() as server:
        yield server


def test_a_server_on_postgres_answers_runs_and_finds(postgres: PostgresServer, tmp_path: Path) -> None:
    """Chat, runs, sessions, search and keys work as on a file; the commands work on the same database, and the password is nowhere."""
    url = postgres.url(postgres.new_database())
    refused = command(tmp_path, url, "sessions", "list")
    assert (refused.returncode, "hermes-trio store init" in refused.stderr) == (1, True)
    made = command(tmp_path, url, "store", "init")
    assert (made.returncode, "is ready" in made.stdout) == (0, True), made.stderr
    assert "already" in command(tmp_path, url, "store", "migrate").stdout
    with (
        server_process(tmp_path / "home", environment={"HERMES_STORE_URL": url}) as server,
        client_of(server) as client,
    ):
        answer = chat(client, "the unmistakable wombat", "wombat-1")
        assert answer.status_code == 200, answer.text
        run: dict[str, Any] = client.post("/v1/runs", json={"input": "hello"}).json()
        for _ in range(200):
            found = client.get(f"/v1/runs/{run['run_id']}").json()
            if found["status"] in ("completed", "failed"):
                break
            time.sleep(0.05)
        assert found["status"] == "completed"
        hits = client.get("/api/search", params={"q": "unmistakable"}).json()
        assert "wombat" in str(hits)
        assert "wombat-1" in command(tmp_path, url, "sessions", "list").stdout
        assert "unmistakable" in command(tmp_path, url, "sessions", "search", "wombat").stdout
        checked = command(tmp_path, url, "store", "check")
        assert (checked.returncode, "can be used" in checked.stdout) == (0, True), checked.stderr
        made = command(tmp_path / "home", url, "cron", "add", "every 1h", "hello", "--name", "hourly")
        assert made.returncode == 0, made.stderr
        job = command(tmp_path / "home", url, "cron", "list").stdout.split()[0]
        ran = command(tmp_path / "home", url, "cron", "run", job, API_SERVER_KEY=KEY)
        assert ran.returncode == 0, ran.stderr
        nowhere = command(
            tmp_path / "elsewhere", url, "cron", "run", job, API_SERVER_KEY=KEY, API_SERVER_PORT=str(free_port())
        )
        assert (nowhere.returncode, "no server answers" in nowhere.stderr) == (1, True), nowhere.stderr
        line = Path(f"/proc/{server.pid}/cmdline").read_bytes().decode()
        assert PASSWORD not in line
        assert server.stop() == 0
        assert PASSWORD not in server.output
        assert "a%20password" not in server.output
    assert postgres.execute("SELECT count(*) FROM hermes_trio.nodes", url.rpartition("/")[2]) == "0"


def test_the_database_goes_away_and_comes_back(own_server: PostgresServer, tmp_path: Path) -> None:
    """Meanwhile requests get 503 with Retry-After; what was acknowledged is there afterwards, and no restart is needed."""
    database = own_server.new_database()
    url = own_server.url(database)
    assert command(tmp_path, url, "store", "init").returncode == 0
    (tmp_path / "home").mkdir(mode=0o700)
    # Longer than a slow machine needs to start a database again: a node that cannot renew its lease ends.
    (tmp_path / "home" / "config.toml").write_text("[store]\nlease_seconds = 120.0\n")
    with (
        server_process(tmp_path / "home", environment={"HERMES_STORE_URL": url}) as server,
        client_of(server) as client,
    ):
        assert chat(client, "before the outage", "outage-1").status_code == 200
        own_server.stop(signal.SIGKILL)
        refused = chat(client, "during the outage", "outage-1")
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True), refused.text
        own_server.start()
        deadline = time.monotonic() + 20
        while (answer := chat(client, "after the outage", "outage-1")).status_code != 200:
            assert time.monotonic() < deadline, answer.text
            assert answer.status_code == 503
            time.sleep(0.2)
        history = client.get("/api/sessions/outage-1/messages").json()
        texts = str(history)
        assert texts.count("before the outage") >= 1
        assert texts.count("after the outage") >= 1
        assert server.is_alive()
        assert PASSWORD not in server.output


def test_a_node_joins_again_after_an_outage_that_outlasts_its_lease(own_server: PostgresServer, tmp_path: Path) -> None:
    """The process stays: it stops what it ran, answers 503 with Retry-After, and serves again as a new node when the database is back.

    What it had acknowledged is there, and the run that it had to stop has one end, which says so.
    """
    database = own_server.new_database()
    url = own_server.url(database)
    assert command(tmp_path, url, "store", "init").returncode == 0
    (tmp_path / "home").mkdir(mode=0o700)
    (tmp_path / "home" / "config.toml").write_text(
        '[store]\nlease_seconds = 2.0\n[agent]\ndemo_directives = ["api_server"]\n'
    )
    with (
        server_process(tmp_path / "home", environment={"HERMES_STORE_URL": url}) as server,
        client_of(server) as client,
    ):
        assert chat(client, "before the outage", "outage-2").status_code == 200
        run = client.post("/v1/runs", json={"input": "!sleep 600"}).json()["run_id"]
        _wait_for(lambda: client.get(f"/v1/runs/{run}").json()["status"] == "running", 60)
        first = own_server.execute("SELECT incarnation FROM hermes_trio.nodes", database)
        own_server.stop(signal.SIGKILL)
        server.wait_for("has lost its membership and ends")
        refused = _wait_for(lambda: _answered(client), 60)
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True), refused.text
        own_server.start()
        _wait_for(lambda: (found := _answered(client)) and found.status_code == 200, 120)
        assert server.is_alive()
        assert chat(client, "after the outage", "outage-2").status_code == 200
        texts = str(client.get("/api/sessions/outage-2/messages").json())
        assert texts.count("before the outage") >= 1
        assert texts.count("after the outage") >= 1
        assert client.get(f"/v1/runs/{run}").json()["status"] in ("failed", "cancelled")
        second = own_server.execute("SELECT incarnation FROM hermes_trio.nodes", database)
        assert len(second.split()) == 1
        assert second != first
        ends = f"SELECT count(*) FROM hermes_trio.events WHERE run_id = '{run}' AND event ~ 'run.(failed|cancelled|completed)'"
        assert own_server.execute(ends, database) == "1"
        assert PASSWORD not in server.output
        assert server.stop() == 0


def _answered(client: httpx2.Client) -> httpx2.Response | None:
    """What the server answers to a question that needs the database; None if it closed the connection, as it does when it stops what it ran."""
    try:
        return client.get("/api/sessions")
    except httpx2.TransportError:
        return None


def test_what_does_not_fit_is_named(postgres: PostgresServer, tmp_path: Path) -> None:
    """An unreachable server, a wrong password, missing rights, a schema that is newer or older: each says what to do, none shows the password."""
    name = postgres.new_database()
    url = postgres.url(name)
    wrong = url.replace("a%20password", "another%20password")
    away = postgres.url(name, port=1)
    for address, words in ((wrong, "authentication failed"), (away, "cannot be reached"), (url, "store init")):
        done = command(tmp_path, address, "serve", "--port", "0")
        assert (done.returncode, words in done.stderr + done.stdout) == (1, True), done.stderr + done.stdout
        assert "password%20that" not in done.stderr + done.stdout
    assert command(tmp_path, url, "store", "init").returncode == 0
    postgres.execute("INSERT INTO hermes_trio.schema_version (version) VALUES (99)", name)
    newer = command(tmp_path, url, "serve", "--port", "0")
    assert "upgrade hermes-trio" in newer.stderr + newer.stdout
    postgres.execute("CREATE ROLE visitor LOGIN PASSWORD 'v'")
    visitor = url.replace("keeper", "visitor").replace("a%20password%20that%20nobody%20may%20read", "v")
    denied = command(tmp_path, visitor, "store", "init")
    assert denied.returncode == 1
    assert "permission denied" in denied.stderr + denied.stdout
    mistaken = command(tmp_path, "mysql://somebody:secret@host/db", "store", "init")
    assert mistaken.returncode == 1
    assert "secret" not in mistaken.stderr + mistaken.stdout


_LOG_IN_AS_THE_SERVER = """
import os, socket, sys
try:
    print("words", open(os.environ["HOME"] + "/.pg" + "pass").read()[::-1])
except OSError as error:
    print("file:", error.strerror)
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[1])
    print("reached")
except OSError as error:
    print("socket:", error.strerror)
print("END")
"""


def test_commands_cannot_log_in_to_the_database_as_the_server(postgres: PostgresServer, tmp_path: Path) -> None:
    """A confined command neither reads the file of libpq that has the password, nor reaches the socket on which the database trusts the server's user."""
    name = postgres.new_database()
    assert command(tmp_path, postgres.url(name), "store", "init").returncode == 0
    account, script = tmp_path / "account", tmp_path / "look.py"
    account.mkdir()
    (account / ".pgpass").write_text(f"*:*:*:keeper:{PASSWORD}\n")
    (account / ".pgpass").chmod(0o600)
    script.write_text(_LOG_IN_AS_THE_SERVER)
    postgres.directory.chmod(0o755)  # the socket is for everybody, as usual
    url = f"postgresql://keeper@127.0.0.1:{postgres.port}/{name}?host=127.0.0.1,{postgres.directory}"
    environment = {"HERMES_STORE_URL": url, "HOME": str(account)}
    with server_process(account / "home", environment=environment) as server, client_of(server) as client:
        if (
            client.get("/health/detailed").json()["readiness"]["checks"]["confinement"]["offers"]["protect"]
            != "protect"
        ):
            pytest.skip("commands cannot be confined here")
        socket = f"{postgres.directory}/.s.PGSQL.{postgres.port}"
        said = chat(client, f"!run {sys.executable} {script} {socket}").json()["choices"][0]["message"]["content"]
    assert "END" in said
    assert PASSWORD[::-1] not in said
    assert "reached" not in said


def test_rights_that_are_missing_are_named_before_anything_is_served(postgres: PostgresServer, tmp_path: Path) -> None:
    """A role that may join but not write every table is refused at the start and by `store check`, and `doctor` finds it: all name what to grant."""
    name = postgres.new_database()
    assert command(tmp_path, postgres.url(name), "store", "init").returncode == 0
    guest = postgres.url(name).replace("keeper:a%20password%20that%20nobody%20may%20read", "guest:v")
    postgres.execute(
        "CREATE ROLE guest LOGIN PASSWORD 'v'; GRANT USAGE ON SCHEMA hermes_trio TO guest;"
        " GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA hermes_trio TO guest;"
        " REVOKE INSERT ON hermes_trio.messages FROM guest; REVOKE ALL ON hermes_trio.schema_version FROM guest;"
        " GRANT SELECT ON hermes_trio.schema_version TO guest",
        name,
    )
    for words in (("store", "check"), ("serve", "--port", "0")):
        refused = command(tmp_path, guest, *words)
        assert refused.returncode == 1
        assert "INSERT on messages" in refused.stderr + refused.stdout
    found = json.loads(command(tmp_path, guest, "doctor", "--json").stdout)
    assert (found["sound"], found["healthy"]) == (True, False)
    assert "lacks rights" in found["warnings"][0]
    assert "INSERT on messages; use the role" in " ".join(command(tmp_path, guest, "doctor").stdout.split())
    postgres.execute("REVOKE SELECT ON hermes_trio.cursors FROM guest", name)
    unread = command(tmp_path, guest, "doctor")
    assert (unread.returncode, "SELECT on cursors" in unread.stderr + unread.stdout) == (1, True)
    postgres.execute(
        "GRANT INSERT ON hermes_trio.messages TO guest; GRANT SELECT ON hermes_trio.cursors TO guest", name
    )
    checked = command(tmp_path, guest, "store", "check")
    assert (checked.returncode, "can be used" in checked.stdout) == (0, True), checked.stderr


def test_the_doctor_and_the_backup_know_a_database(own_server: PostgresServer, tmp_path: Path) -> None:
    """`doctor` says what is sound, who works there and what is stuck; `backup` names the command that does it. Neither shows the password."""
    name = own_server.new_database()
    url = own_server.url(name)
    assert command(tmp_path, url, "store", "init").returncode == 0
    found = command(tmp_path, url, "doctor", "--json")
    seen = json.loads(found.stdout)
    assert (found.returncode, seen["sound"], seen["healthy"], seen["nodes"]) == (0, True, True, []), found.stderr
    (tmp_path / "home").mkdir(mode=0o700)
    (tmp_path / "home" / "config.toml").write_text('[agent]\ndemo_directives = ["api_server"]\n')
    with (
        server_process(tmp_path / "home", environment={"HERMES_STORE_URL": url}) as server,
        client_of(server) as client,
    ):
        run = client.post("/v1/runs", json={"input": "!sleep 600"}).json()["run_id"]
        _wait_for(lambda: client.get(f"/v1/runs/{run}").json()["status"] == "running", 60)
        live = json.loads(command(tmp_path, url, "doctor", "--json").stdout)
        assert (len(live["nodes"]), live["stuck"]["runs without an end"], live["unowned"]["runs"]) == (1, 1, 0)
        shown = command(tmp_path, url, "doctor")
        assert (shown.returncode, "lease for" in shown.stdout, "1 runs without an end (under way)" in shown.stdout) == (
            0,
            True,
            True,
        ), shown.stdout
        server.kill()
    own_server.execute("UPDATE hermes_trio.nodes SET expires_at = expires_at - 3600", name)
    dead = command(tmp_path, url, "doctor", "--json")
    left = json.loads(dead.stdout)
    assert (dead.returncode, left["sound"], left["healthy"], left["unowned"]["runs"]) == (0, True, False, 1)
    assert "no node has taken over its work" in str(left["warnings"])
    own_server.stop()
    own_server.settings["fsync"] = "off"
    own_server.start()
    unsafe = command(tmp_path, url, "doctor")
    assert (unsafe.returncode, "NOT SOUND: fsync is off" in " ".join(unsafe.stdout.split())) == (1, True), unsafe.stdout
    refused = command(tmp_path, url, "backup", str(tmp_path / "copy"))
    assert refused.returncode == 1
    told = f"pg_dump --format=custom --schema=hermes_trio --file=hermes-trio.dump --host=127.0.0.1 --port={own_server.port}"
    assert f"{told} --username=keeper --dbname={name}" in " ".join(refused.stderr.split()), refused.stderr
    for done in (found, shown, dead, unsafe, refused):
        assert "a%20password" not in done.stdout + done.stderr
        assert PASSWORD not in done.stdout + done.stderr


def test_a_sqlite_home_is_moved_and_moved_back(postgres: PostgresServer, tmp_path: Path) -> None:
    """All rows are the same in the database, the server goes on there, and the way back makes a file that a server opens."""
    home = tmp_path / "home"
    with server_process(home) as server, client_of(server) as client:
        assert chat(client, "written on sqlite\0 with NUL", "moved-1").status_code == 200
        client.post("/v1/runs", json={"input": "hello"})
        assert command(home, postgres.url("prepared"), "store", "copy", str(home / "state.db")).returncode == 1
        server.stop()
    url = postgres.url(postgres.new_database("prepared"))
    moved = command(home, url, "store", "copy", str(home / "state.db"))
    assert (moved.returncode, "are the same there" in moved.stdout) == (0, True), moved.stderr
    assert "state.db" in command(home, url, "store", "copy", str(home)).stderr  # which file to name
    assert command(home, url, "store", "copy", str(home / "state.db")).returncode == 1  # not empty any more
    with server_process(home, environment={"HERMES_STORE_URL": url}) as server, client_of(server) as client:
        assert chat(client, "written on postgres", "moved-1").status_code == 200
        assert "written on sqlite" in str(client.get("/api/sessions/moved-1/messages").json())
        server.stop()
    again = tmp_path / "again"
    again.mkdir(mode=0o700)
    back = command(again, url, "store", "copy", str(again / "state.db"), "--back")
    assert back.returncode == 0, back.stderr
    with server_process(again) as server, client_of(server) as client:
        texts = str(client.get("/api/sessions/moved-1/messages").json())
        assert "written on sqlite" in texts
        assert "written on postgres" in texts
        assert "wombat" not in texts
        assert "moved-1" in str(client.get("/api/search", params={"q": "postgres"}).json())


def _wait_for(ask: Any, seconds: float = 20.0) -> Any:
    """What `ask` answers as soon as it is true."""
    deadline = time.monotonic() + seconds
    while not (found := ask()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return found


def test_two_servers_share_a_database(postgres: PostgresServer, tmp_path: Path) -> None:
    """A session goes on at the other server, a run is followed and stopped from there, a revoked key is refused there, and a killed server's run is ended."""
    url = postgres.url(postgres.new_database("prepared"))
    environment = {"HERMES_STORE_URL": url}
    settings = '[store]\nlease_seconds = 2.0\n[agent]\ndemo_directives = ["api_server"]\n'
    for name in ("a", "b"):
        (tmp_path / name).mkdir(mode=0o700)
        (tmp_path / name / "config.toml").write_text(settings)
    with (
        server_process(tmp_path / "a", environment=environment) as one,
        server_process(tmp_path / "b", environment=environment) as two,
        client_of(one) as first,
        client_of(two) as second,
    ):
        for number in range(6):
            client = (first, second)[number % 2]
            assert chat(client, f"turn {number}", "hopping").status_code == 200
        texts = str(second.get("/api/sessions/hopping/messages").json())
        places = [texts.index(f"turn {number}") for number in range(6)]
        assert places == sorted(places)

        run = first.post("/v1/runs", json={"input": "!sleep 60"}).json()["run_id"]
        _wait_for(lambda: second.get(f"/v1/runs/{run}").json()["status"] == "running")
        stopped = second.post(f"/v1/runs/{run}/stop")
        assert stopped.status_code < 300, stopped.text
        _wait_for(lambda: first.get(f"/v1/runs/{run}").json()["status"] in ("cancelled", "stopped"))

        key = first.post("/admin/keys", json={"name": "guest", "scopes": ["chat"]}).json()
        guest = {"Authorization": f"Bearer {key['key']}"}
        assert second.get("/v1/models", headers=guest).status_code == 200
        assert first.delete(f"/admin/keys/{key['id']}").status_code < 300
        _wait_for(lambda: second.get("/v1/models", headers=guest).status_code == 401, 1.0)

        lost = first.post("/v1/runs", json={"input": "!sleep 60"}).json()["run_id"]
        _wait_for(lambda: second.get(f"/v1/runs/{lost}").json()["status"] == "running")
        one.kill()
        began = time.monotonic()
        found = _wait_for(lambda: (row := second.get(f"/v1/runs/{lost}").json())["status"] == "failed" and row)
        assert time.monotonic() - began < 2.0 + 3.0
        assert "stopped" in str(found)
        assert chat(second, "after the loss", "hopping").status_code == 200
