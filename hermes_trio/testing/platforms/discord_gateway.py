"""Discord's Gateway (v10, JSON): sessions, sequence numbers, heartbeats, resuming, and the close codes.

A session outlives its connection, as on the real Gateway: what is dispatched while the client is away is replayed when it
resumes. The fake's owner runs `serve` for each connection; no task outlives it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, final

import attrs
import msgspec
import trio

from hermes_trio.net.websocket import SocketClosed, WebSocket

from .changes import Changes
from .ledger import WAIT_SECONDS, CallLedger
from .server import FakeRequest
from .sockets import FakeSockets

DISPATCH, HEARTBEAT, IDENTIFY, PRESENCE, VOICE, RESUME = 0, 1, 2, 3, 4, 6
RECONNECT, MEMBERS, INVALID_SESSION, HELLO, HEARTBEAT_ACK = 7, 8, 9, 10, 11

DECODE_ERROR, UNKNOWN_OPCODE, NOT_AUTHENTICATED, AUTHENTICATION_FAILED = 4002, 4001, 4003, 4004
ALREADY_AUTHENTICATED, INVALID_SEQ, RATE_LIMITED, SESSION_TIMED_OUT = 4005, 4007, 4008, 4009
INVALID_VERSION, INVALID_INTENTS, DISALLOWED_INTENTS = 4012, 4013, 4014

# Short test intervals on a busy machine must not make a live client look dead.
MIN_TIMEOUT = 2.0
MAX_PAYLOAD_BYTES = 4096
SENDS_PER_MINUTE = 120


class Intent:
    """The intents that decide what a session is sent."""

    GUILDS = 1 << 0
    GUILD_MESSAGES = 1 << 9
    DIRECT_MESSAGES = 1 << 12
    MESSAGE_CONTENT = 1 << 15
    ALL = (1 << 26) - 1


@final
@attrs.frozen
class GatewayEntry:
    """Something that happened on the Gateway: connected, identify, resume, heartbeat or closed (with the code)."""

    kind: str
    session_id: str = ""
    detail: int = 0


@final
@attrs.define
class _Session:
    id: str
    intents: int
    events: list[dict[str, Any]] = attrs.field(factory=list[dict[str, Any]])
    changes: Changes = attrs.field(factory=Changes)

    def add(self, name: str, data: dict[str, Any]) -> None:
        self.events.append({"op": DISPATCH, "t": name, "s": len(self.events) + 1, "d": data})
        self.changes.tell()


@final
@attrs.define(eq=False)
class _Connection:
    socket: WebSocket
    session: _Session | None = None
    sent: int = 0
    identified: trio.Event = attrs.field(factory=trio.Event)
    arrivals: deque[float] = attrs.field(factory=deque[float])

    def begin(self, session: _Session) -> None:
        self.session = session
        self.identified.set()

    async def send(self, op: int, data: Any = None) -> None:
        await self.socket.send(msgspec.json.encode(_payload(op, data)).decode())


def _payload(op: int, data: Any = None) -> dict[str, Any]:
    return {"op": op, "d": data, "s": None, "t": None}


@final
class FakeDiscordGateway(FakeSockets[_Connection]):
    """The Gateway of one fake Discord, with the faults that a test may cause."""

    def __init__(
        self,
        *,
        token: str,
        ready: Callable[[str], dict[str, Any]],
        send_hello: Callable[[], list[tuple[str, dict[str, Any]]]],
        heartbeat_interval: float,
        disallowed_intents: int,
        identify_interval: float,
    ) -> None:
        super().__init__()
        self.log: CallLedger[GatewayEntry] = CallLedger("gateway entry")
        self.heartbeat_interval = heartbeat_interval
        self.mute_heartbeats = False
        self.session_starts_left = 1000
        self.replayed = 0
        """The number of events before the client's sequence number that a resumed connection gets again."""
        self.disallowed_intents = disallowed_intents
        self._identify_interval = identify_interval
        self._token = token
        self._ready = ready
        self._send_hello = send_hello
        self._sessions: dict[str, _Session] = {}
        self._session_count = 0
        self._last_identify = float("-inf")

    # Controls.

    def _socket_of(self, connection: _Connection) -> WebSocket:
        return connection.socket

    async def wait_for(
        self, kind: str, *, count: int = 1, detail: int | None = None, timeout: float = WAIT_SECONDS
    ) -> GatewayEntry:
        """Wait for the `count`th entry of this kind and return it."""

        def fits(entry: GatewayEntry) -> bool:
            return entry.kind == kind and (detail is None or entry.detail == detail)

        return await self.log.nth(count, fits, wanted=f"{kind!r} number {count}", timeout=timeout)

    def dispatch(self, name: str, data: dict[str, Any], *, intent: int = 0) -> None:
        """Send an event to every session that asked for it, now or when it resumes."""
        for session in self._sessions.values():
            if not intent or session.intents & intent:
                session.add(name, data)

    def dispatch_message(self, name: str, data: dict[str, Any], bot_id: str) -> None:
        """Send a message event. Without the MESSAGE_CONTENT intent its content is empty, except where the bot is meant."""
        in_guild = data.get("guild_id") is not None
        visible = not in_guild or data["author"]["id"] == bot_id or any(m["id"] == bot_id for m in data["mentions"])
        for session in self._sessions.values():
            if session.intents & (Intent.GUILD_MESSAGES if in_guild else Intent.DIRECT_MESSAGES):
                shown = visible or session.intents & Intent.MESSAGE_CONTENT
                session.add(name, data if shown else data | {"content": "", "components": []})

    async def request_reconnect(self) -> None:
        """Opcode 7: every client should reconnect and resume."""
        await self.send_to_all(_payload(RECONNECT))

    async def request_heartbeat(self) -> None:
        """Opcode 1 from the server: every client should send a heartbeat at once."""
        await self.send_to_all(_payload(HEARTBEAT))

    async def invalidate_sessions(self, *, resumable: bool) -> None:
        """Opcode 9."""
        if not resumable:
            self._sessions.clear()
        await self.send_to_all(_payload(INVALID_SESSION, resumable))

    async def close_connections(self, code: int, reason: str = "") -> None:
        """Close every connection with a close code."""
        for connection in list(self._connections):
            await connection.socket.close(code, reason, timeout=0.5)

    def forget_sessions(self) -> None:
        """Let every session expire: resuming it will be refused with opcode 9."""
        self._sessions.clear()

    # The protocol.

    async def serve(self, request: FakeRequest, socket: WebSocket) -> None:
        """Serve one client until its connection ends."""
        if self.refuse_connections:
            await socket.abort()
            return
        connection = _Connection(socket)
        try:
            with self._connected(connection):
                self.log.append(GatewayEntry("connected"))
                await self._serve(request, connection)
        except* SocketClosed:
            pass
        finally:
            code = socket.closed.code if socket.closed else 1006
            self.log.append(GatewayEntry("closed", connection.session.id if connection.session else "", code))
            if code in (1000, 1001) and connection.session is not None:
                # A client that closes with a normal close code gives up its session.
                self._sessions.pop(connection.session.id, None)

    async def _serve(self, request: FakeRequest, connection: _Connection) -> None:
        if request.query.get("v") != "10" or request.query.get("encoding", "json") != "json":
            await self._close(connection, INVALID_VERSION, "Invalid API version")
        await connection.send(HELLO, {"heartbeat_interval": round(self.heartbeat_interval * 1000)})
        self._changes.tell()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write_events, connection)
            await self._read(connection)
            nursery.cancel_scope.cancel()

    async def _read(self, connection: _Connection) -> None:
        while True:
            try:
                with trio.fail_after(max(self.heartbeat_interval * 2, MIN_TIMEOUT)):
                    message = await connection.socket.receive()
            except trio.TooSlowError:
                await self._close(connection, SESSION_TIMED_OUT, "Session timed out.")
                return
            await self._handle_payload(connection, message)

    async def _handle_payload(self, connection: _Connection, message: str | bytes) -> None:
        if len(message) > MAX_PAYLOAD_BYTES:
            await self._close(connection, DECODE_ERROR, "Error while decoding payload.")
        now = trio.current_time()
        connection.arrivals.append(now)
        while connection.arrivals[0] < now - 60:
            connection.arrivals.popleft()
        if len(connection.arrivals) > SENDS_PER_MINUTE:
            await self._close(connection, RATE_LIMITED, "Rate limited.")
        try:
            payload = msgspec.json.decode(message, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError):
            await self._close(connection, DECODE_ERROR, "Error while decoding payload.")
            return
        match payload.get("op"):
            case 1:
                session_id = connection.session.id if connection.session else ""
                self.log.append(GatewayEntry("heartbeat", session_id, payload.get("d") or 0))
                if not self.mute_heartbeats:
                    await connection.send(HEARTBEAT_ACK)
            case 2:
                await self._identify(connection, payload.get("d"))
            case 6:
                await self._resume(connection, payload.get("d"))
            case 3 | 4 | 8:
                if connection.session is None:
                    await self._close(connection, NOT_AUTHENTICATED, "Not authenticated.")
            case _:
                await self._close(connection, UNKNOWN_OPCODE, "Unknown opcode.")

    async def _identify(self, connection: _Connection, data: Any) -> None:
        if connection.session is not None:
            await self._close(connection, ALREADY_AUTHENTICATED, "Already authenticated.")
        if not isinstance(data, dict) or not {"token", "intents", "properties"} <= data.keys():
            await self._close(connection, DECODE_ERROR, "Error while decoding payload.")
        fields = msgspec.convert(data, dict[str, Any])
        if str(fields["token"]).removeprefix("Bot ") != self._token:
            await self._close(connection, AUTHENTICATION_FAILED, "Authentication failed.")
        intents = fields["intents"]
        if not isinstance(intents, int) or intents & ~Intent.ALL:
            await self._close(connection, INVALID_INTENTS, "Invalid intent(s).")
        if intents & self.disallowed_intents:
            await self._close(connection, DISALLOWED_INTENTS, "Disallowed intent(s).")
        now = trio.current_time()
        if now < self._last_identify + self._identify_interval or self.session_starts_left <= 0:
            await connection.send(INVALID_SESSION, False)
            return
        self._last_identify = now
        self.session_starts_left -= 1
        self._session_count += 1
        session = _Session(f"session-{self._session_count}", intents)
        self._sessions[session.id] = session
        session.add("READY", self._ready(session.id))
        for name, event in self._send_hello():
            session.add(name, event)
        self.log.append(GatewayEntry("identify", session.id, intents))
        connection.begin(session)

    async def _resume(self, connection: _Connection, data: Any) -> None:
        if not isinstance(data, dict) or not {"token", "session_id", "seq"} <= data.keys():
            await self._close(connection, DECODE_ERROR, "Error while decoding payload.")
        fields = msgspec.convert(data, dict[str, Any])
        if str(fields["token"]).removeprefix("Bot ") != self._token:
            await self._close(connection, AUTHENTICATION_FAILED, "Authentication failed.")
        session = self._sessions.get(fields["session_id"])
        if session is None:
            await connection.send(INVALID_SESSION, False)
            return
        if not isinstance(fields["seq"], int) or fields["seq"] > len(session.events):
            await self._close(connection, INVALID_SEQ, "Invalid seq.")
        self.log.append(GatewayEntry("resume", session.id, fields["seq"]))
        connection.sent = max(0, fields["seq"] - self.replayed)
        session.add("RESUMED", {})
        connection.begin(session)

    async def _write_events(self, connection: _Connection) -> None:
        await connection.identified.wait()
        session = connection.session
        assert session is not None
        while True:
            while connection.sent < len(session.events):
                event = session.events[connection.sent]
                connection.sent += 1
                await connection.socket.send(msgspec.json.encode(event).decode())
            await session.changes.wait()

    async def _close(self, connection: _Connection, code: int, reason: str) -> None:
        await connection.socket.close(code, reason, timeout=0.2)
        raise SocketClosed(code, reason)
