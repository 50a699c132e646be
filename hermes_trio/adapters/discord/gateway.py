"""Discord's Gateway v10: a stream of events that survives lost connections.

`open_discord_gateway` owns the connection and its heartbeat, resumes a session when the connection is lost, and begins a new one when necessary. Its
user reads `events`. A fatal close (a bad token, forbidden intents) raises a permanent `PlatformError`; an outage longer than the back-off allows
raises a transient one. Leaving the block ends everything.
"""

from __future__ import annotations

import math
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from enum import Enum, IntFlag
from typing import Any, TypeVar, final

import attrs
import msgspec
import trio

from hermes_trio.adapters.wire.backoff import Backoff, Reconnection
from hermes_trio.adapters.wire.sockets import open_platform_socket
from hermes_trio.messaging.errors import PlatformError, PlatformErrorKind, single_failure
from hermes_trio.net.websocket import SocketClosed, WebSocket

from .client import DiscordClient
from .types import Channel, Interaction, Message

__all__ = ["DEFAULT_INTENTS", "DiscordGateway", "Dispatch", "GatewayStatus", "Intents", "open_discord_gateway"]

DISPATCH, HEARTBEAT, IDENTIFY, RESUME, RECONNECT, INVALID_SESSION, HELLO, HEARTBEAT_ACK = 0, 1, 2, 6, 7, 9, 10, 11

# Close codes after which no new connection can help, and what to do about each.
FATAL_CLOSES = {
    4004: (PlatformErrorKind.UNAUTHORIZED, "the bot token is not valid"),
    4010: (PlatformErrorKind.UNKNOWN, "the shard is not valid"),
    4011: (PlatformErrorKind.UNKNOWN, "the bot is in too many guilds for one connection: sharding is required"),
    4012: (PlatformErrorKind.UNKNOWN, "this Gateway version is no longer served"),
    4013: (PlatformErrorKind.BAD_FORMAT, "the intents are not valid"),
    4014: (PlatformErrorKind.FORBIDDEN, "an intent is not enabled for this bot: enable it in the developer portal"),
}
# Close codes after which the session is gone: a wrong sequence number, and a session that timed out.
NEW_SESSION_CLOSES = frozenset({4007, 4009})
# Any code but 1000 and 1001, which would end the session.
RESUMABLE_GOODBYE = 4900
# The Gateway allows one IDENTIFY every five seconds.
IDENTIFY_INTERVAL = 5.0
HELLO_TIMEOUT = 20.0
BUFFERED_EVENTS = 64

T = TypeVar("T")


class Intents(IntFlag):
    """The events that a bot subscribes to. MESSAGE_CONTENT must be enabled in the developer portal."""

    GUILDS = 1 << 0
    GUILD_MESSAGES = 1 << 9
    DIRECT_MESSAGES = 1 << 12
    MESSAGE_CONTENT = 1 << 15


DEFAULT_INTENTS = Intents.GUILDS | Intents.GUILD_MESSAGES | Intents.DIRECT_MESSAGES | Intents.MESSAGE_CONTENT


class GatewayStatus(Enum):
    """The state of the connection."""

    CONNECTING = "connecting"
    READY = "ready"
    RETRYING = "retrying"


@final
@attrs.frozen
class Dispatch:
    """One event: its documented name, and its data as decoded JSON."""

    name: str
    data: dict[str, Any]

    def message(self) -> Message | None:
        """Return the message of a MESSAGE_CREATE or MESSAGE_UPDATE; None for other events and for unreadable data."""
        return self._as(Message) if self.name in ("MESSAGE_CREATE", "MESSAGE_UPDATE") else None

    def interaction(self) -> Interaction | None:
        """Return the interaction of an INTERACTION_CREATE."""
        return self._as(Interaction) if self.name == "INTERACTION_CREATE" else None

    def thread(self) -> Channel | None:
        """Return the thread of a THREAD_CREATE."""
        return self._as(Channel) if self.name == "THREAD_CREATE" else None

    def _as(self, kind: type[T]) -> T | None:
        try:
            return msgspec.convert(self.data, kind)
        except msgspec.ValidationError:
            return None


class _Payload(msgspec.Struct, frozen=True):
    op: int
    d: Any = None
    s: int | None = None
    t: str | None = None


@final
@attrs.define
class _Session:
    id: str
    resume_url: str


class _Lost(Exception):
    """Raised when this connection is over; the next one is opened after `delay` seconds."""

    def __init__(self, why: str, *, delay: float = 0.0) -> None:
        super().__init__(why)
        self.delay = delay


@final
class DiscordGateway:
    """A running Gateway connection, opened by `open_discord_gateway`.

    `events` yields every event once, in order, including READY and RESUMED. It is bounded: a slow reader delays the connection, never the heartbeat.
    """

    def __init__(
        self,
        client: DiscordClient,
        *,
        intents: int,
        backoff: Backoff,
        identify_interval: float,
        invalid_session_delay: tuple[float, float],
    ) -> None:
        self.status = GatewayStatus.CONNECTING
        self.last_error: str | None = None
        self._send, self.events = trio.open_memory_channel[Dispatch](BUFFERED_EVENTS)
        self._client = client
        self._intents = intents
        self._reconnection = Reconnection(backoff)
        self._identify_interval = identify_interval
        self._invalid_session_delay = invalid_session_delay
        self._session: _Session | None = None
        self._sequence = 0
        self._may_identify_at = -math.inf
        self._acknowledged = True
        self._delivering = False

    @property
    def reconnects(self) -> int:
        """Return how often the connection was replaced."""
        return self._reconnection.count

    async def run(self) -> None:
        """Keep a connection until cancelled, or until a failure that reconnecting cannot fix."""
        async with self._send:
            while True:
                delay = await self._connect_once()
                self.status = GatewayStatus.RETRYING
                await trio.sleep(delay)

    async def _connect_once(self) -> float:
        """Run one connection. Return the delay before the next."""
        try:
            address = await self._address()
            url = f"{address.rstrip('/')}/?v=10&encoding=json"
            async with open_platform_socket(url, proxy=self._client.proxy) as socket:
                try:
                    await self._converse(socket)
                except SocketClosed as closed:
                    raise self._judge(closed) from None
        except _Lost as lost:
            self.last_error = str(lost)
            return max(lost.delay, self._reconnection.lost())
        except PlatformError as error:
            self.last_error = str(error)
            return self._reconnection.failed(error)
        raise AssertionError("a Gateway connection ends with an exception")

    async def _address(self) -> str:
        if self._session is not None:
            return self._session.resume_url
        gateway = await self._client.get_gateway_bot()
        limit = gateway.session_start_limit
        if limit.remaining <= 0:
            wait = limit.reset_after / 1000
            message = f"no session start is left; the next is in {wait:.0f} s"
            raise PlatformError(PlatformErrorKind.RATE_LIMITED, message, retry_after=wait)
        await trio.sleep_until(self._may_identify_at)
        return gateway.url

    async def _converse(self, socket: WebSocket) -> None:
        try:
            with trio.fail_after(HELLO_TIMEOUT):
                hello = _decode(await socket.receive())
        except trio.TooSlowError:
            raise PlatformError(
                PlatformErrorKind.TRANSIENT, f"the Gateway sent no HELLO within {HELLO_TIMEOUT:g} s"
            ) from None
        if hello.op != HELLO:
            raise PlatformError(
                PlatformErrorKind.TRANSIENT, f"the Gateway began with opcode {hello.op} instead of HELLO"
            )
        self._acknowledged = True
        with single_failure():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._heartbeat, socket, float(hello.d["heartbeat_interval"]) / 1000)
                await self._introduce(socket)
                await self._receive(socket)

    async def _introduce(self, socket: WebSocket) -> None:
        token = self._client.token
        if self._session is not None:
            await _say(socket, RESUME, {"token": token, "session_id": self._session.id, "seq": self._sequence})
            return
        self._may_identify_at = trio.current_time() + self._identify_interval
        properties = {"os": "linux", "browser": "hermes-trio", "device": "hermes-trio"}
        await _say(socket, IDENTIFY, {"token": token, "intents": self._intents, "properties": properties})

    async def _receive(self, socket: WebSocket) -> None:
        while True:
            payload = _decode(await socket.receive())
            match payload.op:
                case 0:
                    await self._deliver(payload)
                case 1:
                    await _say(socket, HEARTBEAT, self._sequence or None)
                case 11:
                    self._acknowledged = True
                case 7:
                    await socket.close(RESUMABLE_GOODBYE)
                    raise _Lost("the Gateway asked for a reconnect")
                case 9:
                    if payload.d is not True:
                        self._session = None
                        self._sequence = 0
                    await socket.close(RESUMABLE_GOODBYE)
                    raise _Lost("the session was invalidated", delay=random.uniform(*self._invalid_session_delay))
                case _:
                    pass

    async def _deliver(self, payload: _Payload) -> None:
        if payload.t is None or payload.s is None or payload.s <= self._sequence:
            return
        raw: Any = payload.d
        data = msgspec.convert(raw, dict[str, Any]) if isinstance(raw, dict) else {}
        if payload.t == "READY":
            self._session = _Session(str(data["session_id"]), str(data["resume_gateway_url"]))
        if payload.t in ("READY", "RESUMED"):
            self.status = GatewayStatus.READY
            self._reconnection.ready()
            self.last_error = None
        self._delivering = True
        try:
            await self._send.send(Dispatch(payload.t, data))
        finally:
            self._delivering = False
        # Only now: an event that was not handed over is replayed when the session is resumed.
        self._sequence = payload.s

    async def _heartbeat(self, socket: WebSocket, interval: float) -> None:
        await trio.sleep(interval * random.random())
        while self._acknowledged or self._delivering:
            self._acknowledged = False
            try:
                await _say(socket, HEARTBEAT, self._sequence or None)
            except SocketClosed:
                # The receiving task reports the cause.
                return
            await trio.sleep(interval)
        # The peer is gone, so no close frame is sent. The receiving task sees the end.
        await socket.abort()

    def _judge(self, closed: SocketClosed) -> Exception:
        if closed.code in FATAL_CLOSES:
            kind, advice = FATAL_CLOSES[closed.code]
            message = f"the Gateway closed the connection with {closed.code}: {advice}"
            return PlatformError(kind, message, permanent=True, code=closed.code)
        if closed.code in NEW_SESSION_CLOSES:
            self._session = None
            self._sequence = 0
        if self.status is GatewayStatus.READY:
            return _Lost(str(closed))
        # Closed before a session was there: this counts as a failed attempt, or a broken server would be hammered.
        return PlatformError(PlatformErrorKind.TRANSIENT, str(closed), code=closed.code)


def _decode(message: str | bytes) -> _Payload:
    try:
        return msgspec.json.decode(message, type=_Payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PlatformError(PlatformErrorKind.TRANSIENT, f"the Gateway sent what is no payload: {error}") from None


async def _say(socket: WebSocket, op: int, data: Any) -> None:
    await socket.send(msgspec.json.encode({"op": op, "d": data}).decode())


@asynccontextmanager
async def open_discord_gateway(
    client: DiscordClient,
    *,
    intents: int = DEFAULT_INTENTS,
    backoff: Backoff | None = None,
    identify_interval: float = IDENTIFY_INTERVAL,
    invalid_session_delay: tuple[float, float] = (1.0, 5.0),
) -> AsyncGenerator[DiscordGateway, None]:
    """Stay connected to the Gateway while the block runs.

    Exceptions of the block propagate unchanged. A failure of the connection cancels the block and raises `PlatformError`.
    """
    gateway = DiscordGateway(
        client,
        intents=int(intents),
        backoff=backoff or Backoff(),
        identify_interval=identify_interval,
        invalid_session_delay=invalid_session_delay,
    )
    with single_failure():
        async with gateway.events, trio.open_nursery() as nursery:
            nursery.start_soon(gateway.run)
            yield gateway
            nursery.cancel_scope.cancel()
