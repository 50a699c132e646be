"""Brace expansion: `{rm,-rf,/}`, `{a..e}`, nested and mixed with quotes and substitutions."""

from __future__ import annotations

import re
from itertools import pairwise

import msgspec

from .marks import SOLID
from .syntax import Literal, Parameter, Part
from .verdict import BlockCategory, Blocked

MAX_VARIANTS = 1_024
_MAX_SEQUENCE = 128
_NAME = re.compile(r"[A-Za-z_]")
_NAME_CHARACTER = re.compile(r"[A-Za-z0-9_]+\Z")
_SEQUENCE = re.compile(r"(-?\d{1,9}|[A-Za-z])\.\.(-?\d{1,9}|[A-Za-z])(?:\.\.-?(\d{1,9}))?")

_Piece = str | Part


def expand_braces(parts: list[Part]) -> list[list[Part]]:
    """Return the words that a word expands to; a word without braces expands to itself."""
    if not any(isinstance(part, Literal) and not part.quoted and "{" in part.text for part in parts):
        return [parts]
    pieces: list[_Piece] = []
    for part in parts:
        if isinstance(part, Literal) and not part.quoted:
            pieces.extend(part.text)
        else:
            pieces.append(part)
    partners = _partners(pieces)
    if not partners:
        return [parts]
    return [_regroup(variant) for variant in _expand(pieces, 0, len(pieces), partners)]


def _partners(pieces: list[_Piece]) -> dict[int, int]:
    stack: list[int] = []
    partners: dict[int, int] = {}
    for index, piece in enumerate(pieces):
        if piece == "{":
            stack.append(index)
            if len(stack) > 64:
                raise Blocked(BlockCategory.OVER_LIMIT, "braces are nested too deep to be inspected")
        elif piece == "}" and stack:
            partners[stack.pop()] = index
    return partners


def _expand(pieces: list[_Piece], start: int, end: int, partners: dict[int, int]) -> list[list[_Piece]]:
    results: list[list[_Piece]] = [[]]
    index = start
    while index < end:
        piece = pieces[index]
        close = partners.get(index) if piece == "{" else None
        options = None if close is None else _options(pieces, index, close, partners)
        if options is None:
            for result in results:
                result.append(piece)
            index += 1
            continue
        if len(results) * len(options) > MAX_VARIANTS:
            raise Blocked(BlockCategory.OVER_LIMIT, f"brace expansion makes more than {MAX_VARIANTS} words")
        results = [result + option for result in results for option in options]
        index = (close or index) + 1
    return results


def _options(pieces: list[_Piece], start: int, close: int, partners: dict[int, int]) -> list[list[_Piece]] | None:
    borders = [start]
    index = start + 1
    while index < close:
        if pieces[index] == "{" and index in partners and partners[index] < close:
            index = partners[index]
        elif pieces[index] == ",":
            borders.append(index)
        index += 1
    borders.append(close)
    if len(borders) == 2:
        return _sequence(pieces[start + 1 : close])
    options: list[list[_Piece]] = []
    for left, right in pairwise(borders):
        options.extend(_expand(pieces, left + 1, right, partners))
        if len(options) > MAX_VARIANTS:
            raise Blocked(BlockCategory.OVER_LIMIT, f"brace expansion makes more than {MAX_VARIANTS} words")
    return options


def _sequence(pieces: list[_Piece]) -> list[list[_Piece]] | None:
    if not all(isinstance(piece, str) for piece in pieces):
        return None
    match = _SEQUENCE.fullmatch("".join(piece for piece in pieces if isinstance(piece, str)))
    if match is None:
        return None
    first, last, step = match.groups()
    numeric = first.lstrip("-").isdigit()
    if numeric != last.lstrip("-").isdigit():
        return None
    low, high = (int(first), int(last)) if numeric else (ord(first), ord(last))
    stride = max(1, int(step or 1))
    count = abs(high - low) // stride + 1
    if count > _MAX_SEQUENCE:
        return [[SOLID]]
    values = range(low, high + (1 if high >= low else -1), stride if high >= low else -stride)
    return [[str(value) if numeric else chr(value)] for value in values]


def _regroup(pieces: list[_Piece]) -> list[Part]:
    parts: list[Part] = []
    run: list[str] = []
    for piece in pieces:
        if isinstance(piece, str):
            last = parts[-1] if parts and not run else None
            if isinstance(last, Parameter) and last.bare and _NAME.match(last.name) and _NAME_CHARACTER.match(piece):
                parts[-1] = msgspec.structs.replace(last, name=last.name + piece)
            else:
                run.append(piece)
            continue
        if run:
            parts.append(Literal("".join(run), quoted=False))
            run = []
        parts.append(piece)
    if run:
        parts.append(Literal("".join(run), quoted=False))
    return parts
