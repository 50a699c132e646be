"""Read configuration tables as typed settings. An error names the key, its value, and what would be accepted."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from typing import Annotated, Any, Final, Literal, TypeVar, cast

import msgspec
from msgspec import Meta

S = TypeVar("S", bound=msgspec.Struct)

_PLACE: Final = re.compile(r"^(?P<problem>.*?)(?: - at `\$\.?(?P<place>[^`]*)`)?$", re.DOTALL)
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(?P<field>[^`]*)`")
_WORDS: Final = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


class SettingsError(ValueError):
    """A table that cannot be used; the text names the key and what would be accepted."""


def read_settings(table: Mapping[str, Any], kind: type[S], where: str) -> S:
    """Convert a table to `kind`. `where` is the name of the table in the configuration file. Raises `SettingsError`."""
    try:
        return msgspec.convert(dict(table), kind)
    except msgspec.ValidationError as error:
        raise SettingsError(explain(error, table, kind, lambda place: _joined(where, place))) from None


def explain(
    error: msgspec.ValidationError,
    table: Mapping[str, Any],
    kind: type[msgspec.Struct],
    named: Callable[[str], str],
    *,
    secret: Collection[str] = (),
) -> str:
    """Return a decoder's error about `table`, for the person who wrote it. `named` gives a place its full name; the values at `secret` places are not shown."""
    match = _PLACE.match(str(error))
    assert match is not None
    problem, place = match["problem"], _found(match["place"] or "", table, kind)
    unknown = _UNKNOWN.match(problem)
    if unknown is not None:
        name = unknown["field"]
        known = tuple(getattr(_bare(_hint(kind, place)), "__struct_fields__", ()))
        section = re.sub(r".*: ", "", named(place))
        return (
            f"{named(_joined(place, name))} is not a setting{near(name, known)}; [{section}] takes {', '.join(known)}"
        )
    value = _value(table, place)
    hidden = value is None or isinstance(value, dict | list) or place in secret
    shown = ":" if hidden else f" is {value!r}:"
    problem = "not of this form" if "matching regex" in problem else f"{problem[:1].lower()}{problem[1:]}"
    return f"{named(place)}{shown} {problem}{_accepted(_hint(kind, place))}"


def near(name: str, known: Iterable[str]) -> str:
    """Suggest the closest known key, in brackets; empty if none is close."""
    import difflib  # only for an error

    close = difflib.get_close_matches(name, list(known), 1)
    return f" (did you mean {close[0]}?)" if close else ""


def _joined(where: str, place: str) -> str:
    return f"{where}.{place}" if where and place and not place.startswith("[") else where + place


def _parts(place: str) -> list[str]:
    """Return the steps to a place. A key of a table with names of its own, and a number of a list, are in brackets."""
    return [bracketed or plain for bracketed, plain in re.findall(r"\[([^\]]*)\]|([^.\[\]]+)", place)]


def _found(place: str, table: Any, kind: Any) -> str:
    """Return a place with the name in it where the decoder says only that it is one of a table's: the first whose value is refused."""
    before, dots, after = place.partition("[...]")
    inner = _value(table, before)
    if not dots or not isinstance(inner, dict):
        return place
    for name, value in cast("dict[str, Any]", inner).items():
        try:
            msgspec.convert(value, _hint(kind, f"{before}[{name}]"))
        except msgspec.ValidationError:
            return _found(f"{_joined(before, name)}{after}", table, kind)
    return place


def _value(table: Any, place: str) -> Any:
    for part in _parts(place):
        table = cast("dict[str, Any]", table).get(part) if isinstance(table, dict) else None
    return table


def _hint(kind: Any, place: str) -> Any:
    """Return the annotation of what stands at `place` below a struct; None if it is not known."""
    hint: Any = kind
    for part in _parts(place):
        bare = _bare(hint)
        if isinstance(bare, type) and issubclass(bare, msgspec.Struct):
            hint = typing.get_type_hints(bare, include_extras=True).get(part)
        elif typing.get_origin(bare) in (dict, Mapping, list, tuple):
            hint = next((one for one in reversed(typing.get_args(bare)) if one is not Ellipsis), None)
        else:
            return None
    return hint


def _choices(hint: Any) -> list[Any]:
    """Return the members of a union, or the one that it is; without None."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [one for one in typing.get_args(hint) if one is not type(None)]
    return [hint]


def _bare(hint: Any) -> Any:
    """Return an annotation without its bounds and without None."""
    (hint, *_) = _choices(hint)
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint


def _accepted(hint: Any) -> str:
    """Return what a key takes, in words, from its type."""
    if hint is None:
        return ""
    ways = [way for way in map(_in_words, _choices(hint)) if way]
    if not ways:
        return ""
    many = len(ways) > 1 or ", " in ways[0]
    return f"; accepted {'are' if many else 'is'} {' or '.join(ways)}"


def _in_words(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return ", ".join(map(str, typing.get_args(hint)))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ", ".join(str(member.value) for member in hint)
    bounds: list[str] = []
    if typing.get_origin(hint) is Annotated:
        hint, *metas = typing.get_args(hint)
        for meta in metas:
            if isinstance(meta, Meta):
                if meta.description is not None:
                    return meta.description
                bounds += [
                    f"{word} {bound:g}"
                    for word, bound in (("from", meta.ge), ("above", meta.gt), ("up to", meta.le), ("below", meta.lt))
                    if bound is not None
                ]
    name = "a list of strings" if typing.get_origin(hint) in (list, tuple) else _WORDS.get(cast("Any", hint), "")
    return " ".join([name, *bounds]) if name else ""
