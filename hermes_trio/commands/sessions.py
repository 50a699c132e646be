"""The commands that look after the store: `sessions …` and `backup`.

They work on the database itself, beside a running server or without one. Reading never disturbs a server. `prune` may run beside one, because
it touches only ended rows, in small transactions; `end` may not, because a live session also has tasks, which only its server can stop.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import cyclopts
import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hermes_trio.base.retention import DAY
from hermes_trio.commands.options import ConfigOption, HomeOption
from hermes_trio.config import Config, load_config
from hermes_trio.store import (
    Page,
    SearchOrder,
    SearchQuery,
    SessionFilter,
    StoreError,
    StoreInUse,
    UnknownSession,
)
from hermes_trio.store.backend import is_address, require_postgres
from hermes_trio.store.ownership import owned
from hermes_trio.store.records import SessionRow
from hermes_trio.store.sqlite.backup import back_up
from hermes_trio.store.sqlite.files import connect, connect_reader
from hermes_trio.store.sqlite.maintenance import Prune, prune_some
from hermes_trio.store.sqlite.rows import Database, one
from hermes_trio.store.sqlite.schema import VERSION, version_of
from hermes_trio.store.sqlite.search import index_backlog, index_next, search
from hermes_trio.store.sqlite.sessions import end_session, get_session, list_sessions, stored_messages
from hermes_trio.store.sqlite.writer import run_now

__all__ = ["backup", "mount", "sessions"]

sessions: Final = cyclopts.App(name="sessions", help="The conversations in the store.")

JsonOption = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON instead of a table.")]

PAGE: Final = 1_000
PRUNE_BATCH: Final = 200
GAP: Final = 2
"""Blanks of a table for each of its columns."""


def mount(app: cyclopts.App) -> None:
    """Put the commands of this module under `app`."""
    app.command(sessions)
    app.command(backup)


def read_config(home: Path | None, config: Path | None) -> Config:
    return load_config(os.environ, home=home, path=config)


def store_path(home: Path | None, config: Path | None, *, file_for: str = "") -> str:
    """The store's file, or the address of its database; `file_for` names a command that knows only files, and what does its work for a database."""
    place = read_config(home, config).place
    if isinstance(place, str):
        if file_for:
            raise StoreError(f"the store is a PostgreSQL database: {file_for}")
        return place
    path = place
    if not path.exists():
        raise StoreError(f"there is no store at {path}; name its directory with --home, or start the server once")
    return str(path)


def _blocking(url: str) -> AbstractContextManager[Database]:
    require_postgres()
    from hermes_trio.store.postgres.blocking import connect_blocking

    return connect_blocking(url)


@contextmanager
def _alone(path: str) -> Iterator[None]:
    """Nobody else works on the store for the body of the `with`; `StoreInUse` if somebody does."""
    if not is_address(path):
        with owned(Path(path)):
            yield
        return
    with _reading(path) as db:
        live = one(db, "SELECT count(*) FROM nodes WHERE expires_at > extract(epoch FROM clock_timestamp())")
    if live is not None and live[0]:
        raise StoreInUse(f"{live[0]} nodes work on the database; stop them first", 0)
    yield


@contextmanager
def _reading(path: str) -> Iterator[Database]:
    if is_address(path):
        with _blocking(path) as database:
            yield database
        return
    db = connect_reader(path)
    try:
        check_version(db, path)
        yield db
    finally:
        db.close()


@contextmanager
def _writing(path: str) -> Iterator[Database]:
    if is_address(path):
        with _blocking(path) as database:
            yield database
        return
    db = connect(path)
    try:
        check_version(db, path)
        yield db
    finally:
        db.close()


def check_version(db: Database, path: str) -> None:
    found = version_of(db)
    if found != VERSION:
        what = (
            "a newer hermes-trio wrote it; upgrade"
            if found > VERSION
            else "start the server once to bring it up to date"
        )
        raise StoreError(f"{path} has schema version {found}, this program works with {VERSION}: {what}")


def print_json(value: object) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def _when(moment: float | None) -> str:
    return "" if moment is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))


def shown_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _print_table(columns: Mapping[str, int | None], rows: Sequence[Sequence[str]], *, header: bool = True) -> None:
    """Each column with the width down to which it may be folded; None for one that stays whole, because people copy from it.

    On a terminal that is too narrow for that, columns are left out from the end; if two are still too many, the terminal wraps the lines. A pipe has
    no width: there, a row is a line.
    """
    cells = [[Text(" ".join(value.split())) for value in row] for row in rows]
    full = [max([len(name), *(row[place].cell_len for row in cells)]) for place, name in enumerate(columns)]
    widths = [most if least is None else min(least, most) for least, most in zip(columns.values(), full, strict=True)]
    console = Console(width=None if sys.stdout.isatty() else sum(full) + GAP * len(full))
    while len(widths) > 2 and sum(widths) + GAP * len(widths) > console.width:
        widths.pop()
    spare = max(0, console.width - sum(widths) - GAP * len(widths))
    for place in sorted(range(len(widths)), key=lambda place: full[place] - widths[place]):
        more = min(spare, full[place] - widths[place])
        widths[place] += more
        spare -= more
    console.width = sum(widths) + GAP * len(widths)
    table = Table(box=None, show_header=header)
    for name, width in zip(columns, widths, strict=False):
        table.add_column(name, overflow="fold", width=width, justify="right" if name == "messages" else "left")
    for row in cells:
        table.add_row(*row[: len(widths)])
    console.print(table)


def _session(db: Database, session_id: str) -> SessionRow:
    found = get_session(db, session_id)
    if found is None:
        raise UnknownSession(
            f"there is no session {session_id!r}; `hermes-trio sessions list` shows those that there are"
        )
    return found


# -- sessions --------------------------------------------------------------------------------------------------------------------


@sessions.command(name="list")
def list_command(
    *,
    limit: Annotated[int, Parameter(help="How many at most.")] = 50,
    offset: Annotated[int, Parameter(help="How many to leave out first.")] = 0,
    source: Annotated[str | None, Parameter(help="Only of this source: telegram, api_server, cron, …")] = None,
    tenant: Annotated[str | None, Parameter(help="Only of this tenant.")] = None,
    children: Annotated[bool, Parameter(negative="", help="Sub-agents' sessions, too.")] = False,
    open_only: Annotated[bool, Parameter(name="--open", negative="", help="Only those that have not ended.")] = False,
    as_json: JsonOption = False,
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """List sessions, the newest activity first."""
    with _reading(store_path(home, config)) as db:
        found = list_sessions(
            db,
            SessionFilter(source=source, tenant=tenant, include_children=children, open_only=open_only),
            Page(limit, offset),
        )
    if as_json:
        print_json(found)
        return
    _print_table(
        {"id": None, "title": 10, "last active": 10, "messages": 8, "source": 6, "ended": 10, "reason": 6},
        [
            (
                session.id,
                session.label[:60],
                _when(session.last_active),
                str(session.message_count),
                session.source,
                _when(session.ended_at),
                session.end_reason or "",
            )
            for session in found
        ],
    )


@sessions.command(name="show")
def show_command(
    session_id: Annotated[str, Parameter(help="The id that `sessions list` shows.")],
    *,
    messages: Annotated[int, Parameter(help="How many of the last messages to show.")] = 20,
    archived: Annotated[bool, Parameter(negative="", help="Also what a compaction has set aside.")] = False,
    as_json: JsonOption = False,
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """Show a session and its last messages."""
    with _reading(store_path(home, config)) as db:
        session = _session(db, session_id)
        everything = list(_all_messages(db, session_id, archived))
    last = everything[-messages:] if messages > 0 else []
    if as_json:
        print_json({"session": session, "messages": last})
        return
    facts = [
        (field, _when(value) if field.endswith(("_at", "_active")) else str(getattr(value, "value", value)))
        for field, value in msgspec.structs.asdict(session).items()
        if value not in (None, "", 0, False)
    ]
    _print_table({"field": None, "value": None}, facts, header=False)
    console = Console()
    for message in last:
        console.rule(f"{message['role']} · {_when(message['timestamp'])}", align="left")
        console.print(message["text"] or str(message.get("tool_calls", "")), markup=False, highlight=False)


def _all_messages(db: Database, session_id: str, archived: bool) -> Iterator[dict[str, Any]]:
    offset = 0
    while page := stored_messages(db, session_id, Page(PAGE, offset), archived):
        offset += len(page)
        for stored in page:
            message = stored.message
            row: dict[str, Any] = {"id": stored.id, "role": message.role, "text": message.text}
            row.update(
                {
                    name: value
                    for name, value in msgspec.structs.asdict(message).items()
                    if value and name not in ("role", "content")
                }
            )
            if not isinstance(message.content, str):
                row["content"] = list(message.content)
            if not stored.active:
                row["archived"] = True
            yield row


@sessions.command(name="search")
def search_command(
    query: Annotated[str, Parameter(help='Words; "a phrase"; beginning*; either OR or.')],
    *,
    limit: Annotated[int, Parameter(help="How many at most.")] = 20,
    source: Annotated[str | None, Parameter(help="Only in sessions of this source.")] = None,
    role: Annotated[list[str] | None, Parameter(help="Only messages of this role; repeat for several.")] = None,
    order: Annotated[SearchOrder, Parameter(help="relevance, newest or oldest.")] = SearchOrder.RELEVANCE,
    as_json: JsonOption = False,
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """Search all messages."""
    path = store_path(home, config)
    wanted = SearchQuery(text=query, source=source, roles=tuple(role or ()), order=order)
    if is_address(path):
        from hermes_trio.store.postgres.search import index_next as index_rows
        from hermes_trio.store.postgres.search import search as search_rows

        with _writing(path) as db:
            while run_now(db, path, index_rows, PRUNE_BATCH):
                pass
            hits, behind = search_rows(db, wanted, Page(limit)), 0
    else:
        _index_if_nobody_else_does(path)
        with _reading(path) as db:
            hits = search(db, wanted, Page(limit))
            behind = index_backlog(db)
    if behind:
        sys.stderr.write(f"{behind} messages are not in the index yet; the running server adds them within seconds\n")
    if as_json:
        print_json(hits)
        return
    _print_table(
        {"session": None, "match": 16, "when": 10, "role": 9},
        [(hit.session_id, hit.snippet, _when(hit.timestamp), hit.role) for hit in hits],
    )


def _index_if_nobody_else_does(path: str) -> None:
    try:
        with owned(Path(path)), _writing(path) as db:
            while run_now(db, path, index_next):
                pass
    except StoreError:
        return


@sessions.command(name="end")
def end_command(
    session_id: Annotated[str, Parameter(help="The id that `sessions list` shows.")],
    *,
    reason: Annotated[str, Parameter(help="Why, in one word.")] = "cli_close",
    as_json: JsonOption = False,
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """End a session, without a running server. The first reason wins."""
    path = store_path(home, config)
    try:
        with _alone(path), _writing(path) as db:
            _session(db, session_id)
            ended = run_now(db, path, end_session, time.time(), session_id, reason)
            session = _session(db, session_id)
    except StoreInUse as error:
        raise StoreError(
            f"{error}; a server has the session's work with it, so end the session there:"
            f' PATCH /api/sessions/{session_id} with {{"end_reason": "{reason}"}}'
        ) from None
    if as_json:
        print_json({"id": session_id, "ended": ended, "end_reason": session.end_reason})
    elif ended:
        Console().print(f"{session_id} is ended: {reason}", markup=False, highlight=False)
    else:
        Console().print(f"{session_id} had ended already: {session.end_reason}", markup=False, highlight=False)


@sessions.command(name="prune")
def prune_command(
    *,
    older_than_days: Annotated[float, Parameter(help="Only sessions that ended more than so many days ago.")] = 90.0,
    source: Annotated[str | None, Parameter(help="Only of this source.")] = None,
    end_reason: Annotated[str | None, Parameter(help="Only with this end reason.")] = None,
    tenant: Annotated[str | None, Parameter(help="Only of this tenant.")] = None,
    dry_run: Annotated[bool, Parameter(negative="", help="Only say how many.")] = False,
    as_json: JsonOption = False,
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """Remove ended sessions for good. Open sessions are never touched."""
    path = store_path(home, config)
    prune = Prune(before=time.time() - older_than_days * DAY, source=source, end_reason=end_reason, tenant=tenant)
    count = 0
    if dry_run:
        with _reading(path) as db:
            where, bindings = prune.where()
            found = one(db, f"SELECT count(*) FROM sessions WHERE {where}", bindings)
            count = found[0] if found else 0
    else:
        with _writing(path) as db:
            more = True
            while more:
                removed, more = run_now(db, path, prune_some, prune, PRUNE_BATCH)
                count += removed
    if as_json:
        print_json({"removed": 0 if dry_run else count, "matching": count, "dry_run": dry_run})
    else:
        verb = "would be removed" if dry_run else "removed"
        Console().print(f"{count} sessions {verb}", highlight=False)


@sessions.command(name="export")
def export_command(
    *session_ids: Annotated[str, Parameter(help="Which sessions; all, if none is named.")],
    output: Annotated[Path | None, Parameter(help="The file to write; standard output, if none is named.")] = None,
    archived: Annotated[bool, Parameter(negative="", help="Also what compactions have set aside.")] = False,
    as_json: Annotated[
        bool, Parameter(name="--json", negative="", help="One JSON array instead of one object a line.")
    ] = False,
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """Write sessions with their messages as JSON, one a line."""
    with _reading(store_path(home, config)) as db:
        chosen: Iterator[SessionRow] = (
            (_session(db, session_id) for session_id in session_ids) if session_ids else _all_sessions(db)
        )
        lines = (
            msgspec.json.encode(
                {"session": session, "messages": list(_all_messages(db, session.id, archived))}
            ).decode()
            for session in chosen
        )
        _write_lines(lines, output, as_json)


def _all_sessions(db: Database) -> Iterator[SessionRow]:
    offset = 0
    while page := list_sessions(db, SessionFilter(include_children=True), Page(PAGE, offset)):
        offset += len(page)
        yield from page


def _write_lines(lines: Iterator[str], output: Path | None, as_array: bool) -> None:
    if output is None:
        for piece in _pieces(lines, as_array):
            sys.stdout.write(piece)
        return
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.writelines(_pieces(lines, as_array))


def _pieces(lines: Iterator[str], as_array: bool) -> Iterator[str]:
    if as_array:
        yield "["
    for place, line in enumerate(lines):
        if as_array:
            yield ("," if place else "") + "\n" + line
        else:
            yield line + "\n"
    if as_array:
        yield "\n]\n"


# -- the database ----------------------------------------------------------------------------------------------------------------


def backup(
    path: Annotated[Path, Parameter(help="The file to make.")],
    *,
    as_json: JsonOption = False,
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """Copy the store to a new file, consistently, also while the server runs."""
    began = time.perf_counter()
    size = back_up(store_path(home, config, file_for="back it up with pg_dump, or from a replica"), path)
    if as_json:
        print_json({"path": str(path), "bytes": size, "seconds": round(time.perf_counter() - began, 3)})
    else:
        Console().print(f"{path}: {shown_bytes(size)}, checked", markup=False, highlight=False)
