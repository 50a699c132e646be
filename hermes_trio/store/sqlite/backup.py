"""Backup of a live database: a consistent copy, made while the server runs; an incomplete copy never gets its name."""

from __future__ import annotations

import os
from pathlib import Path

import apsw

from hermes_trio.store.errors import StoreError, translate

from .files import SqliteConnection, connect_reader
from .rows import many


def back_up(source: str, target: Path) -> int:
    """Copy the database at `source` to the new file `target`, readable only by its owner; return its size in bytes.

    The copy is one snapshot, and passes an integrity check before it gets its name. It is a single file without a log.
    """
    if target.exists():
        raise StoreError(f"{target} exists already; name a file that does not")
    reader = connect_reader(source)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM sqlite_schema").fetchall()
    partial = target.with_name(target.name + ".partial")
    try:
        os.close(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
        copy = SqliteConnection(str(partial))
        try:
            assert isinstance(reader, apsw.Connection)
            with copy.backup("main", reader, "main") as work:
                work.step(-1)
            many(copy, "PRAGMA journal_mode = DELETE")
            found = many(copy, "PRAGMA integrity_check(1)")
        finally:
            copy.close()
        if found != [("ok",)]:
            raise StoreError(
                f"the copy of {source} is damaged: {found[0][0]}; `hermes-trio doctor` looks at the source"
            )
        os.replace(partial, target)
    except apsw.Error as error:
        raise translate(error, str(target)) from error
    except OSError as error:
        raise StoreError(f"{target} cannot be written: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
        reader.close()
    return target.stat().st_size
