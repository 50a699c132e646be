"""Operations on possible values: join alternatives without losing one, within bounds."""

from __future__ import annotations

from collections.abc import Iterable

from .marks import HOLE
from .pruning import prune
from .state import Value
from .verdict import BlockCategory, Blocked

MAX_OUTPUT = 128_000
_MAX_DIRECTORIES = 64


def bounded(text: str) -> str:
    """Return the text, or its dangerous lines and an unknown if it is too long to follow."""
    if len(text) > MAX_OUTPUT:
        lines = list(dict.fromkeys(text.split("\n")))
        text = "\n".join([HOLE, *prune(lines, min(len(lines) - 1, 1_000), str, HOLE)])
    if len(text) > MAX_OUTPUT:
        raise Blocked(BlockCategory.OVER_LIMIT, f"a command would print more than {MAX_OUTPUT} characters to follow")
    return text


def any_of(outputs: list[str]) -> str:
    """Return one text for several possible ones. With more than one it begins with an unknown, so that none is taken as certain."""
    known = [output for output in outputs if output]
    if len(known) < 2:
        return known[0] if known else ""
    return bounded(HOLE + "\n" + "\n".join(known))


def union(left: tuple[str, ...], right: tuple[str, ...]) -> tuple[str, ...]:
    """Return all directories of both. Raises `Blocked` if there are too many."""
    merged = tuple(dict.fromkeys(left + right))
    if len(merged) > _MAX_DIRECTORIES:
        raise Blocked(BlockCategory.OVER_LIMIT, "the working directory has too many possible values to inspect")
    return merged


def items_of(value: Value) -> tuple[str, ...]:
    """Return the value as array items; an unset one has none."""
    return value if isinstance(value, tuple) else () if value in ("", HOLE) else (value,)


def append(old: Value, new: Value) -> Value:
    """`old+=new`."""
    if isinstance(old, str) and isinstance(new, str):
        return ("" if old == HOLE else old) + new
    return items_of(old) + items_of(new)


def chunks(values: list[Value], size: int) -> Iterable[list[Value]]:
    """Return the values in lists of at most `size`."""
    return (values[start : start + size] for start in range(0, len(values), size))
