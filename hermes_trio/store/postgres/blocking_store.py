"""The store's verbs on one connection that blocks, beside the nodes of the database. For command-line tools."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hermes_trio.store.errors import StoreInUse
from hermes_trio.store.sqlite.blocking_store import blocking_database
from hermes_trio.store.sqlite.rows import one
from hermes_trio.store.sqlite.store import SqliteStore

from .blocking import connect_blocking
from .search import PostgresSearch


class _PostgresBlockingStore(PostgresSearch, SqliteStore):
    """All verbs; search uses the index in PostgreSQL."""


@contextmanager
def open_blocking(url: str, *, read_only: bool = False, alone: bool = False) -> Iterator[SqliteStore]:
    """Connect to the database for the body of the `with`. With `alone`, raise `StoreInUse` if a node's lease is in force.

    Raises `StoreUnavailable`, and what a server raises at its start for a schema that does not fit.
    """
    with connect_blocking(url) as db:
        if alone:
            live = one(db, "SELECT count(*) FROM nodes WHERE expires_at > extract(epoch FROM clock_timestamp())")
            if live is not None and live[0]:
                raise StoreInUse(f"{live[0]} nodes work on the database; stop them first", 0)
        yield _PostgresBlockingStore(blocking_database(db, db.where, read_only=read_only))
