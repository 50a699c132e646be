"""A PostgreSQL connection in the shape in which the verbs know one: the protocol `Database` of the store's SQL.

A statement is sent at once and its answer waited for only where a verb looks at it, so that statements whose rows nobody wants cost no round trip:
an error of one is raised at the next wait, at the latest by the commit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, NoReturn

from .bridge import wait_here
from .errors import SqlError
from .link import PostgresLink, Row, StatementAnswer

__all__ = ["PostgresDatabase", "encode", "translated"]

_PLACE: Final = re.compile(r"'(?:[^']|'')*'|\?(\d*)")


_texts: dict[str, str] = {}


def translated(sql: str) -> str:
    """SQL as PostgreSQL numbers its parameters, and with its word for no limit."""
    known = _texts.get(sql)
    if known is None:
        count = 0

        def place(match: re.Match[str]) -> str:
            nonlocal count
            if match[1] is None:
                return match[0]
            count += 1
            return f"${match[1] or count}"

        known = _texts[sql] = _PLACE.sub(place, sql).replace("LIMIT -1", "LIMIT ALL")
    return known


def encode(value: object) -> bytes | None:
    """A parameter in PostgreSQL's text form. Text cannot hold NUL, nor half of a surrogate pair: both become the replacement character."""
    if value is None:
        return None
    if isinstance(value, str):
        if "\0" in value:
            value = value.replace("\0", "\ufffd")
        return value.encode("utf-8", "replace")
    if isinstance(value, bool):
        return b"1" if value else b"0"
    if isinstance(value, int | float):
        return repr(value).encode()
    if isinstance(value, bytes):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be a parameter")


class _Cursor:
    """The rows of a statement, waited for when they are wanted."""

    __slots__ = ("_answer", "_database")

    def __init__(self, database: PostgresDatabase, answer: StatementAnswer) -> None:
        self._database = database
        self._answer = answer

    def fetchall(self) -> list[Row]:
        self._database.settle(self._answer)
        return self._answer.rows()


class PostgresDatabase:
    """A link, for one verb or one transaction of verbs. Runs under `run_waiting`."""

    in_transaction: bool = True

    def __init__(self, link: PostgresLink) -> None:
        self._link: PostgresLink = link
        self._last: StatementAnswer | None = None
        self.signals: list[tuple[str, str]] = []

    def execute(self, statements: str, bindings: Any = None, /) -> _Cursor:
        """Send a statement."""
        self._last = self._send(translated(statements), () if bindings is None else bindings)
        return _Cursor(self, self._last)

    def executemany(self, statements: str, bindings: Iterable[Sequence[object]], /) -> _Cursor:
        """Send a statement once for each set of bindings."""
        sql = translated(statements)
        for given in bindings:
            self._last = self._send(sql, given)
        assert self._last is not None or not bindings
        return _Cursor(self, self._last) if self._last is not None else self.execute("SELECT 1 WHERE false")

    def _send(self, sql: str, bindings: Sequence[object]) -> StatementAnswer:
        parameters = [encode(value) for value in bindings]
        formats = [1 if isinstance(value, bytes) else 0 for value in bindings]
        return self._link.send(sql, parameters, formats if 1 in formats else None)

    def changes(self) -> int:
        """How many rows the last statement changed."""
        assert self._last is not None
        self.settle(self._last)
        return self._last.changed()

    def settle(self, answer: StatementAnswer | None = None) -> None:
        """Wait for everything that was sent up to `answer`, or for all of it."""
        if answer is None or not answer.segment.over:
            wait_here(self._link.over(self._link.sync()))

    def settle_anyhow(self) -> None:
        """The same, whatever became of it: for what is rolled back."""
        with suppress(SqlError):
            self.settle()

    def last_insert_rowid(self) -> int:
        """The number that the last insertion was given."""
        return int(self.execute("SELECT lastval()").fetchall()[0][0])

    def pragma(self, name: str, value: Any = None, /) -> NoReturn:
        """PostgreSQL has none."""
        raise NotImplementedError(f"pragma {name}")

    def set_busy_timeout(self, milliseconds: int, /) -> None:
        """The session's own timeouts hold."""

    def interrupt(self) -> None:
        """A statement ends by the session's own timeouts."""

    def close(self) -> None:
        """The link belongs to the store."""
