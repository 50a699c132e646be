"""The words of a text, and a query for them, as PostgreSQL's search types: made here, so that they depend on no locale, parser or extension.

Letters are folded and lose their accents. A script without spaces between words gives overlapping pairs of characters, and its last character alone,
so that any part of a run is found as a phrase. Any string is a valid query: one without a usable term is empty.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from functools import cache
from typing import Final

from hermes_trio.store.sqlite.search import QUERY_LENGTH, QUERY_TERM, SPACELESS, TERM_LIMIT

WORD_LENGTH: Final = 500
LAST_POSITION: Final = 16_383
POSITIONS_A_WORD: Final = 255
VECTOR_BYTES: Final = 900_000
"""A vector holds less than a megabyte: of a longer text the words up to here are found."""

_LATIN_MARKS: Final = re.compile("[\u0300-\u036f]")
_ASCII_WORD: Final = re.compile(r"[a-z0-9]+")


@cache
def _token() -> re.Pattern[str]:
    """Return a run of a script without spaces, or a word: letters and digits with the marks that belong to them."""
    found = (character for character in map(chr, range(sys.maxunicode + 1)) if not "\u0300" <= character <= "\u036f")
    marks = re.escape("".join(mark for mark in found if unicodedata.category(mark) in ("Mn", "Mc")))
    letter = rf"(?:(?![{SPACELESS}])[^\W_])"
    return re.compile(rf"([{SPACELESS}]+)|({letter}(?:(?![{SPACELESS}])(?:[^\W_]|[{marks}]))*)")


def _plain(text: str) -> str:
    """Return `text` case-folded, without accents."""
    decomposed = unicodedata.normalize("NFD", text).casefold()
    return unicodedata.normalize("NFC", _LATIN_MARKS.sub("", decomposed))


def _lexemes(text: str, *, query: bool = False) -> list[tuple[str, int]]:
    """Return words and their positions. In a query, a run of one character is a prefix: it ends with `*`."""
    if text.isascii():
        return [(word, place) for place, word in enumerate(_ASCII_WORD.findall(text.lower()), 1)]
    found: list[tuple[str, int]] = []
    place = 0
    for match in _token().finditer(_plain(text)):
        run, word = match.groups()
        if word:
            place += 1
            found.append((word, place))
            continue
        characters = [character for character in run if unicodedata.category(character)[0] in "LNM"]
        for number, character in enumerate(characters):
            place += 1
            if number + 1 < len(characters):
                found.append((character + characters[number + 1], place))
            elif not query:
                found.append((character, place))
            elif len(characters) == 1:
                found.append((f"{character}*", place))
    return found


def _quoted(word: str) -> str:
    escaped = word[:WORD_LENGTH].replace("\\", "\\\\").replace("'", "''")
    return f"'{escaped}'"


def text_words(text: str) -> str:
    """Return the literal of a `tsvector`."""
    found: dict[str, list[int]] = {}
    size = 0
    for word, place in _lexemes(text):
        size += 2 if word in found else len(word.encode("utf-8", "replace")) + 8
        if size > VECTOR_BYTES:
            break
        found.setdefault(word, []).append(min(place, LAST_POSITION))
    return " ".join(
        f"{_quoted(word)}:{','.join(map(str, places[:POSITIONS_A_WORD]))}" for word, places in found.items()
    )


def _piece(term: str, *, prefix: bool) -> str:
    """Return one term: its words as a phrase."""
    piece = ""
    last = 0
    words = _lexemes(term, query=True)
    for number, (word, place) in enumerate(words):
        begins = word.endswith("*") or (prefix and number == len(words) - 1)
        part = _quoted(word.rstrip("*")) + (":*" if begins else "")
        piece = f"{piece} <{place - last}> {part}" if piece else part
        last = place
    return f"({piece})" if len(words) > 1 else piece


def text_query(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the literal of a `tsquery`, empty without a usable term, and the terms of the query."""
    parts: list[str] = []
    terms: list[str] = []
    either = False
    shown = "".join(" " if ord(mark) < 32 or 0xD800 <= ord(mark) <= 0xDFFF else mark for mark in text[:QUERY_LENGTH])
    for match in QUERY_TERM.finditer(shown):
        if len(terms) >= TERM_LIMIT:
            break
        quoted, bare = match.group(1), match.group(2)
        term = (quoted if quoted is not None else bare).replace('"', " ").strip()
        if bare in ("AND", "NOT"):
            continue
        if bare == "OR":
            either = bool(parts)
            continue
        stripped = term.rstrip("*")
        piece = _piece(stripped, prefix=quoted is None and term.endswith("*"))
        if piece:
            terms.append(stripped)
            if either:
                parts[-1] = f"({parts[-1]} | {piece})"
            else:
                parts.append(piece)
            either = False
    return " & ".join(parts), tuple(terms)
