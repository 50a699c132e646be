"""Attacks on the gateway through the commands that its agent runs. Each promise is about the real server, with its confinement as it is by default."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
import trio

from hermes_trio.tools.warden import probe_protections
from tests.tools.bench_of_tools import running

from .attacked_server import KEY, PROVIDER_KEY, Attacked, attacked_server, eventually

PACKAGE = Path(__file__).parents[2] / "hermes_trio"


@pytest.fixture(
    scope="module", params=["", pytest.param("nobody", marks=pytest.mark.slow)], ids=["own user", "unprivileged user"]
)
def attacked(request: pytest.FixtureRequest) -> Iterator[Attacked]:
    offered = trio.run(probe_protections)
    if offered.missing:
        pytest.skip(f"this machine does not offer full confinement: {'; '.join(offered.missing)}")
    with attacked_server(request.param) as server:
        yield server


def secrets_in(text: str) -> list[str]:
    return [secret for secret in (KEY, PROVIDER_KEY) if secret in text]


def test_no_key_from_an_environment(attacked: Attacked) -> None:
    """Neither the server's environment nor that of any process around it can be read."""
    pid = attacked.server.pid
    # Turned around, because a key that shows in an output is masked there.
    said = attacked.run(
        f"cat /proc/{pid}/environ /proc/[0-9]*/environ | tr '\\0' '\\n' | grep -a attack | rev; echo END"
    )
    assert "END" in said
    assert not secrets_in(said[::-1])


def test_no_key_from_memory(attacked: Attacked) -> None:
    """The server's memory, its map and its open files are out of reach, also of a debugger's system call."""
    pid = attacked.server.pid
    said = attacked.run(
        f"for p in {pid} 1 $PPID; do cat /proc/$p/maps; ls -l /proc/$p/fd; readlink /proc/$p/exe; head -c 9 /proc/$p/mem; done; echo END"
    )
    assert "END" in said
    assert "state.db" not in said
    assert "r-xp" not in said
    assert "python" not in said


def test_no_key_from_files(attacked: Attacked) -> None:
    """The home is empty for commands by every path to it; as root its disk cannot be read around the file system either."""
    home, pid = attacked.home, attacked.server.pid
    said = attacked.run(
        f"ls -A {home}; cat {home}/* {home}/.* /proc/{pid}/root{home}/* /proc/{pid}/cwd/* /proc/1/root{home}/*;"
        f" ln -s {home} link; cat link/config.toml; cd {home.parent}; grep -rs attack . ; mv .hermes-trio x; umount .hermes-trio;"
        " unshare -Urm sh -c 'umount -l .hermes-trio; cat .hermes-trio/config.toml'; find /dev -type b"
    )
    assert not secrets_in(said)
    if attacked.uid == 0:
        assert "/dev/" not in said.replace("/dev/null", "")
    assert (home / "config.toml").exists()


def test_the_server_cannot_be_ended(attacked: Attacked) -> None:
    """Signals to the server, the warden and the keeper do not arrive, also those of a script that no guard has read."""
    victims = " ".join(map(str, [attacked.server.pid, *attacked.children()]))
    script = attacked.work / "attack.sh"
    script.write_text(f"kill -TERM {victims}\nkill -STOP {victims}\nkill -9 {victims}\nkill -9 $PPID\necho END\n")
    script.chmod(0o644)
    assert "END" in attacked.run(f"sh {script}")
    assert attacked.alive()
    assert attacked.server.is_alive()


def test_the_database_cannot_be_removed(attacked: Attacked) -> None:
    """Removing, truncating and replacing it does nothing, and what was said before is still there."""
    database = attacked.home / "state.db"
    before = os.stat(database).st_ino
    attacked.run(
        f"rm -rf {attacked.home}; rm -f {database}*; : > {database}; truncate -s 0 {database}; cp -f /etc/hostname {database};"
        f" cd {attacked.home.parent} && mv .hermes-trio gone; true"
    )
    assert os.stat(database).st_ino == before
    assert attacked.get("/health/detailed")["readiness"]["checks"]["state_db"] == {"status": "ok"}


def test_the_next_start_runs_no_code_of_a_command(attacked: Attacked) -> None:
    """The package, the interpreter's folders and the configuration cannot be written, nor be exchanged from above."""
    site = next(path for path in sys.path if path.endswith("site-packages"))
    attacked.run(
        f"echo 'print(1)' > {PACKAGE}/evil.py; echo evil > {site}/evil.pth; echo x >> {attacked.home}/config.toml;"
        f" cd {attacked.home.parent.parent}; mv account other; mkdir account; true"
    )
    assert not (PACKAGE / "evil.py").exists()
    assert not Path(site, "evil.pth").exists()
    assert "evil" not in (attacked.home / "config.toml").read_text()
    if attacked.uid == 0:
        evil = Path("/etc/cron.d/hermes-evil")
        said = attacked.run(
            f"echo '# nothing' > {evil}; now=$(cat /proc/sys/kernel/core_pattern);"
            ' echo "$now" > /proc/sys/kernel/core_pattern && echo "WR""OTE"; echo END'
        )
        written = evil.exists()
        evil.unlink(missing_ok=True)
        assert "END" in said
        assert not written
        assert "WROTE" not in said


@pytest.mark.parametrize("kind", ["ssh-agent", "tmux", "abstract", "runtime directory"])
def test_nothing_outside_acts_for_a_command(attacked: Attacked, kind: str) -> None:
    """Sockets of helpers that run outside of the sandbox cannot be connected to."""
    if attacked.uid != os.geteuid() and kind == "runtime directory":
        pytest.skip("the runtime directory of another user")
    with socket.socket(socket.AF_UNIX) as helper, tempfile.TemporaryDirectory(prefix="ssh-", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        if kind == "ssh-agent":
            address = f"{folder}/agent.1"
        elif kind == "tmux":
            Path(f"/tmp/tmux-{attacked.uid}").mkdir(mode=0o755, exist_ok=True)
            address = f"/tmp/tmux-{attacked.uid}/hermes-attack"
        elif kind == "runtime directory":
            Path(f"/run/user/{attacked.uid}").mkdir(mode=0o700, parents=True, exist_ok=True)
            address = f"/run/user/{attacked.uid}/hermes-attack"
        else:
            address = "\0hermes-attack"
        if address[0] == "/":
            Path(address).unlink(missing_ok=True)
        helper.bind(address)
        helper.listen(4)
        if address[0] == "/":
            os.chmod(address, 0o777)
        try:
            shown = address.replace("\0", "\\0")
            code = f'import socket; s = socket.socket(socket.AF_UNIX); s.connect("{shown}"); print("CONN" + "ECTED")'
            said = attacked.run(f"/usr/bin/python3 -c '{code}' || echo refused; echo END")
        finally:
            if address[0] == "/":
                Path(address).unlink(missing_ok=True)
    assert "END" in said
    assert "CONNECTED" not in said
    assert "XDG_RUNTIME_DIR" not in attacked.run("env")


def test_a_real_tmux_server_does_not_act_for_a_command(attacked: Attacked) -> None:
    """A secret was once read through a tmux server outside of the sandbox."""
    if shutil.which("tmux") is None or attacked.uid != os.geteuid():
        pytest.skip("needs tmux, as the user of the server")
    name = f"hermes-attack-{os.getpid()}"
    if subprocess.run(["tmux", "-L", name, "new-session", "-d", "sleep 60"], check=False).returncode:
        pytest.skip("tmux does not start here")
    try:
        out = attacked.work / "stolen"
        attacked.run(f"tmux -L {name} run-shell 'cat {attacked.home}/config.toml > {out}'; true")
        assert not (out.exists() and secrets_in(out.read_text()))
    finally:
        subprocess.run(["tmux", "-L", name, "kill-server"], check=False)


def test_a_tenant_lives_in_a_workspace(attacked: Attacked) -> None:
    """A key that is not the owner's reads neither the account nor the owner's work, and writes only into its own folder."""
    (attacked.work / "plan").write_text("of the owner")
    (attacked.work / "plan").chmod(0o644)
    key = attacked.tenant_key("chat")
    said = attacked.run(
        f"pwd; cat {attacked.work}/plan; ls -A {attacked.home.parent}; echo x > {attacked.work}/new; echo kept > mine; cat mine",
        key=key,
        session="guest-1",
    )
    assert "kept" in said
    assert "of the owner" not in said
    assert ".hermes-trio" not in said
    assert not (attacked.work / "new").exists()
    other = attacked.run(
        "cat mine; cat ../*/mine ../../*/work/mine; echo END", key=attacked.tenant_key("chat"), session="guest-2"
    )
    assert "END" in other
    assert "kept" not in other


def test_shell_state_of_another_session_cannot_be_reached(attacked: Attacked) -> None:
    """A session's functions lie in no folder and in no descriptor that another session's command could open."""
    attacked.run("secret() { echo state-of-one; }; true", session="one")
    with httpx2.Client(base_url=attacked.server.url, headers=attacked.server.headers, timeout=60) as http:
        started = http.post("/v1/runs", json={"input": "!run sleep 3600.0651", "session_id": "one"})
        assert started.status_code in (200, 202), started.text
        eventually(lambda: running("sleep 3600.0651"))
        said = attacked.run(
            "cat /tmp/hermes-trio-shells-*/* /proc/[0-9]*/fd/200 /proc/[0-9]*/fd/201; ls /tmp/hermes-trio-shells-*; echo END",
            session="two",
        )
        http.post(f"/v1/runs/{started.json()['run_id']}/stop", params={"wait": "true"})
    assert "END" in said
    assert "state-of-one" not in said


def test_health_says_that_commands_are_confined(attacked: Attacked) -> None:
    """An operator sees it without looking at the kernel."""
    check = attacked.get("/health/detailed")["readiness"]["checks"]["confinement"]
    assert (check["status"], check["profile"], check["offers"]["workspace"]) == ("ok", "protect", "workspace")


STUBBORN = (
    "!bg for i in 1 2; do (trap '' TERM HUP INT; setsid setsid sleep {name} & ) ; done; trap '' TERM; sleep {name}"
)

ENDS = [
    combination for size in (1, 2, 3) for combination in itertools.combinations(("server", "warden", "keeper"), size)
]


@pytest.mark.parametrize(
    "victims",
    [
        pytest.param(victims, marks=[] if len(victims) == 3 else pytest.mark.slow, id="+".join(victims))
        for victims in [*ENDS, ("SIGTERM",), ("stop",)]
    ],
)
@pytest.mark.parametrize(
    "user", ["", pytest.param("nobody", marks=pytest.mark.slow)], ids=["own user", "unprivileged user"]
)
def test_nothing_survives(victims: tuple[str, ...], user: str) -> None:
    """Whatever of server, warden and keeper is killed, in any combination and at once, no process of a command is left."""
    if not trio.run(probe_protections).pid:
        pytest.skip("this machine offers no PID namespace; `hermes-trio doctor` says what that means")
    name = f"3600.{os.getpid()}{sum(map(ord, ''.join(victims)))}"
    with (
        attacked_server(user) as attacked,
        httpx2.Client(base_url=attacked.server.url, headers=attacked.server.headers, timeout=60) as http,
    ):
        run = http.post("/v1/runs", json={"input": STUBBORN.format(name=name), "session_id": "s"}).json()["run_id"]
        eventually(lambda: len(running(f"sleep {name}")) >= 3)
        warden, *keepers = attacked.children()
        match victims:
            case ("SIGTERM",):
                attacked.server.stop()
            case ("stop",):
                http.post(f"/v1/runs/{run}/stop", params={"wait": "true"})
            case _:
                pids = {"server": [attacked.server.pid], "warden": [warden], "keeper": keepers}
                doomed = [pid for victim in victims for pid in pids[victim]]
                for pid in doomed:
                    os.kill(pid, signal.SIGSTOP)
                for pid in doomed:
                    os.kill(pid, signal.SIGKILL)
        eventually(lambda: not running(f"sleep {name}"))


def test_a_replaced_database_is_noticed_at_once() -> None:
    """The server says 503 and degraded instead of promising what would be lost at its end."""
    with (
        attacked_server() as attacked,
        httpx2.Client(base_url=attacked.server.url, headers=attacked.server.headers, timeout=30) as http,
    ):
        assert http.post("/api/sessions", json={"id": "before"}).status_code == 201
        moved = attacked.home / "elsewhere.db"
        (attacked.home / "state.db").rename(moved)
        refused = http.post("/api/sessions", json={"id": "during"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "session_db_unavailable")
        assert "removed or replaced" in refused.json()["error"]["message"]
        health = http.get("/health/detailed").json()
        assert (health["status"], health["readiness"]["checks"]["state_db"]["detail"]) == ("degraded", "StoreReplaced")
        moved.rename(attacked.home / "state.db")
        assert http.post("/api/sessions", json={"id": "after"}).status_code == 201
