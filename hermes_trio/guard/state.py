"""The state of a command line so far: variables, functions, files that it wrote, and its directory.

Everything is a set of possibilities: an assignment that may not happen adds a value instead of replacing it, so
that no branch can hide what another branch prepared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import msgspec

from .marks import HOLE, SOLID
from .paths import fold
from .pruning import prune
from .syntax import Item, Node
from .verdict import BlockCategory, Blocked

MAX_CANDIDATES = 256
MAX_VALUE = 128_000
PROCESS_SELF = SOLID + "self"
"""The value of `$$`, `$PPID` and `$BASHPID`: a number of this process or its parent."""

Value = str | tuple[str, ...]

_NUMBERS = frozenset({"#", "?", "-", "RANDOM", "SECONDS", "UID", "EUID", "LINENO", "EPOCHSECONDS", "SHLVL", "COLUMNS"})
_PROCESSES = frozenset({"$", "PPID", "BASHPID"})
_DEFAULTS = {
    "IFS": " \t\n",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "SHELL": "/bin/bash",
    "BASH": "/bin/bash",
    "0": "bash",
}


class State(msgspec.Struct):
    """The possible states of a command line at one point."""

    home: str
    cwds: tuple[str, ...]
    variables: dict[str, list[Value]] = msgspec.field(default_factory=dict[str, list[Value]])
    positional: tuple[str, ...] | None = None
    functions: dict[str, list[Node]] = msgspec.field(default_factory=dict[str, list[Node]])
    aliases: dict[str, list[str]] = msgspec.field(default_factory=dict[str, list[str]])
    files: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Text that the command line itself put into a file."""
    sinks: dict[str, list[Item]] = msgspec.field(default_factory=dict[str, list[Item]])
    """Scripts that read what is written to a `>(…)` path."""
    remembered: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Definitions of earlier commands by name: the text of a function, or `alias ` and what it stands for."""
    references: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Names declared with -n: each stands for another variable."""
    detached: dict[str, frozenset[str]] = msgspec.field(default_factory=dict[str, frozenset[str]])
    """Which functions each function starts beside itself."""
    fixed: set[str] = msgspec.field(default_factory=set[str])
    """Read-only variables: a later assignment fails, so the old value stays possible."""
    visited: tuple[str, ...] = ()
    """Every directory that was ever the working one, for `cd -` and popd."""
    links: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Folders that lead elsewhere: symbolic links, bind mounts, container volumes."""
    programs: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Files that are copies of, or links to, a program that has a rule."""
    stdin: str | None = None
    """The default standard input of commands after `exec <`."""
    uncertain: int = 0
    errexit: bool = False

    @contextmanager
    def maybe(self) -> Iterator[None]:
        """Make assignments in the body of the `with` add possible values instead of replacing them."""
        self.uncertain += 1
        try:
            yield
        finally:
            self.uncertain -= 1

    def lookup(self, name: str) -> list[Value]:
        """Return all values that the variable may have, with `HOLE` for one from the environment."""
        if name in self.references:
            name = self.references[name]
        known = self.variables.get(name)
        if known is not None:
            return known
        if name in ("@", "*"):
            return [HOLE] if self.positional is None else [self.positional]
        if name.isdigit() and name != "0":
            if self.positional is None:
                return [HOLE]
            number = int(name[:6])
            return [self.positional[number - 1]] if number <= len(self.positional) else [""]
        if name == "HOME":
            return [self.home or HOLE]
        if name == "PWD":
            return [cwd or SOLID for cwd in self.cwds]
        if name == "OLDPWD":
            return [*self.visited, HOLE]
        if name in ("USER", "LOGNAME"):
            return [self.home.rpartition("/")[2] or SOLID]
        if name in _PROCESSES:
            return [PROCESS_SELF]
        if name in _NUMBERS:
            return [SOLID]
        return [_DEFAULTS.get(name, HOLE)]

    def assign(self, name: str, values: Iterable[Value], *, certain: bool = True) -> None:
        """Assign these possible values to the variable. Its old ones stay possible unless the assignment certainly happens."""
        fresh = list(dict.fromkeys(values))
        if not certain or self.uncertain or name in self.fixed:
            fresh = list(dict.fromkeys([*self.lookup(name), *fresh]))
        fresh = prune(fresh, MAX_CANDIDATES, _text, HOLE)
        for value in fresh:
            if (len(value) if isinstance(value, str) else sum(map(len, value))) > MAX_VALUE:
                raise Blocked(BlockCategory.OVER_LIMIT, f"variable {name} is too long to inspect")
        self.variables[name] = fresh

    def enter(self, directories: tuple[str, ...]) -> None:
        """Change to one of these directories, and remember the previous ones."""
        self.visited = tuple(dict.fromkeys((*self.visited, *self.cwds)))[-64:]
        self.cwds = directories

    def resolve(self, path: str) -> list[str]:
        """Return the path, and its targets through links that this command line made."""
        spellings = [path]
        for link, target in self.links.items():
            for cwd in self.cwds:
                full = "/" + "/".join(fold(path, cwd))
                if full == link or full.startswith(link.rstrip("/") + "/"):
                    spellings.append(target.rstrip("/") + full[len(link.rstrip("/")) :] or "/")
        return spellings

    def separators(self) -> str:
        """Return every character that may split an unquoted expansion."""
        if "IFS" not in self.variables:
            return " \t\n"
        return " \t\n" + "".join(value for value in self.variables["IFS"] if isinstance(value, str))


def _text(value: Value) -> str:
    return value if isinstance(value, str) else " ".join(value)
