"""The migrations, one module a version. A released one is never edited; a change of the tables is a new one.

A migration is a function of the connection. It runs inside a transaction, with foreign keys off: SQLite's own recipe for changing a
table (make a new one, copy the rows, drop the old one, rename the new one) would otherwise delete every row that refers to it. What it
leaves is checked for dangling references before the transaction commits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from hermes_trio.store.sqlite.rows import Database

from .v1 import to_version_1
from .v2 import to_version_2
from .v3 import to_version_3
from .v4 import to_version_4
from .v5 import to_version_5
from .v6 import to_version_6
from .v7 import to_version_7

__all__ = ["MIGRATIONS", "Migration"]

Migration = Callable[[Database], None]

MIGRATIONS: Final[Sequence[Migration]] = (
    to_version_1,
    to_version_2,
    to_version_3,
    to_version_4,
    to_version_5,
    to_version_6,
    to_version_7,
)
"""Migration k (from 1) takes a file of version k-1 to version k."""
