"""The group commit: who shares a commit, what a failure takes with it, and what cancellation does not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import apsw
import pytest
import trio
import trio.testing

from hermes_trio.store import Runner, StoreClosed, StoreError, open_store
from hermes_trio.store.sqlite import writer as writer_module
from hermes_trio.store.sqlite.files import connect, enter_wal
from hermes_trio.store.sqlite.rows import Database, many, write
from hermes_trio.store.sqlite.writer import InlineWorker, ThreadWorker, Weight, Worker, Writer

from .turns import finish, start


def make_table(path: str) -> Database:
    """A database with one table of numbers."""
    db = connect(path)
    enter_wal(db, path)
    write(db, "CREATE TABLE t (n INTEGER PRIMARY KEY)")
    return db


def put(db: Database, number: int) -> int:
    """Insert a number."""
    write(db, "INSERT INTO t (n) VALUES (?)", (number,))
    return number


def put_two_and_fail(db: Database, first: int, second: int) -> None:
    """Insert two numbers, then find out that it was wrong."""
    put(db, first)
    put(db, second)
    raise ValueError("no")


def numbers(db: Database) -> list[int]:
    """All numbers."""
    return [number for (number,) in many(db, "SELECT n FROM t ORDER BY n")]


@pytest.fixture(params=["inline", "threaded"])
async def worker(request: pytest.FixtureRequest) -> AsyncIterator[Worker]:
    """Both places where blocking work may run."""
    async with ThreadWorker("test store") if request.param == "threaded" else InlineWorker() as opened:
        yield opened


@pytest.fixture
def db(tmp_path: Path) -> Database:
    """A file with one table."""
    return make_table(str(tmp_path / "w.db"))


async def test_concurrent_callers_share_commits(db: Database, worker: Worker) -> None:
    """What waits together is committed together, and each caller gets its own result."""
    writer = Writer(db, worker, "w.db", slices=False)
    results: list[int] = []

    async def insert(number: int) -> None:
        results.append(await writer.submit(put, number))

    async with trio.open_nursery() as outer:
        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(insert, number)
            await trio.testing.wait_all_tasks_blocked()
            assert results == []
            outer.start_soon(writer.run)
        writer.close()

    assert sorted(results) == list(range(100))
    assert numbers(db) == list(range(100))
    statistics = writer.statistics()
    assert (statistics.verbs, statistics.commits, statistics.largest_batch) == (100, 1, 100)


async def test_a_failing_verb_takes_nothing_else_with_it(db: Database, worker: Worker) -> None:
    """Its own writes are undone, its caller gets the error, and its neighbours in the batch are committed."""
    writer = Writer(db, worker, "w.db", slices=False)
    errors: list[Exception] = []

    async def fail() -> None:
        try:
            await writer.submit(put_two_and_fail, 1, 2)
        except ValueError as error:
            errors.append(error)

    async def clash() -> None:
        try:
            await writer.submit(put, 0)
        except StoreError as error:
            errors.append(error)

    async with trio.open_nursery() as outer:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.submit, put, 0)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(fail)
            nursery.start_soon(clash)
            nursery.start_soon(writer.submit, put, 3)
            await trio.testing.wait_all_tasks_blocked()
            outer.start_soon(writer.run)
        writer.close()

    assert numbers(db) == [0, 3]
    assert {type(error) for error in errors} == {ValueError, StoreError}
    assert writer.statistics().commits == 1


async def test_verbs_that_keep_failing_double_nobodys_work(db: Database, worker: Worker) -> None:
    """Only the first batch with a failure runs again; the next ones have savepoints from the start, until no verb of one fails."""
    statements: list[str] = []
    runs: list[int] = []

    class Listening:
        """A connection that notes what it executes."""

        def __getattr__(self, name: str) -> object:
            return getattr(db, name)

        def execute(self, sql: str, bindings: object = None) -> object:
            statements.append(sql)
            return db.execute(sql, bindings)

    def counted(db: Database, number: int) -> None:
        runs.append(number)
        put(db, number)

    writer = Writer(Listening(), worker, "w.db", slices=False)  # type: ignore[arg-type]

    async def together(*numbers: int, failing: bool) -> tuple[list[int], int]:
        """Run one batch: the writer starts it when all are in the queue."""
        runs.clear()
        statements.clear()
        for number in numbers:
            writer.post(counted, number)
        if failing:
            writer.post(put_two_and_fail, 100, 101)
        await writer.submit(put, numbers[0] + 1000)
        return runs.copy(), statements.count("SAVEPOINT verb")

    async with trio.open_nursery() as outer:
        outer.start_soon(writer.run)
        await trio.testing.wait_all_tasks_blocked()
        found = [
            await together(1, 2, failing=True),
            await together(3, 4, failing=True),
            await together(5, 6, failing=False),
            await together(7, 8, failing=False),
        ]
        writer.close()

    assert found == [([1, 2, 1, 2], 4), ([3, 4], 4), ([5, 6], 3), ([7, 8], 0)]
    assert numbers(db) == [*range(1, 9), 1001, 1003, 1005, 1007]


async def test_a_verb_in_the_queue_runs_although_its_caller_left(db: Database, worker: Worker) -> None:
    """Cancelling abandons the wait, never the write; cancelled before it is enqueued, it never runs."""
    writer = Writer(db, worker, "w.db", slices=False)

    async with trio.open_nursery() as outer:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.submit, put, 1)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        with trio.CancelScope() as late:
            late.cancel()
            await writer.submit(put, 2)
        outer.start_soon(writer.run)
        writer.close()

    assert late.cancelled_caught
    assert numbers(db) == [1]


async def test_closing_writes_what_is_queued_and_refuses_the_rest(db: Database, worker: Worker) -> None:
    """Nothing that was enqueued is dropped; afterwards a clear error."""
    writer = Writer(db, worker, "w.db", slices=False)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.submit, put, 1)
        await trio.testing.wait_all_tasks_blocked()
        writer.close()
        nursery.start_soon(writer.run)
    with pytest.raises(StoreClosed, match=r"w\.db"):
        await writer.submit(put, 2)
    writer.post(put, 3)

    assert numbers(db) == [1]


async def test_heavy_and_bare_verbs_keep_their_place(db: Database, worker: Worker) -> None:
    """They run alone and in order; a heavy one that fails leaves nothing; a bare one runs outside any transaction."""
    writer = Writer(db, worker, "w.db", slices=True)

    def outside(db: Database) -> bool:
        return db.in_transaction

    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.run)
        await writer.submit(put, 1)
        with pytest.raises(ValueError, match="no"):
            await writer.submit(put_two_and_fail, 2, 3, weight=Weight.HEAVY)
        assert await writer.submit(put, 4, weight=Weight.HEAVY) == 4
        assert await writer.submit(outside, weight=Weight.BARE) is False
        assert await writer.submit(outside, weight=Weight.HEAVY) is True
        writer.close()

    assert numbers(db) == [1, 4]


async def test_a_full_queue_makes_callers_wait(db: Database, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is bounded: those who find it full wait outside, and get their turn."""
    monkeypatch.setattr("hermes_trio.store.sqlite.writer.QUEUE_LIMIT", 4)
    writer = Writer(db, worker, "w.db", slices=False)

    async with trio.open_nursery() as outer:
        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(writer.submit, put, number)
            await trio.testing.wait_all_tasks_blocked()
            assert writer.statistics().waiting == 4
            outer.start_soon(writer.run)
        writer.close()

    assert numbers(db) == list(range(20))


async def test_a_failed_commit_fails_all_of_its_callers(db: Database, worker: Worker) -> None:
    """Nobody is told that a write is durable when the commit failed; the next batch works again."""
    refuse = True

    class Refusing:
        """A connection whose first commit fails."""

        def __getattr__(self, name: str) -> object:
            return getattr(db, name)

        def execute(self, sql: str, bindings: object = None) -> object:
            nonlocal refuse
            if sql == "COMMIT" and refuse:
                refuse = False
                raise apsw.FullError("database or disk is full")
            return db.execute(sql, bindings)

    writer = Writer(Refusing(), worker, "w.db", slices=False)  # type: ignore[arg-type]
    failures: list[str] = []

    async def insert(number: int) -> None:
        try:
            await writer.submit(put, number)
        except StoreError as error:
            failures.append(type(error).__name__)

    async with trio.open_nursery() as outer:
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(insert, number)
            await trio.testing.wait_all_tasks_blocked()
            outer.start_soon(writer.run)
        await writer.submit(put, 9)
        writer.close()

    assert failures == ["StoreFull"] * 3
    assert numbers(db) == [9]


async def test_reads_see_a_batch_as_a_whole(tmp_path: Path) -> None:
    """While a batch is being written in slices, a reader sees none of it; afterwards all of it."""
    async with open_store(tmp_path / "s.db", maintenance=False) as store:
        seen: set[int] = set()

        async def turn(number: int) -> None:
            await store.finish_turn(finish(start(f"t{number}"), "q", "a"))

        async def watch() -> None:
            while True:
                session = await store.get_session("s1")
                history = await store.load_history("s1")
                if session is not None:
                    assert session.message_count <= len(history)
                seen.add(len(history))
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as watching:
            watching.start_soon(watch)
            async with trio.open_nursery() as nursery:
                for number in range(120):
                    nursery.start_soon(turn, number)
            watching.cancel_scope.cancel()
        assert len(await store.load_history("s1")) == 240
        assert all(count % 2 == 0 for count in seen)


@pytest.mark.parametrize("runner", list(Runner))
async def test_an_error_of_the_body_comes_out_unwrapped(tmp_path: Path, runner: Runner) -> None:
    """Who uses the store gets their own exception, and what they had enqueued is written."""

    async def use_it_badly() -> None:
        async with open_store(tmp_path / "s.db", runner=runner) as store:
            await store.set_meta("a", "1")
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        await use_it_badly()

    async with open_store(tmp_path / "s.db", runner=runner) as store:
        assert await store.get_meta("a") == "1"


@pytest.mark.parametrize("runner", list(Runner))
async def test_a_cancelled_store_still_writes_what_it_was_given(tmp_path: Path, runner: Runner) -> None:
    """Cancelling everything around an open store loses nothing that was in its queue."""
    called = 0
    everybody = trio.Event()
    with trio.CancelScope() as scope:
        async with open_store(tmp_path / "s.db", runner=runner) as store, trio.open_nursery() as nursery:

            async def note(number: int) -> None:
                nonlocal called
                called += 1
                if called == 50:
                    everybody.set()
                await store.set_meta(str(number), "x")

            for number in range(50):
                nursery.start_soon(note, number)
            await everybody.wait()
            scope.cancel()

    assert scope.cancelled_caught
    async with open_store(tmp_path / "s.db", runner=runner) as store:
        assert [await store.get_meta(str(number)) for number in range(50)] == ["x"] * 50


class HeldWorker(InlineWorker):
    """Does its work at once, and says so when it is let."""

    def __init__(self) -> None:
        self.let = trio.Event()
        self.let.set()

    async def over(self) -> None:
        """Wait for leave."""
        await self.let.wait()


@asynccontextmanager
async def lone_writer(db: Database, worker: Worker) -> AsyncIterator[Writer]:
    """A writer that has found that nobody else comes: the next caller writes by itself. Closed at the end of the body."""
    writer = Writer(db, worker, "w.db", slices=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.run)
        try:
            await writer.submit(put, 0)
            await trio.testing.wait_all_tasks_blocked()
            yield writer
        finally:
            writer.close()


async def test_a_lone_caller_writes_in_its_own_task(db: Database, worker: Worker) -> None:
    """Each verb of somebody who is alone has a transaction of its own, and a failing one leaves nothing behind."""
    async with lone_writer(db, worker) as writer:
        for number in range(1, 5):
            assert await writer.submit(put, number) == number
        with pytest.raises(ZeroDivisionError):
            await writer.submit(lambda db: put(db, 99) // 0)
        assert await writer.submit(put, 5) == 5
    assert numbers(db) == [0, 1, 2, 3, 4, 5]
    assert writer.statistics().commits == 7


async def test_a_lone_caller_that_is_cancelled_leaves_its_commit_to_the_writer(db: Database) -> None:
    """The write is kept, and whoever comes next waits for its end."""
    worker = HeldWorker()
    results: list[int] = []

    async def insert(number: int) -> None:
        results.append(await writer.submit(put, number))

    async with lone_writer(db, worker) as writer, trio.open_nursery() as outer:
        worker.let = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(insert, 1)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        outer.start_soon(insert, 2)
        await trio.testing.wait_all_tasks_blocked()
        assert results == []
        worker.let.set()
        await trio.testing.wait_all_tasks_blocked()
        assert results == [2]
    assert numbers(db) == [0, 1, 2]


async def test_who_comes_during_a_lone_commit_shares_the_next(db: Database) -> None:
    """A crowd is noticed: what has come meanwhile is one batch, and closing waits for all of it."""
    worker = HeldWorker()
    async with lone_writer(db, worker) as writer, trio.open_nursery() as outer:
        worker.let = trio.Event()
        for number in range(1, 12):
            outer.start_soon(writer.submit, put, number)
        await trio.testing.wait_all_tasks_blocked()
        writer.close()
        worker.let.set()
    assert numbers(db) == list(range(12))
    assert (writer.statistics().commits, writer.statistics().largest_batch) == (3, 10)


async def test_a_lone_commit_that_fails(db: Database, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller is told, nothing is kept, and the next write finds no open transaction."""
    async with lone_writer(db, worker) as writer:

        def broken() -> None:
            raise apsw.FullError("database or disk is full")

        monkeypatch.setattr(writer, "_commit", broken)
        with pytest.raises(StoreError, match="no space left"):
            await writer.submit(put, 1)
        monkeypatch.undo()
        assert not db.in_transaction
        await writer.submit(put, 2)
    assert numbers(db) == [0, 2]


async def test_a_full_loop_does_not_starve_the_writes(
    db: Database, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch gets as much of the loop as the others take, so that a crowd of requests cannot hold up the writes that end them."""
    moment = 0.0
    steps = steps_when_written = 0

    def slow_put(db: Database, number: int) -> int:
        nonlocal moment, steps_when_written
        moment += 0.001
        steps_when_written = steps
        return put(db, number)

    async def crowd() -> None:
        nonlocal moment, steps
        while len(done) < 200:
            moment += 0.02
            steps += 1
            await trio.lowlevel.checkpoint()

    async def insert(number: int) -> None:
        done.append(await writer.submit(slow_put, number))

    monkeypatch.setattr(writer_module, "perf_counter", lambda: moment)
    done: list[int] = []
    writer = Writer(db, worker, "w.db", slices=True)
    async with trio.open_nursery() as outer:
        async with trio.open_nursery() as nursery:
            for number in range(200):
                nursery.start_soon(insert, number)
            await trio.testing.wait_all_tasks_blocked()
            outer.start_soon(writer.run)
            nursery.start_soon(crowd)
        writer.close()
    assert numbers(db) == list(range(200))
    assert writer.statistics().commits == 1
    # Twenty verbs fit into the time of one step of the crowd; with slices of a millisecond it would have had a step for every verb.
    assert steps_when_written < 40
