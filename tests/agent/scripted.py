"""A model that follows a script, in this process: for tests of the loop that need exact timing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import trio

from hermes_trio.agent.model import (
    Finished,
    ModelError,
    ModelEvent,
    ModelRequest,
    ModelStream,
    ReasoningDelta,
    TextDelta,
    ToolCallReady,
)
from hermes_trio.runtime.outcome import Usage
from hermes_trio.runtime.ports import ToolCall

Step = str | ToolCall | ModelEvent | ModelError | float
Answer = Sequence[Step] | Callable[[ModelRequest], Awaitable[Sequence[Step]]]

USAGE = Usage(input_tokens=10, output_tokens=5, api_calls=1)


def tool_call(name: str, id: str = "call_1", **arguments: Any) -> ToolCall:
    """A wish to call a tool."""
    return ToolCall(id=id, name=name, arguments=msgspec.json.encode(arguments).decode())


class ScriptedModel:
    """Gives one answer a request: texts, tool calls, pauses (numbers) and errors. `requests` records what it was asked. Out of answers, it echoes."""

    def __init__(self, *answers: Answer, window: int = 100_000) -> None:
        self.answers: list[Answer] = list(answers)
        self.requests: list[ModelRequest] = []
        self.open = 0
        self.name = "scripted"
        self.context_window = window

    def stream(self, request: ModelRequest) -> ModelStream:
        return self._stream(request)

    @asynccontextmanager
    async def _stream(self, request: ModelRequest) -> AsyncIterator[trio.abc.ReceiveChannel[ModelEvent]]:
        self.requests.append(request)
        self.open += 1
        try:
            yield _Events(self, request)
        finally:
            self.open -= 1

    async def steps(self, request: ModelRequest) -> Sequence[Step]:
        """The next answer."""
        if not self.answers:
            return [f"echo: {request.messages[-1].text}"]
        answer = self.answers.pop(0)
        return await answer(request) if callable(answer) else answer


class _Events(trio.abc.ReceiveChannel[ModelEvent]):
    def __init__(self, model: ScriptedModel, request: ModelRequest) -> None:
        self._model = model
        self._request = request
        self._steps: list[Step] | None = None
        self._calls = 0

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive(self) -> ModelEvent:
        await trio.lowlevel.checkpoint()
        if self._steps is None:
            self._steps = list(await self._model.steps(self._request))
            if not self._steps or not isinstance(self._steps[-1], Finished | ModelError):
                self._steps.append(Finished(usage=USAGE))
        while self._steps:
            step = self._steps.pop(0)
            match step:
                case float() | int():
                    await trio.sleep(step)
                case ModelError():
                    raise step
                case str():
                    return TextDelta(step)
                case ToolCall():
                    return ToolCallReady(step)
                case TextDelta() | ReasoningDelta() | ToolCallReady() | Finished():
                    return step
        raise trio.EndOfChannel


class Routes:
    """One model under every name."""

    def __init__(self, model: ScriptedModel) -> None:
        self.model = model

    def get(self, name: str = "") -> ScriptedModel:
        return self.model

    def __contains__(self, name: object) -> bool:
        return True
