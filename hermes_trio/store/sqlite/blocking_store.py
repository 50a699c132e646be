"""The store's verbs on one connection that blocks, beside a server that may have the same database open. For command-line tools.

Each write is a transaction of its own. There is no writer task, no maintenance, and no owner: what only the owner may do (see `ownership`) needs
`alone=True`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import trio

from hermes_trio.base.retention import Retention
from hermes_trio.store.errors import StoreError, StoreReadOnly
from hermes_trio.store.ownership import owned
from hermes_trio.store.signals import Signals

from .files import connect, connect_reader
from .rows import Database
from .schema import VERSION, version_of
from .store import OpenDatabase, SqliteStore
from .verbs import SharedReads
from .writer import Weight, WriterStatistics, run_now

T = TypeVar("T")


class BlockingWrites:
    """Runs each write at once, in a transaction of its own. With `read_only`, every write raises `StoreReadOnly`."""

    around: Callable[[str], AbstractContextManager[object]] | None = None

    def __init__(self, db: Database, path: str, *, read_only: bool = False) -> None:
        self._db = db
        self._path = path
        self._read_only = read_only

    async def submit(self, verb: Callable[..., T], *args: object, weight: Weight = Weight.LIGHT) -> T:
        """Run a verb and commit it. Cancelled before it starts or not at all."""
        await trio.lowlevel.checkpoint()
        return self._run(verb, *args)

    def post(self, verb: Callable[..., object], *args: object) -> None:
        """Run a verb and commit it."""
        self._run(verb, *args)

    def _run(self, verb: Callable[..., T], *args: object) -> T:
        if self._read_only:
            raise StoreReadOnly(f"{self._path} is open for reading only")
        return run_now(self._db, self._path, verb, *args)

    def check_file(self) -> None:
        """Do nothing: the connection is closed before the file can be replaced."""

    def statistics(self) -> WriterStatistics:
        """Return empty statistics."""
        return WriterStatistics(verbs=0, commits=0, waiting=0, largest_batch=0)


def blocking_database(db: Database, path: str, *, read_only: bool = False) -> OpenDatabase:
    """Return an open database on a connection that blocks."""
    return OpenDatabase(
        path=path,
        writer=BlockingWrites(db, path, read_only=read_only),
        reads=SharedReads(db, path),
        signals=Signals(),
        retention=Retention(),
        clock=time.time,
        token=secrets.token_hex,
    )


def check_version(db: Database, path: str) -> None:
    """Raise `StoreError` with the remedy for a database whose schema is older or newer than this program's."""
    found = version_of(db)
    if found != VERSION:
        remedy = "a newer hermes-trio wrote it; upgrade" if found > VERSION else "start the server once to migrate it"
        raise StoreError(f"{path} has schema version {found}, this program works with {VERSION}: {remedy}")


class _ReadOnlyStore(SqliteStore):
    """All verbs, of which those that write raise `StoreReadOnly`. A search finds what is indexed."""

    async def index_some(self) -> int:
        """Index nothing."""
        return 0


@contextmanager
def open_blocking(path: str, *, read_only: bool = False, alone: bool = False) -> Iterator[SqliteStore]:
    """Open the existing database at `path` for the body of the `with`.

    With `read_only`, neither wait for a server nor block it. With `alone`, hold the owner's lock, and raise `StoreInUse` if a server has it. Raises
    `StoreError` for another schema version.
    """
    with ExitStack() as stack:
        if alone:
            stack.enter_context(owned(Path(path)))
        db = connect_reader(path) if read_only else connect(path)
        stack.callback(db.close)
        check_version(db, path)
        kind = _ReadOnlyStore if read_only else SqliteStore
        yield kind(blocking_database(db, path, read_only=read_only))
