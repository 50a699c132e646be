"""Text from processes: decoding, cleaning, bounds and masking."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_trio.tools.terminal.output import (
    MAX_ESCAPE,
    AnsiFilter,
    HeadTail,
    OutputDecoder,
    RingText,
    mask_secrets,
    strip_ansi,
)

Cuts = st.lists(st.integers(min_value=0), max_size=8)


def places(length: int, cuts: list[int]) -> list[tuple[int, int]]:
    """Where the pieces of something of this length begin and end."""
    return list(pairwise([0, *sorted(cut % (length + 1) for cut in cuts), length]))


@given(st.binary(max_size=200) | st.text(max_size=60).map(str.encode), Cuts)
def test_decoding_does_not_depend_on_the_chunks(data: bytes, cuts: list[int]) -> None:
    """However the bytes are cut, the text is that of the whole, with U+FFFD for what is broken."""
    decoder = OutputDecoder()
    text = "".join(decoder.feed(data[start:end]) for start, end in places(len(data), cuts)) + decoder.finish()
    assert text == data.decode("utf-8", errors="replace")


def test_a_cut_character_waits_for_its_rest() -> None:
    """Half a character is not shown as broken, unless the stream ends there."""
    decoder = OutputDecoder()
    assert decoder.feed("ä".encode()[:1]) == ""
    assert decoder.feed("ä".encode()[1:]) == "ä"
    assert decoder.feed("€".encode()[:2]) == ""
    assert decoder.finish() == "�"


@pytest.mark.parametrize(
    ("shown", "plain"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b(Btext\x1b=", "text"),
        ("\x1b[?25l\x1b[2Kline\x1b[?25h", "line"),
        ("\x1bPq payload\x1b\\after", "after"),
        ("\x9b31mred", "red"),
        ("a\x1b\x1b[0m[31mb", "a[31mb"),
        ("[not] an escape", "[not] an escape"),
        ("cut off \x1b[3", "cut off "),
    ],
)
def test_escape_sequences(shown: str, plain: str) -> None:
    """Colours, titles, links, modes and character sets go; text that only looks like them stays."""
    assert strip_ansi(shown) == plain


@given(st.text(alphabet="\x1b\x9b\x07[]P(0;m?\\ aä\n", max_size=60), Cuts)
def test_escapes_do_not_depend_on_the_chunks(text: str, cuts: list[int]) -> None:
    """However the text is cut, the filter gives what it gives for the whole; and no escape is left."""
    cleaner = AnsiFilter()
    cleaned = "".join(cleaner.feed(text[start:end]) for start, end in places(len(text), cuts))
    assert cleaned == strip_ansi(text)
    assert strip_ansi(cleaned) == cleaned
    assert "\x1b" not in cleaned


def test_an_endless_escape_does_not_swallow_the_output() -> None:
    """A sequence that never ends is text after a while."""
    cleaner = AnsiFilter()
    assert cleaner.feed("\x1b]" + "a" * 10) == ""
    assert cleaner.feed("b" * MAX_ESCAPE) == "]" + "a" * 10 + "b" * MAX_ESCAPE
    assert cleaner.feed("more") == "more"


@given(st.lists(st.text(max_size=30), max_size=20), st.integers(1, 40))
def test_the_ring_holds_the_last_characters(texts: list[str], limit: int) -> None:
    """The ring is always the end of everything, and its counters add up."""
    ring, everything = RingText(limit), ""
    for text in texts:
        ring.append(text)
        everything += text
        assert ring.total == len(everything)
        assert ring.dropped == max(len(everything) - limit, 0)
    assert ring.text == everything[-limit:]
    assert ring.tail(5) == ring.text[-5:]
    assert ring.tail(0) == ""


def test_log_offsets() -> None:
    """Offset 0 shows the last lines, another offset the lines from there; the numbers say which."""
    ring = RingText()
    ring.append("".join(f"line {number}\n" for number in range(10)))
    last = ring.log(limit=3)
    assert (last.text, last.first, last.lines, last.total_lines) == ("line 7\nline 8\nline 9", 7, 3, 10)
    middle = ring.log(offset=2, limit=2)
    assert (middle.text, middle.first, middle.lines) == ("line 2\nline 3", 2, 2)
    beyond = ring.log(offset=50)
    assert (beyond.text, beyond.first, beyond.lines, beyond.total_lines) == ("", 10, 0, 10)
    assert RingText().log() == type(last)("", 0, 0, 0)


@given(st.lists(st.text(max_size=30), max_size=20), st.integers(2, 60))
def test_the_two_ends(texts: list[str], limit: int) -> None:
    """Output within the limit is whole; beyond it the beginning and the end are kept, 40 to 60, and nothing else."""
    kept, everything = HeadTail(limit), "".join(texts)
    for text in texts:
        kept.append(text)
    assert kept.total == len(everything)
    if len(everything) <= limit:
        assert (kept.text, kept.dropped) == (everything, 0)
    else:
        head = max(int(limit * 0.4), 1)
        assert kept.dropped == len(everything) - limit
        assert kept.text.startswith(everything[:head] + "\n\n[... ")
        assert kept.text.endswith(" ...]\n\n" + everything[head - limit :])
        assert f"{kept.dropped} of {len(everything)} characters" in kept.text


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("use sk-abcdefghijklmnopqrstuvwx now", "use sk-*** now"),
        ("sk-ant-api03-abcdefghijklmnop_qrs-t", "sk-ant-***"),
        ("ghp_abcdefghijklmnopqrstuvwxyz0123456789", "ghp_***"),
        ("id AKIAIOSFODNN7EXAMPLE.", "id AKIA***."),
        ("eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.abc-_123", "eyJ***"),
        (
            "https://api.telegram.org/bot12345678:AAabcdefghijklmnopqrstuvwxyz012345/getMe",
            "https://api.telegram.org/bot12345678:***/getMe",
        ),
        ("curl -H 'Authorization: Bearer abcdefghijkl'", "curl -H 'Authorization: Bearer ***'"),
        ("Authorization: Basic dXNlcjpwYXNz", "Authorization: Basic ***"),
        ("export OPENAI_API_KEY=abc123 X=1", "export OPENAI_API_KEY=*** X=1"),
        ("DB_PASSWORD='a b c' ls", "DB_PASSWORD=*** ls"),
        ('MY_SECRET="x y"', "MY_SECRET=***"),
        ("run --auth-token=abcdef --quiet", "run --auth-token=*** --quiet"),
        ("/cb?access_token=abc&state=1", "/cb?access_token=***&state=1"),
        ('{"client_secret": "a\\"b", "name": "x"}', '{"client_secret": "***", "name": "x"}'),
        ("{'password': 'hunter2'}", "{'password': '***'}"),
        ("db:\n  password: hunter2\n  user: bob", "db:\n  password: ***\n  user: bob"),
        ("> x-api-key: abcd1234", "> x-api-key: ***"),
        ("postgres://bob:hunter2@db/x", "postgres://bob:***@db/x"),
        (
            "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\nnext",
            "-----BEGIN RSA PRIVATE KEY-----***-----END RSA PRIVATE KEY-----\nnext",
        ),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\ncut", "-----BEGIN OPENSSH PRIVATE KEY-----***"),
    ],
)
def test_secrets_are_masked(text: str, masked: str) -> None:
    """The secret goes; its name, its prefix and what is around it stay readable."""
    assert mask_secrets(text) == masked


@pytest.mark.parametrize(
    "text",
    [
        "token=$TOKEN make",
        "API_KEY=${OTHER} run",
        "max_tokens=500 keyboard=us monkey=1 sort --key=2",
        "password=None primary_key=True",
        '{"key": "ArrowUp", "tokens": "12"}',
        "git@github.com:owner/repository.git",
        "http://localhost:8080/a@b",
        "task-abcdefghijklmnopqrstuvwx and disk-0123456789abcdefgh",
        "the password is asked for: see below",
        "-----BEGIN PUBLIC KEY-----\nabc\n-----END PUBLIC KEY-----",
    ],
)
def test_ordinary_text_is_not_masked(text: str) -> None:
    """Names without a value, references, and words that only resemble secrets stay as they are."""
    assert mask_secrets(text) == text


SECRETIVE = st.lists(
    st.sampled_from(
        [
            "sk-",
            "API_KEY=",
            "token: ",
            "password",
            "=",
            ":",
            '"',
            "'",
            "Bearer ",
            "://",
            "@",
            "a:b",
            "abcdefghijklmnop0123",
            "-----BEGIN PRIVATE KEY-----",
            "-----END PRIVATE KEY-----",
            "\n",
            " ",
            "***",
            "eyJabcdefgh.",
            "\\",
            "$",
            "_",
            "-",
        ]
    ),
    max_size=12,
).map("".join)


@given(SECRETIVE)
def test_masking_twice_changes_nothing(text: str) -> None:
    """Masked text can be masked again on its way out without becoming another."""
    once = mask_secrets(text)
    assert mask_secrets(once) == once


@pytest.mark.parametrize(
    "unit",
    ["a.", "a-", "eyJ-", "x_", "sk-", "bearer ", "a://", "-----BEGIN PRIVATE KEY-----", '"a_', "'", "\\", " ", "A "],
)
def test_masking_is_linear(unit: str) -> None:
    """A long hostile text is masked like any other; with quadratic patterns this would not end."""
    assert len(mask_secrets(unit * (400_000 // len(unit)))) > 0
