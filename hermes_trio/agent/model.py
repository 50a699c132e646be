"""The port between the agent and a language model.

A `Model` opens a stream of events for a request. The stream is an async context manager that yields a receive channel: entering it does no I/O and
cannot fail; the first `receive()` makes the call, and raises `ModelError` if it fails. Leaving the block, also by cancellation, ends the call
upstream at once. Nothing of a call outlives its block.
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

DEFAULT_CONTEXT_WINDOW: Final = 128_000
"""The context window, in tokens, of a model whose own is not known."""

ONE_CALL: Final = Usage(api_calls=1)
"""The usage of a call for which the provider reports none."""


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
    """The client's options for every model call of its turn. A field that is None or empty is left to the agent's settings and the model.

    `response_format` has the shape of the chat completions API for every provider.
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
    """The options and tools that a client sent with the message of a turn.

    `tools` are executed by the client: when the model calls one, the turn ends with those calls, and the client's next request has their `results`.
    A client's tool hides a tool of the server that has the same name. If `server_tools` is False, the server's tools are off. `choice` applies to
    the first model call of the turn, a choice of `none` to all of them.
    """

    model: ModelOptions = NO_OPTIONS
    tools: tuple[ToolSpec, ...] = ()
    choice: ToolChoice | None = None
    server_tools: bool = True
    results: tuple[Message, ...] = ()

    def payload(self) -> Mapping[str, Any]:
        """Return the options as the value of `TurnInput.payload`."""
        return {_OPTIONS: self}


_OPTIONS: Final = "options"
_NOTHING_ASKED: Final = TurnOptions()


def options_of(input: TurnInput) -> TurnOptions:
    """Return the options of a turn's client, or the defaults if no client of the API started the turn."""
    return input.payload.get(_OPTIONS, _NOTHING_ASKED)


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One model call. `messages` includes the system prompt, as messages of role `system`.

    `max_tokens` and `temperature` are the agent's settings; None leaves them to the model. `options` are the client's and take precedence. `metadata`
    is never sent: it is for models in this process (`directives` and `notice` for the demo model).
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
    """The next piece of the reasoning that the model shows."""

    text: str


class ToolCallReady(msgspec.Struct, frozen=True):
    """A tool call whose arguments are complete."""

    call: ToolCall


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The last event of every successful stream.

    `finish_reason` is a value of the OpenAI API for every provider: `stop`, `length`, `tool_calls`,
    `content_filter`. In `usage`, `input_tokens` counts the whole prompt, cached or not, and `api_calls` is 1,
    so that the usages of several calls can be added.
    """

    finish_reason: str = "stop"
    usage: Usage = ONE_CALL


ModelEvent = TextDelta | ReasoningDelta | ToolCallReady | Finished


ModelStream = AbstractAsyncContextManager[trio.abc.ReceiveChannel[ModelEvent]]
"""What `Model.stream` returns: enter it, then iterate over the channel."""


@runtime_checkable
class Model(Protocol):
    """A model that answers requests.

    Users select it by its `name`. `context_window` is the maximum number of tokens in a request.
    """

    @property
    def name(self) -> str: ...

    @property
    def context_window(self) -> int: ...

    def stream(self, request: ModelRequest) -> ModelStream:
        """Open a stream of the answer's events, `Finished` last.

        Cancelling a `receive()` ends the call: the provider sees the disconnect before `Cancelled` leaves the block.
        """
        ...


class ModelErrorKind(Enum):
    """Why a model call failed. Callers choose their next step by it: retry, compact the context, or report the error."""

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
    """Raised when a model call fails. The message is safe to show to a user: text that looks like a credential is redacted.

    `retryable` says whether the same call may succeed later; `retry_after` is in seconds, None if the provider gives none; `status` is the HTTP
    status, or 0 if there was no response.
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
        """Return the answer as a message of the transcript."""
        return Message(
            role="assistant",
            content=self.text,
            tool_calls=self.tool_calls,
            finish_reason=self.finish_reason,
            reasoning=self.reasoning,
            token_count=self.usage.output_tokens,
        )


async def collect(stream: trio.abc.ReceiveChannel[ModelEvent]) -> ModelAnswer:
    """Read an entered stream to its end and return the whole answer. Raises `ModelError`.

    Cancelling it stops the reading; the call ends when the block that entered the stream is left.
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
        raise ModelError(ModelErrorKind.BROKEN_STREAM, "the model's stream ended before its final event")
    return ModelAnswer(
        text="".join(text),
        reasoning="".join(reasoning),
        tool_calls=tuple(calls),
        finish_reason=finished.finish_reason,
        usage=finished.usage,
    )
