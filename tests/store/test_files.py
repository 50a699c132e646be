"""The file: one server, harmless readers, versions that move forward, and nothing for others to read."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
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
from hermes_trio.store.errors import StoreReplaced
from hermes_trio.store.ownership import owner_pid
from hermes_trio.store.sqlite import files
from hermes_trio.store.sqlite.files import DatabaseFile, connect, enter_wal
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
    """Another program that writes to the file delays a write; it is not lost."""
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
    """Only the owner can read transcripts and keys."""
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


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database file, with its log beside it."""
    return _opened(tmp_path / "home")


def _opened(home: Path) -> Path:
    home.mkdir()
    path = home / "store.db"
    path.write_bytes(b"rows")
    (home / "store.db-wal").write_bytes(b"log")
    return path


def _remove(path: Path) -> None:
    path.unlink()


def _replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.rename(path)


def _move_directory(path: Path) -> None:
    path.parent.rename(path.parent.with_name("elsewhere"))


def _replace_directory(path: Path) -> None:
    _move_directory(path)
    _opened(path.parent)


@pytest.mark.parametrize("name", ["store.db", "store.db-wal"])
@pytest.mark.parametrize("change", [_remove, _replace, _move_directory, _replace_directory])
@pytest.mark.parametrize("linked", [False, True], ids=["file", "link"])
def test_a_file_that_loses_its_name_is_noticed_by_the_next_check(
    path: Path, name: str, change: Callable[[Path], None], linked: bool
) -> None:
    """Although the directory was trusted: of the file, of its log, of the directory, and behind a link."""
    opened = path
    if linked:
        opened = path.parent.with_name("link.db")
        opened.symlink_to(path)
    with closing(DatabaseFile(str(opened), clock=lambda: time.time() + 10)) as file:
        file.check()
        file.check()
        change(path.with_name(name))
        for _ in range(2):
            with pytest.raises(StoreReplaced):
                file.check()


def test_a_file_that_gets_its_name_back_is_accepted(path: Path) -> None:
    """What was moved away and back is the same file."""
    with closing(DatabaseFile(str(path), clock=lambda: time.time() + 10)) as file:
        file.check()
        path.rename(path.with_name("away"))
        with pytest.raises(StoreReplaced):
            file.check()
        path.with_name("away").rename(path)
        file.check()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were read."""
    read: list[str] = []
    stat_of = os.stat

    def counted(path: str) -> os.stat_result:
        read.append(os.path.basename(path))
        return stat_of(path)

    monkeypatch.setattr(files.os, "stat", counted)
    return read


def test_the_files_are_read_only_if_their_directory_has_changed(path: Path, read: list[str]) -> None:
    """And once a second."""
    now = time.time() + 10
    with closing(DatabaseFile(str(path), clock=lambda: now)) as file:
        read.clear()
        file.check()
        both = ["store.db", "store.db-wal"]
        assert read == both
        for _ in range(3):
            file.check()
        assert read == both
        (path.parent / "other").touch()
        file.check()
        assert read == both * 2
        now += 1
        file.check()
        assert read == both * 3


def test_the_files_are_always_read_if_their_directory_may_not_be(
    path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that can only be entered."""

    def refuse(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(files.os, "open", refuse)
    with closing(DatabaseFile(str(path), clock=lambda: time.time() + 10)) as file:
        read.clear()
        file.check()
        file.check()
        assert read == ["store.db", "store.db-wal"] * 2
        path.unlink()
        with pytest.raises(StoreReplaced):
            file.check()


def _hold_time(monkeypatch: pytest.MonkeyPatch, directory: Path, *, grain: int = 1) -> float:
    """Let no change of the directory be seen in its time, which is a multiple of `grain` nanoseconds; return this time."""
    held = os.stat(directory)
    changed = held.st_ctime_ns // grain * grain
    result = os.stat_result(tuple(held), {"st_ctime_ns": changed})

    def held_still(_: int) -> os.stat_result:
        return result

    monkeypatch.setattr(files.os, "fstat", held_still)
    return changed / 1e9


@pytest.mark.parametrize(("grain", "later"), [(1, 0.04), (1_000_000_000, 2.0)], ids=["nanoseconds", "seconds"])
def test_a_directory_that_changed_a_moment_ago_is_not_trusted(
    path: Path, monkeypatch: pytest.MonkeyPatch, grain: int, later: float
) -> None:
    """Another change within the same tick of the clock would leave its time the same; on some file systems, within the same seconds."""
    changed = _hold_time(monkeypatch, path.parent, grain=grain)
    with closing(DatabaseFile(str(path), clock=lambda: changed + later)) as file:
        file.check()
        path.unlink()
        with pytest.raises(StoreReplaced):
            file.check()


def test_an_unchanged_directory_is_trusted_for_a_second(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that does not note changes of directories delays the notice by no more."""
    now = _hold_time(monkeypatch, path.parent) + 10
    with closing(DatabaseFile(str(path), clock=lambda: now)) as file:
        file.check()
        path.unlink()
        now += 0.9
        file.check()
        now += 0.1
        with pytest.raises(StoreReplaced):
            file.check()


def test_a_clock_that_is_set_back_lets_nothing_pass(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are read when the second can no longer be told."""
    now = _hold_time(monkeypatch, path.parent) + 3600
    with closing(DatabaseFile(str(path), clock=lambda: now)) as file:
        file.check()
        path.unlink()
        now -= 1800
        with pytest.raises(StoreReplaced):
            file.check()
