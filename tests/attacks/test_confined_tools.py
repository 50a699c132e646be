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
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


def test_no_process_of_the_same_user_looks_into_the_server(attacked: Attacked) -> None:
    """Also outside of any confinement: what the kernel tells about server, warden and keepers belongs to root, not to their user."""
    if attacked.uid == 0:
        pytest.skip("root looks into everything")
    with httpx2.Client(base_url=attacked.server.url, headers=attacked.server.headers, timeout=60) as http:
        name = f"3600.{os.getpid()}9"
        started = http.post("/v1/runs", json={"input": f"!run sleep {name}", "session_id": "looked-at"})
        eventually(lambda: running(f"sleep {name}"))
        try:
            own = [attacked.server.pid, *attacked.children()]
            assert len(own) >= 3
            assert {os.stat(f"/proc/{pid}/environ").st_uid for pid in own} == {0}
            look = ["setpriv", f"--reuid={attacked.uid}", f"--regid={attacked.uid}", "--clear-groups", "cat"]
            for pid in own:
                for file in ("environ", "maps"):
                    read = subprocess.run([*look, f"/proc/{pid}/{file}"], capture_output=True, check=False)
                    assert read.stdout == b""
        finally:
            http.post(f"/v1/runs/{started.json()['run_id']}/stop", params={"wait": "true"})


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


HELPERS = {
    "ssh-agent": "/tmp/ssh-hermes-attack/agent.1",
    "tmux": "/tmp/tmux-{uid}/hermes-attack",
    "screen": "/run/screen/S-hermes-attack/1.attack",
    "X11": "/tmp/.X11-unix/X97",
    "user bus": "/run/user/{uid}/bus",
    "systemd --user": "/run/user/{uid}/systemd/private",
    "rootless docker": "/run/user/{uid}/docker.sock",
    "docker": "/run/docker.sock",
    "podman": "/run/podman/podman.sock",
    "containerd": "/run/containerd/containerd.sock",
    "system bus": "/run/dbus/system_bus_socket",
    "systemd": "/run/systemd/private",
    "abstract": "\0hermes-attack",
}
"""Where processes listen that would act for a command; `{uid}` is the server's user."""


@contextmanager
def made(path: Path, mode: int = 0o755) -> Iterator[None]:
    """A folder, and those above it; what was made is removed afterwards."""
    missing = [one for one in (path, *path.parents) if not one.exists()]
    for one in reversed(missing):
        one.mkdir(mode=mode)
        one.chmod(mode)
    try:
        yield
    finally:
        for one in missing:
            shutil.rmtree(one, ignore_errors=True)


@contextmanager
def listening(address: str) -> Iterator[list[bytes]]:
    """A helper that notes what it is told: a socket at a place that nobody else uses, open to every user."""
    folder = Path(address).parent if address[0] == "/" else Path("/tmp")
    if address[0] == "/" and (Path(address).exists() or not os.access(_nearest(folder), os.W_OK)):
        pytest.skip(f"{address} is in use, or cannot be made here")
    told: list[bytes] = []

    def answer() -> None:
        while True:
            try:
                link, _ = helper.accept()
            except OSError:
                return
            with link:
                link.settimeout(2)
                told.append(b"connected")
                try:
                    told.append(link.recv(4096))
                    link.sendall(b"HTTP/1.0 200 OK\r\n\r\nhelped")
                except OSError:
                    continue

    with made(folder), socket.socket(socket.AF_UNIX) as helper:
        helper.bind(address)
        helper.listen(8)
        if address[0] == "/":
            os.chmod(address, 0o777)
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        try:
            yield told
        finally:
            helper.shutdown(socket.SHUT_RDWR)
            thread.join(10)
            if address[0] == "/":
                Path(address).unlink(missing_ok=True)


def _nearest(path: Path) -> Path:
    return next(one for one in (path, *path.parents) if one.exists())


@pytest.mark.parametrize("kind", HELPERS)
def test_nothing_outside_acts_for_a_command(attacked: Attacked, kind: str) -> None:
    """The socket of a helper that runs outside of the sandbox cannot be connected to, though every user may use it."""
    address = HELPERS[kind].format(uid=attacked.uid)
    with listening(address) as told:
        shown = address.replace("\0", "\\0")
        code = f'import socket; s = socket.socket(socket.AF_UNIX); s.connect("{shown}"); print("CONN" + "ECTED")'
        said = attacked.run(f"/usr/bin/python3 -c '{code}' || echo refused; echo END")
    assert "END" in said
    assert "CONNECTED" not in said
    assert told == []
    assert "XDG_RUNTIME_DIR" not in attacked.run("env")


def test_docker_does_not_act_for_a_command(attacked: Attacked) -> None:
    """A daemon that would start a container with the home in it is not reached by any of its usual addresses."""
    with listening("/run/docker.sock") as told:
        attacked.run(
            "for s in /run/docker.sock /var/run/docker.sock; do"
            " curl -s -m 5 --unix-socket $s -X POST http://d/containers/create -d '{}'; DOCKER_HOST=unix://$s docker version; done; true"
        )
    assert told == []


def test_a_real_ssh_agent_does_not_sign_for_a_command(attacked: Attacked) -> None:
    """The keys of a person who is logged in are neither listed nor used."""
    if shutil.which("ssh-agent") is None or shutil.which("ssh-add") is None or attacked.uid != os.geteuid():
        pytest.skip("needs ssh-agent, as the user of the server")
    with tempfile.TemporaryDirectory(prefix="ssh-", dir="/tmp") as folder:
        address = f"{folder}/agent.{os.getpid()}"
        agent = subprocess.Popen(["ssh-agent", "-D", "-a", address], stdout=subprocess.DEVNULL)
        try:
            eventually(lambda: Path(address).exists())
            key = f"{folder}/key"
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "attacked", "-f", key], check=True)
            outside = {**os.environ, "SSH_AUTH_SOCK": address}
            subprocess.run(["ssh-add", "-q", key], env=outside, check=True)
            listed = subprocess.run(["ssh-add", "-l"], env=outside, check=True, capture_output=True, text=True)
            assert "attacked" in listed.stdout
            said = attacked.run(f"SSH_AUTH_SOCK={address} ssh-add -l; ls /tmp/ssh-*; echo END")
        finally:
            agent.terminate()
            agent.wait(10)
    assert "END" in said
    assert "ED25519" not in said
    assert f"agent.{os.getpid()}" not in said


def test_a_real_message_bus_does_not_act_for_a_command(attacked: Attacked) -> None:
    """What D-Bus offers (a `systemd --user` that starts units, above all) cannot be called."""
    if shutil.which("dbus-daemon") is None or shutil.which("dbus-send") is None or attacked.uid != os.geteuid():
        pytest.skip("needs dbus-daemon and dbus-send, as the user of the server")
    address = Path(f"/run/user/{attacked.uid}/bus")
    if address.exists() or not os.access(_nearest(address.parent), os.W_OK):
        pytest.skip("the user has a bus already, or cannot have one")
    with made(address.parent, 0o700):
        bus = subprocess.Popen(
            ["dbus-daemon", "--session", "--nofork", f"--address=unix:path={address}"], stderr=subprocess.DEVNULL
        )
        try:
            eventually(address.exists)
            call = (
                f"dbus-send --bus=unix:path={address} --print-reply --dest=org.freedesktop.DBus"
                " /org/freedesktop/DBus org.freedesktop.DBus.ListNames"
            )
            outside = subprocess.run(call.split(), check=True, capture_output=True, text=True)
            assert "org.freedesktop.DBus" in outside.stdout
            said = attacked.run(f"{call} | tr a-z n-za-m; systemd-run --user true; systemctl --user start x; echo END")
        finally:
            bus.terminate()
            bus.wait(10)
            address.unlink(missing_ok=True)
    assert "END" in said
    assert "bet.serrqrfxgbc" not in said


@pytest.mark.parametrize("spool", ["/var/spool/cron/crontabs", "/var/spool/cron/atjobs", "/var/spool/at"])
def test_no_job_is_left_for_cron_or_at(attacked: Attacked, spool: str) -> None:
    """What `crontab` and `at` would write is not written where their daemons look for it, though the folder is open to the user."""
    folder = Path(spool)
    if not os.access(_nearest(folder), os.W_OK):
        pytest.skip("only root can make the folder")
    with made(folder, 0o777):
        name = folder / f"hermes-attack-{os.getpid()}"
        said = attacked.run(
            f"echo '* * * * * true' > {name}; echo '* * * * * true' | crontab -; echo true | at now; ls {spool}; echo END"
        )
        written = name.exists()
        name.unlink(missing_ok=True)
    assert "END" in said
    assert not written


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
    marks = list(attacked.home.parent.glob(".local/state/hermes-trio-sessions/*/session.json"))
    assert any("guest-1" in mark.read_text() for mark in marks)
    assert not (attacked.work / "new").exists()
    other = attacked.run(
        "cat mine; cat ../*/mine ../../*/work/mine; echo END", key=attacked.tenant_key("chat"), session="guest-2"
    )
    assert "END" in other
    assert "kept" not in other


def test_a_key_has_the_profile_that_is_named_for_it() -> None:
    """The named key, here the admin's own, is confined to a workspace, in the foreground and behind; another key has what holds for tenants."""
    named = '[tools.confinement.tenants]\n"*" = "protect"\n[tools.confinement.keys]\nadmin = "workspace"\n'
    with attacked_server(config=named) as attacked:
        (attacked.work / "plan").write_text("of the owner")
        read = f"cat {attacked.work}/plan; echo END"
        other = attacked.run(read, key=attacked.tenant_key("chat"), session="other")
        assert "of the owner" in other
        said = attacked.run(f"{read}; env; env > seen")
        assert "END" in said
        assert "of the owner" not in said
        attacked.ask(f"!delegate !run {read} > told; cat {attacked.work}/plan >> told")
        assert "of the owner" not in attacked.run("sleep 1; cat told")
        assert "admin" not in said.replace("attack-admin", "")


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


def kill_together(pids: list[int]) -> None:
    """Stop all of them before the first one dies. One that is gone by then, like a template whose server is dead, needs no signal."""
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)


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
                kill_together(doomed)
        eventually(lambda: not running(f"sleep {name}"))


UNMARKED = "!bg for i in 1 2; do (env -i setsid setsid sleep {name} & ) ; done; sleep {name}"
"""Processes without a word of the server in their environment, in sessions of their own."""


@pytest.mark.parametrize("victims", [("warden",), ("keeper",), ("warden", "keeper")], ids="+".join)
@pytest.mark.parametrize(
    "user", ["", pytest.param("nobody", marks=pytest.mark.slow)], ids=["own user", "unprivileged user"]
)
def test_every_child_that_the_server_did_not_start_is_ended(victims: tuple[str, ...], user: str) -> None:
    """Also without any confinement: what a dead warden leaves to the server is ended, whatever its environment or session says, and nothing else."""
    name = f"3600.{os.getpid()}7{len(victims)}{len(victims[0])}"
    with (
        attacked_server(user, config='[tools.confinement]\nprofile = "off"\n') as attacked,
        httpx2.Client(base_url=attacked.server.url, headers=attacked.server.headers, timeout=60) as http,
    ):
        http.post("/v1/runs", json={"input": UNMARKED.format(name=name), "session_id": "s"})
        eventually(lambda: len(running(f"sleep {name}")) >= 3)
        warden, *keepers = attacked.children()
        doomed = [pid for victim in victims for pid in ([warden] if victim == "warden" else keepers)]
        kill_together(doomed)
        eventually(lambda: not running(f"sleep {name}"))
        assert attacked.alive()
        assert "again" in attacked.run("echo again", session="t")


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
