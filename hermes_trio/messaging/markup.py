"""Converts a model's text (CommonMark, more or less) to the markup of each platform.

The text is parsed once into blocks and inline nodes, and each dialect writes them. Parsing never fails: what is not markup is text. The output for
Telegram is always valid MarkdownV2, because every node is written by a rule that is valid by itself and everything else is escaped; a plain form
exists in case a message is refused anyway.
"""

from __future__ import annotations

import bisect
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import ClassVar, Final, TypeAlias

from attrs import define, field, frozen

MAX_RUNS: Final = 2000
"""The maximum of runs of emphasis marks in one paragraph; one with more is left as text."""

MAX_RUN: Final = 3
MAX_DEPTH: Final = 20


def to_markdown_v2(text: str) -> str:
    """Convert for Telegram with `parse_mode=MarkdownV2`."""
    return _write(text, _MarkdownV2())


def to_mrkdwn(text: str) -> str:
    """Convert for Slack's `mrkdwn` texts. The result mentions no one."""
    return _write(text, _Mrkdwn())


def to_plain(text: str) -> str:
    """Remove all markup, for a resend after the platform refused it."""
    return _write(text, _Plain())


def to_discord(text: str) -> str:
    """Convert for Discord, which reads the same markup; mentions are switched off where the message is sent."""
    return _clean(text)


def escape_markdown_v2(text: str) -> str:
    """Escape literal text within MarkdownV2."""
    return _RESERVED_V2.sub(r"\\\1", _clean(text))


def _clean(text: str) -> str:
    """Remove characters that no platform accepts: lone surrogates and control characters except tab and newline."""
    unified = text.replace("\r\n", "\n").replace("\r", "\n")
    return _UNSENDABLE.sub(lambda match: "\ufffd" if match.group() >= "\ud800" else "", unified)


_UNSENDABLE: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
_RESERVED_V2: Final = re.compile(r"([_*\[\]()~`>#+\-=|{}.!\\])")


# Nodes


class Style(Enum):
    STRONG = "strong"
    EMPHASIS = "emphasis"
    STRIKE = "strike"


@frozen
class Text:
    text: str


@frozen
class Code:
    text: str


@frozen
class Styled:
    style: Style
    children: tuple[Inline, ...]
    depth: int = field(default=1, eq=False, repr=False)


@frozen
class Link:
    children: tuple[Inline, ...]
    url: str


Inline: TypeAlias = Text | Code | Styled | Link


@frozen
class CodeBlock:
    language: str
    text: str


@frozen
class Line:
    """Inline content behind a literal prefix (an item's indentation and sign) or as a quoted line."""

    children: tuple[Inline, ...]
    prefix: str = ""
    quoted: bool = False


Block: TypeAlias = CodeBlock | Line


# Reading blocks

_FENCE: Final = re.compile(r"([ \t]*)(`{3,}|~{3,})[ \t]*([^\s`]*)[^`\n]*$")
_HEADING: Final = re.compile(r" {0,3}#{1,6}[ \t]+(.+?)[ \t]*#*[ \t]*$")
_RULE: Final = re.compile(r" {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$")
_BULLET: Final = re.compile(r"([ \t]*)[-*+][ \t]+(?:\[([ xX])\][ \t]+)?(?=\S)")
_NUMBER: Final = re.compile(r"([ \t]*\d{1,9}[.)])[ \t]+(?=\S)")
_QUOTE: Final = re.compile(r" {0,3}>[ ]?(.*)$")
_TABLE_RULE: Final = re.compile(r"[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$")
_LANGUAGE: Final = re.compile(r"[A-Za-z0-9_+#.-]{1,32}")


def _blocks(text: str) -> Iterator[Block]:
    lines = text.split("\n")
    position = 0
    while position < len(lines):
        line = lines[position]
        if fence := _FENCE.match(line):
            block, position = _code_block(lines, position, fence)
            yield block
            continue
        if _is_table(lines, position):
            end = position
            while end < len(lines) and "|" in lines[end]:
                end += 1
            yield CodeBlock("", _table(lines[position:end]))
            position = end
            continue
        if special := _special_line(line):
            yield special
            position += 1
            continue
        end = position + 1
        while line.strip() and end < len(lines) and _is_ordinary(lines, end):
            end += 1
        yield Line(_inline("\n".join(part.rstrip() for part in lines[position:end])))
        position = end


def _is_ordinary(lines: Sequence[str], position: int) -> bool:
    line = lines[position]
    special = _FENCE.match(line) or _special_line(line, peek=True) or _is_table(lines, position)
    return bool(line.strip()) and not special


def _code_block(lines: Sequence[str], position: int, fence: re.Match[str]) -> tuple[CodeBlock, int]:
    indent, mark, language = fence.groups()
    content: list[str] = []
    position += 1
    while position < len(lines):
        line = lines[position]
        position += 1
        bare = line.strip()
        if len(bare) >= len(mark) and not bare.strip(mark[0]):
            break
        content.append(line.removeprefix(indent))
    return CodeBlock(language if _LANGUAGE.fullmatch(language) else "", "\n".join(content)), position


def _special_line(line: str, *, peek: bool = False) -> Line | None:
    """Return a heading, rule, item or quoted line; `peek` leaves its content unread."""

    def read(text: str) -> tuple[Inline, ...]:
        return () if peek else _inline(text)

    if heading := _HEADING.match(line):
        return Line((Styled(Style.STRONG, read(heading.group(1))),))
    if _RULE.match(line):
        return Line((Text("———"),))
    if bullet := _BULLET.match(line):
        sign = {None: "•", " ": "☐"}.get(bullet.group(2), "☑")
        return Line(read(line[bullet.end() :]), f"{bullet.group(1)}{sign} ")
    if number := _NUMBER.match(line):
        return Line(read(line[number.end() :]), f"{number.group(1)} ")
    if quote := _QUOTE.match(line):
        return Line(read(quote.group(1)), quoted=True)
    return None


def _is_table(lines: Sequence[str], position: int) -> bool:
    if position + 1 >= len(lines) or "|" not in lines[position] or "|" not in lines[position + 1]:
        return False
    return _TABLE_RULE.match(lines[position + 1]) is not None


def _table(lines: Sequence[str]) -> str:
    """Return a table as aligned plain text: no chat platform shows tables, all show fixed-width text."""
    rows = [
        [_words(_inline(cell.strip())) for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
        for number, line in enumerate(lines)
        if number != 1
    ]
    columns = max(len(row) for row in rows)
    widths = [max((_width(row[column]) for row in rows if column < len(row)), default=0) for column in range(columns)]

    def shown(cells: Sequence[str]) -> str:
        padded = (cell + " " * (width - _width(cell)) for cell, width in zip(cells, widths, strict=False))
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([shown(rows[0]), rule, *(shown(row) for row in rows[1:])])


def _width(text: str) -> int:
    return sum(
        2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text if not unicodedata.combining(char)
    )


# Reading inline content

_PUNCTUATION: Final = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
_ESCAPABLE: Final = _PUNCTUATION | {"\n"}
_AUTOLINK: Final = re.compile(r"<((?:https?|ftp|tg|mailto):[^\s<>]*)>")
_ORDINARY: Final = re.compile(r"(?:[^\\`*_~\[!<h]|h(?!ttps?://))*")
_LINKABLE: Final = re.compile(r"(?:https?://|ftp://|tg://|mailto:|tel:)[^\s\x00-\x1f]+", re.IGNORECASE)
_BARE_URL: Final = re.compile(r"https?://[^\s<>`]+")
_DESTINATION: Final = re.compile(
    r"\([ \t]*(?:<([^<>\n]*)>|((?:\\.|[^\s()\\]|\((?:\\.|[^\s()\\])*\))*))(?:[ \t]+(?:\"[^\"]*\"|'[^']*'))?[ \t]*\)"
)


@define
class _Run:
    """A run of equal emphasis marks that is not used up yet."""

    char: str
    count: int
    length: int
    can_open: bool
    can_close: bool


def _inline(text: str) -> tuple[Inline, ...]:
    return tuple(_InlineReader(text, links=True).read())


class _InlineReader:
    """One left-to-right pass; offsets of code and brackets are found before, so that the pass is linear."""

    def __init__(self, text: str, *, links: bool) -> None:
        self._text = text
        self._links = links
        self._items: list[Inline | _Run] = []
        self._plain: list[str] = []
        self._runs: dict[int, list[int]] = {}
        for match in re.finditer("`+", text):
            self._runs.setdefault(len(match.group()), []).append(match.start())
        self._brackets = self._match_brackets() if links and "[" in text else {}

    def read(self) -> list[Inline]:
        text, position = self._text, 0
        while position < len(text):
            char = text[position]
            if char == "\\" and text[position + 1 : position + 2] in _ESCAPABLE:
                self._plain.append(text[position + 1])
                position += 2
            elif char == "`":
                position = self._code(position)
            elif char in "*_" or text.startswith("~~", position):
                position = self._emphasis(position)
            elif link := (self._link(position) if char in "[!" else self._address(position)):
                position = link
            else:
                plain = _ORDINARY.match(text, position + 1)
                assert plain is not None
                self._plain.append(char + plain.group())
                position = plain.end()
        self._flush()
        return _resolved(self._items)

    def _flush(self) -> None:
        if self._plain:
            self._items.append(Text("".join(self._plain)))
            self._plain.clear()

    def _add(self, item: Inline | _Run) -> None:
        self._flush()
        self._items.append(item)

    def _code_end(self, position: int) -> tuple[int, int | None]:
        """Return the length of a run of backticks, and where the run starts that ends the code, if there is one."""
        end = position
        while self._text.startswith("`", end):
            end += 1
        starts = self._runs.get(end - position, [])
        index = bisect.bisect_right(starts, position)
        return end - position, starts[index] if index < len(starts) else None

    def _code(self, position: int) -> int:
        length, end = self._code_end(position)
        if end is None:
            self._plain.append("`" * length)
            return position + length
        content = self._text[position + length : end].replace("\n", " ")
        if content.startswith(" ") and content.endswith(" ") and content.strip():
            content = content[1:-1]
        self._add(Code(content))
        return end + length

    def _emphasis(self, position: int) -> int:
        text, char = self._text, self._text[position]
        end = position
        while end < len(text) and text[end] == char:
            end += 1
        length = end - position
        before = text[position - 1] if position else " "
        after = text[end] if end < len(text) else " "
        left = not after.isspace() and (not _is_punctuation(after) or before.isspace() or _is_punctuation(before))
        right = not before.isspace() and (not _is_punctuation(before) or after.isspace() or _is_punctuation(after))
        if char == "_":
            can_open = left and (not right or _is_punctuation(before))
            can_close = right and (not left or _is_punctuation(after))
        else:
            can_open, can_close = left, right
        within_word = char == "*" and length == 1 and before.isalnum() and after.isalnum()
        if within_word or length > MAX_RUN or (char == "~" and length != 2):
            # "2*3*4" is arithmetic, and long runs are rules and borders.
            can_open = can_close = False
        self._add(_Run(char, length, length, can_open, can_close))
        return end

    def _match_brackets(self) -> dict[int, int]:
        """Return the closing bracket of each opening one, leaving out escaped ones and those in code."""
        text, position = self._text, 0
        stack: list[int] = []
        found: dict[int, int] = {}
        while position < len(text):
            char = text[position]
            if char == "`":
                length, end = self._code_end(position)
                position = (position if end is None else end) + length
                continue
            if char == "[":
                stack.append(position)
            elif char == "]" and stack:
                found[stack.pop()] = position
            position += 2 if char == "\\" else 1
        return found

    def _link(self, position: int) -> int | None:
        """Read a link or an image from `position`; an image becomes a link to it."""
        start = position + 1 if self._text.startswith("![", position) else position
        end = self._brackets.get(start)
        if end is None:
            return None
        destination = _DESTINATION.match(self._text, end + 1)
        if destination is None:
            return None
        url = destination.group(1) if destination.group(1) is not None else destination.group(2)
        url = re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", url)
        children = _InlineReader(self._text[start + 1 : end], links=False).read()
        self._add(Link(tuple(children) or (Text(url),), url))
        return destination.end()

    def _address(self, position: int) -> int | None:
        """Read an address in angle brackets, or a bare one, whose underscores and asterisks mean nothing."""
        text = self._text
        if match := _AUTOLINK.match(text, position):
            if not self._links:
                self._plain.append(match.group(1))
            else:
                self._add(Link((Text(match.group(1).removeprefix("mailto:")),), match.group(1)))
            return match.end()
        if position and (text[position - 1].isalnum() or text[position - 1] == "_"):
            return None
        if match := _BARE_URL.match(text, position):
            url = match.group().rstrip("*_~)].,;:!?'\"")
            self._plain.append(url)
            return position + len(url)
        return None


def _is_punctuation(char: str) -> bool:
    return char in _PUNCTUATION or unicodedata.category(char)[0] in "PS"


def _resolved(items: list[Inline | _Run]) -> list[Inline]:
    """Pair the emphasis marks by CommonMark's rules; marks without a partner are text."""
    if sum(isinstance(item, _Run) for item in items) > MAX_RUNS:
        return [_leftover(item) for item in items]
    # For each kind of closing run, where searching for its opening one can stop.
    floors: dict[tuple[str, bool, int], int] = {}
    position = 0
    while position < len(items):
        closer = items[position]
        if not isinstance(closer, _Run) or not closer.can_close:
            position += 1
            continue
        kind = (closer.char, closer.can_open, closer.length % 3)
        opening = _opening(items, position, floors.get(kind, 0), closer)
        if opening is None:
            floors[kind] = position
            position += 1
            continue
        opener = items[opening]
        assert isinstance(opener, _Run)
        used = 2 if min(opener.count, closer.count) >= 2 else 1
        style = Style.STRIKE if closer.char == "~" else Style.STRONG if used == 2 else Style.EMPHASIS
        children: tuple[Inline, ...] = tuple(_leftover(item) for item in items[opening + 1 : position])
        opener.count -= used
        closer.count -= used
        kept: list[Inline | _Run] = [run for run in (opener,) if run.count]
        after: list[Inline | _Run] = [run for run in (closer,) if run.count]
        depth = 1 + max((child.depth for child in children if isinstance(child, Styled)), default=0)
        if depth > MAX_DEPTH:
            children, depth = (Text(_words(children)),), 1
        node = Styled(style, children, depth)
        items[opening : position + 1] = [*kept, node, *after]
        position = opening + len(kept) + 1
        floors = {kind: min(floor, opening + len(kept)) for kind, floor in floors.items()}
    return [_leftover(item) for item in items]


def _opening(items: Sequence[Inline | _Run], position: int, floor: int, closer: _Run) -> int | None:
    for index in range(position - 1, floor - 1, -1):
        run = items[index]
        if not isinstance(run, _Run) or run.char != closer.char or not run.can_open:
            continue
        ambiguous = (run.can_close or closer.can_open) and (run.length % 3 or closer.length % 3)
        if closer.char == "~" or not ambiguous or (run.length + closer.length) % 3:
            return index
    return None


def _leftover(item: Inline | _Run) -> Inline:
    return Text(item.char * item.count) if isinstance(item, _Run) else item


# Writing


def _write(text: str, dialect: _Plain) -> str:
    written: list[str] = []
    for block in _blocks(_clean(text)):
        match block:
            case CodeBlock(language, content):
                written.append(dialect.block(language, content))
            case Line(children, prefix, quoted):
                inner = _write_inline(_simplified(children), dialect)
                written.append(dialect.quote(inner) if quoted else dialect.text(prefix) + inner)
    return "\n".join(written)


def _write_inline(nodes: Sequence[Inline], dialect: _Plain) -> str:
    parts: list[str] = []
    for index, node in enumerate(nodes):
        match node:
            case Text(text):
                parts.append(dialect.text(text))
            case Code(text):
                parts.append(dialect.code(text))
            case Link(children, url):
                label = children if dialect.styled_labels else (Text(_words(children)),)
                inner = _write_inline(label, dialect)
                if _LINKABLE.fullmatch(url):
                    parts.append(dialect.link(inner, url))
                else:
                    parts.append(f"{inner}{dialect.text(f' ({url})')}" if url else inner)
            case Styled(style=style, children=children):
                inner = _write_inline(children, dialect)
                touched = not dialect.touching and _is_touched(nodes, index)
                parts.append(inner if touched else dialect.styled(style, inner))
    return "".join(parts)


def _is_touched(nodes: Sequence[Inline], index: int) -> bool:
    before = _words(nodes[index - 1 : index]) if index else ""
    return before[-1:].isalnum() or _words(nodes[index + 1 : index + 2])[:1].isalnum()


def _simplified(nodes: Iterable[Inline], active: frozenset[Style] = frozenset(), in_link: bool = False) -> list[Inline]:
    """Return the same content with each style applied once, neighbours of one kind merged and empty nodes left out.

    Two neighbouring italics would meet in "__", which Telegram reads as the start of an underline.
    """
    result: list[Inline] = []
    for node in nodes:
        match node:
            case Text(text):
                found: list[Inline] = [Text(text)] if text else []
            case Code(text):
                found = [Text(text) if in_link else Code(text)] if text else []
            case Link(children, url):
                found = [Link(tuple(_simplified(children, active, in_link=True)), url)]
            case Styled(style=style, children=children):
                inner = _simplified(children, active | {style}, in_link=in_link)
                blank = not _words(inner).strip()
                found = inner if style in active or blank else [Styled(style, tuple(inner))]
        for one in found:
            result[-1:] = _merged(result[-1], one) if result else [one]
    return result


def _merged(left: Inline, right: Inline) -> list[Inline]:
    match left, right:
        case Text(one), Text(other):
            return [Text(one + other)]
        case Styled(style=style, children=one), Styled(style=other_style, children=other) if style is other_style:
            joined = [*one[:-1], *_merged(one[-1], other[0]), *other[1:]]
            return [Styled(style, tuple(joined))]
        case _:
            return [left, right]


def _words(nodes: Iterable[Inline]) -> str:
    return "".join(node.text if isinstance(node, Text | Code) else _words(node.children) for node in nodes)


# Dialects


class _Plain:
    """The words alone. Other dialects say what they do beyond it."""

    touching: ClassVar[bool] = True
    """Whether a letter or digit may touch styled text from outside."""
    styled_labels: ClassVar[bool] = True

    def text(self, text: str) -> str:
        return text

    def code(self, text: str) -> str:
        return text

    def styled(self, style: Style, inner: str) -> str:
        return inner

    def link(self, inner: str, url: str) -> str:
        return inner if inner == url.removeprefix("mailto:") else f"{inner} ({url})"

    def block(self, language: str, text: str) -> str:
        return text

    def quote(self, inner: str) -> str:
        return f"> {inner}"


class _Marked(_Plain):
    def styled(self, style: Style, inner: str) -> str:
        mark = {Style.STRONG: "*", Style.EMPHASIS: "_", Style.STRIKE: "~"}[style]
        return f"{mark}{inner}{mark}"


class _MarkdownV2(_Marked):
    def text(self, text: str) -> str:
        return _RESERVED_V2.sub(r"\\\1", text)

    def code(self, text: str) -> str:
        return f"`{self._verbatim(text)}`"

    def link(self, inner: str, url: str) -> str:
        escaped = url.replace("\\", "\\\\").replace(")", "\\)")
        return f"[{inner}]({escaped})"

    def block(self, language: str, text: str) -> str:
        return f"```{language}\n{self._verbatim(text)}\n```"

    def quote(self, inner: str) -> str:
        return f">{inner}"

    def _verbatim(self, text: str) -> str:
        return text.replace("\\", "\\\\").replace("`", "\\`")


class _Mrkdwn(_Marked):
    """Slack has no escape for its marks; only "&", "<" and ">" are control characters."""

    touching = False
    styled_labels = False

    def text(self, text: str) -> str:
        return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")

    def code(self, text: str) -> str:
        # A backtick cannot be written within code; this one looks like it and ends nothing.
        return f"`{self.text(text.replace('`', 'ˋ'))}`"

    def link(self, inner: str, url: str) -> str:
        escaped = url.replace("|", "%7C").replace("<", "%3C").replace(">", "%3E").replace("&", "&amp;")
        return f"<{escaped}|{' '.join(inner.split())}>"

    def block(self, language: str, text: str) -> str:
        return f"```\n{self.text(text.replace('```', 'ˋˋˋ'))}\n```"
