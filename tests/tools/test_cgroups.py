"""Control groups of jobs: found, prepared, limited, entered, killed and removed; against a fake hierarchy, and for real where there is one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from hermes_trio.tools.confinement import group_line, open_confinement
from hermes_trio.tools.settings import ToolSettings
from hermes_trio.tools.warden import (
    CommandLimits,
    JobGroups,
    ProcessSpec,
    Profile,
    Protections,
    Sandbox,
    Warden,
    open_warden,
    probe_protections,
)
from hermes_trio.tools.warden.daemon import cgroup
from hermes_trio.tools.warden.process import KeptProcess

from .bench_of_tools import running, until
from .warden_witness import read_all

BARE = Protections()
"""No namespaces and no Landlock: the control group alone."""


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """A folder that looks like a delegated group to a program that only reads and writes files."""
    group = tmp_path / "system.slice" / "hermes-trio.service"
    group.mkdir(parents=True)
    (group / "cgroup.procs").write_text("")
    return group


@pytest.fixture
def real() -> Iterator[Path]:
    """A group of the kernel's own, removed afterwards with everything in it."""
    mounts = [
        line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines() if " - cgroup2 " in line
    ]
    if not mounts or not os.access(mounts[0], os.W_OK):
        pytest.skip("this user cannot make a control group (version 2) here")
    group = Path(mounts[0], f"hermes-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    if not (group / "cgroup.kill").exists():
        group.rmdir()
        pytest.skip("this kernel has no cgroup.kill")
    try:
        yield group
    finally:
        for name in cgroup.jobs(str(group)):
            cgroup.end(str(group), name)
        group.rmdir()


def sandbox_in(group: Path, *controllers: str, **limits: int) -> Sandbox:
    return Sandbox(limits=CommandLimits(**limits), protections=BARE, groups=JobGroups(str(group), tuple(controllers)))  # pyright: ignore[reportArgumentType]


async def start(warden: Warden, sandbox: Sandbox, command: str) -> KeptProcess:
    return await warden.spawn(
        ProcessSpec(argv=("sh", "-c", command), cwd="/", env={}, confinement=sandbox.plan(Profile.PROTECT))
    )


def test_a_delegated_group_is_found_by_its_mark(tmp_path: Path, fake: Path) -> None:
    """Only what the service manager has marked as delegated is taken, also when the server has moved into its part of it before."""
    mounts, own = tmp_path / "mountinfo", tmp_path / "cgroup"
    mounts.write_text(
        f"24 1 0:22 / /proc rw - proc proc rw\n30 24 0:26 / {tmp_path} rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
    )
    own.write_text("4:memory:/old\n0::/system.slice/hermes-trio.service\n")
    assert cgroup.delegated(str(mounts), str(own)) == ""
    try:
        os.setxattr(fake, "user.delegate", b"1")
    except OSError:
        pytest.skip("this file system keeps no marks")
    assert cgroup.delegated(str(mounts), str(own)) == str(fake)
    (fake / "server").mkdir()
    own.write_text("0::/system.slice/hermes-trio.service/server\n")
    assert cgroup.delegated(str(mounts), str(own)) == str(fake)
    own.write_text("0::/system.slice\n")
    assert cgroup.delegated(str(mounts), str(own)) == ""
    assert cgroup.delegated(str(mounts), str(tmp_path / "none")) == ""


def test_the_server_moves_aside_and_switches_the_controllers_on(fake: Path) -> None:
    """A group with processes of its own could not limit its children."""
    (fake / "cgroup.procs").write_text("4711\n")
    assert cgroup.prepare(str(fake)) == ["pids", "memory"]
    assert (fake / "server" / "cgroup.procs").read_text() == "4711"
    assert (fake / "cgroup.subtree_control").read_text() == "+memory"


async def test_a_job_has_a_group_with_its_limits_and_enters_it(fake: Path) -> None:
    """Before anything of the command runs: the limits of processes and memory, all or nothing when memory runs out."""
    sandbox = sandbox_in(fake, "pids", "memory", processes=64, memory_mebibytes=32)
    async with open_warden(cgroup=str(fake)) as warden:
        process = await start(warden, sandbox, "sleep 60")
        group = fake / f"job-{process.keeper_pid}"
        found = {file.name: file.read_text() for file in await trio.to_thread.run_sync(lambda: list(group.iterdir()))}
        assert found == {
            "pids.max": "64",
            "memory.max": str(32 << 20),
            "memory.oom.group": "1",
            "cgroup.procs": "0",
        }
        await process.kill(0)


async def test_a_command_does_not_start_without_its_group(tmp_path: Path) -> None:
    """Nothing runs with less than what was asked for."""
    sandbox = sandbox_in(tmp_path / "gone", "memory", memory_mebibytes=32)
    async with open_warden() as warden:
        with pytest.raises(Exception, match="confine"):
            await start(warden, sandbox, "echo started")


def test_a_limit_that_cannot_be_kept_is_said(tmp_path: Path) -> None:
    """A start warns, and health is degraded, where memory is to be limited and no group can do it."""
    table = {"confinement": {"limits": {"memory_mebibytes": 64, "cgroup": "off"}}}
    full = Protections(mount=True, pid=True, network=True, ipc=True, landlock=7)
    rules = open_confinement(
        ToolSettings.read(table), {"HOME": str(tmp_path)}, home=tmp_path / "home", protections=full
    )
    assert "the memory of commands is not limited" in rules.warnings()[0]
    assert rules.describe()["status"] == "degraded"
    table["confinement"]["limits"] = {"cgroup": str(tmp_path / "none")}
    rules = open_confinement(
        ToolSettings.read(table), {"HOME": str(tmp_path)}, home=tmp_path / "home", protections=full
    )
    assert "cannot be used" in rules.warnings()[0]
    table["confinement"]["limits"] = {}
    rules = open_confinement(
        ToolSettings.read(table), {"HOME": str(tmp_path)}, home=tmp_path / "home", protections=full
    )
    assert rules.warnings() == []


STUBBORN = "for i in 1 2 3; do (trap '' TERM; env -i setsid setsid sleep {name} &); done; sleep {name}"


@pytest.mark.parametrize("how", ["order", "keeper", "warden"])
async def test_the_kernel_kills_a_whole_group(real: Path, how: str) -> None:
    """For real: every process of a job is in its group, and dies with it, when it is told to end and when keeper or warden die; then the group is gone."""
    name = f"3600.{os.getpid()}4"
    async with open_warden(cgroup=str(real)) as warden:
        process = await start(warden, sandbox_in(real), STUBBORN.format(name=name))
        procs = real / f"job-{process.keeper_pid}" / "cgroup.procs"

        def members() -> set[int]:
            return {int(pid) for pid in procs.read_text().split()}

        await until(lambda: len(running(f"sleep {name}")) >= 4 and set(running(f"sleep {name}")) <= members())
        assert not members() & {os.getpid(), process.keeper_pid, warden.warden_pid}
        if how == "order":
            await process.kill(0)
        else:
            victim = process.keeper_pid if how == "keeper" else warden.warden_pid
            assert victim
            os.kill(victim, signal.SIGKILL)
        await until(lambda: not running(f"sleep {name}"))
        if how == "warden":
            again = await start(warden, sandbox_in(real), "echo again")
            assert (await read_all(again)).strip() == b"again"
        await until(lambda: not cgroup.jobs(str(real)))


async def test_a_confined_command_is_in_its_group_and_cannot_reach_it(real: Path) -> None:
    """It could raise its own limits otherwise, or kill the server by a word in a file."""
    offered = await probe_protections()
    if not offered.mount:
        pytest.skip("this machine offers no mount namespace to this user")
    sandbox = Sandbox(protections=offered, groups=JobGroups(str(real)))
    async with open_warden(cgroup=str(real)) as warden:
        process = await start(
            warden, sandbox, f"cat /proc/self/cgroup; ls -A {real}; echo 1 > {real}/cgroup.kill; echo END"
        )
        said = (await read_all(process)).decode()
        await until(lambda: not cgroup.jobs(str(real)))
    assert f"/{real.name}/job-{process.keeper_pid}" in said
    assert "END" in said
    assert "cgroup.procs" not in said


async def test_killing_a_group_outruns_a_process_that_forks_all_the_time(real: Path) -> None:
    """What a list of processes may miss, the kernel does not."""
    name = f"3600.{os.getpid()}5"
    entrance, exit_ = cgroup.make(str(real), "job-1")
    pid = os.fork()
    if pid == 0:
        cgroup.enter(entrance)
        os.execvp("sh", ["sh", "-c", f"while :; do setsid sleep {name} & sleep 0.01; done"])
    try:
        await until(lambda: len(running(f"sleep {name}")) >= 5)
    finally:
        cgroup.kill(exit_)
        os.waitpid(pid, 0)  # noqa: ASYNC222 - it was killed
        os.close(entrance)
        os.close(exit_)
    await until(lambda: not running(f"sleep {name}"))
    await until(lambda: cgroup.end(str(real), "job-1"))


def test_what_there_is_to_be_had_is_said_without_taking_it(fake: Path) -> None:
    """`doctor` says what a server would find, and changes nothing: no process moves, and no controller is switched on."""
    (fake / "cgroup.controllers").write_text("cpu memory pids\n")
    before = {path.name: path.read_text() for path in fake.iterdir()}
    found = JobGroups.look(CommandLimits(cgroup=str(fake)))
    assert (found.root, found.controllers, found.problem) == (str(fake), ("pids", "memory"), "")
    assert group_line(found) == f"commands: a control group of their own below {fake}, which can limit pids and memory"
    assert {path.name: path.read_text() for path in fake.iterdir()} == before
    gone = JobGroups.look(CommandLimits(cgroup=str(fake / "gone")))
    assert group_line(gone) == f"commands: no control group of their own: {fake / 'gone'} cannot be written"
    assert "switched off" in group_line(JobGroups.look(CommandLimits(cgroup="off")))
    if not cgroup.delegated():
        why = JobGroups.look(CommandLimits(), os.getpid()).problem
        assert "Delegate=pids memory" in why if cgroup.mounted() else "not mounted" in why
