"""Stores the server's steps that a stateless client does not see, with the calls of its own tools.

A client that sends its history returns its own tool calls and their results, but not those of the server's tools in the same turn. These steps are
committed with the turn, under the call with which it ended, and are restored in the history when that call is returned. After they have expired, the
history of the client is used as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Final

import msgspec

from hermes_trio.agent.loop import HANDED_OVER
from hermes_trio.runtime.ports import Message, ToolCall
from hermes_trio.store import IdempotentReply

from .idempotency import ReplyStore
from .requests import encode_json

ROUTE: Final = "steps before client tools"
KEPT_SECONDS: Final = 7 * 86_400.0

_messages: Final = msgspec.json.Decoder(list[Message])


def _key(opening: str, call: ToolCall) -> str:
    told = f"{opening}\0{call.id}\0{call.name}\0".encode("utf-8", "replace")
    return sha256(told + _canonical(call.arguments)).hexdigest()


def _canonical(arguments: str) -> bytes:
    """Return arguments in a canonical form: clients may change spaces and the order of keys."""
    try:
        return msgspec.json.encode(msgspec.json.decode(arguments or "{}"), order="sorted")
    except (msgspec.DecodeError, RecursionError):
        return arguments.encode("utf-8", "replace")


def opening_of(history: Sequence[Message], prompt: str) -> str:
    """Return the opening of a client's conversation: the text of its first user message."""
    return next((message.text for message in history if message.role == "user"), prompt)


def kept_steps(tenant: str, opening: str, messages: Sequence[Message], calls: Sequence[ToolCall]) -> list[object]:
    """Return what is committed with a turn that ends with calls of client tools: its own steps, if the client does not see all of them."""
    steps = [
        message
        for message in messages
        if message.role in ("assistant", "tool") and not (message.role == "tool" and message.content == HANDED_OVER)
    ]
    if not calls or not steps or (len(steps) == 1 and len(steps[0].tool_calls) == len(calls)):
        return []
    return [
        IdempotentReply(
            tenant=tenant,
            route=ROUTE,
            key=_key(opening, calls[0]),
            fingerprint="",
            status=200,
            headers=(),
            body=encode_json(steps),
            ttl=KEPT_SECONDS,
        )
    ]


async def restore_steps(store: ReplyStore, tenant: str, opening: str, history: Sequence[Message]) -> list[Message]:
    """Restore the stored steps in the history, in the place of the messages that the client saw of them."""
    restored: list[Message] = []
    brought = {call.id for message in history for call in message.tool_calls}
    for message in history:
        found: IdempotentReply | None = None
        if message.tool_calls:
            found = await store.get_reply(tenant, ROUTE, _key(opening, message.tool_calls[0]), "")
        steps = [] if found is None else _messages.decode(found.body)
        known = {call.id for call in message.tool_calls}
        unseen = {call.id for step in steps for call in step.tool_calls} - known
        # A client that brings the server's steps itself needs none of them twice.
        restored.extend(steps if unseen and unseen.isdisjoint(brought) else [message])
    return restored
