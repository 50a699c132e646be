"""A second reading by tree-sitter-bash: commands that it sees and our reader does not are inspected as well.

One parser's misreading is a way past a guard; two independent ones must agree before a command counts as read. The
grammar is loaded once; each thread has its own parser, because a tree-sitter parser must not be shared.
"""

from __future__ import annotations

import re
import threading

import msgspec
import tree_sitter_bash
from tree_sitter import Language, Parser, Query, QueryCursor

_LANGUAGE = Language(tree_sitter_bash.language())
_COMMANDS = Query(_LANGUAGE, "(command) @command")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")


class _Parsers(threading.local):
    def __init__(self) -> None:
        self.parser = Parser(_LANGUAGE)


_parsers = _Parsers()


class SecondOpinion(msgspec.Struct, frozen=True):
    """Where tree-sitter sees commands, and whether it could read the text at all."""

    readable: bool
    spans: tuple[tuple[int, int], ...]


def second_opinion(text: str) -> SecondOpinion:
    """Read the text with tree-sitter; offsets are those of the text."""
    # One byte a character keeps byte offsets equal to ours; no such character is special to a shell.
    data = (text if text.isascii() else _NOT_ASCII.sub("x", text)).encode("ascii")
    tree = _parsers.parser.parse(data)
    root = tree.root_node
    if root.has_error:
        return SecondOpinion(readable=False, spans=())
    captures = QueryCursor(_COMMANDS).captures(root)
    # Captures come in no fixed order.
    spans = tuple(sorted((node.start_byte, node.end_byte) for node in captures.get("command", ())))
    return SecondOpinion(readable=True, spans=spans)
