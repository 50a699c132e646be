"""Computes the common operators of `${name…}`: defaults, and removal of a prefix or suffix. The results of others are unknown."""

from __future__ import annotations

import fnmatch
import re

from .marks import HOLE, SOLID, is_dynamic
from .state import Value

_MAX_PATTERN = 256
_MAX_SUBJECT = 1_024


def apply_operator(operator: str, value: Value, argument: str) -> list[Value]:
    """Return all values that the expansion may have if the variable has `value`."""
    bare = operator.lstrip(":")
    if bare in ("-", "=", "?", "+") and operator != ":":
        return _default(bare, value, argument, empty_counts=operator.startswith(":"))
    if isinstance(value, tuple):
        return [tuple(_cut(operator, item, argument) for item in value)]
    return [_cut(operator, value, argument)]


def _default(operator: str, value: Value, argument: str, *, empty_counts: bool) -> list[Value]:
    text = value if isinstance(value, str) else " ".join(value)
    unset = text == "" and empty_counts
    if operator == "+":
        if text == HOLE:
            return [argument, ""]
        return [""] if unset else [argument]
    if operator == "?":
        return [SOLID if text == HOLE else value]
    if text == HOLE:
        return [argument, SOLID]
    return [argument] if unset else [value]


def _cut(operator: str, value: str, argument: str) -> str:
    if operator in ("@Q", "@P"):
        return value
    known = operator in ("#", "##", "%", "%%") and len(value) <= _MAX_SUBJECT and len(argument) <= _MAX_PATTERN
    if not known or argument.count("*") > 8 or is_dynamic(value) or is_dynamic(argument):
        return HOLE
    pattern = re.compile(fnmatch.translate(argument))
    lengths = range(len(value) + 1)
    for length in lengths if len(operator) == 1 else reversed(lengths):
        piece = value[:length] if operator[0] == "#" else value[len(value) - length :]
        if pattern.match(piece):
            return value[length:] if operator[0] == "#" else value[: len(value) - length]
    return value
