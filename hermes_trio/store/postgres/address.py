"""The address of a database: its parts, its name for errors and logs, and the passwords that neither may show."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from hermes_trio.store.errors import StoreError

__all__ = ["parse_address", "passwords_of"]


def parse_address(url: str) -> tuple[dict[str, Any], str]:
    """Return the options of an address, and its name for errors: host, port and database, never the password.

    Raises `StoreError` without the address, which may hold a password. A password with an unescaped `/` or `@` would be read as a host, a port or
    a database, and shown as such: such an address is refused.
    """
    try:
        options: dict[str, Any] = dict(conninfo_to_dict(url))
    except psycopg.Error:
        raise _unreadable() from None
    authority, _, path = url.partition("://")[2].partition("?")[0].partition("/")
    ports = str(options.get("port") or "").split(",")
    if (
        authority.count("@") > 1
        or ("@" in path and "@" not in authority)
        or not all(port.isdecimal() for port in ports if port)
    ):
        raise _unreadable()
    host = options.get("host") or options.get("hostaddr") or "localhost"
    name = options.get("dbname") or options.get("user") or "postgres"
    return options, f"{name} at {host}:{options.get('port') or '5432'}"


def passwords_of(url: str) -> list[str]:
    """Return the password of an address, as it is and as it is written. Raises `StoreError` like `parse_address`."""
    options, _ = parse_address(url)
    credentials, _, _ = url.partition("://")[2].partition("/")[0].rpartition("@")
    return list({str(options.get("password") or ""), credentials.partition(":")[2]} - {""})


def _unreadable() -> StoreError:
    return StoreError(
        "the address of the database cannot be read; it looks like postgresql://user@host:5432/name,"
        " with special characters of the password percent-encoded (/ is %2F, @ is %40)"
    )
