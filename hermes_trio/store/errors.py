"""Every error that the store raises on purpose, each with what was wrong and what to do about it.

`translate` turns the driver's errors into these, so that no other layer knows which driver there is.
"""

from __future__ import annotations

from typing import ClassVar

import apsw

from hermes_trio.runtime.errors import OutcomeUnknown, RuntimeProblem

__all__ = [
    "AlreadyStarted",
    "CommitUncertain",
    "ConversationMoved",
    "ForeignDatabase",
    "ForeignSession",
    "IdempotencyConflict",
    "InvalidTitle",
    "NewerSchema",
    "SessionExists",
    "StoreBusy",
    "StoreClosed",
    "StoreCorrupt",
    "StoreError",
    "StoreFull",
    "StoreInUse",
    "StoreReadOnly",
    "StoreReplaced",
    "StoreUnavailable",
    "TitleTaken",
    "UnknownRecord",
    "UnknownSession",
    "translate",
]


class StoreError(RuntimeProblem):
    """The base of all errors of the store. A write that raised one was not made, not even in part; `CommitUncertain` is the exception."""

    told: ClassVar[str] = "the server's log has the details"
    """An error of the store may name files: its own text is for the log."""


class CommitUncertain(StoreError, OutcomeUnknown):
    """Whether the write was made is not known: the connection or the disk failed during its commit. Read the row, or write it again."""

    told: ClassVar[str] = "it is not known whether this was written; the server's log has the details"


class StoreFull(StoreError):
    """The disk is full (or a size limit was reached). Nothing of this write was kept; it works again when there is space."""

    told: ClassVar[str] = "the disk is full, or failing; nothing of this was kept"


class StoreReadOnly(StoreError):
    """The database file or its directory cannot be written."""

    told: ClassVar[str] = "the database cannot be written; the server's log has the details"


class StoreBusy(StoreError):
    """Another process holds the database's write lock for longer than we wait."""

    told: ClassVar[str] = "another process keeps the database locked; nothing of this was kept"


class StoreCorrupt(StoreError):
    """The file is not a database, or is damaged. `hermes-trio doctor` says more."""

    told: ClassVar[str] = "the database is damaged; the server's log has the details"


class StoreReplaced(StoreError):
    """The database file was removed, or another one has its name: what would be written now would be lost with the end of this server."""

    told: ClassVar[str] = "the database file was removed or replaced; nothing of this was kept"


class StoreUnavailable(StoreError):
    """The database cannot be reached, or takes no work now. Nothing of this write was kept; it works again when the database is back."""

    told: ClassVar[str] = "the database cannot be reached; try again in a moment"


class StoreClosed(StoreError):
    """A verb was called after the store was closed."""


class StoreInUse(StoreError):
    """A server already works on this file. `pid` is its process id, 0 if it cannot be told."""

    def __init__(self, message: str, pid: int) -> None:
        super().__init__(message)
        self.pid: int = pid


class NewerSchema(StoreError):
    """The file was written by a newer program. It has not been touched."""


class ForeignDatabase(StoreError):
    """The file belongs to another program. It has not been touched."""


class UnknownRecord(StoreError, LookupError):
    """There is no such row."""

    told: ClassVar[str] = ""


class UnknownSession(UnknownRecord):
    """There is no session of that id."""


class ForeignSession(UnknownSession):
    """The session of that id belongs to another tenant: for the caller there is none. Nothing was written."""


class SessionExists(StoreError):
    """A session of that id exists already."""

    told: ClassVar[str] = ""


class InvalidTitle(StoreError, ValueError):
    """A title that is too long, or has characters that cannot be shown."""

    told: ClassVar[str] = ""


class TitleTaken(InvalidTitle):
    """Another session of this tenant has that title."""


class AlreadyStarted(StoreError):
    """A run with this idempotency key and the same body was started before; `run_id` is that run."""

    told: ClassVar[str] = ""

    def __init__(self, run_id: str) -> None:
        super().__init__(f"a run with this idempotency key was already started: {run_id}")
        self.run_id: str = run_id


class IdempotencyConflict(StoreError):
    """An idempotency key was used again with another body."""

    told: ClassVar[str] = ""

    def __init__(self, key: str) -> None:
        super().__init__(f"the idempotency key {key!r} was used before with another request body; use a new key")
        self.key: str = key


class ConversationMoved(StoreError):
    """A conversation's newest response is not the one that this turn started from: another turn was faster."""

    told: ClassVar[str] = ""

    def __init__(self, name: str, latest: str) -> None:
        super().__init__(f"conversation {name!r} has moved on to {latest or 'nothing'}; start again from there")
        self.name: str = name
        self.latest: str = latest


def translate(error: Exception, path: str) -> StoreError:
    """The store's own error for one of the driver's. `path` is the database, for the text."""
    if isinstance(error, StoreError):
        return error
    if isinstance(error, apsw.FullError):
        return StoreFull(f"no space left to write {path}; nothing of this write was kept")
    if isinstance(error, apsw.ReadOnlyError | apsw.CantOpenError | apsw.PermissionsError):
        return StoreReadOnly(
            f"{path} cannot be written ({error}); check the owner and mode of the file and its directory"
        )
    if isinstance(error, apsw.BusyError | apsw.LockedError):
        return StoreBusy(f"another process keeps {path} locked; nothing of this write was kept")
    if isinstance(error, apsw.CorruptError | apsw.NotADBError):
        return StoreCorrupt(f"{path} is damaged or is not a database ({error})")
    if isinstance(error, apsw.IOError):
        return StoreFull(f"{path} could not be written ({error}); check the disk's space, limits and health")
    return StoreError(f"{path}: {type(error).__name__}: {error}")
