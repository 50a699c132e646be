"""The database file: how it is opened for writing and for reading, and with which settings.

It is opened only through SQLite: a raw open and close of it in this process would drop SQLite's own locks.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final, cast

import apsw

from hermes_trio.store.errors import StoreError, StoreReplaced, translate

from .rows import Database

__all__ = [
    "MEMORY",
    "SqliteConnection",
    "connect",
    "connect_reader",
    "enter_wal",
]

MEMORY: Final = ":memory:"

BUSY_MILLISECONDS: Final = 5_000
"""The busy time-out: how long a write waits for another process that holds the write lock (a migration, a manual statement)."""

STATEMENTS: Final = 256
"""More prepared statements than there are in the package."""

READER_CACHE_KIB: Final = 2_048
WRITER_CACHE_KIB: Final = 4_096
"""Small on purpose: the kernel caches the file's pages too, and the growth of a larger cache looks like a memory leak."""


class SqliteConnection(apsw.Connection):
    """A connection that also collects the signals of the running transaction; the writer announces them after the commit."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.signals: list[tuple[str, str]] = []


def connect(path: str) -> Database:
    """Open a database for writing; a new file is readable only by its owner. Applies settings; reads and writes no table."""
    if path != MEMORY:
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            pass
        except OSError as error:
            raise translate(apsw.CantOpenError(str(error.strerror)), path) from error
    db = cast(Database, SqliteConnection(path, statementcachesize=STATEMENTS))
    try:
        db.set_busy_timeout(BUSY_MILLISECONDS)
        db.pragma("cache_size", -WRITER_CACHE_KIB)
        db.pragma("temp_store", "memory")
        db.pragma("foreign_keys", True)
    except apsw.Error as error:
        db.close()
        raise translate(error, path) from error
    return db


def enter_wal(db: Database, path: str) -> None:
    """Set a file to WAL mode, so that readers and the writer do not block each other, and to incremental vacuum, so that space can be freed."""
    db.pragma("auto_vacuum", "incremental")
    mode = db.pragma("journal_mode", "wal")
    if mode != "wal" and path != MEMORY:
        raise StoreError(f"{path}: the file system does not support write-ahead logging; put it on a local disk")
    db.pragma("synchronous", "full")


class DatabaseFile:
    """The identity of the opened database file and of its log: both must keep their names while a server has them open."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: tuple[int, int] | None = _identity(path)
        self._log: tuple[int, int] | None = None

    def check(self) -> None:
        """Raise `StoreReplaced` unless the names still refer to the open files. Makes two system calls."""
        log = _identity(f"{self._path}-wal")
        if self._log is None:
            self._log = log
        if _identity(self._path) == self._file and log == self._log:
            return
        raise StoreReplaced(
            f"{self._path} was removed or replaced while the server had it open: nothing is written any more;"
            " put the file back, or stop the server and start it again"
        )


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if found.st_nlink else None


def connect_reader(path: str) -> Database:
    """Open an existing database for reading only. Neither waits for the writer nor blocks it.

    A database that no process has open, in a read-only directory, is opened as immutable, because SQLite could not make a log beside it.
    """
    try:
        return _read_only(path, apsw.SQLITE_OPEN_READONLY)
    except (apsw.CantOpenError, apsw.ReadOnlyError) as error:
        if not os.path.exists(path) or os.path.exists(f"{path}-wal"):
            raise translate(error, path) from error
    except apsw.Error as error:
        raise translate(error, path) from error
    try:
        uri = f"{Path(path).absolute().as_uri()}?immutable=1"
        return _read_only(uri, apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
    except apsw.Error as error:
        raise translate(error, path) from error


def _read_only(name: str, flags: int) -> Database:
    db = cast(Database, SqliteConnection(name, flags=flags, statementcachesize=STATEMENTS))
    try:
        db.set_busy_timeout(BUSY_MILLISECONDS)
        db.pragma("cache_size", -READER_CACHE_KIB)
        db.pragma("query_only", True)
        db.execute("SELECT count(*) FROM sqlite_schema").fetchall()
    except apsw.Error:
        db.close()
        raise
    return db
