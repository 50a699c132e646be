"""From one version to the next: nothing is lost, a copy is kept, and whatever goes wrong leaves the old database or the new one."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import stat
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import apsw
import pytest

from hermes_trio.http.turns import SessionClaim
from hermes_trio.store import SearchQuery, StoreError, StoreFull, open_store
from hermes_trio.store.sqlite.files import connect
from hermes_trio.store.sqlite.migrations import MIGRATIONS
from hermes_trio.store.sqlite.rows import Database, many, one
from hermes_trio.store.sqlite.schema import VERSION, backup_path, migrate, version_of

HERE = Path(__file__).parent


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A database that the last program of version 1 has left, with something in every table."""
    path = tmp_path / "store.db"
    path.write_bytes(gzip.decompress((HERE / "v1.db.gz").read_bytes()))
    path.chmod(0o644)
    return path


def rows_of(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """Every row of every table, by the columns that version 1 has."""
    db = apsw.Connection(":memory:")
    MIGRATIONS[0](db)  # pyright: ignore[reportArgumentType]
    first = {name: [row[1] for row in db.execute(f"PRAGMA table_info({name})")] for name in _tables(db)}
    db.close()
    db = apsw.Connection(str(path))
    found = {name: db.execute(f"SELECT {', '.join(columns)} FROM {name}").fetchall() for name, columns in first.items()}
    db.close()
    return found


def _tables(db: apsw.Connection) -> list[str]:
    sql = "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite%' AND name NOT LIKE 'message\\__%' ESCAPE '\\'"
    return [name for (name,) in db.execute(sql)]


def test_the_fixture_has_something_in_every_table(old: Path):
    """An empty table would prove nothing."""
    db = connect(str(old))
    assert version_of(db) == 1
    db.close()
    assert [name for name, rows in rows_of(old).items() if not rows] == []


def test_nothing_is_lost_by_a_migration(old: Path):
    """Every row of version 1 is in the new database with every column that it had; what it refers to is there; references are enforced again.

    A grant to everybody has become the operator's own.
    """
    before = rows_of(old)
    before["grants"] = [(scope or "platform api_server", *rest) for scope, *rest in before["grants"]]
    db = connect(str(old))
    assert migrate(db, str(old)) == 1
    assert version_of(db) == VERSION
    assert many(db, "PRAGMA foreign_key_check") == []
    assert one(db, "PRAGMA foreign_keys") == (1,)
    db.close()
    assert rows_of(old) == before


async def test_a_migrated_database_works(old: Path):
    """The next start finds the conversation, puts right what was under way, and search still finds the old words."""
    async with open_store(old, maintenance=False) as store:
        recovery = await store.recover("e2")
        assert recovery.runs_interrupted == 1
        assert recovery.jobs_lost == 2
        session = await store.session_of("agent:main:telegram:dm:42")
        assert session is not None
        assert session.message_count == 44
        assert len(await store.load_history(session.id)) == 44
        assert await store.search_messages(SearchQuery(text="café"))


def test_a_copy_is_kept_for_its_owner_alone(old: Path):
    """The copy has the old version and every row, is a single file of mode 0600, and the log says where it is."""
    before = rows_of(old)
    db = connect(str(old))
    migrate(db, str(old))
    db.close()
    kept = backup_path(old, 1)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert rows_of(kept) == before
    copy = connect(str(kept))
    assert version_of(copy) == 1
    copy.close()
    assert sorted(path.name for path in old.parent.iterdir()) == ["store.db", "store.db.v1.backup"]


def test_a_new_database_is_not_copied(tmp_path: Path):
    """There is nothing to keep."""
    db = connect(str(tmp_path / "new.db"))
    assert migrate(db, str(tmp_path / "new.db")) == 0
    db.close()
    assert [path.name for path in tmp_path.iterdir()] == ["new.db"]


def test_a_full_disk_refuses_before_anything_is_touched(old: Path, monkeypatch: pytest.MonkeyPatch):
    """Without space for the copy and the change the database stays as it is, byte for byte, and the error says how much is needed."""
    usage = namedtuple("usage", "total used free")
    before = old.read_bytes()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 100_000))
    db = connect(str(old))
    with pytest.raises(StoreFull, match=r"needs [\d,]+ bytes beside it; 100,000 are free. Nothing was changed"):
        migrate(db, str(old))
    assert version_of(db) == 1
    db.close()
    assert old.read_bytes() == before
    assert [path.name for path in old.parent.iterdir()] == ["store.db"]


LIMITED = """
import resource, sys
from hermes_trio.store import StoreFull
from hermes_trio.store.sqlite.files import connect
from hermes_trio.store.sqlite.schema import migrate, version_of

db = connect(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    migrate(db, sys.argv[1])
except StoreFull as error:
    print("full", version_of(db))
"""


def test_a_limit_that_nobody_announces_refuses_too(old: Path):
    """A quota is met by the copy, before the database itself is changed, and half a copy is not left."""
    before = old.read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(old)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "full 1\n"
    assert old.read_bytes() == before
    assert [path.name for path in old.parent.iterdir()] == ["store.db"]


def rebuild_sessions(db: Database) -> None:
    """SQLite's recipe for changing a table: make a new one, copy, drop the old one, rename."""
    (sql,) = one(db, "SELECT sql FROM sqlite_schema WHERE name = 'sessions'") or ("",)
    indexes = [
        text for (text,) in many(db, "SELECT sql FROM sqlite_schema WHERE tbl_name = 'sessions' AND type = 'index'")
    ]
    db.execute(sql.replace("CREATE TABLE sessions", "CREATE TABLE new_sessions"))
    db.execute(
        "INSERT INTO new_sessions SELECT * FROM sessions; DROP TABLE sessions; ALTER TABLE new_sessions RENAME TO sessions"
    )
    for text in filter(None, indexes):
        db.execute(text)


def test_a_table_can_be_rebuilt_without_losing_what_refers_to_it(old: Path):
    """Dropping a table deletes, with foreign keys on, every row that refers to it: every message, here. A migration runs with them off."""
    before = rows_of(old)
    db = connect(str(old))
    migrate(db, str(old), (MIGRATIONS[0], rebuild_sessions))
    assert many(db, "PRAGMA foreign_key_check") == []
    with pytest.raises(apsw.ConstraintError):
        db.execute("INSERT INTO messages (session, role, content, timestamp) VALUES (999, 'user', '', 0)")
    db.close()
    assert rows_of(old) == before


def test_a_migration_that_would_leave_dangling_references_is_refused(old: Path):
    """The check after the change is what stands between a mistake in a migration and a broken database."""

    def forgetful(db: Database) -> None:
        db.execute("DELETE FROM sessions WHERE id = 'old'")

    before = rows_of(old)
    db = connect(str(old))
    with pytest.raises(StoreError, match=r"rows of messages that refer to nothing. Nothing was changed"):
        migrate(db, str(old), (MIGRATIONS[0], forgetful))
    assert version_of(db) == 1
    assert one(db, "PRAGMA foreign_keys") == (1,)
    db.close()
    assert rows_of(old) == before


def test_a_crash_at_any_statement_leaves_the_old_database_or_the_new_one(old: Path, tmp_path: Path):
    """A process that is killed before any statement of the copy or of the change leaves every row, and the next start migrates."""
    place = tmp_path / "deaths"
    place.mkdir()
    script = HERE / "doomed_migration.py"
    done = subprocess.run(
        [sys.executable, str(script), str(old), str(place)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    deaths = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(deaths) > 8
    assert [death["killed"] for death in deaths] == [True] * (len(deaths) - 1) + [False]
    assert {death["version"] for death in deaths} <= {1, VERSION}
    assert {death["version"] for death in deaths[:-1]} >= {1}
    assert deaths[-1]["version"] == VERSION
    rows = deaths[0]["rows"]
    for death in deaths:
        assert death["rows"] == rows or death["version"] != 1
        assert {name: death["later"][name] for name in rows} == rows
    assert os.listdir(place) == []


def test_keys_of_http_sessions_name_their_tenant(tmp_path: Path):
    """Version 3 puts the tenant into every key that an HTTP client chose, in the session, its jobs and their routing; chats keep theirs."""
    db = connect(str(tmp_path / "store.db"))
    for migration in MIGRATIONS[:2]:
        migration(db)
    sessions = [
        ("admin", "api_server", "", "agent:main:telegram:dm:42"),
        ("plain", "api_server", "", "plain"),
        ("mine", "api_server", "a:b", "mine"),
        ("kept", "api_server", "t", "api:t:kept"),
        ("chat", "telegram", "", "agent:main:telegram:dm:42"),
    ]
    for id, source, tenant, key in sessions:
        routing = f'{{"session_key":"{key}","session_id":"{id}"}}'
        db.execute(
            "INSERT INTO sessions (id, source, tenant, session_key, routing, started_at, last_active) VALUES (?, ?, ?, ?, ?, 1, 1)",
            (id, source, tenant, key, routing),
        )
        db.execute(
            "INSERT INTO jobs (job_id, kind, title, session_id, session_key, root_id, turn_id, routing, state, started_at)"
            " VALUES (?1, 'process', 't', ?1, ?2, 'r', 't', ?3, 'running', 1)",
            (id, key, routing),
        )
    MIGRATIONS[2](db)
    wanted = {
        "admin": "api::agent:main:telegram:dm:42",
        "plain": "api::plain",
        "mine": "api:a%3Ab:mine",
        "kept": "api:t:kept",
        "chat": "agent:main:telegram:dm:42",
    }
    for table, id in (("sessions", "id"), ("jobs", "job_id")):
        sql = f"SELECT {id}, session_key, json_extract(routing, '$.session_key') FROM {table}"
        assert {name: (key, routed) for name, key, routed in many(db, sql)} == {
            name: (key, key) for name, key in wanted.items()
        }
    assert SessionClaim(tenant="a:b", session_id="mine").context().session_key == wanted["mine"]
    db.close()
