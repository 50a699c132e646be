"""Deliberate defects of what only some people do: interruptions, steering, `/stop all`, files, jobs at night, and of retention and repeated events."""

from __future__ import annotations

from datetime import UTC
from typing import Any

import msgspec
import trio

from hermes_trio.adapters.cron import schedule
from hermes_trio.adapters.web.adapter import WebAdapter
from hermes_trio.adapters.web.attachments import file_of
from hermes_trio.messaging import inbound
from hermes_trio.messaging.commands import Commands
from hermes_trio.messaging.remote_lanes import RemoteLanes
from hermes_trio.providers.tool_calls import CallAssembler
from hermes_trio.runtime.turn import Turn
from hermes_trio.store import Page, SessionFilter
from hermes_trio.store.sqlite import maintenance
from hermes_trio.testing.simulation import Program, Step
from hermes_trio.testing.simulation.habits import CHANGES

from .mutants import Patch

__all__ = ["HABIT_MUTANTS"]


def _sees_children_everywhere(real: Any) -> Any:
    return lambda turn: True


def _asks_nobody(real: Any) -> Any:
    async def interrupt(self: RemoteLanes, node: str, platform: str, session_key: str) -> None:
        await trio.lowlevel.checkpoint()

    return interrupt


def _has_used_everything(real: Any) -> Any:
    def used_rows(self: Turn) -> tuple[int, ...]:
        return tuple(row for row, _ in self.steered)

    return used_rows


def _has_used_nothing(real: Any) -> Any:
    def used_rows(self: Turn) -> tuple[int, ...]:
        return ()

    return used_rows


def _begins_a_call_again(real: Any) -> Any:
    def add(self: CallAssembler, index: int | None, identity: str, name: str, arguments: str) -> None:
        if identity and index in self._calls:
            index = max(self._calls) + 1
            arguments = arguments or '{"command": "simulated seconds=1 says=m1"}'
        real(self, index, identity, name, arguments)

    return add


def _takes_the_second(real: Any) -> Any:
    def wall_to_utc(wall: Any, zone: Any) -> Any:
        return wall.replace(tzinfo=zone, fold=1).astimezone(UTC)

    return wall_to_utc


def _spares_background_work(real: Any) -> Any:
    async def stop(self: Commands, caller: Any, command: Any) -> str:
        return await real(self, caller, msgspec.structs.replace(command, arguments=""))

    return stop


def _forgets_live_jobs(real: Any) -> Any:
    return tuple(msgspec.structs.replace(rule, condition="true") if rule.table == "runs" else rule for rule in real)


def _serves_all_files(real: Any) -> Any:
    async def file(self: WebAdapter, request: Any) -> Any:
        _, _, number = request.params["place"].partition(".")
        for row in await self.store.list_sessions(SessionFilter(source="web")):
            for one in await self.store.list_messages(row.id, Page(100, 0)):
                if one.id == int(number) and (found := file_of(one.message.content, int(request.params["part"]))):
                    return found
        return await real(self, request)

    return file


def _program(*steps: Step, **more: Any) -> Program:
    return Program(1, 90, steps, **more)


INTERRUPTED = (Step(5.0, "write", 0, 1, "run 60"), Step(12.0, "write", 0, 2, "say"))
STEERED = (Step(5.0, "write", 0, 1, "run 20"), Step(12.0, "write", 0, 2, "say"))
TOO_LATE = (Step(5.0, "write", 0, 1, "think 20"), Step(12.0, "write", 0, 2, "say"))

HABIT_MUTANTS: dict[str, tuple[str, Program, tuple[Patch, ...]]] = {
    "an interrupting message that waits": (
        "7 stops",
        _program(*INTERRUPTED, busy="interrupt"),
        ((inbound, "has_children", _sees_children_everywhere),),
    ),
    "an interrupting message that another node does not hear of": (
        "7 stops",
        _program(*INTERRUPTED, busy="interrupt", nodes=3),
        ((RemoteLanes, "interrupt", _asks_nobody),),
    ),
    "a steering message that came too late and is lost": (
        "2 acknowledged",
        _program(*TOO_LATE, busy="steer"),
        ((Turn, "used_rows", _has_used_everything),),
    ),
    "a steering message that is used twice": (
        "2 acknowledged",
        _program(*STEERED, busy="steer"),
        ((Turn, "used_rows", _has_used_nothing),),
    ),
    "a repeated event of a model that is a second call": (
        "9 limits",
        _program(Step(4.0, "model", words="repeat after=1"), Step(5.0, "write", 0, 1, "run 5")),
        ((CallAssembler, "add", _begins_a_call_again),),
    ),
    "a nightly job that takes the second of two times": (
        "2 acknowledged",
        _program(start=CHANGES["first of two"]),
        ((schedule, "_wall_to_utc", _takes_the_second),),
    ),
    "a nightly job that runs at both of two times": (
        "2 acknowledged",
        _program(start=CHANGES["second of two"]),
        ((schedule, "_wall_to_utc", _takes_the_second),),
    ),
    "a /stop all that spares the background work": (
        "7 stops",
        _program(Step(5.0, "write", 0, 1, "bg 60"), Step(12.0, "command", 0, 3, "/stop all")),
        ((Commands, "_stop", _spares_background_work),),
    ),
    "a retention that forgets live jobs": (
        "2 acknowledged",
        _program(Step(5.0, "run", 0, 1, "bg 60"), upkeep=True),
        ((maintenance, "_RULES", _forgets_live_jobs),),
    ),
    "files of all tenants in the web chat": (
        "3 isolation",
        _program(Step(5.0, "web", 0, 1, "say file=1")),
        ((WebAdapter, "_file", _serves_all_files),),
    ),
}
"""By the defect: the invariant that it must violate, a program that shows it, and the patches."""
