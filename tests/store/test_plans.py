"""Query plans: no statement of ordinary work or of maintenance reads a table that grows from end to end."""

from __future__ import annotations

import re
from typing import Final

import apsw
import pytest

from hermes_trio.store import SqliteStore, open_store

from .conftest import Clock
from .test_growth import DAY, fill

GROWING: Final = re.compile(
    r"SCAN (?:(sessions|messages|runs|events|jobs|inbox|outbox|responses|idempotency|approvals)|[a-z])(?!\S)"
    r"(?!.*USING (?:COVERING )?INDEX)"
)


class Statements(dict[str, list[str]]):
    """The statements that were run on any connection that opened since, each with its plan."""

    def watch(self, db: apsw.Connection) -> None:
        """Explain each new statement of a connection before it runs."""

        def trace(_: apsw.Cursor, sql: str, bindings: object) -> bool:
            if sql not in self and sql.lstrip()[:6].upper() in {"SELECT", "UPDATE", "DELETE", "INSERT"}:
                self[sql] = []
                cursor = db.cursor()
                cursor.exec_trace = None
                explained = cursor.execute(f"EXPLAIN QUERY PLAN {sql}", bindings)  # type: ignore[arg-type]
                self[sql] = [str(row[3]) for row in explained]
            return True

        db.exec_trace = trace


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> Statements:
    """What every connection of the test runs."""
    found = Statements()
    monkeypatch.setattr(apsw, "connection_hooks", [*apsw.connection_hooks, found.watch])
    return found


def scans(found: Statements) -> list[str]:
    """The statements that read a growing table from end to end, with the line of the plan."""
    return [f"{line}: {sql}" for sql, plan in found.items() for line in plan if GROWING.search(line)]


async def work(store: SqliteStore, clock: Clock) -> None:
    """Sessions of every kind, then two rounds of maintenance: idle sessions end, and everything is removed."""
    await fill(store, 70)
    await store.index_messages()
    clock.advance(31 * DAY)
    await store.maintain()
    clock.advance(121 * DAY)
    await store.maintain()


async def test_nothing_reads_a_growing_table_from_end_to_end(clock: Clock, statements: Statements) -> None:
    """A turn, a delivery and a round of maintenance cost the same in a large store as in a small one."""
    async with open_store(None, clock=clock, maintenance=False) as store:
        statements.clear()  # a migration may read all
        await work(store, clock)
        await store.recover("a later boot")

    assert len(statements) > 50, "the statements were not seen"
    assert scans(statements) == []
