"""What is the same on every chat platform of a world, and what its MCP server and its children do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio

from hermes_trio.messaging.senders import Senders
from hermes_trio.testing.simulation import PLATFORMS, Program, Step, WorldSettings, make_program, run_program
from hermes_trio.testing.simulation.people import LISTED

from .count_mutants import COUNT_MUTANTS
from .mutants import MUTANTS, patched

SETTINGS = WorldSettings(cron="", calm_seconds=100)

TALK = Program(
    seed=1,
    seconds=90,
    steps=(
        Step(5.0, "write", 0, 1, "run 5"),
        Step(6.0, "write", 1, 2, "bg 5"),
        Step(9.0, "write", 1, 3, "say group=1"),
        Step(9.0, "write", 2, 4, "say group=1 aside=1"),
        Step(10.0, "write", 2, 5, "dels 5 kept=1"),
    ),
)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_people_get_the_same_answers_on_every_platform(platform: str) -> None:
    """In their own chats and in the group, where the bot answers only those who mention it."""
    result = run_program(attrs.evolve(TALK, platform=platform), SETTINGS)
    assert not result.violations, result.story()
    assert sorted(one.text for one in result.trace.of("chat")) == [
        "500: 'done m1'",
        "501: 'done m2'",
        "501: 'told m2'",
        "502: 'done m5'",
        "700: 'done m3'",
    ]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_what_is_said_while_messages_cannot_be_stored_is_answered_once_on_every_platform(platform: str) -> None:
    """The adapter gives up, is started again, and gets from the platform everything that was not stored."""
    steps = (
        Step(4.9, "store", words="accept_message before seconds=20"),
        Step(5.0, "write", 0, 1, "say"),
        Step(6.0, "write", 0, 2, "say"),
        Step(7.0, "write", 1, 3, "say"),
        Step(16.0, "write", 2, 4, "say"),
    )
    result = run_program(Program(1, 120, steps, platform=platform), SETTINGS)
    assert not result.violations, result.story()
    answers = [one.text for one in result.trace.of("chat")]
    assert sorted(answers) == ["500: 'done m1'", "500: 'done m2'", "501: 'done m3'", "502: 'done m4'"]
    if platform != "slack":  # which repeats each delivery at a time of its own
        assert answers.index("500: 'done m1'") < answers.index("500: 'done m2'")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_command_is_answered_after_a_store_has_stayed_away(platform: str) -> None:
    """Also on Telegram, which got the confirmation of the command before it was executed, and does not deliver it again."""
    steps = (Step(5.0, "store", words="* after seconds=60"), Step(6.0, "command", 2, 1, "/stop all"))
    result = run_program(Program(1, 70, steps, platform=platform), SETTINGS)
    assert not result.violations, result.story()
    assert "502: 'Nothing was running.'" in [one.text.replace("**", "") for one in result.trace.of("chat")]


@pytest.mark.parametrize(
    ("platform", "fault"), [("discord", "gateway invalid"), ("discord", "gateway reconnect"), ("slack", "socket close")]
)
def test_two_faults_of_a_connection_may_come_at_the_same_time(platform: str, fault: str) -> None:
    """What the platform announces on a connection that is being lost does not arrive; the world goes on."""
    steps = (
        Step(5.0, platform, words=f"{fault.split()[0]} drop"),
        Step(5.0, platform, words=fault),
        Step(25.0, "write", 0, 1, "say"),
    )
    result = run_program(Program(2, 30, steps, platform=platform), SETTINGS)
    assert not result.violations, result.story()
    assert [one.text for one in result.trace.of("chat")] == ["500: 'done m1'"]


def test_a_seed_chooses_the_platform_and_the_faults_that_fit_it() -> None:
    """A world has the faults of its own platform only, and those of MCP servers only if it has one."""
    programs = [make_program(seed) for seed in range(120)]
    assert {program.platform for program in programs} == set(PLATFORMS)
    assert {program.mcp for program in programs} == {True, False}
    for program in programs:
        kinds = {step.kind for step in program.steps}
        assert kinds.isdisjoint(set(PLATFORMS) - {program.platform})
        assert program.mcp or "mcp" not in kinds
    assert make_program(3, platform="slack").platform == "slack"


def test_an_mcp_server_that_ends_during_a_call_is_started_again() -> None:
    """The call fails, the next one succeeds, and the server ends with the gateway."""
    steps = (
        Step(5.0, "mcp", 0, 0, "exit"),
        Step(5.0, "write", 0, 1, "ask 5"),
        Step(20.0, "write", 0, 2, "ask 5"),
        Step(30.0, "run", 0, 3, "ask 30 stop=10"),
    )
    result = run_program(Program(1, 60, steps, mcp=True), SETTINGS)
    assert not result.violations, result.story()
    assert [one.text for one in result.trace.of("mcp starts")] == ["node0.1 m1 exit", "node0.1 m2", "node0.1 m3"]
    assert len(result.trace.of("server starts")) == len(result.trace.of("server ends")) == 2


@pytest.mark.parametrize("platform", PLATFORMS)
def test_nothing_of_a_turn_runs_after_its_person_was_told_so(platform: str) -> None:
    """The reply to `/stop` is a promise. One that is not kept is convicted: the children work on."""
    steps = (Step(5.0, "write", 0, 1, "dels 20"), Step(12.0, "command", 0, 2, "/stop"))
    program = Program(1, 60, steps, platform=platform)
    result = run_program(program, SETTINGS)
    assert result.violations == (), result.story()
    assert any("nothing of it runs any more" in one.text for one in result.trace.of("chat"))
    _, patches = MUTANTS["a /stop in a chat that says ok and does nothing"]
    with patched(*patches):
        assert run_program(program, SETTINGS).invariants == {"7 stops"}


@pytest.mark.parametrize("stop", [14.0, 60.0])
def test_the_receipts_of_a_new_conversation_are_not_the_reply_to_a_stop(stop: float) -> None:
    """The reply to `/new` says that the command of the old conversation has ended, and that the thread of its turn has not."""
    steps = (
        Step(5.0, "write", 0, 1, "bg 60"),
        Step(8.0, "write", 0, 2, "ponder 20"),
        Step(10.0, "command", 0, 3, "/new"),
        Step(stop, "command", 0, 4, "/stop"),
    )
    result = run_program(Program(1, 90, steps, platform="slack"), SETTINGS)
    (reply,) = (one for one in result.trace.of("chat") if "nothing of it runs any more" in one.text)
    assert "A new conversation begins." in reply.text
    assert "Not everything has stopped" in reply.text
    assert [one.at > reply.at for one in result.trace.of("thread ends")] == [True]
    assert result.violations == (), result.story()


def test_a_broken_promise_is_convicted_in_a_conversation_that_began_with_a_command() -> None:
    """The reply to an earlier `/new` does not keep the reply to `/stop` from being judged."""
    steps = (
        Step(5.0, "write", 0, 1, "run 60"),
        Step(8.0, "command", 0, 2, "/new"),
        Step(20.0, "write", 0, 3, "dels 20"),
        Step(27.0, "command", 0, 4, "/stop"),
    )
    program = Program(1, 90, steps)
    result = run_program(program, SETTINGS)
    assert result.violations == (), result.story()
    assert len([one for one in result.trace.of("chat") if "nothing of it runs any more" in one.text]) == 2
    _, patches = MUTANTS["a /stop in a chat that says ok and does nothing"]
    with patched(*patches):
        assert run_program(program, SETTINGS).invariants == {"7 stops"}


def test_a_list_that_shows_what_another_tenant_has_allowed_is_convicted() -> None:
    """At the end of every fourth world, each tenant lists what it has."""
    program = Program(LISTED + 4, 60, (Step(5.0, "run", 0, 1, "rm approve=always"),))
    result = run_program(program, SETTINGS)
    assert result.violations == (), result.story()
    _, patches = MUTANTS["grants of all tenants in a list"]
    with patched(*patches):
        assert run_program(program, SETTINGS).invariants == {"3 isolation"}


def _sends_on(real: Any) -> Any:
    """The senders work on for 20 seconds after a drain."""

    @asynccontextmanager
    async def stage(self: Senders, runtime: Any) -> AsyncIterator[Senders]:
        async with real(self, runtime) as senders:
            yield senders
            with trio.CancelScope(shield=True):
                await trio.sleep(20)

    return stage


def test_a_node_that_sends_on_after_its_drain_is_convicted() -> None:
    """What its last turns left has five seconds; a reply that the platform asks to send later is for the next process."""
    steps = (
        Step(4.9, "telegram", 0, 1, "sendMessage limit times=2"),
        Step(5.0, "write", 0, 1, "say"),
        Step(6.0, "restart", 0, 1, "down=0"),
    )
    program = Program(1, 60, steps)
    result = run_program(program, SETTINGS)
    assert result.violations == (), result.story()
    with patched((Senders, "stage", _sends_on)):
        assert run_program(program, SETTINGS).invariants == {"7 stops"}


def test_a_dead_letter_that_is_queued_again_keeps_its_label() -> None:
    """The node ended before it could write that the platform had refused the reply: the one copy has that reason, and a second one has none."""
    steps = (
        Step(0.0, "crash", 0, 90, "before outbox_dead down=5"),
        Step(4.9, "telegram", 0, 270, "sendMessage block"),
        Step(5.0, "write", 0, 2, "say"),
        Step(52.0, "chore", 0, 3, "letters"),
    )
    program = Program(1, 90, steps)
    result = run_program(program, SETTINGS)
    assert result.violations == (), result.story()
    assert "500: '(This may be a duplicate" in result.story()
    *_, patches = COUNT_MUTANTS["a labelled copy is sent twice"]
    with patched(*patches):
        assert "1 watched" in run_program(program, SETTINGS).invariants


def test_on_slack_everything_about_a_request_is_said_in_its_thread() -> None:
    """The question, what the person who presses a button is told, and the answer."""
    program = Program(1, 90, (Step(5.0, "write", 0, 1, "rm group=1"),), platform="slack")
    result = run_program(program, SETTINGS)
    assert result.violations == (), result.story()
    assert any("rm -rf" in one.text and "Approval" not in one.text for one in result.trace.of("chat"))
