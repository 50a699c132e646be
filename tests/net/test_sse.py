"""Reading server-sent events: the same events however the bytes are cut, and limits that hold."""

from __future__ import annotations

import itertools
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_trio.net.sse import EventReader, EventTooLarge, ServerEvent

STREAM = (
    b"\xef\xbb\xbf: a comment\n\n"
    b"data: one\n\n"
    b"event: named\r\nid: 7\r\ndata: two\r\ndata:three\r\n\r\n"
    b"retry: 5\nevent: empty\n\n"
    b"data\n\n"
    b"data:  spaced: out \n\n"
)
EVENTS = [
    ServerEvent("message", b"one"),
    ServerEvent("named", b"two\nthree"),
    ServerEvent("message", b""),
    ServerEvent("message", b" spaced: out "),
]


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_cuts_do_not_matter(cuts: list[int]) -> None:
    """The events of a stream do not depend on how it was cut into pieces."""
    reader = EventReader()
    borders = [0, *sorted(cuts), len(STREAM)]
    found = [event for start, end in itertools.pairwise(borders) for event in reader.feed(STREAM[start:end])]
    assert found == EVENTS
    assert reader.finish() == []


@given(st.binary(max_size=200), st.integers(1, 50))
def test_any_bytes_are_survived(data: bytes, limit: int) -> None:
    """Whatever arrives is read or refused, and never crashes the reader."""
    reader = EventReader(limit)
    with suppress(EventTooLarge):
        reader.feed(data)
        assert len(b"".join(event.data for event in reader.finish())) <= limit


def test_event_without_its_last_blank_line() -> None:
    """An event that the end of the stream cut short of its blank line is still told."""
    reader = EventReader()
    assert reader.feed(b"data: one\n\ndata: two") == [ServerEvent("message", b"one")]
    assert reader.finish() == [ServerEvent("message", b"two")]


@pytest.mark.parametrize("piece", [b"x" * 10, b"data: xxxxxxx\n", b"data:\n"])
def test_events_without_end_are_refused(piece: bytes) -> None:
    """A line, a lot of lines, and a lot of empty lines all meet the limit."""
    reader = EventReader(limit=1000)
    for _ in range(10):
        reader.feed(piece)

    def for_ever() -> None:
        while True:
            reader.feed(piece)

    with pytest.raises(EventTooLarge, match="longer than 1000 bytes"):
        for_ever()


def test_limit_is_for_one_event() -> None:
    """Any number of events below the limit may follow each other."""
    reader = EventReader(limit=100)
    for _ in range(50):
        assert len(reader.feed(b"data: " + b"x" * 60 + b"\n\n")) == 1
