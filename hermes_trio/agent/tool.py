"""The port to tools: a description for the model, and a call that returns text.

A tool does not raise for mistakes of a model: it returns a JSON object whose `error` the model can act on. The loop catches what a tool raises and
reports it to the model in the same form; only cancellation propagates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import msgspec

from hermes_trio.runtime.outcome import Usage
from hermes_trio.runtime.tree import current_node
from hermes_trio.runtime.turn import Turn

from .model import ToolSpec


@runtime_checkable
class Tool(Protocol):
    """One tool. `arguments` is the JSON text that the model wrote."""

    @property
    def spec(self) -> ToolSpec: ...

    async def call(self, turn: Turn, arguments: str) -> str:
        """Run the call and return its result as JSON text. Cancelling ends it and everything that it started in the turn."""
        ...

    def preview(self, arguments: str) -> str:
        """Return a line for people that describes this call."""
        ...


class ToolSource(Protocol):
    """Returns the tools of a turn. A child may have fewer than its parent."""

    def for_turn(self, turn: Turn) -> Mapping[str, Tool]: ...


def error_result(message: str, **more: object) -> str:
    """Return a failure in the form that the model receives."""
    return msgspec.json.encode({"error": message, **more}).decode()


def keep_partial_result(turn: Turn, result: str) -> None:
    """Store the partial result of a tool that is being cancelled: the transcript shows it as the result of the call."""
    node = current_node()
    if node is not None:
        if turn.state is None:
            turn.state = {}
        turn.state[f"partial {node.id}"] = result


def partial_result(turn: Turn, call_id: str) -> str | None:
    """Return the partial result of a cancelled call, or None."""
    return None if turn.state is None else turn.state.get(f"partial {call_id}")


_USAGE = "usage of tools"


def add_usage(turn: Turn, usage: Usage) -> None:
    """Add what a tool used of a model (a synchronous child) to the turn's usage."""
    if turn.state is None:
        turn.state = {}
    turn.state[_USAGE] = turn.state.get(_USAGE, Usage()) + usage


def usage_of_tools(turn: Turn) -> Usage:
    """Return what the tools of a turn have used so far."""
    return Usage() if turn.state is None else turn.state.get(_USAGE, Usage())
