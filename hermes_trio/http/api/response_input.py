"""Parses `input` of a response (texts, messages and items, including the server's own output items), and converts a transcript back to items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import msgspec

from hermes_trio.agent.loop import HANDED_OVER, with_results
from hermes_trio.http.content import flat_text, normalise
from hermes_trio.http.errors import ApiError
from hermes_trio.http.requests import Request
from hermes_trio.runtime.ports import Message, ToolCall

from .response_items import SERVER_LABEL, item_place

_SKIPPED: Final = frozenset({"reasoning", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"})
"""Items that a model need not see again."""

_ACCEPTED: Final = "message, function_call, function_call_output, mcp_call, reasoning and item_reference"


class _Reader:
    """Combines items into messages: consecutive calls, and the text before them, are one message of the assistant."""

    def __init__(self) -> None:
        self.messages: list[tuple[Message, str]] = []
        self._results: list[tuple[Message, str]] = []

    def message(self, message: Message, place: str) -> None:
        """Add a message that is not a call."""
        self._flush()
        self.messages.append((message, place))

    def call(self, call: ToolCall, place: str) -> None:
        """Add a call of the assistant."""
        if self.messages and self.messages[-1][0].role == "assistant":
            last, where = self.messages[-1]
            self.messages[-1] = (msgspec.structs.replace(last, tool_calls=(*last.tool_calls, call)), where)
        else:
            self._flush()
            self.messages.append((Message(role="assistant", tool_calls=(call,)), place))

    def server_call(self, call: ToolCall, result: str, place: str) -> None:
        """Add a call of the server with its result. The result is placed after all calls of the same message."""
        self.call(call, place)
        self._results.append((Message(role="tool", content=result, tool_call_id=call.id, tool_name=call.name), place))

    def result(self, message: Message, place: str) -> None:
        """Add the result of a client's call."""
        self._flush()
        self.messages.append((message, place))

    def _flush(self) -> None:
        self.messages += self._results
        self._results.clear()

    def end(self) -> list[tuple[Message, str]]:
        """Return all messages, each with its place in the body."""
        self._flush()
        return self.messages


async def read_items(request: Request, value: Any) -> list[tuple[Message, str]]:
    """Parse `input` into messages, each with its place. Raises 400 with the place of an item that cannot be used."""
    if isinstance(value, str):
        return [(Message(role="user", content=value), "input")]
    if not isinstance(value, list):
        raise ApiError(400, "input must be a string or a list of messages.", param="input")
    reader = _Reader()
    for number, item in enumerate(cast("list[Any]", value)):
        place = f"input[{number}]"
        if isinstance(item, str):
            reader.message(Message(role="user", content=item), place)
        elif isinstance(item, dict):
            table = cast("dict[str, Any]", item)
            if table.get("type") == "item_reference":
                table = await _referenced(request, table.get("id"), place)
            _read_item(reader, table, place)
        else:
            raise ApiError(400, f"{place} must be a string or a message.", param=place)
    return reader.end()


def _read_item(reader: _Reader, item: dict[str, Any], place: str) -> None:
    match item.get("type", "message"):
        case "message":
            role: Any = item.get("role", "user")
            if not isinstance(role, str):
                raise ApiError(400, f"{place}.role must be a string.", param=f"{place}.role")
            content = normalise(item.get("content"), f"{place}.content")
            reader.message(Message(role="system" if role == "developer" else role, content=content), place)
        case "function_call":
            call = ToolCall(
                id=_required(item, "call_id", place),
                name=_required(item, "name", place),
                arguments=item.get("arguments") or "{}",
            )
            reader.call(call, place)
        case "function_call_output":
            output: Any = item.get("output")
            content = output if isinstance(output, str) else normalise(output, f"{place}.output")
            call_id = _required(item, "call_id", place)
            reader.result(Message(role="tool", content=content, tool_call_id=call_id), place)
        case "mcp_call":
            call = ToolCall(
                id=_required(item, "id", place),
                name=_required(item, "name", place),
                arguments=item.get("arguments") or "{}",
            )
            reader.server_call(call, flat_text(item.get("output") or item.get("error") or ""), place)
        case kind if isinstance(kind, str) and kind in _SKIPPED:
            pass
        case kind:
            raise ApiError(
                400,
                f"{place} has the type {kind!r}; accepted are {_ACCEPTED}.",
                code="unsupported_parameter",
                param=f"{place}.type",
            )


def _required(item: dict[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not value:
        raise ApiError(400, f"{place}.{name} must be a string.", param=f"{place}.{name}")
    return value


async def _referenced(request: Request, item_id: Any, place: str) -> dict[str, Any]:
    """Return the item of a stored response that a client refers to."""
    found = item_place(item_id) if isinstance(item_id, str) else None
    stored = None if found is None else await request.core.store.get_response(request.caller.sees, found[0])
    if found is not None and stored is not None:
        output: list[dict[str, Any]] = msgspec.json.decode(stored.body)["output"]
        if found[1] < len(output) and output[found[1]]["id"] == item_id:
            return output[found[1]]
    raise ApiError(404, f"There is no stored item {str(item_id)[:64]!r}.", code="item_not_found", param=f"{place}.id")


# -- from messages to items ---------------------------------------------------------------------------------------------------------


def input_items_of(response_id: str, transcript: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the input items of a response, oldest first: its transcript up to the last message or result of the client."""
    ends = [number for number, message in enumerate(transcript) if message.role == "user"]
    messages = with_results(transcript[: ends[-1] + 1] if ends else ())
    digits = response_id.removeprefix("resp_")
    calls = {call.id for message in messages for call in message.tool_calls}
    client = {
        message.tool_call_id for message in transcript if message.role == "user" and message.tool_call_id in calls
    }
    items: list[dict[str, Any]] = []
    results = {message.tool_call_id: message.text for message in messages if message.role == "tool"}

    def add(prefix: str, **fields: Any) -> None:
        items.append({"id": f"{prefix}{digits}i{len(items):04x}", "status": "completed", **fields})

    for message in messages:
        if message.role == "tool":
            if message.tool_call_id in client:
                add("fco_", type="function_call_output", call_id=message.tool_call_id, output=message.text)
            continue
        if message.content or not message.tool_calls:
            add("msg_", type="message", role=message.role, content=_parts(message))
        for call in message.tool_calls:
            if call.id in client or results.get(call.id, HANDED_OVER) == HANDED_OVER:
                add("fc_", type="function_call", call_id=call.id, name=call.name, arguments=call.arguments)
            else:
                add(
                    "mcp_",
                    type="mcp_call",
                    server_label=SERVER_LABEL,
                    name=call.name,
                    arguments=call.arguments,
                    output=results[call.id],
                    error=None,
                    approval_request_id=None,
                )
    return items


def _parts(message: Message) -> list[dict[str, Any]]:
    kind = "output_text" if message.role == "assistant" else "input_text"
    if isinstance(message.content, str):
        return [_text_part(kind, message.content)]
    parts: list[dict[str, Any]] = []
    for part in message.content:
        if part.get("type") == "image_url":
            image: dict[str, Any] = part["image_url"]
            parts.append(
                {
                    "type": "input_image",
                    "image_url": image.get("url"),
                    "detail": image.get("detail", "auto"),
                    "file_id": None,
                }
            )
        else:
            parts.append(_text_part(kind, str(part.get("text", ""))))
    return parts


def _text_part(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text, **({"annotations": list[Any]()} if kind == "output_text" else {})}
