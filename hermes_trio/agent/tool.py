"""What the agent asks of a tool: a description for the model, and a call that answers with text.

A tool never raises for what a model got wrong: it answers with a JSON object whose `error` the model can act on. What it does raise is caught by the loop
and told to the model in the same form; only cancellation goes through.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import msgspec

from hermes_trio.runtime.outcome import Usage
from hermes_trio.runtime.tree import current_node
from hermes_trio.runtime.turn import Turn

from .model import ToolSpec

__all__ = ["Tool", "ToolSource", "add_usage", "error_result", "keep_partial_result", "partial_result", "usage_of_tools"]


@runtime_checkable
class Tool(Protocol):
    """One tool. `arguments` is the JSON text that the model wrote."""

    @property
    def spec(self) -> ToolSpec: ...

    async def call(self, turn: Turn, arguments: str) -> str:
        """Do it and return the result as JSON text. Cancelling ends it, and whatever it started in the turn."""
        ...

    def preview(self, arguments: str) -> str:
        """A line for people that says what this call is about."""
        ...


class ToolSource(Protocol):
    """Which tools a turn has. A child may have fewer than its parent."""

    def for_turn(self, turn: Turn) -> Mapping[str, Tool]: ...


def error_result(message: str, **more: object) -> str:
    """The form in which a failure goes back to the model."""
    return msgspec.json.encode({"error": message, **more}).decode()


def keep_partial_result(turn: Turn, result: str) -> None:
    """A tool that is being cancelled leaves what it has: the transcript will show it as the result of the call."""
    node = current_node()
    if node is not None:
        if turn.state is None:
            turn.state = {}
        turn.state[f"partial {node.id}"] = result


def partial_result(turn: Turn, call_id: str) -> str | None:
    """What a cancelled call left, if anything."""
    return None if turn.state is None else turn.state.get(f"partial {call_id}")


_USAGE = "usage of tools"


def add_usage(turn: Turn, usage: Usage) -> None:
    """A tool that used a model for this turn (a synchronous child) adds what that cost to the turn's account."""
    if turn.state is None:
        turn.state = {}
    turn.state[_USAGE] = turn.state.get(_USAGE, Usage()) + usage


def usage_of_tools(turn: Turn) -> Usage:
    """What the tools of a turn have used so far."""
    return Usage() if turn.state is None else turn.state.get(_USAGE, Usage())
