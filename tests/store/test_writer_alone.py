"""A caller who writes in its own task: whatever is cancelled, interrupted or fails around it, no transaction is torn, lost or left open."""

from __future__ import annotations

import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import outcome
import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hermes_trio.store.errors import StoreClosed, StoreError
from hermes_trio.store.sqlite.files import connect
from hermes_trio.store.sqlite.rows import Database
from hermes_trio.store.sqlite.writer import InlineWorker, ThreadWorker, Weight, Writer

from .test_writer import lone_writer, make_table, numbers, put


@pytest.fixture
def db(tmp_path: Path) -> Database:
    """A file with one table."""
    return make_table(str(tmp_path / "w.db"))


@trio.lowlevel.enable_ki_protection
async def press_ctrl_c() -> None:
    """What a person at the terminal does: the main task gets it, because this one is protected."""
    signal.raise_signal(signal.SIGINT)


class SlowWorker:
    """Does its work some steps of the scheduler after it was started, in a task of its own, whoever waits for it."""

    def __init__(self, nursery: trio.Nursery, delays: list[int]) -> None:
        self._nursery = nursery
        self._delays = delays
        self._done = trio.Event()
        self._result: outcome.Value[Any] | outcome.Error | None = None
        self._free = True
        self._pieces = 0

    def start(self, work: Callable[[], Any], /) -> None:
        """Take the work; there is room for one piece."""
        assert self._free
        self._free = False
        self._done = trio.Event()
        self._nursery.start_soon(self._run_piece, work)

    async def _run_piece(self, work: Callable[[], Any]) -> None:
        self._pieces += 1
        for _ in range(self._delays[self._pieces % len(self._delays)]):
            await trio.lowlevel.cancel_shielded_checkpoint()
        self._result = outcome.capture(work)
        self._done.set()

    async def over(self) -> None:
        """Wait for the end of the work; cancelling leaves it alone."""
        await self._done.wait()

    def take(self) -> Any:
        """The result of work that has ended."""
        assert self._done.is_set()
        assert not self._free
        self._free = True
        assert self._result is not None
        return self._result.unwrap()

    async def __aenter__(self) -> SlowWorker:
        return self

    async def __aexit__(self, *failure: object) -> None:
        return None


class Failing:
    """A connection of which some commits fail."""

    def __init__(self, db: Database, failures: list[bool]) -> None:
        self._db = db
        self._failures = failures
        self._commits = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def execute(self, sql: str, bindings: object = None) -> object:
        """Run it, or refuse a commit."""
        if sql == "COMMIT":
            self._commits += 1
            if self._failures[self._commits % len(self._failures)]:
                raise apsw.FullError("database or disk is full")
        return self._db.execute(sql, bindings)


class Refused(Exception):
    """What a verb raises on purpose."""


def put_and_refuse(db: Database, number: int) -> None:
    """Insert a number, and be wrong."""
    put(db, number)
    raise Refused


KINDS = st.sampled_from(["light", "light", "light", "refuse", "heavy", "bare", "post"])
CALLS = st.tuples(KINDS, st.integers(0, 6), st.one_of(st.none(), st.integers(0, 8)))
"""What is called, how many steps after the last call, and after how many steps it is cancelled."""


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    calls=st.lists(CALLS, min_size=1, max_size=12),
    delays=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    failures=st.lists(st.booleans(), max_size=3),
    close_after=st.one_of(st.none(), st.integers(0, 12)),
)
def test_every_write_is_whole_whatever_is_cancelled(
    calls: list[tuple[str, int, int | None]], delays: list[int], failures: list[bool], close_after: int | None
) -> None:
    """Who was told that a write is kept finds it, who was told that it is not does not, and a verb that was run is kept though its caller left."""
    begun: set[int] = set()
    kept: set[int] = set()
    lost: set[int] = set()

    def note(db: Database, number: int) -> None:
        begun.add(number)
        put(db, number)

    async def main(db: Database) -> None:
        async with trio.open_nursery() as threads:
            worker = SlowWorker(threads, delays)
            watched: Any = Failing(db, [*failures, False])
            writer = Writer(watched, worker, "w.db", slices=True)

            async def call(number: int, kind: str, cancel_after: int | None) -> None:
                with trio.CancelScope() as scope:
                    if cancel_after is not None:
                        callers.start_soon(cancel, scope, cancel_after)
                    weight = Weight.LIGHT if kind in ("light", "refuse") else Weight(kind)
                    try:
                        await writer.submit(put_and_refuse if kind == "refuse" else note, number, weight=weight)
                        kept.add(number)
                    except (Refused, StoreError):
                        lost.add(number)

            async def cancel(scope: trio.CancelScope, steps: int) -> None:
                for _ in range(steps):
                    await trio.lowlevel.checkpoint()
                scope.cancel()

            with trio.fail_after(5):
                async with trio.open_nursery() as running:
                    running.start_soon(writer.run)
                    async with trio.open_nursery() as callers:
                        for number, (kind, pause, cancel_after) in enumerate(calls):
                            for _ in range(pause):
                                await trio.lowlevel.checkpoint()
                            if number == close_after:
                                writer.close()
                            if kind == "post":
                                writer.post(note, number)
                            else:
                                callers.start_soon(call, number, kind, cancel_after)
                    writer.close()
            with pytest.raises(StoreClosed):
                await writer.submit(put, 99)

    with tempfile.TemporaryDirectory() as folder:
        db = make_table(f"{folder}/w.db")
        try:
            trio.run(main, db, clock=trio.testing.MockClock(autojump_threshold=0))
            assert not db.in_transaction
            found = set(numbers(db))
        finally:
            db.close()
    assert kept <= found
    assert not lost & found
    assert any(failures) or begun <= found
    assert not {number for number, (kind, *_) in enumerate(calls) if kind == "refuse"} & found


def test_ctrl_c_during_a_lone_commit(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main task is interrupted in the middle of its commit; the commit ends, and the next write waits for it."""
    go = threading.Event()

    async def main() -> None:
        async with ThreadWorker("test store") as worker, lone_writer(db, worker) as writer:
            commit = writer._commit

            def held() -> None:
                assert go.wait(10)
                commit()

            monkeypatch.setattr(writer, "_commit", held)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(press_ctrl_c)
                with pytest.raises(KeyboardInterrupt):
                    await writer.submit(put, 1)
                go.set()
                assert await writer.submit(put, 2) == 2
                assert await writer.submit(put, 3) == 3

    trio.run(main)
    assert not db.in_transaction
    assert numbers(db) == [0, 1, 2, 3]


def test_ctrl_c_while_a_lone_caller_waits_for_the_lock(db: Database, tmp_path: Path) -> None:
    """The transaction that the worker begins after its caller was interrupted is not left open."""
    other = connect(str(tmp_path / "w.db"))

    async def main() -> None:
        async with ThreadWorker("test store") as worker, lone_writer(db, worker) as writer:
            other.execute("BEGIN IMMEDIATE")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(press_ctrl_c)
                with pytest.raises(KeyboardInterrupt):
                    await writer.submit(put, 1)
                other.execute("ROLLBACK")
                assert await writer.submit(put, 2) == 2
                assert await writer.submit(put, 3) == 3

    trio.run(main)
    assert not db.in_transaction
    assert numbers(db) == [0, 2, 3]
    other.close()


async def test_an_abandoned_commit_that_fails(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caller has left before it failed: nothing of it is kept, and the writes after it are not in its transaction."""
    go = threading.Event()
    async with ThreadWorker("test store") as worker, lone_writer(db, worker) as writer:

        def broken() -> None:
            assert go.wait(10)
            raise apsw.FullError("database or disk is full")

        monkeypatch.setattr(writer, "_commit", broken)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(writer.submit, put, 1)
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        monkeypatch.undo()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.submit, put, 2)
            await trio.testing.wait_all_tasks_blocked()
            go.set()
    assert numbers(db) == [0, 2]


async def test_a_lone_caller_without_a_thread_lets_the_others_run(db: Database) -> None:
    """Somebody who writes without a pause does not keep the loop to itself, not even when no commit leaves it."""
    seen = 0

    async def other() -> None:
        nonlocal seen
        while True:
            await trio.lowlevel.checkpoint()
            seen += 1

    async with lone_writer(db, InlineWorker()) as writer, trio.open_nursery() as nursery:
        nursery.start_soon(other)
        for number in range(1, 200):
            await writer.submit(put, number)
        nursery.cancel_scope.cancel()
    assert seen >= 10


async def test_a_thread_whose_result_nobody_takes_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving a worker with an untaken result ends its thread without an error in it."""
    errors: list[object] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    async with ThreadWorker("test store") as worker:
        worker.start(lambda: 1)
        await worker.over()
    assert errors == []
