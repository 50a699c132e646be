"""A webhook event as text: the prompt that a route's template makes of it.

Placeholders are replaced in one pass, so what a sender writes is never a placeholder itself, and the result is
`LiteralText`, so that it is never a command or a reference either (SC-31).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, cast

import msgspec

from hermes_trio.adapters.webhook.filters import WebhookEvent, walk
from hermes_trio.messaging.command_text import LiteralText

MAX_VALUE: Final = 2000
MAX_RAW: Final = 4000
_PLACEHOLDER: Final = re.compile(r"\{([A-Za-z0-9_.]+)\}")


def render_prompt(template: str, event: WebhookEvent) -> LiteralText:
    """Return the prompt for an event; an empty template describes the event and shows its payload."""
    if not template.strip():
        return LiteralText(
            f"The webhook route {event.route!r} received the event {event.name!r}. Its payload:\n\n{_raw(event)}"
        )
    return LiteralText(_render(template, event))


def render_extra(extra: Mapping[str, object], event: WebhookEvent) -> dict[str, object]:
    """Return a route's delivery settings with the placeholders in their texts replaced; other values stay as they are."""
    return {name: _render(value, event) if isinstance(value, str) else value for name, value in extra.items()}


def _render(template: str, event: WebhookEvent) -> str:
    """Replace `{a.b.c}`, which steps through objects only; what is not there stays as it is written."""

    def replacement(match: re.Match[str]) -> str:
        path = match.group(1)
        if path == "__raw__":
            return _raw(event)
        if path == "event_type":
            return event.name
        found, value = walk(event.payload, path.split("."), indexes=False)
        return _shown(value) if found else match.group()

    return _PLACEHOLDER.sub(replacement, template)


def _shown(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list | Mapping):
        return _json(cast("object", value))[:MAX_VALUE]
    return str(value)


def _raw(event: WebhookEvent) -> str:
    return _json(event.payload)[:MAX_RAW]


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
