"""The commands that look after the store, run as a person would type them."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cyclopts
import pytest
import trio

from hermes_trio.commands import doctor as doctor_command
from hermes_trio.commands.sessions import mount
from hermes_trio.runtime.ports import Message
from hermes_trio.store import NewSession, SearchQuery, SqliteStore, StoreError, UnknownSession, open_store

from .turns import finish, run, start

Run = Callable[..., str]


async def fill(path: Path) -> None:
    """Three sessions: an open one, an ended one with a long time behind it, and a sub-agent's."""
    async with open_store(path, maintenance=False, clock=lambda: 1_000.0) as store:
        await store.finish_turn(
            finish(start(session_id="old"), "the zebra-crossing question", "ok", end_session="done")
        )
    async with open_store(path, maintenance=False) as store:
        await store.create_session(NewSession(id="new", source="cli", title="Plan"))
        await store.append_messages("new", [Message(role="user", content=[{"type": "text", "text": "日本語の話"}])])
        await store.finish_turn(finish(start("t2", "child", "", parent_session_id="new"), "q", "a"))
        await store.replace_history("new", [Message(role="assistant", content="summary [bold]x[/bold]")])


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home directory with a store in it."""
    trio.run(fill, tmp_path / "state.db")
    return tmp_path


@pytest.fixture
def command(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command line on that home; return what it printed."""
    monkeypatch.setenv("COLUMNS", "200")
    app = cyclopts.App(backend="trio")
    mount(app)
    doctor_command.mount(app)

    def run_it(*words: str) -> str:
        app([*words, "--home", str(home)], exit_on_error=False, result_action="return_value")
        return capsys.readouterr().out

    return run_it


def test_list_shows_sessions_and_selects(command: Run) -> None:
    """Newest activity first, as a table or as JSON; sub-agents and ended ones on request or not."""
    table = command("sessions", "list")
    found: list[dict[str, Any]] = json.loads(command("sessions", "list", "--json"))

    assert "Plan" in table
    assert "zebra-crossing" in table
    assert [session["id"] for session in found] == ["new", "old"]
    assert (found[1]["end_reason"], found[0]["lineage"]) == ("done", "")
    assert len(json.loads(command("sessions", "list", "--children", "--json"))) == 3
    assert [s["id"] for s in json.loads(command("sessions", "list", "--open", "--json"))] == ["new"]
    assert [s["id"] for s in json.loads(command("sessions", "list", "--source", "telegram", "--json"))] == ["old"]


HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\u202ewalrus\r\x08"
"""Sets the title of a terminal, clears its screen, colours it and turns the line around."""


def test_no_text_of_a_conversation_controls_the_terminal(home: Path, command: Run) -> None:
    """Control and bidirectional characters of messages are shown as spaces; JSON for programs has them."""

    async def fill_hostile() -> None:
        async with open_store(home / "state.db", maintenance=False) as store:
            await store.create_session(NewSession(id="hostile", source="api_server"))
            await store.append_messages("hostile", [Message(role="user", content=f"first line\n{HOSTILE} 👩\u200d💻")])

    trio.run(fill_hostile)
    for words in (("list",), ("search", "walrus"), ("show", "hostile")):
        shown = command("sessions", *words)
        assert "walrus" in shown
        assert not set("\x1b\x07\x9b\u202e\r\x08") & set(shown), words
    assert "first line\n" in command("sessions", "show", "hostile")
    assert "👩\u200d💻" in command("sessions", "show", "hostile")
    found = json.loads(command("sessions", "show", "hostile", "--json"))
    assert HOSTILE in found["messages"][0]["text"]


RUN = "run_0123456789abcdef0123456789abcdef"
CHAT = "agent:main:" + "x" * 100


async def fill_with_long_ids(path: Path) -> None:
    """A session with an id of the usual length, one with a longer id than any terminal is wide; their texts look like markup."""
    async with open_store(path, maintenance=False) as store:
        for session_id in (RUN, CHAT):
            await store.create_session(
                NewSession(id=session_id, source="api_server", title=f"[/title] {session_id[:60]}")
            )
            await store.append_messages(session_id, [Message(role="user", content="walrus [/x] " + "word " * 40)])


@pytest.mark.parametrize("columns", [10, 40, 80, 120, 300])
@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_ids_stay_whole(
    home: Path, command: Run, monkeypatch: pytest.MonkeyPatch, columns: int, terminal: bool
) -> None:
    """An id can be copied from one line in any width; other columns are folded or left out. In a pipe a row is a line."""
    trio.run(fill_with_long_ids, home / "state.db")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    if terminal:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    listed = command("sessions", "list").splitlines()
    found = command("sessions", "search", "walrus").splitlines()
    shown = command("sessions", "show", CHAT, "--messages", "0").splitlines()

    for session_id in (RUN, CHAT):
        for lines in (listed, found):
            assert [line.split()[0] for line in lines if line.startswith(f" {session_id} ")] == [session_id]
    assert any(line.split()[1:] == [CHAT] for line in shown)
    if not terminal:
        assert (len(listed), len(found)) == (1 + 4, 1 + 2)


@pytest.mark.parametrize("words", [("list",), ("search", "walrus")])
def test_a_table_fits_an_ordinary_terminal(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
) -> None:
    """With ids of the usual length no line is longer than 80 columns."""

    async def fill_with_a_run() -> None:
        async with open_store(tmp_path / "state.db", maintenance=False) as store:
            await store.create_session(NewSession(id=RUN, source="api_server", title="A title that is rather long"))
            await store.append_messages(RUN, [Message(role="user", content="walrus " + "word " * 40)])

    trio.run(fill_with_a_run)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    app = cyclopts.App(backend="trio")
    mount(app)
    doctor_command.mount(app)
    app(["sessions", *words, "--home", str(tmp_path)], exit_on_error=False, result_action="return_value")
    printed = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)

    assert RUN in printed
    assert max(len(line) for line in printed.splitlines()) <= 80


def test_show_prints_the_last_messages_literally(command: Run) -> None:
    """Text that looks like markup is printed as it is; archived messages on request."""
    assert "summary [bold]x[/bold]" in command("sessions", "show", "new")
    shown = json.loads(command("sessions", "show", "new", "--archived", "--json"))

    assert shown["session"]["title"] == "Plan"
    assert [message["text"] for message in shown["messages"]] == ["日本語の話", "summary [bold]x[/bold]"]
    assert [message.get("archived", False) for message in shown["messages"]] == [True, False]
    with pytest.raises(UnknownSession, match="sessions list"):
        command("sessions", "show", "nothing")


def test_search_finds_what_no_server_has_indexed(command: Run) -> None:
    """Without a server, the command brings the index up to date itself."""
    assert ">>>zebra-crossing<<<" in command("sessions", "search", "zebra-crossing")
    hits = json.loads(command("sessions", "search", "日本語", "--json"))

    assert [hit["session_id"] for hit in hits] == ["new"]


def test_end_ends_once_and_says_so(command: Run) -> None:
    """The first reason wins here, too."""
    assert json.loads(command("sessions", "end", "new", "--json")) == {
        "id": "new",
        "ended": True,
        "end_reason": "cli_close",
    }
    assert "had ended already: cli_close" in command("sessions", "end", "new", "--reason", "other")


async def test_end_is_refused_beside_a_server(home: Path, command: Run) -> None:
    """A live session has tasks that only its server can stop; the error says how; reading and pruning work meanwhile."""
    async with open_store(home / "state.db", maintenance=False) as store:
        with pytest.raises(StoreError, match=rf"pid {os.getpid()}.*PATCH /api/sessions/new"):
            await trio.to_thread.run_sync(command, "sessions", "end", "new")
        pruned = json.loads(await trio.to_thread.run_sync(command, "sessions", "prune", "--json"))
        assert pruned["removed"] == 1
        assert len(json.loads(await trio.to_thread.run_sync(command, "sessions", "list", "--json"))) == 1
        assert await store.get_session("old") is None


async def test_search_indexes_beside_a_server(home: Path, command: Run) -> None:
    """What a running server has committed is found at once, and the server finds it, too."""
    async with open_store(home / "state.db", maintenance=False) as store:
        await store.finish_turn(finish(start("t9", "live"), "the okapi question", "yes"))
        assert ">>>okapi<<<" in await trio.to_thread.run_sync(command, "sessions", "search", "okapi")
        assert [hit.session_id for hit in await store.search_messages(SearchQuery(text="okapi"))] == ["live"]


def test_prune_removes_only_what_has_ended_long_ago(command: Run) -> None:
    """A dry run says how many; the real one removes them."""
    assert json.loads(command("sessions", "prune", "--dry-run", "--json")) == {
        "removed": 0,
        "matching": 1,
        "dry_run": True,
    }
    assert "1 sessions removed" in command("sessions", "prune")
    assert [s["id"] for s in json.loads(command("sessions", "list", "--json"))] == ["new"]


def test_export_writes_sessions_with_their_messages(home: Path, command: Run) -> None:
    """One object a line, or one array; to a file that only its owner can read."""
    lines = [json.loads(line) for line in command("sessions", "export").splitlines()]
    target = home / "out.json"
    command("sessions", "export", "old", "--json", "--output", str(target))

    assert {line["session"]["id"] for line in lines} == {"new", "old", "child"}
    (exported,) = json.loads(target.read_text())
    assert [message["text"] for message in exported["messages"]] == ["the zebra-crossing question", "ok"]
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


async def test_a_backup_is_taken_beside_a_writing_server(home: Path, command: Run) -> None:
    """The copy shows one moment, is a single sound file, and can be opened as a store."""
    target = home / "copy.db"
    async with open_store(home / "state.db", maintenance=False) as store:
        await store.finish_turn(finish(start("t9", "live"), "before the backup", "yes"))
        said = json.loads(command("backup", str(target), "--json"))
        await store.finish_turn(finish(start("t10", "late"), "after the backup", "no"))

    copy = sqlite3.connect(target)
    assert copy.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert {row[0] for row in copy.execute("SELECT id FROM sessions")} == {"old", "new", "child", "live"}
    copy.close()
    assert said["bytes"] == os.stat(target).st_size
    assert sorted(name for name in os.listdir(home) if name.startswith("copy")) == ["copy.db"]
    with pytest.raises(StoreError, match="exists already"):
        command("backup", str(target))
    async with open_store(target, maintenance=False) as store:
        assert await store.get_session("live") is not None


def test_a_backup_without_a_file(command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file needs a name. For a database, the command that copies it is printed, without the password, and can be run as it is."""
    with pytest.raises(StoreError, match="hermes-trio backup FILE"):
        command("backup")
    monkeypatch.setenv("HERMES_STORE_URL", "postgresql://keeper:secret-word@db.example:5433/store")
    printed = command("backup")
    assert printed.startswith("pg_dump --format=custom --schema=hermes_trio ")
    assert "--host=db.example --port=5433 --username=keeper --dbname=store\n" in printed
    assert "secret-word" not in printed


def test_doctor_finds_a_sound_store(command: Run) -> None:
    """Integrity, sizes, what is stuck and what retention will remove."""
    found = json.loads(command("doctor", "--json"))

    assert (found["sound"], found["healthy"], found["server_pid"]) == (True, True, None)
    assert (found["rows"]["sessions"], found["open_sessions"], found["expired"]["sessions"]) == (3, 2, 1)
    assert "nothing is stuck" in command("doctor")
    group = found["confinement"]["cgroup"]
    said = " ".join(command("doctor").split())
    assert ("a control group of their own below" if group else "no control group of their own:") in said


def test_doctor_names_what_a_dead_server_left(home: Path, command: Run) -> None:
    """Work without an end and without a server is named; it is not unsound, the next boot puts it right."""

    async def leave_a_run() -> None:
        async with open_store(home / "state.db", maintenance=False) as store:
            await store.begin_turn(start("t9", "s9", run=run("run_9", "s9")))

    trio.run(leave_a_run)
    found = json.loads(command("doctor", "--json"))

    assert (found["sound"], found["healthy"]) == (True, False)
    assert found["stuck"]["runs without an end"] == 1
    assert "left by a server that died" in command("doctor")


def test_a_missing_store_is_named(tmp_path: Path) -> None:
    """The error says where it looked."""
    app = cyclopts.App(backend="trio")
    mount(app)
    doctor_command.mount(app)
    with pytest.raises(StoreError, match=r"there is no store at .*state\.db"):
        app(["doctor", "--home", str(tmp_path)], exit_on_error=False, result_action="return_value")


def test_the_port_is_what_the_backend_offers() -> None:
    """Every public verb of the SQLite store is part of the port, and has the signature that the port promises. Its upkeep is its own."""
    import inspect

    from hermes_trio.store import Store

    own = {"observe_writes", "path", "retention", "shared", "statistics"}
    own |= {"give_space_back", "index_messages", "index_some", "maintain", "optimize_search"}
    offered = {name for name in dir(SqliteStore) if not name.startswith("_")} - own
    promised = {name for name in dir(Store) if not name.startswith("_")} - {
        "secret",
        "owner",
        "lease_seconds",
        "node_name",
    }  # attributes of the open store
    assert offered == promised
    for name in sorted(promised):
        port = inspect.signature(getattr(Store, name))
        backend = inspect.signature(getattr(SqliteStore, name))
        assert port.parameters == backend.parameters, name
