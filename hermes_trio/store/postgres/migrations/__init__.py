"""The migrations, one module a version. A released one is never edited; a change of the tables is a new one.

A migration is a list of statements, run in one transaction with the change of the version: it is done, or it was not begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .v1 import VERSION_1
from .v2 import VERSION_2

__all__ = ["MIGRATIONS"]

MIGRATIONS: Final[Sequence[Sequence[str]]] = (VERSION_1, VERSION_2)
"""Migration k (from 1) takes a database of version k-1 to version k."""
