"""Makes a control group for each job, below one that was delegated to the service: the kernel enforces its limits and kills it atomically.

The server prepares the delegated group (`prepare`), a keeper makes a group below it for its job (`make`), the command enters it before its exec
(`enter`), and the warden ends and removes it with the keeper (`end`). Only the second version of control groups is used.
"""

import os

MOUNTS = "/proc/self/mountinfo"
OWN = "/proc/self/cgroup"

SERVER = "server"
"""The group of the server itself: a group that sets limits for its children cannot have processes."""

PREFIX = "job-"
CONTROLLERS = ("pids", "memory")
DELEGATED = ("user.delegate", "trusted.delegate")
"""The attribute with which systemd marks a delegated group."""


def delegated(mounts: str = MOUNTS, own: str = OWN) -> str:
    """Return the group that the service manager has delegated to this process; empty if there is none."""
    try:
        with open(own, encoding="utf-8", errors="surrogateescape") as file:
            path = next((line[3:].rstrip("\n") for line in file if line.startswith("0::")), "")
    except OSError:
        return ""
    root = mounted(mounts)
    if not path or not root:
        return ""
    here = root.rstrip("/") + path.rstrip("/")
    for group in (here, os.path.dirname(here) if os.path.basename(here) == SERVER else ""):
        if group and _is_marked(group) and usable(group):
            return group
    return ""


def mounted(mounts: str = MOUNTS) -> str:
    """Return the mount point of control groups; empty if there are none of the second version."""
    try:
        with open(mounts, encoding="utf-8", errors="surrogateescape") as file:
            return next((fields[4] for fields in map(str.split, file) if " - cgroup2 " in " ".join(fields)), "")
    except OSError:
        return ""


def offered(group: str) -> list[str]:
    """Return the controllers that jobs below a group could have. Changes nothing."""
    try:
        with open(f"{group}/cgroup.controllers", encoding="utf-8") as file:
            known = file.read().split()
    except OSError:
        return []
    return [controller for controller in CONTROLLERS if controller in known]


def _is_marked(group: str) -> bool:
    for name in DELEGATED:
        try:
            if os.getxattr(group, name) == b"1":
                return True
        except OSError:
            continue
    return False


def usable(group: str) -> bool:
    """Return whether this process may make groups below it."""
    return os.path.isdir(group) and os.access(group, os.W_OK) and os.access(f"{group}/cgroup.procs", os.W_OK)


def prepare(group: str) -> list[str]:
    """Prepare a delegated group for jobs, and return the controllers that they have. Raises `OSError` if it cannot be used.

    Moves its processes to a separate group beside those of the jobs.
    """
    with open(f"{group}/cgroup.procs", "rb", buffering=0) as file:
        members = file.read().split()
    if members:
        os.makedirs(f"{group}/{SERVER}", exist_ok=True)
        for pid in members:
            try:
                _write(f"{group}/{SERVER}/cgroup.procs", pid)
            except ProcessLookupError:
                continue
    enabled: list[str] = []
    for controller in CONTROLLERS:
        try:
            _write(f"{group}/cgroup.subtree_control", b"+" + controller.encode())
        except OSError:
            continue
        enabled.append(controller)
    return enabled


def jobs(group: str) -> list[str]:
    """Return the names of the existing groups of jobs."""
    try:
        return [name for name in os.listdir(group) if name.startswith(PREFIX)]
    except OSError:
        return []


def make(group: str, name: str, *, processes: int = 0, memory: int = 0) -> tuple[int, int]:
    """Make the group of a job with its limits. Return descriptors for `enter` and `kill` (-1 on kernels without it). Raises `OSError`."""
    folder = f"{group}/{name}"
    os.mkdir(folder, 0o700)
    try:
        if processes:
            _write(f"{folder}/pids.max", b"%d" % processes)
        if memory:
            _write(f"{folder}/memory.max", b"%d" % memory)
            # The OOM killer ends the whole job: otherwise the rest would continue without the killed process.
            _write(f"{folder}/memory.oom.group", b"1")
        entrance = os.open(f"{folder}/cgroup.procs", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        end(group, name)
        raise
    try:
        return entrance, os.open(f"{folder}/cgroup.kill", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return entrance, -1


def enter(descriptor: int) -> None:
    """Move the calling process into the group behind a descriptor of `make`."""
    os.write(descriptor, b"0")


def kill(descriptor: int) -> None:
    """Kill every process in the group behind a descriptor of `make`, also those that are being forked."""
    if descriptor >= 0:
        try:
            os.pwrite(descriptor, b"1", 0)
        except OSError:
            return


def end(group: str, name: str) -> bool:
    """Kill the remaining processes of a job's group and remove it. Return False if it is not empty yet."""
    folder = f"{group}/{name}"
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        pass
    else:
        return True
    try:
        _write(f"{folder}/cgroup.kill", b"1")
        os.rmdir(folder)
    except OSError:
        return False
    return True


def _write(path: str, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | (0 if os.path.exists(path) else os.O_CREAT), 0o600)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)
