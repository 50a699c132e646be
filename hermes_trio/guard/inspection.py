"""Inspects one command text: pure, synchronous, without side effects, and total (it never raises).

`inspect_command` may be called from any thread. Time is linear in the text but for bounded fan-out; what cannot be
read or exceeds a limit is blocked, because what was not inspected must not run.
"""

from __future__ import annotations

import msgspec

from .call import MAX_EXCERPT
from .marks import shown
from .reader import Reader, TooDeep, Unreadable
from .second_opinion import second_opinion
from .shell import Shell
from .syntax import Item, Literal, Simple
from .verdict import Block, BlockCategory, Blocked, Category, Finding, Verdict
from .views import literal, over_limits, views

_MAX_DISAGREEMENTS = 64


def inspect_command(command: str, *, home: str, cwd: str = "", sudo_password_configured: bool = False) -> Verdict:
    """Say whether a command can never run, and what a person should be asked about before it does.

    `home` is the home directory of the user it runs as, `cwd` the directory it starts in (empty when unknown).
    """
    limit = over_limits(command)
    if limit is not None:
        return Verdict(command, blocked=limit)
    walk = Shell(home=home, cwd=cwd, sudo_password_configured=sudo_password_configured)
    blocked: Block | None = None
    words: tuple[str, ...] | None = None
    try:
        for number, text in enumerate(views(command)):
            reader = Reader(text)
            items = reader.read()
            if number == 0:
                words = _plain_words(items)
            walk.script(items, None)
            _compare(walk, reader, text, words)
    except (TooDeep, RecursionError):
        blocked = Block(BlockCategory.OVER_LIMIT, "the command is nested too deep to inspect; split it up")
    except Unreadable as problem:
        reason = f"the command cannot be read as shell text: {problem}; correct the quoting or split it up"
        blocked = Block(BlockCategory.UNPARSEABLE, reason)
    except Blocked as refusal:
        blocked = refusal.block
    findings = tuple(_located(finding, command) for finding in walk.findings.values())
    return Verdict(command, blocked, tuple(dict.fromkeys(findings)), tuple(walk.commands), words)


def _located(finding: Finding, command: str) -> Finding:
    """A finding about text that is wholly unknown shows the command it came from."""
    if finding.excerpt.strip("… \n"):
        return finding
    return msgspec.structs.replace(finding, excerpt=shown(literal(command))[:MAX_EXCERPT])


def simple_command_words(command: str) -> list[str] | None:
    """The words of a command without any shell operator, expansion or redirection; None for everything else."""
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


def _compare(walk: Shell, reader: Reader, text: str, words: tuple[str, ...] | None) -> None:
    """Inspect what only the second reader takes for a command, and say so when it cannot read the text."""
    if words is not None and "\n" not in text and not any(character in text for character in "'\"\\$`{#"):
        return
    opinion = second_opinion(text)
    if not opinion.readable:
        excerpt = shown(text)[:MAX_EXCERPT]
        walk.findings.setdefault(
            (Category.AMBIGUOUS_SYNTAX, excerpt),
            Finding(Category.AMBIGUOUS_SYNTAX, "two parsers read this command differently", excerpt),
        )
        return
    missed = [span for span in opinion.spans if span[0] not in reader.starts]
    for start, end in missed[:_MAX_DISAGREEMENTS]:
        try:
            items = Reader(text[start:end]).read()
        except Unreadable:
            continue
        walk.script(items, None)
