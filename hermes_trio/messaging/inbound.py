"""Handles an inbound message: duplicate? access? then a command, an answer or text for the conversation's lane.

A disposition is durable when it is returned. Session keys are computed here, once (SC-18). A message that arrives while a turn runs waits, interrupts
the turn, or is passed to it; it is committed first in each case, so that a crash loses nothing. While the server drains, messages are kept for the
next start and the person is told so.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
import trio

from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.errors import Draining, MailboxFull
from hermes_trio.runtime.interface import Inbox
from hermes_trio.runtime.ports import NewMessage
from hermes_trio.runtime.turn import Turn
from hermes_trio.store.errors import StoreBusy, StoreError
from hermes_trio.store.records import ApprovalChoice

from .access import Access, AccessControl
from .addresses import Address
from .command_text import ApprovalAnswer, Command, LiteralText, bare_answer, parse_command
from .commands import CommandContext, Commands, answered_text
from .contract import Adapter, Disposition, Incoming, Received
from .core import MessagingCore
from .errors import single_failure
from .platforms import Platform
from .remote_lanes import NEWER_MESSAGE, has_children, steer_in_order
from .session_keys import SessionKeyError, Source, attributed_text, session_key

logger = logging.getLogger(__name__)

REMEMBERED: Final = 4096
"""The number of events of one platform that are remembered, so that a command is not executed twice. The store remembers messages, and for other nodes
commands."""

ACK_SECONDS: Final = 30.0

COMMAND_SECONDS: Final = 5.0
"""Seconds that a command still has if its receiver is cancelled meanwhile: by a drain, or because the connection has failed."""

CUT_SHORT: Final = (
    "I am being restarted, and do not know how {prefix}{name} has ended. Ask for {prefix}status afterwards, and send it"
    " again if it is still wanted."
)


class Inbound:
    """See the module. It has no task of its own."""

    def __init__(self, messaging: MessagingCore, access: AccessControl, commands: Commands) -> None:
        self._messaging = messaging
        self._access = access
        self._commands = commands
        self._seen: dict[str, OrderedDict[str, None]] = {}
        self._open: dict[tuple[str, str], trio.Event] = {}
        self._acknowledged: OrderedDict[str, float] = OrderedDict()
        self._unsaid: OrderedDict[tuple[str, str], str] = OrderedDict()

    async def receive(self, adapter: Adapter, incoming: Incoming) -> Received:
        """See `HubPort.receive`."""
        platform = self._messaging.platforms.find(adapter.platform)
        if platform is None:
            raise LookupError(f"the adapter {adapter.platform!r} is not one of this gateway's")
        source, settings = incoming.source, platform.settings
        if not incoming.addressed or (source.is_bot and not settings.allow_bots):
            return Received(disposition=Disposition.IGNORED)
        try:
            key = session_key(source, settings.isolation)
        except SessionKeyError:
            return Received(disposition=Disposition.IGNORED)
        if not incoming.event_id:
            return await self._dispose(platform, incoming, key)
        seen = self._seen.setdefault(platform.name, OrderedDict())
        event = (platform.name, incoming.event_id)
        # A redelivery that overlaps an attempt waits for its end: until then nothing is durable, and an attempt that fails leaves the event to the next.
        while (ended := self._open.get(event)) is not None:
            await ended.wait()
        if incoming.event_id in seen:
            return Received(disposition=Disposition.DUPLICATE)
        ended = self._open[event] = trio.Event()
        try:
            received = await self._once(platform, incoming, key)
            if received.disposition is not Disposition.REFUSED:
                seen[incoming.event_id] = None
        finally:
            del self._open[event]
            ended.set()
        while len(seen) > REMEMBERED:
            seen.popitem(last=False)
        return received

    async def clicked(self, adapter: Adapter, source: Source, approval_id: str, choice: ApprovalChoice) -> str:
        """See `HubPort.approval_clicked`."""
        platform = self._messaging.platforms.find(adapter.platform)
        if platform is None or not await self._access.allows(source, platform.settings):
            return "You are not allowed to answer this."
        approval = await self._messaging.store.get_approval(approval_id)
        if approval is None or not _same_chat(approval.session_key, source, platform):
            return "Nothing waits for approval here (any more)."
        answer = ApprovalAnswer(choice)
        return answered_text(await self._commands.answer(source, approval.scope, answer, approval_id), answer)

    # -- one message -----------------------------------------------------------------------------------------------------------------

    async def _once(self, platform: Platform, incoming: Incoming, key: str) -> Received:
        """Dispose of an event, unless another node has executed it: a command, or a word that answers a question. Of messages the inbox knows which it has."""
        messaging = self._messaging
        text = incoming.text
        executed = parse_command(text, prefix=platform.adapter.command_prefix) or bare_answer(text, waiting=True)
        if executed is None or not messaging.runtime.core.shared:
            return await self._dispose(platform, incoming, key)
        route = f"commands of {platform.name}"
        async with messaging.runtime.core.membership.holding(f"{route}: {incoming.event_id}"):
            if await messaging.store.delivery_known(route, incoming.event_id):
                return Received(disposition=Disposition.DUPLICATE, session_key=key)
            received = await self._dispose(platform, incoming, key)
            if received.disposition in (Disposition.COMMAND, Disposition.ANSWERED):
                try:
                    with messaging.committing():
                        await messaging.store.record_delivery(route, incoming.event_id)
                except StoreError as error:
                    # Not passed on: the platform would deliver it again, and it has been executed.
                    logger.error("could not record the command %s of %s: %s", incoming.event_id, platform.name, error)
        return received

    async def _dispose(self, platform: Platform, incoming: Incoming, key: str) -> Received:
        source = incoming.source
        decision = await self._access.decide(source, platform.settings)
        if decision.access is Access.OFFERED:
            await self._say(incoming, pairing_text(platform.name, decision.code))
            return Received(disposition=Disposition.PAIRING, session_key=key)
        if decision.access is Access.IGNORED:
            return Received(disposition=Disposition.UNAUTHORISED, session_key=key)
        adapter = platform.adapter
        command = parse_command(incoming.text, prefix=adapter.command_prefix)
        if command is not None:
            if command.addressee and adapter.bot_name and command.addressee.lower() != adapter.bot_name.lower():
                return Received(disposition=Disposition.IGNORED, session_key=key)
            return await self._command(platform, incoming, key, command)
        answer = bare_answer(incoming.text, waiting=True)
        if answer is not None and self._messaging.approvals is not None:
            answered = await self._commands.answer(source, key, answer)
            if answered or answered is None:
                said = answered_text(answered, answer)
                if answered is None or not adapter.supports_edit:
                    await self._say(incoming, said)
                return Received(disposition=Disposition.ANSWERED, session_key=key, text=said)
        if not incoming.plain_text.strip() and "content" not in incoming.payload:
            return Received(disposition=Disposition.IGNORED, session_key=key)
        return await self._accept(platform, incoming, key)

    async def _command(self, platform: Platform, incoming: Incoming, key: str, command: Command) -> Received:
        caller = CommandContext(
            platform=platform.name, session_key=key, source=incoming.source, prefix=platform.adapter.command_prefix
        )
        event = (platform.name, incoming.event_id)

        async def execute() -> str:
            # If the store has refused the reply, the platform or the adapter repeats the event. Only the reply is then tried again, because a second
            # execution would find nothing to do, and say so.
            said = self._unsaid.get(event, "") if incoming.event_id else ""
            if not said:
                said = await self._commands.run(caller, command)
                self._unsaid[event] = said
                while len(self._unsaid) > REMEMBERED:
                    self._unsaid.popitem(last=False)
            await self._say(
                incoming, said
            )  # without a time limit: a repetition waits for this attempt, and must not store the reply again
            return said

        said = await _finish(execute)
        if not said:
            said = CUT_SHORT.format(prefix=caller.prefix, name=command.name)
            await self._reply(incoming, said)
        self._unsaid.pop(event, None)
        return Received(disposition=Disposition.COMMAND, session_key=key, text=said)

    async def _reply(self, incoming: Incoming, text: str) -> None:
        with self._messaging.committing() as bound:
            await self._say(incoming, text)
        if bound.cancelled_caught:
            raise StoreBusy("the reply to a command could not be stored in time")

    async def _accept(self, platform: Platform, incoming: Incoming, key: str) -> Received:
        messaging, settings = self._messaging, platform.settings
        message = self._message(platform, incoming, key)
        inbox = messaging.inboxes[platform.name]
        turn = inbox.current_turn(key)
        node = "" if turn is not None else await messaging.remote_lanes.node_of(platform.name, key)
        try:
            if messaging.runtime.draining:
                raise Draining
            with messaging.committing() as bound:
                # Only typed text is passed to a turn; files and generated text become turns of their own.
                typed = not isinstance(incoming.text, LiteralText) and "content" not in incoming.payload
                if (turn is not None or node) and settings.busy == "steer" and typed:
                    return await self._steer(inbox, turn, message, node)
                if not await inbox.accept(message):
                    return Received(disposition=Disposition.DUPLICATE, session_key=key)
            if bound.cancelled_caught:
                raise StoreBusy(
                    "the message could not be stored in time; it is accepted when the platform redelivers it"
                )
        except Draining:
            # Not refused: it is stored, and the next start begins a turn with it (SC-9).
            if await messaging.store.accept_message(message) is None:
                return Received(disposition=Disposition.DUPLICATE, session_key=key)
            await self._say(incoming, "I am being restarted. Your message is kept, and answered afterwards.")
            return Received(disposition=Disposition.ACCEPTED, session_key=key)
        except MailboxFull as error:
            await self._say(incoming, f"That was too much at once: {error}.")
            return Received(disposition=Disposition.REFUSED, session_key=key)
        if turn is not None or node:
            if node and settings.busy == "interrupt":
                await messaging.remote_lanes.interrupt(node, platform.name, key)
            elif turn is not None and settings.busy == "interrupt" and not has_children(turn):
                turn.cancel(NEWER_MESSAGE)
            elif settings.busy_ack and self._may_acknowledge(key):
                await self._say(incoming, "I am still working; your message waits and comes next.")
        return Received(disposition=Disposition.ACCEPTED, session_key=key)

    async def _steer(self, inbox: Inbox, turn: Turn | None, message: NewMessage, node: str) -> Received:
        """Pass a message to the running turn, here or on another node. It stays in the inbox until that turn has ended and has used it."""
        key = message.session_key
        number = await self._messaging.store.accept_message(message)
        if number is None:
            return Received(disposition=Disposition.DUPLICATE, session_key=key)
        if node and await self._messaging.remote_lanes.steer(node, message.inbox, key, number, message.text):
            return Received(disposition=Disposition.STEERED, session_key=key)
        steered = await steer_in_order(self._messaging.store, inbox, turn, key, number, message.text)
        return Received(disposition=Disposition.STEERED if steered else Disposition.ACCEPTED, session_key=key)

    def _message(self, platform: Platform, incoming: Incoming, key: str) -> NewMessage:
        source = incoming.source
        text = attributed_text(source, incoming.plain_text, platform.settings.isolation)
        anchor = source.message_id if incoming.anchor is None else incoming.anchor
        routing = SessionContext(
            platform=platform.name,
            source=platform.name,
            chat_id=source.chat_id or "",
            chat_name=_one_line(source.chat_name),
            thread_id=source.thread_id or "",
            user_id=source.user_id or "",
            user_name=_one_line(source.user_name),
            session_key=key,
            message_id=anchor or "",
            tenant=source.tenant or "",
            key_id=source.key_id or "",
        )
        return NewMessage(
            inbox=platform.name,
            session_key=key,
            routing=routing,
            text=text,
            payload=incoming.payload,
            dedupe_key=incoming.event_id,
        )

    async def _say(self, incoming: Incoming, text: str) -> None:
        source = incoming.source
        anchor = source.message_id if incoming.anchor is None else incoming.anchor
        address = Address(source.platform, source.chat_id or source.user_id or "", source.thread_id)
        await self._messaging.post(address, text, {"reply_to": anchor or ""})

    def _may_acknowledge(self, key: str) -> bool:
        now = trio.current_time()
        if now - self._acknowledged.get(key, -ACK_SECONDS) < ACK_SECONDS:
            return False
        self._acknowledged[key] = now
        self._acknowledged.move_to_end(key)
        while len(self._acknowledged) > REMEMBERED:
            self._acknowledged.popitem(last=False)
        return True


async def _finish(work: Callable[[], Awaitable[str]]) -> str:
    """Return the result of `work`, also if the caller is cancelled meanwhile: the work then has `COMMAND_SECONDS`. Empty if they were not enough.

    The cancellation takes effect at the next checkpoint of the caller, which can store the result before.
    """
    said = ""
    over = trio.Event()
    scope = trio.CancelScope(shield=True)
    with single_failure():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_limit_when_cancelled, scope, over)
            with scope:
                said = await work()
            with trio.CancelScope(shield=True):
                # The other task ends first, so that the end of the nursery is no checkpoint that raises.
                nursery.cancel_scope.cancel()
                await over.wait()
    return said


async def _limit_when_cancelled(scope: trio.CancelScope, over: trio.Event) -> None:
    try:
        await trio.sleep_forever()
    except trio.Cancelled:  # noqa: ASYNC103 - the caller's next checkpoint raises it again
        scope.deadline = trio.current_time() + COMMAND_SECONDS
    finally:
        over.set()


def pairing_text(platform: str, code: str) -> str:
    """Return the text that a stranger gets."""
    return (
        "I do not know you yet. If you should have access, give this code to the owner of this agent:\n\n"
        f"`{code}`\n\nIt is valid for an hour. They let you in with `hermes-trio pairing approve {platform} {code}`."
    )


def _same_chat(key: str, source: Source, platform: Platform) -> bool:
    """Return whether a question was asked in the conversation (or, for shared buttons, in the chat) in which it is answered."""
    own = session_key(source, platform.settings.isolation)
    place = session_key(msgspec.structs.replace(source, user_id=None, user_id_alt=None), platform.settings.isolation)
    return key in (own, place) or key.startswith(place + ":")


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())[:200].replace("\x00", "")
