"""Templates: what commands with the same confinement have in common is done once, and never outlives the files that it was done for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from hermes_trio.tools.warden import (
    ProcessSpec,
    Profile,
    Sandbox,
    SandboxPaths,
    SpawnFailed,
    Warden,
    open_warden,
    probe_protections,
)
from hermes_trio.tools.warden.daemon import process_table
from hermes_trio.tools.warden.daemon.wire import Confinement, describe, mark, read_description

from .bench_of_tools import until
from .warden_witness import is_alive, nothing_left, read_all


async def sandbox_for(home: Path, *secrets: Path) -> Sandbox:
    """A sandbox that makes templates; the test is skipped where there are none."""
    if not (await probe_protections()).mount:
        pytest.skip("this machine offers no mount namespace to this user, so there are no templates")
    sandbox = Sandbox(SandboxPaths(home=str(home), secrets=tuple(map(str, secrets))))
    await sandbox.ready()
    return sandbox


def confined(command: str, sandbox: Sandbox) -> ProcessSpec:
    """A command under `protect`."""
    return ProcessSpec(
        command=command, cwd="/", env={"PATH": os.environ["PATH"]}, confinement=sandbox.plan(Profile.PROTECT)
    )


async def run(warden: Warden, sandbox: Sandbox, command: str) -> str:
    """What a confined command writes."""
    async with await warden.spawn(confined(command, sandbox)) as process:
        return (await read_all(process)).decode()


def templates(warden: Warden) -> list[int]:
    """The live templates of a warden."""
    assert warden.warden_pid is not None
    named = [
        (child, Path(f"/proc/{child.pid}/comm")) for child in process_table.children(warden.warden_pid) if child.alive
    ]
    return [child.pid for child, name in named if name.exists() and name.read_text() == "hermes-template\n"]


def test_a_template_survives_the_wire(tmp_path: Path) -> None:
    """What the server describes is what the template is made of; a keeper gets the rest, which says that it is only that."""
    plan = Confinement(landlock=True, guards_kernel=True, guards_devices=True)
    plan.hidden, plan.pinned, plan.binds = [bytes(tmp_path)], [b"/", b"/no such folder"], [(b"/e", b"/tmp")]
    plan.processes, plan.open_files = 7, 99
    common, own = plan.divided()
    marks = [mark(path) for path in common.paths]
    read, read_marks = read_description(describe(common, marks))
    assert (read.paths, read_marks) == (plan.paths, marks)
    assert marks[-1] == b""
    assert (read.landlock, own.landlock, read.open_files, own.open_files) == (True, False, 99, 0)
    assert (read.binds, own.binds, own.processes) == ([], plan.binds, 7)
    assert own.prepared
    assert not read.prepared
    plan.writable = [b"/work"]
    assert [part.landlock for part in plan.divided()] == [False, True]


async def test_commands_of_one_profile_share_a_template(tmp_path: Path) -> None:
    """Commands that start at once have one template between them, which ends with the warden's scope."""
    sandbox = await sandbox_for(tmp_path)
    with nothing_left():
        async with open_warden() as warden:
            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(run, warden, sandbox, "true")
            await run(warden, sandbox, "true")
            assert len(templates(warden)) == 1


async def test_a_home_in_the_place_of_another_is_hidden(tmp_path: Path) -> None:
    """A template hides folders, not names: when another folder stands in the place of the home, also one with the number of the old, it is hidden as well."""
    home, secret = tmp_path / "home", tmp_path / "config.toml"
    home.mkdir()
    (home / "key").write_text("hidden one")
    secret.write_text("hidden two")
    sandbox = await sandbox_for(home, secret)
    look = f"ls {home}; cat {home}/key {secret}; echo END"
    async with open_warden() as warden:
        assert "hidden" not in await run(warden, sandbox, look)
        home.rename(tmp_path / "old")
        home.mkdir()
        (home / "key").write_text("hidden three")
        assert "hidden" not in await run(warden, sandbox, look)
        (home / "key").unlink()
        home.rmdir()
        home.mkdir()
        (home / "key").write_text("hidden four")
        assert "hidden" not in await run(warden, sandbox, look)
        os.link(secret, tmp_path / "linked")
        secret.unlink()
        (tmp_path / "linked").rename(secret)
        said = await run(warden, sandbox, look)
        assert "hidden" not in said
        assert said.endswith("END\n")


async def test_a_helper_that_comes_later_is_hidden(tmp_path: Path) -> None:
    """A socket in /tmp through which others act is hidden from every command that starts after it was made."""
    sandbox = await sandbox_for(tmp_path)
    helper = Path(f"/tmp/ssh-hermes-test-{os.getpid()}")
    async with open_warden() as warden:
        try:
            await run(warden, sandbox, "true")
            os.mkdir(helper)
            (helper / "agent").touch()
            assert await run(warden, sandbox, f"ls {helper}; echo END") == "END\n"
        finally:
            (helper / "agent").unlink(missing_ok=True)
            os.rmdir(helper)


async def test_a_killed_template_costs_nothing(tmp_path: Path) -> None:
    """The next command has another template; a command that runs does not notice."""
    sandbox = await sandbox_for(tmp_path)
    with nothing_left():
        async with open_warden() as warden, await warden.spawn(confined("sleep 3600", sandbox)) as process:
            for _ in range(3):
                (template,) = templates(warden)
                os.kill(template, signal.SIGKILL)
                assert await run(warden, sandbox, "echo still") == "still\n"
            assert process.status is None


async def test_a_template_ends_with_its_warden(tmp_path: Path) -> None:
    """A warden that is killed takes its templates along; the next warden makes its own."""
    sandbox = await sandbox_for(tmp_path)
    with nothing_left():
        async with open_warden() as warden:
            await run(warden, sandbox, "true")
            (template,) = templates(warden)
            killed = warden.warden_pid
            assert killed is not None
            os.kill(killed, signal.SIGKILL)
            # The kernel kills the template when the warden has ended: until then it starts commands, which end with the warden.
            await until(lambda: not is_alive(killed))
            assert await run(warden, sandbox, "echo again") == "again\n"
            await until(lambda: not Path(f"/proc/{template}").exists())


async def test_a_plan_for_a_template_s_keeper_is_refused_by_others() -> None:
    """What leaves most of the confinement to a template never runs without one."""
    plan = Confinement()
    plan.prepared = True
    async with open_warden() as warden:
        with pytest.raises(SpawnFailed, match="confinement"):
            await warden.spawn(ProcessSpec(command="true", cwd="/", env={}, confinement=plan))


async def test_what_the_kernel_refuses_to_a_template_is_said(tmp_path: Path) -> None:
    """A template that cannot be made is a command that is not started, with the reason, each time."""
    sandbox = await sandbox_for(tmp_path)
    plan = sandbox.plan(Profile.PROTECT)
    assert plan is not None
    plan.cgroup = [bytes(tmp_path / "no such group")]
    async with open_warden() as warden:
        for _ in range(2):
            with pytest.raises(SpawnFailed, match=r"refused a part of the confinement.*No such file"):
                await warden.spawn(ProcessSpec(command="true", cwd="/", env={}, confinement=plan))


def test_a_new_mount_is_noticed() -> None:
    """Each change of the mount table makes templates that were made before it useless."""
    program = (
        "import subprocess; from hermes_trio.tools.warden.custody import MountWatch; watch = MountWatch(); first = watch.look();"
        "assert watch.look() == first; subprocess.run(['mount', '-t', 'tmpfs', 'none', '/mnt'], check=True); assert watch.look() != first"
    )
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("only root can mount something, in a mount namespace")
    subprocess.run(["unshare", "-m", sys.executable, "-c", program], check=True)
