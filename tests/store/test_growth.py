"""Growth: sessions of every kind come and go, and the file is as small afterwards as an empty one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from hermes_trio.runtime.outcome import JobState
from hermes_trio.runtime.ports import EventRow, JobFinish, NewReply
from hermes_trio.store import CronState, NewSession, SearchQuery, SessionFilter, SqliteStore, StoredResponse, open_store
from hermes_trio.store.sqlite.doctor import diagnose
from hermes_trio.store.sqlite.files import connect_reader

from .conftest import Clock
from .turns import context, finish, job, message, run, start

SESSIONS = int(os.environ.get("SESSIONS", "100000"))
ALLOWED = 2 * 1024 * 1024
DAY = 86_400.0
TEXT = (
    "What a conversation is made of: words, 漢字かな交じり文, and identifiers such as build-1.2.3 or max_retry_count. "
    * 2
)


async def chat(store: SqliteStore, number: int) -> None:
    """A chat on a platform, with a message, a reply and a job that reports; it goes idle."""
    key = f"agent:main:telegram:dm:{number}"
    session = await store.resolve_session(context("", key), source="telegram")
    accepted = await store.accept_message(message(TEXT, key=key, dedupe=str(number)))
    assert accepted is not None
    begun = start(f"t{number}", session, key, inbox_ids=(accepted,))
    await store.begin_turn(begun)
    await store.start_job(job(f"p{number}", session, key=key))
    reply = NewReply(platform="telegram", target={"chat": number}, text=TEXT)
    await store.finish_turn(finish(begun, TEXT, TEXT, outbox=(reply,)))
    await store.finish_job(JobFinish(job_id=f"p{number}", state=JobState.EXITED))


async def derived(store: SqliteStore, number: int) -> None:
    """A stateless HTTP chat, whose session the front end derived; it goes idle."""
    await store.finish_turn(finish(start(f"t{number}", f"api-{number}", "", source="api_server"), TEXT, TEXT))


async def api_run(store: SqliteStore, number: int) -> None:
    """A run with events and a stored response; its client ends the session."""
    name = f"run_{number}"
    begun = start(f"t{number}", name, "", source="api_server", run=run(name, name, tenant=f"tenant{number % 7}"))
    await store.begin_turn(begun)
    await store.append_events([EventRow(run_id=name, epoch="e", number=1, event={"event": "tool.started", "x": TEXT})])
    response = StoredResponse(id=f"resp_{number}", tenant=f"tenant{number % 7}", session_id=name, body=TEXT.encode())
    await store.finish_turn(finish(begun, TEXT, TEXT, also=(response,)))
    await store.patch_session(name, title=f"Run {number}", set_title=True, end_reason="api")


async def webhook(store: SqliteStore, number: int) -> None:
    """A one-shot session, which ends with its turn."""
    accepted = await store.accept_delivery("route", str(number), message(TEXT, key=f"hook:{number}", inbox="webhook"))
    assert accepted is not None
    begun = start(
        f"t{number}", f"hook_{number}", f"hook:{number}", source="webhook", one_shot=True, inbox_ids=(accepted,)
    )
    await store.begin_turn(begun)
    await store.finish_turn(finish(begun, TEXT, TEXT, end_session="webhook_complete"))


async def cron(store: SqliteStore, number: int) -> None:
    """A slot of a job, with its one-shot session."""
    await store.claim_cron_slot(f"job{number % 5}", float(number))
    begun = start(f"t{number}", f"cron_{number}", f"cron:{number}", source="cron", one_shot=True)
    await store.finish_turn(finish(begun, TEXT, TEXT, end_session="cron_complete"))
    await store.finish_cron_slot(f"job{number % 5}", float(number), CronState.COMPLETED, output=TEXT)


async def family(store: SqliteStore, number: int) -> None:
    """A session with a sub-agent and a branch: three rows, the parent ended by branching, the others idle."""
    await store.finish_turn(finish(start(f"t{number}", f"root_{number}", "", source="cli"), TEXT, TEXT))
    child = start(f"c{number}", f"child_{number}", "", source="cli", parent_session_id=f"root_{number}")
    await store.finish_turn(finish(child, TEXT, TEXT))
    await store.fork_session(f"root_{number}", new_id=f"branch_{number}")


async def explicit(store: SqliteStore, number: int) -> None:
    """A session that is made and never used."""
    await store.create_session(NewSession(id=f"made_{number}", source="api_server", system_prompt=TEXT))


KINDS = (chat, derived, api_run, webhook, cron, family, explicit)


async def fill(store: SqliteStore, sessions: int) -> None:
    """Make so many sessions, of every kind in turn, from 64 tasks; then one sender, as a platform has it, empties the outbox."""
    numbers = iter(range(sessions))

    async def make() -> None:
        for number in numbers:
            await KINDS[number % len(KINDS)](store, number)

    async with trio.open_nursery() as nursery:
        for _ in range(64):
            nursery.start_soon(make)
    while replies := await store.claim_outbox("telegram", limit=256):
        async with trio.open_nursery() as nursery:
            for row in replies:
                nursery.start_soon(store.outbox_sent, row)


def size(path: Path) -> int:
    """The bytes of a database and its log."""
    return sum(beside.stat().st_size for beside in (path, path.with_name(path.name + "-wal")) if beside.exists())


async def grow_and_shrink(directory: Path, sessions: int) -> tuple[int, int, int]:
    """Sizes of an empty store, of a full one, and of that one when everything in it has had its time."""
    clock = Clock()
    async with open_store(directory / "empty.db", clock=clock, maintenance=False) as store:
        await store.maintain()
        empty = size(directory / "empty.db")
    path = directory / "store.db"
    async with open_store(path, clock=clock, maintenance=False) as store:
        await fill(store, sessions)
        await store.index_messages()
        full = size(path)
        clock.advance(31 * DAY)
        await store.maintain()
        clock.advance(121 * DAY)
        report = await store.maintain()
        assert report.removed["sessions"] >= sessions
        assert await store.list_sessions(SessionFilter(include_children=True)) == []
        assert await store.search_messages(SearchQuery(text="identifiers")) == []
        after = size(path)
    db = connect_reader(str(path))
    try:
        diagnosis = diagnose(db, str(path), clock.now)
    finally:
        db.close()
    assert diagnosis.healthy
    assert diagnosis.rows["sessions"] == diagnosis.rows["messages"] == 0
    assert sum(diagnosis.expired.values()) == 0
    return empty, full, after


async def test_a_small_store_shrinks_back(tmp_path: Path) -> None:
    """A thousand sessions of every kind leave nothing behind."""
    empty, full, after = await grow_and_shrink(tmp_path, 700)

    assert full > empty
    assert after - empty < 256 * 1024


@pytest.mark.slow
async def test_a_large_store_shrinks_back(tmp_path: Path) -> None:
    """100,000 sessions of every kind (or as many as SESSIONS says) leave at most 2 MiB."""
    empty, full, after = await grow_and_shrink(tmp_path, SESSIONS)

    assert full > 100 * empty
    assert after - empty <= ALLOWED, f"{after:,} bytes after {full:,}, an empty store has {empty:,}"
