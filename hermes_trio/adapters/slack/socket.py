"""Slack's Socket Mode: a stream of envelopes, each of which must be acknowledged.

`open_slack_socket` owns the connection. When Slack announces the end of a connection, the next one is opened before the old one is closed, so that
nothing is lost; after an unexpected loss, Slack repeats what was not acknowledged. Its user reads `envelopes` and acknowledges each once it is
stored. Leaving the block ends everything.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from enum import Enum
from typing import Any, ClassVar, TypeVar, final

import msgspec
import trio

from hermes_trio.adapters.wire.backoff import Backoff, Reconnection
from hermes_trio.adapters.wire.sockets import open_platform_socket
from hermes_trio.base.structs import RedactedStruct
from hermes_trio.messaging.errors import PlatformError, PlatformErrorKind, single_failure
from hermes_trio.net.websocket import SocketClosed, WebSocket

from .client import SlackClient
from .types import BlockActions, EventCallback, SlashCommand

HELLO_TIMEOUT = 20.0
# Slack pings every few seconds; silence for two of our own pings means that the connection is dead.
PING_INTERVAL = 15.0
# A connection that Slack has announced the end of stays open for about ten seconds.
DRAIN_SECONDS = 15.0
BUFFERED_ENVELOPES = 64

T = TypeVar("T")


class SocketStatus(Enum):
    """The state of the connection."""

    CONNECTING = "connecting"
    READY = "ready"
    RETRYING = "retrying"


@final
class Envelope(RedactedStruct, frozen=True):
    """One delivery. Slack repeats an event that is not acknowledged within three seconds, so the same one may arrive again.

    `kind` is events_api, interactive or slash_commands; `payload` is decoded JSON.
    """

    hidden: ClassVar[tuple[str, ...]] = ("payload", "_socket")
    id: str
    kind: str
    payload: dict[str, Any]
    retry_attempt: int
    _socket: WebSocket

    async def acknowledge(self, answer: dict[str, Any] | None = None) -> bool:
        """Acknowledge the delivery, optionally with a response to show. Return False if the connection is closed: Slack will deliver it again.

        Cancelling it makes the connection unusable, and it is replaced.
        """
        message: dict[str, Any] = {"envelope_id": self.id}
        if answer is not None:
            message["payload"] = answer
        try:
            await self._socket.send(msgspec.json.encode(message).decode())
        except SocketClosed:
            return False
        return True

    def event(self) -> EventCallback | None:
        """Return the event of an events_api envelope; None for other kinds and for unreadable payloads."""
        return self._as(EventCallback) if self.kind == "events_api" else None

    def block_actions(self) -> BlockActions | None:
        """Return the pressed element of an interactive envelope."""
        pressed = self.kind == "interactive" and self.payload.get("type") == "block_actions"
        return self._as(BlockActions) if pressed else None

    def command(self) -> SlashCommand | None:
        """Return the command of a slash_commands envelope."""
        return self._as(SlashCommand) if self.kind == "slash_commands" else None

    def _as(self, kind: type[T]) -> T | None:
        try:
            return msgspec.convert(self.payload, kind)
        except msgspec.ValidationError:
            return None


class _Lost(Exception):
    """Raised when this connection is over and must be replaced."""


class _Frame(msgspec.Struct, frozen=True):
    type: str
    envelope_id: str | None = None
    payload: dict[str, Any] = {}
    reason: str | None = None
    retry_attempt: int = 0


@final
class SlackSocket:
    """A running Socket Mode connection, opened by `open_slack_socket`.

    `envelopes` is bounded: a slow reader slows the connection down, and Slack repeats what it could not deliver.
    """

    def __init__(self, client: SlackClient, *, backoff: Backoff, ping_interval: float, drain: float) -> None:
        self.status = SocketStatus.CONNECTING
        self.last_error: str | None = None
        self._send, self.envelopes = trio.open_memory_channel[Envelope](BUFFERED_ENVELOPES)
        self._client = client
        self._reconnection = Reconnection(backoff)
        self._ping_interval = ping_interval
        self._drain = drain
        self._handing_over: set[WebSocket] = set()

    @property
    def reconnects(self) -> int:
        """Return how often the connection was replaced."""
        return self._reconnection.count

    async def run(self) -> None:
        """Keep a connection until cancelled, or until a failure that reconnecting cannot fix."""
        async with self._send, trio.open_nursery() as connections:
            while True:
                delay = await self._connect_once(connections)
                await trio.sleep(delay)

    async def _connect_once(self, connections: trio.Nursery) -> float:
        """Run one connection until it must be replaced. Return the delay before the next."""
        try:
            url = await self._client.open_connection()
            with single_failure():
                # Returns when the connection has been announced to end; it then drains beside its successor.
                await connections.start(self._run_connection, url)
        except _Lost as lost:
            self.last_error, self.status = str(lost), SocketStatus.RETRYING
            return self._reconnection.lost()
        except PlatformError as error:
            self.last_error, self.status = str(error), SocketStatus.RETRYING
            return self._reconnection.failed(error)
        return self._reconnection.lost()

    async def _run_connection(self, url: str, *, task_status: trio.TaskStatus[None]) -> None:
        announced = False
        async with open_platform_socket(url, proxy=self._client.proxy) as socket:
            await self._hello(socket)
            try:
                with single_failure():
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._watch, socket)
                        await self._receive(socket)
                        announced = True
                        task_status.started()
                        with trio.move_on_after(self._drain):
                            while True:
                                await self._receive(socket)
                        nursery.cancel_scope.cancel()
            except SocketClosed as closed:
                if not announced:
                    raise _Lost(str(closed)) from None

    async def _hello(self, socket: WebSocket) -> None:
        try:
            with trio.fail_after(HELLO_TIMEOUT):
                hello = _decode(await socket.receive())
        except trio.TooSlowError:
            message = f"Socket Mode: no hello within {HELLO_TIMEOUT:g} s"
            raise PlatformError(PlatformErrorKind.TRANSIENT, message) from None
        except SocketClosed as closed:
            raise PlatformError(PlatformErrorKind.TRANSIENT, f"Socket Mode: {closed} before its hello") from None
        if hello.type == "disconnect":
            _check_frame(hello)
        if hello.type != "hello":
            raise PlatformError(PlatformErrorKind.TRANSIENT, f"Socket Mode began with {hello.type!r} instead of hello")
        self.status = SocketStatus.READY
        self.last_error = None
        self._reconnection.ready()

    async def _receive(self, socket: WebSocket) -> None:
        """Pass envelopes on until Slack announces the end of this connection."""
        while True:
            frame = _decode(await socket.receive())
            if frame.type == "disconnect":
                _check_frame(frame)
                return
            if frame.envelope_id is not None:
                envelope = Envelope(frame.envelope_id, frame.type, frame.payload, frame.retry_attempt, socket)
                self._handing_over.add(socket)
                try:
                    await self._send.send(envelope)
                finally:
                    self._handing_over.discard(socket)

    async def _watch(self, socket: WebSocket) -> None:
        """Drop the connection after two pings without a response; the receiving task sees the end."""
        try:
            # While a slow consumer blocks the receiving task, no frame is read.
            while socket in self._handing_over or trio.current_time() < socket.received_at + 2 * self._ping_interval:
                await trio.sleep(self._ping_interval)
                await socket.ping()
        except SocketClosed:
            return
        await socket.abort()


def _check_frame(frame: _Frame) -> None:
    if frame.reason == "link_disabled":
        message = "Socket Mode is switched off for this app: switch it on in the app's settings"
        raise PlatformError(PlatformErrorKind.FORBIDDEN, message, permanent=True, code=frame.reason)


def _decode(message: str | bytes) -> _Frame:
    try:
        return msgspec.json.decode(message, type=_Frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PlatformError(PlatformErrorKind.TRANSIENT, f"Socket Mode: a message cannot be read: {error}") from None


@asynccontextmanager
async def open_slack_socket(
    client: SlackClient,
    *,
    backoff: Backoff | None = None,
    ping_interval: float = PING_INTERVAL,
    drain: float = DRAIN_SECONDS,
) -> AsyncGenerator[SlackSocket, None]:
    """Stay connected over Socket Mode while the block runs.

    Exceptions of the block propagate unchanged. A failure of the connection cancels the block and raises `PlatformError`: a permanent one for a bad
    token or a disabled Socket Mode, a transient one for an outage longer than the back-off allows.
    """
    socket = SlackSocket(client, backoff=backoff or Backoff(), ping_interval=ping_interval, drain=drain)
    with single_failure():
        async with socket.envelopes, trio.open_nursery() as nursery:
            nursery.start_soon(socket.run)
            yield socket
            nursery.cancel_scope.cancel()
