"""Reads shell words: quotes, escapes, expansions, substitutions, patterns.

The base of `Reader`, which adds commands; the two call each other, because a word may hold a script.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

import msgspec

from .quoting import ansi_c
from .syntax import Arithmetic, Item, Literal, Parameter, Part, Pattern, ProcessSubstitution, Substitution, Word

MAX_NESTING = 24
STEPS, STEPS_A_CHARACTER = 500, 8
"""The limit of words and blanks that are read from a text. Reading it once takes fewer; more means that parts are read repeatedly."""

_RUN = re.compile(r"[^ \t\n|&;()<>$`'\"\\]+")
_QUOTED_RUN = re.compile(r"[^$`\"\\]+")
TEXT_RUN = re.compile(r"[^$`\\]+")
_BRACED_RUN = re.compile(r"[^}$`'\"\\]+")
_BLANKS = re.compile(r"(?:[ \t]|\\\n)+")
_RESERVED = re.compile(
    r"(if|then|else|elif|fi|while|until|for|select|do|done|case|esac|function|coproc|time|in|\{|\}|\[\[|!(?=\())"
    r"(?=(?:\\\n)*(?:[ \t\n|&;()<>]|\Z))|(!)(?=(?:\\\n)*[ \t\n<>])"
)
_PARAMETER = re.compile(r"(!?)(#?)([A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?$!\-])")
_CONTINUED_NAME = re.compile(r"(?:\\\n)+[A-Za-z0-9_]")
_OPERATOR = re.compile(r":?[-=?+]|##?|%%?|/[/#%]?|\^\^?|,,?|~~?|@[A-Za-z]|:|[@*]")
_LITERAL_QUOTE_OPERATORS = frozenset({"-", "=", "?", "+", ":-", ":=", ":?", ":+"})


class Unreadable(Exception):
    """Raised if the text is not a shell script that the reader understands."""


class TooDeep(Unreadable):
    """Raised if the text nests deeper than the reader follows, or takes too many steps."""


class StepsLeft(msgspec.Struct):
    """The remaining steps in which a text must be read, including the texts inside it."""

    count: int


class WordReader(ABC):
    """Reads words from a position in a text; also collects `comments`.

    Reading ends for every text: each step is counted, and `TooDeep` is raised when there are too many. A text inside a text has the `steps`
    of the outer one.
    """

    def __init__(self, text: str, *, nesting: int = 0, steps: StepsLeft | None = None) -> None:
        self._steps = StepsLeft(STEPS + STEPS_A_CHARACTER * len(text)) if steps is None else steps
        self.text = text
        self.end: int = len(text)
        self.position: int = 0
        self.nesting: int = nesting
        self.starts: set[int] = set()
        """Offsets at which a simple command begins, substitutions included."""
        self.comments: list[tuple[int, int]] = []

    @abstractmethod
    def _parenthesised(self) -> list[Item]:
        """Return the script up to the closing parenthesis, which is consumed."""

    @abstractmethod
    def _until(self, word: str) -> list[Item]:
        """Return the script up to a reserved word, which is consumed."""

    @abstractmethod
    def _inner(self, text: str) -> tuple[list[Item], set[int]]:
        """Return the script of a text of its own, and where its commands begin."""

    @abstractmethod
    def _newline(self) -> None:
        """Consume a newline and what it completes."""

    def _next_word(self) -> Word:
        """Read a word of at least one character. Raises `Unreadable` where none begins: every loop over words goes on or ends."""
        start = self.position
        word = self._word()
        if self.position == start:
            raise Unreadable(f"unexpected {self.text[start : start + 1]!r} at {start}")
        return word

    def _step(self) -> None:
        self._steps.count -= 1
        if self._steps.count < 0:
            raise TooDeep("it would have to be read again and again")

    def _word(self, stop: str = "") -> Word:
        self._step()
        parts: list[Part] = []
        text, end = self.text, self.end
        while self.position < end:
            match = _RUN.match(text, self.position, end)
            if match is not None:
                run = match.group()
                if stop and stop in run:
                    run = run[: run.index(stop)]
                    if run:
                        parts.append(Literal(run, quoted=False))
                    self.position += len(run)
                    break
                parts.append(Literal(run, quoted=False))
                self.position = match.end()
                continue
            character = text[self.position]
            if character in " \t\n|&;)":
                break
            if character == "\\":
                self._escape(parts)
            elif character == "'":
                self._single_quote(parts)
            elif character == '"':
                self._double_quote(parts)
            elif character == "$":
                self._dollar(parts, quoted=False)
            elif character == "`":
                parts.append(self._backtick(quoted=False))
            elif character in "<>":
                if text[self.position + 1 : self.position + 2] != "(":
                    break
                self.position += 2
                parts.append(ProcessSubstitution(self._parenthesised(), writes=character == ">"))
            elif self._opens_pattern(parts):
                opener = parts[-1]
                if isinstance(opener, Literal):
                    opener.text = opener.text[:-1]
                self.position += 1
                parts.append(Pattern(self._pattern()))
            else:
                break
        return Word(parts)

    @staticmethod
    def _opens_pattern(parts: list[Part]) -> bool:
        if not parts:
            return False
        last = parts[-1]
        return isinstance(last, Literal) and not last.quoted and last.text[-1:] in ("?", "*", "+", "@", "!")

    def _pattern(self) -> list[Part]:
        parts: list[Part] = []
        self._enter()
        while True:
            if self.position >= self.end:
                raise Unreadable("unfinished extended pattern")
            character = self.text[self.position]
            if character == ")":
                self.position += 1
                self.nesting -= 1
                return parts
            before = self.position
            parts.extend(self._word().parts)
            if self.position == before:
                if character == "(":
                    self.position += 1
                    parts.append(Pattern(self._pattern()))
                else:
                    self.position += 1

    def _escape(self, parts: list[Part]) -> None:
        following = self.text[self.position + 1 : min(self.position + 2, self.end)]
        self.position += 2 if following else 1
        if following != "\n":
            parts.append(Literal(following or "\\", quoted=True))

    def _single_quote(self, parts: list[Part]) -> None:
        close = self.text.find("'", self.position + 1, self.end)
        if close < 0:
            raise Unreadable(f"unfinished ' at {self.position}")
        parts.append(Literal(self.text[self.position + 1 : close], quoted=True))
        self.position = close + 1

    def _double_quote(self, parts: list[Part]) -> None:
        start = self.position
        self.position += 1
        parts.append(Literal("", quoted=True))
        while self.position < self.end:
            match = _QUOTED_RUN.match(self.text, self.position, self.end)
            if match is not None:
                parts.append(Literal(match.group(), quoted=True))
                self.position = match.end()
                continue
            character = self.text[self.position]
            if character == '"':
                self.position += 1
                return
            self._quoted_special(parts, character, '$`"\\')
        raise Unreadable(f'unfinished " at {start}')

    def _quoted_special(self, parts: list[Part], character: str, escapable: str) -> None:
        if character == "\\":
            following = self.text[self.position + 1 : min(self.position + 2, self.end)]
            if following == "\n":
                self.position += 2
            elif following and following in escapable:
                parts.append(Literal(following, quoted=True))
                self.position += 2
            else:
                parts.append(Literal("\\", quoted=True))
                self.position += 1
        elif character == "$":
            self._dollar(parts, quoted=True)
        else:
            parts.append(self._backtick(quoted=True))

    def _dollar(self, parts: list[Part], *, quoted: bool) -> None:
        text, start = self.text, self.position
        following = text[start + 1 : min(start + 2, self.end)]
        if following == "(":
            if text.startswith("((", start + 1):
                close = self._arithmetic_end(start + 3)
                if close is not None:
                    self.position = start + 3
                    parts.append(Arithmetic(self._embedded(close), quoted))
                    self.position = close + 2
                    return
            self.position = start + 2
            parts.append(Substitution(self._parenthesised(), quoted))
        elif following == "{":
            parts.append(self._braced(quoted=quoted))
        elif following == "[":
            self.position = start + 2
            inner = self._subscript()
            self.position += 1
            parts.append(Arithmetic(inner, quoted))
        elif following == "'" and not quoted:
            decoded, position = ansi_c(text, start + 2, self.end)
            if position < 0:
                raise Unreadable(f"unfinished $' at {start}")
            parts.append(Literal(decoded, quoted=True))
            self.position = position
        elif following == '"' and not quoted:
            self.position += 1
            self._double_quote(parts)
        elif following == "\\" and text.startswith("\\\n", start + 1):
            raise Unreadable(f"line continuation after $ at {start}")
        else:
            match = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!\-]").match(text, start + 1, self.end)
            if match is None:
                parts.append(Literal("$", quoted=quoted))
                self.position += 1
            else:
                parts.append(Parameter(match.group(), quoted, bare=not quoted))
                self.position = match.end()
                if _CONTINUED_NAME.match(self.text, self.position, self.end):
                    raise Unreadable(f"line continuation after a variable name at {self.position}")

    def _braced(self, *, quoted: bool) -> Part:
        start = self.position
        self.position += 2
        if self.text[self.position : self.position + 1] in (" ", "\t", "\n", "|"):
            self.position += 1
            return Substitution(self._until("}"), quoted)
        match = _PARAMETER.match(self.text, self.position, self.end)
        if match is None and self.text.startswith("#}", self.position):
            self.position += 2
            return Parameter("#", quoted)
        if match is None:
            raise Unreadable(f"bad substitution at {start}")
        self.position = match.end()
        part = Parameter(match.group(3), quoted, indirect=bool(match.group(1)), length=bool(match.group(2)))
        if self.text.startswith("[", self.position):
            self.position += 1
            index = self._subscript()
            self.position += 1
            simple = all(isinstance(piece, Literal) for piece in index)
            part.index = "".join(piece.text for piece in index if isinstance(piece, Literal)) if simple else ""
            part.argument.extend(piece for piece in index if not isinstance(piece, Literal))
        if self.text.startswith("}", self.position):
            self.position += 1
            return part
        operator = _OPERATOR.match(self.text, self.position, self.end)
        if operator is None:
            raise Unreadable(f"bad substitution at {start}")
        part.operator = operator.group()
        self.position = operator.end()
        self._enter()
        quotes_are_text = quoted and part.operator in _LITERAL_QUOTE_OPERATORS
        part.argument = part.argument + self._braced_argument(start, quotes_are_text=quotes_are_text)
        self.nesting -= 1
        return part

    def _braced_argument(self, start: int, *, quotes_are_text: bool) -> list[Part]:
        parts: list[Part] = []
        while self.position < self.end:
            match = _BRACED_RUN.match(self.text, self.position, self.end)
            if match is not None:
                parts.append(Literal(match.group(), quoted=quotes_are_text))
                self.position = match.end()
                continue
            character = self.text[self.position]
            if character == "}":
                self.position += 1
                return parts
            if character == "\\":
                self._escape(parts)
            elif character == "'" and quotes_are_text:
                parts.append(Literal("'", quoted=True))
                self.position += 1
            elif character == "'":
                self._single_quote(parts)
            elif character == '"':
                self._double_quote(parts)
            elif character == "$":
                self._dollar(parts, quoted=quotes_are_text)
            else:
                parts.append(self._backtick(quoted=quotes_are_text))
        raise Unreadable(f"unfinished ${{ at {start}")

    def _subscript(self) -> list[Part]:
        """Parts up to the matching `]`, which is not consumed; blanks and operators are text here."""
        parts: list[Part] = []
        depth = 0
        while self.position < self.end:
            character = self.text[self.position]
            if character == "]":
                if depth == 0:
                    return parts
                depth -= 1
            if character == "[":
                depth += 1
            if character in "\\'\"$`":
                parts.extend(self._word("]").parts)
                continue
            parts.append(Literal(character, quoted=False))
            self.position += 1
        raise Unreadable("unfinished [")

    def _backtick(self, *, quoted: bool) -> Substitution:
        start = self.position
        position = start + 1
        pieces: list[str] = []
        escaped = False
        while position < self.end:
            character = self.text[position]
            if character == "`":
                break
            if character == "\\" and position + 1 < self.end:
                following = self.text[position + 1]
                if following in "`$\\" or (quoted and following == '"'):
                    pieces.append(following)
                    escaped = True
                else:
                    pieces.append(character + following)
                position += 2
                continue
            close = _next_backtick(self.text, position, self.end)
            pieces.append(self.text[position:close])
            position = close
        else:
            raise Unreadable(f"unfinished ` at {start}")
        body, starts = self._inner("".join(pieces))
        if not escaped:
            self.starts.update(start + 1 + offset for offset in starts)
        self.position = position + 1
        return Substitution(body, quoted)

    def _arithmetic_end(self, position: int) -> int | None:
        """Return where the `))` is that closes an arithmetic opened before `position`, or None if it is none."""
        depth = 0
        text = self.text
        finder = _ARITHMETIC_SPECIAL
        if text.find("))", position, self.end) < 0:
            return None
        while True:
            match = finder.search(text, position, self.end)
            if match is None:
                return None
            position = match.end()
            character = match.group()
            if character == "(":
                depth += 1
            elif character == ")":
                if depth == 0:
                    return match.start() if text.startswith(")", position) and position < self.end else None
                depth -= 1
            elif character == "\\":
                position += 1
            elif character == "\n#":
                return None
            else:
                close = text.find(character, position, self.end)
                if close < 0:
                    return None
                position = close + 1

    def _embedded(self, close: int) -> list[Part]:
        """Parts between here and `close`, read as inside double quotes."""
        return self._region(close, TEXT_RUN, '$`"\\')

    def _region(self, close: int, run: re.Pattern[str], escapable: str) -> list[Part]:
        self._enter()
        parts: list[Part] = []
        outer, self.end = self.end, close
        while self.position < close:
            match = run.match(self.text, self.position, close)
            if match is not None:
                parts.append(Literal(match.group(), quoted=True))
                self.position = match.end()
            else:
                self._quoted_special(parts, self.text[self.position], escapable)
        self.end = outer
        self.nesting -= 1
        return parts

    def _enter(self) -> None:
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            raise TooDeep(f"nested deeper than {MAX_NESTING} levels")

    # -- blanks and comments

    def _reserved(self) -> str | None:
        match = _RESERVED.match(self.text, self.position, self.end)
        return None if match is None else match.group(1) or match.group(2)

    def _skip_blanks(self) -> None:
        self._step()
        match = _BLANKS.match(self.text, self.position, self.end)
        if match is not None:
            self.position = match.end()

    def _skip_comment(self) -> None:
        close = self.text.find("\n", self.position, self.end)
        start, self.position = self.position, self.end if close < 0 else close
        self.comments.append((start, self.position))

    def _skip_lines(self) -> None:
        while True:
            self._skip_blanks()
            character = self.text[self.position : self.position + 1] if self.position < self.end else ""
            if character == "\n":
                self._newline()
            elif character == "#":
                self._skip_comment()
            else:
                return


_ARITHMETIC_SPECIAL = re.compile(r"[()'\"\\`]|\n#")
_BACKTICK_SPECIAL = re.compile(r"[`\\]")


def _next_backtick(text: str, position: int, end: int) -> int:
    match = _BACKTICK_SPECIAL.search(text, position, end)
    if match is None:
        return end
    return match.start() if match.start() > position else min(position + 1, end)
