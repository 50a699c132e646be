"""Typed access to rows: the one place where the driver's loosely typed values enter the package."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

Row = tuple[Any, ...]


class Cursor(Protocol):
    """The rows of a statement."""

    def fetchall(self) -> list[Any]: ...


class Database(Protocol):
    """The part of the driver's connection that the package uses."""

    def execute(self, statements: str, bindings: Any = None, /) -> Cursor: ...

    def executemany(self, statements: str, bindings: Any, /) -> Cursor: ...

    def pragma(self, name: str, value: Any = None, /) -> Any: ...

    def changes(self) -> int: ...

    def set_busy_timeout(self, milliseconds: int, /) -> None: ...

    def interrupt(self) -> None: ...

    def close(self) -> None: ...

    @property
    def signals(self) -> list[tuple[str, str]]: ...

    @property
    def in_transaction(self) -> bool: ...


Bindings = Sequence[object] | Mapping[str, object]


def one(db: Database, sql: str, bindings: Bindings = ()) -> Row | None:
    """Run a statement; return the first row, or None."""
    found = db.execute(sql, bindings).fetchall()
    return found[0] if found else None


def single(db: Database, sql: str, bindings: Bindings = ()) -> Any:
    """Run a statement; return the first column of the first row, or None."""
    found = db.execute(sql, bindings).fetchall()
    return found[0][0] if found else None


def many(db: Database, sql: str, bindings: Bindings = ()) -> list[Row]:
    """Run a statement; return all rows."""
    return db.execute(sql, bindings).fetchall()


def exists(db: Database, sql: str, bindings: Bindings = ()) -> bool:
    """Run a statement; return whether it has a row."""
    return bool(db.execute(sql, bindings).fetchall())


def write(db: Database, sql: str, bindings: Bindings = ()) -> None:
    """Run a statement and ignore its rows."""
    db.execute(sql, bindings)


def changed(db: Database, sql: str, bindings: Bindings = ()) -> int:
    """Run a statement; return how many rows it changed."""
    db.execute(sql, bindings)
    return db.changes()


def write_many(db: Database, sql: str, rows: Iterable[Sequence[object]]) -> None:
    """Run a statement once for each set of bindings."""
    db.executemany(sql, rows)


def roll_back(db: Database) -> None:
    """Roll back the open transaction, and forget its signals. Raises the driver's error if that fails; the transaction is then still open."""
    db.signals.clear()
    db.execute("ROLLBACK")


def equalities(columns: Mapping[str, object]) -> tuple[list[str], list[object]]:
    """Return conditions `column = ?` for the values that are not None, and their bindings. Never empty: without any it is `true`."""
    given = {column: value for column, value in columns.items() if value is not None}
    return ["true", *(f"{column} = ?" for column in given)], list(given.values())


def marks(count: int) -> str:
    """Return `?, ?, …` for an IN list. Callers keep the count bounded, so that the statement cache stays small."""
    return ", ".join("?" * count)
