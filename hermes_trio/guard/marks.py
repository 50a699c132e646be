"""Private characters that represent text which static reading cannot know.

Text of unknown content is carried inside ordinary strings as one private-use character, so that it survives
concatenation, splitting and re-parsing. Input text never contains them: `views` replaces them first.
"""

from __future__ import annotations

HOLE = "\uf8e0"
"""Unknown text, possibly empty (an unset variable, the output of a program)."""
SOLID = "\uf8e1"
"""Unknown text, certainly not empty."""
REMOTE = "\uf8e2"
"""Zero-width: the text that follows was downloaded."""
DECODED = "\uf8e3"
"""Zero-width: the text that follows was decoded."""
SPLIT = "\uf8e4"
"""A word border that an unquoted expansion produced."""
QUOTED = "\uf8e5"
"""Zero-width: something here was quoted, so an empty field still counts."""

TEMPORARY = "/tmp/tmp." + SOLID
"""The output of mktemp: a file or folder that this command line made itself."""

PRIVATE = "[\uf8e0-\uf8e9]"

_TAINTS = str.maketrans("", "", REMOTE + DECODED)


def plain(text: str) -> str:
    """Return the text without its origin marks."""
    return text.translate(_TAINTS) if not text.isascii() else text


def is_dynamic(text: str) -> bool:
    """Return whether a part of the text is unknown."""
    return HOLE in text or SOLID in text


def shown(text: str) -> str:
    """Return the text for a person, with unknown parts as an ellipsis."""
    if text.isascii():
        return text
    return plain(text).replace(HOLE, "…").replace(SOLID, "…").replace(QUOTED, "").replace(SPLIT, " ")
