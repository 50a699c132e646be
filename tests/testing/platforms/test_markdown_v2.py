"""The fake Bot API's MarkdownV2 parser: text, entities, and the error texts of the real one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_trio.testing.platforms.markdown_v2 import MarkupError, parse_markdown_v2, utf16_length

RESERVED_ALONE = "](){}#+-=|.!"


@pytest.mark.parametrize("character", RESERVED_ALONE)
def test_reserved_character_must_be_escaped(character: str) -> None:
    """A reserved character alone is refused by name, and its escaped form is plain text."""
    with pytest.raises(MarkupError) as caught:
        parse_markdown_v2(f"a{character}")
    assert str(caught.value) == f"Character '{character}' is reserved and must be escaped with the preceding '\\'"
    assert parse_markdown_v2(f"a\\{character}") == (f"a{character}", [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("é_italic", "Can't find end of Italic entity at byte offset 2"),
        ("_a *b ", "Can't find end of Bold entity at byte offset 3"),
        ("a __b", "Can't find end of Underline entity at byte offset 2"),
        ("_a__", "Can't find end of Underline entity at byte offset 2"),
        ("x`", "Can't find end of Code entity at byte offset 1"),
        ("x```py", "Can't find end of Pre entity at byte offset 1"),
        ("x```py code", "Can't find end of PreCode entity at byte offset 1"),
        ("||secret\\|", "Can't find end of Spoiler entity at byte offset 0"),
        ("[site](http://a", "Can't find end of a URL at byte offset 7"),
        ("a>b", "Character '>' is reserved and must be escaped with the preceding '\\'"),
        (">*bold\nout*", "Can't find end of Bold entity at byte offset 1"),
        ("![x]", "Custom emoji entity must contain a tg://emoji URL"),
        ("![x](tg://emoji?id=07)", "Invalid custom emoji identifier specified"),
    ],
)
def test_markup_errors_name_the_place(text: str, message: str) -> None:
    """An unfinished entity is refused with its kind and its byte offset."""
    with pytest.raises(MarkupError) as caught:
        parse_markdown_v2(text)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "plain", "entities"),
    [
        ("😀_é_", "😀é", [("italic", 2, 1)]),
        ("*a _b __c___*", "a b c", [("bold", 0, 5), ("italic", 2, 3), ("underline", 4, 1)]),
        ("`1.2 (x)`", "1.2 (x)", [("code", 0, 7)]),
        ("```py\nprint(1)\n```", "print(1)\n", [("pre", 0, 9)]),
        ("```\nx\\`y```", "x`y", [("pre", 0, 3)]),
        ("[site](http://a.b/\\))", "site", [("text_link", 0, 4)]),
        (">one\n>two\nthree", "one\ntwo\nthree", [("blockquote", 0, 8)]),
        (">one||\nout", "one\nout", [("expandable_blockquote", 0, 4)]),
        ("~a~ ||b||", "a b", [("strikethrough", 0, 1), ("spoiler", 2, 1)]),
        ("**", "", []),
        ("trailing\\", "trailing\\", []),
    ],
)
def test_markup_becomes_entities(text: str, plain: str, entities: list[tuple[str, int, int]]) -> None:
    """Markup is taken out of the text and described by entities in UTF-16 units."""
    found, described = parse_markdown_v2(text)
    assert found == plain
    assert [(entity["type"], entity["offset"], entity["length"]) for entity in described] == entities


def test_arguments_of_entities() -> None:
    """A link keeps its address and a code block its language."""
    assert parse_markdown_v2("[a](http://b.c)")[1][0]["url"] == "http://b.c"
    assert parse_markdown_v2("```python\nx```")[1][0]["language"] == "python"


@given(st.text())
def test_escaping_everything_gives_the_text_back(text: str) -> None:
    """A text with every ASCII punctuation escaped parses to itself, without entities."""
    escaped = "".join(f"\\{c}" if c in r"_*[]()~`>#+-=|{}.!\\" else c for c in text)
    assert parse_markdown_v2(escaped) == (text, [])


@given(st.text(alphabet="ab _*~`|[]()>!\\\n\r.😀", max_size=30))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    """No text makes the parser fail in another way, and entities lie within the text."""
    try:
        plain, entities = parse_markdown_v2(text)
    except MarkupError:
        return
    for entity in entities:
        assert 0 < entity["length"] <= utf16_length(plain) - entity["offset"]
