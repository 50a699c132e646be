"""Choose the backend of a store by its place: a path is a SQLite file, an address is a PostgreSQL database, None is a database in memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from hermes_trio.base.retention import Retention

from .errors import StoreError
from .ports import Store
from .sqlite.store import open_store

_SCHEMES: Final = ("postgresql://", "postgres://")
_DEFAULT_RETENTION: Final = Retention()


def is_address(place: Path | str | None) -> bool:
    """Return whether a place is the address of a PostgreSQL database, and not a file."""
    return isinstance(place, str) and place.startswith(_SCHEMES)


def require_postgres() -> None:
    """Raise `StoreError` with the remedy if the packages for PostgreSQL are not installed."""
    missing = [name for name in ("psycopg", "greenlet") if find_spec(name) is None]
    if missing:
        raise StoreError(
            f"a store in PostgreSQL needs the package {' and '.join(missing)}; install `hermes-trio[postgres]`"
        )


def address_passwords(url: str) -> list[str]:
    """Return the password of an address, in the forms in which a log could show it. Raises `StoreError` if the address cannot be read."""
    require_postgres()
    from .postgres.address import passwords_of

    return passwords_of(url)


def address_login_files(url: str, environment: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the files and the sockets with which any process of this user could log in at an address. Raises `StoreError` if it cannot be read."""
    require_postgres()
    from .postgres.address import login_files_of

    return login_files_of(url, environment)


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


def open_blocking(place: Path | str, *, read_only: bool = False, alone: bool = False) -> AbstractContextManager[Store]:
    """Open an existing store for a command, beside the servers that use it, for the body of the `with`. Its verbs block the loop.

    With `read_only`, a file is opened for reading only. With `alone`, raise `StoreInUse` if a server uses the store. Raises `StoreError` if there is no
    store, or if its schema has another version.
    """
    if isinstance(place, str) and is_address(place):
        require_postgres()
        from .postgres.blocking_store import open_blocking as open_database

        return open_database(place, read_only=read_only, alone=alone)
    from .sqlite.blocking_store import open_blocking as open_file

    if not Path(place).exists():
        raise StoreError(f"there is no store at {place}; name its directory with --home, or start the server once")
    return open_file(str(place), read_only=read_only, alone=alone)
