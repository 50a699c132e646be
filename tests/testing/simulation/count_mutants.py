"""Deliberate defects of numbers: something is told, sent, queued, written or left behind too often, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import trio

from hermes_trio.adapters.slack.adapter import SlackAdapter
from hermes_trio.adapters.web.feeds import NodeFeeds
from hermes_trio.adapters.webhook import receiver
from hermes_trio.http import turns as http_turns
from hermes_trio.http.api import chat as api_chat
from hermes_trio.messaging.contract import SendResult
from hermes_trio.messaging.conversations import ChatInterface
from hermes_trio.messaging.core import MessagingCore
from hermes_trio.messaging.inbound import Inbound
from hermes_trio.messaging.senders import Senders
from hermes_trio.runtime.budget import Allowance
from hermes_trio.runtime.interface import Completions
from hermes_trio.runtime.ports import InboxKind, TurnFinish
from hermes_trio.store.records import ApprovalChoice, ApprovalState
from hermes_trio.store.sqlite import approvals, deliveries, nodes
from hermes_trio.store.sqlite.store import SqliteStore

from .mutants import Patch

__all__ = ["COUNT_MUTANTS"]


def _hides(real: Any) -> Any:
    """A notice is settled, and the agent is not given its text."""

    def prepare(self: ChatInterface, rows: Any) -> Any:
        if rows[0].kind is InboxKind.NOTICE:
            rows = tuple(msgspec.structs.replace(row, text="something has happened") for row in rows)
        return real(self, rows)

    return prepare


def _posts_twice(real: Any) -> Any:
    async def post(self: MessagingCore, *args: Any, **named: Any) -> None:
        await real(self, *args, **named)
        await real(self, *args, **named)

    return post


def _queues_for_cron_twice(real: Any) -> Any:
    async def finish_turn(self: Any, finish: TurnFinish) -> Any:
        more = tuple(one for one in finish.outbox if "901" in str(one.target))
        return await real(self, msgspec.structs.replace(finish, outbox=(*finish.outbox, *more)))

    return finish_turn


def _sends_copies_twice(real: Any) -> Any:
    async def send(self: Senders, adapter: Any, message: Any, label: bool) -> Any:
        result = await real(self, adapter, message, label)
        return await real(self, adapter, message, label) if label and result.success else result

    return send


def _returns_twice(real: Any) -> Any:
    async def anext(self: Any) -> Any:
        again = self.__dict__.pop("again", None)
        if again is not None:
            await trio.lowlevel.checkpoint()
            return again
        self.again = await real(self)
        return self.again

    return anext


def _returns_every_second(real: Any) -> Any:
    async def anext(self: Any) -> Any:
        await real(self)
        return await real(self)

    return anext


def _answers_without_writing(real: Any) -> Any:
    def answer(db: Any, now: float, id: str, choice: ApprovalChoice, reason: str) -> Any:
        row = approvals.get(db, id)
        if row is None or row.state is not ApprovalState.PENDING:
            return None
        state = ApprovalState.DENIED if choice is ApprovalChoice.DENY else ApprovalState.APPROVED
        return msgspec.structs.replace(row, state=state, choice=choice)

    return answer


def _says_sent(real: Any) -> Any:
    async def send_once(send: Any, message: Any) -> SendResult:
        await trio.lowlevel.checkpoint()
        return SendResult(success=True, message_id="1")

    return send_once


def _forgets_the_thread(real: Any) -> Any:
    async def send(self: SlackAdapter, message: Any) -> Any:
        return await real(self, msgspec.structs.replace(message, thread_id=""))

    return send


def _cuts_the_end(real: Any) -> Any:
    """The last characters of a text are not written to the stream, which ends as it should."""

    def text(self: Any, delta: str) -> bytes:
        return real(self, delta[:-3])

    return text


def _is_always_new(real: Any) -> Any:
    def record(db: Any, now: float, route: str, delivery_id: str) -> bool:
        real(db, now, route, delivery_id)
        return True

    return record


def _is_never_known(real: Any) -> Any:
    def known(db: Any, route: str, delivery_id: str) -> bool:
        return False

    return known


def _drops_every_third(real: Any) -> Any:
    dropped = 0

    def tell(self: NodeFeeds, chat: str, event: Any) -> None:
        nonlocal dropped
        dropped += 1
        if dropped % 3:
            real(self, chat, event)

    return tell


def _leaves_a_task(real: Any) -> Any:
    async def receive(self: Inbound, adapter: Any, incoming: Any) -> Any:
        trio.lowlevel.spawn_system_task(trio.sleep_forever)
        return await real(self, adapter, incoming)

    return receive


def _answers_no_request(real: Any) -> Any:
    def answer(db: Any, now: float, request_id: str, value: Any) -> None:
        return None

    return answer


def _removes_no_node(real: Any) -> Any:
    def remove_node(db: Any, incarnation: str) -> None:
        return None

    return remove_node


def _spends_no(resource: str) -> Callable[[Any], Any]:
    def make(real: Any) -> Any:
        def spend(self: Allowance, what: Any, amount: int = 1) -> None:
            if what != resource:
                real(self, what, amount)

        return spend

    return make


def _has_no_limit(real: Any) -> Any:
    async def accept_message(self: Any, message: Any, *, limit: int | None = None) -> Any:
        return await real(self, message)

    return accept_message


def _no_budget(real: Any) -> Any:
    def budget(**named: Any) -> None:
        return None

    return budget


COUNT_MUTANTS: dict[str, tuple[str, str, int, tuple[Patch, ...]]] = {
    "a notice counts as delivered and is not given to the agent": (
        "1 watched",
        "telegram",
        1,
        ((ChatInterface, "prepare", _hides),),
    ),
    "answers to commands are queued twice": ("1 watched", "telegram", 1, ((MessagingCore, "post", _posts_twice),)),
    "the answer of a slot of cron is queued twice": (
        "1 watched",
        "telegram",
        1,
        ((SqliteStore, "finish_turn", _queues_for_cron_twice),),
    ),
    "a labelled copy is sent twice": ("1 watched", "telegram", 1, ((Senders, "_send", _sends_copies_twice),)),
    "the reader of completions gets each notice twice": (
        "1 watched",
        "telegram",
        1,
        ((Completions, "__anext__", _returns_twice),),
    ),
    "the reader of completions gets every second notice": (
        "1 watched",
        "telegram",
        1,
        ((Completions, "__anext__", _returns_every_second),),
    ),
    "the answer to a request for approval is acknowledged and not written": (
        "2 acknowledged",
        "telegram",
        1,
        ((approvals, "answer", _answers_without_writing),),
    ),
    "a direct delivery is acknowledged and not sent": (
        "2 acknowledged",
        "telegram",
        1,
        ((receiver, "_send_once", _says_sent),),
    ),
    "a reply on Slack is outside of its thread": (
        "2 acknowledged",
        "slack",
        1,
        ((SlackAdapter, "send", _forgets_the_thread),),
    ),
    "a streamed completion ends without its last text": (
        "5 events",
        "telegram",
        1,
        ((api_chat._Chunks, "text", _cuts_the_end),),
    ),
    "two attempts to deliver a webhook in one instant are two deliveries": (
        "2 acknowledged",
        "telegram",
        2,
        ((deliveries, "record", _is_always_new),),
    ),
    "a direct delivery that is sent again is shown again": (
        "2 acknowledged",
        "telegram",
        1,
        ((deliveries, "known", _is_never_known),),
    ),
    "a page of the web chat misses every third event": (
        "5 events",
        "telegram",
        1,
        ((NodeFeeds, "tell", _drops_every_third),),
    ),
    "each message leaves a task behind": ("8 calm", "telegram", 1, ((Inbound, "receive", _leaves_a_task),)),
    "requests to other nodes are not answered": ("8 calm", "telegram", 2, ((nodes, "answer", _answers_no_request),)),
    "the row of a node outlives the node": ("8 calm", "telegram", 2, ((nodes, "remove_node", _removes_no_node),)),
    "the budget of background jobs has no effect": (
        "9 limits",
        "telegram",
        1,
        ((Allowance, "spend", _spends_no("jobs")),),
    ),
    "the budget of tokens has no effect": ("9 limits", "telegram", 1, ((Allowance, "spend", _spends_no("tokens")),)),
    "the mailbox has no limit": ("9 limits", "telegram", 1, ((SqliteStore, "accept_message", _has_no_limit),)),
    "the time limit of runs has no effect": ("9 limits", "telegram", 1, ((http_turns, "Budget", _no_budget),)),
}
"""By the defect: the invariant that it must violate, the platform and the number of nodes of the worlds, and the patches."""
