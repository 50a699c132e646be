"""The errors that the store raises on purpose. Each message says what was wrong and what to do about it.

`translate` turns the driver's errors into these, so that no other layer depends on the driver.
"""

from __future__ import annotations

from typing import ClassVar

import apsw

from hermes_trio.runtime.errors import OutcomeUnknown, Refused, RuntimeProblem


class StoreError(RuntimeProblem):
    """The base of all errors of the store. A write that raised one was rolled back completely, except for `CommitUncertain`."""

    told: ClassVar[str] = "the server's log has the details"
    """The text for a client: an error of the store may name files, so its own text is only for the log."""


class CommitUncertain(StoreError, OutcomeUnknown):
    """Raised when the connection or the disk failed during a commit, so its outcome is unknown. Read the row, or write it again."""

    told: ClassVar[str] = "the result of a write is unknown; the server's log has the details"


class StoreFull(StoreError):
    """Raised when the disk is full or a size limit is reached. The write was rolled back; writes succeed again when there is space."""

    told: ClassVar[str] = "the disk is full or failing; nothing was written"


class StoreReadOnly(StoreError):
    """Raised when the database file or its directory cannot be written."""

    told: ClassVar[str] = "the database cannot be written; the server's log has the details"


class StoreBusy(StoreError):
    """Raised when another process holds the database's write lock for longer than the busy time-out."""

    told: ClassVar[str] = "another process keeps the database locked; nothing was written"


class StoreCorrupt(StoreError):
    """Raised when the file is not a database, or is damaged. `hermes-trio doctor` reports details."""

    told: ClassVar[str] = "the database is damaged; the server's log has the details"


class StoreReplaced(StoreError):
    """Raised when the database file was removed or replaced: writes to the open file would be lost when this server ends."""

    told: ClassVar[str] = "the database file was removed or replaced; nothing was written"


class StoreUnavailable(StoreError):
    """Raised when the database cannot be reached or accepts no work now. The write was rolled back; retry when the database is back."""

    told: ClassVar[str] = "the database cannot be reached; try again in a moment"


class StoreClosed(StoreError, Refused):
    """Raised when a verb is called after the store was closed."""


class StoreInUse(StoreError):
    """Raised when another server has this file open. `pid` is its process id, 0 if it is unknown."""

    def __init__(self, message: str, pid: int) -> None:
        super().__init__(message)
        self.pid: int = pid


class NewerSchema(StoreError):
    """Raised for a file that a newer program wrote. The file is unchanged."""


class ForeignDatabase(StoreError):
    """Raised for a file of another program. The file is unchanged."""


class UnknownRecord(StoreError, Refused, LookupError):
    """Raised when there is no such row."""

    told: ClassVar[str] = ""


class UnknownSession(UnknownRecord):
    """Raised when there is no session of that id."""


class ForeignSession(UnknownSession):
    """Raised when the session of that id belongs to another tenant: for the caller it does not exist. Nothing was written."""


class SessionExists(StoreError, Refused):
    """Raised when a session of that id exists already."""

    told: ClassVar[str] = ""


class InvalidTitle(StoreError, Refused, ValueError):
    """Raised for a title that is too long, or has characters that cannot be shown."""

    told: ClassVar[str] = ""


class TitleTaken(InvalidTitle):
    """Raised when another session of this tenant has that title."""


class AlreadyStarted(StoreError, Refused):
    """Raised when a run with this idempotency key and the same body was started before; `run_id` is that run."""

    told: ClassVar[str] = ""

    def __init__(self, run_id: str) -> None:
        super().__init__(f"a run with this idempotency key was already started: {run_id}")
        self.run_id: str = run_id


class IdempotencyConflict(StoreError, Refused):
    """Raised when an idempotency key is used again with another body."""

    told: ClassVar[str] = ""

    def __init__(self, key: str) -> None:
        super().__init__(f"the idempotency key {key!r} was used before with another request body; use a new key")
        self.key: str = key


class ConversationMoved(StoreError, Refused):
    """Raised when a conversation's newest response is not the one that this turn started from: another turn committed first."""

    told: ClassVar[str] = ""

    def __init__(self, name: str, latest: str) -> None:
        super().__init__(f"conversation {name!r} has continued with {latest or 'nothing'}; start again from there")
        self.name: str = name
        self.latest: str = latest


def translate(error: Exception, path: str) -> StoreError:
    """Return the store's error for an error of the driver. `path` is the database, for the message."""
    if isinstance(error, StoreError):
        return error
    if isinstance(error, apsw.FullError):
        return StoreFull(f"no space left to write {path}; nothing was written")
    if isinstance(error, apsw.ReadOnlyError | apsw.CantOpenError | apsw.PermissionsError):
        return StoreReadOnly(
            f"{path} cannot be written ({error}); check the owner and mode of the file and its directory"
        )
    if isinstance(error, apsw.BusyError | apsw.LockedError):
        return StoreBusy(f"another process keeps {path} locked; nothing was written")
    if isinstance(error, apsw.CorruptError | apsw.NotADBError):
        return StoreCorrupt(f"{path} is damaged or is not a database ({error})")
    if isinstance(error, apsw.IOError):
        return StoreFull(f"{path} could not be written ({error}); check the disk's space, limits and health")
    return StoreError(f"{path}: {type(error).__name__}: {error}")
