"""What a terminal shows after everything that a program wrote to it: enough of a terminal for a prompt that redraws itself."""

from __future__ import annotations

import re

__all__ = ["picture"]

_PIECE = re.compile(
    r"\x1b\[([0-9;?]*)([@-~])|\x1b\][^\x07]*\x07|\x1b[()][A-Z0-9]|\x1b[=>]|([\r\n\x08\x07])|([^\x1b\r\n\x08\x07]+)"
)


def picture(raw: str, columns: int = 120) -> list[str]:
    """The lines of the screen, as if it were endlessly high; blank lines at the end are left out."""
    lines: list[list[str]] = [[]]
    row = column = 0

    def at(wanted: int) -> list[str]:
        while len(lines) <= wanted:
            lines.append([])
        return lines[wanted]

    for match in _PIECE.finditer(raw):
        number, letter, control, text = match.groups()
        if text is not None:
            for character in text:
                if column >= columns:
                    row, column = row + 1, 0
                line = at(row)
                line.extend(" " * (column + 1 - len(line)))
                line[column] = character
                column += 1
        elif control == "\r":
            column = 0
        elif control == "\n":
            row, column = row + 1, 0
            at(row)
        elif control == "\x08":
            column = max(0, column - 1)
        elif letter is not None and "?" not in number:
            count = int(number.split(";")[0] or 0)
            match letter:
                case "A":
                    row = max(0, row - max(1, count))
                case "B":
                    row += max(1, count)
                case "C":
                    column += max(1, count)
                case "D":
                    column = max(0, column - max(1, count))
                case "K":
                    del at(row)[column:]
                case "J":
                    del at(row)[column:]
                    del lines[row + 1 :]
                case _:
                    pass
    shown = ["".join(line).rstrip() for line in lines]
    while shown and not shown[-1]:
        shown.pop()
    return shown
