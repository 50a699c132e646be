"""Questions about syntax nodes that need no evaluation."""

from __future__ import annotations

from collections.abc import Iterator

from .syntax import (
    Branches,
    Case,
    Condition,
    ForEach,
    Function,
    Group,
    Item,
    Literal,
    Loop,
    Node,
    Pipeline,
    Simple,
    Word,
)


def static_text(word: Word) -> str | None:
    """Return the text of a word without expansions; None if it has some."""
    pieces: list[str] = []
    for part in word.parts:
        if not isinstance(part, Literal):
            return None
        pieces.append(part.text)
    return "".join(pieces)


def literal_name(node: Simple) -> str:
    """Return the first word if it is one plain literal, else an empty text."""
    if not node.words:
        return ""
    parts = node.words[0].parts
    return parts[0].text if len(parts) == 1 and isinstance(parts[0], Literal) else ""


def leaves(node: Node, *, in_function: bool) -> bool:
    """Return whether a command certainly ends the script, or the function it is in."""
    if isinstance(node, Group):
        if node.subshell or not node.body:
            return False
        certain = len(node.body) == 1 or node.body[-2].operator not in ("&&", "||")
        return certain and node.body[-1].operator != "&" and leaves(node.body[-1].node, in_function=in_function)
    return isinstance(node, Simple) and literal_name(node) in (("exit", "return") if in_function else ("exit",))


def inner_scripts(node: Node) -> list[list[Item]]:
    """Return the scripts inside a compound command, in reading order."""
    if isinstance(node, Group | ForEach):
        return [node.body]
    if isinstance(node, Loop):
        return [node.condition, node.body]
    if isinstance(node, Branches):
        return node.scripts
    if isinstance(node, Case):
        return node.bodies
    if isinstance(node, Pipeline):
        return [[Item(command, "") for command in node.commands]]
    return []


def started_beside(node: Node, *, beside: bool) -> Iterator[str]:
    """Yield the names of commands that a function body starts in a pipe or in the background, so that they run in parallel with it."""
    if isinstance(node, Simple):
        parts = node.words[0].parts if node.words else []
        if beside and parts:
            yield "".join(part.text for part in parts if isinstance(part, Literal))
    elif isinstance(node, Pipeline):
        for command in node.commands:
            yield from started_beside(command, beside=beside or len(node.commands) > 1)
    elif not isinstance(node, Function | Condition):
        for script in inner_scripts(node):
            for item in script:
                yield from started_beside(item.node, beside=beside or item.operator == "&")
