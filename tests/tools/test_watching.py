"""Watching output: matches per line across chunks, cool-downs, strikes, and the breaker over all processes."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_trio.tools.terminal.watching import (
    COOL_DOWN,
    MAX_TEXT,
    TRIP,
    WINDOW,
    WINDOW_EVENTS,
    Breaker,
    Disabled,
    Hit,
    LineScanner,
    Match,
    OutputWatch,
    OverflowReleased,
    OverflowTripped,
    WatchEvent,
)


class Clock:
    """A time that only the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def watch(clock: Clock, *patterns: str, breaker: Breaker | None = None) -> OutputWatch:
    """A watch of its own, or of a shared breaker."""
    return OutputWatch(patterns or ("ERROR",), breaker or Breaker(clock), clock)


def kinds(events: list[WatchEvent]) -> list[str]:
    """The names under which events travel."""
    return [event.kind for event in events]


def test_a_match(clock: Clock) -> None:
    """A line that contains a pattern is told with the pattern, the line and nothing suppressed."""
    assert watch(clock, "READY", "up").feed("starting\nserver READY on 80\n") == [
        Match("READY", "server READY on 80", matches=1, suppressed=0)
    ]


def test_patterns_are_plain_and_case_sensitive(clock: Clock) -> None:
    """A pattern is no regular expression, and upper case is not lower case."""
    assert watch(clock, "a.c", "Error").feed("abc\nerror\n") == []
    assert kinds(watch(clock, "a.c").feed("x a.c y\n")) == ["watch_match"]


def test_lines_of_one_chunk_make_one_event(clock: Clock) -> None:
    """At most twenty lines and two thousand characters are shown; a line with two patterns counts once."""
    (event,) = watch(clock, "a", "b").feed("".join(f"b a {number}\n" for number in range(30)))
    assert isinstance(event, Match)
    assert (event.pattern, event.matches) == ("a", 30)
    assert event.text.split("\n") == [f"b a {number}" for number in range(20)]
    (long,) = watch(clock, "a").feed("a" * 5000 + "\n")
    assert isinstance(long, Match)
    assert len(long.text) == MAX_TEXT


def test_a_pattern_across_chunks(clock: Clock) -> None:
    """A pattern, and its line, that come in two reads are found whole (H24)."""
    watched = watch(clock, "listening on")
    assert watched.feed("now liste") == []
    assert watched.feed("ning on 80") == []
    assert watched.feed("80\nnext") == [Match("listening on", "now listening on 8080", 1, 0)]


def test_a_prompt_without_a_line_end(clock: Clock) -> None:
    """When the output pauses, an unfinished line is looked at; its rest is not counted again."""
    watched = watch(clock, "Password:")
    assert watched.feed("Password: ") == []
    assert watched.settle() == [Match("Password:", "Password: ", 1, 0)]
    clock.now += COOL_DOWN
    assert watched.settle() == []
    assert watched.feed("Password: again\n") == []
    assert kinds(watched.feed("Password: new line\n")) == ["watch_match"]


def test_progress_bars_are_lines(clock: Clock) -> None:
    """A carriage return ends a line, alone or before a line feed."""
    assert watch(clock, "100%").feed("10%\r50%\r100%\r\n") == [Match("100%", "100%", 1, 0)]


def test_after_the_exit(clock: Clock) -> None:
    """The last, unfinished line is examined at the end; after it there are no events (TOOL-53)."""
    watched = watch(clock)
    assert watched.feed("ERROR at the end") == []
    assert kinds(watched.finish()) == ["watch_match"]
    clock.now += 100
    assert watched.feed("ERROR\n") == watched.settle() == watched.finish() == []


def test_the_cool_down_drops_and_counts(clock: Clock) -> None:
    """Within 15 seconds of an event matches are counted; the next event tells how many, once."""
    watched = watch(clock)
    assert kinds(watched.feed("ERROR 1\n")) == ["watch_match"]
    clock.now += COOL_DOWN - 0.001
    assert watched.feed("ERROR 2\nERROR 3\n") == []
    clock.now += 0.001
    assert watched.feed("ERROR 4\n") == [Match("ERROR", "ERROR 4", 1, suppressed=2)]
    clock.now += COOL_DOWN
    assert watched.feed("ERROR 5\n") == [Match("ERROR", "ERROR 5", 1, suppressed=0)]
    assert watched.events == 3


def test_three_strikes(clock: Clock) -> None:
    """Three cool-downs in a row with drops end the watching for good, with one explanation (TOOL-48)."""
    watched = watch(clock)
    for _ in range(2):
        assert kinds(watched.feed("ERROR\n")) == ["watch_match"]
        for _ in range(5):
            assert watched.feed("ERROR\n") == []
        clock.now += COOL_DOWN
    assert kinds(watched.feed("ERROR\n")) == ["watch_match"]
    assert not watched.disabled
    assert watched.feed("ERROR\n") == [Disabled(suppressed=1)]
    assert watched.disabled
    clock.now += 1000
    assert watched.feed("ERROR\n") == watched.finish() == []


def test_a_clean_cool_down_forgives(clock: Clock) -> None:
    """A cool-down without a drop sets the strikes back (TOOL-47)."""
    watched = watch(clock)
    for _ in range(2):
        watched.feed("ERROR\n")
        watched.feed("ERROR\n")
        clock.now += COOL_DOWN
    watched.feed("ERROR\n")
    clock.now += COOL_DOWN
    for _ in range(2):
        assert kinds(watched.feed("ERROR\n")) == ["watch_match"]
        assert watched.feed("ERROR\n") == []
        clock.now += COOL_DOWN
    assert not watched.disabled


def test_the_breaker_trips_and_releases(clock: Clock) -> None:
    """The sixteenth event within ten seconds trips it; the first one after thirty tells what was dropped, and passes."""
    breaker = Breaker(clock)
    watches = [watch(clock, breaker=breaker) for _ in range(WINDOW_EVENTS + 3)]
    for watched in watches[:WINDOW_EVENTS]:
        assert kinds(watched.feed("ERROR\n")) == ["watch_match"]
    assert watches[WINDOW_EVENTS].feed("ERROR\n") == [OverflowTripped(TRIP)]
    assert breaker.tripped
    assert watches[WINDOW_EVENTS + 1].feed("ERROR\n") == []
    clock.now += TRIP
    assert not breaker.tripped
    assert watches[WINDOW_EVENTS + 2].feed("ERROR\n") == [OverflowReleased(dropped=2), Match("ERROR", "ERROR", 1, 0)]


def test_the_breaker_starts_the_cool_down(clock: Clock) -> None:
    """An event that the breaker drops still starts its process's cool-down, and is counted as suppressed (TOOL-52)."""
    breaker = Breaker(clock)
    for _ in range(WINDOW_EVENTS):
        watch(clock, breaker=breaker).feed("ERROR\n")
    watched = watch(clock, breaker=breaker)
    assert kinds(watched.feed("ERROR\n")) == ["watch_overflow_tripped"]
    clock.now += COOL_DOWN - 1
    assert watched.feed("ERROR\n") == []
    clock.now += TRIP
    assert watched.feed("ERROR\n")[-1] == Match("ERROR", "ERROR", 1, suppressed=2)


@pytest.mark.parametrize("patterns", [(), ("",), ("a", ""), ("a\nb",)])
def test_patterns_that_cannot_match(clock: Clock, patterns: tuple[str, ...]) -> None:
    """No pattern, an empty one, or one with a line break is refused with a reason."""
    with pytest.raises(ValueError, match="pattern"):
        OutputWatch(patterns, Breaker(clock), clock)


Text = st.text(alphabet="ab\r\n", max_size=80)
Patterns = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


@given(Text, Patterns, st.lists(st.integers(min_value=0), max_size=8))
def test_hits_do_not_depend_on_the_chunks(text: str, patterns: tuple[str, ...], cuts: list[int]) -> None:
    """However the output is cut, exactly the lines that contain a pattern are hit, each once."""
    scanner = LineScanner(patterns)
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    hits = [hit for start, end in pairwise(places) for hit in scanner.feed(text[start:end])] + scanner.settle()
    expected = [
        Hit(next(pattern for pattern in patterns if pattern in line), line)
        for line in re.split("[\r\n]", text)
        if any(pattern in line for pattern in patterns)
    ]
    assert hits == expected


@given(Text, Patterns, st.integers(1, 10))
def test_long_lines_are_bounded_and_searched(text: str, patterns: tuple[str, ...], max_line: int) -> None:
    """With lines cut into bounded parts, a line is hit, once, if and only if it contains a pattern."""
    scanner = LineScanner(patterns, max_line)
    hits: list[Hit] = []
    for character in text:
        hits += scanner.feed(character)
        assert len(scanner._line) <= max(max_line, 8) + 1
    hits += scanner.settle()
    lines = re.split("[\r\n]", text)
    assert len(hits) == sum(any(pattern in line for pattern in patterns) for line in lines)
    assert all(hit.pattern in hit.line for hit in hits)


Steps = st.lists(st.tuples(st.integers(0, 19), st.sampled_from([0.0, 0.1, 0.5, 1.0, 5.0, 16.0, 31.0])), max_size=200)


@given(Steps)
def test_the_limits_hold_for_any_history(steps: list[tuple[int, float]]) -> None:
    """Per process one event in 15 s; over all 15 in 10 s; nothing while tripped; every match is told or counted."""
    clock = Clock()
    breaker = Breaker(clock)
    watches = [watch(clock, breaker=breaker) for _ in range(20)]
    delivered: list[tuple[int, float]] = []
    fed, told, at_the_end = [0] * 20, [0] * 20, [0] * 20
    tripped_until = 0.0
    for number, pause in steps:
        clock.now += pause
        if watches[number].disabled:
            assert watches[number].feed("ERROR\n") == []
            continue
        fed[number] += 1
        for event in watches[number].feed("ERROR\n"):
            match event:
                case Match():
                    assert clock.now >= tripped_until
                    delivered.append((number, clock.now))
                    told[number] += event.matches + event.suppressed
                case Disabled():
                    at_the_end[number] = event.suppressed
                case OverflowTripped():
                    tripped_until = clock.now + TRIP
                case OverflowReleased():
                    assert event.dropped >= 1
    for number in range(20):
        times = [time for who, time in delivered if who == number]
        assert all(later - earlier >= COOL_DOWN for earlier, later in pairwise(times))
        pending = at_the_end[number] if watches[number].disabled else watches[number]._suppressed
        assert fed[number] == told[number] + pending
    times = [time for _, time in delivered]
    for first, last in zip(times, times[WINDOW_EVENTS:], strict=False):
        assert last - first >= WINDOW
