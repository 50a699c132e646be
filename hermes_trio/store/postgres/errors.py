"""PostgreSQL's errors and their translation to the store's."""

from __future__ import annotations

import re
from typing import Any, Final

from psycopg.pq import DiagnosticField

from hermes_trio.runtime.errors import Fenced
from hermes_trio.store.errors import StoreBusy, StoreError, StoreFull, StoreReadOnly, StoreUnavailable

FENCED: Final = "HT001"
"""Raised by `begin_unit`: the row of this node was removed."""

ALREADY: Final = "HT002"
"""Raised by `begin_unit`: the unit of this number was committed before."""

REPEATABLE: Final = frozenset({"40001", "40P01", "23505", "23503", "55P03", "26000"})
"""Errors of a conflict between two writers: the verb can be repeated, and then sees what the other wrote."""

_PASSWORD: Final = re.compile(r"(?i)(password\s*=\s*)('(?:[^'\\]|\\.)*'|\S+)|(://[^:@/\s]*:)[^@\s]*(@)")


def without_secrets(text: str) -> str:
    """Return `text` with the passwords of connection strings and addresses replaced."""
    return _PASSWORD.sub(lambda match: f"{match[1]}…" if match[1] else f"{match[3]}…{match[4]}", text)


class LinkBroken(Exception):
    """Raised when the connection is broken. Statements that were sent on it may have run."""


class SqlError(Exception):
    """Raised when a statement failed. `state` is PostgreSQL's code."""

    def __init__(self, state: str, message: str, fatal: bool = False) -> None:
        super().__init__(f"{message} ({state})")
        self.state: str = state
        self.message: str = message
        self.fatal: bool = fatal
        """Whether the server has ended the connection with it."""

    @classmethod
    def of(cls, result: Any) -> SqlError:
        """Return the error of a result."""
        state: bytes = result.error_field(DiagnosticField.SQLSTATE) or b""
        primary: bytes = result.error_field(DiagnosticField.MESSAGE_PRIMARY) or result.error_message or b""
        severity: bytes = result.error_field(DiagnosticField.SEVERITY_NONLOCALIZED) or b""
        return cls(
            state.decode("ascii", "replace"),
            primary.decode("utf-8", "replace").strip(),
            severity in (b"FATAL", b"PANIC"),
        )


def translate_sql(error: Exception, where: str) -> Exception:
    """Return the store's error for an error of PostgreSQL; any other error is returned unchanged."""
    if isinstance(error, LinkBroken):
        return StoreUnavailable(f"the connection to the database {where} broke: {error}")
    if not isinstance(error, SqlError):
        return error
    kind = error.state[:2]
    if error.state == FENCED:
        return Fenced("this node was taken over and its work was reaped; start it again")
    if error.state in ("53100", "53200") or error.state == "54000":
        return StoreFull(f"the database {where} has no space left: {error}; nothing was written")
    if error.state in ("25006", "42501"):
        return StoreReadOnly(
            f"the database {where} cannot be written: {error}; check the rights of its role, and whether it is a replica"
        )
    if kind in ("08", "53") or error.state in ("57P01", "57P02", "57P03"):
        return StoreUnavailable(f"the database {where} takes no work now: {error}")
    if kind == "40" or error.state in ("55P03", "57014"):
        return StoreBusy(f"the database {where} could not finish this in time: {error}; nothing was written")
    return StoreError(f"the database {where}: {error}")
