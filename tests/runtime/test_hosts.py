"""Sessions that are bound to a node, as lanes and sub-agents see it. Two nodes on one store, on virtual time."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
import trio
import trio.testing

from hermes_trio import Interface, SessionContext, Turn, TurnSpec
from hermes_trio.runtime.errors import HostedElsewhere
from hermes_trio.runtime.ports import NewMessage, TurnInput
from hermes_trio.runtime.turn import DeliveringTurn
from hermes_trio.testing.fakes import fake_job
from hermes_trio.testing.faults import StoreFaults
from hermes_trio.testing.nodes import open_nodes

ONCE = SessionContext(platform="once", session_key="once:1", chat_id="1")
CHAT = SessionContext(platform="chat", session_key="chat:1", chat_id="1")


class Chat(Interface):
    """A conversation."""

    platform = "chat"


class Told:
    """What agents were told, and on which nodes."""

    def __init__(self) -> None:
        self.turns: list[tuple[str, str]] = []
        self.prefaces: list[str] = []

    async def __call__(self, turn: Turn) -> str:
        """The agent: `bind` does what a command does before it runs, `child` lets a child do it."""
        self.turns.append((turn.input.text, turn.core.store.owner))
        self.prefaces.append(turn.input.preface)
        if turn.input.text == "bind":
            await turn.core.hosts.bind(turn)
        if turn.input.text == "child":
            await turn.run_child("bind")
        return "ok"


async def test_messages_of_a_bound_conversation_are_handled_on_its_node(virtual_clock: object) -> None:
    """Whichever node they come in on, in order; when that node has left, the other one takes what waits and tells what was lost, once."""
    told = Told()
    async with open_nodes() as nodes, nodes.make(told, "two") as two, AsyncExitStack() as late:
        async with nodes.make(told, "one") as one, one.delivering(Chat()) as first:
            await first.accept(_message("bind"))
            await trio.testing.wait_all_tasks_blocked()
            second = await late.enter_async_context(two.delivering(Chat()))
            for number in range(4):
                await (second if number % 2 else first).accept(_message(f"m{number}"))
                await trio.testing.wait_all_tasks_blocked()
            assert told.turns == [(text, one.store.owner) for text in ("bind", "m0", "m1", "m2", "m3")]
        for text in ("after", "later"):
            await second.accept(_message(text))
            await trio.testing.wait_all_tasks_blocked()
        assert [owner for _, owner in told.turns[5:]] == [two.store.owner] * 2
        assert told.turns[5][0].startswith("[IMPORTANT: The host")
        assert told.turns[5][0].endswith("]\n\nafter")
        assert told.turns[6][0] == "later"
        assert told.prefaces == [""] * 5 + [told.turns[5][0].removesuffix("\n\nafter"), ""]


def _message(text: str) -> NewMessage:
    return NewMessage(inbox="chat", session_key="chat:1", text=text, routing=CHAT)


async def test_a_childs_command_binds_the_conversation_around_it(virtual_clock: object) -> None:
    """A child works in its parent's folder, so that the parent's next turn runs there, too."""
    told = Told()
    async with open_nodes() as nodes, nodes.open(told, 2) as (one, two):
        context = SessionContext(session_id="s", session_key="s")
        await one.stateless.run_turn(TurnSpec(input=TurnInput(text="child"), context=context))
        with pytest.raises(HostedElsewhere) as refused:
            await two.stateless.run_turn(TurnSpec(input=TurnInput(text="next"), context=context))
        assert refused.value.node == one.store.owner
        with pytest.raises(HostedElsewhere):
            await two.stateless.start_run(TurnSpec(input=TurnInput(text="next"), context=context))
        assert [text for text, _ in told.turns] == ["child", "bind"]
        once = SessionContext(session_id="once", session_key="once")
        await one.stateless.run_turn(TurnSpec(input=TurnInput(text="bind"), context=once, one_shot="done"))
        assert await two.store.session_host("once") is None


async def test_a_turn_that_fails_leaves_the_loss_to_be_told_again(virtual_clock: object) -> None:
    """What was lost is told until a turn has completed. A binding that the store refuses is made by the next command."""
    told: list[str] = []

    async def agent(turn: Turn) -> str:
        told.append(turn.input.text)
        if turn.input.text == "bind":
            await turn.core.hosts.bind(turn)
        if turn.input.text.endswith("fail"):
            raise RuntimeError("no")
        return "ok"

    faults = StoreFaults(seed=1)
    context = SessionContext(session_id="s", session_key="s")

    def spec(text: str) -> TurnSpec:
        return TurnSpec(input=TurnInput(text=text), context=context)

    async with open_nodes() as nodes, nodes.make(agent, "two") as two:
        async with nodes.make(agent, "one", faults=faults) as one:
            faults.fail("claim_host")
            assert (await one.stateless.run_turn(spec("bind"))).ok
            assert await two.store.session_host("s") is None
            assert (await one.stateless.run_turn(spec("bind"))).ok
            assert await two.store.session_host("s") is not None
        for text in ("fail", "work", "more"):
            await two.stateless.run_turn(spec(text))
        assert [text.startswith("[IMPORTANT") for text in told[2:]] == [True, True, False]


class Once(Interface):
    """Sessions that end with their work."""

    platform = "once"
    one_shot = "over"


async def test_a_lane_does_not_linger_for_a_notice_that_another_node_has_told(virtual_clock: object) -> None:
    """It waits for what its one-shot session was promised; when the turn of another node has told it, both lanes leave, and the session has ended."""
    told: list[str] = []

    async def agent(turn: Turn) -> str:
        told.append(turn.core.store.owner)
        if len(told) == 1:
            assert isinstance(turn, DeliveringTurn)
            await turn.watch_job(fake_job(10, "done"))
        else:
            await trio.sleep(5)
        return "ok"

    faults = StoreFaults(seed=1)
    async with (
        open_nodes() as nodes,
        nodes.make(agent, "two") as two,
        nodes.make(agent, "one", faults=faults) as one,
        one.delivering(Once()) as first,
    ):
        await first.accept(NewMessage(inbox="once", session_key="once:1", text="go", routing=ONCE))
        await trio.testing.wait_all_tasks_blocked()
        async with two.delivering(Once()):
            faults.fail("take_inbox", times=1)
            await trio.sleep(16)
            assert told == [one.store.owner, two.store.owner]
            assert (one.lanes, two.lanes) == (0, 0)
    assert len(told) == 2
