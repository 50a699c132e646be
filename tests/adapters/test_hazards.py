"""Places where gateways lose work, tell what is not so, or leave something running; see docs/hazards.md for the ids."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from hermes_trio import Turn
from hermes_trio.messaging.platforms import Platform
from hermes_trio.messaging.settings import PlatformSettings
from hermes_trio.store import Page, SessionFilter
from hermes_trio.testing.memory_platform import MemoryPlatform
from tests.messaging.harness import open_world, scripted, starts_job, works

pytestmark = pytest.mark.usefixtures("virtual_clock")


async def test_whatever_happens_to_a_turn_its_helpers_end_with_it() -> None:
    """Typing, preview and the turn's own tasks are gone after success, failure and a stop alike (SC-10)."""

    async def busy(turn: Turn) -> str:
        for _ in range(3):
            turn.start_soon(trio.sleep, 10_000)
        turn.emit("message.delta", delta="something long enough to be shown while it is written")
        await trio.sleep(5)
        if turn.input.text == "fail":
            raise RuntimeError("boom")
        turn.nursery.cancel_scope.cancel()
        return "fine"

    chat = MemoryPlatform(edits=True, typing=1)
    settings = PlatformSettings(allow_all=True, stream=True)
    async with open_world(busy, Platform(chat, settings)) as world:
        for number, text in enumerate(("fail", "stop me", "go on"), 1):
            await chat.say(text)
            await trio.sleep(2)
            if text == "stop me":
                await chat.say("/stop")
            await world.idle()
            left = {node.kind for node in world.runtime.tree.root.walk()}
            assert left.isdisjoint({"typing", "preview", "task", "turn", "prompt"}), (number, left)


async def test_two_keys_that_lead_to_one_session_never_share_its_transcript() -> None:
    """The turns of a session wait for each other, whoever began them, for as long as it takes (SC-26)."""
    running: list[str] = []
    most: list[int] = []

    async def slow(turn: Turn) -> str:
        running.append(turn.id)
        most.append(sum(1 for one in running if one))
        await trio.sleep(4000)
        running.remove(turn.id)
        return turn.context.session_id

    chat, other = MemoryPlatform("one"), MemoryPlatform("two")
    async with open_world(slow, chat, other) as world:
        first = await chat.say("hello")
        await trio.sleep(1)
        session = await world.store.session_of(first.session_key)
        assert session is not None
        await world.store.resolve_session(_routing(other), source="two")
        await world.store.switch_session("agent:main:two:dm:1", session.id)
        await other.say("me too")
        await chat.wait_sent(1)
        await other.wait_sent(1)
    assert max(most) == 1
    assert chat.texts() == other.texts() == [session.id]


def _routing(platform: MemoryPlatform):
    from hermes_trio import SessionContext

    return SessionContext(platform=platform.platform, session_key=f"agent:main:{platform.platform}:dm:1")


async def test_first_messages_that_come_together_make_one_session() -> None:
    """One lane asks for the session, so that there is nothing to race for and nobody to block (SC-27)."""
    chat, agent = MemoryPlatform(), scripted()
    async with open_world(agent, chat) as world:
        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(chat.say, f"m{number}")
        await world.idle()
        assert len(await world.store.list_sessions(SessionFilter(source="memory"))) == 1
    assert len({turn.context.session_id for turn in agent.turns}) == 1
    assert len(agent.turns) == 20


async def test_what_the_last_turns_write_while_the_server_stops_is_there_afterwards(tmp_path: Path) -> None:
    """The store is closed last, after everything that could still write (SC-28)."""
    path = tmp_path / "state.db"
    chat = MemoryPlatform()
    chats = [f"c{number}" for number in range(20)]
    async with open_world(scripted(*[works(1000)] * 20), chat, path=path):
        for name in chats:
            await chat.say("work", chat=name)
        await trio.sleep(1)
    assert sorted(one.chat for one in chat.sent) == sorted(chats)
    async with open_world(scripted(), MemoryPlatform(), path=path) as world:
        sessions = await world.store.list_sessions(SessionFilter(source="memory"), Page(100))
        assert [session.message_count for session in sessions] == [1] * 20
        assert await world.store.backlog() == {"inbox": 0, "outbox": 0, "approvals": 0, "runs": 0, "jobs": 0}


async def test_reports_of_many_conversations_come_in_order_and_never_cross() -> None:
    """Each session has its own inbox: nobody takes and puts back what is not theirs (SC-29)."""

    async def agent(turn: Turn) -> str:
        if turn.input.notices:
            return " ".join(row.text.split()[2].rstrip("]") for row in turn.input.notices)
        chat = turn.context.chat_id
        for number in range(5):
            await starts_job(10 + number, f"{chat}.{number}")(turn)
        return f"{chat}.started"

    platform = MemoryPlatform()
    async with open_world(agent, platform) as world:
        for number in range(40):
            await platform.say("go", chat=f"c{number}")
        await trio.sleep(60)
        await world.idle()
    for number in range(40):
        said = " ".join(platform.texts(f"c{number}")).split()
        assert said == [f"c{number}.started", *(f"c{number}.{job}" for job in range(5))]
