"""Confinement of one command: namespaces for its keeper, then Landlock, no capabilities and limits for the command itself.

The keeper is cloned into its namespaces (`fork`), completes them (`settle`) and arranges the file systems (`arrange`); with a PID namespace it is
process 1 there, so that the kernel ends the whole job with it. The command, after its fork and before its exec, gives up what the keeper needed
(`restrict`). A step that the kernel refuses raises `OSError`, and the command is not started: nothing runs with less than what was asked for.
"""

import ctypes
import os
import resource
import signal
import stat
import struct

import prctl
from wire import Confinement, Spaces

_CLONE_FLAGS = {
    Spaces.MOUNT: 0x0002_0000,
    Spaces.USER: 0x1000_0000,
    Spaces.PID: 0x2000_0000,
    Spaces.NETWORK: 0x4000_0000,
    Spaces.IPC: 0x0800_0000,
}

# The numbers of system calls from 424 on are the same on every architecture.
_OPEN_TREE, _MOVE_MOUNT, _CLONE3, _MOUNT_SETATTR = 428, 429, 435, 442
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446

_AT_FDCWD = -100
_AT_EMPTY_PATH, _AT_RECURSIVE = 0x1000, 0x8000
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 1, 2, 4, 8, 16384, 1 << 18
_ATTR_RDONLY = 1

_LANDLOCK_VERSION = 1
_LANDLOCK_PATH = 1
_FS_EXECUTE, _FS_WRITE, _FS_READ, _FS_READ_DIR = 1, 2, 4, 8
_FS_TRUNCATE, _FS_IOCTL = 1 << 14, 1 << 15
_FS_FILE = _FS_EXECUTE | _FS_WRITE | _FS_READ | _FS_TRUNCATE | _FS_IOCTL
_FS_READING = _FS_EXECUTE | _FS_READ | _FS_READ_DIR
_NET_BIND, _NET_CONNECT = 1, 2
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2

DEVICES = (
    b"null",
    b"zero",
    b"full",
    b"random",
    b"urandom",
    b"tty",
    b"ptmx",
    b"pts",
    b"shm",
    b"mqueue",
    b"fuse",
    b"net",
    b"kvm",
    b"dri",
)
"""What a command of root keeps of /dev where there are block devices, which uid 0 may read without any capability."""

KERNEL_FOLDERS = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs", "/sys")
"""What uid 0 may write without any capability, and what changes the machine: read-only for the commands of root."""

_libc = ctypes.CDLL(None, use_errno=True)
_python = ctypes.PyDLL(None, use_errno=True)
_python.syscall.restype = ctypes.c_long
_libc.syscall.restype = ctypes.c_long


class _CloneArguments(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("flags", "pidfd", "child_tid", "parent_tid", "exit_signal", "stack", "stack_size", "tls")
    )


class _MountAttributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns"))


class _Ruleset(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("files", "network", "scoped"))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("access", ctypes.c_uint64), ("descriptor", ctypes.c_int32))


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


# -- namespaces ------------------------------------------------------------------------------------------------------------------


def fork(spaces: Spaces) -> int:
    """`os.fork`, with the child in new namespaces. Raises `OSError` where the kernel refuses them.

    The child of a new user namespace has no identity until `settle` gives it one.
    """
    flags = 0
    for space, flag in _CLONE_FLAGS.items():
        if spaces & space:
            flags |= flag
    arguments = _CloneArguments(flags=flags, exit_signal=signal.SIGCHLD)
    _python.PyOS_BeforeFork()
    pid = _python.syscall(ctypes.c_long(_CLONE3), ctypes.byref(arguments), ctypes.c_size_t(ctypes.sizeof(arguments)))
    number = ctypes.get_errno()
    if pid == 0:
        _python.PyOS_AfterFork_Child()
        return 0
    _python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(number, f"clone3: {os.strerror(number)}")
    return pid


def settle(spaces: Spaces, uid: int, gid: int) -> None:
    """Complete the namespaces of this process: its identity is `uid` and `gid` as before, and the loopback interface is up."""
    if spaces & Spaces.USER:
        # The files belong to root while the process is not dumpable.
        prctl.set_dumpable(True)
        _write("/proc/self/setgroups", b"deny")
        _write("/proc/self/uid_map", b"%d %d 1" % (uid, uid))
        _write("/proc/self/gid_map", b"%d %d 1" % (gid, gid))
        prctl.set_dumpable(False)
    if spaces & Spaces.NETWORK:
        _raise_loopback()


def _write(path: str, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def _raise_loopback() -> None:
    import _socket
    import fcntl

    request, up = 0x8914, 1
    with_socket = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
    try:
        fcntl.ioctl(with_socket.fileno(), request, struct.pack("16sh14x", b"lo", up))
    finally:
        with_socket.close()


# -- file systems ----------------------------------------------------------------------------------------------------------------


def arrange(plan: Confinement) -> None:
    """Make the mount namespace of this process what the plan says. Without one this does nothing."""
    if not plan.spaces & Spaces.MOUNT:
        return
    _mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE)
    for path in plan.pinned:
        # A mount point cannot be renamed, so nothing else can be put in the place of what lies below it.
        _rebind(path, read_only=False)
    shown = [(path, tree) for path in plan.shown if (tree := _clone(path)) is not None]
    for _, tree in shown:
        _make_read_only(tree)
    for path in plan.read_only:
        _rebind(path, read_only=True)
    for path in plan.hidden:
        _hide(path, [(inside, tree) for inside, tree in shown if inside.startswith(path + b"/")])
    # After the hiding: a source that another command has replaced by a link shows nothing that is hidden.
    for source, target in plan.binds:
        tree = _clone(source)
        if tree is not None:
            _attach(tree, target)
    if plan.spaces & Spaces.PID:
        _mount(b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    if plan.guards_kernel:
        for folder in KERNEL_FOLDERS:
            _rebind(folder.encode(), read_only=True)
    if plan.guards_devices:
        _limit_devices()


def _mount(source: bytes, target: bytes, kind: bytes | None, flags: int, options: bytes | None = None) -> None:
    _checked(_libc.mount(source, target, kind, ctypes.c_ulong(flags), options), f"mount {os.fsdecode(target)}")


def _clone(path: bytes) -> int | None:
    """A detached copy of what is mounted at and below a path; None if there is nothing."""
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_RECURSIVE
    tree = _libc.syscall(ctypes.c_long(_OPEN_TREE), ctypes.c_int(_AT_FDCWD), path, ctypes.c_uint(flags))
    if tree < 0 and ctypes.get_errno() in (2, 20, 13):
        return None
    return _checked(tree, f"open_tree {os.fsdecode(path)}")


def _attach(tree: int, path: bytes) -> None:
    moved = _libc.syscall(
        ctypes.c_long(_MOVE_MOUNT),
        ctypes.c_int(tree),
        b"",
        ctypes.c_int(_AT_FDCWD),
        path,
        ctypes.c_uint(_MOVE_MOUNT_F_EMPTY_PATH),
    )
    _checked(moved, f"move_mount {os.fsdecode(path)}")
    os.close(tree)


def _make_read_only(tree: int, flags: int = _AT_EMPTY_PATH | _AT_RECURSIVE) -> None:
    attributes = _MountAttributes(set=_ATTR_RDONLY)
    done = _libc.syscall(
        ctypes.c_long(_MOUNT_SETATTR),
        ctypes.c_int(tree),
        b"",
        ctypes.c_uint(flags),
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )
    _checked(done, "mount_setattr")


def _rebind(path: bytes, *, read_only: bool) -> None:
    tree = _clone(path)
    if tree is None:
        return
    if read_only:
        _make_read_only(tree)
    _attach(tree, path)


def _hide(path: bytes, shown: list[tuple[bytes, int]]) -> None:
    """Put an empty folder over a folder, and the null device over anything else."""
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except OSError:
        return
    if not is_folder:
        tree = _clone(b"/dev/null")
        if tree is not None:
            _attach(tree, path)
        return
    flags = _MS_NOSUID | _MS_NODEV | (0 if shown else _MS_RDONLY)
    _mount(b"none", path, b"tmpfs", flags, b"mode=0500")
    if not shown:
        return
    for inside, tree in shown:
        os.makedirs(inside, exist_ok=True)
        _attach(tree, inside)
    cover = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _make_read_only(cover, _AT_EMPTY_PATH)
    finally:
        os.close(cover)


def _limit_devices() -> None:
    """Leave everything out of /dev that is not in `DEVICES`, block devices above all."""
    kept = [
        (name, tree, stat.S_ISDIR(os.fstat(tree).st_mode))
        for name in DEVICES
        if (tree := _clone(b"/dev/" + name)) is not None
    ]
    _mount(b"none", b"/dev", b"tmpfs", _MS_NOSUID | _MS_NOEXEC, b"mode=0755")
    for name, tree, is_folder in kept:
        path = b"/dev/" + name
        if is_folder:
            os.mkdir(path)
        else:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666))
        _attach(tree, path)
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"/dev/{name}")


# -- the command -----------------------------------------------------------------------------------------------------------------


def restrict(plan: Confinement) -> None:
    """Give up every right that a command does not need. The exec that follows gives none of them back."""
    _limit(plan)
    _checked(_libc.prctl(prctl.SET_NO_NEW_PRIVS, ctypes.c_ulong(1), 0, 0, 0), "no_new_privs")
    if plan.landlock:
        _enter_landlock(plan)
    _drop_capabilities()


def _limit(plan: Confinement) -> None:
    for kind, wanted in (
        (resource.RLIMIT_FSIZE, plan.file_bytes),
        (resource.RLIMIT_NOFILE, plan.open_files),
        (resource.RLIMIT_AS, plan.address_bytes),
    ):
        if wanted:
            _, hard = resource.getrlimit(kind)
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(kind, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def landlock_version() -> int:
    """The version of Landlock's interface; 0 where there is none."""
    version = _libc.syscall(
        ctypes.c_long(_LANDLOCK_CREATE), None, ctypes.c_size_t(0), ctypes.c_uint32(_LANDLOCK_VERSION)
    )
    return max(0, version)


def _enter_landlock(plan: Confinement) -> None:
    version = landlock_version()
    every = (1 << (16 if version >= 5 else 15 if version >= 3 else 14 if version >= 2 else 13)) - 1
    ruleset = _Ruleset(
        files=every,
        network=_NET_BIND | _NET_CONNECT if plan.no_tcp else 0,
        scoped=_SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if version >= 6 else 0,
    )
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    created = _libc.syscall(
        ctypes.c_long(_LANDLOCK_CREATE), ctypes.byref(ruleset), ctypes.c_size_t(size), ctypes.c_uint32(0)
    )
    rules = _checked(created, "landlock_create_ruleset")
    for path in plan.writable:
        _allow(rules, path, every)
    for path in plan.readable:
        _allow(rules, path, _FS_READING)
    for path in plan.devices:
        _allow(rules, path, _FS_READ | _FS_WRITE | _FS_READ_DIR | (_FS_IOCTL & every))
    entered = _libc.syscall(ctypes.c_long(_LANDLOCK_RESTRICT), ctypes.c_int(rules), ctypes.c_uint32(0))
    _checked(entered, "landlock_restrict_self")
    os.close(rules)


def _allow(rules: int, path: bytes, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            access &= _FS_FILE
        rule = _PathRule(access=access, descriptor=descriptor)
        added = _libc.syscall(
            ctypes.c_long(_LANDLOCK_ADD),
            ctypes.c_int(rules),
            ctypes.c_int(_LANDLOCK_PATH),
            ctypes.byref(rule),
            ctypes.c_uint32(0),
        )
        _checked(added, f"landlock_add_rule {os.fsdecode(path)}")
    finally:
        os.close(descriptor)


def _drop_capabilities() -> None:
    for capability in range(64):
        if _libc.prctl(prctl.CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) != 0:
            break
    _libc.prctl(prctl.CAP_AMBIENT, ctypes.c_ulong(prctl.CAP_AMBIENT_CLEAR_ALL), 0, 0, 0)
    header, data = _CapabilityHeader(version=0x2008_0522, pid=0), (ctypes.c_uint32 * 6)()
    _checked(_libc.capset(ctypes.byref(header), ctypes.byref(data)), "capset")
