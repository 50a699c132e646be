"""Splits long texts into several messages, each within the platform's limit, together the whole text.

Breaks are at the end of a line, else at a space, else between grapheme clusters; within inline code only if there is no other place. A fenced code
block that is cut is closed and reopened with its language. With more than one message, each ends with its number, "(2/3)".

Limits are counted by the platform's length function, such as `utf16_length`, which must count every code point at least once.
"""

from __future__ import annotations

import bisect
import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import msgspec

Length: TypeAlias = Callable[[str], int]

SMALLEST_LIMIT: Final = 32
"""A smaller limit has no room for a number, a fence and text."""


def utf16_length(text: str) -> int:
    """Count UTF-16 code units, as Telegram does."""
    return len(text) + sum(char > "\uffff" for char in text)


class Limit(msgspec.Struct, frozen=True):
    """The maximum length of one message."""

    size: int
    length: Length = len


TELEGRAM: Final = Limit(4096, utf16_length)
DISCORD: Final = Limit(2000)
SLACK: Final = Limit(39_000)


class Chunk(msgspec.Struct, frozen=True):
    """One message. The bodies and separators of all chunks, joined, are the text without leading white space.

    `opening` and `closing` are the fences that were added because a code block was cut, `marker` is the number of the message.
    """

    body: str
    separator: str = ""
    opening: str = ""
    closing: str = ""
    marker: str = ""

    @property
    def text(self) -> str:
        return f"{self.opening}{self.body}{self.closing}{self.marker}"


def split_text(text: str, limit: Limit) -> list[str]:
    """Return the messages for `text`; none if it has no visible character."""
    return [chunk.text for chunk in split_chunks(text, limit)]


def split_chunks(text: str, limit: Limit) -> list[Chunk]:
    """Like `split_text`, with the additions separate from the text. Raises `ValueError` for a limit below `SMALLEST_LIMIT`."""
    if limit.size < SMALLEST_LIMIT:
        raise ValueError(
            f"a message limit of {limit.size} is too small to split text; at least {SMALLEST_LIMIT} is needed"
        )
    if not text.strip():
        return []
    if limit.length(text) <= limit.size:
        return [Chunk(text)]
    splitter = _Splitter(_BLANK_START.sub("", text, count=1), limit.length)
    digits = 1
    while True:
        room = limit.size - limit.length(_marker(10**digits - 1, 10**digits - 1))
        chunks = list(splitter.chunks(room))
        if len(str(len(chunks))) <= digits:
            break
        digits += 1
    if len(chunks) == 1:
        return chunks
    return [_numbered(chunk, number, len(chunks)) for number, chunk in enumerate(chunks, 1)]


def _marker(number: int, total: int) -> str:
    return f" ({number}/{total})"


def _numbered(chunk: Chunk, number: int, total: int) -> Chunk:
    marker = _marker(number, total)
    last_line = chunk.text.rpartition("\n")[2]
    if _FENCE.match(last_line):
        # A closing fence must stand alone on its line.
        marker = "\n" + marker[1:]
    return Chunk(chunk.body, chunk.separator, chunk.opening, chunk.closing, marker)


# Fences

_BLANK_START: Final = re.compile(r"\A(?:[^\S\n]*\n)+")
_FENCE: Final = re.compile(r" {0,3}(`{3,}|~{3,})([^\n]*)$")
_BARE_FENCE: Final = re.compile(r" {0,3}(?:`{3,}|~{3,})\s*")
_FENCE_START: Final = re.compile(r" {0,3}(?:```|~~~)")


class _Fence(msgspec.Struct, frozen=True):
    """A fenced block: the offsets of its opening line, its content and what follows, and how to write it again."""

    start: int
    content: int
    content_end: int
    end: int
    mark: str
    language: str

    @property
    def opening(self) -> str:
        return f"{self.mark}{self.language}\n"

    @property
    def closing(self) -> str:
        return f"\n{self.mark}"


def _fences(text: str) -> list[_Fence]:
    """Return the fenced blocks of a text; an unclosed block extends to its end."""
    found: list[_Fence] = []
    start, content, mark, language = 0, 0, "", ""
    position = 0
    for line in re.split(r"(?<=\n)", text):
        after = position + len(line)
        match = _FENCE.match(line.rstrip("\r\n"))
        if not mark:
            if match is not None and not (match.group(1)[0] == "`" and "`" in match.group(2)):
                words = match.group(2).split()
                start, content, mark, language = position, after, match.group(1), words[0] if words else ""
        elif match is not None and match.group(1).startswith(mark) and not match.group(2).strip():
            if position == content:
                # An empty block has no place to break: all of it counts as its opening line.
                content = position = after
            found.append(_Fence(start, content, position - 1, after, mark, language))
            mark = ""
        position = after
    if mark:
        found.append(_Fence(start, content, len(text), len(text), mark, language))
    return found


# Splitting


class _Splitter:
    """Splits a text with its code blocks. The caller repeats it with less room until the numbers fit."""

    def __init__(self, text: str, length: Length) -> None:
        fences = _fences(text)
        if fences and fences[-1].content_end == len(text):
            # Close the last block, because the number of the last message would be inside it otherwise.
            text += fences[-1].closing
            fences = _fences(text)
        self._text = text
        self._length = length
        self._fences = fences
        self._starts = [fence.start for fence in fences]
        self._room = 0

    def chunks(self, room: int) -> Iterator[Chunk]:
        """Return the chunks, unnumbered, each at most `room` long."""
        self._room = room
        text, position = self._text, 0
        pending: Chunk | None = None
        reopened: _Fence | None = None
        while position < len(text):
            opening = "" if reopened is None else reopened.opening
            end, following, cut = self._next(position, opening)
            body, separator = text[position:end], text[end:following]
            if body.strip():
                if pending is not None:
                    yield pending
                pending = Chunk(body, separator, opening, "" if cut is None else cut.closing)
            elif pending is not None:
                # Every platform refuses a message that has only white space.
                pending = Chunk(pending.body, pending.separator + body + separator, pending.opening, pending.closing)
            position = following
            reopened = cut if cut is not None and following < cut.end else None
        if pending is not None:
            yield pending

    def _next(self, position: int, opening: str) -> tuple[int, int, _Fence | None]:
        """Return the end of the body from `position`, the start of the next one, and the code block that is cut there."""
        room = self._room - self._length(opening)
        reserved = 0
        while True:
            reach = self._reach(position, room - reserved)
            end = self._break(position, reach)
            cut = None if end == len(self._text) else self._cut(end)
            needed = 0 if cut is None else self._length(cut.closing)
            if needed <= reserved:
                break
            reserved = needed
        following = end + 1 if self._text[end : end + 1] in ("\n", " ") else end
        if cut is not None and following > cut.content_end:
            # The block's own last line is next: the closing fence that is added here takes its place.
            following = cut.end
        return end, following, cut

    def _reach(self, position: int, room: int) -> int:
        """Return the furthest offset such that the text up to it fits into `room`; at least one character further."""
        text, length = self._text, self._length
        high = min(position + room, len(text))
        if length(text[position:high]) <= room:
            return high
        low = position + 1
        while high - low > 1:
            middle = (low + high) // 2
            if length(text[position:middle]) <= room:
                low = middle
            else:
                high = middle
        return low

    def _fence_at(self, offset: int) -> _Fence | None:
        """Return the code block whose opening line, content or closing line is around `offset`."""
        index = bisect.bisect_left(self._starts, offset) - 1
        return self._fences[index] if index >= 0 and offset < self._fences[index].end else None

    def _cut(self, offset: int) -> _Fence | None:
        """Return the code block that a break at `offset` cuts, if there is room to close and reopen it."""
        fence = self._fence_at(offset)
        if fence is None or not fence.content <= offset <= fence.content_end:
            return None
        return fence if self._length(fence.opening + fence.closing) <= self._room // 2 else None

    def _break(self, position: int, reach: int) -> int:
        """Return the best place to break in (position, reach]: a newline, else a space, in the second half if possible."""
        text = self._text
        if reach >= len(text):
            return reach
        half = position + (reach - position) // 2
        newline = self._newline(position, reach)
        if newline > half:
            return newline
        spans = [] if self._cut(reach) is not None else _code_spans(text, position, reach, reach + self._room)
        space = self._space(position, reach, spans)
        if space > half:
            return space
        for candidate in (newline, space):
            if candidate > position:
                return candidate
        inside = next((start for start, end in spans if start < reach < end), position)
        return inside if inside > position else self._between_characters(position, reach)

    def _newline(self, position: int, reach: int) -> int:
        # A separator may directly follow the last character that fits.
        newline = self._text.rfind("\n", position + 1, reach + 1)
        fence = self._fence_at(newline)
        if fence is not None and newline < fence.content:
            # A break after a block's opening line would leave an empty block, so break before that line.
            newline = fence.start - 1
        return newline if newline > position else -1

    def _space(self, position: int, reach: int, spans: list[tuple[int, int]]) -> int:
        text = self._text
        space = text.rfind(" ", position + 1, reach + 1)
        while space > position:
            inside = next((start for start, end in spans if start < space < end), None)
            whole = _is_boundary(text, space) and _is_boundary(text, space + 1)
            if inside is None and whole and self._is_open(space) and not self._makes_fence(space, space + 1):
                return space
            space = text.rfind(" ", position + 1, space if inside is None else inside)
        return -1

    def _is_open(self, offset: int) -> bool:
        """Return whether a break at `offset` leaves the opening lines of code blocks whole."""
        fence = self._fence_at(offset)
        return fence is None or offset >= fence.content

    def _makes_fence(self, end: int, following: int) -> bool:
        """Return whether a break within a line would turn backticks on either side of it into a fence."""
        text = self._text
        if _FENCE_START.match(text, following):
            return True
        line = text[text.rfind("\n", max(end - self._room, 0), end) + 1 : end] if end else ""
        return _BARE_FENCE.fullmatch(line) is not None

    def _between_characters(self, position: int, reach: int) -> int:
        offset = reach
        while offset > position and (not _is_boundary(self._text, offset) or self._makes_fence(offset, offset)):
            offset -= 1
        # A grapheme cluster that is longer than a message has to be cut.
        return offset if offset > position else reach


def _code_spans(text: str, position: int, reach: int, horizon: int) -> list[tuple[int, int]]:
    """Return the inline code on the line around `reach`: the offsets of its first backtick and after its last one.

    Code that does not end before `horizon` is too long for a message and may be cut.
    """
    start = max(text.rfind("\n", position, reach) + 1, position)
    end = text.find("\n", reach, horizon)
    runs = [match.span() for match in re.finditer("`+", text[start : end if end >= 0 else horizon])]
    later: dict[int, list[int]] = {}
    for index in range(len(runs) - 1, -1, -1):
        later.setdefault(runs[index][1] - runs[index][0], []).append(index)
    found: list[tuple[int, int]] = []
    index = 0
    while index < len(runs):
        candidates = later[runs[index][1] - runs[index][0]]
        while candidates and candidates[-1] <= index:
            candidates.pop()
        if candidates:
            found.append((start + runs[index][0], start + runs[candidates[-1]][1]))
            index = candidates[-1]
        index += 1
    return found


# Grapheme clusters

_ZERO_WIDTH_JOINER: Final = "\u200d"


def _extends(char: str) -> bool:
    """Return whether `char` belongs to the character before it."""
    if char < "\u0300":
        return False
    return (
        unicodedata.category(char) in ("Mn", "Me", "Mc")
        or char == _ZERO_WIDTH_JOINER
        or "\U0001f3fb" <= char <= "\U0001f3ff"
        or "\U000e0020" <= char <= "\U000e007f"
        or "\u1160" <= char <= "\u11ff"
    )


def _is_regional(char: str) -> bool:
    return "\U0001f1e6" <= char <= "\U0001f1ff"


def _is_boundary(text: str, offset: int) -> bool:
    """Return whether a break before `offset` leaves the grapheme clusters on both sides whole."""
    if offset <= 0 or offset >= len(text):
        return True
    before, after = text[offset - 1], text[offset]
    if _extends(after) or before == _ZERO_WIDTH_JOINER or (before == "\r" and after == "\n"):
        return False
    if _is_regional(before) and _is_regional(after):
        # A flag is a pair of regional indicators; pairs are counted from the start of the sequence.
        start = offset
        while start > 0 and _is_regional(text[start - 1]):
            start -= 1
        return (offset - start) % 2 == 0
    return True
