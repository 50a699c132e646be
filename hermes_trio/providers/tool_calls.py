"""Assembles tool calls from the pieces of a stream, within limits."""

from __future__ import annotations

import uuid
from typing import final

import msgspec

from hermes_trio.agent.model import ModelError, ModelErrorKind
from hermes_trio.runtime.ports import ToolCall

from .http_model import AnswerLimits


class _Piecewise(msgspec.Struct):
    id: str = ""
    name: str = ""
    arguments: list[str] = msgspec.field(default_factory=list[str])


@final
class CallAssembler:
    """The tool calls of one answer, of bounded size."""

    def __init__(self, name: str, limits: AnswerLimits) -> None:
        self._name = name
        self._limits = limits
        self._calls: dict[int, _Piecewise] = {}
        self._size = 0

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, index: int | None, identity: str, name: str, arguments: str) -> None:
        """Add a piece of a call. Raises `ModelError` beyond a limit.

        Servers that number nothing begin a new call with a new id or, if they give no ids, with a name.
        """
        if index is None:
            index = self._guess_index(identity, name)
        call = self._calls.get(index)
        if call is None:
            if len(self._calls) >= self._limits.calls:
                raise self._too_much(f"more than {self._limits.calls} tool calls in one answer")
            call = self._calls[index] = _Piecewise()
        if identity and not call.id:
            call.id = identity
        # Some servers repeat the whole name in every piece, others spell it out over several.
        if name and name != call.name:
            call.name += name
        if arguments:
            call.arguments.append(arguments)
        # Each piece counts beyond its length: endless one-letter pieces must not use more memory than they count.
        self._size += len(arguments) + len(name) + 1
        if self._size > self._limits.arguments:
            raise self._too_much(f"the arguments of the tool calls are longer than {self._limits.arguments} bytes")

    def finish(self) -> list[ToolCall]:
        """Return the complete calls, in order."""
        return [
            ToolCall(
                id=call.id or f"call_{uuid.uuid4().hex[:24]}",
                name=call.name,
                arguments="".join(call.arguments).strip() or "{}",
            )
            for _, call in sorted(self._calls.items())
        ]

    def _guess_index(self, identity: str, name: str) -> int:
        last = max(self._calls, default=-1)
        if last < 0:
            return 0
        begins = identity != self._calls[last].id if identity else bool(name)
        if begins:
            for index, call in self._calls.items():
                if identity and call.id == identity:
                    return index
        return last + 1 if begins else last

    def _too_much(self, what: str) -> ModelError:
        return ModelError(ModelErrorKind.BROKEN_STREAM, f"{self._name}: {what}", retryable=False)
