"""`hermes-trio doctor`: examines a store, the MCP servers and the confinement of commands, beside a running server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import cyclopts
import msgspec
from rich.console import Console
from rich.table import Table

from hermes_trio.base.terminal import clean
from hermes_trio.commands.options import ConfigOption, HomeOption
from hermes_trio.commands.sessions import JsonOption, print_json, read_config, shown_bytes, store_path
from hermes_trio.config import Config, loose_modes
from hermes_trio.store.backend import is_address, require_postgres
from hermes_trio.store.sqlite.doctor import Diagnosis, diagnose_file
from hermes_trio.tools.confinement import confinement_lines, confinement_report, group_line
from hermes_trio.tools.settings import ToolSettings
from hermes_trio.tools.warden import JobGroups, probe_protections

if TYPE_CHECKING:
    from hermes_trio.store.postgres.doctor import DatabaseDiagnosis


def mount(app: cyclopts.App) -> None:
    """Register the command of this module with `app`."""
    app.command(doctor)


async def doctor(*, as_json: JsonOption = False, home: HomeOption = None, config: ConfigOption = None) -> int:
    """Examine the store: integrity, sizes, stuck rows, and what retention will remove. List the MCP servers, and how commands are confined.

    Exits with 1 if the store is damaged.
    """
    from hermes_trio.commands.tools import mcp_health

    settings = read_config(home, config)
    found = _examine(settings, store_path(home, config))
    loose = loose_modes(settings)
    rules = ToolSettings.read(settings.tools).confinement
    server_pid = found.server_pid if isinstance(found, Diagnosis) else None
    protections, groups = await probe_protections(), JobGroups.look(rules.limits, server_pid)
    servers = await mcp_health(settings)
    if as_json:
        print_json(
            {
                **msgspec.structs.asdict(found),
                "sound": found.sound,
                "healthy": found.healthy,
                "loose_modes": loose,
                "mcp": servers,
                "confinement": confinement_report(rules.profile, protections)
                | {"cgroup": groups.root, "cgroup_controllers": groups.controllers, "cgroup_missing": groups.problem},
            }
        )
    else:
        if isinstance(found, Diagnosis):
            _print_diagnosis(found)
        else:
            _print_database(found)
        for problem in (*loose, *confinement_lines(rules.profile, protections), group_line(groups)):
            Console().print(problem, markup=False, highlight=False)
        for name, one in servers.items():
            why = f": {one['error']}" if one.get("error") else ""
            Console().print(clean(f"MCP server {name}: {one['state']}{why}"), markup=False, highlight=False)
    return 0 if found.sound else 1


def _examine(settings: Config, path: str) -> Diagnosis | DatabaseDiagnosis:
    """Examine the file, or the database."""
    if is_address(path):
        require_postgres()
        from hermes_trio.store.postgres.blocking import connect_blocking
        from hermes_trio.store.postgres.doctor import diagnose_database

        with connect_blocking(path) as database:
            return diagnose_database(database, database.where, settings.retention)
    return diagnose_file(path, settings.retention)


def _print_diagnosis(found: Diagnosis) -> None:
    console = Console()
    server = "no server" if found.server_pid is None else f"server pid {found.server_pid}"
    verdict = "sound" if found.sound else "NOT SOUND: " + "; ".join(found.integrity)
    console.print(f"{found.path}: schema version {found.version}, {server}, {verdict}", markup=False, highlight=False)
    if found.broken_links:
        console.print(f"{found.broken_links} rows point to rows that are not there", highlight=False)
    console.print(
        f"file {shown_bytes(found.file_bytes)}, of which {shown_bytes(found.free_bytes)} unused; log {shown_bytes(found.log_bytes)};"
        f" {found.open_sessions} open sessions; {found.unindexed} messages not indexed yet",
        highlight=False,
    )
    _print_tables(console, found)
    _print_counts(
        console,
        found,
        "under way" if found.server_pid is not None else "left by a server that died; the next start repairs it",
    )


def _print_database(found: DatabaseDiagnosis) -> None:
    console = Console()
    verdict = "sound" if found.sound else "NOT SOUND: " + "; ".join(found.problems)
    lines = [
        f"{found.path}: {found.server}, schema version {found.version}, {verdict}",
        f"database {shown_bytes(found.database_bytes)}; {found.connections} of {found.max_connections} connections used;"
        f" {found.open_sessions} open sessions; {found.unindexed} messages not indexed yet",
    ]
    lines += [
        f"node {node['name']}: up for {node['age_seconds']:g} s, lease for {node['lease_seconds']:g} s"
        for node in found.nodes
    ] or ["no node"]
    for line in (*lines, *found.warnings):
        console.print(clean(line), markup=False, highlight=False)
    _print_tables(console, found)
    for what, count in found.unowned.items():
        if count:
            console.print(f"{count} {what} of nodes that have ended; the next node to start ends them", highlight=False)
    live = any(node["lease_seconds"] > 0 for node in found.nodes)
    _print_counts(console, found, "under way" if live else "left by nodes that died; the next start repairs it")


def _print_tables(console: Console, found: Diagnosis | DatabaseDiagnosis) -> None:
    table = Table(box=None)
    table.add_column("table")
    for name in ("rows", "size", "retention removes"):
        table.add_column(name, justify="right")
    names = [*found.rows, *(name for name in found.table_bytes if name not in found.rows)]
    for name in names:
        size = found.table_bytes.get(name, 0)
        rows = found.rows.get(name)
        if rows or size > 16_384:
            table.add_row(
                name, "" if rows is None else f"{rows:,}", shown_bytes(size), f"{found.expired.get(name, 0):,}"
            )
    console.print(table)


def _print_counts(console: Console, found: Diagnosis | DatabaseDiagnosis, note: str) -> None:
    stuck: Sequence[tuple[str, int]] = [(what, count) for what, count in found.stuck.items() if count]
    for what, count in stuck:
        console.print(f"{count} {what} ({note})", highlight=False)
    for what, count in found.waiting.items():
        if count:
            console.print(f"{count} {what}", highlight=False)
    if not stuck and not any(found.waiting.values()):
        console.print("nothing is stuck", highlight=False)
