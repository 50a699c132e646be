"""`hermes-trio store`: manages the PostgreSQL database that `[store] url` or `HERMES_STORE_URL` names. Its address is no option, because it may hold
a password.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final

import cyclopts
from cyclopts import Parameter

from hermes_trio.commands.options import CommandFailed, ConfigOption, HomeOption
from hermes_trio.commands.output import say
from hermes_trio.config import load_config
from hermes_trio.store.backend import require_postgres

store: Final = cyclopts.App(
    name="store", help="Create, migrate and check a store in PostgreSQL; copy a SQLite store into it or back."
)


def _address(home: Path | None, config: Path | None) -> str:
    settings = load_config(os.environ, home=home, path=config)
    if not settings.store.url:
        raise CommandFailed(
            "no database is configured: set HERMES_STORE_URL, or `url` in the section [store] of the configuration, to"
            " postgresql://user@host:5432/name"
        )
    require_postgres()
    return settings.store.url


async def _bring_up(url: str, *, make: bool) -> None:
    from hermes_trio.store.postgres.address import parse_address
    from hermes_trio.store.postgres.link import open_link
    from hermes_trio.store.postgres.schema import VERSION, check_server, migrate_schema, version_of
    from hermes_trio.store.postgres.store import telling

    _, where = parse_address(url)
    with telling(where):
        async with open_link(url, where) as link:
            await check_server(link, url, where)
            if not make and await version_of(link) == 0:
                raise CommandFailed(f"the database {where} has no store yet; run `hermes-trio store init`")
            before = await migrate_schema(link, where)
    if before == VERSION:
        say(f"the database {where} has schema version {VERSION} already")
    elif before:
        say(f"the database {where} was migrated from schema version {before} to {VERSION}")
    else:
        say(f"the database {where} is ready: schema version {VERSION}")


@store.command
async def init(*, home: HomeOption = None, config: ConfigOption = None) -> None:
    """Create the tables in the configured database, or migrate existing ones."""
    await _bring_up(_address(home, config), make=True)


@store.command
async def migrate(*, home: HomeOption = None, config: ConfigOption = None) -> None:
    """Migrate the configured database to the schema of this program. Stop all nodes first."""
    await _bring_up(_address(home, config), make=False)


@store.command
async def check(*, home: HomeOption = None, config: ConfigOption = None) -> None:
    """Connect to the configured database, check its version, rights and schema, and write and read a row."""
    from hermes_trio.store.backend import open_backend

    url = _address(home, config)
    async with open_backend(url, node_name="check") as opened:
        await opened.probe()
        waiting = await opened.backlog()
        nodes = [node.name for node in await opened.list_nodes() if node.incarnation != opened.owner]
    say("the database can be used")
    say(f"nodes: {', '.join(nodes) or 'none'}")
    say("waiting: " + (", ".join(f"{count} {name}" for name, count in waiting.items() if count) or "nothing"))


@store.command(name="copy")
def copy_command(
    sqlite_file: Annotated[Path, Parameter(help="The file of a SQLite store, `state.db` in its home directory.")],
    *,
    back: Annotated[bool, Parameter(negative="", help="Copy from the database into a new file.")] = False,
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """Copy a whole store from a SQLite file into the configured database, or nothing. Compares every row. Stop all servers of both first."""
    url = _address(home, config)
    from hermes_trio.store.postgres.blocking import connect_blocking
    from hermes_trio.store.postgres.copying import copy_from_sqlite, copy_to_sqlite

    with connect_blocking(url, bulk=True) as db:
        counts = copy_to_sqlite(db, sqlite_file) if back else copy_from_sqlite(sqlite_file, db)
        where = db.where
    for table, count in counts.items():
        if count:
            say(f"{count:>9,} {table}")
    source, target = (
        (f"the database {where}", str(sqlite_file)) if back else (str(sqlite_file), f"the database {where}")
    )
    say(f"{sum(counts.values()):>9,} rows were copied from {source} to {target}, and are the same there")
