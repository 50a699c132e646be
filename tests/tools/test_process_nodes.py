"""The process tool in a turn on another node than the one that has the process: real processes, two runtimes on one store."""

from __future__ import annotations

import time

import pytest

from hermes_trio.agent.approvals import Approvals
from hermes_trio.agent.command_policy import ApprovalSettings
from hermes_trio.runtime.errors import HostedElsewhere
from hermes_trio.runtime.turn import Turn
from hermes_trio.testing.nodes import open_nodes
from hermes_trio.tools.toolbox import CommandReview, open_toolbox

from .bench_of_tools import Bench


async def idle(turn: Turn) -> str:
    """Never called: every turn of a bench brings its agent."""
    raise AssertionError


async def test_a_process_is_seen_and_ended_from_another_node() -> None:
    """List, poll, log and kill reach the node that has it; another session's processes stay hidden; one of a node that left is told of from its row."""
    allowed = CommandReview(settings=ApprovalSettings(mode=False))
    async with (
        open_nodes(clock=time.time) as nodes,
        nodes.make(idle, "b") as second,
        open_toolbox(second, review=allowed) as box_two,
    ):
        two = Bench(second, box_two, Approvals(second.store))  # type: ignore[arg-type]
        async with nodes.make(idle, "a") as first, open_toolbox(first, review=allowed) as box_one:
            one = Bench(first, box_one, Approvals(first.store))  # type: ignore[arg-type]
            started = await one.run("echo hello; sleep 60", background=True)
            id = started["session_id"]
            assert box_two.processes.find(id, "s1") is None
            listed = (await two.use("process", {"action": "list"}))["processes"]
            assert [line["session_id"] for line in listed] == [id]
            assert (await two.use("process", {"action": "poll", "session_id": id}))["status"] == "running"
            waited = await two.use("process", {"action": "wait", "session_id": id, "timeout": 1})
            assert (waited["status"], waited["output"].strip()) == ("timeout", "hello")
            assert "hello" in (await two.use("process", {"action": "log", "session_id": id}))["output"]
            other = await two.use("process", {"action": "poll", "session_id": id}, session="s2")
            assert other["status"] == "not_found"
            killed = await two.use("process", {"action": "kill", "session_id": id})
            assert killed["status"] == "killed"
            assert await one.use("process", {"action": "list"})
            assert len(first.supervisor) == 0
            lost = await one.run("sleep 61", background=True)
        gone = await two.use("process", {"action": "poll", "session_id": lost["session_id"]})
        assert gone["status"] in ("exited", "killed", "lost")
        assert "does not answer" in gone["error"]


async def test_a_shell_binds_its_conversation_to_its_node() -> None:
    """The first command does; the next turn is refused elsewhere, and after the node has left it begins with what was lost."""
    allowed = CommandReview(settings=ApprovalSettings(mode=False))
    async with (
        open_nodes(clock=time.time) as nodes,
        nodes.make(idle, "b") as second,
        open_toolbox(second, review=allowed) as box_two,
    ):
        two = Bench(second, box_two, Approvals(second.store))  # type: ignore[arg-type]
        async with nodes.make(idle, "a") as first, open_toolbox(first, review=allowed) as box_one:
            one = Bench(first, box_one, Approvals(first.store))  # type: ignore[arg-type]
            await one.run("cd / && export SHADE=blue", stateless=True)
            assert (await one.run("echo $PWD $SHADE", stateless=True))["output"] == "/ blue"
            with pytest.raises(HostedElsewhere):
                await two.run("echo $PWD $SHADE", stateless=True)
            await one.run("sleep 62", background=True, stateless=True)
        told: list[str] = []

        async def listen(turn: Turn) -> None:
            told.append(turn.input.text)

        for _ in range(2):
            await two.in_turn(listen, stateless=True)
        assert "Its shell is lost" in told[0]
        assert told[1] == "go"
