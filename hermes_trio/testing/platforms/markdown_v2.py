"""Telegram's MarkdownV2: text and entities, or the error text that the Bot API answers with.

Follows the documented syntax of `parse_mode=MarkdownV2` and the observable behaviour of the server: greedy `__`, quotes
that end with their line, offsets in UTF-8 bytes in errors and in UTF-16 units in entities.
"""

from __future__ import annotations

from typing import Any, Final, final

import attrs

RESERVED: Final = frozenset(b"_*[]()~`>#+-=|{}.!")
BACKTICK, BACKSLASH, NEWLINE, RETURN = b"`"[0], b"\\"[0], b"\n"[0], b"\r"[0]
# Only these have an effect inside code.
RESERVED_IN_CODE: Final = frozenset({BACKTICK})

# The Bot API's entity type for each kind of markup, by the name that its errors use.
ENTITY_TYPES: Final = {
    "Bold": "bold",
    "Italic": "italic",
    "Underline": "underline",
    "Strikethrough": "strikethrough",
    "Spoiler": "spoiler",
    "Code": "code",
    "Pre": "pre",
    "PreCode": "pre",
    "TextUrl": "text_link",
    "CustomEmoji": "custom_emoji",
    "BlockQuote": "blockquote",
}
CODE_KINDS: Final = frozenset({"Code", "Pre", "PreCode"})
# What closes the innermost open markup. Italic is a special case: `_` that is not part of `__`.
CLOSERS: Final = {
    "Bold": b"*",
    "Underline": b"__",
    "Strikethrough": b"~",
    "Spoiler": b"||",
    "Code": b"`",
    "Pre": b"```",
    "PreCode": b"```",
    "TextUrl": b"]",
    "CustomEmoji": b"]",
}


@final
class MarkupError(ValueError):
    """The text does not parse. Its message is what follows "can't parse entities: "."""


def utf16_length(text: str) -> int:
    """Length in UTF-16 code units, which Telegram counts limits and offsets in."""
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


@final
@attrs.define
class _Open:
    kind: str
    at: int
    start: int
    language: str = ""


class _Parser:
    def __init__(self, text: str) -> None:
        self.source = text.encode()
        self.position = 0
        self.out = bytearray()
        self.open: list[_Open] = []
        self.entities: list[dict[str, Any]] = []
        self.at_line_start = True

    def parse(self) -> tuple[str, list[dict[str, Any]]]:
        while self.position < len(self.source):
            self._step()
        if self.open and self.open[-1].kind == "BlockQuote":
            self._close("BlockQuote")
        if self.open:
            raise self._unclosed(self.open[-1])
        self.entities.sort(key=lambda entity: (entity["offset"], -entity["length"]))
        return self.out.decode(), self.entities

    def _step(self) -> None:
        source, here = self.source, self.position
        byte = source[here]
        if byte == BACKSLASH and here + 1 < len(source) and 0 < source[here + 1] <= 126:
            self._emit(source[here + 1])
            self.position += 2
            return
        innermost = self.open[-1].kind if self.open else ""
        reserved = RESERVED_IN_CODE if innermost in CODE_KINDS else RESERVED
        if byte not in reserved:
            self._plain(byte, in_code=innermost in CODE_KINDS)
        elif self._closes(innermost):
            self._close(innermost)
        else:
            self._begin(byte)

    def _plain(self, byte: int, *, in_code: bool) -> None:
        self._emit(byte)
        self.position += 1
        if byte != NEWLINE or in_code:
            return
        quote = next((entry for entry in self.open if entry.kind == "BlockQuote"), None)
        if quote is None:
            return
        if self.source[self.position : self.position + 1] == b">":
            self.position += 1
            self.at_line_start = False
        elif self.open[-1] is quote:
            self._close("BlockQuote")
        else:
            raise self._unclosed(self.open[-1])

    def _emit(self, byte: int) -> None:
        self.out.append(byte)
        self.at_line_start = byte in (NEWLINE, RETURN)

    def _ahead(self, token: bytes) -> bool:
        return self.source.startswith(token, self.position)

    def _closes(self, kind: str) -> bool:
        if kind == "Italic":
            return self._ahead(b"_") and not self._ahead(b"__")
        closer = CLOSERS.get(kind)
        return closer is not None and self._ahead(closer)

    def _begin(self, byte: int) -> None:
        match bytes([byte]):
            case b"_":
                self._start("Underline" if self._ahead(b"__") else "Italic", 2 if self._ahead(b"__") else 1)
            case b"*":
                self._start("Bold", 1)
            case b"~":
                self._start("Strikethrough", 1)
            case b"[":
                self._start("TextUrl", 1)
            case b"!" if self._ahead(b"!["):
                self._start("CustomEmoji", 2)
            case b"|" if self._ahead(b"||"):
                if self._ends_expandable_quote():
                    self.open[-1].language = "expandable"
                    self.position += 2
                else:
                    self._start("Spoiler", 2)
            case b">" if self.at_line_start and not any(entry.kind == "BlockQuote" for entry in self.open):
                self._start("BlockQuote", 1)
            case b"`":
                if self._ahead(b"```"):
                    self._start_pre()
                else:
                    self._start("Code", 1)
            case _:
                raise MarkupError(f"Character '{chr(byte)}' is reserved and must be escaped with the preceding '\\'")

    def _ends_expandable_quote(self) -> bool:
        if not self.open or self.open[-1].kind != "BlockQuote":
            return False
        rest = self.source[self.position + 2 :].removeprefix(b"\r")
        return not rest or (rest.startswith(b"\n") and not rest.startswith(b"\n>"))

    def _start(self, kind: str, width: int) -> None:
        self.open.append(_Open(kind, self.position, len(self.out)))
        self.position += width

    def _start_pre(self) -> None:
        entry = _Open("Pre", self.position, len(self.out))
        self.position += 3
        end = self.position
        while end < len(self.source) and self.source[end] != BACKTICK and not bytes([self.source[end]]).isspace():
            end += 1
        if self.position < end < len(self.source) and self.source[end] != BACKTICK:
            entry.kind = "PreCode"
            entry.language = self.source[self.position : end].decode()
            self.position = end
        if self._ahead(b"\r\n") or self._ahead(b"\n\r"):
            self.position += 2
        elif self._ahead(b"\n") or self._ahead(b"\r"):
            self.position += 1
        self.open.append(entry)

    def _close(self, kind: str) -> None:
        entry = self.open.pop()
        assert entry.kind == kind
        extra: dict[str, Any] | None = {}
        if kind == "Italic":
            self.position += 1
        elif kind == "BlockQuote":
            if entry.language:
                extra = {"type": "expandable_blockquote"}
        else:
            self.position += len(CLOSERS[kind])
            if kind == "TextUrl":
                extra = self._link(entry)
            elif kind == "CustomEmoji":
                extra = self._custom_emoji()
            elif entry.language:
                extra = {"language": entry.language}
        if extra is None or len(self.out) == entry.start:
            return
        offset = utf16_length(self.out[: entry.start].decode())
        length = utf16_length(self.out[entry.start :].decode())
        self.entities.append({"type": ENTITY_TYPES[kind], "offset": offset, "length": length, **extra})

    def _link(self, entry: _Open) -> dict[str, Any] | None:
        url = self._url("a URL") if self._ahead(b"(") else self.out[entry.start :].decode()
        # The server drops a link whose address it cannot use, and keeps its text.
        return {"url": url} if "." in url or ":" in url else None

    def _custom_emoji(self) -> dict[str, Any]:
        if not self._ahead(b"("):
            raise MarkupError("Custom emoji entity must contain a tg://emoji URL")
        url = self._url("a custom emoji URL")
        scheme, _, rest = url.partition(":")
        if scheme.lower() != "tg":
            raise MarkupError("Custom emoji URL must have scheme tg")
        host, _, query = rest.removeprefix("//").partition("?")
        if host.strip("/").partition("#")[0].lower() != "emoji":
            raise MarkupError('Custom emoji URL must have host "emoji"')
        arguments = query.partition("#")[0].split("&")
        identifier = next((part.removeprefix("id=") for part in arguments if part.startswith("id=")), "")
        if not identifier:
            raise MarkupError("Custom emoji URL must have an emoji identifier")
        if not identifier.isdigit() or identifier.startswith("0"):
            raise MarkupError("Invalid custom emoji identifier specified")
        return {"custom_emoji_id": identifier}

    def _url(self, noun: str) -> str:
        begin = self.position
        url = bytearray()
        index = begin + 1
        while index < len(self.source) and self.source[index] != b")"[0]:
            if self.source[index] == BACKSLASH and 0 < self.source[index + 1 : index + 2].ljust(1, b"\0")[0] <= 126:
                index += 1
            url.append(self.source[index])
            index += 1
        if index >= len(self.source):
            raise MarkupError(f"Can't find end of {noun} at byte offset {begin + 1}")
        self.position = index + 1
        return url.decode()

    def _unclosed(self, entry: _Open) -> MarkupError:
        return MarkupError(f"Can't find end of {entry.kind} entity at byte offset {entry.at}")


def parse_markdown_v2(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the plain text and its entities (Bot API form). Raises `MarkupError` with the Bot API's words."""
    return _Parser(text).parse()
