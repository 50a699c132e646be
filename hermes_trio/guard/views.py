"""The readings of one command text that must all be harmless, and the limits on its size.

A terminal may show less than a shell runs, and a later layer may fold what a shell keeps apart. So text with
escape sequences, look-alike or invisible characters is inspected as it stands *and* as it looks: normalising alone
would turn a full-width quote into a real one and hide what follows it.
"""

from __future__ import annotations

import re
import unicodedata

from .marks import PRIVATE
from .reader import Reader, Unreadable
from .verdict import MAX_CHARACTERS, MAX_SEPARATORS, MAX_UNBROKEN, Block, BlockCategory

_ANSI = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_]|[ -/][0-~])|\x9b[0-?]*[ -/]*[@-~]"
)
_INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f"
    "\ufeff\uffa0\U000e0000-\U000e0fff\x01-\x08\x0e-\x1a\x7f]"
)
_UNUSABLE = re.compile(PRIVATE + "|[\ud800-\udfff]")
_SEPARATORS = re.compile(r"[\s;&|()<>]+")
_DASHES = str.maketrans(
    {"\u2010": "-", "\u2011": "-", "\u2012": "-", "\u2013": "-", "\u2212": "-", "\u2215": "/", "\u2044": "/"}
)


def over_limits(command: str) -> Block | None:
    """Return a block if the text is too large to be inspected, else None."""
    if len(command) > MAX_CHARACTERS:
        return _too_large(f"longer than {MAX_CHARACTERS} characters ({len(command)})")
    if len(command) <= MAX_UNBROKEN:
        return None
    separators = 0
    position = 0
    for match in _SEPARATORS.finditer(command):
        if match.start() - position > MAX_UNBROKEN:
            return _too_large(f"{MAX_UNBROKEN} characters without a separator")
        position = match.end()
        separators += 1
    if len(command) - position > MAX_UNBROKEN:
        return _too_large(f"{MAX_UNBROKEN} characters without a separator")
    if separators > MAX_SEPARATORS:
        return _too_large(f"more than {MAX_SEPARATORS} separators")
    return None


def _too_large(what: str) -> Block:
    reason = f"the command is too large to inspect: {what}; write it to a file and run the file"
    return Block(BlockCategory.OVER_LIMIT, reason)


def normalise(command: str) -> str:
    """Return the text as a person would see it: no escape sequences, no invisible characters, compatibility forms folded."""
    text = _UNUSABLE.sub("\ufffd", command.replace("\0", ""))
    text = _ANSI.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    if not text.isascii():
        text = unicodedata.normalize("NFKC", _INVISIBLE.sub("", text)).translate(_DASHES)
        text = _UNUSABLE.sub("\ufffd", text)
    return _INVISIBLE.sub("", text)


def literal(command: str) -> str:
    """Return the text as the shell gets it, without the characters that no shell keeps."""
    if command.isascii() and "\0" not in command:
        return command
    return _UNUSABLE.sub("\ufffd", command.replace("\0", ""))


def views(command: str) -> tuple[str, ...]:
    """Return every reading to inspect, the literal one first."""
    raw = literal(command)
    if raw.isascii() and raw.isprintable():
        return (raw,)
    return tuple(dict.fromkeys((raw, normalise(raw))))


def strip_comments(command: str) -> str:
    """Return the command without its comments. Text that cannot be read is returned unchanged."""
    if "#" not in command:
        return command
    reader = Reader(command)
    try:
        reader.read()
    except (Unreadable, RecursionError):
        return command
    pieces: list[str] = []
    position = 0
    for start, end in sorted(reader.comments):
        pieces.append(command[position:start].rstrip(" \t"))
        position = end
    pieces.append(command[position:])
    return "".join(pieces)
