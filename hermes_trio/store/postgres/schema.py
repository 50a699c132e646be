"""The schema of a PostgreSQL database: made, migrated, and checked before any other use.

Everything is in the schema `hermes_trio`. Its version is a row; a server starts only on the version that it knows, and names the command to run on any
other. A change of the schema is one transaction, and two programs that make it at once wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hermes_trio.store.errors import NewerSchema, StoreError, StoreReadOnly

from .database import encode
from .errors import LinkBroken, SqlError, translate_sql
from .link import PostgresLink, open_link
from .locks import lock_number
from .migrations import MIGRATIONS

SCHEMA: Final = "hermes_trio"
VERSION: Final = len(MIGRATIONS)
OLDEST_SERVER: Final = 150_000

MISSING_RIGHTS: Final = f"""
SELECT needed || ' on ' || relname FROM pg_class CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS needed
    WHERE relnamespace = '{SCHEMA}'::regnamespace AND relkind = 'r' AND relname <> 'schema_version'
    AND NOT has_table_privilege(oid, needed)
UNION ALL SELECT 'EXECUTE on ' || proname FROM pg_proc
    WHERE pronamespace = '{SCHEMA}'::regnamespace AND NOT has_function_privilege(oid, 'EXECUTE')
ORDER BY 1
"""
"""The rights that a server needs and the role of the connection lacks."""

_MOST_NAMED: Final = 5

_FOREIGN_STATEMENTS: Final = frozenset({"42P05", "26000"})
"""The first statement of a new connection exists already, or is unknown when it is executed: other connections use the same backend."""


async def check_server(link: PostgresLink, url: str, where: str) -> None:
    """Raise `StoreError` for a server that is too old, for a replica, and for a pooler that hands transactions to changing connections."""
    if link.version < OLDEST_SERVER:
        raise StoreError(
            f"the database {where} is PostgreSQL {link.version // 10_000}; hermes-trio needs {OLDEST_SERVER // 10_000} or newer"
        )
    try:
        rows = await link.run("SELECT pg_backend_pid(), pg_is_in_recovery(), current_setting('server_encoding')")
    except SqlError as error:
        if error.state not in _FOREIGN_STATEMENTS:
            raise
        raise _pooled(where) from None
    pid, replica, encoding = rows[0]
    if replica:
        raise StoreError(f"the database {where} is a replica, which cannot be written; name the primary server")
    if encoding != "UTF8":
        raise StoreError(f"the database {where} has the encoding {encoding}; make it with ENCODING 'UTF8'")
    if pid != link.backend and await _shares_backends(link, pid, url, where):
        raise _pooled(where)


def _pooled(where: str) -> StoreError:
    return StoreError(
        f"the database {where} is behind a pooler in transaction mode, which loses prepared statements and notifications;"
        " connect to PostgreSQL directly, or use the pooler's session mode"
    )


async def _shares_backends(link: PostgresLink, backend: int, url: str, where: str) -> bool:
    """Return whether the pooler that answers gives the backend of one connection to another while the first only rests, or gives the first another one."""
    try:
        async with open_link(url, where) as second:
            await second.run("BEGIN")
            rows = await second.run("SELECT pg_backend_pid()")
            again = await link.run("SELECT pg_backend_pid()")
    except (SqlError, LinkBroken):
        return True  # a statement of the other connection was in the way, or the pooler knows no transactions
    return rows[0][0] == backend or again[0][0] != backend


async def version_of(link: PostgresLink) -> int:
    """Return the version of the schema; 0 if there is none."""
    (found,) = (await link.run("SELECT to_regclass('hermes_trio.schema_version') IS NOT NULL"))[0]
    if not found:
        return 0
    rows = await link.run("SELECT max(version) FROM hermes_trio.schema_version")
    return int(rows[0][0] or 0)


async def check_schema(link: PostgresLink, where: str) -> None:
    """Raise, with the command to run, unless the schema is of this program's version."""
    check_found(await version_of(link), where)


async def check_rights(link: PostgresLink, where: str) -> None:
    """Raise `StoreReadOnly`, with what to grant, unless the role of this connection may do everything that a server does."""
    told = lacking([str(right) for (right,) in await link.run(MISSING_RIGHTS)], where)
    if told:
        raise StoreReadOnly(told)


def lacking(missing: Sequence[str], where: str) -> str:
    """Return what to do about the rights that `MISSING_RIGHTS` has found; empty if there are none."""
    if not missing:
        return ""
    more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
    return (
        f"the role of the address lacks rights in the database {where}: {', '.join(missing[:_MOST_NAMED])}{more}; use the role that ran"
        f" `hermes-trio store init`, or GRANT them on all tables and functions of the schema {SCHEMA}"
    )


def check_found(found: int, where: str) -> None:
    """Raise, with the command to run, unless this is the version that the program knows."""
    if found > VERSION:
        raise NewerSchema(
            f"the database {where} has schema version {found}, and this program knows {VERSION}: upgrade hermes-trio on this host."
            " Nothing was changed"
        )
    if found == 0:
        raise StoreError(f"the database {where} has no store yet; run `hermes-trio store init`")
    if found < VERSION:
        raise StoreError(
            f"the database {where} has schema version {found}, and this program needs {VERSION}: stop all nodes, then run"
            " `hermes-trio store migrate`"
        )


async def migrate_schema(link: PostgresLink, where: str, migrations: Sequence[Sequence[str]] = MIGRATIONS) -> int:
    """Migrate the database to the newest version, also from an empty one, in one transaction; return the version that it had.

    The link cannot be used after an error: closing it rolls the transaction back.
    Raises `NewerSchema` for a newer one, and `StoreError` while nodes work on the database.
    """
    try:
        await link.run("BEGIN")
        await link.run("SELECT pg_advisory_xact_lock($1)", [encode(lock_number("schema"))])
        before = await version_of(link)
        if before > len(migrations):
            raise NewerSchema(
                f"the database {where} has schema version {before}, and this program knows {len(migrations)}. Nothing was changed"
            )
        if before == 0:
            await link.run(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}")
            await link.run(
                f"CREATE TABLE {SCHEMA}.schema_version (version bigint PRIMARY KEY, made_at timestamptz NOT NULL DEFAULT now())"
            )
        elif before < len(migrations):
            await _check_no_node_works(link, where)
        await link.run(f"SET LOCAL search_path TO {SCHEMA}")
        for number, statements in enumerate(migrations[before:], before + 1):
            for statement in statements:
                await link.run(statement)
            await link.run("INSERT INTO schema_version (version) VALUES ($1)", [encode(number)])
        await link.run("COMMIT")
    except SqlError as error:
        raise translate_sql(error, where) from None
    return before


async def _check_no_node_works(link: PostgresLink, where: str) -> None:
    rows = await link.run(f"SELECT name FROM {SCHEMA}.nodes WHERE expires_at > extract(epoch FROM clock_timestamp())")
    if rows:
        names = ", ".join(sorted(str(name) for (name,) in rows))
        raise StoreError(
            f"nodes work on the database {where} ({names}); stop all of them, then migrate. Nothing was changed"
        )
