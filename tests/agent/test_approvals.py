"""Asking a person: by id, oldest or all, time-outs, races, resets, and nobody there (TOOL-145 to TOOL-156, H26, H27)."""

from __future__ import annotations

from contextlib import suppress
from typing import cast

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from hermes_trio import CancelCause, Cause, Runtime, SessionContext, Turn, TurnHooks
from hermes_trio.agent.approvals import MOST_PER_SCOPE, MOST_PER_TENANT, ApprovalResult, Approvals, grantee_of
from hermes_trio.store import StoreError, open_store
from hermes_trio.store.ports import Store
from hermes_trio.store.records import ApprovalChoice, ApprovalState, NewApproval
from hermes_trio.testing.fakes import ScriptedAgent
from hermes_trio.testing.faults import StoreFaults
from hermes_trio.testing.rows import grant_category

from .asking import QUESTION, asking


def store_of(runtime: Runtime) -> Store:
    return cast("Store", runtime.store)


async def test_a_question_is_durable_before_it_is_shown(runtime: Runtime) -> None:
    """Each request has an id and a row; the turn shows in the tree what it waits for; the answer reaches the tool."""
    async with asking(runtime) as person:
        person.ask()
        await wait_all_tasks_blocked()
        (id,) = person.asked
        row = await store_of(runtime).get_approval(id)
        assert row is not None
        assert (row.state, row.command, row.scope) == (ApprovalState.PENDING, "rm -rf build", "chat")
        assert person.turns[0].node.waits_on == f"approval {id}"
        (event,) = person.events
        assert event["pattern_keys"] == ["recursive delete"]
        assert event["choices"] == ["once", "session", "always", "deny"]
        answered = await person.approvals.answer("chat", ApprovalChoice.ONCE, approval_id=id)
        assert [approval.id for approval in answered] == [id]
        await wait_all_tasks_blocked()
        assert person.answers[0].allowed
        assert person.told == ["approval.request", "approval.responded"]


async def test_silence_is_not_consent(runtime: Runtime) -> None:
    """TOOL-150: nobody answers: refused, with an event, a row that says so, and words that silence is no consent."""
    async with asking(runtime) as person:
        person.ask()
        await trio.sleep(61)
        assert not person.answers[0].allowed
        assert person.answers[0].timed_out
        assert "silence is not consent" in person.answers[0].reason
        assert person.told == ["approval.request", "approval.expired"]
        row = await store_of(runtime).get_approval(person.asked[0])
        assert row is not None
        assert row.state is ApprovalState.EXPIRED


async def test_a_late_answer_is_a_conflict(runtime: Runtime) -> None:
    """An answer to what has expired changes nothing and says so by returning nothing."""
    async with asking(runtime) as person:
        person.ask()
        await trio.sleep(61)
        assert await person.approvals.answer("chat", ApprovalChoice.ONCE, approval_id=person.asked[0]) == []


async def test_oldest_first_and_all(runtime: Runtime) -> None:
    """TOOL-151: without an id the oldest question is answered; `everything` answers all that wait, in this conversation only."""
    async with asking(runtime) as person:
        for number in range(4):
            person.ask(session=f"s{number}", key="chat" if number < 3 else "other")
            await wait_all_tasks_blocked()
        first = await person.approvals.answer("chat", ApprovalChoice.DENY, reason="not today")
        assert [approval.id for approval in first] == person.asked[:1]
        rest = await person.approvals.answer("chat", ApprovalChoice.ONCE, everything=True)
        assert [approval.id for approval in rest] == person.asked[1:3]
        assert await person.approvals.answer("chat", ApprovalChoice.ONCE) == []
        await wait_all_tasks_blocked()
        answers = {answer.approval_id: answer for answer in person.answers}
        assert [answers[asked].allowed for asked in person.asked[:3]] == [False, True, True]
        assert answers[person.asked[0]].reason == "not today"
        assert [approval.id for approval in await person.approvals.pending("other")] == person.asked[3:]
        await person.approvals.answer("other", ApprovalChoice.DENY)


async def test_another_conversation_cannot_answer(runtime: Runtime) -> None:
    """An id is not enough: it must belong to the scope that answers."""
    async with asking(runtime) as person:
        person.ask()
        await wait_all_tasks_blocked()
        assert await person.approvals.answer("other", ApprovalChoice.ONCE, approval_id=person.asked[0]) == []
        assert person.answers == []
        await person.approvals.answer("chat", ApprovalChoice.DENY)


async def test_scopes_of_an_answer(runtime: Runtime) -> None:
    """TOOL-145: `session` grants the category to this conversation, `always` to everything on this platform, `once` to nothing."""
    async with asking(runtime) as person:
        for choice, here, elsewhere in (
            (ApprovalChoice.ONCE, set(), set()),
            (ApprovalChoice.SESSION, {"recursive delete"}, set()),
            (ApprovalChoice.ALWAYS, {"recursive delete"}, {"recursive delete"}),
        ):
            person.ask()
            await wait_all_tasks_blocked()
            await person.approvals.answer("chat", choice)
            await wait_all_tasks_blocked()
            turn = person.turns[-1]
            assert await person.approvals.granted(turn) == here
            assert await store_of(runtime).granted("other", grantee=grantee_of(turn)) == elsewhere
            assert await store_of(runtime).granted("other", grantee="platform another") == set()


async def test_always_where_it_was_not_offered_counts_for_the_conversation(runtime: Runtime) -> None:
    """TOOL-147: what may not be allowed for ever is allowed for the conversation."""
    async with asking(runtime) as person:
        person.ask(
            msgspec.structs.replace(
                QUESTION, choices=(ApprovalChoice.ONCE, ApprovalChoice.SESSION, ApprovalChoice.DENY)
            )
        )
        await wait_all_tasks_blocked()
        assert person.events[0]["allow_permanent"] is False
        (answered,) = await person.approvals.answer("chat", ApprovalChoice.ALWAYS)
        assert answered.choice is ApprovalChoice.SESSION
        assert await store_of(runtime).granted("other") == set()


async def test_a_new_conversation_refuses_what_waits(runtime: Runtime) -> None:
    """TOOL-148: the end of a scope refuses what waits there, with its reason, and forgets its grants; others wait on."""
    async with asking(runtime) as person:
        await grant_category(store_of(runtime), "recursive delete", scope="chat")
        person.ask()
        person.ask(key="other")
        await wait_all_tasks_blocked()
        assert await person.approvals.end_scope("chat", "the conversation was reset") == 1
        await wait_all_tasks_blocked()
        (answer,) = person.answers
        assert (answer.allowed, answer.timed_out, answer.reason) == (False, False, "the conversation was reset")
        assert person.told.count("approval.expired") == 1
        assert await store_of(runtime).granted("chat") == set()
        await person.approvals.answer("other", ApprovalChoice.DENY)


async def test_a_question_that_cannot_be_shown_is_refused_at_once(runtime: Runtime) -> None:
    """H26, TOOL-155: if the prompt cannot be sent nobody waits for an answer, and whoever could not send it can say so."""
    async with asking(runtime) as person:
        began = trio.current_time()
        person.ask()
        await wait_all_tasks_blocked()
        assert await person.approvals.withdraw(person.asked[0], "the message could not be sent")
        await wait_all_tasks_blocked()
        assert person.answers[0].reason == "the message could not be sent"
        assert trio.current_time() == began
        assert person.told == ["approval.request", "approval.expired"]
        assert not await person.approvals.withdraw(person.asked[0])


async def test_a_sink_that_fails_is_a_refusal(runtime: Runtime) -> None:
    """H26: a sink that raises while the question is shown refuses it, and the row is closed."""
    approvals = Approvals(store_of(runtime))
    answers: list[ApprovalResult] = []

    def broken(event: object) -> None:
        raise OSError("no connection")

    async def agent(turn: Turn) -> str:
        answers.append(await approvals.ask(turn, QUESTION))
        return "ok"

    await runtime.run_turn(
        "go", SessionContext(session_id="s", session_key="k"), agent=agent, hooks=TurnHooks(asks=broken)
    )
    assert "could not be shown" in answers[0].reason
    assert await approvals.pending("k") == []


async def test_nobody_to_ask(runtime: Runtime) -> None:
    """No human reachable: refused at once, with the reason, and nothing is written down."""
    async with asking(runtime) as person:
        person.ask(asks=False)
        await wait_all_tasks_blocked()
        (answer,) = person.answers
        assert (answer.allowed, answer.asked) == (False, False)
        assert "no user to ask" in answer.reason
        assert await store_of(runtime).list_approvals(state=None) == []


async def test_stopping_the_turn_withdraws_the_question(runtime: Runtime) -> None:
    """TOOL-153: a stop ends the wait at once; the question is expired, and a later answer is a conflict."""
    async with asking(runtime) as person:
        person.ask()
        await wait_all_tasks_blocked()
        receipt = await person.turns[0].stop()
        assert receipt.ok
        assert person.told == ["approval.request", "approval.expired"]
        assert await person.approvals.answer("chat", ApprovalChoice.ONCE, approval_id=person.asked[0]) == []


async def test_a_stop_while_the_question_is_written_leaves_none_open(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn that is stopped before its question was shown leaves no pending row, and nobody hears of it."""
    async with asking(runtime) as person:
        create = store_of(runtime).create_approval

        async def slowly(new: object) -> object:
            await create(new)  # type: ignore[arg-type]
            await trio.sleep_forever()

        monkeypatch.setattr(runtime.store, "create_approval", slowly)
        person.ask()
        await wait_all_tasks_blocked()
        await person.turns[0].stop()
        assert person.events == []
        assert await person.approvals.pending("chat") == []


async def test_an_answer_and_a_time_out_at_the_same_moment_agree(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H26: if the answer is committed while the time-out is on its way, the answer counts, and exactly one event says so."""
    async with asking(runtime) as person:
        person.ask()
        await wait_all_tasks_blocked()
        expire = store_of(runtime).expire_approval
        answered: list[object] = []

        async def after_the_answer(id: str, *, reason: str = "timeout") -> bool:
            answered.append(await store_of(runtime).answer_approval(id, ApprovalChoice.ONCE))
            return await expire(id, reason=reason)

        monkeypatch.setattr(runtime.store, "expire_approval", after_the_answer)
        await trio.sleep(61)
        assert len(answered) == 1
        assert person.answers[0].allowed
        assert person.told == ["approval.request", "approval.responded"]


async def test_many_waiting_questions_stop_nobody_else(runtime: Runtime) -> None:
    """H27: a hundred turns that wait for answers do not keep another turn from running."""
    async with asking(runtime) as person:
        for number in range(100):
            person.ask(session=f"w{number}", key=f"k{number % 10}")
        await wait_all_tasks_blocked()
        assert len(person.asked) == 100
        outcome = await runtime.run_turn("hello")
        assert outcome.text == "echo: hello"
        for number in range(10):
            await person.approvals.answer(f"k{number}", ApprovalChoice.DENY, everything=True)


async def test_a_flood_of_questions_is_refused_beyond_a_bound(runtime: Runtime) -> None:
    """A conversation, and a tenant, has a bounded number of questions before people; the rest is refused unasked, and an answer makes room."""
    async with asking(runtime) as person:
        for number in range(300):
            person.ask(session=f"f{number}")
        await wait_all_tasks_blocked()
        assert len(person.asked) == MOST_PER_SCOPE
        assert len(person.answers) == 300 - MOST_PER_SCOPE
        assert not any(answer.allowed or answer.asked for answer in person.answers)
        assert "questions of this conversation wait" in person.answers[0].reason
        await person.approvals.answer("chat", ApprovalChoice.DENY)
        await wait_all_tasks_blocked()
        person.ask(session="later")
        await wait_all_tasks_blocked()
        assert len(person.asked) == MOST_PER_SCOPE + 1
        await person.approvals.answer("chat", ApprovalChoice.DENY, everything=True)
        await wait_all_tasks_blocked()
        before = len(person.asked)
        for number in range(MOST_PER_TENANT + 50):
            person.ask(session=f"t{number}", key=f"chat {number}", tenant="acme")
        person.ask(session="other", key="other", tenant="globex")
        await wait_all_tasks_blocked()
        assert len(person.asked) - before == MOST_PER_TENANT + 1
        for number in range(MOST_PER_TENANT + 50):
            await person.approvals.answer(f"chat {number}", ApprovalChoice.DENY, everything=True)
        await person.approvals.answer("other", ApprovalChoice.DENY, everything=True)


async def test_after_a_restart_an_answer_is_a_conflict(runtime: Runtime) -> None:
    """A request of an earlier process is expired at boot: listed as such, and an answer is a conflict, never a hang."""
    async with asking(runtime) as person:
        person.ask()
        await wait_all_tasks_blocked()
        later = Approvals(store_of(runtime))
        await store_of(runtime).recover("another epoch")
        assert await later.answer("chat", ApprovalChoice.ONCE, approval_id=person.asked[0]) == []
        row = await store_of(runtime).get_approval(person.asked[0])
        assert row is not None
        assert row.state is ApprovalState.EXPIRED
        await person.turns[0].stop()


@pytest.mark.parametrize("after", [False, True])
async def test_a_question_whose_end_fails_is_not_left_open(virtual_clock: object, after: bool) -> None:
    """The store fails while a question expires, or while its turn is stopped: the row has its end as soon as the store works, and until then nobody
    is told that the answer is no."""
    faults = StoreFaults()
    async with (
        Runtime(agent=ScriptedAgent(), store=faults.around(open_store(None))) as runtime,
        asking(runtime) as person,
    ):
        person.ask()
        await trio.sleep(59)
        faults.fail("expire_approval", times=None, after_commit=after)
        await trio.sleep(30)
        assert person.answers == [] or after
        person.ask(session="another", key="another")
        await wait_all_tasks_blocked()
        person.turns[1].cancel(Cause(CancelCause.STOP))
        await trio.sleep(30)
        faults.heal()
        await trio.sleep(30)
        assert not person.answers[0].allowed
        rows = [await store_of(runtime).get_approval(id) for id in person.asked]
        assert [row and row.state for row in rows] == [ApprovalState.EXPIRED] * 2
        assert len(runtime.core.ends) == 0


@pytest.mark.parametrize("after", [False, True], ids=["not written", "written"])
@pytest.mark.parametrize("id", ["", "1"], ids=["the oldest", "by its id"])
@pytest.mark.parametrize("times", [1, 2, 4])
async def test_a_repeated_answer_is_about_the_same_question(after: bool, id: str, times: int) -> None:
    """An answer that failed, whether it was written or not, is about the question that was the oldest when it was given: its repetition never approves
    another one, and finds what was written. The answer after that is about the next question.
    """
    faults = StoreFaults()
    async with faults.around(open_store(None)) as opened:
        store = cast("Store", opened)
        for name in ("1", "2"):
            await store.create_approval(NewApproval(id=name, scope="chat", command=f"rm {name}", expires_at=9e9))
        approvals = Approvals(store)
        faults.fail("answer_approval", after_commit=after, times=times)
        for _ in range(5):
            with suppress(StoreError):
                assert [row.id for row in await approvals.answer("chat", ApprovalChoice.ONCE, approval_id=id)] == ["1"]
                break
        assert faults.calls["answer_approval"] <= times + 1
        assert [row.id for row in await store.list_approvals()] == ["2"]
        assert [row.id for row in await approvals.answer("chat", ApprovalChoice.DENY)] == ["2"]


async def test_a_repetition_that_says_something_else_answers_nothing(virtual_clock: object) -> None:
    """After an answer whose outcome is unknown, another choice does not apply to the next question; a minute later it is a new answer."""
    faults = StoreFaults()
    async with faults.around(open_store(None)) as opened:
        store = cast("Store", opened)
        for name in ("1", "2"):
            await store.create_approval(NewApproval(id=name, scope="chat", command=f"rm {name}", expires_at=9e9))
        approvals = Approvals(store)
        for again in (False, True):
            faults.fail("answer_approval", after_commit=True, times=2)
            with pytest.raises(StoreError):
                await approvals.answer("chat", ApprovalChoice.DENY)
            if again:
                await trio.sleep(61)
                await store.create_approval(NewApproval(id="3", scope="chat", command="rm 3", expires_at=9e9))
            assert len(await approvals.answer("chat", ApprovalChoice.ONCE)) == again
        assert await store.list_approvals() == []
