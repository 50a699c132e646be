"""The output of a process as text: decoded, without escape sequences, bounded, and redacted.

Bytes arrive in pieces that end anywhere, so every reader of a stream is incremental: a character or an escape sequence that is cut by the end of a
chunk is held back until its rest arrives (H24). Every buffer has a fixed bound. Nothing here does I/O; each object belongs to the one task that reads
the stream.
"""

import codecs
import re
from collections import deque
from typing import final

import msgspec

RING_CHARACTERS = 200_000
"""The maximum of characters of a background process's output that can be read later (TOOL-70)."""

FOREGROUND_CHARACTERS = 50_000
"""The maximum of characters of a foreground command's output (TOOL-23)."""

HEAD_SHARE = 0.4
"""The share of the foreground bound for the beginning; the rest is for the end."""

LOG_LINES = 200
"""The default number of lines that reading the log returns."""

_ESCAPES = re.compile(
    # CSI; strings that end with BEL or ST (OSC, DCS, PM, APC, SOS); character sets; two-byte sequences.
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|\x1b[ -/]+[0-~]"
    r"|\x1b[0-OQ-WYZ\\`-~]"
    # One that has begun at the end of the text and may still become any of these.
    r"|(?P<begun>(?:(?:\x1b\[|\x9b)[0-?]*[ -/]*|\x1b[\]PX^_][^\x07\x1b]*\x1b?|\x1b[ -/]*)\Z)"
    # And one that never will.
    r"|[\x1b\x9b]"
)

MAX_ESCAPE = 4096
"""An escape sequence longer than this is text, so that a stream cannot make the filter hold back everything that follows."""


def strip_ansi(text: str) -> str:
    """Return the text without terminal escape sequences, including an incomplete one at its end."""
    return AnsiFilter().feed(text)


@final
class OutputDecoder:
    """Decodes UTF-8 from a stream: a character is never split, and an invalid byte becomes U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, data: bytes) -> str:
        """Return the characters that are complete."""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """Return the rest at the end of the stream: nothing, or the replacement of a cut character."""
        return self._decoder.decode(b"", final=True)


@final
class AnsiFilter:
    """Removes escape sequences from a stream, also those that are cut by the end of a chunk."""

    def __init__(self) -> None:
        self._begun = ""

    def feed(self, text: str) -> str:
        """Return the text that is certain. A sequence that never ends is not returned, unless it is longer than `MAX_ESCAPE`."""
        text, self._begun = self._begun + text, ""
        return _ESCAPES.sub(self._remove, text) if "\x1b" in text or "\x9b" in text else text

    def _remove(self, escape: re.Match[str]) -> str:
        begun = escape["begun"]
        if begun is None:
            return ""
        if len(begun) > MAX_ESCAPE:
            return begun.replace("\x1b", "").replace("\x9b", "")
        self._begun = begun
        return ""


class LogSlice(msgspec.Struct, frozen=True):
    """Some lines of a log. `first` is the number, from 0, of the first of them among the `total_lines` visible ones."""

    text: str
    first: int
    lines: int
    total_lines: int


@final
class RingText:
    """The last characters of a stream, and how many there were in all."""

    def __init__(self, limit: int = RING_CHARACTERS) -> None:
        if limit < 1:
            raise ValueError(f"a ring holds at least one character, got a limit of {limit}")
        self._limit = limit
        self._pieces: deque[str] = deque()
        self._held = 0
        self._total = 0

    @property
    def total(self) -> int:
        """Characters that were ever appended."""
        return self._total

    @property
    def dropped(self) -> int:
        """Characters that are no longer held."""
        return self._total - self._held

    @property
    def text(self) -> str:
        """Everything that is held."""
        if len(self._pieces) > 1:
            self._pieces = deque(["".join(self._pieces)])
        return self._pieces[0] if self._pieces else ""

    def append(self, text: str) -> None:
        """Append text, and drop as much from the beginning as the limit requires."""
        if not text:
            return
        self._total += len(text)
        if len(text) >= self._limit:
            self._pieces = deque([text[-self._limit :]])
            self._held = self._limit
            return
        self._pieces.append(text)
        self._held += len(text)
        while (excess := self._held - self._limit) > 0:
            oldest = self._pieces.popleft()
            if len(oldest) > excess:
                self._pieces.appendleft(oldest[excess:])
                self._held -= excess
            else:
                self._held -= len(oldest)

    def tail(self, characters: int) -> str:
        """Return the last `characters` characters, or all that are held."""
        return self.text[-characters:] if characters > 0 else ""

    def log(self, offset: int = 0, limit: int = LOG_LINES) -> LogSlice:
        """Return lines of what is held: from line `offset` on, or the last `limit` lines if it is 0 (TOOL-61)."""
        lines = self.text.split("\n")
        if lines[-1] == "":
            lines.pop()
        limit = max(limit, 0)
        first = max(len(lines) - limit, 0) if offset <= 0 else min(offset, len(lines))
        shown = lines[first : first + limit]
        return LogSlice("\n".join(shown), first, len(shown), len(lines))


@final
class HeadTail:
    """The beginning and the end of a foreground command's output, with a remark where the middle was (TOOL-23)."""

    def __init__(self, limit: int = FOREGROUND_CHARACTERS) -> None:
        if limit < 2:
            raise ValueError(f"there is no beginning and end within {limit} characters: the limit is at least 2")
        self._limit = limit
        self._head_limit = max(int(limit * HEAD_SHARE), 1)
        self._head = ""
        self._tail = RingText(limit - self._head_limit)

    @property
    def total(self) -> int:
        """Characters that were ever appended."""
        return len(self._head) + self._tail.total

    @property
    def dropped(self) -> int:
        """Return the number of characters of the middle that were dropped."""
        return self._tail.dropped

    def append(self, text: str) -> None:
        """Add text at the end."""
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += text[:room]
            text = text[room:]
        self._tail.append(text)

    @property
    def text(self) -> str:
        """Return all of it if it fits, else both ends with the number of characters missing between them."""
        if not self.dropped:
            return self._head + self._tail.text
        notice = f"\n\n[... {self.dropped} of {self.total} characters left out here ...]\n\n"
        return self._head + notice + self._tail.text


MASK = "***"

# Every repetition that may start in the middle of a run of the same characters is bounded: masking is linear.
_PRIVATE_KEY = re.compile(
    r"(-----BEGIN (?:[A-Z0-9]{1,20} ){0,4}PRIVATE KEY(?: BLOCK)?-----)(?!\*\*\*).*?(-----END [A-Z0-9 ]{1,80}-----|\Z)",
    re.DOTALL,
)
_URL_PASSWORD = re.compile(r"(?i)\b([a-z][a-z0-9+.-]{1,20}://[^\s/:@]{0,256}:)(?!\*\*\*@)[^\s/@]{1,512}@")
_KNOWN_SHAPES = re.compile(
    r"""
    (?<![A-Za-z0-9_])(?P<prefix>
        sk-(?:ant-|proj-|or-)?|[sr]k_(?:live|test)_|gh[oprsu]_|github_pat_|glpat-|xox[abeoprs]-|xapp-|hf_|npm_|pypi-
        |dop_v1_|shpat_|tvly-|gsk_|pplx-|AIza|ya29\.|SG\.
    )[A-Za-z0-9_.\-]{16,}
    |(?<![A-Za-z0-9_])(?P<aws>A(?:KIA|SIA))[A-Z0-9]{16}(?![A-Za-z0-9])
    |(?<![A-Za-z0-9_-])(?P<jwt>eyJ)[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*
    |(?:(?<=bot)|(?<![A-Za-z0-9_]))(?P<bot>\d{8,10}:)AA[A-Za-z0-9_-]{32,}
    """,
    re.VERBOSE,
)
_AUTHORIZATION = re.compile(r"(?i)\b(bearer|basic|bot)([ \t]+)(?!\*\*\*)[A-Za-z0-9._~+/=-]{8,}")
_SECRET_NAME = r"(?:(?!hermes_session_key)[A-Za-z0-9_.-]*[_.-]key|(?:[A-Za-z0-9_.-]*[_.-])?(?:apikey|token|secret|password|passwd|passphrase))"
_HARMLESS = r"(?!(?:true|false|none|null|nil|[0-9]{1,5})(?![A-Za-z0-9_.-]))"
"""Values that describe a secret, or a sort order, and are none."""
_ASSIGNED = re.compile(
    rf"(?i)(?<![A-Za-z0-9_.-])({_SECRET_NAME}=){_HARMLESS}"
    r"(?!\*\*\*)(?:\"[^\"\n]*\"|'[^'\n]*'|(?![$<({\"'])[^\s\"'&;|,)]+)"
)
_QUOTED_FIELD = re.compile(
    rf"(?i)([\"']{_SECRET_NAME}[\"']\s{{0,20}}:\s{{0,20}})([\"'])(?!\*\*\*)(?:\\.|(?!\2)[^\\\n])+\2"
)
_PLAIN_FIELD = re.compile(
    # A line of YAML, or of headers.
    rf"(?im)^([ \t]*(?:[-<>*][ \t]+)?{_SECRET_NAME}:[ \t]+){_HARMLESS}(?!\*\*\*)(?![$<{{&|>\"'])\S+"
)


def mask_secrets(text: str) -> str:
    """Replace what looks like a secret by `***`; names, prefixes and everything around it stay.

    Known: keys with a vendor's prefix, tokens of an Authorization header, values of names such as `*_KEY`, `*_TOKEN`, `*_SECRET` and `PASSWORD`
    (assigned, in JSON, in YAML, in headers), private key blocks, passwords in URLs. Idempotent.
    """
    text = _PRIVATE_KEY.sub(rf"\1{MASK}\2", text)
    text = _URL_PASSWORD.sub(rf"\1{MASK}@", text)
    text = _KNOWN_SHAPES.sub(_mask_shape, text)
    text = _AUTHORIZATION.sub(rf"\1\2{MASK}", text)
    text = _QUOTED_FIELD.sub(rf"\1\2{MASK}\2", text)
    text = _ASSIGNED.sub(rf"\1{MASK}", text)
    return _PLAIN_FIELD.sub(rf"\1{MASK}", text)


_QUOTED_CODE = re.compile(r"[`$]")
_BARE_CODE = re.compile(r"[`$;|&<>()\n]")


def mask_command(command: str) -> str:
    """Redact a command for the person who approves it, but never anything that a shell would run or expand.

    Where a mask would cover a substitution or an operator, the text stays: what is hidden could not be approved.
    """
    for pattern, replacement in _COMMAND_MASKS:
        command = pattern.sub(
            lambda match, to=replacement: match.group() if _runs(match.group()) else _fill(match, to), command
        )
    return command


def _fill(match: re.Match[str], replacement: str) -> str:
    return _mask_shape(match) if not replacement else match.expand(replacement)


def _runs(text: str) -> bool:
    value = text.partition("=")[2]
    quoted = len(value) > 1 and value[0] in "\"'" and value[-1] == value[0]
    return (_QUOTED_CODE if quoted else _BARE_CODE).search(text) is not None


_COMMAND_MASKS = (
    (_PRIVATE_KEY, rf"\1{MASK}\2"),
    (_URL_PASSWORD, rf"\1{MASK}@"),
    (_KNOWN_SHAPES, ""),
    (_AUTHORIZATION, rf"\1\2{MASK}"),
    (_QUOTED_FIELD, rf"\1\2{MASK}\2"),
    (_ASSIGNED, rf"\1{MASK}"),
    (_PLAIN_FIELD, rf"\1{MASK}"),
)


def _mask_shape(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None) + MASK
