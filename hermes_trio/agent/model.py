"""The port between the agent and whatever writes its answers.

A `Model` opens a stream of events for a request. The stream is an async context manager that yields a receive
channel: entering it costs nothing and cannot fail; the call is made by the first `receive()`, errors come out of
`receive()` as a bare `ModelError`, and leaving the block, for whatever reason, ends the call upstream at once.
Nothing of a call outlives its block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from enum import Enum
from typing import Any, Final, Protocol, runtime_checkable

import msgspec
import trio

from hermes_trio.base.redaction import redact
from hermes_trio.runtime.outcome import Usage
from hermes_trio.runtime.ports import Message, ToolCall, TurnInput

__all__ = [
    "DEFAULT_CONTEXT_WINDOW",
    "NO_OPTIONS",
    "ONE_CALL",
    "Finished",
    "Model",
    "ModelAnswer",
    "ModelError",
    "ModelErrorKind",
    "ModelEvent",
    "ModelOptions",
    "ModelRequest",
    "ModelStream",
    "ReasoningDelta",
    "TextDelta",
    "ToolCallReady",
    "ToolChoice",
    "ToolSpec",
    "TurnOptions",
    "collect",
    "options_of",
]

DEFAULT_CONTEXT_WINDOW: Final = 128_000
"""Tokens that a model is trusted with when nobody said how many it takes."""

ONE_CALL: Final = Usage(api_calls=1)
"""What a call counts when the provider does not say more."""


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as a model sees it. `parameters` is a JSON schema of an object; `strict` is left to the model when None."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = msgspec.field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool | None = None


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Whether and which tools a model must call: `mode` is `auto`, `none`, `required` or `tool`, which forces `name`.

    `parallel` says whether one answer may hold several calls; None leaves it to the model.
    """

    mode: str = "auto"
    name: str = ""
    parallel: bool | None = None


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asks of every model call of its turn. None, or nothing, leaves it to the agent's settings and the model.

    `response_format` has the shape of the chat completions API, whatever the provider.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    reasoning_effort: str = ""
    verbosity: str = ""
    response_format: Mapping[str, Any] | None = None


NO_OPTIONS: Final = ModelOptions()


class TurnOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the client of a turn brought beside its message.

    `tools` run at the client: a turn in which the model calls one ends with those calls, and `results` are what the client's
    next request brings back. A client's tool hides a tool of the server that has the same name. `server_tools` False
    switches the server's tools off. `choice` holds for the first model call of the turn; `none` for all of them.
    """

    model: ModelOptions = NO_OPTIONS
    tools: tuple[ToolSpec, ...] = ()
    choice: ToolChoice | None = None
    server_tools: bool = True
    results: tuple[Message, ...] = ()

    def payload(self) -> Mapping[str, Any]:
        """The options as `TurnInput.payload` carries them."""
        return {_OPTIONS: self}


_OPTIONS: Final = "options"
_NOTHING_ASKED: Final = TurnOptions()


def options_of(input: TurnInput) -> TurnOptions:
    """What the client of a turn asked for; the defaults for a turn that no client of the API started."""
    return input.payload.get(_OPTIONS, _NOTHING_ASKED)


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One call. `messages` holds the system prompt, too, as messages of role `system`.

    `max_tokens` and `temperature` are the agent's settings, left to the model's own defaults when None; `options` are the
    client's and go before them. `metadata` never goes over the wire: it is for models in this process (`directives` and
    `notice` for the demo model).
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    choice: ToolChoice | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    options: ModelOptions = NO_OPTIONS
    metadata: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])


class TextDelta(msgspec.Struct, frozen=True):
    """The next piece of the answer's text."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True):
    """The next piece of what the model shows of its thinking."""

    text: str


class ToolCallReady(msgspec.Struct, frozen=True):
    """A tool call whose arguments are complete."""

    call: ToolCall


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The last event of every successful stream.

    `finish_reason` is one of the words of the OpenAI API whatever the provider: `stop`, `length`, `tool_calls`,
    `content_filter`. In `usage`, `input_tokens` counts the whole prompt, cached or not, and `api_calls` is 1:
    usages of several calls can be added.
    """

    finish_reason: str = "stop"
    usage: Usage = ONE_CALL


ModelEvent = TextDelta | ReasoningDelta | ToolCallReady | Finished


ModelStream = AbstractAsyncContextManager[trio.abc.ReceiveChannel[ModelEvent]]
"""What `Model.stream` returns: enter it, then iterate over the channel."""


@runtime_checkable
class Model(Protocol):
    """Something that answers requests.

    `name` is what users call it, `context_window` how many tokens a request may have.
    """

    @property
    def name(self) -> str: ...

    @property
    def context_window(self) -> int: ...

    def stream(self, request: ModelRequest) -> ModelStream:
        """Open a stream of the answer's events, `Finished` last.

        Cancelling a `receive()` ends the call: the upstream sees its client leave before the cancellation has left
        the block.
        """
        ...


class ModelErrorKind(Enum):
    """What went wrong with a call, as far as the caller's next step is concerned."""

    AUTH = "auth"
    RATE_LIMITED = "rate_limited"
    OVERLOADED = "overloaded"
    TIMEOUT = "timeout"
    BROKEN_STREAM = "broken_stream"
    BAD_REQUEST = "bad_request"
    CONTEXT_OVERFLOW = "context_overflow"
    CONTENT_FILTER = "content_filter"
    UNAVAILABLE = "unavailable"


_RETRYABLE: Final = frozenset(
    {
        ModelErrorKind.RATE_LIMITED,
        ModelErrorKind.OVERLOADED,
        ModelErrorKind.TIMEOUT,
        ModelErrorKind.BROKEN_STREAM,
        ModelErrorKind.UNAVAILABLE,
    }
)


class ModelError(Exception):
    """A model call failed. The message may be shown to a user: what looks like a credential has been taken out of it.

    `retryable` says whether the same call may succeed later; `retry_after` is in seconds, when the provider said
    so; `status` is the HTTP status, or 0 when there was none.
    """

    def __init__(
        self,
        kind: ModelErrorKind,
        message: str,
        *,
        retryable: bool | None = None,
        retry_after: float | None = None,
        status: int = 0,
    ) -> None:
        self.kind: ModelErrorKind = kind
        self.message: str = redact(message)
        self.retryable: bool = kind in _RETRYABLE if retryable is None else retryable
        self.retry_after: float | None = retry_after
        self.status: int = status
        super().__init__(self.message)

    def __repr__(self) -> str:
        facts = [f"{self.kind.value}", repr(self.message)]
        if self.status:
            facts.append(f"status={self.status}")
        if self.retry_after is not None and math.isfinite(self.retry_after):
            facts.append(f"retry_after={self.retry_after:g}")
        return f"ModelError({', '.join(facts)})"


class ModelAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, collected from a stream."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str = "stop"
    usage: Usage = ONE_CALL

    @property
    def message(self) -> Message:
        """The answer as an entry of the transcript."""
        return Message(
            role="assistant",
            content=self.text,
            tool_calls=self.tool_calls,
            finish_reason=self.finish_reason,
            reasoning=self.reasoning,
            token_count=self.usage.output_tokens,
        )


async def collect(stream: trio.abc.ReceiveChannel[ModelEvent]) -> ModelAnswer:
    """Read an entered stream to its end.

    Cancelling it ends the read; the block that entered the stream ends the call.
    """
    text: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    finished: Finished | None = None
    async for event in stream:
        match event:
            case TextDelta(piece):
                text.append(piece)
            case ReasoningDelta(piece):
                reasoning.append(piece)
            case ToolCallReady(call):
                calls.append(call)
            case Finished():
                finished = event
    if finished is None:
        raise ModelError(
            ModelErrorKind.BROKEN_STREAM, "the model's stream ended without saying that the answer is finished"
        )
    return ModelAnswer(
        text="".join(text),
        reasoning="".join(reasoning),
        tool_calls=tuple(calls),
        finish_reason=finished.finish_reason,
        usage=finished.usage,
    )
