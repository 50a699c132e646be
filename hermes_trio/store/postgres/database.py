"""A PostgreSQL connection that implements `Database`, the protocol that the verbs use.

A statement is sent at once and its answer waited for only where a verb reads it, so that statements whose rows are not read cost no round trip:
an error of one is raised at the next wait, at the latest by the commit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, NoReturn, TypeVar, cast

from greenlet import GreenletExit, getcurrent, greenlet

from .bridge import wait_here
from .errors import SqlError
from .link import PostgresLink, Row, StatementAnswer

T = TypeVar("T")

_PLACE: Final = re.compile(r"'(?:[^']|'')*'|\?(\d*)")


_texts: dict[str, str] = {}


def translated(sql: str) -> str:
    """Return SQL with PostgreSQL's parameter numbers and its keyword for no limit."""
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
    """Return a parameter in PostgreSQL's text form. A NUL and a lone surrogate become the replacement character."""
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
    """The rows of a statement; reading them waits for the answer."""

    __slots__ = ("_answer", "_database")

    def __init__(self, database: PostgresDatabase, answer: StatementAnswer) -> None:
        self._database = database
        self._answer = answer

    def fetchall(self) -> list[Row]:
        self._database.settle(self._answer)
        return self._answer.rows()


class PostgresDatabase:
    """A link, for one verb or one transaction of verbs. Runs under `run_waiting`.

    `pause` is called where an answer is needed: it returns when everything that was sent is answered. By default this database waits by itself.
    """

    in_transaction: bool = True

    def __init__(self, link: PostgresLink, pause: Callable[[], object] | None = None) -> None:
        self._link: PostgresLink = link
        self._pause: Callable[[], object] = pause or self._wait
        self._last: StatementAnswer | None = None
        self.signals: list[tuple[str, str]] = []

    def beside(self, pause: Callable[[], object]) -> PostgresDatabase:
        """Return a database on the same link with the same signals, for code that waits by `pause`."""
        beside = PostgresDatabase(self._link, pause)
        beside.signals = self.signals
        return beside

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
        parameters: list[bytes | None] = []
        formats: list[int] | None = None
        for value in bindings:
            kind = type(value)
            if kind is str and "\0" not in cast(str, value):
                parameters.append(cast(str, value).encode("utf-8", "replace"))
            elif value is None:
                parameters.append(None)
            else:
                parameters.append(encode(value))
                if kind is bytes:
                    formats = [1 if isinstance(one, bytes) else 0 for one in bindings]
        return self._link.send(sql, parameters, formats)

    def changes(self) -> int:
        """Return how many rows the last statement changed."""
        assert self._last is not None
        self.settle(self._last)
        return self._last.changed()

    def settle(self, answer: StatementAnswer | None = None) -> None:
        """Wait for everything that was sent up to `answer`, or for all of it."""
        if answer is None or not answer.segment.over:
            self._pause()

    def _wait(self) -> None:
        wait_here(self._link.over(self._link.sync()))

    def settle_always(self) -> None:
        """Do the same and ignore errors, before a rollback."""
        with suppress(SqlError):
            self.settle()

    def pragma(self, name: str, value: Any = None, /) -> NoReturn:
        """Raise: PostgreSQL has no pragmas."""
        raise NotImplementedError(f"pragma {name}")

    def set_busy_timeout(self, milliseconds: int, /) -> None:
        """Do nothing: the session's own time-outs apply."""

    def interrupt(self) -> None:
        """Do nothing: a statement ends by the session's own time-outs."""

    def close(self) -> None:
        """Do nothing: the link belongs to the store."""


def run_together(db: PostgresDatabase, works: Sequence[Callable[[PostgresDatabase], T]]) -> list[T]:
    """Run several functions on one link concurrently: each runs until it needs an answer, then all wait for one round trip.

    Their statements mix, so they must not read each other's rows. An error of one, or of a statement, ends all of them. What
    they signal is signalled. Runs under `run_waiting`, or as one of such pieces itself.
    """
    results: list[Any] = [None] * len(works)
    conductor: Any = getcurrent()
    waiting: list[tuple[int, Any]] = []
    try:
        for place, work in enumerate(works):
            running: Any = greenlet(work)
            results[place] = running.switch(db.beside(conductor.switch))
            if not running.dead:
                waiting.append((place, running))
        while waiting:
            db.settle()
            for place, running in tuple(waiting):
                results[place] = running.switch()
            waiting = [(place, running) for place, running in waiting if not running.dead]
    except BaseException:
        for _, running in waiting:
            if not running.dead:
                running.throw(GreenletExit)
        raise
    return results
