"""Diagnosis of a PostgreSQL database: whether its settings protect acknowledged writes, the sizes, the nodes that use it, and what is stuck.

Reads only, on a connection of its own, so it can run beside nodes. Damaged pages are found by PostgreSQL's own tools (`pg_amcheck`).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
from psycopg.conninfo import conninfo_to_dict

from hermes_trio.base.retention import DAY, Retention
from hermes_trio.store.errors import StoreReadOnly
from hermes_trio.store.sqlite.doctor import STUCK, TABLES, WAITING
from hermes_trio.store.sqlite.maintenance import expired_counts
from hermes_trio.store.sqlite.rows import Database, many, one

from .schema import MISSING_RIGHTS, SCHEMA, VERSION, lacking

CONNECTIONS: Final = 6
"""The connections that each node opens."""

OWNED: Final[Mapping[str, str]] = {
    "runs": "ended_at IS NULL",
    "jobs": "ended_at IS NULL",
    "turns": "open_turn IS NOT NULL",
    "messages": "state = 'taken'",
    "replies": "state = 'attempting'",
    "approvals": "state = 'pending'",
}
_TABLE_OF: Final = {"turns": "sessions", "messages": "inbox", "replies": "outbox"}

LONG_TRANSACTION: Final = 300.0
"""Seconds after which an open transaction is reported: the space of rows removed since its start cannot be reused."""


class DatabaseDiagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The findings about a database. Sizes are in bytes."""

    path: str
    server: str
    version: int
    known_version: int
    problems: tuple[str, ...]
    """Findings that endanger the rows: such a database is not sound."""
    warnings: tuple[str, ...]
    """Findings that endanger the service."""
    database_bytes: int
    nodes: tuple[Mapping[str, Any], ...]
    connections: int
    max_connections: int
    rows: Mapping[str, int]
    table_bytes: Mapping[str, int]
    open_sessions: int
    stuck: Mapping[str, int]
    unowned: Mapping[str, int]
    """Open rows of nodes that have ended: the next reaper ends them."""
    waiting: Mapping[str, int]
    expired: Mapping[str, int]
    unindexed: int

    @property
    def sound(self) -> bool:
        """Return whether nothing endangers the rows, and the schema is of a version that we know."""
        return not self.problems and self.version <= self.known_version

    @property
    def healthy(self) -> bool:
        """Sound, and without anything under way that no live node has."""
        return self.sound and not any(self.unowned.values()) and not self.warnings


def _count(db: Database, sql: str, *bindings: object) -> int:
    found = one(db, sql, bindings)
    return int(found[0] or 0) if found else 0


def _setting(db: Database, name: str) -> str:
    found = one(db, "SELECT current_setting(?, true)", (name,))
    return str(found[0]) if found and found[0] is not None else ""


def diagnose_database(db: Database, where: str, retention: Retention | None = None) -> DatabaseDiagnosis:
    """Examine a connected database, by its own clock. Raises `StoreReadOnly`, with what to grant, if the role may not read every table."""
    missing = [str(right) for (right,) in many(db, MISSING_RIGHTS)]
    rights = lacking(missing, where)
    if any(right.startswith("SELECT ") for right in missing):
        raise StoreReadOnly(rights)
    found = one(db, "SELECT extract(epoch FROM clock_timestamp())::double precision")
    assert found is not None
    now = float(found[0])
    nodes = [
        {"name": name, "age_seconds": round(now - started, 1), "lease_seconds": round(expires - now, 1)}
        for name, started, expires in many(db, "SELECT name, started_at, expires_at FROM nodes ORDER BY started_at")
    ]
    used = _count(db, "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'")
    most = int(_setting(db, "max_connections")) - int(_setting(db, "superuser_reserved_connections") or 0)
    gone = "owner NOT IN (SELECT incarnation FROM nodes WHERE expires_at > ?)"
    return DatabaseDiagnosis(
        path=where,
        server=f"PostgreSQL {_setting(db, 'server_version')}",
        version=_count(db, "SELECT max(version) FROM schema_version"),
        known_version=VERSION,
        problems=tuple(_problems(db)),
        warnings=(*([rights] if rights else ()), *_warnings(db, nodes, used, most)),
        database_bytes=_count(db, "SELECT pg_database_size(current_database())"),
        nodes=tuple(nodes),
        connections=used,
        max_connections=most,
        rows={table: _count(db, f"SELECT count(*) FROM {table}") for table in TABLES},
        table_bytes=dict(
            many(
                db,
                "SELECT relname, pg_total_relation_size(oid) FROM pg_class WHERE relkind = 'r' AND relnamespace = ?::regnamespace"
                " ORDER BY 2 DESC",
                (SCHEMA,),
            )
        ),
        open_sessions=_count(db, "SELECT count(*) FROM sessions WHERE ended_at IS NULL"),
        stuck={what: _count(db, sql) for what, sql in STUCK.items()},
        unowned={
            what: _count(db, f"SELECT count(*) FROM {_TABLE_OF.get(what, what)} WHERE {which} AND {gone}", now)
            for what, which in OWNED.items()
        },
        waiting={what: _count(db, sql, now - DAY) for what, sql in WAITING.items()},
        expired=expired_counts(db, now, retention or Retention()),
        unindexed=_count(db, "SELECT count(*) FROM messages WHERE words IS NULL"),
    )


def _problems(db: Database) -> Iterable[str]:
    for name in ("fsync", "full_page_writes"):
        if _setting(db, name) == "off":
            yield f"{name} is off: a crash of the server's machine can lose or damage what was acknowledged"
    sql = (
        "SELECT c.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid"
        " WHERE NOT i.indisvalid AND c.relnamespace = ?::regnamespace ORDER BY 1"
    )
    for (name,) in many(db, sql, (SCHEMA,)):
        yield f"the index {name} is not valid; run REINDEX INDEX {SCHEMA}.{name}"


def _warnings(db: Database, nodes: list[dict[str, Any]], used: int, most: int) -> Iterable[str]:
    for node in nodes:
        if node["lease_seconds"] <= 0:
            yield f"the lease of node {node['name']} ended {-node['lease_seconds']:g} s ago, and no node has taken over its work"
    if most - used < CONNECTIONS:
        yield f"{used} of {most} connections are used; another node needs {CONNECTIONS}: raise max_connections"
    longest = one(
        db,
        "SELECT max(extract(epoch FROM clock_timestamp() - xact_start))::double precision FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()",
    )
    if longest is not None and (longest[0] or 0) > LONG_TRANSACTION:
        yield f"a transaction is open since {longest[0]:.0f} s: the space of removed rows cannot be used again"
    queue = one(db, "SELECT pg_notification_queue_usage()::double precision")
    if queue is not None and queue[0] > 0.5:
        yield f"the queue of notifications is {queue[0]:.0%} full: a session listens and does not read"


def dump_command(url: str) -> str:
    """Return the shell command that backs up the database at `url` with PostgreSQL's own program, without the password."""
    options: dict[str, Any] = dict(conninfo_to_dict(url))
    names = (("host", "--host"), ("port", "--port"), ("user", "--username"), ("dbname", "--dbname"))
    words = [f"{option}={options[name]}" for name, option in names if options.get(name)]
    return shlex.join(["pg_dump", "--format=custom", f"--schema={SCHEMA}", "--file=hermes-trio.dump", *words])
