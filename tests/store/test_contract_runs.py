"""The contract of runs and their event logs."""

from __future__ import annotations

from hermes_trio.runtime.outcome import RunStatus, TurnState, Usage
from hermes_trio.runtime.ports import EventRow
from hermes_trio.store import Page, RunFilter, Store

from .conftest import Clock
from .turns import finish, run, start


def event(number: int, name: str = "tool.started", run_id: str = "run_1", epoch: str = "e1") -> EventRow:
    """An event of a run."""
    return EventRow(run_id=run_id, epoch=epoch, number=number, event={"event": name, "n": number})


async def test_a_run_is_there_before_it_is_promised(store: Store, clock: Clock) -> None:
    """`begin_turn` makes the row; it is queued, and has all the fields that a status shows."""
    await store.begin_turn(start(run=run(model="m", tenant="t", input_preview="hi")))

    found = await store.get_run("run_1")
    assert found is not None
    assert (found.status, found.model, found.tenant, found.session_id) == (RunStatus.QUEUED, "m", "t", "s1")
    assert (found.created_at, found.updated_at, found.ended_at) == (clock.now, clock.now, None)
    assert await store.get_run("unknown") is None


async def test_a_run_follows_its_events_until_the_end(store: Store, clock: Clock) -> None:
    """A live run names its last event; after the end nothing moves the run any more."""
    begun = start(run=run())
    await store.begin_turn(begun)
    clock.advance(1)
    await store.append_events([event(1, "approval.request")])
    waiting = await store.get_run("run_1")
    await store.finish_turn(
        finish(
            begun, "q", "a", state=TurnState.FAILED, error="it broke", error_code="agent_error",
            usage=Usage(input_tokens=2, output_tokens=3),
        )
    )  # fmt: skip
    await store.append_events([event(2, "tool.started")])
    await store.finish_turn(finish(begun, "q", "a"))
    ended = await store.get_run("run_1")

    assert waiting is not None
    assert (waiting.status, waiting.last_event) == (RunStatus.QUEUED, "approval.request")
    assert waiting.updated_at == clock.now
    assert ended is not None
    assert (ended.status, ended.error, ended.error_code) == (RunStatus.FAILED, "it broke", "agent_error")
    assert ended.last_event == "run.failed"
    assert ended.usage == {"input_tokens": 2, "output_tokens": 3, "total_tokens": 5}


async def test_events_are_numbered_and_read_after_a_number(store: Store) -> None:
    """Reading destroys nothing; a batch that is written again changes nothing; each event knows its epoch."""
    await store.begin_turn(start(run=run()))
    await store.append_events([event(1), event(2, "message.delta")])
    await store.append_events([event(2, "other"), event(3, "tool.completed")])

    assert [row.number for row in await store.events_after("run_1")] == [1, 2, 3]
    assert [row.event["event"] for row in await store.events_after("run_1", 1, limit=1)] == ["message.delta"]
    assert [row.number for row in await store.events_after("run_1", 3)] == []
    assert await store.event_epoch("run_1", 2) == "e1"
    assert await store.event_epoch("run_1", 9) is None


async def test_last_event_follows_everything_but_text(store: Store) -> None:
    """Text deltas are not events worth naming in a status."""
    await store.begin_turn(start(run=run()))
    await store.append_events([event(1, "tool.started"), event(2, "message.delta")])

    found = await store.get_run("run_1")
    assert found is not None
    assert found.last_event == "tool.started"


async def test_runs_are_listed_newest_first_and_filtered(store: Store) -> None:
    """Status, session and tenant select; pages are stable."""
    for number, tenant in enumerate(("t", "t", "u")):
        begun = start(f"turn_{number}", f"s{number}", run=run(f"run_{number}", f"s{number}", tenant=tenant))
        await store.begin_turn(begun)
        if number == 0:
            await store.finish_turn(finish(begun, "q", "a"))

    assert [row.run_id for row in await store.list_runs()] == ["run_2", "run_1", "run_0"]
    assert [row.run_id for row in await store.list_runs(RunFilter(tenant="t"))] == ["run_1", "run_0"]
    assert [row.run_id for row in await store.list_runs(RunFilter(status=RunStatus.COMPLETED))] == ["run_0"]
    assert [row.run_id for row in await store.list_runs(RunFilter(session_id="s1"))] == ["run_1"]
    assert [row.run_id for row in await store.list_runs(page=Page(1, 2))] == ["run_0"]


async def test_a_page_of_events_is_bounded_in_bytes(store: Store) -> None:
    """A page has as many events as fit, and one at least; the next page begins behind it."""
    begun = start(run=run())
    await store.begin_turn(begun)
    sizes = (10, 10, 1000, 10)
    await store.append_events(
        [
            EventRow(run_id="run_1", epoch="e", number=number, event={"event": "message.delta", "delta": "x" * size})
            for number, size in enumerate(sizes, 1)
        ]
    )
    pages, last = list[list[int]](), 0
    while page := await store.events_after("run_1", last, most_bytes=200):
        pages.append([row.number for row in page])
        last = pages[-1][-1]
    assert pages == [[1, 2], [3], [4]]
