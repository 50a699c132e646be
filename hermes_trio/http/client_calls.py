"""Stores the server's steps that a stateless client does not see, with the calls of its own tools.

A client that sends its history returns its own tool calls and their results, but not those of the server's tools in the same turn. These steps are
committed with the turn, under the call with which it ended, and are restored in the history when that call is returned. After they have expired, the
history of the client is used as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Final

import msgspec

from hermes_trio.agent.loop import HANDED_OVER
from hermes_trio.runtime.ports import Message, ToolCall
from hermes_trio.store import IdempotentReply

from .errors import ApiError
from .idempotency import ReplyStore
from .requests import encode_json

__all__ = ["client_calls", "kept_steps", "opening_of", "restore_steps", "split_results"]

ROUTE: Final = "steps before client tools"
KEPT_SECONDS: Final = 7 * 86_400.0

_messages: Final = msgspec.json.Decoder(list[Message])


def client_calls(value: Any, param: str) -> tuple[ToolCall, ...]:
    """Parse `tool_calls` of an assistant's message that a client returns."""
    try:
        entries = msgspec.convert(value, list[_SentCall])
    except msgspec.ValidationError as error:
        raise ApiError(400, f"{param}: {error}", code="invalid_value", param=param) from None
    return tuple(
        [ToolCall(id=entry.id, name=entry.function.name, arguments=entry.function.arguments) for entry in entries]
    )


class _SentFunction(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _SentCall(msgspec.Struct):
    id: str
    function: _SentFunction


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


def split_results(
    messages: Sequence[Message], params: Sequence[str], brought: int = 0
) -> tuple[list[Message], list[Message], Message | None]:
    """Split a conversation with tool calls into history, results that the turn brings, and its message.

    `params` says where each message is in the body; those before `brought` are not the client's.

    Raises 400 for a result without a call.
    """
    waiting: set[str] = set()
    last = -1
    for index, message in enumerate(messages):
        if message.role == "assistant":
            waiting = {call.id for call in message.tool_calls}
            last = index
        elif message.role == "tool" and message.content != HANDED_OVER:
            if message.tool_call_id not in waiting and index >= brought:
                raise ApiError(
                    400,
                    f"{params[index]} is the result of {message.tool_call_id!r}, but the assistant's message before it has no such tool call,"
                    " or its result was given already.",
                    code="unknown_tool_call",
                    param=params[index],
                )
            waiting.discard(message.tool_call_id)
    split = max(last + 1, brought)
    head, tail = list(messages[:split]), list(messages[split:])
    # The result of a server tool that a client sends back has the tool's name; that of its own tool has not.
    head += [message for message in tail if message.role == "tool" and message.tool_name]
    results = [message for message in tail if message.role == "tool" and not message.tool_name]
    said = [message for message in tail if message.role != "tool"]
    if results and len(said) > 1:
        # The turn is about the last message; what came before it, the results among it, is history.
        head += [msgspec.structs.replace(message, role="user") for message in results]
        results = []
    return [*head, *said[:-1]], results, said[-1] if said else None
