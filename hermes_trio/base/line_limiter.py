"""Limit the log lines that unauthenticated clients can cause: a few per period are written, the rest are counted."""

from __future__ import annotations

from typing import final


@final
class LineLimiter:
    """Allow at most `lines` lines in `seconds`. The caller passes the time, in monotonic seconds."""

    __slots__ = ("_began", "_left_out", "_lines", "_seconds", "_written")

    def __init__(self, lines: int = 10, seconds: float = 60.0) -> None:
        self._lines = lines
        self._seconds = seconds
        self._began: float | None = None
        self._written = 0
        self._left_out = 0

    def admit(self, now: float) -> int | None:
        """Count one line. Return None if it must be dropped, else how many lines were dropped since the last one that was written."""
        if self._began is None or now - self._began >= self._seconds:
            self._began, self._written = now, 0
        if self._written >= self._lines:
            self._left_out += 1
            return None
        self._written += 1
        left_out, self._left_out = self._left_out, 0
        return left_out
