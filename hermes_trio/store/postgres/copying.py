"""Move a whole store between a SQLite file and a PostgreSQL database: all rows, checked one by one, or none.

Rows that belong to running nodes are not moved. The search index is rebuilt at the destination.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from hermes_trio.store.errors import StoreError
from hermes_trio.store.ownership import owned
from hermes_trio.store.sqlite.files import connect, connect_reader, enter_wal
from hermes_trio.store.sqlite.rows import Database, Row, many, marks, one, write
from hermes_trio.store.sqlite.schema import VERSION, migrate, version_of

from .blocking import BlockingDatabase
from .database import encode

TABLES: Final = (
    "sessions",
    "routes",
    "messages",
    "runs",
    "resumptions",
    "events",
    "jobs",
    "inbox",
    "outbox",
    "approvals",
    "grants",
    "responses",
    "conversations",
    "idempotency",
    "webhook_deliveries",
    "cron_jobs",
    "cron_executions",
    "api_keys",
    "pairing_codes",
    "allowed_users",
    "cursors",
    "state_meta",
)
"""The tables that are moved, each after the ones that it refers to."""

_NO_LIMIT: Final = "SET LOCAL statement_timeout = 0"
"""A table is read, and written, by one statement, however long that takes."""

_INDEX_MARK: Final = "search.indexed_upto"
_NUMBERED: Final = {"sessions": "n", "messages": "id", "inbox": "id", "outbox": "id"}
"""Columns that count rows, where it is not `rowid`."""


class _Table(msgspec.Struct, frozen=True):
    """A table as it is moved: with the columns of the file, and the order of insertion where the database stores it."""

    name: str
    columns: Mapping[str, bool]
    """Whether the column is of bytes, by its name."""
    key: tuple[str, ...]
    """The columns that order the rows, the same on both sides."""

    @property
    def listed(self) -> str:
        """Return the columns as SQL lists them."""
        return ", ".join(self.columns)


def _described(file: Database, database: BlockingDatabase, name: str) -> _Table:
    sql = "SELECT column_name, data_type FROM information_schema.columns WHERE table_schema = current_schema() AND table_name = ?"
    there = {str(column): str(kind) for column, kind in many(database, sql, (name,))}
    here = {str(row[1]): int(row[5]) for row in many(file, f"PRAGMA table_info({name})")}
    if strange := set(here) - set(there):
        raise StoreError(
            f"the database has no columns {', '.join(sorted(strange))} in {name}; run `hermes-trio store migrate`"
        )
    columns = ["rowid", *here] if "rowid" in there else list(here)
    key = ["rowid"] if "rowid" in there else sorted(filter(here.__getitem__, here), key=here.__getitem__)
    return _Table(name, {column: there[column] == "bytea" for column in columns}, tuple(key))


def _rows(db: Database, table: _Table) -> Iterator[Sequence[Any]]:
    """Iterate over the rows of a table in the order of its key, with one of them in memory at a time."""
    sql = f"SELECT {table.listed} FROM {table.name} ORDER BY {', '.join(table.key)}"
    return db.stream(sql) if isinstance(db, BlockingDatabase) else iter(cast(Iterable[Row], db.execute(sql)))


def _plain(row: Sequence[Any]) -> tuple[object, ...]:
    """Return a row as both sides can hold it. A whole number is the same in a column of fractions, where it is one exactly."""
    return tuple(value if isinstance(value, int | float) else encode(value) for value in row)


def _check(source: Database, target: Database, table: _Table) -> int:
    """Compare all rows of a table; return how many there are."""
    count = 0
    for one_row, other in zip_longest(_rows(source, table), _rows(target, table)):
        count += 1
        if one_row is None or other is None or _plain(one_row) != _plain(other):
            raise StoreError(f"row {count} of {table.name} differs after it was copied; nothing was kept")
    return count


def copy_from_sqlite(path: Path, target: BlockingDatabase) -> dict[str, int]:
    """Move everything from a file into an empty database, in one transaction; return the rows by table. The file stays as it is.

    Raises `StoreInUse` if a server has the file open, and `StoreError` if the database is not empty or a row differs afterwards.
    """
    if not path.exists():
        raise StoreError(f"there is no store at {path}")
    if path.is_dir():
        raise StoreError(f"{path} is a directory; name the file of the store in it, {path / 'state.db'}")
    with owned(path):
        file = connect_reader(str(path))
        try:
            if version_of(file) != VERSION:
                raise StoreError(
                    f"{path} has schema version {version_of(file)}, this program copies {VERSION}; start the server once on it"
                )
            target.execute("BEGIN")
            target.execute(_NO_LIMIT)
            target.execute(f"LOCK TABLE {', '.join(TABLES)} IN ACCESS EXCLUSIVE MODE")
            _check_empty(target)
            target.execute("DELETE FROM state_meta")
            counts: dict[str, int] = {}
            for table in TABLES:
                described = _described(file, target, table)
                target.copy_in(table, described.columns, _rows(file, described))
                counts[table] = _check(file, target, described)
                _count_on(target, described)
            write(target, "DELETE FROM state_meta WHERE key = ?", (_INDEX_MARK,))
            target.execute("COMMIT")
        finally:
            file.close()
    return counts


def _check_empty(target: BlockingDatabase) -> None:
    full = [table for table in TABLES if table != "state_meta" and many(target, f"SELECT 1 FROM {table} LIMIT 1")]
    if full:
        raise StoreError(
            f"the database is not empty ({', '.join(full)} have rows); copy into a new one. Nothing was changed"
        )
    if many(target, "SELECT 1 FROM nodes WHERE expires_at > extract(epoch FROM clock_timestamp())"):
        raise StoreError("nodes work on the database; stop them first. Nothing was changed")


def _count_on(target: BlockingDatabase, table: _Table) -> None:
    """Set the counter of a table, so that new rows are numbered after the copied ones."""
    column = "rowid" if "rowid" in table.columns else _NUMBERED.get(table.name)
    if column is not None:
        write(
            target,
            f"SELECT setval(pg_get_serial_sequence(?, ?), greatest((SELECT max({column}) FROM {table.name}), 1))",
            (table.name, column),
        )


def copy_to_sqlite(source: BlockingDatabase, path: Path) -> dict[str, int]:
    """Move everything from a database into a new file; return the rows by table. The database stays as it is."""
    if path.exists():
        raise StoreError(f"{path} exists already; name a file that does not")
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    try:
        source.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        source.execute(_NO_LIMIT)
        if many(source, "SELECT 1 FROM nodes WHERE expires_at > extract(epoch FROM clock_timestamp())"):
            raise StoreError(
                "nodes work on the database; stop them first, or what they write meanwhile is missing in the file"
            )
        file = connect(str(partial))
        try:
            enter_wal(file, str(partial))
            migrate(file, str(partial))
            counts = _fill(source, file)
            many(file, "PRAGMA journal_mode = DELETE")
            found = one(file, "PRAGMA integrity_check(1)")
        finally:
            file.close()
        if found != ("ok",):
            raise StoreError(f"the copy is damaged: {found}")
        os.replace(partial, path)
        return counts
    finally:
        partial.unlink(missing_ok=True)


def _fill(source: BlockingDatabase, file: Database) -> dict[str, int]:
    counts: dict[str, int] = {}
    file.execute("BEGIN IMMEDIATE")
    file.execute("DELETE FROM state_meta")
    for table in TABLES:
        described = _described(file, source, table)
        sql = f"INSERT INTO {table} ({described.listed}) VALUES ({marks(len(described.columns))})"
        file.executemany(sql, _rows(source, described))
        counts[table] = _check(source, file, described)
    file.execute("COMMIT")
    return counts
