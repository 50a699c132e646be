"""The values that callers exchange with the process layer: what to start, and how it ended."""

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
"""The shells for a `command`; the first that exists is used."""


class Stdin(enum.Enum):
    """The standard input of a command."""

    NULL = "null"
    """The null device: every read returns end of file."""
    PIPE = "pipe"
    """A pipe that the owner writes to."""
    PTY = "pty"
    """A pseudo-terminal, which is also the command's output."""


class ProcessSpec(RedactedStruct, frozen=True, kw_only=True):
    """A command to start: either a `command` for the shell or an `argv`, in `cwd`, with exactly this environment."""

    hidden: ClassVar[tuple[str, ...]] = ("env",)
    command: str | None = None
    argv: tuple[str, ...] | None = None
    cwd: str
    env: Mapping[str, str]
    """The whole environment; nothing is added from the server's. It appears in no repr, error or argument list."""
    stdin: Stdin = Stdin.NULL
    rows: int = 30
    cols: int = 120
    """The size of the terminal, with `Stdin.PTY`."""
    merge_stderr: bool = True
    """Whether standard error goes to standard output; always the case on a terminal."""
    inherited: tuple[int, ...] = ()
    """At most two more descriptors for the command, as `FIRST_INHERITED` and the next number. The caller keeps and closes its own."""
    confinement: Confinement | None = None
    """The confinement of the command; None for all rights of the server."""

    @property
    def spaces(self) -> Spaces:
        """Return the namespaces of the keeper."""
        return Spaces.NONE if self.confinement is None else self.confinement.spaces

    def plan(self, token: str, confinement: Confinement | None = None) -> Plan:
        """Return the keeper's `Plan`, with its part of the confinement. Raises `SpawnFailed` for a command that no kernel could start."""
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
    """How the command itself ended, as the kernel reported to its keeper; its descendants may still run.

    `lost` says that it ended because its keeper or warden died; `code` and `signal` are then as far as known.
    """

    code: int | None = None
    signal: int | None = None
    lost: bool = False

    @property
    def returncode(self) -> int | None:
        """Return one number as `subprocess` does: the code, or minus the signal; None if neither is known."""
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
        """Return the status in the two numbers of an EXITED frame."""
        return cls(code=None, signal=signum, lost=lost) if signum else cls(code=code, signal=None, lost=lost)


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


class KillHow(enum.StrEnum):
    """The means that ended a job."""

    ALREADY_EXITED = "already-exited"
    SIGTERM = "SIGTERM"
    SIGKILL = "SIGKILL"
    LOST = "lost"
    """Its keeper was already dead; the warden or the server ended the remaining processes."""


class KillReport(msgspec.Struct, frozen=True):
    """The receipt of a kill. With `survivors` above 0 the job is not empty, and its keeper continues to send SIGKILL."""

    how: KillHow
    milliseconds: float
    survivors: int = 0
