"""Markup: what each platform is sent, that Telegram always takes it, and that the words stay."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_trio.messaging.markup import escape_markdown_v2, to_discord, to_markdown_v2, to_mrkdwn, to_plain
from hermes_trio.testing.platforms.markdown_v2 import parse_markdown_v2


class InvalidMarkdownV2(Exception):
    """Telegram would refuse the text."""


def visible(text: str) -> str:
    """The text that Telegram shows for MarkdownV2, by its documented rules; raises if it would refuse it."""
    shown: list[str] = []
    stack: list[str] = []
    position = 0
    while position < len(text):
        char = text[position]
        top = stack[-1] if stack else ""
        if char == "\\" and position + 1 < len(text) and 1 <= ord(text[position + 1]) <= 126:
            shown.append(text[position + 1])
            position += 2
        elif top in ("`", "```"):
            if text.startswith(top, position):
                stack.pop()
                position += len(top)
            elif char == "`":
                raise InvalidMarkdownV2(f"lone backtick in code at {position}")
            else:
                shown.append(char)
                position += 1
        elif text.startswith("```", position):
            language = re.compile(r"[^\s`]*").match(text, position + 3)
            assert language is not None
            after = language.end()
            position = after if text[after : after + 1] != "`" else position + 3
            position += text[position : position + 1] == "\n"
            stack.append("```")
        elif char == "[":
            stack.append("[")
            position += 1
        elif char == "]" and top == "[":
            stack.pop()
            if text[position + 1 : position + 2] != "(":
                raise InvalidMarkdownV2(f"label without address at {position}")
            position += 2
            while position < len(text) and text[position] != ")":
                position += 2 if text[position] == "\\" else 1
            if position >= len(text):
                raise InvalidMarkdownV2("address without end")
            position += 1
        elif char == ">" and (position == 0 or text[position - 1] == "\n"):
            if stack:
                raise InvalidMarkdownV2(f"quote within {stack} at {position}")
            position += 1
        elif text.startswith(("__", "||"), position):
            raise InvalidMarkdownV2(f"a mark that is never written here at {position}")
        elif char in "*_~`":
            if top == char:
                stack.pop()
            else:
                stack.append(char)
            position += 1
        elif char in "[]()>#+-=|{}.!":
            raise InvalidMarkdownV2(f"{char!r} is not escaped at {position}")
        else:
            shown.append(char)
            position += 1
    if stack:
        raise InvalidMarkdownV2(f"no end of {stack}")
    return "".join(shown)


@pytest.mark.parametrize(
    ("text", "telegram", "slack", "plain"),
    [
        ("plain words", "plain words", "plain words", "plain words"),
        ("a.b-c! (x+y=z)", r"a\.b\-c\! \(x\+y\=z\)", "a.b-c! (x+y=z)", "a.b-c! (x+y=z)"),
        ("**bold** text", "*bold* text", "*bold* text", "bold text"),
        ("__bold__", "*bold*", "*bold*", "bold"),
        ("*italic* and _italic_", "_italic_ and _italic_", "_italic_ and _italic_", "italic and italic"),
        ("***both***", "_*both*_", "_*both*_", "both"),
        ("**a _b_ c**", "*a _b_ c*", "*a _b_ c*", "a b c"),
        ("**a **b** c**", "*a b c*", "*a b c*", "a b c"),
        ("~~gone~~ ~kept~", r"~gone~ \~kept\~", "~gone~ ~kept~", "gone ~kept~"),
        ("*a*_b_", "_ab_", "_ab_", "ab"),
        ("# Title *x*", "*Title _x_*", "*Title _x_*", "Title x"),
        ("## **T** ##", "*T*", "*T*", "T"),
        ("#hashtag", r"\#hashtag", "#hashtag", "#hashtag"),
        ("- a\n  * b\n+ c", "• a\n  • b\n• c", "• a\n  • b\n• c", "• a\n  • b\n• c"),
        ("1. a\n2) b", "1\\. a\n2\\) b", "1. a\n2) b", "1. a\n2) b"),
        ("- [ ] a\n- [x] b", "☐ a\n☑ b", "☐ a\n☑ b", "☐ a\n☑ b"),
        ("> **q**\n> r\nend", ">*q*\n>r\nend", "> *q*\n> r\nend", "> q\n> r\nend"),
        ("---", "———", "———", "———"),
        ("`a.b`", "`a.b`", "`a.b`", "a.b"),
        ("`` a`b\\ ``", r"`a\`b\\`", "`aˋb\\`", "a`b\\"),
        ("```py\nx = `1` \\\n```", "```py\nx = \\`1\\` \\\\\n```", "```\nx = `1` \\\n```", "x = `1` \\"),
        ("```\nnot closed", "```\nnot closed\n```", "```\nnot closed\n```", "not closed"),
        ("~~~\n```\n~~~", "```\n\\`\\`\\`\n```", "```\nˋˋˋ\n```", "```"),
        (
            "[**t**](https://x.org/a_(b)?c=1&d)",
            r"[*t*](https://x.org/a_(b\)?c=1&d)",
            "<https://x.org/a_(b)?c=1&amp;d|t>",
            "t (https://x.org/a_(b)?c=1&d)",
        ),
        (
            '![alt](<http://i/a b.png> "title")',
            r"alt \(http://i/a b\.png\)",
            "alt (http://i/a b.png)",
            "alt (http://i/a b.png)",
        ),
        ("<https://y.org>", r"[https://y\.org](https://y.org)", "<https://y.org|https://y.org>", "https://y.org"),
        (
            "[x](javascript:alert(1))",
            r"x \(javascript:alert\(1\)\)",
            "x (javascript:alert(1))",
            "x (javascript:alert(1))",
        ),
        ("[x] (y) [z]", r"\[x\] \(y\) \[z\]", "[x] (y) [z]", "[x] (y) [z]"),
        ("https://x.org/_a_b*c", r"https://x\.org/\_a\_b\*c", "https://x.org/_a_b*c", "https://x.org/_a_b*c"),
        ("**https://x.org**", r"*https://x\.org*", "*https://x.org*", "https://x.org"),
        ("snake_case_name 2*3*4", r"snake\_case\_name 2\*3\*4", "snake_case_name 2*3*4", "snake_case_name 2*3*4"),
        (r"\*not\* \[x\](y) \\", r"\*not\* \[x\]\(y\) \\", "*not* [x](y) \\", "*not* [x](y) \\"),
        ("**open", r"\*\*open", "**open", "**open"),
        ("a ** b ** c", r"a \*\* b \*\* c", "a ** b ** c", "a ** b ** c"),
        ("<!channel> & <@U1>", r"<\!channel\> & <@U1\>", "&lt;!channel&gt; &amp; &lt;@U1&gt;", "<!channel> & <@U1>"),
        ("pre**fix**ed", "pre*fix*ed", "prefixed", "prefixed"),
        ("two\nlines **of\nbold**", "two\nlines *of\nbold*", "two\nlines *of\nbold*", "two\nlines of\nbold"),
        ("a  \nb\\\nc", "a\nb\nc", "a\nb\nc", "a\nb\nc"),
        (
            "| a | b |\n|---|:-:|\n| **1** | 日本 |",
            "```\na  b\n-  ----\n1  日本\n```",
            "```\na  b\n-  ----\n1  日本\n```",
            None,
        ),
        ("", "", "", ""),
    ],
)
def test_each_dialect(text: str, telegram: str, slack: str, plain: str | None) -> None:
    """The same text in the markup of Telegram, of Slack and without any."""
    assert telegram == to_markdown_v2(text)
    assert slack == to_mrkdwn(text)
    if plain is not None:
        assert plain == to_plain(text)


def test_discord_gets_the_text_as_it_is() -> None:
    """Discord reads the model's markup itself; only what cannot be sent is taken out."""
    assert to_discord("**b** `c` # x\r\n\x00\ud800") == "**b** `c` # x\n\ufffd"


def test_a_language_that_is_none_is_left_out() -> None:
    """Only a plain word follows the fence, whatever the model wrote there."""
    assert to_markdown_v2("```{.py #x}\na\n```") == "```\na\n```"
    assert to_markdown_v2("```c++ title=x\na\n```") == "```c++\na\n```"


@pytest.mark.parametrize("bad", ["*", "a_b", "__x__", "x.", "`a", "[a", "[a](b", ">a\n*b\n>c*", "a||", "*a _b* c_"])
def test_the_validator_refuses_what_telegram_refuses(bad: str) -> None:
    """The measure that the other tests use has teeth."""
    with pytest.raises(InvalidMarkdownV2):
        visible(bad)


pieces = st.sampled_from(
    [
        *"*_~`[]()>#+-=|{}.!\\ \n\t&<ab",
        *("**", "__", "~~", "```", "``", "***", "\n\n", "\n> ", "\n- ", "\n1. ", "\n# ", "\n```\n", "\n~~~\n"),
        *("](http://x.org/a)", "](b)", "<http://y>", "https://z.org/_a_", "| a | b |\n|--|--|\n| c |", "![", "<!here>"),
        *("word ", "é", "😀", "\ud800", "\x00", "\u200b", "\u2028", "\r\n", "\x7f"),
    ]
)
documents = st.lists(pieces | st.text(max_size=4), max_size=40).map("".join)


@settings(max_examples=600, deadline=None)
@given(documents)
def test_markdown_v2_is_always_valid(text: str) -> None:
    """Whatever a model writes, Telegram takes it: by our own reading of the rules and by the fake's."""
    written = to_markdown_v2(text)
    visible(written)
    parse_markdown_v2(written)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([*"*_ .!\n#-ab1", "**", "__", "~~a b~~", "word", "\\*"]), max_size=40).map("".join))
def test_no_words_are_lost(text: str) -> None:
    """Telegram shows what the plain form says, and no letter or digit of the original is missing."""
    assert visible(to_markdown_v2(text)) == to_plain(text)
    assert re.sub(r"[\W_]", "", to_plain(text)) == re.sub(r"[\W_]", "", text)


@settings(max_examples=300, deadline=None)
@given(documents)
def test_every_dialect_can_be_sent(text: str) -> None:
    """Results encode as UTF-8, and Slack is sent no control sequence but our own links."""
    for written in (to_markdown_v2(text), to_mrkdwn(text), to_plain(text), to_discord(text)):
        written.encode()
        assert "\x00" not in written
    slack = to_mrkdwn(text)
    assert all(re.match(r"<(https?|ftp|tg|mailto|tel):", slack[m.start() :]) for m in re.finditer("<", slack))


@given(st.text())
def test_escaped_text_is_literal(text: str) -> None:
    """Escaped text shows as itself."""
    sendable = to_discord(text)
    assert sendable == visible(escape_markdown_v2(text))


@pytest.mark.parametrize(
    "text",
    [
        "*" * 20_000 + "a" + "*" * 20_000,
        "*a " * 10_000,
        "*a **b " * 900 + "b** a* " * 900,
        "[" * 20_000,
        "[a](" * 5_000,
        "[" * 3_000 + "a" + "](http://x)" * 3_000,
        "`" * 5_001 + "a",
        "".join("`" * n + "a" for n in range(200)),
        "> " * 5_000,
        "| a " * 5_000 + "\n" + "|---" * 5_000,
        "\\" * 20_001,
        "<http://" * 5_000,
        "(" * 20_000 + "[a](" + "(" * 5_000,
        "# " * 10_000,
        "- " * 10_000 + "x",
    ],
)
def test_odd_texts_are_written_too(text: str) -> None:
    """Endless and deeply nested marks neither fail nor take for ever."""
    visible(to_markdown_v2(text))
    to_mrkdwn(text)
    to_plain(text)
