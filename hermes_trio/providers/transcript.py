"""Makes a transcript that every provider accepts: each tool call has its result, and each result its call.

Compaction and cancellation may cut a pair, and providers answer that with a plain 400.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, cast

import msgspec

from hermes_trio.runtime.ports import Message, ToolCall

MISSING_RESULT: Final = "[no result: the call was interrupted]"


def paired(messages: Iterable[Message]) -> Iterator[Message]:
    """Return the messages, with a result for each unanswered tool call and without results that have no call."""
    open_calls: dict[str, ToolCall] = {}
    for message in messages:
        if message.role == "tool":
            if open_calls.pop(message.tool_call_id, None) is not None:
                yield message
            continue
        yield from _missing(open_calls)
        open_calls = {call.id: call for call in message.tool_calls} if message.role == "assistant" else {}
        if len(open_calls) != len(message.tool_calls) and message.role == "assistant":
            message = msgspec.structs.replace(message, tool_calls=tuple(open_calls.values()))
        yield message
    yield from _missing(open_calls)


def _missing(calls: dict[str, ToolCall]) -> Iterator[Message]:
    for call in calls.values():
        yield Message(role="tool", content=MISSING_RESULT, tool_call_id=call.id, tool_name=call.name)


def result_text(message: Message) -> str:
    """Return the text of a tool's result; never empty, because some providers refuse that."""
    return message.text or "(empty)"


def arguments_object(call: ToolCall) -> dict[str, Any]:
    """Return the arguments of a call as an object. Arguments of another shape are kept under a name of their own."""
    try:
        value: Any = msgspec.json.decode(call.arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        value = call.arguments
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {"_invalid_arguments": value}
