"""Types of the wire that several resources share, with what the OpenAPI document says about them.

Loose fields are typed `Any` and declared for what they accept: the handlers normalise them.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

__all__ = ["Deleted", "ErrorBody", "ErrorEnvelope", "HistoryMessage", "LooseBool", "MessageContent", "UsageBody"]

LooseBool = Annotated[
    Any,
    Meta(
        description="A boolean; also `1/true/yes/on` and `0/false/no/off` as strings, and numbers by truthiness. Anything else is the default.",
    ),
]

MessageContent = Annotated[
    Any,
    Meta(description="A string, null, or a list of text and image parts."),
]


class ErrorBody(msgspec.Struct):
    """What was wrong, where, and what would be right."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct):
    """Every error has this shape."""

    error: ErrorBody


class UsageBody(msgspec.Struct):
    """Tokens of a whole turn."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


class Deleted(msgspec.Struct):
    """The answer to a DELETE."""

    id: str
    object: str
    deleted: bool


class HistoryMessage(msgspec.Struct):
    """An earlier message that a client brings along."""

    role: str
    content: MessageContent
