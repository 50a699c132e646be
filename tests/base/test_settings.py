"""Mistakes in a table of the configuration, as the person who made them reads them."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from hermes_trio.base.settings import SettingsError, read_settings


class Colour(Enum):
    """An enumeration."""

    RED = "red"
    BLUE = "blue"


class Inner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table in a table."""

    mode: Literal["fast", "slow"] = "fast"
    size: Annotated[int, Meta(ge=1, le=9)] | None = None


class Outer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table."""

    name: str = ""
    colour: Colour = Colour.RED
    inner: Inner = Inner()
    routes: dict[str, Inner] = msgspec.field(default_factory=dict[str, Inner])
    words: list[str] | str = ""


def test_a_table_that_can_be_used() -> None:
    """What is right becomes settings."""
    assert read_settings({"inner": {"size": 3}}, Outer, "x").inner.size == 3


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"nam": 1}, "x.nam is not a setting (did you mean name?); [x] takes name, colour, inner, routes, words"),
        ({"inner": {"speed": 1}}, "x.inner.speed is not a setting; [x.inner] takes mode, size"),
        ({"name": 3}, "x.name is 3: expected `str`, got `int`; accepted is a string"),
        ({"colour": "green"}, "x.colour is 'green': invalid enum value 'green'; accepted are red, blue"),
        ({"inner": {"mode": "x"}}, "x.inner.mode is 'x': invalid enum value 'x'; accepted are fast, slow"),
        (
            {"inner": {"size": 10}},
            "x.inner.size is 10: expected `int` <= 9; accepted is a whole number from 1 up to 9",
        ),
        ({"words": 1}, "x.words is 1: expected `str | array`, got `int`; accepted are a list of strings or a string"),
    ],
)
def test_mistakes(table: dict[str, Any], text: str) -> None:
    """The key by its full name, what stands there, and what would be right."""
    with pytest.raises(SettingsError) as caught:
        read_settings(table, Outer, "x")
    assert str(caught.value) == text


def test_a_mistake_below_a_name_of_ones_own() -> None:
    """The decoder does not tell which of the tables it was; the text does."""
    with pytest.raises(SettingsError) as caught:
        read_settings({"routes": {"a": {"size": 1}, "b": {"size": 0}}}, Outer, "x")
    assert str(caught.value) == "x.routes.b.size is 0: expected `int` >= 1; accepted is a whole number from 1 up to 9"
    with pytest.raises(
        SettingsError, match=r"^x\.routes\.c\.speed is not a setting; \[x\.routes\.c\] takes mode, size$"
    ):
        read_settings({"routes": {"a": {}, "c": {"speed": 0}}}, Outer, "x")
