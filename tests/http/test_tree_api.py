"""The tree over HTTP: who sees what of it, how its events resume, and stops with receipts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import trio
from trio.testing import MockClock

from hermes_trio import Turn, working
from hermes_trio.http.api.tree import _follow
from hermes_trio.runtime.tree import Tree

from .gateway import Event, Events, eventually, open_gateway


async def following(events: Events) -> Event:
    """The next event; there must be one."""
    event = await events.next()
    assert event is not None
    return event


def _ids(node: dict[str, Any]) -> list[str]:
    return [node["id"], *(id for child in node["children"] for id in _ids(child))]


async def test_a_key_sees_and_stops_only_its_own_part_of_the_tree() -> None:
    """The server filters, in the tree, in its events and in the stop; the receipt comes line by line."""

    async def agent(turn: Turn) -> str:
        with working("tool", "call_1", "slow"):
            await trio.sleep_forever()
        return ""

    async with open_gateway(agent) as gateway:
        mine, theirs = await gateway.key("runs", name="a"), await gateway.key("runs", name="b")
        async with gateway.events("/v1/tree/events", headers=theirs) as others:
            first = await following(others)
            assert first.name == "snapshot"
            started = await gateway.http.post("/v1/runs", json={"input": "mine"}, headers=mine)
            run_id = started.json()["run_id"]
            found: list[dict[str, Any]] = []

            async def shown() -> bool:
                found[:] = (await gateway.http.get(f"/v1/runs/{run_id}/tree", headers=mine)).json()["nodes"]
                return bool(found) and bool(found[0]["children"])

            await eventually(shown)
            turn = found[0]
            seen = (await gateway.http.get("/v1/tree", headers=mine)).json()
            assert {turn["id"], "call_1"} <= set(_ids(seen["tree"]))
            assert turn["id"] not in _ids((await gateway.http.get("/v1/tree", headers=theirs)).json()["tree"])
            only = (await gateway.http.get("/v1/tree", params={"session": turn["owner"]})).json()["tree"]
            assert _ids(only) == ["runtime", "turns", turn["id"], "call_1"]

            path = f"/v1/tree/{turn['key']}/stop"
            refused = await gateway.http.post(path, headers=theirs)
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "node_not_found")
            places = [node for node in [seen["tree"], *seen["tree"]["children"]] if node["id"] != turn["id"]]
            for place in places:
                answer = await gateway.http.post(f"/v1/tree/{place['key']}/stop", headers=mine)
                assert answer.status_code == 404
                assert (await gateway.http.post(f"/v1/tree/{place['key']}/stop")).status_code == 409
            assert (await gateway.http.post("/v1/tree/nothing/stop")).status_code == 404
            assert (await gateway.http.post(path, params={"timeout": "soon"})).status_code == 400

            wanted = {**mine, "Accept": "text/event-stream"}
            async with gateway.events(path, method="POST", headers=wanted) as events:
                told = await events.all()
            assert [event.name for event in told] == ["stopping", "line", "line", "receipt"]
            assert [event.data["node"] for event in told[1:3]] == ["call_1", turn["id"]]
            assert told[-1].data["ok"] is True
            assert told[-1].data["detail"] == "by a"
            # What the other key's stream held of all this: nothing. A change of its own is the first thing that it sees.
            await gateway.http.post("/v1/runs", json={"input": "theirs"}, headers=theirs)
            seen_first = await following(others)
            assert seen_first.data["nodes"][0]["name"] == "theirs"
            await gateway.http.post(f"/v1/tree/{seen_first.data['nodes'][0]['key']}/stop")


async def test_the_events_of_the_tree_resume(fast_path: bool) -> None:
    """A reader that was away gets what it missed, once; an id of another start of the server gets a snapshot."""
    async with open_gateway(fast_path=fast_path) as gateway:
        tree = gateway.runtime.tree
        async with gateway.events("/v1/tree/events") as events:
            first = await following(events)
            node = tree.root.open("x", "stays")
            second = await following(events)
            assert second.data["nodes"][0]["id"] == "stays"
        gone = tree.root.open("x", "gone")
        node.note = "changed while away"
        headers = {"Last-Event-ID": second.id}
        async with gateway.events("/v1/tree/events", headers=headers) as events:
            missed = await following(events)
            assert missed.name == "difference"
            assert {one["id"]: one["note"] for one in missed.data["nodes"]} == {
                "stays": "changed while away",
                "gone": "",
            }
        gone.close("cancelled")
        async with gateway.events("/v1/tree/events", params={"last_event_id": missed.id}) as events:
            missed = await following(events)
            assert missed.data["closed"] == [[gone.key, "cancelled"]]
        for other in ("0000-5", first.id + "0000", "nonsense", f"{tree.epoch}-"):
            async with gateway.events("/v1/tree/events", headers={"Last-Event-ID": other}) as events:
                again = await following(events)
                assert again.name == "snapshot"
        node.close()


class _Quiet:
    """A writer that counts what it is given."""

    def __init__(self) -> None:
        self.put_events = 0
        self.flushed = 0
        self.comments = 0

    async def open(self, first: bytes = b"") -> None:
        await trio.lowlevel.checkpoint()

    def put(self, piece: bytes) -> None:
        self.put_events += 1

    async def flush(self) -> None:
        self.flushed += 1
        await trio.lowlevel.checkpoint()

    async def comment(self, text: str) -> None:
        self.comments += 1
        await trio.lowlevel.checkpoint()


class _Steps(trio.abc.Instrument):
    """Counts how often a task runs."""

    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += task.name == "the viewer"


async def test_an_idle_viewer_costs_nothing_and_a_busy_one_ten_messages_a_second(autojump_clock: MockClock) -> None:
    """An hour without a change is one sign of life every 15 s and nothing else; a thousand changes a second are coalesced to ten messages."""
    tree, writer, steps = Tree("e"), _Quiet(), _Steps()

    async def yes(request: object) -> bool:
        await trio.lowlevel.checkpoint()
        return True

    request: Any = SimpleNamespace(
        core=SimpleNamespace(
            shared=False,
            runtime=SimpleNamespace(tree=tree),
            signin=SimpleNamespace(still_signed_in=yes),
            store=SimpleNamespace(owner="here"),
        ),
        caller=SimpleNamespace(sees=None),
        header=lambda name: None,
        query=lambda name: "",
    )
    node = tree.root.open("turn", "t")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_follow, request, writer, name="the viewer")
        await trio.sleep(1)
        trio.lowlevel.add_instrument(steps)
        await trio.sleep(3600)
        assert (writer.put_events, writer.flushed, writer.comments) == (0, 0, 240)
        assert steps.count <= 5 * 240
        for _ in range(1000):
            node.note = f"{trio.current_time()}"
            await trio.sleep(0.001)
        assert 8 <= writer.put_events <= 11
        trio.lowlevel.remove_instrument(steps)
        nursery.cancel_scope.cancel()
