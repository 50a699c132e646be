"""One model call over HTTP: attempts, deadlines, and the stream of events that the agent reads.

`HttpModelStream` is the receive channel of a call and the only owner of its connection. It has no task of its own: the receiving task reads the
socket, so it gets back pressure, cancellation and errors directly. A call is retried only before its first event. Providers differ in their
`HttpModel`: how a request is written and how the events of the answer are read.
"""

from __future__ import annotations

import logging
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from enum import Enum, auto
from types import TracebackType
from typing import ClassVar, Final, Protocol, Required, TypedDict, Unpack, final

import msgspec
import trio

from hermes_trio.agent.model import (
    DEFAULT_CONTEXT_WINDOW,
    ModelError,
    ModelErrorKind,
    ModelEvent,
    ModelRequest,
    ModelStream,
)
from hermes_trio.base.redaction import Secret
from hermes_trio.base.structs import RedactedStruct
from hermes_trio.net.dial import ConnectFailed, Origin, parse_base_url
from hermes_trio.net.http1 import ClientConnection, ConnectionPool, ResponseBroken
from hermes_trio.net.sse import EventReader, EventTooLarge, ServerEvent
from hermes_trio.runtime.tree import trace_headers, waiting

from .failures import response_error
from .network_switch import check_network_allowed

log = logging.getLogger("hermes_trio.model")

OPENAI_URL: Final = "https://api.openai.com/v1"
ANTHROPIC_URL: Final = "https://api.anthropic.com"

ERROR_BODY_LIMIT: Final = 64 * 1024
"""The maximum of bytes that are read of an error response."""

ERROR_BODY_SECONDS: Final = 5.0
"""The time limit for an error response, after its headers."""

MAX_ADAPTATIONS: Final = 4
"""How often one call is rewritten because the server refused an optional part of it."""

TAIL_SECONDS: Final = 0.1
"""How long a finished answer may take to end its HTTP message, so that the connection can be reused."""


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts in seconds. `idle` limits each silence of the provider, including the one before the first byte.

    `total` limits the call with its retries.
    """

    connect: float = 15.0
    idle: float = 180.0
    total: float = 1800.0


class Retries(msgspec.Struct, frozen=True, kw_only=True):
    """How often a call is retried before its first event, and the delay if the provider names none."""

    attempts: int = 3
    first_pause: float = 0.5
    longest_pause: float = 30.0
    """If a provider asks for a longer delay than this, the error is raised instead."""


class AnswerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The maximum size of one answer in bytes, of the arguments of its tool calls, and of their number."""

    answer: int = 64 * 1024 * 1024
    arguments: int = 4 * 1024 * 1024
    calls: int = 128


class ModelEndpoint(RedactedStruct, frozen=True, kw_only=True):
    """The address of a model and how it is called. `name` is the name that users choose it by; the key is left out of every `repr`."""

    hidden: ClassVar[tuple[str, ...]] = ("transport", "headers")
    name: str
    origin: Origin
    path: str
    key: Secret
    transport: ConnectionPool
    headers: tuple[tuple[str, str], ...] = ()
    timeouts: Timeouts = Timeouts()
    retries: Retries = Retries()
    limits: AnswerLimits = AnswerLimits()


class StreamDecoder(Protocol):
    """Reads the events of one answer.

    Every method returns the events that are complete, and raises `ModelError` for an invalid answer.
    """

    @property
    def finished(self) -> bool:
        """Return whether `Finished` has been returned."""
        ...

    def event(self, event: ServerEvent) -> Sequence[ModelEvent]: ...

    def whole(self, body: bytes) -> Sequence[ModelEvent]:
        """Read the answer of a server that does not stream."""
        ...

    def end(self) -> Sequence[ModelEvent]:
        """Finish the response, or report that it was cut off. Raises `ModelError` unless the answer is complete."""
        ...


class _State(Enum):
    CALLING = auto()
    DONE = auto()
    CLOSED = auto()


@final
class HttpModelStream(trio.abc.ReceiveChannel[ModelEvent]):
    """The events of one call.

    One task receives at a time. Leaving its `async with` block closes the connection at once.
    """

    def __init__(self, endpoint: ModelEndpoint, wire: HttpModel, request: ModelRequest) -> None:
        check_network_allowed(endpoint.name, endpoint.origin)
        self._endpoint = endpoint
        self._wire = wire
        self._request = request
        self._state = _State.CALLING
        self._connection: ClientConnection | None = None
        self._decoder: StreamDecoder = wire.decoder()
        self._reader: EventReader | None = None
        self._whole = bytearray()
        self._events: deque[ModelEvent] = deque()
        self._received = 0
        self._attempt = 0
        self._adaptations = 0
        self._emitted = False
        self._failure: ModelError | None = None
        self._body = b""
        self._deadline = 0.0
        self._waiting = waiting(f"model {endpoint.name}")

    async def __aenter__(self) -> HttpModelStream:
        self._waiting.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._waiting.__exit__(kind, error, tb)
        self.close()

    def close(self) -> None:
        """End the call.

        A connection whose answer was read to the end returns to the pool, any other is closed.
        """
        self._state = _State.CLOSED
        self._events.clear()
        self._drop()

    async def aclose(self) -> None:
        """Close it as `close` does, without waiting."""
        self.close()
        await trio.lowlevel.checkpoint()

    async def receive(self) -> ModelEvent:
        """Return the next event. Raises `ModelError` if the call fails. Cancelling it ends the call."""
        if self._state is _State.CLOSED:
            raise trio.ClosedResourceError
        if self._events:
            await trio.lowlevel.checkpoint()
            return self._events.popleft()
        if self._state is _State.CALLING:
            if not self._deadline:
                self._deadline = trio.current_time() + self._endpoint.timeouts.total
            try:
                while not self._events:
                    if self._failure is not None:
                        raise self._failure
                    await self._step()
            except BaseException:
                self.close()
                raise
            if self._decoder.finished:
                self._state = _State.DONE
            return self._events.popleft()
        await self._finish_message()
        raise trio.EndOfChannel

    async def _step(self) -> None:
        """Make progress: connect if necessary, and read once; or handle a failure."""
        try:
            connection = self._connection
            if connection is None:
                connection = await self._open()
            await self._read(connection)
        except ModelError as error:
            self._drop()
            if self._emitted or self._events:
                # Events that arrived before the failure are returned before it is raised.
                self._failure = error
            elif self._adaptations < MAX_ADAPTATIONS and self._wire.adapt_to_refusal(self._body, error):
                self._adaptations += 1
                self._attempt -= 1
            else:
                await self._pause(error)

    async def _open(self) -> ClientConnection:
        endpoint = self._endpoint
        self._attempt += 1
        self._decoder = self._wire.decoder()
        self._whole.clear()
        self._received = 0
        self._body = self._wire.encode(self._request)
        connection = await self._request_once(self._body)
        if connection.status != 200:
            refusal = await self._error_body(connection)
            raise self._scrubbed(response_error(endpoint.name, connection.status, connection.headers, refusal))
        encoding = connection.headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            raise self._error(
                ModelErrorKind.BROKEN_STREAM,
                f"the answer is {encoding}-encoded although plain text was asked for",
                retryable=False,
            )
        streams = not connection.headers.get("content-type", "").lower().startswith("application/json")
        self._reader = EventReader() if streams else None
        return connection

    async def _request_once(self, body: bytes) -> ClientConnection:
        endpoint = self._endpoint
        headers = [
            ("Content-Type", "application/json"),
            ("Accept", "text/event-stream"),
            ("Accept-Encoding", "identity"),
            ("User-Agent", "hermes-trio"),
            *endpoint.headers,
            *trace_headers().items(),
        ]
        fresh = False
        while True:
            with trio.move_on_at(self._until(endpoint.timeouts.connect)) as scope:
                try:
                    self._connection = await endpoint.transport.take(endpoint.origin, fresh=fresh)
                except ConnectFailed as error:
                    raise self._error(ModelErrorKind.UNAVAILABLE, str(error)) from None
            if scope.cancelled_caught or self._connection is None:
                raise self._timeout("connect", endpoint.timeouts.connect)
            connection = self._connection
            with trio.move_on_at(self._until(endpoint.timeouts.idle)) as scope:
                try:
                    await connection.send("POST", endpoint.path, headers, body)
                except ResponseBroken as error:
                    # The server may close an idle connection just as it is reused: connect again, without counting an attempt.
                    if connection.reused and error.untouched:
                        self._drop()
                        fresh = True
                        continue
                    raise self._error(ModelErrorKind.BROKEN_STREAM, str(error)) from None
            if scope.cancelled_caught:
                raise self._timeout("idle", endpoint.timeouts.idle)
            return connection

    async def _error_body(self, connection: ClientConnection) -> bytes:
        body = bytearray()
        with trio.move_on_after(ERROR_BODY_SECONDS):
            try:
                while len(body) < ERROR_BODY_LIMIT:
                    piece = await connection.read()
                    if not piece:
                        break
                    body += piece
            except ResponseBroken:
                pass
        return bytes(body[:ERROR_BODY_LIMIT])

    async def _read(self, connection: ClientConnection) -> None:
        """Read once from the socket, and return the events that this completes."""
        endpoint = self._endpoint
        piece = b""
        broken: ResponseBroken | None = None
        with trio.move_on_at(self._until(endpoint.timeouts.idle)) as scope:
            try:
                piece = await connection.read()
            except ResponseBroken as error:
                broken = error
        if scope.cancelled_caught:
            raise self._timeout("idle", endpoint.timeouts.idle)
        self._received += len(piece)
        if self._received > endpoint.limits.answer:
            raise self._error(
                ModelErrorKind.BROKEN_STREAM,
                f"the answer is longer than {endpoint.limits.answer} bytes",
                retryable=False,
            )
        try:
            self._decode(piece, broken)
        except EventTooLarge as error:
            raise self._error(ModelErrorKind.BROKEN_STREAM, str(error), retryable=False) from None
        except ModelError as error:
            raise self._scrubbed(error) from None
        self._emitted = self._emitted or bool(self._events)

    def _decode(self, piece: bytes, broken: ResponseBroken | None) -> None:
        decoder, reader = self._decoder, self._reader
        if reader is None:
            if piece:
                self._whole += piece
            elif broken is not None:
                raise ModelError(ModelErrorKind.BROKEN_STREAM, f"{self._endpoint.name}: {broken}")
            else:
                self._events.extend(decoder.whole(bytes(self._whole)))
            return
        events = reader.feed(piece) if piece else reader.finish() if broken is None else []
        for event in events:
            self._events.extend(decoder.event(event))
            if decoder.finished:
                return
        if not piece:
            try:
                self._events.extend(decoder.end())
            except ModelError as error:
                if broken is None:
                    raise
                raise ModelError(error.kind, f"{error.message}: {broken}") from None

    async def _finish_message(self) -> None:
        connection = self._connection
        if connection is not None:
            with trio.move_on_after(TAIL_SECONDS):
                try:
                    while await connection.read():
                        pass
                except ResponseBroken:
                    pass
            self._drop()
        else:
            await trio.lowlevel.checkpoint()

    async def _pause(self, error: ModelError) -> None:
        """Wait before the next attempt, or raise the error if there is none."""
        retries = self._endpoint.retries
        if not error.retryable or self._attempt >= retries.attempts:
            raise error
        seconds = error.retry_after
        if seconds is None:
            seconds = min(retries.longest_pause, retries.first_pause * 2 ** (self._attempt - 1)) * random.uniform(
                0.75, 1.25
            )
        if seconds > retries.longest_pause or trio.current_time() + seconds >= self._deadline:
            raise error
        log.warning(
            "model call failed before its first event (%s); attempt %d of %d in %.1f s: %s",
            error.kind.value,
            self._attempt + 1,
            retries.attempts,
            seconds,
            error.message,
        )
        await trio.sleep(seconds)

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._endpoint.transport.give_back(connection)

    def _until(self, seconds: float) -> float:
        return min(self._deadline, trio.current_time() + seconds)

    def _error(self, kind: ModelErrorKind, message: str, *, retryable: bool | None = None) -> ModelError:
        return ModelError(kind, self._endpoint.key.scrub(f"{self._endpoint.name}: {message}"), retryable=retryable)

    def _timeout(self, which: str, seconds: float) -> ModelError:
        timeouts = self._endpoint.timeouts
        if trio.current_time() >= self._deadline:
            return self._error(
                ModelErrorKind.TIMEOUT,
                f"no complete answer within {timeouts.total:g} s (timeouts.total)",
                retryable=False,
            )
        words = "no connection" if which == "connect" else "the provider was silent"
        return self._error(ModelErrorKind.TIMEOUT, f"{words} for {seconds:g} s (timeouts.{which})")

    def _scrubbed(self, error: ModelError) -> ModelError:
        message = self._endpoint.key.scrub(error.message)
        return ModelError(
            error.kind, message, retryable=error.retryable, retry_after=error.retry_after, status=error.status
        )


class HttpModelOptions(TypedDict, total=False):
    """The options of a model over HTTP; see `HttpModel`."""

    transport: Required[ConnectionPool]
    base_url: str
    key: Secret | None
    name: str
    context_window: int | None
    max_tokens: int | None
    headers: Sequence[tuple[str, str]]
    timeouts: Timeouts | None
    retries: Retries | None
    limits: AnswerLimits | None


class HttpModel(ABC):
    """A model behind a provider's protocol, which a subclass implements. It holds only settings."""

    provider: ClassVar[str]
    default_url: ClassVar[str]
    default_window: ClassVar[int] = DEFAULT_CONTEXT_WINDOW

    def __init__(self, model: str, **options: Unpack[HttpModelOptions]) -> None:
        origin, path = parse_base_url(options.get("base_url") or self.default_url)
        key = options.get("key") or Secret("")
        self._endpoint = ModelEndpoint(
            name=options.get("name") or f"{self.provider}/{model}",
            origin=origin,
            path=self._address(path),
            key=key,
            transport=options["transport"],
            headers=(*self._headers(key), *options.get("headers", ())),
            timeouts=options.get("timeouts") or Timeouts(),
            retries=options.get("retries") or Retries(),
            limits=options.get("limits") or AnswerLimits(),
        )
        check_network_allowed(self.name, origin)
        self._model = model
        self._max_tokens = options.get("max_tokens")
        self._context_window = options.get("context_window") or self.default_window

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._model!r}, base_url={str(self._endpoint.origin)!r})"

    @property
    def name(self) -> str:
        """Return the name that users choose this model by."""
        return self._endpoint.name

    @property
    def served(self) -> str:
        """Return the provider's name of the model."""
        return self._model

    @property
    def context_window(self) -> int:
        """Return the maximum of tokens in a request."""
        return self._context_window

    def stream(self, request: ModelRequest) -> ModelStream:
        """Open a stream of the answer's events; see `hermes_trio.agent.model.Model`."""
        return HttpModelStream(self._endpoint, self, request)

    @abstractmethod
    def _address(self, base: str) -> str:
        """Return the path of calls, below the path of the base URL."""

    @abstractmethod
    def _headers(self, key: Secret) -> tuple[tuple[str, str], ...]:
        """Return the headers of every call, including the key."""

    @abstractmethod
    def encode(self, request: ModelRequest) -> bytes:
        """Return the body of a request."""

    @abstractmethod
    def decoder(self) -> StreamDecoder:
        """Return a decoder for one answer."""

    @abstractmethod
    def adapt_to_refusal(self, body: bytes, error: ModelError) -> bool:
        """Adapt to a refusal of `body`; return whether the next `encode` leaves out what the server refused."""
