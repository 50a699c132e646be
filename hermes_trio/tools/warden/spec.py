"""What is started, and how it ended: the values that cross the boundary of the process layer."""

import enum
import os
import signal
from collections.abc import Mapping
from typing import ClassVar, Self

import msgspec

from hermes_trio.base.structs import RedactedStruct
from hermes_trio.tools.warden.daemon.wire import TOKEN_VARIABLE, Confinement, Plan, Spaces, Streams
from hermes_trio.tools.warden.errors import SpawnFailed

SHELLS = ("/bin/bash", "/bin/sh")
"""Where a `command` is read; the first that exists."""


class Stdin(enum.Enum):
    """What the command reads from."""

    NULL = "null"
    """The null device: every read is at its end."""
    PIPE = "pipe"
    """A pipe that the owner writes to."""
    PTY = "pty"
    """A terminal, which is the command's output too."""


class ProcessSpec(RedactedStruct, frozen=True, kw_only=True):
    """A command to start: either a `command` for the shell or an `argv`, in `cwd`, with exactly this environment."""

    hidden: ClassVar[tuple[str, ...]] = ("env",)
    command: str | None = None
    argv: tuple[str, ...] | None = None
    cwd: str
    env: Mapping[str, str]
    """The whole environment, not additions to the server's. It never shows in a repr, an error or an argument list."""
    stdin: Stdin = Stdin.NULL
    rows: int = 30
    cols: int = 120
    """The size of the terminal, with `Stdin.PTY`."""
    merge_stderr: bool = True
    """Standard error goes where standard output goes; always so on a terminal."""
    inherited: tuple[int, ...] = ()
    """At most two descriptors that the command gets besides its streams, as `FIRST_INHERITED` and the next. They stay the caller's."""
    confinement: Confinement | None = None
    """What the kernel lets the command see and touch; None for everything that the server may."""

    @property
    def spaces(self) -> Spaces:
        """The namespaces of the keeper."""
        return Spaces.NONE if self.confinement is None else self.confinement.spaces

    def plan(self, token: str, confinement: Confinement | None = None) -> Plan:
        """The form in which a keeper takes it, with what the keeper has to do of its confinement. Raises `SpawnFailed` for what no kernel could start."""
        if (self.command is None) == (self.argv is None):
            raise SpawnFailed("a process is started from either a command or an argv: give exactly one of them")
        argv = (_shell(), "-c", self.command) if self.command is not None else self.argv
        if not argv or not argv[0]:
            raise SpawnFailed("argv is empty: its first item must name the program")
        if not os.path.isabs(self.cwd):
            raise SpawnFailed(f"cwd must be an absolute path, got {self.cwd!r}")
        for name, value in self.env.items():
            if not name or "=" in name or "\0" in name or "\0" in value:
                raise SpawnFailed(f"environment variable {name!r} cannot be passed on: '=' in its name or a NUL byte")
        for what, text in (("cwd", self.cwd), *(("the command", argument) for argument in argv)):
            if "\0" in text:
                raise SpawnFailed(f"{what} contains a NUL byte, which cannot be passed to a program")
        return Plan(
            argv=[os.fsencode(argument) for argument in argv],
            cwd=os.fsencode(self.cwd),
            env={os.fsencode(name): os.fsencode(value) for name, value in self.env.items()}
            | {TOKEN_VARIABLE.encode(): token.encode()},
            streams=self._streams(),
            confinement=confinement,
        )

    def _streams(self) -> Streams:
        if self.stdin is Stdin.PTY:
            return Streams.TERMINAL
        streams = Streams.STDIN if self.stdin is Stdin.PIPE else Streams.OUTPUT_ONLY
        return streams if self.merge_stderr else streams | Streams.STDERR


def _shell() -> str:
    return next((shell for shell in SHELLS if os.access(shell, os.X_OK)), SHELLS[-1])


class ExitStatus(msgspec.Struct, frozen=True):
    """How the command itself ended, as the kernel told its keeper; its descendants may still run.

    `lost` says that the processes around it died and took it along: then `code` and `signal` are what is known.
    """

    code: int | None = None
    signal: int | None = None
    lost: bool = False

    @property
    def returncode(self) -> int | None:
        """One number as `subprocess` has it: the code, minus the signal, or None when neither is known."""
        return -self.signal if self.signal is not None else self.code

    def __str__(self) -> str:
        if self.signal is not None:
            text = f"killed by {_signal_name(self.signal)}"
        elif self.code is not None:
            text = f"exited with code {self.code}"
        else:
            text = "ended in an unknown way"
        return f"lost ({text})" if self.lost else text

    @classmethod
    def from_frame(cls, code: int, signum: int, *, lost: bool) -> Self:
        """Read the two numbers of an EXITED frame."""
        return cls(code=None, signal=signum, lost=lost) if signum else cls(code=code, signal=None, lost=lost)


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


class KillHow(enum.StrEnum):
    """What it took to end a job."""

    ALREADY_EXITED = "already-exited"
    SIGTERM = "SIGTERM"
    SIGKILL = "SIGKILL"
    LOST = "lost"
    """Its keeper was dead already; warden or server ended what was left."""


class KillReport(msgspec.Struct, frozen=True):
    """The receipt of a kill. With `survivors` above 0 the job is not empty, and its keeper goes on trying."""

    how: KillHow
    milliseconds: float
    survivors: int = 0
