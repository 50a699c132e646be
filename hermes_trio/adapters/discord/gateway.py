"""Discord's Gateway v10: a stream of events that survives lost connections.

`open_discord_gateway` owns the connection and its heartbeat, resumes a session when the connection is lost, and begins a new one when necessary. Its
user reads `events`, and handles each in `event.handling()`. A fatal close (a bad token, forbidden intents) raises a permanent `PlatformError`; an
outage longer than the back-off allows raises a transient one. Leaving the block ends everything.

Discord has no acknowledgement for an event. The only way to get one again is to resume its session behind an earlier sequence number, so Discord is
sent a number, in a heartbeat or RESUME, only after every event up to it has been handled.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from enum import Enum, IntFlag
from typing import Any, Final, TypeVar, final

import msgspec
import trio

from hermes_trio.adapters.wire.backoff import Backoff, Reconnection
from hermes_trio.adapters.wire.sockets import open_platform_socket
from hermes_trio.messaging.errors import PlatformError, PlatformErrorKind, single_failure
from hermes_trio.net.websocket import SocketClosed, WebSocket
from hermes_trio.store.errors import StoreUnavailable

from .client import DiscordClient
from .types import Channel, Interaction, Message

logger: Final = logging.getLogger("hermes_trio.adapters.discord.gateway")

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
# Close codes that end the session: a wrong sequence number, and a session that timed out.
NEW_SESSION_CLOSES = frozenset({4007, 4009})
# Any code but 1000 and 1001, which would end the session.
RESUMABLE_CLOSE = 4900
# The Gateway allows one IDENTIFY every five seconds.
IDENTIFY_INTERVAL = 5.0
HELLO_TIMEOUT = 20.0
BUFFERED_EVENTS = 64
# How often handling an event may fail before it is skipped. With the delays of `AdapterRunner`, the last attempt is at least seven minutes after
# the first.
EVENT_ATTEMPTS = 5

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
class GatewaySession:
    """A session of the Gateway, and which of its events have been handled. It may outlive the `DiscordGateway` that began it.

    READY and RESUMED are about the session itself and are not counted among its events.
    """

    def __init__(self, session_id: str, resume_url: str) -> None:
        self.id = session_id
        self.resume_url = resume_url
        self.answered = True
        """Whether the session has been connected since it began or was taken over."""
        self._newest = 0
        self._unhandled: set[int] = set()
        self._missed: set[int] = set()
        self._failures: dict[int, int] = {}

    @property
    def handled(self) -> int:
        """Return the number up to which every event has been handled. The events behind it may be handled in any order."""
        return min(self._unhandled) - 1 if self._unhandled else self._newest

    def take_over(self) -> None:
        """Expect the events that an earlier `DiscordGateway` has not handled once more."""
        self.answered = False
        self._missed = set(self._unhandled)

    def is_expected(self, sequence: int) -> bool:
        """Return False for an event that was handed over before, and is being handled or has been handled."""
        return sequence > self._newest or sequence in self._missed

    def begin(self, sequence: int) -> None:
        """Record that an event is handed over."""
        self._unhandled.add(sequence)

    def withdraw(self, sequence: int) -> None:
        """Record that an event could not be handed over: it is replayed."""
        if sequence not in self._missed:
            self._unhandled.discard(sequence)

    def advance(self, sequence: int) -> None:
        """Record that an event was handed over."""
        self._missed.discard(sequence)
        self._newest = max(self._newest, sequence)

    def settle(self, sequence: int) -> None:
        """Record that an event has been handled."""
        self._unhandled.discard(sequence)
        self._failures.pop(sequence, None)

    def fail(self, sequence: int) -> None:
        """Record that handling an event failed. After `EVENT_ATTEMPTS` failures it is skipped, so that it does not block the events behind it."""
        failures = self._failures[sequence] = self._failures.get(sequence, 0) + 1
        if failures >= EVENT_ATTEMPTS:
            logger.error("event %d of a Discord session failed %d times; it is skipped", sequence, failures)
            self.settle(sequence)

    def give_up(self) -> None:
        """Log how many events were not handled, as the session is not resumed any more: they are lost."""
        if self._unhandled:
            logger.warning(
                "%d events of a Discord session that has ended were not handled; they are lost", self.unhandled
            )

    @property
    def unhandled(self) -> int:
        """Return how many events were handed over and not handled."""
        return len(self._unhandled)

    def end_replay(self) -> None:
        """Record that Discord has replayed what it still had of the session."""
        if self._missed:
            logger.warning("Discord did not replay %d events, which were not handled; they are lost", len(self._missed))
        for sequence in self._missed:
            self.settle(sequence)
        self._missed = set()


@final
class Dispatch(msgspec.Struct, frozen=True):
    """One event: its documented name, its data as decoded JSON, and where it is in its session."""

    name: str
    data: dict[str, Any]
    sequence: int
    session: GatewaySession

    @contextmanager
    def handling(self) -> Generator[None, None, None]:
        """Count the event as handled when the body ends. If the body fails or is cancelled, the event is replayed when the session is taken over.

        A store that cannot be reached is no failure of the event, however often.
        """
        try:
            yield
        except StoreUnavailable:
            raise
        except Exception:
            self.session.fail(self.sequence)
            raise
        self.session.settle(self.sequence)

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


class _Lost(Exception):
    """Raised when this connection is over; the next one is opened after `delay` seconds."""

    def __init__(self, why: str, *, delay: float = 0.0) -> None:
        super().__init__(why)
        self.delay = delay


@final
class DiscordGateway:
    """A running Gateway connection, opened by `open_discord_gateway`.

    `events` yields every event once, in order, including READY and RESUMED. It is bounded: a slow reader delays the connection, never the heartbeat.
    `session` is the present session; None while there is none.
    """

    def __init__(
        self,
        client: DiscordClient,
        session: GatewaySession | None,
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
        self.session = session
        self.ended: list[GatewaySession] = []
        """Sessions that Discord has ended while events of them were being handled."""
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
                    await self._run_session(socket)
                except SocketClosed as closed:
                    raise self._error_of_close(closed) from None
        except _Lost as lost:
            self.last_error = str(lost)
            return max(lost.delay, self._reconnection.lost())
        except PlatformError as error:
            self.last_error = str(error)
            return self._reconnection.failed(error)
        raise AssertionError("a Gateway connection ends with an exception")

    async def _address(self) -> str:
        if self.session is not None:
            return self.session.resume_url
        gateway = await self._client.get_gateway_bot()
        limit = gateway.session_start_limit
        if limit.remaining <= 0:
            wait = limit.reset_after / 1000
            message = f"no session start is left; the next is in {wait:.0f} s"
            raise PlatformError(PlatformErrorKind.RATE_LIMITED, message, retry_after=wait)
        await trio.sleep_until(self._may_identify_at)
        return gateway.url

    async def _run_session(self, socket: WebSocket) -> None:
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
                await self._identify_or_resume(socket)
                await self._receive(socket)

    async def _identify_or_resume(self, socket: WebSocket) -> None:
        token = self._client.token
        session = self.session
        if session is not None:
            await _say(socket, RESUME, {"token": token, "session_id": session.id, "seq": session.handled})
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
                    await self._say_alive(socket)
                case 11:
                    self._acknowledged = True
                case 7:
                    await socket.close(RESUMABLE_CLOSE)
                    raise _Lost("the Gateway asked for a reconnect")
                case 9:
                    if payload.d is not True:
                        self._end_session()
                    await socket.close(RESUMABLE_CLOSE)
                    raise _Lost("the session was invalidated", delay=random.uniform(*self._invalid_session_delay))
                case _:
                    pass

    async def _deliver(self, payload: _Payload) -> None:
        if payload.t is None or payload.s is None:
            return
        raw: Any = payload.d
        data = msgspec.convert(raw, dict[str, Any]) if isinstance(raw, dict) else {}
        if payload.t == "READY" and (self.session is None or self.session.id != data["session_id"]):
            self.session = GatewaySession(str(data["session_id"]), str(data["resume_gateway_url"]))
        session = self.session
        if session is None or not session.is_expected(payload.s):
            return
        session.answered = True
        about_session = payload.t in ("READY", "RESUMED")
        if about_session:
            self.status = GatewayStatus.READY
            self._reconnection.ready()
            self.last_error = None
            session.end_replay()
        else:
            session.begin(payload.s)
        self._delivering = True
        try:
            await self._send.send(Dispatch(payload.t, data, payload.s, session))
        except BaseException:
            session.withdraw(payload.s)
            raise
        finally:
            self._delivering = False
        # Only now: an event that was not handed over is replayed when the session is resumed.
        session.advance(payload.s)

    def _end_session(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.end_replay()
            self.ended = [one for one in (*self.ended, session) if one.unhandled]

    async def _say_alive(self, socket: WebSocket) -> None:
        handled = 0 if self.session is None else self.session.handled
        await _say(socket, HEARTBEAT, handled or None)

    async def _heartbeat(self, socket: WebSocket, interval: float) -> None:
        await trio.sleep(interval * random.random())
        while self._acknowledged or self._delivering:
            self._acknowledged = False
            try:
                await self._say_alive(socket)
            except SocketClosed:
                # The receiving task reports the cause.
                return
            await trio.sleep(interval)
        # The peer has disconnected, so no close frame is sent. The receiving task sees the end.
        await socket.abort()

    def _error_of_close(self, closed: SocketClosed) -> Exception:
        if closed.code in FATAL_CLOSES:
            kind, advice = FATAL_CLOSES[closed.code]
            message = f"the Gateway closed the connection with {closed.code}: {advice}"
            return PlatformError(kind, message, permanent=True, code=closed.code)
        if closed.code in NEW_SESSION_CLOSES:
            self._end_session()
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
    session: GatewaySession | None = None,
    *,
    intents: int = DEFAULT_INTENTS,
    backoff: Backoff | None = None,
    identify_interval: float = IDENTIFY_INTERVAL,
    invalid_session_delay: tuple[float, float] = (1.0, 5.0),
) -> AsyncGenerator[DiscordGateway, None]:
    """Stay connected to the Gateway while the block runs; begin with `session`, of an earlier block, if there is one.

    Exceptions of the block propagate unchanged. A failure of the connection cancels the block and raises `PlatformError`.
    """
    if session is not None:
        session.take_over()
    gateway = DiscordGateway(
        client,
        session,
        intents=int(intents),
        backoff=backoff or Backoff(),
        identify_interval=identify_interval,
        invalid_session_delay=invalid_session_delay,
    )
    with single_failure():
        async with gateway.events, trio.open_nursery() as nursery:
            nursery.start_soon(gateway.run)
            try:
                yield gateway
            finally:
                for ended in gateway.ended:
                    ended.give_up()
            nursery.cancel_scope.cancel()
