"""The senders: one task for each platform takes committed replies from the outbox and delivers them.

The order within a chat is kept; chats do not wait for each other. A temporary failure is retried later (the platform's `Retry-After` first), a
permanent one makes a dead letter. A reply whose attempt was cut off by a crash, or by a connection that broke without a response, is sent again with
a visible label, and given up after a few such attempts. The senders are a stage of the runtime: they outlive every turn, and at the end they have a
moment to send what the last turns left.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol, cast

import msgspec
import trio

from hermes_trio.runtime.ends import End
from hermes_trio.runtime.ports import OUTBOX_TOPIC, NewReply
from hermes_trio.runtime.runtime import Runtime
from hermes_trio.runtime.tree import waiting, working
from hermes_trio.runtime.turn_lifecycle import first_cause
from hermes_trio.store.errors import StoreError
from hermes_trio.store.ports import OutboxStore
from hermes_trio.store.records import ApprovalChoice, OutboxRow

from .addresses import Address
from .contract import Adapter, Button, Outgoing, PlatformError, PlatformErrorKind, SendResult
from .settings import OutboxSettings

logger: Final = logging.getLogger("hermes_trio.messaging.senders")

DUPLICATE_LABEL: Final = "(This may be a duplicate: the server could not tell whether it had been sent.)"

BLOCKED_SECONDS: Final = 5.0
"""How often a sender polls while a reply waits behind another one whose time it does not know (after a restart)."""

SHORTEST_SECONDS: Final = 0.01
"""The shortest delay: the clocks of the store and the runtime may differ a little."""

OPEN_SECONDS: Final = 30.0
"""The delay before a sender opens its platform's sending side again."""

STORE_SECONDS: Final = 1.0
"""The delay before a sender reads a failing store again."""

UNKNOWN_ATTEMPTS: Final = 5
"""The maximum of attempts after an unknown error."""

BUTTON_LABELS: Final[Mapping[ApprovalChoice, str]] = {
    ApprovalChoice.ONCE: "Allow once",
    ApprovalChoice.SESSION: "Allow for this session",
    ApprovalChoice.ALWAYS: "Always allow",
    ApprovalChoice.DENY: "Deny",
}


def target_of(address: Address) -> dict[str, str]:
    """Return an address as an outbox target: replies to equal targets keep their order."""
    return {"chat_id": address.chat_id or "", "thread_id": address.thread_id or ""}


def compose_entries(
    adapter: Adapter | None, address: Address, text: str, payload: Mapping[str, Any] | None = None
) -> list[NewReply]:
    """Return the outbox rows of one text: one for each message, so that a retry never repeats a part that has arrived.

    The first one has the reply anchor and replaces a preview, the last one has the buttons.
    """
    pieces = [text] if adapter is None else adapter.split(text)
    entries: list[NewReply] = []
    first, last = ("reply_to", "edits", "preview"), ("approval_id", "choices")
    for index, piece in enumerate(pieces):
        own = {
            name: value
            for name, value in (payload or {}).items()
            if value and (name not in first or index == 0) and (name not in last or index == len(pieces) - 1)
        }
        entries.append(NewReply(platform=address.platform, target=target_of(address), text=piece, payload=own))
    return entries


class SenderHooks(Protocol):
    """Hooks around sending, for previews and prompts."""

    async def before_send(self, row: OutboxRow) -> str:
        """Called before each attempt; returns the id of a message that the reply replaces, or None."""
        ...

    def after_send(self, row: OutboxRow, result: SendResult) -> None:
        """Called when a reply has arrived or was given up."""
        ...


class _Sender(msgspec.Struct, eq=False):
    """One platform's sender. `in_flight` are the replies that it holds, each with the number of its attempt; `retries` the attempts after which
    a reply waits for the next one, each with the monotonic time of that."""

    adapter: Adapter
    wake: trio.Event = msgspec.field(default_factory=trio.Event)
    in_flight: dict[int, int] = msgspec.field(default_factory=dict[int, int])
    retries: dict[tuple[int, int], float] = msgspec.field(default_factory=dict[tuple[int, int], float])
    sent: int = 0
    failed: int = 0
    dead: int = 0


class Senders:
    """All senders. Give `stage` to the Runtime; the store's signals wake them after each commit of a reply."""

    def __init__(self, adapters: Iterable[Adapter], settings: OutboxSettings | None = None) -> None:
        self.settings: OutboxSettings = OutboxSettings() if settings is None else settings
        self.hooks: SenderHooks | None = None
        self._senders = {adapter.platform: _Sender(adapter) for adapter in adapters}
        self._closing = False
        self._runtime: Runtime

    @asynccontextmanager
    async def stage(self, runtime: Runtime) -> AsyncIterator[Senders]:
        """Run the senders for the body of the `async with`; leaving it flushes within `flush_seconds`, then cancels.

        A send that is cancelled stays marked as being attempted: the next start sends it again, labelled.
        """
        self._runtime = runtime
        async with trio.open_nursery() as nursery:
            for sender in self._senders.values():
                nursery.start_soon(self._live, sender, name=f"sender {sender.adapter.platform}")
            try:
                yield self
            finally:
                self._closing = True
                for sender in self._senders.values():
                    sender.wake.set()
                nursery.cancel_scope.deadline = trio.current_time() + self.settings.flush_seconds

    def knows(self, platform: str) -> bool:
        """Return whether there is a sender for this platform."""
        return platform in self._senders

    def statistics(self) -> dict[str, dict[str, int]]:
        """Return the counters of each sender."""
        return {
            name: {"sent": one.sent, "failed": one.failed, "dead": one.dead, "in_flight": len(one.in_flight)}
            for name, one in self._senders.items()
        }

    # -- one sender ------------------------------------------------------------------------------------------------------------------

    @property
    def _store(self) -> OutboxStore:
        return cast("OutboxStore", self._runtime.store)

    def _now(self) -> float:
        return self._runtime.core.clock()

    async def _live(self, sender: _Sender) -> None:
        """Open the sending side of one platform, and retry later if that fails. A failure affects only this platform."""
        platform = sender.adapter.platform
        wakes = self._runtime.store.subscribe(OUTBOX_TOPIC, lambda _: sender.wake.set(), platform)
        with working("sender", f"sender:{platform}") as node, wakes:
            while True:
                try:
                    async with sender.adapter.open():
                        await self._serve(sender)
                        return
                except* Exception as group:
                    logger.error(
                        "could not open the sending side of %s; retrying", platform, exc_info=first_cause(group)
                    )
                    if node is not None:
                        node.note = f"sending is not possible: {type(first_cause(group)).__name__}"
                with trio.move_on_after(OPEN_SECONDS), waiting("the next attempt to send"):
                    while not self._closing:
                        sender.wake = trio.Event()
                        await sender.wake.wait()
                if self._closing:
                    return

    async def _serve(self, sender: _Sender) -> None:
        """Send replies until the runtime closes and none is left."""
        platform = sender.adapter.platform
        async with trio.open_nursery() as nursery:
            while True:
                sender.wake = trio.Event()
                try:
                    waited = self._waited(sender)
                    due = await self._store.next_outbox_due(platform, holding=tuple(sender.in_flight), waited=waited)
                    now = self._now()
                    rows = await self._claim(sender, waited) if due is not None and due <= now else []
                    for row in rows:
                        sender.retries.pop((row.id, row.attempts - 1), None)
                        sender.in_flight[row.id] = row.attempts
                        nursery.start_soon(self._deliver, sender, row)
                    if rows:
                        continue
                    if self._closing and not sender.in_flight:
                        break
                    seconds = math.inf if self._closing else self._pause(sender, due, now)
                except StoreError as error:
                    logger.error("could not read the outbox of %s; retrying: %s", platform, error)
                    seconds = STORE_SECONDS
                with trio.move_on_after(seconds), waiting(f"the outbox ({len(sender.in_flight)} being sent)"):
                    await sender.wake.wait()

    async def _claim(self, sender: _Sender, waited: Sequence[tuple[int, int]]) -> list[OutboxRow]:
        free = self.settings.concurrency - len(sender.in_flight)
        if free <= 0:
            return []
        return await self._store.claim_outbox(
            sender.adapter.platform, limit=free, holding=tuple(sender.in_flight), waited=waited
        )

    def _waited(self, sender: _Sender) -> tuple[tuple[int, int], ...]:
        """Return the replies whose delay has passed. Those that were not claimed for long are forgotten: another node has them."""
        now = trio.current_time()
        old = now - self.settings.give_up_hours * 3600
        for attempt in [attempt for attempt, at in sender.retries.items() if at < old]:
            del sender.retries[attempt]
        return tuple(attempt for attempt, at in sender.retries.items() if at <= now)

    def _pause(self, sender: _Sender, due: float | None, now: float) -> float:
        """Return the seconds until something may be due, after nothing could be claimed at `now`. `due` is the time of the next reply."""
        steady = trio.current_time()
        retry = min((at - steady for at in sender.retries.values() if at > steady), default=math.inf)
        if due is None or due > now:
            wait = min(self.settings.look_seconds, retry, math.inf if due is None else due - now)
            return max(wait, SHORTEST_SECONDS)
        # A due reply waits behind an earlier one of its chat, which is being sent or is to be retried.
        if retry < math.inf:
            return retry
        return math.inf if sender.in_flight else BLOCKED_SECONDS

    async def _deliver(self, sender: _Sender, row: OutboxRow) -> None:
        try:
            with working("send", f"outbox:{row.id}"):
                await self._settle(sender, row, await self._attempt(sender, row))
        except BaseException:
            # Cancelled: the row stays marked as being attempted, and the next start sends it again, labelled.
            self._release(sender, row)
            raise

    async def _attempt(self, sender: _Sender, row: OutboxRow) -> SendResult:
        """Return the result of one attempt. An exception is a failed attempt of that reply, and affects no other."""
        if self._unknown(row):
            return SendResult(success=False, error="the server stopped in the last attempt")
        try:
            replaces = "" if self.hooks is None else await self.hooks.before_send(row)
            return await self._try_forms(sender, row, replaces)
        except StoreError as error:
            logger.error("could not prepare reply %d to %s; retrying: %s", row.id, row.platform, error)
            kind, retry_after, problem = PlatformErrorKind.TRANSIENT, STORE_SECONDS, str(error)
        except Exception as error:
            platform = sender.adapter.platform
            logger.exception("reply %d to %s failed with an unexpected error", row.id, platform)
            kind, retry_after, problem = PlatformErrorKind.UNKNOWN, None, type(error).__name__
        return SendResult(success=False, error=problem, error_kind=kind, retryable=True, retry_after=retry_after)

    def _release(self, sender: _Sender, row: OutboxRow) -> None:
        """End an attempt in memory. The end of an earlier attempt never ends a later one."""
        if sender.in_flight.get(row.id) == row.attempts:
            del sender.in_flight[row.id]
        sender.wake.set()

    async def _end(self, sender: _Sender, row: OutboxRow, write: Callable[[], Awaitable[object]]) -> None:
        """Store the result of an attempt. Until that succeeds, the sender keeps the row and sends nothing else to the chat."""
        end = End(f"the attempt to send reply {row.id}", write, then=lambda _: self._release(sender, row))
        await self._runtime.core.ends.put(end)

    async def _try_forms(self, sender: _Sender, row: OutboxRow, replaces: str) -> SendResult:
        """Send a reply; in another form, if the platform refuses its form."""
        adapter = sender.adapter
        label = row.maybe_duplicate > 0
        message = _outgoing(row)
        if replaces:
            message = msgspec.structs.replace(message, edits=replaces)
        result = await self._send(adapter, message, label)
        if message.edits and not result.success and not result.retryable:
            message = msgspec.structs.replace(message, edits="")
            result = await self._send(adapter, message, label)
        if result.error_kind in (PlatformErrorKind.BAD_FORMAT, PlatformErrorKind.TOO_LONG) and not message.plain:
            message = msgspec.structs.replace(message, plain=True)
            result = await self._send(adapter, message, label)
        # An edit that is repeated is no copy.
        return msgspec.structs.replace(result, unanswered=False) if message.edits else result

    async def _send(self, adapter: Adapter, message: Outgoing, label: bool) -> SendResult:
        """Make one attempt. An edit can be repeated without harm, so it needs no label."""
        if not label or message.edits:
            return await self._call(adapter, message)
        result = SendResult(success=False)
        for piece in adapter.split(f"{DUPLICATE_LABEL}\n\n{message.text}"):
            result = await self._call(adapter, msgspec.structs.replace(message, text=piece))
            if not result.success:
                break
        return result

    async def _call(self, adapter: Adapter, message: Outgoing) -> SendResult:
        seconds = self.settings.send_seconds
        with trio.move_on_after(seconds), waiting(f"{adapter.platform} to take a message"):
            try:
                return await adapter.send(message)
            except PlatformError as error:
                return SendResult.failed(error)
        return SendResult(
            success=False,
            error=f"{adapter.platform} did not answer within {seconds:g} s",
            error_kind=PlatformErrorKind.TRANSIENT,
            retryable=True,
            ambiguous=True,
            unanswered=True,
        )

    async def _settle(self, sender: _Sender, row: OutboxRow, result: SendResult) -> None:
        platform = sender.adapter.platform
        if result.success:
            await self._end(sender, row, lambda: self._store.outbox_sent(row))
            sender.sent += 1
        else:
            sender.failed += 1
            if result.ambiguous:
                # In the row, not in memory: the next attempt may be another server's.
                count = row.maybe_duplicate + 1 if result.unanswered else max(row.maybe_duplicate, 1)
                row = msgspec.structs.replace(row, maybe_duplicate=count)
            delay = self._delay(row, result)
            if delay is not None:
                at = self._now() + delay
                sender.retries[row.id, row.attempts] = trio.current_time() + delay
                await self._end(sender, row, lambda: self._store.outbox_retry(row, at=at, error=result.error))
                logger.info("reply %d to %s failed; next attempt in %.0f s: %s", row.id, platform, delay, result.error)
                return
            error = result.error if not self._unknown(row) else _unknown_outcome(platform, row, result.error)
            await self._end(sender, row, lambda: self._store.outbox_dead(row, error=error))
            sender.dead += 1
            logger.warning("reply %d to %s is a dead letter: %s", row.id, platform, error)
        if self.hooks is not None:
            try:
                self.hooks.after_send(row, result)
            except Exception:
                logger.exception("the hook after reply %d failed", row.id)

    def _unknown(self, row: OutboxRow) -> bool:
        """Return whether the platform has left so many attempts without an answer that it probably has the reply: another one would be a copy."""
        return row.maybe_duplicate >= self.settings.unanswered_attempts

    def _delay(self, row: OutboxRow, result: SendResult) -> float | None:
        """Return the seconds until the next attempt, or None if there is none."""
        settings = self.settings
        if (
            not result.retryable
            or self._unknown(row)
            or (result.error_kind is PlatformErrorKind.UNKNOWN and row.attempts >= UNKNOWN_ATTEMPTS)
        ):
            return None
        if result.retry_after is not None:
            delay = result.retry_after
        elif result.unanswered and row.maybe_duplicate > 1:
            # Few attempts are left: they are spread, so that the platform may recover between them.
            delay = settings.longest_delay
        else:
            steps = min(row.attempts - 1, 32)
            delay = min(settings.first_delay * 2.0**steps, settings.longest_delay) + random.random()
        return None if self._now() + delay - row.created_at > settings.give_up_hours * 3600 else delay


def _unknown_outcome(platform: str, row: OutboxRow, error: str) -> str:
    return f"outcome unknown: {platform} left {row.maybe_duplicate} attempts unanswered; it probably has the reply ({error})"


def _outgoing(row: OutboxRow) -> Outgoing:
    payload = row.payload
    approval_id = str(payload.get("approval_id", ""))
    choices = cast("Sequence[str]", payload.get("choices", ()))
    buttons = tuple(Button(BUTTON_LABELS[ApprovalChoice(name)], approval_id, ApprovalChoice(name)) for name in choices)
    return Outgoing(
        chat_id=str(row.target.get("chat_id", "")),
        thread_id=str(row.target.get("thread_id", "")),
        text=row.text,
        reply_to=str(payload.get("reply_to", "")),
        edits=str(payload.get("edits", "")),
        plain=bool(payload.get("plain")),
        buttons=buttons,
        payload=payload,
    )
