"""Watches a process's output for substrings, with limits on the number of events.

An `OutputWatch` belongs to one process, a `Breaker` is shared by all. Both are pure: text and time in, events out; the caller routes the events, also
those of the breaker, to the process's conversation. Lines are assembled across chunks (H24), so that the same output gives the same matches however
it is cut.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable
from typing import ClassVar, final

import msgspec

COOL_DOWN = 15.0
"""Seconds after an event in which a process gets no other (TOOL-46)."""

STRIKES = 3
"""Consecutive cool-downs with dropped matches after which a process is no longer watched (TOOL-48)."""

MAX_LINES = 20
MAX_TEXT = 2000
"""The maximum of matching lines, and of their characters, in one event (TOOL-44)."""

WINDOW, WINDOW_EVENTS, TRIP = 10.0, 15, 30.0
"""The limit over all processes: so many events in so many seconds; beyond it there are none for `TRIP` seconds (TOOL-50)."""

MAX_LINE = 16_384
"""A longer line is examined in overlapping parts, so that it cannot grow without limit."""

_LINE_END = re.compile(r"[\r\n]")


class Match(msgspec.Struct, frozen=True):
    """Lines of the output contained a pattern."""

    kind: ClassVar[str] = "watch_match"
    pattern: str
    """The pattern of the first of them."""
    text: str
    matches: int
    """How many lines there were; `text` shows at most 20 of them."""
    suppressed: int
    """Matching lines that were dropped since the last event of this process."""


class Disabled(msgspec.Struct, frozen=True):
    """The process matched too often: it is no longer watched, and its owner gets a notice of its end instead."""

    kind: ClassVar[str] = "watch_disabled"
    suppressed: int


class OverflowTripped(msgspec.Struct, frozen=True):
    """All processes together matched too often: match events are suspended."""

    kind: ClassVar[str] = "watch_overflow_tripped"
    seconds: float


class OverflowReleased(msgspec.Struct, frozen=True):
    """Match events are delivered again; says how many were dropped."""

    kind: ClassVar[str] = "watch_overflow_released"
    dropped: int


WatchEvent = Match | Disabled | OverflowTripped | OverflowReleased


class Hit(msgspec.Struct, frozen=True):
    """A line, or as much of it as there is, that contains a pattern."""

    pattern: str
    line: str


@final
class LineScanner:
    """Finds the lines that contain a pattern, each counted once, in text that arrives in pieces."""

    def __init__(self, patterns: tuple[str, ...], max_line: int = MAX_LINE) -> None:
        longest = max(map(len, patterns))
        self._patterns = patterns
        self._max_line = max(max_line, 2 * longest)
        self._overlap = longest - 1
        self._line = ""
        self._counted = False

    def feed(self, text: str) -> list[Hit]:
        """Return the hits in the lines that this piece completes."""
        hits: list[Hit] = []
        *ends, rest = _LINE_END.split(text)
        for end in ends:
            self._extend(end, hits)
            self._examine(self._line, hits)
            self._line, self._counted = "", False
        self._extend(rest, hits)
        return hits

    def settle(self) -> list[Hit]:
        """Return the hit in the unfinished line, such as a prompt; the rest of that line is not counted again."""
        hits: list[Hit] = []
        self._examine(self._line, hits)
        if self._counted:
            self._line = ""
        return hits

    def _extend(self, piece: str, hits: list[Hit]) -> None:
        if self._counted:
            return
        self._line += piece
        while len(self._line) > self._max_line and not self._counted:
            self._examine(self._line[: self._max_line], hits)
            self._line = self._line[self._max_line - self._overlap :]
        if self._counted:
            self._line = ""

    def _examine(self, line: str, hits: list[Hit]) -> None:
        if self._counted:
            return
        pattern = next((pattern for pattern in self._patterns if pattern in line), None)
        if pattern is not None:
            hits.append(Hit(pattern, line))
            self._counted = True


@final
class Breaker:
    """Limits match events over all processes (TOOL-50, TOOL-51)."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._recent: deque[float] = deque()
        self._tripped_until: float | None = None
        self._dropped = 0

    @property
    def tripped(self) -> bool:
        """Return whether an event would be dropped now."""
        return self._tripped_until is not None and self._clock() < self._tripped_until

    def admit(self) -> tuple[bool, list[WatchEvent]]:
        """Return whether one more match event may pass, and the events to emit before it."""
        now = self._clock()
        told: list[WatchEvent] = []
        if self._tripped_until is not None:
            if now < self._tripped_until:
                self._dropped += 1
                return False, told
            told.append(OverflowReleased(self._dropped))
            self._tripped_until, self._dropped = None, 0
            self._recent.clear()
        while self._recent and now - self._recent[0] >= WINDOW:
            self._recent.popleft()
        if len(self._recent) >= WINDOW_EVENTS:
            self._tripped_until, self._dropped = now + TRIP, 1
            return False, [*told, OverflowTripped(TRIP)]
        self._recent.append(now)
        return True, told


@final
class OutputWatch:
    """One process's patterns and their limits. Raises `ValueError` for patterns that could never match a line."""

    def __init__(self, patterns: Iterable[str], breaker: Breaker, clock: Callable[[], float]) -> None:
        self.patterns = tuple(patterns)
        if not self.patterns or not all(self.patterns):
            raise ValueError("watch_patterns must be a list of at least one text, none of them empty")
        for pattern in self.patterns:
            if _LINE_END.search(pattern):
                raise ValueError(f"watch pattern {pattern!r} has a line break in it: patterns are tested line by line")
        self._breaker = breaker
        self._clock = clock
        self._scanner = LineScanner(self.patterns)
        self._cools_until: float | None = None
        self._struck = False
        self._strikes = 0
        self._suppressed = 0
        self._events = 0
        self._disabled = False
        self._finished = False

    @property
    def disabled(self) -> bool:
        """Return whether the watch was disabled: the owner gets a notice of completion instead (TOOL-48)."""
        return self._disabled

    @property
    def events(self) -> int:
        """Return how many matches were delivered."""
        return self._events

    def feed(self, text: str) -> list[WatchEvent]:
        """Return the events for this piece of output."""
        return [] if self._disabled or self._finished else self._events_of(self._scanner.feed(text))

    def settle(self) -> list[WatchEvent]:
        """Examine the unfinished line, too, after the output has paused."""
        return [] if self._disabled or self._finished else self._events_of(self._scanner.settle())

    def finish(self) -> list[WatchEvent]:
        """Examine the last line after the process has exited and all its output was fed."""
        told = self.settle()
        self._finished = True
        return told

    def _events_of(self, hits: list[Hit]) -> list[WatchEvent]:
        if not hits:
            return []
        now = self._clock()
        if self._cools_until is not None and now < self._cools_until:
            return self._suppress(len(hits))
        if not self._struck:
            self._strikes = 0
        self._struck = False
        self._cools_until = now + COOL_DOWN
        admitted, told = self._breaker.admit()
        if not admitted:
            self._suppressed += len(hits)
            return told
        text = "\n".join(hit.line for hit in hits[:MAX_LINES])[:MAX_TEXT]
        told.append(Match(hits[0].pattern, text, len(hits), self._suppressed))
        self._suppressed = 0
        self._events += 1
        return told

    def _suppress(self, count: int) -> list[WatchEvent]:
        self._suppressed += count
        if not self._struck:
            self._struck = True
            self._strikes += 1
        if self._strikes < STRIKES:
            return []
        self._disabled = True
        return [Disabled(self._suppressed)]
