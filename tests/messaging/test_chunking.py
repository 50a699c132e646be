"""Splitting: every message fits, nothing is lost, and code, words and characters stay whole where they can."""

from __future__ import annotations

import re
import unicodedata
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_trio.messaging.chunking import DISCORD, SLACK, TELEGRAM, Limit, split_chunks, split_text, utf16_length

SMALL = Limit(40)


def bytes_length(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def test_short_text_is_one_message_as_it_is() -> None:
    """What fits is not touched and not numbered."""
    assert split_text("  hello\n\n```\nx", SMALL) == ["  hello\n\n```\nx"]
    assert split_text("x" * 40, SMALL) == ["x" * 40]


@pytest.mark.parametrize("text", ["", " ", "\n" * 5000])
def test_nothing_to_see_is_no_message(text: str) -> None:
    """Blank text is not sent."""
    assert split_text(text, SMALL) == []


def test_lines_are_kept_whole() -> None:
    """Breaks prefer the ends of lines, and each message is numbered."""
    assert split_text("one two three four\nfive six seven eight\nnine ten", SMALL) == [
        "one two three four (1/2)",
        "five six seven eight\nnine ten (2/2)",
    ]


def test_words_are_kept_whole() -> None:
    """Without a line's end, breaks are made at spaces."""
    assert split_text("alpha beta gamma delta epsilon zeta eta theta", SMALL) == [
        "alpha beta gamma delta epsilon (1/2)",
        "zeta eta theta (2/2)",
    ]


def test_a_word_without_end_is_cut() -> None:
    """Where there is no other place, a word is cut at the limit."""
    assert split_text("x" * 70, SMALL) == ["x" * 34 + " (1/3)", "x" * 34 + " (2/3)", "xx (3/3)"]


def test_inline_code_is_kept_whole() -> None:
    """A space within inline code is no place to break if there is one before it."""
    assert split_text("some words then `git commit -m message` and so on", SMALL) == [
        "some words then (1/2)",
        "`git commit -m message` and so on (2/2)",
    ]
    glued = "x" * 20 + "`a b c d e f g h i j k l`"
    assert split_text(glued, SMALL)[0] == "x" * 20 + " (1/2)"


def test_a_cut_code_block_is_closed_and_opened_again() -> None:
    """Each part of a code block is a code block of the same language."""
    text = "Look:\n```python\n" + "\n".join(f"print({n})" for n in range(6)) + "\n```\ndone"
    assert split_text(text, SMALL) == [
        "Look:\n```python\nprint(0)\n```\n(1/4)",
        "```python\nprint(1)\nprint(2)\n```\n(2/4)",
        "```python\nprint(3)\nprint(4)\n```\n(3/4)",
        "```python\nprint(5)\n```\ndone (4/4)",
    ]


def test_the_end_of_a_block_is_not_repeated() -> None:
    """A break right before a block's last line makes no empty block."""
    messages = split_text("```\n" + "a" * 20 + "\n```\n" + "b" * 20, SMALL)
    assert messages == ["```\n" + "a" * 20 + "\n```\n(1/2)", "b" * 20 + " (2/2)"]


def test_a_block_that_is_never_closed_is_closed() -> None:
    """The number of the last message does not stand within a block that the text left open."""
    messages = split_text("~~~sh\n" + "\n".join("echo" for _ in range(12)), SMALL)
    assert all(message.startswith("~~~sh\n") for message in messages)
    assert all(re.search(r"\n~~~\n\(\d/\d\)$", message) for message in messages)


def test_indentation_behind_a_break_is_kept() -> None:
    """One separator goes, the rest of the space stays."""
    text = "```\n" + "\n".join("    " * n + "x" for n in range(5)) + "\n```"
    joined = "".join(chunk.body + chunk.separator for chunk in split_chunks(text, SMALL))
    assert text == joined


def test_code_with_fences_inside_keeps_its_own_fence() -> None:
    """A longer fence is reopened as it was; fences within it are content."""
    text = "````md\n```\ncode code code code\n```\nmore more more more more\n````"
    assert split_text(text, SMALL)[1].startswith("````md\n")


@pytest.mark.parametrize(
    "character",
    [
        "e\u0301\u0323",
        "👩‍👩‍👧‍👦",
        "👍🏽",
        "🇩🇪",
        "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
        "❤️",
        "नि",
    ],
)
def test_characters_stay_whole(character: str) -> None:
    """Accents, joined emoji, flags and signs with modifiers are not cut."""
    for offset in range(12):
        messages = split_text("x" * offset + character * 30, Limit(40, utf16_length))
        bodies = [re.sub(r" \(\d+/\d+\)$", "", message) for message in messages]
        assert len(bodies) > 1
        assert all(body.lstrip("x").replace(character, "") == "" for body in bodies)


def test_a_character_longer_than_a_message_is_cut() -> None:
    """An endless combination is cut rather than kept."""
    messages = split_text("e" + "\u0301" * 200, SMALL)
    assert all(len(message) <= 40 for message in messages)


def test_platforms_count_differently() -> None:
    """Telegram counts UTF-16 units, Discord and Slack characters."""
    assert utf16_length("a😀") == 3
    assert len(split_text("😀" * 2048, TELEGRAM)) == 1
    assert len(split_text("😀" * 2049, TELEGRAM)) == 2
    assert len(split_text("😀" * 2000, DISCORD)) == 1
    assert len(split_text("x" * 39_000, SLACK)) == 1
    assert len(split_text("x" * 39_001, SLACK)) == 2


def test_a_limit_that_is_too_small_is_refused() -> None:
    """A limit without room for text is an error in the configuration."""
    with pytest.raises(ValueError, match="limit of 31 is too small"):
        split_text("x", Limit(31))


def test_ten_thousand_messages_have_room_for_their_numbers() -> None:
    """The room for the numbers grows with their digits."""
    messages = split_text("word " * 30_000, SMALL)
    assert len(messages) > 1000
    assert messages[-1].endswith(f"({len(messages)}/{len(messages)})")
    assert all(len(message) <= 40 for message in messages)


pieces = st.sampled_from(
    [
        "word ",
        "longerword",
        " ",
        "\n",
        "\n\n",
        "```\n",
        "```python\n",
        "````\n",
        "~~~ js x\n",
        "\n```\n",
        "`code with space` ",
        "``a ` b``",
        "`",
        "    indented\n",
        "é",
        "e\u0301",
        "👩‍👩‍👧‍👦",
        "🇩🇪",
        "😀",
        "\t",
        "\r\n",
        "\u2028",
        "(1/2)",
    ]
)


@settings(max_examples=400, deadline=None)
@given(
    text=st.lists(pieces | st.text(max_size=15), max_size=60).map("".join),
    size=st.integers(32, 120),
    length=st.sampled_from([len, utf16_length, bytes_length]),
)
def test_every_message_fits_and_nothing_is_lost(text: str, size: int, length: object) -> None:
    """For any text: messages fit and are not blank, and without what was added they are the text."""
    limit = Limit(size, length)  # type: ignore[arg-type]
    chunks = split_chunks(text, limit)
    assert all(limit.length(chunk.text) <= size for chunk in chunks)
    assert all(chunk.body.strip() for chunk in chunks)
    assert [chunk.marker.strip() for chunk in chunks] == (
        [f"({n}/{len(chunks)})" for n in range(1, len(chunks) + 1)] if len(chunks) > 1 else [""] * len(chunks)
    )
    joined = "".join(chunk.body + chunk.separator for chunk in chunks)
    closed = re.sub(r"\n(`{3,}|~{3,})\Z", "", joined) if len(chunks) > 1 else joined
    assert any(
        text.endswith(whole) and not text[: len(text) - len(whole)].strip() for whole in (joined, closed) if chunks
    ) or (not chunks and not text.strip())


@settings(max_examples=200, deadline=None)
@given(text=st.lists(pieces, min_size=20, max_size=60).map("".join), size=st.integers(60, 120))
def test_fences_are_balanced_in_every_message(text: str, size: int) -> None:
    """No message leaves a code block open when there are several."""
    chunks = split_chunks(text, Limit(size))
    if len(chunks) < 2:
        return
    for chunk in chunks:
        mark = ""
        for line in chunk.text.split("\n"):
            match = re.match(r" {0,3}(`{3,}|~{3,})([^\n]*)$", line.rstrip("\r"))
            if match is None:
                continue
            if not mark and not ("`" in match.group(2) and match.group(1)[0] == "`"):
                mark = match.group(1)
            elif mark and match.group(1).startswith(mark) and not match.group(2).strip():
                mark = ""
        assert mark == "", chunk


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from("ab \n\u0301\u0323\u200d👩👍🏽"), max_size=300))
def test_no_message_starts_within_a_character(text: str) -> None:
    """Unless one character fills a message, none starts with a mark that belongs to the one before."""
    chunks = split_chunks(text, Limit(100))
    clusters = re.findall(r"(?:\u200d.|[\u0301\u0323\u200d\U0001f3fd])+", text)
    if any(len(cluster) > 20 for cluster in clusters):
        return
    for before, chunk in pairwise(chunks):
        if not before.separator:
            assert not unicodedata.combining(chunk.body[0])
            assert chunk.body[0] not in "\u200d🏽"
            assert before.body[-1] != "\u200d"
