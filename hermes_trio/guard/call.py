"""One command as its rule sees it: resolved words, the text it would read, and where to report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from .marks import shown
from .verdict import Category

if TYPE_CHECKING:
    from .shell import Shell

MAX_EXCERPT: Final = 160


class Call(msgspec.Struct):
    """One command about to run: its name without folder, its arguments, and the text it would read."""

    shell: Shell
    name: str
    arguments: list[str]
    """The arguments without origin marks."""
    raw: list[str]
    """The arguments with marks where text was downloaded or decoded."""
    stdin: str | None
    path: str

    @property
    def excerpt(self) -> str:
        """Return the command as text for a person."""
        return excerpt_of([self.path, *self.arguments])

    def flag(self, category: Category, description: str) -> None:
        """Record a finding about this command."""
        self.shell.flag(category, description, self.excerpt)


def excerpt_of(argv: list[str]) -> str:
    """Return the words of a command as text for a person, shortened. Takes constant time for any length of the command."""
    return shown(" ".join(argv[:MAX_EXCERPT])[: 4 * MAX_EXCERPT])[:MAX_EXCERPT]


def base_name(path: str) -> str:
    """Return the program that a path names, without folder and in lower case."""
    name = path.rstrip("/").rpartition("/")[2] if "/" in path else path
    name = name.lower()
    return name[:-4] if name.endswith(".exe") else name


def quoted(text: str) -> str:
    """Return the text as one literal shell word."""
    return "'" + text.replace("'", "'\\''") + "'"
