"""The file: one server, harmless readers, versions that move forward, and nothing for others to read."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import apsw
import pytest

from hermes_trio.store import (
    ForeignDatabase,
    NewerSchema,
    NewSession,
    StoreCorrupt,
    StoreInUse,
    StoreReadOnly,
    open_store,
)
from hermes_trio.store.ownership import owner_pid
from hermes_trio.store.sqlite.files import connect, enter_wal
from hermes_trio.store.sqlite.migrations import MIGRATIONS
from hermes_trio.store.sqlite.rows import Database, many, one, write
from hermes_trio.store.sqlite.schema import APPLICATION_ID, VERSION, migrate, version_of

OPEN_AND_SAY = """
import sys, trio
from hermes_trio.store import open_store, StoreInUse

async def main():
    try:
        async with open_store(sys.argv[1]):
            print("opened")
    except StoreInUse as error:
        print(error.pid, error)

trio.run(main)
"""


async def test_a_second_server_is_refused_with_the_first_ones_pid(tmp_path: Path) -> None:
    """In this process and in another one; when the first is gone, the next may open."""
    path = tmp_path / "store.db"
    async with open_store(path):
        assert owner_pid(path) == os.getpid()
        with pytest.raises(StoreInUse, match=f"pid {os.getpid()}") as refused:
            async with open_store(path):
                pass
        said = subprocess.run(  # noqa: ASYNC221
            [sys.executable, "-c", OPEN_AND_SAY, str(path)], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    assert refused.value.pid == os.getpid()
    assert said.startswith(f"{os.getpid()} ")
    assert owner_pid(path) is None
    async with open_store(path):
        pass


async def test_a_reader_is_harmless(tmp_path: Path) -> None:
    """Another process that reads, even inside a transaction, neither stops a write nor sees half of one."""
    path = tmp_path / "store.db"
    async with open_store(path) as store:
        await store.create_session(NewSession(id="a", source="x"))
        reader = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)
        reader.execute("BEGIN")
        before = reader.execute("SELECT count(*) FROM sessions").fetchone()
        await store.create_session(NewSession(id="b", source="x"))
        await store.give_space_back()
        during = reader.execute("SELECT count(*) FROM sessions").fetchone()
        reader.execute("COMMIT")
        after = reader.execute("SELECT count(*) FROM sessions").fetchone()
        reader.close()

    assert (before, during, after) == ((1,), (1,), (2,))


async def test_a_short_lock_of_another_process_is_waited_for(tmp_path: Path) -> None:
    """Somebody who writes by hand delays a write; it is not lost."""
    path = tmp_path / "store.db"
    async with open_store(path) as store:
        script = (
            "import sqlite3, sys, time\n"
            "db = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
            "db.execute('BEGIN IMMEDIATE')\n"
            "print('locked', flush=True)\n"
            "time.sleep(0.3)\n"
            "db.execute('COMMIT')\n"
        )
        other = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE)  # noqa: ASYNC220
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        await store.set_meta("a", "1")
        assert await store.get_meta("a") == "1"
        other.stdout.close()
        assert other.wait() == 0


async def test_the_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    """Transcripts and keys are nobody else's business."""
    path = tmp_path / "store.db"
    async with open_store(path) as store:
        await store.set_meta("a", "1")
        modes = {name: stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in os.listdir(tmp_path)}

    assert modes == dict.fromkeys(("store.db", "store.db-wal", "store.db-shm", "store.db.lock"), 0o600)


async def test_a_new_file_is_set_up_for_giving_space_back(tmp_path: Path) -> None:
    """Incremental vacuum from the first page, write-ahead log, full synchronisation, foreign keys, our mark."""
    path = tmp_path / "store.db"
    async with open_store(path):
        pass
    db = sqlite3.connect(path)
    found = {
        name: db.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("auto_vacuum", "journal_mode", "user_version", "application_id")
    }
    db.close()
    writer = connect(str(path))
    assert (writer.pragma("foreign_keys"), writer.pragma("synchronous")) == (1, 2)
    writer.close()

    assert found == {
        "auto_vacuum": 2,
        "journal_mode": "wal",
        "user_version": VERSION,
        "application_id": APPLICATION_ID,
    }


async def test_a_newer_file_is_refused_and_untouched(tmp_path: Path) -> None:
    """A program that does not know a file's version does not touch it, not even its journal mode."""
    path = tmp_path / "store.db"
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {VERSION + 1}")
    db.execute("CREATE TABLE from_the_future (x)")
    db.commit()
    db.close()
    before = path.read_bytes()

    with pytest.raises(NewerSchema, match=f"version {VERSION + 1}.*upgrade"):
        async with open_store(path):
            pass

    assert path.read_bytes() == before


async def test_something_else_is_not_taken_for_a_store(tmp_path: Path) -> None:
    """A file that is no database is refused with a clear error, and stays as it is."""
    path = tmp_path / "store.db"
    path.write_bytes(b"this is not a database, it is a text file\n" * 50)
    before = path.read_bytes()

    with pytest.raises(StoreCorrupt, match="not a database"):
        async with open_store(path):
            pass

    assert path.read_bytes() == before


async def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    """The error says which path cannot be written."""
    with pytest.raises(StoreReadOnly, match="nowhere"):
        async with open_store(tmp_path / "nowhere" / "store.db"):
            pass


def _older(db: Database) -> None:
    write(db, "CREATE TABLE people (name TEXT)")
    write(db, "INSERT INTO people VALUES ('Ann')")


def _newer(db: Database) -> None:
    write(db, "ALTER TABLE people ADD COLUMN age INTEGER NOT NULL DEFAULT 7")


def _broken(db: Database) -> None:
    write(db, "CREATE TABLE half (x)")
    raise RuntimeError("power cut")


def test_a_file_moves_forward_one_version_at_a_time(tmp_path: Path) -> None:
    """An older file gets the migrations that it lacks, once, and keeps its rows."""
    path = str(tmp_path / "m.db")
    db = connect(path)
    enter_wal(db, path)

    assert migrate(db, path, (_older,)) == 0
    assert migrate(db, path, (_older, _newer)) == 1
    assert migrate(db, path, (_older, _newer)) == 2
    assert one(db, "SELECT name, age FROM people") == ("Ann", 7)
    assert version_of(db) == 2
    db.close()


def test_a_migration_that_fails_leaves_the_version_before_it(tmp_path: Path) -> None:
    """A migration is one transaction: after a failure the file is what it was."""
    path = str(tmp_path / "m.db")
    db = connect(path)
    migrate(db, path, (_older,))

    with pytest.raises(RuntimeError, match="power cut"):
        migrate(db, path, (_older, _broken))

    assert version_of(db) == 1
    assert many(db, "SELECT name FROM sqlite_schema WHERE name = 'half'") == []
    db.close()


@pytest.mark.parametrize("released", range(1, VERSION + 1))
async def test_every_released_version_can_be_opened(tmp_path: Path, released: int) -> None:
    """A file of each version that was ever released becomes one of today's."""
    path = tmp_path / "store.db"
    db = connect(str(path))
    enter_wal(db, str(path))
    migrate(db, str(path), MIGRATIONS[:released])
    db.close()

    async with open_store(path) as store:
        await store.create_session(NewSession(id="a", source="x"))
        assert await store.get_session("a") is not None


async def test_the_database_of_another_program_is_left_alone(tmp_path: Path) -> None:
    """It is named, and not a byte of it changes."""
    path = tmp_path / "state.db"
    foreign = apsw.Connection(str(path))
    foreign.execute("CREATE TABLE sessions (id TEXT); CREATE TABLE notes (n INTEGER); INSERT INTO notes VALUES (1)")
    foreign.close()
    before = path.read_bytes()
    with pytest.raises(ForeignDatabase, match=r"another program.*notes, sessions.*home directory of its own"):
        async with open_store(path):
            pass
    assert path.read_bytes() == before
    assert not path.with_name("state.db-wal").exists()
