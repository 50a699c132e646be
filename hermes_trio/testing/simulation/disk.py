"""The disk below the store: a statement of a transaction fails inside SQLite, at its beginning, in its middle, at its commit or at its rollback.

Unlike the faults of whole verbs, these leave the store's writer with an open transaction, or with one that SQLite has rolled back by itself. The faults use
the driver's trace of statements, which costs nothing while there is no fault.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import apsw
import attrs

DISK_POINTS: Final = ("begin", "statement", "commit", "rollback")

DISK_ERRORS: Final[dict[str, Callable[[str], Exception]]] = {
    "busy": apsw.BusyError,
    "full": apsw.FullError,
    "io": apsw.IOError,
}
"""The errors of the driver, by the words of a step."""

_ENDS: Final = {"BEGIN": "begin", "COMMIT": "commit", "ROLLBACK": "rollback"}

_WRITES: Final = frozenset({"INSERT", "UPDATE", "DELETE", "REPLACE"})


@attrs.define
class _DiskFault:
    point: str
    error: str
    skip: int
    undone: bool


class SimulatedDisk:
    """Lets statements of one connection fail. `told` is called with the point and the error of each."""

    def __init__(self, db: Any, told: Callable[[str, str], None]) -> None:
        self._db = db
        self._told = told
        self._faults: list[_DiskFault] = []
        self._hook = self._trace

    def fail(self, point: str, error: str, *, skip: int = 0, undone: bool = False) -> None:
        """Let the next statement at this point fail, after `skip` others. With `undone`, SQLite has rolled the transaction back, as it may for a full disk."""
        self._faults.append(_DiskFault(point, error, skip, undone))
        self._db.exec_trace = self._hook

    def heal(self) -> None:
        """End all faults. Not called by the trace itself, because the driver does not hold a reference to it."""
        self._faults.clear()
        self._db.exec_trace = None

    def _trace(self, cursor: object, sql: str, bindings: object) -> bool:
        point = self._point(sql)
        fault = next((one for one in self._faults if one.point == point), None)
        if fault is None:
            return True
        if fault.skip:
            fault.skip -= 1
            return True
        self._faults.remove(fault)
        waiting, self._faults = self._faults, []
        if fault.undone and self._db.in_transaction:
            self._db.execute("ROLLBACK")
        self._told(point, fault.error)
        self._faults = waiting
        raise DISK_ERRORS[fault.error](f"injected: {fault.error} at {point}")

    def _point(self, sql: str) -> str:
        word, _, rest = sql.partition(" ")
        if word in _ENDS and not rest.startswith("TO "):
            return _ENDS[word]
        # Reads are left out, because the world reads rows over the same connection.
        return "statement" if word in _WRITES and self._db.in_transaction else ""
