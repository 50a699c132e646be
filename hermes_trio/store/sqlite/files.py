"""The database file: how it is opened for writing and for reading, with which settings, and how the loss of its name is noticed.

It is opened only through SQLite: a raw open and close of it in this process would drop SQLite's own locks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

import apsw

from hermes_trio.store.errors import StoreError, StoreReplaced, translate

from .rows import Database

MEMORY: Final = ":memory:"

BUSY_MILLISECONDS: Final = 5_000
"""The busy time-out: how long a write waits for another process that holds the write lock (a migration, a manual statement)."""

STATEMENTS: Final = 256
"""More prepared statements than there are in the package."""

READER_CACHE_KIB: Final = 2_048
WRITER_CACHE_KIB: Final = 4_096
"""Small on purpose: the kernel caches the file's pages too, and the growth of a larger cache looks like a memory leak."""

EXAMINED_SECONDS: Final = 1.0
"""How long an unchanged directory is trusted. Not every file system notes its changes."""

FINE_SECONDS: Final = 0.05
COARSE_SECONDS: Final = 2.5
COARSE_NANOSECONDS: Final = 10_000_000
"""How long after a change of a directory another one could leave its time the same: a few ticks of the kernel's clock. Some file systems store
whole seconds or hundredths, recognised by times that are multiples of a hundredth."""


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
    """The identity of the opened database file and of its log: both must keep their names while a server has them open. To be closed.

    A file loses its name only by a change of its directory, so the directory is read before each commit, and the files only if it has changed, or
    after a second: then it is also noticed that the path leads to another directory, in which case the files keep their names elsewhere. Reading
    the times of the log before each commit would be expensive: kernels with fine-grained file times then store new ones with the next write.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        real = os.path.realpath(path)
        self._log_path = f"{real}-wal" if os.path.islink(path) else f"{path}-wal"
        self._clock = clock
        self._file: tuple[int, int] | None = _identity(path)
        self._known: tuple[int, int, int, int] | None = None
        self._directory: int | None = None
        with suppress(OSError):  # a directory that may not be read
            self._directory = os.open(os.path.dirname(real), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._changed: int = 0
        """The time of the directory's last change, while the files had their names; 0 if another change could leave it the same."""
        self._examined: float = 0.0

    def close(self) -> None:
        """Close the directory. The files are not opened here: a raw open and close of them would drop SQLite's locks."""
        if self._directory is not None:
            os.close(self._directory)
            self._directory = None

    def check(self) -> None:
        """Raise `StoreReplaced` unless the names still refer to the open files. Makes one system call while the directory does not change."""
        now = self._clock()
        changed = 0 if self._directory is None else os.fstat(self._directory).st_ctime_ns
        if changed and changed == self._changed and 0.0 <= now - self._examined < EXAMINED_SECONDS:
            return
        self._changed = 0
        if self._examine():
            grain = COARSE_SECONDS if changed % COARSE_NANOSECONDS == 0 else FINE_SECONDS
            if now - changed / 1e9 > grain:
                self._changed, self._examined = changed, now

    def _examine(self) -> bool:
        """Raise `StoreReplaced` unless the names refer to the open files; return whether there is a log already."""
        try:
            file, log = os.stat(self._path), os.stat(self._log_path)
        except OSError:
            if self._known is None and _identity(self._path) == self._file:
                return False
        else:
            found = (file.st_dev, file.st_ino, log.st_dev, log.st_ino)
            if found == self._known:
                return True
            if self._known is None and found[:2] == self._file:
                self._known = found
                return True
        raise StoreReplaced(
            f"{self._path} was removed or replaced while the server had it open: nothing is written any more;"
            " put the file back, or stop the server and start it again"
        )


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


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
