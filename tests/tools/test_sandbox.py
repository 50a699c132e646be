"""Commands under confinement: what each profile lets them do, as the kernel of this machine enforces it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hermes_trio import SessionContext, Turn
from hermes_trio.base.settings import SettingsError
from hermes_trio.tools.confinement import confinement_report, open_confinement
from hermes_trio.tools.settings import ToolSettings
from hermes_trio.tools.terminal.hints import confinement_hint
from hermes_trio.tools.warden import (
    CommandLimits,
    ProcessSpec,
    Profile,
    Protections,
    Sandbox,
    SandboxPaths,
    SpawnFailed,
    Stdin,
    Warden,
    Workspace,
    open_warden,
    probe_protections,
)
from hermes_trio.tools.warden.daemon.wire import Confinement, Plan, Spaces, Streams

from .bench_of_tools import call, open_bench, running, until
from .warden_witness import nothing_left, read_all

FULL = Protections(mount=True, pid=True, network=True, ipc=True, landlock=7)


async def needs(*names: str) -> Protections:
    """What this machine offers; a test that needs more is skipped, with the reason."""
    offered = await probe_protections()
    for name in names:
        if not getattr(offered, name):
            pytest.skip(f"this machine offers no {name} confinement to this user: {offered}")
    return offered


async def output_of(
    warden: Warden,
    sandbox: Sandbox,
    command: str,
    profile: Profile = Profile.PROTECT,
    *,
    workspace: Workspace | None = None,
) -> str:
    """What a confined command writes."""
    await sandbox.ready()
    cwd = "/" if workspace is None else workspace.root
    process = await warden.spawn(
        ProcessSpec(
            command=command, cwd=cwd, env={"PATH": os.environ["PATH"]}, confinement=sandbox.plan(profile, workspace)
        )
    )
    said = (await read_all(process)).decode()
    await process.wait_empty()
    return said


def gateway_home(tmp_path: Path) -> Path:
    """A home with a key in it, beside a file of the user's."""
    home = tmp_path / "account" / "home"
    (home / "skills").mkdir(parents=True)
    (home / "api_server.key").write_text("ht-secret")
    (home / "skills" / "one.md").write_text("how to")
    (tmp_path / "account" / "notes").write_text("mine")
    return home


def test_a_plan_survives_the_wire() -> None:
    """What the server decided is what the keeper carries out."""
    rules = Confinement(spaces=Spaces.MOUNT | Spaces.PID, landlock=True, guards_kernel=True)
    rules.hidden, rules.pinned, rules.binds = [b"/a b", b"/c"], [b"/d"], [(b"/e", b"/tmp"), (b"/f", b"/g")]
    rules.processes, rules.file_bytes = 7, 1 << 40
    sent = Plan([b"x"], b"/", {b"A": b"1"}, Streams.STDIN, rules).encode()
    size = Plan.HEADER.size
    got = Plan.decode(sent[:size], sent[size:])
    assert got.confinement is not None
    assert got.env == {b"A": b"1"}
    assert {name: getattr(got.confinement, name) for name in Confinement.__slots__} == {
        name: getattr(rules, name) for name in Confinement.__slots__
    }


async def test_the_home_is_hidden_and_everything_else_works(tmp_path: Path) -> None:
    """`protect` shows an empty home, also to those who unmount, rename or go around it; the folders beside it stay usable."""
    await needs("mount")
    home = gateway_home(tmp_path)
    sandbox = Sandbox(SandboxPaths(home=str(home), shown=(str(home / "skills"),)))
    with nothing_left():
        async with open_warden() as warden:
            said = await output_of(
                warden,
                sandbox,
                f"cd {home.parent}; cat notes; touch new; ls home; cat home/skills/one.md; cat home/api_server.key;"
                " umount home; mv home elsewhere; rm -rf home; echo x > home/skills/one.md; echo x > home/config.toml",
            )
    assert said.startswith("mineskills\nhow to")
    assert "ht-secret" not in said
    assert (home / "api_server.key").read_text() == "ht-secret"
    assert (home / "skills" / "one.md").read_text() == "how to"
    assert (home.parent / "new").exists()
    assert not (home.parent / "elsewhere").exists()


async def test_a_folder_above_the_home_cannot_be_exchanged(tmp_path: Path) -> None:
    """The next start finds the home where it was: nothing can be put in its place by renaming what lies above it."""
    await needs("mount")
    home = gateway_home(tmp_path)
    async with open_warden() as warden:
        said = await output_of(
            warden,
            Sandbox(SandboxPaths(home=str(home))),
            f"cd {tmp_path}; mv account gone && mkdir -p account/home && echo 'evil' > account/home/config.toml",
        )
    assert "busy" in said
    assert (home / "api_server.key").exists()


async def test_the_program_and_the_machine_are_read_only() -> None:
    """A command cannot change what the next start of the gateway would run, nor, as root, the kernel's settings and block devices."""
    await needs("mount")
    package = Path(__file__).parents[2] / "hermes_trio"
    sandbox = Sandbox()
    async with open_warden() as warden:
        said = await output_of(
            warden,
            sandbox,
            f"echo x > {package}/evil.py; echo x > /proc/sys/kernel/core_pattern; echo x > /etc/cron.d/evil;"
            " grep -E 'Cap(Eff|Bnd)|NoNewPrivs' /proc/self/status | cut -f2 | tr '\\n' ' '; find /dev -type b | head -1",
        )
    assert not (package / "evil.py").exists()
    assert "evil" not in os.listdir("/etc/cron.d" if os.path.isdir("/etc/cron.d") else "/etc")  # noqa: ASYNC240
    assert said.count("Read-only file system") + said.count("Permission denied") + said.count("nonexistent") >= 2
    zeros = "0" * 16
    assert f"{zeros} {zeros} 1" in said
    if os.geteuid() == 0:
        assert not [line for line in said.split() if line.startswith("/dev/")]


async def test_a_command_sees_and_signals_only_its_own_processes() -> None:
    """The server, the warden and the keeper can neither be found nor signalled."""
    await needs("pid")
    async with open_warden() as warden:
        said = await output_of(
            warden,
            Sandbox(),
            f"ls -d /proc/[0-9]* | wc -l; kill -9 {os.getpid()} || echo no; kill -9 1 || echo no; kill -9 $PPID || echo no;"
            " kill -STOP 1; cat /proc/1/environ 2>/dev/null | wc -c; ls -l /proc/1/fd 2>&1 | grep -c denied; echo on",
        )
        words = said.split()
    assert int(words[0]) <= 5
    assert words.count("no") == 3
    assert words[-3:] == ["0", "1", "on"] or words[-1] == "on"


async def test_nothing_survives_the_death_of_a_keeper() -> None:
    """In a PID namespace the kernel ends the job with its keeper, however many sessions and forks away it is."""
    await needs("pid")
    sandbox = Sandbox()
    await sandbox.ready()
    async with open_warden() as warden:
        process = await warden.spawn(
            ProcessSpec(
                command="setsid setsid sh -c \"trap '' TERM HUP; sleep 3600.0641\" & sleep 3600.0641",
                cwd="/",
                env={"PATH": os.environ["PATH"]},
                confinement=sandbox.plan(Profile.PROTECT),
            )
        )
        await until(lambda: len(running("sleep 3600.0641")) >= 2)
        os.kill(process.keeper_pid, 9)
        await until(lambda: not running("sleep 3600.0641"))
        assert (await process.wait()).lost


INTO_TERMINAL = """
import fcntl, os, sys, termios
for name in sys.argv[1:]:
    for flags in (os.O_RDWR, os.O_WRONLY | os.O_NOCTTY):
        try:
            terminal = os.open(name, flags)
            if not os.isatty(terminal):
                continue
            os.write(terminal, b"PWNED")
            print("wrote to", name)
            fcntl.ioctl(terminal, termios.TIOCSTI, b"x")
            print("typed on", name)
        except OSError as error:
            print(error.strerror)
"""


@pytest.mark.parametrize("profile", [Profile.PROTECT, Profile.WORKSPACE])
async def test_no_terminal_of_others_is_written_or_typed_on(tmp_path: Path, profile: Profile) -> None:
    """The terminal in which the server, or its user's shell, runs is out of reach: nothing appears on it, and nothing is typed or read there."""
    await needs("mount", "landlock")
    workspace = Workspace(str(tmp_path))
    master, slave = os.openpty()
    try:
        os.set_blocking(master, False)
        name = os.ttyname(slave)
        async with open_warden() as warden:
            program = (
                f"{shlex.quote(sys.executable)} -c {shlex.quote(INTO_TERMINAL)} {name} /dev/tty /dev/console; echo END"
            )
            said = await output_of(warden, Sandbox(), program, profile, workspace=workspace)
        with pytest.raises(BlockingIOError):
            os.read(master, 100)
    finally:
        os.close(master)
        os.close(slave)
    assert said.endswith("END\n")
    assert "typed" not in said
    assert "wrote" not in said


async def test_a_command_s_own_terminal_has_a_name(tmp_path: Path) -> None:
    """Programs that ask for the name of their terminal, and those that make terminals, work."""
    await needs("mount", "landlock")
    if not os.access("/dev/console", os.F_OK):
        pytest.skip("there is no /dev/console to give the terminal's name to")
    sandbox = Sandbox()
    await sandbox.ready()
    code = "import os; print(os.isatty(0), os.ttyname(0)); open('/dev/tty', 'w').write('tty works\\n'); print(os.ttyname(os.openpty()[1]))"
    async with open_warden() as warden:
        process = await warden.spawn(
            ProcessSpec(
                argv=(sys.executable, "-c", code),
                cwd="/",
                env={"PATH": os.environ["PATH"]},
                stdin=Stdin.PTY,
                confinement=sandbox.plan(Profile.PROTECT),
            )
        )
        said = (await read_all(process)).decode().splitlines()
        await process.wait_empty()
    assert said[0] == "True /dev/console", said
    assert said[1] == "tty works"
    assert said[2].startswith("/dev/pts/"), said


async def test_a_workspace_is_all_that_can_be_written(tmp_path: Path) -> None:
    """`workspace` writes below its folder and a temporary one of its own, and reads neither the account nor other workspaces."""
    await needs("landlock")
    home = gateway_home(tmp_path)
    for name in ("own", "tmp", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "other" / "secret").write_text("theirs")
    workspace = Workspace(str(tmp_path / "own"), str(tmp_path / "tmp"))
    async with open_warden() as warden:
        said = await output_of(
            warden,
            Sandbox(SandboxPaths(home=str(home))),
            f"echo ok > file; cat file; echo x > {tmp_path}/other/new; cat {tmp_path}/other/secret; cat {home.parent}/notes;"
            " ls / >/dev/null; cat /etc/hostname >/dev/null && echo system; echo x > /usr/x; git init -q . && ls -d .git",
            Profile.WORKSPACE,
            workspace=workspace,
        )
    lines = said.splitlines()
    assert lines[0] == "ok"
    assert "system" in lines
    assert ".git" in lines
    assert "theirs" not in said
    assert "mine" not in said
    assert not (tmp_path / "other" / "new").exists()


async def test_the_temporary_folder_of_a_workspace_is_its_own(tmp_path: Path) -> None:
    """What it puts into /tmp is there for its next command, and for nobody else."""
    await needs("landlock", "mount")
    own = Path("/var/lib") if os.access("/var/lib", os.W_OK) else None
    if own is None:
        pytest.skip("the folders of this test lie below /tmp, which cannot be both a workspace and hidden")
    root = own / f"hermes-test-{os.getpid()}"
    (root / "work").mkdir(parents=True)
    (root / "tmp").mkdir()
    workspace = Workspace(str(root / "work"), str(root / "tmp"))
    try:
        async with open_warden() as warden:
            assert await output_of(warden, Sandbox(), f"ls {tmp_path} | wc -l; echo kept > /tmp/hermes-x", Profile.WORKSPACE, workspace=workspace)  # fmt: skip
            said = await output_of(warden, Sandbox(), "cat /tmp/hermes-x", Profile.WORKSPACE, workspace=workspace)
        assert said == "kept\n"
        assert "hermes-x" not in os.listdir("/tmp")
    finally:
        shutil.rmtree(root)


async def test_a_temporary_folder_that_became_a_link_shows_nothing_that_is_hidden(tmp_path: Path) -> None:
    """Another command of the account may put a link to the gateway's home in the place of a workspace's temporary folder."""
    await needs("landlock", "mount")
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (home / "config.toml").write_text("secret")
    (tmp_path / "tmp").symlink_to(home)
    sandbox = Sandbox(SandboxPaths(home=str(home)))
    async with open_warden() as warden:
        said = await output_of(
            warden,
            sandbox,
            "for d in /tmp /var/tmp /dev/shm; do cat $d/config.toml; echo evil > $d/evil; done; echo END",
            Profile.WORKSPACE,
            workspace=Workspace(str(work), str(tmp_path / "tmp")),
        )
    assert "END" in said
    assert "secret" not in said
    assert [entry.name for entry in home.iterdir()] == ["config.toml"]


async def test_shared_memory_of_a_command_ends_with_it(tmp_path: Path) -> None:
    """System V memory belongs to the user: without a namespace it outlived its command, beyond every limit, and commands of other tenants could read it."""
    await needs("mount", "ipc")
    make = "import ctypes; print('made', ctypes.CDLL(None).shmget(0x68657278, 4096, 0o1600) >= 0)"
    look = "import ctypes; print('found', ctypes.CDLL(None).shmget(0x68657278, 0, 0) >= 0)"
    async with open_warden() as warden:
        made = await output_of(warden, Sandbox(), f"{sys.executable} -c {shlex.quote(make)}", Profile.PROTECT)
        found = await output_of(warden, Sandbox(), f"{sys.executable} -c {shlex.quote(look)}", Profile.PROTECT)
    assert (made, found) == ("made True\n", "found False\n")


async def test_offline_has_a_loopback_and_nothing_else(tmp_path: Path) -> None:
    """A network namespace: programs can talk to themselves, and to nobody else."""
    await needs("network", "landlock")
    async with open_warden() as warden:
        said = await output_of(
            warden,
            Sandbox(),
            "ls /sys/class/net 2>/dev/null | tr '\\n' ' '; grep -c : /proc/net/dev; (exec 3<>/dev/tcp/192.0.2.1/80) 2>&1 | grep -q unreachable && echo cut",
            Profile.OFFLINE,
            workspace=Workspace(str(tmp_path)),
        )
    assert said.split()[-2:] == ["1", "cut"]


async def test_without_a_network_namespace_offline_is_no_tcp(tmp_path: Path) -> None:
    """Landlock refuses TCP; it is not called more than it is."""
    offered = await needs("landlock")
    if offered.landlock < 4:
        pytest.skip("Landlock has no rules for TCP here")
    protections = msgspec.structs.replace(offered, network=False)
    assert protections.offers(Profile.OFFLINE) == "no-tcp"
    async with open_warden() as warden:
        said = await output_of(
            warden,
            Sandbox(protections=protections),
            "(exec 3<>/dev/tcp/127.0.0.1/9) 2>&1 | grep -q 'Permission denied' && echo cut",
            Profile.OFFLINE,
            workspace=Workspace(str(tmp_path)),
        )
    assert said.strip() == "cut"


async def test_landlock_alone_still_keeps_the_home(tmp_path: Path) -> None:
    """Where there are no namespaces the home cannot be read or changed either; that it costs more is said."""
    offered = await needs("landlock")
    home = gateway_home(tmp_path)
    protections = Protections(landlock=offered.landlock, root=offered.root)
    assert protections.offers(Profile.PROTECT) == "degraded"
    async with open_warden() as warden:
        said = await output_of(
            warden,
            Sandbox(SandboxPaths(home=str(home)), protections=protections),
            f"cat {home.parent}/notes; cat {home}/api_server.key; rm -rf {home}; echo x > {home}/new; echo fine",
        )
    assert "mine" in said
    assert "fine" in said
    assert "ht-secret" not in said
    assert sorted(os.listdir(home)) == ["api_server.key", "skills"]


def test_what_cannot_be_enforced_is_refused_or_said() -> None:
    """`workspace` does not run on a kernel without Landlock; `protect` runs and is called degraded, with reasons."""
    bare = Protections()
    with pytest.raises(SpawnFailed, match=r"'workspace' cannot be confined.*doctor"):
        Sandbox(protections=bare).plan(Profile.WORKSPACE, Workspace("/srv"))
    assert bare.offers(Profile.OFFLINE) == "refused"
    report = confinement_report(Profile.PROTECT, bare)
    assert (report["status"], len(report["missing"])) == ("degraded", 3)  # type: ignore[arg-type]
    assert confinement_report(Profile.PROTECT, FULL)["status"] == "ok"
    assert "switched off" in str(confinement_report(Profile.OFF, FULL)["detail"])
    assert Sandbox(protections=FULL).plan(Profile.OFF) is None


async def test_limits_of_a_command() -> None:
    """A job with too many processes is killed and the server is told; files and descriptors have their limits."""
    sandbox = Sandbox(limits=CommandLimits(processes=20, file_mebibytes=1, open_files=99))
    await sandbox.ready()
    async with open_warden() as warden:
        said = await output_of(warden, sandbox, "ulimit -n; ulimit -f; ulimit -c")
        assert said.split() == ["99", "1024", "0"]
        bomb = await warden.spawn(
            ProcessSpec(
                command="for i in $(seq 60); do sleep 3600.0642 & done; wait",
                cwd="/",
                env={"PATH": os.environ["PATH"]},
                confinement=sandbox.plan(Profile.PROTECT),
            )
        )
        await bomb.wait_empty()
        assert bomb.count_exceeded is not None
        assert bomb.count_exceeded[1] == 20
        assert not running("sleep 3600.0642")


# -- which profile ---------------------------------------------------------------------------------------------------------------


def test_profiles_by_platform_route_and_tenant() -> None:
    """A tenant that is not the owner gets `workspace` unless it is named; platforms and routes narrow it and never widen it."""
    settings = ToolSettings.read(
        {
            "confinement": {
                "platforms": {"telegram": "workspace", "api_server": "off"},
                "routes": {"deploy": "offline"},
                "tenants": {"ci": "protect"},
                "keys": {"key_strict": "offline", "key_trusted": "protect", "admin": "workspace"},
            }
        }
    )
    rules = open_confinement(settings, {"HOME": "/root"}, protections=FULL)

    def profile(tenant: str = "", **fields: str) -> Profile:
        return rules.profile_of(None, SessionContext(**fields), tenant)

    assert profile() is Profile.PROTECT
    assert profile(platform="telegram") is Profile.WORKSPACE
    assert profile(platform="api_server") is Profile.OFF
    assert profile(platform="webhook", user_name="deploy") is Profile.OFFLINE
    assert profile(platform="webhook", user_name="else") is Profile.PROTECT
    assert profile("key_1", platform="api_server") is Profile.WORKSPACE
    assert profile("ci", platform="api_server") is Profile.PROTECT
    assert profile("ci", platform="api_server", key_id="key_strict") is Profile.OFFLINE
    assert profile("other", platform="web", key_id="key_trusted") is Profile.PROTECT
    assert profile("other", platform="web", key_id="key_2") is Profile.WORKSPACE
    assert profile(platform="api_server", key_id="admin") is Profile.WORKSPACE


async def test_a_child_is_confined_as_its_parent_or_more() -> None:
    """A delegated turn has its parent's tenant and platform, and with `[tools.delegation] profile` a narrower profile."""
    async with open_bench(table={"confinement": {"profile": "off"}, "delegation": {"profile": "protect"}}) as bench:
        seen: list[tuple[Profile, bool]] = []

        async def look(turn: Turn) -> str:
            place = await bench.box.confinement.place(turn)
            seen.append((place.profile, place.confined))
            return "ok"

        async def body(turn: Turn) -> None:
            await look(turn)
            await turn.run_child("go", agent=look)

        await bench.in_turn(body)
    assert seen[0] == (Profile.OFF, False)
    assert seen[1][0] is Profile.PROTECT


def test_the_working_directory_is_never_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configured directory inside of the home is refused with its name; the default goes elsewhere."""
    home = tmp_path / "home"
    (home / "work").mkdir(parents=True)
    with pytest.raises(SettingsError, match=r"tools\.terminal\.cwd .*inside the gateway's home"):
        open_confinement(ToolSettings.read({"terminal": {"cwd": str(home / "work")}}), {}, home=home)
    (tmp_path / "link").symlink_to(home)
    with pytest.raises(SettingsError, match="inside the gateway's home"):
        open_confinement(ToolSettings.read({"terminal": {"cwd": str(tmp_path / "link")}}), {}, home=home)
    monkeypatch.setattr(os, "getcwd", lambda: str(home))
    assert open_confinement(ToolSettings(), {"HOME": str(tmp_path)}, home=home).cwd == str(tmp_path)


async def test_each_session_can_have_a_folder_of_its_own(tmp_path: Path) -> None:
    """`workspace = "per-session"`: two sessions start in different folders, and a session's next command in the same one."""
    table: dict[str, Any] = {"terminal": {"workspace": "per-session", "session_folder": str(tmp_path)}}
    async with open_bench(table=table) as bench:
        first = (await bench.run("pwd; touch here"))["output"]
        assert (await bench.run("pwd; ls"))["output"].split() == [first, "here"]
        other = (await bench.run("pwd; ls", session="../../etc"))["output"]
    assert first != other
    assert {Path(one).parents[1] for one in (first, other)} == {tmp_path}


async def test_a_session_below_tmp_has_temporary_files(tmp_path: Path) -> None:
    """Where /tmp cannot be replaced because the session's own folder lies in it, `TMPDIR` names a folder that the command can write."""
    await needs("landlock")
    if not str(tmp_path).startswith("/tmp/"):
        pytest.skip("the folders of this test lie somewhere else")
    secret = tmp_path / "secret"
    secret.write_text("of somebody else")
    table: dict[str, Any] = {
        "terminal": {"workspace": "per-session", "session_folder": str(tmp_path / "sessions")},
        "confinement": {"profile": "workspace"},
    }
    async with open_bench(table=table) as bench:
        said = (await bench.run(f'echo kept > "$(mktemp)"; cat "$TMPDIR"/*; cat {secret}; ls /tmp'))["output"]
    assert said.startswith("kept\n")
    assert "somebody" not in said
    assert "Permission denied" in said


# -- what the model is told ------------------------------------------------------------------------------------------------------


async def test_a_refused_kill_is_explained_and_the_process_tool_takes_a_pid() -> None:
    """Commands of one session cannot signal each other; the answer says what can, and that works with the number that was shown."""
    await needs("landlock")
    async with open_bench() as bench:
        seen: list[dict[str, Any]] = []

        async def body(turn: Turn) -> None:
            started = await call(bench.box, turn, "terminal", {"command": "sleep 3600.0643", "background": True})
            seen.append(await call(bench.box, turn, "terminal", {"command": f"kill {started['pid']}"}))
            assert running("sleep 3600.0643")
            seen.append(await call(bench.box, turn, "process", {"action": "kill", "session_id": started["pid"]}))
            assert not running("sleep 3600.0643")
            seen.append(await call(bench.box, turn, "process", {"action": "kill", "session_id": os.getpid()}))

        await bench.in_turn(body)
    assert "process(action='kill'" in seen[0]["hint"]
    assert seen[1]["status"] == "killed"
    assert seen[2]["status"] == "not_found"


def test_sudo_names_the_switch() -> None:
    """A setuid program fails under no_new_privs in words that help nobody: the result says which setting decides."""
    said = 'sudo: The "no new privileges" flag is set, which prevents sudo from running as root.'
    assert '[tools.confinement] profile = "off"' in confinement_hint(said, Profile.PROTECT)
    assert confinement_hint(said, Profile.OFF) == ""
    assert confinement_hint("all is well", Profile.WORKSPACE) == ""
    assert "$HOME" in confinement_hint("touch: /etc/x: Permission denied", Profile.WORKSPACE)
