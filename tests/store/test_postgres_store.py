"""The store on PostgreSQL: the published contracts, the schema beside SQLite's, and a database that breaks under load."""

from __future__ import annotations

import logging
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

pytest.importorskip("psycopg", reason="the extra `postgres` is not installed")

from hermes_trio.runtime.errors import Fenced, RuntimeProblem, SessionHeld
from hermes_trio.runtime.outcome import RunStatus
from hermes_trio.runtime.ports import KEY_TOPIC, LEASE_TOPIC, RUN_TOPIC, SESSION_TOPIC, EventRow, Message, inbox_topic
from hermes_trio.store import NewSession, Store, StoreError
from hermes_trio.store.errors import AlreadyStarted, ForeignSession, StoreUnavailable
from hermes_trio.store.postgres import reads
from hermes_trio.store.postgres.address import login_files_of, parse_address, passwords_of
from hermes_trio.store.postgres.blocking import connect_blocking
from hermes_trio.store.postgres.copying import TABLES
from hermes_trio.store.postgres.database import encode, translated
from hermes_trio.store.postgres.errors import without_secrets
from hermes_trio.store.postgres.lexemes import text_query, text_words
from hermes_trio.store.postgres.locks import lock_numbers
from hermes_trio.store.postgres.reconnecting_link import ReconnectingLink
from hermes_trio.store.postgres.signal_listener import GRACE_SECONDS, POLL_SECONDS, SignalListener
from hermes_trio.store.postgres.store import open_postgres
from hermes_trio.store.sqlite import sessions
from hermes_trio.store.sqlite.files import connect
from hermes_trio.store.sqlite.schema import migrate
from hermes_trio.testing.contracts import GatewayStoreContract
from hermes_trio.testing.contracts.gateway_store import NodeStoreContract
from tests.database_proxy import database_proxy
from tests.postgres_server import PASSWORD, PostgresServer, free_port, postgres_server

from .turns import KEY, finish, message, run, start


@pytest.mark.slow
class TestPostgresStore(GatewayStoreContract):
    """The contract of everything that a gateway keeps."""

    @pytest.fixture(autouse=True)
    def _database(self, postgres_url: str) -> None:
        self.url = postgres_url

    def open_store(self, path: Path) -> AbstractAsyncContextManager[Store]:
        return open_postgres(self.url, maintenance=False)


@pytest.mark.slow
class TestPostgresNodes(NodeStoreContract):
    """The contract of nodes that share a store."""

    @pytest.fixture(autouse=True)
    def _database(self, postgres_url: str) -> None:
        self.url = postgres_url

    @asynccontextmanager
    async def open_nodes(self, path: Path) -> AsyncIterator[tuple[Store, Store]]:
        async with (
            open_postgres(self.url, maintenance=False, node_name="a", lease_seconds=60) as one,
            open_postgres(self.url, maintenance=False, node_name="b", lease_seconds=60) as two,
        ):
            yield one, two


@pytest.mark.slow
def test_both_backends_have_the_same_tables_and_columns(postgres: PostgresServer) -> None:
    """A column that is added to one is added to the other: the verbs are the same code, and a store can be moved."""
    file = connect(":memory:")
    migrate(file, ":memory:")
    names = [
        name
        for (name,) in file.execute(
            "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite%' AND name NOT LIKE 'message\\_%' ESCAPE '\\'"
        ).fetchall()
    ]
    here = {name: {row[1] for row in file.execute(f"PRAGMA table_info({name})").fetchall()} for name in names}
    file.close()
    own = {"units": {"incarnation", "slot", "number"}, "schema_version": {"version", "made_at"}}
    there: dict[str, set[str]] = {}
    with connect_blocking(postgres.url("prepared")) as db:
        sql = "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'hermes_trio'"
        for table, column in db.execute(sql).fetchall():
            there.setdefault(table, set()).add(column)
    assert set(there) - set(here) == set(own)
    for name, columns in here.items():
        assert there[name] - columns <= {"rowid", "words"}, name
        assert columns <= there[name], name
    assert set(TABLES) == set(here) - {"nodes", "leases", "node_requests"}


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """A PostgreSQL that this test alone may kill."""
    with postgres_server() as server:
        yield server


async def _make(url: str) -> None:
    from hermes_trio.store.postgres.link import open_link
    from hermes_trio.store.postgres.schema import migrate_schema

    async with open_link(url, "it") as link:
        await migrate_schema(link, "it")


@pytest.mark.slow
async def test_a_database_that_is_killed_ten_times_loses_nothing(own_server: PostgresServer) -> None:
    """Under load, killed and started again, with backends ended at random between: what was acknowledged is there once, what was refused at most once."""
    url = own_server.url(own_server.new_database())
    await _make(url)
    acknowledged: list[str] = []
    uncertain: list[str] = []
    refused = 0
    over = trio.Event()
    async with open_postgres(url, maintenance=False) as store:
        for worker in range(6):
            await store.create_session(NewSession(id=f"s{worker}", source="api"))

        async def write(worker: int) -> None:
            nonlocal refused
            number = 0
            while not over.is_set():
                number += 1
                text = f"{worker}-{number}"
                try:
                    await store.append_messages(f"s{worker}", [Message(role="user", content=text)])
                    acknowledged.append(text)
                except StoreUnavailable:
                    refused += 1
                except StoreError:
                    uncertain.append(text)
                await trio.sleep(0.002)

        async def disturb() -> None:
            for _ in range(10):
                await trio.sleep(0.3)
                sql = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = 'keeper' AND random() < 0.5"
                await trio.to_thread.run_sync(own_server.execute, sql)
                await trio.sleep(0.3)
                await trio.to_thread.run_sync(own_server.stop, signal.SIGKILL)
                await trio.sleep(random.uniform(0.0, 0.3))
                await trio.to_thread.run_sync(own_server.start)
            await trio.sleep(2)
            over.set()

        async with trio.open_nursery() as nursery:
            for worker in range(6):
                nursery.start_soon(write, worker)
            nursery.start_soon(disturb)
        found = Counter[str]()
        for worker in range(6):
            found.update(entry.text for entry in await store.load_history(f"s{worker}"))
    assert len(acknowledged) > 100
    assert [text for text in acknowledged if found[text] != 1] == []
    assert [text for text, count in found.items() if count > 1] == []
    assert set(found) <= {*acknowledged, *uncertain}


@pytest.mark.slow
async def test_what_was_not_notified_is_found_by_looking(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other nodes poll the rows, so a node that dies before it sends its signals delays no task for ever. Without the poll they wait."""
    monkeypatch.setattr(SignalListener, "publish", lambda self, signals: None)
    for poll, found in ((0.2, True), (3600.0, False)):
        async with (
            open_postgres(postgres_url, maintenance=False) as one,
            open_postgres(postgres_url, maintenance=False, poll_seconds=poll) as two,
        ):
            await trio.sleep(0.5)
            woken = trio.Event()
            with two.subscribe(inbox_topic("telegram"), lambda key, woken=woken: woken.set(), KEY):
                number = await one.accept_message(message())
                with trio.move_on_after(3):
                    await woken.wait()
            assert woken.is_set() is found
            assert number is not None
            await two.take_inbox("telegram", KEY)
            await two.acknowledge([number])


@pytest.mark.slow
async def test_a_revoked_key_is_announced_by_the_first_look_that_finds_it(postgres_url: str) -> None:
    """Other rows may be announced by the second. A look is at most `POLL_SECONDS`, and what it takes, after the last one."""
    assert POLL_SECONDS + GRACE_SECONDS < 0.95
    async with (
        open_postgres(postgres_url, maintenance=False) as one,
        open_postgres(postgres_url, maintenance=False, poll_seconds=3600) as two,
    ):
        link = two.listener._line.up
        assert link is not None
        link.on_notification = lambda _: None  # lost
        told: list[str] = []
        with two.subscribe(KEY_TOPIC, told.append):
            await two.listener.look(link)
            row, _ = await one.create_api_key("guest")
            assert await one.revoke_api_key(row.id)
            assert told == []
            await two.listener.look(link)
            assert told == [row.id]


async def test_a_turn_that_has_begun_waits_for_a_database_that_is_away(
    postgres: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other reads give up, so that their requests are refused in time; the history of a turn is read when the database is back."""
    async with database_proxy(postgres.port) as proxy:
        through = postgres_url.replace(f":{postgres.port}/", f":{proxy.port}/")
        async with open_postgres(through, maintenance=False) as store:
            await store.create_session(NewSession(id="s", source="api"))
            await store.append_messages("s", [Message(role="user", content="hello")])
            monkeypatch.setattr(reads, "WAIT_SECONDS", 0.05)
            proxy.hold("up")
            found: list[Message] = []
            name = postgres_url.rpartition("/")[2]
            await trio.to_thread.run_sync(
                postgres.execute, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
            )

            async def load() -> None:
                found.extend(await store.load_history("s"))

            with trio.fail_after(20):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(load)
                    for _ in range(2):
                        with pytest.raises(StoreUnavailable):
                            await store.get_session("s")
                    assert not found
                    proxy.heal()
            assert [message.text for message in found] == ["hello"]


@pytest.mark.slow
async def test_the_release_of_a_session_is_sent_to_nodes_that_wait_for_it(postgres_url: str) -> None:
    """The end of a turn sends a notification only if a node waits, also one that begins to wait a moment after it. No poll helps here."""
    async with (
        open_postgres(postgres_url, maintenance=False, poll_seconds=3600) as one,
        open_postgres(postgres_url, maintenance=False, poll_seconds=3600) as two,
    ):
        with trio.fail_after(20):
            for number in range(10):
                await one.begin_turn(begun := start(f"t{number}", hold=True))
                await one.finish_turn(finish(begun, "a", "b"))
            marked = trio.Event()
            with two.subscribe(RUN_TOPIC, lambda _: marked.set(), "mark"):
                one.listener.publish([(RUN_TOPIC, "mark")])
                await marked.wait()
            assert two.listener.received == 1
            await one.begin_turn(begun := start("early", "s2", hold=True))
            free = trio.Event()
            with two.subscribe(SESSION_TOPIC, lambda _: free.set(), "s2"):
                while not one.listener.received:  # noqa: ASYNC110
                    await trio.sleep(0.01)
                assert not free.is_set()
                await one.finish_turn(finish(begun, "a", "b"))
                await free.wait()
            await one.begin_turn(begun := start("late", "s3", hold=True))
            await one.finish_turn(finish(begun, "a", "b"))
            late = trio.Event()
            with two.subscribe(SESSION_TOPIC, lambda _: late.set(), "s3"):
                await late.wait()
            # A session that was released and taken again is not free: a waiting node is notified of the next release.
            await one.begin_turn(begun := start("again", "s3", hold=True))
            again = trio.Event()
            before = one.listener.received
            with two.subscribe(SESSION_TOPIC, lambda _: again.set(), "s3"):
                while one.listener.received == before:  # noqa: ASYNC110
                    await trio.sleep(0.01)
                await one.finish_turn(finish(start("other", "s4"), "a", "b"))
                assert not again.is_set()
                await one.finish_turn(finish(begun, "a", "b"))
                await again.wait()


@pytest.mark.slow
async def test_the_verbs_of_turns_read_no_table_whole(postgres_url: str) -> None:
    """The plans that a node keeps for the statements of its turns find sessions by their key, also if the tables are small."""
    async with open_postgres(postgres_url, maintenance=False) as store:
        for number in range(12):
            async with trio.open_nursery() as nursery:
                for place in range(4):
                    nursery.start_soon(store.session_host, f"s{place}")
            await store.begin_turn(begun := start(f"t{number}", hold=True))
            await store.finish_turn(finish(begun, "a", "b"))
        plans: list[str] = []
        for name in ("units", "reads"):
            link = await store._lines[name].link(1)
            for statement, sql in await link.run("SELECT name, statement FROM pg_prepared_statements"):
                if "json_to_recordset" in sql:
                    given = ", ".join(["'[]'"] * (2 if "$2" in sql else 1))
                    rows = await link.run(f"EXPLAIN EXECUTE {statement}({given})")
                    plans.append("\n".join(row[0] for row in rows))
        assert len(plans) == 3
        for plan in plans:
            assert "Seq Scan" not in plan
            for table in ("sessions", "leases"):
                found = re.findall(rf"Index (?:Only )?Scan using \w+ on {table}\b.*\n\s+(.*)", plan)
                assert all(line.startswith("Index Cond") for line in found), plan


@pytest.mark.slow
async def test_a_run_that_is_followed_elsewhere_is_looked_at(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event whose notification was lost wakes the followers of the run once; a run without new events wakes none."""
    monkeypatch.setattr(SignalListener, "publish", lambda self, signals: None)
    async with (
        open_postgres(postgres_url, maintenance=False) as one,
        open_postgres(postgres_url, maintenance=False, poll_seconds=0.1) as two,
    ):
        await one.begin_turn(start(run=run()))
        woken: list[str] = []
        with two.subscribe(RUN_TOPIC, woken.append, "run_1"):
            await trio.sleep(1)
            before = len(woken)
            assert before <= 1
            await one.append_events([EventRow(run_id="run_1", epoch="e", number=1, event={"event": "tool.started"})])
            with trio.move_on_after(10):
                while len(woken) == before:  # noqa: ASYNC110
                    await trio.sleep(0.01)
            await trio.sleep(0.5)
            assert len(woken) == before + 1


@pytest.mark.slow
async def test_a_look_does_not_announce_what_was_signalled_and_read(postgres_url: str) -> None:
    """One event wakes a follower once, in whichever order it is notified, read and looked at; lost notifications are made up for by a look.

    A word behind a plus happens while the look waits for notifications that are under way.
    """
    orders = (
        "signal read look",
        "read signal look",
        "signal look+read",
        "look+signal read",
        "look+signal+read",
        "read look+signal",
        "look+read+signal",
        "look read",  # lost
        "look look read",
        "read look",  # lost, and read by another follower
        "look+read",
    )
    async with (
        open_postgres(postgres_url, maintenance=False) as one,
        open_postgres(postgres_url, maintenance=False, poll_seconds=3600) as two,
    ):
        woken: list[str] = []
        held: list[str] = []
        number = 0
        meanwhile: list[str] = []
        listener = two.listener
        link = listener._line.up
        assert link is not None

        async def do(words: str) -> None:
            nonlocal meanwhile
            word, *later = words.split("+")
            if word == "signal":
                listener._receive(held.pop())
            elif word == "read":
                assert [row.number for row in await two.events_after("run_1", number - 1)] == [number]
            else:
                meanwhile = later
                await listener.look(link)

        async def grace(seconds: float) -> None:
            for word in meanwhile:
                await do(word)

        async def arrived() -> None:
            with trio.fail_after(20):
                while not held:  # noqa: ASYNC110
                    await trio.sleep(0.01)

        listener._sleep = grace
        link.on_notification = held.append
        await one.begin_turn(begun := start(run=run()))
        await arrived()
        with two.subscribe(RUN_TOPIC, woken.append, "run_1"):
            assert await two.events_after("run_1") == []
            await do("look")
            assert woken == []
            for number, order in enumerate(orders, 1):
                held.clear()
                await one.append_events(
                    [EventRow(run_id="run_1", epoch="e", number=number, event={"event": "tool.started"})]
                )
                await arrived()
                for words in order.split():
                    await do(words)
                assert (order, len(woken)) == (order, number)
                await do("look")
                assert (f"{order}, another look", len(woken)) == (f"{order}, another look", number)
            await one.finish_turn(finish(begun, "a", "b"))
            await do("look")
            await do("look")
            assert len(woken) == number + 1


@pytest.mark.slow
async def test_a_hundred_callers_that_leave_do_not_disturb_the_others(postgres_url: str) -> None:
    """A caller that is cancelled abandons its wait, never the write; the answers to other callers stay in order."""
    async with open_postgres(postgres_url, maintenance=False) as store:
        await store.create_session(NewSession(id="s", source="api"))

        async def write(number: int) -> None:
            with trio.move_on_after(random.uniform(0, 0.02)):
                await store.append_messages("s", [Message(role="user", content=f"{number}")])
                await store.load_history("s")

        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(write, number)
        await store.set_meta("after", "all")
        texts = [entry.text for entry in await store.load_history("s")]
        assert len(set(texts)) == len(texts)
        for number in range(50):
            await store.set_meta(f"key {number}", f"{number}")
            assert await store.get_meta(f"key {number}") == f"{number}"


@pytest.mark.slow
async def test_one_verb_that_fails_takes_no_other_with_it(postgres_url: str) -> None:
    """Verbs that share a unit fail alone: the others of it are written."""
    async with open_postgres(postgres_url, maintenance=False) as store:
        await store.create_session(NewSession(id="taken", source="api"))
        failed: list[int] = []

        async def make(number: int) -> None:
            name = "taken" if number % 3 == 0 else f"s{number}"
            try:
                await store.create_session(NewSession(id=name, source="api"))
            except StoreError:
                failed.append(number)

        async with trio.open_nursery() as nursery:
            for number in range(60):
                nursery.start_soon(make, number)
        assert sorted(failed) == list(range(0, 60, 3))
        assert store.statistics().largest_batch > 1
        for number in range(60):
            assert (await store.get_session(f"s{number}") is None) is (number % 3 == 0)


PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")


@pytest.fixture(params=["transaction", "statement", "session"])
def pooled(request: pytest.FixtureRequest, postgres: PostgresServer, postgres_url: str) -> Iterator[tuple[str, str]]:
    """PgBouncer before a store: its mode, and the address behind it."""
    port = free_port()
    folder = Path(tempfile.mkdtemp(prefix="hermes-trio-pooler-"))
    folder.chmod(0o755)
    (folder / "users").write_text(f'"keeper" "{PASSWORD}"\n')
    (folder / "settings").write_text(
        f"[databases]\n* = host=127.0.0.1 port={postgres.port}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n"
        f"unix_socket_dir =\nauth_type = plain\nauth_file = {folder}/users\npool_mode = {request.param}\ndefault_pool_size = 10\n"
    )
    user: dict[str, Any] = {"user": "nobody"} if os.geteuid() == 0 else {}
    pooler = subprocess.Popen([PGBOUNCER or "", "-q", str(folder / "settings")], stderr=subprocess.DEVNULL, **user)
    try:
        yield request.param, postgres_url.replace(f":{postgres.port}/", f":{port}/")
    finally:
        pooler.kill()
        pooler.wait()
        shutil.rmtree(folder)


async def _open_in_time(url: str) -> None:
    """Open a store and write; waits for a pooler that is just starting."""
    for _ in range(100):
        try:
            async with open_postgres(url, maintenance=False) as store:
                await store.set_meta("a", "b")
            return
        except StoreUnavailable:
            await trio.sleep(0.05)
    raise AssertionError("the pooler did not start in time")


@pytest.mark.slow
@pytest.mark.skipif(PGBOUNCER is None, reason="pgbouncer is not installed (apt-get install pgbouncer)")
async def test_a_pooler_that_shares_backends_is_named(pooled: tuple[str, str]) -> None:
    """PgBouncer in transaction or statement mode is recognised at each start, also by what an earlier one has left in its backends; in session mode it is no
    hindrance.
    """
    mode, address = pooled
    for _ in range(3):
        if mode == "session":
            await _open_in_time(address)
        else:
            with pytest.raises(StoreError, match="pooler in transaction mode"):
                await _open_in_time(address)


def test_parameters_and_text_are_what_postgres_takes() -> None:
    """Placeholders are numbered outside of strings; NUL and half surrogates are replaced."""
    assert (
        translated("SELECT '?', ? WHERE a = ?2 AND b = ?2 LIMIT -1")
        == "SELECT '?', $1 WHERE a = $2 AND b = $2 LIMIT ALL"
    )
    assert (encode("a\0b"), encode("\ud800"), encode(True), encode(0.1), encode(None)) == (
        "a\ufffdb".encode(),
        b"?",
        b"1",
        b"0.1",
        None,
    )


def test_an_address_is_named_without_its_password(caplog: pytest.LogCaptureFixture) -> None:
    """Errors and logs name host and database; a password is replaced wherever it may stand."""
    caplog.set_level(logging.DEBUG)
    _, where = parse_address(f"postgresql://keeper:{PASSWORD.replace(' ', '%20')}@db.example:5433/store")
    assert where == "store at db.example:5433"
    for text in ("password='it is secret' host=x", "password=secret host=x", "postgresql://a:secret@h/d"):
        assert "secret" not in without_secrets(text)
    for address in (
        "postgresql://a:se%zzcret@h/d",
        "postgresql://a:cret/se@h:1/d",
        "postgresql://a:1/cret@h/d",
        "postgresql://a:se@cret@h/d",
    ):
        with pytest.raises(StoreError) as caught:
            parse_address(address)
        assert "cret" not in str(caught.value)
    assert parse_address("postgresql:///d?host=/run/a@b&user=c@d")[1] == "d at /run/a@b:5432"
    assert sorted(passwords_of("postgresql://a:b[c%2F@h/d")) == ["b[c%2F", "b[c/"]
    assert passwords_of("postgresql://h/d?password=x%20y") == ["x y"]


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("postgresql://a:secret@h/d?colour=hidden", "colour"),
        ("postgresql://h/d?sslmode=require&ssl_mode=hidden", "ssl_mode (did you mean sslmode?)"),
        ("postgresql:///d?colour=hidden", "colour"),
        ("postgresql://a:x/secret?secret=1@h/d", None),
        ("postgresql://a:x/secret?secret=1@h/d?colour=1", None),
        ("postgresql://h/d?user=a&password=hidden&secret=1", None),
        ("postgresql://h/d?no%20option=1", None),
    ],
)
def test_an_unknown_option_of_an_address_is_named(address: str, name: str | None) -> None:
    """Its name is shown, but no value, and nothing that may be a part of a password."""
    with pytest.raises(StoreError) as caught:
        parse_address(address)
    told = str(caught.value)
    assert ("cannot be read" in told) if name is None else f"the unknown option {name};" in told
    assert "secret" not in told
    assert "hidden" not in told


async def test_a_database_that_is_away_is_named_once() -> None:
    """The error of a verb says once which database cannot be reached, and then why."""
    line = ReconnectingLink("units", "postgresql://a@127.0.0.1:1/d", "d at 127.0.0.1:1", {}, 60)
    async with trio.open_nursery() as nursery:
        with pytest.raises(StoreUnavailable):
            await nursery.start(line.keep)
    with pytest.raises(StoreUnavailable, match="cannot be reached: connection to server") as caught:
        await line.link(0)
    assert str(caught.value).count("cannot be reached") == 1


def test_the_files_and_sockets_that_log_in_are_those_of_libpq() -> None:
    """Every file with which libpq logs in to an address, and every socket on which it connects, is named, from the address, the environment or its defaults."""
    home = {"HOME": "/home/ada"}
    key = "/home/ada/.postgresql/postgresql.key"
    assert login_files_of("postgresql://a:b@h/d", home) == ([key], [])
    assert login_files_of("postgresql://a@h/d", home) == ([key, "/home/ada/.pgpass"], [])
    assert login_files_of("postgresql://a@h/d", {**home, "PGPASSWORD": "b"}) == ([key], [])
    told = {**home, "PGPASSFILE": "/p", "PGSSLKEY": "/k", "PGSERVICE": "s", "PGSERVICEFILE": "/s"}
    assert login_files_of("postgresql://a@h/d", told) == (["/k", "/p", "/s"], [])
    assert login_files_of("postgresql://a@h/d?passfile=/q&sslkey=/l", told)[0] == ["/l", "/q", "/s"]
    _, sockets = login_files_of("postgresql:///d?host=/nowhere/a,h,/nowhere/b&port=1,2,3", home)
    assert {"/nowhere/a/.s.PGSQL.1", "/nowhere/b/.s.PGSQL.3"} <= set(sockets)
    assert login_files_of("postgresql:///d", home)[1] == [os.path.realpath("/var/run/postgresql/.s.PGSQL.5432")]
    assert login_files_of("postgresql:///d", {**home, "PGHOST": "h"})[1] == []


def test_locks_come_in_one_order() -> None:
    """All verbs that lock two names take them in the same order; a verb without a name takes none."""
    one = lock_numbers([(sessions.end_session, (0.0, "a", "x")), (sessions.end_session, (0.0, "b", "x"))])
    two = lock_numbers([(sessions.end_session, (0.0, "b", "x")), (sessions.end_session, (0.0, "a", "x"))])
    assert one == two == sorted(one)
    assert len(one) == 2
    assert lock_numbers([(sessions.get_session, ("a",))]) == []


def test_words_and_queries_are_literals_for_any_text() -> None:
    """Whatever a text holds, its words and its query are well-formed: quotes and backslashes are escaped, what means nothing is empty."""
    assert text_words("It's a C:\\path, it's") == "'it':1,6 's':2,7 'a':3 'c':4 'path':5"
    assert text_query("Crème brûlée")[0] == "'creme' & 'brulee'"
    assert text_query('"new york" OR paris*')[0] == "(('new' <1> 'york') | 'paris':*)"
    assert text_query("東京") == ("'東京'", ("東京",))
    assert text_query(' " \0 \ud800 && || !! ')[0] == ""


@pytest.mark.slow
async def test_turns_of_one_unit_fail_alone_and_leave_what_they_would_leave_alone(postgres_url: str) -> None:
    """Turns are written many at a time: each has its own outcome, messages keep their order, logs have no gap, and odd text changes nothing."""
    odd = "a\0b \ud800 \\u0000 'quoted' \"twice\" \\ {}"
    parts = [{"type": "text", "text": "x\0y"}]
    async with (
        open_postgres(postgres_url, maintenance=False) as store,
        open_postgres(postgres_url, maintenance=False) as other,
    ):
        await store.create_session(NewSession(id="s1", source="api", tenant="somebody else"))
        await other.begin_turn(start(turn_id="theirs", session_id="s2", hold=True))
        await other.begin_turn(start(turn_id="their_run", session_id="there", run=run("run_3", "there")))
        await store.begin_turn(start(turn_id="before", session_id="s4", run=run("run_before", idempotency_key="k")))
        begun: dict[int, Exception | None] = {}
        ended: dict[int, Exception | bool] = {}
        told: list[str] = []

        async def one(number: int) -> None:
            of_run = run(f"run_{number}", f"s{number}", idempotency_key="k" if number == 4 else "")
            this = start(turn_id=f"t{number}", session_id=f"s{number}", run=of_run, hold=number != 3)
            try:
                await store.begin_turn(this)
                begun[number] = None
            except (StoreError, RuntimeProblem) as error:
                begun[number] = error
                if number != 3:
                    return
            said = [odd if number == 7 else f"{number} {count}" for count in range(6)]
            rows = [
                EventRow(run_id=of_run.run_id, epoch="e", number=count, event={"event": "x", "text": said[0]})
                for count in (1, 2, 3)
            ]
            await store.append_events(rows[:2])
            end = finish(this, *said, events=tuple(rows))
            if number == 8:
                end = msgspec.structs.replace(end, messages=(Message(role="user", content=parts),))
            try:
                ended[number] = await store.finish_turn(end)
            except (StoreError, RuntimeProblem) as error:
                ended[number] = error

        with store.subscribe(RUN_TOPIC, told.append):
            async with trio.open_nursery() as nursery:
                for number in range(1, 41):
                    nursery.start_soon(one, number)
        assert isinstance(begun.pop(1), ForeignSession)
        assert isinstance(begun.pop(2), SessionHeld)
        assert isinstance(begun.pop(4), AlreadyStarted)
        assert set(begun.values()) == {None}
        assert isinstance(ended.pop(3), Fenced)
        assert ended == dict.fromkeys(range(5, 41), False)
        assert set(told) == {f"run_{number}" for number in (3, *range(5, 41))}
        assert store.statistics().largest_batch > 30
        for number in range(5, 41):
            texts = [entry.text for entry in await other.load_history(f"s{number}")]
            clean = odd.replace("\0", "\ufffd").replace("\ud800", "?")
            assert texts == {7: [clean] * 6, 8: ["x\0y"]}.get(number, [f"{number} {count}" for count in range(6)])
            row = await other.get_run(f"run_{number}")
            assert row is not None
            assert row.status is RunStatus.COMPLETED
            rows = await other.events_after(f"run_{number}")
            assert [event.number for event in rows] == [1, 2, 3]
            assert rows[0].event["text"] == (odd.replace("\ud800", "?") if number == 7 else f"{number} 0")
        for missing in ("run_1", "run_2", "run_4"):
            assert await other.get_run(missing) is None
        assert await other.load_history("s3") == []
        (kept,) = await other.load_history("s8")
        assert kept.content == parts


@pytest.mark.slow
async def test_many_readers_on_another_node_miss_nothing(postgres_url: str) -> None:
    """Readers of the runs of another node are served together: few statements for many of them, each with its own events, in order, without a gap."""
    tails, events = 150, 12
    async with (
        open_postgres(postgres_url, maintenance=False) as one,
        open_postgres(postgres_url, maintenance=False) as two,
    ):
        async with trio.open_nursery() as nursery:
            for tail in range(tails):
                begun = start(turn_id=f"t{tail}", session_id=f"s{tail}", run=run(f"run_{tail}", f"s{tail}"))
                nursery.start_soon(one.begin_turn, begun)
        seen: dict[int, list[int]] = {tail: [] for tail in range(tails)}

        async def follow(tail: int) -> None:
            woken = trio.Event()
            with two.subscribe(RUN_TOPIC, lambda _: woken.set(), f"run_{tail}"):
                while len(seen[tail]) < events:
                    woken = trio.Event()
                    rows = await two.events_after(f"run_{tail}", len(seen[tail]), limit=3)
                    assert {row.event["of"] for row in rows} <= {tail}
                    seen[tail] += [row.number for row in rows]
                    if not rows:
                        await woken.wait()

        async with trio.open_nursery() as nursery:
            for tail in range(tails):
                nursery.start_soon(follow, tail)
            for number in range(1, events + 1):
                rows = [
                    EventRow(run_id=f"run_{tail}", epoch="e", number=number, event={"event": "x", "of": tail})
                    for tail in range(tails)
                ]
                await one.append_events(rows)
        assert all(numbers == list(range(1, events + 1)) for numbers in seen.values())
        assert two.gathered.statements < two.gathered.reads / 4


@pytest.mark.slow
async def test_a_look_announces_a_singleton_only_if_no_node_holds_it(postgres_url: str) -> None:
    """A node that stands by need not try to claim it while another one holds it; a lost notification of its release is made up for by two looks."""
    async with (
        open_postgres(postgres_url, maintenance=False) as one,
        open_postgres(postgres_url, maintenance=False, poll_seconds=3600) as two,
    ):
        await one.recover("e1")
        await two.recover("e2")
        woken: list[str] = []
        link = two.listener._line.up
        assert link is not None
        link.on_notification = lambda _: None  # lost
        assert await one.claim_lease("cron")
        assert not await two.claim_lease("cron")
        with two.subscribe(LEASE_TOPIC, woken.append, "cron"):
            for _ in range(3):
                await two.listener.look(link)
            assert woken == []
            await one.release_lease("cron")
            for _ in range(2):
                await two.listener.look(link)
            assert woken == ["cron"]
        assert await two.claim_lease("cron")
