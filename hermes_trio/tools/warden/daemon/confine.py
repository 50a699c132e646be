"""Confines one command: namespaces for its keeper, then Landlock, no capabilities and limits for the command itself.

A keeper is cloned into its namespaces (`fork`), gives them an identity (`settle`), arranges the file systems (`arrange`) and completes them with what
is its own (`complete`); with a PID namespace it is process 1 there, so that the kernel ends the whole job with it. The command, after its fork and
before its exec, gives up what the keeper needed (`restrict`). What is the same for many commands a template does once for its keepers: `arrange`, and
`prepare` for the part of `restrict` that a fork passes on. A step that the kernel refuses raises `OSError`, and the command is not started: nothing
runs with less than what was asked for.

Between a fork and an exec each page that is touched is copied, which is most of the cost: the arguments of the calls are made beforehand.
"""

import ctypes
import os
import resource
import signal
import stat
import struct
from collections.abc import Callable
from functools import partial

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

_CLONE_PARENT = 0x8000
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
"""The devices that a command of root keeps if /dev has block devices, which uid 0 may read without any capability."""

_TERMINALS, _CONSOLE = b"/dev/pts", b"/dev/console"

KERNEL_FOLDERS = (b"/proc/sys", b"/proc/sysrq-trigger", b"/proc/irq", b"/proc/bus", b"/proc/fs")
"""Paths that uid 0 may write without any capability and that change the machine: read-only for commands of root, as is /sys."""

_ROOM = 1024
"""The number of open files that a template and its keepers may need themselves."""

_libc = ctypes.CDLL(None, use_errno=True)
_python = ctypes.PyDLL(None, use_errno=True)


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


def _system_call(number: int, *kinds: type, library: ctypes.CDLL = _libc) -> Callable[..., int]:
    """Make a system call for which the C library has no function."""
    call = library["syscall"]
    call.restype, call.argtypes = ctypes.c_long, (ctypes.c_long, *kinds)
    return partial(call, number)


_clone3 = _system_call(_CLONE3, ctypes.c_void_p, ctypes.c_size_t, library=_python)
_open_tree = _system_call(_OPEN_TREE, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
_move_mount = _system_call(_MOVE_MOUNT, ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
_mount_setattr = _system_call(
    _MOUNT_SETATTR, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_size_t
)
_landlock_create = _system_call(_LANDLOCK_CREATE, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32)
_landlock_add = _system_call(_LANDLOCK_ADD, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32)
_landlock_restrict = _system_call(_LANDLOCK_RESTRICT, ctypes.c_int, ctypes.c_uint32)
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
_prctl = _libc.prctl
_prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)
_libc.capset.argtypes = (ctypes.c_void_p, ctypes.c_void_p)

_READ_ONLY = _MountAttributes(set=_ATTR_RDONLY)
_READ_ONLY_AT = ctypes.addressof(_READ_ONLY)
_ATTRIBUTES_SIZE = ctypes.sizeof(_MountAttributes)

_CAPABILITY_VERSION = 0x2008_0522
_HEADER, _NO_CAPABILITIES = _CapabilityHeader(version=_CAPABILITY_VERSION, pid=0), (ctypes.c_uint32 * 6)()
_HEADER_AT, _NO_CAPABILITIES_AT = ctypes.addressof(_HEADER), ctypes.addressof(_NO_CAPABILITIES)


def _refused(what: str) -> OSError:
    """Return the error of the last call."""
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


# -- namespaces ------------------------------------------------------------------------------------------------------------------


def fork(spaces: Spaces, *, sibling: bool = False) -> int:
    """Fork as `os.fork` does, with the child in new namespaces. Raises `OSError` if the kernel refuses them.

    The child of a new user namespace has no identity until `settle` gives it one. A sibling is a child of the caller's parent.
    """
    flags = _CLONE_PARENT if sibling else 0
    for space, flag in _CLONE_FLAGS.items():
        if spaces & space:
            flags |= flag
    # A sibling gets the exit signal of the process that makes it.
    arguments = _CloneArguments(flags=flags, exit_signal=0 if sibling else signal.SIGCHLD)
    _python.PyOS_BeforeFork()
    pid = _clone3(ctypes.addressof(arguments), ctypes.sizeof(arguments))
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
    """Set up the mount namespace of this process by the plan, except for the part of `complete`. Does nothing without one."""
    if not plan.spaces & Spaces.MOUNT:
        return
    _mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE)
    for path in plan.pinned:
        # A mount point cannot be renamed, so the files below it cannot be replaced.
        _rebind(path, read_only=False)
    shown = [(path, tree) for path in plan.shown if (tree := _clone(path)) is not None]
    for _, tree in shown:
        _make_read_only(tree, recursive=True)
    for path in plan.read_only:
        _rebind(path, read_only=True)
    for path in plan.hidden:
        _hide(path, [(inside, tree) for inside, tree in shown if inside.startswith(path + b"/")])
    if plan.guards_kernel:
        _rebind(b"/sys", read_only=True)
    if os.access(_CONSOLE, os.R_OK) or os.access(_CONSOLE, os.W_OK):
        # In a container it is the server's own terminal.
        _hide(_CONSOLE, [])
    if not plan.terminal:
        _replace_terminals()
    if plan.guards_devices:
        _limit_devices()


def complete(plan: Confinement, terminal: int = -1) -> None:
    """Add the part of one command to the mount namespace of this process: its folders, its terminal, and its view of processes."""
    if not plan.spaces & Spaces.MOUNT:
        return
    # After the hiding: a source that another command has replaced by a link cannot show hidden files.
    for source, target in plan.binds:
        tree = _clone(source)
        if tree is not None:
            _attach(tree, target)
    if plan.terminal:
        _name_terminal(terminal)
        _replace_terminals()
    if plan.spaces & Spaces.PID:
        _mount(b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    if plan.guards_kernel:
        for folder in KERNEL_FOLDERS:
            _rebind(folder, read_only=True)


def _mount(source: bytes, target: bytes, kind: bytes | None, flags: int, options: bytes | None = None) -> None:
    if _libc.mount(source, target, kind, flags, options) < 0:
        raise _refused(f"mount {os.fsdecode(target)}")


def _clone(path: bytes) -> int | None:
    """Return a detached copy of the mounts at and below a path; None if the path does not exist."""
    tree = _open_tree(_AT_FDCWD, path, _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_RECURSIVE)
    if tree >= 0:
        return tree
    if ctypes.get_errno() in (2, 20, 13):
        return None
    raise _refused(f"open_tree {os.fsdecode(path)}")


def _attach(tree: int, path: bytes) -> None:
    if _move_mount(tree, b"", _AT_FDCWD, path, _MOVE_MOUNT_F_EMPTY_PATH) < 0:
        raise _refused(f"move_mount {os.fsdecode(path)}")
    os.close(tree)


def _make_read_only(tree: int, *, recursive: bool) -> None:
    flags = _AT_EMPTY_PATH | _AT_RECURSIVE if recursive else _AT_EMPTY_PATH
    if _mount_setattr(tree, b"", flags, _READ_ONLY_AT, _ATTRIBUTES_SIZE) < 0:
        raise _refused("mount_setattr")


def _rebind(path: bytes, *, read_only: bool) -> None:
    tree = _clone(path)
    if tree is None:
        return
    if read_only:
        _make_read_only(tree, recursive=True)
    _attach(tree, path)


def _hide(path: bytes, shown: list[tuple[bytes, int]]) -> None:
    """Mount an empty folder over a folder, and the null device over any other file."""
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
        _make_read_only(cover, recursive=False)
    finally:
        os.close(cover)


def _name_terminal(terminal: int) -> None:
    """Keep the command's own terminal from outside, under a name by which programs find it."""
    name = b"%b/%d" % (_TERMINALS, os.minor(os.fstat(terminal).st_rdev))
    tree = _clone(name) if os.path.exists(_CONSOLE) else None
    if tree is not None:
        _attach(tree, _CONSOLE)


def _replace_terminals() -> None:
    """Mount separate pseudo-terminals for commands: with access to another terminal they could write to it and read its input."""
    try:
        _mount(b"devpts", _TERMINALS, b"devpts", _MS_NOSUID | _MS_NOEXEC, b"newinstance,ptmxmode=0666,mode=0620")
    except OSError:
        for name in os.listdir(_TERMINALS):
            if name.isdigit():
                _hide(_TERMINALS + b"/" + name, [])
        return
    tree = None if os.path.islink(b"/dev/ptmx") else _clone(_TERMINALS + b"/ptmx")
    if tree is not None:
        _attach(tree, b"/dev/ptmx")


def _limit_devices() -> None:
    """Hide everything in /dev that is not in `DEVICES`, in particular block devices."""
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
    os.close(os.open(_CONSOLE, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"/dev/{name}")


# -- the command -----------------------------------------------------------------------------------------------------------------


class Prepared:
    """The rights that a process has given up for its future commands, and what it has prepared for them; see `prepare`."""

    __slots__ = ("limits", "rules")

    def __init__(self, limits: list[tuple[int, int]], rules: int) -> None:
        self.limits = limits
        """The limits that would also limit the process itself, and are left to the command."""
        self.rules = rules
        """The Landlock ruleset that a command enters; -1 for none."""


def prepare(plan: Confinement) -> Prepared:
    """Give up the rights of this process and its descendants that it does not need for making namespaces."""
    left: list[tuple[int, int]] = []
    for kind, most in _limits(plan):
        if kind == resource.RLIMIT_AS or (kind == resource.RLIMIT_NOFILE and most < _ROOM):
            left.append((kind, most))
        else:
            resource.setrlimit(kind, (most, most))
    _forbid_new_privileges()
    _empty_bounding_set()
    return Prepared(left, _make_rules(plan) if plan.landlock else -1)


def restrict(plan: Confinement, prepared: Prepared | None = None) -> None:
    """Give up every right that a command does not need. The following exec restores none of them."""
    for kind, most in _limits(plan) if prepared is None else prepared.limits:
        resource.setrlimit(kind, (most, most))
    if prepared is None:
        _forbid_new_privileges()
    elif prepared.rules >= 0:
        _enter(prepared.rules)
    if plan.landlock:
        rules = _make_rules(plan)
        _enter(rules)
        os.close(rules)
    if prepared is None or plan.spaces & Spaces.USER:
        # A new user namespace begins with a full set.
        _empty_bounding_set()
    _prctl(prctl.CAP_AMBIENT, prctl.CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    if _libc.capset(_HEADER_AT, _NO_CAPABILITIES_AT) != 0:
        raise _refused("capset")


def _limits(plan: Confinement) -> list[tuple[int, int]]:
    """Return the limits to set, as kinds and numbers: those of the plan that this process does not have yet, and no core dumps."""
    found: list[tuple[int, int]] = []
    for kind, wanted in (
        (resource.RLIMIT_FSIZE, plan.file_bytes),
        (resource.RLIMIT_NOFILE, plan.open_files),
        (resource.RLIMIT_AS, plan.address_bytes),
    ):
        if wanted:
            soft, hard = resource.getrlimit(kind)
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            if (soft, hard) != (most, most):
                found.append((kind, most))
    found.append((resource.RLIMIT_CORE, 0))
    return found


def _forbid_new_privileges() -> None:
    if _prctl(prctl.SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise _refused("no_new_privs")


def _empty_bounding_set() -> None:
    capability = 0
    while _prctl(prctl.CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1


def landlock_version() -> int:
    """Return the version of Landlock's interface; 0 if the kernel has none."""
    return max(0, _landlock_create(None, 0, _LANDLOCK_VERSION))


def _make_rules(plan: Confinement) -> int:
    """Return a Landlock ruleset of the plan; the caller closes it."""
    version = landlock_version()
    every = (1 << (16 if version >= 5 else 15 if version >= 3 else 14 if version >= 2 else 13)) - 1
    ruleset = _Ruleset(
        files=every,
        network=_NET_BIND | _NET_CONNECT if plan.no_tcp else 0,
        scoped=_SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if version >= 6 else 0,
    )
    rules = _landlock_create(ctypes.addressof(ruleset), 24 if version >= 6 else 16 if version >= 4 else 8, 0)
    if rules < 0:
        raise _refused("landlock_create_ruleset")
    for path in plan.writable:
        _allow(rules, path, every)
    for path in plan.readable:
        _allow(rules, path, _FS_READING)
    for path in plan.devices:
        _allow(rules, path, _FS_READ | _FS_WRITE | _FS_READ_DIR | (_FS_IOCTL & every))
    return rules


def _enter(rules: int) -> None:
    if _landlock_restrict(rules, 0) < 0:
        raise _refused("landlock_restrict_self")


def _allow(rules: int, path: bytes, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            access &= _FS_FILE
        rule = _PathRule(access=access, descriptor=descriptor)
        if _landlock_add(rules, _LANDLOCK_PATH, ctypes.addressof(rule), 0) < 0:
            raise _refused(f"landlock_add_rule {os.fsdecode(path)}")
    finally:
        os.close(descriptor)
