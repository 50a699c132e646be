"""The bytes between the server, the warden and the keepers.

Two kinds of socket carry them. The *control* socket (SEQPACKET, server and warden) carries one frame a packet; a
SPAWN packet brings descriptors along: the keeper's end of a link, then the command's standard streams. A *link*
(STREAM, server and keeper) carries one `Plan`, then frames in both directions; its end of file is an order to kill.
"""

import struct
from enum import IntEnum, IntFlag

FRAME = struct.Struct("!Bqq")
"""Kind and two numbers; `Kind` says what they mean."""

MAX_DESCRIPTORS = 4
"""A link and three standard streams."""

TOKEN_VARIABLE = "HERMES_TRIO_WARDEN"
"""In the environment of the warden and of every command: tells the server which orphans are its warden's."""

ABANDONED_GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL when nobody is left to say how long it should be."""


class Kind(IntEnum):
    """What a frame says, and who says it to whom."""

    SPAWN = 1
    """Server to warden: fork a keeper. (job, -)"""
    DISCARD = 2
    """Server to warden: this keeper does not answer, kill it and what it kept. (job, -)"""
    CLOSED = 3
    """Warden to server: the keeper is reaped, and nothing that it kept is alive. (job, -)"""
    HELLO = 4
    """Keeper to server: there is a keeper. (its pid, -)"""
    STARTED = 5
    """Keeper to server: the command runs. (its pid, -)"""
    FAILED = 6
    """Keeper (or a warden that cannot fork) to server: the command does not run. (Stage, errno)"""
    EXITED = 7
    """Keeper to server: the command itself has ended. (code or -1, signal or 0)"""
    EMPTY = 8
    """Keeper to server, its last word: no process of this job is left. (Means, -)"""
    SURVIVORS = 9
    """Keeper to server: still alive in spite of SIGKILL; the keeper goes on trying. (how many, -)"""
    ORPHANED = 10
    """Keeper to server: the warden is dead, so this job is being ended. (-, -)"""
    KILL = 11
    """Server to keeper: end every process of this job. (grace in milliseconds, -)"""


class Stage(IntEnum):
    """Where starting a command went wrong."""

    FORK = 1
    SETUP = 2
    CHDIR = 3
    EXEC = 4


class Means(IntEnum):
    """The strongest thing that was needed to end a job."""

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


class Plan:
    """What a keeper is to start. No string may contain a NUL byte."""

    __slots__ = ("argv", "cwd", "env", "streams")

    HEADER = struct.Struct("!IIIB")

    def __init__(self, argv: list[bytes], cwd: bytes, env: dict[bytes, bytes], streams: Streams) -> None:
        self.argv = argv
        self.cwd = cwd
        self.env = env
        self.streams = streams

    def encode(self) -> bytes:
        """The plan as it travels over a link, its own length first."""
        strings = [self.cwd, *self.argv]
        for name, value in self.env.items():
            strings += (name, value)
        body = b"\0".join(strings)
        return self.HEADER.pack(len(body), len(self.argv), len(self.env), self.streams) + body

    @classmethod
    def decode(cls, header: bytes, body: bytes) -> "Plan":
        """The inverse of `encode`; the reader has read as many bytes of body as the header says."""
        _, argc, envc, streams = cls.HEADER.unpack(header)
        strings = body.split(b"\0")
        flat = strings[1 + argc : 1 + argc + 2 * envc]
        return cls(
            argv=strings[1 : 1 + argc],
            cwd=strings[0],
            env=dict(zip(flat[::2], flat[1::2], strict=True)),
            streams=Streams(streams),
        )
