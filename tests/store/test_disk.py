"""A disk that is full, or that cannot be written: a clear error, nothing acknowledged lost, and back to work when there is space."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import apsw
import pytest
import trio

from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.ports import Message, NewMessage
from hermes_trio.store import NewSession, Runner, StoreError, StoreFull, StoreReadOnly, open_store
from hermes_trio.store.sqlite.files import connect_reader
from hermes_trio.store.sqlite.maintenance import checkpoint
from hermes_trio.store.sqlite.rows import one
from hermes_trio.store.sqlite.store import SqliteStore
from hermes_trio.store.sqlite.writer import Weight

LIMITED = """
import resource, sys, trio
from hermes_trio.runtime.ports import Message
from hermes_trio.store import NewSession, StoreFull, open_store

async def main():
    async with open_store(sys.argv[1]) as store:
        await store.create_session(NewSession(id="s", source="x"))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
        kept = 0
        try:
            while kept < 1000:
                await store.append_messages("s", [Message(role="user", content="x" * 20_000)])
                kept += 1
        except StoreFull as error:
            print("full:", error)
        assert await store.get_session("s") is not None
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        await store.append_messages("s", [Message(role="user", content="there is space again")])
        history = await store.load_history("s")
        print(kept, len(history), history[-1].text)

trio.run(main)
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of three megabytes, if this machine lets us mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(place)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("runner", list(Runner))
async def test_a_full_disk_is_an_error_to_the_caller_and_no_more(small_disk: Path, runner: Runner) -> None:
    """Writes fail with `StoreFull`, reads go on, what was acknowledged is there, and with space it works again."""
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"\0" * 1_700_000)  # the log is copied into the file at the close: it needs its own size again
    kept = 0
    async with open_store(small_disk / "store.db", runner=runner, maintenance=False) as store:
        await store.create_session(NewSession(id="s", source="x"))
        full: StoreError | None = None
        while full is None:
            try:
                await store.append_messages("s", [Message(role="user", content=str(kept) + " x" * 10_000)])
                kept += 1
            except StoreFull as error:
                full = error
        assert "no space left" in str(full)
        with pytest.raises(StoreFull):
            await store.append_messages("s", [Message(role="user", content="x" * 300_000)])
        assert len(await store.load_history("s")) == kept

        ballast.unlink()
        await store.append_messages("s", [Message(role="user", content="there is space again")])
        history = await store.load_history("s")
        assert [entry.text.split()[0] for entry in history[:-1]] == [str(number) for number in range(kept)]
        assert history[-1].text == "there is space again"

    async with open_store(small_disk / "store.db", runner=runner, maintenance=False) as store:
        assert len(await store.load_history("s")) == kept + 1


async def test_concurrent_callers_all_hear_of_a_full_disk(small_disk: Path) -> None:
    """No write of a batch that cannot be committed is reported as durable."""
    async with open_store(small_disk / "store.db", maintenance=False) as store:
        await store.create_session(NewSession(id="s", source="x"))
        kept: list[int] = []
        refused: list[int] = []

        async def append(number: int) -> None:
            try:
                await store.append_messages("s", [Message(role="user", content=f"{number} " + "x" * 30_000)])
                kept.append(number)
            except StoreFull:
                refused.append(number)

        for wave in range(10):
            async with trio.open_nursery() as nursery:
                for place in range(20):
                    nursery.start_soon(append, wave * 20 + place)
        stored = {int(entry.text.split()[0]) for entry in await store.load_history("s")}

    assert refused
    assert stored == set(kept)


async def test_a_read_only_disk_is_refused_by_name(small_disk: Path) -> None:
    """Opening says what cannot be written; a reader still reads what is there."""
    path = small_disk / "store.db"
    async with open_store(path) as store:
        await store.create_session(NewSession(id="s", source="x"))
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    subprocess.run(remount, check=True)  # noqa: ASYNC221
    with pytest.raises(StoreReadOnly, match=r"store\.db.*cannot be written"):
        async with open_store(path):
            pass
    reader = connect_reader(str(path))
    assert one(reader, "SELECT id FROM sessions") == ("s",)
    reader.close()


async def test_a_read_only_directory_is_refused_by_name(tmp_path: Path) -> None:
    """The same for a directory whose mode forbids writing."""
    if os.getuid() == 0:
        pytest.skip("root may write everywhere")
    place = tmp_path / "sealed"
    place.mkdir(mode=0o555)
    with pytest.raises(StoreReadOnly, match="sealed"):
        async with open_store(place / "store.db"):
            pass


def test_a_size_limit_counts_as_a_full_disk(tmp_path: Path) -> None:
    """A process that may not make its file larger gets the same error, and works again when it may."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "store.db")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    said = done.stdout.splitlines()
    kept, stored, last = said[1].split(" ", 2)

    assert said[0].startswith("full:")
    assert 0 < int(kept) < 1000
    assert int(stored) == int(kept) + 1
    assert last == "there is space again"


class FailingRollbacks:
    """Lets the second statement of a transaction fail, and then as many rollbacks as it is told."""

    def __init__(self, store: SqliteStore, rollbacks: int) -> None:
        self._db: Any = cast("Any", store._writer)._db
        self._rollbacks = rollbacks
        self._writes = 0
        self._hook = self._trace
        self._db.exec_trace = self._hook

    def _trace(self, cursor: object, sql: str, bindings: object) -> bool:
        if sql.startswith("ROLLBACK") and not sql.startswith("ROLLBACK TO") and self._rollbacks:
            self._rollbacks -= 1
            raise apsw.IOError("the disk is away")
        if sql.startswith(("INSERT", "UPDATE")) and self._db.in_transaction:
            self._writes += 1
            if self._writes == 2:
                raise apsw.BusyError("the disk is busy")
        return True


async def _alone(store: SqliteStore) -> None:
    """Make the next write one that has no others to share its transaction with."""
    for number in range(2):
        await store.record_delivery("route", f"earlier {number}")


def _delivery() -> NewMessage:
    return NewMessage(inbox="webhook", session_key="key", routing=SessionContext(), text="hello")


@pytest.mark.parametrize("in_memory", [True, False])
async def test_what_could_not_be_rolled_back_is_never_read(tmp_path: Path, in_memory: bool) -> None:
    """A delivery whose write failed is not known, although its rollback failed, too: the sender's next attempt is accepted."""
    path = None if in_memory else tmp_path / "store.db"
    async with open_store(path, runner=Runner.INLINE, maintenance=False) as store:
        await _alone(store)
        failing = FailingRollbacks(store, rollbacks=1)
        with pytest.raises(StoreError, match="locked"):
            await store.accept_delivery("route", "d1", _delivery())
        assert failing._rollbacks == 0
        assert not await store.delivery_known("route", "d1")
        assert await store.accept_delivery("route", "d1", _delivery()) is not None


async def test_a_read_fails_while_a_transaction_cannot_be_rolled_back(tmp_path: Path) -> None:
    """It has nothing true to tell. Afterwards reads work again."""
    async with open_store(None) as store:
        await _alone(store)
        FailingRollbacks(store, rollbacks=2)
        with pytest.raises(StoreError, match="locked"):
            await store.accept_delivery("route", "d1", _delivery())
        with pytest.raises(StoreError, match="away"):
            await store.delivery_known("route", "d1")
        assert not await store.delivery_known("route", "d1")


@pytest.mark.parametrize("in_memory", [True, False])
async def test_the_write_after_a_failed_rollback_succeeds(tmp_path: Path, in_memory: bool) -> None:
    """It rolls back first: its own transaction begins, and has nothing of the failed one. So does maintenance, which needs no transaction."""
    path = None if in_memory else tmp_path / "store.db"
    async with open_store(path, runner=Runner.INLINE, maintenance=False) as store:
        for number in range(2):
            await _alone(store)
            FailingRollbacks(store, rollbacks=1)
            with pytest.raises(StoreError, match="locked"):
                await store.accept_delivery("route", f"d{number}", _delivery())
            if number:
                await store._writer.submit(checkpoint, weight=Weight.BARE)
            else:
                await store.record_delivery("route", "other")
        assert not await store.delivery_known("route", "d0")
        assert not await store.delivery_known("route", "d1")
