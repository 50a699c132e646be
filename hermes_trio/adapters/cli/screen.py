"""Writes to a terminal: text as it is being written, formatted on a terminal, plain in a pipe.

Output must not break the line that a person types, so only whole lines are written while a prompt is shown: a formatted block, or a line of plain
text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, TextIO

from rich.console import Console
from rich.markdown import Markdown
from rich.text import Text

from hermes_trio.base.terminal import clean_lines

_FENCE: Final = re.compile(r" {0,3}(`{3,}|~{3,})")


class BlockStream:
    """Splits streamed text into blocks: each is complete when a blank line outside any fence follows it."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._rest = ""
        self._fence = ""

    @property
    def unfinished(self) -> str:
        """Return the unfinished block."""
        return "\n".join([*self._lines, self._rest])

    def feed(self, piece: str) -> list[str]:
        """Return the blocks that are complete."""
        *whole, self._rest = (self._rest + piece).split("\n")
        blocks: list[str] = []
        for line in whole:
            self._line(line, blocks)
        return blocks

    def flush(self) -> list[str]:
        """Return the rest, complete or not."""
        blocks: list[str] = []
        if self._rest:
            self._lines.append(self._rest)
            self._rest = ""
        self._close(blocks)
        self._fence = ""
        return blocks

    def _line(self, line: str, blocks: list[str]) -> None:
        fence = _FENCE.match(line)
        if fence is not None:
            mark = fence.group(1)
            if not self._fence:
                self._fence = mark
            elif mark.startswith(self._fence):
                self._fence = ""
                self._lines.append(line)
                self._close(blocks)
                return
        if line.strip() or self._fence:
            self._lines.append(line)
        else:
            self._close(blocks)

    def _close(self, blocks: list[str]) -> None:
        text = "\n".join(self._lines)
        self._lines.clear()
        if text.strip():
            blocks.append(text)


class LineMarkdown(Markdown):
    """Markdown that keeps line breaks: lists of commands, poems and addresses are not joined into one paragraph."""

    def __init__(self, markup: str) -> None:
        super().__init__(markup)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"


class Screen:
    """Writes to a terminal or a pipe. `file` is the present standard output, unless another one is given.

    Control characters in texts are replaced by spaces, except in answers that go into a pipe.

    `live` receives unfinished text; where formatted text is written only in whole blocks, an answer streams through it.
    """

    def __init__(
        self,
        *,
        formatted: bool,
        tools: bool = True,
        file: TextIO | None = None,
        live: Callable[[str], None] | None = None,
    ) -> None:
        self._formatted = formatted
        self._tools = tools
        self._console = Console(file=file, highlight=False, soft_wrap=not formatted, markup=False, emoji=False)
        self._blocks = BlockStream()
        self._live = live
        self._open_line = False

    def _clean(self, text: str) -> str:
        return clean_lines(text) if self._formatted or self._console.is_terminal else text

    def stream(self, piece: str) -> None:
        """Write more of an answer."""
        piece = self._clean(piece)
        if self._formatted:
            for block in self._blocks.feed(piece):
                self._markdown(block)
            if self._live is not None:
                self._live(self._blocks.unfinished)
        else:
            self._console.file.write(piece)
            self._console.file.flush()
            self._open_line = not piece.endswith("\n")

    def end_stream(self) -> None:
        """End an answer."""
        if self._formatted:
            blocks = self._blocks.flush()
            if self._live is not None:
                self._live("")
            for block in blocks:
                self._markdown(block)
        elif self._open_line:
            self._console.file.write("\n")
            self._console.file.flush()
            self._open_line = False

    def say(self, text: str) -> None:
        """Write a whole text. It does not cut the unfinished block, which follows when it is complete."""
        text = self._clean(text)
        if self._formatted:
            self._markdown(text)
        else:
            self.end_stream()
            self._console.file.write(f"{text}\n")
            self._console.file.flush()

    def note(self, text: str) -> None:
        """Write a remark beside the conversation."""
        if not self._formatted:
            self.end_stream()
        self._console.print(Text(clean_lines(text), style="dim"))

    def tool(self, text: str) -> None:
        """Write what the agent is doing."""
        if self._tools:
            self.note(f"  {text}")

    def _markdown(self, text: str) -> None:
        self._console.print(LineMarkdown(text))
        self._console.print()
