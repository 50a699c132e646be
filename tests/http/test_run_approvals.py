"""Approvals in runs: listed in the status, answered by id, oldest or all, and timed out with an event."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from hermes_trio.agent.approvals import ApprovalResult, Approvals, Question
from hermes_trio.runtime.turn import Turn
from hermes_trio.testing.rows import grant_category

from .gateway import Gateway, eventually, open_gateway


class Asking:
    """An agent that asks for as many approvals at once as its input says, and answers with what came of them."""

    def __init__(self, seconds: float = 20.0) -> None:
        self.seconds = seconds
        self.broker: Approvals | None = None

    async def pending(self, scope: str) -> list[object]:
        """As the broker."""
        return [] if self.broker is None else list(await self.broker.pending(scope))

    async def answer(self, scope: str, choice: object, **more: object) -> list[object]:
        """As the broker."""
        return [] if self.broker is None else list(await self.broker.answer(scope, choice, **more))  # type: ignore[arg-type]

    async def __call__(self, turn: Turn) -> str:
        if self.broker is None:
            self.broker = Approvals(turn.core.store, seconds=self.seconds)  # type: ignore[arg-type]
        answers: dict[int, ApprovalResult] = {}

        async def ask(number: int) -> None:
            assert self.broker is not None
            answers[number] = await self.broker.ask(turn, Question(shown=f"rm {number}", description="removes"))

        async with trio.open_nursery() as nursery:
            for number in range(int(turn.input.text)):
                nursery.start_soon(ask, number)
                await trio.testing.wait_all_tasks_blocked()
        return ",".join("yes" if answers[number].allowed else "no" for number in sorted(answers))


@asynccontextmanager
async def asking(count: int, seconds: float = 20.0) -> AsyncIterator[tuple[Gateway, str]]:
    """A run that waits for `count` approvals."""
    agent = Asking(seconds)
    async with open_gateway(agent, approvals=agent) as gateway:
        run_id = await gateway.start(str(count))

        async def all_asked() -> bool:
            return len((await gateway.http.get(f"/v1/runs/{run_id}")).json().get("approvals", [])) == count

        await eventually(all_asked)
        yield gateway, run_id


async def test_a_pending_approval_is_in_the_status_and_the_events() -> None:
    """The status says waiting_for_approval and lists the request; the event carries id, command and choices."""
    async with asking(1) as (gateway, run_id):
        run = (await gateway.http.get(f"/v1/runs/{run_id}")).json()
        assert run["status"] == "waiting_for_approval"
        [pending] = run["approvals"]
        assert pending["command"] == "rm 0"
        assert pending["choices"] == ["once", "session", "always", "deny"]
        async with gateway.events(f"/v1/runs/{run_id}/events") as events:
            event = await events.next()
            assert event is not None
            assert event.data["event"] == "approval.request"
            assert event.data["approval_id"] == pending["approval_id"]
            answer = await gateway.http.post(f"/v1/runs/{run_id}/approval", json={"choice": " Allow "})
            assert answer.json() == {
                "object": "hermes.run.approval_response",
                "run_id": run_id,
                "choice": "once",
                "resolved": 1,
                "approval_ids": [pending["approval_id"]],
            }
            rest = await events.all()
        assert [event.data["event"] for event in rest[:-1]] == ["approval.responded", "run.completed"]
        assert (await gateway.ended(run_id))["output"] == "yes"


async def test_by_id_oldest_and_all() -> None:
    """An id answers that request, no id the oldest, all the rest; the string "false" is false."""
    async with asking(4) as (gateway, run_id):
        path = f"/v1/runs/{run_id}/approval"
        pending = (await gateway.http.get(f"/v1/runs/{run_id}")).json()["approvals"]
        third = pending[2]["approval_id"]
        by_id = await gateway.http.post(path, json={"choice": "deny", "approval_id": third})
        assert by_id.json()["approval_ids"] == [third]
        again = await gateway.http.post(path, json={"choice": "once", "approval_id": third})
        assert (again.status_code, again.json()["error"]["code"]) == (409, "approval_not_pending")
        oldest = await gateway.http.post(path, json={"choice": "once", "all": "false"})
        assert oldest.json()["approval_ids"] == [pending[0]["approval_id"]]
        assert (await gateway.http.get(f"/v1/runs/{run_id}")).json()["status"] == "waiting_for_approval"
        rest = await gateway.http.post(path, json={"choice": "deny", "resolve_all": "yes"})
        assert rest.json()["resolved"] == 2
        assert (await gateway.ended(run_id))["output"] == "yes,no,no,no"


async def test_no_answer_in_time_is_a_refusal_with_an_event() -> None:
    """A time-out refuses, emits approval.expired, and the run goes on."""
    agent = Asking(0.01)
    async with open_gateway(agent, approvals=agent) as gateway:
        run_id = await gateway.start("1")
        run = await gateway.ended(run_id)
        assert run["output"] == "no"
        async with gateway.events(f"/v1/runs/{run_id}/events") as events:
            found = await events.all()
        assert [event.data["event"] for event in found[:-1]] == [
            "approval.request",
            "approval.expired",
            "run.completed",
        ]


async def test_a_run_answers_only_for_itself() -> None:
    """Two runs on different sessions cannot answer each other's requests, not even by id."""
    async with asking(1) as (gateway, run_id):
        other = await gateway.start("1")
        approval = (await gateway.http.get(f"/v1/runs/{run_id}")).json()["approvals"][0]["approval_id"]

        async def asked() -> object:
            return (await gateway.http.get(f"/v1/runs/{other}")).json().get("approvals")

        await eventually(asked)
        crossed = await gateway.http.post(
            f"/v1/runs/{other}/approval", json={"choice": "once", "approval_id": approval}
        )
        assert crossed.status_code == 409
        for run in (run_id, other):
            await gateway.http.post(f"/v1/runs/{run}/approval", json={"choice": "deny"})
            assert (await gateway.ended(run))["output"] == "no"


async def test_a_stop_releases_the_waiter() -> None:
    """Stopping a run that waits for approval ends it, and nothing is pending any more."""
    async with asking(1) as (gateway, run_id):
        receipt = (await gateway.http.post(f"/v1/runs/{run_id}/stop", params={"wait": "true"})).json()["receipt"]
        assert receipt["ok"] is True
        run = await gateway.ended(run_id)
        assert run["status"] == "cancelled"
        assert await gateway.core.store.list_approvals() == []


@pytest.mark.parametrize("body", [{}, {"choice": None}, {"choice": 5}, {"choice": "maybe"}])
async def test_wrong_choices(body: object) -> None:
    """A choice that is none is 400 invalid_approval_choice, and answers nothing."""
    async with asking(1) as (gateway, run_id):
        answer = await gateway.http.post(f"/v1/runs/{run_id}/approval", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_approval_choice")
        assert len((await gateway.http.get(f"/v1/runs/{run_id}")).json()["approvals"]) == 1
        await gateway.http.post(f"/v1/runs/{run_id}/approval", json={"choice": "deny"})
        await gateway.ended(run_id)


async def test_everything_that_waits_for_a_person_is_one_list_and_answered_by_id() -> None:
    """The list has the exact command and whose it is; one answer counts, the second is a conflict; another tenant sees nothing."""
    async with asking(2) as (gateway, run_id):
        theirs = await gateway.key("runs", name="b")
        found = (await gateway.http.get("/v1/approvals")).json()["data"]
        assert [(one["command"], one["run_id"], one["state"]) for one in found] == [
            ("rm 0", run_id, "pending"),
            ("rm 1", run_id, "pending"),
        ]
        assert (await gateway.http.get("/v1/approvals", headers=theirs)).json()["data"] == []
        path = f"/v1/approvals/{found[1]['approval_id']}"
        assert (await gateway.http.post(path, json={"choice": "once"}, headers=theirs)).status_code == 404
        assert (await gateway.http.post(path, json={"choice": "perhaps"})).status_code == 400
        answered = (await gateway.http.post(path, json={"choice": "once"})).json()
        assert (answered["state"], answered["choice"]) == ("approved", "once")
        again = await gateway.http.post(path, json={"choice": "deny"})
        assert (again.status_code, again.json()["error"]["code"]) == (409, "approval_not_pending")
        await gateway.http.post(f"/v1/approvals/{found[0]['approval_id']}", json={"choice": "deny"})
        assert (await gateway.ended(run_id))["output"] == "no,yes"
        past = (await gateway.http.get("/v1/approvals", params={"state": "answered"})).json()["data"]
        assert [one["state"] for one in past] == ["approved", "denied"]
        assert (await gateway.http.get("/v1/approvals", params={"state": "x"})).status_code == 400


async def test_what_was_allowed_for_good_is_listed_and_revoked_by_its_owner() -> None:
    """A tenant sees and revokes what it allowed with `always`; the operator sees everybody's; after that the category is asked about again."""
    async with open_gateway() as gateway:
        store, list_of = gateway.core.store, gateway.http.get
        for scope in ("tenant a", "tenant b", "platform telegram", "run_1"):
            await grant_category(store, "recursive delete", scope=scope)
        mine = await gateway.key("runs", tenant="a")
        (found,) = (await list_of("/v1/grants", headers=mine)).json()["data"]
        assert (found["scope"], found["category"]) == ("tenant a", "recursive delete")
        every = {one["scope"]: one["id"] for one in (await list_of("/v1/grants")).json()["data"]}
        assert set(every) == {"tenant a", "tenant b", "platform telegram", "run_1"}
        for id in (every["tenant b"], every["platform telegram"], "grant_x"):
            refused = await gateway.http.delete(f"/v1/grants/{id}", headers=mine)
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "grant_not_found")
        assert (await gateway.http.delete(f"/v1/grants/{found['id']}", headers=mine)).json()["deleted"] is True
        assert await store.granted("run_9", grantee="tenant a") == frozenset()
        assert (await gateway.http.delete(f"/v1/grants/{found['id']}", headers=mine)).status_code == 404
        assert (await gateway.http.delete(f"/v1/grants/{every['platform telegram']}")).status_code == 200
        assert [one.scope for one in await store.list_grants()] == ["run_1", "tenant b"]


async def test_replies_that_were_given_up_are_listed_and_queued_again() -> None:
    """For admins: what waits, what is dead and why; a dead one can be tried once more."""
    from hermes_trio.runtime.ports import NewReply

    async with open_gateway() as gateway:
        store = gateway.core.store
        [number] = await store.add_outbox([NewReply(platform="telegram", target={"chat_id": "7"}, text="hello")])
        (row,) = (await gateway.http.get("/admin/outbox")).json()["data"]
        assert (row["id"], row["platform"], row["target"], row["text"]) == (
            number,
            "telegram",
            {"chat_id": "7"},
            "hello",
        )
        path = f"/admin/outbox/{number}/retry"
        assert (await gateway.http.post(path)).status_code == 404
        (claimed,) = await store.claim_outbox("telegram")
        await store.outbox_dead(claimed, error="the chat is gone")
        (dead,) = (await gateway.http.get("/admin/outbox", params={"state": "dead"})).json()["data"]
        assert dead["error"] == "the chat is gone"
        assert (await gateway.http.post(path)).json()["state"] == "pending"
        assert len((await gateway.http.get("/admin/outbox")).json()["data"]) == 1
        assert (await gateway.http.get("/admin/outbox", params={"state": "lost"})).status_code == 400
        assert (await gateway.http.post("/admin/outbox/x/retry")).status_code == 404


async def test_dead_letters_of_the_inbox_are_listed_and_let_in_again() -> None:
    """For admins: what could not be handled and why; letting it wait again signals its conversation."""
    from hermes_trio.runtime.context import SessionContext
    from hermes_trio.runtime.ports import NewMessage

    async with open_gateway() as gateway:
        store = gateway.core.store
        message = NewMessage(inbox="old", session_key="k", routing=SessionContext(session_key="k"), text="poison")
        number = await store.accept_message(message)
        assert number is not None
        claimed = await store.take_inbox("old", "k")
        assert (await gateway.http.get("/admin/inbox")).json()["data"] == []
        await store.inbox_dead(claimed, reason="the interface refused it three times")
        (row,) = (await gateway.http.get("/admin/inbox")).json()["data"]
        assert (row["id"], row["kind"], row["text"]) == (number, "message", "poison")
        assert "three times" in row["reason"]
        assert (await gateway.http.post(f"/admin/inbox/{number}/retry")).json()["state"] == "pending"
        assert (await gateway.http.post(f"/admin/inbox/{number}/retry")).status_code == 404
        assert len((await gateway.http.get("/admin/inbox", params={"state": "pending"})).json()["data"]) == 1
        assert (await gateway.http.get("/admin/inbox", params={"state": "lost"})).status_code == 400
        assert (await gateway.http.get("/admin/inbox", headers=await gateway.key("runs"))).status_code == 403
