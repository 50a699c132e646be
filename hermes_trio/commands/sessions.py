"""The commands `sessions …` and `backup`.

They work on the database itself, beside a running server or without one. Reading never blocks a server. `prune` may run beside one, because it
touches only ended rows, in small transactions; `end` may not, because the tasks of a live session can only be stopped by its server.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, TextIO

import cyclopts
import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hermes_trio.base.terminal import clean
from hermes_trio.commands.options import ConfigOption, HomeOption
from hermes_trio.commands.output import clean_lines, say, say_json
from hermes_trio.config import Config, load_config
from hermes_trio.store import (
    Page,
    SearchOrder,
    SearchQuery,
    SessionFilter,
    Store,
    StoreBusy,
    StoreError,
    StoreInUse,
    StoreReadOnly,
    UnknownSession,
)
from hermes_trio.store.backend import is_address, open_blocking, require_postgres
from hermes_trio.store.records import SessionRow
from hermes_trio.store.sqlite.backup import back_up

sessions: Final = cyclopts.App(name="sessions", help="List, show, search, end, delete and export sessions.")

JsonOption = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON instead of a table.")]

PAGE: Final = 1_000
GAP: Final = 2
"""The blanks that a table needs for each column."""


def mount(app: cyclopts.App) -> None:
    """Register the commands of this module with `app`."""
    app.command(sessions)
    app.command(backup)


def read_config(home: Path | None, config: Path | None) -> Config:
    return load_config(os.environ, home=home, path=config)


def store_path(home: Path | None, config: Path | None) -> str:
    """Return the path of the store's file, or the address of its database. Raises `StoreError` if the file does not exist."""
    place = read_config(home, config).place
    if isinstance(place, str):
        return place
    if not place.exists():
        raise StoreError(f"there is no store at {place}; name its directory with --home, or start the server once")
    return str(place)


def print_json(value: object) -> None:
    """Print a value as JSON."""
    say_json(value)


def _when(moment: float | None) -> str:
    return "" if moment is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))


def shown_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _print_table(columns: Mapping[str, int | None], rows: Sequence[Sequence[str]], *, header: bool = True) -> None:
    """Print a table. `columns` maps a name to the width below which its column is not folded; None for a column that is never folded, because people
    copy from it.

    On a narrower terminal, columns are left out from the end; if two still do not fit, the terminal wraps the lines. In a pipe, each row is one line.
    """
    cells = [[Text(" ".join(clean(value).split())) for value in row] for row in rows]
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


async def _session(store: Store, session_id: str) -> SessionRow:
    found = await store.get_session(session_id)
    if found is None:
        raise UnknownSession(
            f"there is no session {session_id!r}; `hermes-trio sessions list` shows those that there are"
        )
    return found


# -- sessions --------------------------------------------------------------------------------------------------------------------


@sessions.command(name="list")
async def list_command(
    *,
    limit: Annotated[int, Parameter(help="The maximum number of results.")] = 50,
    offset: Annotated[int, Parameter(help="The number of results to skip.")] = 0,
    source: Annotated[str | None, Parameter(help="Only sessions of this source: telegram, api_server, cron, …")] = None,
    tenant: Annotated[str | None, Parameter(help="Only sessions of this tenant.")] = None,
    children: Annotated[bool, Parameter(negative="", help="Include sessions of sub-agents.")] = False,
    open_only: Annotated[bool, Parameter(name="--open", negative="", help="Only open sessions.")] = False,
    as_json: JsonOption = False,
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """List sessions, most recently active first."""
    with open_blocking(store_path(home, config), read_only=True) as store:
        found = await store.list_sessions(
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
async def show_command(
    session_id: Annotated[str, Parameter(help="The id that `sessions list` shows.")],
    *,
    messages: Annotated[int, Parameter(help="The number of messages to show, counted from the end.")] = 20,
    archived: Annotated[bool, Parameter(negative="", help="Include messages that a compaction has archived.")] = False,
    as_json: JsonOption = False,
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """Show a session and its last messages."""
    with open_blocking(store_path(home, config), read_only=True) as store:
        session = await _session(store, session_id)
        everything = await _all_messages(store, session_id, archived)
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
        shown = clean_lines(message["text"] or str(message.get("tool_calls", "")))
        console.print(shown, markup=False, highlight=False)


async def _all_messages(store: Store, session_id: str, archived: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while page := await store.list_messages(session_id, Page(PAGE, len(found)), include_archived=archived):
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
            found.append(row)
    return found


@sessions.command(name="search")
async def search_command(
    query: Annotated[str, Parameter(help='Words, "a phrase", prefix*, one OR another.')],
    *,
    limit: Annotated[int, Parameter(help="The maximum number of results.")] = 20,
    source: Annotated[str | None, Parameter(help="Only in sessions of this source.")] = None,
    role: Annotated[list[str] | None, Parameter(help="Only messages of this role; repeat for several.")] = None,
    order: Annotated[SearchOrder, Parameter(help="relevance, newest or oldest.")] = SearchOrder.RELEVANCE,
    as_json: JsonOption = False,
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """Search the messages of all sessions."""
    place = store_path(home, config)
    wanted = SearchQuery(text=query, source=source, roles=tuple(role or ()), order=order)
    try:
        with open_blocking(place) as store:
            hits = await store.search_messages(wanted, Page(limit))
    except (StoreReadOnly, StoreBusy) as error:
        with open_blocking(place, read_only=True) as store:
            hits = await store.search_messages(wanted, Page(limit))
        sys.stderr.write(f"messages that are not indexed yet were not searched: {error}\n")
    if as_json:
        print_json(hits)
        return
    _print_table(
        {"session": None, "match": 16, "when": 10, "role": 9},
        [(hit.session_id, hit.snippet, _when(hit.timestamp), hit.role) for hit in hits],
    )


@sessions.command(name="end")
async def end_command(
    session_id: Annotated[str, Parameter(help="The id that `sessions list` shows.")],
    *,
    reason: Annotated[str, Parameter(help="The reason to record, in one word.")] = "cli_close",
    as_json: JsonOption = False,
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """End a session while no server runs. An earlier end keeps its reason."""
    try:
        with open_blocking(store_path(home, config), alone=True) as store:
            await _session(store, session_id)
            ended = await store.end_session(session_id, reason)
            session = await _session(store, session_id)
    except StoreInUse as error:
        raise StoreError(
            f"{error}; the server of a session has to stop its work, so end the session there:"
            f' PATCH /api/sessions/{session_id} with {{"end_reason": "{reason}"}}'
        ) from None
    if as_json:
        print_json({"id": session_id, "ended": ended, "end_reason": session.end_reason})
    elif ended:
        Console().print(f"{session_id} is ended: {reason}", markup=False, highlight=False)
    else:
        Console().print(f"{session_id} had ended already: {session.end_reason}", markup=False, highlight=False)


@sessions.command(name="prune")
async def prune_command(
    *,
    older_than_days: Annotated[float, Parameter(help="Only sessions that ended more than this many days ago.")] = 90.0,
    source: Annotated[str | None, Parameter(help="Only sessions of this source.")] = None,
    end_reason: Annotated[str | None, Parameter(help="Only sessions with this end reason.")] = None,
    tenant: Annotated[str | None, Parameter(help="Only sessions of this tenant.")] = None,
    dry_run: Annotated[
        bool, Parameter(negative="", help="Print how many sessions would be deleted, and delete none.")
    ] = False,
    as_json: JsonOption = False,
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """Delete ended sessions. Open sessions stay."""
    with open_blocking(store_path(home, config), read_only=dry_run) as store:
        count = await store.prune_sessions(
            older_than_days, source, end_reason=end_reason, tenant=tenant, dry_run=dry_run
        )
    if as_json:
        print_json({"removed": 0 if dry_run else count, "matching": count, "dry_run": dry_run})
    else:
        verb = "would be removed" if dry_run else "removed"
        Console().print(f"{count} sessions {verb}", highlight=False)


@sessions.command(name="export")
async def export_command(
    *session_ids: Annotated[str, Parameter(help="The ids of the sessions; default: all.")],
    output: Annotated[Path | None, Parameter(help="The file to write; default: standard output.")] = None,
    archived: Annotated[bool, Parameter(negative="", help="Include messages that compactions have archived.")] = False,
    as_json: Annotated[
        bool, Parameter(name="--json", negative="", help="Write one JSON array instead of one object a line.")
    ] = False,
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """Export sessions with their messages as JSON, one object a line."""
    with open_blocking(store_path(home, config), read_only=True) as store, _opened(output) as file:
        lines = 0
        async for session in _chosen_sessions(store, session_ids):
            messages = await _all_messages(store, session.id, archived)
            text = msgspec.json.encode({"session": session, "messages": messages}).decode()
            file.write(_separator(lines, as_json) + text + ("" if as_json else "\n"))
            lines += 1
        if as_json:
            file.write("\n]\n" if lines else "[\n]\n")


async def _chosen_sessions(store: Store, session_ids: Sequence[str]) -> AsyncIterator[SessionRow]:
    for session_id in session_ids:
        yield await _session(store, session_id)
    if session_ids:
        return
    offset = 0
    while page := await store.list_sessions(SessionFilter(include_children=True), Page(PAGE, offset)):
        offset += len(page)
        for session in page:
            yield session


def _separator(place: int, as_array: bool) -> str:
    if not as_array:
        return ""
    return ",\n" if place else "[\n"


@contextmanager
def _opened(output: Path | None) -> Iterator[TextIO]:
    if output is None:
        yield sys.stdout
        return
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        yield file


# -- the database ----------------------------------------------------------------------------------------------------------------


def backup(
    path: Annotated[Path | None, Parameter(help="The file to create.")] = None,
    *,
    as_json: JsonOption = False,
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """Copy the store to a new file. Works while a server runs, and shows one moment. For a store in PostgreSQL, print the command that copies it."""
    began = time.perf_counter()
    place = store_path(home, config)
    if is_address(place):
        require_postgres()
        from hermes_trio.store.postgres.doctor import dump_command

        if path is None:
            say(dump_command(place))
            return
        raise StoreError(f"the store is a PostgreSQL database; back it up with its own program: {dump_command(place)}")
    if path is None:
        raise StoreError("name the file to create: `hermes-trio backup FILE`")
    size = back_up(place, path)
    if as_json:
        print_json({"path": str(path), "bytes": size, "seconds": round(time.perf_counter() - began, 3)})
    else:
        Console().print(f"{path}: {shown_bytes(size)}, checked", markup=False, highlight=False)
