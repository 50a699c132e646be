"""The address of a database: its parts, its name for errors and logs, the passwords that neither may show, and the files that log in with it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Conninfo

from hermes_trio.base.settings import near
from hermes_trio.store.errors import StoreError

_SOCKETS: Final = "/var/run/postgresql"
"""The folder of the socket where an address names no host."""

_HIDDEN: Final = re.compile("password|secret|key")
_NAME: Final = re.compile("[A-Za-z_]{1,40}")


def parse_address(url: str) -> tuple[dict[str, Any], str]:
    """Return the options of an address, and its name for errors: host, port and database, never the password.

    Raises `StoreError` without the address, which may hold a password; an unknown option is named. A password with an unescaped `/` or `@` would be
    read as a host, a port or a database, and shown as such: such an address is refused.
    """
    try:
        options: dict[str, Any] = dict(conninfo_to_dict(url))
    except psycopg.Error:
        raise _unknown_option(url) or _unreadable() from None
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


def login_files_of(url: str, environment: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the files with which libpq logs in (of passwords, a service, a private key), and the sockets on which the server may trust a user by its id.

    They need not exist. Raises `StoreError` like `parse_address`.
    """
    options, _ = parse_address(url)

    def option(name: str, default: str = "") -> str:
        return str(options.get(name) or environment.get(f"PG{name.upper()}") or default)

    home = environment.get("HOME") or os.path.expanduser("~")
    files = [option("sslkey", f"{home}/.postgresql/postgresql.key")]
    if not option("password"):
        files.append(option("passfile", f"{home}/.pgpass"))
    if option("service"):
        files.append(option("servicefile", f"{home}/.pg_service.conf"))
    hosts = [] if option("hostaddr") else [host or _SOCKETS for host in option("host").split(",")]
    ports = option("port", "5432").split(",")
    sockets = [f"{host}/.s.PGSQL.{port or '5432'}" for host in hosts if host.startswith("/") for port in ports]
    return [os.path.abspath(file) for file in files], [os.path.realpath(socket) for socket in sockets]


def _unknown_option(url: str) -> StoreError | None:
    """Return the error that names the first unknown option of an address. None if there is none, or if its name may be a part of a password."""
    query = url.partition("://")[2].rpartition("@")[2].partition("?")[2]
    if "?" in url.partition("://")[2].rpartition("@")[0]:
        return None
    known = {option.keyword.decode() for option in Conninfo.get_defaults()}
    for part in query.split("&"):
        name = part.partition("=")[0]
        if name in known and not _HIDDEN.search(name):
            continue
        if name in known or not _NAME.fullmatch(name):
            return None
        return StoreError(
            f"the address of the database has the unknown option {name}{near(name, known)}; its options are those of libpq, as in"
            " postgresql://user@host:5432/name?sslmode=require"
        )
    return None


def _unreadable() -> StoreError:
    return StoreError(
        "the address of the database cannot be read; it looks like postgresql://user@host:5432/name,"
        " with special characters of the password percent-encoded (/ is %2F, @ is %40)"
    )
