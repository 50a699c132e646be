"""What a session's shell remembers between two commands: its directory, its variables, its functions and aliases.

`ShellStates` owns the state of every session, keyed by session id and by nothing else, so nothing crosses over (H21). Each command is a new shell that is given
the state, and writes what became of it, through descriptors that it inherits and that no other session can reach; the change, not the whole, is then
merged, so commands that run side by side do not undo each other.

State is forgotten when its session is over. It is also forgotten when it was idle for long or there are too many sessions, but then never
while a command holds a lease on it (H29).
"""

from __future__ import annotations

import fcntl
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, final

import attrs
import msgspec

from hermes_trio import guard
from hermes_trio.runtime.context import ENVIRONMENT_NAMES, SessionContext
from hermes_trio.tools.warden.daemon.wire import FIRST_INHERITED, TOKEN_VARIABLE
from hermes_trio.tools.warden.errors import SpawnFailed

__all__ = ["Lease", "ShellState", "ShellStates", "base_environment"]

BASHES: Final = ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash")

MAX_SESSIONS: Final = 4096
IDLE_SECONDS: Final = 24 * 3600.0

MAX_STATE: Final = 256 * 1024
"""Bytes of variables, and of definitions, that a session may leave behind; beyond it a command changes nothing."""

PASSED_ON: Final = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LANGUAGE",
    "LC_*",
    "TZ",
    "TMPDIR",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
)
"""What of the server's environment a command gets; everything else, the server's keys above all, stays with the server."""

_OURS: Final = frozenset({*ENVIRONMENT_NAMES, TOKEN_VARIABLE, "PWD", "SHLVL", "_", "BASH_EXECUTION_STRING"})
"""Never remembered: identity comes from the turn, the rest belongs to each shell."""

_END: Final = b"#"
"""The record after the variables, and the last one; without them the shell was cut off while it wrote, and nothing is taken from it."""

# `trap` is a function so that a command's own EXIT handler runs after ours instead of replacing it. Everything is kept in the main shell only
# (BASHPID is $$), also after `exit`, after `set -e` ended the shell, with `set -u` and with noclobber.
_KEEPING: Final = r"""
__hermes_state=$1 __hermes_text=$3
shopt -s expand_aliases
[[ -n $2 ]] && { . "/proc/self/fd/$2" 2>/dev/null; eval "exec $2<&-"; }
set --
__hermes_status() { return "$1"; }
__hermes_keep() {
  [[ $BASHPID == "$$" ]] || return 0
  local IFS=$'\n' __hermes_name
  {
    builtin printf '%s\0' "$(builtin pwd)"
    for __hermes_name in $(builtin compgen -e); do builtin printf '%s=%s\0' "$__hermes_name" "${!__hermes_name-}"; done
    builtin printf '#\0'
    ( builtin unset -f trap __hermes_keep __hermes_status; builtin declare -f; builtin declare -Fx; builtin alias -p )
    builtin printf '\0#\0'
  } >&"$__hermes_state"
} 2>/dev/null
__hermes_first='__hermes_code=$?; set +eu; __hermes_keep; __hermes_status "$__hermes_code"'
builtin trap "$__hermes_first" EXIT
trap() {
  builtin trap "$@"
  local __hermes_result=$? __hermes_now
  if [[ $BASHPID == "$$" ]]; then
    __hermes_now=$(builtin trap -p EXIT)
    if [[ $__hermes_now != *__hermes_keep* ]]; then
      eval "set -- $__hermes_now"
      builtin trap "$__hermes_first"$'\n'"${3-}" EXIT
    fi
  fi
  return "$__hermes_result"
}
eval "$__hermes_text"
"""

_USING: Final = r"""
__hermes_text=$2
shopt -s expand_aliases
[[ -n $1 ]] && { . "/proc/self/fd/$1" 2>/dev/null; eval "exec $1<&-"; }
set --
eval "$__hermes_text"
"""


def base_environment(server: Mapping[str, str], passed_on: Sequence[str] = ()) -> dict[str, str]:
    """The environment that every command starts from: an allow-list of the server's, and what `passed_on` (names or globs) adds to it."""
    allowed = (*PASSED_ON, *passed_on)
    found = {name: value for name, value in server.items() if any(fnmatchcase(name, glob) for glob in allowed)}
    found.setdefault("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    found.setdefault("HOME", str(Path("~").expanduser()))
    found.setdefault("LANG", "C.UTF-8")
    for name in _OURS:
        found.pop(name, None)
    return found


class ShellState(msgspec.Struct, eq=False):
    """One session's state. `changes` are the variables that differ from the base environment; None for one that was removed."""

    cwd: str
    root: str = ""
    """The folder that the session was given, where a workspace ends."""
    changes: dict[str, str | None] = msgspec.field(default_factory=dict[str, "str | None"])
    definitions: bytes = b""
    leases: int = 0
    used_at: float = 0.0


@final
@attrs.define(eq=False)
class Lease:
    """A session's state in the hands of one command: what it starts with, and where it leaves what became of it."""

    _shells: ShellStates
    _shell: ShellState
    cwd: str
    environment: dict[str, str]
    _definitions: bytes
    _given: int | None = None
    """An unnamed file with the definitions."""
    _left: int | None = None
    """An unnamed file, of fixed size, that the shell writes its state into."""

    @property
    def root(self) -> str:
        """The folder that the session was given."""
        return self._shell.root or self.cwd

    @property
    def inherited(self) -> tuple[int, ...]:
        """The descriptors that the command has to get, for `ProcessSpec.inherited`."""
        return tuple(one for one in (self._given, self._left) if one is not None)

    def argv(self, command: str, *, keep: bool) -> tuple[str, ...]:
        """How to run `command` with this state. With `keep` the shell writes down what it changes, for `take_back`. Raises `SpawnFailed`."""
        bash = self._shells.bash
        if bash is None:
            return ("/bin/sh", "-c", command)
        options = ("-l",) if self._shells.login else ("--noprofile", "--norc")
        try:
            if self._definitions:
                self._given = _file_with(self._definitions)
            if keep:
                self._left = _file_of_size(2 * MAX_STATE)
        except OSError as error:
            raise SpawnFailed(f"no descriptors for the state of the session's shell: {error.strerror}") from error
        before = str(FIRST_INHERITED) if self._given is not None else ""
        if keep:
            state = str(FIRST_INHERITED + (self._given is not None))
            return (bash, *options, "-c", _KEEPING, "bash", state, before, command)
        return (bash, *options, "-c", _USING, "bash", before, command)

    def take_back(self) -> None:
        """Merge what the command changed into the session. Nothing is changed if it could not, or was not asked to, write it down."""
        if self._left is None:
            return
        # The shell's descriptor and ours share their position: that is how much it wrote.
        written = min(os.lseek(self._left, 0, os.SEEK_CUR), 2 * MAX_STATE)
        records = os.pread(self._left, written, 0).split(b"\0")
        if records[-2:] != [_END, b""] or _END not in records[:-2]:
            return
        ends = records.index(_END)
        definitions = records[ends + 1]
        if ends != len(records) - 4 or max(len(definitions), sum(map(len, records[:ends]))) > MAX_STATE:
            return
        texts = [record.decode("utf-8", "surrogateescape") for record in records[:ends]]
        shell = self._shell
        if texts[0] != self.cwd and texts[0].startswith("/"):
            shell.cwd = texts[0]
        self._merge_variables(dict(record.split("=", 1) for record in texts[1:] if "=" in record))
        if definitions != self._definitions:
            shell.definitions = definitions

    def _merge_variables(self, after: Mapping[str, str]) -> None:
        base, changes = self._shells.base, self._shell.changes
        for name in (self.environment.keys() | after.keys()) - _OURS:
            value = after.get(name)
            if value == self.environment.get(name):
                continue
            if value == base.get(name):
                changes.pop(name, None)
            else:
                changes[name] = value

    def clean_up(self) -> None:
        """Close the files. Harmless without any."""
        for descriptor in self.inherited:
            os.close(descriptor)
        self._given = self._left = None


def _file_with(data: bytes) -> int:
    descriptor = os.memfd_create("shell-definitions", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.pwrite(descriptor, data, 0)
    fcntl.fcntl(
        descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    )
    return descriptor


def _file_of_size(size: int) -> int:
    """An unnamed file in memory that can be written but does not grow, so that a command cannot fill the memory through it."""
    descriptor = os.memfd_create("shell-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


@final
class ShellStates:
    """The shells of all sessions. `usable` says whether a directory may be a session's."""

    def __init__(
        self,
        base: Mapping[str, str],
        cwd: str,
        clock: Callable[[], float],
        *,
        login: bool = False,
        bash: str | None = None,
        usable: Callable[[str], bool] = os.path.isdir,
    ) -> None:
        self._usable = usable
        self._clock = clock
        self._cwd = cwd
        self._sessions: OrderedDict[str, ShellState] = OrderedDict()
        self.base: dict[str, str] = dict(base)
        self.login = login
        self.bash: str | None = bash or next((path for path in BASHES if os.access(path, os.X_OK)), None)

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def home(self) -> str:
        """The home directory of every command."""
        return self.base["HOME"]

    def cwd_of(self, context: SessionContext) -> str:
        """The directory in which the session's next command would start."""
        return self._of(context).cwd

    def remembered(self, context: SessionContext) -> guard.Remembered:
        """What the session's earlier commands defined and exported, as the guard reads it."""
        shell = self._of(context)
        return guard.Remembered(
            definitions=shell.definitions.decode("utf-8", "replace"),
            variables={name: value for name, value in shell.changes.items() if value is not None},
        )

    @contextmanager
    def lease(self, context: SessionContext, *, cwd: str = "") -> Iterator[Lease]:
        """The session's state for one command; `cwd` overrides its directory. The state lives at least as long as the lease."""
        shell = self._of(context)
        environment = dict(self.base)
        for name, value in shell.changes.items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value
        lease = Lease(self, shell, cwd or self._standing(shell), environment, shell.definitions)
        shell.leases += 1
        try:
            yield lease
        finally:
            shell.leases -= 1
            shell.used_at = self._clock()
            lease.clean_up()

    def begin(self, context: SessionContext, folder: str) -> None:
        """Give a session its folder before its first command, which then starts there. One that has begun keeps the folder that it has."""
        known = context.session_id in self._sessions
        shell = self._of(context)
        if not shell.root:
            shell.root = folder
            if not known and (folder != self._cwd and shell.cwd == self._cwd):
                shell.cwd = folder

    def inherit(self, parent: SessionContext, child: SessionContext) -> None:
        """A child starts in its parent's directory, inside the same folder; where it goes from there is its own affair."""
        above, below = self._of(parent), self._of(child)
        below.cwd, below.root = above.cwd, above.root

    def forget(self, session_id: str) -> None:
        """The session is over: whatever comes under its id afterwards starts afresh. Forgetting what is not known is harmless.

        A command that still runs keeps what it was given (its lease has it), and what it leaves behind goes with the lease.
        """
        self._sessions.pop(session_id, None)

    def _of(self, context: SessionContext) -> ShellState:
        shell = self._sessions.get(context.session_id)
        if shell is None:
            shell = ShellState(
                cwd=context.cwd if os.path.isabs(context.cwd) and self._usable(context.cwd) else self._cwd
            )
            self._sessions[context.session_id] = shell
        shell.used_at = self._clock()
        self._sessions.move_to_end(context.session_id)
        self._prune()
        return shell

    def _standing(self, shell: ShellState) -> str:
        """The session's directory; the default again if it has been removed, or no command could ever run again."""
        return shell.cwd if self._usable(shell.cwd) else (shell.root or self._cwd)

    def _prune(self) -> None:
        """Drop what is too old or too much, the longest unused first."""
        now = self._clock()
        oldest = next(iter(self._sessions.values()))
        if len(self._sessions) <= MAX_SESSIONS and now - oldest.used_at <= IDLE_SECONDS:
            return
        newest = next(reversed(self._sessions))
        for session_id, shell in list(self._sessions.items()):
            idle = now - shell.used_at > IDLE_SECONDS
            if not idle and len(self._sessions) <= MAX_SESSIONS:
                return
            if not shell.leases and session_id != newest:
                del self._sessions[session_id]
