"""Types of the wire that several resources share, with what the OpenAPI document says about them.

Loose fields are typed `Any` and declared for what they accept: the handlers normalise them.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from .routing import RouteParameter

LOOSE_NUMBER = {
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "description": "A whole number; anything else, and what is out of range, is the default.",
}
"""The schema of paging parameters (API-109)."""

LOOSE_FLAG = {
    "anyOf": [{"type": "boolean"}, {"type": "string"}],
    "description": "`1/true/yes/on` or `0/false/no/off`; anything else is false.",
}
"""The schema of flags in a query (API-27)."""

ON_DISCONNECT = RouteParameter(
    "X-Hermes-On-Disconnect",
    "`detach`: a run does the turn, is named in `X-Hermes-Run-Id`, and goes on when the client disconnects.",
    {"type": "string", "enum": ["detach", "cancel"]},
    "header",
)
"""On routes whose turn belongs to the request."""

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


TurnInputs = Annotated[
    Any,
    Meta(
        description="A string, or a list of strings and messages; the last one is what the turn is about.",
        extra_json_schema={"anyOf": [{"type": "string", "pattern": "\\S"}, {"type": "array", "minItems": 1}]},
    ),
]

OptionalText = Annotated[
    Any,
    Meta(description="A text, or null.", extra_json_schema={"type": ["string", "null"], "maxLength": 65_536}),
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
