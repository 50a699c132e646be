"""Migrate a copy of a database and die at the n-th statement, for every n; print what each death left behind.

Arguments: the database of an older version, and a directory to work in. Each line of the output is a JSON object.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import apsw

from hermes_trio.store.sqlite.files import connect, enter_wal
from hermes_trio.store.sqlite.schema import migrate, version_of


def count(path: Path) -> dict[str, int]:
    """How many rows each table has, and whether the file is sound."""
    db = apsw.Connection(str(path))
    tables = [
        name
        for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table' AND sql NOT LIKE '%VIRTUAL%'")
    ]
    rows = {
        name: db.execute(f"SELECT count(*) FROM {name}").fetchall()[0][0] for name in tables if "message_" not in name
    }
    assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert db.execute("PRAGMA foreign_key_check").fetchall() == []
    db.close()
    return rows


def die_at(path: Path, statement: int) -> bool:
    """Migrate in a child process that kills itself before its `statement`-th statement; return whether it was killed."""
    child = os.fork()
    if child == 0:
        left = statement

        def trace(*_: object) -> bool:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return True

        db = connect(str(path))
        db.exec_trace = trace  # type: ignore[attr-defined]
        apsw.connection_hooks.append(lambda other: setattr(other, "exec_trace", trace))
        migrate(db, str(path))
        enter_wal(db, str(path))
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def main(source: Path, place: Path) -> None:
    """Die at each statement in turn, until a migration gets to its end."""
    statement = 0
    killed = True
    while killed:
        statement += 1
        path = place / f"{statement}.db"
        shutil.copy(source, path)
        killed = die_at(path, statement)
        db = connect(str(path))
        left = version_of(db)
        after_death = count(path)
        migrate(db, str(path))
        db.close()
        print(json.dumps({"killed": killed, "version": left, "rows": after_death, "later": count(path)}))  # noqa: T201
        for beside in place.glob(f"{statement}.db*"):
            beside.unlink()


main(Path(sys.argv[1]), Path(sys.argv[2]))
