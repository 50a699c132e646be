"""What commands may see and change: profiles, the protections that this machine offers, and the plan that a keeper carries out.

`Sandbox.plan` is the only place where a profile becomes rules. If the machine lacks a protection, `protect` uses the others and
`Protections.missing` names it; `workspace` and `offline`, which isolate tenants, are refused instead.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final, final

import msgspec
import trio
from msgspec import Meta

from hermes_trio.tools.warden.daemon import cgroup
from hermes_trio.tools.warden.daemon.wire import Confinement, Spaces
from hermes_trio.tools.warden.errors import SpawnFailed

PROBE: Final = Path(__file__).parent / "daemon" / "probe.py"
PROBE_SECONDS: Final = 20.0

LANDLOCK_SCOPES: Final = 6
LANDLOCK_TCP: Final = 4

SYSTEM_FOLDERS: Final = (
    "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/usr", "/etc", "/opt", "/nix", "/proc", "/sys",
    "/run/systemd/resolve", "/run/resolvconf", "/var/lib/dpkg", "/var/lib/ca-certificates", "/var/cache/fontconfig",
)  # fmt: skip
"""The paths that a command in a workspace may read besides its own folders."""

DEVICES: Final = (
    "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/ptmx", "/dev/pts", "/dev/fd",
)  # fmt: skip

HELPERS: Final = (
    "/run/dbus", "/run/systemd/private", "/run/systemd/machine", "/run/systemd/journal/socket", "/run/docker.sock", "/run/docker",
    "/run/containerd", "/run/podman", "/run/crio", "/run/buildkit", "/run/snapd.socket", "/run/snapd-snap.socket", "/run/libvirt",
    "/run/lxd", "/run/lxd.socket", "/run/incus", "/run/screen", "/run/pcscd", "/run/udisks2",
    "/var/spool/cron", "/var/spool/at", "/var/spool/anacron", "/var/spool/cups",
)  # fmt: skip
"""Sockets and folders through which a process outside would act for a command; they are hidden."""

TEMPORARY_HELPERS: Final = (
    "tmux-", "ssh-", "screens", "emacs", ".X11-unix", ".ICE-unix", "vscode-ipc-", "dbus-", "agent.",
)  # fmt: skip
"""The prefixes of those in /tmp."""

HELPER_VARIABLES: Final = ("SSH_AUTH_SOCK", "TMUX_TMPDIR", "DBUS_SESSION_BUS_ADDRESS", "DOCKER_HOST", "GPG_AGENT_INFO")

SETTLED_NANOSECONDS: Final = 1_000_000_000
"""The age of a change from which the next one has a different time."""

ROOT_READ_ONLY: Final = (
    "/etc",
    "/boot",
    "/lib",
    "/lib32",
    "/lib64",
    "/usr/lib",
    "/usr/lib32",
    "/usr/lib64",
    "/usr/libexec",
)
"""Paths that other processes of root run or load: read-only for the commands of a server that runs as root."""

ROOT_SECRETS: Final = (
    "/etc/shadow", "/etc/shadow-", "/etc/gshadow", "/etc/gshadow-", "/etc/ssh", "/etc/ssl/private", "/etc/sudoers", "/etc/sudoers.d",
)  # fmt: skip
"""Paths that uid 0 reads without any capability, and that tenants do not need."""


class Profile(StrEnum):
    """How much a command may do, from most to least."""

    OFF = "off"
    """All rights of the server."""
    PROTECT = "protect"
    """Everything except access to the gateway: its home, its program, its processes, and the helpers that could reach it."""
    WORKSPACE = "workspace"
    """Write only below the session's own folders; read those and system folders."""
    OFFLINE = "offline"
    """As `workspace`, without a network."""

    @property
    def strictness(self) -> int:
        """Return 0 for `off`, and more for stricter profiles."""
        return list(Profile).index(self)

    @property
    def confines_files(self) -> bool:
        """Return whether only the workspace can be written."""
        return self in (Profile.WORKSPACE, Profile.OFFLINE)

    def narrowed(self, other: Profile) -> Profile:
        """Return the stricter of two profiles."""
        return max(self, other, key=lambda one: one.strictness)


class Protections(msgspec.Struct, frozen=True, kw_only=True):
    """The protections that the kernel offers to this server's user."""

    user: bool = False
    """Whether namespaces need a user namespace: the server is not root, or lacks root's rights."""
    mount: bool = False
    pid: bool = False
    network: bool = False
    ipc: bool = False
    landlock: int = 0
    """The version of its interface; 0 without."""
    root: bool = False

    @property
    def missing(self) -> list[str]:
        """Return sentences that name what `protect` cannot do here; empty if it does everything."""
        found: list[str] = []
        if not self.mount:
            found.append(
                "no mount namespace: the gateway's home is kept from commands by Landlock alone, which also refuses to create"
                " files beside it"
                if self.landlock
                else "no mount namespace and no Landlock: commands can read and change the gateway's home"
            )
        if not self.pid:
            found.append(
                "no PID namespace: processes of a command can outlive a server, warden and keeper that are killed at once"
            )
        if self.mount and not self.ipc:
            found.append(
                "no IPC namespace: System V memory that a command makes outlives it, and other tenants' commands can read it"
            )
        if not self.landlock:
            found.append("no Landlock: commands can reach abstract sockets of processes outside")
        elif self.landlock < LANDLOCK_SCOPES:
            lost = "abstract sockets" if self.pid else "abstract sockets and signals"
            found.append(f"Landlock version {self.landlock} (6 is needed): {lost} are not confined")
        return found

    @property
    def advice(self) -> str:
        """Return what would enable a missing mount or PID namespace; empty if none is missing."""
        if self.mount and self.pid:
            return ""
        return (
            "allow user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone,"
            " kernel.apparmor_restrict_unprivileged_userns; in a container, a seccomp profile that permits clone3, mount and"
            " unshare, and an unmasked /proc)"
        )

    def offers(self, profile: Profile) -> str:
        """Return what this machine offers for a profile: the profile's name, `degraded`, `no-tcp`, or `refused`."""
        if profile is Profile.PROTECT:
            return "degraded" if self.missing else str(profile)
        if profile.confines_files and not self.landlock:
            return "refused"
        if profile is Profile.OFFLINE and not self.network:
            return "no-tcp" if self.landlock >= LANDLOCK_TCP else "refused"
        return str(profile)

    @property
    def spaces(self) -> Spaces:
        """Return the namespaces of commands, without that of the network."""
        if not self.mount:
            return Spaces.NONE
        made = Spaces.MOUNT
        for space, offered in ((Spaces.USER, self.user), (Spaces.PID, self.pid), (Spaces.IPC, self.ipc)):
            made |= space if offered else Spaces.NONE
        return made


async def probe_protections() -> Protections:
    """Probe the kernel with a short-lived process. If it fails or takes too long, no protection is offered. Cancelling ends it."""
    output = b""
    with trio.move_on_after(PROBE_SECONDS):
        try:
            done = await trio.run_process([sys.executable, "-I", "-S", str(PROBE)], capture_stdout=True, check=False)
            output = done.stdout
        except OSError:
            pass
    numbers = output.split()
    if len(numbers) != 6:
        return Protections(root=os.geteuid() == 0)
    user, mount, pid, network, ipc, landlock = map(int, numbers)
    return Protections(
        user=bool(user),
        mount=bool(mount),
        pid=bool(pid),
        network=bool(network),
        ipc=bool(ipc),
        landlock=landlock,
        root=os.geteuid() == 0,
    )


Amount = Annotated[int, Meta(ge=0)]


class CommandLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[tools.confinement.limits]`: what one command and all its processes may take; 0 for no limit."""

    processes: Amount = 1024
    file_mebibytes: Amount = 65_536
    """The maximum size of one file that a command writes."""
    open_files: Amount = 65_536
    address_mebibytes: Amount = 0
    """Address space of each process. Node, Go and Chromium reserve much more than they use."""
    memory_mebibytes: Amount = 0
    """Memory of all processes together, in a delegated control group."""
    cgroup: str = "auto"
    """The delegated control group: `auto` for what the service manager has marked as such, `off`, or its path."""


class JobGroups(msgspec.Struct, frozen=True):
    """The delegated group in which each job gets its own control group, and its controllers. `problem` says why a requested one is missing."""

    root: str = ""
    controllers: tuple[str, ...] = ()
    problem: str = ""

    @classmethod
    def look(cls, limits: CommandLimits, server: int | None = None) -> JobGroups:
        """Return what `open` would find for the process `server`, or for this one. Changes nothing."""
        own = cgroup.OWN if server is None else f"/proc/{server}/cgroup"
        root = cgroup.delegated(own=own) if limits.cgroup == "auto" else "" if limits.cgroup == "off" else limits.cgroup
        if limits.cgroup == "off":
            return cls(problem="switched off (tools.confinement.limits.cgroup)")
        if root:
            usable = cgroup.usable(root)
            return cls(root, tuple(cgroup.offered(root))) if usable else cls(problem=f"{root} cannot be written")
        if not cgroup.mounted():
            return cls(problem="the second version of control groups is not mounted")
        whom = "this process" if server is None else f"the server (process {server})"
        return cls(
            problem=f"none is delegated to {whom}; with Delegate=pids memory in its unit, as in the shipped one, a service has one"
        )

    @classmethod
    def open(cls, limits: CommandLimits) -> JobGroups:
        """Find the delegated group and prepare it. Moves its processes, including this one, to a group beside the jobs."""
        root = cgroup.delegated() if limits.cgroup == "auto" else "" if limits.cgroup == "off" else limits.cgroup
        found, why = cls(), "there is no delegated control group (Delegate=pids memory in the service's unit)"
        if root:
            try:
                found = cls(root, tuple(cgroup.prepare(root)))
                why = f"the control group {root} has no controller for memory"
            except OSError as error:
                why = f"the control group {root} cannot be used: {error.strerror}"
        unlimited = limits.memory_mebibytes and "memory" not in found.controllers
        unusable = limits.cgroup not in ("auto", "off") and not found.root
        if not unlimited and not unusable:
            return found
        lost = "the memory of commands is not limited: " if unlimited else ""
        return msgspec.structs.replace(found, problem=f"{lost}{why}")


NO_GROUPS: Final = JobGroups()


class SandboxPaths(msgspec.Struct, frozen=True, kw_only=True):
    """The paths of the gateway and its configuration that a sandbox needs. All are absolute."""

    home: str = ""
    """The gateway's own folder; empty for a program without one."""
    secrets: tuple[str, ...] = ()
    """Other files and folders that commands must not see, such as a configuration outside the home."""
    read_only: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    """Paths that commands in a workspace may read besides the system's folders."""
    shown: tuple[str, ...] = ()
    """Folders inside the home that stay readable."""
    sockets: tuple[str, ...] = ()
    """Sockets on which the gateway is known by its user id, such as that of its database. They may be made again at any time."""


class Workspace(msgspec.Struct, frozen=True):
    """The folders of a session: those that it may write, and that of its temporary files."""

    root: str
    temporary: str = ""

    def lies_below(self, folder: str) -> bool:
        """Return whether hiding this folder would hide files of the workspace."""
        return _below(self.root, folder)


@final
class Sandbox:
    """Makes the plan for each command. `ready` must have returned once before `plan` is called."""

    def __init__(
        self,
        paths: SandboxPaths | None = None,
        limits: CommandLimits | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        protections: Protections | None = None,
        groups: JobGroups = NO_GROUPS,
    ) -> None:
        self.groups = groups
        self.paths: SandboxPaths = SandboxPaths() if paths is None else paths
        self.limits: CommandLimits = CommandLimits() if limits is None else limits
        self.protections: Protections | None = protections
        self._environment: Mapping[str, str] = {} if environment is None else environment
        self._asking: trio.Lock = trio.Lock()
        self._helpers_found: list[str] = []
        self._helpers_state: list[int] = []

    async def ready(self) -> Protections:
        """Return the protections of this machine. They are probed once."""
        if self.protections is None:
            async with self._asking:
                if self.protections is None:
                    self.protections = await probe_protections()
        return self.protections

    def inside_home(self, path: str) -> bool:
        """Return whether a folder is in the gateway's home, directly or through links."""
        home = self.paths.home
        return bool(home) and any(_below(real, os.path.realpath(home)) for real in (path, os.path.realpath(path)))

    def confines(self, profile: Profile) -> bool:
        """Return whether the kernel keeps commands of this profile away from the gateway."""
        return (
            profile is not Profile.OFF
            and self.protections is not None
            and bool(self.protections.mount or self.protections.landlock)
        )

    def plan(self, profile: Profile, workspace: Workspace | None = None) -> Confinement | None:
        """Return the rules for one command; None for `off`. Raises `SpawnFailed` for a profile that this machine cannot enforce."""
        if profile is Profile.OFF:
            return None
        protections = self.protections
        assert protections is not None
        offered = protections.offers(profile)
        if offered == "refused":
            raise SpawnFailed(
                f"commands of the profile {str(profile)!r} cannot be confined on this machine, so none is started;"
                " `hermes-trio doctor` says what is missing"
            )
        made = Confinement(
            spaces=protections.spaces,
            landlock=protections.landlock > 0,
            no_tcp=offered == "no-tcp",
            guards_kernel=protections.root and protections.mount,
            guards_devices=protections.root and protections.mount and self._has_block_devices,
        )
        if profile is Profile.OFFLINE and offered != "no-tcp":
            made.spaces |= Spaces.NETWORK
        limits = self.limits
        made.processes, made.open_files = limits.processes, limits.open_files
        made.file_bytes, made.address_bytes = limits.file_mebibytes << 20, limits.address_mebibytes << 20
        if self.groups.root:
            made.cgroup = _encoded([self.groups.root])
            made.tasks = limits.processes if "pids" in self.groups.controllers else 0
            made.memory_bytes = limits.memory_mebibytes << 20 if "memory" in self.groups.controllers else 0
        if protections.mount:
            hidden = [*self._gateway, *self._helpers(), self.groups.root]
            if profile.confines_files and protections.root:
                hidden += ROOT_SECRETS
            made.hidden = _encoded(hidden)
            made.shown = _encoded(self.paths.shown)
            made.read_only = _encoded(self._read_only)
            made.pinned = _encoded(self._pinned)
        if profile.confines_files:
            self._confine_files(made, protections, workspace)
        elif not protections.mount:
            made.writable = _encoded(_around([*self._gateway, *([self.groups.root] if self.groups.root else [])]))
        return made

    def _confine_files(self, made: Confinement, protections: Protections, workspace: Workspace | None) -> None:
        own = [] if workspace is None else [workspace.root, workspace.temporary]
        made.writable = _encoded(own)
        made.readable = _encoded([*SYSTEM_FOLDERS, *self.paths.readable, *self.paths.shown])
        made.devices = _encoded(DEVICES)
        if workspace is not None and workspace.temporary and protections.mount:
            for target in ("/tmp", "/var/tmp", "/dev/shm"):
                if os.path.isdir(target) and not workspace.lies_below(target):
                    made.binds.append((os.fsencode(workspace.temporary), target.encode()))
                    made.writable.append(target.encode())

    @cached_property
    def _gateway(self) -> list[str]:
        """Return the real paths of the gateway's own files."""
        return [
            os.path.realpath(path) for path in (self.paths.home, *self.paths.secrets) if path and os.path.lexists(path)
        ]

    def _helpers(self) -> list[str]:
        """Return the helper sockets that exist now. Searches again when a folder that could have one has changed."""
        now, state = time.time_ns(), [_modified(folder) for folder in self._helper_folders]
        if state == self._helpers_state:
            return self._helpers_found
        candidates = [
            *self._helper_paths,
            *(f"/tmp/{name}" for name in _listed("/tmp") if name.startswith(TEMPORARY_HELPERS)),
        ]
        found = [path for path in dict.fromkeys(candidates) if os.path.lexists(path)]
        # Changes within one tick of the clock have the same time.
        if max(state) < now - SETTLED_NANOSECONDS:
            self._helpers_found, self._helpers_state = found, state
        return found

    @cached_property
    def _helper_paths(self) -> list[str]:
        found = [f"/run/user/{os.getuid()}", self._environment.get("XDG_RUNTIME_DIR", "")]
        for name in HELPER_VARIABLES:
            value = self._environment.get(name, "")
            found += [
                part.partition("=")[2] or part for part in value.removeprefix("unix://").split(",") if "/" in part
            ]
        return [path for path in (*found, *HELPERS, *self.paths.sockets) if path.startswith("/") and path != "/"]

    @cached_property
    def _helper_folders(self) -> list[str]:
        return ["/tmp", *dict.fromkeys(os.path.dirname(path) for path in self._helper_paths)]

    @cached_property
    def _has_block_devices(self) -> bool:
        return any(stat.S_ISBLK(os.lstat(f"/dev/{name}").st_mode) for name in _listed("/dev"))

    @cached_property
    def _read_only(self) -> list[str]:
        """Return the writable paths of the program, and for root those of the system, whose changes other processes would run."""
        import sysconfig  # loads the configuration of the interpreter's build, which a server without tools does not need

        paths = [
            str(Path(__file__).parents[2]),
            sys.prefix,
            sys.base_prefix if sys.base_prefix not in ("/usr", "/usr/local") else "",
            sysconfig.get_path("stdlib"),
            sysconfig.get_path("platstdlib"),
            *(path for path in sys.path if path.endswith(("site-packages", "dist-packages"))),
            os.path.realpath(sys.executable),
            *self.paths.read_only,
            *(ROOT_READ_ONLY if os.geteuid() == 0 else ()),
        ]
        real = sorted({os.path.realpath(path) for path in paths if path and os.path.exists(path)})
        writable = [path for path in real if path != "/" and os.access(path, os.W_OK)]
        gateway = self._gateway
        outer = [
            path
            for path in writable
            if not any(_below(path, other) for other in (*writable, *gateway) if other != path)
        ]
        return [path for path in outer if not any(_below(own, path) for own in gateway)] + [
            path for path in outer if any(_below(own, path) for own in gateway)
        ]

    @cached_property
    def _pinned(self) -> list[str]:
        """Return the folders above protected paths that the user could rename, outermost first."""
        found: set[str] = set()
        for path in (*self._gateway, *self._read_only):
            for parent in Path(path).parents:
                if str(parent) != "/" and os.access(parent.parent, os.W_OK):
                    found.add(str(parent))
        covered = set(self._read_only)
        return sorted(path for path in found if not any(_below(path, other) for other in covered))


def _below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _encoded(paths: Iterable[str]) -> list[bytes]:
    return [os.fsencode(path) for path in paths if path]


def _around(secrets: Iterable[str]) -> list[str]:
    """Return as few paths as possible that cover everything except these files and folders: Landlock can only allow."""
    allowed = ["/"]
    for secret in secrets:
        kept: list[str] = []
        for path in allowed:
            while _below(secret, path) and path != secret:
                step = os.path.join(path, os.path.relpath(secret, path).partition("/")[0])
                kept += [other for other in _entries(path) if other != step]
                path = step
            if not _below(path, secret):
                kept.append(path)
        allowed = kept
    return allowed


def _modified(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _entries(folder: str) -> list[str]:
    """Return the entries of a folder without links: a rule for a link would apply to its target, which may be a protected file."""
    try:
        return [entry.path for entry in os.scandir(folder) if not entry.is_symlink()]
    except OSError:
        return []
