"""Inspects one command text: pure, synchronous, without side effects, and total (it never raises).

`inspect_command` may be called from any thread. Time is linear in the text but for bounded fan-out; what cannot be
read or exceeds a limit is blocked, because what was not inspected must not run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import msgspec

from .call import MAX_EXCERPT
from .marks import HOLE, shown
from .reader import Reader, TooDeep, Unreadable
from .shell import Shell
from .syntax import Item, Literal, Simple
from .verdict import Block, BlockCategory, Blocked, Finding, Verdict
from .views import literal, over_limits, views

_ALIAS = re.compile(r"^alias (?:-- )?([^\s=]+)=(.*)$", re.MULTILINE)
_FUNCTION = re.compile(r"^(\S+) \(\) *\n\{ *$", re.MULTILINE)
_FUNCTION_END = re.compile(r"^\}$", re.MULTILINE)


class Remembered(msgspec.Struct, frozen=True):
    """The state of a session's shell before a command: definitions as `declare -f` and `alias -p` print them, and exported variables."""

    definitions: str = ""
    variables: Mapping[str, str] = {}

    @property
    def size(self) -> int:
        """Return its number of characters."""
        return len(self.definitions) + sum(len(name) + len(value) for name, value in self.variables.items())


def inspect_command(
    command: str,
    *,
    home: str,
    cwd: str = "",
    gateway_home: str = "",
    remembered: Remembered | None = None,
    confined: bool = False,
    sudo_password_configured: bool = False,
) -> Verdict:
    """Return whether a command is blocked, and what a person has to approve before it runs. Never raises.

    `home` is the home directory of the user it runs as, `cwd` the directory it starts in (empty when unknown), `gateway_home` the gateway's own folder.
    If the kernel has `confined` the command, harmless inline code needs no approval.
    """
    limit = over_limits(command)
    if limit is not None:
        return Verdict(command, blocked=limit)
    walk = Shell(
        home=home,
        cwd=cwd,
        gateway_home=gateway_home,
        confined=confined,
        sudo_password_configured=sudo_password_configured,
    )
    if remembered is not None:
        _recall(walk, remembered)
    blocked: Block | None = None
    words: tuple[str, ...] | None = None
    try:
        for number, text in enumerate(views(command)):
            items = Reader(text).read()
            if number == 0:
                words = _plain_words(items)
            walk.script(items, None)
    except (TooDeep, RecursionError):
        blocked = Block(
            BlockCategory.OVER_LIMIT, "the command is nested too deep, or read too often, to inspect; split it up"
        )
    except Unreadable as problem:
        reason = f"the command cannot be read as shell text: {problem}; correct the quoting or split it up"
        blocked = Block(BlockCategory.UNPARSEABLE, reason)
    except Blocked as refusal:
        blocked = refusal.block
    findings = tuple(_located(finding, command) for finding in walk.findings.values())
    return Verdict(command, blocked, tuple(dict.fromkeys(findings)), tuple(walk.commands), words)


def _recall(walk: Shell, remembered: Remembered) -> None:
    """Add the state of earlier commands to the walk. A definition is read when its name is used."""
    walk.state.variables.update({name: [value] for name, value in remembered.variables.items()})
    text = literal(remembered.definitions)
    walk.state.remembered.update(_functions(text))
    for match in _ALIAS.finditer(text):
        words = simple_command_words(": " + match.group(2))
        walk.state.remembered[match.group(1)] = "alias " + (HOLE if words is None else " ".join(words[1:]))


def _functions(text: str) -> Iterator[tuple[str, str]]:
    """Return the names and definitions of the functions in the output of `declare -f`, in one pass."""
    position = 0
    while (begin := _FUNCTION.search(text, position)) and (end := _FUNCTION_END.search(text, begin.end())):
        position = end.end()
        yield begin.group(1), text[begin.start() : position]


def _located(finding: Finding, command: str) -> Finding:
    """Replace the excerpt of a finding about wholly unknown text by the command that it came from."""
    if finding.excerpt.strip("… \n"):
        return finding
    return msgspec.structs.replace(finding, excerpt=shown(literal(command))[:MAX_EXCERPT])


def simple_command_words(command: str) -> list[str] | None:
    """Return the words of a command without any shell operator, expansion or redirection; None for every other text."""
    if over_limits(command) is not None:
        return None
    try:
        words = _plain_words(Reader(literal(command)).read())
    except (Unreadable, RecursionError):
        return None
    return None if words is None else list(words)


def _plain_words(items: list[Item]) -> tuple[str, ...] | None:
    if len(items) != 1 or items[0].operator not in ("", "\n"):
        return None
    node = items[0].node
    if not isinstance(node, Simple) or node.assignments or node.redirects or not node.words:
        return None
    words: list[str] = []
    for word in node.words:
        pieces: list[str] = []
        for part in word.parts:
            if not isinstance(part, Literal):
                return None
            pieces.append(part.text)
        words.append("".join(pieces))
    return tuple(words)
