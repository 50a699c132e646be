"""A conversation that starts anew inherits nothing: what was allowed in the old one ends with it, what waits is refused, its shell is forgotten."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from hermes_trio import RuntimeSettings, Turn
from hermes_trio.adapters.assembly import AdapterAssembly
from hermes_trio.agent.approvals import Approvals
from hermes_trio.agent.command_policy import CommandPolicy
from hermes_trio.config import Config
from hermes_trio.gateway.gateway import Gateway, open_gateway
from hermes_trio.messaging.core import STARTED_ANEW, ConversationEnd
from hermes_trio.messaging.platforms import Platform
from hermes_trio.messaging.settings import PlatformSettings, ResetSettings
from hermes_trio.runtime.ports import InboxKind
from hermes_trio.runtime.supervisor import Job, JobSpec
from hermes_trio.store import SessionFilter
from hermes_trio.store.records import ApprovalChoice, ApprovalState, InboxState
from hermes_trio.store.sqlite.store import SqliteStore
from hermes_trio.testing.fakes import ScriptedAgent
from hermes_trio.testing.memory_platform import MemoryPlatform
from hermes_trio.testing.rows import grant_category

from .harness import OPEN, World, asks, open_world, scripted, starts_job, works

HOUR = 3600.0
LONG = 120.0


async def take_all_places(chat: MemoryPlatform, agent: ScriptedAgent, nodes: int) -> None:
    """Let other people write until every node runs a turn, where each has one place.

    Which node takes a message is left to chance, and one whose place is taken may take another: it waits there.
    """
    wanted = len(agent.turns) + nodes
    for number in range(int(LONG / 2)):
        await chat.say("somebody else", chat=f"other-{number}")
        await trio.sleep(1)
        if len(agent.turns) == wanted:
            return
    raise AssertionError("a node takes nothing")


@asynccontextmanager
async def open_chat(home: Path) -> AsyncIterator[tuple[MemoryPlatform, Gateway]]:
    """The whole product around a platform in memory, with the demo model, real tools and real time."""
    chat = MemoryPlatform()
    config = Config(home=home / "gateway", tools={"terminal": {"cwd": str(home)}}, approvals={"timeout": 600})
    async with open_gateway(
        config, AdapterAssembly([Platform(chat, OPEN)]), in_memory=True, directives=("memory",)
    ) as host:
        yield chat, host


@pytest.mark.one_node
async def test_new_ends_the_grants_of_the_conversation(tmp_path: Path) -> None:
    """What a person allowed for the session is over with `/new`: the next dangerous command is asked about again."""
    async with open_chat(tmp_path) as (chat, _):
        await chat.say("!run rm -rf x")
        assert "Approval needed" in (await chat.wait_sent(1))[0].text
        await chat.say("session")
        await chat.until(lambda: "approved by the user (session)" in chat.texts()[-1])
        await chat.say("!run rm -rf x")
        await chat.until(lambda: "allowed earlier" in chat.texts()[-1])
        await chat.say("/new")
        await chat.say("!run rm -rf x")
        await chat.until(lambda: "Approval needed" in chat.texts()[-1])
        await chat.say("no")
        await chat.until(lambda: "denied" in chat.texts()[-1])


@pytest.mark.one_node
async def test_new_refuses_what_waits_for_approval_and_says_why(tmp_path: Path) -> None:
    """The row has the reason, the chat is told, and a late answer finds nothing."""
    async with open_chat(tmp_path) as (chat, host):
        await chat.say("!run rm -rf x")
        await chat.wait_sent(1)
        await chat.say("/new")
        (row,) = await host.store.list_approvals(state=None)
        assert (row.state, row.reason) == (ApprovalState.EXPIRED, STARTED_ANEW)
        assert "Nothing waits" in (await chat.say("/approve")).text
        await chat.until(lambda: any(f"Withdrawn: {STARTED_ANEW}." in text for text in chat.texts()))


@pytest.mark.one_node
async def test_new_forgets_the_shell_of_the_old_session(tmp_path: Path) -> None:
    """Directory and variables of the old conversation are dropped, and the new one has none of them."""
    (tmp_path / "below").mkdir()
    async with open_chat(tmp_path) as (chat, host):
        await chat.say("!run cd below && export KEPT=swordfish")
        await chat.wait_sent(1)
        await chat.say("!run pwd; echo [$KEPT]")
        assert "[swordfish]" in (await chat.wait_sent(2))[1].text
        assert len(host.toolbox.shells) == 1
        await chat.say("/new")
        assert len(host.toolbox.shells) == 0
        await chat.say("!run pwd; echo [$KEPT]")
        await chat.until(lambda: "[]" in chat.texts()[-1])
        assert "below" not in chat.texts()[-1]


@pytest.mark.one_node
async def test_new_forgets_the_shell_of_a_command_that_is_running(tmp_path: Path) -> None:
    """What is stopped by `/new` does not keep its session's shell alive, in the foreground or in the background."""
    async with open_chat(tmp_path) as (chat, host):
        await chat.say("!bg cd /usr; sleep 1000")
        await chat.wait_sent(1)
        await chat.say("!run touch begun; sleep 1000")
        with trio.fail_after(10):
            while not (tmp_path / "begun").exists():  # noqa: ASYNC110 - only the operating system knows
                await trio.sleep(0.01)
        assert "nothing of it runs any more" in (await chat.say("/new")).text
        assert (len(host.toolbox.shells), len(host.toolbox.warden.processes)) == (0, 0)


async def test_a_reset_by_policy_ends_them_too(virtual_clock: object) -> None:
    """After the idle time a user gets a new conversation, without the grants of the old one."""
    chat, made, ended = MemoryPlatform(), list[CommandPolicy](), list[str]()

    def ends(approvals: Approvals) -> ConversationEnd:
        made.append(CommandPolicy(approvals, home="/", shown=str))

        async def end(session_key: str, session_id: str, reason: str) -> None:
            ended.append(session_id)
            await made[0].end_scope(session_key, reason)

        return end

    settings = PlatformSettings(allow_all=True, reset=ResetSettings(mode="idle", idle_minutes=60))
    agent = scripted()
    async with open_world(agent, Platform(chat, settings), ends=ends) as world:
        await chat.say("one")
        await chat.wait_sent(1)
        key = agent.turns[0].context.session_key
        await grant_category(world.store, "deletion", scope=key)
        await trio.sleep(0.5 * HOUR)
        await chat.say("two")
        await chat.wait_sent(2)
        assert await world.store.granted(key) == {"deletion"}
        await trio.sleep(2 * HOUR)
        await chat.say("three")
        await chat.wait_sent(3)
        assert await world.store.granted(key) == frozenset()
    assert ended == [agent.turns[1].context.session_id]
    assert agent.turns[2].context.session_id not in ended


async def test_a_question_of_the_new_conversation_is_not_refused_for_the_old_ones_sake(virtual_clock: object) -> None:
    """Stopping the old one's background work takes a while; what was queued goes on meanwhile, and may ask."""
    chat, worlds = MemoryPlatform(), list[World]()

    async def slow_to_stop(job: Job) -> None:
        job.started()
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(20)

    async def starts(turn: Turn) -> str:
        await turn.core.supervisor.start(JobSpec(kind="test", title="slow", run=slow_to_stop), turn.owner)
        await trio.sleep_forever()
        raise AssertionError

    async with open_world(scripted(starts, asks(lambda: worlds[0])), chat) as world, trio.open_nursery() as nursery:
        worlds.append(world)
        await chat.say("one")
        await chat.say("two")
        await trio.sleep(1)
        nursery.start_soon(chat.say, "/new")
        (question,) = await chat.wait_sent(1)
        assert "Approval needed" in question.text
        await trio.sleep(30)
        (waiting,) = await world.store.list_approvals()
        await world.approvals.answer(waiting.scope, ApprovalChoice.ONCE)
        await chat.until(lambda: "allowed" in chat.texts())


async def test_new_is_done_as_a_whole_or_not_at_all(virtual_clock: object) -> None:
    """The task of the command may be cancelled in the middle: no new session keeps the state of the old one."""
    chat, ended = MemoryPlatform(), list[str]()
    impatient = trio.CancelScope()

    def ends(approvals: Approvals) -> ConversationEnd:
        async def end(session_key: str, session_id: str, reason: str) -> None:
            impatient.cancel()
            await trio.sleep(1)
            ended.append(session_id)

        return end

    async with open_world(scripted(), chat, ends=ends) as world:
        await chat.say("one")
        await chat.wait_sent(1)
        (old,) = await world.store.list_sessions(SessionFilter(source="memory"))
        with impatient:
            await chat.say("/new")
        assert ended == [old.id]


async def test_a_message_whose_session_was_chosen_before_new_runs_in_the_new_conversation(
    virtual_clock: object, nodes: int
) -> None:
    """It waits for a free slot while the command is executed: nothing goes on in the conversation of which the person was told that it is over."""
    chat, agent = MemoryPlatform(), scripted(works(1), *[works(LONG)] * nodes)
    settings = RuntimeSettings(watchdog_seconds=0, max_turns=1)
    async with open_world(agent, chat, runtime_settings=settings) as world:
        await chat.say("one")
        await chat.wait_sent(1)
        await take_all_places(chat, agent, nodes)
        await chat.say("two")
        await trio.sleep(1)
        assert (await chat.say("/new")).text == "A new conversation begins."
        await chat.until(lambda: "echo: two" in chat.texts())
        sessions = {one.id: one.end_reason for one in await world.store.list_sessions(SessionFilter(source="memory"))}
    old, new = (turn.context.session_id for turn in agent.turns if turn.input.text in {"one", "two"})
    assert (sessions[old], sessions[new]) == ("session_reset", None)


async def test_new_stops_a_turn_that_began_while_it_was_stored(
    virtual_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply names what was stopped, and nothing of the old conversation runs on after it."""
    chat, agent = MemoryPlatform(), scripted(works(1), works(600))
    make = SqliteStore.new_session

    async def slow(self: SqliteStore, session_key: str, *, source: str, reason: str = "session_reset") -> str:
        await trio.sleep(5)
        return await make(self, session_key, source=source, reason=reason)

    monkeypatch.setattr(SqliteStore, "new_session", slow)
    async with open_world(agent, chat) as world, trio.open_nursery() as nursery:
        await chat.say("one")
        await chat.wait_sent(1)
        nursery.start_soon(chat.say, "/new")
        await trio.sleep(1)
        await chat.say("two")
        with trio.fail_after(10):
            await chat.until(lambda: "nothing of it runs any more" in chat.texts()[-1])
            await world.idle()
    assert [turn.input.text for turn in agent.turns] == ["one", "two"]


async def test_a_notice_that_waits_for_a_slot_during_new_ends_with_the_old_conversation(
    virtual_clock: object, nodes: int
) -> None:
    """It is abandoned with its session, which stays ended."""
    chat, agent = MemoryPlatform(), scripted(starts_job(LONG / 2), *[works(LONG)] * nodes)
    settings = RuntimeSettings(watchdog_seconds=0, max_turns=1)
    async with open_world(agent, chat, runtime_settings=settings) as world:
        await chat.say("one")
        await chat.wait_sent(1)
        await take_all_places(chat, agent, nodes)
        await trio.sleep(LONG / 2)
        assert (await chat.say("/new")).text == "A new conversation begins."
        await world.idle()
        used = [turn.context.session_id for turn in agent.turns]
        assert used.count(used[0]) == 1
        old = await world.store.get_session(used[0])
        ((row, reason),) = await world.store.list_inbox(InboxState.ABANDONED)
    assert old is not None
    assert (old.end_reason, row.kind, reason) == ("session_reset", InboxKind.NOTICE, "session_ended")
