"""The events of a run: numbered, resumable, shareable, and readable after the run, the reader and the server have ended."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import trio

from hermes_trio.http.api.run_events import parse_event_id
from hermes_trio.runtime.errors import AgentFailed
from hermes_trio.runtime.supervisor import Job, JobSpec
from hermes_trio.runtime.turn import Turn

from .gateway import Event, eventually, open_gateway


def names(events: list[Event]) -> list[str]:
    """What happened, in order; comments in brackets."""
    return [f"[{event.comment}]" if event.comment else event.data["event"] for event in events]


def text(events: list[Event]) -> str:
    """The text of all deltas."""
    return "".join(event.data["delta"] for event in events if event.data and event.data["event"] == "message.delta")


async def test_a_late_reader_gets_everything(fast_path: bool) -> None:
    """A reader that comes after the end gets every event in order, with ids, then the closing comment."""

    async def agent(turn: Turn) -> str:
        turn.emit("message.delta", delta="hi")
        turn.emit("tool.started", tool="terminal", preview="ls")
        turn.emit("tool.completed", tool="terminal", duration=0.1, error=False)
        return "bye"

    async with open_gateway(agent, fast_path=fast_path) as gateway:
        run_id = await gateway.start()
        await gateway.ended(run_id)
        for _ in range(2):
            async with gateway.events(f"/v1/runs/{run_id}/events") as events:
                assert events.response.headers["content-type"].startswith("text/event-stream")
                assert events.response.headers["x-frame-options"] == "DENY"
                found = await events.all()
            assert names(found) == [
                "message.delta",
                "tool.started",
                "tool.completed",
                "run.completed",
                "[stream closed]",
            ]
            numbers = [parse_event_id(event.id) for event in found[:-1]]
            assert [number and number[1] for number in numbers] == [1, 2, 3, 4]
            assert all(event.data["run_id"] == run_id and event.data["timestamp"] > 0 for event in found[:-1])
            assert found[3].data["output"] == "bye"


async def test_several_readers_see_the_same(fast_path: bool) -> None:
    """Two live readers and a late one see the same events; reading destroys nothing."""
    go = trio.Event()

    async def agent(turn: Turn) -> str:
        turn.emit("message.delta", delta="one")
        await go.wait()
        turn.emit("tool.started", tool="x", preview="")
        return "done"

    async with open_gateway(agent, fast_path=fast_path) as gateway:
        run_id = await gateway.start()
        seen: list[list[Event]] = []
        ready = 0

        async def read() -> None:
            nonlocal ready
            async with gateway.events(f"/v1/runs/{run_id}/events") as events:
                first = await events.next()
                assert first is not None
                ready += 1
                if ready == 2:
                    go.set()
                seen.append([first, *await events.all()])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            nursery.start_soon(read)
        await read()
        assert names(seen[0]) == ["message.delta", "tool.started", "run.completed", "[stream closed]"]
        assert [names(found) for found in seen] == [names(seen[0])] * 3
        assert [[event.id for event in found] for found in seen] == [[event.id for event in seen[0]]] * 3


async def test_a_reader_resumes_where_it_was(fast_path: bool) -> None:
    """A reader that comes back with Last-Event-ID gets what came after it, nothing twice and nothing lost."""
    steps = [trio.Event() for _ in range(5)]

    async def agent(turn: Turn) -> str:
        for number, step in enumerate(steps):
            await step.wait()
            turn.emit("tool.started", tool=f"t{number}", preview="")
        return "done"

    async with open_gateway(agent, fast_path=fast_path) as gateway:
        run_id = await gateway.start()
        path = f"/v1/runs/{run_id}/events"
        last = ""
        tools: list[str] = []
        for step in steps:
            step.set()
            headers = {"Last-Event-ID": last} if last else {}
            async with gateway.events(path, headers=headers) as events:
                event = await events.next()
                assert event is not None
                last = event.id
                tools.append(event.data["tool"])
        assert tools == [f"t{number}" for number in range(5)]
        async with gateway.events(path, params={"last_event_id": last}) as events:
            assert names(await events.all()) == ["run.completed", "[stream closed]"]


async def test_resuming_behind_the_end_closes_at_once() -> None:
    """With the terminal event's id there is nothing left but the closing comment."""
    async with open_gateway() as gateway:
        run_id = await gateway.start()
        path = f"/v1/runs/{run_id}/events"
        async with gateway.events(path) as events:
            last = (await events.all())[-2].id
        async with gateway.events(path, headers={"Last-Event-ID": last}) as events:
            assert names(await events.all()) == ["[stream closed]"]


@pytest.mark.parametrize("last", ["nonsense", "0000-1", "deadbeef-99999", "-", "x" * 500])
async def test_an_unknown_id_is_a_resync(last: str) -> None:
    """An id that is not known gets a resync event, then everything that there is."""
    async with open_gateway() as gateway:
        run_id = await gateway.start()
        await gateway.ended(run_id)
        async with gateway.events(f"/v1/runs/{run_id}/events", headers={"Last-Event-ID": last}) as events:
            found = await events.all()
        assert names(found)[0] == "resync"
        assert found[0].id == ""
        assert names(found)[-2:] == ["run.completed", "[stream closed]"]
        assert text(found) == "You said: hello"


async def test_a_reader_that_leaves_does_not_stop_the_run() -> None:
    """The run goes on when its only reader has gone."""
    go = trio.Event()

    async def agent(turn: Turn) -> str:
        turn.emit("message.delta", delta="x")
        await go.wait()
        return "finished"

    async with open_gateway(agent) as gateway:
        run_id = await gateway.start()
        async with gateway.events(f"/v1/runs/{run_id}/events") as events:
            await events.next()
        go.set()
        assert (await gateway.ended(run_id))["output"] == "finished"


@pytest.mark.one_node
async def test_readers_that_left_are_gone(fast_path: bool) -> None:
    """A reader of a silent stream that leaves is noticed at once: nothing of its request stays behind."""
    go = trio.Event()

    async def agent(turn: Turn) -> str:
        turn.emit("tool.started", tool="x", preview="")
        await go.wait()
        return "ok"

    async with open_gateway(agent, fast_path=fast_path) as gateway:
        run_id = await gateway.start()
        before = trio.lowlevel.current_statistics().tasks_living
        async with gateway.events(f"/v1/runs/{run_id}/events") as one, gateway.events("/v1/tree/events") as other:
            await one.next()
            await other.next()
            assert len(gateway.runtime.tree._watchers) == 1

        async def gone() -> bool:
            living = trio.lowlevel.current_statistics().tasks_living
            return not gateway.runtime.tree._watchers and living <= before

        await eventually(gone)
        go.set()
        await gateway.ended(run_id)


async def test_settled_is_sent_only_when_asked_for() -> None:
    """The stream ends with the terminal event; until=settled goes on to run.settled, live and afterwards."""
    release = trio.Event()

    async def work(job: Job) -> None:
        job.started()
        await release.wait()

    async def agent(turn: Turn) -> str:
        await turn.core.supervisor.start(JobSpec(run=work, kind="process", title="job"), turn.owner)
        return "ok"

    async with open_gateway(agent) as gateway:
        run_id = await gateway.start()
        path = f"/v1/runs/{run_id}/events"
        async with gateway.events(path) as events:
            assert names(await events.all()) == ["run.completed", "[stream closed]"]
        async with gateway.events(path, params={"until": "settled"}) as events:
            event = await events.next()
            assert event is not None
            assert event.data["event"] == "run.completed"
            release.set()
            assert names(await events.all()) == ["run.settled", "[stream closed]"]
        async with gateway.events(path, params={"until": "settled"}) as events:
            assert names(await events.all()) == ["run.completed", "run.settled", "[stream closed]"]
        async with gateway.events(path) as events:
            assert names(await events.all()) == ["run.completed", "[stream closed]"]
        assert (await gateway.http.get(path, params={"until": "never"})).status_code == 400


async def test_events_older_than_the_memory_come_from_the_store() -> None:
    """A reader of a live run whose log has moved on reads the older part from the store; nothing is missing."""
    go = trio.Event()
    count = 200

    async def agent(turn: Turn) -> str:
        for number in range(count):
            turn.emit("tool.started", tool=f"t{number}", preview="")
            if number % 20 == 0:
                await turn.core.journal.flush()
        await turn.core.journal.flush()
        await go.wait()
        return "ok"

    async with open_gateway(agent) as gateway:
        msgspec.structs.force_setattr(gateway.runtime.core.settings, "event_limit", 10)
        run_id = await gateway.start()
        async with gateway.events(f"/v1/runs/{run_id}/events") as events:
            found = [await events.next() for _ in range(count)]
            go.set()
            rest = await events.all()
        assert [event.data["tool"] for event in found if event] == [f"t{number}" for number in range(count)]
        assert names(rest) == ["run.completed", "[stream closed]"]


async def test_a_gap_that_cannot_be_closed_is_a_resync() -> None:
    """When neither memory nor store have the missing events, the reader is told, and goes on with what there is."""
    go = trio.Event()

    async def agent(turn: Turn) -> str:
        for number in range(50):
            turn.emit("tool.started", tool=f"t{number}", preview="")
        turn.core.journal._waiting.clear()
        await go.wait()
        return "ok"

    async with open_gateway(agent) as gateway:
        msgspec.structs.force_setattr(gateway.runtime.core.settings, "event_limit", 5)
        run_id = await gateway.start()
        go.set()
        async with gateway.events(f"/v1/runs/{run_id}/events") as events:
            found = await events.all()
        assert "resync" in names(found)
        assert names(found)[-2:] == ["run.completed", "[stream closed]"]


async def test_events_survive_a_restart(tmp_path: Path) -> None:
    """After a restart the events of an ended run are readable, and a reader resumes with the ids of before."""
    path = str(tmp_path / "state.db")
    async with open_gateway(path=path) as gateway:
        run_id = await gateway.start()
        async with gateway.events(f"/v1/runs/{run_id}/events") as events:
            before = await events.all()
    async with open_gateway(path=path) as gateway:
        url = f"/v1/runs/{run_id}/events"
        async with gateway.events(url) as events:
            after = await events.all()
        assert [(event.id, event.data["event"]) for event in after[:-1]] == [
            (event.id, event.data["event"]) for event in before[:-1]
        ]
        async with gateway.events(url, headers={"Last-Event-ID": before[0].id}) as events:
            assert [event.id for event in await events.all()] == [event.id for event in before[1:]]
        assert (await gateway.ended(run_id))["status"] == "completed"


async def test_failures_and_text_are_told_as_events() -> None:
    """A failed run ends with run.failed and its error; text deltas are joined but never lost."""

    async def agent(turn: Turn) -> str:
        for number in range(100):
            turn.emit("message.delta", delta=f"{number},")
        raise AgentFailed("not today", code="model_auth")

    async with open_gateway(agent) as gateway:
        run_id = await gateway.start()
        async with gateway.events(f"/v1/runs/{run_id}/events") as events:
            found = await events.all()
        assert text(found) == "".join(f"{number}," for number in range(100))
        assert found[-2].data["event"] == "run.failed"
        assert (found[-2].data["error"], found[-2].data["error_code"]) == ("not today", "model_auth")


async def test_silent_streams_are_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream on which nothing happens carries comments."""
    monkeypatch.setattr("hermes_trio.http.api.run_events.HEARTBEAT_SECONDS", 0.01)
    go = trio.Event()

    async def agent(turn: Turn) -> str:
        await go.wait()
        return "ok"

    async with open_gateway(agent) as gateway:
        run_id = await gateway.start()
        async with gateway.events(f"/v1/runs/{run_id}/events") as events:
            event: Event | None = await events.next()
            assert event is not None
            assert event.comment == "keepalive"
            go.set()
            found = [event for event in await events.all() if event.comment != "keepalive"]
        assert names(found) == ["run.completed", "[stream closed]"]


@pytest.mark.one_node
def test_event_ids() -> None:
    """Only `<hex epoch>-<number>` is an event id."""
    assert parse_event_id("ab12-7") == ("ab12", 7)
    assert parse_event_id(" ab12-7 ") == ("ab12", 7)
    assert [parse_event_id(text) for text in ("", "7", "ab12-", "xy-7", "ab12-7x", "ab12--7")] == [None] * 6
