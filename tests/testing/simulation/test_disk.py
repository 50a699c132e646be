"""Statements that fail inside SQLite, and clients that do not keep to the usual order of a request."""

from __future__ import annotations

from typing import Any

import pytest
import trio

import hermes_trio.store.sqlite.verbs as verbs_module
import hermes_trio.store.sqlite.writer as writer_module
from hermes_trio.store.sqlite.rows import Database
from hermes_trio.store.sqlite.verbs import SharedReads
from hermes_trio.testing.simulation import Program, Step, WorldSettings, run_program
from hermes_trio.testing.simulation.disk import DISK_ERRORS, DISK_POINTS

from .mutants import patched

QUICK = WorldSettings(cron="", calm_seconds=120)

DELIVERY = Program(
    1,
    30,
    (
        Step(4.9, "disk", words="statement busy skip=1"),
        Step(4.9, "disk", words="rollback io"),
        Step(9.0, "webhook", 0, 1, "ponder 2"),
    ),
)


def _failing(point: str, error: str, more: str = "") -> Program:
    faults = [Step(4.9, "disk", words=f"{point} {error} skip=1{more}")]
    if point == "rollback":
        faults = [Step(4.9, "disk", words="statement full skip=2"), Step(4.9, "disk", words=f"rollback {error}")]
    people = (
        Step(5.0, "write", 0, 1, "bg 5"),
        Step(5.5, "run", 0, 2, "say"),
        Step(6.0, "write", 1, 3, "say"),
    )
    return Program(1, 30, (*faults, *people))


@pytest.mark.parametrize("error", DISK_ERRORS)
@pytest.mark.parametrize("point", DISK_POINTS)
def test_a_statement_that_fails_breaks_no_promise(point: str, error: str) -> None:
    """At the beginning of a transaction, in its middle, at its commit and at its rollback."""
    result = run_program(_failing(point, error), QUICK)
    assert result.violations == (), result.story()
    assert result.coverage.disk[point, error] == 1


@pytest.mark.parametrize("point", ["statement", "commit"])
def test_a_transaction_that_sqlite_rolls_back_by_itself_breaks_no_promise(point: str) -> None:
    """As on a full disk: nothing of the transaction is kept, and nothing of it is acknowledged."""
    result = run_program(_failing(point, "full", " undone=1"), QUICK)
    assert result.violations == (), result.story()
    assert result.coverage.disk[point, "full"] == 1


def test_a_rollback_that_failed_is_repeated_before_a_heavy_write() -> None:
    """Here before the recovery of a node that is started again."""
    faults = (Step(4.9, "disk", words="statement io"), Step(4.9, "disk", words="rollback io"))
    crash = Step(5.0, "crash", words="before accept_message down=0.5")
    result = run_program(Program(1, 30, (*faults, crash, Step(5.1, "write", 0, 1, "say"))), QUICK)
    assert result.coverage.disk["rollback", "io"] == 1
    assert result.violations == (), result.story()


def test_a_delivery_that_could_not_be_rolled_back_is_not_taken_for_a_known_one() -> None:
    """The sender got 503 and sends it again: the second attempt is accepted, not answered as a repetition of rows that were never committed."""
    result = run_program(DELIVERY, QUICK)
    assert result.coverage.disk["rollback", "io"] == 1
    assert result.violations == (), result.story()


def _keeps_the_transaction_open(real: Any) -> Any:
    def roll_back(db: Database) -> None:
        db.signals.clear()

    return roll_back


def _reads_as_if_all_were_committed(real: Any) -> Any:
    async def point(self: SharedReads, read: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return read(self._db)

    return point


def test_a_writer_that_does_not_roll_back_is_convicted() -> None:
    """The transaction of a failed write stays open, and no later one can begin."""
    with patched(
        (writer_module, "roll_back", _keeps_the_transaction_open),
        (verbs_module, "roll_back", _keeps_the_transaction_open),
    ):
        assert run_program(_failing("commit", "full"), QUICK).violations != ()


def test_reads_of_what_was_not_committed_are_convicted() -> None:
    """A delivery that was refused is then answered as a known one, and is lost."""
    with patched((SharedReads, "point", _reads_as_if_all_were_committed)):
        assert any("has 0 rows" in one for one in run_program(DELIVERY, QUICK).violations)


@pytest.mark.parametrize("manner", ["half=1", "torn=1", "reconnect=1 old=1"])
def test_a_client_with_bad_manners_gets_what_it_was_promised(manner: str) -> None:
    """It half-closes its connection (a disconnect), disconnects in the middle of a body, or resumes events from an old id: there is one run."""
    program = Program(1, 30, (Step(5.0, "run", 0, 1, f"think 2 {manner}"),))
    result = run_program(program, QUICK)
    assert result.violations == (), result.story()
    (told,) = result.trace.of("run")
    assert "202" in told.text
    assert len(result.trace.of("model")) == 1
