"""Receives webhooks: an authentic event becomes one delivery, one session, one turn; or is delivered directly.

A delivery's id is committed in the transaction of its work, and 202 is sent after that commit: a refusal, a crash or a failed direct delivery has no
effect, and the sender's next attempt is accepted (SC-5). Load is refused before anything is accepted (SC-6), with 503 while draining. The text of an
event is literal: it goes to the lane as a message, and is never a command (SC-31).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from hermes_trio.base.line_limiter import LineLimiter
from hermes_trio.messaging.addresses import GITHUB_COMMENT, Address, target_text
from hermes_trio.messaging.callbacks import CallbackResponse
from hermes_trio.messaging.contract import Outgoing, PlatformError, SendResult
from hermes_trio.messaging.core import MessagingCore
from hermes_trio.messaging.one_shot import OneShotInterface, delivery_fields
from hermes_trio.messaging.session_keys import session_key, webhook_source
from hermes_trio.messaging.settings import WebhookSettings
from hermes_trio.runtime.budget import Budget
from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.outcome import Outcome, TurnState
from hermes_trio.runtime.ports import InboxRow, NewMessage, TurnInput
from hermes_trio.runtime.turn import Turn
from hermes_trio.store.errors import StoreError

from .filters import (
    DeliveryId,
    PayloadError,
    WebhookEvent,
    delivery_of,
    event_name,
    matches,
    parse_payload,
    signed_delivery,
)
from .routes import UnknownAddress, WebhookRoute, build_routes
from .signatures import Rejected, Scheme
from .template import render_prompt

logger: Final = logging.getLogger("hermes_trio.adapters.webhook.receiver")

WEBHOOK: Final = "webhook"
WEBHOOK_COMPLETE: Final = "webhook_complete"
RATE_WINDOW: Final = 60.0
DIRECT_SECONDS: Final = 30.0
RETRY_SECONDS: Final = 5
FILE_BYTES: Final = 1_048_576


class WebhookInterface(OneShotInterface):
    """The interface of deliveries."""

    def __init__(self, messaging: MessagingCore, routes: Mapping[str, WebhookRoute]) -> None:
        super().__init__(messaging, WEBHOOK, WEBHOOK_COMPLETE)
        self._routes = routes
        self.pending: set[str] = set()
        """Session keys of deliveries that were accepted and whose first turn has not ended."""
        # The lane's own bound is the outermost one; each route's is kept by the base class.
        self.linger: float | None = max((route.settings.linger for route in routes.values()), default=0.0) + 60.0

    def prepare(self, rows: Sequence[InboxRow]) -> TurnInput:
        given = super().prepare(rows)
        route = self._routes.get(rows[0].routing.user_name)
        return given if route is None else msgspec.structs.replace(given, model=route.settings.model)

    def budget(self, rows: Sequence[InboxRow]) -> Budget | None:
        route = self._routes.get(rows[0].routing.user_name)
        seconds = None if route is None else route.settings.deadline
        return None if seconds is None else Budget(seconds=seconds)

    def linger_of(self, context: SessionContext) -> float:
        route = self._routes.get(context.user_name)
        return self._messaging.runtime.settings.linger_seconds if route is None else route.settings.linger

    def told(self, turn: Turn, outcome: Outcome, place: Address) -> str:
        # A failure is reported to the operator, not to the readers of a pull request.
        if outcome.state is not TurnState.COMPLETED and place.platform == GITHUB_COMMENT:
            return ""
        return super().told(turn, outcome, place)

    async def ended(self, turn: Turn, outcome: Outcome) -> None:
        if outcome.begun:
            self.pending.discard(turn.context.session_key)

    async def on_refused(self, rows: Sequence[InboxRow], reason: str) -> None:
        self.pending.difference_update(row.session_key for row in rows)


class WebhookReceiver:
    """Answers `POST /webhooks/{route}` by `handle`. Open it inside the runtime; it owns no socket."""

    prefix: Final = "/webhooks/"

    def __init__(
        self,
        messaging: MessagingCore,
        settings: WebhookSettings,
        *,
        host: str | None,
        environment: Mapping[str, str] | None = None,
        home: Path | None = None,
    ) -> None:
        self.settings = settings
        self.routes: dict[str, WebhookRoute] = build_routes(
            settings, messaging.platforms, host=host, environment=environment or {}
        )
        self.interface = WebhookInterface(messaging, self.routes)
        self._messaging = messaging
        self._home = home
        self._requests: dict[str, deque[float]] = {name: deque() for name in self.routes}
        self._direct: set[DeliveryId] = set()
        self._shared = messaging.runtime.membership.share("webhooks", self._taken_elsewhere)
        self._refusals = LineLimiter()
        self._accepting: int = 0

    @property
    def max_body_bytes(self) -> int:
        """Return the maximum size of a body."""
        return self.settings.max_body_bytes

    @asynccontextmanager
    async def open(self) -> AsyncIterator[WebhookReceiver]:
        """Handle deliveries for the body of the `async with`. Deliveries that an earlier server had accepted and not begun are begun."""
        async with self.interface.settling():
            self.interface.pending.update(await self._messaging.store.waiting_sessions(WEBHOOK))
            async with self._messaging.runtime.delivering(self.interface) as self.interface.inbox:
                yield self

    @property
    def endpoint(self) -> str:
        """Return the address of all routes."""
        return self.prefix + "{route}"

    async def handle(self, method: str, path: str, headers: Iterable[tuple[str, str]], body: bytes) -> CallbackResponse:
        """Answer one request. Cancelling it (the sender left) leaves either an accepted delivery or nothing."""
        pairs = list(headers)
        names = {name.lower(): value for name, value in pairs}
        route = self.routes.get(path.removeprefix(self.prefix)) if path.startswith(self.prefix) else None
        if route is None:
            return CallbackResponse.refusal(404, "there is no such webhook route")
        if method != "POST":
            return CallbackResponse.refusal(405, "a webhook is a POST request", ("Allow", "POST"))
        refusal, scheme = self._check(route, names, pairs, body)
        if refusal is not None:
            return refusal
        try:
            # No form begins with a brace, and `curl -d` calls everything a form (GW-127: JSON is tried first).
            media = "" if body.lstrip()[:1] in (b"{", b"[") else names.get("content-type", "")
            payload = parse_payload(body, media)
        except PayloadError as error:
            return CallbackResponse.refusal(400, str(error))
        event = WebhookEvent(route.name, event_name(names, payload), payload, names)
        if not route.wants(event.name):
            return CallbackResponse.of(200, {"status": "ignored", "event": event.name})
        if not matches(route.filters, event, self._read_file):
            return CallbackResponse.of(200, {"status": "ignored", "reason": "filter", "route": route.name})
        delivery = delivery_of(route.name, names, payload, lambda: self._messaging.runtime.core.ids.make("wh_", 24))
        delivery = signed_delivery(delivery, None if route.settings.repeats else scheme, event, body)
        try:
            return await self._deliver(route, event, delivery)
        except StoreError as error:
            logger.error(
                "could not store a delivery of the webhook route %s; the sender gets 503: %s", route.name, error
            )
            return CallbackResponse.refusal(
                503, "the delivery could not be stored; send it again", ("Retry-After", str(RETRY_SECONDS))
            )

    # -- before the body is understood ---------------------------------------------------------------------------------------------

    def _check(
        self, route: WebhookRoute, names: Mapping[str, str], headers: Iterable[tuple[str, str]], body: bytes
    ) -> tuple[CallbackResponse | None, Scheme | None]:
        """Return the refusal of a request, or the scheme by which it is authentic."""
        if not route.settings.enabled:
            return CallbackResponse.refusal(403, "this webhook route is disabled"), None
        declared = names.get("content-length", "")
        size = max(len(body), int(declared) if declared.isascii() and declared.isdigit() and len(declared) < 19 else 0)
        if size > self.settings.max_body_bytes:
            return CallbackResponse.refusal(413, f"the body has more than {self.settings.max_body_bytes} bytes"), None
        if not route.secrets and not route.insecure:
            return CallbackResponse.refusal(403, "this webhook route has no secret"), None
        verdict = route.authenticate(headers, body, self._messaging.runtime.core.clock())
        if isinstance(verdict, Rejected):
            left_out = self._refusals.admit(trio.current_time())
            if left_out is not None:
                more = f" ({left_out} more refusals were not logged)" if left_out else ""
                logger.warning("a request to the webhook route %s was refused: %s%s", route.name, verdict.reason, more)
            return CallbackResponse.refusal(401, "the signature is missing or wrong"), None
        wait = self._over_rate(route.name)
        if wait:
            later = ("Retry-After", str(int(wait) + 1))
            return CallbackResponse.refusal(429, f"more than {self.settings.rate_limit} requests a minute", later), None
        return None, None if verdict is None else verdict.scheme

    def _over_rate(self, name: str) -> float:
        """Return the seconds until the route accepts another request, on any node; 0, and count it, if it does now."""
        now, log = trio.current_time(), self._requests[name]
        while log and now - log[0] >= RATE_WINDOW:
            log.popleft()
        if len(log) >= self.settings.rate_limit:
            return RATE_WINDOW - (now - log[0])
        log.append(now)
        self._shared.spend(name)
        return 0.0

    def _taken_elsewhere(self, name: str, amount: int) -> None:
        log = self._requests.get(name)
        if log is not None:
            log.extend([trio.current_time()] * min(amount, self.settings.rate_limit))

    def _read_file(self, name: str) -> str | None:
        """Read a file below the home directory, for the filter `in_file`."""
        if self._home is None:
            return None
        home = self._home.resolve()
        path = (home / name).resolve()
        try:
            if not path.is_relative_to(home) or path.stat().st_size > FILE_BYTES:
                return None
            return path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    # -- the delivery --------------------------------------------------------------------------------------------------------------

    async def _deliver(self, route: WebhookRoute, event: WebhookEvent, delivery: DeliveryId) -> CallbackResponse:
        duplicate = CallbackResponse.of(200, {"status": "duplicate", "delivery_id": delivery.id})
        # Deliveries that were accepted before the signature decided are known by the sender's id.
        for name in dict.fromkeys((delivery.once, delivery.id)):
            if await self._messaging.store.delivery_known(route.name, name):
                return duplicate
        later = ("Retry-After", str(RETRY_SECONDS))
        if self._messaging.runtime.draining:
            return CallbackResponse.refusal(503, "the server is being stopped; send it again", later)
        try:
            place = route.place(event)
        except UnknownAddress as error:
            return CallbackResponse.refusal(400, str(error))
        text = render_prompt(route.settings.prompt, event).text
        if route.settings.deliver_only:
            if delivery in self._direct:
                return CallbackResponse.refusal(503, "this delivery is being handled", later)
            self._direct.add(delivery)
            membership = self._messaging.runtime.membership
            try:
                async with membership.holding(f"delivery {route.name} {delivery.once}"):
                    # Another node may have delivered it while this one waited.
                    if await self._messaging.store.delivery_known(route.name, delivery.once):
                        return duplicate
                    return await self._deliver_directly(route, delivery, place, text)
            finally:
                self._direct.discard(delivery)
        waiting = await self._waiting() + self._accepting
        if waiting >= self.settings.max_pending:
            return CallbackResponse.refusal(503, f"{waiting} deliveries wait already; send it again", later)
        message = self._message(route, event, delivery, place, text)
        number: int | None = None
        self._accepting += 1
        try:
            with self._messaging.committing() as bound:
                number = await self._messaging.store.accept_delivery(route.name, delivery.once, message)
        finally:
            self._accepting -= 1
        if bound.cancelled_caught:
            return CallbackResponse.refusal(503, "the delivery could not be stored in time; send it again", later)
        if number is None:
            return duplicate
        if not self._messaging.runtime.core.shared:
            self.interface.pending.add(message.session_key)
        return CallbackResponse.of(
            202,
            {"status": "accepted", "route": route.name, "event": event.name, "delivery_id": delivery.id},
        )

    async def _waiting(self) -> int:
        """Deliveries that were accepted and have not ended: known here, unless other nodes work on them, too."""
        if self._messaging.runtime.core.shared:
            return await self._messaging.store.inbox_waiting(inbox=WEBHOOK, taken=True)
        return len(self.interface.pending)

    def _message(
        self, route: WebhookRoute, event: WebhookEvent, delivery: DeliveryId, place: Address, text: str
    ) -> NewMessage:
        source = webhook_source(route.name, delivery.id)
        key = session_key(source)
        routing = SessionContext(
            platform=WEBHOOK,
            source=WEBHOOK,
            chat_id=source.chat_id or "",
            chat_name=source.chat_name or "",
            user_id=source.user_id or "",
            user_name=route.name,
            session_key=key,
            message_id=delivery.id,
            **delivery_fields(place),
        )
        return NewMessage(
            inbox=WEBHOOK,
            session_key=key,
            routing=routing,
            text=text,
            payload={"route": route.name, "event": event.name, "delivery_id": delivery.id, "literal": True},
        )

    async def _deliver_directly(
        self, route: WebhookRoute, delivery: DeliveryId, place: Address, text: str
    ) -> CallbackResponse:
        """Send the text without an agent, within the request, and store the id only after that."""
        platform = self._messaging.platforms.find(place.platform)
        assert platform is not None, "checked when the route was made"
        result = SendResult(success=False, error="there was nothing to say")
        with trio.move_on_after(DIRECT_SECONDS) as bound:
            for piece in platform.adapter.split(text):
                message = Outgoing(chat_id=place.chat_id or "", thread_id=place.thread_id or "", text=piece)
                result = await _send_once(platform.adapter.send, message)
                if not result.success:
                    break
        if bound.cancelled_caught or not result.success:
            logger.error("a direct delivery of %s to %s failed: %s", route.name, target_text(place), result.error)
            return CallbackResponse.of(
                502, {"status": "error", "error": "the delivery failed", "delivery_id": delivery.id}
            )
        await self._messaging.store.record_delivery(route.name, delivery.once)
        return CallbackResponse.of(
            200,
            {
                "status": "delivered",
                "route": route.name,
                "target": place.platform,
                "delivery_id": delivery.id,
            },
        )


async def _send_once(send: Any, message: Outgoing) -> SendResult:
    try:
        result: SendResult = await send(message)
    except PlatformError as error:
        return SendResult.failed(error)
    except Exception as error:
        logger.exception("a direct delivery failed with an unexpected error")
        return SendResult(success=False, error=type(error).__name__)
    return result
