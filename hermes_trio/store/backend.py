"""The one place that chooses a backend: a file is SQLite's, an address is PostgreSQL's, and nothing is a database in memory."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from hermes_trio.base.retention import Retention

from .errors import StoreError
from .ports import Store
from .sqlite.store import open_store

__all__ = ["is_address", "open_backend", "require_postgres"]

_SCHEMES: Final = ("postgresql://", "postgres://")
_DEFAULT_RETENTION: Final = Retention()


def is_address(place: Path | str | None) -> bool:
    """Whether a place is the address of a PostgreSQL database, and not a file."""
    return isinstance(place, str) and place.startswith(_SCHEMES)


def require_postgres() -> None:
    """Raise `StoreError` with the remedy if the packages for PostgreSQL are not installed."""
    missing = [name for name in ("psycopg", "greenlet") if find_spec(name) is None]
    if missing:
        raise StoreError(
            f"a store in PostgreSQL needs the package {' and '.join(missing)}; install `hermes-trio[postgres]`"
        )


def open_backend(
    place: Path | str | None,
    *,
    retention: Retention = _DEFAULT_RETENTION,
    node_name: str = "",
    lease_seconds: float = 15.0,
) -> AbstractAsyncContextManager[Store]:
    """Open the store at a place, for the body of the `async with`: see `open_store` and `open_postgres` for what they raise.

    `node_name` and `lease_seconds` are for a database that several nodes share. A file has one owner, and no lease.
    """
    if not isinstance(place, str) or not is_address(place):
        return open_store(place, retention=retention)
    require_postgres()
    from .postgres.store import open_postgres  # loaded only here: a server on SQLite does not need it

    return open_postgres(place, retention=retention, node_name=node_name, lease_seconds=lease_seconds)
