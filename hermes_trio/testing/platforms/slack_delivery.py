"""How Slack delivers: Socket Mode envelopes with acknowledgements, or signed HTTP requests with retries.

Everything that people do becomes a `SlackDelivery`. It is repeated, with a retry number, until it is acknowledged or three retries
are used up, over whichever connection is there. The fake's owner runs `run` and `serve`; nothing outlives them.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, final
from urllib.parse import urlencode

import attrs
import msgspec
import trio

from hermes_trio.net.websocket import SocketClosed, WebSocket

from .callback import Callback, post
from .ledger import CallLedger
from .server import FakeRequest
from .sockets import FakeSockets

MAX_RETRIES = 3
MAX_QUEUED = 100_000


@final
@attrs.define(eq=False)
class SlackDelivery:
    """One thing to deliver. `kind` is events_api, interactive or slash_commands."""

    kind: str
    payload: dict[str, Any]
    envelope_id: str
    attempts: int = 0
    settled: trio.Event = attrs.field(factory=trio.Event, repr=False)


@final
@attrs.frozen
class Acknowledgement:
    """An envelope that the app acknowledged, and what it said in answer."""

    envelope_id: str
    kind: str
    payload: Any
    retry_attempt: int


def sign(secret: str, timestamp: str, body: bytes) -> str:
    """Return the value of X-Slack-Signature."""
    digest = hmac.new(secret.encode(), f"v0:{timestamp}:".encode() + body, hashlib.sha256)
    return f"v0={digest.hexdigest()}"


@final
class FakeSlackSocket(FakeSockets[WebSocket]):
    """Socket Mode: the connections of one app, and the faults that a test may cause."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = 0
        self.acknowledgements: CallLedger[Acknowledgement] = CallLedger("acknowledgement")
        self._tickets: set[str] = set()
        self._waiting: dict[str, SlackDelivery] = {}
        self._turn = itertools.count()
        self._count = itertools.count(1)

    @property
    def connections(self) -> list[WebSocket]:
        """Return the open connections, oldest first."""
        return self._connections

    def _socket_of(self, connection: WebSocket) -> WebSocket:
        return connection

    def ticket(self) -> str:
        """Return a single-use ticket, part of the address that apps.connections.open returns."""
        ticket = f"ticket-{next(self._count)}"
        self._tickets.add(ticket)
        return ticket

    async def request_disconnect(self, reason: str = "refresh_requested", *, close: bool = False) -> None:
        """Tell every connection that it will end (`warning`, `refresh_requested` or `link_disabled`), and end it with `close`."""
        sockets = list(self.connections)
        await self.send_to_all({"type": "disconnect", "reason": reason, "debug_info": {"host": "fake"}})
        if close:
            for socket in sockets:
                await socket.close(timeout=0.5)

    async def serve(self, request: FakeRequest, socket: WebSocket) -> None:
        """Serve one client until its connection ends."""
        if self.refuse_connections or request.query.get("ticket") not in self._tickets:
            await socket.abort()
            return
        self._tickets.discard(request.query["ticket"])
        self.opened += 1
        with self._connected(socket), suppress(SocketClosed):
            hello = {
                "type": "hello",
                "num_connections": len(self.connections),
                "debug_info": {"host": "fake", "build_number": 1, "approximate_connection_time": 3600},
                "connection_info": {"app_id": "A1"},
            }
            await socket.send(msgspec.json.encode(hello).decode())
            self._changes.tell()
            while True:
                self._receive(msgspec.json.decode(await socket.receive()))

    async def try_deliver(self, delivery: SlackDelivery, ack_timeout: float, sent: Callable[[], None]) -> bool:
        """Send one envelope once, say that it was sent, and wait for its acknowledgement while the connection lasts."""
        await self._changes.until(lambda: bool(self.connections))
        socket = self.connections[next(self._turn) % len(self.connections)]
        envelope: dict[str, Any] = {
            "envelope_id": delivery.envelope_id,
            "type": delivery.kind,
            "accepts_response_payload": delivery.kind != "events_api",
            "payload": delivery.payload,
        }
        if delivery.kind == "events_api":
            envelope |= {"retry_attempt": delivery.attempts, "retry_reason": "timeout" if delivery.attempts else ""}
        self._waiting[delivery.envelope_id] = delivery
        delivery.attempts += 1
        try:
            await socket.send(msgspec.json.encode(envelope).decode())
        except SocketClosed:
            return False
        sent()
        with trio.move_on_after(ack_timeout):
            await self._changes.until(lambda: socket not in self.connections or delivery.settled.is_set())
        return delivery.settled.is_set()

    def _receive(self, message: Any) -> None:
        assert isinstance(message, dict), f"a client sent {message!r}, which is no acknowledgement"
        fields = msgspec.convert(message, dict[str, Any])
        delivery = self._waiting.pop(str(fields.get("envelope_id")), None)
        if delivery is None:
            return
        delivery.settled.set()
        acknowledgement = Acknowledgement(
            delivery.envelope_id, delivery.kind, fields.get("payload"), delivery.attempts - 1
        )
        self.acknowledgements.append(acknowledgement)
        self._changes.tell()


@final
class SlackDeliveries:
    """Delivers what people do, over Socket Mode or to a request URL."""

    def __init__(self, signing_secret: str, ack_timeout: float, retry_delay: float, now: Callable[[], int]) -> None:
        self.socket = FakeSlackSocket()
        self.callbacks: CallLedger[Callback] = CallLedger("request to the app")
        self.request_url: str | None = None
        self.given_up: CallLedger[SlackDelivery] = CallLedger("abandoned delivery")
        self.added: list[SlackDelivery] = []
        self.signing_secret = signing_secret
        self._ack_timeout = ack_timeout
        self._retry_delay = retry_delay
        self._now = now
        self._count = itertools.count(1)
        self._send, self._receive = trio.open_memory_channel[SlackDelivery](MAX_QUEUED)

    def add(self, kind: str, payload: dict[str, Any]) -> SlackDelivery:
        """Append a delivery to the queue."""
        delivery = SlackDelivery(kind, payload, f"envelope-{next(self._count)}")
        self.added.append(delivery)
        self._send.send_nowait(delivery)
        return delivery

    async def run(self) -> None:
        """Deliver everything that is added. It is sent in order; acknowledgements and retries are awaited beside that."""
        async with self._send, self._receive, trio.open_nursery() as nursery:
            async for delivery in self._receive:
                await nursery.start(self._deliver_with_retries, delivery)

    async def request(self, body: bytes, content_type: str, *, retry: int = 0, reason: str = "") -> Callback:
        """Make one signed request to the app's request URL."""
        assert self.request_url is not None
        timestamp = str(self._now())
        headers = {
            "Content-Type": content_type,
            "X-Slack-Request-Timestamp": timestamp,
            "X-Slack-Signature": sign(self.signing_secret, timestamp, body),
        }
        if retry:
            headers |= {"X-Slack-Retry-Num": str(retry), "X-Slack-Retry-Reason": reason}
        callback = await post(self.request_url, headers, body, timeout=self._ack_timeout)
        self.callbacks.append(callback)
        return callback

    async def _deliver_with_retries(
        self, delivery: SlackDelivery, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        begun = False

        def begin() -> None:
            nonlocal begun
            if not begun:
                begun = True
                task_status.started()

        while not await self._try(delivery, begin):
            begin()
            # Slack repeats events only; a lost click or command is lost.
            if delivery.attempts > MAX_RETRIES or delivery.kind != "events_api":
                self.given_up.append(delivery)
                return
            await trio.sleep(self._retry_delay)
        begin()

    async def _try(self, delivery: SlackDelivery, sent: Callable[[], None]) -> bool:
        if self.request_url is None:
            return await self.socket.try_deliver(delivery, self._ack_timeout, sent)
        retry, delivery.attempts = delivery.attempts, delivery.attempts + 1
        match delivery.kind:
            case "events_api":
                body, content_type = msgspec.json.encode(delivery.payload), "application/json"
            case "interactive":
                body = urlencode({"payload": msgspec.json.encode(delivery.payload).decode()}).encode()
                content_type = "application/x-www-form-urlencoded"
            case _:
                body, content_type = urlencode(delivery.payload).encode(), "application/x-www-form-urlencoded"
        callback = await self.request(body, content_type, retry=retry, reason="http_error")
        return 200 <= callback.status < 300
