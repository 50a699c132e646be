"""The wire format between the server, the warden and the keepers.

Two kinds of socket carry them. A *control* socket (SEQPACKET, server and warden, or server and template) carries one
frame a packet; a SPAWN packet brings descriptors along: the keeper's end of a link, then the command's standard streams.
A *link* (STREAM, server and keeper) carries one `Plan`, then frames in both directions; its end of file is an order to
kill. Keepers that a template forked tell the warden so over a pipe, one CLAIMED frame each.
"""

import _socket
import os
import stat
import struct
import sys
from collections.abc import Iterable
from enum import IntEnum, IntFlag

FRAME = struct.Struct("!Bqq")
"""Kind and two numbers; `Kind` says what they mean."""

MAX_DESCRIPTORS = 6
"""A link, three standard streams, and two more that the command inherits."""

FIRST_INHERITED = 200
"""The number of the first of those two in the command: above all numbers that shells and scripts use by themselves."""

TOKEN_VARIABLE = "HERMES_TRIO_WARDEN"
"""In the environment of the warden and of every command: identifies the orphans of a warden."""

CGROUP_VARIABLE = "HERMES_TRIO_CGROUP"
"""In the environment of the warden: the delegated control group of the jobs."""

ABANDONED_GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL if the server or the warden has ended."""


class Kind(IntEnum):
    """The kind of a frame, with its sender, its receiver and its two numbers."""

    SPAWN = 1
    """Server to warden or template: fork a keeper. (job, its `Spaces`)"""
    DISCARD = 2
    """Server to warden: this keeper does not answer, kill it and its job. (job, -)"""
    CLOSED = 3
    """Warden to server: the keeper is reaped, and no process of its job is alive. (job, -)"""
    HELLO = 4
    """Keeper to server: the keeper has started. (its pid, -)"""
    STARTED = 5
    """Keeper to server: the command runs. (its pid, -)"""
    FAILED = 6
    """Keeper (or a warden that cannot fork) to server: the command does not run. (Stage, errno)"""
    EXITED = 7
    """Keeper to server: the command itself has ended. (code or -1, signal or 0)"""
    EMPTY = 8
    """Keeper to server, the last frame: no process of this job is left. (Means, -)"""
    SURVIVORS = 9
    """Keeper to server: processes have survived SIGKILL; the keeper continues to send it. (how many, -)"""
    ORPHANED = 10
    """Keeper to server: the warden is dead, so this job is being ended. (-, -)"""
    KILL = 11
    """Server to keeper: end every process of this job. (grace in milliseconds, -)"""
    CROWDED = 12
    """Keeper to server: the job had more processes than its plan allows, so it is being killed. (how many, the limit)"""
    TEMPLATE = 13
    """Server to warden: fork a template. Its control socket and a file with its `Confinement` come along. (its `Spaces`, -)"""
    CLAIMED = 14
    """Keeper of a template to warden: this is your child. A template that could not fork says so with the number 0. (job, its pid)"""


class Stage(IntEnum):
    """The step at which starting a command failed."""

    FORK = 1
    SETUP = 2
    CHDIR = 3
    EXEC = 4
    CONFINE = 5
    """Nothing was started: the kernel refused a part of the confinement that was asked for."""


class Means(IntEnum):
    """The strongest signal that was needed to end a job."""

    NONE = 0
    SIGTERM = 1
    SIGKILL = 2


class Streams(IntFlag):
    """Which descriptors came with a plan, in this order: standard input, output, error."""

    OUTPUT_ONLY = 0
    STDIN = 1
    STDERR = 2
    TERMINAL = 4
    """One descriptor, the terminal's, is all three and becomes the controlling terminal."""


class Spaces(IntFlag):
    """Namespaces of a keeper and its command."""

    NONE = 0
    USER = 1
    """Gives an unprivileged user the right to make the others."""
    MOUNT = 2
    PID = 4
    NETWORK = 8
    IPC = 16
    """System V memory, semaphores and queues, and POSIX queues: they belong to a user, not to a process, and outlive it."""


TEMPLATE_SPACES = Spaces.USER | Spaces.MOUNT
"""The namespaces of a template; each keeper has all of its own."""


class Confinement:
    """What a command may see and change. Paths are absolute; one that does not exist is left out."""

    __slots__ = (
        "address_bytes",
        "binds",
        "cgroup",
        "devices",
        "file_bytes",
        "guards_devices",
        "guards_kernel",
        "hidden",
        "landlock",
        "memory_bytes",
        "no_tcp",
        "open_files",
        "pinned",
        "prepared",
        "processes",
        "read_only",
        "readable",
        "shown",
        "spaces",
        "tasks",
        "terminal",
        "writable",
    )

    _NUMBERS = (
        "spaces",
        "landlock",
        "no_tcp",
        "guards_kernel",
        "guards_devices",
        "processes",
        "file_bytes",
        "open_files",
        "address_bytes",
        "tasks",
        "memory_bytes",
        "prepared",
        "terminal",
    )
    _LISTS = ("hidden", "shown", "read_only", "pinned", "readable", "writable", "devices", "cgroup")

    def __init__(
        self,
        *,
        spaces: Spaces = Spaces.NONE,
        landlock: bool = False,
        no_tcp: bool = False,
        guards_kernel: bool = False,
        guards_devices: bool = False,
    ) -> None:
        self.spaces = spaces
        self.landlock = landlock
        self.no_tcp = no_tcp
        """Landlock refuses TCP connections and listening."""
        self.guards_kernel = guards_kernel
        """Files that change the machine are read-only: for commands of root."""
        self.guards_devices = guards_devices
        """There are no block devices: for commands of root."""
        self.hidden: list[bytes] = []
        """Hidden paths: the command sees an empty folder or the null device instead."""
        self.shown: list[bytes] = []
        """Folders inside of hidden ones that stay visible, read-only."""
        self.read_only: list[bytes] = []
        self.pinned: list[bytes] = []
        """Folders that cannot be renamed, because something below them is hidden or read-only."""
        self.readable: list[bytes] = []
        self.writable: list[bytes] = [b"/"]
        self.devices: list[bytes] = []
        """With Landlock: the only paths that can be read, written, or used as a device."""
        self.binds: list[tuple[bytes, bytes]] = []
        """Pairs of paths: the files at the first are seen at the second."""
        self.processes = 0
        self.file_bytes = 0
        self.open_files = 0
        self.address_bytes = 0
        """Limits; 0 for none. The processes are those of the whole job."""
        self.cgroup: list[bytes] = []
        """The delegated control group below which the job has one of its own; empty for none."""
        self.tasks = 0
        self.memory_bytes = 0
        """The limits of that group, of processes with their threads and of memory; 0 for none."""
        self.prepared = False
        """Whether this is only the part that a template leaves to its keepers: a keeper that no template forked refuses it."""

        self.terminal = False
        """Whether the command has a terminal from outside; it keeps that one and sees no other."""

    @property
    def paths(self) -> list[bytes]:
        """Return the paths that are hidden, shown, read-only or pinned, on which a template depends."""
        return [*self.hidden, *self.shown, *self.read_only, *self.pinned]

    def divided(self) -> "tuple[Confinement, Confinement]":
        """Return the common part, which a template does once for all its commands, and the part of the keeper and the command."""
        common = Confinement(spaces=self.spaces, guards_kernel=self.guards_kernel, guards_devices=self.guards_devices)
        common.hidden, common.shown, common.read_only, common.pinned = (
            self.hidden,
            self.shown,
            self.read_only,
            self.pinned,
        )
        common.file_bytes, common.open_files, common.address_bytes = (
            self.file_bytes,
            self.open_files,
            self.address_bytes,
        )
        common.cgroup = self.cgroup
        own = Confinement(spaces=self.spaces, guards_kernel=self.guards_kernel)
        own.prepared, own.binds, own.processes = True, self.binds, self.processes
        common.terminal = own.terminal = self.terminal
        own.cgroup, own.tasks, own.memory_bytes = self.cgroup, self.tasks, self.memory_bytes
        # The folders of a session differ; a rule for the root is common to all.
        rules = own if self.writable != [b"/"] else common
        rules.landlock, rules.no_tcp = self.landlock, self.no_tcp
        rules.readable, rules.writable, rules.devices = self.readable, self.writable, self.devices
        return common, own

    def encode(self) -> list[bytes]:
        """Return the strings in which it is sent; none of them contains a NUL byte."""
        strings = [b" ".join(b"%d" % int(getattr(self, name)) for name in self._NUMBERS)]
        for name in self._LISTS:
            paths: list[bytes] = getattr(self, name)
            strings += (b"%d" % len(paths), *paths)
        for pair in self.binds:
            strings += pair
        return strings

    @classmethod
    def decode(cls, strings: list[bytes]) -> "Confinement":
        """Decode what `encode` wrote."""
        made = cls()
        for name, number in zip(cls._NUMBERS, strings[0].split(), strict=True):
            setattr(made, name, int(number))
        made.spaces = Spaces(made.spaces)
        at = 1
        for name in cls._LISTS:
            count = int(strings[at])
            setattr(made, name, strings[at + 1 : at + 1 + count])
            at += 1 + count
        made.binds = list(zip(strings[at::2], strings[at + 1 :: 2], strict=True))
        return made


class Plan:
    """What a keeper is to start. No string may contain a NUL byte."""

    __slots__ = ("argv", "confinement", "cwd", "env", "streams")

    HEADER = struct.Struct("!IIIBI")

    def __init__(
        self,
        argv: list[bytes],
        cwd: bytes,
        env: dict[bytes, bytes],
        streams: Streams,
        confinement: Confinement | None = None,
    ) -> None:
        self.argv = argv
        self.cwd = cwd
        self.env = env
        self.streams = streams
        self.confinement = confinement

    def encode(self) -> bytes:
        """Return the plan as it is sent over a link, with its length first."""
        strings = [self.cwd, *self.argv]
        for name, value in self.env.items():
            strings += (name, value)
        confinement = [] if self.confinement is None else self.confinement.encode()
        body = b"\0".join(strings + confinement)
        return self.HEADER.pack(len(body), len(self.argv), len(self.env), self.streams, len(confinement)) + body

    @classmethod
    def decode(cls, header: bytes, body: bytes) -> "Plan":
        """Return the plan of a header and a body, whose length the header gives. The inverse of `encode`."""
        _, argc, envc, streams, confined = cls.HEADER.unpack(header)
        strings = body.split(b"\0")
        after = 1 + argc + 2 * envc
        flat = strings[1 + argc : after]
        return cls(
            argv=strings[1 : 1 + argc],
            cwd=strings[0],
            env=dict(zip(flat[::2], flat[1::2], strict=True)),
            streams=Streams(streams),
            confinement=Confinement.decode(strings[after:]) if confined else None,
        )


def mark(path: bytes) -> bytes:
    """Return the identity of the file or folder that a path leads to; empty if there is none. It changes if a file is linked or replaced."""
    try:
        found = os.stat(path)
    except OSError:
        return b""
    if stat.S_ISDIR(found.st_mode):
        return b"%d %d" % (found.st_dev, found.st_ino)
    return b"%d %d %d" % (found.st_dev, found.st_ino, found.st_ctime_ns)


def describe(common: Confinement, marks: Iterable[bytes]) -> bytes:
    """Return a template as it is sent: the common part of its commands, and the marks of its paths."""
    marks = list(marks)
    return b"\0".join([b"%d" % len(marks), *marks, *common.encode()])


def read_description(data: bytes) -> tuple[Confinement, list[bytes]]:
    """Read what `describe` wrote."""
    count, *strings = data.split(b"\0")
    return Confinement.decode(strings[int(count) :]), strings[: int(count)]


def receive(control: _socket.socket) -> tuple[bytes, list[int]]:
    """Return the next packet of a control socket and its descriptors; no bytes at the end of the socket."""
    int_size = 4
    try:
        packet, ancillary, _, _ = control.recvmsg(
            FRAME.size, _socket.CMSG_SPACE(MAX_DESCRIPTORS * int_size), _socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionError:
        return b"", []
    return packet, [
        int.from_bytes(data[start : start + int_size], sys.byteorder)
        for _, _, data in ancillary
        for start in range(0, len(data) - int_size + 1, int_size)
    ]
