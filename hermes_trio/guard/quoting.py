"""Backslash escapes: those of `$'…'`, of `printf` and of `echo -e`, decoded without running anything."""

from __future__ import annotations

import re

_SIMPLE = {
    "a": "\a",
    "b": "\b",
    "e": "\x1b",
    "E": "\x1b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "?": "?",
}
_ESCAPE = re.compile(
    r"\\(?:x\{?([0-9A-Fa-f]{1,2})\}?|u([0-9A-Fa-f]{1,4})|U([0-9A-Fa-f]{1,8})|(0?[0-7]{1,3})|c(.)|(.))", re.DOTALL
)
_ANSI_END = re.compile(r"(?:[^'\\]|\\.)*'", re.DOTALL)


def _decode(match: re.Match[str]) -> str:
    hexadecimal, short, long, octal, control, simple = match.groups()
    if hexadecimal is not None:
        return chr(int(hexadecimal, 16))
    if short is not None or long is not None:
        code = int(short or long, 16)
        return chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 else "\ufffd"
    if octal is not None:
        return chr(int(octal, 8) & 0xFF)
    if control is not None:
        return chr(ord(control) & 0x1F)
    return _SIMPLE.get(simple, "\\" + simple)


def unescape(text: str) -> str:
    """Return the text with backslash escapes replaced, and without NUL, which no shell keeps."""
    if "\\" not in text:
        return text
    return _ESCAPE.sub(_decode, text).replace("\0", "")


def ansi_c(text: str, start: int, end: int) -> tuple[str, int]:
    """Decode the body of `$'…'` that begins at `start`. Return it and the offset behind its quote, or -1 if it has none."""
    match = _ANSI_END.match(text, start, end)
    if match is None:
        return "", -1
    return unescape(match.group()[:-1]), match.end()
