"""The state of a session's shell between two commands: its directory, variables, functions and aliases.

`ShellStates` holds the state of every session by session id, so that nothing crosses between sessions (H21). Each command is a new shell that reads
the state, and writes its own at its end, through inherited descriptors that no other session can reach. Only the difference is merged, so that
concurrent commands do not undo each other.

The state is dropped when its session ends. It is also dropped after a long idle time or beyond a number of sessions, but never while a command holds
a lease on it (H29).
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

BASHES: Final = ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash")

MAX_SESSIONS: Final = 4096
IDLE_SECONDS: Final = 24 * 3600.0

MAX_STATE: Final = 256 * 1024
"""The maximum of bytes of variables, and of definitions, that a session may keep; a command that exceeds it changes nothing."""

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
"""The variables of the server's environment that a command gets. All others, above all keys, are not passed."""

_OURS: Final = frozenset({*ENVIRONMENT_NAMES, TOKEN_VARIABLE, "PWD", "SHLVL", "_", "BASH_EXECUTION_STRING"})
"""Never kept: identity comes from the turn, the rest belongs to each shell."""

_END: Final = b"#"
"""The record after the variables, and the last one. Without them the shell was killed while it wrote, and nothing is merged."""

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
    """Return the environment that every command starts from: an allow-list of the server's, and the names or globs in `passed_on`."""
    allowed = (*PASSED_ON, *passed_on)
    found = {name: value for name, value in server.items() if any(fnmatchcase(name, glob) for glob in allowed)}
    found.setdefault("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    found.setdefault("HOME", str(Path("~").expanduser()))
    found.setdefault("LANG", "C.UTF-8")
    for name in _OURS:
        found.pop(name, None)
    return found


class ShellState(msgspec.Struct, eq=False):
    """One session's state. `changes` are the variables that differ from the base environment; None for a removed one."""

    cwd: str
    root: str = ""
    """The directory of the session's workspace."""
    changes: dict[str, str | None] = msgspec.field(default_factory=dict[str, "str | None"])
    definitions: bytes = b""
    leases: int = 0
    used_at: float = 0.0


@final
@attrs.define(eq=False)
class Lease:
    """One command's use of a session's state: what it starts with, and where it writes its own."""

    _shells: ShellStates
    _shell: ShellState
    cwd: str
    environment: dict[str, str]
    _definitions: bytes
    _given: int | None = None
    """An unnamed file with the definitions."""
    _left: int | None = None
    """An unnamed file of fixed size that the shell writes its state into."""

    @property
    def root(self) -> str:
        """Return the directory of the session's workspace."""
        return self._shell.root or self.cwd

    @property
    def inherited(self) -> tuple[int, ...]:
        """Return the descriptors that the command inherits, for `ProcessSpec.inherited`."""
        return tuple(one for one in (self._given, self._left) if one is not None)

    def argv(self, command: str, *, keep: bool) -> tuple[str, ...]:
        """Return the arguments that run `command` with this state. With `keep` the shell writes its changes, for `take_back`. Raises `SpawnFailed`."""
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
        """Merge the command's changes into the session. Changes nothing if the shell did not write them completely."""
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
        """Close the files. Idempotent."""
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
    """Create an unnamed file in memory that does not grow, so that a command cannot fill the memory through it."""
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
        """Return the home directory of every command."""
        return self.base["HOME"]

    def cwd_of(self, context: SessionContext) -> str:
        """Return the directory in which the session's next command would start."""
        return self._of(context).cwd

    def remembered(self, context: SessionContext) -> guard.Remembered:
        """Return what the session's earlier commands defined and exported, for the guard."""
        shell = self._of(context)
        return guard.Remembered(
            definitions=shell.definitions.decode("utf-8", "replace"),
            variables={name: value for name, value in shell.changes.items() if value is not None},
        )

    @contextmanager
    def lease(self, context: SessionContext, *, cwd: str = "") -> Iterator[Lease]:
        """Return the session's state for one command; `cwd` overrides its directory. The state is kept at least as long as the lease."""
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
        """Set the directory of a session before its first command. A session that has begun keeps the one that it has."""
        known = context.session_id in self._sessions
        shell = self._of(context)
        if not shell.root:
            shell.root = folder
            if not known and (folder != self._cwd and shell.cwd == self._cwd):
                shell.cwd = folder

    def inherit(self, parent: SessionContext, child: SessionContext) -> None:
        """Let a child's session start in its parent's directory and workspace."""
        above, below = self._of(parent), self._of(child)
        below.cwd, below.root = above.cwd, above.root

    def forget(self, session_id: str) -> None:
        """Drop the state of a session that has ended. Idempotent.

        A command that still runs keeps its lease; its changes are dropped with it.
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
        """Return the session's directory, or the default one if it was removed, so that commands can still run."""
        return shell.cwd if self._usable(shell.cwd) else (shell.root or self._cwd)

    def _prune(self) -> None:
        """Drop states that are too old or too many, the least recently used first."""
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
