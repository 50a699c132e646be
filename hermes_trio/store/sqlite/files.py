"""The database file: who may open it, with which settings, the one server that owns it, and where that one listens.

The owner holds an advisory lock on a file beside the database and has written its pid there; another file, locked in the same way, says at which
addresses it can be reached. A file that nobody has locked says nothing. The database itself is only ever opened
through SQLite: any raw open and close of it in this process would drop SQLite's own locks.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

import apsw

from hermes_trio.store.errors import StoreError, StoreInUse, StoreReplaced, translate

from .rows import Database

__all__ = [
    "MEMORY",
    "SqliteConnection",
    "address_path",
    "announced",
    "announced_addresses",
    "connect",
    "connect_reader",
    "enter_wal",
    "lock_path",
    "owned",
    "owner_pid",
]

MEMORY: Final = ":memory:"

BUSY_MILLISECONDS: Final = 5_000
"""How long another process may hold the write lock (a migration, a manual statement) before a write gives up."""

ADDRESS_BYTES: Final = 65_536

STATEMENTS: Final = 256
"""More prepared statements than there are in the package."""

READER_CACHE_KIB: Final = 2_048
WRITER_CACHE_KIB: Final = 4_096
"""Small on purpose: the kernel keeps the file's pages too, and a larger cache makes a server that works look like one that leaks."""


class SqliteConnection(apsw.Connection):
    """A connection that also keeps what the verbs of the running transaction have to signal: the writer announces it after the commit."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.signals: list[tuple[str, str]] = []


def lock_path(path: Path) -> Path:
    """The file that the owner of `path` keeps locked."""
    return path.with_name(path.name + ".lock")


def owner_pid(path: Path) -> int | None:
    """The pid of the server that owns `path` now (0 if it cannot be told), or None if nobody does."""
    try:
        descriptor = os.open(lock_path(path), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _written_pid(descriptor)
    else:
        return None
    finally:
        os.close(descriptor)


def _written_pid(descriptor: int) -> int:
    text = os.pread(descriptor, 32, 0).strip()
    return int(text) if text.isdigit() else 0


@contextmanager
def owned(path: Path) -> Iterator[None]:
    """Be the one server of `path` for the body of the `with`, or raise `StoreInUse` with the other one's pid.

    The lock goes with the process however it ends, so a crash leaves nothing to clean up.
    """
    beside = lock_path(path)
    try:
        descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise translate(apsw.CantOpenError(f"{beside}: {error.strerror}"), str(path)) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _written_pid(descriptor)
            raise StoreInUse(
                f"{path} is in use by another server, pid {pid}; stop that one first, or give this one another file",
                pid,
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def address_path(path: Path) -> Path:
    """The file in which the owner of `path` says where it listens."""
    return path.with_name(path.name + ".address")


@contextmanager
def announced(path: Path, addresses: Sequence[str]) -> Iterator[None]:
    """Say for the body of the `with` where the owner of `path` listens. Only the owner may; `OSError` if it cannot be written.

    The file is complete and locked before it has its name, so one that is locked is never an earlier server's, and the lock goes with the process.
    """
    name = address_path(path)
    made = name.with_name(name.name + ".new")
    made.unlink(missing_ok=True)
    descriptor = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, "".join(f"{address}\n" for address in addresses).encode())
        made.rename(name)
        try:
            yield
        finally:
            name.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def announced_addresses(path: Path) -> tuple[str, ...]:
    """Where the server that owns `path` listens now; nothing if there is none, or if it has not said."""
    try:
        descriptor = os.open(address_path(path), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return tuple(os.pread(descriptor, ADDRESS_BYTES, 0).decode("ascii", "replace").split())
    else:
        return ()
    finally:
        os.close(descriptor)


def connect(path: str) -> Database:
    """Open a database for writing, made readable for its owner alone if it is new. Settings only; no table is touched."""
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
    """The durable mode of a file: space can be given back from the first page on, readers and the writer do not wait for each other."""
    db.pragma("auto_vacuum", "incremental")
    mode = db.pragma("journal_mode", "wal")
    if mode != "wal" and path != MEMORY:
        raise StoreError(f"{path}: the file system does not support write-ahead logging; put it on a local disk")
    db.pragma("synchronous", "full")


class DatabaseFile:
    """The file that was opened, and its log, as they were then: both must still have their names while a server works on them."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: tuple[int, int] | None = _identity(path)
        self._log: tuple[int, int] | None = None

    def check(self) -> None:
        """Raise `StoreReplaced` unless the names still belong to the files that are open. Two system calls."""
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
    """Open an existing database for reading only. Never waits for the writer, and never makes it wait.

    A database that nobody has open, in a directory that cannot be written, is read as it is: SQLite would want to make a log beside it.
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
