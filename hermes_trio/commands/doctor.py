"""`hermes-trio doctor`: what can be said about a store, its MCP servers and the confinement of commands, without disturbing a server that runs."""

from __future__ import annotations

from collections.abc import Sequence

import cyclopts
import msgspec
from rich.console import Console
from rich.table import Table

from hermes_trio.commands.options import ConfigOption, HomeOption
from hermes_trio.commands.sessions import JsonOption, print_json, read_config, shown_bytes, store_path
from hermes_trio.config import loose_modes
from hermes_trio.store.sqlite.doctor import Diagnosis, diagnose_file
from hermes_trio.tools.confinement import confinement_lines, confinement_report, group_line
from hermes_trio.tools.settings import ToolSettings
from hermes_trio.tools.warden import JobGroups, probe_protections

__all__ = ["doctor", "mount"]


def mount(app: cyclopts.App) -> None:
    """Put the command of this module under `app`."""
    app.command(doctor)


async def doctor(*, as_json: JsonOption = False, home: HomeOption = None, config: ConfigOption = None) -> int:
    """Look the store over: is it sound, what is large, what is stuck, what will retention remove. Name the MCP servers, and say how commands are confined.

    Exit code 1 if the store is not sound.
    """
    from hermes_trio.commands.tools import mcp_health

    settings = read_config(home, config)
    path = store_path(home, config, file_for="`hermes-trio store check` looks it over")
    found = diagnose_file(path, settings.retention)
    loose = loose_modes(settings)
    rules = ToolSettings.read(settings.tools).confinement
    protections, groups = await probe_protections(), JobGroups.look(rules.limits, found.server_pid)
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
        _print_diagnosis(found)
        for problem in (*loose, *confinement_lines(rules.profile, protections), group_line(groups)):
            Console().print(problem, markup=False, highlight=False)
        for name, one in servers.items():
            why = f": {one['error']}" if one.get("error") else ""
            Console().print(f"MCP server {name}: {one['state']}{why}", markup=False, highlight=False)
    return 0 if found.sound else 1


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
    _print_counts(console, found)


def _print_counts(console: Console, found: Diagnosis) -> None:
    stuck: Sequence[tuple[str, int]] = [(what, count) for what, count in found.stuck.items() if count]
    for what, count in stuck:
        note = (
            "under way" if found.server_pid is not None else "left by a server that died; the next start puts it right"
        )
        console.print(f"{count} {what} ({note})", highlight=False)
    for what, count in found.waiting.items():
        if count:
            console.print(f"{count} {what}", highlight=False)
    if not stuck and not any(found.waiting.values()):
        console.print("nothing is stuck", highlight=False)
