"""Conversion of values to columns and back: JSON text, cleaned strings, routing, messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.ports import Message, ToolCall

MESSAGE_COLUMNS: Final = (
    "role, content, parts, tool_calls, tool_call_id, tool_name, finish_reason, reasoning, token_count,"
    " platform_message_id, timestamp"
)
"""In the order in which `message_to_row` writes and `message_from_row` reads them."""

_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder().decode


def clean(text: str) -> str:
    """Return `text` without lone surrogates, which no database can store (a model or a terminal may emit them)."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def dump(value: object) -> str:
    """Return the JSON text of plain values, mappings and sequences."""
    try:
        return _encode(value).decode()
    except UnicodeEncodeError:
        return _encode(cleaned(msgspec.to_builtins(value))).decode()


def load(text: str) -> Any:
    """Return the value of a JSON text that `dump` wrote."""
    return _decode(text)


def load_mapping(text: str | None) -> dict[str, Any]:
    """Return the mapping of a JSON text; empty for no text."""
    return _decode(text) if text else {}


def merge_patch(value: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with the changes of another (RFC 7396): None removes a member, mappings are merged, everything else is replaced."""
    merged = dict(value)
    for name, change in patch.items():
        if change is None:
            merged.pop(name, None)
        elif isinstance(change, Mapping):
            known = merged.get(name)
            old = cast(Mapping[str, Any], known if isinstance(known, Mapping) else {})
            merged[name] = merge_patch(old, cast(Mapping[str, Any], change))
        else:
            merged[name] = change
    return merged


def cleaned(value: object) -> object:
    """Return a value with all of its texts passed through `clean`."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        mapping = cast(Mapping[object, object], value)
        return {clean(str(key)): cleaned(item) for key, item in mapping.items()}
    if isinstance(value, list | tuple):
        return [cleaned(item) for item in cast(Sequence[object], value)]
    return value


def routing_text(context: SessionContext) -> str:
    """Return a routing context as the JSON of its non-empty fields."""
    return dump(context)


def load_routing(text: str) -> SessionContext:
    """Return the context of a text that `routing_text` wrote."""
    return SessionContext.from_dict(_decode(text)) if text else SessionContext()


def message_to_row(message: Message, now: float) -> tuple[object, ...]:
    """Return the columns of a message. Structured content is stored as its parts, and as text for the search."""
    content = message.content
    if isinstance(content, str):
        text, parts = content, None
    else:
        text, parts = message.text, dump(content)
    if not text.isascii():
        text = clean(text)
    return (
        message.role,
        text,
        parts,
        dump([(call.id, call.name, call.arguments) for call in message.tool_calls]) if message.tool_calls else None,
        message.tool_call_id or None,
        message.tool_name or None,
        message.finish_reason or None,
        clean(message.reasoning) if message.reasoning else None,
        message.token_count,
        message.platform_message_id or None,
        message.timestamp or now,
    )


def message_from_row(row: tuple[Any, ...]) -> Message:
    """Return the message of a row that `message_to_row` made."""
    role, text, parts, calls, call_id, name, finish, reasoning, tokens, platform_id, timestamp = row
    return Message(
        role=role,
        content=text if parts is None else _decode(parts),
        tool_calls=tuple(ToolCall(id=i, name=n, arguments=a) for i, n, a in _decode(calls)) if calls else (),
        tool_call_id=call_id or "",
        tool_name=name or "",
        finish_reason=finish or "",
        reasoning=reasoning or "",
        token_count=tokens,
        platform_message_id=platform_id or "",
        timestamp=timestamp,
    )
