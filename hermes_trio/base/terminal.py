"""Text for a terminal. It comes from messages, models, clients and other hosts, none of which may control the terminal."""

from __future__ import annotations

from typing import Final

_JOINERS: Final = "\u200c\u200d"
"""They control nothing, and some scripts and emoji need them."""

_KEPT: Final = frozenset(f"\n\t{_JOINERS}")


def clean(text: object) -> str:
    """Return text for one line of a terminal: control, bidirectional and line-breaking characters are replaced by spaces."""
    return "".join(one if one.isprintable() or one in _JOINERS else " " for one in str(text))


def clean_lines(text: str) -> str:
    """Return text for a terminal: the same, except that line breaks and tabs stay."""
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "".join(one if one.isprintable() or one in _KEPT else " " for one in text)
