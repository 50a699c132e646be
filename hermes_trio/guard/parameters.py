"""The operators of `${name…}`: defaults, cutting, replacing, case and substrings."""

from __future__ import annotations

import fnmatch
import re

from .arithmetic import evaluate
from .marks import HOLE, SOLID, is_dynamic
from .quoting import unescape
from .state import Value

_MAX_PATTERN = 256
_MAX_SUBJECT = 1_024


def apply_operator(operator: str, value: Value, argument: str) -> list[Value]:
    """All values the expansion may have when the variable has `value`."""
    bare = operator.lstrip(":")
    if bare in ("-", "=", "?", "+") and operator != ":":
        return _default(bare, value, argument, empty_counts=operator.startswith(":"))
    if isinstance(value, tuple):
        if operator == ":":
            return [_slice_items(value, argument)]
        items: list[str] = []
        for item in value:
            result = apply_operator(operator, item, argument)[0]
            items.append(result if isinstance(result, str) else HOLE)
        return [tuple(items)]
    if is_dynamic(value):
        return [HOLE]
    if operator == ":":
        return [_slice(value, argument)]
    if operator in ("#", "##", "%", "%%"):
        return [_cut(operator, value, argument)]
    if operator.startswith("/"):
        return [_replace(operator, value, argument)]
    if operator in ("^", "^^", ",", ",,", "~", "~~") or operator in ("@U", "@L", "@u"):
        return [_case(operator, value)]
    if operator == "@E":
        return [unescape(value)]
    if operator in ("@Q", "@P"):
        return [value]
    return [HOLE]


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


def _range(argument: str, size: int) -> tuple[int, int] | None:
    first, _, second = argument.partition(":")
    start = evaluate(first) if first.strip() else 0
    length = evaluate(second) if second.strip() else size
    if start is None or length is None:
        return None
    if start < 0:
        start = max(0, size + start)
    stop = start + length if length >= 0 else size + length
    return start, stop


def _slice(value: str, argument: str) -> str:
    bounds = _range(argument, len(value))
    return HOLE if bounds is None else value[bounds[0] : max(bounds)]


def _slice_items(value: tuple[str, ...], argument: str) -> Value:
    bounds = _range(argument, len(value) + 1)
    if bounds is None:
        return HOLE
    # Positional parameters count from one, arrays from zero: keep the larger cut.
    start = max(0, bounds[0] - 1)
    return value[start : max(start, bounds[1])]


def _regex(pattern: str) -> re.Pattern[str] | None:
    if len(pattern) > _MAX_PATTERN or pattern.count("*") > 8 or is_dynamic(pattern):
        return None
    try:
        return re.compile(fnmatch.translate(pattern))
    except re.error:
        return None


def _cut(operator: str, value: str, argument: str) -> str:
    pattern = _regex(argument)
    if pattern is None or len(value) > _MAX_SUBJECT:
        return HOLE
    lengths = range(len(value) + 1)
    ordered = lengths if len(operator) == 1 else reversed(lengths)
    for length in ordered:
        piece = value[:length] if operator[0] == "#" else value[len(value) - length :]
        if pattern.match(piece):
            return value[length:] if operator[0] == "#" else value[: len(value) - length]
    return value


def _replace(operator: str, value: str, argument: str) -> str:
    target, _, replacement = argument.partition("/")
    if is_dynamic(argument) or len(value) > _MAX_SUBJECT or len(target) > _MAX_PATTERN or target.count("*") > 1:
        return HOLE
    # One star at most, so that matching stays quadratic in a short text.
    body = "".join(".*" if c == "*" else "." if c == "?" else re.escape(c) for c in target)
    if "[" in target:
        return HOLE
    if operator == "/#":
        body = r"\A(?:" + body + ")"
    elif operator == "/%":
        body = "(?:" + body + r")\Z"
    return re.sub(body, lambda _: replacement, value, count=0 if operator == "//" else 1, flags=re.DOTALL)


def _case(operator: str, value: str) -> str:
    if operator in ("^^", "@U"):
        return value.upper()
    if operator in (",,", "@L"):
        return value.lower()
    if operator == "~~":
        return value.swapcase()
    head, tail = value[:1], value[1:]
    if operator in ("^", "@u"):
        return head.upper() + tail
    return (head.lower() if operator == "," else head.swapcase()) + tail
