"""Migration of a file of an older version to this one. The tables themselves are in `migrations`.

`user_version` holds the number of the last migration that ran. A file from a newer program is refused before anything is written to it.
A file with content is copied before it is changed, and changed in one transaction: a crash leaves the old database or the new one.
Every table that can grow has a column with the time of the end, which retention reads.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hermes_trio.store.errors import ForeignDatabase, NewerSchema, StoreError, StoreFull

from .backup import back_up
from .files import MEMORY
from .migrations import MIGRATIONS, Migration
from .rows import Database, many, one

APPLICATION_ID: Final = 0x48545253
"""`HTRS`, in the file's header: identifies the program of the database to `file(1)` and to `check_ours`."""

SPARE_BYTES: Final = 1_048_576
"""The disk space that a migration may need in addition to one copy of the database and one log as large as it."""

logger: Final = logging.getLogger(__name__)

VERSION: Final = len(MIGRATIONS)


def version_of(db: Database) -> int:
    """Return the schema version of an open file; 0 for an empty one."""
    return int(db.pragma("user_version"))


def check_ours(db: Database, path: str) -> None:
    """Raise `ForeignDatabase`, with nothing changed, for a file that another program has filled."""
    if int(db.pragma("application_id")) == APPLICATION_ID:
        return
    tables = [str(name) for (name,) in many(db, "SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name")]
    if not tables and version_of(db) == 0:
        return
    some = f" (it has the tables {', '.join(tables[:5])}{', …' if len(tables) > 5 else ''})" if tables else ""
    raise ForeignDatabase(
        f"{path} is the database of another program{some}; give hermes-trio a home directory of its own with HERMES_HOME or --home."
        " Nothing was changed"
    )


def backup_path(path: Path, version: int) -> Path:
    """Return the path of the copy that is made before a database of this version is migrated."""
    return path.with_name(f"{path.name}.v{version}.backup")


def migrate(db: Database, path: str, migrations: Sequence[Migration] = MIGRATIONS) -> int:
    """Migrate an open file to the newest version; return the version that it had.

    Raises `NewerSchema` for a file of a newer version, and `StoreFull` if there is no space for the copy and the change: nothing is
    touched then. An error in a migration, a dangling reference that it would leave, or a crash leaves the file as it was.
    """
    before = version_of(db)
    newest = len(migrations)
    if before > newest:
        raise NewerSchema(
            f"{path} has schema version {before}, and this program knows {newest}: it was written by a newer"
            " hermes-trio; upgrade the program, or use another file. Nothing was changed"
        )
    if before == newest:
        return before
    if before and path != MEMORY:
        _keep_copy(db, Path(path), before, newest)
    db.pragma("foreign_keys", False)
    try:
        db.execute("BEGIN IMMEDIATE")
        try:
            dangling = _dangling(db)
            for migration in migrations[before:]:
                migration(db)
            if left := _dangling(db) - dangling:
                raise StoreError(
                    f"{path}: the migration from version {before} to {newest} would leave rows of {', '.join(sorted(left))}"
                    " that refer to nothing. Nothing was changed"
                )
            db.pragma("user_version", newest)
            db.pragma("application_id", APPLICATION_ID)
            db.execute("COMMIT")
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")
    finally:
        db.pragma("foreign_keys", True)
    return before


def _dangling(db: Database) -> set[str]:
    """Return the tables with rows that refer to rows that do not exist."""
    return {str(table) for table, *_ in many(db, "PRAGMA foreign_key_check")}


def _keep_copy(db: Database, path: Path, before: int, newest: int) -> None:
    """Copy the database to a file beside it, readable only by its owner. An earlier copy of the same version is replaced by a complete one."""
    pages = one(db, "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size")
    assert pages is not None
    needed = 2 * int(pages[0]) + SPARE_BYTES
    free = shutil.disk_usage(path.absolute().parent).free
    if free < needed:
        raise StoreFull(
            f"{path} has schema version {before} and must be migrated to {newest}, which needs {needed:,} bytes beside it;"
            f" {free:,} are free. Nothing was changed"
        )
    kept = backup_path(path, before)
    made = kept.with_name(kept.name + ".new")
    made.unlink(missing_ok=True)
    back_up(str(path), made)
    os.replace(made, kept)
    directory = os.open(kept.absolute().parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    logger.info("migrating %s from schema version %d to %d; a copy of it is kept at %s", path, before, newest, kept)
