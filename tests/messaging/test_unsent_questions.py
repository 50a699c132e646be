"""A question that its platform refuses is withdrawn: the turn continues at once, and the agent is told that no person was asked."""

from __future__ import annotations

import pytest
import trio

from hermes_trio import Turn
from hermes_trio.adapters.telegram.adapter import telegram_platform
from hermes_trio.agent.approvals import ApprovalResult, Question
from hermes_trio.messaging.contract import Outgoing, PlatformError, PlatformErrorKind
from hermes_trio.store.records import ApprovalState
from hermes_trio.testing.memory_platform import MemoryPlatform
from hermes_trio.testing.platforms import open_fake_telegram
from tests.adapters.platform_bench import open_bench

from .harness import World, asks, open_world, scripted

DAY = 86_400.0


def refuses_questions(kind: PlatformErrorKind, permanent: bool | None = None) -> MemoryPlatform:
    """A chat that takes everything but messages with buttons."""
    chat = MemoryPlatform()

    def refuses(message: Outgoing) -> PlatformError | None:
        return PlatformError(kind, "no buttons here", permanent=permanent) if message.buttons else None

    chat.refuses = refuses
    return chat


@pytest.mark.parametrize(
    ("kind", "permanent"),
    [
        pytest.param(PlatformErrorKind.FORBIDDEN, None, id="refused for good"),
        pytest.param(PlatformErrorKind.BAD_FORMAT, None, id="refused in every form"),
        pytest.param(PlatformErrorKind.UNKNOWN, False, id="given up after some attempts"),
    ],
)
async def test_a_question_that_is_given_up_is_withdrawn_with_the_reason(
    virtual_clock: object, kind: PlatformErrorKind, permanent: bool | None
) -> None:
    """The agent, the row and the chat are told the same: it could not be sent. The turn does not wait for the time-out."""
    chat, worlds = refuses_questions(kind, permanent), list[World]()
    async with open_world(scripted(asks(lambda: worlds[0])), chat, approval_seconds=DAY) as world:
        worlds.append(world)
        await chat.say("delete it")
        await chat.wait_sent(2)
        (row,) = await world.store.list_approvals(state=None)
    reason = f"the question could not be sent to memory, and no user was asked ({kind.value}: no buttons here)"
    assert (row.state, row.reason) == (ApprovalState.EXPIRED, reason)
    assert f"refused: {reason}" in chat.texts()
    assert f"Withdrawn: {reason}." in chat.texts()


async def test_a_question_is_withdrawn_if_a_part_of_its_command_is_not_shown(virtual_clock: object) -> None:
    """A command of which only a part was shown cannot be approved, although the buttons arrive."""
    chat, worlds = MemoryPlatform(limit=1_000), list[World]()
    faults = iter([None, PlatformError(PlatformErrorKind.FORBIDDEN, "not this part")])

    def refuses(message: Outgoing) -> PlatformError | None:
        return next(faults, None) if "folder" in message.text else None

    chat.refuses = refuses
    long = "rm -rf " + " ".join(f"folder-{number:04}" for number in range(400))
    async with open_world(scripted(asks(lambda: worlds[0], long)), chat, approval_seconds=DAY) as world:
        worlds.append(world)
        await chat.say("delete it")
        await world.idle()
        (row,) = await world.store.list_approvals(state=None)
    assert row.state is ApprovalState.EXPIRED
    assert "not this part" in row.reason


async def test_a_question_that_is_tried_again_still_waits_for_its_answer(virtual_clock: object) -> None:
    """A failure that passes withdraws nothing."""
    chat, worlds = MemoryPlatform(), list[World]()
    chat.send_faults.extend([PlatformError(PlatformErrorKind.TRANSIENT, "a moment"), None])
    async with open_world(scripted(asks(lambda: worlds[0])), chat, approval_seconds=DAY) as world:
        worlds.append(world)
        await chat.say("delete it")
        await chat.wait_sent(1)
        await chat.say("yes")
        await chat.wait_sent(2)
    assert chat.texts()[-1] == "allowed"


async def test_only_the_question_that_was_given_up_is_withdrawn(virtual_clock: object) -> None:
    """Two questions of one turn: the other one was shown, and is answered."""
    chat, worlds, answers = MemoryPlatform(), list[World](), dict[str, ApprovalResult]()
    chat.refuses = lambda message: (
        PlatformError(PlatformErrorKind.FORBIDDEN, "not this one")
        if "first" in message.text and message.buttons
        else None
    )

    async def step(turn: Turn) -> str:
        async def ask(command: str) -> None:
            answers[command] = await worlds[0].approvals.ask(turn, Question(shown=command, description="deletes"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "first")
            nursery.start_soon(ask, "second")
        return "both are known"

    async with open_world(scripted(step), chat, approval_seconds=DAY) as world:
        worlds.append(world)
        await chat.say("delete it")
        await chat.until(lambda: any("second" in text for text in chat.texts()))
        await trio.sleep(1)
        assert list(answers) == ["first"]
        await chat.say("yes")
        await chat.until(lambda: "both are known" in chat.texts())
    assert (answers["first"].allowed, answers["first"].asked, answers["first"].timed_out) == (False, False, False)
    assert (answers["second"].allowed, answers["second"].asked) == (True, True)


async def test_whoever_blocks_the_bot_does_not_keep_its_turn_waiting() -> None:
    """Over the wire: the platform's refusal ends the question long before its time."""
    ended = trio.Event()
    answers: list[ApprovalResult] = []
    worlds: list[World] = []
    async with open_fake_telegram() as fake:

        async def agent(turn: Turn) -> str:
            fake.forbid(42)
            answers.append(await worlds[0].approvals.ask(turn, Question(shown="rm -rf x", description="deletes")))
            ended.set()
            return "done"

        table = {"token": fake.token, "base_url": fake.base_url, "poll_seconds": 1, "allow_all": True}
        member = telegram_platform(table, {})
        assert member is not None
        async with open_bench(member, agent) as world:
            worlds.append(world)
            fake.say("delete it")
            with trio.fail_after(10):
                await ended.wait()
    assert (answers[0].allowed, answers[0].asked, answers[0].timed_out) == (False, False, False)
    assert "the question could not be sent to telegram" in answers[0].reason
    assert "bot was blocked by the user" in answers[0].reason
