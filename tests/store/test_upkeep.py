"""What looks after the store does not hold up those who use it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import apsw
import pytest
import trio
import trio.testing

from hermes_trio.runtime.ports import EventRow
from hermes_trio.store import Retention, Runner, StoreError, open_store
from hermes_trio.store.sqlite import files, writer
from hermes_trio.store.sqlite.files import connect
from hermes_trio.store.sqlite.maintenance import _RULES, ROWS_A_STEP, remove_expired
from hermes_trio.store.sqlite.roots import _COUNTS
from hermes_trio.store.sqlite.rows import Database, many, one
from hermes_trio.store.sqlite.schema import migrate
from hermes_trio.store.sqlite.writer import InlineWorker, Writer

from .conftest import Clock
from .test_writer import make_table, numbers, put
from .turns import finish, job, run, start

DAY = 86_400.0


async def test_a_checkpoint_beside_a_long_reader_does_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup that reads for minutes costs a round of maintenance nothing, and the commits behind it neither; later the log is cut."""
    for module in (files, writer):
        monkeypatch.setattr(module, "BUSY_MILLISECONDS", 600_000)
    path = tmp_path / "store.db"
    async with open_store(path, runner=Runner.THREADED, maintenance=False) as store:
        await store.set_meta("a", "1")
        # The store's own library: two of them in one process do not see each other's locks.
        with closing(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM sessions").fetchall()
            await store.set_meta("a", "2")
            with trio.move_on_after(30) as waited:
                await store.give_space_back()
                await store.set_meta("a", "3")
            assert path.with_name("store.db-wal").stat().st_size > 0, "the reader does not hold the log"
        assert not waited.cancelled_caught
        await store.give_space_back()
        assert path.with_name("store.db-wal").stat().st_size == 0
        assert await store.get_meta("a") == "3"


async def _runs(path: Path, clock: Clock, *, count: int, events: int) -> None:
    async with open_store(path, runner=Runner.INLINE, clock=clock, maintenance=False) as store:
        for number in range(count):
            begun = start(f"turn_{number}", f"s{number}", f"key{number}", run=run(f"run_{number}", f"s{number}"))
            await store.begin_turn(begun)
            rows = [
                EventRow(run_id=f"run_{number}", epoch="e", number=n, event={"event": "x"})
                for n in range(1, events + 1)
            ]
            await store.append_events(rows)
            await store.finish_turn(finish(begun, "a", "b"))


async def test_retention_removes_runs_in_slices_bounded_by_rows(tmp_path: Path, clock: Clock) -> None:
    """However many events the old runs have, one transaction removes a bounded number of rows, and in the end all are gone."""
    path = tmp_path / "store.db"
    await _runs(path, clock, count=5, events=3 * ROWS_A_STEP // 2)
    db = connect(str(path))
    retention = Retention()
    rule = _RULES[0]
    assert rule.table == "runs"
    total, steps, more = 0, 0, True
    while more:
        before = (one(db, "SELECT total_changes()") or (0,))[0]
        removed, more = remove_expired(db, rule, clock.now + 1000 * DAY, retention)
        assert (one(db, "SELECT total_changes()") or (0,))[0] - before <= ROWS_A_STEP + 1
        total += removed
        steps += 1
    assert total == 5
    assert steps >= 7
    assert one(db, "SELECT (SELECT count(*) FROM runs), (SELECT count(*) FROM events)") == (0, 0)
    db.close()


async def test_retention_keeps_a_run_whose_work_is_alive(clock: Clock) -> None:
    """A run that ended long ago, and whose background job still runs, has events to come: it goes after the job's end."""
    async with open_store(None, clock=clock, maintenance=False) as store:
        begun = start(run=run("turn_1"))  # the root of the job below
        await store.begin_turn(begun)
        await store.finish_turn(finish(begun, "a", "b"))
        await store.start_job(job("proc_1", inbox=""))
        clock.advance(1000 * DAY)
        await store.maintain()
        assert await store.get_run("turn_1") is not None
        await store.recover("e2")
        await store.maintain()
        assert await store.get_run("turn_1") is None


def test_counting_what_waits_reads_no_table_from_end_to_end() -> None:
    """The health check and the drain ask for it on the loop: every count is answered from an index of what is open."""
    db = connect(":memory:")
    migrate(db, ":memory:")
    plan = [str(row[3]) for row in many(db, f"EXPLAIN QUERY PLAN {_COUNTS}")]
    db.close()
    scans = [line for line in plan if line.startswith("SCAN") and "INDEX" not in line and "CONSTANT" not in line]
    assert scans == []


async def test_a_rollback_that_fails_leaves_nobody_waiting(tmp_path: Path) -> None:
    """The callers of a batch whose commit and rollback both fail are told, the store goes on, and the next write works."""
    real = make_table(str(tmp_path / "w.db"))
    broken = {"COMMIT": 1, "ROLLBACK": 1}

    class Breaking:
        """A connection whose first commit fails, and the rollback after it."""

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def execute(self, sql: str, bindings: object = None) -> object:
            if broken.get(sql):
                broken[sql] -= 1
                raise apsw.IOError("disk I/O error")
            return real.execute(sql, bindings)

    breaking: Database = Breaking()  # type: ignore[assignment]
    writer = Writer(breaking, InlineWorker(), "w.db", slices=False)
    failures: list[str] = []

    async def insert(number: int) -> None:
        try:
            await writer.submit(put, number)
        except StoreError as error:
            failures.append(type(error).__name__)

    with trio.fail_after(5):
        async with trio.open_nursery() as outer:
            async with trio.open_nursery() as nursery:
                for number in range(3):
                    nursery.start_soon(insert, number)
                await trio.testing.wait_all_tasks_blocked()
                outer.start_soon(writer.run)
            await writer.submit(put, 9)
            writer.close()
    assert len(failures) == 3
    assert numbers(real) == [9]
